"""The libraries of the extra `export`: asked for by name, and kept from telling their makers what is done with them."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from vitreous.errors import ResourceError


def needed(name: str, who: str = "exported models need") -> Any:
    """An optional library. Raises ResourceError, with the command that installs it, where there is none."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ResourceError(f"{who} {name}, which is not installed", "pip install 'vitreous[export]'") from None


def check_installed(names: Iterable[str], who: str = "exported models need") -> None:
    """Raise ResourceError, with the command that installs it, for the first of these libraries that is not there.
    Imports none."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ResourceError(f"{who} {name}, which is not installed", "pip install 'vitreous[export]'")


@contextmanager
def setting(name: str, value: str) -> Iterator[None]:
    """A variable of the environment for a while; then as it was before."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def unobserved() -> AbstractContextManager[None]:
    """OpenVINO and nncf tell their makers of every import and conversion, but in CI jobs: be one, so that nothing is
    sent from here."""
    return setting("CI", "true")
