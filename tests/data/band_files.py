"""Multi-band image files as GDAL and numpy write them: GeoTIFF in every layout, dtype and compression, and .npy."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NODATA = 42113
#: pixel scale, tie point and GeoKeyDirectory: UTM zone 11 north, pixels of 30 m
GEOREFERENCE: dict[int, tuple[Any, ...]] = {
    33550: (30.0, 30.0, 0.0),
    33922: (0.0, 0.0, 0.0, 500000.0, 4000000.0, 0.0),
    34735: (1, 1, 0, 3, 1024, 0, 1, 1, 1025, 0, 1, 1, 3072, 0, 1, 32611),
}
IMAGE_SIDE = 32


def write_tiff(path: Path, bands: np.ndarray, nodata: float | None = None, located: bool = True, **options) -> Path:
    """Write bands (C, H, W) as GDAL does: pixel-interleaved unless `planarconfig` is "separate".

    `options` are passed to tifffile.
    """
    import tifffile

    tag_types = {33550: "d", 33922: "d", 34735: "H"}
    tags: list[tuple] = [(tag, tag_types[tag], len(row), row, True) for tag, row in GEOREFERENCE.items() if located]
    if nodata is not None:
        tags.append((NODATA, "s", 0, repr(nodata), True))
    planar = options.pop("planarconfig", "contig")
    if len(bands) > 1:
        options |= {"planarconfig": planar, "extrasamples": ["unspecified"] * (len(bands) - 1)}
    values = bands[0] if len(bands) == 1 else bands if planar == "separate" else np.moveaxis(bands, 0, -1)
    tifffile.imwrite(path, values, photometric="minisblack", extratags=tags, metadata=None, **options)
    return path


def mark_as_lzw(path: Path) -> Path:
    """Set the compression tag of a TIFF to LZW without compressing its data."""
    raw = path.read_bytes()
    path.write_bytes(raw.replace(struct.pack("<HHII", 259, 3, 1, 1), struct.pack("<HHII", 259, 3, 1, 5)))
    assert path.read_bytes() != raw
    return path


def make_bands(count: int, dtype: str, seed: int = 0, size: tuple[int, int] = (IMAGE_SIDE, IMAGE_SIDE)) -> np.ndarray:
    """Return random non-zero reflectances (C, H, W) in the range of `dtype`."""
    values = np.random.default_rng(seed).uniform(0.1, 0.4, (count, *size))
    peak = {"uint8": 255, "int8": 127}.get(dtype, 10_000 if np.dtype(dtype).kind in "iu" else 1)
    return (values * peak).astype(dtype)


def write_scenes(home: Path, count: int, change=lambda number, bands: None, dtype: str = "float32", **options) -> Path:
    """Write images/*.tif with five bands and masks/*.png that are 1 where the last band is bright.

    `change(number, bands)` edits the bands of an image in place.
    """
    for folder in ("images", "masks"):
        (home / folder).mkdir(parents=True)
    for number in range(count):
        bands, mask = make_bands(5, dtype, number), np.zeros((IMAGE_SIDE, IMAGE_SIDE), np.uint8)
        mask[8 : 20 + number, 8:20] = 1
        bands[4][mask == 1] *= 2
        change(number, bands)
        write_tiff(home / "images" / f"{number}.tif", bands, **options)
        Image.fromarray(mask).save(home / "masks" / f"{number}.png")
    return home
