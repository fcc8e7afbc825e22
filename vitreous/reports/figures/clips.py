"""The figure of clips: attention over time, as a row of frames and as an animation."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitreous.data.rgb_images import to_rgb_frames
from vitreous.inference.image_grid import arrange_image_grid
from vitreous.inspection.attention import average_query_attention, get_readout_weights
from vitreous.inspection.hooks import AttentionCall, visit_attention_calls
from vitreous.inspection.rollout import RolloutOptions, compute_rollout
from vitreous.reports.figures.attention import describe_readout
from vitreous.reports.figures.drawing import (
    DEFAULT_IMAGE_COUNT,
    add_colour_bar,
    count_attention_blocks,
    draw_heat_map,
    label_panel,
    make_panels,
)
from vitreous.reports.figures.subject import FigureContext, FigureResult, InputImage
from vitreous.reports.pages.thumbnails import encode_gif, enlarge_pixels, overlay_heat_map

MAX_SHOWN_SLOTS = 8  # slots shown side by side
MIN_FRAME_SIDE = 224  # minimum size in pixels of a frame of the animation


class ClipMaps(NamedTuple):
    """(T, h, w) nonnegative weights of the patches of a clip's T slots, with their description for captions."""

    weights: Tensor
    caption: str


def make_clips(scene: FigureContext) -> list[FigureResult]:
    """Draw attention over time in each clip: a row of frames with overlaid maps, and an animation of the clip next to
    its maps."""
    pictures = scene.take_images(DEFAULT_IMAGE_COUNT)
    maps = [compute_clip_maps(scene, one) for one in pictures]
    weights = torch.stack([one.weights for one in maps])
    slots = weights.shape[1]
    some = np.unique(np.linspace(0, slots - 1, min(MAX_SHOWN_SLOTS, slots)).round().astype(int))
    figure, axes = make_panels(scene, len(pictures), len(some), [f"slot {slot + 1}" for slot in some])
    frames = [to_rgb_frames(one.pixels) for one in pictures]
    for places, one, own, values in zip(axes, pictures, frames, weights.numpy(), strict=True):
        most = max(float(values.max()), 1e-30)
        for place, slot in zip(places, some, strict=True):
            frame = own[slot * (len(own) // slots)]
            image = draw_heat_map(place, InputImage(one.name, frame, one.pixels), values[slot], most)
        label_panel(places[0], one.name)
    add_colour_bar(figure, image, axes, "attention")
    caption = (
        f"{maps[0].caption} A slot is the {len(frames[0]) // slots} frames of a patch; its first frame is shown. "
        "Maps are scaled to the maximum of the clip. The animation shows every frame."
    )
    numbers = {"maps": weights.numpy(), "images": np.array([one.name for one in pictures])}
    animation = make_attention_gif(frames, weights.numpy())
    return [FigureResult("clips", "Attention over time", caption, figure, numbers=numbers, animation=animation)]


def compute_clip_maps(scene: FigureContext, picture: InputImage) -> ClipMaps:
    """Return the rollout of a clip through all blocks if each attends over the whole clip; else the attention of the
    last block that attends within slots."""
    clip = scene.input(picture.pixels[None])
    options, config = scene.options, scene.model.config
    if config.sees_whole_image:
        mixing = RolloutOptions(options.residual, options.fusion, options.discard)
        maps = compute_rollout(scene.model, clip, mixing).maps[0, -1]
        words = (
            f"Attention rollout through all {count_attention_blocks(scene)} blocks, computed "
            f"from {describe_readout(scene)} (arXiv:2005.00928)."
        )
        return ClipMaps(maps.float().cpu(), words)
    looks: dict[int, AttentionCall] = {}

    def keep(look: AttentionCall) -> None:
        if look.span == "space":
            looks[look.layer] = look

    visit_attention_calls(scene.model, clip, keep)
    layer = max(looks)
    look = looks[layer]
    slots = look.x.flatten(0, 1)  # (T, S, D) of one clip
    rows = average_query_attention(
        replace(look, x=slots), get_readout_weights(scene.model, look).expand(len(slots), -1)
    ).mean(1)
    words = (
        f"Attention within each slot of time in block {layer + 1} of {count_attention_blocks(scene)}, the mean "
        f"over its heads, computed "
        f"from {describe_readout(scene)} of that slot; the weighting between slots is not included."
    )
    return ClipMaps(rows[:, look.prefix :].unflatten(-1, look.grid[1:]).float().cpu(), words)


def make_attention_gif(frames: list[list], weights: np.ndarray) -> bytes:
    """Encode n clips of T frames with (n, slots, h, w) weights as a GIF: one row per clip, the frame and its overlaid
    map."""
    whole = weights / np.maximum(weights.max((1, 2, 3), keepdims=True), 1e-30)
    slots, moments = weights.shape[1], []
    for moment in range(len(frames[0])):
        shown = []
        for own, values in zip(frames, whole, strict=True):
            frame = enlarge_pixels(own[moment], MIN_FRAME_SIDE)
            shown += [frame, overlay_heat_map(frame, values[moment * slots // len(own)])]
        moments.append(arrange_image_grid(shown, 2))
    return encode_gif(moments)
