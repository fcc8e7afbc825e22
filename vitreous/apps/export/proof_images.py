"""Images on which an export is verified, and images for int8 calibration."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import numpy as np

from vitreous.data.keys import draw_permutation
from vitreous.data.layouts.video import open_sample
from vitreous.data.run_data import iterate_sample_images, open_run_data, open_training_data
from vitreous.data.split import Data
from vitreous.errors import DataError, UsageError
from vitreous.inference.class_maps import decode_item
from vitreous.inference.sources import Item, resolve_image_source
from vitreous.system.cores import default_worker_count
from vitreous.tasks.export_proof import VerificationImages
from vitreous.weights.bundle import Bundle

# images for the verification: fewer are not significant, more take long and add little
MIN_PROOF_IMAGES, MAX_PROOF_IMAGES = 8, 200
MAX_INT8_IMAGES = 128  # maximum images for int8 calibration
MORE_IMAGES_HINT = "add more images with --images"


def collect_verification_images(
    run: str | os.PathLike[str],
    bundle: Bundle,
    images: Sequence[str],
    data: str | os.PathLike[str] | None,
    calibrate: bool,
) -> tuple[VerificationImages, list[np.ndarray] | None]:
    """Collect the images for the verification: the files or folders `images`, the dataset `data`, or the run's
    validation images, or else its test images.

    With `calibrate`, also return normalised images for int8 calibration, (1, C, *image) float32 each. They are from the
    training split of the data or, without one, every second of `images`. Raises UsageError if there are no images,
    DataError if there are too few.
    """
    dataset = None
    if images:
        proof_images = load_verification_files(images, bundle)
    else:
        dataset, proof_images = load_verification_dataset(run, bundle, data)
    calibration = None
    if calibrate:
        if (train := open_training_data(run, dataset)) is not None:
            pixels = (tensor.numpy() for tensor in iterate_sample_images(train, bundle.preprocess))
        elif len(proof_images) < 2 * MIN_PROOF_IMAGES:
            requirement = (
                f"int8 needs {MIN_PROOF_IMAGES} for calibration and {MIN_PROOF_IMAGES} others for verification"
            )
            raise DataError(f"{proof_images.name} has {len(proof_images)} images: {requirement}", MORE_IMAGES_HINT)
        else:
            pixels, proof_images = (
                iter(proof_images.take(slice(0, None, 2)).pixels),
                proof_images.take(slice(1, None, 2)),
            )
        calibration = [bundle.preprocess.normalise_array(image[None]) for image in islice(pixels, MAX_INT8_IMAGES)]
        if len(calibration) < MIN_PROOF_IMAGES:
            raise DataError(
                f"int8 calibration needs at least {MIN_PROOF_IMAGES} images, and there are {len(calibration)}",
                MORE_IMAGES_HINT,
            )
    if len(proof_images) < MIN_PROOF_IMAGES:
        raise DataError(
            (
                f"verification of an export needs at least {MIN_PROOF_IMAGES} images; "
                f"{proof_images.name} has {len(proof_images)}"
            ),
            MORE_IMAGES_HINT,
        )
    return proof_images, calibration


def prepare_item(bundle: Bundle, item: Item) -> np.ndarray:
    """Preprocess an item to the (C, *image) input of the exported file. Raises DataError with the item's name if it
    cannot be decoded."""
    return bundle.task.prepare_input(decode_item(bundle.preprocess, item), bundle.preprocess)


def load_verification_files(images: Sequence[str], bundle: Bundle) -> VerificationImages:
    """Load the verification images from files and folders: all, or a fixed random subset of `2 * MAX_PROOF_IMAGES`.
    Raises DataError for a file that cannot be read."""
    items = list(resolve_image_source(images, preprocess=bundle.preprocess))
    indices = sorted(draw_permutation(len(items), 0, 0)[: 2 * MAX_PROOF_IMAGES].tolist())
    with ThreadPoolExecutor(default_worker_count()) as pool:
        pixels = list(pool.map(partial(prepare_item, bundle), [items[index] for index in indices]))
    name = f"{len(pixels)} of {len(items)} files" if len(pixels) < len(items) else "the files of --images"
    return VerificationImages(np.stack(pixels), None, name)


def load_verification_dataset(
    run: str | os.PathLike[str], bundle: Bundle, data: str | os.PathLike[str] | None
) -> tuple[Data, VerificationImages]:
    """Load verification images from a dataset, by default the run's. If the model has classes, also load their labels.

    Returns the dataset and the images. Raises UsageError without a dataset, DataError if no image can be read.
    """
    try:
        source, dataset = open_run_data(
            run, data, "test", labelled=bool(bundle.task.outputs), targets=bundle.task.label_columns
        )
    except (UsageError, DataError) as error:
        if data is not None:
            raise
        message = f"no images to verify the export on: {error.message}"
        raise UsageError(message, "add --images FOLDER, or --data DATA") from None
    name = next((name for name in ("val", "test") if name in dataset.splits), next(iter(dataset.splits)))
    split = dataset.splits[name]
    split = bundle.task.align_labels(split, dataset) if bundle.task.outputs else split
    preprocess, pixels, samples = bundle.preprocess, [], []
    for sample in draw_permutation(len(split), 0, 0)[: 4 * MAX_PROOF_IMAGES].tolist():
        try:
            image = preprocess.decode(open_sample(split, sample), split.name(sample))
            pixels.append(bundle.task.prepare_input(image, preprocess))
            samples.append(sample)
        except DataError:
            continue
        if len(samples) == MAX_PROOF_IMAGES:
            break
    if not samples:
        raise DataError(f"no image of {source} can be read", "use other images: --images FOLDER")
    labels = split.labels[samples] if bundle.task.outputs else None
    return dataset, VerificationImages(np.stack(pixels), labels, f"{source} ({name})")


def make_other_sizes(proof_images: VerificationImages, patch: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield the first verification images at two other sizes, (8, C, H, W): one patch lower and one wider; then two
    patches higher and one wider."""
    pixels = proof_images.pixels[:MIN_PROOF_IMAGES]
    native_size = pixels.shape[2:]
    for increments in ((-1, 1), (2, 1)):
        height, width = (
            max(2, length // p + increment) * p
            for length, p, increment in zip(native_size, patch, increments, strict=True)
        )
        pad = ((0, max(0, height - native_size[0])), (0, max(0, width - native_size[1])))
        yield np.pad(pixels, ((0, 0), (0, 0), *pad), mode="wrap")[:, :, :height, :width]
