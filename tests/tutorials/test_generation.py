"""docs/tutorials/generation.md: the commands and the Python script run, and print the fixed lines of the page."""

from __future__ import annotations

import re

import pytest

from tests.tutorials.runner import DOCS, check_exit_codes, check_fixed_lines, read_steps, run_steps

PAGE = (DOCS / "tutorials" / "generation.md").read_text("utf-8")
SHORT = {"digits": ("--steps", "2", "--batch-size", "16", "--workers", "0")}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_run(tmp_path, monkeypatch, capsys):
    steps = run_steps(read_steps(PAGE), tmp_path, SHORT)
    commands = [step.command.split()[1] for step in steps]
    assert commands == ["train", *["sample"] * 3, "train", "evaluate", "predict", *["sample"] * 5]
    check_exit_codes(steps)
    check_fixed_lines(steps)
    (script,) = re.findall(r"```text\n(import .*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "nearest.py", "exec"), {})
    assert "closest" in capsys.readouterr().out
