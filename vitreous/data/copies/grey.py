"""The small grey view that stands for a picture while copies are searched for. Needs no PyTorch."""

from __future__ import annotations

import numpy as np
from PIL import Image

from vitreous.data.copies.windows import WHOLE, spectrum

SHARED = 5  # frequencies that share the power, at least, of a picture that can be told from others
PLAIN = 2.0  # standard deviation of grey levels below which a view shows nothing to compare
SCANNED = 256  # longest side at which borders are looked for
FLAT, SAME = 10, 6  # grey levels: spread within a line of a border, and difference between two of its lines


def view(picture: Image.Image, side: int) -> np.ndarray:
    """A picture without its borders, as (side, side) uint8 greys; its proportions are lost."""
    grey = picture.convert("L")
    size = (min(grey.width, SCANNED), min(grey.height, SCANNED))
    small = grey if size == grey.size else grey.resize(size, Image.Resampling.BOX)
    greys = small.tobytes()
    width = size[0]
    edges = (greys[::width], greys[:width], greys[width - 1 :: width], greys[-width:])
    if all(max(line) - min(line) > FLAT for line in edges):  # no border: of most pictures, and told in microseconds
        if grey.size != (side, side):
            greys = grey.resize((side, side), Image.Resampling.BILINEAR).tobytes()
        return np.frombuffer(greys, np.uint8).reshape(side, side)
    left, top, right, bottom = margins(np.frombuffer(greys, np.uint8).reshape(size[::-1]))
    x, y = grey.width / size[0], grey.height / size[1]
    box = (left * x, top * y, grey.width - right * x, grey.height - bottom * y)
    return np.asarray(grey.resize((side, side), Image.Resampling.BILINEAR, box=box))


def margins(values: np.ndarray) -> tuple[int, int, int, int]:
    """The lines of one colour at the left, the top, the right and the bottom of (h, w) uint8 greys, at most a quarter
    each.

    The line after a border may show a little of it, and goes with it.
    """

    def count(lines: np.ndarray) -> int:
        if int(lines[0].max()) - int(lines[0].min()) > FLAT:
            return 0
        lines = lines[: len(lines) // 4 + 1].astype(np.int16)
        border = (np.ptp(lines, axis=1) <= FLAT) & (np.abs(lines.mean(1) - lines[0].mean()) <= SAME)
        width = len(border) if border.all() else int(np.argmin(border))
        return min(width + 1, len(border) - 1)

    return count(values.T), count(values), count(values.T[::-1]), count(values[::-1])


def comparable(views: np.ndarray) -> np.ndarray:
    """(n, side, side) greys -> (n,) bool: which show enough to tell them from others.

    With whole spectra of length 1, s, `1 / sum(s ** 4)` is about how many frequencies share the power: in photographs
    10 to 90, 5 at least; in a plain gradient 2, and all of those are alike.
    """
    enough = np.empty(len(views), bool)
    for low in range(0, len(enough), 4096):
        part = views[low : low + 4096].astype(np.float32)
        power = (spectrum(part, WHOLE.repeat(len(part), 0), 16) ** 4).sum((1, 2))
        enough[low : low + 4096] = (power < 1 / SHARED) & (part.reshape(len(part), -1).std(1) >= PLAIN)
    return enough
