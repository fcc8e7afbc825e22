"""The verb `vitreous data convert`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from vitreous.cli.console import Console


@dataclass(frozen=True)
class Options:
    """Convert a dataset with boxes or masks to another annotation format, in a new folder.

    Example: vitreous data convert cells/ cells-coco --to coco
    """

    source: Annotated[Positional[str], arg(metavar="DATA")]
    """COCO, Pascal VOC, YOLO, LabelMe, a CSV file of boxes, or masks next to images."""
    out: Annotated[Positional[str], arg(metavar="DIR")]
    """Folder to create."""
    ignore_index: int | None = None
    """Value of ignored pixels in index masks, in addition to 255 (default: 255 only)."""
    to: Literal["coco", "yolo", "voc", "masks"] = "coco"
    """Format: coco keeps boxes, masks and crowd regions; yolo masks or boxes; voc boxes; masks one class per pixel."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Convert annotations, and print images and objects per split, and the output folder."""
    from pathlib import Path

    from vitreous.apps.curation.convert import convert_annotations
    from vitreous.data.sources import open_data

    data = open_data(options.source, ignore_index=options.ignore_index)
    for note in data.notes:
        if not note.startswith("held out"):
            console.note(note)
    document = convert_annotations(data, Path(options.out), options.to, console)
    rows = [[name, f"{split['images']:,}", f"{split['objects']:,}"] for name, split in document["splits"].items()]
    console.table(["split", "images", "objects"], rows)
    count = len(document["classes"])
    console.print_line(f"{count} class{'es' * (count != 1)}, as {options.to}: {document['out']}")
    return document
