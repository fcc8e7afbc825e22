"""Datasets of volumes with class maps, for segmentation: NIfTI, .npy, .npz or TIFF stacks.

    DIR/images/a.nii.gz    DIR/masks/a.nii.gz     each voxel is the index of its class; also DIR/labels, in any format
    DIR/imagesTr/a.nii.gz  DIR/labelsTr/a.nii.gz  DIR/dataset.json, as in the Medical Segmentation Decathlon

Masks of NIfTI files are converted to the axis order and directions of their images, by the affines of both. Splits and
`classes.txt` are as for images; without that file, `labels` of `dataset.json` define the class names.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from vitreous.data.annotations.mask_places import ImageMaskReader, find_image_folder, find_mask_folder
from vitreous.data.annotations.masks import MASK_FOLDER_NAMES, open_masks
from vitreous.data.decoding.volumes import (
    VOLUME_ONLY_SUFFIXES,
    VOLUME_SUFFIXES,
    open_volume,
    read_label_volume,
    read_nifti_header,
    read_volume_form,
    strip_volume_suffix,
)
from vitreous.data.layouts.folder import list_files_by_suffix
from vitreous.data.layouts.split_names import find_split_folders
from vitreous.data.split import Data
from vitreous.data.text_files import read_text
from vitreous.errors import DataError, escape_unprintable

MAX_GRID_SHIFT = 0.5  # maximum distance between the corners of an image's grid and those of its mask's grid, in voxels

DECATHLON_FOLDERS = ("imagesTr", "labelsTr")
DATASET_JSON = "dataset.json"


def read_affine(path: Path) -> np.ndarray | None:
    """Read the affine (4, 4) from voxels to millimetres in a NIfTI header; None for other files, and for headers
    without a valid affine. Raises DataError for an unreadable file."""
    header = read_nifti_header(path)
    if header is None or not (int(header["sform_code"]) > 0 or int(header["qform_code"]) > 0):
        return None
    affine = header.get_best_affine()
    return affine if np.isfinite(affine).all() and abs(np.linalg.det(affine[:3, :3])) > 1e-12 else None


def align_to_image_grid(labels: np.ndarray, mask_path: Path, image_path: Path, size: tuple[int, ...]) -> np.ndarray:
    """Convert the labels (D, H, W) of a mask to the axis order and directions of its image of `size`, by the affines of
    both files.

    Labels are unchanged if a header has no affine, or if no axis order has the size of the image. Raises DataError if
    both headers have affines but the mask is not on the grid of its image.
    """
    source, target = (None, None) if labels.ndim != 3 else (read_affine(mask_path), read_affine(image_path))
    if source is None or target is None:
        return labels
    import nibabel.orientations as orientations

    transform = orientations.ornt_transform(orientations.io_orientation(source), orientations.io_orientation(target))
    aligned = orientations.apply_orientation(labels, transform)
    if aligned.shape != size != labels.shape:
        return labels
    hint = "resample the mask to its image; if the voxels match, copy the affine of the image to the mask"
    if aligned.shape != size:
        problem = (
            f"{escape_unprintable(mask_path)} has another axis order than its "
            f"image {escape_unprintable(image_path)}, but the same size"
        )
        raise DataError(problem, hint)
    affine = source @ orientations.inv_ornt_aff(transform, labels.shape)
    corners = np.stack(np.meshgrid(*[(0, length - 1) for length in size], [1], indexing="ij"), -1).reshape(-1, 4)
    shift = np.abs(np.linalg.solve(target, (affine - target) @ corners.T)[:3]).max()
    if shift > MAX_GRID_SHIFT:
        problem = (
            f"{escape_unprintable(mask_path)} lies {shift:.3g} voxels off the grid "
            f"of its image {escape_unprintable(image_path)}"
        )
        raise DataError(problem, hint)
    return np.ascontiguousarray(aligned)


def list_volumes(folder: Path) -> list[Path]:
    """List the files below a folder with the suffix of a volume, in natural order."""
    return [Path(path) for path in list_files_by_suffix(str(folder), frozenset(VOLUME_SUFFIXES))]


def read_volume_size(path: Path) -> tuple[int, ...]:
    """Read the size (D, H, W) of a volume from its header. Raises DataError for an unreadable file."""
    return read_volume_form(path)[1]


def read_mask_volume(path: Path) -> np.ndarray:
    """Read the class indices (D, H, W) int32 of a mask. Raises DataError for an unreadable file."""
    return read_label_volume(path)


VOLUME_MASK_READER = ImageMaskReader(
    3,
    (("images", DECATHLON_FOLDERS[0]), (*MASK_FOLDER_NAMES, DECATHLON_FOLDERS[1])),
    files=list_volumes,
    stem=strip_volume_suffix,
    size=read_volume_size,
    mask=read_mask_volume,
    align=align_to_image_grid,
)


def has_volume_masks(root: Path) -> bool:
    """Return whether a folder has volumes and masks: a file has a suffix that only volumes have, or the first mask has
    three axes."""
    for split_folder in (root, *find_split_folders(root).values()):
        folder = find_mask_folder(split_folder, VOLUME_MASK_READER)
        if folder is not None:
            images, first_mask = (
                list_volumes(find_image_folder(split_folder, VOLUME_MASK_READER)),
                list_volumes(folder)[0],
            )
            return any(path.name.lower().endswith(tuple(VOLUME_ONLY_SUFFIXES)) for path in (*images, first_mask)) or (
                bool(images) and is_volume_file(first_mask)
            )
    return False


def is_volume_file(path: Path) -> bool:
    """Return whether a file can be opened as a volume with three axes."""
    try:
        return len(open_volume(path, escape_unprintable(path)).shape) == 3
    except DataError:
        return False


def open_volume_masks(root: Path, split_seed: int = 0, ignore_index: int | None = None) -> Data:
    """Open a dataset of volumes with class maps. `ignore_index`: an index of ignored voxels, in addition to 255. Raises
    DataError as `open_masks`, and for a `dataset.json` whose class indices are not consecutive from 0."""
    return open_masks(
        root, split_seed, VOLUME_MASK_READER, read_dataset_json_classes(root / DATASET_JSON), ignore_index
    )


def read_dataset_json_classes(json_path: Path) -> list[str]:
    """Read the class names in a `dataset.json`: `{"labels": {"0": "background", "1": "hippocampus"}}`, or, as in
    nnU-Net, with names as keys and indices as values. Empty if there is no such file. Raises DataError if the file is
    invalid."""
    if not json_path.is_file():
        return []
    try:
        labels = json.loads(read_text(json_path))["labels"]
        keys_are_indices = all(str(key).isdecimal() for key in labels)
        names_by_index = {
            int(key if keys_are_indices else name): str(name if keys_are_indices else key)
            for key, name in labels.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        hint = 'write {"labels": {"0": "background", "1": "…"}}, or add a classes.txt'
        raise DataError(f"{escape_unprintable(json_path)} has no valid class names", hint) from None
    if sorted(names_by_index) != list(range(len(labels))):
        raise DataError(
            f"{escape_unprintable(json_path)} has the class indices {sorted(names_by_index)}",
            "count from 0, without gaps",
        )
    return [names_by_index[index] for index in range(len(names_by_index))]
