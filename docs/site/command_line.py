"""The reference of the command line, from the parser of each verb."""

from __future__ import annotations

import argparse
import inspect
import re
import warnings
from importlib import import_module

from docstrings import escape

EXAMPLE = re.compile(r"^Example: (.*(?:\n +.*)*)$", re.MULTILINE)


def parser_of(verb: str) -> argparse.ArgumentParser:
    """The parser that `vitreous VERB` uses."""
    import tyro
    from tyro.conf import DisallowNone

    from vitreous.cli.main import VERBS, hide_empty_defaults

    kind = import_module(VERBS[verb][0]).Options
    hide_empty_defaults(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return tyro.extras.get_parser(kind, prog=f"vitreous {verb}", config=(DisallowNone,))


def option_lines(action: argparse.Action) -> list[str]:
    """An option as a section: its names and what it takes, and what it does."""
    metavar = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar or ())
    choices = re.findall(r"[^{},]+", metavar) if metavar.startswith("{") and metavar.endswith("}") else []
    taken = "" if choices else f" {metavar}".rstrip()
    names = [f"{name}{taken}" for name in action.option_strings] or [metavar or action.dest]
    anchor = (action.option_strings or [action.dest])[0].strip("-").lower()
    values = ["One of " + ", ".join(f"`{choice}`" for choice in choices) + ".", ""] if choices else []
    text = escape(" ".join((action.help or "").split()))
    return [f"### `{', '.join(names)}` {{ #{anchor} }}", "", text, "", *values]


def verb_page(verb: str, about: str) -> str:
    """The page of a verb: what it does, examples, every option."""
    from vitreous.cli.main import VERBS

    kind = import_module(VERBS[verb][0]).Options
    description = inspect.cleandoc(kind.__doc__ or "")
    examples = [" ".join(found.split()) for found in EXAMPLE.findall(description)]
    text = escape(EXAMPLE.sub("", description)) or about
    lines = [f"# vitreous {verb}", "", text, ""]
    lines += ["```text", *examples, "```", ""] if examples else []
    actions = [action for action in parser_of(verb)._actions if action.dest != "help"]
    for title, chosen in (
        ("Arguments", [action for action in actions if not action.option_strings]),
        ("Options", [action for action in actions if action.option_strings]),
    ):
        lines += [f"## {title}", ""] if chosen else []
        for action in chosen:
            lines += option_lines(action)
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
