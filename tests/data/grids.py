"""A test modality, which shows the code that a new modality needs.

`GRID_MODALITIES` is its entry of the modality table. A grid is a text file of numbers, one row per line, for example a
height map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from vitreous.data.decoding.decode import read_input_file
from vitreous.data.modalities.base import Preprocess, RawSample, SampleForm
from vitreous.data.modalities.volumes import crop_or_pad
from vitreous.errors import DataError


@dataclass(frozen=True)
class GridPreprocess(Preprocess):
    """Grids (1, H, W) float32 in units of `unit_height`, centre-cropped or zero-padded."""

    noun: ClassVar[str] = "grids"
    unit: ClassVar[str] = "heights"
    suffixes: ClassVar[frozenset[str]] = frozenset([".grid"])

    _: KW_ONLY
    unit_height: float = 1.0
    name: Literal["grids"] = "grids"

    @classmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, requested: Mapping[str, str]) -> SampleForm:
        heights = read_grid(raw, name)
        return SampleForm(heights.shape[1:], 1, cls(heights.shape[1:], 1, (0.0,), (1.0,)))

    def decode(self, raw: RawSample, name: str | None = None) -> np.ndarray:
        return read_grid(raw, name or str(raw)[:99]) / np.float32(self.unit_height)

    def to_array(self, decoded: Any) -> np.ndarray:
        return crop_or_pad(decoded, self.image)


GRID_MODALITIES = {"grids": GridPreprocess}


def read_grid(raw: Any, name: str) -> np.ndarray:
    """Read a path, a file's bytes or an array (H, W) as (1, H, W) float32. Raises DataError."""
    if isinstance(raw, np.ndarray):
        return raw[None].astype(np.float32)
    content = raw if isinstance(raw, bytes) else read_input_file(raw)
    try:
        return np.array([line.split() for line in content.decode().splitlines()], np.float32)[None]
    except ValueError as error:
        raise DataError(f"{name}: no grid of numbers ({error})", "write one row of numbers a line") from None


def write_grids(home: Any, count: int, size: tuple[int, int] = (10, 12)) -> Any:
    """Write a folder of two classes (central hills, slopes) with the splits `train` and `test`."""
    rng = np.random.default_rng(0)
    y, x = (np.linspace(-1, 1, side) for side in size)
    shapes = {"hill": np.exp(-3 * (y[:, None] ** 2 + x**2)), "slope": np.broadcast_to((x + 1) / 2, size)}
    for split, files in (("train", count), ("test", count // 2)):
        for label, shape in shapes.items():
            (home / split / label).mkdir(parents=True)
            for number in range(files):
                np.savetxt(home / split / label / f"{number}.grid", shape + rng.normal(0, 0.1, size), "%.5f")
    return home
