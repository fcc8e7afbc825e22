"""Object detection in `predict`: objects with boxes, scores and instance masks.

n objects on an image of H and W pixels at its native size. Boxes are left, top, right, bottom in pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vitreous.data.annotations.boxes_drawing import draw_objects
from vitreous.data.annotations.drawing import create_class_colours
from vitreous.data.annotations.shapes import rle_to_mask
from vitreous.errors import DataError, UsageError
from vitreous.inference.card import Card
from vitreous.inference.class_maps import decode_native_pixels, pixels_to_rgb
from vitreous.inference.pipeline import choose_chunk_size, run_pipeline
from vitreous.inference.sources import Item
from vitreous.tasks.detections import Detections, decode_detections, detect_objects, fit_image

if TYPE_CHECKING:
    from vitreous.inference.engine import Engine

DEFAULT_THRESHOLD = 0.5  # default minimum score


@dataclass(frozen=True, eq=False)
class ImageObjects:
    """The detected objects of an image, highest score first, or the error if it could not be read. `classes`: all class
    names of the model, in its order. `detections` is None if there is an `error`. `image`: the RGB image, if requested.
    `file` and `overlay`: the paths of the output files."""

    path: str
    classes: tuple[str, ...] = ()
    detections: Detections | None = None
    image: Image.Image | None = None
    error: str | None = None
    file: str | None = None
    overlay: str | None = None

    def __len__(self) -> int:
        return 0 if self.detections is None else len(self.detections)

    @property
    def names(self) -> tuple[str, ...]:
        """The class name of each object."""
        return () if self.detections is None else tuple(self.classes[int(label)] for label in self.detections.labels)

    @property
    def boxes(self) -> np.ndarray:
        """The boxes of the objects, (n, 4) float32."""
        return np.zeros((0, 4), np.float32) if self.detections is None else self.detections.boxes

    @property
    def scores(self) -> np.ndarray:
        """The scores of the objects, (n,) float32 in (0, 1]."""
        return np.zeros(0, np.float32) if self.detections is None else self.detections.scores

    @property
    def masks(self) -> np.ndarray | None:
        """The masks of the objects, (n, H, W) bool; None for a detector without masks."""
        if self.detections is None or self.detections.masks is None:
            return None
        masks = [rle_to_mask(runs, self.detections.size) for runs in self.detections.masks]
        return np.stack(masks) if masks else np.zeros((0, *self.detections.size), bool)

    def draw_overlay(self) -> Image.Image:
        """Draw boxes and masks over the image, one colour per class, with class and score. Raises UsageError if the
        image was not kept."""
        if self.detections is None or self.image is None:
            raise UsageError(
                f"{self.path}: the image was not kept, so the objects cannot be drawn over it",
                "use detect(…, keep_images=True)",
            )
        return draw_detections(self.image, self.detections, self.classes)

    def objects(self) -> list[dict[str, Any]]:
        """Return the objects as JSON values: label, score, left, top, right, bottom and, with masks, `segmentation`,
        the size of the image (H, W) and COCO's uncompressed run lengths."""
        return [] if self.detections is None else detections_to_dicts(self.detections, self.classes)


def detections_to_dicts(detections: Detections, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Convert detections to JSON values, with box edges rounded to a thousandth of a pixel."""
    records: list[dict[str, Any]] = []
    for index in range(len(detections)):
        edges = zip(("left", "top", "right", "bottom"), detections.boxes[index], strict=True)
        record: dict[str, Any] = {
            "label": classes[detections.labels[index]],
            "score": to_shortest_float(detections.scores[index]),
        }
        record |= {name: round(float(edge), 3) for name, edge in edges}
        if detections.masks is not None:
            record["segmentation"] = {"size": list(detections.size), "counts": list(detections.masks[index])}
        records.append(record)
    return records


def to_shortest_float(value: np.floating) -> float:
    """Convert a float32 to the float with its shortest decimal representation."""
    return float(str(value))


def draw_detections(image: Image.Image, detections: Detections, classes: tuple[str, ...]) -> Image.Image:
    """Draw boxes, masks, class names and scores of detections over their image."""
    palette = create_class_colours(classes)
    colours = [(int(r), int(g), int(b)) for r, g, b in palette[detections.labels]]
    labels_and_scores = zip(detections.labels, detections.scores, strict=True)
    texts = [f"{classes[label]} {score:.0%}" for label, score in labels_and_scores]
    return draw_objects(image, detections.boxes, colours, texts, detections.masks)


@dataclass(frozen=True)
class DetectOptions:
    """Options of `detect`. `threshold` is the minimum score, in [0, 1]. With `tiles`, images larger than the model's
    size are processed at their native resolution. Raises UsageError for an invalid threshold."""

    threshold: float = DEFAULT_THRESHOLD
    tiles: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold {self.threshold:g} is not a score", "use a number from 0 to 1")


@dataclass(eq=False)
class ScaledItem:
    """An item, with the native size (H, W) of its image and the scale factors of height and width to the model's
    input."""

    item: Item
    size: tuple[int, int] = (0, 0)
    scale: tuple[float, float] = (1.0, 1.0)


def iterate_image_objects(
    card: Card, engine: Engine, items: Iterable[Item], options: DetectOptions, bad_images: str, keep_images: bool
) -> Iterator[ImageObjects]:
    """Yield the detected objects of items in order, with at most a few hundred images in memory; `keep_images` keeps
    each image in its result. Raises UsageError for a model that is not a detector, DataError for an unreadable image if
    `bad_images` is stop."""
    classes, preprocess = card.task.classes, card.preprocess
    card.task.require_endpoint("detect", f"{card.name} {card.task.verb_phrase} and does not detect objects")

    def decode(scaled_item: ScaledItem) -> np.ndarray | DataError:
        """Decode an item to pixels at native size or, without tiles, at the model's size; return the error if it
        fails."""
        try:
            pixels = decode_native_pixels(preprocess, scaled_item.item)
        except DataError as error:
            return error
        if options.tiles:
            return pixels
        scaled_item.size = (pixels.shape[1], pixels.shape[2])
        pixels, scaled_item.scale = fit_image(pixels, preprocess)
        return pixels

    def compute(batch: np.ndarray) -> list[Any]:
        """Compute the detections of an image with tiles, or the outputs of a batch."""
        if options.tiles:
            return [detect_objects(engine.objects, batch[0], preprocess, True, options.threshold)]
        return list(zip(*engine.objects(batch), strict=True))

    for chunk in run_pipeline(
        map(ScaledItem, items), decode, compute, 1 if options.tiles else choose_chunk_size(preprocess)
    ):
        for scaled_item, output in chunk:
            name = scaled_item.item.name
            if isinstance(output, DataError):
                if bad_images == "stop":
                    raise output
                yield ImageObjects(name, error=output.message)
                continue
            image = pixels_to_rgb(decode_native_pixels(preprocess, scaled_item.item)) if keep_images else None
            detections = (
                output
                if options.tiles
                else decode_detections(output, scaled_item.size, scaled_item.scale, options.threshold)
            )
            yield ImageObjects(name, classes, detections, image)
