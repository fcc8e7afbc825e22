"""Creation of a study's runs: a `Run` from each cell's options and the data, and its folder, which studies share."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.apps.studies.study import StudyCell, update_options
from vitreous.config import to_yaml
from vitreous.data.sources import open_data
from vitreous.data.split import Data, Split, require_labels
from vitreous.errors import UsageError
from vitreous.jobs.data import prepare_data, screen_inputs
from vitreous.jobs.derive_run import count_scan_workers, derive_run
from vitreous.progress import NullListener, ProgressListener
from vitreous.recipes.channels import infer_dataset_info
from vitreous.recipes.options import INIT_FROM_SCRATCH, TrainOptions
from vitreous.reports.readings import slugify_name
from vitreous.system.disk import write_text_atomic
from vitreous.system.tables import escape_formula, format_csv
from vitreous.training.batches import RunInputs
from vitreous.training.folder import RunFolder
from vitreous.training.run import Run

MIN_RUN_STEPS = 10  # minimum steps of a run that is shortened to fit a budget
DIGITS_HOLD_OUT = "0.3"  # validation share of `digits`; 10 % is 180 images, too few to detect small differences
MAX_EVALUATION_SHARE = 0.25  # maximum number of evaluated images during a run, relative to training images seen
#: settings that do not change the metrics, with the values that a run's key uses
RESULT_NEUTRAL_FIELDS = {"timeout": 300.0, "log_every": 1, "evaluate_every": 1, "save_every": 1, "keep": 2}


@dataclass(frozen=True)
class SharedRunOptions:
    """Settings that all runs of a study share: the data, the folder for runs (`store`), the fraction of their steps
    that fits into the budget, and device, precision and workers."""

    data: str
    store: Path
    step_fraction: float = 1.0
    device: str | None = None
    _: KW_ONLY
    precision: str | None = None
    workers: int | None = None


@dataclass(frozen=True)
class StudyRun:
    """A run of a cell with a seed: its settings, images, dataset, and folder."""

    cell: StudyCell
    seed: int
    run: Run
    inputs: RunInputs
    _: KW_ONLY
    data: Data
    folder: RunFolder

    @property
    def is_complete(self) -> bool:
        """Return whether the run is complete. Another study may have trained it."""
        return self.folder.summary.is_file()


class RunFactory:
    """Create the runs of cells. A dataset is opened and scanned once per fraction of its images."""

    def __init__(self, shared_options: SharedRunOptions, listener: ProgressListener) -> None:
        self.common, self.listener = shared_options, OnceListener(listener)
        self._opened: dict[Any, tuple[Data, Run]] = {}
        self._inputs: dict[Any, tuple[RunInputs, int]] = {}

    def get_image_size(self) -> int:
        """Return the longer side of the dataset's images in pixels. Raises DataError for data without labels,
        UsageError for data other than images."""
        dataset = open_data(self.common.data)
        require_labels(dataset)
        size = infer_dataset_info(dataset, TrainOptions(self.common.data), None).size
        if len(size) != 2:
            raise UsageError(f"studies need images, but {self.common.data} has other data", "use a dataset of images")
        return max(size)

    def make_run(self, cell: StudyCell, seed: int, parents: dict[str, Path] | None = None) -> StudyRun:
        """Create the run of a cell with a seed. `parents` maps an option or a settings path to the folder of a
        prerequisite run.

        Without `parents`, a cell with prerequisites gets a run with the same length and cost, for estimates only.
        Raises the exceptions of `train` for incompatible options.
        """
        options = self.build_options(cell, parents or {})
        run, inputs, dataset = self.derive_inputs(options)
        if self.common.step_fraction < 1:
            steps = max(MIN_RUN_STEPS, int(run.steps * self.common.step_fraction))
            run, inputs, dataset = self.derive_inputs(replace(options, epochs=None, steps=steps))
        if options.evaluate_every is None:
            run = limit_evaluations(run, len(dataset.splits.get("val", ())))
        run = replace(run, seed=seed)
        return StudyRun(
            cell, seed, run=run, inputs=inputs, data=dataset, folder=self.make_folder(run, Path(cell.data).name)
        )

    def build_options(self, cell: StudyCell, parents: dict[str, Path]) -> TrainOptions:
        """Return the training options of a cell's runs. `parents` is that of `make_run`."""
        shared_options = self.common
        options = update_options(cell.options, **(cell.parent_overrides if parents else {}))
        options = replace(
            options,
            data=cell.data or shared_options.data,
            device=shared_options.device,
            precision=shared_options.precision,
            workers=shared_options.workers,
            init=options.init or INIT_FROM_SCRATCH,
        )
        if options.data == "digits":
            options = update_options(options, settings={"data.hold_out": DIGITS_HOLD_OUT})
        for path, folder in parents.items():
            if "." in path:
                options = replace(options, settings=options.settings | {path: [str(folder)]})
            else:
                options = replace(options, **{path: str(folder)})
        return replace(options, exclude=str(self.exclusions(options, cell.share))) if cell.share < 1 else options

    def derive_inputs(self, options: TrainOptions) -> tuple[Run, RunInputs, Data]:
        """Return the run of training options, its images, and the dataset. Datasets and images are cached."""
        images_key = options.data, options.exclude
        if images_key not in self._opened:
            dataset, run, inputs = prepare_data(options.data, None, options, self.listener)
            require_labels(dataset)
            self._opened[images_key] = dataset, run
            self._inputs[images_key, run.preprocess, run.data.cache] = inputs, run.data.images
            return run, inputs, dataset
        dataset, opened_run = self._opened[images_key]
        split = {
            name: getattr(opened_run.data, name)
            for name in ("split_seed", "hold_out", "group_by", "axes", "exclude", "ignore_index")
        }
        run = derive_run(dataset, options, split, self.listener, None)
        cache_key = images_key, run.preprocess, run.data.cache
        if cache_key not in self._inputs:
            run, inputs = screen_inputs(dataset, run, count_scan_workers(dataset, options), self.listener)
            self._inputs[cache_key] = inputs, run.data.images
        inputs, images = self._inputs[cache_key]
        return replace(run, data=replace(run.data, images=images)), inputs, dataset

    def exclusions(self, options: TrainOptions, share: float) -> Path:
        """Write the list of the training images outside of the fraction `share`, for the option `exclude`, and return
        its path."""
        train_split = self.derive_inputs(replace(options, exclude=None))[2].split("train")
        names = (train_split.name(sample) for sample in select_excluded_samples(train_split, share))
        text = format_csv([["path"], *([escape_formula(name)] for name in names)])
        path = self.common.store.absolute() / f"share-{share:g}-{short_sha256(text)}.csv"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(path, text, "surrogateescape")
        return path

    def make_folder(self, run: Run, dataset_name: str = "") -> RunFolder:
        """Return the folder of a run. Its name contains the model and a digest of the settings, the data's fingerprint,
        and `dataset_name`."""
        return RunFolder(
            self.common.store
            / f"{slugify_name(run.model.name())}-{compute_run_key(run, self.common.store, dataset_name)}"
        )


def limit_evaluations(run: Run, images: int) -> Run:
    """Return a run with fewer evaluations, if evaluating `images` images would take long compared with training. The
    table uses the last evaluation. Runs that select weights by evaluation are unchanged."""
    if run.keep_best or run.early_stop or not images:
        return run
    count = int(MAX_EVALUATION_SHARE * run.total / images)
    return replace(run, evaluate_every=max(run.evaluate_every, math.ceil(run.steps / (count + 1))))


def compute_run_key(run: Run, store: Path, dataset_name: str = "") -> str:
    """Return a digest of a run's settings and its data's fingerprint, independent of the paths of data and store.

    A fingerprint covers only file names. Therefore `dataset_name` distinguishes datasets with equal file names.
    """
    data = replace(run.data, source="", workers=0)
    text = to_yaml(replace(run, data=data, **RESULT_NEUTRAL_FIELDS))
    return short_sha256(dataset_name + text.replace(f"{os.path.abspath(store)}/", "").replace(f"{store}/", ""))


def short_sha256(text: str) -> str:
    """Return the first twelve hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def select_excluded_samples(split: Split, share: float) -> np.ndarray:
    """Return the samples to leave out, sorted (m,) int64, so that the fraction `share` of each class is kept. At least
    one sample per class is kept, and a larger fraction keeps all samples of a smaller one. Multi-label data are treated
    as one class."""
    labels = split.labels if split.labels.ndim == 1 else np.zeros(len(split), np.int64)
    order, excluded = np.random.default_rng(0).permutation(len(split)), []
    for label in np.unique(labels):
        class_samples = order[labels[order] == label]
        excluded.append(class_samples[max(1, round(share * len(class_samples))) :])
    return np.sort(np.concatenate(excluded))


class OnceListener(NullListener):
    """A listener that forwards each note only once."""

    def __init__(self, listener: ProgressListener) -> None:
        self.listener = listener
        self.seen_texts: set[str] = set()

    def note(self, text: str) -> None:
        """Forward a note, unless it was forwarded before."""
        if text not in self.seen_texts:
            self.seen_texts.add(text)
            self.listener.note(text)

    def progress(self, label: str, done: int, total: int | None, text: str = "") -> None:
        """Forward all progress reports."""
        self.listener.progress(label, done, total, text)
