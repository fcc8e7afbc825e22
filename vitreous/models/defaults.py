"""The model that `train` makes where none is named, and the size of its input. Needs no PyTorch."""

from __future__ import annotations

from vitreous.models.names import configure
from vitreous.nn.sizes import nearby

SMALL = 64  # pixels: images up to this side are not enlarged
LARGE_IMAGE = (224, 224)  # the input for all others
#: what is learned of annotated images -> (height, width) of the input of the recipe that `train` takes for it
ANNOTATED_IMAGE = {"objects": (320, 320), "classes": (256, 256)}


def model_for_small_images(size: tuple[int, ...]) -> str:
    """The name of the model for images of this (height, width), both at most SMALL."""
    return "ViT-64x6/2" if max(size) <= 16 else "Conv+ViT-128x4/8"


def default_image(size: tuple[int, int], annotated: str = "") -> tuple[int, ...]:
    """The (height, width) of the input that `train` takes without options, in pixels, where the first training image
    has this size; `annotated`: what is learned of annotations, `objects` or `classes`, if any."""
    if annotated:
        return ANNOTATED_IMAGE[annotated]
    if max(size) > SMALL:
        return LARGE_IMAGE
    return nearby(size, configure(model_for_small_images(size)).patch)  # type: ignore[union-attr]
