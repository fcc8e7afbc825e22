"""One way from what is given to the pixels that a model is asked about, for files, requests and workers alike. Without torch."""

from __future__ import annotations

import os

import numpy as np

from vitreous.data.preprocess import Preprocess


def read(
    raw: bytes | np.ndarray | str | os.PathLike[str], preprocess: Preprocess, name: str | None = None, exact: bool = False
) -> np.ndarray:
    """A file, its bytes, or pixels -> (C, *image) as the model takes them. Raises DataError for what cannot be read."""
    return preprocess.array(preprocess.decoded(raw, name))
