"""Entry points of torch.hub: models by name, and published weights under their names with `_` for `-`.

torch.hub.load("FOLDER", "dinov2_s14", source="local")                       # published weights, downloaded once
torch.hub.load("FOLDER", "dinov2_s14", source="local", pretrained=False)     # that model, freshly initialised
torch.hub.load("FOLDER", "create", "ViT-B/16", source="local", num_classes=37)
torch.hub.load("FOLDER", "load", "runs/pets", source="local")                # whatever `vitreous.load` opens
"""

from __future__ import annotations

from collections.abc import Callable

from torch.nn import Module

from vitreous.models.zoo import create_untrained_model as create
from vitreous.weights.published import PUBLISHED_WEIGHTS, PublishedWeights

dependencies = ["torch", "torchvision", "numpy", "safetensors", "pydantic", "yaml", "filelock"]


def load(source: str) -> Module:
    """The torch.nn.Module of weights of any kind: a run folder, a bundle, a file, a published name, `hf:org/name`."""
    import vitreous

    return vitreous.load(source, headless=True).model


def _entry(row: PublishedWeights) -> Callable[..., Module]:
    """The entry point of published weights."""

    def entry(pretrained: bool = True) -> Module:
        return load(row.name) if pretrained else create(row.model, image_size=row.image_size)

    accuracy = "" if row.accuracy is None else f", {row.accuracy:.1%} {row.accuracy_note} on ImageNet"
    entry.__doc__ = f"{row.model}, {row.image_size} pixels, {row.licence}{accuracy} ({row.reference})."
    return entry


globals().update(
    {
        row.name.replace("-", "_"): _entry(row) for row in PUBLISHED_WEIGHTS if not row.model.startswith("VideoMAE")
    }  # of clips
)
