"""docs/tutorials/segmentation.md: the commands run, and print the fixed lines of the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.tutorials.runner import DOCS, check_exit_codes, check_fixed_lines, read_steps, run_steps

PAGE = (DOCS / "tutorials" / "segmentation.md").read_text("utf-8")
SHORT = {"nuclei/": ("--steps", "2", "--batch-size", "4", "--image-size", "32", "--workers", "0")}


def write_nuclei(folder: Path, images: int) -> None:
    """Write images of two bright squares, in one folder each, with a mask file per square."""
    rng = np.random.default_rng(0)
    for number in range(images):
        pixels = np.zeros((48, 48), np.uint8)
        for name in ("images", "masks"):
            (folder / f"{number:02}" / name).mkdir(parents=True)
        for square in range(2):
            mask = np.zeros((48, 48), np.uint8)
            top, left = rng.integers(0, 36, 2).tolist()
            mask[top : top + 10, left : left + 10] = 255
            pixels |= mask // 2
            Image.fromarray(mask).save(folder / f"{number:02}" / "masks" / f"{square}.png")
        Image.fromarray(pixels).save(folder / f"{number:02}" / "images" / f"{number:02}.png")


def write_boxes(folder: Path) -> None:
    """Write a Pascal VOC dataset of one class with a box on each image."""
    for name in ("JPEGImages", "Annotations"):
        (folder / name).mkdir(parents=True)
    corners = "<xmin>5</xmin><ymin>5</ymin><xmax>30</xmax><ymax>30</ymax>"
    for number in range(4):
        Image.new("RGB", (48, 48), (9 * number, 0, 0)).save(folder / "JPEGImages" / f"{number}.jpg")
        content = f"<annotation><object><name>RBC</name><bndbox>{corners}</bndbox></object></annotation>"
        (folder / "Annotations" / f"{number}.xml").write_text(content)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_run(tmp_path):
    write_nuclei(tmp_path / "nuclei", 20)
    write_boxes(tmp_path / "cells")
    (tmp_path / "new").mkdir()
    for folder, names in (("images", "abc"), ("masks", "ab")):
        (tmp_path / "plants" / folder).mkdir(parents=True)
        for name in names:
            Image.fromarray(np.eye(48, dtype=np.uint8)).save(tmp_path / "plants" / folder / f"{name}.png")
    for number in range(2):
        Image.new("RGB", (80, 64)).save(tmp_path / "new" / f"{number:02}.png")
    steps = run_steps(read_steps(PAGE), tmp_path, SHORT)
    commands = [step.command.split()[1] for step in steps]
    assert commands == ["data", "train", "evaluate", "predict", "predict", "train", "train"]
    check_exit_codes(steps)
    check_fixed_lines([step for step in steps if step.command.startswith("vitreous evaluate")])
    for name in ("runs/nuclei/report-val.html", "maps/00.png", "maps/maps.jsonl", "overlays/00.png"):
        assert (tmp_path / name).is_file(), name
    with Image.open(tmp_path / "maps" / "00.png") as class_map:
        assert class_map.size == (80, 64)
