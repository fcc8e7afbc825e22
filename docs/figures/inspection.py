"""Draw the figures of docs/guides/inspection.md: `vitreous inspect` of the digits model of that page.

The model is trained by `vitreous train digits`, in about a minute. Each figure is drawn by the command above it on the
page; a test compares the names.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

#: figure of `vitreous inspect` -> its additional options
FIGURES: dict[str, tuple[str, ...]] = {
    "rollout": (),
    "gradient": (),
    "attention": ("--layers", "-1"),
    "segments": ("--mass", "0.6"),
    "distance": ("--count", "128"),
    "features": (),
    "nearest": (),
    "filters": (),
    "positions": (),
    "fourier": (),
    "similarity": (),
    "cost": (),
}
OUTPUTS = (
    "rollout.png",
    "rollout-blocks.png",
    "gradient.png",
    "attention.png",
    "segments.png",
    "distance.png",
    "features.png",
    "nearest.png",
    "filters.png",
    "positions.png",
    "fourier.png",
    "similarity.png",
    "cost.png",
)
DATASETS: tuple[str, ...] = ()
VITREOUS = (sys.executable, "-m", "vitreous")


def build(context: Any) -> None:
    """Train the model unless its run is in the work folder, draw each figure, and copy it to the output folder."""
    run = context.work / "inspection" / "digits"
    if not (run / "report.html").is_file():
        shutil.rmtree(run, ignore_errors=True)
        subprocess.run([*VITREOUS, "train", "digits", "--out", str(run)], check=True)
    drawn = context.work / "inspection" / "figures"
    for name, options in FIGURES.items():
        words = ("inspect", str(run), "--figures", name, "--out", str(drawn / name), *options)
        subprocess.run([*VITREOUS, *words], check=True)
        for path in (drawn / name).glob("*.png"):
            if path.name in OUTPUTS:
                shutil.copyfile(path, context.out / path.name)
