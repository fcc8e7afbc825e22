"""Images of many sizes at once, each at its own aspect ratio (NaViT, arXiv:2307.06304).

The tokens of several images lie in one row; norms, projections and MLPs are computed for all of them together,
attention for each image by itself. n images (C, *size), N_i patch tokens of one, P prefix tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig
from vitreous.models.vit import ViT
from vitreous.nn.attention import Segments
from vitreous.nn.grid import gather_tokens

PACKED_ROW_TOKENS = 1600  # tokens of a row, about: more fall out of the caches of a CPU
TRAINING_ROW_TOKENS = (
    6400  # of one that is differentiated on a CPU, whose numbers are kept anyway: fewer gradients to add up
)
ROW_MULTIPLE = 64  # tokens of which a row on a GPU is a multiple, so that few shapes are compiled


class PackedViT(nn.Module):
    """A ViT as it is, that takes a list of images (C, *size) of any sizes that its patch divides.

    `row`: tokens of one forward pass, if one image alone does not have more; None: what is fastest on a CPU. Images of
    as many tokens lie side by side.
    `masked`: attention by a mask over the row, which is padded, in the place of image after image; None: on a GPU. Each
    answer is that of the image alone.
    Raises UsageError for a model whose blocks take grids, or know of places.
    """

    def __init__(self, model: ViT, row: int | None = None, masked: bool | None = None) -> None:
        super().__init__()
        check_can_pack(model.config)
        if row is not None and row < 1:
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
        placed = self.place(images, keep)
        order = sorted(range(len(placed)), key=lambda number: len(placed[number]))  # those of one length together
        features: list[Tensor] = []
        trained = torch.is_grad_enabled() and not self.is_masked(images[0])
        for part in pack_sequences(
            [len(placed[number]) for number in order],
            self.row or (TRAINING_ROW_TOKENS if trained else PACKED_ROW_TOKENS),
        ):
            features += self.encode([placed[number] for number in order[part]])
        return [features[place] for place in sorted(range(len(order)), key=order.__getitem__)]

    def is_masked(self, tensor: Tensor) -> bool:
        """Whether a row is computed under a mask where the tensor is."""
        return tensor.device.type != "cpu" if self.masked is None else self.masked

    def place(self, images: Sequence[Tensor], keep: Sequence[Tensor] | None = None) -> list[Tensor]:
        """n images (C, *size) -> of each (P + N, D): the tokens that the first block gets, of all patches or of those
        to `keep`. Images of one size are read together, and their positions are resized once."""
        placed: dict[int, Tensor] = {}
        for numbers in group_by_size(images):
            tokens = self.model.place(self.model.project(torch.stack([images[number] for number in numbers])))
            if keep is None:
                placed |= zip(numbers, self.model.with_prefix(tokens), strict=True)
                continue
            for own, number in zip(tokens, numbers, strict=True):
                placed[number] = self.model.with_prefix(gather_tokens(own[None], keep[number][None]))[0]
        return [placed[number] for number in range(len(images))]

    def encode(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Of each image (P + N_i, D) -> the same after blocks and last norm, by one pass over all of them.

        Raises UsageError in training with stochastic depth, which leaves out whole rows.
        """
        if self.training and self.model.config.regularization.drop_path:
            raise UsageError("rows of several images have no stochastic depth", "use regularization.drop_path=0")
        lengths = tuple(map(len, sequences))
        masked = self.is_masked(sequences[0])
        row = torch.cat(list(sequences))
        if masked and (lacking := -len(row) % ROW_MULTIPLE):
            row, lengths = torch.cat([row, row.new_zeros(lacking, row.shape[1])]), (*lengths, lacking)
        encoded = self.model.encoder(row[None], Segments(lengths, masked))[0]
        return list(encoded.split(lengths))[: len(sequences)]


def check_can_pack(config: ModelConfig) -> None:
    """Raise UsageError for a model that cannot take pictures of many sizes."""
    if not config.packs_sizes:
        raise UsageError(
            "images of many sizes are packed for plain ViTs whose positions are added at the input, and "
            f"{config.name()} is none",
            "use a model without windows, rotary or relative positions",
        )


def group_by_size(images: Sequence[Tensor]) -> list[list[int]]:
    """n images (C, *size) -> the numbers of those of one size, for each size."""
    groups: dict[torch.Size, list[int]] = {}
    for number, image in enumerate(images):
        groups.setdefault(image.shape, []).append(number)
    return list(groups.values())


def pack_sequences(lengths: Sequence[int], most: int) -> list[slice]:
    """Lengths of sequences -> consecutive parts of them of at most `most` tokens, or of one longer sequence."""
    parts, start, size = [], 0, 0
    for number, length in enumerate(lengths):
        if number > start and size + length > most:
            parts.append(slice(start, number))
            start, size = number, 0
        size += length
    return [*parts, slice(start, len(lengths))] if lengths else []
