"""Zero-shot retrieval as an evaluation protocol: captions by images and images by captions (arXiv:2103.00020, section
3.1)."""

from __future__ import annotations

import numpy as np

from vitreous.data.loader import EvalLoader
from vitreous.data.pairs import PairSplit, require_pairs, tokenize_pairs
from vitreous.data.screen import check_unreadable_images, find_readable_samples
from vitreous.data.split import Data
from vitreous.evaluation.evaluator import SplitOutputs
from vitreous.evaluation.retrieval import DIRECTIONS, RECALL_DEPTHS, RetrievalEvaluator
from vitreous.inference.engine import build_readable_mask, make_engine
from vitreous.reports.answers import make_progress_counter
from vitreous.reports.protocols.task import ProtocolResult, ProtocolTask
from vitreous.system.cores import default_worker_count
from vitreous.weights.bundle import Bundle
from vitreous.weights.zero_shot import require_text_encoder


def prepare_pairs(data: Data, bundle: Bundle, run: str) -> Data:
    """Return a dataset of image-text pairs with the token ids of the captions, which are cut at the length of the text
    encoder. Raises DataError for other data, UsageError for a model without a text encoder, WeightsError without a
    tokenizer."""
    _, tokenizer = require_text_encoder(bundle, run)
    require_pairs(data)
    return tokenize_pairs(data, tokenizer)


def evaluate_retrieval(task: ProtocolTask) -> ProtocolResult:
    """Evaluate the recall of retrieval among the pairs of a split, at most `MAX_RETRIEVAL_PAIRS`, evenly spaced.

    Raises DataError for unreadable images, with bad_images `skip` only if none is readable.
    """
    settings, evaluator = task.evaluation_settings, RetrievalEvaluator()
    (split,) = evaluator.required_splits(task.evaluated_split)
    assert isinstance(split, PairSplit), "prepare_pairs was called"
    if len(split) < len(task.evaluated_split):
        settings.listener.note(f"{len(split):,} of {len(task.evaluated_split):,} pairs are evaluated, evenly spaced")
    engine = make_engine(task.bundle.model, task.bundle.preprocess, settings.inference_options)
    workers = default_worker_count() if settings.workers is None else settings.workers
    images = len(np.unique(split.image_indices))
    on_images = make_progress_counter(settings.listener, "evaluate", images)
    outputs, errors = evaluator.outputs(engine, EvalLoader(split, task.bundle.preprocess, workers), on_images)
    check_unreadable_images(errors, len(split), settings.bad_images)
    find_readable_samples(split, errors)  # raises DataError if there are none
    report = evaluator.report(SplitOutputs(split, outputs, build_readable_mask(len(split), errors)))
    results = [
        {
            "direction": direction.replace("_", " "),
            **{f"r{depth}": report.metrics[f"{direction}_r{depth}"] for depth in RECALL_DEPTHS},
            "interval": {f"r{depth}": report.intervals[f"{direction}_r{depth}"] for depth in RECALL_DEPTHS},
        }
        for direction in DIRECTIONS
    ]
    return ProtocolResult(report, results, {"pairs": len(split)})
