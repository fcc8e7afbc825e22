"""The verb `vitreous data check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from vitreous.cli.console import Console

LEVEL_LABELS = {"error": "FAILS", "warning": "warning", "info": "note"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Check a dataset before training: unreadable files, duplicates, splits, class balance, image sizes and formats.

    Exits with 1 if the check fails: unknown layout, unreadable images, or an image or group in two splits or with two
    labels.

    Example: vitreous data check photos/ --out report.html
    """

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """A dataset as for `vitreous train`, or a folder of images."""
    split: Literal["train", "val", "test"] | None = None
    """Check only this split."""
    out: Annotated[str | None, arg(metavar="REPORT.html")] = None
    """Write an HTML report."""
    image_size: int | None = None
    """Model input size in pixels (default: as `vitreous train` would choose)."""
    group_by: Annotated[str | None, arg(metavar="COLUMN|REGEX")] = None
    """Groups of images: a column of a CSV file, or a regular expression for paths, such as 'patient(\\d+)'."""
    axes: Literal[1, 2, 3] | None = None
    """How to read .npy files and TIFF stacks that are ambiguous: 1 signals, 2 images, 3 volumes (default: from file
    names and shapes)."""
    ignore_index: int | None = None
    """Value of ignored pixels in index masks, in addition to 255 (default: 255 only)."""
    targets: Annotated[tuple[str, ...], arg(metavar="COLUMN...")] = ()
    """Regression: numeric columns of a CSV or Parquet file to check (default: as for `vitreous train`)."""
    workers: int | None = None
    """Processes that read images; does not change the results (default: one per core)."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Check a dataset, print the findings, and write the report of --out. Raises UsageError if its folder does not
    exist."""
    from pathlib import Path

    from vitreous.apps.curation.check import check_dataset
    from vitreous.apps.curation.checks.page import render_check_page
    from vitreous.errors import UsageError
    from vitreous.models.names import choose_default_image_size
    from vitreous.system.disk import write_output_file

    out = Path(options.out) if options.out else None
    if out and not out.absolute().parent.is_dir():
        raise UsageError(f"the folder {out.absolute().parent} does not exist", "create it first")
    if out and out.is_dir():
        raise UsageError(f"{out} is a folder", "use a file: --out report.html")
    size = choose_default_image_size if options.image_size is None else options.image_size
    document, subject = check_dataset(
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
        write_output_file(out, render_check_page(document, subject))
    print_findings(document, console)
    if out:
        console.print_line(f"\nreport: {out}")
    return document


def print_findings(document: dict[str, Any], console: Console) -> None:
    """Print the table of splits, the image sizes, unreadable files, and findings of a check."""
    from vitreous.apps.curation.checks.facts import group_by_reason
    from vitreous.apps.curation.checks.findings import MAX_LISTED_NAMES
    from vitreous.apps.curation.checks.pairs import describe_pairs

    rows = [
        [name, f"{split['images']:,}", f"{split['unreadable']:,}", f"{split['bytes'] / 1e6:,.1f}M"]
        for name, split in document["splits"].items()
    ]
    console.table(["split", "clips" if document["clips"] else "images", "unreadable", "bytes"], rows)
    if size := document["image_sizes"]:
        width, height = (
            f"{size[axis]['min']:.0f} to {size[axis]['max']:.0f}, median {size[axis]['median']:.0f}"
            for axis in ("width", "height")
        )
        slices = f"{size['slices']['min']:.0f} to {size['slices']['max']:.0f} slices; " if "slices" in size else ""
        size_text = (
            f"length {width}" if document["sample_type"] == "signals" else f"{slices}width {width}; height {height}"
        )
        targets, classes = document["targets"], document["classes"]
        target_count = f"{len(targets)} target{'s' * (len(targets) != 1)}"
        count = target_count if targets else f"{len(classes)} class{'es' * (len(classes) != 1)}"
        console.print_line(size_text if document["pairs"] else f"{count}; {size_text}")
    if document["pairs"]:
        console.print_line(describe_pairs(document["pairs"]))
    if (clips := document["clips"]) and clips["frames"]:
        names = {"frames": "frames", "seconds": "seconds", "frame_rate": "frames/s"}
        ranges = [(clips[key], name) for key, name in names.items() if clips[key]]
        texts = [f"{span['min']:.3g} to {span['max']:.3g} {name}, median {span['median']:.3g}" for span, name in ranges]
        console.print_line("; ".join(texts))
    for note in document["notes"]:
        console.note(note)
    num_listed = 0
    for reason, entries in group_by_reason(document["unreadable"]):
        console.print_line(f"\n{len(entries):,} x {reason}")
        for entry in entries[: max(MAX_LISTED_NAMES - num_listed, 0)]:
            console.print_line(f"    {entry['path']}")
        num_listed += len(entries)
    if num_listed > MAX_LISTED_NAMES:
        console.print_line(f"    {MAX_LISTED_NAMES} of {num_listed:,} are listed; --json lists all")
    console.print_line()
    for finding in document["findings"]:
        console.print_line(f"{LEVEL_LABELS[finding['level']]}: {finding['message']}")
        if finding["hint"]:
            console.print_line(f"    {finding['hint']}")
    console.print_line("passed" if document["passed"] else "failed")
