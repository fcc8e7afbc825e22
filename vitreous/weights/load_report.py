"""What became of the tensors of weights that a model starts from."""

from __future__ import annotations

from dataclasses import dataclass

HEAD = ("head.", "representation.", "classes.")  # the last is a DiT's table


@dataclass(frozen=True)
class Adoption:
    """What became of the tensors of a source."""

    source: str
    title: str
    loaded: list[str]
    new: list[str]
    unused: list[str]
    resized: str = ""
    channels: str = ""
    windows: str = ""
    patches: str = ""

    def text(self) -> str:
        """One line for people."""
        line = (
            f"started from {self.source}, {self.title} (kept {len(self.loaded)} tensors, new {len(self.new)}, unused "
            f"{len(self.unused)})"
        )
        if any(name.startswith(HEAD) for name in self.new):
            line += "; classes are new" if "classes.weight" in self.new else "; the head is new and zero-initialised"
        line += f"; positions resized {self.resized}" if self.resized else ""
        line += f"; channels {self.channels}" if self.channels else ""
        line += f"; patches {self.patches}" if self.patches else ""
        return line + (f"; {self.windows}" if self.windows else "")
