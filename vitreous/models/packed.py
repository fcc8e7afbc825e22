"""Images of many sizes at once, each at its own aspect ratio (NaViT, arXiv:2307.06304).

The tokens of several images lie in one row; norms, projections and MLPs are computed for all of them together,
attention for each image by itself. n images (C, *size), N_i patch tokens of one, P prefix tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitreous.errors import UsageError
from vitreous.models.vit import ViT
from vitreous.nn.grid import take
from vitreous.nn.segments import Segments

ROW = 1600  # tokens of a row on a CPU, about: more fall out of the caches
PAD = 64  # tokens of which a row on a GPU is a multiple, so that few shapes are compiled


class Packed(nn.Module):
    """A ViT as it is, that takes a list of images (C, *size) of any sizes that its patch divides.

    `row`: tokens of one forward pass, if one image alone does not have more. `masked`: attention by a mask over the
    row, which is padded, in the place of image after image; None: on a GPU. Each answer is that of the image alone.
    Raises UsageError for a model whose blocks take grids, or know of places.
    """

    def __init__(self, model: ViT, row: int = ROW, masked: bool | None = None) -> None:
        super().__init__()
        c = model.config
        if not isinstance(model, ViT) or c.on_grid or c.needs_positions:
            raise UsageError(
                "images of many sizes are packed for plain ViTs whose positions are added at the input",
                "use a model without windows, rotary or relative positions",
            )
        if row < 1:
            raise UsageError(f"a row has at least one token, not {row}")
        self.model, self.row, self.masked = model, row, masked

    def forward(self, images: Sequence[Tensor], keep: Sequence[Tensor] | None = None) -> Tensor:
        """n images -> (n, classes): logits. `keep`: the numbers (K_i,) int64 of the patches of each image that are
        looked at, all where it is None. Raises ValueError for no image, UsageError for a size that the patch does not
        divide."""
        pooled = [self.model.pool(tokens[None]) for tokens in self.features(images, keep)]
        return self.model.classify(torch.cat(pooled))

    def features(self, images: Sequence[Tensor], keep: Sequence[Tensor] | None = None) -> list[Tensor]:
        """n images -> of each (P + N_i, D): every token after the last norm. Raises as `forward`."""
        if not images:
            raise ValueError("no image")
        placed = [self.place(image, None if keep is None else keep[i]) for i, image in enumerate(images)]
        features: list[Tensor] = []
        for part in rows([len(tokens) for tokens in placed], self.row):
            features += self.encode(placed[part])
        return features

    def place(self, image: Tensor, keep: Tensor | None) -> Tensor:
        """(C, *size) -> (P + N, D): the tokens that the first block gets, of all patches or of those to `keep`."""
        tokens = self.model.place(self.model.project(image[None]))
        return self.model.with_prefix(tokens if keep is None else take(tokens, keep[None]))[0]

    def encode(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Of each image (P + N_i, D) -> the same after blocks and last norm, by one pass over all of them.

        Raises UsageError in training with stochastic depth, which leaves out whole rows.
        """
        if self.training and self.model.config.drop_path:
            raise UsageError("rows of several images have no stochastic depth", "set model.drop_path=0")
        lengths = tuple(map(len, sequences))
        masked = sequences[0].device.type != "cpu" if self.masked is None else self.masked
        row = torch.cat(list(sequences))
        if masked and (lacking := -len(row) % PAD):
            row, lengths = torch.cat([row, row.new_zeros(lacking, row.shape[1])]), (*lengths, lacking)
        encoded = self.model.encoder(row[None], Segments(lengths, masked))[0]
        return list(encoded.split(lengths))[: len(sequences)]


def rows(lengths: Sequence[int], most: int) -> list[slice]:
    """Lengths of sequences -> consecutive parts of them of at most `most` tokens, or of one longer sequence."""
    parts, start, size = [], 0, 0
    for number, length in enumerate(lengths):
        if number > start and size + length > most:
            parts.append(slice(start, number))
            start, size = number, 0
        size += length
    return [*parts, slice(start, len(lengths))] if lengths else []


def native_size(size: tuple[int, ...], patch: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Pixels along each axis of an image -> those of about its aspect ratio that have at most so many patches, whole
    ones: as many as there may be, at least one along each axis.

    Raises UsageError for fewer than one token.
    """
    if tokens < 1:
        raise UsageError(f"an image has at least one token, not {tokens}")
    cells = [side / length for side, length in zip(size, patch, strict=True)]
    low, high = 0.0, tokens / min(cells)  # bisect the scale: counts rise with it
    for _ in range(60):
        middle = (low + high) / 2
        fits = math.prod(max(1, round(cell * middle)) for cell in cells) <= tokens
        low, high = (middle, high) if fits else (low, middle)
    return tuple(min(tokens, max(1, round(cell * low))) * length for cell, length in zip(cells, patch, strict=True))
