"""The protocol `heads` for class maps: segmentation by heads on the patch tokens of a frozen encoder.

| head | prediction of a patch |
|---|---|
| knn | votes of the most similar patches of the training images (arXiv:2306.01667) |
| linear | a linear layer on standardised tokens, the 1 x 1 convolution after a batch norm of arXiv:2304.07193 |

Images are resized to the encoder's size without cropping. The scores of patches are resized to the size of the image by
linear interpolation, and evaluated at every pixel. Training minimises the cross-entropy of all pixels with the scores
of their patch.

Shapes: n images, N patches, D width, K classes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.data.annotations.target import AnnotatedSplit
from vitreous.errors import DataError, ResourceError, UsageError
from vitreous.evaluation.evaluator import SplitOutputs
from vitreous.evaluation.head_grid import (
    DEFAULT_LRS,
    DEFAULT_WEIGHT_DECAYS,
    HeadSchedule,
    LinearHeads,
    build_grid,
    train_candidate_heads,
)
from vitreous.evaluation.patch_neighbours import PATCH_NEIGHBOURS, count_patch_classes, vote_patch_classes
from vitreous.evaluation.pixels import SegmentationEvaluator, compute_segmentation_metrics
from vitreous.inference.features import SplitFeatures
from vitreous.inference.frozen_encoder import TOKENS, FrozenEncoder
from vitreous.reports.protocols.probes import describe_features
from vitreous.reports.protocols.task import HeadResult, ProtocolResult, ProtocolTask
from vitreous.system.machine import get_free_memory
from vitreous.tasks.report import Report

MAP_HEADS = ("knn", "linear")
MAP_BATCH_IMAGES, MAX_MAP_STEPS = 16, 1_000  # images per step, and most steps by default
MOMENT_IMAGES = 512  # training images whose tokens are read for mean and standard deviation
MAX_MEMORY_PATCHES = 10_000  # patches whose classes vote, drawn from the training images
MAX_SCORED_IMAGES = 100  # held-out images on which a setting is chosen
SCORE_IMAGES = 16  # images per chunk of scores

#: indices (b,) of images of a split -> scores of their patches, (b, N, K) float32
ScoreFunction = Callable[[SplitFeatures, np.ndarray], Tensor]


@dataclass(frozen=True)
class MapData:
    """Patch tokens (n, N, D) of the training and the evaluated images, class shares (n, N, K) float16 of the training
    patches, and the training images that fit a candidate (`fit_rows`) or choose one (`dev_rows`)."""

    task: ProtocolTask
    train: SplitFeatures
    evaluated: SplitFeatures
    _: KW_ONLY
    shares: np.ndarray
    fit_rows: np.ndarray
    dev_rows: np.ndarray

    @property
    def train_rows(self) -> np.ndarray:
        """The indices (n,) of all readable training images, sorted."""
        return np.sort(np.concatenate([self.fit_rows, self.dev_rows]))

    def load_tokens(self, features: SplitFeatures, rows: np.ndarray) -> Tensor:
        """Load the tokens of images (b,), (b N, D) float32."""
        return torch.from_numpy(np.asarray(features.features[rows])).to(self.task.device).float().flatten(0, 1)

    def score_dev(self, compute_scores: ScoreFunction) -> float:
        """Compute the mIoU over the pixels of held-out images, each with the class of its patch."""
        num_classes, confusion = self.task.num_classes, np.zeros((self.task.num_classes,) * 2)
        rows = self.dev_rows[:MAX_SCORED_IMAGES]
        for start in range(0, len(rows), SCORE_IMAGES):
            chunk = rows[start : start + SCORE_IMAGES]
            scores = compute_scores(self.train, chunk)
            if not scores.isfinite().all():
                return -1.0
            predicted = np.eye(num_classes)[scores.argmax(2).numpy().ravel()]
            confusion += self.shares[chunk].reshape(-1, num_classes).astype(np.float64).T @ predicted
        return compute_segmentation_metrics(confusion)["miou"] or 0.0

    def evaluate(self, compute_scores: ScoreFunction) -> Report:
        """Compute the metrics of segmentation at the native size of the evaluated images."""
        task, split = self.task, cast(AnnotatedSplit, self.task.evaluated_split)
        evaluator = SegmentationEvaluator(task.data.classes)
        readable = np.flatnonzero(self.evaluated.is_readable)
        counts = np.zeros((len(split), task.num_classes**2))
        for start in range(0, len(readable), SCORE_IMAGES):
            rows = readable[start : start + SCORE_IMAGES]
            for row, scores in zip(rows.tolist(), compute_scores(self.evaluated, rows), strict=True):
                target = split.target(row)
                prediction = resize_scores(scores, task.bundle.model.config.grid, target.size).argmax(0)
                counts[row] = evaluator.count_image(target, prediction.numpy())
            task.evaluation_settings.listener.progress("class maps", start + len(rows), len(readable), "")
        return evaluator.report(SplitOutputs(split, counts, self.evaluated.is_readable))


def evaluate_map_heads(task: ProtocolTask) -> ProtocolResult:
    """Evaluate segmentation heads on the frozen encoder: encode each image once, then fit each head of --heads.

    The headline metric is that of the head with the best mIoU on held-out training images. Raises UsageError for heads
    that do not segment and for --out, DataError for too few training images, ResourceError if the class shares of the
    patches do not fit into memory.
    """
    names = list(dict.fromkeys(task.options.heads)) or list(MAP_HEADS)
    if rejected := [name for name in names if name not in MAP_HEADS]:
        raise UsageError(f"the head {rejected[0]} does not segment images", f"use {' or '.join(MAP_HEADS)}")
    if task.options.out:
        raise UsageError("--out is for heads that classify images", "leave --out out")
    task = replace(task, bundle=replace(task.bundle, preprocess=task.bundle.preprocess.adjust(fit="squash")))
    data, encoding_seconds = encode_maps(task)
    results = [{"knn": fit_patch_neighbours, "linear": fit_linear_maps}[name](data) for name in names]
    best = max(results, key=lambda result: result.val or 0.0)
    extra = {
        "selected": best.head,
        "encoding_seconds": encoding_seconds,
        "fit_images": len(data.fit_rows),
        "held_out_images": len(data.dev_rows),
        "features": {TOKENS: describe_features(data.train, data.evaluated, task.split)},
    }
    return ProtocolResult(best.report, [result.summary() for result in results], extra)


def encode_maps(task: ProtocolTask) -> tuple[MapData, float]:
    """Compute the patch tokens, or read them from the cache, and the class shares; also return the duration.

    Raises DataError if too few training images can be read to hold some out, UsageError for an encoder whose tokens are
    not one grid.
    """
    start_time, config = time.perf_counter(), task.bundle.model.config
    encoder = FrozenEncoder(task.bundle.model, (TOKENS,))
    (array,) = encoder.describe_arrays(task.bundle.preprocess.image)
    if array.shape[0] != math.prod(config.grid):
        raise UsageError(f"the tokens of {config.name()} are not one grid of patches", "use a ViT")
    task.check_feature_space(encoder)
    check_share_memory(len(task.training_split) * array.shape[0] * task.num_classes * 2)
    task.evaluation_settings.listener.note(
        f"heads segment {len(task.evaluated_split)} {task.split} images, and train on {len(task.training_split)} "
        f"images of {task.source}"
    )
    train = task.feature_arrays("train", task.training_split, encoder)[TOKENS]
    evaluated = task.feature_arrays(task.split, task.evaluated_split, encoder)[TOKENS]
    readable = np.flatnonzero(train.is_readable)
    subsets = task.hold_out(task.training_split.labels, readable)
    if not len(subsets["dev"]):
        raise DataError("too few training images to hold some out for choosing settings", "add annotated images")
    split, shares = (
        cast(AnnotatedSplit, task.training_split),
        np.zeros((len(task.training_split), array.shape[0], task.num_classes), np.float16),
    )
    for row in readable.tolist():
        counts = count_patch_classes(split.target(row).class_map(), config.grid, task.num_classes)
        shares[row] = (counts / counts.sum(-1, keepdims=True).clip(min=1)).reshape(shares.shape[1:])
    if not shares.any():
        raise DataError(f"no pixel of the training images of {task.source} has a class", "check the masks")
    fit_rows, dev_rows = readable[subsets["train"]], readable[subsets["dev"]]
    data = MapData(task, train, evaluated, shares=shares, fit_rows=fit_rows, dev_rows=dev_rows)
    return data, time.perf_counter() - start_time


def check_share_memory(num_bytes: int) -> None:
    """Raise ResourceError if the class shares of the training patches need more than half of the free memory."""
    if num_bytes > (free := get_free_memory("cpu")) / 2 > 0:
        problem = (
            f"class shares of the training patches take {num_bytes:,} bytes, and {free:,} bytes of memory are free"
        )
        raise ResourceError(problem, "use fewer training images")


def resize_scores(scores: Tensor, grid: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """Resize scores of patches (N, K) on a grid to the size of an image by linear interpolation: (K, *size)."""
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(grid)]
    return F.interpolate(scores.T.unflatten(1, grid)[None], size, mode=mode, align_corners=False)[0]


def fit_patch_neighbours(data: MapData) -> HeadResult:
    """Fit nearest-neighbour segmentation: `MAX_MEMORY_PATCHES` training patches vote; the number of neighbours is that
    of --k with the best mIoU on held-out images."""
    started, task = time.perf_counter(), data.task
    candidates: list[dict[str, Any]] = []
    for k in sorted(set(task.options.k)) or (PATCH_NEIGHBOURS // 6, PATCH_NEIGHBOURS):
        compute_scores = make_vote_function(data, data.fit_rows, k)
        candidates.append({"k": k, "val": data.score_dev(compute_scores)})
    best = max(candidates, key=lambda candidate: candidate["val"])
    report = data.evaluate(make_vote_function(data, data.train_rows, best["k"]))
    seconds = time.perf_counter() - started
    return HeadResult("knn", {"k": best["k"]}, best["val"], report, seconds=seconds, candidates=candidates)


def make_vote_function(data: MapData, rows: np.ndarray, k: int) -> ScoreFunction:
    """Return a function that computes the votes of patches of the training images `rows` (m,), drawn evenly."""
    draw, num_classes = np.random.default_rng(data.task.options.seed), data.task.num_classes
    per_image = max(1, MAX_MEMORY_PATCHES // len(rows))
    if len(rows) > MAX_MEMORY_PATCHES:
        rows = np.sort(draw.choice(rows, MAX_MEMORY_PATCHES, replace=False))
    tokens, shares = list[np.ndarray](), list[np.ndarray]()
    for row in rows.tolist():
        labelled = np.flatnonzero(data.shares[row].any(1))
        chosen = draw.permutation(labelled)[:per_image]
        tokens.append(np.asarray(data.train.features[row])[chosen].astype(np.float32))
        shares.append(data.shares[row][chosen].astype(np.float32))
    memory, memory_shares = np.concatenate(tokens), np.concatenate(shares)

    def compute_votes(features: SplitFeatures, indices: np.ndarray) -> Tensor:
        queries = data.load_tokens(features, indices).cpu().numpy()
        votes = vote_patch_classes(memory, memory_shares, queries, k=k, device=data.task.device)
        return torch.from_numpy(votes).view(len(indices), -1, num_classes)

    return compute_votes


def fit_linear_maps(data: MapData) -> HeadResult:
    """Fit a linear layer on the tokens for every candidate of the grid, and train the best one on all training
    images."""
    started, options = time.perf_counter(), data.task.options
    grid = build_grid(options.lr or DEFAULT_LRS, options.weight_decay or DEFAULT_WEIGHT_DECAYS)
    heads = train_linear_maps(data, grid, data.fit_rows)
    candidates = [
        {
            "lr": candidate.lr,
            "weight_decay": candidate.weight_decay,
            "val": data.score_dev(partial(compute_linear_scores, data, heads, index)),
        }
        for index, candidate in enumerate(grid)
    ]
    best = max(range(len(grid)), key=lambda index: candidates[index]["val"])
    chosen = train_linear_maps(data, (grid[best],), data.train_rows)
    report = data.evaluate(partial(compute_linear_scores, data, chosen, 0))
    settings = {"lr": grid[best].lr, "weight_decay": grid[best].weight_decay}
    seconds = time.perf_counter() - started
    val = candidates[best]["val"]
    return HeadResult("linear", settings, val, report, seconds=seconds, candidates=candidates, heads=chosen)


def train_linear_maps(data: MapData, grid: tuple[Any, ...], rows: np.ndarray) -> LinearHeads:
    """Train a linear layer for each candidate on the tokens of the training images `rows` (m,)."""
    options, task = data.task.options, data.task
    tokens = data.load_tokens(data.train, rows[:MOMENT_IMAGES]).double()
    std, mean = torch.std_mean(tokens, 0, correction=0)
    std = torch.where(std > 1e-6 * mean.abs() + 1e-12, std, 1.0)
    heads = LinearHeads(mean.float(), std.float(), len(grid), task.num_classes).to(task.device)
    schedule = HeadSchedule.plan(
        len(rows),
        epochs=options.epochs,
        steps=options.steps,
        seed=options.seed,
        max_batch=MAP_BATCH_IMAGES,
        max_steps=MAX_MAP_STEPS,
    )
    progress = task.evaluation_settings.listener.progress
    train_candidate_heads(
        heads,
        grid,
        partial(data.load_tokens, data.train),
        torch.from_numpy(data.shares),
        rows=rows,
        schedule=schedule,
        on_step=lambda step: progress("linear", step + 1, schedule.steps, f"{len(grid)} candidates"),
    )
    return heads


@torch.no_grad()
def compute_linear_scores(
    data: MapData, heads: LinearHeads, index: int, features: SplitFeatures, rows: np.ndarray
) -> Tensor:
    """Compute the logits of the patches of images (b,) by the candidate at `index`, (b, N, K) on the CPU."""
    weight, bias = heads.fold_standardisation(index)
    logits = data.load_tokens(features, rows) @ weight.T + bias
    return logits.cpu().view(len(rows), -1, len(bias))
