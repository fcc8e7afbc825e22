"""What a study is: a question, the runs that answer it at three scales, and what was published.

A study is one file with one `Study`. It trains nothing itself: its cells are options of `train`, so that each of its
runs is one that `vitreous train` makes too. Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vitreous.recipes.options import TrainOptions

ScaleName = Literal["small", "gpu", "published"]
Place = tuple[str, ...]  # a value on each axis of a table
LARGE = 64  # pixels: larger pictures are scaled to it, but at the published scale


@dataclass(frozen=True)
class Scale:
    """How large the runs of a study are: `steps` of `batch_size` images by a ViT of `width` and `depth`, on `seeds`.

    Of the published scale the model, the length and everything else are the recipe's, and `steps` is 0. `data`: a set
    of `recipes.recipe.SETS`, by which the cost is counted where no data are named.
    """

    name: ScaleName
    about: str
    data: str
    width: int
    depth: int
    steps: int
    batch_size: int
    seeds: int


SCALES: dict[str, Scale] = {
    "small": Scale("small", "minutes on two cores", "digits", 64, 4, 400, 128, 3),
    "gpu": Scale("gpu", "an hour on one GPU", "CIFAR-10", 192, 9, 4000, 256, 3),
    "published": Scale("published", "as published", "JFT-300M", 768, 12, 0, 4096, 1),
}


@dataclass(frozen=True)
class Setting:
    """What a study's cells depend on: the scale, and the side of the images in pixels."""

    scale: Scale
    side: int

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
            return change(published, **changes)
        side = LARGE if self.side > LARGE else None
        own = TrainOptions(model=self.vit(), steps=self.scale.steps, batch_size=self.scale.batch_size, image_size=side)
        return change(own, **changes)


def change(options: TrainOptions, **changes: Any) -> TrainOptions:
    """Options with other values; `settings`, {path: words}, are added to those that there are."""
    settings = options.settings | {path: words.split() for path, words in changes.pop("settings", {}).items()}
    return replace(options, **changes, settings=settings)


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its place on the axes, and the options of its runs, one run a seed.

    `share` of the training images are learned from, those of smaller shares among them. `after`: cells that are
    trained first, by the option or the path of a setting that is given the folder of their run of the same seed; `then`
    are further changes of the options that these allow. A cell without a place is in no table.
    """

    place: Place
    options: TrainOptions
    share: float = 1.0
    after: dict[str, Cell] = field(default_factory=dict)
    then: dict[str, Any] = field(default_factory=dict)

    @property
    def level(self) -> int:
        """How many cells come before it, one after the other."""
        return 1 + max((cell.level for cell in self.after.values()), default=-1)


@dataclass(frozen=True)
class Chart:
    """How a figure shows the table: means against the axis, or the measured quantity, `x`, a line for each value of the
    axis `series`. Without `x` a row of dots with intervals."""

    x: str = ""
    series: str = ""
    logarithmic: bool = False


@dataclass(frozen=True)
class Published:
    """Published numbers by their place in the table, as they were printed, and what they are of."""

    of: str
    values: dict[Place, str]


@dataclass(frozen=True)
class Study:
    """A table or figure of a paper as a question, and how its runs answer it.

    `cells` gives the cells for a setting. `reference` is the place that others are compared with; a function of a place
    where it is not the same for all. `differs` says in what small runs differ from the published ones, and why.
    """

    name: str
    title: str
    question: str
    source: str
    axes: tuple[str, ...]
    cells: Callable[[Setting], tuple[Cell, ...]]
    reference: Place | Callable[[Place], Place]
    published: Published
    differs: str
    chart: Chart = Chart()

    def reference_of(self, place: Place) -> Place:
        """The place that a place is compared with."""
        return self.reference(place) if callable(self.reference) else self.reference


def with_parents(cells: tuple[Cell, ...]) -> list[Cell]:
    """Cells and all that are trained before them, each once, what comes first before what needs it."""
    ordered: list[Cell] = []

    def visit(cell: Cell) -> None:
        for parent in cell.after.values():
            visit(parent)
        if cell not in ordered:
            ordered.append(cell)

    for cell in cells:
        visit(cell)
    return sorted(ordered, key=lambda cell: cell.level)


def places(cells: tuple[Cell, ...]) -> Iterator[Place]:
    """The places of the cells that are in the table."""
    return (cell.place for cell in cells if cell.place)
