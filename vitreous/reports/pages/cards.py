"""The worst and the least certain images of an evaluation, with attention, for a page."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.data.layouts.video import open_sample
from vitreous.data.rgb_images import rgb_image
from vitreous.data.split import Split
from vitreous.errors import DataError, UsageError
from vitreous.evaluation.calibration import losses
from vitreous.inference.outputs import probabilities
from vitreous.reports.pages.thumbnails import ENLARGED, SMALL, data_uri, enlarge, heat_map, scale_map, shrink
from vitreous.weights.bundle import Bundle

SHOWN = 8  # images of a kind


def cards(bundle: Bundle, split: Split, logits: np.ndarray, bad: frozenset[int]) -> dict[str, Any]:
    """Return the worst and the least certain images, each with label, answer, and its picture as a data URI.

    Worst: of those answered wrongly, where the label's probability is lowest; with several labels an image, the highest
    loss. Least certain: where the two best classes are nearest, or a class to 0.5. `logits` (n, K).
    """
    loss, margin, wrong = marks(logits, split.labels)
    usable = np.array([sample not in bad for sample in range(len(split))], dtype=bool)
    worst = [int(s) for s in np.argsort(-loss, kind="stable") if usable[s] and wrong[s]][:SHOWN]
    unsure = [int(s) for s in np.argsort(margin, kind="stable") if usable[s]][:SHOWN]
    shown = pictures(bundle, split, list(dict.fromkeys([*worst, *unsure])))

    def card(sample: int) -> dict[str, Any]:
        p, name, picture = (
            probabilities(logits[sample : sample + 1], bundle.loss)[0],
            split.name(sample),
            shown[sample],
        )
        best = int(p.argmax())
        label = split.labels[sample]
        places = np.flatnonzero(label > 0) if split.labels.ndim == 2 else [int(label)]
        names = ", ".join(bundle.classes[place] for place in places) or "none"
        return {"name": name, "label": names, "answer": bundle.classes[best], "p": float(p[best]), **picture}

    kinds = {name: [card(s) for s in some if s in shown] for name, some in (("worst", worst), ("unsure", unsure))}
    return {**kinds, "small": max(bundle.preprocess.image) < SMALL}


def marks(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(n, K) logits and labels (n,) or (n, K) -> loss, margin between the two nearest answers, and what is wrong, (n,)
    each."""
    loss = losses(logits, labels)
    if labels.ndim == 2:
        return loss, np.abs(probabilities(logits, "sigmoid") - 0.5).min(1), ((logits > 0) != (labels > 0)).any(1)
    best = np.sort(probabilities(logits), 1)[:, -2:]
    return loss, best[:, -1] - best[:, 0], logits.argmax(1) != labels


def pictures(bundle: Bundle, split: Split, samples: list[int]) -> dict[int, dict[str, str | None]]:
    """Return samples as data URIs: as the model sees them, and with attention where the model has any."""
    pixels: dict[int, Tensor] = {}
    for sample in samples:
        try:
            picture = bundle.preprocess.decode(open_sample(split, sample), split.name(sample))
            pixels[sample] = bundle.preprocess.to_tensor(picture)
        except DataError:  # gone since it was judged
            continue
    if not pixels:
        return {}
    batch = bundle.preprocess.collate(list(pixels.values()))
    parts = [one[None] for one in batch] if isinstance(batch, list) else [batch]
    rollouts = [attention(bundle, part) for part in parts]
    maps = [one for part in rollouts if part is not None for one in part]
    uris = {}
    for place, (sample, own) in enumerate(pixels.items()):
        image = shrink(rgb_image(own))
        large = enlarge(image, ENLARGED)  # so that the map over it is smooth
        uris[sample] = {
            "picture": data_uri(image),
            "attention": data_uri(heat_map(large, scale_map(maps[place]))) if maps else None,
        }
    return uris


def attention(bundle: Bundle, pixels: Tensor) -> np.ndarray | None:
    """(B, C, *image) pixels -> (B, *grid) rollout from the class token, its maximum 1; None for models without it."""
    from vitreous.inspection.rollout import rollout

    model, device = bundle.model, next(bundle.model.parameters()).device
    try:
        rollouts = [rollout(model, bundle.preprocess.normalise(part.to(device))) for part in pixels.split(4)]
    except UsageError:
        return None
    grid, prefix = rollouts[0].grid, rollouts[0].prefix
    if len(grid) != 2:
        return None
    maps = torch.cat([one.joint[:, -1, prefix:] for one in rollouts])
    return (maps / maps.amax(1, keepdim=True).clamp(min=1e-12)).unflatten(1, grid).cpu().numpy()
