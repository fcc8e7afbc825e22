"""Image-text pairs: images with captions, of which an image may have several. A sample is one pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np

from vitreous.data.layouts.split_names import SPLIT_NAMES
from vitreous.data.split import Data, Split, create_empty_labels, ensure_val_split
from vitreous.data.tokenizer import Tokenizer
from vitreous.errors import DataError, UsageError, escape_unprintable

PAIR_FORMATS_HINT = (
    "use a CSV file with the columns path,caption, WebDataset archives with NAME.jpg and NAME.txt, Parquet files with "
    "a column caption, or a captions file of COCO"
)


class Captions(Sequence[str]):
    """Sequence of texts, stored in one byte string that forked processes share without copying."""

    def __init__(self, texts: Iterable[str]) -> None:
        encoded_texts = [text.encode("utf-8", "replace") for text in texts]
        self._ends = np.cumsum([0, *map(len, encoded_texts)], dtype=np.int64)
        self._bytes = b"".join(encoded_texts)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        positions = range(len(self))[index]
        if isinstance(positions, range):
            return [self[position] for position in positions]
        return self._bytes[int(self._ends[positions]) : int(self._ends[positions + 1])].decode("utf-8")


@dataclass(frozen=True, eq=False)
class PairTable:
    """Images and captions of which several splits contain pairs.

    - `images`: the images, each once.
    - `image_indices` (n,) int64: the image of each pair.
    - `captions`: the n captions.
    - `tokenizer`, `tokens` (n, N) int32: the tokenizer and the token ids of the captions; None before `tokenize_pairs`.
    """

    images: Split
    image_indices: np.ndarray
    captions: Captions
    tokenizer: Tokenizer | None = None
    tokens: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class PairSplit:
    """Split of image-text pairs: the pairs at `indices` (n,) int64 of a table. Its samples have no labels."""

    table: PairTable
    indices: np.ndarray

    @property
    def labels(self) -> np.ndarray:
        """The labels of n unlabelled samples, (n, 0) float32."""
        return create_empty_labels(len(self.indices))

    @property
    def image_indices(self) -> np.ndarray:
        """The index of the image of each pair in the table, (n,) int64."""
        return self.table.image_indices[self.indices]

    @property
    def has_tokens(self) -> bool:
        """Whether the captions are encoded as token ids."""
        return self.table.tokens is not None

    @property
    def tokens(self) -> np.ndarray:
        """The token ids of the captions, (n, N) int32. Raises UsageError if captions were not encoded."""
        if self.table.tokens is None:
            raise UsageError("the captions have no token ids", "encode them with a tokenizer")
        return self.table.tokens[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def caption(self, sample: int) -> str:
        """Return the caption of a pair."""
        return self.table.captions[int(self.indices[sample])]

    def captions(self) -> list[str]:
        """Return the captions of all pairs."""
        return [self.table.captions[int(index)] for index in self.indices]

    def raw(self, sample: int) -> bytes | np.ndarray:
        """Return the stored bytes or pixels of the image of a pair. Raises DataError if they cannot be read."""
        return self.table.images.raw(int(self.table.image_indices[self.indices[sample]]))

    def name(self, sample: int) -> str:
        """Return the name of the image of a pair, for messages."""
        return self.table.images.name(int(self.table.image_indices[self.indices[sample]]))

    def take(self, indices: np.ndarray, labels: np.ndarray | None = None) -> PairSplit:
        """Return a split of the pairs at `indices` (m,), in this order; pairs have no labels that could be replaced."""
        return PairSplit(self.table, self.indices[indices])

    def update(self, digest: Any) -> None:
        """Update a hashlib digest with the identities of the images, and with the captions."""
        self.table.images.take(self.image_indices).update(digest)
        for caption in self.captions():
            digest.update(f"{caption}\n".encode())


def build_pair_data(
    name: str,
    images: Split,
    image_indices: np.ndarray,
    captions: Sequence[str],
    *,
    pairs_by_split: Mapping[str, np.ndarray],
    split_seed: int,
    notes: list[str],
    unsplit: bool,
) -> Data:
    """Build a dataset of image-text pairs.

    Args:
        name: the name of the source, for messages.
        images: the images, each once.
        image_indices: the image of each pair, (n,) int64.
        captions: the n captions. Pairs with a blank caption are left out, with a note.
        pairs_by_split: the indices of the pairs of each split. If there is no `val`, a tenth of the images is held out.
        split_seed: the seed of the draw of held-out images.
        notes: notes about the dataset, to which this function appends.
        unsplit: whether the source has no predefined splits.

    Raises DataError if no training pair has a caption.
    """
    texts = [" ".join(caption.split()) for caption in captions]
    has_text = np.array([bool(text) for text in texts], dtype=bool)
    table = PairTable(images, np.asarray(image_indices, np.int64), Captions(texts))
    if num_empty := int((~has_text).sum()):
        notes.append(f"{num_empty:,} of {len(texts):,} pairs have an empty caption and are left out")
    splits: dict[str, Split] = {
        split: PairSplit(table, pairs_by_split[split][has_text[pairs_by_split[split]]])
        for split in SPLIT_NAMES
        if split in pairs_by_split
    }
    if not len(splits.get("train", ())):
        raise DataError(f"{name} has no training images with captions", PAIR_FORMATS_HINT)
    train = splits["train"]
    assert isinstance(train, PairSplit)
    groups = train.image_indices  # captions of an image are not divided between splits
    splits, full_train = ensure_val_split(splits, split_seed, notes, groups)
    pairs = sum(len(split) for split in splits.values())
    notes.insert(0, f"{pairs:,} image-text pairs of {len(np.unique(table.image_indices[has_text])):,} images")
    return Data(name, (), splits, notes, unsplit=unsplit, full_train_split=full_train, groups=groups)


def has_pairs(data: Data) -> bool:
    """Return whether a dataset consists of image-text pairs."""
    return all(isinstance(split, PairSplit) for split in data.splits.values())


def require_pairs(data: Data) -> None:
    """Raise DataError if a dataset does not consist of image-text pairs."""
    if not has_pairs(data):
        raise DataError(f"{escape_unprintable(data.name)} has no captions", PAIR_FORMATS_HINT)


def get_tokenizer(split: Split) -> Tokenizer | None:
    """Return the tokenizer of a split of image-text pairs; None for other splits."""
    return split.table.tokenizer if isinstance(split, PairSplit) else None


def tokenize_pairs(data: Data, tokenizer: Tokenizer) -> Data:
    """Return a dataset of image-text pairs whose captions are encoded as token ids. Captions that are too long for the
    text encoder are cut."""
    tables: dict[int, PairTable] = {}

    def encode_split(split: Split) -> Split:
        """Return a split whose table has token ids; tables that splits share are encoded once."""
        assert isinstance(split, PairSplit), "require_pairs was called"
        if id(split.table) not in tables:
            tokens = tokenizer.encode_texts(split.table.captions, truncate=True).astype(np.int32)
            tables[id(split.table)] = replace(split.table, tokenizer=tokenizer, tokens=tokens)
        return replace(split, table=tables[id(split.table)])

    full_train = data.full_train_split
    return replace(
        data,
        splits={name: encode_split(split) for name, split in data.splits.items()},
        full_train_split=full_train and encode_split(full_train),
    )
