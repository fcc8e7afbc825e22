"""A detector with predictable outputs: it detects the largest red and the largest green rectangle on dark images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from vitreous.data.modalities.images import ImagePreprocess
from vitreous.inference.card import Card
from vitreous.inference.predict import Predictor
from vitreous.tasks.detection import Detection

CLASSES = ("red <b>one</b>", "green")
IMAGE_SIZE, MAX_DETECTIONS, MASK_SIZE = 64, 5, 8


class BlobEngine:
    """An engine for images of SIZE pixels: one object for each colour that occurs, then padding."""

    name, precision = "blobs", "fp32"

    def __init__(self, masks: bool = True) -> None:
        self.masks, self.asked = masks, 0

    def objects(self, pixels):
        self.asked += len(pixels)
        assert pixels.shape[1:] == (3, IMAGE_SIZE, IMAGE_SIZE) and pixels.dtype == np.uint8
        boxes, scores = (
            np.zeros((len(pixels), MAX_DETECTIONS, 4), np.float32),
            np.zeros((len(pixels), MAX_DETECTIONS), np.float32),
        )
        labels = np.zeros((len(pixels), MAX_DETECTIONS), np.int64)
        for image, image_pixels in enumerate(pixels):
            for label in range(2):
                inside = (image_pixels[label] > 180) & (image_pixels[1 - label] < 90)
                if inside.any():
                    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
                    boxes[image, label] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
                    scores[image, label], labels[image, label] = 0.9 - 0.3 * label, label
        outputs = boxes, scores, labels
        return (*outputs, np.ones((*scores.shape, MASK_SIZE, MASK_SIZE), np.float32)) if self.masks else outputs

    def logits(self, pixels):
        raise NotImplementedError

    features = logits


def make_blob_predictor(masks: bool = True) -> Predictor:
    preprocess = ImagePreprocess((IMAGE_SIZE, IMAGE_SIZE), filter="bilinear")
    return Predictor(Card("Blobs", "1", preprocess, task=Detection(CLASSES, masks)), BlobEngine(masks))


def make_scene(
    size: tuple[int, int] = (IMAGE_SIZE, IMAGE_SIZE), red=(8, 8, 24, 32), green=(40, 20, 56, 44)
) -> Image.Image:
    """A dark image of a size (W, H) with a red and a green rectangle, each given as left, top, right, bottom."""
    pixels = np.full((*size[::-1], 3), 30, np.uint8)
    for channel, box in enumerate((red, green)):
        if box is not None:
            left, top, right, bottom = box
            pixels[top:bottom, left:right] = 20
            pixels[top:bottom, left:right, channel] = 230
    return Image.fromarray(pixels)


def write_scenes(folder: Path, count: int = 3) -> Path:
    """Write a folder of `count` images; the last one has no objects."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        last = index == count - 1
        image = make_scene(
            (IMAGE_SIZE, IMAGE_SIZE), None if last else (8 + index, 8, 24, 32), None if last else (40, 20, 56, 44)
        )
        image.save(folder / f"{index}.png")
    return folder
