"""Training and inference steps with tensors in 2 MiB pages compared with 4 KiB pages, in alternating rounds.

    python benchmarks/huge_pages.py --out benchmarks/results/DATE-huge-pages-HARDWARE.md

Each contender is a separate process; the one with small pages has `VITREOUS_HUGE_PAGES=0`. If the system does not give
huge pages on request, both are the same, and the page reports it.
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
    """A turn in a process that has not allocated large tensors yet."""
    os.environ["VITREOUS_HUGE_PAGES"] = str(int(huge))
    return (ours.build_train_step if work.task == "train" else ours.build_inference_step)(work)


def list_contenders() -> list[Contender]:
    """The contenders, both vitreous."""
    return [
        Contender("vitreous", "2 MiB", partial(build_step, huge=True), is_ours=True),
        Contender("vitreous", "4 KiB", partial(build_step, huge=False), is_ours=True),
    ]


def build_page(results: dict[Workload, list[ContenderResult]], is_supported: bool) -> str:
    """Build the table."""
    lines = [f"# Huge memory pages, {time.strftime('%Y-%m-%d')}", "", f"{describe_hardware()}.", ""]
    lines += [] if is_supported else ["This system does not give huge pages on request: both columns are the same.", ""]
    lines += [
        "`python benchmarks/huge_pages.py`",
        "",
        "Medians of alternating rounds, and all rounds; memory is the peak of the process.",
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
    """Race at every workload, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per round")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {work: run_race(work, list_contenders(), Timing(args.rounds, args.seconds)) for work in WORKLOADS}
    text = build_page(results, can_request_huge_pages())
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
