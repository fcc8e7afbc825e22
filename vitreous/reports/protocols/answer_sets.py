"""The protocols `real` and `objectnet`: a model with ImageNet's head, judged by files of right answers."""

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

from vitreous.data.decoding.decode import decode, read_regular
from vitreous.data.layouts.imagenet import is_ilsvrc2012, torchvision_names
from vitreous.data.loader import EvalLoader
from vitreous.data.screen import readable, stop_at_unreadable
from vitreous.data.split import Split
from vitreous.errors import DataError, UsageError, printable
from vitreous.inference.engine import logits_of, make_engine, readable_mask
from vitreous.reports.answers import progress_counter
from vitreous.reports.protocols.task import ProtocolResult, ProtocolTask
from vitreous.system.cores import default_workers
from vitreous.tasks.classification_metrics import judge_answer_sets

IMAGENET = 1_000
NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
AGREE = 0.9  # share of names that a head's have to share with torchvision's, in their order
RED = (255, 0, 0)
REAL = "real.json of github.com/google-research/reassessed-imagenet: a list of 50,000 lists of numbers below 1,000"
MAP = (
    'expected {"class": number or [numbers], …} in JSON, or rows of class,number in CSV; '
    "numbers are ImageNet's, below 1,000"
)


def real(task: ProtocolTask) -> ProtocolResult:
    """Judge by ImageNet ReaL's label sets, one or more of the 1,000 classes an image; images without any are left out.

    Raises DataError for images that are not ImageNet's validation images, or that no label fits.
    """
    path, order = labels_file(task), imagenet_order(task.run, task.bundle.classes)
    answers, split = read_real(path), task.judged
    matches = [NUMBER.search(os.path.basename(split.name(sample))) for sample in range(len(split))]
    if not all(matches):
        hint = "ReaL's labels are in the order of ILSVRC2012_val_00000001.JPEG, …: judge images with those names"
        raise DataError(f"{split.name(matches.index(None))} is no validation image of ImageNet", hint)
    numbers = [int(match[1]) for match in matches if match]
    if not 0 < min(numbers) <= max(numbers) <= len(answers):
        images = f"images {min(numbers)} to {max(numbers)}"
        raise DataError(f"{images} are not all among the {len(answers)} of {printable(path)}", REAL)
    right = answer_table([answers[number - 1] for number in numbers], order)
    if not right.any():
        raise DataError(f"no image of {task.source} has a label in {printable(path)}", REAL)
    scores, right, good = answer_images(task, split, right)
    report, extra = judge_answer_sets(scores, right, good), {"images_without_label": len(split) - len(right)}
    return ProtocolResult(report, [report.summary()], {"labels": os.fspath(path), **extra})


def objectnet(task: ProtocolTask) -> ProtocolResult:
    """Judge by ObjectNet (Barbu et al., 2019): its classes that ImageNet has too, each one or several of the 1,000.

    The headline takes the answer among all 1,000 classes, as the data set's authors, BiT and the paper do; the figures
    `mapped` choose among mapped classes alone. The red frame of the published images is cut off. Raises UsageError for
    several labels an image, DataError where the map names none of the classes.
    """
    path, order = labels_file(task), imagenet_order(task.run, task.bundle.classes)
    task.require_one_label("", "ObjectNet has one")
    known = {normalise_name(name): numbers for name, numbers in read_map(path).items()}
    of_class = [known.get(normalise_name(name), []) for name in task.data.classes]
    right = answer_table(of_class, order)[task.judged.labels]
    if not right.any():
        hint = f"they are called {', '.join(task.data.classes[:5])}, …"
        raise DataError(f"{printable(path)} names none of the classes of {task.source} that have images", hint)
    scores, right, good = answer_images(task, Unframed(task.judged), right)
    report = judge_answer_sets(scores, right, good)
    chosen = np.where(answer_table(of_class, order).any(0), scores, -np.inf)
    figures = [
        {"among": "all", **report.summary()},
        {"among": "mapped", **judge_answer_sets(chosen, right, good).summary()},
    ]
    extra = {
        "labels": os.fspath(path),
        "classes_mapped": sum(map(bool, of_class)),
        "images_not_mapped": len(task.judged) - len(right),
    }
    return ProtocolResult(report, figures, extra)


ANSWER_SETS = {"real": real, "objectnet": objectnet}


def answer_images(task: ProtocolTask, split: Split, right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits (m, 1000) of images with a right answer, those answers (m, 1000), and which are readable (m,)."""
    rows, s = np.flatnonzero(right.any(1)), task.computing
    judged = split.take(rows)
    engine = make_engine(task.bundle.model, task.bundle.preprocess, s.how)
    reader = EvalLoader(judged, task.bundle.preprocess, default_workers() if s.workers is None else s.workers)
    logits, bad = logits_of(engine, reader, s.batch_size, progress_counter(s.listener, "evaluate", len(rows)))
    stop_at_unreadable(bad, len(rows), s.bad_images)
    readable(judged, bad)  # there must be some
    return logits, right[rows], readable_mask(len(rows), bad)


def answer_table(sets: Sequence[Sequence[int]], order: np.ndarray) -> np.ndarray:
    """Sets of ImageNet's class numbers -> (n, 1000) bool at the model's positions of them."""
    right = np.zeros((len(sets), IMAGENET), dtype=bool)
    for row, numbers in enumerate(sets):
        right[row, order[list(numbers)]] = True
    return right


def imagenet_order(run: str, classes: tuple[str, ...]) -> np.ndarray:
    """Return the position of each of ImageNet's 1,000 classes among a model's, (1000,) int64.

    Its classes are numbers in ImageNet's order; synsets in any order; or names, nine in ten of which are torchvision's.
    Raises UsageError for a model with other classes.
    """
    if len(classes) == IMAGENET:
        if classes == tuple(map(str, range(IMAGENET))):
            return np.arange(IMAGENET)
        if is_ilsvrc2012(tuple(sorted(classes))):
            return np.argsort(np.array(classes), kind="stable")
        same = [first_name(own) == first_name(name) for own, name in zip(classes, torchvision_names(), strict=True)]
        if np.mean(same) >= AGREE:
            return np.arange(IMAGENET)
    problem = f"{run} does not answer with the 1,000 classes of ImageNet"
    raise UsageError(problem, "ReaL and ObjectNet are for models with that head")


def first_name(title: str) -> str:
    """Return the first name of a class: `tench` of `tench, Tinca tinca`."""
    return title.split(",")[0].strip().casefold()


def normalise_name(name: str) -> str:
    """Normalise how a class is written: `Alarm clock` and `alarm_clock` are the same."""
    return re.sub(r"[^a-z0-9]+", "_", name.casefold()).strip("_")


def labels_file(task: ProtocolTask) -> Path:
    """Return the file of --labels. Raises UsageError where none is named."""
    if not task.options.labels:
        hint = REAL if task.options.protocol == "real" else MAP
        raise UsageError(f"--protocol {task.options.protocol} needs --labels FILE", hint)
    return Path(task.options.labels)


def read_real(path: Path) -> list[list[int]]:
    """Read ReaL's label sets, in the order of the validation images. Raises DataError for anything else."""
    answers = read_json(path, REAL)
    if not isinstance(answers, list) or not answers:
        raise DataError(f"{printable(path)} is no list of lists", REAL)
    for number, labels in enumerate(answers, 1):
        if not isinstance(labels, list) or not all(is_class(label) for label in labels):
            raise DataError(f"{printable(path)}: the labels of image {number} are {str(labels)[:80]}", REAL)
    return answers


def read_map(path: Path) -> dict[str, list[int]]:
    """Read class -> ImageNet's numbers from JSON or CSV, whose rows may repeat a class. Raises DataError for others."""
    numbers_of: dict[str, list[int]] = {}
    if path.suffix.lower() == ".json":
        document = read_json(path, MAP)
        if not isinstance(document, dict):
            raise DataError(f"{printable(path)} has no classes", MAP)
        for name, numbers in document.items():
            numbers_of[name] = numbers if isinstance(numbers, list) else [numbers]
            if not all(is_class(number) for number in numbers_of[name]):
                raise DataError(f"{printable(path)}: {printable(name)} is {str(numbers)[:80]}", MAP)
        return numbers_of
    for line, row in enumerate(csv.reader(io.StringIO(read_utf8(path))), 1):
        if not row or (line == 1 and len(row) == 2 and not row[1].strip().isdecimal()):  # a head
            continue
        if len(row) != 2 or not row[1].strip().isdecimal() or not is_class(int(row[1])):
            raise DataError(f"{printable(path)}, line {line}: {printable(','.join(row)[:80])}", MAP)
        numbers_of.setdefault(row[0], []).append(int(row[1]))
    return numbers_of


def is_class(number: Any) -> bool:
    """Tell whether it is a number of ImageNet's classes."""
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < IMAGENET


def read_json(path: Path, hint: str) -> Any:
    """Parse a JSON file. Raises DataError for what is none."""
    try:
        return json.loads(read_utf8(path))
    except ValueError as error:
        raise DataError(f"{printable(path)} is no JSON ({error})", hint) from None


def read_utf8(path: Path) -> str:
    """Read a text file. Raises DataError if it is not UTF-8."""
    try:
        return read_regular(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{printable(path)}: not UTF-8", "save it as UTF-8") from None


@dataclass(frozen=True)
class Unframed:
    """A split whose images lose a frame of one pure red pixel: ObjectNet's, (H, W, 3) -> (H - 2, W - 2, 3).

    The labels are (n,), those of the split.
    """

    split: Split

    @property
    def labels(self) -> np.ndarray:
        """Those of the split."""
        return self.split.labels

    def __len__(self) -> int:
        return len(self.split)

    def raw(self, sample: int) -> bytes | np.ndarray:
        """Return what is stored, or the pixels within the frame. Raises DataError if it cannot be decoded."""
        stored = self.split.raw(sample)
        pixels = np.asarray(decode(stored, 3, self.name(sample)))
        sides = (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])
        framed = min(pixels.shape[:2]) > 2 and all((side == RED).all() for side in sides)
        return np.ascontiguousarray(pixels[1:-1, 1:-1]) if framed else stored

    def name(self, sample: int) -> str:
        return self.split.name(sample)

    def take(self, rows: np.ndarray, labels: np.ndarray | None = None) -> Unframed:
        return replace(self, split=self.split.take(rows, labels))

    def update(self, digest: Any) -> None:
        digest.update(b"unframed\n")
        self.split.update(digest)
