"""Commands in README.md and docs/: the parser accepts all of them, and those of the start page run."""

from __future__ import annotations

import fnmatch
import re
import shlex
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import run_cli
from vitreous.apps.studies import registry as studies
from vitreous.cli.main import VERBS, parse_options, split_settings, split_verb
from vitreous.config import set_dotted_paths
from vitreous.errors import UsageError
from vitreous.recipes import registry as recipes

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "log"))
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
