"""The verb `vitreous data pack`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from vitreous.cli.console import Console

#: suffix of --shard-size -> bytes
BYTE_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Pack a dataset into shards for training: downscaled, with checksums, in an open format.

    Running the same command again continues an interrupted pack, or verifies a finished one.

    Example: vitreous data pack photos/ --out photos-packed --to uint8
    """

    source: Annotated[Positional[str], arg(metavar="DATA")]
    """A dataset as for `vitreous train`."""
    out: Annotated[str, arg(metavar="DIR")]
    """Folder to create."""
    to: Literal["tar", "uint8"] = "tar"
    """tar: WebDataset archives of JPEG and PNG files. uint8: decoded pixels that are memory-mapped; larger and
    faster."""
    short_side: int = 256
    """Downscale images to this height or width in pixels, whichever is shorter; smaller images are kept."""
    quality: int = 90
    """JPEG quality of downscaled images; other images are copied."""
    lossless: bool = False
    """Store downscaled images that were not JPEG as PNG."""
    shard_size: str = "256M"
    """Size of a shard in bytes, with K, M or G."""
    latents: str | None = None
    """Store latents instead of pixels, for `vitreous train --recipe dit`: folder or hf: name of an autoencoder of
    diffusers (extra `gen`). The centre square of --short-side pixels is encoded once per image."""
    mirror: bool = False
    """With --latents: also store the latents of the mirrored training images, since latents cannot be flipped."""
    device: str = "auto"
    """Device for the autoencoder: auto, cpu, cuda, cuda:1 or mps."""
    bad_images: Literal["stop", "skip"] = "stop"
    """Stop at unreadable images without a pack, or skip them and list them in pack.json."""
    workers: int | None = None
    """Processes that decode images; does not change the output (default: one per core)."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Pack a dataset, and print its splits and shards. Raises UsageError for an invalid shard size or number of
    workers."""
    from vitreous.errors import UsageError

    digits, unit = options.shard_size.rstrip("KMGkmg"), options.shard_size[-1:].upper()
    if not digits.isdecimal() or len(options.shard_size) > len(digits) + 1:
        raise UsageError(f"--shard-size {options.shard_size} is not a size", "use bytes, or 64K, 256M, 1G")
    if options.workers is not None and options.workers < 0:
        raise UsageError(f"--workers must be at least 0, not {options.workers}")
    from vitreous.apps.curation.pack import PackPlan, pack_dataset

    size, autoencoder = int(digits) * BYTE_FACTORS["" if unit.isdecimal() else unit], None
    if options.latents is not None:
        from vitreous.system.machine import pick_device
        from vitreous.weights.autoencoder import Autoencoder

        autoencoder = Autoencoder(options.latents, pick_device(options.device))
    pack_format = options.to if autoencoder is None else "latents"
    latents = None if autoencoder is None else autoencoder.latents
    plan = PackPlan(
        pack_format,
        options.short_side,
        quality=options.quality,
        lossless=options.lossless,
        shard_size=size,
        latents=latents,
        mirror=options.mirror,
    )
    document = pack_dataset(
        options.source,
        options.out,
        plan=plan,
        bad_images=options.bad_images,
        workers=options.workers,
        listener=console,
        autoencoder=autoencoder,
    )
    rows = []
    for name, split in document["splits"].items():
        size = sum(file["bytes"] for file in (*split["shards"], *split["files"].values())) / 2**20
        counts = f"{split['images']:,}", len(split["unreadable"]), len(split["shards"])
        rows.append([name, *counts, f"{size:.1f} MiB"])
    console.table(["split", "images", "unreadable", "shards", "size"], rows)
    console.print_line(f"next: vitreous train {document['out']}" + " --recipe dit" * (autoencoder is not None))
    return document
