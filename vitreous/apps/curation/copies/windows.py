"""Small grey views of images, boxes in a view, and descriptors of a box: the amplitudes of its low frequencies.

A box is (x, y, width, height) in fractions of the view. A crop of an image is similar to one of the image's
`SEARCH_BOXES`; the search uses these boxes, and the verification refines them.

Photographs have most of their power in the lowest frequencies, so that all bright skies would be similar. Therefore
each amplitude is multiplied by a power of its frequency, and mean and contrast are removed. Needs no PyTorch.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

VIEW_SIZE, LARGER_VIEW_SIZE = 32, 64  # height and width of small views (search) and of larger views (verification)
MIN_SHARED_FREQUENCIES = 5  # minimum effective number of frequencies in a distinctive image
MIN_VIEW_STD = 2.0  # views with a lower standard deviation of grey levels are not compared
BORDER_SCAN_SIZE = 256  # longest side in pixels to which an image is scaled down to detect borders
# maximum range within a line of a border, and difference between its lines, in grey levels
BORDER_LINE_SPREAD, BORDER_LINE_DIFFERENCE = 10, 6
DESCRIPTOR_CELLS = 8  # cells per side of a descriptor
FREQUENCY_POWERS = {8: 0.5, 16: 0.75, 32: 0.75}  # cells per side -> power of the frequency
# side of a square box, and number of its positions along an axis; down to half of the area
SQUARE_BOX_SIZES = ((1.0, 1), (0.95, 2), (0.84, 4), (0.707, 5))
OBLONG_BOX_SIZE = (0.75, 3)  # size of a box along one axis, which is full along the other; number of its positions
# intervals along one axis: (size, start)
AXIS_INTERVALS = [
    (size, float(at)) for size, count in (*SQUARE_BOX_SIZES, OBLONG_BOX_SIZE) for at in np.linspace(0, 1 - size, count)
]
BOX_SHAPES = {(size, size) for size, _ in SQUARE_BOX_SIZES} | {(1.0, OBLONG_BOX_SIZE[0]), (OBLONG_BOX_SIZE[0], 1.0)}
BOX_INTERVALS = [
    (y, x)
    for y, vertical in enumerate(AXIS_INTERVALS)
    for x, horizontal in enumerate(AXIS_INTERVALS)
    if (vertical[0], horizontal[0]) in BOX_SHAPES
]
# (n, 4) boxes; the first is the whole image
SEARCH_BOXES = np.array(
    [
        (AXIS_INTERVALS[x][1], AXIS_INTERVALS[y][1], AXIS_INTERVALS[x][0], AXIS_INTERVALS[y][0])
        for y, x in BOX_INTERVALS
    ],
    np.float32,
)
WHOLE_BOX = SEARCH_BOXES[:1]
CENTRE_BOX_INDEX = next(
    k
    for k in range(len(SEARCH_BOXES))
    if np.allclose(SEARCH_BOXES[k, :2] * 2 + SEARCH_BOXES[k, 2:], 1, atol=1e-3) and SEARCH_BOXES[k, 2] < 0.75
)
#: (vertical, horizontal) frequency of each entry of a descriptor: low ones, robust to a shift of a few pixels
FREQUENCIES = [(i, j) for i in range(DESCRIPTOR_CELLS) for j in range(DESCRIPTOR_CELLS) if 0 < i + j < DESCRIPTOR_CELLS]
DESCRIPTOR_LENGTH = len(FREQUENCIES)
# a mirror image changes the signs of odd frequencies
MIRROR_SIGNS = np.array([1 - 2 * (j % 2) for _, j in FREQUENCIES], np.float32)
_FACTORS = np.array([np.hypot(i, j) ** FREQUENCY_POWERS[DESCRIPTOR_CELLS] for i, j in FREQUENCIES], np.float32)


def make_grey_view(image: Image.Image, side: int) -> np.ndarray:
    """Remove the uniform borders of an image, and scale it to (side, side) uint8 greys, without preserving its aspect
    ratio."""
    grey = image.convert("L")
    size = (min(grey.width, BORDER_SCAN_SIZE), min(grey.height, BORDER_SCAN_SIZE))
    scan_image = grey if size == grey.size else grey.resize(size, Image.Resampling.BOX)
    greys = scan_image.tobytes()
    width = size[0]
    edges = (greys[::width], greys[:width], greys[width - 1 :: width], greys[-width:])
    if all(
        max(line) - min(line) > BORDER_LINE_SPREAD for line in edges
    ):  # no border: the common case, decided in microseconds
        if grey.size != (side, side):
            greys = grey.resize((side, side), Image.Resampling.BILINEAR).tobytes()
        return np.frombuffer(greys, np.uint8).reshape(side, side)
    left, top, right, bottom = count_border_lines(np.frombuffer(greys, np.uint8).reshape(size[::-1]))
    x, y = grey.width / size[0], grey.height / size[1]
    box = (left * x, top * y, grey.width - right * x, grey.height - bottom * y)
    return np.asarray(grey.resize((side, side), Image.Resampling.BILINEAR, box=box))


def count_border_lines(values: np.ndarray) -> tuple[int, int, int, int]:
    """Count the uniform lines at the left, top, right and bottom of (h, w) uint8 greys, at most a quarter on each side.

    The line next to a border may be blended with it, and is counted too.
    """

    def count_side_lines(lines: np.ndarray) -> int:
        """Count the border lines among the first lines of (n, length) greys."""
        if int(lines[0].max()) - int(lines[0].min()) > BORDER_LINE_SPREAD:
            return 0
        lines = lines[: len(lines) // 4 + 1].astype(np.int16)
        border = (np.ptp(lines, axis=1) <= BORDER_LINE_SPREAD) & (
            np.abs(lines.mean(1) - lines[0].mean()) <= BORDER_LINE_DIFFERENCE
        )
        width = len(border) if border.all() else int(np.argmin(border))
        return min(width + 1, len(border) - 1)

    return (
        count_side_lines(values.T),
        count_side_lines(values),
        count_side_lines(values.T[::-1]),
        count_side_lines(values[::-1]),
    )


def make_dct_matrix(length: int, count: int) -> np.ndarray:
    """Make the first `count` basis vectors of the orthonormal discrete cosine transform (DCT-II): (count, length)
    float32."""
    frequencies = np.arange(count)[:, None]
    matrix = np.cos(np.pi * frequencies * (2 * np.arange(length) + 1) / (2 * length)) * np.sqrt(2 / length)
    matrix[0] /= np.sqrt(2)
    return matrix.astype(np.float32)


def compute_cell_weights(start: np.ndarray, length: np.ndarray, count: int, side: int) -> np.ndarray:
    """Compute the pixel weights with which cells average an interval of an axis: (n, count, side), for intervals with
    (n,) starts and lengths, each of `count` cells."""
    steps = np.arange(count + 1, dtype=np.float32) / count
    edges = (start[:, None] + length[:, None] * steps).astype(np.float32) * side
    pixel = np.arange(side, dtype=np.float32)
    shares = np.minimum(edges[:, 1:, None], pixel + 1)
    shares -= np.maximum(edges[:, :-1, None], pixel)
    np.maximum(shares, 0, out=shares)
    return shares / np.maximum(shares.sum(2, keepdims=True), 1e-6)


def average_cells(views: np.ndarray, boxes: np.ndarray, count: int) -> np.ndarray:
    """Average (n, side, side) greys over the cells of one box each, (n, 4): (n, count, count)."""
    side = views.shape[-1]
    row_weights, column_weights = (
        compute_cell_weights(boxes[:, 1], boxes[:, 3], count, side),
        compute_cell_weights(boxes[:, 0], boxes[:, 2], count, side),
    )
    return row_weights @ views @ column_weights.transpose(0, 2, 1)


def compute_weighted_spectrum(
    views: np.ndarray, boxes: np.ndarray, count: int, power: float | None = None
) -> np.ndarray:
    """Compute the weighted DCT amplitudes of one box (n, 4) of each of (n, side, side) float32 greys: (n, count, count)
    of length 1. Each amplitude is multiplied by its frequency to the power `power`, by default that of
    `FREQUENCY_POWERS`."""
    cosines = make_dct_matrix(count, count)
    factors = np.hypot(*np.mgrid[:count, :count]).astype(np.float32) ** (
        FREQUENCY_POWERS[count] if power is None else power
    )
    amplitudes = cosines @ average_cells(views, boxes, count) @ cosines.T * factors  # the factor of the mean is 0
    return amplitudes / np.maximum(np.sqrt((amplitudes**2).sum((1, 2), keepdims=True)), 1e-6)


def compute_descriptors(
    views: np.ndarray,
    intervals: list[tuple[float, float]] = AXIS_INTERVALS,
    pairs: list[tuple[int, int]] = BOX_INTERVALS,
) -> np.ndarray:
    """Compute the descriptor of each box of each view: (n, side, side) small views -> (n, boxes, L) float32, with L =
    `DESCRIPTOR_LENGTH`. It is the weighted spectrum (`compute_weighted_spectrum`), low frequencies only.

    All intervals are transformed along one axis and then along the other; `pairs` selects the pairs of intervals that
    form boxes.
    """
    starts, sizes = np.array([start for _, start in intervals]), np.array([size for size, _ in intervals])
    transform = (
        (
            make_dct_matrix(DESCRIPTOR_CELLS, DESCRIPTOR_CELLS)
            @ compute_cell_weights(starts, sizes, DESCRIPTOR_CELLS, VIEW_SIZE)
        )
        .reshape(-1, VIEW_SIZE)
        .astype(np.float32)
    )
    width = len(transform)
    indices = np.array(
        [[(DESCRIPTOR_CELLS * y + i) * width + DESCRIPTOR_CELLS * x + j for i, j in FREQUENCIES] for y, x in pairs]
    )
    descriptors = np.empty((len(views), len(pairs), DESCRIPTOR_LENGTH), np.float32)
    for low in range(0, len(views), 512):
        block = views[low : low + 512].astype(np.float32)
        horizontal = (block.reshape(-1, VIEW_SIZE) @ transform.T).reshape(-1, VIEW_SIZE, width)
        spectra = np.ascontiguousarray(horizontal.transpose(0, 2, 1)).reshape(-1, VIEW_SIZE) @ transform.T  # (n * x, y)
        amplitudes = spectra.reshape(-1, width, width).transpose(0, 2, 1).reshape(len(block), -1)[:, indices] * _FACTORS
        descriptors[low : low + 512] = amplitudes / np.maximum(np.linalg.norm(amplitudes, axis=2, keepdims=True), 1e-6)
    return descriptors


def compute_whole_descriptors(views: np.ndarray) -> np.ndarray:
    """Compute the descriptor of each whole view: (n, side, side) small views -> (n, L) float32."""
    return compute_descriptors(views, AXIS_INTERVALS[:1], BOX_INTERVALS[:1])[:, 0]


def is_distinctive(views: np.ndarray) -> np.ndarray:
    """Return which of (n, side, side) greys are distinctive enough to compare: (n,) bool.

    For a spectrum s of length 1, `1 / sum(s ** 4)` is the effective number of frequencies. Photographs have 10 to 90,
    and must have at least 5. A uniform gradient has 2, and all gradients are similar.
    """
    distinctive = np.empty(len(views), bool)
    for low in range(0, len(distinctive), 4096):
        block = views[low : low + 4096].astype(np.float32)
        power = (compute_weighted_spectrum(block, WHOLE_BOX.repeat(len(block), 0), 16) ** 4).sum((1, 2))
        distinctive[low : low + 4096] = (power < 1 / MIN_SHARED_FREQUENCIES) & (
            block.reshape(len(block), -1).std(1) >= MIN_VIEW_STD
        )
    return distinctive
