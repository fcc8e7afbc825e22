"""Throughput of `vitreous data check` and of imagededup's perceptual hashing on the same files, in files/s.

    python benchmarks/check.py FOLDER --peer PYTHON --workers 2 --out benchmarks/results/DATE-check-HARDWARE.md

PYTHON is the interpreter of another environment, in which imagededup is installed. Each round runs both in separate
processes; the time for starting and importing is not counted. The check reads, decodes and hashes every file, measures
its properties, and searches for duplicates and near-duplicates; imagededup reads, decodes and hashes
(`PHash().encode_images`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import PIL

from vitreous.data.decoding.decode import is_image_file
from vitreous.system.machine import get_processor_name

VITREOUS_SCRIPT = """
import json, sys, time
from vitreous.apps.curation.check import check_dataset
started = time.perf_counter()
document, _ = check_dataset(sys.argv[1], workers=int(sys.argv[2]))
print(json.dumps([time.perf_counter() - started, sum(split["images"] - split["unreadable"] for split in document["splits"].values())]))
"""
IMAGEDEDUP_SCRIPT = """
import json, sys, time
from imagededup.methods import PHash
started = time.perf_counter()
hashes = PHash(verbose=False).encode_images(image_dir=sys.argv[1], recursive=True, num_enc_workers=int(sys.argv[2]))
print(json.dumps([time.perf_counter() - started, len(hashes)]))
"""


def measure_files_per_second(python: str, code: str, folder: str, workers: int) -> float:
    """Run a script in a separate process, and return its throughput in files/s."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [python, "-c", code, folder, str(workers)], check=True, capture_output=True, text=True, env=environment
    )
    seconds, files = json.loads(result.stdout.splitlines()[-1])
    return files / seconds


def sample_images(folder: Path, count: int | None, sample_folder: Path) -> tuple[Path, int]:
    """Return a folder of images, and their number.

    If `count` is set and below the number of images, a random sample is linked or copied to `sample_folder`, which is
    returned; otherwise `folder`.
    """
    paths = sorted(path for path in folder.rglob("*") if is_image_file(path))
    if count is None or count >= len(paths):
        return folder, len(paths)
    for path in random.Random(0).sample(paths, count):
        target = sample_folder / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, target) if os.stat(path).st_dev == os.stat(sample_folder).st_dev else target.write_bytes(
            path.read_bytes()
        )
    return sample_folder, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", required=True, metavar="PYTHON", help="interpreter with imagededup installed")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--files", type=int, help="random sample of this many images (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {"vitreous": [], "imagededup": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder, count = sample_images(arguments.folder, arguments.files, Path(scratch))
        for _ in range(arguments.rounds):
            for name, python, code in (
                ("vitreous", sys.executable, VITREOUS_SCRIPT),
                ("imagededup", arguments.peer, IMAGEDEDUP_SCRIPT),
            ):
                rates[name].append(measure_files_per_second(python, code, str(folder), arguments.workers))
                print(f"{name} {rates[name][-1]:,.0f} files/s", flush=True)
    package_info = subprocess.run(
        [arguments.peer, "-m", "pip", "show", "imagededup"], capture_output=True, text=True
    ).stdout
    version = next(
        (line.split()[1] for line in package_info.splitlines() if line.startswith("Version")), "of unknown version"
    )
    text = "\n".join(build_page(rates, count, arguments.workers, version))
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def build_page(rates: dict[str, list[float]], count: int, workers: int, version: str) -> list[str]:
    """Return the lines of the page from the throughputs of all rounds, in files/s."""
    medians = {name: statistics.median(throughputs) for name, throughputs in rates.items()}
    lines = [
        f"# `data check` of {count:,} files compared with hashing by imagededup, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {workers} workers, Pillow {PIL.__version__}, imagededup {version}.",
        (
            f"`python benchmarks/check.py FOLDER --peer PYTHON`; {len(rates['vitreous'])} alternating rounds; median "
            "and every round."
        ),
        "The time for starting and importing is not counted.",
        "",
        "| | files/s | ratio | rounds |",
        "|---|---|---|---|",
    ]
    descriptions = {
        "vitreous": "`vitreous data check`: readability, SHA-256, descriptor, size, colours, properties, duplicates and "
        "near-duplicates",
        "imagededup": "imagededup `PHash().encode_images`: perceptual hash",
    }
    for name, throughputs in rates.items():
        rounds = ", ".join(f"{throughput:,.0f}" for throughput in throughputs)
        lines.append(
            f"| {descriptions[name]} | {medians[name]:,.0f} | {medians[name] / medians['imagededup']:.2f} x | {rounds} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    main()
