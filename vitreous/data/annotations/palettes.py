"""Masks with a palette of their own, where `classes.txt` gives each class a colour: the two are compared."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from vitreous.data.decoding.decode import read_regular
from vitreous.data.decoding.npy import MAGIC
from vitreous.errors import DataError, first_names, printable


def apply_palette(values: np.ndarray, place: Path, colours: dict[tuple[int, ...], int]) -> np.ndarray:
    """Return the (H, W) numbers of a mask, or its (H, W, 3) uint8 colours where its palette has the colours of the
    classes at other numbers; `colours`: colour -> class. Numbers of files without a palette, and of grey palettes, are
    returned as they are. Raises DataError for a palette that contradicts the colours of the classes."""
    content = read_regular(place)
    if content.startswith(MAGIC):
        return values
    with Image.open(io.BytesIO(content)) as image:
        palette = image.convert("P").getpalette("RGB") if image.mode == "P" else None
    if not palette:
        return values
    table = np.zeros((256, 3), np.uint8)
    table[: len(palette) // 3] = np.array(palette, np.uint8).reshape(-1, 3)
    used = {number: tuple(table[number].tolist()) for number in np.unique(values).tolist()}
    stated = {number: colour for number, colour in used.items() if colour in colours}
    if all(colours[colour] == number for number, colour in stated.items()) and len(stated) >= len(used) - 1:
        return values  # one number may be that of unknown pixels
    if len(stated) == len(used):
        return table[values]
    if all(colour == (number,) * 3 for number, colour in used.items()):
        return values
    wrong = first_names((" ".join(map(str, colour)) for colour in used.values() if colour not in colours), 3)
    problem = f"{printable(place)} has a palette with colours that classes.txt does not list: {wrong}"
    raise DataError(problem, "list them in classes.txt, or leave all colours out of it to use the numbers")
