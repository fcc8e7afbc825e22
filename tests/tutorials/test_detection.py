"""docs/tutorials/detection.md: the commands run, and print the fixed lines of the page."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.tutorials.runner import DOCS, check_exit_codes, check_fixed_lines, read_steps, run_steps

PAGE = (DOCS / "tutorials" / "detection.md").read_text("utf-8")
CLASSES = ("Platelets", "RBC", "WBC")
SHORT = {"cells/": ("--steps", "2", "--batch-size", "2", "--image-size", "64", "--workers", "0")}


def write_cells(folder: Path) -> None:
    """Write a Pascal VOC dataset with the layout of the page: a square of each class on each image."""
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, numbers in {"train": range(6), "val": range(6, 8), "test": range(8, 10)}.items():
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(map(str, numbers)))
        for number in numbers:
            pixels, objects = rng.integers(0, 60, (64, 64, 3), np.uint8), ""
            for index, name in enumerate(CLASSES):
                left, top = 2 + 20 * index, int(rng.integers(1, 40))
                pixels[top : top + 16, left : left + 16, index] = 250
                corners = zip(("xmin", "ymin", "xmax", "ymax"), (left, top, left + 16, top + 16), strict=True)
                box = "".join(f"<{key}>{value}</{key}>" for key, value in corners)
                objects += f"<object><name>{name}</name><bndbox>{box}</bndbox></object>"
            Image.fromarray(pixels).save(folder / "JPEGImages" / f"{number}.jpg")
            (folder / "Annotations" / f"{number}.xml").write_text(f"<annotation>{objects}</annotation>")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_run(tmp_path):
    write_cells(tmp_path / "cells")
    (tmp_path / "new").mkdir()
    Image.new("RGB", (80, 64)).save(tmp_path / "new" / "1.jpg")
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    rows = "a.png,cat,0.1,0.1,0.6,0.5\na.png,cat,0.2,0.1,0.6,0.5\n"
    (tmp_path / "boxes.csv").write_text(f"image,class,left,top,right,bottom\n{rows}")
    steps = run_steps(read_steps(PAGE), tmp_path, SHORT)
    commands = [step.command.split()[1] for step in steps]
    assert commands == ["data", "train", "evaluate", "predict", "train", "train"]
    check_exit_codes(steps)
    check_fixed_lines([step for step in steps if step.command.startswith("vitreous evaluate")])
    assert (tmp_path / "runs" / "cells" / "report.html").is_file()
    assert (tmp_path / "overlays" / "1.png").is_file()
    with (tmp_path / "objects.csv").open(newline="") as file:
        header = next(csv.reader(file))
    assert header == ["path", "number", "label", "score", "left", "top", "right", "bottom", "error"]
