"""Definition of a study: a question, its runs at three scales, and the published results.

A study file has one `Study`, or several that share runs. A study is a table: a cell is a position on its axes, with the
options of `train` for its runs. Therefore `vitreous train` can reproduce each run. The result of a run is its primary
validation metric, another validation metric, or the result of a `Measure`. Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vitreous.progress import NullListener, ProgressListener
from vitreous.recipes.options import TrainOptions

ScaleName = Literal["small", "gpu", "published"]
AxisValues = tuple[str, ...]  # the position of a cell: its value on each axis of the table
#: labels of the metrics that studies measure
STUDY_METRIC_LABELS = {
    "fewshot_top1": "few-shot top-1",
    "merged_top1": "top-1",
    "variance_share": "explained variance of filters",
    "position_contrast": "similarity within rows and columns minus elsewhere",
    "attention_distance": "attention distance (pixels)",
    "rollout_spread": "share of patches with half of the rollout",
    "norm_ratio": "largest / median norm of patch tokens",
    "fastest_rate": "images/s",
    "largest_batch": "largest batch (images)",
}
MAX_IMAGE_SIZE = 64  # larger images are downscaled to this size in pixels, except at the published scale


@dataclass(frozen=True)
class Scale:
    """The size of a study's runs: `steps` with batches of `batch_size` images, a ViT of `width` and `depth`, and
    `seeds` runs per cell.

    At the published scale, the recipe defines model and length, and `steps` is 0. `data` is the dataset in
    `recipes.recipe.REFERENCE_DATASETS` that cost estimates use without --data.
    """

    name: ScaleName
    about: str
    data: str
    width: int
    _: KW_ONLY
    depth: int
    steps: int
    batch_size: int
    seeds: int


SCALES: dict[str, Scale] = {
    "small": Scale(
        "small", "minutes on two cores", data="digits", width=64, depth=4, steps=400, batch_size=128, seeds=3
    ),
    "gpu": Scale("gpu", "an hour on one GPU", data="CIFAR-10", width=192, depth=9, steps=4000, batch_size=256, seeds=3),
    "published": Scale(
        "published", "as published", data="JFT-300M", width=768, depth=12, steps=0, batch_size=4096, seeds=1
    ),
}


@dataclass(frozen=True)
class OtherDataset:
    """A target dataset of a study: its name and group in the table, and its source in a form that `train` accepts."""

    name: str
    source: str
    group: str = ""


@dataclass(frozen=True)
class StudySetting:
    """Settings from which a study derives its cells: the scale, the image size in pixels, and the target datasets."""

    scale: Scale
    image_size: int
    other_datasets: tuple[OtherDataset, ...] = ()

    @property
    def patch(self) -> int:
        """Return the patch size that gives about 16 to 64 tokens."""
        return 2 if self.image_size <= 16 else 4 if self.image_size <= 32 else 8

    @property
    def recipe(self) -> str:
        """Return the recipe for small images. Fine-tuned cells set it, since they would otherwise use the recipe of
        their initial weights."""
        return "digits" if self.image_size <= 8 else "small"

    def format_vit_name(self, width: int = 0, depth: int = 0, patch: int = 0) -> str:
        """Return the name of the scale's ViT, with another width, depth or patch size if it is not 0."""
        scale = self.scale
        return f"ViT-{width or scale.width}x{depth or scale.depth}/{patch or self.patch}"

    def options(self, published: TrainOptions, **changes: Any) -> TrainOptions:
        """Return the training options of the scale or, at the published scale, `published`, updated with `changes`."""
        if self.scale.name == "published":
            return update_options(published, **changes)
        image_size = MAX_IMAGE_SIZE if self.image_size > MAX_IMAGE_SIZE else None
        scale_options = TrainOptions(
            model=self.format_vit_name(),
            steps=self.scale.steps,
            batch_size=self.scale.batch_size,
            image_size=image_size,
        )
        return update_options(scale_options, **changes)


def update_options(options: TrainOptions, **changes: Any) -> TrainOptions:
    """Return a copy of training options with changed fields. `settings`, {path: words}, are added to the existing
    settings."""
    settings = options.settings | {path: text.split() for path, text in changes.pop("settings", {}).items()}
    return replace(options, **changes, settings=settings)


@dataclass(frozen=True)
class StudyCell:
    """A cell of a study's table: its position on the axes, and the options of its runs, one run per seed. Cells without
    `axis_values` are not in the table.

    `share` is the fraction of the training images; a larger fraction contains a smaller one. `parents` are prerequisite
    cells, by the option or settings path that receives the folder of their run with the same seed. `parent_overrides`
    are changes of options for runs that start from prerequisites. `data` is a dataset other than the study's.
    """

    axis_values: AxisValues
    options: TrainOptions
    share: float = 1.0
    parents: dict[str, StudyCell] = field(default_factory=dict)
    _: KW_ONLY
    parent_overrides: dict[str, Any] = field(default_factory=dict)
    data: str = ""

    @property
    def depth(self) -> int:
        """Return the length of the longest chain of prerequisites; 0 without any."""
        return 1 + max((cell.depth for cell in self.parents.values()), default=-1)


@dataclass(frozen=True)
class Chart:
    """The figure of a table: means against `x`, an axis or a measured quantity, with one curve per value of the axes
    `series`. Without `x`, it has one line per row, with mean and interval."""

    x: str = ""
    series: str | tuple[str, ...] = ""
    logarithmic: bool = False
    logarithmic_y: bool = False


@dataclass(frozen=True)
class MeasuredRun:
    """A run to be measured: its folder (None for an untrained model), settings (`training.run.Run`) and seed, the
    study's target datasets, and the folder for its figures (`album`)."""

    folder: Path | None
    run: Any
    seed: int
    other_datasets: tuple[OtherDataset, ...]
    _: KW_ONLY
    album: Path
    device: str = "auto"
    precision: Any = "auto"
    listener: ProgressListener = field(default_factory=NullListener)

    @property
    def trained_run_folder(self) -> Path:
        """Return the folder of the run. Raises ValueError for an untrained model."""
        if self.folder is None:
            raise ValueError("an untrained model has no run folder")
        return self.folder


@dataclass(frozen=True)
class Measurement:
    """A measured value of a run: its position on the additional axes of the table, its value or None, and quantities
    that a chart may use as x."""

    axis_values: AxisValues
    value: float | None
    measurements: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """A measurement of each run that replaces the validation metric in the table: `metric` is its key, and `better` is
    whether higher or lower is better. `needs_training` is False if it measures randomly initialised models."""

    metric: str
    measure_run: Callable[[MeasuredRun], list[Measurement]]
    better: Literal["higher", "lower"] = "higher"
    needs_training: bool = True


@dataclass(frozen=True)
class Conclusion:
    """Conclusions from a study's table: sentences, another table, and curves for the figure by name, each with points
    (x, value)."""

    title: str
    sentences: tuple[str, ...]
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    _: KW_ONLY
    curves: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Published:
    """Published values by cell, as printed in the paper, and a description of their conditions."""

    description: str
    values: dict[AxisValues, str]


@dataclass(frozen=True)
class Study:
    """A table or figure of a paper: the question, the runs, and their evaluation.

    `cells` returns the cells for a setting. `reference` is the cell that others are compared with, or a function from a
    cell to its reference. `differs` describes the differences from the published runs. `run_measure` measures each run;
    without it, the result is the primary validation metric, or the metric with the key `metric`. `conclude` draws
    conclusions from the rows (`tables.TableRow`). `other_data_kind` is `sets` if the study needs target datasets, and
    `groups` if it needs folders of them, one per group.
    """

    name: str
    title: str
    question: str
    source: str
    _: KW_ONLY
    axes: tuple[str, ...]
    cells: Callable[[StudySetting], tuple[StudyCell, ...]]
    reference: AxisValues | Callable[[AxisValues], AxisValues]
    published: Published
    differs: str
    chart: Chart = Chart()
    run_measure: Measure | None = None
    metric: str = ""
    conclude: Callable[[Sequence[Any]], Conclusion] | None = None
    other_data_kind: Literal["", "sets", "groups"] = ""

    @property
    def series(self) -> tuple[str, ...]:
        """Return the axes for which the figure has one curve per value."""
        series = self.chart.series
        return series if isinstance(series, tuple) else (series,) if series else ()

    @property
    def trains_models(self) -> bool:
        """Return whether the study trains models. Otherwise, it measures randomly initialised models."""
        return self.run_measure is None or self.run_measure.needs_training

    def get_reference(self, axis_values: AxisValues) -> AxisValues:
        """Return the reference cell that a cell is compared with."""
        return self.reference(axis_values) if callable(self.reference) else self.reference


def order_with_parents(cells: tuple[StudyCell, ...]) -> list[StudyCell]:
    """Return cells and their prerequisites, each once, with prerequisites first."""
    ordered: list[StudyCell] = []

    def visit(cell: StudyCell) -> None:
        """Append a cell after its prerequisites."""
        for parent in cell.parents.values():
            visit(parent)
        if cell not in ordered:
            ordered.append(cell)

    for cell in cells:
        visit(cell)
    return sorted(ordered, key=lambda cell: cell.depth)


def list_table_cells(cells: tuple[StudyCell, ...]) -> Iterator[AxisValues]:
    """Yield the positions of the cells that are in the table."""
    return (cell.axis_values for cell in cells if cell.axis_values)
