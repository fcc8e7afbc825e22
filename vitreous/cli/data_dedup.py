"""The verb `vitreous data dedup`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from vitreous.cli.console import Console

if TYPE_CHECKING:
    from vitreous.apps.curation.dedup import ImageEmbedder
    from vitreous.data.split import Data, Split


@dataclass(frozen=True, kw_only=True)
class Options:
    """List images of a dataset that other datasets contain too: the same file, the same pixels, or a near-duplicate (a
    crop of at least half of the area, shifted, framed, scaled, recompressed, mirrored, recoloured); for clips the same
    file, or similar frames and motion. Nothing is deleted.

    Example: vitreous data dedup photos/ --against pets/ --against flowers/ --out copies.csv
    """

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """A dataset as for `vitreous train`, or a folder of images; its test split is not searched."""
    out: Annotated[str, arg(metavar="LIST.csv")]
    """Output list with the columns path, duplicate_of, reason, score."""
    against: Annotated[tuple[str, ...], arg(metavar="DATA...")] = ()
    """Datasets to compare with."""
    against_split: Literal["auto", "train", "val", "test", "all"] = "auto"
    """Split of the --against datasets; auto is the test split, or all images if there is none."""
    within: bool = False
    """Also list duplicates within DATA."""
    apply_to: Annotated[str | None, arg(metavar="OUT.csv")] = None
    """Also write the dataset without duplicates, as a table for `vitreous train`."""
    targets: Annotated[tuple[str, ...], arg(metavar="COLUMN...")] = ()
    """Regression: numeric columns of DATA, a CSV or Parquet file (default: as for `vitreous train`)."""
    threshold: float = 0.54
    """Minimum similarity of a near-duplicate to its original after alignment, up to 1."""
    model: Annotated[str | None, arg(metavar="RUN")] = None
    """Run folder or bundle; its features are used to find further near-duplicates."""
    device: str = "auto"
    """Device for --model: auto, cpu, cuda, cuda:1 or mps."""
    workers: int | None = None
    """Processes that decode images; does not change the results (default: one per core)."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Find duplicates, write the list of --out and the table of --apply-to, and print counts. Raises UsageError for
    invalid options."""
    from pathlib import Path

    from vitreous.apps.curation.copies.listing import copies_to_csv, remaining_to_csv
    from vitreous.apps.curation.dedup import find_copies
    from vitreous.data.exclusions import read_exclusion_list
    from vitreous.data.sources import open_images
    from vitreous.data.split import Data
    from vitreous.errors import UsageError
    from vitreous.system.disk import write_output_file
    from vitreous.system.machine import pick_device

    if options.workers is not None and options.workers < 0:
        raise UsageError(f"--workers must be at least 0, not {options.workers}")
    data, out = open_images(options.data, options.targets), Path(options.out)
    if options.apply_to and not (isinstance(data, Data) and data.labelled):
        raise UsageError(
            f"{options.data} has no classes or values, so it cannot be written as a table", "remove --apply-to"
        )
    for path in (out, *([Path(options.apply_to)] if options.apply_to else [])):
        if not path.absolute().parent.is_dir():
            raise UsageError(f"the folder {path.absolute().parent} does not exist", "create it first")
    splits = [split for name, split in data.splits.items() if name != "test"] if isinstance(data, Data) else [data]
    reference_splits = [
        split
        for source in options.against
        for split in choose_reference_splits(open_images(source), options.against_split, source, console)
    ]
    embedder = load_embedder(options.model, pick_device(options.device)) if options.model else None
    document = find_copies(
        splits,
        reference_splits,
        within=options.within,
        threshold=options.threshold,
        workers=options.workers,
        embedder=embedder,
        progress=console.progress,
    )
    write_output_file(out, copies_to_csv(document["duplicates"]))
    if options.apply_to and isinstance(data, Data):
        table = Path(options.apply_to)
        write_output_file(table, remaining_to_csv(data, read_exclusion_list(out), table.absolute().parent))
    for line in document["unreadable"][:20]:
        console.note(f"cannot be read: {line}")
    counts = document["counts"]
    console.table(["copies by", "images"], [[reason, counts.get(reason, 0)] for reason in ("bytes", "pixels", "near")])
    console.print_line(
        f"{len(document['duplicates'])} of {document['images']} images are copies, "
        f"{len(document['unreadable'])} cannot be read: {out}"
    )
    return {
        "data": options.data,
        "against": list(options.against),
        "out": options.out,
        "applied_to": options.apply_to,
    } | {
        "images": document["images"],
        "against_images": document["against_images"],
        **{key: document[key] for key in ("within", "threshold", "counts", "unreadable", "duplicates")},
    }


def choose_reference_splits(data: Data | Split, split_option: str, source: str, console: Console) -> list[Split]:
    """Return the splits of a reference dataset that `--against-split` selects. If it is `auto` or `all`, print their
    names."""
    from vitreous.data.split import Data

    if not isinstance(data, Data):
        return [data]
    if split_option in ("train", "val", "test"):
        return [data.split(split_option)]
    names = ["test"] if split_option == "auto" and "test" in data.splits else list(data.splits)
    console.note(f"{source}: {', '.join(names)}, {sum(len(data.splits[name]) for name in names)} images")
    return [data.splits[name] for name in names]


def load_embedder(run: str, device: str) -> ImageEmbedder:
    """Load a model that computes the input features of its head: pixels (B, C, *image) -> (B, D) float32."""
    import numpy as np
    import torch

    from vitreous.apps.curation.dedup import ImageEmbedder
    from vitreous.inference.open_model import open_bundle

    bundle = open_bundle(run)
    model = bundle.model.to(device).eval()

    @torch.inference_mode()
    def embed(pixels: np.ndarray) -> np.ndarray:
        images = bundle.preprocess.normalise(torch.from_numpy(pixels).to(device))
        return model.pool(model.features(images)).float().cpu().numpy()

    return ImageEmbedder(bundle.preprocess, embed)
