"""Sequence packing: images of many sizes at their native aspect ratio in one forward pass (NaViT, arXiv:2307.06304).

The tokens of several images are concatenated to one sequence. Norms, projections and MLPs process all tokens together;
attention is computed within each image.

Shapes: n images (C, *size), N_i patch tokens of image i, K_i of them used, P prefix tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitreous.errors import UsageError
from vitreous.models.base import VisionModel
from vitreous.models.config import ModelConfig
from vitreous.models.vit import ViT
from vitreous.nn.attention import Segments
from vitreous.nn.grid import gather_tokens

PACKED_ROW_TOKENS = 1600  # tokens per packed sequence without gradients; more do not fit into a CPU's caches
TRAINING_ROW_TOKENS = 6400  # tokens per packed sequence in training on a CPU: fewer gradients are added up
ROW_MULTIPLE = 64  # packed sequences on a GPU are padded to a multiple of this, so few shapes are compiled


class PackedViT(nn.Module):
    """Run a ViT on a list of images (C, *size) of any sizes that its patch divides; outputs equal those of each image
    alone. For a model with a text encoder, this runs its image encoder.

    - `row` is the maximum number of tokens per packed sequence, unless a single image has more; None selects the
      fastest on a CPU. Images with the same number of tokens are adjacent.
    - `masked` computes one attention with a mask over the padded sequence instead of one per image; None selects it
      only on a GPU.

    Raises UsageError for a model whose blocks need a grid or token positions, and for a `row` below 1.
    """

    def __init__(self, model: nn.Module, row: int | None = None, masked: bool | None = None) -> None:
        super().__init__()
        config: ModelConfig | None = getattr(model, "config", None)
        if config is not None:
            check_can_pack(config)
        encoder = model.inspected_backbone() if isinstance(model, VisionModel) else model
        assert isinstance(encoder, ViT)
        if row is not None and row < 1:
            raise UsageError(f"row must be at least 1 token, got {row}")
        self.model, self.max_tokens, self.use_mask = encoder, row, masked

    def forward(self, images: Sequence[Tensor], keep: Sequence[Tensor] | None = None) -> Tensor:
        """Compute logits of a list of n images: -> (n, classes).

        `keep` contains the indices (K_i,) int64 of the patches to use for each image; None uses all. Raises ValueError
        for an empty list, UsageError for a size that the patch does not divide.
        """
        pooled = [self.model.pool(tokens[None]) for tokens in self.features(images, keep)]
        return self.model.classify(torch.cat(pooled))

    def features(self, images: Sequence[Tensor], keep: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Compute every token after the last norm: n images -> a list of (P + N_i, D). Raises the errors of
        `forward`."""
        if not images:
            raise ValueError("the list of images is empty")
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
        """Return whether attention on the device of this tensor (any shape) uses a mask."""
        return tensor.device.type != "cpu" if self.use_mask is None else self.use_mask

    def embed_patches(self, images: Sequence[Tensor], keep: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Compute the input of the first block: n images (C, *size) -> a list of (P + N_i, D), or of (P + K_i, D) for
        the patches in `keep`.

        Images of the same size are projected together, and positions are resized once for them.
        """
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
        """Run blocks and last norm on several sequences in one pass: a list of (P + N_i, D) -> a list of (P + N_i, D).

        Raises UsageError in training with stochastic depth, which would drop whole packed sequences.
        """
        if self.model.training and self.model.config.regularization.drop_path:
            raise UsageError("packed sequences do not support stochastic depth", "set regularization.drop_path=0")
        lengths = tuple(map(len, sequences))
        masked = self.is_masked(sequences[0])
        packed = torch.cat(list(sequences))
        if masked and (padding := -len(packed) % ROW_MULTIPLE):
            packed, lengths = torch.cat([packed, packed.new_zeros(padding, packed.shape[1])]), (*lengths, padding)
        encoded = self.model.encoder(packed[None], Segments(lengths, masked))[0]
        return list(encoded.split(lengths))[: len(sequences)]


def check_can_pack(config: ModelConfig) -> None:
    """Raise UsageError if the model of a config does not support sequence packing."""
    if not config.packs_sizes:
        raise UsageError(
            "sequence packing (native aspect ratio) requires a plain ViT whose positions are added at the input; "
            f"{config.name()} is not supported",
            "use a model without windows, rotary or relative positions",
        )


def group_by_size(images: Sequence[Tensor]) -> list[list[int]]:
    """Group n images (C, *size) by size: the indices of the images of each size."""
    groups: dict[torch.Size, list[int]] = {}
    for index, image in enumerate(images):
        groups.setdefault(image.shape, []).append(index)
    return list(groups.values())


def pack_sequences(lengths: Sequence[int], max_tokens: int) -> list[slice]:
    """Divide sequences into consecutive chunks of at most `max_tokens` tokens, by their lengths; a longer sequence is a
    separate chunk."""
    chunks, start, num_tokens = list[slice](), 0, 0
    for index, length in enumerate(lengths):
        if index > start and num_tokens + length > max_tokens:
            chunks.append(slice(start, index))
            start, num_tokens = index, 0
        num_tokens += length
    return [*chunks, slice(start, len(lengths))] if lengths else []
