"""Volume masks are resampled to the grid of their images; palette masks and class colours are combined."""

from __future__ import annotations

from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.annotations.solids import AFFINE, make_solid
from tests.data.test_split_names import write_image
from vitreous.data.sources import open_data
from vitreous.errors import DataError

nibabel = pytest.importorskip("nibabel")


def write_nifti(path: Path, voxels: np.ndarray, affine: np.ndarray | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, affine), path)


def read_classes(root: Path) -> np.ndarray:
    return open_data(root).split("train").target(0).classes


def reorient(values: np.ndarray, axis_matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the same voxels with permuted and flipped axes, and their affine."""
    affine = AFFINE @ nibabel.orientations.inv_ornt_aff(axis_matrix, values.shape)
    return nibabel.orientations.apply_orientation(values, axis_matrix), affine


@pytest.mark.parametrize("axes", list(permutations(range(3))))
def test_masks_are_reoriented_to_their_image(tmp_path, axes):
    voxels, classes = make_solid(1)
    for signs in product((1, -1), repeat=3):
        write_nifti(tmp_path / "images" / "0.nii.gz", voxels, AFFINE)
        reoriented, affine = reorient(classes, np.array(list(zip(axes, signs, strict=True)), float))
        write_nifti(tmp_path / "masks" / "0.nii.gz", reoriented, affine)
        assert np.array_equal(read_classes(tmp_path), classes)


def test_reoriented_images_match_their_masks(tmp_path):
    voxels, classes = make_solid(1)
    reoriented, affine = reorient(voxels, np.array([[1, -1], [0, 1], [2, -1]], float))
    write_nifti(tmp_path / "images" / "0.nii.gz", reoriented, affine)
    write_nifti(tmp_path / "masks" / "0.nii.gz", classes, AFFINE)
    assert np.isclose(reoriented[read_classes(tmp_path) == 1].mean(), voxels[classes == 1].mean())


def test_masks_off_the_image_grid_are_rejected(tmp_path):
    voxels, classes = make_solid(1)
    write_nifti(tmp_path / "images" / "0.nii.gz", voxels, AFFINE)
    shifted_affine = AFFINE.copy()
    shifted_affine[0, 3] += 4
    for affine in (shifted_affine, AFFINE * [[1.1], [1.1], [1.1], [1]], np.eye(4)):
        write_nifti(tmp_path / "masks" / "0.nii.gz", classes, affine)
        with pytest.raises(DataError, match=r"off the grid|another axis order"):
            read_classes(tmp_path)
    close_affine = AFFINE.copy()
    close_affine[0, 3] += 0.01
    write_nifti(tmp_path / "masks" / "0.nii.gz", classes, close_affine)
    assert np.array_equal(read_classes(tmp_path), classes)


def test_masks_without_an_affine_are_read(tmp_path):
    voxels, classes = make_solid(1)
    write_nifti(tmp_path / "images" / "0.nii.gz", voxels, AFFINE)
    write_nifti(tmp_path / "masks" / "0.nii.gz", classes, None)  # without sform and qform codes
    assert np.array_equal(read_classes(tmp_path), classes)
    (tmp_path / "masks" / "0.nii.gz").unlink()
    np.savez(tmp_path / "masks" / "0.npz", classes)
    assert np.array_equal(read_classes(tmp_path), classes)


def test_nearly_integer_mask_values_are_rounded(tmp_path):
    voxels, classes = make_solid(1)
    write_nifti(tmp_path / "images" / "0.nii.gz", voxels, AFFINE)
    write_nifti(tmp_path / "masks" / "0.nii.gz", classes.astype(np.float32) * np.float32(0.9999999), AFFINE)
    assert np.array_equal(read_classes(tmp_path), classes)
    write_nifti(tmp_path / "masks" / "0.nii.gz", classes.astype(np.float32) * np.float32(0.5), AFFINE)
    with pytest.raises(DataError, match="is not a class"):
        read_classes(tmp_path)


def write_palette(path: Path, numbers: np.ndarray, palette: list[tuple[int, int, int]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(numbers.astype(np.uint8), "P")
    image.putpalette([value for colour in palette for value in colour])
    image.save(path)


ROAD, SKY, CAR = (128, 64, 128), (70, 130, 180), (0, 0, 142)


@pytest.mark.parametrize(
    "palette,expected",
    [
        ([ROAD, SKY, CAR], [0, 1, 2]),
        ([SKY, CAR, ROAD], [1, 2, 0]),
        ([(0, 0, 0), (1, 1, 1), (2, 2, 2)], [0, 1, 2]),
        ([ROAD, SKY, (9, 8, 7)], [0, 1, 2]),
    ],
)
def test_palette_masks_match_class_colours(tmp_path, palette, expected):
    numbers = np.arange(120).reshape(10, 12) % 3
    write_image(tmp_path / "images" / "0.png")
    write_palette(tmp_path / "masks" / "0.png", numbers, palette)
    (tmp_path / "classes.txt").write_text("road 128 64 128\nsky 70 130 180\ncar 0 0 142\n")
    assert np.array_equal(read_classes(tmp_path), np.array(expected)[numbers])


def test_palettes_with_unknown_colours_are_rejected(tmp_path):
    write_image(tmp_path / "images" / "0.png")
    write_palette(tmp_path / "masks" / "0.png", np.arange(120).reshape(10, 12) % 3, [CAR, (5, 6, 7), (9, 8, 7)])
    (tmp_path / "classes.txt").write_text("road 128 64 128\nsky 70 130 180\ncar 0 0 142\n")
    with pytest.raises(DataError, match=r"palette with colours that classes\.txt does not list"):
        read_classes(tmp_path)


def test_index_arrays_are_read_when_classes_have_colours(tmp_path):
    numbers = np.arange(120).reshape(10, 12) % 3
    write_image(tmp_path / "images" / "0.png")
    (tmp_path / "masks").mkdir()
    np.save(tmp_path / "masks" / "0.npy", numbers)
    (tmp_path / "classes.txt").write_text("a 1 1 1\nb 2 2 2\nc 3 3 3\n")
    assert np.array_equal(read_classes(tmp_path), numbers)
