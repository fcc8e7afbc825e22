"""docs/tutorials/research.md: the commands run, and print the fixed lines of the page."""

from __future__ import annotations

import pytest

from tests.tutorials.runner import DOCS, Step, check_exit_codes, check_fixed_lines, read_steps, run_steps

PAGE = (DOCS / "tutorials" / "research.md").read_text("utf-8")


def shorten(step: Step) -> Step:
    """The step with runs of ten optimiser steps."""
    return Step(step.command.replace("--steps 100", "--steps 10"), step.printed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_run(tmp_path):
    steps = run_steps([shorten(step) for step in read_steps(PAGE)], tmp_path)
    assert [step.command.split()[1] for step in steps].count("study") == 5
    check_exit_codes(steps)
    check_fixed_lines(steps)
    for name in ("report.html", "report.md", "study.json"):
        assert (tmp_path / "runs" / "studies" / "pooling" / name).is_file()
