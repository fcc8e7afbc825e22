"""Run the commands of a page of docs/ and compare the output with the page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import run_cli

DOCS = Path(__file__).parents[2] / "docs"
#: lines of output that do not depend on the images: notes, headings of tables, written files, next commands
FIXED_LINES = re.compile(
    r"(?:note|page|next|report|page with all figures|doctor|split |class +images|figure +file|image +classes|passed|wrote)"
)


@dataclass(frozen=True)
class Step:
    """A command of a page, the lines printed below it on the page, and the result of running it."""

    command: str
    printed: tuple[str, ...]
    returncode: int = 0
    output: str = ""
    error: str = ""


def read_steps(page: str) -> list[Step]:
    """The commands (`$ …`) of the `console` blocks of a page, each with the lines printed below it."""
    steps: list[Step] = []
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                steps.append(Step(line[2:], ()))
            else:
                steps[-1] = Step(steps[-1].command, (*steps[-1].printed, line))
    return steps


def run_steps(steps: Sequence[Step], home: Path, options: Mapping[str, Sequence[str]] | None = None) -> list[Step]:
    """Run the commands in `home`, in order. `options`: additional options of `vitreous train`, by its dataset; `--steps`
    replaces `--epochs` of the page. `python -c` runs in this process. Raises AssertionError for other programs."""
    finished = []
    for step in steps:
        program, *words = shlex.split(step.command)
        if program == "python":
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(home)
                exec(words[1], {"__name__": "__main__"})
            continue
        assert program == "vitreous", step.command
        extra = (options or {}).get(words[1], ()) if words[0] == "train" else ()
        if "--epochs" in words and "--steps" in extra:
            position = words.index("--epochs")
            del words[position : position + 2]
        result = run_cli(*words, *extra, cwd=home)
        finished.append(Step(step.command, step.printed, result.returncode, result.stdout, result.stderr))
    return finished


def check_exit_codes(steps: Sequence[Step]) -> None:
    """Assert that commands with an error on the page fail with its message, and that all others succeed."""
    for step in steps:
        errors = [line for line in step.printed if line.startswith("error: ")]
        assert bool(step.returncode) == bool(errors), f"{step.command}\n{step.error}"
        assert all(line in step.error for line in errors), f"{step.command}\n{step.error}"


def check_fixed_lines(steps: Sequence[Step]) -> None:
    """Assert that the lines of the page that do not depend on the images are printed; spaces may differ."""
    for step in steps:
        output = " ".join((step.output + step.error).split())
        for line in step.printed:
            if FIXED_LINES.match(line) and "…" not in line.partition(" IMAGE ")[0]:
                assert " ".join(line.split()) in output, f"{step.command}\n{line}\n{output}"
