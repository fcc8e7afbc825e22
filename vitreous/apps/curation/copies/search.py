"""Search for candidate duplicates of each image.

A whole image is compared with parts of other images, and its parts with other whole images, upright and mirrored. For
shifted images, its centre is compared with parts of other images. A part is a box of `SEARCH_BOXES`.

The descriptors of parts are stored in inverted lists by their nearest centroid. An image is compared only with the
parts in the nearest lists (Jégou et al., IEEE TPAMI 33(1), 2011, without the quantisation). Shapes: N samples,
descriptors of L = `DESCRIPTOR_LENGTH` numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from vitreous.apps.curation.copies.windows import CENTRE_BOX_INDEX, MIRROR_SIGNS, SEARCH_BOXES

PARTS_PER_LIST = 448  # approximate number of parts per inverted list
MAX_LISTS, NUM_PROBED_LISTS = 1024, 24  # maximum number of lists; nearest lists that an image is compared with
KMEANS_ROUNDS, KMEANS_PARTS_PER_LIST = 6, 40  # rounds of k-means, and parts that it uses per list
MAX_HELD_PARTS = 425_984  # parts in memory at a time: those of 8192 images
FEATURE_BLOCK_SIZE = 8192  # images whose features are compared at a time
QUERY_BLOCK_SIZE = 16384  # images that are compared with the parts at a time
MAX_CANDIDATES = 8  # candidates per image
# minimum cosine of two descriptors, and of a model's features, for a candidate
MIN_DESCRIPTOR_COSINE, MIN_FEATURE_COSINE = 0.8, 0.5

#: `sample` may be a copy of `of`. One of them, mirrored if `mirrored`, matches the box `box` of the other: `sample`
#: matches a box of `of` if `inner`, else the reverse
CANDIDATE = np.dtype(
    [("sample", "i8"), ("of", "i8"), ("cosine", "f4"), ("box", "f4", 4), ("mirrored", "?"), ("inner", "?")]
)
DescribeParts = Callable[[np.ndarray], np.ndarray]  # sample indices (n,) -> descriptors (n, boxes, L)


def search_candidates(
    wholes: np.ndarray,
    describe_parts: DescribeParts,
    queries: np.ndarray,
    references: np.ndarray,
    floor: float = MIN_DESCRIPTOR_COSINE,
    probed: int = NUM_PROBED_LISTS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> np.ndarray:
    """Find for each query the most similar earlier samples in `references`: (p,) of dtype `CANDIDATE`, with cosines of
    at least `floor`.

    `wholes` (N, L) are descriptors of whole images, `describe_parts` computes descriptors of parts. `queries` and
    `references` are sorted sample indices. An image is compared with the parts in the `probed` nearest lists. If
    `describe_parts` returns only whole images, whole images are compared.
    """
    candidates = np.empty(0, CANDIDATE)
    if not len(queries) or not len(references):
        return candidates
    centres = train_centroids(describe_parts, references)
    num_boxes = describe_parts(references[:1]).shape[1]
    has_parts, block_size = num_boxes > 1, max(MAX_HELD_PARTS // num_boxes, 1)
    # samples of the parts, samples of the wholes, whether the query is the whole
    directions = [(references, queries, True), (queries, references, False)][: 1 + has_parts]
    total, done = sum(len(part_samples) for part_samples, *_ in directions), 0
    for part_samples, whole_samples, inner in directions:
        for block_start in range(0, len(part_samples), block_size):
            block_samples = part_samples[block_start : block_start + block_size]
            lists = InvertedLists(describe_parts(block_samples), block_samples, centres)
            eligible = (
                whole_samples[whole_samples > block_samples[0]]
                if inner
                else whole_samples[whole_samples < block_samples[-1]]
            )
            for start in range(0, len(eligible), QUERY_BLOCK_SIZE):
                query_block = eligible[start : start + QUERY_BLOCK_SIZE]
                pairs = [
                    candidates,
                    *compare_with_lists(
                        wholes[query_block],
                        query_block,
                        query_box=SEARCH_BOXES[0],
                        lists=lists,
                        inner=inner,
                        floor=floor,
                        probed=probed,
                    ),
                ]
                if inner and has_parts:
                    pairs += compare_with_lists(
                        describe_parts(query_block)[:, CENTRE_BOX_INDEX],
                        query_block,
                        query_box=SEARCH_BOXES[CENTRE_BOX_INDEX],
                        lists=lists,
                        inner=inner,
                        floor=floor,
                        probed=probed,
                    )
                candidates = keep_best_candidates(np.concatenate(pairs))
            done += len(block_samples)
            progress(done, total)
    return candidates


class InvertedLists:
    """Descriptors of parts (n, boxes, L), sorted by their nearest centroid: list k is `list_starts[k]` to
    `list_starts[k + 1]`."""

    def __init__(self, descriptors: np.ndarray, samples: np.ndarray, centres: np.ndarray) -> None:
        flat_descriptors = descriptors.reshape(-1, descriptors.shape[2])
        nearest = np.concatenate(
            [
                (flat_descriptors[low : low + 65536] @ centres.T).argmax(1)
                for low in range(0, len(flat_descriptors), 65536)
            ]
        )
        order = np.argsort(nearest, kind="stable")
        self.vectors, self.image_indices = flat_descriptors[order], samples[order // descriptors.shape[1]]
        self.window_indices = (order % descriptors.shape[1]).astype(np.int16)
        self.centres, self.list_starts = centres, np.searchsorted(nearest[order], np.arange(len(centres) + 1))


def train_centroids(describe_parts: DescribeParts, references: np.ndarray) -> np.ndarray:
    """Train centroids by spherical k-means on a subset of the parts: (k, L) of length 1. The result is
    deterministic."""
    generator = np.random.default_rng(0)
    num_boxes = describe_parts(references[:1]).shape[1]
    count = min(max(len(references) * num_boxes // PARTS_PER_LIST, 1), MAX_LISTS)
    subset = np.sort(
        generator.choice(
            len(references), min(len(references), -(-count * KMEANS_PARTS_PER_LIST // min(num_boxes, 8))), replace=False
        )
    )
    vectors = describe_parts(references[subset])
    vectors = vectors[:, np.sort(generator.choice(num_boxes, min(num_boxes, 8), replace=False))].reshape(
        -1, vectors.shape[2]
    )
    centres = vectors[generator.choice(len(vectors), count, replace=False)]
    for _ in range(KMEANS_ROUNDS if count > 1 else 0):
        nearest = (vectors @ centres.T).argmax(1)
        order = np.argsort(nearest, kind="stable")
        nonempty, starts = np.unique(nearest[order], return_index=True)
        sums = np.add.reduceat(vectors[order], starts, axis=0)
        centres[nonempty] = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-6)
    return centres


def compare_with_lists(
    descriptors: np.ndarray,
    query_samples: np.ndarray,
    query_box: np.ndarray,
    lists: InvertedLists,
    inner: bool,
    floor: float,
    probed: int,
) -> Iterator[np.ndarray]:
    """Compare images with the parts in their nearest lists, and yield candidates: (p,) of dtype `CANDIDATE`.

    `descriptors` (n, L) describe the box `query_box` of the images `query_samples`, which are compared upright and
    mirrored. `inner` is that of `CANDIDATE`.
    """
    upright = descriptors.astype(np.float32)
    vectors, num_lists = np.concatenate([upright, upright * MIRROR_SIGNS]), len(lists.centres)
    probed = min(probed, num_lists)
    nearest_lists = np.argpartition(-(vectors @ lists.centres.T), probed - 1, axis=1)[:, :probed].ravel()
    order = np.argsort(nearest_lists, kind="stable")
    query_rows, starts = order // probed, np.searchsorted(nearest_lists[order], np.arange(num_lists + 1))
    size = SEARCH_BOXES[:, 2:] / query_box[2:]  # box of the whole query if its part `query_box` matches a search box
    whole_boxes = np.concatenate([SEARCH_BOXES[:, :2] - query_box[:2] * size, size], 1)
    for k in range(num_lists):
        list_slice = slice(lists.list_starts[k], lists.list_starts[k + 1])
        for low in range(starts[k], starts[k + 1], 1024):
            block_rows = query_rows[low : min(low + 1024, starts[k + 1])]
            cosine = vectors[block_rows] @ lists.vectors[list_slice].T
            # np.nonzero of two axes is far slower
            i, j = np.divmod(np.flatnonzero(cosine.ravel() >= floor), cosine.shape[1])
            query, part_sample = query_samples[block_rows[i] % len(query_samples)], lists.image_indices[list_slice][j]
            sample, of = (query, part_sample) if inner else (part_sample, query)
            is_earlier = of < sample
            if not is_earlier.any():
                continue
            pairs = np.empty(int(is_earlier.sum()), CANDIDATE)
            pairs["sample"], pairs["of"], pairs["cosine"] = sample[is_earlier], of[is_earlier], cosine[i, j][is_earlier]
            pairs["box"], pairs["inner"] = whole_boxes[lists.window_indices[list_slice][j][is_earlier]], inner
            pairs["mirrored"] = (block_rows[i] >= len(query_samples))[is_earlier]
            yield pairs


def find_first_equal_rows(keys: np.ndarray) -> np.ndarray:
    """Return for each row of keys (n, 2) uint64 the index of the first equal row, or of the row itself if it is the
    first: (n,) int64."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal rows stay in their order
    ranked = keys[order]
    is_new = np.ones(len(keys), bool)
    is_new[1:] = (ranked[1:] != ranked[:-1]).any(1)
    first_index = np.empty(len(keys), np.int64)
    first_index[order] = order[np.maximum.accumulate(np.where(is_new, np.arange(len(keys)), 0))]
    return first_index


def keep_best_candidates(pairs: np.ndarray) -> np.ndarray:
    """Keep the best `MAX_CANDIDATES` of each sample in (p,) candidates of dtype `CANDIDATE`, with only the best box for
    the same pair, mirroring and direction."""
    order = np.lexsort((-pairs["cosine"], pairs["inner"], pairs["mirrored"], pairs["of"], pairs["sample"]))
    pairs = pairs[order]
    is_duplicate = np.ones(len(pairs), bool)
    for name in ("sample", "of", "mirrored", "inner"):
        is_duplicate[1:] &= pairs[name][1:] == pairs[name][:-1]
    is_duplicate[:1] = False
    pairs = pairs[~is_duplicate]
    pairs = pairs[np.lexsort((pairs["of"], -pairs["cosine"], pairs["sample"]))]
    starts = np.flatnonzero(np.diff(pairs["sample"], prepend=-1))
    rank = np.arange(len(pairs)) - np.repeat(starts, np.diff(np.append(starts, len(pairs))))
    return pairs[rank < MAX_CANDIDATES]


def search_by_features(features: np.ndarray, queries: np.ndarray, references: np.ndarray) -> np.ndarray:
    """Find for each query the earlier samples in `references` with the nearest features (N, D): (p,) of dtype
    `CANDIDATE`.

    Features do not locate a box. Each pair is returned as whole images, upright and mirrored.
    """
    pairs = [np.empty(0, CANDIDATE)]
    for low in range(0, len(queries), 1024):
        query_block = queries[low : low + 1024]
        for start in range(0, len(references), FEATURE_BLOCK_SIZE):
            reference_block = references[start : start + FEATURE_BLOCK_SIZE]
            cosine = features[query_block].astype(np.float32) @ features[reference_block].astype(np.float32).T
            cosine[reference_block[None] >= query_block[:, None]] = -1
            nearest = np.argpartition(-cosine, min(MAX_CANDIDATES, len(reference_block)) - 1, axis=1)[
                :, :MAX_CANDIDATES
            ]
            i, j = np.repeat(np.arange(len(query_block)), nearest.shape[1]), nearest.ravel()
            is_near = cosine[i, j] >= MIN_FEATURE_COSINE
            candidates = np.zeros(int(is_near.sum()), CANDIDATE)
            candidates["sample"], candidates["of"], candidates["cosine"] = (
                query_block[i[is_near]],
                reference_block[j[is_near]],
                cosine[i, j][is_near],
            )
            candidates["box"], candidates["inner"] = SEARCH_BOXES[0], True
            pairs.append(candidates)
    upright = keep_best_candidates(np.concatenate(pairs))
    mirrored = upright.copy()
    mirrored["mirrored"] = True
    return np.concatenate([upright, mirrored])
