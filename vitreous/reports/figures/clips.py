"""The figure of clips: what is attended over time, as a row of frames and as an animated picture."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitreous.data.rgb_images import rgb_frames
from vitreous.inference.image_grid import grid_of
from vitreous.inspection.attention import row, start
from vitreous.inspection.hooks import AttentionCall, watch
from vitreous.inspection.rollout import Mixing, rollout
from vitreous.reports.figures.attention import reader
from vitreous.reports.figures.drawing import PICTURES, depth_of, heat, label_panel, panels, scale
from vitreous.reports.figures.subject import FigureResult, Picture, Scene
from vitreous.reports.pages.thumbnails import enlarge, gif_of, heat_map

SLOTS = 8  # shown side by side
SIDE = 224  # pixels that a frame of the animated picture has at least


class ClipMaps(NamedTuple):
    """(T, h, w) nonnegative weights of the patches of a clip's T slots, and what they are, for captions."""

    weights: Tensor
    caption: str


def make_clips(scene: Scene) -> list[FigureResult]:
    """Draw what is attended over time in each clip: a row of frames with maps over them, and the clip beside its maps,
    animated."""
    pictures = scene.some(PICTURES)
    maps = [maps_of(scene, one) for one in pictures]
    weights = torch.stack([one.weights for one in maps])
    slots = weights.shape[1]
    some = np.unique(np.linspace(0, slots - 1, min(SLOTS, slots)).round().astype(int))
    figure, axes = panels(scene, len(pictures), len(some), [f"slot {slot + 1}" for slot in some])
    frames = [rgb_frames(one.pixels) for one in pictures]
    for places, one, own, values in zip(axes, pictures, frames, weights.numpy(), strict=True):
        most = max(float(values.max()), 1e-30)
        for place, slot in zip(places, some, strict=True):
            frame = own[slot * (len(own) // slots)]
            image = heat(place, Picture(one.name, frame, one.pixels), values[slot], most)
        label_panel(places[0], one.name)
    scale(figure, image, axes, "attention")
    caption = (
        f"{maps[0].caption} A slot is the {len(frames[0]) // slots} frames of a patch, of which the first is shown; "
        "maps of a clip are relative to its largest value. The animation shows every frame."
    )
    numbers = {"maps": weights.numpy(), "images": np.array([one.name for one in pictures])}
    animation = animate(frames, weights.numpy())
    return [FigureResult("clips", "Attention over time", caption, figure, numbers=numbers, animation=animation)]


def maps_of(scene: Scene, picture: Picture) -> ClipMaps:
    """The rollout of a clip through all blocks where each sees the whole clip; else what the last block that sees slots
    for themselves attends in each."""
    clip = scene.input(picture.pixels[None])
    options, config = scene.options, scene.model.config
    if config.sees_whole_image:
        mixing = Mixing(options.residual, options.fusion, options.discard)
        maps = rollout(scene.model, clip, mixing).maps[0, -1]
        words = f"Attention rollout through all {depth_of(scene)} blocks, seen from {reader(scene)} (arXiv:2005.00928)."
        return ClipMaps(maps.float().cpu(), words)
    looks: dict[int, AttentionCall] = {}

    def keep(look: AttentionCall) -> None:
        if look.span == "space":
            looks[look.layer] = look

    watch(scene.model, clip, keep)
    layer = max(looks)
    look = looks[layer]
    slots = look.x.flatten(0, 1)  # (T, S, D) of one clip
    rows = row(replace(look, x=slots), start(scene.model, look).expand(len(slots), -1)).mean(1)
    words = (
        f"Attention within each slot of time in block {layer + 1} of {depth_of(scene)}, the mean over its heads, seen "
        f"from {reader(scene)} of that slot; how slots are weighed against each other is not in it."
    )
    return ClipMaps(rows[:, look.prefix :].unflatten(-1, look.grid[1:]).float().cpu(), words)


def animate(frames: list[list], weights: np.ndarray) -> bytes:
    """T frames of each of n clips, and (n, slots, h, w) weights -> a GIF with a row for each clip: the frame, and its
    map over it."""
    whole = weights / np.maximum(weights.max((1, 2, 3), keepdims=True), 1e-30)
    slots, moments = weights.shape[1], []
    for moment in range(len(frames[0])):
        shown = []
        for own, values in zip(frames, whole, strict=True):
            frame = enlarge(own[moment], SIDE)
            shown += [frame, heat_map(frame, values[moment * slots // len(own)])]
        moments.append(grid_of(shown, 2))
    return gif_of(moments)
