"""docs/tutorials/pretraining.md: the commands run, and print the fixed lines of the page."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.conftest import make_folder
from tests.tutorials.runner import DOCS, check_exit_codes, check_fixed_lines, read_steps, run_steps

PAGE = (DOCS / "tutorials" / "pretraining.md").read_text("utf-8")
SHORT = {"bees/": ("--batch-size", "8", "--workers", "0")}
NUMBERS = ("batch size 64", "427 images")  # lines that depend on the number of images


def is_fixed(line: str) -> bool:
    """Whether a line of the page does not depend on the number of images."""
    return not any(number in line for number in NUMBERS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_run(tmp_path):
    make_folder(tmp_path / "bees", {"train": 12, "val": 4, "test": 4}, ("no_pollen", "pollen"), size=(40, 64))
    steps = [replace(step, command=re.sub(r"--steps \d+", "--steps 2", step.command)) for step in read_steps(PAGE)]
    steps = run_steps(steps, tmp_path, SHORT)
    check_exit_codes(steps)
    check_fixed_lines([replace(step, printed=tuple(filter(is_fixed, step.printed))) for step in steps])
    for name in ("dino", "tuned"):
        assert (tmp_path / "runs" / name / "report.html").is_file()
    assert (tmp_path / "runs" / "dino" / "inspect" / "features.png").is_file()
    assert (tmp_path / "runs" / "mae" / "inspect" / "reconstruction.png").is_file()
