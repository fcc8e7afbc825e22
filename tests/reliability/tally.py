"""What was tried, what passed, and what has to be known to see a miss again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.reliability.rig import CheckFailure


@dataclass
class Tally:
    """The trials of one promise. `facts` are what the trials saw, for people."""

    name: str
    passed: int = 0
    tried: int = 0
    misses: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    @contextmanager
    def trial(self, what: str, count: int = 1) -> Iterator[None]:
        """`count` trials that pass if nothing is raised. A Miss is noted, and the next trial comes; any other error
        goes on up."""
        self.tried += count
        try:
            yield
        except CheckFailure as miss:
            self.misses.append(f"{what}: {miss}")
        else:
            self.passed += count

    @property
    def line(self) -> str:
        """`name: passed of tried, seconds`, and what was seen."""
        facts = "".join(f"; {name} {value}" for name, value in self.facts.items())
        return f"{self.name}: {self.passed} of {self.tried}, {time.monotonic() - self.begun:.0f} s{facts}"


def expect(holds: object, what: str) -> None:
    """Raise Miss unless it holds."""
    if not holds:
        raise CheckFailure(what)
