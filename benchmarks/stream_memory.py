"""Memory of an epoch over a million samples in WebDataset archives must not grow with the number of samples read.

    python benchmarks/stream_memory.py --scratch DIR --out benchmarks/results/DATE-stream-HARDWARE.md

Writes archives of small images (2.5 KB per sample) into DIR once, as BMPs, which are the fastest to decode. Each row is
a separate process that opens them, the first with an empty cache, and reads an epoch in shuffled order, with validation
and decoding.

Memory is the proportional set size (PSS) of the process and its workers, from /proc/PID/smaps_rollup, at 10, 50 and 100
% of the epoch: shared pages count once. The size of the index, which grows with the number of samples by design, is
reported separately.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np

EPOCH_SHARES = (0.1, 0.5, 1.0)
IMAGE_SIZE, NUM_CLASSES, SHARD_SIZE = 16, 100, 10_000  # image size in pixels, classes, samples per archive
BATCH_SIZE = 256


def write_archives(folder: Path, samples: int) -> None:
    """Write archives of `samples` BMPs; existing ones are kept."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    images = []
    for _ in range(100):
        buffer = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)).save(buffer, "BMP")
        images.append(buffer.getvalue())
    for low in range(0, samples, SHARD_SIZE):
        path = folder / f"train-{low // SHARD_SIZE:06d}.tar"
        if path.exists():
            continue
        temporary = path.with_suffix(".part")
        with open(temporary, "wb") as file:
            for sample in range(low, min(low + SHARD_SIZE, samples)):
                for suffix, content in (("bmp", images[sample % 100]), ("cls", b"%d" % (sample % NUM_CLASSES))):
                    info = tarfile.TarInfo(f"{sample:09d}.{suffix}")
                    info.size = len(content)
                    file.write(info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512))
            file.write(bytes(1024))
        os.replace(temporary, path)


def read_pss(process: int) -> int:
    """Bytes of a process; shared pages count proportionally."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


def measure_memory() -> int:
    """Bytes of this process and its children."""
    pid = os.getpid()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return read_pss(pid) + sum(read_pss(int(child)) for child in children)


def measure_epoch(folder: Path, workers: int) -> dict:
    """One epoch in this process: seconds to open, and memory before it and at each share of it."""
    from vitreous.data.augmentation.augment import Augment
    from vitreous.data.loader import TrainLoader
    from vitreous.data.modalities.images import ImagePreprocess
    from vitreous.data.sources import open_data

    began = time.perf_counter()
    data = open_data(folder)
    opened = time.perf_counter() - began
    split = data.with_holdout(0, 0).split("train")
    index = split.index  # type: ignore[attr-defined]
    size = (
        sum(array.nbytes for array in vars(index).values() if isinstance(array, np.ndarray))
        + split.labels.nbytes
        + 8 * len(split)
    )
    feed = TrainLoader(split, ImagePreprocess((IMAGE_SIZE, IMAGE_SIZE)), Augment(), 0, workers=workers)
    memory_before, measurements = measure_memory(), []
    began = time.perf_counter()
    marks = [int(share * len(split)) for share in EPOCH_SHARES]
    for batch_index, _ in enumerate(feed.iterate_batches(0, len(split), BATCH_SIZE), 1):
        if min(batch_index * BATCH_SIZE, len(split)) >= marks[len(measurements)]:
            measurements.append(measure_memory())
    rate = len(split) / (time.perf_counter() - began)
    return {
        "workers": workers,
        "samples": len(split),
        "open": opened,
        "index": size,
        "before": memory_before,
        "at": measurements,
        "rate": rate,
    }


def build_page(rows: list[dict]) -> list[str]:
    """The lines of the page."""
    import torch

    from vitreous.system.machine import get_processor_name

    mib, first_row = 2**20, rows[0]
    lines = [
        f"# Memory of an epoch over {first_row['samples']:,} samples in archives, {time.strftime('%Y-%m-%d')}",
        "",
        (
            f"{get_processor_name()}, torch {torch.__version__}. `python benchmarks/stream_memory.py`; BMPs of {IMAGE_SIZE} x {IMAGE_SIZE}, "
            f"{SHARD_SIZE:,} per archive."
        ),
        "",
        (
            f"Opening: {first_row['open']:.1f} s the first time, {rows[-1]['open']:.1f} s from the cache. The index and "
            "the labels take"
        ),
        f"{first_row['index'] / mib:.0f} MiB, {first_row['index'] / first_row['samples']:.0f} bytes per sample.",
        "",
        "| workers | before | 10 % | 50 % | 100 % of the epoch | growth from 10 % | images/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        at = " | ".join(f"{value / mib:.0f} MiB" for value in row["at"])
        growth = (row["at"][-1] - row["at"][0]) / row["at"][0]
        lines.append(f"| {row['workers']} | {row['before'] / mib:.0f} MiB | {at} | {growth:+.1%} | {row['rate']:.0f} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.scratch / f"bmp-{arguments.samples}"
    if arguments.one is not None:
        print(json.dumps(measure_epoch(folder, arguments.one)))
        return
    write_archives(folder, arguments.samples)
    cache = arguments.scratch / f"cache-{os.getpid()}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache.absolute())}
    base = [sys.executable, __file__, "--scratch", str(arguments.scratch), "--samples", str(arguments.samples), "--one"]
    rows = []
    for workers in arguments.workers:
        done = subprocess.run([*base, str(workers)], env=environment, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout))
        print(rows[-1], file=sys.stderr, flush=True)
    text = "\n".join(build_page(rows))
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
