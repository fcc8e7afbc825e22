"""Synthetic volumes and signals with classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.data.annotations.solids import write_volume


def make_ball(seed: int, large: bool, side: int = 12) -> np.ndarray:
    """Return noise (side, side, side + 2) float32 with a bright ball (radius 2 or 4 voxels) at a random position."""
    rng = np.random.default_rng(seed)
    offsets = np.indices((side, side, side + 2)) - rng.integers(4, side - 4, 3)[:, None, None, None]
    inside = (offsets**2).sum(0) <= (4 if large else 2) ** 2
    return (100 * inside + rng.normal(40, 10, inside.shape)).astype(np.float32)


def make_wave(seed: int, fast: bool, length: int = 48) -> np.ndarray:
    """Return a noisy sine (length,) float32 with a period of 6 or 16 samples."""
    rng = np.random.default_rng(seed)
    phase = 2 * np.pi * (np.arange(length) / (6 if fast else 16) + rng.random())
    return (np.sin(phase) + rng.normal(0, 0.2, length)).astype(np.float32)


def write_signal(path: Path, values: np.ndarray) -> Path:
    """Write values (L,) or (C, L) in the format of the file suffix; in a text table, channels are columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        np.savetxt(path, values.T, delimiter=",")
    else:
        write_volume(path, values)
    return path


def write_balls(home: Path, count: int, suffixes: tuple[str, ...] = (".nii.gz", ".npz"), first: int = 0) -> Path:
    """Write `home`/CLASS/NUMBER.* with `count` small and `count` large balls, and return the folder."""
    for class_index, label in enumerate(("large", "small")):
        for number in range(count):
            seed, path = first + 2 * number + class_index, home / label / f"{number}{suffixes[number % len(suffixes)]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_volume(path, make_ball(seed, label == "large"))
    return home


def write_waves(home: Path, count: int, suffix: str = ".npy", first: int = 0) -> Path:
    """Write `home`/CLASS/NUMBER.npy with `count` fast and `count` slow waves, and return the folder."""
    for class_index, label in enumerate(("fast", "slow")):
        for number in range(count):
            write_signal(
                home / label / f"{number}{suffix}", make_wave(first + 2 * number + class_index, label == "fast")
            )
    return home
