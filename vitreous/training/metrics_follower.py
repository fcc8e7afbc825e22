"""Lines of metrics as they are written, for who looks on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitreous.training.folder import parse_object


class MetricsFollower:
    """Reads what was added to a metrics.jsonl since the last look."""

    def __init__(self, path: Path) -> None:
        self.path, self.inode, self.place = path, 0, 0

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file was written anew since the last look (a run went back to a checkpoint), and the whole lines
        that are new: then all of them. A line that is not whole yet comes with a later look."""
        try:
            with open(self.path, "rb") as file:
                file.seek(0, 2)
                status, size = self.path.stat(), file.tell()
                anew = bool(self.inode) and (status.st_ino != self.inode or size < self.place)
                self.inode, self.place = status.st_ino, 0 if anew else self.place
                file.seek(self.place)
                text = file.read()
        except FileNotFoundError:
            return False, []
        whole = text[: text.rfind(b"\n") + 1]
        self.place += len(whole)
        parsed = (parse_object(line) for line in whole.decode("utf-8", "replace").splitlines())
        return anew, [line for line in parsed if line is not None]
