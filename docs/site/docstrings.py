"""Docstrings as Markdown, for mkdocstrings."""

from __future__ import annotations

from typing import Any

import griffe
from plain_text import to_markdown


class PlainText(griffe.Extension):
    """Rewrites every docstring before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
