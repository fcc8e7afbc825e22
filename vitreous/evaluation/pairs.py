"""The classes that are most often taken for each other."""

from __future__ import annotations

from typing import Any

import numpy as np

SHOWN = 10


def confused(
    cells: np.ndarray, support: np.ndarray, classes: tuple[str, ...], most: int = SHOWN
) -> dict[str, list[dict[str, Any]]]:
    """Label, answer and count, (m, 3) int64, and (K,) images of each class -> the pairs with most mistakes, at most so
    many.

    `ordered`: `label` taken for `answer`, with `count` and its `share` of the label's images. `unordered`: mistakes
    between two `classes` either way, and their share of the images of both. Of equal counts, the larger share comes
    first, then the order of the classes.
    """
    rows, columns, counts = cells[cells[:, 0] != cells[:, 1]].T
    shares = counts / np.maximum(support[rows], 1)
    ordered = [
        {"label": classes[rows[i]], "answer": classes[columns[i]], "count": int(counts[i]), "share": float(shares[i])}
        for i in np.lexsort((-shares, -counts))[:most]
    ]
    codes, place = np.unique(np.minimum(rows, columns) * len(classes) + np.maximum(rows, columns), return_inverse=True)
    totals = np.bincount(place, weights=counts, minlength=len(codes)).astype(np.int64)
    low, high = codes // len(classes), codes % len(classes)
    shares = totals / np.maximum(support[low] + support[high], 1)
    unordered = [
        {"classes": [classes[low[i]], classes[high[i]]], "count": int(totals[i]), "share": float(shares[i])}
        for i in np.lexsort((-shares, -totals))[:most]
    ]
    return {"ordered": ordered, "unordered": unordered}
