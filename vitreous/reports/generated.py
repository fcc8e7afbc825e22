"""Evaluate generative models: the distance between generated and real images in a named feature space."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitreous.config import OptionalPath
from vitreous.data.buckets import find_samples_at_model_size
from vitreous.data.loader import EvalLoader
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.run_data import choose_split, open_run_data
from vitreous.data.split import Data, Split
from vitreous.errors import DataError, UsageError, VitreousError
from vitreous.evaluation.frechet import (
    FeatureMoments,
    compute_density_coverage,
    compute_moments,
    compute_precision_recall,
    frechet_distance,
    frechet_distance_of_moments,
    measure_copy_share,
)
from vitreous.evaluation.inception import inception_score
from vitreous.generation.settings import SamplingOptions, cycle_classes
from vitreous.inference.image_grid import (
    SAMPLES_FILE,
    arrange_image_grid,
    array_to_frames,
    choose_shown_classes,
    enlarge_small_images,
)
from vitreous.inference.image_sampler import ImageSampler, build_sampler
from vitreous.inference.open_model import open_generator
from vitreous.inference.sample_sizes import choose_sample_size, format_sample_size
from vitreous.progress import ProgressListener
from vitreous.reports.answers import EvaluationSettings, make_progress_counter
from vitreous.reports.readings import record_evaluation
from vitreous.reports.reference import read_reference_batch
from vitreous.reports.spaces import INCEPTION, LATENTS, PIXELS, FeatureSpace, SpaceFeatures, open_feature_space
from vitreous.system.cores import default_worker_count
from vitreous.system.disk import atomic_path
from vitreous.training.folder import RunFolder
from vitreous.weights.bundle import Bundle

DEFAULT_SAMPLES = 1000
SHOWN_SAMPLES, SHOWN_GUIDANCE = 8, 1.5  # samples.png of a run: images per class; guidance scale
MIN_REAL_IMAGES = 10
IMAGE_CHUNK = 1000  # images in memory at a time


@dataclass(frozen=True)
class GenerationOptions(SamplingOptions):
    """Options for evaluating a generative model.

    `samples` images are generated, spread evenly over classes. `features` is the feature space: `pixels`, the features
    of a run, a bundle or weights, or those of an Inception weights file. `reference`: an .npz file of real images or of
    the moments of their features, instead of a dataset. `vae`: an autoencoder instead of the run's. `size`, such as
    64x48, and `frames`: for a model trained at several sizes, the size to generate; it is compared with the real images
    nearest to that size. Raises UsageError for too few samples.
    """

    samples: int = DEFAULT_SAMPLES
    features: str = PIXELS
    reference: OptionalPath = None
    vae: OptionalPath = None
    size: str | None = None
    frames: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.samples <= 1_000_000:
            raise UsageError(f"--samples must be 2 to 1,000,000, not {self.samples}")


@dataclass(frozen=True)
class RealImages:
    """The features of the real images of a split, or of a reference file, in one feature space.

    `source` is the dataset or file, `images` the number of images, `train` (n, d) the features of the training images,
    if there are any. `moments` are those that a reference file contains; they are used instead of `features`.
    """

    source: str
    split: str
    images: int
    features: SpaceFeatures
    _: KW_ONLY
    train: np.ndarray | None = None
    moments: Mapping[str, FeatureMoments] = field(default_factory=dict)

    def distance(self, name: str, features: np.ndarray) -> float | None:
        """Compute the Fréchet distance between the real features `name` and `features` (m, d) of generated images.

        Returns None if the real features are not available.
        """
        if name in self.moments:
            return frechet_distance_of_moments(self.moments[name], compute_moments(features))
        return frechet_distance(self.features[name], features) if name in self.features else None


def measure_generator(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    split: str | None,
    options: GenerationOptions,
    evaluation_settings: EvaluationSettings,
) -> dict[str, Any]:
    """Generate images and compare them with real images. Returns the document of `evaluate --json`.

    The real images are those of `options.reference`, or of a split of `data` or, if it is None, of the run's dataset. A
    model trained at several sizes is evaluated at one, `size` in the document: `options.size`, or the model's default;
    real images nearest to it are used. `frechet_distance_of_train`, a baseline, is the distance between the split and
    at most as many training images as samples. `classifier_accuracy`: the share of images that the feature
    model classifies as their class, if it has these classes. Inception's space adds `fid`, `sfid` and
    `inception_score`. Raises UsageError, DataError and WeightsError as `evaluate`.
    """
    start_time, listener = time.perf_counter(), evaluation_settings.listener
    bundle = open_generator(run, listener.note)
    if options.reference is not None and (data is not None or split is not None):
        raise UsageError("--reference is used instead of the dataset", "leave DATA and --split out")
    stills = bundle.preprocess.has_buckets
    source_and_dataset = (
        None if options.reference is not None else open_run_data(run, data, split, labelled=False, stills=stills)
    )
    sampler, preprocess, space_name = open_sampler(
        bundle, source_and_dataset[1] if source_and_dataset else None, options, evaluation_settings
    )
    space = open_feature_space(space_name, bundle.task.classes, evaluation_settings, sampler.device)
    if source_and_dataset is None:
        real = read_real_reference(str(options.reference), space)
    else:
        name = choose_split(source_and_dataset[1], split, listener.note)
        source_and_dataset = (
            source_and_dataset[0],
            select_size(source_and_dataset[1], name, preprocess, evaluation_settings),
        )
        real = read_real_split(*source_and_dataset, name, preprocess, space, evaluation_settings)
    batches = generate_images(sampler, len(bundle.task.classes), options, evaluation_settings)
    generated = concatenate_features([space.features(images, labels) for labels, images in batches])
    sampler_name, steps = options.resolve_sampler(sampler.process)
    sampling = {"guidance": options.guidance, "sampler": sampler_name, "steps": steps, "seed": options.seed}
    metrics = compute_generator_metrics(real, generated) | {
        "images": real.images,
        "samples": len(generated["features"]),
        "features": space.name,
    }
    metrics |= {"dimensions": generated["features"].shape[1], "primary": "frechet_distance", "better": "lower"}
    metrics["size"] = format_sample_size(sampler.image, sampler.stride)
    if (Path(run) / "config.yaml").is_file():
        record_evaluation(Path(run), real.source, real.split, metrics | sampling)
    document = {"run": os.fspath(run), "data": real.source, "split": real.split, real.split: metrics, **sampling}
    return {**document, "seconds": time.perf_counter() - start_time}


def compute_generator_metrics(real: RealImages, generated: SpaceFeatures) -> dict[str, float | None]:
    """Compare real and generated images. Metrics for which `real` lacks features or training images are None."""
    features, real_features = generated["features"], real.features.get("features")
    metrics: dict[str, float | None] = dict.fromkeys(("precision", "recall", "density", "coverage", "near_duplicates"))
    metrics |= {"frechet_distance": real.distance("features", features), "frechet_distance_of_train": None}
    if real_features is not None:
        metrics["precision"], metrics["recall"] = compute_precision_recall(real_features, features)
        metrics["density"], metrics["coverage"] = compute_density_coverage(real_features, features)
    if real_features is not None and real.train is not None:
        train_indices = np.linspace(0, len(real.train) - 1, min(len(real.train), len(features))).astype(np.int64)
        metrics["frechet_distance_of_train"] = frechet_distance(real_features, real.train[train_indices])
        metrics["near_duplicates"] = measure_copy_share(real.train, features)[0]
    metrics["classifier_accuracy"] = float(generated["recognised"].mean()) if "recognised" in generated else None
    if "logits" in generated:
        metrics["fid"], metrics["sfid"] = metrics["frechet_distance"], real.distance("spatial", generated["spatial"])
        metrics["inception_score"] = inception_score(generated["logits"])
    return metrics


def select_size(data: Data, name: str, preprocess: Preprocess, evaluation_settings: EvaluationSettings) -> Data:
    """Select the images nearest to the model's size from the split `name` and from `train`.

    For a model trained at one size, the data are returned unchanged. Raises DataError for a size without images.
    """
    if not preprocess.has_buckets:
        return data
    workers, splits = (
        default_worker_count() if evaluation_settings.workers is None else evaluation_settings.workers,
        dict(data.splits),
    )
    for split_name in {name, "train"} & data.splits.keys():
        splits[split_name] = data.splits[split_name].take(
            find_samples_at_model_size(data.splits[split_name], preprocess, workers)
        )
    count = f"{len(splits[name]):,} of {len(data.splits[name]):,} {name} images"
    evaluation_settings.listener.note(
        f"evaluated at {format_sample_size(preprocess.image)}, against the {count} nearest to that size"
    )
    return replace(data, splits=splits)


def read_real_split(
    source: str,
    dataset: Data,
    name: str,
    preprocess: Preprocess,
    space: FeatureSpace,
    evaluation_settings: EvaluationSettings,
) -> RealImages:
    """Compute the features of the images of a split and of the training split. Raises DataError for too few images."""
    features, train = compute_space_features(dataset.split(name), preprocess, space, evaluation_settings), None
    if (count := len(features["features"])) < MIN_REAL_IMAGES:
        raise DataError(f"{count} images are too few to compare with", f"use at least {MIN_REAL_IMAGES}")
    if "train" in dataset.splits and name != "train":
        train = compute_space_features(dataset.splits["train"], preprocess, space, evaluation_settings)["features"]
    return RealImages(source, name, count, features, train=train)


def read_real_reference(file: str, space: FeatureSpace) -> RealImages:
    """Read a reference file: compute the features of its images, or use the moments that it contains.

    Raises UsageError if the moments are of another feature space, DataError as `read_reference_batch`.
    """
    reference = read_reference_batch(file)
    if reference.moments and space.name != INCEPTION:
        raise UsageError(
            f"{file} contains moments of Inception features, not of {space.name}", "use --features inception.pth"
        )
    features = concatenate_features([space.features(images) for images in reference.images(IMAGE_CHUNK)])
    return RealImages(
        file, "reference", images=reference.count, features=features, train=None, moments=reference.moments
    )


def open_sampler(
    bundle: Bundle, dataset: Data | None, options: GenerationOptions, evaluation_settings: EvaluationSettings
) -> tuple[ImageSampler, Preprocess, str]:
    """Return the sampler of a bundle, the preprocessing of real images, and the name of the feature space.

    The preprocessing gives real images the size of generated ones. The feature space is `options.features`, or
    `LATENTS` if the dataset contains latents. Raises UsageError if `options.features` needs images but the dataset
    contains latents, and as `build_sampler`.
    """
    device, precision, note = (
        evaluation_settings.inference_options.device,
        evaluation_settings.inference_options.precision,
        evaluation_settings.listener.note,
    )
    if dataset is None or dataset.latents is None:
        sampler = build_sampler(bundle, device, precision, options.vae)
        sampler.image = choose_sample_size(bundle, options.size, options.frames, sampler.stride, note)
        if sampler.decode is not None:
            return (
                sampler,
                ImagePreprocess(tuple(length * sampler.stride for length in sampler.image)),
                options.features,
            )
        return sampler, bundle.preprocess.with_only_size(sampler.image), options.features
    if options.features != PIXELS:
        problem = f"{dataset.name} contains latents, and --features needs images"
        raise UsageError(problem, f"use the images: vitreous evaluate RUN IMAGES --features {options.features}")
    sampler = build_sampler(bundle, device, precision, decoded=False)
    sampler.image = choose_sample_size(bundle, options.size, options.frames, note=note)
    if sampler.image != tuple(bundle.model.config.image):
        raise UsageError(f"{dataset.name} contains latents of one size", "leave --size out")
    sampler.decode = sampler.preprocess.denormalise
    return sampler, bundle.preprocess, LATENTS


def iterate_split_images(
    split: Split, preprocess: Preprocess, evaluation_settings: EvaluationSettings
) -> Iterator[np.ndarray]:
    """Yield the images of a split, preprocessed as in training, (n, H, W, C) uint8 or float32 latents.

    They are yielded in chunks of `IMAGE_CHUNK`. Raises DataError for the first unreadable image, with bad_images `skip`
    only if none is readable.
    """
    images: list[torch.Tensor] = []
    workers, has_yielded = (
        default_worker_count() if evaluation_settings.workers is None else evaluation_settings.workers,
        False,
    )
    for _, batch in EvalLoader(split, preprocess, workers).iterate_batches(evaluation_settings.batch_size):
        for image in batch:
            if isinstance(image, DataError):
                if evaluation_settings.bad_images == "stop":
                    raise image
            else:
                images.append(image)
        if len(images) >= IMAGE_CHUNK:
            yield torch.stack(images).movedim(1, -1).numpy()
            images, has_yielded = [], True
    if images:
        yield torch.stack(images).movedim(1, -1).numpy()
    elif not has_yielded:
        raise DataError("no image of the split can be read", "run `vitreous data check` to list the errors")


def compute_space_features(
    split: Split, preprocess: Preprocess, space: FeatureSpace, evaluation_settings: EvaluationSettings
) -> SpaceFeatures:
    """Compute the features of the images of a split."""
    return concatenate_features(
        [space.features(images) for images in iterate_split_images(split, preprocess, evaluation_settings)]
    )


def generate_images(
    sampler: ImageSampler, classes: int, options: GenerationOptions, evaluation_settings: EvaluationSettings
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield class indices (n,) int64 and generated images of these classes, (n, H, W, C) uint8 or latents.

    The indices cycle through the classes. Images are yielded in chunks of `IMAGE_CHUNK`.
    """
    labels, image_numbers = torch.tensor(cycle_classes(options.samples, classes)).unbind(1)
    report_images, done = make_progress_counter(evaluation_settings.listener, "sample", options.samples), 0.0

    def advance_progress(images: float) -> None:
        nonlocal done
        previous, done = int(done + 1e-6), done + images
        report_images(int(done + 1e-6) - previous)

    for chunk_labels, chunk_numbers in zip(labels.split(IMAGE_CHUNK), image_numbers.split(IMAGE_CHUNK), strict=True):
        yield (
            chunk_labels.numpy(),
            sampler.sample(chunk_labels, chunk_numbers, options, advance_progress).movedim(1, -1).numpy(),
        )


def concatenate_features(chunks: Iterable[SpaceFeatures]) -> SpaceFeatures:
    """Concatenate the features of chunks of images."""
    chunks = list(chunks)
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in (chunks[0] if chunks else {})}


def write_run_samples(folder: RunFolder, listener: ProgressListener) -> None:
    """Generate images with a complete run, and write them to samples.png. A failure is logged and not raised.

    Images: one row of `SHOWN_SAMPLES` per class of `choose_shown_classes`. Clips: `SHOWN_SAMPLES` in total, one row
    of frames each.
    """
    try:
        bundle = open_generator(folder.path)
        classes = choose_shown_classes(len(bundle.task.classes))
        is_animated, frames = bundle.preprocess.is_animated, bundle.preprocess.frames
        count, columns = (SHOWN_SAMPLES // len(classes), frames) if is_animated else (SHOWN_SAMPLES, SHOWN_SAMPLES)
        labels, image_numbers = (
            torch.from_numpy(classes).repeat_interleave(count),
            torch.arange(count).repeat(len(classes)),
        )
        images = (
            build_sampler(bundle)
            .sample(labels, image_numbers, SamplingOptions(guidance=SHOWN_GUIDANCE))
            .movedim(1, -1)
            .numpy()
        )
        grid = arrange_image_grid(
            enlarge_small_images([frame for image in images for frame in array_to_frames(image)]), columns
        )
        with atomic_path(folder.path / SAMPLES_FILE) as temporary:
            grid.save(temporary, "PNG")
    except (OSError, VitreousError) as error:
        listener.note(f"no {SAMPLES_FILE}: {error}")
