"""Counts of the trials of a check, and the details needed to reproduce a failure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.reliability.rig import CheckFailure


@dataclass
class Tally:
    """The trials of one promise. `facts` are observations for the report."""

    name: str
    passed: int = 0
    tried: int = 0
    misses: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    @contextmanager
    def trial(self, name: str, count: int = 1) -> Iterator[None]:
        """`count` trials that pass if nothing is raised. A CheckFailure is recorded and the next trial starts; other
        errors propagate."""
        self.tried += count
        try:
            yield
        except CheckFailure as miss:
            self.misses.append(f"{name}: {miss}")
        else:
            self.passed += count

    @property
    def line(self) -> str:
        """`name: passed of tried, seconds`, and the observations."""
        observations = "".join(f"; {name} {value}" for name, value in self.facts.items())
        return f"{self.name}: {self.passed} of {self.tried}, {time.monotonic() - self.begun:.0f} s{observations}"


def expect(holds: object, message: str) -> None:
    """Raise CheckFailure unless the condition holds."""
    if not holds:
        raise CheckFailure(message)
