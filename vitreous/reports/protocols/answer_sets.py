"""The protocols `real` and `objectnet`: evaluate a model with an ImageNet head by the label sets of a file."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.decoding.decode import decode_to_pillow, read_input_file
from vitreous.data.layouts.imagenet import get_torchvision_names, is_ilsvrc2012
from vitreous.data.loader import EvalLoader
from vitreous.data.screen import check_unreadable_images, find_readable_samples
from vitreous.data.split import Split
from vitreous.errors import DataError, UsageError, escape_unprintable
from vitreous.inference.engine import build_readable_mask, compute_split_logits, make_engine
from vitreous.reports.answers import make_progress_counter
from vitreous.reports.protocols.task import ProtocolResult, ProtocolTask
from vitreous.system.cores import default_worker_count
from vitreous.tasks.classification_metrics import evaluate_label_sets

IMAGENET_CLASSES = 1_000
VALIDATION_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")
MIN_NAME_AGREEMENT = 0.9  # minimum share of a head's class names that must match torchvision's, in order
FRAME_COLOUR = (255, 0, 0)
REAL_FORMAT_HINT = (
    "use real.json of github.com/google-research/reassessed-imagenet: a list of 50,000 lists of numbers below 1,000"
)
OBJECTNET_FORMAT_HINT = (
    'expected {"class": number or [numbers], …} in JSON, or rows of class,number in CSV; '
    "numbers are ImageNet class indices, below 1,000"
)


def evaluate_imagenet_real(task: ProtocolTask) -> ProtocolResult:
    """Evaluate with ImageNet ReaL's label sets: a prediction is correct if it is one of the image's labels.

    Images without labels are skipped. Raises DataError for images that are not ImageNet's validation images, or that
    have no valid label.
    """
    path, order = get_labels_file(task), map_imagenet_classes(task.run, task.bundle.classes)
    label_sets, split = read_real_labels(path), task.evaluated_split
    matches = [VALIDATION_NAME.search(os.path.basename(split.name(sample))) for sample in range(len(split))]
    if not all(matches):
        hint = "ReaL's labels are in the order of ILSVRC2012_val_00000001.JPEG, …: use images with those names"
        raise DataError(f"{split.name(matches.index(None))} is not an ImageNet validation image", hint)
    image_numbers = [int(match[1]) for match in matches if match]
    if not 0 < min(image_numbers) <= max(image_numbers) <= len(label_sets):
        images = f"images {min(image_numbers)} to {max(image_numbers)}"
        raise DataError(
            f"{images} do not all have one of the {len(label_sets)} label sets of {escape_unprintable(path)}",
            REAL_FORMAT_HINT,
        )
    label_mask = build_label_mask([label_sets[image_number - 1] for image_number in image_numbers], order)
    if not label_mask.any():
        raise DataError(f"no image of {task.source} has a label in {escape_unprintable(path)}", REAL_FORMAT_HINT)
    scores, label_mask, is_readable = compute_labelled_logits(task, split, label_mask)
    report, extra = (
        evaluate_label_sets(scores, label_mask, is_readable),
        {"images_without_label": len(split) - len(label_mask)},
    )
    return ProtocolResult(report, [report.summary()], {"labels": os.fspath(path), **extra})


def evaluate_objectnet(task: ProtocolTask) -> ProtocolResult:
    """Evaluate on ObjectNet (Barbu et al., 2019): each class shared with ImageNet is mapped to one or more of the
    1,000.

    The headline metric uses the prediction among all 1,000 classes, as the dataset's authors, BiT and the ViT paper do;
    the `mapped` metrics use the prediction among mapped classes. The red frame of the images is cropped. Raises
    UsageError for multi-label data, DataError if the map contains none of the classes.
    """
    path, order = get_labels_file(task), map_imagenet_classes(task.run, task.bundle.classes)
    task.require_single_label("", "use ObjectNet, whose images have one label")
    class_map = {normalise_class_name(name): class_indices for name, class_indices in read_objectnet_map(path).items()}
    label_sets = [class_map.get(normalise_class_name(name), []) for name in task.data.classes]
    label_mask = build_label_mask(label_sets, order)[task.evaluated_split.labels]
    if not label_mask.any():
        hint = f"use a file with the classes of the data: {', '.join(task.data.classes[:5])}, …"
        raise DataError(f"{escape_unprintable(path)} contains no class of {task.source} that has images", hint)
    scores, label_mask, is_readable = compute_labelled_logits(task, UnframedSplit(task.evaluated_split), label_mask)
    report = evaluate_label_sets(scores, label_mask, is_readable)
    mapped_scores = np.where(build_label_mask(label_sets, order).any(0), scores, -np.inf)
    results = [
        {"candidate_classes": "all", **report.summary()},
        {"candidate_classes": "mapped", **evaluate_label_sets(mapped_scores, label_mask, is_readable).summary()},
    ]
    extra = {
        "labels": os.fspath(path),
        "classes_mapped": sum(map(bool, label_sets)),
        "images_not_mapped": len(task.evaluated_split) - len(label_mask),
    }
    return ProtocolResult(report, results, extra)


LABEL_SET_PROTOCOLS = {"real": evaluate_imagenet_real, "objectnet": evaluate_objectnet}


def compute_labelled_logits(
    task: ProtocolTask, split: Split, label_mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the logits of the m images that have a label in `label_mask` (n, 1000).

    Returns logits (m, 1000) float32, their rows of `label_mask` (m, 1000), and (m,) bool: whether each is readable.
    """
    labelled_samples, settings = np.flatnonzero(label_mask.any(1)), task.evaluation_settings
    labelled_split = split.take(labelled_samples)
    engine = make_engine(task.bundle.model, task.bundle.preprocess, settings.inference_options)
    loader = EvalLoader(
        labelled_split, task.bundle.preprocess, default_worker_count() if settings.workers is None else settings.workers
    )
    logits, read_errors = compute_split_logits(
        engine, loader, settings.batch_size, make_progress_counter(settings.listener, "evaluate", len(labelled_samples))
    )
    check_unreadable_images(read_errors, len(labelled_samples), settings.bad_images)
    find_readable_samples(labelled_split, read_errors)  # raises DataError if none is readable
    return logits, label_mask[labelled_samples], build_readable_mask(len(labelled_samples), read_errors)


def build_label_mask(label_sets: Sequence[Sequence[int]], order: np.ndarray) -> np.ndarray:
    """Convert n sets of ImageNet class indices to a mask (n, 1000) bool in the model's class order.

    `order` (1000,) is the index of each ImageNet class among the model's classes.
    """
    label_mask = np.zeros((len(label_sets), IMAGENET_CLASSES), dtype=bool)
    for index, class_indices in enumerate(label_sets):
        label_mask[index, order[list(class_indices)]] = True
    return label_mask


def map_imagenet_classes(run: str, classes: tuple[str, ...]) -> np.ndarray:
    """Return the index of each of ImageNet's 1,000 classes among a model's classes, (1000,) int64.

    The model's classes may be the numbers 0 to 999, synsets in any order, or names in ImageNet's order of which at
    least 90 % match torchvision's. Raises UsageError for a model with other classes.
    """
    if len(classes) == IMAGENET_CLASSES:
        if classes == tuple(map(str, range(IMAGENET_CLASSES))):
            return np.arange(IMAGENET_CLASSES)
        if is_ilsvrc2012(tuple(sorted(classes))):
            return np.argsort(np.array(classes), kind="stable")
        is_same_name = [
            get_first_name(model_class) == get_first_name(name)
            for model_class, name in zip(classes, get_torchvision_names(), strict=True)
        ]
        if np.mean(is_same_name) >= MIN_NAME_AGREEMENT:
            return np.arange(IMAGENET_CLASSES)
    problem = f"the classes of {run} are not the 1,000 classes of ImageNet"
    raise UsageError(problem, "use a model with an ImageNet head for ReaL and ObjectNet")


def get_first_name(title: str) -> str:
    """Return the first name of a class: `tench` of `tench, Tinca tinca`."""
    return title.split(",")[0].strip().casefold()


def normalise_class_name(name: str) -> str:
    """Convert a class name to lower case with underscores: `Alarm clock` -> `alarm_clock`."""
    return re.sub(r"[^a-z0-9]+", "_", name.casefold()).strip("_")


def get_labels_file(task: ProtocolTask) -> Path:
    """Return the path of --labels. Raises UsageError if it is not set."""
    if not task.options.labels:
        hint = REAL_FORMAT_HINT if task.options.protocol == "real" else OBJECTNET_FORMAT_HINT
        raise UsageError(f"--protocol {task.options.protocol} needs --labels FILE", hint)
    return Path(task.options.labels)


def read_real_labels(path: Path) -> list[list[int]]:
    """Read ReaL's label sets, lists of class indices in the order of the validation images. Raises DataError for
    invalid content."""
    label_sets = read_json_labels(path, REAL_FORMAT_HINT)
    if not isinstance(label_sets, list) or not label_sets:
        raise DataError(f"{escape_unprintable(path)} is not a list of lists", REAL_FORMAT_HINT)
    for image_number, labels in enumerate(label_sets, 1):
        if not isinstance(labels, list) or not all(is_imagenet_class(label) for label in labels):
            raise DataError(
                f"{escape_unprintable(path)}: the labels of image {image_number} are {str(labels)[:80]}",
                REAL_FORMAT_HINT,
            )
    return label_sets


def read_objectnet_map(path: Path) -> dict[str, list[int]]:
    """Read a map from class name to ImageNet class indices, as JSON or CSV; several CSV rows may have the same class.

    Raises DataError for invalid content.
    """
    indices_by_class: dict[str, list[int]] = {}
    if path.suffix.lower() == ".json":
        document = read_json_labels(path, OBJECTNET_FORMAT_HINT)
        if not isinstance(document, dict):
            raise DataError(f"{escape_unprintable(path)} has no classes", OBJECTNET_FORMAT_HINT)
        for name, class_indices in document.items():
            indices_by_class[name] = class_indices if isinstance(class_indices, list) else [class_indices]
            if not all(is_imagenet_class(class_index) for class_index in indices_by_class[name]):
                raise DataError(
                    f"{escape_unprintable(path)}: {escape_unprintable(name)} is {str(class_indices)[:80]}",
                    OBJECTNET_FORMAT_HINT,
                )
        return indices_by_class
    for line, row in enumerate(csv.reader(io.StringIO(read_utf8_file(path))), 1):
        if not row or (line == 1 and len(row) == 2 and not row[1].strip().isdecimal()):  # header
            continue
        if len(row) != 2 or not row[1].strip().isdecimal() or not is_imagenet_class(int(row[1])):
            raise DataError(
                f"{escape_unprintable(path)}, line {line}: {escape_unprintable(','.join(row)[:80])}",
                OBJECTNET_FORMAT_HINT,
            )
        indices_by_class.setdefault(row[0], []).append(int(row[1]))
    return indices_by_class


def is_imagenet_class(value: Any) -> bool:
    """Return whether a value is an integer from 0 to 999."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < IMAGENET_CLASSES


def read_json_labels(path: Path, hint: str) -> Any:
    """Parse a JSON file. Raises DataError with `hint` for invalid JSON."""
    try:
        return json.loads(read_utf8_file(path))
    except ValueError as error:
        raise DataError(f"{escape_unprintable(path)} is not valid JSON ({error})", hint) from None


def read_utf8_file(path: Path) -> str:
    """Read a text file. Raises DataError if it is not UTF-8."""
    try:
        return read_input_file(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{escape_unprintable(path)}: not UTF-8", "save it as UTF-8") from None


@dataclass(frozen=True)
class UnframedSplit:
    """A split of ObjectNet images without their one-pixel red frame, (H, W, 3) -> (H - 2, W - 2, 3).

    It wraps `split`, whose names and labels (n,) it has.
    """

    split: Split

    @property
    def labels(self) -> np.ndarray:
        """Return the labels of the split."""
        return self.split.labels

    def __len__(self) -> int:
        return len(self.split)

    def raw(self, sample: int) -> bytes | np.ndarray:
        """Return an image's pixels without the one-pixel red frame, or the stored image unchanged if it has no frame.
        Raises DataError if the image cannot be decoded."""
        stored = self.split.raw(sample)
        pixels = np.asarray(decode_to_pillow(stored, 3, self.name(sample)))
        borders = (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])
        has_frame = min(pixels.shape[:2]) > 2 and all((border == FRAME_COLOUR).all() for border in borders)
        return np.ascontiguousarray(pixels[1:-1, 1:-1]) if has_frame else stored

    def name(self, sample: int) -> str:
        """Return the sample's name in the wrapped split."""
        return self.split.name(sample)

    def take(self, indices: np.ndarray, labels: np.ndarray | None = None) -> UnframedSplit:
        """Return the samples at `indices` as a new split, with other labels if `labels` are passed."""
        return replace(self, split=self.split.take(indices, labels))

    def update(self, digest: Any) -> None:
        """Add the content of the split to a hash."""
        digest.update(b"unframed\n")
        self.split.update(digest)
