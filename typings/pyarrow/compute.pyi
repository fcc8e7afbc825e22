"""Functions of pyarrow.compute, which it makes when it is imported."""

from typing import Any

def __getattr__(name: str) -> Any: ...
