"""The figure `reconstruction`: images with hidden patches, and their reconstruction by a self-supervised model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitreous.config import from_builtins
from vitreous.data.keys import derive_keys
from vitreous.data.modalities.base import Preprocess
from vitreous.data.rgb_images import to_rgb_image
from vitreous.errors import UsageError, WeightsError
from vitreous.objectives.base import Objective, ObjectiveSetting
from vitreous.objectives.table import OBJECTIVES
from vitreous.reports.figures.drawing import format_dimensions, make_image_rows
from vitreous.reports.figures.subject import MAX_SHOWN_IMAGES, FigureContext, FigureResult, InputImage
from vitreous.weights.adopt import open_objective_state, open_weights
from vitreous.weights.objective_parts import load_into_objective

RESTORING_RECIPES_HINT = "mae and masked-patches restore images"

HIDDEN_PATCH_GREY = 128  # grey value of patches hidden from the encoder
PANEL_TITLES = ("image", "encoder input", "reconstruction")


def load_restoring_objective(source: str | os.PathLike[str]) -> Objective:
    """Load the objective, such as MAE, with which a run, a bundle or external MAE weights reconstruct images.

    It is float32 and in evaluation mode. Raises UsageError for weights without a decoder, and for an objective that
    does not reconstruct images; WeightsError for damaged or mismatched modules.
    """
    objective_state = open_objective_state(source)
    if objective_state is None:
        hint = f"use a run, its bundle, or MAE weights with a decoder; of vitreous's recipes {RESTORING_RECIPES_HINT}"
        raise UsageError(f"{source} has no decoder, which image reconstruction needs", hint)
    name = objective_state.config.get("name", "")
    if name not in OBJECTIVES:
        raise WeightsError(
            f"{source} was trained with {name!r}, which this version does not support", "install a newer vitreous"
        )
    config = from_builtins(OBJECTIVES[name], objective_state.config)
    if not config.describe_restoration():
        hint = f"{RESTORING_RECIPES_HINT}: vitreous train DATA --recipe mae"
        raise UsageError(f"{source} was trained with {name}, which does not reconstruct images", hint)
    bundle = open_weights(source).build_bundle()
    setting = ObjectiveSetting(normalisation=(bundle.preprocess.mean, bundle.preprocess.std))
    with torch.random.fork_rng(devices=[]):
        objective = config.build(bundle.model, setting)
    if mismatched := load_into_objective(objective, objective_state.config, objective_state).skipped:
        raise WeightsError(
            f"{source}: {', '.join(mismatched)} does not fit the model", "restore the bundle from a copy"
        )
    return objective.eval()


class RestoredImage(NamedTuple):
    """The encoder's input and the reconstruction of an image, both RGB; of a clip, four frames.

    `predicted` (*grid) bool marks the patches that the objective predicts; the others are those of the image.
    """

    encoder_input: Image.Image
    restored: Image.Image
    predicted: np.ndarray


def make_reconstruction(context: FigureContext) -> list[FigureResult]:
    """Draw images, their encoder input with hidden patches, and their reconstruction.

    Raises UsageError for a model without a decoder, and if --image-size is not the image size of the run.
    """
    objective = load_restoring_objective(context.run).to(context.device)
    config = objective.deployed_model().config
    if context.preprocess.image != config.image:
        requested_size = format_dimensions(context.preprocess.image)
        raise UsageError(
            f"cannot reconstruct images of {requested_size} pixels",
            f"leave --image-size out; the model reconstructs {format_dimensions(config.image)} pixels",
        )
    input_images = context.take_images(MAX_SHOWN_IMAGES)
    results = restore_images(objective, context.preprocess, input_images, context.options.seed)
    figure, axes = make_image_rows(context, input_images, PANEL_TITLES)
    for row, result in zip(axes, results, strict=True):
        for panel, image in zip(row[1:], (result.encoder_input, result.restored), strict=True):
            panel.imshow(np.asarray(image), interpolation="nearest")
    arrays = {
        "seen": np.stack([np.asarray(item.encoder_input) for item in results]),
        "restored": np.stack([np.asarray(item.restored) for item in results]),
        "image": np.stack([np.asarray(item.rgb_image) for item in input_images]),
        "predicted": np.stack([item.predicted for item in results]),
        "images": np.array([item.name for item in input_images]),
    }
    return [
        FigureResult(
            "reconstruction", "Reconstructions", objective.config.describe_restoration(), figure, arrays=arrays
        )
    ]


def restore_images(
    objective: Objective, preprocess: Preprocess, input_images: Sequence[InputImage], seed: int = 0
) -> list[RestoredImage]:
    """Hide random patches of images, chosen by the seed, and reconstruct them. Images are processed one at a time."""
    images_restored, device = [], next(objective.parameters()).device
    for index, input_image in enumerate(input_images):
        images = preprocess.normalise(input_image.pixels[None].to(device)).float()
        with torch.no_grad():
            result = objective.reconstruct(images, derive_keys(seed, np.array([index])))
        hidden = to_rgb_image(expand_patch_mask(result.hidden[0], input_image.pixels.shape[1:]).to(torch.uint8)[None])
        seen, restored = (
            to_shown_image(output[0], preprocess, input_image) for output in (result.encoder_input, result.restored)
        )
        masked_input = np.where(np.asarray(hidden) > 0, np.uint8(HIDDEN_PATCH_GREY), np.asarray(seen))
        images_restored.append(
            RestoredImage(Image.fromarray(masked_input), restored, result.predicted[0].cpu().numpy())
        )
    return images_restored


def expand_patch_mask(patches: Tensor, image: Sequence[int]) -> Tensor:
    """Expand a patch mask, (h, w) or (t, h, w) bool, to pixels, (H, W) or (T, H, W) bool; `image` is the size in
    pixels."""
    result = patches.cpu()
    for axis, (length, count) in enumerate(zip(image, patches.shape, strict=True)):
        result = result.repeat_interleave(length // count, axis)
    return result


def to_shown_image(image: Tensor, preprocess: Preprocess, input_image: InputImage) -> Image.Image:
    """Convert normalised pixels (C, *image) to an RGB image; pixels that are not uint8 are scaled by the range of
    `input_image`."""
    values = preprocess.denormalise(image[None].cpu())[0]
    if input_image.pixels.dtype == torch.uint8:
        return to_rgb_image(values.round().clamp(0, 255).to(torch.uint8))
    return to_rgb_image(values, input_image.pixels)
