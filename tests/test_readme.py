"""README.md tells the truth: its commands run, its Python runs, and CI runs its test command."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.conftest import make_folder, say
from vitreous.jobs import doctor

pytestmark = pytest.mark.drawn

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TWO = [
    "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/vitreous train digits",
    (
        "python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/python -m pytest -n auto --maxprocesses 4 "
        "--dist loadfile"
    ),
]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL)


#: what the first hour's training is told besides, and the least of its test and validation top-1; as printed, it takes
#: minutes
HOURS = {"short": (["--epochs", "12"], 0.7, 0.7), "as printed": ([], 0.975, 0.96)}


@pytest.fixture(scope="module", params=["short", pytest.param("as printed", marks=pytest.mark.slow)])
def lived(request, tmp_path_factory):
    """Every `$ vitreous …` of the README in order, in a folder of photographs and nothing else; and the folder."""
    home = tmp_path_factory.mktemp("home")
    make_folder(home / "photos", {"train": 12, "val": 4, "test": 4}, classes=("cat", "dog"), size=(64, 48))
    lines = [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    assert any(line.startswith("vitreous train digits") for line in lines)
    for line in lines:
        verb, *words = shlex.split(line)
        assert verb == "vitreous" or (verb, words[0]) == ("python", "-c"), line
        if verb == "vitreous":
            with pytest.MonkeyPatch.context() as patch:
                if request.param == "short":
                    patch.setattr(doctor, "BATCH", 2)
                    patch.setattr(doctor, "SECONDS", 0.0)
                result = say(*words, *(HOURS[request.param][0] if words[0] == "train" else []), cwd=home)
            assert result.returncode == 0, f"{line}\n{result.stderr}"
            assert all(note in result.stderr for note in notes_shown(line))
        else:
            run_block(home, words[1])
    return request.param, home


def notes_shown(command: str) -> list[str]:
    """The notes that the README prints below a command, whole."""
    after = README.partition(f"$ {command}\n")[2].partition("\n$ ")[0].partition("```")[0]
    return [line for line in after.splitlines() if line.startswith("note: ") and "…" not in line]


def test_the_note_on_what_google_computes_otherwise_is_shown():
    assert any(
        "gelu none -> tanh" in note for note in notes_shown("vitreous convert runs/digits digits-vit --to google-npz")
    )


def test_the_two_commands_stand_as_promised():
    assert [block.strip() for block in blocks("bash")[:2]] == TWO


@pytest.mark.skipif(not (ROOT / ".ci" / "run").exists(), reason="not a checkout")
def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    extraction = next(line for line in script.splitlines() if line.startswith("command="))
    found = subprocess.run(
        ["bash", "-c", f'{extraction}\necho "$command"'], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert found.strip() == TWO[1]


def test_every_figure_of_the_docs_is_made_by_a_command_above_it():
    from vitreous.reports.inspect import FIGURES

    page, made = (ROOT / "docs" / "inside.md").read_text(), set()
    for part in re.split(r"(?=!\[)", page):
        shown = re.match(r"!\[[^]]+\]\(figures/(([a-z]+)[a-z-]*)\.png\)", part)
        if shown:
            assert shown[2] in made and (ROOT / "docs" / "figures" / f"{shown[1]}.png").read_bytes().startswith(
                b"\x89PNG"
            )
        for words in re.findall(r"^vitreous inspect .*--figures ([a-z ]+)", part, re.MULTILINE):
            made |= set(words.split())
    assert made >= set(FIGURES)


@pytest.mark.timeout(3600)  # a busy machine is no fault
def test_the_first_hour(lived):
    """The figures of `train digits` hold."""
    hour, home = lived
    summary = json.loads((home / "runs" / "digits" / "summary.json").read_text())
    assert summary["test"]["top1"] >= HOURS[hour][1] and summary["val"]["top1"] >= HOURS[hour][2]


def run_block(home, code):
    """Python as a reader types it, in the folder where the first hour happens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        exec(code, {"__name__": "__main__"})


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python(lived, number):
    """The blocks run after the first hour, where it ran."""
    run_block(lived[1], blocks("python")[number])
