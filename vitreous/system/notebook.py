"""What a notebook shows: tables as HTML, and progress in a cell that is drawn anew. Imports no IPython before it is
there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

CELL_STYLE = "text-align:left; padding:2px 10px; vertical-align:middle"


class RawHTML(NamedTuple):
    """HTML that stands in a table as it is; everything else in it is escaped."""

    html: str


def format_html_table(rows: Sequence[Sequence[Any]], head: Sequence[str] = (), title: str = "", note: str = "") -> str:
    """A table of rows, with the names of its columns, a title above it and a note below it."""

    def line(cells: Sequence[Any], tag: str) -> str:
        texts = [cell.html if isinstance(cell, RawHTML) else escape(str(cell)) for cell in cells]
        return "<tr>" + "".join(f'<{tag} style="{CELL_STYLE}">{text}</{tag}>' for text in texts) + "</tr>"

    top = f"<caption style='{CELL_STYLE}'><b>{escape(title)}</b></caption>" if title else ""
    body = (line(head, "th") if head else "") + "".join(line(row, "td") for row in rows)
    return f"<table>{top}{body}</table>" + (f"<div>{escape(note)}</div>" if note else "")


def list_config_settings(plain: Any, path: str = "") -> list[tuple[str, Any]]:
    """A config as plain data -> its settings by their dotted paths, as `--path.to.field` has them."""
    if not isinstance(plain, dict):
        return [(path, plain)]
    return [
        row for name, value in plain.items() for row in list_config_settings(value, f"{path}.{name}" if path else name)
    ]


def open_updatable_cell() -> Callable[[str], None] | None:
    """A part of the output of the cell that runs, which each call fills with other HTML; None outside of notebooks."""
    kernel = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if kernel is None or type(kernel).__name__ != "ZMQInteractiveShell":
        return None
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)
    return None if handle is None else lambda html: handle.update(HTML(html))


def format_progress_html(label: str, done: int, total: int, text: str, seconds_left: float | None) -> str:
    """A bar with what is said of it."""
    left = "" if seconds_left is None else f"  {seconds_left:.0f} s left"
    words = escape(f"{done / max(total, 1):.0%}  {text}{left}")
    return f'{escape(label)} <progress max="{total}" value="{done}"></progress> <code>{words}</code>'
