"""Cost of `--reproducible`: the same training run with and without it, as one process and as two.

    python benchmarks/reproducible.py [DATA] [--model MODEL] [--rounds 3] --out
    benchmarks/results/DATE-reproducible-HARDWARE.md

Runs alternate, each in a separate process (two under torchrun, with one thread each); the rate is the median of the
run's log lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from vitreous.system.machine import get_processor_name

RUN_OPTIONS = {
    "one process": (1, []),
    "one process, `--reproducible`": (1, ["--reproducible"]),
    "two processes (DDP)": (2, []),
    "two processes, `--reproducible`": (2, ["--reproducible"]),
}


def measure_throughput(processes: int, words: list[str], out: Path) -> tuple[float, int]:
    """Images/s and peak memory in bytes of a run; of rank 0, if there are two processes."""
    start = (
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        if processes > 1
        else [sys.executable]
    )
    subprocess.run([*start, "-m", "vitreous", "train", *words, "--out", str(out)], check=True, capture_output=True)
    summary = json.loads((out / "summary.json").read_text())
    return summary["images_per_second"], summary["peak_memory_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="digits")
    parser.add_argument("--model")
    parser.add_argument("--epochs", default="8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    common = [arguments.data, "--epochs", arguments.epochs, *(["--model", arguments.model] if arguments.model else [])]
    results: dict[str, list[tuple[float, int]]] = {name: [] for name in RUN_OPTIONS}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(arguments.rounds):
            for option_index, (name, (processes, words)) in enumerate(RUN_OPTIONS.items()):
                results[name].append(
                    measure_throughput(processes, [*common, *words], Path(scratch) / f"{turn}-{option_index}")
                )
    base = statistics.median(images for images, _ in results["one process"])
    rows = [
        f"# Cost of `--reproducible`, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}.",
        (
            f"`python benchmarks/reproducible.py {' '.join(sys.argv[1:])}`; medians of {arguments.rounds} alternating "
            "runs."
        ),
        "",
        "| | images/s | ratio | minimum, maximum | peak memory per process |",
        "|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        rates = sorted(images for images, _ in runs)
        middle = statistics.median(rates)
        memory = max(held for _, held in runs) / 2**20
        rows.append(
            f"| {name} | {middle:.0f} | {middle / base:.2f} | {rates[0]:.0f}, {rates[-1]:.0f} | {memory:.0f} MiB |"
        )
    text = "\n".join(rows) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
