"""Plain text as Markdown: of ours, where `*` is a star and an indented line is code."""

from __future__ import annotations

import re

CODE = re.compile(r"(`[^`]*`)")
SPECIAL = re.compile(r"([*_\[\]#<|~^\\])")


def escape(text: str) -> str:
    """Escape what Markdown would take for markup, but for `code`."""
    parts = CODE.split(text)
    return "".join(part if n % 2 else SPECIAL.sub(r"\\\1", part) for n, part in enumerate(parts))


def is_verbatim(line: str) -> bool:
    """Whether a line is laid out by hand: indented by four, or in columns; no row of a table is."""
    return not line.startswith("|") and (line.startswith("    ") or bool(re.search(r"\S {2,}\S", line)))


def to_markdown(text: str) -> str:
    """A docstring as Markdown: paragraphs, lists and tables stay what they are, lines that are laid out become code."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        lines, verbatim, inside = block.splitlines(), [], False
        for line in lines:
            verbatim.append(is_verbatim(line) or (inside and line.startswith(" ")))
            inside = verbatim[-1]
        for number, line in enumerate(lines):
            opens = verbatim[number] and not (number and verbatim[number - 1])
            closes = verbatim[number] and not (number + 1 < len(lines) and verbatim[number + 1])
            out += ["", "```text"] if opens else []
            out.append(line if verbatim[number] or line.startswith("|") else escape(line))
            out += ["```", ""] if closes else []
        out.append("")
    return "\n".join(out).strip()
