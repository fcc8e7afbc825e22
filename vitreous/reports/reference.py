"""Read .npz files with real images, or with the moments of their features: ADM's reference batches
(arXiv:2105.05233) and pytorch-fid's statistics.

| entry | content |
|---|---|
| `arr_0` | images, (n, H, W, 3) uint8 |
| `mu`, `sigma` | mean (2048,) and covariance (2048, 2048) of Inception's last features |
| `mu_s`, `sigma_s` | mean (2023,) and covariance (2023, 2023) of features of a middle layer of Inception, for sFID |
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitreous.errors import DataError
from vitreous.evaluation.frechet import FeatureMoments

#: feature name in `SpaceFeatures` -> entries of mean and covariance, and number of features
MOMENT_ENTRIES = {"features": ("mu", "sigma", 2048), "spatial": ("mu_s", "sigma_s", 2023)}
EXPECTED_CONTENT = "use a file with arr_0, which is (n, H, W, 3) uint8, or with mu and sigma"


@dataclass(frozen=True)
class ReferenceBatch:
    """The content of a reference file: images (n, H, W, C) uint8 or None, and moments by feature name."""

    pixels: np.ndarray | None
    moments: Mapping[str, FeatureMoments]

    @property
    def count(self) -> int:
        """Return the number of images in the file."""
        return 0 if self.pixels is None else len(self.pixels)

    def images(self, chunk_size: int) -> Iterator[np.ndarray]:
        """Yield the images (n, H, W, C) of the file in chunks of at most `chunk_size`; nothing if it has only
        moments."""
        for low in range(0, self.count, chunk_size):
            assert self.pixels is not None
            yield self.pixels[low : low + chunk_size]


def read_reference_batch(source: str) -> ReferenceBatch:
    """Read a reference file. Raises DataError for an invalid or damaged file."""
    path, known_entries = Path(source), ("arr_0", *(name for *names, _ in MOMENT_ENTRIES.values() for name in names))
    if not path.is_file():
        raise DataError(f"no reference file at {source}", EXPECTED_CONTENT)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files if name in known_entries}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise DataError(f"{source} is not a reference file ({str(error)[:100]})", EXPECTED_CONTENT) from None
    pixels, moments = arrays.get("arr_0"), {}
    if pixels is not None and (pixels.dtype != np.uint8 or pixels.ndim != 4 or len(pixels) < 2):
        raise DataError(f"{source}: arr_0 has dtype {pixels.dtype} and shape {pixels.shape}", EXPECTED_CONTENT)
    for name, (mean, covariance, size) in MOMENT_ENTRIES.items():
        if mean in arrays and covariance in arrays:
            pair = arrays[mean].astype(np.float64), arrays[covariance].astype(np.float64)
            if (
                pair[0].shape != (size,)
                or pair[1].shape != (size, size)
                or not all(np.isfinite(array).all() for array in pair)
            ):
                problem = f"{source}: {mean} and {covariance} are not a mean and covariance of {size} features"
                raise DataError(problem, EXPECTED_CONTENT)
            moments[name] = pair
    if pixels is None and "features" not in moments:
        content = f"only {', '.join(arrays)}" if arrays else "none of the arrays of a reference file"
        raise DataError(f"{source} contains {content}", EXPECTED_CONTENT)
    return ReferenceBatch(pixels, moments)
