"""Objective of masked patch prediction (arXiv:2010.11929, sections 4.6 and B.1.2): predict the colours of corrupted
patches.

Shapes: B images of C channels, N patches of which M are corrupted, D width, V values in a patch
(channels times pixels), S = 4^axes colours of a shrunk patch.
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

MaskedTarget = Literal["mean-colour", "small-colours", "pixels"]  # prediction targets of a patch
COLOUR_LEVELS = 8  # levels per channel (3 bits)
SMALL_PATCH_SIDE = 4  # pixels along a side of the shrunk patch that `small-colours` predicts
MAX_COLOUR_CHANNELS = 4  # maximum number of channels for colours: there are 8 to the power of the channels classes
_CORRUPT = 0x6D7070  # makes the random numbers of corruptions independent of those of augmentation


@dataclass(frozen=True)
class MaskedPatchesConfig(ObjectiveConfig):
    """Options of masked patch prediction; the defaults are the paper's (B.1.2).

    - `share`: share of the patches that are predicted (corrupted patches).
    - `masked`, `swapped`: shares of the corrupted patches whose embedding is replaced by the mask token, or by the
      embedding of another patch; the embeddings of the remaining corrupted patches are unchanged. For a convolutional
      stem, patches of the image are set to 0 or swapped instead.
    - `target`: the mean 3-bit colour of a patch (512 classes for RGB), the 3-bit colours of the patch shrunk to 4 x 4
      pixels, or all its pixels with the squared error.
    """

    name: Literal["masked-patches"] = "masked-patches"
    target: MaskedTarget = "mean-colour"
    share: float = 0.5
    masked: float = 0.8
    swapped: float = 0.1

    def check(self, model: ModelConfig, classes: tuple[str, ...], views: Any) -> None:
        """Raise UsageError for several views, for a model without patch tokens, and for patches that cannot be
        targets."""
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
            problem = f"colour targets support at most {MAX_COLOUR_CHANNELS} channels, got {model.channels}"
            raise UsageError(problem, hint)
        if self.target == "small-colours" and min(model.patch) < SMALL_PATCH_SIDE:
            hint = "use --objective.target mean-colour"
            problem = f"small-colours requires patches of at least {SMALL_PATCH_SIDE} pixels, got {model.patch}"
            raise UsageError(problem, hint)

    def describe_restoration(self) -> str:
        """Describe the reconstructed images for reports."""
        unchanged = 1 - self.masked - self.swapped
        description = (
            f"{self.share:.0%} of the patches are predicted. Of these, {self.masked:.0%} (grey) are hidden from the"
            f" encoder, {self.swapped:.0%} show another patch, {unchanged:.0%} are unchanged."
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

    The input is {"images": (B, C, *image), "source": (B, N) int64, "masked_positions": (B, M) int64, "targets"}.

    - "source": index of the patch whose embedding is used at each position, `MASK_VECTOR` for the mask token.
    - "masked_positions": positions to predict.
    - "targets": colours of these patches, (B, M) or (B, M, S) int64, or pixels (B, M, V) float32.
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
        """Draw the corruptions, and add the corrupted patches of the images as targets."""
        images = batch["images"]
        source, patch_indices = self.draw_corruptions(
            derive_keys(self.setting.seed, _CORRUPT, batch["positions"].numpy()), images.device
        )
        targets = self.targets(images, patch_indices)
        entries = {"images": images, "source": source, "masked_positions": patch_indices, "targets": targets}
        return entries | {name: batch[name] for name in ("positions", "samples")}

    def draw_corruptions(self, keys: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        """Draw the corruptions of images by their keys (B,): the source of each position (B, N), and the positions to
        predict (B, M) int64."""
        config = self.config
        corruption = corrupt_patches(keys, self.model.config.grid, config.share, config.masked, config.swapped)
        predicted = corruption.predicted.reshape(len(keys), -1)
        patch_indices = copy_to_device(from_numpy(predicted.nonzero()[1].reshape(len(keys), -1)), device)
        return copy_to_device(from_numpy(corruption.source.reshape(len(keys), -1)), device), patch_indices

    def targets(self, images: Tensor, patch_indices: Tensor) -> Tensor:
        """Compute the targets of the patches at `patch_indices` (B, M) int64, from normalised images (B, C, *image).

        - Colours: the levels floor(8 x) of the channels, x in 0 .. 1, as digits of a number to the base 8, red first;
          of the patch's mean (B, M), or of the patch shrunk to 4 pixels along each axis (B, M, S) int64.
        - Pixels: (B, M, V) float32.
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
        """Compute the head's outputs for corrupted images: images (B, C, *image), source (B, N), positions to predict
        (B, M) int64 -> (B, M, outputs of the head) float32.

        Images are corrupted before the model, so a convolutional stem does not leak a hidden patch into neighbouring
        tokens. For a plain ViT this is equivalent to corrupting tokens.
        """
        model = self.model
        tokens = model.project(self.corrupt(images, source))
        hidden = (source == MASK_VECTOR).view(*tokens.shape[:-1], 1)
        tokens = torch.where(hidden, self.mask_token.to(tokens.dtype), tokens)
        encoded = model.encode(model.add_positions(tokens), model.make_token_positions(tokens))
        return self.head(gather_tokens(encoded[:, model.config.prefix :], predicted)).float()

    def corrupt(self, images: Tensor, source: Tensor) -> Tensor:
        """Replace each patch of images (B, C, *image) by its source (B, N) int64, or by 0 for `MASK_VECTOR`."""
        shape = self.model.config
        patches = gather_tokens(patchify(images, shape.patch).flatten(1, -2), source.clamp(min=0))
        patches = patches.masked_fill((source == MASK_VECTOR)[..., None], 0.0)
        return unpatchify(torch.unflatten(patches, 1, shape.grid), shape.patch)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the loss, a scalar: the cross-entropy of colours, or the mean squared error of pixels."""
        logits, targets = self.predict(batch["images"], batch["source"], batch["masked_positions"]), batch["targets"]
        if self.config.target == "pixels":
            return {"loss": (logits - targets).square().mean()}
        return {"loss": F.cross_entropy(logits.reshape(-1, self.colours), targets.flatten())}

    @torch.no_grad()
    def reconstruct(self, images: Tensor, keys: np.ndarray) -> Reconstruction:
        """Corrupt images (B, C, *image), normalised, by keys (B,), and predict the corrupted patches."""
        patch, grid = self.model.config.patch, self.model.config.grid
        source, patch_indices = self.draw_corruptions(keys, images.device)
        logits = self.predict(images, source, patch_indices)
        predicted_pixels = logits if self.config.target == "pixels" else self.paint(logits)
        patches, hidden = patchify(images.float(), patch).flatten(1, -2), source == MASK_VECTOR
        restored = patches.scatter(1, patch_indices[..., None].expand_as(predicted_pixels), predicted_pixels)
        visible_image, restored = (
            self.corrupt(images.float(), source),
            unpatchify(torch.unflatten(restored, 1, grid), patch),
        )
        predicted = torch.zeros_like(hidden).scatter(1, patch_indices, True)
        return Reconstruction(visible_image, restored, hidden.unflatten(1, grid), predicted.unflatten(1, grid))

    def paint(self, logits: Tensor) -> Tensor:
        """Convert logits of colours to normalised pixels: (B, M, outputs of the head) -> (B, M, V).

        A patch gets its most likely colour, or S most likely colours, at the middle of their levels.
        """
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
        """Return the floating-point operations of three passes over all patches."""
        shape = self.model.config
        head = int(self.config.share * math.prod(shape.grid)) * shape.width * self.head.out_features
        return 6 * (shape.computed_macs() + head)


def average_pool_patches(patches: Tensor, num_cells: int, axes: int) -> Tensor:
    """Average patches (..., *patch) of `axes` axes over `num_cells` cells along each axis, of sizes as equal as
    possible -> (..., num_cells^axes).

    Cell i of an axis of n pixels covers floor(i n / num_cells) to ceil((i + 1) n / num_cells) - 1.
    """
    for axis in range(-axes, 0):
        length = patches.shape[axis]
        starts, ends = ([f(i * length / num_cells) for i in range(num_cells + 1)] for f in (math.floor, math.ceil))
        means = [patches.narrow(axis, a, b - a).mean(axis) for a, b in zip(starts[:-1], ends[1:], strict=True)]
        patches = torch.stack(means, axis)
    return patches.flatten(-axes)
