"""Memory and network traffic of a run: planned by `train --dry-run --world` and measured, for 1, 2 and 4 processes.

    python benchmarks/scaling.py --out benchmarks/results/DATE-scaling-HARDWARE.md

Each process trains three steps of `digits` in float32 on a CPU, with gloo. Memory is the maximum allocated by PyTorch
at a time, from its profiler, which records every tensor from the start. Traffic is measured on the loopback device
during the third step, so no other program may use it. gloo's reduce-scatter is an all-reduce, twice the bytes of a
ring, and is planned as such.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from vitreous.jobs.plan import plan_run
from vitreous.progress import NullListener
from vitreous.recipes.options import TrainOptions
from vitreous.system.machine import get_processor_name
from vitreous.training.folder import RunFolder
from vitreous.training.loop import run_training_loop
from vitreous.training.ranks import SINGLE_PROCESS, process_group
from vitreous.training.scale import count_memory, count_traffic, measure_sizes
from vitreous.training.session import Session

#: model, image size, batch size
SCALING_CASES = {
    "wide": ("ViT-384x4/4", 32, 32),
    "deep": ("ViT-128x16/4", 32, 32),
    "fine": ("ViT-128x4/2", 32, 16),
    "large": ("ViT-512x6/8", 32, 64),
}
NUM_STEPS = 3


def read_sent_bytes() -> int:
    """Bytes sent by the loopback device."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def compute_peak_bytes(trace: Path) -> int:
    """The maximum allocated bytes, from a profile's list of allocations."""
    events = json.loads(trace.read_text())["traceEvents"]
    held = most = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


def run_worker(case: str, parallel: str, out: Path) -> None:
    """One process: train, and write the planned and measured values."""
    model, side, batch = SCALING_CASES[case]
    options = TrainOptions(data="digits", out=str(out), model=model, image_size=side, batch_size=batch, precision="fp32", optimizer="adamw", ema=0.99, workers=0, shards=1, device="cpu", accumulate=1, parallel=parallel, settings={"objective.progressive": ["1.0"], "objective.patch_dropout": ["0.0"]})  # fmt: skip
    _, run, inputs, _ = plan_run(options, NullListener())
    with (
        process_group("cpu", 120) as ranks,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        session = Session(run, inputs, RunFolder(out), NullListener(), ranks=ranks)
        state, at = session.build(), []

        def tick(state: Any) -> None:
            ranks.wait()
            at.append(read_sent_bytes())
            state.should_stop = state.step == NUM_STEPS

        run_training_loop(state, session.batches(state), [(1, tick)])
    trace = out.with_suffix(f".{ranks.rank}.json")
    profiler.export_chrome_trace(str(trace))
    if ranks is not SINGLE_PROCESS and ranks.rank:
        return
    sizes = measure_sizes(state.objective)
    world = ranks.world
    planned = count_memory(run, sizes, world, "cpu")
    if parallel == "fsdp":
        planned["peak_bytes"] += 4 * sizes.trainable  # the evaluated copy, which is on the CPU
    traffic = count_traffic(run, sizes, world)
    if parallel == "fsdp":
        traffic += round(4 * sizes.trainable * (world - 1) / world)
    row = {"case": case, "model": model, "parallel": parallel, "world": world, "parameters": sizes.trainable}
    row |= {"planned_bytes": planned["peak_bytes"], "counted_bytes": compute_peak_bytes(trace), "terms": planned}
    row |= {"planned_sent": traffic, "counted_sent": (at[-1] - at[-2]) // world}
    out.with_suffix(".row").write_text(json.dumps(row))


def measure_case(case: str, parallel: str, world: int, folder: Path) -> dict[str, Any]:
    """Start the processes of a case, and read the row of the first one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    out = folder / f"{case}-{parallel}-{world}"
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, __file__, "--worker", case, parallel, str(out)]
    several = world > 1 or parallel == "fsdp"
    started = [
        subprocess.Popen(words, env=os.environ | (shared | {"RANK": str(n), "LOCAL_RANK": str(n)} if several else {}))
        for n in range(world)
    ]
    if codes := [code for code in [process.wait() for process in started] if code]:
        raise SystemExit(f"{case}, {parallel}, {world} processes: exit {codes}")
    return json.loads(out.with_suffix(".row").read_text())


def build_page(rows: list[dict[str, Any]]) -> str:
    """Build the table."""
    lines = [
        f"# Memory and traffic of a run: planned and measured, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}, gloo. Three steps of digits, float32, AdamW, an average; maximum memory of a process, and bytes",
        "sent per step.",
        "",
        "    python benchmarks/scaling.py",
        "",
        "| model | | processes | memory planned, MiB | measured | difference | sent per step planned, MiB | measured | difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["model"], row["parallel"], str(row["world"])]
        for kind in ("bytes", "sent"):
            planned, counted = row[f"planned_{kind}"], row[f"counted_{kind}"]
            shown = f"{planned / counted - 1:+.1%}" if planned else ""
            cells += [f"{planned / 2**20:.1f}", f"{counted / 2**20:.1f}", shown]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every case, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(SCALING_CASES), choices=list(SCALING_CASES))
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return run_worker(args.worker[0], args.worker[1], Path(args.worker[2]))
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            measure_case(case, parallel, world, Path(folder))
            for case in args.cases
            for parallel in ("ddp", "fsdp")
            for world in args.worlds
        ]
    if args.rows:
        args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(build_page(rows))
    if args.out:
        args.out.write_text(build_page(rows))


if __name__ == "__main__":
    main()
