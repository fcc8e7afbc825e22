"""Statistics of class maps: plausible flips and quarter turns, for augmentation, and class shares, for class weights.

Street scenes have the sky above the road, so that an upside-down image is implausible. Images of nuclei and aerial
images have no preferred orientation, so that flips and quarter turns are useful augmentations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitreous.data.annotations.target import IGNORE_INDEX, AnnotatedSplit
from vitreous.data.keys import derive_keys, draw_uniform
from vitreous.errors import DataError

MAX_MAPS = 100  # maximum number of class maps that are measured, sampled evenly from the split
MAX_MAP_SIDE = 256  # maximum pixels per axis after subsampling
RANDOM_FLIPS = 1023  # number of random sign flips of the test
SYMMETRY_SIGNIFICANCE = 0.005  # maximum p-value of a fixed orientation
MIN_TESTED_MAPS = 10  # with fewer maps the test cannot be significant; an effect of `STRONG_EFFECT` is then required
#: minimum effect of fixed vertical positions and of border directions; minimum effect of fixed horizontal positions
FIXED_EFFECT, STRONG_EFFECT = 0.15, 0.5
POSITION_NOISE, DIRECTION_NOISE = 0.03, 0.1  # offsets, as shares, that count as noise
OVERRIDE_HINT = "to change this, set --views.flip, --views.flip_vertical or --views.turn"


@dataclass(frozen=True)
class MapSymmetry:
    """The augmentations that leave class maps plausible: mirroring left to right (`flip`), mirroring top to bottom
    (`flip_vertical`), and rotation by 90 degrees (`turn`). `reason` is a clause for messages."""

    flip: bool = True
    flip_vertical: bool = True
    turn: bool = True
    reason: str = "the class maps have no preferred orientation"

    @property
    def text(self) -> str:
        """The note about the chosen augmentations, their reason, and the options that override them."""
        directions = [
            direction for direction, is_used in (("horizontal", self.flip), ("vertical", self.flip_vertical)) if is_used
        ]
        flips = f"{' and '.join(directions)} flips" if directions else "no flips"
        if self.turn:
            flips = f"{flips}, quarter turns"
        elif len(directions) == 1:
            flips = f"{flips} only"
        return f"augmentation: {flips}, as {self.reason}; {OVERRIDE_HINT}"


@dataclass(frozen=True, eq=False)
class ClassOffsets:
    """Measures of class positions that change their sign if a map is mirrored or rotated, for n class maps of K
    classes. Each is (n, K) float64, NaN for absent classes.

    `vertical_offsets` and `horizontal_offsets`: offset of the mean position of a class from the image centre, as a
    share of the height or width, from -0.5 to 0.5. `directions`: (a - b) / (a + b), where a counts the borders of a
    class between rows, and b those between columns.
    """

    vertical_offsets: np.ndarray
    horizontal_offsets: np.ndarray
    directions: np.ndarray


@dataclass(frozen=True)
class MapStatistics:
    """The symmetry of class maps, and the share of each of K classes among the labelled pixels, 0 if there are none."""

    symmetry: MapSymmetry
    class_shares: tuple[float, ...]


def measure_class_maps(split: AnnotatedSplit, classes: Sequence[str]) -> MapStatistics:
    """Measure the symmetry and the class shares of up to `MAX_MAPS` class maps of a split. Unreadable maps are left
    out."""
    maps = [subsample_map(class_map) for class_map in read_class_maps(split)]
    counts = sum(
        (np.bincount(class_map[class_map != IGNORE_INDEX], None, len(classes)) for class_map in maps),
        np.zeros(len(classes)),
    )
    shares = tuple((counts / max(counts.sum(), 1)).tolist())
    are_2d = all(class_map.ndim == 2 for class_map in maps)
    return MapStatistics(choose_symmetry(maps, classes) if are_2d else MapSymmetry(), shares)


def choose_symmetry(maps: Sequence[np.ndarray], classes: Sequence[str]) -> MapSymmetry:
    """Choose the flips and quarter turns that leave class maps, (H, W) int32 each, plausible.

    If a mirrored map were as likely as the original, the class offsets of an image could as well all have the opposite
    sign. The offsets are therefore compared with `RANDOM_FLIPS` copies in which the signs of random images are flipped
    (a sign-flip test). Quarter turns also require that class borders have no preferred direction.
    """
    offsets = measure_class_offsets(maps, len(classes))
    vertical = horizontal = ""
    if has_fixed_sign(offsets.vertical_offsets, POSITION_NOISE, FIXED_EFFECT):
        upper, lower = (classes[k] for k in find_extreme_classes(offsets.vertical_offsets))
        vertical = f"classes have fixed vertical positions ({upper} above {lower})"
    if has_fixed_sign(offsets.horizontal_offsets, POSITION_NOISE, STRONG_EFFECT):
        left_class, right_class = (classes[k] for k in find_extreme_classes(offsets.horizontal_offsets))
        horizontal = f"classes have fixed horizontal positions ({left_class} left of {right_class})"
    if vertical or horizontal:
        reason = " and ".join(filter(None, (vertical, horizontal)))
        return MapSymmetry(not horizontal, not vertical, False, reason)
    if has_fixed_sign(offsets.directions, DIRECTION_NOISE, FIXED_EFFECT):
        return MapSymmetry(turn=False, reason="the borders of classes have a preferred direction")
    return MapSymmetry()


def compute_class_weights(shares: Sequence[float]) -> tuple[float, ...]:
    """Compute class weights of the cross-entropy from the pixel shares (K,) of the classes: 1 / ln(1.02 + share), which
    is larger for rare classes, from 1.4 to 50.5 (ENet, arXiv:1606.02147, section 5.2). Weights have four significant
    digits."""
    return tuple(float(f"{1 / math.log(1.02 + share):.4g}") for share in shares)


def subsample_map(classes_map: np.ndarray) -> np.ndarray:
    """Subsample a class map, (H, W) or (D, H, W), by a stride per axis to at most `MAX_MAP_SIDE` pixels."""
    step = -(-max(classes_map.shape) // MAX_MAP_SIDE)
    return classes_map[(slice(None, None, step),) * classes_map.ndim]


def read_class_maps(split: AnnotatedSplit) -> Iterator[np.ndarray]:
    """Read up to `MAX_MAPS` class maps, (H, W) or (D, H, W) int32, spread evenly over the split; skip unreadable
    ones."""
    count = min(len(split), MAX_MAPS)
    for sample_index in np.unique(np.linspace(0, len(split) - 1, count).round().astype(np.int64)).tolist():
        try:
            yield split.target(sample_index).class_map()
        except DataError:
            continue


def measure_class_offsets(maps: Iterable[np.ndarray], classes: int) -> ClassOffsets:
    """Measure the offsets and border directions of K = `classes` classes in each of n class maps (H, W) int32."""
    measured: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for class_map in maps:
        row_borders, column_borders = (count_borders(class_map, classes, axis) for axis in (0, 1))
        with np.errstate(invalid="ignore"):
            directions = (row_borders - column_borders) / (row_borders + column_borders)
        measured.append(
            (measure_mean_positions(class_map, classes, 0), measure_mean_positions(class_map, classes, 1), directions)
        )
    return ClassOffsets(*np.array(measured).reshape(-1, 3, classes).transpose(1, 0, 2))


def measure_mean_positions(classes_map: np.ndarray, classes: int, axis: int) -> np.ndarray:
    """Measure the mean position of each class along an axis of a class map (H, W): (K,) float64, relative to the
    centre, as a share of the length of the axis; NaN for absent classes."""
    length = classes_map.shape[axis]
    offsets = (np.arange(length) + 0.5) / length - 0.5
    positions = np.broadcast_to(offsets[:, None] if axis == 0 else offsets[None], classes_map.shape)
    is_labelled = classes_map != IGNORE_INDEX
    labels = classes_map[is_labelled]
    with np.errstate(invalid="ignore"):
        return np.bincount(labels, positions[is_labelled], classes) / np.bincount(labels, None, classes)


def count_borders(classes_map: np.ndarray, classes: int, axis: int) -> np.ndarray:
    """Count the borders of each class along an axis of a class map (H, W): (K,) int64. A border is a pair of adjacent
    labelled pixels of which exactly one has the class."""
    first, second = (
        np.moveaxis(classes_map, axis, 0)[pixel_slice] for pixel_slice in (slice(None, -1), slice(1, None))
    )
    border = (first != second) & (first != IGNORE_INDEX) & (second != IGNORE_INDEX)
    return np.bincount(first[border], None, classes) + np.bincount(second[border], None, classes)


def has_fixed_sign(offsets: np.ndarray, noise: float, min_effect: float) -> bool:
    """Return whether the offsets (n, K) of classes, NaN if absent, have the same sign on all images, by a sign-flip
    test. The effect must reach `min_effect` and be significant. With fewer than `MIN_TESTED_MAPS` images, it must reach
    `STRONG_EFFECT`.

        effect(s) = sum over classes of ((sum_i s_i x_i)^2 - sum_i x_i^2) / (m - 1), of the m >= 2 images with the class
                    / sum over images and classes of (x^2 + noise^2)
        p = share of the sign vectors s, RANDOM_FLIPS random ones and s = 1, whose effect is at least that of s = 1

    The effect is an unbiased estimate of the share of the mean square of the offsets that a fixed offset of each class
    explains. Its expectation is 0 for random signs.
    """
    offsets = offsets[np.nan_to_num(offsets).any(1)]  # zero offsets have no sign
    present = ~np.isnan(offsets)
    counts = present.sum(0)
    is_frequent = counts >= 2
    if not is_frequent.any():
        return False
    values, counts = np.where(present, offsets, 0.0)[:, is_frequent], counts[is_frequent]
    squares = (values**2).sum(0)
    total = squares.sum() + noise**2 * counts.sum()
    is_flipped = draw_uniform(derive_keys(np.arange(RANDOM_FLIPS)), len(values)) < 0.5
    signs = np.concatenate([np.ones((1, len(values))), np.where(is_flipped, -1.0, 1.0)])
    effects = ((((signs @ values) ** 2 - squares) / (counts - 1)).sum(1)) / total
    p = (effects >= effects[0] - 1e-9).mean()
    if len(values) < MIN_TESTED_MAPS:
        return bool(effects[0] >= max(min_effect, STRONG_EFFECT))
    return bool(effects[0] >= min_effect and p <= SYMMETRY_SIGNIFICANCE)


def find_extreme_classes(offsets: np.ndarray) -> tuple[int, int]:
    """Find the classes with the lowest and the highest offset in (n, K), NaN if absent. Offsets are summed over images
    and divided by the square root of the number of images with the class, which prefers frequent classes."""
    counts = np.maximum((~np.isnan(offsets)).sum(0), 1)
    scores = np.nansum(offsets, 0) / np.sqrt(counts)
    return int(scores.argmin()), int(scores.argmax())
