"""scikit-learn's handwritten digits: the data set that comes with the package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from vitreous.data.holdout import hold_out
from vitreous.data.split import Arrays, Data, Split


def digits(split_seed: int = 0) -> Data:
    """scikit-learn's handwritten digits (1,797 greys of 8 x 8), split 80/10/10 within each class."""
    table = digits_table()
    pixels = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = table[:, -1].astype(np.int64)
    parts = hold_out(labels, split_seed, {"val": 0.1, "test": 0.1})
    splits: dict[str, Split] = {name: Arrays(pixels[rows], labels[rows]) for name, rows in parts.items()}
    rest = np.sort(np.concatenate([parts["train"], parts["val"]]))
    return Data("digits", tuple(map(str, range(10))), splits, whole=Arrays(pixels[rest], labels[rest]))


def digits_table() -> np.ndarray:
    """(1797, 65) float64: 64 pixels from 0 to 16, then the label. Read from scikit-learn's own file, since importing
    its data sets takes longer than an epoch; through its function where the file is not found."""
    spec = find_spec("sklearn")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(place) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])
