"""`vitreous serve` under load and abuse, with the server on one core and all clients on another.

    python benchmarks/serving.py --scratch DIR --out benchmarks/results/DATE-serving-HARDWARE.md
    python benchmarks/serving.py --scratch DIR --parts load loris fuzz drain crash reload cancel soak

The model is a ViT-S/16 with random weights, created in DIR, or --run; the images are those of --images, or synthetic.
Requests are sent at Poisson times independent of the server, and latency counts from the scheduled time
(`serving_client.py`). Every response must equal the prediction for the same image alone, exactly, and have the ID of
its request.

Capacity T* is the maximum rate of correct responses in any phase up to 1.5 x the closed loop: 16 clients that send the
next request after each response. L1 is the median latency of a single client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import serving_abuse
import serving_life
import torch
from serving_client import (
    Client,
    ClientRequest,
    LoadPhase,
    closed_loop,
    compute_quantile,
    make_upload_requests,
    open_loop,
    send_periodically,
)
from serving_server import SERVE_PROGRAM, Server, bind_cores, load_photographs, make_run

from vitreous.apps.bench.report import describe_hardware

TABLE_HEAD = (
    "x T*",
    "offered/s",
    "correct responses/s",
    "of T*",
    "accepted p50, p99 ms",
    "refused p99 ms",
    "statuses",
    "healthz p99 ms",
)
TABLE_HEAD += ("recovered after s", "CPU of server, client")
LOAD_FACTORS = (0.7, 1.0, 2.0, 5.0, 20.0)
SWEEP_FACTORS = (0.8, 1.0, 1.25, 1.5)
MIB = 2**20


@dataclass
class BenchmarkContext:
    """Settings and results shared by all parts: run, images, cores, duration of a phase, and measurements so far."""

    run: Path
    pictures: list[tuple[str, bytes]]
    scratch: Path
    core: int
    seconds: float
    seed: int
    capacity: float = 0.0
    alone: float = 0.0
    answers: list[list] = field(default_factory=list)
    words: tuple[str, ...] = ()

    def serve(self, run: Path | None = None, program: tuple[str, ...] = SERVE_PROGRAM) -> Server:
        """Start a server on its core."""
        return Server(run or self.run, self.scratch, self.core, self.words, program)

    def questions(self, port: int) -> list[ClientRequest]:
        """One upload per image, with its expected predictions."""
        return make_upload_requests(port, self.pictures, self.answers)


async def collect_reference_predictions(rig: BenchmarkContext, server: Server) -> None:
    """Request every image alone, twice: the reference predictions, and the latency without load."""
    client = Client(server.port)
    asked = make_upload_requests(server.port, rig.pictures)
    first = [await client.ask(question) for question in asked]
    if failed := [reply for reply in first if reply.status != 200]:
        raise RuntimeError(f"alone, {len(failed)} of {len(first)} got {failed[0].status}: {failed[0].body[:300]!r}")
    rig.answers = [json.loads(reply.body)["predictions"] for reply in first]
    again = [await client.ask(question) for question in rig.questions(server.port)]
    if not all(reply.right for reply in again):
        raise RuntimeError("the predictions for a single image differ between two requests")
    if len({json.dumps([p["classes"] for p in answer]) for answer in rig.answers}) < len(rig.answers):
        raise RuntimeError("two images have the same predictions: mixed-up responses would not be detected")
    rig.alone = compute_quantile([reply.seconds for reply in again], 0.5)
    client.close()


async def measure_capacity(rig: BenchmarkContext, server: Server, seconds: float) -> list[tuple[str, LoadPhase]]:
    """Measure T* with a closed loop and a sweep of rates around its throughput."""
    client, asked = Client(server.port), rig.questions(server.port)
    phases = [("closed loop, 16 clients", await closed_loop(client, asked, 16, seconds))]
    rate = phases[0][1].goodput
    for share in SWEEP_FACTORS:
        phase = await open_loop(client, asked, share * rate, seconds, rig.seed + int(100 * share))
        phases.append((f"open loop at {share:g} of the closed loop", phase))
        print_phase(phases[-1][0], phase)
    rig.capacity = max(phase.goodput for _, phase in phases)
    client.close()
    return phases


@dataclass
class MemoryMonitor:
    """Records the server's memory twice per second in a thread."""

    server: Server
    seen: list[int] = field(default_factory=list)

    def __enter__(self) -> MemoryMonitor:
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()
        return self

    def look(self) -> None:
        """Record memory until the end."""
        self.seen.append(self.server.memory())
        while not self.over.wait(0.5):
            self.seen.append(self.server.memory())

    def __exit__(self, *error) -> None:
        self.over.set()
        self.thread.join()


async def measure_recovery(client: Client, asked: list[ClientRequest], normal: float) -> float:
    """Seconds until a request, repeated continuously, gets a correct response within the normal latency; at most 30."""
    clock = asyncio.get_running_loop().time
    begun, number = clock(), 0
    while clock() - begun < 30:
        reply = await client.ask(asked[number % len(asked)])
        if reply.right and reply.seconds <= normal:
            break
        number += 1
        await asyncio.sleep(0.01)
    return clock() - begun


async def measure_load(rig: BenchmarkContext, arguments: argparse.Namespace) -> list[str]:
    """All multiples of T*, one after the other, on one server."""
    lines = ["## Load", ""]
    with rig.serve() as server:
        await collect_reference_predictions(rig, server)
        sweep = await measure_capacity(rig, server, rig.seconds)
        before, rows = server.memory(), []
        asked = rig.questions(server.port)
        with MemoryMonitor(server) as watch:
            for share in LOAD_FACTORS:
                client, side, over = Client(server.port), Client(server.port), asyncio.Event()
                beat = asyncio.create_task(send_periodically(side, "/healthz", 0.05, over))
                spent = server.spent()
                phase = await open_loop(client, asked, share * rig.capacity, rig.seconds, rig.seed + int(10 * share))
                spent = (server.spent() - spent) / (asyncio.get_running_loop().time() - phase.start)
                over.set()
                health = await beat
                last = await measure_recovery(side, asked, 3 * rig.alone + 0.005)
                rows.append((share, phase, health, last, spent))
                print_phase(f"{share:g} x T*, server {spent:.0%} of its core", phase)
                client.close()
                side.close()
        peak, after = max(watch.seen), server.memory()
        startup, metrics = server.startup, server.metrics()
    lines += [
        (
            f"L1 {rig.alone * 1000:.1f} ms, T* {rig.capacity:.1f} responses/s, {len(rig.pictures)} images, {rig.seconds:g} "
            "s per phase."
        ),
        f"Start-up: {startup:.1f} s.",
        "",
        "| | offered/s | correct responses/s | p50, p99 ms |",
        "|---|---|---|---|",
        *(
            f"| {name} | {p.offered:.1f} | {p.goodput:.1f} | {format_milliseconds(p.latency(0.5))}, {format_milliseconds(p.latency(0.99))} |"
            for name, p in sweep
        ),
        "",
        f"| {' | '.join(TABLE_HEAD)} |",
        "|" + "---|" * len(TABLE_HEAD),
    ]
    for share, p, health, recovered, spent in rows:
        beat = format_milliseconds(compute_quantile([r.seconds for r in health], 0.99)) + " (not all 200)" * any(
            not r.right for r in health
        )
        rates = [f"{share:g}", f"{p.offered:.1f}", f"{p.goodput:.1f}", f"{p.goodput / rig.capacity:.2f}"]
        times = [
            f"{format_milliseconds(p.latency(0.5))}, {format_milliseconds(p.latency(0.99))}",
            format_milliseconds(p.latency(0.99, refused=True)),
            format_statuses(p.statuses()),
            beat,
        ]
        lines.append(f"| {' | '.join([*rates, *times, f'{recovered:.2f}', f'{spent:.0%}, {p.own:.0%}'])} |")
    unnamed = sum(r.status in (429, 503) and b"retry-after" not in r.headers for _, p, *_ in rows for r in p.replies)
    wrong = sum(r.status == 200 and not r.right for _, p, *_ in [*sweep, *rows] for r in p.replies)
    checked = sum(r.status == 200 for _, p, *_ in [*sweep, *rows] for r in p.replies)
    lines += [
        "",
        (f"Responses that differ from those of the image alone, or have another request's ID: {wrong} of {checked:,}."),
        f"Rejections without Retry-After: {unnamed}.",
        (
            f"Memory of the server and its children: {before / MIB:.0f} MiB before, {peak / MIB:.0f} at the peak, "
            f"{after / MIB:.0f} after."
        ),
        "".join(
            f"{name} {metrics.get(f'vitreous_{name}_total', 0):.0f}. "
            for name in ("expired", "cancelled", "decoder_restarts")
        ),
        "",
    ]
    return lines


def print_phase(name: str, phase: LoadPhase) -> None:
    """Print the results of a phase in a line."""
    print(
        f"{name}: offered {phase.offered:.1f}/s, right {phase.goodput:.1f}/s, p99 {format_milliseconds(phase.latency(0.99))} ms, "
        f"refused p99 {format_milliseconds(phase.latency(0.99, True))} ms, {format_statuses(phase.statuses())}, client {phase.own:.0%}",
        file=sys.stderr,
        flush=True,
    )


def format_milliseconds(seconds: float) -> str:
    """Format a duration in milliseconds for a table."""
    return "–" if seconds != seconds else f"{1000 * seconds:.1f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def format_statuses(statuses: dict[str, int]) -> str:
    """`200 57, 429 920`."""
    return ", ".join(f"{name} {count}" for name, count in sorted(statuses.items()))


async def ensure_capacity(rig: BenchmarkContext) -> None:
    """If the part `load` has not run, measure the reference predictions and a rough T*."""
    if rig.capacity:
        return
    with rig.serve() as server:
        await collect_reference_predictions(rig, server)
        client = Client(server.port)
        rig.capacity = (await closed_loop(client, rig.questions(server.port), 16, min(6.0, rig.seconds))).goodput
        client.close()
    print(f"L1 {format_milliseconds(rig.alone)} ms, T* about {rig.capacity:.1f}/s", file=sys.stderr, flush=True)


PARTS = {
    "load": measure_load,
    "loris": serving_abuse.measure_slow_clients,
    "fuzz": serving_abuse.send_malformed_requests,
    "cancel": serving_abuse.measure_cancellation,
    "drain": serving_life.measure_drains,
    "crash": serving_life.measure_decoder_crashes,
    "reload": serving_life.measure_reloads,
    "soak": serving_life.measure_soak,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--model", default="ViT-S/16")
    parser.add_argument("--images", type=Path)
    parser.add_argument("--count", type=int, default=100, help="number of images")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--requests", type=int, default=10_000, help="number of requests of the part fuzz")
    parser.add_argument("--attackers", type=int, default=1000, help="number of clients of the parts loris and cancel")
    parser.add_argument("--drains", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=["load"])
    parser.add_argument(
        "--serve", nargs="+", default=[], help="additional options of vitreous serve without dashes: queue=64"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    server_core, client_core = bind_cores()
    torch.set_num_threads(1)
    run = arguments.run or make_run(arguments.scratch, arguments.model, arguments.seed)
    images = load_photographs(arguments.images, arguments.count, arguments.seed)
    words = tuple(word for option in arguments.serve for word in ("--" + option).split("=", 1))
    rig = BenchmarkContext(run, images, arguments.scratch, server_core, arguments.seconds, arguments.seed, words=words)
    mean = sum(len(raw) for _, raw in images) / len(images) / 1024
    lines = [
        f"# Serving {arguments.run.name if arguments.run else arguments.model}, {time.strftime('%Y-%m-%d')}",
        "",
        f"{describe_hardware()}, torch {torch.__version__}; the server on core {server_core}, the client on core {client_core}.",
        f"{len(images)} images of {mean:.0f} KiB on average.",
        "",
        (
            f"`python benchmarks/serving.py --scratch DIR --parts {' '.join(arguments.parts)} --seconds "
            f"{arguments.seconds:g}`"
        ),
        "",
    ]
    for part in arguments.parts:
        if part != "load":
            asyncio.run(ensure_capacity(rig))
        lines += asyncio.run(PARTS[part](rig, arguments))
        print(f"{part} done", file=sys.stderr, flush=True)
    text = "\n".join(lines)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
