"""vitreous inspect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from vitreous.cli.console import Console
from vitreous.weights.options import WeightsOptions


@dataclass(frozen=True)
class Options(WeightsOptions):
    """Look inside a model: what it has learned and what it looks at, as pictures and as numbers.

    Example: vitreous inspect runs/pets dog.jpg --figures rollout attention

    Figures: filters, positions, distance, rollout (these four unless others are named), attention, gradient, segments,
    fourier, features, nearest, reconstruction, similarity, cost. Of models of clips: clips, distance, similarity, cost.
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder, a bundle, or weights."""
    images: Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGE...")] = ()
    """Images, or folders of them, for the figures that show one (default: some of the data)."""
    figures: tuple[str, ...] = ()
    """Which figures."""
    all: bool = False
    """Every figure that the model has."""
    out: str | None = None
    """Folder for the files (default: RUN/inspect)."""
    data: str | None = None
    """A data set to take images from (default: the run's own)."""
    split: Literal["train", "val", "test"] | None = None
    """Which part of it (default: val)."""
    count: int = 128
    """Images that a mean is taken over; the paper's distance has 128."""
    image_size: tuple[int, ...] = ()
    """Pixels along a side, or height and width (default: the model's own)."""
    layers: tuple[int, ...] = ()
    """Blocks to look at, from 0, or from -1 backwards (default: all, or the last where only one is shown)."""
    heads: tuple[int, ...] = ()
    """Heads to show, from 0 (default: all)."""
    fusion: Literal["mean", "max", "min"] = "mean"
    """How rollout makes one map of all heads."""
    residual: float = 0.5
    """Share of the identity in each block's map for rollout; 0 leaves the residual path out."""
    discard: float = 0.0
    """Share of the smallest weights that rollout sets to zero in each block."""
    mass: float = 0.6
    """Share of a head's attention that segments keep."""
    of_class: str | None = None
    """The class whose gradient is taken (default: the one predicted)."""
    other: str | None = None
    """Another model, to compare layers with."""
    batch_sizes: tuple[int, ...] = ()
    """Batches that cost tries (default: powers of two, as long as memory holds them)."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Numbers the model computes with; attention is always looked at in float32."""
    batch_size: int = 8
    """Images computed at a time."""
    seed: int = 0
    """Which images of the data are taken."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Make the figures, and say where they are."""
    from vitreous.cli.inference import select_options
    from vitreous.reports.figures.subject import InspectOptions
    from vitreous.reports.inspect import inspect

    settings = select_options(InspectOptions, options)
    document = inspect(options.source(options.run), options.images, options.out, settings, console)
    console.table(
        ["figure", "file"], [[one["title"], f"{document['out']}/{one['png']}"] for one in document["figures"]]
    )
    console.say(f"all on one page: {document['page']}")
    return document
