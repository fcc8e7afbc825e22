"""What `tasks` uses of scipy, which ships no types; submodules are imported when they are first used."""

from typing import Any

from scipy import optimize as optimize
from scipy import special as special

def __getattr__(name: str) -> Any: ...
