"""Whether two pictures are one: the one is laid over the other where it fits best, and what is left is compared.

p pairs of views (a, b), each (p, side, side) float32: a, mirrored or not, lies in a part of b, but for its edges.
"""

from __future__ import annotations

import numpy as np

from vitreous.data.copies.windows import cut, spectrum

NARROWEST, WIDEST = 0.55, 1.1  # side of a box
OUTSIDE = 0.15  # of a side: how far a box may reach out of the view
# cosines of 8 and of 16 cells below which a pair is not followed further; of copies 99 % have 0.86 and 0.67
HOPELESS = (0.75, 0.5)
PROMISING = 0.65  # cosine of small views from which larger ones are compared
THRESHOLD = 0.54  # how alike copies are at least
DETAIL, BLOCK = 32, 4  # cells a side of what is compared in detail, and of the blocks in it
NOISE = 0.002  # variance of a block, to that of the picture, below which its pattern counts for little
ENOUGH = 25.0  # standard deviations from chance that are as good as more
LEAST = 6.0  # those that a copy has at least
EPSILON, LARGEST = 0.008, 0.05  # of a box, in fractions of the view: the difference of a derivative, and a step at most


def laid(views: np.ndarray, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, side, side) views, of which (p,) CANDIDATE have the numbers -> the picture that is whole, mirrored or not,
    and the other."""
    one, other = views[pairs["sample"]].astype(np.float32), views[pairs["of"]].astype(np.float32)
    inner = pairs["inner"][:, None, None]
    a, b = np.where(inner, one, other), np.where(inner, other, one)
    return np.where(pairs["mirrored"][:, None, None], a[:, :, ::-1], a), b


def align(a: np.ndarray, b: np.ndarray, boxes: np.ndarray, count: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Move and stretch (p, 4) boxes until that part of `b` is most like `a`. Returns (p,) cosines of `count` cells a
    side, and boxes.

    What of `a` lies outside of `b` is left out. Gauss-Newton steps on the difference of both spectra, damped; of all
    boxes on the way the best one is kept.
    """
    best, placed, boxes = np.full(len(a), -1, np.float32), boxes.copy(), boxes.copy()
    moves = np.eye(4, dtype=np.float32) * EPSILON
    for step in range(steps + 1):
        shown = overlap(boxes)
        own = spectrum(a, shown, count).reshape(len(a), count * count)
        now = spectrum(b, within(boxes, shown), count).reshape(len(a), count * count)
        cosine = (own * now).sum(1)
        better = cosine > best
        best[better], placed[better] = cosine[better], boxes[better]
        if step == steps:
            break
        changed = [spectrum(b, within(boxes + move, shown), count).reshape(len(a), count * count) for move in moves]
        slopes = (np.stack(changed, 1) - now[:, None]) / EPSILON  # (p, 4, count * count)
        normal = slopes @ slopes.transpose(0, 2, 1)
        damping = 1e-3 * np.trace(normal, axis1=1, axis2=2) / 4 + 1e-6
        change = np.linalg.solve(
            normal + damping[:, None, None] * np.eye(4, dtype=np.float32), slopes @ (own - now)[:, :, None]
        )[:, :, 0]
        boxes = limited(boxes + change.clip(-LARGEST, LARGEST))
    return best, placed


def limited(boxes: np.ndarray) -> np.ndarray:
    """Boxes of NARROWEST to WIDEST, moved so that no more than OUTSIDE is out of the view."""
    size = boxes[:, 2:].clip(NARROWEST, WIDEST)
    return np.concatenate([np.minimum(boxes[:, :2].clip(-OUTSIDE), 1 + OUTSIDE - size), size], 1)


def overlap(boxes: np.ndarray) -> np.ndarray:
    """(p, 4) places of `a` in `b`, which may reach out of it -> the part of `a` that is in `b`, as a box of `a`."""
    start, end = boxes[:, :2].clip(0), (boxes[:, :2] + boxes[:, 2:]).clip(None, 1)
    return np.concatenate([(start - boxes[:, :2]) / boxes[:, 2:], (end - start) / boxes[:, 2:]], 1)


def within(boxes: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Parts (p, 4) of boxes (p, 4), each in fractions of its box -> boxes of the view."""
    return np.concatenate([boxes[:, :2] + parts[:, :2] * boxes[:, 2:], parts[:, 2:] * boxes[:, 2:]], 1)


def fit(a: np.ndarray, b: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Small views and the boxes that a search found -> (p,) cosines and (p, 4) boxes, aligned; what is hopeless is left
    early.

    Coarse cells first: a step finds its way from further off.
    """
    cosine, boxes = align(a, b, boxes, 8, 2)
    for least, steps in ((HOPELESS[0], 0), (HOPELESS[1], 3)):
        going = np.flatnonzero(cosine >= least)
        cosine[cosine < least] = 0
        cosine[going], boxes[going] = align(a[going], b[going], boxes[going], 16, steps)
    return cosine, boxes


def likeness(a: np.ndarray, b: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Larger views, and where `fit` ended -> (p,) how alike they are, at most 1; 0 where they agree in too little to be
    sure.

    Two parts of it: how alike the patterns are block by block, which two pictures of like things have not, and how far
    from chance the agreement of the whole is, which two drawings of a few strokes have not. Copies have THRESHOLD and
    more.
    """
    _, boxes = align(a, b, boxes, 16, 2)
    shown = overlap(boxes)
    sure = surety(spectrum(a, shown, 16, 1.0), spectrum(b, within(boxes, shown), 16, 1.0))
    _, boxes = align(a, b, boxes, DETAIL, 1)
    shown = overlap(boxes)
    alike = local(cut(a, shown, DETAIL), cut(b, within(boxes, shown), DETAIL))
    return np.where(sure >= LEAST, (alike + 0.02 * np.minimum(sure, ENOUGH)) / (1 + 0.02 * ENOUGH), 0)


def surety(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Spectra of length 1, (p, c, c) each -> (p,) how far from chance their cosine is, in standard deviations.

    A cosine r that d frequencies add up to is that many deviations from 0: atanh(r) * sqrt(d - 3) (Fisher's
    transformation). d is counted as (sum t)^2 / sum t^2 over the terms t of r.
    """
    terms = a * b
    cosine = terms.sum((1, 2))
    shared = cosine**2 / np.maximum((terms**2).sum((1, 2)), 1e-9)
    return np.arctanh(cosine.clip(-0.9999, 0.9999)) * np.sqrt((shared - 3).clip(0))


def local(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(p, c, c) greys each -> (p,) the mean correlation of blocks of BLOCK x BLOCK cells; where both are plain it is
    near 0."""

    def blocks(views: np.ndarray) -> np.ndarray:
        count, side = len(views), views.shape[1] // BLOCK
        scaled = views / np.maximum(views.reshape(count, -1).std(1), 1e-3)[:, None, None]
        cells = scaled.reshape(count, side, BLOCK, side, BLOCK).transpose(0, 1, 3, 2, 4).reshape(count, side * side, -1)
        return cells - cells.mean(2, keepdims=True)

    x, y = blocks(a), blocks(b)
    spread = ((x**2).mean(2) + NOISE) * ((y**2).mean(2) + NOISE)
    return ((x * y).mean(2) / np.sqrt(spread)).mean(1)
