"""The published linear protocols of MAE, DINO and DINOv2: heads trained by SGD on a frozen model.

| `--probe` | input features | training | source |
|---|---|---|---|
| mae | class token behind a batch norm | LARS, rate 0.1, 90 epochs of 16,384 images | main_linprobe.py |
| dino | class tokens of 4 blocks (ViT-S), or 1 and the mean | SGD, 0.001, 100 epochs of 1,024 | eval_linear.py |
| dinov2 | 1 or 4 blocks, with and without the mean | SGD, 13 rates, 12,500 steps of 1,024 | eval/linear.py |

All have momentum 0.9, no weight decay, learning rates scaled by batch / 256, and only random crops and flips.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.data.augmentation.augment import Augment
from vitreous.data.loader import EvalLoader, TrainLoader
from vitreous.data.screen import check_unreadable_images, find_readable_samples, fits_in_memory, screen_images
from vitreous.data.split import Split
from vitreous.errors import DataError, NonFiniteError, UsageError
from vitreous.inference.engine import ModelEngine, build_readable_mask, compute_split_logits, make_engine
from vitreous.models.config import ModelConfig
from vitreous.reports.answers import make_progress_counter
from vitreous.reports.protocols.heads import (
    BASE_BATCH_SIZE,
    HeadConfig,
    HeadInput,
    LinearHead,
    TokenReader,
    get_best_index,
    train_heads,
)
from vitreous.reports.protocols.task import ProtocolOptions, ProtocolResult, ProtocolTask
from vitreous.system.cores import default_worker_count
from vitreous.tasks.classification_metrics import evaluate_classification
from vitreous.training.run import ScheduleConfig
from vitreous.training.schedule import schedule_factor

DINOV2_LR_GRID = (
    1e-5,
    2e-5,
    5e-5,
    1e-4,
    2e-4,
    5e-4,
    1e-3,
    2e-3,
    5e-3,
    1e-2,
    2e-2,
    5e-2,
    1e-1,
)  # DINOv2's learning rates for 256 images
DINOV2_STEPS = 12_500  # steps of DINOv2
PUBLISHED_STEPS = {"mae": 7_038, "dino": 125_100, "dinov2": DINOV2_STEPS}  # steps on ImageNet
SHORT_TRAINING_SHARE = 0.1  # share of these below which a training is called short
MAX_EPOCHS = 100  # maximum passes over the training images if the length is in steps
CLASS_TOKEN_BLOCKS = 4  # blocks whose class tokens are concatenated
VIT_B_WIDTH, VIT_L_WIDTH = (
    768,
    1_024,
)  # widths of ViT-B, for which DINO uses one block, and of ViT-L, which MAE trains for fewer epochs
FORWARD_BATCH_SIZE = 256  # images augmented and computed at a time
PROBE_CROP = Augment(crop=(0.08, 1.0), crop_filter="bicubic", flip=0.5)


@dataclass(frozen=True)
class ProbePlan:
    """Training plan of a protocol for one model and number of images: its heads and training length.

    `steps_per_epoch`: the learning rate changes after every epoch, not at every step.
    """

    heads: tuple[HeadConfig, ...]
    batch: int
    steps: int
    warmup: int = 0
    by_epoch: float = 0.0  # steps per epoch; 0: the learning rate changes at every step
    views: Augment = PROBE_CROP

    def get_lr_factor(self, step: int) -> float:
        """Return the learning rate factor at a step, 0-based: linear warm-up, then cosine to 0."""
        schedule = ScheduleConfig(self.warmup)
        if not self.by_epoch:
            return schedule_factor(schedule, step, self.steps)
        return schedule_factor(schedule, int(step / self.by_epoch), max(1, round(self.steps / self.by_epoch)))

    def describe(self) -> dict[str, Any]:
        """Return batch size, steps, and whether images are cropped and mirrored, for a document."""
        return {"batch_size": self.batch, "steps": self.steps, "augmented": self.views.flip > 0}


def build_head_configs(probe: str, model: ModelConfig) -> tuple[HeadConfig, ...]:
    """Return the heads of a protocol for a model; the first of ties is chosen.

    Raises UsageError for dino and dinov2 if the model has no class token.
    """
    token = model.class_token
    if probe == "mae":
        return (HeadConfig(0.1, HeadInput(1 if token else 0), "lars", normed=True),)
    if not token:
        hint = (
            "use --probe mae, which uses the input of the model's head, or leave --probe out; "
            "--model.class-token True --model.pool class trains a model with one"
        )
        raise UsageError(f"--probe {probe} needs a class token, and {model.name()} has none", hint)
    num_blocks = min(CLASS_TOKEN_BLOCKS, model.depth)
    if probe == "dino":
        return (HeadConfig(1e-3, HeadInput(1, mean=True) if model.width >= VIT_B_WIDTH else HeadInput(num_blocks)),)
    head_inputs = [HeadInput(blocks, mean) for blocks in dict.fromkeys((1, num_blocks)) for mean in (False, True)]
    return tuple(HeadConfig(lr, head_input) for head_input in head_inputs for lr in DINOV2_LR_GRID)


def plan_probe(options: ProtocolOptions, model: ModelConfig, images: int) -> ProbePlan:
    """Return the plan of a protocol for a number of training images.

    A batch has at most as many images as there are. --epochs and --steps set the length; by default DINOv2's steps are
    limited to `MAX_EPOCHS` over the images. Raises UsageError as `build_head_configs`.
    """
    probe, heads = options.probe, build_head_configs(options.probe, model)
    batch = options.probe_batch or min(16_384 if probe == "mae" else 1_024, max(2, images))
    epochs = {"mae": 50 if model.width >= VIT_L_WIDTH else 90, "dino": 100, "dinov2": None}[probe]
    epoch = images / batch  # steps per epoch
    if options.steps is not None:
        steps = options.steps
    elif options.epochs is not None or epochs is not None:
        steps = max(1, round((options.epochs or epochs or 0) * epoch))
    else:
        steps = max(1, min(DINOV2_STEPS, round(MAX_EPOCHS * epoch)))
    views = PROBE_CROP if options.probe_augment else Augment()
    if probe == "mae":  # ten epochs of warm-up, or the same share of a shorter training
        return ProbePlan(heads, batch, steps, round(min(10 * epoch, steps / 9)), views=views)
    if probe == "dino":  # DINO reads crops bilinearly
        return ProbePlan(heads, batch, steps, by_epoch=epoch, views=replace(views, crop_filter="bilinear"))
    return ProbePlan(heads, batch, steps, views=views)


def evaluate_published_probe(task: ProtocolTask) -> ProtocolResult:
    """Evaluate by a published linear protocol: its heads are trained jointly, and validation images select one.

    Raises UsageError for multi-label data, int8, OpenVINO and merged tokens; DataError as `split_probe_images` and for
    images of one class; NonFiniteError if no head has finite weights.
    """
    options, inference = task.options, task.evaluation_settings.inference_options
    task.require_single_label(f"; --probe {options.probe} needs one", "leave --probe out, or use --protocol knn")
    if inference.engine == "openvino" or inference.precision == "int8" or inference.merge_tokens:
        problem = f"--probe {options.probe} reads the tokens of the PyTorch model"
        raise UsageError(problem, "leave --engine openvino, --precision int8 and --merge-tokens out")
    if not task.bundle.preprocess.stacks:
        problem = f"--probe {options.probe} does not support models with native aspect ratio"
        raise UsageError(problem, "leave --probe out")
    task.check_classes()
    is_selecting = len(build_head_configs(options.probe, task.bundle.model.config)) > 1
    train, val, data_description = split_probe_images(task, is_selecting)
    pixels, train = screen_training_images(task, train)
    plan = plan_probe(options, task.bundle.model.config, len(train))
    log_probe_plan(task, plan, len(train), data_description)
    reader = TokenReader(task.bundle.model, tuple(head.reading for head in plan.heads))
    engine = make_engine(reader, task.bundle.preprocess, inference)  # type: ignore[arg-type]
    heads = [
        LinearHead(head, reader.get_columns(head.reading), task.num_classes, options.seed, device=task.device)
        for head in plan.heads
    ]
    train_heads(heads, iterate_feature_batches(task, plan, engine, train, pixels))
    del pixels
    scores = (
        score_heads(heads, *compute_unaugmented_features(task, engine, val, "validation images"), val)
        if val
        else [None] * len(heads)
    )
    scores = [score if head.is_finite else None for head, score in zip(heads, scores, strict=True)]
    best_index = get_best_index(scores)
    if not heads[best_index].is_finite:
        raise NonFiniteError(
            "the weights of the head are not finite", "use a smaller --probe-batch to lower the learning rate"
        )
    features, good = compute_unaugmented_features(task, engine, task.evaluated_split, f"{task.split} images")
    report = evaluate_classification(
        heads[best_index].logits(features), task.evaluated_split.labels, task.data.classes, good
    )
    candidates = [
        describe_head(head.config, plan.batch) | {"val": score} for head, score in zip(heads, scores, strict=True)
    ]
    settings = {"probe": options.probe, **plan.describe()}
    selection = {"selected": candidates[best_index], "images": len(val) if val else 0, "candidates": candidates}
    results = [{"probe": options.probe, **candidates[best_index], **report.summary()}]
    return ProtocolResult(report, results, settings | {"selection": selection} | data_description)


def describe_head(head: HeadConfig, batch: int) -> dict[str, Any]:
    """Describe a head for a document: base rate, rate, class tokens read, and whether patches are read too."""
    return {
        "base_lr": head.lr,
        "lr": head.scale_lr(batch),
        "blocks": head.reading.blocks,
        "mean_patch": head.reading.mean,
    }


def split_probe_images(task: ProtocolTask, is_selecting: bool) -> tuple[Split, Split | None, dict[str, Any]]:
    """Return the training images, the images that select a head if `is_selecting`, and their description for a
    document.

    A `val` split that is not evaluated selects the head; otherwise a share of `train` is held out. A single head needs
    no selection: it trains on all images and is scored on the data's `val` split. Raises DataError if no images can be
    held out.
    """
    training, val_split = task.training_split, task.data.splits.get("val") if task.split == "test" else None
    is_drawn = task.data.full_train_split is not None
    if val_split is not None and not is_drawn:
        name = "val"
    elif not is_selecting:
        val_split, name = None, ""
    elif val_split is not None:
        training, name = task.data.split("train"), "val"
    else:
        subsets = task.hold_out(training.labels, np.arange(len(training)))
        if not len(subsets["dev"]):
            hint = "add images, or use --probe mae or dino, which train one head"
            raise DataError("too few training images to hold some out for selecting a head", hint)
        training, val_split, name = training.take(subsets["train"]), training.take(subsets["dev"]), "held out of train"
    splits = task.describe_splits["train_data"]["splits"] if not is_selecting else ["train"]
    train_data = {"data": task.source, "splits": splits, "images": len(training)}
    validation = {"split": name, "images": len(val_split)} if val_split is not None else None
    return training, val_split, {"train_data": train_data, "validation": validation}


def log_probe_plan(task: ProtocolTask, plan: ProbePlan, images: int, data_description: dict[str, Any]) -> None:
    """Log the number of heads, their training images, training length, and the images that select a head."""
    note, probe, validation = task.evaluation_settings.listener.note, task.options.probe, data_description["validation"]
    heads_text = f"{len(plan.heads)} heads" if len(plan.heads) > 1 else "a head"
    purpose = "select one of them" if len(plan.heads) > 1 else "are its validation images"
    selection_text = f"; {validation['images']} others ({validation['split']}) {purpose}" if validation else ""
    splits = " and ".join(data_description["train_data"]["splits"])
    note(
        f"--probe {probe} trains {heads_text} on {images} images of {task.source} ({splits})"
        f"{selection_text}; evaluated on {len(task.evaluated_split)} others of it ({task.split})"
    )
    published_batch = 16_384 if probe == "mae" else 1_024
    if plan.batch < published_batch and not task.options.probe_batch:
        note(
            f"batch {published_batch} -> {plan.batch}: the training set has {plan.batch} images; learning rates "
            f"are scaled by batch / {BASE_BATCH_SIZE}"
        )
    if probe == "dinov2" and task.options.steps is None and task.options.epochs is None and plan.steps < DINOV2_STEPS:
        note(
            f"steps {DINOV2_STEPS} -> {plan.steps}: {MAX_EPOCHS} passes over the images; --steps or --epochs changes it"
        )
    if plan.steps < SHORT_TRAINING_SHARE * PUBLISHED_STEPS[probe]:
        note(
            f"{plan.steps} steps are few compared with {PUBLISHED_STEPS[probe]} on ImageNet: the head may "
            f"underfit, and the "
            "metric would not reflect the features; increase --steps or --epochs, or leave --probe out"
        )


def screen_training_images(task: ProtocolTask, train: Split) -> tuple[Tensor | None, Split]:
    """Return the training images in memory if they are small, (n, C, *image), and the split without unreadable ones.

    Raises DataError for unreadable images, unless they are skipped.
    """
    computing, preprocess = task.evaluation_settings, task.bundle.preprocess
    cache_images, skip_unreadable = fits_in_memory(train, preprocess), computing.bad_images == "skip"
    if not cache_images and not skip_unreadable:
        return None, train  # the first unreadable image stops the training
    pixels, bad = screen_images(train, preprocess, get_worker_count(task), cache_images)
    check_unreadable_images(bad, len(train), computing.bad_images)
    readable = find_readable_samples(train, bad)
    return None if pixels is None else pixels[torch.from_numpy(readable)], train.take(readable)


def get_worker_count(task: ProtocolTask) -> int:
    """Return the number of decoding processes."""
    return default_worker_count() if task.evaluation_settings.workers is None else task.evaluation_settings.workers


def iterate_feature_batches(
    task: ProtocolTask, plan: ProbePlan, engine: ModelEngine, train: Split, pixels: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield features (B, N) of augmented images, their labels (B,) and the learning rate factor, for every step.

    The model computes each batch once. Raises NonFiniteError for features that are not finite.
    """
    loader = TrainLoader(
        train, task.bundle.preprocess, plan.views, task.options.seed, workers=get_worker_count(task), cached=pixels
    )
    starts = range(0, plan.steps * plan.batch, plan.batch)
    spans = [
        (low, min(low + FORWARD_BATCH_SIZE, start + plan.batch))
        for start in starts
        for low in range(start, start + plan.batch, FORWARD_BATCH_SIZE)
    ]
    loaded_batches, chunks_per_step = iter(loader.iterate_spans(spans)), -(-plan.batch // FORWARD_BATCH_SIZE)
    count = make_progress_counter(
        task.evaluation_settings.listener, f"{task.options.probe} heads", plan.steps * plan.batch
    )
    for step in range(plan.steps):
        batch_features, labels = [], []
        for _ in range(chunks_per_step):
            batch = next(loaded_batches)
            batch_features.append(engine(batch["images"]))
            labels.append(batch["labels"])
            count(len(batch_features[-1]))
        features = torch.cat(batch_features).to(task.device)
        if not features.isfinite().all():
            problem = "features of augmented training images are not finite"
            raise NonFiniteError(problem, "use --precision fp32, or other weights")
        yield features, torch.cat(labels).to(task.device), plan.get_lr_factor(step)


def compute_unaugmented_features(
    task: ProtocolTask, engine: ModelEngine, split: Split, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return (m, N) features of a split without augmentation, and (m,) bool: readable images.

    Raises DataError for unreadable images, unless they are skipped.
    """
    computing = task.evaluation_settings
    on_images = make_progress_counter(computing.listener, f"features of {name}", len(split))
    reader = EvalLoader(split, task.bundle.preprocess, get_worker_count(task))
    features, bad = compute_split_logits(engine, reader, computing.batch_size, on_images)
    check_unreadable_images(bad, len(split), computing.bad_images)
    find_readable_samples(split, bad)  # raises DataError if none is readable
    return features, build_readable_mask(len(split), bad)


def score_heads(heads: list[LinearHead], features: np.ndarray, good: np.ndarray, val: Split) -> list[float | None]:
    """Return the top-1 of each head on (m, N) features; unreadable images, not `good` (m,), count as wrong."""
    return [float(((head.logits(features).argmax(1) == val.labels) & good).mean()) for head in heads]
