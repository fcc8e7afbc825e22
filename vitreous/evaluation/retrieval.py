"""Zero-shot retrieval of captions by images and of images by captions (arXiv:2103.00020, section 3.1; Flickr30K and
COCO protocol).

n pairs, m distinct images, c distinct captions, E channels of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vitreous.data.loader import EvalLoader
from vitreous.data.pairs import PairSplit
from vitreous.data.split import Split
from vitreous.errors import DataError
from vitreous.evaluation.evaluator import Evaluator, SplitOutputs
from vitreous.inference.engine import ModelEngine, compute_split_logits
from vitreous.tasks.intervals import Interval, wilson_interval
from vitreous.tasks.report import Report

DIRECTIONS = ("image_to_text", "text_to_image")  # first the query, then the candidates
RECALL_DEPTHS = (1, 5, 10)  # R@k: numbers of retrieved candidates
MAX_RETRIEVAL_PAIRS = 10_000  # pairs of a split that are evaluated, evenly spaced
TEXT_CHUNK = 256  # texts that are encoded at a time
QUERY_CHUNK = 1024  # queries whose similarities are computed at a time


class RetrievalEvaluator(Evaluator):
    """Evaluates the recall of retrieval among the pairs of a split.

    Outputs are (n, 2 E): the embeddings of image and caption of each pair. A retrieved candidate is correct if the
    split has it as a pair with the query; equal captions are one candidate.
    """

    name = "retrieval_r1"

    def required_splits(self, split: Split) -> tuple[Split, ...]:
        """Return the evaluated pairs, at most `MAX_RETRIEVAL_PAIRS`."""
        count = min(len(split), MAX_RETRIEVAL_PAIRS)
        return (split.take(np.linspace(0, len(split) - 1, count).astype(np.int64)) if count < len(split) else split,)

    def without_labels(self) -> RetrievalEvaluator:
        """Return this evaluator, which needs captions but no labels."""
        return self

    def outputs(
        self, engine: ModelEngine, reader: EvalLoader, on_images: Callable[[int], None] = lambda images: None
    ) -> tuple[Any, dict[int, DataError]]:
        """Compute the embeddings of images and captions, (n, 2 E) float32. Every image is encoded once."""
        split = reader.split
        assert isinstance(split, PairSplit), "the objective requires image-text pairs"
        _, first_pairs, image_of_pair = np.unique(split.image_indices, return_index=True, return_inverse=True)
        image_reader = replace(reader, split=split.take(first_pairs))
        images, read_errors = compute_split_logits(engine, image_reader, on_images=on_images)
        errors = {pair: read_errors[image] for pair, image in enumerate(image_of_pair) if image in read_errors}
        return np.concatenate([images[image_of_pair], embed_captions(engine, split)], 1), errors

    def report(self, outputs: SplitOutputs, *extra_outputs: SplitOutputs) -> Report:
        """Compute R@1, R@5 and R@10 in both directions, and the mean R@1. Pairs with unreadable images are left out."""
        split, readable = outputs.split, outputs.readable
        assert isinstance(split, PairSplit), "the objective requires image-text pairs"
        pairs, embeddings = split.take(np.flatnonzero(readable)), outputs.outputs[readable]
        images, texts = np.split(embeddings.astype(np.float32), 2, axis=1)
        metrics, intervals = measure_retrieval(images, texts, pairs.image_indices, np.array(pairs.captions()))
        return Report(
            len(readable),
            int((~readable).sum()),
            metrics=metrics,
            intervals=intervals,
            per_class=[],
            confusion_cells=None,
            primary=self.name,
        )


def embed_captions(engine: ModelEngine, split: PairSplit) -> np.ndarray:
    """Compute the text embeddings of the pairs of a split, (n, E) float32, on the engine's device."""
    model: Any = engine.original
    device, tokens = next(model.parameters()).device, torch.from_numpy(split.tokens.astype(np.int64))
    with torch.inference_mode():
        chunks = [model.embed_texts(chunk.to(device)).cpu() for chunk in tokens.split(TEXT_CHUNK)]
    return torch.cat(chunks).numpy() if chunks else np.zeros((0, model.config.num_features), np.float32)


def measure_retrieval(
    images: np.ndarray, texts: np.ndarray, image_ids: np.ndarray, captions: np.ndarray
) -> tuple[dict[str, float | None], dict[str, Interval | None]]:
    """Compute the recall of retrieval by cosine similarity.

    Args:
        images: image embeddings of the pairs, (n, E).
        texts: text embeddings of the pairs, (n, E).
        image_ids: the image of each pair, (n,).
        captions: the caption of each pair, (n,).

    Returns:
        R@k of each direction with its 95 % interval over queries, and the mean of both R@1; None without pairs.
    """
    metrics: dict[str, float | None] = {"retrieval_r1": None}
    intervals: dict[str, Interval | None] = {"retrieval_r1": None}
    metrics |= dict.fromkeys(f"{direction}_r{depth}" for direction in DIRECTIONS for depth in RECALL_DEPTHS)
    if not len(images):
        return metrics, dict.fromkeys(metrics)
    _, first_images, image_of_pair = np.unique(image_ids, return_index=True, return_inverse=True)
    _, first_texts, text_of_pair = np.unique(captions, return_index=True, return_inverse=True)
    is_match = np.zeros((len(first_images), len(first_texts)), bool)
    is_match[image_of_pair, text_of_pair] = True
    image_rows, text_rows = images[first_images], texts[first_texts]
    recalls = []
    for direction, queries, candidates, matches in (
        (DIRECTIONS[0], image_rows, text_rows, is_match),
        (DIRECTIONS[1], text_rows, image_rows, is_match.T),
    ):
        for depth, hits in zip(RECALL_DEPTHS, count_hits(queries, candidates, matches), strict=True):
            metrics[f"{direction}_r{depth}"] = hits / len(queries)
            intervals[f"{direction}_r{depth}"] = wilson_interval(hits, len(queries))
        recalls.append(metrics[f"{direction}_r1"] or 0.0)
    return metrics | {"retrieval_r1": sum(recalls) / 2}, intervals


def count_hits(queries: np.ndarray, candidates: np.ndarray, is_match: np.ndarray) -> list[int]:
    """Count for each depth k of `RECALL_DEPTHS` the queries (q, E) of which one of the k most similar candidates (c, E)
    is a match. `is_match` is (q, c) bool."""
    query_rows, candidate_rows = (
        torch.nn.functional.normalize(torch.from_numpy(rows), dim=1) for rows in (queries, candidates)
    )
    matches, hits = torch.from_numpy(np.ascontiguousarray(is_match)), [0] * len(RECALL_DEPTHS)
    for start in range(0, len(query_rows), QUERY_CHUNK):
        similarities = query_rows[start : start + QUERY_CHUNK] @ candidate_rows.T
        nearest = similarities.topk(min(max(RECALL_DEPTHS), len(candidate_rows)), dim=1).indices
        is_hit = matches[start : start + QUERY_CHUNK].gather(1, nearest)
        hits = [count + int(is_hit[:, :depth].any(1).sum()) for depth, count in zip(RECALL_DEPTHS, hits, strict=True)]
    return hits
