"""Statistics of class maps that choose augmentation and class weights: the flips and quarter turns that they allow, and
the share of each class.

A street has its sky above its road, so an image that is upside down shows nothing that occurs. Nuclei and aerial images
have no such order, and flips and turns multiply their training images.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitreous.data.annotations.target import IGNORE_INDEX, AnnotatedSplit
from vitreous.data.keys import derive_keys, draw_uniform
from vitreous.errors import DataError

MAX_MAPS = 100  # class maps, spread over the split, that stand for all
MAX_MAP_SIDE = 256  # pixels of a class map that are looked at along each axis
RANDOM_FLIPS = 1023  # of the maps, to compare with those as they are
SYMMETRY_SIGNIFICANCE = 0.005
MIN_TESTED_MAPS = 10  # of fewer, no test reaches that significance, and an effect of `STRONG_EFFECT` decides
FIXED_EFFECT, STRONG_EFFECT = (
    0.15,
    0.5,
)  # effects from which vertical positions and directions, and left and right, are fixed
POSITION_NOISE, DIRECTION_NOISE = 0.03, 0.1  # offsets, as shares, that augmentation may ignore
OVERRIDE_HINT = "to change this, set --views.flip, --views.flip_vertical or --views.turn"


@dataclass(frozen=True)
class MapSymmetry:
    """Whether class maps are as likely when mirrored left to right (`flip`), upside down (`flip_vertical`), and rotated
    by 90 degrees (`turn`); `reason` is a clause on what decided it."""

    flip: bool = True
    flip_vertical: bool = True
    turn: bool = True
    reason: str = "the class maps have no preferred orientation"

    @property
    def text(self) -> str:
        """The augmentation that this allows, the reason, and the options that change it, in one line."""
        words = [word for word, is_used in (("horizontal", self.flip), ("vertical", self.flip_vertical)) if is_used]
        flips = f"{' and '.join(words)} flips" if words else "no flips"
        if self.turn:
            flips = f"{flips}, quarter turns"
        elif len(words) == 1:
            flips = f"{flips} only"
        return f"augmentation: {flips}, as {self.reason}; {OVERRIDE_HINT}"


@dataclass(frozen=True, eq=False)
class ClassOffsets:
    """What a flip negates, for n class maps of K classes, (n, K) float64, NaN where a map does not have the class.

    `rows` and `columns`: from the middle of the image to the mean position of the class, as shares of height and width,
    from -0.5 to 0.5. `directions`: (a - b) / (a + b) for the class's borders between rows, a, and between columns, b.
    """

    rows: np.ndarray
    columns: np.ndarray
    directions: np.ndarray


@dataclass(frozen=True)
class MapStatistics:
    """The symmetry of class maps, and for each of K classes its share of their labelled pixels, all 0 without any."""

    symmetry: MapSymmetry
    shares: tuple[float, ...]


def measure_class_maps(split: AnnotatedSplit, classes: Sequence[str]) -> MapStatistics:
    """Measure up to `MAX_MAPS` class maps of a split, spread over it; maps that cannot be read are left out."""
    maps = [subsample_map(one) for one in read_class_maps(split)]
    counts = sum((np.bincount(one[one != IGNORE_INDEX], None, len(classes)) for one in maps), np.zeros(len(classes)))
    shares = tuple((counts / max(counts.sum(), 1)).tolist())
    pictures = all(one.ndim == 2 for one in maps)
    return MapStatistics(choose_symmetry(maps, classes) if pictures else MapSymmetry(), shares)


def choose_symmetry(maps: Sequence[np.ndarray], classes: Sequence[str]) -> MapSymmetry:
    """Test which flips and quarter turns class maps, (H, W) int32 each, allow.

    If mirrored maps were as likely, the positions of an image's classes could as well have the other sign, all of them
    together. So the maps are compared with `RANDOM_FLIPS` copies of which each is mirrored or not (a sign-flip test).
    Quarter turns also need the borders of classes to have no preferred direction.
    """
    offsets = measure_class_offsets(maps, len(classes))
    vertical = horizontal = ""
    if has_fixed_sign(offsets.rows, POSITION_NOISE, FIXED_EFFECT):
        upper, lower = (classes[k] for k in find_extreme_classes(offsets.rows))
        vertical = f"classes have fixed vertical positions ({upper} above {lower})"
    if has_fixed_sign(offsets.columns, POSITION_NOISE, STRONG_EFFECT):
        first, last = (classes[k] for k in find_extreme_classes(offsets.columns))
        horizontal = f"classes have fixed horizontal positions ({first} left of {last})"
    if vertical or horizontal:
        reason = " and ".join(filter(None, (vertical, horizontal)))
        return MapSymmetry(not horizontal, not vertical, False, reason)
    if has_fixed_sign(offsets.directions, DIRECTION_NOISE, FIXED_EFFECT):
        return MapSymmetry(turn=False, reason="the borders of classes have a preferred direction")
    return MapSymmetry()


def compute_class_weights(shares: Sequence[float]) -> tuple[float, ...]:
    """Shares (K,) of pixels -> K weights of the cross-entropy, of which rare classes have larger ones: 1 / ln(1.02 +
    share), from 1.4 to 50.5 (ENet, arXiv:1606.02147, section 5.2), to four digits."""
    return tuple(float(f"{1 / math.log(1.02 + share):.4g}") for share in shares)


def subsample_map(classes_map: np.ndarray) -> np.ndarray:
    """Take every n-th pixel of a class map, (H, W) or (D, H, W), along each axis, so that none has more than
    `MAX_MAP_SIDE`."""
    step = -(-max(classes_map.shape) // MAX_MAP_SIDE)
    return classes_map[(slice(None, None, step),) * classes_map.ndim]


def read_class_maps(split: AnnotatedSplit) -> Iterator[np.ndarray]:
    """Read up to `MAX_MAPS` class maps, (H, W) or (D, H, W) int32, spread evenly over the split, those that can be
    read."""
    count = min(len(split), MAX_MAPS)
    for sample in np.unique(np.linspace(0, len(split) - 1, count).round().astype(np.int64)).tolist():
        try:
            yield split.target(sample).class_map()
        except DataError:
            continue


def measure_class_offsets(maps: Iterable[np.ndarray], classes: int) -> ClassOffsets:
    """Measure where the K `classes` lie in each of n class maps (H, W) int32 and how their borders run."""
    measured: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for one in maps:
        rows, columns = (count_borders(one, classes, axis) for axis in (0, 1))
        with np.errstate(invalid="ignore"):
            directions = (rows - columns) / (rows + columns)
        measured.append((measure_mean_positions(one, classes, 0), measure_mean_positions(one, classes, 1), directions))
    return ClassOffsets(*np.array(measured).reshape(-1, 3, classes).transpose(1, 0, 2))


def measure_mean_positions(classes_map: np.ndarray, classes: int, axis: int) -> np.ndarray:
    """Return (K,) float64, the mean position of each class of a map (H, W) along an axis, as a share of its length from
    the middle; NaN for a class without a pixel."""
    length = classes_map.shape[axis]
    offsets = (np.arange(length) + 0.5) / length - 0.5
    places = np.broadcast_to(offsets[:, None] if axis == 0 else offsets[None], classes_map.shape)
    known = classes_map != IGNORE_INDEX
    labels = classes_map[known]
    with np.errstate(invalid="ignore"):
        return np.bincount(labels, places[known], classes) / np.bincount(labels, None, classes)


def count_borders(classes_map: np.ndarray, classes: int, axis: int) -> np.ndarray:
    """Return (K,) int64, the pairs of neighbours along an axis of a map (H, W) of which one has the class, and the
    other another class."""
    first, second = (np.moveaxis(classes_map, axis, 0)[part] for part in (slice(None, -1), slice(1, None)))
    border = (first != second) & (first != IGNORE_INDEX) & (second != IGNORE_INDEX)
    return np.bincount(first[border], None, classes) + np.bincount(second[border], None, classes)


def has_fixed_sign(offsets: np.ndarray, noise: float, least: float) -> bool:
    """Whether offsets (n, K), NaN for none, have fixed signs: the effect reaches `least` and is significant, or, of
    fewer images than `MIN_TESTED_MAPS`, reaches `STRONG_EFFECT`.

        effect(s) = sum over classes of ((sum_i s_i x_i)^2 - sum_i x_i^2) / (m - 1), of the m >= 2 images with the class
                    / sum over images and classes of (x^2 + noise^2)
        p = share of random signs s, and s = 1, whose effect is at least that of s = 1

    The effect is the share of the mean square that a fixed offset of each class explains, without bias: its expectation
    is 0 where signs are random.
    """
    offsets = offsets[np.nan_to_num(offsets).any(1)]  # others have no sign
    present = ~np.isnan(offsets)
    counts = present.sum(0)
    often = counts >= 2
    if not often.any():
        return False
    values, counts = np.where(present, offsets, 0.0)[:, often], counts[often]
    squares = (values**2).sum(0)
    total = squares.sum() + noise**2 * counts.sum()
    chance = draw_uniform(derive_keys(np.arange(RANDOM_FLIPS)), len(values)) < 0.5
    signs = np.concatenate([np.ones((1, len(values))), np.where(chance, -1.0, 1.0)])
    effects = ((((signs @ values) ** 2 - squares) / (counts - 1)).sum(1)) / total
    p = (effects >= effects[0] - 1e-9).mean()
    if len(values) < MIN_TESTED_MAPS:
        return bool(effects[0] >= max(least, STRONG_EFFECT))
    return bool(effects[0] >= least and p <= SYMMETRY_SIGNIFICANCE)


def find_extreme_classes(offsets: np.ndarray) -> tuple[int, int]:
    """Return the classes with the lowest and the highest offset of (n, K), NaN for none, by the sum over the images
    divided by the square root of their number, so that frequent classes are named."""
    counts = np.maximum((~np.isnan(offsets)).sum(0), 1)
    scores = np.nansum(offsets, 0) / np.sqrt(counts)
    return int(scores.argmin()), int(scores.argmax())
