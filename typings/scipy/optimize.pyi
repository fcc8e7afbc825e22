"""Roots and minima."""

from collections.abc import Callable
from typing import Any

def brentq(f: Callable[[float], float], a: float, b: float, *, xtol: float = 2e-12) -> float: ...
def __getattr__(name: str) -> Any: ...
