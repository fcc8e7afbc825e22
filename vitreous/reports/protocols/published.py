"""The published linear protocols of MAE, DINO and DINOv2: heads trained by SGD on a frozen model.

| `--probe` | input features | training | source |
|---|---|---|---|
| mae | class token after a batch norm | LARS, lr 0.1, 90 epochs of 16,384 | main_linprobe.py |
| dino | class tokens of 4 blocks (ViT-S), or of 1 and the mean | SGD, lr 0.001, 100 epochs of 1,024 | eval_linear.py |
| dinov2 | class tokens of 1 or 4 blocks, with and without mean | SGD, 13 lr, 12,500 steps of 1,024 | eval/linear.py |

The batch size follows "of"; the mean is that of the last block's patch tokens. All have momentum 0.9, no weight decay,
learning rates scaled by batch / 256, and only random crops and flips.
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

# DINOv2's learning rates for 256 images
DINOV2_LR_GRID = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
DINOV2_STEPS = 12_500
PUBLISHED_STEPS = {"mae": 7_038, "dino": 125_100, "dinov2": DINOV2_STEPS}  # on ImageNet
SHORT_TRAINING_SHARE = 0.1  # a training with fewer than this share of `PUBLISHED_STEPS` is reported as short
MAX_EPOCHS = 100  # maximum epochs if the published length is in steps
CLASS_TOKEN_BLOCKS = 4  # blocks whose class tokens are concatenated
# from VIT_B_WIDTH on, DINO uses one block; from VIT_L_WIDTH on, MAE trains for fewer epochs
VIT_B_WIDTH, VIT_L_WIDTH = 768, 1_024
FORWARD_BATCH_SIZE = 256  # images per forward pass of the frozen model
PROBE_CROP = Augment(crop=(0.08, 1.0), crop_filter="bicubic", flip=0.5)


@dataclass(frozen=True)
class ProbePlan:
    """The training plan of a published protocol, for a model and a number of training images.

    `batch` is the batch size, `steps` and `warmup` are in steps, `views` are the augmentations.
    """

    heads: tuple[HeadConfig, ...]
    batch: int
    steps: int
    warmup: int = 0
    by_epoch: float = 0.0  # steps per epoch if the learning rate changes once per epoch; 0: at every step
    views: Augment = PROBE_CROP

    def get_lr_factor(self, step: int) -> float:
        """Return the learning rate factor at a step, counted from 0: linear warm-up, then cosine decay to 0."""
        schedule = ScheduleConfig(self.warmup)
        if not self.by_epoch:
            return schedule_factor(schedule, step, self.steps)
        return schedule_factor(schedule, int(step / self.by_epoch), max(1, round(self.steps / self.by_epoch)))

    def describe(self) -> dict[str, Any]:
        """Return batch size, steps, and whether images are cropped and flipped, for the document."""
        return {"batch_size": self.batch, "steps": self.steps, "augmented": self.views.flip > 0}


def build_head_configs(probe: str, model: ModelConfig) -> tuple[HeadConfig, ...]:
    """Return the head configurations that a protocol trains for a model; of equal scores, the first is selected.

    Raises UsageError for dino and dinov2 if the model has no class token.
    """
    token = model.class_token
    if probe == "mae":
        return (HeadConfig(0.1, HeadInput(1 if token else 0), "lars", normed=True),)
    if not token:
        hint = (
            "use --probe mae, which uses the input of the model's head, or leave --probe out; "
            "or train a model with --model.class-token True --model.pool class"
        )
        raise UsageError(f"--probe {probe} needs a class token, and {model.name()} has none", hint)
    num_blocks = min(CLASS_TOKEN_BLOCKS, model.depth)
    if probe == "dino":
        return (HeadConfig(1e-3, HeadInput(1, mean=True) if model.width >= VIT_B_WIDTH else HeadInput(num_blocks)),)
    head_inputs = [HeadInput(blocks, mean) for blocks in dict.fromkeys((1, num_blocks)) for mean in (False, True)]
    return tuple(HeadConfig(lr, head_input) for head_input in head_inputs for lr in DINOV2_LR_GRID)


def plan_probe(options: ProtocolOptions, model: ModelConfig, images: int) -> ProbePlan:
    """Return the training plan of a protocol for a number of training images.

    The default batch size is at most the number of images. --epochs and --steps set the length; the default steps of
    DINOv2 are limited to `MAX_EPOCHS` epochs. Raises UsageError as `build_head_configs`.
    """
    probe, heads = options.probe, build_head_configs(options.probe, model)
    batch = options.probe_batch or min(16_384 if probe == "mae" else 1_024, max(2, images))
    published_epochs = {"mae": 50 if model.width >= VIT_L_WIDTH else 90, "dino": 100, "dinov2": None}[probe]
    steps_per_epoch = images / batch
    if options.steps is not None:
        steps = options.steps
    elif options.epochs is not None or published_epochs is not None:
        steps = max(1, round((options.epochs or published_epochs or 0) * steps_per_epoch))
    else:
        steps = max(1, min(DINOV2_STEPS, round(MAX_EPOCHS * steps_per_epoch)))
    views = PROBE_CROP if options.probe_augment else Augment()
    if probe == "mae":  # ten epochs of warm-up, or the same share of a shorter training
        return ProbePlan(heads, batch, steps, round(min(10 * steps_per_epoch, steps / 9)), views=views)
    if probe == "dino":  # DINO resizes crops with bilinear interpolation
        return ProbePlan(heads, batch, steps, by_epoch=steps_per_epoch, views=replace(views, crop_filter="bilinear"))
    return ProbePlan(heads, batch, steps, views=views)


def evaluate_published_probe(task: ProtocolTask) -> ProtocolResult:
    """Evaluate by a published linear protocol: train its heads together, and select one on validation images.

    Raises UsageError for multi-label data, int8, OpenVINO and merged tokens; DataError as `split_probe_images` and for
    images of one class; NonFiniteError if no head has finite weights.
    """
    options, inference = task.options, task.evaluation_settings.inference_options
    task.require_single_label(f"; --probe {options.probe} needs one", "leave --probe out, or use --protocol knn")
    if inference.engine == "openvino" or inference.precision == "int8" or inference.merge_tokens:
        problem = f"--probe {options.probe} needs the tokens of the PyTorch model in fp32 or bf16"
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
    feature_model = TokenReader(task.bundle.model, tuple(head.reading for head in plan.heads))
    engine = make_engine(feature_model, task.bundle.preprocess, inference)  # type: ignore[arg-type]
    heads = [
        LinearHead(head, feature_model.get_columns(head.reading), task.num_classes, options.seed, device=task.device)
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
    features, is_readable = compute_unaugmented_features(task, engine, task.evaluated_split, f"{task.split} images")
    report = evaluate_classification(
        heads[best_index].logits(features), task.evaluated_split.labels, task.data.classes, is_readable
    )
    candidates = [
        describe_head(head.config, plan.batch) | {"val": score} for head, score in zip(heads, scores, strict=True)
    ]
    settings = {"probe": options.probe, **plan.describe()}
    selection = {"selected": candidates[best_index], "images": len(val) if val else 0, "candidates": candidates}
    results = [{"probe": options.probe, **candidates[best_index], **report.summary()}]
    return ProtocolResult(report, results, settings | {"selection": selection} | data_description)


def describe_head(head: HeadConfig, batch: int) -> dict[str, Any]:
    """Describe a head for the document: base and scaled learning rate, number of class tokens, and whether it uses the
    mean of the patch tokens."""
    return {
        "base_lr": head.lr,
        "lr": head.scale_lr(batch),
        "blocks": head.reading.blocks,
        "mean_patch": head.reading.mean,
    }


def split_probe_images(task: ProtocolTask, is_selecting: bool) -> tuple[Split, Split | None, dict[str, Any]]:
    """Return the training images, the validation images, and the description of both for the document.

    If `is_selecting`, several heads are trained, and the validation images select one: they are the `val` split if it
    is not evaluated, else a share held out of `train`. A single head trains on all images, and the validation images
    are the `val` split of the data, or None. Raises DataError if no images can be
    held out.
    """
    training, val_split = task.training_split, task.data.splits.get("val") if task.split == "test" else None
    is_drawn = task.data.full_train_split is not None
    if val_split is not None and not is_drawn:
        validation_source = "val"
    elif not is_selecting:
        val_split, validation_source = None, ""
    elif val_split is not None:
        training, validation_source = task.data.split("train"), "val"
    else:
        subsets = task.hold_out(training.labels, np.arange(len(training)))
        if not len(subsets["dev"]):
            hint = "add images, or use --probe mae or dino, which train one head"
            raise DataError("too few training images to hold some out for selecting a head", hint)
        training, val_split, validation_source = (
            training.take(subsets["train"]),
            training.take(subsets["dev"]),
            "held out of train",
        )
    splits = task.describe_splits["train_data"]["splits"] if not is_selecting else ["train"]
    train_data = {"data": task.source, "splits": splits, "images": len(training)}
    validation = {"split": validation_source, "images": len(val_split)} if val_split is not None else None
    return training, val_split, {"train_data": train_data, "validation": validation}


def log_probe_plan(task: ProtocolTask, plan: ProbePlan, images: int, data_description: dict[str, Any]) -> None:
    """Log the number of heads, the images they use, and any difference from the published batch size and length."""
    note, probe, validation = task.evaluation_settings.listener.note, task.options.probe, data_description["validation"]
    heads_text = f"{len(plan.heads)} heads" if len(plan.heads) > 1 else "a head"
    purpose = "select one of them" if len(plan.heads) > 1 else "are its validation images"
    selection_text = f"; {validation['images']} other images ({validation['split']}) {purpose}" if validation else ""
    splits = " and ".join(data_description["train_data"]["splits"])
    note(
        f"--probe {probe} trains {heads_text} on {images} images of {task.source} ({splits})"
        f"{selection_text}; evaluated on {len(task.evaluated_split)} {task.split} images"
    )
    published_batch = 16_384 if probe == "mae" else 1_024
    if plan.batch < published_batch and not task.options.probe_batch:
        note(
            f"batch {published_batch} -> {plan.batch}: the training set has {plan.batch} images; learning rates "
            f"are scaled by batch / {BASE_BATCH_SIZE}"
        )
    if probe == "dinov2" and task.options.steps is None and task.options.epochs is None and plan.steps < DINOV2_STEPS:
        note(f"steps {DINOV2_STEPS} -> {plan.steps}: {MAX_EPOCHS} epochs; set --steps or --epochs to change it")
    if plan.steps < SHORT_TRAINING_SHARE * PUBLISHED_STEPS[probe]:
        note(
            f"{plan.steps} steps are few compared with {PUBLISHED_STEPS[probe]} on ImageNet: the head may "
            f"underfit, and the "
            "metric would not reflect the features; increase --steps or --epochs, or leave --probe out"
        )


def screen_training_images(task: ProtocolTask, train: Split) -> tuple[Tensor | None, Split]:
    """Return the readable training images: decoded as (n, C, *image) if they fit into memory, else None; and their
    split.

    Raises DataError for unreadable images, unless they are skipped.
    """
    evaluation_settings, preprocess = task.evaluation_settings, task.bundle.preprocess
    cache_images, skip_unreadable = fits_in_memory(train, preprocess), evaluation_settings.bad_images == "skip"
    if not cache_images and not skip_unreadable:
        return None, train  # the first unreadable image stops the training
    pixels, read_errors = screen_images(train, preprocess, get_worker_count(task), cache_images)
    check_unreadable_images(read_errors, len(train), evaluation_settings.bad_images)
    readable = find_readable_samples(train, read_errors)
    return None if pixels is None else pixels[torch.from_numpy(readable)], train.take(readable)


def get_worker_count(task: ProtocolTask) -> int:
    """Return the number of decoding processes."""
    return default_worker_count() if task.evaluation_settings.workers is None else task.evaluation_settings.workers


def iterate_feature_batches(
    task: ProtocolTask, plan: ProbePlan, engine: ModelEngine, train: Split, pixels: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield, for every step, features (B, N) of augmented images, their labels (B,), and the learning rate factor.

    The model computes each batch once for all heads. `pixels` are the decoded images of `train`, or None. Raises
    NonFiniteError for features that are not finite.
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
    report_images = make_progress_counter(
        task.evaluation_settings.listener, f"{task.options.probe} heads", plan.steps * plan.batch
    )
    for step in range(plan.steps):
        batch_features, labels = [], []
        for _ in range(chunks_per_step):
            batch = next(loaded_batches)
            batch_features.append(engine(batch["images"]))
            labels.append(batch["labels"])
            report_images(len(batch_features[-1]))
        features = torch.cat(batch_features).to(task.device)
        if not features.isfinite().all():
            problem = "features of augmented training images are not finite"
            raise NonFiniteError(problem, "use --precision fp32, or other weights")
        yield features, torch.cat(labels).to(task.device), plan.get_lr_factor(step)


def compute_unaugmented_features(
    task: ProtocolTask, engine: ModelEngine, split: Split, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the features (m, N) of a split without augmentation, and (m,) bool: whether each image is readable.

    Raises DataError for unreadable images, unless they are skipped.
    """
    evaluation_settings = task.evaluation_settings
    on_images = make_progress_counter(evaluation_settings.listener, f"features of {name}", len(split))
    loader = EvalLoader(split, task.bundle.preprocess, get_worker_count(task))
    features, read_errors = compute_split_logits(engine, loader, evaluation_settings.batch_size, on_images)
    check_unreadable_images(read_errors, len(split), evaluation_settings.bad_images)
    find_readable_samples(split, read_errors)  # raises DataError if none is readable
    return features, build_readable_mask(len(split), read_errors)


def score_heads(
    heads: list[LinearHead], features: np.ndarray, is_readable: np.ndarray, val: Split
) -> list[float | None]:
    """Return the top-1 accuracy of each head on the split `val` with features (m, N).

    Images that are not readable (`is_readable` (m,) bool) count as wrong.
    """
    return [float(((head.logits(features).argmax(1) == val.labels) & is_readable).mean()) for head in heads]
