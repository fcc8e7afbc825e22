"""With --json a command writes only one document to stdout, and files are written before anything is printed."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.conftest import TINY_RUN, make_folder, run_cli
from vitreous.cli import models as models_verb
from vitreous.cli import recipes as recipes_verb
from vitreous.cli.console import Console
from vitreous.cli.main import VERBS, main
from vitreous.errors import UsageError
from vitreous.jobs.train import train
from vitreous.recipes.registry import RECIPES

#: required arguments of each command; a new command needs an entry
REQUIRED_ARGUMENTS = {
    "train": ["digits"],
    "evaluate": ["run"],
    "predict": ["run"],
    "embed": ["run"],
    "sample": ["run", "--out", "grid.png"],
    "serve": ["run"],
    "export": ["run"],
    "inspect": ["run"],
    "study": ["positions"],
    "soup": ["run", "--out", "bundle"],
    "watch": ["run"],
    "data check": ["data"],
    "data dedup": ["data", "--against", "data", "--out", "list.csv"],
    "data convert": ["data", "out"],
    "data pack": ["data", "--out", "out"],
    "convert": ["in", "out"],
    "push": ["run", "hf:org/name"],
    "recipes": [],
    "models": [],
    "bench": [],
    "completion": ["bash"],
    "doctor": [],
}

#: runs every command with a function that prints in all the ways that libraries do
NOISY_SCRIPT = """
import os, subprocess, sys
from importlib import import_module
from vitreous.cli.main import VERBS, main
early = sys.stdout

def noisy(options, console):
    print("print")
    early.write("a kept stream")
    sys.stdout.write("the stream of now")
    os.write(1, b"the descriptor")
    subprocess.run(["echo", "a child"])
    console.print_line("a line for people")
    if {refuse}:
        from vitreous.errors import DataError
        raise DataError("no")
    return {{"done": True}}

for verb, needed in {needed}.items():
    import_module(VERBS[verb][0]).run = noisy
    try:
        main([*verb.split(), *needed, "--json"])
    except SystemExit as end:
        print("CODE", verb, end.code)
"""


def run_noisy(refuse: bool) -> subprocess.CompletedProcess[str]:
    code = NOISY_SCRIPT.format(needed=REQUIRED_ARGUMENTS, refuse=refuse)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_required_arguments_cover_every_verb():
    assert set(REQUIRED_ARGUMENTS) == set(VERBS)


def test_only_the_json_document_is_on_stdout():
    result = run_noisy(refuse=False)
    lines = iter(result.stdout.splitlines())
    for verb in VERBS:
        assert json.loads(next(lines)) == {"done": True}
        assert next(lines) == f"CODE {verb} 0"
    assert next(lines, None) is None
    for text in ("print", "a kept stream", "the stream of now", "the descriptor", "a child", "a line for people"):
        assert result.stderr.count(text) == len(VERBS), text


def test_only_the_json_error_is_on_stdout():
    lines = iter(run_noisy(refuse=True).stdout.splitlines())
    for verb in VERBS:
        assert json.loads(next(lines))["error"]["code"] == 3
        assert next(lines) == f"CODE {verb} 3"


def test_invalid_options_print_a_json_error():
    result = run_cli("models", "--image-size", "wide", "--json")
    assert result.returncode == 2 and json.loads(result.stdout)["error"]["code"] == 2 and "wide" in result.stderr


@pytest.fixture(scope="module")
def trained_run_and_photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    photos = make_folder(folder / "photos", {"train": 8, "val": 2})
    train(str(photos), out=str(folder / "run"), workers=0, **{**TINY_RUN, "epochs": 1})
    return photos, folder / "run"


def run_with_closed_pipe(name: str, *words: str) -> int:
    """The exit code of a command whose stdout or stderr is a pipe without a reader."""
    reading, writing = os.pipe()
    os.close(reading)
    handler = signal.getsignal(signal.SIGTERM)
    with os.fdopen(writing, "w") as pipe, pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, name, pipe)
        patch.setattr(sys, "argv", ["vitreous", *words])
        main(words)
    signal.signal(signal.SIGTERM, handler)
    return int(end.value.code or 0)


def test_predict_writes_its_csv_before_it_prints(trained_run_and_photos, tmp_path):
    """As in `vitreous predict RUN DIR --csv a.csv | head -3`; the exit code is the command's."""
    photos, out = trained_run_and_photos
    (tmp_path / "bad.jpg").write_bytes(b"junk")
    files = [str(path) for path in sorted((photos / "val").rglob("*.png"))]
    for bad, code in ([], 0), ([str(tmp_path / "bad.jpg")], 3):
        table = tmp_path / f"{code}.csv"
        assert run_with_closed_pipe("stdout", "predict", str(out), *files, *bad, "--csv", str(table)) == code
        rows = list(csv.DictReader(table.read_text().splitlines()))
        assert {row["path"] for row in rows} == {*files, *bad}


def test_training_continues_when_stderr_is_closed(trained_run_and_photos, tmp_path):
    """As in `vitreous train DATA 2>&1 | head -3`."""
    words = [w for k, v in {**TINY_RUN, "epochs": 1}.items() for w in (f"--{k}", str(v))]
    assert (
        run_with_closed_pipe(
            "stderr", "train", str(trained_run_and_photos[0]), "--out", str(tmp_path / "run"), "--workers", "0", *words
        )
        == 0
    )
    assert (tmp_path / "run" / "summary.json").is_file()


def test_data_check_writes_its_page_before_it_prints(trained_run_and_photos, tmp_path, monkeypatch):
    from vitreous.cli import data_check

    def raise_broken_pipe(document, console):
        raise BrokenPipeError

    monkeypatch.setattr(data_check, "print_findings", raise_broken_pipe)
    run_cli("data", "check", str(trained_run_and_photos[0]), "--image-size", "16", "--out", str(tmp_path / "page.html"))
    assert "<html" in (tmp_path / "page.html").read_text()


def test_bench_writes_its_page_before_it_prints(tmp_path, monkeypatch):
    from vitreous.apps.bench import report, run

    monkeypatch.setattr(run, "run_benchmarks", lambda *words: [])
    monkeypatch.setattr(report, "races_to_json", lambda races: {"hardware": "h", "peak_throughput": {}, "results": []})
    monkeypatch.setattr(report, "make_report_name", lambda races: "page.md")
    monkeypatch.setattr(report, "render_race_markdown", lambda *words: "text")

    def raise_broken_pipe(peak):
        raise BrokenPipeError

    monkeypatch.setattr(report, "format_peaks", raise_broken_pipe)
    run_cli("bench", "--out", str(tmp_path))
    assert (tmp_path / "page.md").read_text() == "text"


def test_tables_fit_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setattr("vitreous.cli.console.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "48")
    rows = [
        ["alpha", "a long description of the first row", 12, "arXiv:2010.11929, Table 3"],
        ["beta", "short", 3456, "x"],
    ]
    Console().table(["name", "for", "count", "source"], rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 48 and lines[1].count("…") == 2 and lines[1].split()[0] == "alpha"
    assert lines[2].split() == ["beta", "short", "3456", "x"]
    monkeypatch.setattr("vitreous.cli.console.is_terminal", lambda stream: False)
    Console().table(["name", "for", "count", "source"], rows)
    assert "a long description of the first row" in capsys.readouterr().out


def test_recipes_and_models_are_filtered(capsys):
    document = recipes_verb.run(recipes_verb.Options(task="segmentation"), Console())
    assert {recipe["task"] for recipe in document["recipes"]} == {"segmentation"} and len(document["recipes"]) > 3
    assert capsys.readouterr().out.startswith("Semantic segmentation\n")
    with pytest.raises(UsageError, match="no recipe for detection matches finetune"):
        recipes_verb.run(recipes_verb.Options("finetune-*", task="detection"), Console())
    models = models_verb.run(models_verb.Options("ViT-*", max_parameters=30, max_gflops=5), Console())["models"]
    assert models and all(model["parameters"] <= 30e6 and model["gflops"] <= 5 for model in models)
    weights = models_verb.run(models_verb.Options("dino*", weights=True, max_parameters=30), Console())["weights"]
    assert {"dino-s16", "dinov2-s14"} <= {row["name"] for row in weights}
    assert all(row["parameters"] <= 30e6 for row in weights)
    with pytest.raises(UsageError, match="no model that matches ViT-H/14 is within max_parameters=30"):
        models_verb.run(models_verb.Options("ViT-H/14", max_parameters=30), Console())


def test_every_recipe_has_a_titled_task():
    assert {recipe.task for recipe in RECIPES.values()} == set(recipes_verb.TASK_TITLES)
