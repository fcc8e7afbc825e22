"""Definition of a study: a question, its runs at three scales, and the published results.

A study is one file with one `Study` or a few that share runs. It trains nothing itself: its cells are options of
`train`, so that each of its runs is one that `vitreous train` makes too. What is read of a run is the figure that it
leads with, another one of its validation images, or what a `Measure` measures. Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vitreous.progress import NullListener, ProgressListener
from vitreous.recipes.options import TrainOptions

ScaleName = Literal["small", "gpu", "published"]
AxisValues = tuple[str, ...]  # a value on each axis of a table
#: names for people of the figures that studies measure
STUDY_METRIC_LABELS = {
    "fewshot_top1": "few-shot top-1",
    "merged_top1": "top-1",
    "variance_share": "share of the filters' variance",
    "position_contrast": "similarity within rows and columns, less elsewhere",
    "attention_distance": "attention distance, pixels",
    "rollout_spread": "share of the patches that hold half of the rollout",
    "norm_ratio": "largest norm of a patch token, of the median",
    "fastest_rate": "images/s",
    "largest_batch": "images in the largest batch",
}
MAX_IMAGE_SIZE = 64  # pixels: larger images are scaled to it, but at the published scale


@dataclass(frozen=True)
class Scale:
    """How large the runs of a study are: `steps` of `batch_size` images by a ViT of `width` and `depth`, on `seeds`.

    Of the published scale the model, the length and everything else are the recipe's, and `steps` is 0. `data`: a set
    of `recipes.recipe.REFERENCE_DATASETS`, by which the cost is counted where no data are named.
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
    """A further dataset of a study, as for `train`, with its name and group in the table."""

    name: str
    source: str
    group: str = ""


@dataclass(frozen=True)
class StudySetting:
    """Settings of a study's cells: the scale, the image size in pixels, and the other datasets."""

    scale: Scale
    side: int
    others: tuple[OtherDataset, ...] = ()

    @property
    def patch(self) -> int:
        """The side of a patch that gives about 16 to 64 tokens."""
        return 2 if self.side <= 16 else 4 if self.side <= 32 else 8

    @property
    def recipe(self) -> str:
        """The recipe of small images, for cells that would take another one from weights."""
        return "digits" if self.side <= 8 else "small"

    def vit(self, width: int = 0, depth: int = 0, patch: int = 0) -> str:
        """The name of the scale's ViT, or of one of another width, depth or patch."""
        scale = self.scale
        return f"ViT-{width or scale.width}x{depth or scale.depth}/{patch or self.patch}"

    def options(self, published: TrainOptions, **changes: Any) -> TrainOptions:
        """Options of the scale's runs, with changes; of the published scale those of `published`."""
        if self.scale.name == "published":
            return update_options(published, **changes)
        image_size = MAX_IMAGE_SIZE if self.side > MAX_IMAGE_SIZE else None
        scale_options = TrainOptions(
            model=self.vit(), steps=self.scale.steps, batch_size=self.scale.batch_size, image_size=image_size
        )
        return update_options(scale_options, **changes)


def update_options(options: TrainOptions, **changes: Any) -> TrainOptions:
    """Options with other values; `settings`, {path: words}, are added to those that there are."""
    settings = options.settings | {path: text.split() for path, text in changes.pop("settings", {}).items()}
    return replace(options, **changes, settings=settings)


@dataclass(frozen=True)
class StudyCell:
    """A cell of a table: its place on the axes, and the options of its runs, one run a seed.

    `share` of the training images are learned from, those of smaller shares among them. `after`: cells that are
    trained first, by the option or the path of a setting that is given the folder of their run of the same seed; `then`
    are further changes of the options that these allow. A cell without a place is in no table. `data`: another data
    set than the study's.
    """

    axis_values: AxisValues
    options: TrainOptions
    share: float = 1.0
    after: dict[str, StudyCell] = field(default_factory=dict)
    _: KW_ONLY
    then: dict[str, Any] = field(default_factory=dict)
    data: str = ""

    @property
    def level(self) -> int:
        """How many cells come before it, one after the other."""
        return 1 + max((cell.level for cell in self.after.values()), default=-1)


@dataclass(frozen=True)
class Chart:
    """How a figure shows the table: means against the axis, or the measured quantity, `x`, a line for each value of the
    axis `series`, or of several axes. Without `x` a row of dots with intervals."""

    x: str = ""
    series: str | tuple[str, ...] = ""
    logarithmic: bool = False
    logarithmic_y: bool = False


@dataclass(frozen=True)
class MeasuredRun:
    """A run to be measured: its folder, its settings (`training.run.Run`) and seed, the other data sets of the study,
    and a folder for what is drawn of it. Of a model that is not trained there is no folder."""

    folder: Path | None
    run: Any
    seed: int
    others: tuple[OtherDataset, ...]
    _: KW_ONLY
    album: Path
    device: str = "auto"
    precision: Any = "auto"
    listener: ProgressListener = field(default_factory=NullListener)

    @property
    def home(self) -> Path:
        """The folder of the run. Raises ValueError for a model that is not trained."""
        if self.folder is None:
            raise ValueError("the model is not trained, so that it has no folder")
        return self.folder


@dataclass(frozen=True)
class Measurement:
    """A figure of a run: what its place has beside that of the run's cell, its value, None where there is none, and
    quantities that a figure may have as its axis."""

    axis_values: AxisValues
    value: float | None
    measurements: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """What is measured of every run in place of the figure that it leads with, by the key of that figure and whether
    `higher` is better. `trained`: False for models as they are drawn, of which nothing is trained."""

    metric: str
    read: Callable[[MeasuredRun], list[Measurement]]
    better: Literal["higher", "lower"] = "higher"
    trained: bool = True


@dataclass(frozen=True)
class Conclusion:
    """What follows from a table: sentences, a table of its own, and curves over the figure by their names, each of
    points (x, value)."""

    title: str
    sentences: tuple[str, ...]
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    _: KW_ONLY
    curves: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Published:
    """Published numbers by their place in the table, as they were printed, and what they are of."""

    of: str
    values: dict[AxisValues, str]


@dataclass(frozen=True)
class Study:
    """A table or figure of a paper as a question, and how its runs answer it.

    `cells` gives the cells for a setting. `reference` is the place that others are compared with; a function of a place
    where it is not the same for all. `differs` says in what small runs differ from the published ones, and why.
    `measure`: what is measured of runs, `figure`: the key of another figure than the leading one, `conclude`: what
    follows from the rows (`tables.TableRow`). `others`: it needs other data sets; `groups` of them, each a folder.
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
    measure: Measure | None = None
    metric: str = ""
    conclude: Callable[[Sequence[Any]], Conclusion] | None = None
    others: Literal["", "sets", "groups"] = ""

    @property
    def series(self) -> tuple[str, ...]:
        """Return the axes with one line per value in the figure."""
        series = self.chart.series
        return series if isinstance(series, tuple) else (series,) if series else ()

    @property
    def trained(self) -> bool:
        """Return whether the models of the study are trained."""
        return self.measure is None or self.measure.trained

    def get_reference(self, axis_values: AxisValues) -> AxisValues:
        """Return the reference cell of a cell."""
        return self.reference(axis_values) if callable(self.reference) else self.reference


def order_with_parents(cells: tuple[StudyCell, ...]) -> list[StudyCell]:
    """Cells and all that are trained before them, each once, what comes first before what needs it."""
    ordered: list[StudyCell] = []

    def visit(cell: StudyCell) -> None:
        for parent in cell.after.values():
            visit(parent)
        if cell not in ordered:
            ordered.append(cell)

    for cell in cells:
        visit(cell)
    return sorted(ordered, key=lambda cell: cell.level)


def list_table_cells(cells: tuple[StudyCell, ...]) -> Iterator[AxisValues]:
    """The places of the cells that are in the table."""
    return (cell.axis_values for cell in cells if cell.axis_values)
