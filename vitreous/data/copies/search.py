"""For every picture, the few others that it may be a copy of.

A picture is compared whole with parts of the others, and in parts with the others whole, upright and as its mirror image. n
queries, m pictures in the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from vitreous.data.copies.views import SIDE, Looks
from vitreous.data.copies.windows import BOXES, COARSE, Windows

QUERIES, POOL = 2048, 256  # compared at a time: the products stay in cache
MOST = 8  # candidates of a picture
LIKE = 0.6  # cosine that a candidate has at least
LIKE_FEATURES = 0.5  # the same of a model's features


def candidates(
    looks: Looks, queries: np.ndarray, known: np.ndarray, device: str = "cpu", progress: Callable[[int], None] = lambda done: None
) -> np.ndarray:
    """(p, 2) int64 pairs (query, other), other < query: for each query up to MOST samples in `known` that are most like it.

    `queries` and `known` are sample numbers in rising order; a sample is only compared with earlier ones.
    """
    windows = Windows(SIDE, device)
    found = []
    for low in range(0, len(queries), QUERIES):
        asked = queries[low : low + QUERIES]
        earlier = known[known < asked[-1]]
        found.append(best(asked, earlier, by_windows(looks, asked, earlier, windows, device), LIKE, device))
        if looks.features is not None:
            found.append(best(asked, earlier, by_features(looks.features, asked, earlier, device), LIKE_FEATURES, device))
        progress(min(low + QUERIES, len(queries)))
    return np.unique(np.concatenate(found), axis=0) if found else np.empty((0, 2), np.int64)


def best(asked: np.ndarray, known: np.ndarray, scores: Iterator[tuple[int, Tensor]], floor: float, device: str) -> np.ndarray:
    """(p, 2) pairs of the MOST highest scores of each query above `floor`, from (first column, (n, columns)) blocks of scores."""
    numbers, others = torch.from_numpy(asked).to(device), torch.from_numpy(known).to(device)
    top = torch.full((len(asked), MOST), floor, device=device)
    place = torch.full((len(asked), MOST), -1, dtype=torch.int64, device=device)
    for first, block in scores:
        later = others[first : first + block.shape[1]] >= numbers[:, None]
        columns = torch.arange(first, first + block.shape[1], device=device).expand(len(asked), -1)
        top, chosen = torch.cat([top, block.masked_fill(later, -1.0)], 1).topk(MOST, 1)
        place = torch.cat([place, columns], 1).gather(1, chosen)
    rows, ranks = torch.nonzero(place >= 0, as_tuple=True)
    return np.stack([asked[rows.cpu().numpy()], known[place[rows, ranks].cpu().numpy()]], 1)


def greys(looks: Looks, samples: np.ndarray, device: str) -> Tensor:
    """The views of some samples, (n, SIDE, SIDE) float32."""
    return torch.from_numpy(looks.views[samples]).to(device).float()


def by_windows(looks: Looks, asked: np.ndarray, known: np.ndarray, windows: Windows, device: str) -> Iterator[tuple[int, Tensor]]:
    """Blocks of scores, (first column, (n, columns)): the highest cosine of a whole picture and a part of the other one."""
    upright = greys(looks, asked, device)
    parts = windows(torch.cat([upright, upright.flip(2)])).transpose(0, 1).contiguous()  # (boxes, 2 n, cells)
    for first in range(0, len(known), POOL):
        others = windows(greys(looks, known[first : first + POOL], device)).permute(1, 2, 0).contiguous()  # (boxes, cells, columns)
        score = torch.empty(2 * len(asked), others.shape[2], device=device)
        product = torch.empty_like(score)
        torch.mm(parts[0], others[0], out=score)
        for box in range(1, len(BOXES)):
            torch.maximum(score, torch.mm(parts[0], others[box], out=product), out=score)
            torch.maximum(score, torch.mm(parts[box], others[0], out=product), out=score)
        yield first, score.view(2, len(asked), -1).amax(0)


def by_features(features: np.ndarray, asked: np.ndarray, known: np.ndarray, device: str) -> Iterator[tuple[int, Tensor]]:
    """Blocks of scores, (first column, (n, columns)): the cosine of two pictures' features."""
    own = torch.from_numpy(features[asked]).to(device).float()
    for first in range(0, len(known), POOL):
        yield first, own @ torch.from_numpy(features[known[first : first + POOL]]).to(device).float().T


def start(windows: Windows, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Views of pairs, (p, SIDE, SIDE) each -> where to begin to lay one over the other, for each of four ways:

    `a` whole in a part of `b`, `a` mirrored in it, and `b` in a part of `a`, and of `a` mirrored. (4, p) cosines, (4, p, 4) boxes.
    """
    parts, whole = windows(b), windows(torch.cat([a, a.flip(2)])).view(2, len(a), len(BOXES), COARSE * COARSE)
    ways = [torch.einsum("pwc,pc->pw", parts, whole[m, :, 0]) for m in (0, 1)]
    ways += [torch.einsum("pwc,pc->pw", whole[m], parts[:, 0]) for m in (0, 1)]
    score, box = torch.stack(ways).max(2)
    return score, BOXES.to(a.device)[box]
