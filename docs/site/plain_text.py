"""Convert plain text, such as docstrings and help texts, to Markdown.

In plain text, characters such as `*` have no special meaning, and indented lines are code.
"""

from __future__ import annotations

import re

CODE = re.compile(r"(`[^`]*`)")
SPECIAL = re.compile(r"([*_\[\]#<|~^\\])")


def escape(text: str) -> str:
    """Escape the special characters of Markdown, except within backquotes."""
    pieces = CODE.split(text)
    return "".join(piece if index % 2 else SPECIAL.sub(r"\\\1", piece) for index, piece in enumerate(pieces))


def is_verbatim(line: str) -> bool:
    """Return whether the layout of a line must be kept: it is indented by four spaces, or has columns; rows of Markdown
    tables do not count."""
    return not line.startswith("|") and (line.startswith("    ") or bool(re.search(r"\S {2,}\S", line)))


def to_markdown(text: str) -> str:
    """Convert a docstring to Markdown. Paragraphs, lists and tables are kept; lines with a fixed layout become code."""
    output_lines: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        lines, is_code, in_code = block.splitlines(), [], False
        for line in lines:
            is_code.append(is_verbatim(line) or (in_code and line.startswith(" ")))
            in_code = is_code[-1]
        for number, line in enumerate(lines):
            starts_code = is_code[number] and not (number and is_code[number - 1])
            ends_code = is_code[number] and not (number + 1 < len(lines) and is_code[number + 1])
            output_lines += ["", "```text"] if starts_code else []
            output_lines.append(line if is_code[number] or line.startswith("|") else escape(line))
            output_lines += ["```", ""] if ends_code else []
        output_lines.append("")
    return "\n".join(output_lines).strip()
