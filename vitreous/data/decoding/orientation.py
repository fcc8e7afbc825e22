"""Bring the mask of a NIfTI volume to the voxel grid of its image, by the affines in both headers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitreous.data.decoding.volumes import nifti_header
from vitreous.errors import DataError, printable

MAX_SHIFT = 0.5  # voxels that the corners of two equal grids may differ by


def read_affine(place: Path) -> np.ndarray | None:
    """Return the (4, 4) affine from voxels to millimetres in a NIfTI header; None for other files, and for headers that
    do not state one. Raises DataError for a file that cannot be read."""
    header = nifti_header(place)
    if header is None or not (int(header["sform_code"]) > 0 or int(header["qform_code"]) > 0):
        return None
    affine = header.get_best_affine()
    return affine if np.isfinite(affine).all() and abs(np.linalg.det(affine[:3, :3])) > 1e-12 else None


def align_labels(labels: np.ndarray, place: Path, image: Path, size: tuple[int, ...]) -> np.ndarray:
    """Return the labels (D, H, W) of the file `place` in the axis order and directions of its image, which has this
    size. Labels are returned as they are where a header states no affine, and where their size fits in no order.

    Raises DataError where both headers state affines and the mask does not lie on the grid of its image.
    """
    source, target = (None, None) if labels.ndim != 3 else (read_affine(place), read_affine(image))
    if source is None or target is None:
        return labels
    import nibabel.orientations as orientations

    turn = orientations.ornt_transform(orientations.io_orientation(source), orientations.io_orientation(target))
    aligned = orientations.apply_orientation(labels, turn)
    if aligned.shape != size != labels.shape:
        return labels
    hint = "resample the mask to its image; if the voxels match, give the mask the affine of its image"
    if aligned.shape != size:
        problem = f"{printable(place)} has its axes in another order than its image {printable(image)}, and its size"
        raise DataError(problem, hint)
    affine = source @ orientations.inv_ornt_aff(turn, labels.shape)
    corners = np.stack(np.meshgrid(*[(0, side - 1) for side in size], [1], indexing="ij"), -1).reshape(-1, 4)
    shift = np.abs(np.linalg.solve(target, (affine - target) @ corners.T)[:3]).max()
    if shift > MAX_SHIFT:
        problem = f"{printable(place)} lies {shift:.3g} voxels off the grid of its image {printable(image)}"
        raise DataError(problem, hint)
    return np.ascontiguousarray(aligned)
