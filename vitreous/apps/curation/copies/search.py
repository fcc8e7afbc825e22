"""Search for candidate duplicates of each image.

A whole image is compared with parts of the others, and its parts with the others as wholes, upright and mirrored; its
centre is compared with parts of the others, for shifted images. Parts are stored in inverted lists by their nearest
centroid, and an image is compared with the parts in the lists nearest to it (Jégou et al., IEEE TPAMI 33(1), 2011,
without the quantisation). N samples, descriptors of LENGTH numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from vitreous.apps.curation.copies.windows import CENTRE_BOX_INDEX, MIRROR_SIGNS, SEARCH_BOXES

PARTS_PER_LIST = 448  # approximate parts per list
MAX_LISTS, NUM_PROBED_LISTS = 1024, 24  # maximum lists, and lists that an image is compared with
KMEANS_ROUNDS, KMEANS_PARTS_PER_LIST = 6, 40  # rounds of k-means, and parts per list that it uses
MAX_HELD_PARTS = 425_984  # in memory at a time: those of 8192 images
FEATURE_BLOCK_SIZE = 8192  # images whose features are compared at a time
QUERY_BLOCK_SIZE = 16384  # images that are compared with the parts at a time
MAX_CANDIDATES = 8  # candidates per image
MIN_DESCRIPTOR_COSINE, MIN_FEATURE_COSINE = (
    0.8,
    0.5,
)  # minimum cosine of a candidate: of descriptors, and of a model's features

#: `sample` may be a copy of `of`: one of them, mirrored or not, matches the box of the other; `forward_before_output`:
#: whether it is `sample`
CANDIDATE = np.dtype(
    [("sample", "i8"), ("of", "i8"), ("cosine", "f4"), ("box", "f4", 4), ("mirrored", "?"), ("inner", "?")]
)
DescribeParts = Callable[[np.ndarray], np.ndarray]  # sample numbers (n,) -> descriptors (n, boxes, LENGTH)


def search_candidates(
    wholes: np.ndarray,
    parts: DescribeParts,
    queries: np.ndarray,
    known: np.ndarray,
    floor: float = MIN_DESCRIPTOR_COSINE,
    probed: int = NUM_PROBED_LISTS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> np.ndarray:
    """Find for each query the earlier samples in `known` with the highest cosines of at least `floor`: (p,) CANDIDATE.

    `wholes` (N, LENGTH) has the descriptor of every sample, `parts` computes those of the boxes of some; `queries` and
    `known` are sorted sample indices. An image is compared with the parts in the `probed` nearest lists; if `parts`
    returns only whole images, wholes are compared with wholes.
    """
    best = np.empty(0, CANDIDATE)
    if not len(queries) or not len(known):
        return best
    centres = train_centroids(parts, known)
    boxes = parts(known[:1]).shape[1]
    multiple, block = boxes > 1, max(MAX_HELD_PARTS // boxes, 1)
    # samples of the parts, samples of the wholes, whether the query is the whole
    sides = [(known, queries, True), (queries, known, False)][: 1 + multiple]
    total, done = sum(len(listed) for listed, *_ in sides), 0
    for listed, asked, inner in sides:
        for low in range(0, len(listed), block):
            held = listed[low : low + block]
            lists = InvertedLists(parts(held), held, centres)
            later = asked[asked > held[0]] if inner else asked[asked < held[-1]]
            for first in range(0, len(later), QUERY_BLOCK_SIZE):
                few = later[first : first + QUERY_BLOCK_SIZE]
                pairs = [
                    best,
                    *compare_with_lists(
                        wholes[few], few, shown=SEARCH_BOXES[0], lists=lists, inner=inner, floor=floor, probed=probed
                    ),
                ]
                if inner and multiple:
                    pairs += compare_with_lists(
                        parts(few)[:, CENTRE_BOX_INDEX],
                        few,
                        shown=SEARCH_BOXES[CENTRE_BOX_INDEX],
                        lists=lists,
                        inner=inner,
                        floor=floor,
                        probed=probed,
                    )
                best = keep_best_candidates(np.concatenate(pairs))
            done += len(held)
            progress(done, total)
    return best


class InvertedLists:
    """(n, boxes, LENGTH) parts sorted by their nearest centroid: list k is `starts[k]` to `starts[k + 1]`."""

    def __init__(self, parts: np.ndarray, numbers: np.ndarray, centres: np.ndarray) -> None:
        flat = parts.reshape(-1, parts.shape[2])
        nearest = np.concatenate(
            [(flat[low : low + 65536] @ centres.T).argmax(1) for low in range(0, len(flat), 65536)]
        )
        order = np.argsort(nearest, kind="stable")
        self.vectors, self.numbers = flat[order], numbers[order // parts.shape[1]]
        self.boxes = (order % parts.shape[1]).astype(np.int16)
        self.centres, self.starts = centres, np.searchsorted(nearest[order], np.arange(len(centres) + 1))


def train_centroids(parts: DescribeParts, known: np.ndarray) -> np.ndarray:
    """Train centroids by spherical k-means on some parts: (k, LENGTH) of length 1; deterministic."""
    draw = np.random.default_rng(0)
    boxes = parts(known[:1]).shape[1]
    count = min(max(len(known) * boxes // PARTS_PER_LIST, 1), MAX_LISTS)
    drawn = np.sort(
        draw.choice(len(known), min(len(known), -(-count * KMEANS_PARTS_PER_LIST // min(boxes, 8))), replace=False)
    )
    vectors = parts(known[drawn])
    vectors = vectors[:, np.sort(draw.choice(boxes, min(boxes, 8), replace=False))].reshape(-1, vectors.shape[2])
    centres = vectors[draw.choice(len(vectors), count, replace=False)]
    for _ in range(KMEANS_ROUNDS if count > 1 else 0):
        nearest = (vectors @ centres.T).argmax(1)
        order = np.argsort(nearest, kind="stable")
        used, first = np.unique(nearest[order], return_index=True)
        sums = np.add.reduceat(vectors[order], first, axis=0)
        centres[used] = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-6)
    return centres


def compare_with_lists(
    descriptors: np.ndarray,
    asked: np.ndarray,
    shown: np.ndarray,
    lists: InvertedLists,
    inner: bool,
    floor: float,
    probed: int,
) -> Iterator[np.ndarray]:
    """Yield candidates, (p,) CANDIDATE, among images and the parts in the lists nearest to them.

    `descriptors` (n, LENGTH) are those of the box `shown` of the samples `asked`, compared upright and mirrored.
    """
    upright = descriptors.astype(np.float32)
    vectors, count = np.concatenate([upright, upright * MIRROR_SIGNS]), len(lists.centres)
    probed = min(probed, count)
    near = np.argpartition(-(vectors @ lists.centres.T), probed - 1, axis=1)[:, :probed].ravel()
    order = np.argsort(near, kind="stable")
    rows, starts = order // probed, np.searchsorted(near[order], np.arange(count + 1))
    size = SEARCH_BOXES[:, 2:] / shown[2:]  # box of the whole image if its part `shown` matches each search box
    places = np.concatenate([SEARCH_BOXES[:, :2] - shown[:2] * size, size], 1)
    for k in range(count):
        own = slice(lists.starts[k], lists.starts[k + 1])
        for low in range(starts[k], starts[k + 1], 1024):
            chosen = rows[low : min(low + 1024, starts[k + 1])]
            cosine = vectors[chosen] @ lists.vectors[own].T
            # np.nonzero of two axes is far slower
            i, j = np.divmod(np.flatnonzero(cosine.ravel() >= floor), cosine.shape[1])
            whole, other = asked[chosen[i] % len(asked)], lists.numbers[own][j]
            sample, of = (whole, other) if inner else (other, whole)
            earlier = of < sample
            if not earlier.any():
                continue
            pairs = np.empty(int(earlier.sum()), CANDIDATE)
            pairs["sample"], pairs["of"], pairs["cosine"] = sample[earlier], of[earlier], cosine[i, j][earlier]
            pairs["box"], pairs["inner"] = places[lists.boxes[own][j][earlier]], inner
            pairs["mirrored"] = (chosen[i] >= len(asked))[earlier]
            yield pairs


def find_first_equal(keys: np.ndarray) -> np.ndarray:
    """Find the first equal row for each row of (n, 2) uint64, which may be itself: (n,) int64."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal rows stay in their order
    ranked = keys[order]
    new = np.ones(len(keys), bool)
    new[1:] = (ranked[1:] != ranked[:-1]).any(1)
    first = np.empty(len(keys), np.int64)
    first[order] = order[np.maximum.accumulate(np.where(new, np.arange(len(keys)), 0))]
    return first


def keep_best_candidates(pairs: np.ndarray) -> np.ndarray:
    """Keep the best box of each pair and direction in (p,) CANDIDATE, and the best MAX_CANDIDATES of each sample."""
    order = np.lexsort((-pairs["cosine"], pairs["inner"], pairs["mirrored"], pairs["of"], pairs["sample"]))
    pairs = pairs[order]
    same = np.ones(len(pairs), bool)
    for name in ("sample", "of", "mirrored", "inner"):
        same[1:] &= pairs[name][1:] == pairs[name][:-1]
    same[:1] = False
    pairs = pairs[~same]
    pairs = pairs[np.lexsort((pairs["of"], -pairs["cosine"], pairs["sample"]))]
    first = np.flatnonzero(np.diff(pairs["sample"], prepend=-1))
    rank = np.arange(len(pairs)) - np.repeat(first, np.diff(np.append(first, len(pairs))))
    return pairs[rank < MAX_CANDIDATES]


def search_by_features(features: np.ndarray, queries: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Find for each query the earlier samples in `known` with the nearest features (N, D): (p,) CANDIDATE.

    Features have no box: each pair is added upright and mirrored, as whole images.
    """
    pairs = [np.empty(0, CANDIDATE)]
    for low in range(0, len(queries), 1024):
        asked = queries[low : low + 1024]
        for first in range(0, len(known), FEATURE_BLOCK_SIZE):
            others = known[first : first + FEATURE_BLOCK_SIZE]
            cosine = features[asked].astype(np.float32) @ features[others].astype(np.float32).T
            cosine[others[None] >= asked[:, None]] = -1
            nearest = np.argpartition(-cosine, min(MAX_CANDIDATES, len(others)) - 1, axis=1)[:, :MAX_CANDIDATES]
            i, j = np.repeat(np.arange(len(asked)), nearest.shape[1]), nearest.ravel()
            good = cosine[i, j] >= MIN_FEATURE_COSINE
            part = np.zeros(int(good.sum()), CANDIDATE)
            part["sample"], part["of"], part["cosine"] = asked[i[good]], others[j[good]], cosine[i, j][good]
            part["box"], part["inner"] = SEARCH_BOXES[0], True
            pairs.append(part)
    upright = keep_best_candidates(np.concatenate(pairs))
    mirrored = upright.copy()
    mirrored["mirrored"] = True
    return np.concatenate([upright, mirrored])
