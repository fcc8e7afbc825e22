"""`vitreous data check` against imagededup's perceptual hashing of the same files: files per second.

    python benchmarks/check.py FOLDER --peer PYTHON --workers 2 --out benchmarks/results/DATE-check-HARDWARE.md

PYTHON has imagededup installed (a virtual environment of its own). Each round runs both, one after the other, each in a
process of its own; what it takes to start and import is not counted. The check reads, decodes, digests, describes and
measures every file, and looks for equal and near ones; imagededup reads, decodes and hashes (`PHash().encode_images`).
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
found = PHash(verbose=False).encode_images(image_dir=sys.argv[1], recursive=True, num_enc_workers=int(sys.argv[2]))
print(json.dumps([time.perf_counter() - started, len(found)]))
"""


def measure_files_per_second(python: str, code: str, folder: str, workers: int) -> float:
    """Files per second of one run in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", code, folder, str(workers)], check=True, capture_output=True, text=True, env=environment
    )
    seconds, files = json.loads(done.stdout.splitlines()[-1])
    return files / seconds


def sample_images(folder: Path, count: int | None, home: Path) -> tuple[Path, int]:
    """The folder and how many images it has; or as many of them as asked for, drawn at random, as links in `home`."""
    paths = sorted(path for path in folder.rglob("*") if is_image_file(path))
    if count is None or count >= len(paths):
        return folder, len(paths)
    for path in random.Random(0).sample(paths, count):
        place = home / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, place) if os.stat(path).st_dev == os.stat(home).st_dev else place.write_bytes(path.read_bytes())
    return home, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", required=True, metavar="PYTHON")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--files", type=int)
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
    told = subprocess.run([arguments.peer, "-m", "pip", "show", "imagededup"], capture_output=True, text=True).stdout
    version = next((line.split()[1] for line in told.splitlines() if line.startswith("Version")), "of unknown version")
    text = "\n".join(build_page(rates, count, arguments.workers, version))
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def build_page(rates: dict[str, list[float]], count: int, workers: int, version: str) -> list[str]:
    """The page, line by line."""
    middle = {name: statistics.median(found) for name, found in rates.items()}
    lines = [
        f"# `data check` on {count:,} files against imagededup's hashing of them, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {workers} workers, Pillow {PIL.__version__}, imagededup {version}.",
        (
            f"`python benchmarks/check.py FOLDER --peer PYTHON`; {len(rates['vitreous'])} rounds, alternating; medians, "
            "and all of them."
        ),
        "Starting and importing are not counted.",
        "",
        "| | files/s | ratio | rounds |",
        "|---|---|---|---|",
    ]
    what = {
        "vitreous": "`vitreous data check`: verdict, SHA-256, descriptor, sizes, colours, traits, equal and near "
        "copies",
        "imagededup": "imagededup `PHash().encode_images`: perceptual hash",
    }
    for name, found in rates.items():
        rounds = ", ".join(f"{rate:,.0f}" for rate in found)
        lines.append(f"| {what[name]} | {middle[name]:,.0f} | {middle[name] / middle['imagededup']:.2f} x | {rounds} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
