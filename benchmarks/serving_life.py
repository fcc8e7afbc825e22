"""Shutdown, reload, decoder crashes and long operation of a server; parts of `serving.py`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import time
from pathlib import Path

from serving_client import (
    STATUS_BROKEN,
    STATUS_HUNG,
    Client,
    ClientResponse,
    closed_loop,
    compute_quantile,
    make_request,
    open_loop,
)
from serving_server import make_run
from serving_trap import TRICKS

MIB = 2**20
TRAP_SCRIPT = Path(__file__).parent / "serving_trap.py"


def is_port_closed(port: int) -> bool:
    """Whether a port no longer accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return True
    return False


async def drain_server(rig, server_index: int) -> dict:
    """One server under load, a SIGTERM at a random time, and the outcome of every request."""
    draw = random.Random(rig.seed + server_index)
    with rig.serve() as server:
        client, asked, clock = Client(server.port), rig.questions(server.port), asyncio.get_running_loop().time
        load = asyncio.create_task(open_loop(client, asked, 1.5 * rig.capacity, 4.0, server_index))
        await asyncio.sleep(draw.uniform(1.0, 2.0))
        told = clock()
        server.process.send_signal(signal.SIGTERM)
        while not await asyncio.to_thread(is_port_closed, server.port) and clock() - told < 15:
            await asyncio.sleep(0.002)
        closed = clock() - told
        while server.process.poll() is None and clock() - told < 20:
            await asyncio.sleep(0.005)
        ended, code = clock() - told, server.process.poll()
        phase = await load
    before = [reply for reply in phase.replies if reply.sent < told]
    waiting = [reply for reply in before if reply.finished > told]
    lost = [reply for reply in before if reply.status in (STATUS_BROKEN, STATUS_HUNG)]
    wrong = [reply for reply in before if reply.status == 200 and not reply.right]
    late = [reply for reply in phase.replies if reply.sent >= told and reply.sent < told + closed]
    torn = [reply for reply in late if reply.status in (STATUS_BROKEN, STATUS_HUNG)]
    return {
        "before": len(before),
        "waiting": len(waiting),
        "lost": len(lost),
        "wrong": len(wrong),
        "late": len(late),
        "torn": len(torn),
        "closed": closed,
        "ended": ended,
        "code": code,
    }


async def measure_drains(rig, arguments) -> list[str]:
    """Shut down `--drains` servers under load at 1.5 T*."""
    rows = []
    for server_index in range(arguments.drains):
        rows.append(await drain_server(rig, server_index))
        print(rows[-1], flush=True)

    def total(key: str) -> int:
        return sum(row[key] for row in rows)

    clean = sum(row["code"] == 0 and not row["lost"] and not row["wrong"] for row in rows)
    return [
        "## SIGTERM under load",
        "",
        (
            f"{len(rows)} servers at 1.5 T*, each with a SIGTERM after 1 to 2 s: {clean} of {len(rows)} exited with 0 and "
            "lost no request."
        ),
        "",
        f"- sent before the signal: {total('before')}, of which {total('waiting')} were waiting for a response",
        f"- of these lost: {total('lost')}, wrong: {total('wrong')}",
        f"- sent after the signal, while the listener was open: {total('late')}, without a response: {total('torn')}",
        f"- listener closed within {max(row['closed'] for row in rows) * 1000:.0f} ms",
        (
            f"- exited within {max(row['ended'] for row in rows):.2f} s, median "
            f"{compute_quantile([row['ended'] for row in rows], 0.5):.2f}"
        ),
        "",
    ]


async def measure_decoder_crashes(rig, arguments) -> list[str]:
    """Images that crash, spin or exhaust memory, and a decoder killed from outside, during load at 0.5 T*."""
    lines = [
        "## Decoder failures",
        "",
        "| failure | status | s until response | other requests correct | same process |",
        "|---|---|---|---|---|",
    ]
    with rig.serve(program=(str(TRAP_SCRIPT), "serve")) as server:
        asked, first = rig.questions(server.port), server.process.pid
        memory = server.memory()
        for trick in (*TRICKS, b"SIGKILL"):
            client, side = Client(server.port), Client(server.port)
            load = asyncio.create_task(open_loop(client, asked, 0.5 * rig.capacity, 10.0, rig.seed))
            await asyncio.sleep(1)
            if trick == b"SIGKILL":
                for child in server.decoders():
                    os.kill(child, signal.SIGKILL)
                victim = None
            else:
                victim = await side.ask(
                    make_request(server.port, "/v1/predict", rig.pictures[0][1] + trick, "image/jpeg")
                )
            phase = await load
            response = f"{victim.status} | {victim.seconds:.2f}" if victim else "– | –"
            alive = server.process.poll() is None and server.process.pid == first
            lines.append(
                f"| {trick.decode()} | {response} | {len(phase.good)} of {len(phase.replies)} {phase.statuses()} | {alive} |"
            )
            client.close()
            side.close()
        restarts = server.metrics().get("vitreous_decoder_restarts_total", 0)
        lines += [
            "",
            (
                f"Restarted decoders: {restarts:.0f}. Memory {memory / MIB:.0f} MiB before, "
                f"{server.memory() / MIB:.0f} after."
            ),
            "",
        ]
    return lines


def replace_bundle(run: Path, replacement: Path) -> None:
    """Replace a bundle by another, file by file as a copy does."""
    for path in replacement.iterdir():
        if path.is_file():
            shutil.copy(path, run / f".{path.name}")
            os.replace(run / f".{path.name}", run / path.name)


async def measure_reloads(rig, arguments) -> list[str]:
    """SIGHUP during load at 0.7 T*: another model, then a damaged one, then the first again."""
    reloaded = rig.scratch / "reloaded"
    shutil.rmtree(reloaded, ignore_errors=True)
    first = make_run(rig.scratch, arguments.model, 0)
    second = make_run(rig.scratch, arguments.model, 1)
    shutil.copytree(first, reloaded)
    lines = [
        "## Reload by SIGHUP",
        "",
        "| new bundle | versions before, after | requests, statuses | p99 s | s until used |",
        "|---|---|---|---|---|",
    ]
    with rig.serve(run=reloaded) as server:
        asked = [make_request(server.port, "/v1/predict", raw, "image/jpeg") for _, raw in rig.pictures]
        memory_before = server.memory()
        for new_bundle in ("another", "a damaged one", "the first"):
            client, side = Client(server.port), Client(server.port)
            version_before = read_model_version(await side.ask(asked[0]))
            load = asyncio.create_task(open_loop(client, asked, 0.7 * rig.capacity, 15.0))
            await asyncio.sleep(2)
            replace_bundle(reloaded, {"another": second, "the first": first}.get(new_bundle, second))
            if new_bundle == "a damaged one":
                with open(reloaded / "weights.safetensors", "r+b") as file:
                    file.seek(-1000, 2)
                    file.write(b"\xff" * 100)
            begun = time.perf_counter()
            server.process.send_signal(signal.SIGHUP)
            seconds_until_used = float("nan")
            while time.perf_counter() - begun < 12:
                if read_model_version(await side.ask(asked[0])) != version_before:
                    seconds_until_used = time.perf_counter() - begun
                    break
                await asyncio.sleep(0.1)
            phase = await load
            version_after = read_model_version(await side.ask(asked[0]))
            versions = sorted({read_model_version(reply) for reply in phase.replies if reply.status == 200})
            requests = f"{len(phase.replies)}, {phase.statuses()}, {len(versions)} versions"
            lines.append(
                f"| {new_bundle} | {version_before}, {version_after} | {requests} | {phase.latency(0.99):.2f} | {seconds_until_used:.1f} |"
            )
            client.close()
            side.close()
        lines += ["", f"Memory {memory_before / MIB:.0f} MiB before, {server.memory() / MIB:.0f} after three.", ""]
    return lines


def read_model_version(reply: ClientResponse) -> str:
    """The model's version in a response."""
    try:
        return json.loads(reply.body)["model"]["version"]
    except (ValueError, KeyError):
        return f"status {reply.status}"


async def measure_soak(rig, arguments) -> list[str]:
    """Long operation at 0.7 T*, with one image in ten damaged."""
    minutes = max(rig.seconds * 10, 60) / 60
    with rig.serve() as server:
        asked = rig.questions(server.port)
        bad = [
            make_request(server.port, "/v1/predict", raw[: len(raw) // 2], "image/jpeg")
            for _, raw in rig.pictures[: len(asked) // 10]
        ]
        client = Client(server.port)
        await closed_loop(client, asked, 4, 5)
        rows = []
        for _ in range(6):
            phase = await open_loop(client, [*asked, *bad], 0.7 * rig.capacity, minutes * 10, len(rows))
            rows.append((phase.latency(0.5), phase.latency(0.99), server.memory(), server.files(), phase.statuses()))
            print(rows[-1], flush=True)
        client.close()
    lines = ["## Long operation", "", f"{minutes:.0f} minutes at 0.7 T*, one image in ten truncated.", ""]
    lines += ["| sixth | p50 ms | p99 ms | memory MiB | descriptors | statuses |", "|---|---|---|---|---|---|"]
    for sixth, (p50, p99, memory, files, statuses) in enumerate(rows, 1):
        lines.append(f"| {sixth} | {1000 * p50:.0f} | {1000 * p99:.0f} | {memory / MIB:.0f} | {files} | {statuses} |")
    return [*lines, ""]
