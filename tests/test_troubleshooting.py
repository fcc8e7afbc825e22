"""docs/troubleshooting.md: every class of errors is listed with its exit code, and the quoted messages exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from vitreous import errors

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
#: messages of other programs
FOREIGN_MESSAGES = {"vitreous: command not found"}
#: codes of HTTP responses are listed in the guide of the server
HTTP_CODE = re.compile(r"[a-z]+(?:_[a-z]+)*")


def quoted_messages() -> list[str]:
    """The messages in the first column of the tables, and those that begin a paragraph in bold."""
    cells = re.findall(r"^\| (.*?) \|", PAGE.partition("\n## Installation\n")[2], re.MULTILINE)
    bold = re.findall(r"^\*\*(`[^`]+`)", PAGE, re.MULTILINE)
    texts = [text for cell in [*cells, *bold] for text in re.findall(r"`([^`]+)`", cell)]
    return [text for text in texts if text not in FOREIGN_MESSAGES and not HTTP_CODE.fullmatch(text)]


@cache
def source_texts() -> str:
    """All strings of the package, with `…` for the values in f-strings, one per line."""
    lines = []
    for path in sorted((ROOT / "vitreous").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                lines.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines.append(node.value)
    return "\n".join(lines)


def test_every_error_class_has_its_exit_code():
    table = dict(re.findall(r"^\| ([\d, ]+) \| [^|]* \| `(\w+)` \|$", PAGE, re.MULTILINE))
    codes = {name: [int(code) for code in key.split(", ")] for key, name in table.items()}
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    shown = {kind.__name__: getattr(kind, "code", 1) for kind in classes if kind.__name__ != "EmptyImageError"}
    assert set(codes) == set(shown)
    assert all(code in codes[name] or name == "Interrupted" for name, code in shown.items())


@pytest.mark.parametrize("message", quoted_messages())
def test_quoted_messages_exist(message):
    """Every part of a quoted message between its `…` occurs in a string of the package."""
    texts = source_texts()
    for part in filter(None, (part.strip(" (),.:") for part in re.split("…", message))):
        assert part in texts, part
