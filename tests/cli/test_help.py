"""`--help` lists the common options of a command, `--help-all` lists all of them by section."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Annotated, ClassVar, Literal

import pytest
from tyro.conf import Positional, Suppress, arg

from vitreous.cli.help import format_help, list_options, read_sections
from vitreous.cli.main import VERBS, run_command
from vitreous.errors import UsageError

VERB_OPTIONS = {verb: import_module(module).Options for verb, (module, _) in VERBS.items()}


@dataclass(frozen=True)
class ToyOptions:
    """Do something with a file.

    Example: vitreous toy file
    """

    COMMON: ClassVar[tuple[str, ...]] = ("scale",)
    SECTIONS: ClassVar[dict[str, str]] = {"scale": "Size", "mode": "Mode"}

    file: Annotated[Positional[str], arg(metavar="FILE")]
    """Input file."""
    scale: Annotated[float, arg(aliases=["--factor"])] = 2.0
    """Scale factor."""
    crop: tuple[int, int] | None = None
    """Crop in
    pixels."""
    mode: Literal["fast", "exact"] | None = None
    """How to resize."""
    cache: bool = True
    """Keep the result."""
    check: Annotated[bool, "mark"] = False
    """Verify the result."""
    average: bool | None = None
    """Average the result."""
    names: Annotated[tuple[str, ...], arg(name="name", metavar="NAME...")] = ()
    """Names."""
    secret: Suppress[int] = 3
    """Hidden."""


COMMON_HELP = """usage: vitreous toy [OPTIONS] FILE

Do something with a file.

Example: vitreous toy file

Arguments:
  FILE                    Input file.

Common options:
  --scale, --factor FLOAT
                          Scale factor. (default: 2.0)

All 7 options: vitreous toy --help-all

--json prints one JSON document to stdout and everything else to stderr."""

FULL_HELP = """Size:
  --scale, --factor FLOAT
                          Scale factor. (default: 2.0)
  --crop INT INT          Crop in pixels.

Mode:
  --mode {fast,exact}     How to resize.
  --cache, --no-cache     Keep the result. (default: on)
  --check                 Verify the result.
  --average, --no-average
                          Average the result.
  --name NAME...          Names."""


def test_common_options_and_all_options():
    assert format_help(ToyOptions, "toy", show_all=False) == COMMON_HELP
    assert FULL_HELP in format_help(ToyOptions, "toy", show_all=True)


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("10", 50), ("500", 100)])
def test_help_lines_fit_the_terminal_width(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    lines = format_help(VERB_OPTIONS["train"], "train", show_all=True).split("\n")
    wrapped = [len(line) for line in lines if line.startswith(" " * 26)]
    assert width - 20 < max(wrapped) <= width


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_has_a_description_and_a_section(verb):
    options_class = VERB_OPTIONS[verb]
    entries = {entry.name: entry for entry in list_options(options_class)}
    assert all(entry.description for entry in entries.values())
    named = {field.name for field in fields(options_class)}
    assert set(getattr(options_class, "COMMON", ())) <= set(entries) and set(read_sections(options_class)) <= named
    if len(entries) > 25:
        assert (
            len(getattr(options_class, "COMMON", ())) == 10 and len({entry.section for entry in entries.values()}) > 4
        )


@pytest.mark.parametrize("verb", VERBS)
def test_every_documented_option_is_parsed(verb):
    """The parser accepts every documented name; the error is of the unknown option behind it."""
    from vitreous.cli.main import parse_options

    for entry in list_options(VERB_OPTIONS[verb]):
        names, *placeholders = entry.label.replace(", ", ",").split(" ")
        for name in () if entry.is_positional else names.split(","):
            choices = re.findall(r"One of ([^,.]+)|$", entry.description)[0]
            words = [choices or (text.strip("{}").split(",")[0] if "{" in text else "3") for text in placeholders]
            with pytest.raises(UsageError) as caught:
                parse_options(VERB_OPTIONS[verb], verb, [name, *words, "--no-such-option"])
            assert caught.value.message == "unknown option --no-such-option", entry.label


def test_help_is_printed_before_options_are_parsed(capsys):
    assert run_command(["train", "--no-such-option", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: vitreous train [OPTIONS] DATA")
