"""Commands in README.md and docs/: the parser accepts all of them, and those of the start page run."""

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
#: two spaces end a command: a description follows
COMMAND_PATTERN = re.compile(r"(?:^|\$ |-m |\| |/)vitreous (\S+(?: \S+)*)")
FOREIGN_MODELS = ("timm:", "hf:")  # tests/models/test_foreign.py builds these models
#: options of other programs in the pages
FOREIGN_OPTIONS = {
    "docker": {"--gpus", "--target"},
    "sbatch": {"--ntasks-per-node", "--signal"},
    "timm's train.py": {
        "--aa",
        "--amp",
        "--aug-repeats",
        "--bce-loss",
        "--drop",
        "--grad-accum-steps",
        "--grad-checkpointing",
        "--img-size",
        "--input-size",
        "--log-wandb",
        "--lr-base",
        "--model-ema",
        "--opt",
        "--reprob",
        "--sched",
        "--sched-on-updates",
        "--smoothing",
        "--torchcompile",
        "--warmup-epochs",
        "--min-lr",
        "--hflip",
        "--checkpoint-hist",
        "--warmup-lr",
    },
    "torchrun": {"--max-restarts", "--nnodes", "--nproc-per-node", "--rdzv-id", "--shutdown-timeout", "--standalone"},
}


def list_block_commands(text: str) -> list[str]:
    """The words after `vitreous` of each command in the code blocks of a page, without descriptions; commands below
    which the page shows an error are left out."""
    blocks = [block for language, block in CODE_BLOCK.findall(text) if language in ("text", "bash", "sh", "console")]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    following = [*lines[1:], ""]
    return [
        match[1]
        for line, next_line in zip(lines, following, strict=False)
        if (match := COMMAND_PATTERN.search(line)) and not next_line.startswith("error: ")
    ]


def list_inline_commands(text: str) -> list[str]:
    """The words of `vitreous VERB …` in running text, if it has options or arguments."""
    spans = re.findall(r"`vitreous ([^`\n]+)`", CODE_BLOCK.sub("", text))
    return [span for span in spans if span not in VERBS]


COMMANDS = sorted({line for page in PAGES for line in list_block_commands(page.read_text("utf-8"))})
INLINE_COMMANDS = sorted(
    {line for page in PAGES for line in list_inline_commands(page.read_text("utf-8"))} - set(COMMANDS)
)


def parse_line(line: str) -> tuple[str, Any]:
    """The verb and the options of a command. Exits if the parser rejects it."""
    words = shlex.split(line.replace("…", ""), comments=True)
    words = words[: words.index(">")] if ">" in words else words
    verb, words = split_verb(words)
    options_class = import_module(VERBS[verb][0]).Options
    if "settings" not in options_class.__dataclass_fields__:
        return verb, parse_options(options_class, verb, words)[0]
    arguments, settings = split_settings(words)
    return verb, replace(parse_options(options_class, verb, arguments)[0], settings=settings)


def check_names(verb: str, options: Any) -> None:
    """Raise UsageError for an unknown recipe, model, study or setting in a command."""
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
    """The patterns match: one known example of each form is found."""
    assert len(COMMANDS) > 150 and len(INLINE_COMMANDS) > 20
    for example in ("doctor", "train photos/ --exclude copies.csv", "predict runs/pets - --out predictions.jsonl"):
        assert example in COMMANDS
    assert "train images/ --recipe dino" in INLINE_COMMANDS


@pytest.mark.parametrize("line", COMMANDS + INLINE_COMMANDS)
def test_documented_commands_are_parsed(line):
    if "--help" not in line:
        check_names(*parse_line(line))


def test_unknown_options_and_names_are_rejected():
    """Outdated pages are detected."""
    for line in ("train digits --epoch 3", "train digits --optimizer adamm", "inspect runs/digits --figure rollout"):
        with pytest.raises(UsageError, match=r"unknown option|cannot be"):
            parse_line(line)
    for line in ("train digits --recipe smal", "train digits --model.gelo tanh", "study position", "trian digits"):
        with pytest.raises(UsageError):
            check_names(*parse_line(line))


def test_options_in_prose_exist():
    options = {name for verb in VERBS for name in list_option_names(verb)}
    options = options.union(*FOREIGN_OPTIONS.values())
    for page in PAGES:
        named = re.findall(r"`(--[a-z][a-z-]*[a-z])[ `=]", CODE_BLOCK.sub("", page.read_text("utf-8")))
        assert set(named) <= options, f"{page.name}: {sorted(set(named) - options)}"


@cache
def list_option_names(verb: str) -> set[str]:
    """Every option in the help of a verb."""
    return {
        "--json",
        "--help",
        "--help-all",
        *re.findall(r"--[a-z][a-z0-9-]*", run_cli(*verb.split(), "--help-all").stdout),
    }


#: options added to a command of the start page: fewer steps, small images, a free port
EXTRA_OPTIONS = {
    "train digits --out runs/digits": "--epochs 3",
    "train photos/ --out runs/photos": "--epochs 2 --image-size 16",
    "train photos/ --init dinov2-s14 --out runs/pets": "--epochs 1 --image-size 28",
    "serve runs/digits": "--port 0 --quiet",
}
#: files that the page's commands write, according to the page
EXPECTED_FILES = (
    "runs/digits/report.html",
    "runs/digits/config.yaml",
    "runs/digits/metrics.jsonl",
    "runs/digits/model/model.json",
    "runs/digits/inspect/rollout.png",
    "runs/digits/model.onnx",
)


@pytest.mark.slow
@pytest.mark.timeout(900)  # allows for a busy machine
def test_the_start_page_runs(tmp_path, monkeypatch):
    """Every command of docs/tutorials/first-model.md in order, in a folder with photographs and an image of a digit, without network
    access."""
    lines = list_block_commands(START_PAGE)
    assert set(EXTRA_OPTIONS) <= set(lines) and len(lines) == len(re.findall(r"^vitreous ", START_PAGE, re.MULTILINE))
    make_folder(tmp_path / "photos", {"": 20}, classes=("cat", "dog"), size=(64, 48))
    save_digit(tmp_path / "digit.png")
    monkeypatch.setenv("VITREOUS_MIRROR", os.fspath(tmp_path / "mirror"))
    write_small_dinov2(tmp_path)
    monkeypatch.setattr(doctor, "BENCHMARK_BATCH_SIZE", 2)
    monkeypatch.setattr(doctor, "BENCHMARK_SECONDS", 0.0)
    for line in [*lines, *list_inline_commands(START_PAGE)]:
        words = [*shlex.split(line), *EXTRA_OPTIONS.get(line, "").split()]
        if words[0] == "serve":
            assert request_prediction(words, tmp_path)["predictions"]
            continue
        result = run_cli(*words, cwd=tmp_path)
        assert result.returncode == 0, f"vitreous {line}\n{result.stderr}"
    for name in EXPECTED_FILES:
        assert (tmp_path / name).is_file(), name


def save_digit(path: Path) -> None:
    """Save an image of a digit, 80 x 80 pixels."""
    from PIL import Image
    from sklearn.datasets import load_digits

    pixels = (load_digits().images[0] * 255 / 16).astype("uint8")
    Image.fromarray(pixels).resize((80, 80)).save(path)


def write_small_dinov2(folder: Path) -> None:
    """Write a file in DINOv2's format at the mirror path of its ViT-S/14: 2 blocks of width 32."""
    from safetensors.torch import load_file

    published = PUBLISHED_BY_NAME["dinov2-s14"]
    model = vitreous.create(
        published.model, image_size=published.image_size, width=32, depth=2, heads=2, mlp={"hidden": 128}
    )
    vitreous.save(model, folder / "bundle")
    written = convert(folder / "bundle", folder / "weights", "dinov2")["out"]
    path = folder / "mirror" / published.source.partition("://")[2]
    path.parent.mkdir(parents=True)
    torch.save(load_file(written), path)


def request_prediction(words: list[str], folder: Path) -> dict[str, Any]:
    """The response of `vitreous serve` for digit.png; the server must end with SIGTERM."""
    command = [sys.executable, "-m", "vitreous", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            content = (folder / "digit.png").read_bytes()
            request = urllib.request.Request(f"{address}/v1/predict", content, {"Content-Type": "image/png"})
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(120) == 0
