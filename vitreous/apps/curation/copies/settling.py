"""Copies that were found, and which image each of them is listed with."""

from __future__ import annotations

from typing import NamedTuple


class Copy(NamedTuple):
    """A sample, the sample it is a copy of, how that was found, and their likeness: up to 1."""

    sample: int
    of: int
    reason: str  # bytes, pixels or near
    score: float


def settled(equal: dict[int, Copy], alike: list[Copy]) -> list[Copy]:
    """List one copy a sample, of an image that is not a copy itself; an image that is only like copies is none."""
    listed: dict[int, Copy] = {}
    order: dict[int, list[Copy]] = {}
    for copy in alike:
        order.setdefault(copy.sample, []).append(copy)
    for sample in sorted({*equal, *order}):
        if sample in equal:
            root = listed.get(equal[sample].of)
            listed[sample] = root._replace(sample=sample) if root else equal[sample]
        elif staying := [copy for copy in order[sample] if copy.of not in listed]:
            listed[sample] = max(staying, key=lambda copy: (copy.score, -copy.of))
    return list(listed.values())
