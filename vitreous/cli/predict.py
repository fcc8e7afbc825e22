"""vitreous predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from vitreous.cli.answering import Answering

if TYPE_CHECKING:
    from vitreous.cli.console import Console


@dataclass(frozen=True)
class Options(Answering):
    """Names and probabilities for images.

    Example: vitreous predict runs/pets new/*.jpg --top 3
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """A run folder or a bundle."""
    images: Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGE...")]
    """Image files, or folders of them."""
    top: int | None = None
    """How many classes to name at most (default: 3; all above --threshold where an image may have several)."""
    threshold: float | None = None
    """Name classes of a probability above it alone (default: 0.5 where an image may have several, else none)."""
    abstain: float | None = None
    """Say "unsure" of an image whose highest probability is below this, above 0 to 1."""
    csv: str | None = None
    """Write a table to this file: path, class and probability of each of the top classes, and whether the model is unsure."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Predict, print a table, and write the CSV if one was asked for."""
    from vitreous.data.decode import printable
    from vitreous.errors import UsageError
    from vitreous.machine import pick_device, warning
    from vitreous.serving.predict import expand, load

    if not options.images:
        raise UsageError("no images to predict", "name files or folders after the run")
    if options.top is not None and options.top < 1:
        raise UsageError(f"--top must be at least 1, not {options.top}")
    if options.threshold is not None and not 0 <= options.threshold < 1:
        raise UsageError(f"--threshold must be at least 0 and below 1, not {options.threshold}")
    paths = list(expand(options.images))
    if slow := warning(options.precision, pick_device(options.device)):
        console.note(slow)
    predictor = load(options.run, options.how(), paths)
    top = options.top if options.top or predictor.bundle.several else 3

    def each(done: int) -> None:
        console.progress("predict", done, len(paths))

    answers = predictor.predict(paths, top, options.bad_images, each, options.threshold, options.abstain)
    rows = []
    for answer in answers:
        best = [f"{name} {p:.1%}" for name, p in zip(answer.names, answer.probabilities, strict=True)]
        said = f"unsure ({best[0] if best else 'none'})" if answer.unsure else "  ".join(best) or "none"
        rows.append([printable(answer.path), f"cannot be read: {answer.error}" if answer.error else said])
    console.table(["image", "classes"], rows)
    if options.csv:
        write_csv(options.csv, answers)
    return {
        "model": options.run,
        "predictions": [
            {
                "path": printable(a.path),
                "classes": [{"class": n, "probability": p} for n, p in zip(a.names, a.probabilities, strict=True)],
                "error": a.error,
                "unsure": a.unsure,
            }
            for a in answers
        ],
    }


def write_csv(path: str, answers: list[Any]) -> None:
    """One row an image and class, one of an image without any."""
    from vitreous.data.decode import printable
    from vitreous.reports.tables import write_table

    rows: list[list[Any]] = []
    for answer in answers:
        where = printable(answer.path)
        if not answer.names:
            rows.append([where, "", "", "", answer.error, "unsure" * answer.unsure])
        for rank, (name, p) in enumerate(zip(answer.names, answer.probabilities, strict=True), 1):
            rows.append([where, rank, name, f"{p:.6f}", "", "unsure" * answer.unsure])
    write_table(path, ["path", "rank", "class", "probability", "error", "unsure"], rows)
