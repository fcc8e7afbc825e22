"""An extension of mkdocstrings that converts docstrings to Markdown."""

from __future__ import annotations

from typing import Any

import griffe
from plain_text import to_markdown


class PlainText(griffe.Extension):
    """Converts every docstring with `to_markdown` before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of a documented object, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
