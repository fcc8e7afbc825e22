"""Image cards of a page: selected images of an evaluation, such as those of the highest loss, with attention."""

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


def build_image_cards(bundle: Bundle, split: Split, outputs: np.ndarray, unreadable: frozenset[int]) -> dict[str, Any]:
    """Return cards of the images that the task selects by its outputs (n, K), such as those of the highest loss.

    A card has name, label, prediction, probability, and the image as a data URI. `unreadable` are the indices of
    unreadable images.
    """
    readable = np.array([sample not in unreadable for sample in range(len(split))], dtype=bool)
    examples_by_list = bundle.task.choose_examples(outputs, split, readable, MAX_CARD_IMAGES)
    encoded = encode_card_images(
        bundle,
        split,
        list(dict.fromkeys(example.sample for examples in examples_by_list.values() for example in examples)),
    )
    cards = {
        list_name: [
            {
                "name": split.name(example.sample),
                "label": example.label,
                "prediction": example.prediction,
                "p": example.probability,
            }
            | encoded[example.sample]
            for example in examples
            if example.sample in encoded
        ]
        for list_name, examples in examples_by_list.items()
    }
    return {**cards, "notes": bundle.task.example_notes, "small": max(bundle.preprocess.image) < MIN_SMOOTH_SIDE}


def encode_card_images(bundle: Bundle, split: Split, samples: list[int]) -> dict[int, dict[str, str | None]]:
    """Encode samples as data URIs: the model's input image, and its attention overlay if the model has attention."""
    pixels: dict[int, Tensor] = {}
    for sample in samples:
        try:
            decoded = bundle.preprocess.decode(open_sample(split, sample), split.name(sample))
            pixels[sample] = bundle.preprocess.to_tensor(decoded)
        except DataError:  # the file was deleted after the evaluation
            continue
    if not pixels:
        return {}
    batch = bundle.preprocess.collate(list(pixels.values()))
    batches = [item[None] for item in batch] if isinstance(batch, list) else [batch]
    rollouts = [compute_card_attention(bundle, chunk) for chunk in batches]
    maps = [item for chunk in rollouts if chunk is not None for item in chunk]
    uris = {}
    for index, (sample, sample_pixels) in enumerate(pixels.items()):
        image = shrink_image(to_rgb_image(sample_pixels))
        enlarged = enlarge_pixels(image, MIN_MAP_SIDE)  # enlarged for a smooth overlay
        uris[sample] = {
            "image": encode_data_uri(image),
            "attention": encode_data_uri(overlay_heat_map(enlarged, scale_attention_map(maps[index])))
            if maps
            else None,
        }
    return uris


def compute_card_attention(bundle: Bundle, pixels: Tensor) -> np.ndarray | None:
    """Compute attention rollout from the class token: pixels (B, C, *image) -> maps (B, h, w) with maximum 1.

    Returns None for models without attention, and for inputs that are not images.
    """
    from vitreous.inspection.rollout import compute_rollout

    model, device = bundle.model, next(bundle.model.parameters()).device
    try:
        rollouts = [compute_rollout(model, bundle.preprocess.normalise(chunk.to(device))) for chunk in pixels.split(4)]
    except UsageError:
        return None
    grid, prefix = rollouts[0].grid, rollouts[0].prefix
    if len(grid) != 2:
        return None
    maps = torch.cat([rollout.joint[:, -1, prefix:] for rollout in rollouts])
    return (maps / maps.amax(1, keepdim=True).clamp(min=1e-12)).unflatten(1, grid).cpu().numpy()
