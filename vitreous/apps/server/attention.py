"""Inspection of a served model and of one image: attention, position embeddings, patch filters, and the visible crop.

Inspection runs in float32, uncompiled, while a frozen copy of the model serves predictions. Shapes: L blocks, h heads,
P prefix tokens, N patches on a (rows, columns) grid, or on a (slots, rows, columns) grid for clips.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from vitreous.data.annotations.drawing import encode_png
from vitreous.data.modalities.base import Preprocess
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig, ViTConfig

if TYPE_CHECKING:
    from vitreous.models.zoo import Model
    from vitreous.weights.bundle import Bundle

HOOK_LOCK = Lock()  # a hook runs in every forward pass of the model, so inspections must not run concurrently
MAX_POSITIONS = 1024  # maximum positions whose similarities are returned; with more, a response exceeds 8 MB
MIN_PNG_SIZE = 448  # minimum pixels of the longer side of a PNG
SIGNIFICANT_DIGITS = 6  # significant digits of an attention weight in JSON

HEAD_FUSIONS = ("mean", "max", "min")


@dataclass(frozen=True)
class AttentionRequest:
    """The attention map that a request selects: kind, layer, head and query token.

    `raw` is the attention of the heads of a block. `rollout` combines all blocks up to a block; `head` is then the
    fusion of the heads. `layer` counts from 0. `query` is the (row, column) of a patch, for clips (slot, row, column).
    None is the output position: the class token, or the pooled patches.
    """

    kind: Literal["raw", "rollout"] = "rollout"
    layer: int | Literal["all"] = 0
    head: int | Literal["mean", "max", "min", "all"] = "mean"
    query: tuple[int, ...] | None = None

    @staticmethod
    def parse(parameters: Mapping[str, str], model: Model, preprocess: Preprocess | None = None) -> AttentionRequest:
        """Parse `kind`, `layer`, `head` and `query` of a request; other parameters are ignored. With the model's
        `preprocess`, images may have more patches along an axis than the model's grid; with None they may not.

        Raises UsageError with the parameter, its value and the allowed values, and for models without such attention.
        """
        config = require_attention_config(model.config)
        kind, head = parameters.get("kind", "rollout"), parameters.get("head", "mean")
        if kind not in ("raw", "rollout"):
            raise make_parameter_error("kind", kind, "raw or rollout")
        if kind == "rollout":
            head = parse_number("head", head, 0, "mean, max or min", HEAD_FUSIONS)
        else:
            allowed = f"an index from 0 to {config.heads - 1}, mean, max, min or all"
            head = parse_number("head", head, config.heads, allowed, (*HEAD_FUSIONS, "all"))
        layer = parameters.get("layer", str(config.depth - 1))
        layer = parse_number("layer", layer, config.depth, f"a block from 0 to {config.depth - 1}, or all", ("all",))
        query, position = parameters.get("query", "prediction"), None
        if query != "prediction":
            max_grid = preprocess.longest_grid(config.grid) if preprocess else config.grid
            axes = ("SLOT", "ROW", "COLUMN")[-len(config.grid) :]
            first_position, last_position = (
                ",".join(map(str, ends)) for ends in ([0] * len(axes), [end - 1 for end in max_grid])
            )
            allowed = f"prediction, or {','.join(axes)} of a patch, from {first_position} to {last_position}"
            coordinates = query.split(",")
            if len(coordinates) != len(axes):
                raise make_parameter_error("query", query, allowed)
            position = tuple(
                parse_number("query", number, end, allowed, full_value=query)
                for number, end in zip(coordinates, max_grid, strict=True)
            )
        return AttentionRequest(kind, layer, head, position)


def parse_number(
    name: str, text: str, end: int, allowed: str, allowed_words: tuple[str, ...] = (), full_value: str = ""
) -> Any:
    """Parse an integer from 0 to below `end`, or one of `allowed_words`. Raises UsageError with the value `full_value`
    (by default `text`) and the `allowed` values."""
    if text in allowed_words:
        return text
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < end):
        raise make_parameter_error(name, full_value or text, allowed)
    return int(text)


def make_parameter_error(name: str, value: str, allowed: str) -> UsageError:
    """Make the error for an invalid parameter of a request."""
    return UsageError(f"invalid {name}={value[:40]}", f"set {name} to {allowed}")


def require_attention_config(config: ModelConfig) -> ViTConfig:
    """Return the config of a model with global attention in every block. Raises UsageError for other models."""
    if not config.has_attention:
        raise UsageError("a BiT ResNet has no attention over tokens", "request GET /v1/filters instead")
    if not config.sees_whole_image:
        message = "blocks of this model attend within rows, columns, windows or time slots, not globally"
        raise UsageError(message, "request GET /v1/filters instead")
    return cast(ViTConfig, config)


def detect_inspections(bundle: Bundle) -> dict[str, bool]:
    """Return whether the model supports each inspection: `attention`, `positions` (their similarity) and patch
    `filters`."""
    config = bundle.model.config
    try:
        has_attention = bool(require_attention_config(config))
    except UsageError:
        has_attention = False
    has_positions = (
        config.positions.kind != "none" and len(config.grid) == 2 and config.grid[0] * config.grid[1] <= MAX_POSITIONS
    )
    return {
        "attention": has_attention,
        "positions": has_positions,
        "filters": isinstance(config.image, tuple) and len(config.image) == 2,
    }


def attention_to_json(bundle: Bundle, pixels: np.ndarray, request: AttentionRequest) -> dict[str, Any]:
    """Compute the requested attention of (C, *image) pixels from `reading.read_model_input` as a JSON document.

    `weights` is [h][w], for clips [t][h][w], with a leading axis for all heads if `head` is all, and before it one for
    all layers if `layer` is all. `prefix_weights` is [P], with the same leading axes. The weights and prefix weights of
    a token sum to one, except for the fusions `max` and `min`. Raises UsageError for a model without attention.
    """
    selected, grid, prefix = compute_attention_weights(bundle, pixels, request)
    config = require_attention_config(bundle.model.config)
    return {
        "kind": request.kind,
        "layer": request.layer,
        "head": request.head,
        "query": "prediction" if request.query is None else list(request.query),
        "grid": list(grid),
        "layers": config.depth,
        "heads": config.heads,
        "prefix_tokens": prefix,
        "weights": round_significant(selected[..., prefix:].reshape(*selected.shape[:-1], *grid)).tolist(),
        "prefix_weights": round_significant(selected[..., :prefix]).tolist(),
    }


def compute_attention_weights(
    bundle: Bundle, pixels: np.ndarray, request: AttentionRequest
) -> tuple[np.ndarray, tuple[int, ...], int]:
    """Compute the requested attention of (C, *image) pixels. Return weights (..., P + N) float32, with leading axes for
    all layers and all heads if requested, the grid, and P. Raises UsageError for a query outside of the grid."""
    import torch

    from vitreous.inspection.attention import compute_attention_maps as raw
    from vitreous.inspection.rollout import RolloutOptions, compute_rollout

    model, config = bundle.model, require_attention_config(bundle.model.config)
    grid = tuple(i // p for i, p in zip(pixels.shape[1:], config.patch, strict=True))
    queries = None
    if request.query is not None:
        if any(position >= length for position, length in zip(request.query, grid, strict=True)):
            raise make_parameter_error(
                "query", ",".join(map(str, request.query)), f"a position on the grid {grid} of this image"
            )
        queries = torch.zeros(config.prefix + math.prod(grid))
        queries[config.prefix + int(np.ravel_multi_index(request.query, grid))] = 1
    device = next(model.parameters()).device
    images = bundle.preprocess.normalise(torch.from_numpy(pixels)[None].to(device))
    layers = range(config.depth) if request.layer == "all" else [request.layer]
    with HOOK_LOCK:
        if request.kind == "rollout":
            rollout = compute_rollout(model, images, RolloutOptions(fusion=request.head), queries).joint[0]  # type: ignore[arg-type]
            selected = rollout[list(layers)]
        else:
            weights = raw(model, images, layers, queries)
            selected = torch.stack([weights[layer][0] for layer in layers])  # (L, h, T)
            if isinstance(request.head, int):
                selected = selected[:, request.head]
            elif request.head != "all":
                selected = {"mean": selected.mean, "max": selected.amax, "min": selected.amin}[request.head](1)
    return (selected if request.layer == "all" else selected[0]).float().cpu().numpy(), grid, config.prefix


def round_significant(values: np.ndarray) -> np.ndarray:
    """Round (n, ...) numbers to `SIGNIFICANT_DIGITS` significant digits, float64, for short JSON. Numbers below 1e-16
    keep fewer digits."""
    values = values.astype(np.float64)
    size = np.floor(np.log10(np.maximum(np.abs(values), 1e-16)))
    scale = np.array([float(10**k) for k in range(23)])[np.clip(SIGNIFICANT_DIGITS - 1 - size, 0, 22).astype(int)]
    return np.rint(values * scale) / scale


def render_attention_image(bundle: Bundle, pixels: np.ndarray, request: AttentionRequest) -> bytes:
    """Render the requested attention map as an overlay on the model's input (C, *image) (arXiv:2010.11929, Fig. 6): a
    PNG, or an animated GIF for clips. Raises UsageError if several maps are requested."""
    import torch

    from vitreous.data.rgb_images import to_rgb_frames
    from vitreous.reports.pages.thumbnails import encode_gif, enlarge_pixels, overlay_heat_map, scale_attention_map

    if "all" in (request.layer, request.head):
        name = "layer" if request.layer == "all" else "head"
        raise make_parameter_error(name, "all", "a single index, or use format=json, which returns all")
    selected, grid, prefix = compute_attention_weights(bundle, pixels, request)
    weights = selected[prefix:].reshape(-1, *grid[-2:])
    weights = scale_attention_map(weights)
    frames = [enlarge_pixels(frame, MIN_PNG_SIZE) for frame in to_rgb_frames(torch.from_numpy(pixels))]
    maps = np.repeat(weights, len(frames) // len(weights), 0)
    overlays = [overlay_heat_map(frame, values) for frame, values in zip(frames, maps, strict=True)]
    return encode_gif(overlays) if len(grid) == 3 else encode_png(overlays[0])


def render_clip_frames(pixels: np.ndarray) -> bytes:
    """Render the (C, T, H, W) model input of a clip as a PNG with the frames stacked vertically."""
    import torch
    from PIL import Image

    from vitreous.data.rgb_images import to_rgb_frames

    frames = to_rgb_frames(torch.from_numpy(pixels))
    return encode_png(Image.fromarray(np.concatenate([np.asarray(frame) for frame in frames])))


def compute_position_similarity(bundle: Bundle) -> dict[str, Any] | None:
    """Return the cosine similarities of all position embeddings as a JSON document (arXiv:2010.11929, Fig. 7 centre).
    None if the model does not support it.

    `similarity` is [N][N], with positions in row-major order. `range` is its minimum and maximum over distinct
    positions, for a colour scale. If a model adds positions before each block, those of the first block are used.
    """
    from vitreous.inspection.positions import compute_position_cosines, get_position_embeddings, similarity_range

    if not detect_inspections(bundle)["positions"]:
        return None
    config = bundle.model.config
    grid = tuple(i // p for i, p in zip(bundle.preprocess.image, config.patch, strict=True))
    table = next(iter(get_position_embeddings(bundle.model, grid).values()))
    similarities = compute_position_cosines(table).reshape(grid[0] * grid[1], -1)
    value_range = [round(end, 4) for end in similarity_range(similarities)]
    rounded = (np.rint(similarities.double().numpy() * 1e4) / 1e4).tolist()
    return {"grid": list(grid), "kind": config.positions.kind, "range": value_range, "similarity": rounded}


def render_patch_filters(bundle: Bundle) -> bytes | None:
    """Render the principal components of the patch filters as a PNG (arXiv:2010.11929, Fig. 7 left). None if the model
    does not support it."""
    from PIL import Image

    from vitreous.inspection.features import compute_filter_components as components
    from vitreous.reports.figures.features import arrange_filters, filters_to_images

    if not detect_inspections(bundle)["filters"]:
        return None
    grid_image = arrange_filters(filters_to_images(components(bundle.model).components.numpy())[0])
    return encode_png(Image.fromarray((grid_image * 255).round().astype(np.uint8)))


def compute_visible_box(preprocess: Preprocess, width: int, height: int) -> list[float]:
    """Return the crop of an upright image that the model sees: left, top, right, bottom as fractions of width and
    height."""
    return [round(edge, 6) for edge in preprocess.visible_box(width, height)]
