"""README.md: its commands and Python code run, its numbers are on the linked pages, and CI runs its test command."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import vitreous
from tests.conftest import make_folder, make_image, run_cli
from tests.test_docs import list_heading_anchors

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
SETUP_COMMANDS = [
    "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/vitreous train digits",
    (
        "python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/python -m pytest -n auto --maxprocesses 4 "
        "--dist loadfile"
    ),
]
#: additional options of each training run of the quickstarts, by dataset; unchanged, they take minutes
QUICK_OPTIONS = {"steps": 2, "batch_size": 4}
QUICK_OPTIONS_BY_DATA = {"cells/": {"image_size": 64, "model": "ViT-32x2/16"}}


INSTALL_BLOCKS = 2  # `sh` blocks before those of the quickstarts


def list_code_blocks(language: str) -> list[str]:
    """The contents of README's fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def make_boxes(root: Path, count: int) -> None:
    """Write a COCO dataset: `count` images of 64 x 64 pixels, each with one box of one of two classes."""
    for split in ("train", "val"):
        folder = root / split
        folder.mkdir(parents=True)
        entries, boxes = [], []
        for index in range(count):
            make_image(index, (64, 64), index % 2).save(folder / f"{index}.png")
            entries.append({"id": index, "file_name": f"{index}.png", "width": 64, "height": 64})
            box = [8 + index, 8, 32, 24]
            boxes.append(
                {"id": index, "image_id": index, "category_id": index % 2, "bbox": box, "area": 768, "iscrowd": 0}
            )
        categories = [{"id": 0, "name": "RBC"}, {"id": 1, "name": "WBC"}]
        document = {"images": entries, "annotations": boxes, "categories": categories}
        (root / f"{split}.json").write_text(json.dumps(document))


@pytest.fixture
def quickstart_folder(tmp_path, monkeypatch, published_weights):
    """A working directory with the images used by the quickstarts; published weights are a small random ViT."""
    make_folder(tmp_path / "photos", {"train": 8, "val": 4, "test": 4}, classes=("cat", "dog"), size=(80, 72))
    make_folder(tmp_path / "unlabelled", {"": 40}, classes=("",), size=(32, 32))
    make_folder(tmp_path / "new", {"": 3}, classes=("",), size=(80, 72))
    make_boxes(tmp_path / "cells", 8)
    Image.new("RGB", (80, 72), "tan").save(tmp_path / "dog.jpg")
    Image.new("RGB", (64, 64), "pink").save(tmp_path / "smear.jpg")
    monkeypatch.setenv("VITREOUS_MIRROR", str(published_weights))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def serve_once(words: list[str]) -> None:
    """Run `vitreous serve` on a free port until it prints its address, then stop it as a container would."""
    command = [sys.executable, "-m", "vitreous", *words, "--port", "0", "--decoders", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout and re.search(r"http://[\d.]+:\d+", process.stdout.readline())
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_command_line_quickstarts(quickstart_folder):
    commands = [
        shlex.split(line)
        for block in list_code_blocks("sh")[INSTALL_BLOCKS:]
        for line in block.replace("\\\n", " ").splitlines()
    ]
    assert {words[1] for words in commands} == {"data", "train", "evaluate", "predict", "embed", "export", "serve"}
    for verb, *words in commands:
        assert verb == "vitreous"
        if words[0] == "serve":
            serve_once(words)
            continue
        short = QUICK_OPTIONS | QUICK_OPTIONS_BY_DATA.get(words[1], {}) if words[0] == "train" else {}
        options = [text for name, value in short.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        result = run_cli(*words, *options)
        assert result.returncode == 0, f"{shlex.join(words)}\n{result.stderr}"
    for name in ("pets.csv", "new.npz", "drawn/smear.png"):
        assert (quickstart_folder / name).is_file()
    assert list((quickstart_folder / "runs" / "cells").glob("**/*.onnx"))


def test_python_quickstarts(quickstart_folder, monkeypatch, capsys):
    """The blocks run in order, in one namespace."""
    train = vitreous.train

    def train_shortly(data: str, **options: object) -> object:
        return train(data, **QUICK_OPTIONS, **QUICK_OPTIONS_BY_DATA.get(data, {}), **options, progress=False)

    monkeypatch.setattr(vitreous, "train", train_shortly)
    names: dict[str, object] = {}
    for block in list_code_blocks("python"):
        exec(block, names)
    names_line, shape_line, *_ = capsys.readouterr().out.splitlines()
    assert set(re.findall(r"\w+", names_line)) == {"cat", "dog"} and re.fullmatch(r"\(\d+,\)", shape_line)


def test_quickstarts_are_short_and_side_by_side():
    tables = re.findall(r"<table>(.*?)</table>", README, re.DOTALL)
    assert len(tables) == 3
    for table in tables:
        command_line, python = re.findall(r"```(?:sh|python)\n(.*?)```", table, re.DOTALL)
        for block in (command_line, python):
            assert len(block.splitlines()) <= 6
            assert max(map(len, block.splitlines())) <= 48  # both columns fit the width of a repository page


def test_prose_is_at_most_900_words():
    prose = re.sub(r"```.*?```|<[^>]*>|\]\([^)]*\)|^\|[^\n]*$", " ", README, flags=re.DOTALL | re.MULTILINE)
    assert 300 < len(prose.split()) <= 900


def test_the_setup_commands():
    assert [block.strip() for block in list_code_blocks("bash")] == SETUP_COMMANDS


@pytest.mark.skipif(not (ROOT / ".ci" / "run").exists(), reason="not a checkout")
def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    extraction = next(line for line in script.splitlines() if line.startswith("command="))
    result = subprocess.run(
        ["bash", "-c", f'{extraction}\necho "$command"'], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == SETUP_COMMANDS[1]


def read_result_rows() -> list[list[str]]:
    """The cells of the results table, without its two header lines."""
    section = README.partition("## Results")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_number_of_the_results_is_on_the_linked_page():
    rows = read_result_rows()
    assert len(rows) >= 8
    for _, ours, peer, *_, details in rows:
        page = re.fullmatch(r"\[[\w.]+\]\((benchmarks/results/[\w.-]+\.md)\)", details)
        assert page, details
        text = (ROOT / page[1]).read_text("utf-8").replace(" %", "%")
        for cell in (ours, peer):
            value = re.match(r"\*{0,2}([\d.,]+)( %)?", cell)
            assert value, cell
            digits = value[1].replace(",", "")
            pattern = rf"(?<![\d.]){re.escape(digits)}" + (r"(?:\.0+)?%" if value[2] else r"(?:\.\d+)?(?![\d.])")
            assert re.search(pattern, text.replace(",", "")), f"{cell} is not on {page[1]}"


def test_the_results_mark_the_better_value_and_include_losses():
    def number(cell: str) -> float:
        return float(re.sub(r"[*,%]", "", cell).split()[0])

    wins = []
    for _, ours, peer, *_ in read_result_rows():
        wins.append(number(ours) > number(peer))
        assert [cell.startswith("**") for cell in (ours, peer)] == [wins[-1], not wins[-1]]
    assert wins.count(False) >= 2


def test_links_and_figures_exist():
    targets = re.findall(r"\]\(([^)\s]+)\)", README) + re.findall(r'src(?:set)?="([^"]+)"', README)
    local = [target for target in targets if "://" not in target]
    assert len(local) > 30
    for target in local:
        name, _, anchor = target.partition("#")
        path = ROOT / (name or "README.md")
        assert path.exists(), target
        if anchor:
            assert anchor in list_heading_anchors(path.read_text("utf-8")), target
    images = re.findall(r"<img [^>]*>", README)
    assert images and all(re.search(r'alt="[^"]{20,}"', image) for image in images)


def test_every_figure_of_the_docs_is_preceded_by_its_command():
    from vitreous.reports.inspect import FIGURES

    page, commands_figures = (ROOT / "docs" / "guides" / "inspection.md").read_text("utf-8"), set()
    for section in re.split(r"(?=!\[)", page):
        shown = re.match(r"!\[[^]]+\]\((?:\.\./)?figures/(([a-z]+)[a-z-]*)\.png\)", section)
        if shown:
            content = (ROOT / "docs" / "figures" / f"{shown[1]}.png").read_bytes()
            assert shown[2] in commands_figures and content.startswith(b"\x89PNG")
        for words in re.findall(r"^vitreous inspect .*--figures ([a-z ]+)", section, re.MULTILINE):
            commands_figures |= set(words.split())
    assert commands_figures >= set(FIGURES)
