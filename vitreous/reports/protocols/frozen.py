"""The protocol `heads`: several heads on the features of a frozen encoder, which encodes each image once.

| head | input | chosen on held-out training images |
|---|---|---|
| knn | the input of the model's head | number of neighbours |
| linear | the input of the model's head | learning rate, weight decay |
| blocks | class tokens of the last 1 or 4 blocks, with and without the mean of the patch tokens | the same, and input |
| attentive | patch tokens of the last block | learning rate, weight decay |
| fewshot | the input of the model's head, of a few images per class | nothing |

The evaluated images are never used to choose anything. The chosen setting is trained again on all training images.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from vitreous.data.annotations.target import AnnotatedSplit
from vitreous.errors import DataError, UsageError
from vitreous.evaluation import knn, linear
from vitreous.evaluation.head_grid import (
    DEFAULT_LRS,
    DEFAULT_WEIGHT_DECAYS,
    AttentiveHeads,
    Candidate,
    CandidateHeads,
    HeadSchedule,
    LinearHeads,
    LoadInputs,
    build_grid,
    compute_head_logits,
    train_candidate_heads,
)
from vitreous.evaluation.linear import LabelledFeatures, score_logits
from vitreous.inference.features import POOLED, SplitFeatures
from vitreous.inference.frozen_encoder import LAYERS, TOKENS, FrozenEncoder, has_block_tokens
from vitreous.reports.options import FrozenHead
from vitreous.reports.protocols.frozen_bundle import check_bundle_path, save_linear_head
from vitreous.reports.protocols.frozen_maps import evaluate_map_heads
from vitreous.reports.protocols.probes import KNN_NEIGHBOURS, choose_shots, describe_features, draw_few_shot_results
from vitreous.reports.protocols.task import HeadResult, ProtocolResult, ProtocolTask, build_mean_report
from vitreous.system.machine import configure_process
from vitreous.tasks.classification_metrics import evaluate_classification
from vitreous.tasks.intervals import bootstrap_metrics, percentile_interval
from vitreous.tasks.report import Report

MAX_RESIDENT_VALUES = 2**28  # most values of an array of features that are kept in memory
MOMENT_IMAGES = 512  # training images whose patch tokens are read for mean and standard deviation


@dataclass(frozen=True)
class HeadData:
    """Features of the training and the evaluated images by array, and the training images that fit a candidate
    (`fit_rows`) or choose one (`dev_rows`), both indices."""

    task: ProtocolTask
    train: dict[str, SplitFeatures]
    evaluated: dict[str, SplitFeatures]
    _: KW_ONLY
    fit_rows: np.ndarray
    dev_rows: np.ndarray
    moments: dict[tuple[str, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def train_rows(self) -> np.ndarray:
        """The indices (n,) of all readable training images, sorted."""
        return np.sort(np.concatenate([self.fit_rows, self.dev_rows]))

    @property
    def labels(self) -> np.ndarray:
        """The labels of the training images, (n,) or (n, K)."""
        return self.task.training_split.labels

    def score_dev(self, logits: np.ndarray) -> float:
        """Return top-1 or mAP of logits (m, K) of the images `dev_rows`; -1 if they are not finite."""
        return score_logits(logits, self.labels[self.dev_rows]) if np.isfinite(logits).all() else -1.0

    def evaluate(self, logits: np.ndarray) -> Report:
        """Compute the metrics of logits (n, K) of the evaluated images."""
        features, task = self.evaluated[POOLED], self.task
        return evaluate_classification(logits, task.evaluated_split.labels, task.data.classes, features.is_readable)

    def make_loader(self, features: np.ndarray, columns: np.ndarray | None = None) -> LoadInputs:
        """Return a function that loads features (n, ...) of images by index, (b, ...) float32 on the device; with
        `columns` (d,) only these columns, (b, d). Small arrays are kept in memory."""
        device = self.task.device
        if columns is not None and len(features) * len(columns) <= MAX_RESIDENT_VALUES:
            resident = torch.from_numpy(features.reshape(len(features), -1)[:, columns]).to(device)
            return lambda rows: resident[torch.from_numpy(rows).to(device)]

        def load(rows: np.ndarray) -> Tensor:
            chunk = np.asarray(features[rows])
            chunk = chunk if columns is None else chunk.reshape(len(rows), -1)[:, columns]
            return torch.from_numpy(chunk).to(device).float()

        return load

    def compute_moments(self, name: str, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Compute mean and standard deviation (F,) float32 of the flat features of an array, over the training images
        `rows` (n,). They are computed once per array and number of images."""
        if (name, len(rows)) not in self.moments:
            features = self.train[name].features
            flat = LabelledFeatures(features.reshape(len(features), -1), self.labels, rows, self.task.num_classes)
            mean, std = (torch.from_numpy(moment).float().to(self.task.device) for moment in flat.compute_moments())
            self.moments[name, len(rows)] = mean, std
        return self.moments[name, len(rows)]


def evaluate_heads(task: ProtocolTask) -> ProtocolResult:
    """Evaluate heads on the frozen encoder: encode each image once, then fit each head of --heads.

    The headline metric is that of the head with the best metric on held-out training images. For annotated data, the
    heads segment images. Raises UsageError for settings under which tokens are not available, DataError for too few
    training images.
    """
    configure_process()
    inference = task.evaluation_settings.inference_options
    if inference.engine == "openvino" or inference.precision == "int8" or inference.merge_tokens:
        problem = "--protocol heads needs the tokens of the PyTorch model in fp32 or bf16"
        raise UsageError(problem, "leave --engine openvino, --precision int8 and --merge-tokens out")
    if not task.bundle.preprocess.stacks:
        problem = "--protocol heads does not support models with native aspect ratio"
        raise UsageError(problem, "leave --native-aspect out")
    if isinstance(task.training_split, AnnotatedSplit):
        return evaluate_map_heads(task)
    names = choose_frozen_heads(task)
    if task.options.out:
        check_bundle_path(task.options.out, task.bundle, names)
    data, encoding_seconds = encode_images(task, names)
    results: list[HeadResult] = []
    for name in names:
        results += HEADS[name](data)
    best = max((result for result in results if result.val is not None), key=lambda result: result.val or 0.0)
    return finish_heads(data, results, best, encoding_seconds)


def finish_heads(
    data: HeadData, results: list[HeadResult], best: HeadResult, encoding_seconds: float
) -> ProtocolResult:
    """Save the linear head if --out is set, and build the result of the protocol."""
    task, extra = data.task, dict[str, Any]()
    if task.options.out:
        chosen = next(result for result in results if result.head == "linear")
        assert isinstance(chosen.heads, LinearHeads)
        extra["saved"] = save_linear_head(task, *chosen.heads.fold_standardisation(), chosen.report)
        if best.head != "linear":
            task.evaluation_settings.listener.note(
                f"{best.head} is better on held-out training images ({best.val:.1%}, linear {chosen.val:.1%}), but a "
                "bundle has a linear head on the model's pooled features"
            )
    extra |= {
        "selected": best.head,
        "encoding_seconds": encoding_seconds,
        "fit_images": len(data.fit_rows),
        "held_out_images": len(data.dev_rows),
        "features": {name: describe_array(data, name) for name in data.train},
    }
    return ProtocolResult(best.report, [result.summary() for result in results], extra)


def describe_array(data: HeadData, name: str) -> dict[str, Any]:
    """Describe the files of an array for the document, as the other protocols do, with shape and bytes per image."""
    features = data.train[name].features
    description = describe_features(data.train[name], data.evaluated[name], data.task.split)
    return description | {"shape": list(features.shape[1:]), "bytes_per_image": features[:1].nbytes}


def choose_frozen_heads(task: ProtocolTask) -> list[str]:
    """Return the heads to fit: --heads, or all that model and data support.

    Raises UsageError for a requested head that is not supported.
    """
    reasons: dict[str, str] = {}
    if not task.data.label_kind.is_exclusive:
        reasons["fewshot"] = f"{task.source} has several labels per image"
    if not has_block_tokens(task.bundle.model):
        reasons["blocks"] = f"the blocks of {task.bundle.model.config.name()} have no tokens of the same form"
    requested: list[str] = list(dict.fromkeys(task.options.heads))
    if rejected := [name for name in requested if name in reasons]:
        supported = [name for name in get_args(FrozenHead) if name not in reasons]
        raise UsageError(f"{rejected[0]} is not available: {reasons[rejected[0]]}", f"use {', '.join(supported)}")
    if not requested:
        for name, reason in reasons.items():
            task.evaluation_settings.listener.note(f"without {name}: {reason}")
    names: list[str] = requested or [name for name in get_args(FrozenHead) if name not in reasons]
    if names == ["fewshot"]:
        raise UsageError("few-shot alone does not choose settings", "use --protocol fewshot, or add heads")
    return names


def encode_images(task: ProtocolTask, names: list[str]) -> tuple[HeadData, float]:
    """Compute the features that the heads `names` use, or read them from the cache; also return the duration.

    Raises DataError if too few training images can be read to hold some out.
    """
    task.check_classes()
    listener, start_time = task.evaluation_settings.listener, time.perf_counter()
    splits = " and ".join(task.describe_splits["train_data"]["splits"])
    listener.note(
        f"heads train on {len(task.training_split)} images of {task.source} ({splits}) "
        f"and are evaluated on {len(task.evaluated_split)} {task.split} images"
    )
    arrays = [POOLED, *[LAYERS] * ("blocks" in names), *[TOKENS] * ("attentive" in names)]
    encoder = FrozenEncoder(task.bundle.model, tuple(arrays))
    task.check_feature_space(encoder)
    train = task.feature_arrays("train", task.training_split, encoder)
    evaluated = task.feature_arrays(task.split, task.evaluated_split, encoder)
    readable = np.flatnonzero(train[POOLED].is_readable)
    subsets = task.hold_out(task.training_split.labels, readable)
    if not len(subsets["dev"]):
        raise DataError("too few training images to hold some out for choosing settings", "use --protocol fewshot")
    fit_rows, dev_rows = readable[subsets["train"]], readable[subsets["dev"]]
    data = HeadData(task, train, evaluated, fit_rows=fit_rows, dev_rows=dev_rows)
    return data, time.perf_counter() - start_time


def fit_knn(data: HeadData) -> list[HeadResult]:
    """Fit weighted k-NN: --k with the best metric on the held-out images, whose neighbours are the other training
    images."""
    started, task = time.perf_counter(), data.task
    features, options = data.train[POOLED].features, data.task.options
    counts = options.k or KNN_NEIGHBOURS
    ks = [k for k in sorted(set(counts)) if k <= len(data.fit_rows)] or [len(data.fit_rows)]

    def compute_logits(memory_rows: np.ndarray, queries: np.ndarray, ks: list[int]) -> list[np.ndarray]:
        """Compute logits (m, K) of query features (m, F) for each k."""
        cosines, neighbours = knn.find_nearest_neighbours(features[memory_rows], queries, max(ks), task.device)
        votes = (
            knn.compute_neighbour_votes(
                cosines[:, :k], neighbours[:, :k], data.labels[memory_rows], task.num_classes, options.temperature
            )
            for k in ks
        )
        return [task.data.label_kind.shares_to_logits(shares) for shares in votes]

    dev_labels = data.labels[data.dev_rows]
    scores = [score_logits(x, dev_labels) for x in compute_logits(data.fit_rows, features[data.dev_rows], ks)]
    candidates = [{"k": k, "val": score} for k, score in zip(ks, scores, strict=True)]
    best = max(candidates, key=lambda candidate: candidate["val"])
    (logits,) = compute_logits(data.train_rows, np.asarray(data.evaluated[POOLED].features), [int(best["k"])])
    report = data.evaluate(logits)
    report.metrics["nll"] = report.intervals["nll"] = None  # infinite if the label has no votes
    seconds = time.perf_counter() - started
    settings = {"k": best["k"]}
    return [HeadResult("knn", settings, best["val"], report, seconds=seconds, candidates=candidates)]


@dataclass(frozen=True)
class HeadVariant:
    """Inputs of a head that is trained by gradient descent: `settings` describe them, `array` and `columns` select
    them, and `build` creates heads for the moments of some images and a number of candidates."""

    settings: dict[str, Any]
    array: str
    build: Callable[[np.ndarray, int], CandidateHeads]
    _: KW_ONLY
    columns: np.ndarray | None = None


def fit_candidates(data: HeadData, head: str, variants: list[HeadVariant]) -> list[HeadResult]:
    """Fit a head for every variant of its inputs and every candidate of the grid, and train the best one on all
    training images. Of equal metrics the first counts, which has the lowest learning rate and weight decay."""
    started, task, options = time.perf_counter(), data.task, data.task.options
    grid = build_grid(options.lr or DEFAULT_LRS, options.weight_decay or DEFAULT_WEIGHT_DECAYS)
    candidates: list[dict[str, Any]] = []
    for index, variant in enumerate(variants):
        heads, load = train_variant(data, variant, grid, data.fit_rows, f"{head} {index + 1}/{len(variants)}")
        logits = compute_head_logits(heads, load, data.dev_rows).numpy()
        for position, candidate in enumerate(grid):
            description = variant.settings | {"lr": candidate.lr, "weight_decay": candidate.weight_decay}
            candidates.append(description | {"val": data.score_dev(logits[:, position])})
    best = max(range(len(candidates)), key=lambda index: candidates[index]["val"])
    variant, candidate = variants[best // len(grid)], grid[best % len(grid)]
    heads, _ = train_variant(data, variant, (candidate,), data.train_rows, f"{head} on all images")
    load = data.make_loader(data.evaluated[variant.array].features, variant.columns)
    logits = compute_head_logits(heads, load, np.arange(len(task.evaluated_split)))[:, 0].numpy()
    report, seconds = data.evaluate(logits), time.perf_counter() - started
    settings = {name: value for name, value in candidates[best].items() if name != "val"}
    val = candidates[best]["val"]
    return [HeadResult(head, settings, val, report, seconds=seconds, candidates=candidates, heads=heads)]


def train_variant(
    data: HeadData, variant: HeadVariant, grid: tuple[Candidate, ...], rows: np.ndarray, label: str
) -> tuple[CandidateHeads, LoadInputs]:
    """Train a head for each candidate on the training images `rows` (n,); also return the function that loads its
    inputs. `label` is shown with the progress."""
    options, device = data.task.options, data.task.device
    schedule = HeadSchedule.plan(len(rows), epochs=options.epochs, steps=options.steps, seed=options.seed)
    load = data.make_loader(data.train[variant.array].features, variant.columns)
    labels = torch.from_numpy(data.labels).to(device)
    heads = variant.build(rows, len(grid))
    progress = data.task.evaluation_settings.listener.progress
    train_candidate_heads(
        heads,
        grid,
        load,
        labels if labels.ndim == 1 else labels > 0,
        rows=rows,
        schedule=schedule,
        on_step=lambda step: progress(label, step + 1, schedule.steps, f"{len(grid)} candidates"),
    )
    return heads, load


def build_linear_heads(
    data: HeadData, name: str, columns: np.ndarray, rows: np.ndarray, candidates: int
) -> LinearHeads:
    """Create linear heads for columns (d,) of an array; features are standardised by those of `rows` (n,)."""
    mean, std = data.compute_moments(name, rows)
    return LinearHeads(mean[columns], std[columns], candidates, data.task.num_classes).to(data.task.device)


def build_attentive_heads(data: HeadData, rows: np.ndarray, candidates: int) -> AttentiveHeads:
    """Create attentive probes; tokens are standardised by those of the first `MOMENT_IMAGES` images of `rows` (n,)."""
    tokens = data.make_loader(data.train[TOKENS].features)(rows[:MOMENT_IMAGES]).double()
    std, mean = torch.std_mean(tokens.flatten(0, 1), 0, correction=0)
    std = torch.where(std > 1e-6 * mean.abs() + 1e-12, std, 1.0)
    return AttentiveHeads(mean.float(), std.float(), candidates, data.task.num_classes, seed=data.task.options.seed)


def fit_linear(data: HeadData) -> list[HeadResult]:
    """Fit linear classifiers of the pooled features."""
    columns = np.arange(data.train[POOLED].features.shape[1])
    build = partial(build_linear_heads, data, POOLED, columns)
    return fit_candidates(data, "linear", [HeadVariant({}, POOLED, build, columns=columns)])


def fit_blocks(data: HeadData) -> list[HeadResult]:
    """Fit linear classifiers of the last 1 and the last 4 blocks, with and without the mean of the patch tokens, as
    DINOv2 does (arXiv:2304.07193); for a model without a class token, of the means of the patch tokens."""
    blocks, summaries, width = data.train[LAYERS].features.shape[1:]
    columns = np.arange(blocks * summaries * width).reshape(blocks, summaries, width)
    variants = []
    for count in dict.fromkeys((1, blocks)):
        first = columns[:count, 0].ravel()
        inputs = {False: first}
        if summaries > 1:
            inputs[True] = np.concatenate([first, columns[0, 1]])
        for mean, selected in inputs.items():
            settings = {"blocks": count, "mean_patch": mean or summaries == 1}
            build = partial(build_linear_heads, data, LAYERS, selected)
            variants.append(HeadVariant(settings, LAYERS, build, columns=selected))
    return fit_candidates(data, "blocks", variants)


def fit_attentive(data: HeadData) -> list[HeadResult]:
    """Fit attentive probes of the patch tokens of the last block."""
    return fit_candidates(data, "attentive", [HeadVariant({}, TOKENS, partial(build_attentive_heads, data))])


def fit_few_shot(data: HeadData) -> list[HeadResult]:
    """Fit ridge regression of the pooled features of a few images per class, as in the ViT paper. Top-1 is the mean
    over --seeds draws; its interval is a bootstrap over the evaluated images."""
    task, started = data.task, time.perf_counter()
    train, evaluated = data.train[POOLED], data.evaluated[POOLED]
    counts = np.bincount(data.labels[train.is_readable], minlength=task.num_classes)
    shots, l2 = choose_shots(task, counts), task.options.l2 or linear.RIDGE_L2
    correct: dict[int, list[np.ndarray]] = {shot: [] for shot in shots}
    for shot, is_correct in draw_few_shot_results(task, train, evaluated, shots, l2):
        correct[shot].append(is_correct)
    results, images = list[HeadResult](), len(task.evaluated_split)
    seconds = (time.perf_counter() - started) / len(shots)
    for shot in shots:
        share = np.mean(correct[shot], 0).astype(np.float32)
        draws = bootstrap_metrics(lambda counts, share=share: {"top1": share @ counts / len(share)}, images)
        report = build_mean_report(images, int((~evaluated.is_readable).sum()), float(share.mean()))
        report = replace(report, intervals=report.intervals | {"top1": percentile_interval(draws["top1"])})
        per_draw = [{"seed": task.options.seed + i, "top1": float(x.mean())} for i, x in enumerate(correct[shot])]
        settings = {"shots": shot, "l2": l2}
        results.append(HeadResult("fewshot", settings, None, report, seconds=seconds, candidates=per_draw))
    return results


#: name -> function that fits the head on the data, and returns one result, or one per setting
HEADS: dict[str, Callable[[HeadData], list[HeadResult]]] = {
    "knn": fit_knn,
    "linear": fit_linear,
    "blocks": fit_blocks,
    "attentive": fit_attentive,
    "fewshot": fit_few_shot,
}
