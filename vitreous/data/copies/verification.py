"""Whether two pictures are one: the one is laid over the other where it fits best, and what is left is compared.

Pairs (a, b) of views; a way is one of four: a in a part of b, a mirrored in a part of b, b in a part of a, b in a part of a mirrored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitreous.data.copies.search import start
from vitreous.data.copies.windows import WHOLE, Windows, spectrum

BEHIND = 0.1  # a way whose coarse cosine is this far behind the best one is not followed
NARROWEST = 0.55  # side of the smallest part
STEPS = (0.05, 0.025, 0.012, 0.006)  # of the box while it is moved, in fractions of the view
HOPELESS = 0.4  # how alike a pair has to be after the first step to be followed further: photographs' copies were at least 0.47
FINE = (0.02, 0.01, 0.005, 0.0025)


def agreement(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Spectra of length 1, (p, h, w) each -> (p,) cosines, and (p,) how far from chance each is, in standard deviations.

    A cosine r that d frequencies add up to is that many deviations from 0: atanh(r) * sqrt(d - 3) (Fisher's transformation). d is
    counted as (sum t)^2 / sum t^2 over the terms t of r. Two drawings of a few strokes agree in few.
    """
    terms = a * b
    cosine = terms.sum((1, 2))
    shared = cosine**2 / terms.pow(2).sum((1, 2)).clamp(min=1e-9)
    return cosine, torch.atanh(cosine.clamp(-0.9999, 0.9999)) * (shared - 3).clamp(min=0).sqrt()


def same(a: Tensor, b: Tensor, count: int = 16) -> tuple[Tensor, Tensor]:
    """Pairs of whole views, (p, side, side) float32 -> their agreement, upright or mirrored, whichever is more; nothing is moved."""
    whole = WHOLE.to(a.device).expand(len(a), 4)
    other = spectrum(b, whole, count)
    upright, mirrored = (agreement(spectrum(one, whole, count), other) for one in (a, a.flip(2)))
    more = upright[0] >= mirrored[0]
    return torch.where(more, upright[0], mirrored[0]), torch.where(more, upright[1], mirrored[1])


def fit(windows: Windows, a: Tensor, b: Tensor, count: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of views, (p, side, side) float32 -> how alike, -1 to 1, the way, and the box, each for every pair."""
    coarse, boxes = start(windows, a, b)
    score = torch.full_like(coarse, -1.0)
    for way in range(4):
        chosen = torch.nonzero(coarse[way] >= coarse.amax(0) - BEHIND)[:, 0]
        for steps in (STEPS[:1], STEPS[1:]):
            if len(chosen):
                found, boxes[way, chosen] = refine(*laid(a[chosen], b[chosen], way), boxes[way, chosen], count, steps)
                score[way, chosen] = found
                chosen = chosen[found >= HOPELESS]
    top, way = score.max(0)
    return top, way, boxes[way, torch.arange(len(a), device=a.device)]


def refit(a: Tensor, b: Tensor, way: Tensor, boxes: Tensor, count: int = 32) -> tuple[Tensor, Tensor]:
    """The same with larger views, from where `fit` ended: the agreement of (p,) pairs."""
    score, surety = torch.empty(len(a), device=a.device), torch.empty(len(a), device=a.device)
    for one in range(4):
        chosen = torch.nonzero(way == one)[:, 0]
        if len(chosen):
            whole, other = laid(a[chosen], b[chosen], one)
            _, placed = refine(whole, other, boxes[chosen], count, FINE)
            own = spectrum(whole, WHOLE.to(a.device).expand(len(whole), 4), count)
            score[chosen], surety[chosen] = agreement(own, spectrum(other, placed, count))
    return score, surety


def laid(a: Tensor, b: Tensor, way: int) -> tuple[Tensor, Tensor]:
    """The view that is whole, and the one of which a part is sought."""
    a = a.flip(2) if way % 2 else a
    return (a, b) if way < 2 else (b, a)


def refine(whole: Tensor, other: Tensor, boxes: Tensor, count: int, steps: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Move and stretch (p, 4) boxes step by step while `whole` gets more like that part of `other`. Returns cosines and boxes."""
    own = spectrum(whole, WHOLE.to(whole.device).expand(len(whole), 4), count)

    def cosine(boxes: Tensor) -> Tensor:
        return (own * spectrum(other, boxes, count)).sum((1, 2))

    best = cosine(boxes)
    moves = torch.tensor([(1, 0, 0, 0), (0, 1, 0, 0), (-0.5, 0, 1, 0), (0, -0.5, 0, 1)], device=whole.device)
    for step in steps:
        for move in torch.cat([moves, -moves]).repeat(2, 1):
            moved = inside(boxes + step * move)
            now = cosine(moved)
            better = now > best
            best, boxes = torch.where(better, now, best), torch.where(better[:, None], moved, boxes)
    return best, boxes


def inside(boxes: Tensor) -> Tensor:
    """Boxes of at least NARROWEST, moved into the view."""
    size = boxes[:, 2:].clamp(NARROWEST, 1.0)
    return torch.cat([torch.minimum(boxes[:, :2].clamp(min=0), 1 - size), size], 1)
