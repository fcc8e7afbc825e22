"""docs/tutorials/research.md: the commands run, and print the fixed lines of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tutorials.runner import DOCS, Step, check_exit_codes, check_fixed_lines, read_steps, run_steps

PAGE = (DOCS / "tutorials" / "research.md").read_text("utf-8")


def shorten(step: Step) -> Step:
    """The step with runs of ten optimiser steps."""
    return Step(step.command.replace("--steps 100", "--steps 10"), step.printed)


def run_step(step: Step, home: Path) -> list[Step]:
    """Run a command of the page in `home`; `mv A B` renames a folder, and has no result."""
    program, *words = step.command.split()
    if program == "mv":
        source, target = words
        (home / source).rename(home / target)
        return []
    return run_steps([shorten(step)], home)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_run(tmp_path):
    steps = [result for step in read_steps(PAGE) for result in run_step(step, tmp_path)]
    assert [step.command.split()[1] for step in steps].count("study") == 6
    check_exit_codes(steps)
    check_fixed_lines(steps)
    for study in ("pooling", "pooling-one-seed"):
        for name in ("report.html", "report.md", "study.json"):
            assert (tmp_path / "runs" / "studies" / study / name).is_file()
