"""Masked patch prediction (arXiv:2010.11929, section 4.6 and B.1.2): restore the colours of corrupted patches.

B images of C channels, N patches of which M are corrupted, D width, V values in a patch: channels times pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.masks import MASK_VECTOR, corrupt_patches
from vitreous.data.batch import Batch
from vitreous.data.keys import derive_keys
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig
from vitreous.models.vit import ViT
from vitreous.models.zoo import Model
from vitreous.nn.grid import gather_tokens, patchify, unpatchify
from vitreous.objectives.base import ObjectiveConfig, ObjectiveSetting, Reconstruction, TrainingProgress
from vitreous.objectives.unlabelled import UnlabelledObjective, check_takes_patches, check_views
from vitreous.system.machine import copy_to_device
from vitreous.system.torch_types import from_numpy

MaskedTarget = Literal["mean-colour", "small-colours", "pixels"]
COLOUR_LEVELS = 8  # per channel: 3 bits
SMALL_PATCH_SIDE = 4  # pixels along a side of the shrunk patch that `small-colours` predicts
MAX_COLOUR_CHANNELS = 4  # maximum, because the number of classes is 8 to the power of the channels
_CORRUPT = 0x6D7070  # separates random numbers of corruptions from those of augmentation


@dataclass(frozen=True)
class MaskedPatchesConfig(ObjectiveConfig):
    """Masked patch prediction; the defaults are the paper's (B.1.2).

    `share` of the patches are to be restored. Of their embeddings, `masked` are replaced by the mask token, `swapped`
    by that of another patch, the rest stay. For a convolutional stem, these patches of the image are set to 0 or
    swapped. `target`: the mean 3-bit colour of a patch (512 classes for RGB), the 4 x 4 3-bit colours of the shrunk
    patch, or all its pixels with the squared error.
    """

    name: Literal["masked-patches"] = "masked-patches"
    target: MaskedTarget = "mean-colour"
    share: float = 0.5
    masked: float = 0.8
    swapped: float = 0.1

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for several views, a model without patch tokens, and patches that cannot be targets."""
        check_views(views, Augment, self.name)
        check_takes_patches(model, self.name)
        corrupt_patches(np.zeros(1, np.int64), model.grid, self.share, self.masked, self.swapped)
        if not int(self.share * math.prod(model.grid)):
            raise UsageError(
                f"--objective.share {self.share} of {math.prod(model.grid)} patches selects no patch",
                "use smaller patches",
            )
        if self.target != "pixels" and model.channels > MAX_COLOUR_CHANNELS:
            hint = "use --objective.target pixels"
            raise UsageError(f"colours of {model.channels} channels give too many classes", hint)
        if self.target == "small-colours" and min(model.patch) < SMALL_PATCH_SIDE:
            hint = "use --objective.target mean-colour"
            raise UsageError(f"patches of {model.patch} pixels are smaller than {SMALL_PATCH_SIDE}", hint)

    def describe_restoration(self) -> str:
        """Description of a reconstruction."""
        stay = 1 - self.masked - self.swapped
        description = (
            f"{self.share:.0%} of the patches are predicted. Of these, {self.masked:.0%} (grey) are hidden from the"
            f" encoder, {self.swapped:.0%} show another patch, {stay:.0%} are unchanged."
        )
        if self.target == "pixels":
            return description
        target_text = (
            "its mean colour" if self.target == "mean-colour" else f"{SMALL_PATCH_SIDE} x {SMALL_PATCH_SIDE} colours"
        )
        return (
            description
            + f" The model predicts {target_text} of a patch, in {COLOUR_LEVELS} levels per channel (midpoints)."
        )

    def build(self, model: Model, setting: ObjectiveSetting) -> MaskedPatchesObjective:
        """Build the objective of an encoder."""
        return MaskedPatchesObjective(model, self, setting)


class MaskedPatchesObjective(UnlabelledObjective):
    """Mean cross-entropy in nats, or mean squared error, over the corrupted patches.

    Takes {"images": (B, C, *image), "source": (B, N) int64, "masked_positions": (B, M) int64, "targets"}. "source" is
    the index of the patch whose embedding is used at each position, `MASK_VECTOR` for the mask token.
    "masked_positions" are the positions to predict. "targets" are their colours (B, M) or (B, M, S) int64, or pixels
    (B, M, V) float32.
    """

    capturable: ClassVar[bool] = True

    def __init__(
        self,
        model: Model,
        config: MaskedPatchesConfig = MaskedPatchesConfig(),
        setting: ObjectiveSetting = ObjectiveSetting(),
    ) -> None:
        super().__init__()
        shape = model.config
        self.model = cast(ViT, model)
        self.config, self.setting = config, setting
        self.mask_token = nn.Parameter(torch.empty(shape.width).normal_(std=0.02))
        self.colours = COLOUR_LEVELS**shape.channels
        self.predictions = SMALL_PATCH_SIDE ** len(shape.patch) if config.target == "small-colours" else 1
        values = shape.channels * math.prod(shape.patch)
        self.head = nn.Linear(shape.width, values if config.target == "pixels" else self.predictions * self.colours)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def prepare(self, batch: Batch, progress: TrainingProgress) -> Batch:
        """Draw the corruptions, and use the corrupted patches of the images as targets."""
        images = batch["images"]
        source, patch_indices = self.draw_corruptions(
            derive_keys(self.setting.seed, _CORRUPT, batch["positions"].numpy()), images.device
        )
        targets = self.targets(images, patch_indices)
        entries = {"images": images, "source": source, "masked_positions": patch_indices, "targets": targets}
        return entries | {name: batch[name] for name in ("positions", "samples")}

    def draw_corruptions(self, keys: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        """(B,) keys -> (B, N) and (B, M) int64: the source of each position, and the positions to predict."""
        config = self.config
        corruption = corrupt_patches(keys, self.model.config.grid, config.share, config.masked, config.swapped)
        predicted = corruption.predicted.reshape(len(keys), -1)
        patch_indices = copy_to_device(from_numpy(predicted.nonzero()[1].reshape(len(keys), -1)), device)
        return copy_to_device(from_numpy(corruption.source.reshape(len(keys), -1)), device), patch_indices

    def targets(self, images: Tensor, patch_indices: Tensor) -> Tensor:
        """(B, C, *image) normalised, (B, M) int64 -> the targets of these patches.

        Colours: the levels floor(8 x) of the channels, x in 0 .. 1, as digits of a number to the base 8, red first; (B,
        M) int64 of a patch's mean, (B, M, 4^axes) of it shrunk to 4 pixels a side. Pixels: (B, M, V) float32.
        """
        shape, images = self.model.config, images.float()
        patches = gather_tokens(patchify(images, shape.patch).flatten(1, -2), patch_indices)
        if self.config.target == "pixels":
            return patches
        channels = torch.unflatten(patches, -1, (shape.channels, *shape.patch))
        pooled = average_pool_patches(
            channels, SMALL_PATCH_SIDE if self.config.target == "small-colours" else 1, len(shape.patch)
        )
        mean, std = (copy_to_device(torch.tensor(v), images.device) for v in self.setting.normalisation)
        levels = ((pooled * std[:, None] + mean[:, None]) * COLOUR_LEVELS).floor().clamp(0, COLOUR_LEVELS - 1).long()
        digits = COLOUR_LEVELS ** torch.arange(shape.channels - 1, -1, -1, device=images.device)
        colours = (levels * digits[:, None]).sum(-2)
        return colours if self.config.target == "small-colours" else colours[..., 0]

    def predict(self, images: Tensor, source: Tensor, predicted: Tensor) -> Tensor:
        """(B, C, *image), (B, N), (B, M) int64 -> (B, M, outputs of the head) float32.

        Images are corrupted before the model, so that a convolutional stem does not leak a hidden patch into
        neighbouring tokens. For a plain ViT this is equivalent to corrupting tokens.
        """
        model = self.model
        tokens = model.project(self.corrupt(images, source))
        hidden = (source == MASK_VECTOR).view(*tokens.shape[:-1], 1)
        tokens = torch.where(hidden, self.mask_token.to(tokens.dtype), tokens)
        encoded = model.encode(model.add_positions(tokens), model.make_token_positions(tokens))
        return self.head(gather_tokens(encoded[:, model.config.prefix :], predicted)).float()

    def corrupt(self, images: Tensor, source: Tensor) -> Tensor:
        """(B, C, *image), (B, N) int64 -> the images with each patch replaced by its source, or by 0 for
        `MASK_VECTOR`."""
        shape = self.model.config
        patches = gather_tokens(patchify(images, shape.patch).flatten(1, -2), source.clamp(min=0))
        patches = patches.masked_fill((source == MASK_VECTOR)[..., None], 0.0)
        return unpatchify(torch.unflatten(patches, 1, shape.grid), shape.patch)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        logits, targets = self.predict(batch["images"], batch["source"], batch["masked_positions"]), batch["targets"]
        if self.config.target == "pixels":
            return {"loss": (logits - targets).square().mean()}
        return {"loss": F.cross_entropy(logits.reshape(-1, self.colours), targets.flatten())}

    @torch.no_grad()
    def reconstruct(self, images: Tensor, keys: np.ndarray) -> Reconstruction:
        """(B, C, *image) normalised, (B,) keys -> the images with corrupted patches, and with predicted ones."""
        patch, grid = self.model.config.patch, self.model.config.grid
        source, patch_indices = self.draw_corruptions(keys, images.device)
        logits = self.predict(images, source, patch_indices)
        painted = logits if self.config.target == "pixels" else self.paint(logits)
        patches, hidden = patchify(images.float(), patch).flatten(1, -2), source == MASK_VECTOR
        restored = patches.scatter(1, patch_indices[..., None].expand_as(painted), painted)
        visible_image, restored = (
            self.corrupt(images.float(), source),
            unpatchify(torch.unflatten(restored, 1, grid), patch),
        )
        predicted = torch.zeros_like(hidden).scatter(1, patch_indices, True)
        return Reconstruction(visible_image, restored, hidden.unflatten(1, grid), predicted.unflatten(1, grid))

    def paint(self, logits: Tensor) -> Tensor:
        """(B, M, outputs) logits of colours -> (B, M, V) normalised pixels: the most likely colour, or 4^axes of them,
        at the middle of its levels."""
        shape = self.model.config
        colours = torch.unflatten(logits, -1, (self.predictions, self.colours)).argmax(-1)
        digits = COLOUR_LEVELS ** torch.arange(shape.channels - 1, -1, -1, device=logits.device)
        levels = colours[:, :, None] // digits[:, None] % COLOUR_LEVELS
        mean, std = (torch.tensor(values, device=logits.device)[:, None] for values in self.setting.normalisation)
        num_cells = SMALL_PATCH_SIDE if self.config.target == "small-colours" else 1
        pixels = torch.unflatten(((levels + 0.5) / COLOUR_LEVELS - mean) / std, -1, (num_cells,) * len(shape.patch))
        for axis, length in enumerate(shape.patch, -len(shape.patch)):
            pixels = pixels.index_select(axis, torch.arange(length, device=logits.device) * num_cells // length)
        return pixels.flatten(2)

    def flops(self, progress: TrainingProgress) -> float:
        """Three passes over all patches."""
        shape = self.model.config
        head = int(self.config.share * math.prod(shape.grid)) * shape.width * self.head.out_features
        return 6 * (shape.computed_macs() + head)


def average_pool_patches(patches: Tensor, num_cells: int, axes: int) -> Tensor:
    """(..., *patch) of `axes` axes -> (..., side^axes): means over the chunks of each axis, as equal as possible.

    Chunk i of an axis of n pixels covers floor(i n / side) to ceil((i + 1) n / side) - 1.
    """
    for axis in range(-axes, 0):
        length = patches.shape[axis]
        starts, ends = ([f(i * length / num_cells) for i in range(num_cells + 1)] for f in (math.floor, math.ceil))
        means = [patches.narrow(axis, a, b - a).mean(axis) for a, b in zip(starts[:-1], ends[1:], strict=True)]
        patches = torch.stack(means, axis)
    return patches.flatten(-axes)
