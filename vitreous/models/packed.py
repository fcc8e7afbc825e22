"""Sequence packing: images of many sizes at their native aspect ratio in one forward pass (NaViT, arXiv:2307.06304).

The tokens of several images are concatenated to one sequence. Norms, projections and MLPs run on all of them together,
attention on each image separately. n images (C, *size), N_i patch tokens of one, P prefix tokens, D width.
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

PACKED_ROW_TOKENS = 1600  # tokens per sequence, about: more do not fit a CPU's caches
TRAINING_ROW_TOKENS = 6400  # with gradients on a CPU, where activations are stored anyway: fewer gradients to add up
ROW_MULTIPLE = 64  # sequence lengths on a GPU are multiples of this, so that few shapes are compiled


class PackedViT(nn.Module):
    """Run a ViT on a list of images (C, *size) of any sizes that its patch divides. Outputs equal those of each image
    alone.

    `max_tokens`: maximum tokens per forward pass, unless a single image has more; None: the fastest on a CPU. Images
    with the same number of tokens are adjacent. `use_mask`: one attention with a mask over the padded sequence instead
    of one per image; None: only on a GPU. Raises UsageError for a model whose blocks take grids or use positions.
    """

    def __init__(self, model: nn.Module, row: int | None = None, masked: bool | None = None) -> None:
        super().__init__()
        config: ModelConfig | None = getattr(model, "config", None)
        if config is not None:
            check_can_pack(config)
        assert isinstance(model, ViT)
        if row is not None and row < 1:
            raise UsageError(f"row must be at least one token, not {row}")
        self.model, self.max_tokens, self.use_mask = model, row, masked

    def forward(self, images: Sequence[Tensor], keep: Sequence[Tensor] | None = None) -> Tensor:
        """n images -> (n, classes): logits. `keep`: the indices (K_i,) int64 of the patches to use for each image;
        None: all. Raises ValueError for an empty list, UsageError for a size that the patch does not divide."""
        pooled = [self.model.pool(tokens[None]) for tokens in self.features(images, keep)]
        return self.model.classify(torch.cat(pooled))

    def features(self, images: Sequence[Tensor], keep: Sequence[Tensor] | None = None) -> list[Tensor]:
        """n images -> a list of (P + N_i, D): every token after the last norm. Raises as `forward`."""
        if not images:
            raise ValueError("images is empty")
        sequences = self.embed_patches(images, keep)
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))  # equal lengths are adjacent
        features: list[Tensor] = []
        is_training = torch.is_grad_enabled() and not self.is_masked(images[0])
        for chunk in pack_sequences(
            [len(sequences[index]) for index in order],
            self.max_tokens or (TRAINING_ROW_TOKENS if is_training else PACKED_ROW_TOKENS),
        ):
            features += self.encode([sequences[index] for index in order[chunk]])
        return [features[position] for position in sorted(range(len(order)), key=order.__getitem__)]

    def is_masked(self, tensor: Tensor) -> bool:
        """Return whether attention on the tensor's device uses a mask."""
        return tensor.device.type != "cpu" if self.use_mask is None else self.use_mask

    def embed_patches(self, images: Sequence[Tensor], keep: Sequence[Tensor] | None = None) -> list[Tensor]:
        """n images (C, *size) -> a list of (P + N, D): the first block's input, for all patches or the patches in
        `keep`. Images of the same size are projected together, and their positions are resized once."""
        sequences: dict[int, Tensor] = {}
        for image_indices in group_by_size(images):
            tokens = self.model.add_positions(
                self.model.project(torch.stack([images[index] for index in image_indices]))
            )
            if keep is None:
                sequences |= zip(image_indices, self.model.with_prefix(tokens), strict=True)
                continue
            for image_tokens, index in zip(tokens, image_indices, strict=True):
                sequences[index] = self.model.with_prefix(gather_tokens(image_tokens[None], keep[index][None]))[0]
        return [sequences[index] for index in range(len(images))]

    def encode(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """A list of (P + N_i, D) -> the same after blocks and last norm, in one pass.

        Raises UsageError in training with stochastic depth, which would drop whole sequences.
        """
        if self.training and self.model.config.regularization.drop_path:
            raise UsageError("packed sequences do not support stochastic depth", "use regularization.drop_path=0")
        lengths = tuple(map(len, sequences))
        masked = self.is_masked(sequences[0])
        packed = torch.cat(list(sequences))
        if masked and (padding := -len(packed) % ROW_MULTIPLE):
            packed, lengths = torch.cat([packed, packed.new_zeros(padding, packed.shape[1])]), (*lengths, padding)
        encoded = self.model.encoder(packed[None], Segments(lengths, masked))[0]
        return list(encoded.split(lengths))[: len(sequences)]


def check_can_pack(config: ModelConfig) -> None:
    """Raise UsageError for a model that does not support sequence packing."""
    if not config.packs_sizes:
        raise UsageError(
            "sequence packing (native aspect ratio) requires a plain ViT whose positions are added at the input; "
            f"{config.name()} is not supported",
            "use a model without windows, rotary or relative positions",
        )


def group_by_size(images: Sequence[Tensor]) -> list[list[int]]:
    """n images (C, *size) -> the indices of the images of each size."""
    groups: dict[torch.Size, list[int]] = {}
    for index, image in enumerate(images):
        groups.setdefault(image.shape, []).append(index)
    return list(groups.values())


def pack_sequences(lengths: Sequence[int], max_tokens: int) -> list[slice]:
    """Lengths of sequences -> consecutive chunks of at most `max_tokens` tokens, or of one longer sequence."""
    chunks, start, size = list[slice](), 0, 0
    for index, length in enumerate(lengths):
        if index > start and size + length > max_tokens:
            chunks.append(slice(start, index))
            start, size = index, 0
        size += length
    return [*chunks, slice(start, len(lengths))] if lengths else []
