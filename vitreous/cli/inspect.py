"""The verb `vitreous inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, arg

from vitreous.cli.console import Console
from vitreous.reports.options import InspectOptions
from vitreous.weights.options import WeightsOptions


@dataclass(frozen=True, kw_only=True)
class Options(InspectOptions, WeightsOptions):
    """Draw inspection figures of a model (attention rollout, attention distance, filters, position embeddings).

    Example: vitreous inspect runs/pets dog.jpg --figures rollout attention

    Figures: filters, positions, distance, rollout (these four unless others are named), attention, gradient, segments,
    fourier, features, nearest, reconstruction, similarity, cost. Of models of clips: clips, distance, similarity, cost.
    """

    SECTIONS: ClassVar[dict[str, str]] = {"out": "Output"}

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder, a bundle, or weights."""
    images: Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGE...")] = ()
    """Images or folders, for figures that show images (default: images of the dataset)."""
    out: str | None = None
    """Output folder (default: RUN/inspect)."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Draw the figures, print their paths, and return the document."""
    from vitreous.cli.inference import select_options
    from vitreous.reports.figures.subject import InspectOptions
    from vitreous.reports.inspect import inspect

    settings = select_options(InspectOptions, options)
    document: dict[str, Any] = {**inspect(options.source(options.run), options.images, options.out, settings, console)}
    console.table(
        ["figure", "file"], [[figure["title"], f"{document['out']}/{figure['png']}"] for figure in document["figures"]]
    )
    console.print_line(f"page with all figures: {document['page']}")
    return document
