"""Parts of a small grey view, and what is compared of them: the amplitudes of low frequencies, the higher ones raised.

A box is (x, y, width, height) in fractions of the view. A picture that was cut out of another one looks like the part
of it that a box holds; it is searched for among `BOXES`, and then placed exactly. To compare greys themselves would
find that all bright skies are alike: photographs have most of their power in the lowest frequencies, so each frequency
is multiplied by its own length to some power, and mean and contrast are taken out. n views, c cells a side.
"""

from __future__ import annotations

import numpy as np

SIDE = 32  # of the views that all pictures are searched by
COARSE = 8  # cells a side of a descriptor
RAISED = {8: 0.5, 16: 0.75, 32: 0.75}  # cells a side -> power of the frequency
SIZES = ((1.0, 1), (0.95, 2), (0.84, 4), (0.707, 5))  # side of the box, places along an axis: down to half of the area
OBLONG = (0.75, 3)  # the same, of one axis alone
# along one axis
PLACES = [(size, float(at)) for size, count in (*SIZES, OBLONG) for at in np.linspace(0, 1 - size, count)]
SHAPES = {(size, size) for size, _ in SIZES} | {(1.0, OBLONG[0]), (OBLONG[0], 1.0)}
PAIRS = [(y, x) for y, one in enumerate(PLACES) for x, other in enumerate(PLACES) if (one[0], other[0]) in SHAPES]
# the first is the whole
BOXES = np.array([(PLACES[x][1], PLACES[y][1], PLACES[x][0], PLACES[y][0]) for y, x in PAIRS], np.float32)
WHOLE = BOXES[:1]
CENTRE = next(
    k for k in range(len(BOXES)) if np.allclose(BOXES[k, :2] * 2 + BOXES[k, 2:], 1, atol=1e-3) and BOXES[k, 2] < 0.75
)
#: vertical and horizontal frequency of a descriptor's entries: those that a shift of a few pixels does not upset
FREQUENCIES = [(i, j) for i in range(COARSE) for j in range(COARSE) if 0 < i + j < COARSE]
LENGTH = len(FREQUENCIES)
# a mirror image changes the signs of odd frequencies
MIRROR = np.array([1 - 2 * (j % 2) for _, j in FREQUENCIES], np.float32)
_FACTORS = np.array([np.hypot(i, j) ** RAISED[COARSE] for i, j in FREQUENCIES], np.float32)


def dct(side: int, count: int) -> np.ndarray:
    """(count, side) float32: the first rows of the orthonormal discrete cosine transform (DCT-II)."""
    rows = np.arange(count)[:, None]
    matrix = np.cos(np.pi * rows * (2 * np.arange(side) + 1) / (2 * side)) * np.sqrt(2 / side)
    matrix[0] /= np.sqrt(2)
    return matrix.astype(np.float32)


def cells(start: np.ndarray, length: np.ndarray, count: int, side: int) -> np.ndarray:
    """(n,) fractions each -> (n, count, side): the share of each of `side` pixels in each of `count` cells of a part of
    an axis."""
    steps = np.arange(count + 1, dtype=np.float32) / count
    edges = (start[:, None] + length[:, None] * steps).astype(np.float32) * side
    pixel = np.arange(side, dtype=np.float32)
    shares = np.minimum(edges[:, 1:, None], pixel + 1)
    shares -= np.maximum(edges[:, :-1, None], pixel)
    np.maximum(shares, 0, out=shares)
    return shares / np.maximum(shares.sum(2, keepdims=True), 1e-6)


def cut(views: np.ndarray, boxes: np.ndarray, count: int) -> np.ndarray:
    """(n, side, side) greys and (n, 4) boxes -> (n, count, count): that part of each, as means of cells."""
    side = views.shape[-1]
    down, across = cells(boxes[:, 1], boxes[:, 3], count, side), cells(boxes[:, 0], boxes[:, 2], count, side)
    return down @ views @ across.transpose(0, 2, 1)


def spectrum(views: np.ndarray, boxes: np.ndarray, count: int, power: float | None = None) -> np.ndarray:
    """(n, side, side) float32 greys and (n, 4) boxes -> (n, count, count) of length 1: what is compared of that part of
    each."""
    cosines = dct(count, count)
    factors = np.hypot(*np.mgrid[:count, :count]).astype(np.float32) ** (RAISED[count] if power is None else power)
    amplitudes = cosines @ cut(views, boxes, count) @ cosines.T * factors  # the factor of the mean is 0
    return amplitudes / np.maximum(np.sqrt((amplitudes**2).sum((1, 2), keepdims=True)), 1e-6)


def describe(
    views: np.ndarray, places: list[tuple[float, float]] = PLACES, pairs: list[tuple[int, int]] = PAIRS
) -> np.ndarray:
    """(n, SIDE, SIDE) greys -> (n, boxes, LENGTH) float32, each of length 1: `spectrum` of all boxes, of the lowest
    frequencies.

    It takes the transform of all places along one axis and then along the other, and picks those that make boxes.
    """
    starts, sizes = np.array([at for _, at in places]), np.array([size for size, _ in places])
    rows = (dct(COARSE, COARSE) @ cells(starts, sizes, COARSE, SIDE)).reshape(-1, SIDE).astype(np.float32)
    width = len(rows)
    chosen = np.array([[(COARSE * y + i) * width + COARSE * x + j for i, j in FREQUENCIES] for y, x in pairs])
    descriptors = np.empty((len(views), len(pairs), LENGTH), np.float32)
    for low in range(0, len(views), 512):
        part = views[low : low + 512].astype(np.float32)
        across = (part.reshape(-1, SIDE) @ rows.T).reshape(-1, SIDE, width)
        both = np.ascontiguousarray(across.transpose(0, 2, 1)).reshape(-1, SIDE) @ rows.T  # (n * x, y)
        amplitudes = both.reshape(-1, width, width).transpose(0, 2, 1).reshape(len(part), -1)[:, chosen] * _FACTORS
        descriptors[low : low + 512] = amplitudes / np.maximum(np.linalg.norm(amplitudes, axis=2, keepdims=True), 1e-6)
    return descriptors


def describe_whole(views: np.ndarray) -> np.ndarray:
    """(n, SIDE, SIDE) greys -> (n, LENGTH) float32: the descriptor of each whole view."""
    return describe(views, PLACES[:1], PAIRS[:1])[:, 0]
