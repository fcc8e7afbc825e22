"""Open datasets for a trained model: the data of its run, opened with the run's options, or other data for
evaluation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torch import Tensor

from vitreous.config import from_builtins, read_yaml
from vitreous.data.annotations.target import get_sample_noun
from vitreous.data.keys import draw_permutation
from vitreous.data.layouts.video import open_sample
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.table import AnyPreprocess
from vitreous.data.options import DataOptions
from vitreous.data.sources import open_data, open_run_source
from vitreous.data.split import Data, require_labels
from vitreous.errors import DataError, ResourceError, UsageError


def open_run_data(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    split: str | None,
    labelled: bool = True,
    stills: bool = False,
    preprocess: Preprocess | None = None,
    targets: tuple[str, ...] = (),
) -> tuple[str, Data]:
    """Open the dataset for evaluating a run: `data`, or the run's data with the run's splits. Returns its name and the
    dataset.

    If `data` has no predefined splits, all its images form the test split, unless `split` selects another. `targets`
    are the columns whose values are the labels, by default those of the run. Files are opened as volumes or signals if
    `preprocess` (default: the run's) requires it. `stills` as in `open_data`. Raises UsageError if `run` is a bundle
    without a run and there is no `data`. Raises DataError for data without labels if `labelled`.
    """
    source, config = os.fspath(data) if data is not None else None, Path(run) / "config.yaml"
    split_seed, share, group_by, axes, ignore_index = 0, None, None, None, None
    if config.is_file():
        trained, preprocess = read_run_data(config, preprocess)
        source, split_seed = source or trained.source, trained.split_seed
        run_split = (trained.hold_out, trained.group_by, trained.axes)
        share, group_by, axes = run_split if data is None else (None, None, None)
        ignore_index, targets = trained.ignore_index, targets or trained.targets
    if source is None:
        problem = f"{run} is a bundle without a run, so it has no evaluation data"
        raise UsageError(problem, "add the path of a dataset after it")
    dataset = (
        open_run_source(
            run,
            source,
            split_seed=split_seed,
            group_by=group_by,
            stills=stills,
            axes=axes,
            ignore_index=ignore_index,
            targets=targets,
        )
        if data is None
        else open_for_model(source, split_seed, preprocess, stills=stills, ignore_index=ignore_index, targets=targets)
    )
    if labelled:
        require_labels(dataset)
    dataset = dataset.with_holdout(share, split_seed)
    is_test_data = data is not None and dataset.unsplit and split in (None, "test")
    return source, as_test_split(dataset) if is_test_data else dataset


def read_run_data(config: Path, preprocess: Preprocess | None = None) -> tuple[DataOptions, Preprocess]:
    """Read the data options and the preprocessing in a run's config.yaml; `preprocess`, if passed, replaces the latter.
    Raises UsageError for a damaged file."""
    document = read_yaml(config.read_text("utf-8"))
    if not isinstance(document, dict) or not {"data", "preprocess"} <= set(document):
        raise UsageError(f"{config} has no data and preprocess sections", "restore the file")
    return from_builtins(DataOptions, document["data"]), preprocess or from_builtins(
        AnyPreprocess, document["preprocess"]
    )


def open_for_model(
    source: str,
    split_seed: int,
    preprocess: Preprocess | None,
    stills: bool = False,
    ignore_index: int | None = None,
    targets: tuple[str, ...] = (),
) -> Data:
    """Open a dataset for a model. Files that can be images, volumes or signals are opened as the input that
    `preprocess` requires. `stills`, `ignore_index` and `targets` as in `open_data`, as are the errors."""
    axes, data = preprocess.array_axes if preprocess is not None else None, None
    try:
        data = open_data(source, split_seed, stills=stills, ignore_index=ignore_index, targets=targets)
        if axes is None or get_sample_noun(next(iter(data.splits.values()))) != "images":
            return data
        return open_data(source, split_seed, axes=axes, ignore_index=ignore_index, targets=targets)
    except DataError:
        if data is not None:
            return data  # images, which a later check of the model's input rejects
        if axes is None:
            raise
    return open_data(source, split_seed, axes=axes, ignore_index=ignore_index, targets=targets)


def choose_split(data: Data, split: str | None, note: Callable[[str], None]) -> str:
    """Return the name of the split to evaluate: the requested `split`, else test, else val.

    The use of val instead of test is reported by `note`. Raises DataError, with the available splits, if the data have
    no such split.
    """
    if split is not None or "test" in data.splits or "val" not in data.splits:
        data.split(split or "test")
        return split or "test"
    origin_text = ", split from the training set" if data.unsplit else ""
    note(f"{data.name} has no test split: evaluated on its {len(data.splits['val'])} val images{origin_text}")
    return "val"


def iterate_sample_images(data: Data, preprocess: Preprocess) -> Iterator[Tensor]:
    """Yield readable images (C, *image) for int8 calibration, in a fixed random order: those of `train`, or of the
    first split if there is no `train`."""
    split = data.splits.get("train") or next(iter(data.splits.values()))
    for sample in draw_permutation(len(split), 0, 0):
        try:
            yield preprocess.to_tensor(preprocess.decode(open_sample(split, int(sample)), split.name(int(sample))))
        except DataError:
            continue


def open_training_data(run: str | os.PathLike[str], opened: Data | None = None) -> Data | None:
    """Return a dataset with a training split, for calibration: `opened`, or by default the run's dataset. Returns None
    if it cannot be opened, or has no training split next to another split."""
    if opened is None:
        try:
            opened = open_run_data(run, None, "test")[1]
        except (UsageError, DataError, ResourceError):
            return None
    return opened if "train" in opened.splits and len(opened.splits) > 1 else None


def iterate_calibration_images(
    run: str | os.PathLike[str], preprocess: Preprocess, fallback_images: Callable[[], Iterable[Tensor]]
) -> Iterator[Tensor]:
    """Yield images (C, *image) for int8 calibration: training images of the run, or those of `fallback_images()` if the
    run's data cannot be opened. Predictions thus do not depend on the evaluated data if possible."""
    data = open_training_data(run)
    yield from fallback_images() if data is None else iterate_sample_images(data, preprocess)


def as_test_split(data: Data) -> Data:
    """Return a dataset whose only split, `test`, has all images of `data`, a dataset without predefined splits."""
    splits = {"test": data.full_train_split or data.split("train")}
    return Data(data.name, data.classes, splits, titles=data.titles, frequency=data.frequency, targets=data.targets)
