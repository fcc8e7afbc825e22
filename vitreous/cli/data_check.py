"""vitreous data check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from vitreous.cli.console import Console

MARKS = {"fails": "FAILS", "warns": "warning", "tells": "note"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is wrong with a data set, before an hour is spent on it: unreadable files, copies, splits and classes, sizes
    and kinds.

    Ends with 0 if nothing hinders training, and with 1 if it fails: the layout is refused, images cannot be read, an
    image is in two splits or under two labels, or a group is in two splits.

    Example: vitreous data check photos/ --out report.html
    """

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """A data set, as `vitreous train` takes it, of clips too, or a folder of images."""
    split: Literal["train", "val", "test"] | None = None
    """Check this part of it alone."""
    out: Annotated[str | None, arg(metavar="REPORT.html")] = None
    """Write a page that shows it."""
    image_size: int | None = None
    """Side of the model's input, pixels (default: the one that `vitreous train` takes for the first image)."""
    group_by: Annotated[str | None, arg(metavar="COLUMN|REGEX")] = None
    """What names the group of an image: a column of a CSV file, or a regular expression for its path, as
    'patient(\\d+)'."""
    axes: Literal[1, 2, 3] | None = None
    """What .npy files and TIFF stacks are, where they could be either: 1 signals, 2 pictures, 3 volumes (default: as
    their endings and shapes say)."""
    ignore_index: int | None = None
    """The number of pixels without a class in class maps, besides 255 (default: 255 alone)."""
    targets: Annotated[tuple[str, ...], arg(metavar="COLUMN...")] = ()
    """Columns of numbers of a CSV or Parquet file that are learned (default: as `vitreous train`)."""
    workers: int | None = None
    """Processes that read images; changes nothing (default: one a core)."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Check, print the findings, and write the page of --out. Raises UsageError: there is no such folder."""
    from pathlib import Path

    from vitreous.apps.curation.check import check
    from vitreous.apps.curation.checks.page import page
    from vitreous.errors import UsageError
    from vitreous.models.names import default_image
    from vitreous.system.disk import write_output

    out = Path(options.out) if options.out else None
    if out and not out.absolute().parent.is_dir():
        raise UsageError(f"no folder {out.absolute().parent}", "make it first")
    if out and out.is_dir():
        raise UsageError(f"{out} is a folder", "name a file: --out report.html")
    size = default_image if options.image_size is None else options.image_size
    document, subject = check(
        options.data,
        options.split,
        workers=options.workers,
        image_size=size,
        group_by=options.group_by,
        axes=options.axes,
        ignore_index=options.ignore_index,
        targets=options.targets,
        progress=console.progress,
    )
    if out:
        write_output(out, page(document, subject))
    print_findings(document, console)
    if out:
        console.say(f"\n{out} shows it")
    return document


def print_findings(document: dict[str, Any], console: Console) -> None:
    """Print the splits, the unreadable files, and the findings."""
    from vitreous.apps.curation.checks.facts import by_reason
    from vitreous.apps.curation.checks.findings import SHOWN

    rows = [
        [name, f"{split['images']:,}", f"{split['unreadable']:,}", f"{split['bytes'] / 1e6:,.1f}M"]
        for name, split in document["splits"].items()
    ]
    console.table(["split", "clips" if document["clips"] else "images", "unreadable", "bytes"], rows)
    if size := document["sizes"]:
        width, height = (
            f"{size[side]['min']:.0f} to {size[side]['max']:.0f}, median {size[side]['median']:.0f}"
            for side in ("width", "height")
        )
        slices = f"{size['slices']['min']:.0f} to {size['slices']['max']:.0f} slices; " if "slices" in size else ""
        sides = f"length {width}" if document["kind"] == "signals" else f"{slices}width {width}; height {height}"
        targets, classes = document["targets"], document["classes"]
        count = f"{len(targets)} target{'s' * (len(targets) != 1)}" if targets else f"{len(classes)} classes"
        console.say(f"{count}; {sides}")
    if (clips := document["clips"]) and clips["frames"]:
        names = {"frames": "frames", "seconds": "seconds", "rate": "frames a second"}
        spans = [(clips[key], name) for key, name in names.items() if clips[key]]
        texts = [f"{own['min']:.3g} to {own['max']:.3g} {name}, median {own['median']:.3g}" for own, name in spans]
        console.say("; ".join(texts))
    for note in document["notes"]:
        console.note(note)
    shown = 0
    for reason, bad in by_reason(document["unreadable"]):
        console.say(f"\n{len(bad):,} x {reason}")
        for row in bad[: max(SHOWN - shown, 0)]:
            console.say(f"    {row['path']}")
        shown += len(bad)
    if shown > SHOWN:
        console.say(f"    {SHOWN} of {shown:,} are named here; --json names all")
    console.say()
    for finding in document["findings"]:
        console.say(f"{MARKS[finding['level']]}: {finding['text']}")
        if finding["way"]:
            console.say(f"    {finding['way']}")
    console.say("passed" if document["passed"] else "failed")
