"""Image cards of an evaluation, such as the highest-loss images, with attention, for a page."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.data.layouts.video import open_sample
from vitreous.data.rgb_images import to_rgb_image
from vitreous.data.split import Split
from vitreous.errors import DataError, UsageError
from vitreous.reports.pages.thumbnails import (
    MIN_MAP_SIDE,
    MIN_SMOOTH_SIDE,
    encode_data_uri,
    enlarge_pixels,
    overlay_heat_map,
    scale_attention_map,
    shrink_image,
)
from vitreous.weights.bundle import Bundle

MAX_CARD_IMAGES = 8  # images per list


def build_image_cards(bundle: Bundle, split: Split, outputs: np.ndarray, bad: frozenset[int]) -> dict[str, Any]:
    """Return cards of the images that the task selects from outputs (n, K), such as the worst ones: label, prediction,
    and the image as a data URI."""
    readable = np.array([sample not in bad for sample in range(len(split))], dtype=bool)
    kinds = bundle.task.choose_examples(outputs, split, readable, MAX_CARD_IMAGES)
    shown = encode_card_images(
        bundle, split, list(dict.fromkeys(one.sample for some in kinds.values() for one in some))
    )
    rows = {
        kind: [
            {"name": split.name(one.sample), "label": one.label, "answer": one.prediction, "p": one.probability}
            | shown[one.sample]
            for one in some
            if one.sample in shown
        ]
        for kind, some in kinds.items()
    }
    return {**rows, "notes": bundle.task.example_notes, "small": max(bundle.preprocess.image) < MIN_SMOOTH_SIDE}


def encode_card_images(bundle: Bundle, split: Split, samples: list[int]) -> dict[int, dict[str, str | None]]:
    """Encode samples as data URIs: the model's input image, and its attention overlay if the model has attention."""
    pixels: dict[int, Tensor] = {}
    for sample in samples:
        try:
            picture = bundle.preprocess.decode(open_sample(split, sample), split.name(sample))
            pixels[sample] = bundle.preprocess.to_tensor(picture)
        except DataError:  # the file has disappeared since the evaluation
            continue
    if not pixels:
        return {}
    batch = bundle.preprocess.collate(list(pixels.values()))
    parts = [one[None] for one in batch] if isinstance(batch, list) else [batch]
    rollouts = [compute_card_attention(bundle, part) for part in parts]
    maps = [one for part in rollouts if part is not None for one in part]
    uris = {}
    for place, (sample, own) in enumerate(pixels.items()):
        image = shrink_image(to_rgb_image(own))
        large = enlarge_pixels(image, MIN_MAP_SIDE)  # enlarged for a smooth overlay
        uris[sample] = {
            "picture": encode_data_uri(image),
            "attention": encode_data_uri(overlay_heat_map(large, scale_attention_map(maps[place]))) if maps else None,
        }
    return uris


def compute_card_attention(bundle: Bundle, pixels: Tensor) -> np.ndarray | None:
    """Compute rollout from the class token for (B, C, *image) pixels -> (B, *grid) with maximum 1; None for models
    without attention."""
    from vitreous.inspection.rollout import compute_rollout

    model, device = bundle.model, next(bundle.model.parameters()).device
    try:
        rollouts = [compute_rollout(model, bundle.preprocess.normalise(part.to(device))) for part in pixels.split(4)]
    except UsageError:
        return None
    grid, prefix = rollouts[0].grid, rollouts[0].prefix
    if len(grid) != 2:
        return None
    maps = torch.cat([one.joint[:, -1, prefix:] for one in rollouts])
    return (maps / maps.amax(1, keepdim=True).clamp(min=1e-12)).unflatten(1, grid).cpu().numpy()
