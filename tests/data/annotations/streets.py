"""Synthetic class maps with and without an orientation: street scenes (11 classes), nuclei, aerial views of fields."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

STREET_CLASSES = (
    "sky",
    "building",
    "pole",
    "road",
    "pavement",
    "tree",
    "sign",
    "fence",
    "car",
    "pedestrian",
    "bicyclist",
)
#: RGB colour of each street class
CLASS_COLOURS = np.array(
    [(150, 190, 230), (150, 110, 90), (90, 90, 90), (80, 80, 90), (150, 140, 130), (50, 110, 50), (200, 190, 60),
     (110, 80, 50), (160, 40, 40), (200, 150, 120), (60, 60, 170)], np.int16)  # fmt: skip


def draw_street(number: int, size: tuple[int, int] = (60, 80)) -> np.ndarray:
    """Draw the (H, W) uint8 class indices of a street.

    The horizon has a random height, with houses and trees above it and a road below it. Poles, signs, pedestrians and
    bicyclists cover less than 2 % of the pixels.
    """
    draw, (height, width) = np.random.default_rng(number), size
    horizon = int(height * draw.uniform(0.4, 0.6))
    classes = np.zeros(size, np.uint8)
    left = 0
    while left < width:
        right, top = left + int(draw.integers(8, 20)), int(horizon * draw.uniform(0.1, 0.7))
        classes[top:horizon, left:right] = draw.choice([1, 1, 5])
        left = right
    classes[horizon:] = 4
    middle, slope = width * draw.uniform(0.4, 0.6), width * draw.uniform(0.5, 0.7) / (height - horizon)
    row, column = np.mgrid[:height, :width]
    classes[(row >= horizon) & (np.abs(column - middle) < 3 + slope * (row - horizon))] = 3
    for class_index, (high, wide), share in (
        *((7, (4, 14), 0.4), (8, (7, 12), 0.9), (2, (18, 1), 0.8), (6, (4, 3), 0.5)),
        *((9, (9, 3), 0.5), (10, (7, 4), 0.2)),
    ):
        if draw.random() < share:
            bottom = horizon + int(draw.integers(1, 10)) - (14 if class_index == 6 else 0)
            left = int(draw.integers(0, width - wide))
            classes[max(0, bottom - high) : bottom, left : left + wide] = class_index
    return classes


def draw_nuclei(number: int, size: tuple[int, int] = (60, 80)) -> np.ndarray:
    """Draw (H, W) uint8 class indices: 0 background, 1 ellipses at random positions."""
    draw = np.random.default_rng(number)
    row, column = np.mgrid[: size[0], : size[1]]
    classes = np.zeros(size, np.uint8)
    for _ in range(int(draw.integers(3, 15))):
        y, x = draw.uniform(0, size[0]), draw.uniform(0, size[1])
        a, b = draw.uniform(3, 7, 2)
        classes[((row - y) / a) ** 2 + ((column - x) / b) ** 2 <= 1] = 1
    return classes


def draw_fields(number: int, size: tuple[int, int] = (64, 64)) -> np.ndarray:
    """Draw (H, W) uint8 class indices 0-3: each pixel has the class of the nearest of 12 random points."""
    draw = np.random.default_rng(number)
    points, classes = draw.uniform(0, size, (12, 2)), draw.integers(0, 4, 12)
    row, column = np.mgrid[: size[0], : size[1]]
    distances = (row[..., None] - points[:, 0]) ** 2 + (column[..., None] - points[:, 1]) ** 2
    return classes[distances.argmin(-1)].astype(np.uint8)


def write_streets(home: Path, count: int = 24, size: tuple[int, int] = (60, 80)) -> Path:
    """Write `images/` with noisy colours, `masks/` and `classes.txt` of street scenes."""
    for folder in ("images", "masks"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        classes, draw = draw_street(number, size), np.random.default_rng(10_000 + number)
        noise = draw.integers(-25, 26, (*size, 3)) + draw.integers(-20, 21, (12, 3))[classes]
        pixels = np.clip(CLASS_COLOURS[classes] + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(home / "images" / f"{number:03}.png")
        Image.fromarray(classes).save(home / "masks" / f"{number:03}.png")
    (home / "classes.txt").write_text("\n".join(STREET_CLASSES) + "\n")
    return home
