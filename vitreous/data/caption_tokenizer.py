"""Train a tokenizer on the captions of a dataset: a byte-level BPE of the `tokenizers` library (extra `text`), for text
encoders that are trained from scratch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from vitreous.data.tokenizer import CLIP_END, clean_text
from vitreous.errors import ResourceError, require_installed
from vitreous.system.disk import get_cache_folder, open_atomic

MAX_VOCABULARY = 16_384  # maximum number of tokens of a trained tokenizer
MAX_TEXT_LENGTH = 64  # maximum number of tokens of a text
LENGTH_STEP = 8  # lengths are multiples of this number
PAD_TOKEN, PAD_ID = "<pad>", 0
CLEANING = "lower"  # how captions are cleaned, see `tokenizer.clean_text`
FORMAT_VERSION = 1  # part of the name of cached files


class TrainedTokenizer(NamedTuple):
    """A tokenizer that was trained on captions: its file, its number of tokens, of which the last is the end of a text,
    and the length of texts in tokens that covers the captions, at most `MAX_TEXT_LENGTH`."""

    path: Path
    vocabulary: int
    length: int


def train_tokenizer(captions: Iterable[str]) -> TrainedTokenizer:
    """Train a tokenizer on captions, or load it from the cache if it was trained on the same captions before.

    The result depends only on the captions. Raises ResourceError if the library is not installed, or if the cache
    folder cannot be written.
    """
    require_installed(["tokenizers"], "text")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [clean_text(caption, CLEANING) for caption in captions]
    digest = hashlib.sha256(f"{FORMAT_VERSION} {MAX_VOCABULARY}\n".encode())
    for text in texts:
        digest.update(f"{text}\n".encode())
    path = get_cache_folder("tokenizers") / f"{digest.hexdigest()[:32]}.json"
    if path.is_file():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=MAX_VOCABULARY - 1,
            min_frequency=2,
            special_tokens=[PAD_TOKEN],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.add_special_tokens([CLIP_END])  # the last id, as text encoders with `pool=end` require
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_atomic(path, shared=True) as file:
                file.write(tokenizer.to_str().encode())
        except OSError as error:
            hint = "set XDG_CACHE_HOME to a folder that can be written"
            raise ResourceError(f"cannot write {os.fspath(path)}: {error.strerror}", hint) from None
    longest = 1 + max((len(encoding.ids) for encoding in tokenizer.encode_batch(texts)), default=0)
    length = min(MAX_TEXT_LENGTH, -(-longest // LENGTH_STEP) * LENGTH_STEP)
    return TrainedTokenizer(path, tokenizer.get_vocab_size(), length)
