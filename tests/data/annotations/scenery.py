"""Small synthetic segmentation datasets (squares and discs on noise) in the supported folder layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def make_scene(number: int, size: tuple[int, int] = (24, 32)) -> tuple[np.ndarray, np.ndarray]:
    """Return an image (H, W, 3) uint8 and a class map (H, W) uint8: 0 dark noise, 1 a red square, 2 a green disc."""
    draw = np.random.default_rng(number)
    pixels = draw.integers(0, 60, (*size, 3), dtype=np.uint8)
    classes = np.zeros(size, np.uint8)
    top, left = draw.integers(0, size[0] - 8), draw.integers(0, size[1] // 2 - 8)
    classes[top : top + 8, left : left + 8] = 1
    row, column = np.mgrid[: size[0], : size[1]]
    y, x = draw.integers(5, size[0] - 5), draw.integers(size[1] // 2 + 5, size[1] - 5)
    classes[(row - y) ** 2 + (column - x) ** 2 <= 16] = 2
    pixels[classes == 1, 0] += 180
    pixels[classes == 2, 1] += 180
    return pixels, classes


def write_maps(home: Path, count: int = 8, names: str = "ground\nsquare\ndisc\n") -> Path:
    """Write `images/`, `masks/` with index class maps, and `classes.txt`."""
    for folder in ("images", "masks"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels, classes = make_scene(number)
        Image.fromarray(pixels).save(home / "images" / f"{number}.png")
        Image.fromarray(classes).save(home / "masks" / f"{number}.png")
    if names:
        (home / "classes.txt").write_text(names)
    return home


def write_objects(home: Path, count: int = 4) -> Path:
    """Write one folder for each image, with one mask for each object."""
    for number in range(count):
        pixels, classes = make_scene(number)
        for folder in ("images", "masks"):
            (home / f"cell{number}" / folder).mkdir(parents=True)
        Image.fromarray(pixels).save(home / f"cell{number}" / "images" / f"cell{number}.png")
        for label in (1, 2):
            mask = Image.fromarray((classes == label).astype(np.uint8) * 255)
            mask.save(home / f"cell{number}" / "masks" / f"{label}.png")
    return home
