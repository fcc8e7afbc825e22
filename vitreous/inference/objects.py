"""`predict` of detectors: the objects on images, with boxes, scores and, of instances, masks.

n objects on an image of H and W pixels at its own size. Boxes are left, top, right, bottom in pixels.
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

DEFAULT_THRESHOLD = 0.5  # the score from which an object is named, where nothing else is said


@dataclass(frozen=True, eq=False)
class ImageObjects:
    """The objects on an image, the one of the highest score first; or why there is no answer.

    `classes`: all that the model knows, in its order; `detections` are None where there is an `error`. `image`: the
    picture in RGB, if it was asked for. `file` and `overlay`: the files that it was written to.
    """

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
        """The class of each object."""
        return () if self.detections is None else tuple(self.classes[int(label)] for label in self.detections.labels)

    @property
    def boxes(self) -> np.ndarray:
        """(n, 4) float32."""
        return np.zeros((0, 4), np.float32) if self.detections is None else self.detections.boxes

    @property
    def scores(self) -> np.ndarray:
        """(n,) float32 in (0, 1]."""
        return np.zeros(0, np.float32) if self.detections is None else self.detections.scores

    @property
    def masks(self) -> np.ndarray | None:
        """(n, H, W) bool; None of a detector that learned boxes alone."""
        if self.detections is None or self.detections.masks is None:
            return None
        masks = [rle_to_mask(runs, self.detections.size) for runs in self.detections.masks]
        return np.stack(masks) if masks else np.zeros((0, *self.detections.size), bool)

    def draw_overlay(self) -> Image.Image:
        """The boxes and masks laid over the picture, in a colour for each class, with class and score. Raises
        UsageError where there is no picture."""
        if self.detections is None or self.image is None:
            raise UsageError(f"{self.path} has no picture to draw on", "ask for it: detect(…, pictures=True)")
        return draw_detections(self.image, self.detections, self.classes)

    def objects(self) -> list[dict[str, Any]]:
        """Each object as JSON has it: label, score, left, top, right, bottom and, of instances, `segmentation`, the
        size of the image (H, W) and COCO's uncompressed run lengths."""
        return [] if self.detections is None else detections_to_dicts(self.detections, self.classes)


def detections_to_dicts(detections: Detections, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Detections as JSON has them; boxes to a thousandth of a pixel."""
    rows: list[dict[str, Any]] = []
    for number in range(len(detections)):
        edges = zip(("left", "top", "right", "bottom"), detections.boxes[number], strict=True)
        row: dict[str, Any] = {
            "label": classes[detections.labels[number]],
            "score": to_shortest_float(detections.scores[number]),
        }
        row |= {name: round(float(edge), 3) for name, edge in edges}
        if detections.masks is not None:
            row["segmentation"] = {"size": list(detections.size), "counts": list(detections.masks[number])}
        rows.append(row)
    return rows


def to_shortest_float(value: np.floating) -> float:
    """A float32 as the shortest number that stands for it."""
    return float(str(value))


def draw_detections(image: Image.Image, detections: Detections, classes: tuple[str, ...]) -> Image.Image:
    """Draw detections over their image."""
    table = create_class_colours(classes)
    colours = [(int(r), int(g), int(b)) for r, g, b in table[detections.labels]]
    named = zip(detections.labels, detections.scores, strict=True)
    texts = [f"{classes[label]} {score:.0%}" for label, score in named]
    return draw_objects(image, detections.boxes, colours, texts, detections.masks)


@dataclass(frozen=True)
class DetectOptions:
    """How images are answered: objects whose score is at least `threshold`, in [0, 1]; `tiles`: images that are larger
    than the model's are answered at their own resolution. Raises UsageError for a threshold that cannot be."""

    threshold: float = DEFAULT_THRESHOLD
    tiles: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold {self.threshold:g} is no score", "it is a number from 0 to 1")


@dataclass(eq=False)
class ScaledItem:
    """An item, with the size (H, W) of its image and what its rows and columns were scaled by."""

    item: Item
    size: tuple[int, int] = (0, 0)
    scale: tuple[float, float] = (1.0, 1.0)


def iterate_image_objects(
    card: Card, engine: Engine, items: Iterable[Item], options: DetectOptions, bad_images: str, pictures: bool
) -> Iterator[ImageObjects]:
    """Items -> their objects in order, at most a few hundred images in memory; with their `pictures` if asked.

    Raises UsageError for a model that finds no objects, DataError where `bad_images` is stop.
    """
    classes, preprocess = card.task.classes, card.preprocess
    card.task.require_endpoint("detect", f"{card.name} finds no objects on images")

    def decode(fitted: ScaledItem) -> np.ndarray | DataError:
        try:
            pixels = decode_native_pixels(preprocess, fitted.item)
        except DataError as error:
            return error
        if options.tiles:
            return pixels
        fitted.size = (pixels.shape[1], pixels.shape[2])
        pixels, fitted.scale = fit_image(pixels, preprocess)
        return pixels

    def compute(batch: np.ndarray) -> list[Any]:
        if options.tiles:
            return [detect_objects(engine.objects, batch[0], preprocess, True, options.threshold)]
        return list(zip(*engine.objects(batch), strict=True))

    for chunk in run_pipeline(
        map(ScaledItem, items), decode, compute, 1 if options.tiles else choose_chunk_size(preprocess)
    ):
        for fitted, row in chunk:
            name = fitted.item.name
            if isinstance(row, DataError):
                if bad_images == "stop":
                    raise row
                yield ImageObjects(name, error=row.message)
                continue
            image = pixels_to_rgb(decode_native_pixels(preprocess, fitted.item)) if pictures else None
            detections = row if options.tiles else decode_detections(row, fitted.size, fitted.scale, options.threshold)
            yield ImageObjects(name, classes, detections, image)
