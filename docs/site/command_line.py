"""Write the reference pages of the command line from the help of each verb."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

from plain_text import escape

from vitreous.cli.help import OptionHelp, list_options, order_sections

EXAMPLE = re.compile(r"^Example: (.*(?:\n +.*)*)$", re.MULTILINE)


def entry_lines(entry: OptionHelp) -> list[str]:
    """Return the Markdown lines of an option: a heading with its names and placeholder, and its description."""
    anchor = re.sub(r"\W+", "-", re.split("[ ,]", entry.label)[0]).strip("-").lower()
    return [f"### `{entry.label}` {{ #{anchor} }}", "", escape(entry.description), ""]


def verb_page(verb: str, about: str) -> str:
    """Return the Markdown page of a verb: description, examples, and all options by section."""
    from vitreous.cli.main import VERBS

    options_type = import_module(VERBS[verb][0]).Options
    description = inspect.cleandoc(options_type.__doc__ or "")
    examples = [" ".join(example.split()) for example in EXAMPLE.findall(description)]
    text = escape(EXAMPLE.sub("", description)) or about
    lines = [f"# vitreous {verb}", "", text, ""]
    lines += ["```text", *examples, "```", ""] if examples else []
    entries = list(list_options(options_type))
    options = [entry for entry in entries if not entry.is_positional]
    sections = {"Arguments": [entry for entry in entries if entry.is_positional]}
    for title in order_sections(options_type, options):
        sections[title] = [entry for entry in options if entry.section == title]
    for title, section_entries in sections.items():
        lines += [f"## {title}", ""] if section_entries else []
        for entry in section_entries:
            lines += entry_lines(entry)
    lines += ["## Output format", "", "### `--json` { #json }", ""]
    lines += ["Print one JSON document to stdout and everything else to stderr.", ""]
    if "settings" in options_type.__dataclass_fields__:
        text = "Set any field of config.yaml by its path: `--optimizer.betas 0.9 0.95`."
        lines += ["### `--PATH.TO.FIELD VALUE` { #settings }", "", text, ""]
    return "\n".join(lines)


def overview_page() -> str:
    """Return the Markdown page that lists all verbs."""
    from vitreous.cli.main import VERBS

    rows = [f"| [`vitreous {verb}`]({page_name(verb)}) | {escape(about)} |" for verb, (_, about) in VERBS.items()]
    return "\n".join(["# The command line", "", "| verb | purpose |", "|---|---|", *rows, ""])


def page_name(verb: str) -> str:
    """Return the file name of the page of a verb: `data check` -> `data-check.md`."""
    return f"{verb.replace(' ', '-')}.md"
