"""Pictures of which a part can be had without the rest: what a crop is cut from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image

from vitreous.data.decoding.decode import MODES, decode
from vitreous.data.decoding.jpeg import Box, parse_plain


class Regions(Protocol):
    """A picture whose size is known and whose pixels are still to be read."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, as Pillow has it."""
        ...

    def region(self, box: Box, target: tuple[int, int] | None = None) -> np.ndarray:
        """A box -> (h, w, C) uint8, contiguous and writable; a smaller one that is at least `target` will do. Raises
        DataError."""
        ...

    def whole(self) -> Image.Image:
        """The picture, as `decode` gives it. Raises DataError."""
        ...


@dataclass(frozen=True, eq=False)
class Pixels:
    """A stored picture, (H, W, C) uint8; of a file that is mapped into memory only the box is read."""

    pixels: np.ndarray

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, as Pillow has it."""
        return self.pixels.shape[1], self.pixels.shape[0]

    def region(self, box: Box, target: tuple[int, int] | None = None) -> np.ndarray:
        """A box -> (h, w, C) uint8, a copy."""
        return np.array(self.pixels[box[1] : box[3], box[0] : box[2]], order="C")

    def whole(self) -> Image.Image:
        """The picture, as `decode` gives it."""
        return Image.fromarray(self.pixels[..., 0] if self.pixels.shape[-1] == 1 else self.pixels)


def open_picture(raw: bytes | np.ndarray, channels: int, name: str, exact: bool = True) -> Image.Image | Regions:
    """What is stored of a sample, not yet decoded where that can wait, else the decoded picture. Raises DataError.

    `exact` False lets a crop of a plain JPEG that is to be shrunk be decoded at 1/2, 1/4 or 1/8.
    """
    if isinstance(raw, np.ndarray):
        grey = raw[..., None] if raw.ndim == 2 else raw
        if channels in MODES and grey.dtype == np.uint8 and grey.ndim == 3 and grey.shape[2] == channels and grey.size:
            return Pixels(grey)
    elif raw.startswith(b"\xff\xd8") and channels in MODES:
        jpeg = parse_plain(raw, channels, name, exact)
        if jpeg is not None:
            return jpeg
    return decode(raw, channels, name)
