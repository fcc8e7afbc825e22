"""docs/tutorials/pretraining.md: the commands run, and print the fixed lines of the page."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.conftest import make_folder
from tests.tutorials.runner import DOCS, check_exit_codes, check_fixed_lines, read_steps, run_steps

PAGE = (DOCS / "tutorials" / "pretraining.md").read_text("utf-8")
SHORT = {"bees/": ("--batch-size", "8", "--workers", "0")}
NOTE = "batch size 64"  # depends on the number of images


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_run(tmp_path):
    make_folder(tmp_path / "bees", {"train": 12, "val": 4, "test": 4}, ("no_pollen", "pollen"), size=(40, 64))
    steps = [replace(step, command=re.sub(r"--steps \d+", "--steps 2", step.command)) for step in read_steps(PAGE)]
    steps = run_steps(steps, tmp_path, SHORT)
    check_exit_codes(steps)
    check_fixed_lines([step for step in steps if NOTE not in "".join(step.printed)])
    for name in ("dino", "tuned"):
        assert (tmp_path / "runs" / name / "report.html").is_file()
    assert (tmp_path / "runs" / "dino" / "inspect" / "features.png").is_file()
    assert (tmp_path / "runs" / "mae" / "inspect" / "reconstruction.png").is_file()
