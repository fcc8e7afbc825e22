"""Small synthetic volumes with masks (boxes and balls in noise) in every supported file format."""

from __future__ import annotations

from pathlib import Path

import numpy as np

# rotated, with different voxel sizes along the axes
AFFINE = np.array([[0, -2.0, 0, 5], [1.5, 0, 0, -7], [0, 0, 3.0, 11], [0, 0, 0, 1]])


def make_solid(number: int, size: tuple[int, int, int] = (12, 17, 14)) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 voxels (D, H, W) and uint8 classes: 0 noise, 1 a bright box, 2 a dark ball."""
    draw = np.random.default_rng(number)
    voxels = draw.normal(100, 5, size).astype(np.float32) * (1 + number)
    classes = np.zeros(size, np.uint8)
    corner = [int(draw.integers(0, max(1, side // 2 - 4))) for side in size]
    classes[tuple(slice(low, low + 4) for low in corner)] = 1
    centre = [int(draw.integers(side // 2 + 2, side - 2)) for side in size]
    coordinates = np.stack(np.meshgrid(*map(np.arange, size), indexing="ij"))
    classes[((coordinates - np.array(centre)[:, None, None, None]) ** 2).sum(0) <= 6] = 2
    voxels[classes == 1] *= 2
    voxels[classes == 2] *= 0.3
    return voxels, classes


def write_volume(path: Path, voxels: np.ndarray) -> Path:
    """Write an array in the format of the file suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith((".nii", ".nii.gz")):
        import nibabel

        nibabel.save(nibabel.Nifti1Image(voxels, AFFINE), path)  # type: ignore[attr-defined]
    elif path.suffix == ".npy":
        np.save(path, voxels)
    elif path.suffix == ".npz":
        np.savez_compressed(path, voxels)
    else:
        import tifffile

        colours = "rgb" if voxels.ndim == 4 else "minisblack"
        tifffile.imwrite(path, voxels, photometric=colours, compression="zlib")
    return path


def write_solids(home: Path, count: int = 6, ending: str = ".nii.gz", names: str = "background\nbox\nball\n") -> Path:
    """Write `images/` and `masks/` of volumes, and `classes.txt`."""
    for number in range(count):
        voxels, classes = make_solid(number)
        write_volume(home / "images" / f"{number}{ending}", voxels)
        write_volume(home / "masks" / f"{number}{ending}", classes)
    if names:
        (home / "classes.txt").write_text(names)
    return home
