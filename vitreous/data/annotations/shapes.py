"""Object shapes of annotation files (boxes, polygons and run lengths), and their conversion to and from masks.

Coordinates are in pixels: x from the left, y from the top; the image extends from 0 to its width and height. In shapes,
H and W are the height and width of an image. Run lengths are the lengths of alternating runs of 0 and 1 in a mask, in
column order, as in COCO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from vitreous.data.annotations.target import Target, mask_to_box, stack_masks
from vitreous.errors import DataError

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, eq=False)
class Shape:
    """An object of an annotation file.

    `label`: its class index. `box`: its bounding box, None if the file has none. `polygons`: the polygons of its mask,
    each (n, 2) float32 of x and y. `runs`: the run lengths of its mask. `crowd`: the object is a group that is not
    divided into objects.
    """

    label: int
    box: Box | None = None
    polygons: tuple[np.ndarray, ...] = ()
    runs: Sequence[int] | None = None
    _: KW_ONLY
    crowd: bool = False

    @property
    def has_mask(self) -> bool:
        """Whether the object has a mask, rather than only a box."""
        return bool(self.polygons) or self.runs is not None

    def mask(self, size: tuple[int, int]) -> np.ndarray:
        """Rasterise the mask of the object on an image of `size` (H, W): (H, W) bool. Raises ValueError if the run
        lengths do not cover the image."""
        if self.runs is not None:
            return rle_to_mask(self.runs, size)
        mask = np.zeros(size, bool)
        for polygon in self.polygons:
            mask |= polygon_to_mask(polygon, size)
        return mask

    def compute_bounding_box(self) -> Box | None:
        """Return the box, or else the bounding box of the polygons; None for an object with run lengths only."""
        if self.box is not None or not self.polygons:
            return self.box
        corners = np.concatenate(self.polygons)
        left, top, right, bottom = (float(edge) for edge in (*corners.min(0), *corners.max(0)))
        return left, top, right, bottom


def shapes_to_target(shapes: Sequence[Shape], size: tuple[int, int], origin: str) -> Target:
    """Convert the objects on an image of `size` (H, W) to a target.

    Boxes are clipped to the image, and objects without pixels are dropped. Masks are kept only if every object has one.
    Raises DataError, with `origin`, if run lengths do not cover the image.
    """
    height, width = size
    limits = np.array([width, height, width, height], np.float32)
    with_masks = bool(shapes) and all(shape.has_mask for shape in shapes)
    boxes, masks, kept_shapes = [], [], []
    for index, shape in enumerate(shapes):
        try:
            mask = shape.mask(size) if with_masks or shape.compute_bounding_box() is None else None
        except ValueError as error:
            raise DataError(f"{origin}, object {index + 1}: {error}", "fix the file, or delete the object") from None
        extent = shape.compute_bounding_box()
        box = (
            mask_to_box(mask)
            if extent is None and mask is not None
            else np.clip(np.array(extent, np.float32), 0, limits)
        )
        if box[2] <= box[0] or box[3] <= box[1] or (with_masks and mask is not None and not mask.any()):
            continue
        boxes.append(box)
        kept_shapes.append(shape)
        if with_masks and mask is not None:
            masks.append(mask)
    labels = np.array([shape.label for shape in kept_shapes], np.int64)
    crowd = np.array([shape.crowd for shape in kept_shapes], bool)
    box_array = np.stack(boxes) if boxes else np.zeros((0, 4), np.float32)
    return Target(size, labels, box_array, crowd, layers=stack_masks(masks, size) if with_masks else None)


def polygon_to_mask(corners: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Rasterise a polygon (n, 2) to (H, W) bool: the pixels whose centres are inside, by the even-odd rule."""
    height, width = size
    mask = np.zeros(size, bool)
    if len(corners) < 3:
        return mask
    x0, y0 = corners.astype(np.float64).T
    x1, y1 = np.roll(x0, -1), np.roll(y0, -1)
    first_row = max(0, math.floor(y0.min() - 0.5))
    last_row = min(height - 1, math.ceil(y0.max() - 0.5))
    pixel_centres = np.arange(width) + 0.5
    for row in range(first_row, last_row + 1):
        y = row + 0.5
        crossed = (y0 <= y) != (y1 <= y)  # an edge includes its upper end, but not its lower end
        if crossed.any():
            a, b, c, d = x0[crossed], y0[crossed], x1[crossed], y1[crossed]
            crossings = np.sort(a + (y - b) * (c - a) / (d - b))
            mask[row] = np.searchsorted(crossings, pixel_centres, side="right") % 2 == 1
    return mask


def rle_to_mask(runs: Sequence[int], size: tuple[int, int]) -> np.ndarray:
    """Decode run lengths to a mask (H, W) bool: lengths of alternating runs of 0 and 1, 0 first, in column order.

    Raises ValueError for negative lengths, and if the runs do not cover the image.
    """
    lengths = np.asarray(runs, np.int64)
    if (lengths < 0).any() or lengths.sum() != size[0] * size[1]:
        raise ValueError(f"the run lengths cover {int(lengths.sum())} pixels, the image has {size[0] * size[1]}")
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(size[::-1]).T


def rle_to_mask_window(runs: Sequence[int], size: tuple[int, int], window: tuple[int, int, int, int]) -> np.ndarray:
    """Decode the window (left, top, right, bottom) of a mask of `size` (H, W) from its run lengths: (h, w) bool.
    Equal to `rle_to_mask(runs, size)[top:bottom, left:right]`, but other columns are not decoded."""
    left, top, right, bottom = window
    edges = np.clip(np.cumsum([0, *runs]), left * size[0], right * size[0])
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, np.diff(edges))
    return flat.reshape(right - left, size[0]).T[top:bottom]


def mask_to_rle(mask: np.ndarray) -> list[int]:
    """Encode a mask (H, W) bool as run lengths, which `rle_to_mask` decodes."""
    flat = mask.T.ravel()
    edges = np.flatnonzero(np.diff(flat)) + 1
    lengths = np.diff([0, *edges.tolist(), flat.size]).tolist()
    return [0, *lengths] if flat.size and flat[0] else lengths


def decode_compressed_rle(text: str) -> list[int]:
    """Decode COCO's compressed run lengths. A number is stored in characters of 5 bits, lowest bits first, with a sixth
    bit if another character follows. From the fourth number on, it is the difference to the number two before. Raises
    ValueError for other characters and for an incomplete text."""
    runs: list[int] = []
    value = shift = 0
    for letter in text:
        bits = ord(letter) - 48
        if not 0 <= bits < 64:
            raise ValueError(f"{letter!r} is not a character of compressed run lengths")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            if bits & 16:
                value -= 1 << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    if shift:
        raise ValueError("compressed run lengths end in the middle of a number")
    return runs


def encode_compressed_rle(runs: Sequence[int]) -> str:
    """Encode run lengths in COCO's compressed form, for `decode_compressed_rle`."""
    letters = []
    for index, run in enumerate(runs):
        value = run - runs[index - 2] if index > 2 else run
        has_more = True
        while has_more:
            bits = value & 31
            value >>= 5
            has_more = value != (-1 if bits & 16 else 0)
            letters.append(chr(48 + bits + 32 * has_more))
    return "".join(letters)


def mask_to_polygon(mask: np.ndarray) -> np.ndarray:
    """Convert a mask (H, W) bool with at least one pixel to a single closed polygon along pixel edges. Returns its
    corners (n, 2) int64 of x and y. `polygon_to_mask` converts the polygon back exactly.

    The outlines of components and holes (`trace_outlines`) are connected to the first outline by a path to each and
    back, along x and then along y. A path that is traversed twice does not change the interior.
    """
    outlines = trace_outlines(mask)
    corners = [*outlines[0], outlines[0][0]]
    x0, y0 = outlines[0][0]
    for outline in outlines[1:]:
        x, y = outline[0]
        corners += [(x, y0), *outline, (x, y), (x, y0), (x0, y0)]
    return np.array(corners[:-1], np.int64)


def box_to_corners(box: np.ndarray) -> np.ndarray:
    """Convert a box (4,) of left, top, right, bottom to its corners (4, 2) of x and y, clockwise from the upper
    left."""
    left, top, right, bottom = box
    return np.array([(left, top), (right, top), (right, bottom), (left, bottom)])


def trace_outlines(mask: np.ndarray) -> list[list[tuple[int, int]]]:
    """Trace the closed outlines of the components and holes of a mask (H, W) bool. Returns the corners (x, y) of each.

    Pixel edges are followed from corner to corner, with the mask on the right, until an outline is closed.
    """
    framed = np.pad(mask, 1).astype(np.int8)
    vertical_steps, horizontal_steps = np.diff(framed, axis=0)[:, 1:-1], np.diff(framed, axis=1)[1:-1]
    successors: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for steps, (from_x, from_y), (to_x, to_y) in (
        (vertical_steps > 0, (0, 0), (1, 0)),  # a mask begins below: along its upper edge to the right
        (vertical_steps < 0, (1, 0), (0, 0)),
        (horizontal_steps > 0, (0, 1), (0, 0)),  # it begins to the right: along its left edge upwards
        (horizontal_steps < 0, (0, 0), (0, 1)),
    ):
        for y, x in np.argwhere(steps).tolist():
            successors.setdefault((x + from_x, y + from_y), []).append((x + to_x, y + to_y))
    outlines = []
    while successors:
        start = corner = next(iter(successors))
        path: list[tuple[int, int]] = []
        while corner in successors:
            path.append(corner)
            next_corners = successors[corner]
            next_corner = next_corners.pop()
            if not next_corners:
                del successors[corner]
            corner = next_corner
            if corner == start:
                break
        triples = zip(path[-1:] + path[:-1], path, path[1:] + path[:1], strict=True)
        outlines.append([b for a, b, c in triples if (a[0] == b[0]) != (b[0] == c[0])])
    return outlines
