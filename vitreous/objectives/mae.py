"""Objective of masked autoencoding (MAE, arXiv:2111.06377): encode a quarter of the patches, predict the pixels of the
others. For clips (VideoMAE, arXiv:2203.12602), the same spatial positions are masked in all time slots.

Shapes: B images, N patches of which K are visible and M = N - K masked, P prefix tokens, D width of the encoder. V are
the values in a patch (C channels times pixels), G the groups of values that are normalised separately. Images may have
any number of axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.masks import random_masks, tube_masks
from vitreous.data.batch import Batch
from vitreous.data.keys import derive_keys
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig
from vitreous.models.cost import block_macs
from vitreous.models.initial import init_xavier
from vitreous.models.vit import ViT
from vitreous.models.zoo import Model
from vitreous.nn.attention import Attention, QkvLinearWithoutKeyBias
from vitreous.nn.block import Block, Mlp
from vitreous.nn.encoder import Encoder, build_blocks
from vitreous.nn.grid import gather_tokens, patchify, unpatchify
from vitreous.nn.position import SinusoidPosition, sincos_position_table
from vitreous.objectives.base import ObjectiveConfig, ObjectiveSetting, Reconstruction, TrainingProgress
from vitreous.objectives.unlabelled import UnlabelledObjective, check_takes_patches, check_views, hide_patches
from vitreous.system.machine import copy_to_device
from vitreous.system.torch_types import from_numpy

_MASK = 0x6D6165  # makes the random numbers of masks independent of those of augmentation


@dataclass(frozen=True)
class MAEConfig(ObjectiveConfig):
    """Options of masked autoencoding; the defaults are the paper's (section 4, appendix A.1).

    - `mask`: share of the patches that are hidden from the encoder; with `tubes`, share of a clip's spatial positions,
      each hidden in all time slots (VideoMAE).
    - `decoder_width`, `decoder_depth`, `decoder_heads`: width, blocks and heads of the decoder.
    - `normalise`: targets have mean 0 and variance 1 within a patch, or with `normalise_channels` within each channel
      of a patch (VideoMAE).

    Raises UsageError for invalid values.
    """

    takes_clips: ClassVar[bool] = True

    name: Literal["mae"] = "mae"
    mask: float = 0.75
    tubes: bool = False
    decoder_width: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16
    normalise: bool = True
    normalise_channels: bool = False

    def __post_init__(self) -> None:
        width, heads = self.decoder_width, self.decoder_heads
        if min(width, heads) < 1 or self.decoder_depth < 0 or width % heads or width % 4:
            raise UsageError(
                f"a decoder cannot have {self.decoder_depth} blocks of width {width} with {heads} heads",
                "use a width that is divisible by 4 and by the number of heads",
            )
        if self.normalise_channels and not self.normalise:
            raise UsageError("--objective.normalise-channels requires --objective.normalise true")

    def count_visible_patches(self, grid: tuple[int, ...]) -> int:
        """Count the patches of a grid that are not masked, which are the encoder's input."""
        if not self.tubes:
            return int(math.prod(grid) * (1 - self.mask))
        spatial_positions = math.prod(grid[1:])
        return grid[0] * (spatial_positions - int(spatial_positions * self.mask))

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for a model that requires every patch, for several views, for tubes without a time axis, and
        for a mask that leaves no masked or no visible patch."""
        check_views(views, Augment, self.name)
        check_takes_patches(model, self.name)
        if self.tubes and len(model.grid) != 3:
            raise UsageError(
                "--objective.tubes masks the same positions in all time slots, but images have no time axis",
                "use --objective.tubes false",
            )
        length = math.prod(model.grid)
        if not 0 < self.count_visible_patches(model.grid) < length:
            raise UsageError(
                f"--objective.mask {self.mask} of {length} patches leaves no visible or no masked patch",
                "use a share such as 0.75, or smaller patches",
            )

    def describe_restoration(self) -> str:
        """Describe the reconstructed images for reports."""
        description = f"{self.mask:.0%} of the patches (grey) are hidden from the encoder, and restored by the decoder."
        if not self.normalise:
            return description
        scope = "each channel of a patch" if self.normalise_channels else "a patch"
        return description + (
            f" Its targets are pixels with mean 0 and std 1 within {scope}. Each restored patch is shown with the mean"
            " and std of the original patch, which the model does not predict."
        )

    def initialise(self, model: Model) -> None:
        """Initialise the encoder's weights as in the paper (appendix A.1)."""
        init_xavier(model)

    def build(self, model: Model, setting: ObjectiveSetting) -> MAE:
        """Build the objective of an encoder."""
        return MAE(model, self, setting)


class MAEDecoder(nn.Module):
    """Decoder: a narrow ViT on the encoded tokens and on a mask token for every masked patch.

    For an encoder with VideoMAE's positions it is VideoMAE's decoder: with the same positions, without a key bias and
    without a bias of its first layer. Attention does not depend on the order of tokens, so masked tokens are put first
    and the output is a slice.
    """

    position: Tensor

    def __init__(self, shape: ModelConfig, config: MAEConfig) -> None:
        super().__init__()
        width, heads, grid = config.decoder_width, config.decoder_heads, shape.grid
        videomae = shape.positions.kind == "sinusoid"
        self.embed = nn.Linear(shape.width, width, bias=not videomae)
        self.mask_token = nn.Parameter(torch.empty(width).normal_(std=0.02))
        position = SinusoidPosition(width).read(grid) if videomae else sincos_position_table(grid, width)
        self.register_buffer("position", position.flatten(0, -2), persistent=False)
        blocks = build_blocks(
            config.decoder_depth, lambda i, rate: Block(width, Attention(width, heads), Mlp(width, 4 * width))
        )
        if videomae:
            for block in blocks:
                block.attention.part.qkv = QkvLinearWithoutKeyBias(width)
        self.encoder = Encoder(width, blocks)
        self.head = nn.Linear(width, shape.channels * math.prod(shape.patch))
        init_xavier(self)

    def forward(self, tokens: Tensor, visible: Tensor, masked: Tensor) -> Tensor:
        """Predict the values of masked patches: encoded tokens (B, P + K, D), indices of visible (B, K) and masked
        patches (B, M) int64 -> (B, M, V)."""
        x, position = self.embed(tokens), self.position.to(tokens.dtype)
        prefix, visible_tokens = x.split([x.shape[1] - visible.shape[1], visible.shape[1]], 1)
        x = torch.cat([self.mask_token + position[masked], visible_tokens + position[visible], prefix], 1)
        return self.head(self.encoder(x)[:, : masked.shape[1]])


class MAE(UnlabelledObjective):
    """Mean squared error of the predicted masked patches.

    The input is {"images": (B, C, *image), "visible": (B, K), "masked": (B, M) int64, "targets": (B, M, V) float32}.
    The squares are averaged in float32.
    """

    capturable: ClassVar[bool] = True

    def __init__(
        self, model: Model, config: MAEConfig = MAEConfig(), setting: ObjectiveSetting = ObjectiveSetting()
    ) -> None:
        super().__init__()
        self.model = cast(ViT, model)
        self.config, self.setting = config, setting
        self.decoder = MAEDecoder(model.config, config)

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Draw the masks, and add the masked patches of the images as targets."""
        images = batch["images"]
        visible, masked = self.draw_masks(
            derive_keys(self.setting.seed, _MASK, batch["positions"].numpy()), images.device
        )
        return {
            "images": images,
            "visible": visible,
            "masked": masked,
            "targets": self.targets(images, masked),
            "positions": batch["positions"],
            "samples": batch["samples"],
        }

    def draw_masks(self, keys: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        """Draw the masks of images by their keys (B,): the indices of visible patches (B, K) and of masked patches
        (B, M) int64."""
        masks = (tube_masks if self.config.tubes else random_masks)(keys, self.model.config.grid, self.config.mask)
        masked = masks.mask.reshape(len(keys), -1).nonzero()[1].reshape(len(keys), -1)
        return copy_to_device(from_numpy(masks.keep), device), copy_to_device(from_numpy(masked), device)

    def targets(self, images: Tensor, masked: Tensor) -> Tensor:
        """Return the pixels of masked patches, normalised if the config enables it: images (B, C, *image), indices
        (B, M) int64 -> (B, M, V) float32."""
        patches = gather_tokens(patchify(images.float(), self.model.config.patch).flatten(1, -2), masked)
        if not self.config.normalise:
            return patches
        groups = self.group_values(patches)
        mean, std = self.compute_moments(groups)
        return ((groups - mean) / std).flatten(-2)

    def group_values(self, patches: Tensor) -> Tensor:
        """Group the values that are normalised together, the patch (G = 1) or each of its C channels: (B, M, V) ->
        (B, M, G, V / G)."""
        return torch.unflatten(patches, -1, (self.model.config.channels if self.config.normalise_channels else 1, -1))

    def compute_moments(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Compute mean and std of each group: (B, M, G, V / G) -> (B, M, G, 1) twice.

        The std is sqrt(var + 1e-6), for channels sqrt(var) + 1e-6, with the unbiased variance, as in the code of MAE
        and of VideoMAE.
        """
        variance, mean = torch.var_mean(groups, -1, keepdim=True)
        return mean, variance.sqrt() + 1e-6 if self.config.normalise_channels else (variance + 1e-6).sqrt()

    def make_hidden_mask(self, masked: Tensor) -> Tensor:
        """Convert indices of masked patches (B, M) int64 to a mask (B, N) bool, true for masked patches."""
        unmasked = torch.zeros(len(masked), math.prod(self.model.config.grid), dtype=torch.bool, device=masked.device)
        return unmasked.scatter(1, masked, True)

    def predict(self, images: Tensor, visible: Tensor, masked: Tensor) -> Tensor:
        """Predict the values of masked patches with encoder and decoder: images (B, C, *image), indices of visible
        (B, K) and masked patches (B, M) int64 -> (B, M, V)."""
        images = hide_patches(images, self.make_hidden_mask(masked), self.model.config)
        return self.decoder(self.model.encode_patches(images, visible), visible, masked)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the loss, a scalar: the mean squared error of the predicted patches."""
        predicted = self.predict(batch["images"], batch["visible"], batch["masked"]).float()
        return {"loss": (predicted - batch["targets"]).square().mean()}

    @torch.no_grad()
    def reconstruct(self, images: Tensor, keys: np.ndarray) -> Reconstruction:
        """Predict the masked patches of images (B, C, *image), normalised, with masks drawn by keys (B,).

        If targets are normalised, predicted patches get the mean and std of the original patches.
        """
        patch, grid = self.model.config.patch, self.model.config.grid
        visible, masked = self.draw_masks(keys, images.device)
        predicted = self.predict(images, visible, masked).float()
        target_patches = patchify(images.float(), patch).flatten(1, -2)
        if self.config.normalise:
            mean, std = self.compute_moments(self.group_values(gather_tokens(target_patches, masked)))
            predicted = (self.group_values(predicted) * std + mean).flatten(-2)
        scatter_index = masked[..., None].expand_as(predicted)
        patch_sets = (
            target_patches.scatter(1, scatter_index, torch.zeros_like(predicted)),
            target_patches.scatter(1, scatter_index, predicted),
        )
        visible_image, restored = (unpatchify(torch.unflatten(patches, 1, grid), patch) for patches in patch_sets)
        return Reconstruction(visible_image, restored, *[self.make_hidden_mask(masked).unflatten(1, grid)] * 2)

    def flops(self, progress: TrainingProgress) -> float:
        """Return the floating-point operations of three passes: the encoder over the visible patches, the decoder over
        all patches."""
        shape, config = self.model.config, self.config
        patches = math.prod(shape.grid)
        num_visible = config.count_visible_patches(shape.grid)
        width, tokens = config.decoder_width, patches + shape.prefix
        embed = (num_visible + shape.prefix) * shape.width * width
        head = (patches - num_visible) * width * shape.channels * math.prod(shape.patch)
        decoder = config.decoder_depth * block_macs(tokens, width, 4 * width)
        return 6 * (shape.computed_macs(patches=num_visible) + embed + decoder + head)
