"""Flips and quarter turns allowed by class maps: streets allow one flip, nuclei and fields allow all."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.data.annotations.streets import STREET_CLASSES, draw_fields, draw_nuclei, draw_street
from vitreous.data.annotations.map_statistics import (
    MAX_MAPS,
    MapStatistics,
    MapSymmetry,
    compute_class_weights,
    has_fixed_sign,
    measure_class_maps,
)
from vitreous.data.annotations.target import IGNORE_INDEX, create_empty_target
from vitreous.errors import DataError

ALL_SYMMETRIES = (True, True, True)


@dataclass(frozen=True)
class ClassMapSplit:
    """A split of class maps (H, W) uint8 in memory; 255 is IGNORE, and an index in `broken` raises DataError."""

    maps: list[np.ndarray]
    broken: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.maps)

    def target(self, sample):
        if sample in self.broken:
            raise DataError("a mask that cannot be read")
        classes = self.maps[sample].astype(np.int32)
        return create_empty_target(classes.shape, np.where(classes == 255, IGNORE_INDEX, classes))


def measure_statistics(maps, names=STREET_CLASSES, **options) -> MapStatistics:
    split: Any = ClassMapSplit(list(maps), **options)
    return measure_class_maps(split, names)


def measure_symmetry(maps, **options) -> MapSymmetry:
    return measure_statistics(maps, **options).symmetry


def get_allowed_symmetries(maps, **options) -> tuple[bool, bool, bool]:
    symmetry = measure_symmetry(maps, **options)
    return symmetry.flip, symmetry.flip_vertical, symmetry.turn


def draw_maps(draw, count, first=0):
    return [draw(first + number) for number in range(count)]


@pytest.mark.parametrize("count", [3, 10, 40])
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_streets_allow_horizontal_flips_only(count, first):
    assert get_allowed_symmetries(draw_maps(draw_street, count, first)) == (True, False, False)


@pytest.mark.parametrize(("count", "least"), [(4, 17), (10, 19), (40, 19)])
@pytest.mark.parametrize("draw", [draw_nuclei, draw_fields])
def test_nuclei_and_fields_allow_everything(draw, count, least):
    """Three tests at significance level 0.005: about 1 of 70 sets without orientation is classified as oriented."""
    results = [get_allowed_symmetries(draw_maps(draw, count, first)) for first in range(0, 2000, 100)]
    assert results.count(ALL_SYMMETRIES) >= least


def test_rotated_street_maps_allow_only_vertical_flips():
    symmetry = measure_symmetry(np.rot90(class_map) for class_map in draw_maps(draw_street, 12))
    assert (symmetry.flip, symmetry.flip_vertical, symmetry.turn) == (False, True, False)
    assert symmetry.reason == "classes have fixed horizontal positions (sky left of road)"


def test_a_class_in_a_fixed_corner_forbids_every_flip():
    corner = [np.pad(np.ones((6, 6), np.uint8), ((2, 40 + n % 3), (3, 30))) for n in range(12)]
    assert get_allowed_symmetries(corner) == (False, False, False)
    assert measure_symmetry(corner).text.startswith("augmentation: no flips, as classes have fixed vertical positions")


def test_directional_borders_forbid_only_quarter_turns():
    stripes = [np.repeat(np.random.default_rng(n).permutation(16) % 2, 4)[:, None].repeat(64, 1) for n in range(12)]
    symmetry = measure_symmetry(np.asarray(stripes, np.uint8))
    assert (symmetry.flip, symmetry.flip_vertical, symmetry.turn) == (True, True, False)
    assert symmetry.reason == "the borders of classes have a preferred direction"


def test_flipping_half_of_the_maps_allows_flips():
    maps = [class_map[::-1] if number % 2 else class_map for number, class_map in enumerate(draw_maps(draw_street, 40))]
    assert get_allowed_symmetries(maps)[:2] == (True, True)


def test_the_symmetry_decision_is_logged_with_its_options():
    assert measure_symmetry(draw_maps(draw_street, 10)).text == (
        "augmentation: horizontal flips only, as classes have fixed vertical positions (sky above road); "
        "to change this, set --views.flip, --views.flip_vertical or --views.turn"
    )
    assert MapSymmetry().text == (
        "augmentation: horizontal and vertical flips, quarter turns, as the class maps have no preferred orientation; "
        "to change this, set --views.flip, --views.flip_vertical or --views.turn"
    )


def test_symmetry_ignores_unreadable_maps_and_absent_classes():
    maps = draw_maps(draw_street, 10)
    maps += [np.full((60, 80), 255, np.uint8), np.zeros((60, 80), np.uint8)]
    assert get_allowed_symmetries(maps, broken=frozenset({3, 4})) == (True, False, False)
    assert (
        get_allowed_symmetries([], broken=frozenset()) == ALL_SYMMETRIES
        and get_allowed_symmetries(maps[10:]) == ALL_SYMMETRIES
    )
    assert get_allowed_symmetries([maps[0]]) == ALL_SYMMETRIES  # a single map is not enough for a decision


def test_sampled_maps_are_evenly_spaced_and_deterministic():
    read_samples = []

    class RecordingSplit(ClassMapSplit):
        def target(self, sample):
            read_samples.append(sample)
            return super().target(sample)

    split: Any = RecordingSplit([draw_nuclei(0)] * (3 * MAX_MAPS))
    assert measure_class_maps(split, STREET_CLASSES) == measure_class_maps(split, STREET_CLASSES)
    assert len(read_samples) == 2 * MAX_MAPS and read_samples[:MAX_MAPS] == read_samples[MAX_MAPS:]
    assert read_samples[0] == 0 and read_samples[MAX_MAPS - 1] == 3 * MAX_MAPS - 1


def test_symmetry_does_not_depend_on_map_size_and_sampling():
    maps = [class_map.repeat(12, 0).repeat(12, 1) for class_map in draw_maps(draw_street, 10)]
    assert measure_symmetry(maps) == measure_symmetry(draw_maps(draw_street, 10))


def test_small_offsets_and_single_images_have_no_fixed_sign():
    # half a percent of the height is significant but below the effect threshold
    assert not has_fixed_sign(np.full((50, 2), 0.005), 0.03, 0.15)
    assert has_fixed_sign(np.full((50, 2), 0.05), 0.03, 0.15)
    # each class occurs in one image only
    assert not has_fixed_sign(np.array([[0.4, np.nan], [np.nan, 0.3]]), 0.03, 0.15)
    assert not has_fixed_sign(np.where(np.arange(50) % 2, 0.3, -0.3)[:, None], 0.03, 0.15)


def test_class_shares_skip_ignored_pixels_and_weights_match_enet():
    half = np.zeros((10, 10), np.uint8)
    half[:5] = 255
    half[5, :5] = 2
    assert measure_statistics([half] * 3, ("a", "b", "c")).class_shares == (0.9, 0.0, 0.1)
    assert measure_statistics([], ("a", "b")).class_shares == (0.0, 0.0)
    assert compute_class_weights((0.9, 0.0, 0.1)) == (1.533, 50.5, 8.824)
