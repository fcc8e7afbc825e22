"""Progress listeners for tests."""

from __future__ import annotations

from vitreous.progress import NullListener


class NoteListener(NullListener):
    """Records its notes in `notes` and ignores progress."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Record a note."""
        self.notes.append(text)
