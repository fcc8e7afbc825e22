"""Steps of training and inference with tensors in pages of 2 MiB beside pages of 4 KiB, in turn.

    python benchmarks/huge_pages.py --out benchmarks/results/DATE-huge-pages-HARDWARE.md

Each contender is a process of its own; that with small pages has `VITREOUS_HUGE_PAGES=0`. Where the system does not
give huge pages on request, both are the same, and the page says so.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path

from vitreous.apps.bench import ours
from vitreous.apps.bench.race import ContenderResult, run_race
from vitreous.apps.bench.report import describe_hardware
from vitreous.apps.bench.work import BenchmarkStep, Contender, Timing, Workload
from vitreous.system.allocator import can_request_huge_pages

WORKLOADS = (
    Workload("train", "ViT-S/16", 224, 16),
    Workload("train", "Conv+ViT-128x4/8", 32, 128),
    Workload("inference", "ViT-S/16", 224, 1),
    Workload("inference", "ViT-S/16", 224, 16),
)


def build_step(work: Workload, huge: bool) -> BenchmarkStep:
    """A turn of a process that has not asked for large tensors yet."""
    os.environ["VITREOUS_HUGE_PAGES"] = str(int(huge))
    return (ours.build_train_step if work.task == "train" else ours.build_inference_step)(work)


def list_contenders() -> list[Contender]:
    """Who takes part: both are this project."""
    return [
        Contender("vitreous", "2 MiB", partial(build_step, huge=True), is_ours=True),
        Contender("vitreous", "4 KiB", partial(build_step, huge=False), is_ours=True),
    ]


def build_page(results: dict[Workload, list[ContenderResult]], wanted: bool) -> str:
    """The table."""
    lines = [f"# Pages of memory, {time.strftime('%Y-%m-%d')}", "", f"{describe_hardware()}.", ""]
    lines += [] if wanted else ["This system does not give huge pages on request: both columns are the same.", ""]
    lines += [
        "`python benchmarks/huge_pages.py`",
        "",
        "Medians of rounds in turn, and all rounds; memory is the peak of the process.",
        "",
    ]
    lines += ["| work | images/s, 2 MiB | images/s, 4 KiB | ratio | MiB | MiB |", "|---|---|---|---|---|---|"]
    for work, (huge, small) in results.items():
        rates = [
            f"{lane.median:.1f} ({', '.join(f'{rate:.1f}' for rate in lane.throughputs)})" for lane in (huge, small)
        ]
        memory = [f"{lane.memory / 2**20:.0f}" for lane in (huge, small)]
        title = f"{work.task}, {work.model} at {work.image_size}, batch {work.batch_size}"
        lines.append("| " + " | ".join([title, *rates, f"{huge.median / small.median:.2f}", *memory]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Race at every work, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    results = {work: run_race(work, list_contenders(), Timing(given.rounds, given.seconds)) for work in WORKLOADS}
    text = build_page(results, can_request_huge_pages())
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
