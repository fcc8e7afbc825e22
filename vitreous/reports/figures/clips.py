"""The figure of clips: attention over time, as a row of frames and as an animation.

A slot is the group of consecutive frames that one patch covers. A clip has T slots of h x w patches.
"""

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

MAX_SHOWN_SLOTS = 8  # most slots shown side by side
MIN_FRAME_SIDE = 224  # minimum size in pixels of a frame of the animation


class ClipMaps(NamedTuple):
    """The attention to each patch of a clip, `weights` (T, h, w) nonnegative, and its description for captions."""

    weights: Tensor
    caption: str


def make_clips(context: FigureContext) -> list[FigureResult]:
    """Draw attention over time in each clip: a row of frames with overlaid maps, and an animation of the clip next to
    its maps."""
    input_images = context.take_images(DEFAULT_IMAGE_COUNT)
    maps = [compute_clip_maps(context, clip) for clip in input_images]
    weights = torch.stack([clip.weights for clip in maps])
    slots = weights.shape[1]
    shown_slots = np.unique(np.linspace(0, slots - 1, min(MAX_SHOWN_SLOTS, slots)).round().astype(int))
    figure, axes = make_panels(
        context, len(input_images), len(shown_slots), [f"slot {slot + 1}" for slot in shown_slots]
    )
    frames = [to_rgb_frames(clip.pixels) for clip in input_images]
    for panels, clip, clip_frames, values in zip(axes, input_images, frames, weights.numpy(), strict=True):
        max_weight = max(float(values.max()), 1e-30)
        for panel, slot in zip(panels, shown_slots, strict=True):
            frame = clip_frames[slot * (len(clip_frames) // slots)]
            mappable = draw_heat_map(panel, InputImage(clip.name, frame, clip.pixels), values[slot], max_weight)
        label_panel(panels[0], clip.name)
    add_colour_bar(figure, mappable, axes, "attention")
    caption = (
        f"{maps[0].caption} A slot is the {len(frames[0]) // slots} frames of a patch; its first frame is shown. "
        "Maps are scaled to the maximum of the clip. The animation shows every frame."
    )
    arrays = {"maps": weights.numpy(), "images": np.array([clip.name for clip in input_images])}
    animation = make_attention_gif(frames, weights.numpy())
    return [FigureResult("clips", "Attention over time", caption, figure, arrays=arrays, animation=animation)]


def compute_clip_maps(context: FigureContext, input_image: InputImage) -> ClipMaps:
    """Compute the attention to each patch of a clip, a volume or a signal.

    If every block attends over the whole clip, this is attention rollout through all blocks; otherwise the attention of
    the last block that attends within slots.
    """
    clip = context.to_model_input(input_image.pixels[None])
    options, config = context.options, context.model.config
    if config.sees_whole_image:
        mixing = RolloutOptions(options.residual, options.fusion, options.discard)
        maps = compute_rollout(context.model, clip, mixing).maps[0, -1]
        caption = (
            f"Attention rollout through all {count_attention_blocks(context)} blocks, computed "
            f"from {describe_readout(context)} (arXiv:2005.00928)."
        )
        return ClipMaps(maps.float().cpu(), caption)
    calls: dict[int, AttentionCall] = {}

    def record_space_call(call: AttentionCall) -> None:
        if call.span == "space":
            calls[call.layer] = call

    visit_attention_calls(context.model, clip, record_space_call)
    layer = max(calls)
    call = calls[layer]
    slots = call.x.flatten(0, 1)  # (T, S, D) of one clip
    attention = average_query_attention(
        replace(call, x=slots), get_readout_weights(context.model, call).expand(len(slots), -1)
    ).mean(1)
    caption = (
        f"Attention within each slot of time in block {layer + 1} of {count_attention_blocks(context)}, the mean "
        f"over its heads, computed "
        f"from {describe_readout(context)} of that slot; the weighting between slots is not included."
    )
    return ClipMaps(attention[:, call.prefix :].unflatten(-1, call.grid[1:]).float().cpu(), caption)


def make_attention_gif(frames: list[list], weights: np.ndarray) -> bytes:
    """Encode n clips with their attention `weights` (n, slots, h, w) as a GIF: one row per clip, with the frame and the
    frame under its map. `frames` has a list of RGB images per clip."""
    scaled = weights / np.maximum(weights.max((1, 2, 3), keepdims=True), 1e-30)
    slots, gif_frames = weights.shape[1], []
    for time_index in range(len(frames[0])):
        tiles = []
        for clip_frames, values in zip(frames, scaled, strict=True):
            frame = enlarge_pixels(clip_frames[time_index], MIN_FRAME_SIDE)
            tiles += [frame, overlay_heat_map(frame, values[time_index * slots // len(clip_frames)])]
        gif_frames.append(arrange_image_grid(tiles, 2))
    return encode_gif(gif_frames)
