"""Entry points of torch.hub: `create`, `load`, and one for each published weights, whose name has `_` in place of `-`.

torch.hub.load("FOLDER", "dinov2_s14", source="local")                       # published weights, downloaded once
torch.hub.load("FOLDER", "dinov2_s14", source="local", pretrained=False)     # the same model with random weights
torch.hub.load("FOLDER", "create", "ViT-B/16", source="local", num_classes=37)
torch.hub.load("FOLDER", "load", "runs/pets", source="local")                # any source that `vitreous.load` opens
"""

from __future__ import annotations

from collections.abc import Callable

from torch.nn import Module

from vitreous.models.zoo import create_untrained_model as create
from vitreous.weights.published import PUBLISHED_WEIGHTS, PublishedWeights

dependencies = ["torch", "torchvision", "numpy", "safetensors", "pydantic", "yaml", "filelock"]


def load(source: str) -> Module:
    """Load the model of a run folder, a bundle, a weights file, a published name or `hf:org/name` as a
    torch.nn.Module."""
    import vitreous

    return vitreous.load(source, headless=True).model


def _entry(weights: PublishedWeights) -> Callable[..., Module]:
    """Return the torch.hub entry point of published weights."""

    def entry(pretrained: bool = True) -> Module:
        return load(weights.name) if pretrained else create(weights.model, image_size=weights.image_size)

    accuracy = "" if weights.accuracy is None else f", {weights.accuracy:.1%} {weights.accuracy_note} on ImageNet"
    entry.__doc__ = f"{weights.model}, {weights.image_size} pixels, {weights.licence}{accuracy} ({weights.reference})."
    return entry


globals().update(
    {
        row.name.replace("-", "_"): _entry(row) for row in PUBLISHED_WEIGHTS if not row.model.startswith("VideoMAE")
    }  # torch.hub models take images, not clips
)
