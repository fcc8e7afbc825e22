"""The libraries of the extra `export`: asked for by name, and kept from telling their makers what is done with them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vitreous.errors import ResourceError


def needed(name: str, who: str = "exported models need") -> Any:
    """An optional library. Raises ResourceError, with the command that installs it, where there is none."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ResourceError(f"{who} {name}, which is not installed", "pip install 'vitreous[export]'") from None


@contextmanager
def unobserved() -> Iterator[None]:
    """OpenVINO and nncf tell their makers of every import and conversion, but in CI jobs: be one, so that nothing is sent from here."""
    before = os.environ.get("CI")
    os.environ["CI"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["CI"]
        else:
            os.environ["CI"] = before
