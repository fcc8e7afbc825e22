"""Compute the logits and features of a model on the images of a split. Every evaluation starts from these."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property

import numpy as np

from vitreous.data.annotations.target import get_sample_noun
from vitreous.data.clip_views import SINGLE_VIEW, parse_clip_views
from vitreous.data.loader import EvalLoader
from vitreous.data.run_data import choose_split, iterate_calibration_images, iterate_sample_images, open_run_data
from vitreous.data.screen import check_unreadable_images, error_from_message, find_readable_samples
from vitreous.data.split import Data, Split
from vitreous.errors import DataError, UsageError
from vitreous.evaluation.evaluator import Evaluator
from vitreous.inference.engine import ENGINE_CHUNK, InferenceOptions, build_readable_mask, compute_split_logits
from vitreous.inference.engine_choice import build_evaluation_engine
from vitreous.inference.features import SplitFeatures, load_or_compute_arrays, load_or_compute_features
from vitreous.inference.frozen_encoder import FrozenEncoder
from vitreous.inference.open_model import open_bundle
from vitreous.progress import NullListener, ProgressListener
from vitreous.system.cores import default_worker_count
from vitreous.system.machine import describe_emulation, pick_device
from vitreous.tasks.report import Report
from vitreous.weights.bundle import Bundle


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings for computing logits and features; only `inference_options` and `bad_images` affect metrics."""

    batch_size: int = ENGINE_CHUNK  # images that are decoded at a time
    workers: int | None = None  # decoding processes; None: `default_worker_count()`
    inference_options: InferenceOptions = field(default_factory=InferenceOptions)
    bad_images: str = "stop"  # `stop`: an unreadable image raises DataError; `skip`: it counts as wrong
    _: KW_ONLY
    listener: ProgressListener = field(default_factory=NullListener)
    cache: bool = True  # whether features are cached on disk


@dataclass(frozen=True)
class SplitPredictions:
    """Predictions for the images of a split, with labels in the model's class order.

    `source` is the path of the dataset, `name` the name of the split. `raw_logits` (n, K) float32 are the logits before
    temperature scaling, `unreadable` the indices of unreadable images, `start_time` the clock time in seconds at the
    first image.
    """

    run: str
    bundle: Bundle
    source: str
    data: Data
    name: str
    split: Split
    raw_logits: np.ndarray
    unreadable: frozenset[int]
    start_time: float
    clip_views: str = SINGLE_VIEW
    evaluator: Evaluator | None = None  # for segmentation and detection

    @property
    def clip_views_entry(self) -> dict[str, str]:
        """Return the entry `clip_views` of JSON documents; an empty dict if the model does not take clips."""
        return {"clip_views": self.clip_views} if self.bundle.preprocess.is_animated else {}

    @cached_property
    def logits(self) -> np.ndarray:
        """Return the logits divided by the bundle's temperature, (n, K). They are float64, so that distinct float32
        logits stay distinct."""
        return self.bundle.classification.scale_logits(self.raw_logits)

    @property
    def report(self) -> Report:
        """Evaluate the logits with the metrics of the model's task."""
        return self.bundle.task.evaluate(self.raw_logits, self.split.labels, self.readable)

    @cached_property
    def readable(self) -> np.ndarray:
        """Return (n,) bool: whether each image is readable."""
        return build_readable_mask(len(self.split), self.unreadable)

    @cached_property
    def confidence(self) -> np.ndarray:
        """Return (n,) float64: the highest probability of each image, 0 for unreadable images."""
        return np.where(self.readable, self.bundle.task.activate(self.raw_logits).max(1), 0.0)

    @cached_property
    def is_correct(self) -> np.ndarray:
        """Return (n,) bool: whether the top-1 class is the label, for single-label data."""
        return self.readable & (self.logits.argmax(1) == self.split.labels)


def predict_split(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    split: str | None,
    evaluation_settings: EvaluationSettings,
) -> SplitPredictions:
    """Open a run and a dataset, and predict the images of a split.

    `data` is the path of the dataset; None: the dataset of the run. If `split` is None, `test` is predicted, or `val`
    if there is no test split. Raises DataError for unreadable images, with bad_images `skip` only if none is readable;
    UsageError if the data are multi-label and the model single-label; WeightsError as `open_bundle`.
    """
    bundle = open_bundle(run, note=evaluation_settings.listener.note)
    source, dataset = open_run_data(run, data, split, preprocess=bundle.preprocess, targets=bundle.task.label_columns)
    return predict_open_split(
        run,
        bundle,
        source=source,
        dataset=dataset,
        split=choose_split(dataset, split, evaluation_settings.listener.note),
        evaluation_settings=evaluation_settings,
    )


def predict_open_split(
    run: str | os.PathLike[str],
    bundle: Bundle,
    source: str,
    dataset: Data,
    split: str,
    evaluation_settings: EvaluationSettings,
) -> SplitPredictions:
    """Predict the images of a split, if the model and the dataset are already open.

    Raises UsageError if the data are multi-label and the model single-label, and for data of another modality than the
    model's; DataError as `predict_split`.
    """
    sample_noun = get_sample_noun(dataset.split(split))
    if sample_noun != (model_noun := bundle.preprocess.noun):
        raise UsageError(
            f"{run} needs {model_noun}, but {source} contains {sample_noun}", f"use a dataset of {model_noun}"
        )
    aligned_split = bundle.task.align_labels(dataset.split(split), dataset)
    if emulation_note := describe_emulation(
        evaluation_settings.inference_options.precision, pick_device(evaluation_settings.inference_options.device)
    ):
        evaluation_settings.listener.note(emulation_note)
    preprocess = bundle.preprocess
    clip_views = evaluation_settings.inference_options.clip_views
    views, single_view_options = (
        parse_clip_views(clip_views, preprocess),
        replace(evaluation_settings.inference_options, clip_views=SINGLE_VIEW),
    )
    engine = build_evaluation_engine(
        bundle.model,
        preprocess,
        options=single_view_options,
        num_images=len(aligned_split),
        note=evaluation_settings.listener.note,
        calibration_images=lambda: iterate_calibration_images(
            run, preprocess, lambda: iterate_sample_images(dataset, preprocess)
        ),
    )
    start_time, on_images = (
        time.perf_counter(),
        make_progress_counter(evaluation_settings.listener, "evaluate", len(aligned_split)),
    )
    workers = default_worker_count() if evaluation_settings.workers is None else evaluation_settings.workers
    logits, read_errors = compute_split_logits(
        engine, EvalLoader(aligned_split, preprocess, workers, views), evaluation_settings.batch_size, on_images
    )
    check_unreadable_images(read_errors, len(aligned_split), evaluation_settings.bad_images)
    find_readable_samples(aligned_split, read_errors)  # raises DataError if none is readable
    unreadable = frozenset(read_errors)
    return SplitPredictions(
        os.fspath(run),
        bundle,
        source=source,
        data=dataset,
        name=split,
        split=aligned_split,
        raw_logits=logits,
        unreadable=unreadable,
        start_time=start_time,
        clip_views=clip_views,
    )


def compute_split_features(
    bundle: Bundle, split: Split, name: str, evaluation_settings: EvaluationSettings
) -> SplitFeatures:
    """Compute the features of the images of a split, or read them from the cache; messages call the images `name`.

    Raises DataError for unreadable images, with bad_images `skip` only if none is readable.
    """
    on_images = make_progress_counter(evaluation_settings.listener, f"features of {name}", len(split))
    features = load_or_compute_features(
        bundle.model,
        bundle.preprocess,
        split=split,
        how=evaluation_settings.inference_options,
        batch_size=evaluation_settings.batch_size,
        workers=evaluation_settings.workers,
        keep=evaluation_settings.cache,
        on_images=on_images,
    )
    check_split_features(features, split, name, evaluation_settings)
    return features


def compute_split_arrays(
    bundle: Bundle, encoder: FrozenEncoder, split: Split, name: str, evaluation_settings: EvaluationSettings
) -> dict[str, SplitFeatures]:
    """Compute all arrays of an encoder for the images of a split in one pass, or read them from the cache.

    Returns the features by name of the array; messages call the images `name`. Raises DataError as
    `compute_split_features`.
    """
    features = load_or_compute_arrays(
        bundle.model,
        encoder,
        arrays=encoder.describe_arrays(bundle.preprocess.image),
        preprocess=bundle.preprocess,
        split=split,
        how=evaluation_settings.inference_options,
        batch_size=evaluation_settings.batch_size,
        workers=evaluation_settings.workers,
        keep=evaluation_settings.cache,
        on_images=make_progress_counter(evaluation_settings.listener, f"features of {name}", len(split)),
    )
    for array in features.values():
        check_split_features(array, split, name, evaluation_settings)
    return features


def check_split_features(
    features: SplitFeatures, split: Split, name: str, evaluation_settings: EvaluationSettings
) -> None:
    """Raise DataError for unreadable images, with bad_images `skip` only if none is readable."""
    check_unreadable_images(
        {sample: error_from_message(reason) for sample, reason in features.read_errors.items()},
        len(split),
        evaluation_settings.bad_images,
    )
    if not features.is_readable.any():
        raise DataError(
            f"none of the {len(split)} {name} can be read; first: {next(iter(features.read_errors.values()))}"
        )


def make_progress_counter(listener: ProgressListener, label: str, total: int) -> Callable[[int], None]:
    """Return a callback that adds its argument to the number of processed images, and reports progress and images/s."""
    started, done = time.perf_counter(), 0

    def report_images(images: int) -> None:
        nonlocal done
        done += images
        listener.progress(label, done, total, f"{done / (time.perf_counter() - started):.0f} images/s")

    return report_images
