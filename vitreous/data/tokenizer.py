"""Convert texts to token ids for a text encoder, with a tokenizer file of the Hugging Face `tokenizers` library.

The library (extra `text`) is imported when the first text is encoded.
"""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vitreous.errors import DataError, WeightsError, require_installed

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

#: file of the `tokenizers` library, and the two files of a byte-level BPE that CLIP's repositories have
TOKENIZER_FILE, VOCABULARY_FILE, MERGES_FILE = "tokenizer.json", "vocab.json", "merges.txt"
#: CLIP's pattern of words before merging: contractions, letters, one digit, other characters
CLIP_WORD_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
CLIP_START, CLIP_END = "<|startoftext|>", "<|endoftext|>"
REMOVE_PUNCTUATION = str.maketrans("", "", string.punctuation)
TextCleaning = Literal["none", "lower", "canonicalise"]


def clean_text(text: str, cleaning: TextCleaning) -> str:
    """Clean a text before tokenisation.

    `lower` collapses whitespace and changes letters to lower case (CLIP). `canonicalise` also replaces underscores by
    spaces and removes ASCII punctuation (SigLIP; `canonicalize_text` of big_vision).
    """
    if cleaning == "none":
        return text
    if cleaning == "canonicalise":
        text = text.replace("_", " ").translate(REMOVE_PUNCTUATION)
    return " ".join(text.lower().split())


def find_tokenizer_file(folder: Path) -> Path | None:
    """Return the tokenizer file of a folder with weights: tokenizer.json, or vocab.json next to merges.txt; None if
    there is none."""
    if (folder / TOKENIZER_FILE).is_file():
        return folder / TOKENIZER_FILE
    has_merges = (folder / VOCABULARY_FILE).is_file() and (folder / MERGES_FILE).is_file()
    return folder / VOCABULARY_FILE if has_merges else None


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer of a text encoder.

    `path`: its file, as `find_tokenizer_file` returns it. `vocabulary`: token ids of the text encoder. `length`: tokens
    of a text, to which shorter texts are padded with `pad_id`. `end_id`: id of the end of a text, which every text
    has. `cleaning`: see `clean_text`.
    """

    path: Path
    _: KW_ONLY
    vocabulary: int
    length: int
    pad_id: int
    end_id: int
    cleaning: TextCleaning = "none"

    @cached_property
    def library_tokenizer(self) -> LibraryTokenizer:
        """The tokenizer of the library, without its padding and truncation. Raises ResourceError if the library is not
        installed, WeightsError for a damaged file and for another number of tokens than the text encoder has."""
        require_installed(["tokenizers"], "text")
        from tokenizers import Tokenizer as LibraryTokenizer

        try:
            loaded = (
                build_clip_tokenizer(self.path, self.path.with_name(MERGES_FILE))
                if self.path.name == VOCABULARY_FILE
                else LibraryTokenizer.from_file(str(self.path))
            )
        except Exception as error:  # the library raises plain Exception
            reason = (str(error).splitlines() or [type(error).__name__])[0][:100]
            raise WeightsError(f"{self.path} is not a tokenizer ({reason})", "download it again") from None
        count = loaded.get_vocab_size(with_added_tokens=True)
        if count != self.vocabulary:
            raise WeightsError(
                f"{self.path} has {count:,} tokens, but the text encoder has {self.vocabulary:,}",
                "use the tokenizer of the same model",
            )
        loaded.no_padding()
        loaded.no_truncation()
        return loaded

    def encode_texts(self, texts: Sequence[str], truncate: bool = False) -> np.ndarray:
        """Convert texts to token ids (B, length) int64, with the end of each text, padded on the right.

        With `truncate`, longer texts are cut before their last token, the end of the text. Raises DataError for a text
        that is longer than `length` tokens otherwise, and the errors of `library_tokenizer`.
        """
        tokens = np.full((len(texts), self.length), self.pad_id, np.int64)
        for index, text in enumerate(texts):
            ids: list[int] = self.library_tokenizer.encode(clean_text(text, self.cleaning)).ids
            ids = ids if ids and ids[-1] == self.end_id else [*ids, self.end_id]
            if len(ids) > self.length:
                if not truncate:
                    shortened = text if len(text) <= 40 else f"{text[:37]}..."
                    raise DataError(
                        f"the text {shortened!r} has {len(ids)} tokens, but the text encoder supports {self.length}",
                        "shorten it, or allow truncation (truncate=True)",
                    )
                ids = [*ids[: self.length - 1], self.end_id]
            tokens[index, : len(ids)] = ids
        return tokens

    def write(self, path: Path) -> None:
        """Write the tokenizer as a tokenizer.json to a path. Raises OSError, and for other files the errors of
        `library_tokenizer`."""
        if self.path.name == VOCABULARY_FILE:
            path.write_text(self.library_tokenizer.to_str(), "utf-8")
        else:
            shutil.copyfile(self.path, path)


def build_clip_tokenizer(vocabulary_path: Path, merges_path: Path) -> LibraryTokenizer:
    """Build CLIP's byte-level BPE from its two files: words end in `</w>`, and every text is between two special
    tokens. Raises ValueError for files without these tokens."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as LibraryTokenizer

    vocabulary: Any = json.loads(vocabulary_path.read_text("utf-8"))
    lines = merges_path.read_text("utf-8").splitlines()
    merges = [
        (pair[0], pair[1]) for line in lines if not line.startswith("#version") and len(pair := line.split()) == 2
    ]
    missing = [token for token in (CLIP_START, CLIP_END) if token not in vocabulary]
    if missing:
        raise ValueError(f"it has no token {missing[0]}")
    tokenizer = LibraryTokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            end_of_word_suffix="</w>",
            unk_token=CLIP_END,
            continuing_subword_prefix="",
            fuse_unk=False,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CLIP_WORD_PATTERN), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([CLIP_START, CLIP_END])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLIP_START} $A {CLIP_END}",
        pair=f"{CLIP_START} $A {CLIP_END} $B:1 {CLIP_END}:1",
        special_tokens=[(token, vocabulary[token]) for token in (CLIP_START, CLIP_END)],
    )
    return tokenizer


def missing_tokenizer_error(source: str) -> WeightsError:
    """Build the error for weights of a text encoder without a tokenizer."""
    return WeightsError(
        f"{source} has no tokenizer: texts cannot be encoded",
        f"add the {TOKENIZER_FILE} of the same model to its folder, or {VOCABULARY_FILE} and {MERGES_FILE} of a CLIP",
    )
