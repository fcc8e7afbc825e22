"""The figure of hidden patches that a model restores, as it was taught to without labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitreous.config import from_plain
from vitreous.data.keys import key
from vitreous.data.modalities.base import Preprocess
from vitreous.data.rgb_images import rgb_image
from vitreous.errors import UsageError, WeightsError
from vitreous.objectives.base import Objective, Setting
from vitreous.objectives.table import OBJECTIVES
from vitreous.reports.figures.drawing import picture_rows, times
from vitreous.reports.figures.subject import SEEN, FigureResult, Picture, Scene
from vitreous.weights.adopt import open_weights, parts_of
from vitreous.weights.objective_parts import adopt_parts

ABLE = "mae and masked-patches restore images"

GREY = 128  # of patches that the encoder does not see
HEADS = ("image", "what is seen", "restored")


def load_objective(source: str | os.PathLike[str]) -> Objective:
    """Return the objective of a run, a bundle or others' MAE that restores images, in float32, in evaluation mode.

    Raises UsageError for weights without the parts of an objective, and for an objective that restores nothing;
    WeightsError where parts are damaged or of another model.
    """
    parts = parts_of(source)
    if parts is None:
        hint = f"name a run, its bundle, or MAE's weights with their decoder; of vitreous's recipes {ABLE}"
        raise UsageError(f"{source} has no decoder to restore images with", hint)
    name = parts.config.get("name", "")
    if name not in OBJECTIVES:
        raise WeightsError(
            f"{source} learned by {name!r}, which this version does not know", "install a newer vitreous"
        )
    config = from_plain(OBJECTIVES[name], parts.config)
    if not config.restoration():
        hint = f"{ABLE}: vitreous train DATA --recipe mae"
        raise UsageError(f"{source} learned by {name}, which restores no image", hint)
    bundle = open_weights(source).bundle()
    setting = Setting(normalisation=(bundle.preprocess.mean, bundle.preprocess.std))
    with torch.random.fork_rng(devices=[]):
        objective = config.build(bundle.model, setting)
    if left := adopt_parts(objective, parts.config, parts).left:
        raise WeightsError(f"{source}: {', '.join(left)} does not fit the model", "restore the bundle from a copy")
    return objective.eval()


class Restored(NamedTuple):
    """An image as the encoder sees it and as it is restored, RGB, of a clip four frames; (*grid) bool: the patches to
    restore."""

    seen: Image.Image
    restored: Image.Image
    predicted: np.ndarray


def make_reconstruction(scene: Scene) -> list[FigureResult]:
    """Draw images, what the encoder sees of them when patches are hidden, and what is restored of these.

    Raises UsageError for a model without a decoder, and at another size than that of the run.
    """
    objective = load_objective(scene.run).to(scene.device)
    config = objective.deployed().config
    if scene.preprocess.image != config.image:
        asked = times(scene.preprocess.image)
        raise UsageError(
            f"images of {asked} pixels cannot be restored", f"leave out --image-size: {times(config.image)}"
        )
    pictures = scene.some(SEEN)
    results = restore(objective, scene.preprocess, pictures, scene.options.seed)
    figure, axes = picture_rows(scene, pictures, HEADS)
    for row, result in zip(axes, results, strict=True):
        for place, image in zip(row[1:], (result.seen, result.restored), strict=True):
            place.imshow(np.asarray(image), interpolation="nearest")
    numbers = {
        "seen": np.stack([np.asarray(one.seen) for one in results]),
        "restored": np.stack([np.asarray(one.restored) for one in results]),
        "image": np.stack([np.asarray(one.shown) for one in pictures]),
        "predicted": np.stack([one.predicted for one in results]),
        "images": np.array([one.name for one in pictures]),
    }
    return [FigureResult("reconstruction", "Restored images", objective.config.restoration(), figure, numbers=numbers)]


def restore(objective: Objective, preprocess: Preprocess, pictures: Sequence[Picture], seed: int = 0) -> list[Restored]:
    """Hide patches of images, drawn by the seed, and restore them, one image at a time."""
    images_restored, device = [], next(objective.parameters()).device
    for number, picture in enumerate(pictures):
        images = preprocess.normalise(picture.pixels[None].to(device)).float()
        with torch.no_grad():
            result = objective.reconstruct(images, key(seed, np.array([number])))
        hidden = rgb_image(enlarge(result.hidden[0], picture.pixels.shape[1:]).to(torch.uint8)[None])
        seen, restored = (pixels_of(part[0], preprocess, picture) for part in (result.seen, result.restored))
        shown = np.where(np.asarray(hidden) > 0, np.uint8(GREY), np.asarray(seen))
        images_restored.append(Restored(Image.fromarray(shown), restored, result.predicted[0].cpu().numpy()))
    return images_restored


def enlarge(patches: Tensor, image: Sequence[int]) -> Tensor:
    """(h, w) or (t, h, w) bool, of patches -> (H, W) or (T, H, W) bool, of the pixels of an image."""
    result = patches.cpu()
    for axis, (length, count) in enumerate(zip(image, patches.shape, strict=True)):
        result = result.repeat_interleave(length // count, axis)
    return result


def pixels_of(image: Tensor, preprocess: Preprocess, picture: Picture) -> Image.Image:
    """(C, *image) normalised -> RGB, with colours as the picture is shown in."""
    values = preprocess.denormalise(image[None].cpu())[0]
    if picture.pixels.dtype == torch.uint8:
        return rgb_image(values.round().clamp(0, 255).to(torch.uint8))
    return rgb_image(values, picture.pixels)
