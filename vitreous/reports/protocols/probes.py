"""The protocols `knn`, `linear` and `fewshot`: simple classifiers on a model's features."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from vitreous.errors import DataError, UsageError
from vitreous.evaluation import knn, linear
from vitreous.evaluation.linear import NUM_PENALTY_FITS, LabelledFeatures, fit_linear_classifier, search_penalty
from vitreous.inference.features import SplitFeatures
from vitreous.reports.protocols.published import evaluate_published_probe
from vitreous.reports.protocols.task import ProtocolResult, ProtocolTask, build_mean_report
from vitreous.tasks.classification_metrics import evaluate_classification
from vitreous.tasks.intervals import wilson_interval

# DINO's values of k; the headline k is fixed, not chosen on the evaluated images
KNN_NEIGHBOURS, HEADLINE_NEIGHBOURS = ((10, 20, 100, 200), 20)
HEADLINE_SHOTS = 5  # the paper's "linear 5-shot"


def describe_features(train: SplitFeatures, evaluated: SplitFeatures, split: str) -> dict[str, Any]:
    """Return, for the training and the evaluated split, number and width of the features and their cache file."""
    descriptions = {}
    for name, features in (("train", train), (split, evaluated)):
        images, width = len(features.features), math.prod(features.features.shape[1:])
        file = features.file and os.fspath(features.file)
        descriptions[name] = {"images": images, "width": width, "file": file, "reused": features.reused}
    return descriptions


def evaluate_knn(task: ProtocolTask) -> ProtocolResult:
    """Evaluate by k-NN: weighted votes of the k nearest training images, for each k of --k.

    The headline metric is that of k = 20 or, if --k does not contain 20, of the smallest k. Raises UsageError if k
    exceeds the number of training images.
    """
    train, evaluated = task.pair()
    readable = np.flatnonzero(train.is_readable)
    if task.options.k and max(task.options.k) > len(readable):
        problem = f"--k {max(task.options.k)} exceeds the {len(readable)} training images"
        raise UsageError(problem, f"use at most --k {len(readable)}")
    ks = sorted(set(task.options.k)) or [k for k in KNN_NEIGHBOURS if k <= len(readable)] or [len(readable)]
    train_features = train.features if train.is_readable.all() else train.features[readable]
    labels, label_kind = task.training_split.labels[readable], task.data.label_kind
    cosines, neighbours = knn.find_nearest_neighbours(train_features, evaluated.features, max(ks), task.device)
    headline_k = HEADLINE_NEIGHBOURS if HEADLINE_NEIGHBOURS in ks else ks[0]
    results, headline = [], None
    for k in ks:
        shares = knn.compute_neighbour_votes(
            cosines[:, :k], neighbours[:, :k], labels, task.num_classes, task.options.temperature
        )
        report = evaluate_classification(
            label_kind.shares_to_logits(shares), task.evaluated_split.labels, task.data.classes, evaluated.is_readable
        )
        report.metrics["nll"] = report.intervals["nll"] = None  # infinite if the label has no votes
        results.append({"k": k, **report.summary()})
        headline = report if k == headline_k else headline
    assert headline is not None
    settings = {"k": headline_k, "temperature": task.options.temperature}
    return ProtocolResult(headline, results, settings | {"features": describe_features(train, evaluated, task.split)})


def evaluate_linear_probe(task: ProtocolTask) -> ProtocolResult:
    """Evaluate by logistic regression on the features, or by the published probe of --probe.

    The L2 penalty is --l2 or, if it is not set, the best one on held-out training images.
    """
    if task.options.probe != "regression":
        return evaluate_published_probe(task)
    train, evaluated = task.pair()
    train_features = LabelledFeatures(
        train.features,
        task.training_split.labels,
        np.flatnonzero(train.is_readable),
        task.num_classes,
        device=task.device,
    )
    l2, held_out = (task.options.l2, None) if task.options.l2 else choose_l2_penalty(task, train_features)
    report = evaluate_classification(
        fit_linear_classifier(train_features, l2).logits(evaluated.features),
        task.evaluated_split.labels,
        task.data.classes,
        evaluated.is_readable,
    )
    settings = {"l2": l2, "held_out": held_out}
    extra = settings | {"features": describe_features(train, evaluated, task.split)}
    return ProtocolResult(report, [settings | report.summary()], extra)


def choose_l2_penalty(task: ProtocolTask, features: LabelledFeatures) -> tuple[float, dict[str, Any]]:
    """Return the best L2 penalty on held-out training images, chosen by the seed, and its description.

    Raises DataError for too few training images.
    """
    subsets = task.hold_out(features.labels, features.sample_indices)
    if not len(subsets["dev"]):
        raise DataError("too few training images to select the L2 penalty", "set it: --l2 0.01")
    return sweep_l2_penalties(
        task,
        features.with_rows(features.sample_indices[subsets["train"]]),
        features.with_rows(features.sample_indices[subsets["dev"]]),
    )


def sweep_l2_penalties(
    task: ProtocolTask, train: LabelledFeatures, held_out: LabelledFeatures, label: str = "penalty"
) -> tuple[float, dict[str, Any]]:
    """Return the best L2 penalty on held-out images, and its description: score, images, and all candidates."""
    candidates: list[dict[str, float]] = []
    name = train.kind.metric_key

    def on_fit(l2: float, score: float) -> None:
        candidates.append({"l2": l2, name: score})
        task.evaluation_settings.listener.progress(
            label, len(candidates), NUM_PENALTY_FITS, f"l2 {l2:.2g}: {score:.1%} held out"
        )

    l2, score = search_penalty(train, held_out, on_fit)
    return l2, {name: score, "images": len(held_out.sample_indices), "candidates": candidates}


def evaluate_few_shot(task: ProtocolTask) -> ProtocolResult:
    """Evaluate by few-shot linear regression, as in the ViT paper, on random training images of each class.

    Each number of --shots is evaluated on --seeds draws.

    Raises UsageError for multi-label data.
    """
    task.require_single_label("; few-shot needs one", "use --protocol linear or knn")
    train, evaluated = task.pair()
    readable = np.flatnonzero(train.is_readable)
    labels, true_labels = task.training_split.labels[readable], task.evaluated_split.labels
    counts = np.bincount(labels, minlength=task.num_classes)
    shots = choose_shots(task, counts)
    if num_small_classes := int((counts < max(shots)).sum()):
        task.evaluation_settings.listener.note(
            f"{num_small_classes} of {task.num_classes} classes have fewer than "
            f"{max(shots)} training images: all of them are used"
        )
    l2 = task.options.l2 or linear.RIDGE_L2
    hits: dict[int, list[int]] = {shot: [] for shot in shots}
    for shot, is_correct in draw_few_shot_results(task, train, evaluated, shots, l2):
        hits[shot].append(int(is_correct.sum()))
    images, first_seed = len(true_labels), task.options.seed
    results = [summarise_draws(shot, hits[shot], images, first_seed, int((counts < shot).sum())) for shot in shots]
    headline = next((result for result in results if result["shots"] == HEADLINE_SHOTS), results[-1])
    report = build_mean_report(images, int((~evaluated.is_readable).sum()), headline["top1"])
    extra = {"shots": headline["shots"], "l2": l2, "features": describe_features(train, evaluated, task.split)}
    return ProtocolResult(report, results, extra)


def choose_shots(task: ProtocolTask, counts: np.ndarray) -> list[int]:
    """Return the numbers of training images per class: --shots, or the defaults up to the size of the largest class.
    `counts` (K,) are the training images of each class."""
    return sorted(set(task.options.shots)) or [shots for shots in linear.DEFAULT_SHOTS if shots <= counts.max()]


def draw_few_shot_results(
    task: ProtocolTask, train: SplitFeatures, evaluated: SplitFeatures, shots: list[int], l2: float
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield, for each of --seeds draws and each number of shots, the number and whether each evaluated image is
    classified correctly, (n,) bool."""
    readable, total = np.flatnonzero(train.is_readable), task.options.seeds
    labels, true_labels = task.training_split.labels[readable], task.evaluated_split.labels
    done = 0
    for seed in range(task.options.seed, task.options.seed + total):
        order = linear.shuffle_rows_by_class(labels, task.num_classes, seed)
        for shot in shots:
            drawn_indices = np.concatenate([class_rows[:shot] for class_rows in order])
            ridge = linear.fit_ridge_classifier(
                train.features[readable[drawn_indices]], labels[drawn_indices], task.num_classes, l2
            )
            yield shot, (ridge.scores(evaluated.features).argmax(1) == true_labels) & evaluated.is_readable
            done += 1
            task.evaluation_settings.listener.progress("few-shot", done, total * len(shots), f"{shot} per class")


def summarise_draws(shots: int, hits: list[int], images: int, seed: int, num_short_classes: int) -> dict[str, Any]:
    """Return top-1 for a number of shots: mean and sample standard deviation over draws, and each draw.

    `hits` has the number of correct images of each draw, `seed` is that of the first draw.
    """
    top1 = [hit / images for hit in hits]
    draws = [
        {"seed": seed + n, "top1": value, "interval": list(wilson_interval(hits[n], images))}
        for n, value in enumerate(top1)
    ]
    mean, std = float(np.mean(top1)), float(np.std(top1, ddof=1)) if len(top1) > 1 else None
    return {"shots": shots, "top1": mean, "std": std, "per_seed": draws, "classes_with_fewer": num_short_classes}


PROBES = {"knn": evaluate_knn, "linear": evaluate_linear_probe, "fewshot": evaluate_few_shot}
