"""docs/tutorials/few-labels.md: the commands run, and print the fixed lines of the page."""

from __future__ import annotations

import pytest

from tests.conftest import make_folder
from tests.tutorials.runner import DOCS, check_exit_codes, check_fixed_lines, read_steps, run_steps

PAGE = (DOCS / "tutorials" / "few-labels.md").read_text("utf-8")
CLASSES = ("apple", "bicycle", "cat", "diamond", "eye", "fish")
SHORT = {
    "sketches/": ("--steps", "2", "--batch-size", "8", "--workers", "0"),
    "unlabelled/": ("--steps", "2", "--batch-size", "16", "--workers", "0"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_run(tmp_path):
    make_folder(tmp_path / "sketches", {"train": 4, "test": 4}, CLASSES, size=(28, 28))
    make_folder(tmp_path / "unlabelled", {"": 40}, classes=("",), size=(28, 28))
    steps = run_steps(read_steps(PAGE), tmp_path, SHORT)
    assert [step.command.split()[1] for step in steps] == ["data", "train", "train", "evaluate", "train", "evaluate"]
    check_exit_codes(steps)
    check_fixed_lines([step for step in steps if "held out" not in "".join(step.printed)])
    assert (tmp_path / "runs" / "tuned" / "report.html").is_file()
