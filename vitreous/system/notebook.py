"""HTML views for notebooks: tables, and progress in a cell that is updated. IPython is used only if it is already
loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

CELL_STYLE = "text-align:left; padding:2px 10px; vertical-align:middle"


class RawHTML(NamedTuple):
    """HTML that is inserted into a table unchanged; all other text is escaped."""

    html: str


def format_html_table(rows: Sequence[Sequence[Any]], head: Sequence[str] = (), title: str = "", note: str = "") -> str:
    """Format rows of cells as an HTML table, with column names, a title above and a note below."""

    def format_row(cells: Sequence[Any], tag: str) -> str:
        """Format cells as a table row; `tag` is th or td."""
        texts = [cell.html if isinstance(cell, RawHTML) else escape(str(cell)) for cell in cells]
        return "<tr>" + "".join(f'<{tag} style="{CELL_STYLE}">{text}</{tag}>' for text in texts) + "</tr>"

    top = f"<caption style='{CELL_STYLE}'><b>{escape(title)}</b></caption>" if title else ""
    body = (format_row(head, "th") if head else "") + "".join(format_row(row, "td") for row in rows)
    return f"<table>{top}{body}</table>" + (f"<div>{escape(note)}</div>" if note else "")


def list_config_settings(data: Any, path: str = "") -> list[tuple[str, Any]]:
    """List the values of a nested config dict as (dotted path, value), with paths as in `--path.to.field`."""
    if not isinstance(data, dict):
        return [(path, data)]
    return [
        setting
        for name, value in data.items()
        for setting in list_config_settings(value, f"{path}.{name}" if path else name)
    ]


def open_updatable_cell() -> Callable[[str], None] | None:
    """Create an output area in the current notebook cell. Returns a function that replaces its HTML; None outside of
    notebooks."""
    kernel = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if kernel is None or type(kernel).__name__ != "ZMQInteractiveShell":
        return None
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)
    return None if handle is None else lambda html: handle.update(HTML(html))


def format_progress_html(label: str, done: int, total: int, text: str, seconds_left: float | None) -> str:
    """Format a progress bar as HTML: `done` of `total` steps, with a label, a text and the remaining seconds."""
    time_left = "" if seconds_left is None else f"  {seconds_left:.0f} s left"
    status = escape(f"{done / max(total, 1):.0%}  {text}{time_left}")
    return f'{escape(label)} <progress max="{total}" value="{done}"></progress> <code>{status}</code>'
