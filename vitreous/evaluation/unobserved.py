"""Libraries that tell their makers of what is done with them are kept from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


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
