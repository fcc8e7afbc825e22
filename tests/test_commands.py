"""Commands of README.md and of docs/: the parser takes every one of them, and those of the first page run."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import vitreous
from tests.conftest import make_folder, run_cli
from vitreous.apps.studies import registry as studies
from vitreous.cli.main import VERBS, parse_options, split_settings, split_verb
from vitreous.config import set_dotted_paths
from vitreous.errors import UsageError
from vitreous.jobs import doctor
from vitreous.recipes import registry as recipes
from vitreous.weights.convert import convert
from vitreous.weights.published import PUBLISHED_BY_NAME

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "log"))
TUTORIALS = ROOT / "docs" / "tutorials"
START_PAGE = "".join((TUTORIALS / name).read_text("utf-8") for name in ("first-model.md", "own-photos.md"))
CODE_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: two spaces end a command: what it does follows
COMMAND_PATTERN = re.compile(r"(?:^|\$ |-m |\| |/)vitreous (\S+(?: \S+)*)")
FOREIGN_MODELS = ("timm:", "hf:")  # tests/models/test_foreign.py builds such
#: options of other programs that the pages name
FOREIGN_OPTIONS = {
    "docker": {"--gpus", "--target"},
    "sbatch": {"--signal"},
    "torchrun": {"--max-restarts", "--nnodes", "--nproc-per-node", "--rdzv-id", "--shutdown-timeout", "--standalone"},
}


def block_commands(text: str) -> list[str]:
    """The words behind `vitreous` of each command in the blocks of a page, without what is said of it."""
    blocks = [block for kind, block in CODE_BLOCK.findall(text) if kind in ("text", "bash", "sh", "console")]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [match[1] for line in lines if (match := COMMAND_PATTERN.search(line))]


def inline_commands(text: str) -> list[str]:
    """The same of `vitreous VERB …` in running text, where it has options or arguments."""
    spans = re.findall(r"`vitreous ([^`\n]+)`", CODE_BLOCK.sub("", text))
    return [span for span in spans if span not in VERBS]


COMMANDS = sorted({line for page in PAGES for line in block_commands(page.read_text("utf-8"))})
INLINE_COMMANDS = sorted({line for page in PAGES for line in inline_commands(page.read_text("utf-8"))} - set(COMMANDS))


def parse_line(line: str) -> tuple[str, Any]:
    """The verb and the options of a command. Exits where the parser does not take it."""
    words = shlex.split(line.replace("…", ""), comments=True)
    words = words[: words.index(">")] if ">" in words else words
    verb, words = split_verb(words)
    kind = import_module(VERBS[verb][0]).Options
    if "settings" not in kind.__dataclass_fields__:
        return verb, parse_options(kind, verb, words)[0]
    rest, settings = split_settings(words)
    return verb, replace(parse_options(kind, verb, rest)[0], settings=settings)


def check_names(verb: str, options: Any) -> None:
    """Raise UsageError for a recipe, model, study or setting that a command names and that there is not."""
    if verb == "train":
        model = None if (options.model or "").startswith(FOREIGN_MODELS) else options.model
        set_dotted_paths(
            recipes.build_example_run(options.recipe or ("finetune" if options.init else "photos"), model),
            options.settings,
        )
    elif verb == "recipes" and options.pattern != "NAME":
        assert fnmatch.filter(recipes.RECIPES, options.pattern)
    elif verb == "study" and options.name:
        studies.get_study(options.name)


def test_pages_show_commands():
    """The expressions find what they are for: of each form one that is known to be there."""
    assert len(COMMANDS) > 150 and len(INLINE_COMMANDS) > 20
    for known in ("doctor", "train photos/ --exclude copies.csv", "predict runs/pets - --out answers.jsonl"):
        assert known in COMMANDS
    assert "train images/ --recipe dino" in INLINE_COMMANDS


@pytest.mark.parametrize("line", COMMANDS + INLINE_COMMANDS)
def test_documented_commands_are_parsed(line):
    if "--help" not in line:
        check_names(*parse_line(line))


def test_unknown_options_and_names_are_rejected():
    """As in a page that was forgotten."""
    for line in ("train digits --epoch 3", "train digits --optimizer adamm", "inspect runs/digits --figure rollout"):
        with pytest.raises(SystemExit) as end:
            parse_line(line)
        assert end.value.code == 2
    for line in ("train digits --recipe smal", "train digits --model.gelo tanh", "study position", "trian digits"):
        with pytest.raises(UsageError):
            check_names(*parse_line(line))


def test_options_in_prose_exist():
    options = {name for verb in VERBS for name in option_names(verb)}
    options = options.union(*FOREIGN_OPTIONS.values())
    for page in PAGES:
        named = re.findall(r"`(--[a-z][a-z-]*[a-z])[ `=]", CODE_BLOCK.sub("", page.read_text("utf-8")))
        assert set(named) <= options, f"{page.name}: {sorted(set(named) - options)}"


@cache
def option_names(verb: str) -> set[str]:
    """Every option in the help of a verb."""
    return {
        "--json",
        "--help",
        "--help-all",
        *re.findall(r"--[a-z][a-z0-9-]*", run_cli(*verb.split(), "--help-all").stdout),
    }


#: what the test adds to a command of the first page: fewer steps, images of few pixels, a free port
EXTRA_OPTIONS = {
    "train digits --out runs/digits": "--epochs 3",
    "train photos/ --out runs/photos": "--epochs 2 --image-size 16",
    "train photos/ --init dinov2-s14 --out runs/pets": "--epochs 1 --image-size 28",
    "serve runs/digits": "--port 0 --quiet",
}
#: what the page says that its commands leave behind
EXPECTED_FILES = (
    "runs/digits/report.html",
    "runs/digits/config.yaml",
    "runs/digits/metrics.jsonl",
    "runs/digits/model/model.json",
    "runs/digits/inspect/rollout.png",
    "runs/digits/model.onnx",
)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine is no fault
def test_the_start_page_runs(tmp_path, monkeypatch):
    """Every command of docs/tutorials/first-model.md in order, in a folder with photographs and a picture of a digit, without network."""
    lines = block_commands(START_PAGE)
    assert set(EXTRA_OPTIONS) <= set(lines) and len(lines) == len(re.findall(r"^vitreous ", START_PAGE, re.MULTILINE))
    make_folder(tmp_path / "photos", {"": 20}, classes=("cat", "dog"), size=(64, 48))
    save_digit(tmp_path / "digit.png")
    monkeypatch.setenv("VITREOUS_MIRROR", os.fspath(tmp_path / "mirror"))
    write_small_dinov2(tmp_path)
    monkeypatch.setattr(doctor, "BENCHMARK_BATCH_SIZE", 2)
    monkeypatch.setattr(doctor, "BENCHMARK_SECONDS", 0.0)
    for line in [*lines, *inline_commands(START_PAGE)]:
        words = [*shlex.split(line), *EXTRA_OPTIONS.get(line, "").split()]
        if words[0] == "serve":
            assert request_prediction(words, tmp_path)["predictions"]
            continue
        result = run_cli(*words, cwd=tmp_path)
        assert result.returncode == 0, f"vitreous {line}\n{result.stderr}"
    for name in EXPECTED_FILES:
        assert (tmp_path / name).is_file(), name


def save_digit(path: Path) -> None:
    """A picture of a digit, 80 x 80 pixels."""
    from PIL import Image
    from sklearn.datasets import load_digits

    pixels = (load_digits().images[0] * 255 / 16).astype("uint8")
    Image.fromarray(pixels).resize((80, 80)).save(path)


def write_small_dinov2(folder: Path) -> None:
    """A file of DINOv2's form where its ViT-S/14 would be in a mirror: 2 blocks of width 32."""
    from safetensors.torch import load_file

    row = PUBLISHED_BY_NAME["dinov2-s14"]
    model = vitreous.create(row.model, image_size=row.image_size, width=32, depth=2, heads=2, mlp={"hidden": 128})
    vitreous.save(model, folder / "bundle")
    written = convert(folder / "bundle", folder / "weights", "dinov2")["out"]
    place = folder / "mirror" / row.source.partition("://")[2]
    place.parent.mkdir(parents=True)
    torch.save(load_file(written), place)


def request_prediction(words: list[str], folder: Path) -> dict[str, Any]:
    """What `vitreous serve` answers to digit.png; it has to end with SIGTERM."""
    command = [sys.executable, "-m", "vitreous", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            picture = (folder / "digit.png").read_bytes()
            request = urllib.request.Request(f"{address}/v1/predict", picture, {"Content-Type": "image/png"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(120) == 0
