"""The reference of the command line, from the help of each verb."""

from __future__ import annotations

import inspect
import io
import os
import re
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module

from plain_text import escape

EXAMPLE = re.compile(r"^Example: (.*(?:\n +.*)*)$", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """An option or a positional argument in the help of a verb."""

    names: tuple[str, ...]  # `--exact`, `--no-exact`; none for a positional argument
    metavar: str
    text: str


def help_entries(verb: str) -> list[Entry]:
    """Options and arguments as `vitreous VERB --help` prints them, but for --help itself. Raises ValueError for a help
    text of another form."""
    entries: list[tuple[str, list[str]]] = []
    for line in help_text(verb).partition("\n ---")[2].splitlines():
        if re.match(r"  \S", line):
            invocation, _, text = line.strip().partition("  ")
            entries.append((invocation, [text]))
        elif line.startswith("    ") and entries:
            entries[-1][1].append(line)
    if not entries:
        raise ValueError(f"the help of vitreous {verb} has another form than that of tyro 1.0: adapt help_entries")
    read = [entry_of(invocation, " ".join(" ".join(text).split())) for invocation, text in entries]
    return [entry for entry in read if "--help" not in entry.names]


def help_text(verb: str) -> str:
    """What `vitreous VERB --help` prints into a file of ASCII, in one column."""
    from vitreous.cli.main import VERBS, parse

    text = io.StringIO()
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "120"
    try:
        with redirect_stdout(text), suppress(SystemExit):
            parse(import_module(VERBS[verb][0]).Options, verb, ["--help"])
    finally:
        os.environ.pop("COLUMNS")
        os.environ |= {"COLUMNS": width} if width is not None else {}
    return text.getvalue()


def entry_of(invocation: str, text: str) -> Entry:
    """`--learning-rate FLOAT, --lr FLOAT` or `RUN`, and what it does."""
    if not invocation.startswith("-"):
        return Entry((), invocation, text)
    names, metavars = zip(*(form.partition(" ")[::2] for form in invocation.split(", ")), strict=True)
    return Entry(names, metavars[-1], text)


def entry_lines(entry: Entry) -> list[str]:
    """An option as a section: its names and what it takes, and what it does."""
    metavar = entry.metavar
    choices = re.findall(r"[^{},]+", metavar) if metavar.startswith("{") and metavar.endswith("}") else []
    taken = "" if choices else f" {metavar}".rstrip()
    names = [f"{name}{taken}" for name in entry.names] or [metavar]
    anchor = re.sub(r"\W+", "-", names[0].partition(" ")[0] if entry.names else metavar).strip("-").lower()
    values = ["One of " + ", ".join(f"`{choice}`" for choice in choices) + ".", ""] if choices else []
    return [f"### `{', '.join(names)}` {{ #{anchor} }}", "", escape(entry.text), "", *values]


def verb_page(verb: str, about: str) -> str:
    """The page of a verb: what it does, examples, every option."""
    from vitreous.cli.main import VERBS

    kind = import_module(VERBS[verb][0]).Options
    description = inspect.cleandoc(kind.__doc__ or "")
    examples = [" ".join(found.split()) for found in EXAMPLE.findall(description)]
    text = escape(EXAMPLE.sub("", description)) or about
    lines = [f"# vitreous {verb}", "", text, ""]
    lines += ["```text", *examples, "```", ""] if examples else []
    entries = help_entries(verb)
    for title, chosen in (
        ("Arguments", [entry for entry in entries if not entry.names]),
        ("Options", [entry for entry in entries if entry.names]),
    ):
        lines += [f"## {title}", ""] if chosen else []
        for entry in chosen:
            lines += entry_lines(entry)
    lines += ["### `--json` { #json }", "", "Print one JSON document on stdout, and everything else on stderr.", ""]
    if "settings" in kind.__dataclass_fields__:
        text = "Set any value of the run by its path in config.yaml, as in `--optimizer.betas 0.9 0.95`."
        lines += ["### `--PATH.TO.FIELD VALUE` { #settings }", "", text, ""]
    return "\n".join(lines)


def overview_page() -> str:
    """The page of all verbs, and of exit codes."""
    from vitreous.cli.main import VERBS

    rows = [f"| [`vitreous {verb}`]({page_name(verb)}) | {escape(about)} |" for verb, (_, about) in VERBS.items()]
    return "\n".join(["# The command line", "", "| verb | what it does |", "|---|---|", *rows, ""])


def page_name(verb: str) -> str:
    """`data check` -> `data-check.md`."""
    return f"{verb.replace(' ', '-')}.md"
