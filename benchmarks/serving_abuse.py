"""Slow, malformed and disconnecting clients; parts of `serving.py`."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import resource
import sys
from collections import Counter, defaultdict

from serving_client import Client, ClientRequest, LoadPhase, compute_quantile, make_upload_requests, open_loop
from serving_malformed import MAX_OFFERED_BYTES, generate_random_cases, list_known_cases
from serving_sending import send_all
from serving_server import Server, make_run

MIB = 2**20
SMALL_MODEL = "ViT-64x2/32"
ATTACKS = ("header", "body", "idle", "reader")
ATTACK_DESCRIPTIONS = {
    "header": "one byte of a header every 5 s",
    "body": "one byte of a body per second",
    "idle": "sends nothing",
    "reader": "does not read the responses to 30 requests",
}


def raise_file_limit() -> None:
    """Raise the limit of open descriptors to the maximum."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def hold_connection(port: int, way: str, until: float) -> tuple[str, float]:
    """Hold one connection as long as possible. Returns the duration; infinite if it was still open at the end."""
    clock = asyncio.get_running_loop().time
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    except OSError:
        return way, 0.0
    begun, host = clock(), f"Host: 127.0.0.1:{port}\r\n"
    if way == "header":
        writer.write(f"GET /v1/model HTTP/1.1\r\n{host}X-A: ".encode())
    elif way == "body":
        writer.write(
            f"POST /v1/predict HTTP/1.1\r\n{host}Content-Type: image/jpeg\r\nContent-Length: 60000\r\n\r\n".encode()
        )
    elif way == "reader":
        writer.write(f"GET /v1/model HTTP/1.1\r\n{host}\r\n".encode() * 30)
        assert isinstance(writer.transport, asyncio.Transport)
        writer.transport.pause_reading()
    try:
        if way == "reader":  # a close cannot be detected without reading: send occasionally until that fails
            while clock() < until:
                await asyncio.sleep(1)
                writer.write(b"G")
                await writer.drain()
            return way, float("inf")
        pause = {"header": 5.0, "body": 1.0, "idle": 1.0}[way]
        while clock() < until:
            try:
                if not await asyncio.wait_for(reader.read(4096), pause):
                    return way, clock() - begun
            except TimeoutError:
                if way != "idle":
                    writer.write(b"a")
                    await writer.drain()
        return way, float("inf")
    except OSError:
        return way, clock() - begun
    finally:
        writer.transport.abort()


async def run_normal_clients(port: int, asked: list[ClientRequest], rig, seconds: float) -> list[LoadPhase]:
    """Requests at 0.7 T*, half of them on persistent connections."""
    kept, fresh = Client(port), Client(port, fresh=True)
    rate = 0.35 * rig.capacity
    phases = await asyncio.gather(
        open_loop(kept, asked, rate, seconds, rig.seed), open_loop(fresh, asked, rate, seconds, rig.seed + 1)
    )
    kept.close()
    return phases


async def measure_slow_clients(rig, arguments) -> list[str]:
    """Attackers hold connections while normal clients, half of them on new connections, send requests at 0.7 T*."""
    raise_file_limit()
    seconds = max(rig.seconds, 45.0)
    with rig.serve() as server:
        asked = rig.questions(server.port)
        calm = await run_normal_clients(server.port, asked, rig, seconds / 3)
        before, files = server.memory(), server.files()
        clock = asyncio.get_running_loop().time
        until = clock() + seconds + 2
        attackers = [
            asyncio.create_task(hold_connection(server.port, way, until))
            for _, way in zip(range(arguments.attackers), itertools.cycle(ATTACKS))
        ]
        await asyncio.sleep(2)
        held = server.files() - files
        attacked = await run_normal_clients(server.port, asked, rig, seconds)
        peak = server.memory()
        ended = await asyncio.gather(*attackers)
        await asyncio.sleep(1)
        after, left = server.memory(), server.files()
    lines = [
        "## Slow clients",
        "",
        f"{arguments.attackers} connections, {held} of them still open after 2 s; normal clients at 0.7 T* for {seconds:g} s.",
        "",
    ]
    names = [
        f"{how}, {when}"
        for when in ("before the attack", "during the attack")
        for how in ("persistent connections", "new connections")
    ]
    for name, phase in zip(names, [*calm, *attacked], strict=True):
        share, statuses = len(phase.good) / len(phase.replies), phase.statuses()
        lines.append(
            f"- {name}: {share:.1%} of {len(phase.replies)} correct, {statuses}, p99 {phase.latency(0.99):.2f} s"
        )
    times = defaultdict(list)
    for way, span in ended:
        times[way].append(span)
    lines += [
        "",
        "| attack | connections | median s until closed | longest | open at the end |",
        "|---|---|---|---|---|",
    ]
    for way in ATTACKS:
        spans = [span for span in times[way] if span != float("inf")]
        longest = f"{compute_quantile(spans, 0.5):.1f} | {max(spans):.1f}" if spans else "– | –"
        lines.append(f"| {ATTACK_DESCRIPTIONS[way]} | {len(times[way])} | {longest} | {len(times[way]) - len(spans)} |")
    lines += [
        "",
        f"Memory {before / MIB:.0f} MiB before, {peak / MIB:.0f} during the attack, {after / MIB:.0f} after.",
        f"Descriptors {files} before, {left} after.",
        "",
    ]
    return lines


async def send_malformed_requests(rig, arguments) -> list[str]:
    """Known cases, then random requests, then the initial requests again; with a small model, so that few requests are
    rejected for load."""
    with rig.serve(make_run(rig.scratch, SMALL_MODEL, rig.seed)) as server:
        client = Client(server.port)
        expected = [
            json.loads((await client.ask(question)).body)["predictions"]
            for question in make_upload_requests(server.port, rig.pictures)
        ]
        memory_before, raws = server.memory(), [raw for _, raw in rig.pictures[:20]]
        cases = list_known_cases(server.port, raws[0])
        known = len(cases)
        cases += generate_random_cases(server.port, max(0, arguments.requests - known), rig.seed, raws)
        begun = asyncio.get_running_loop().time()
        tally = await send_all(server.port, cases)
        seconds = asyncio.get_running_loop().time() - begun
        right = sum(
            [
                (await client.ask(question)).right
                for question in make_upload_requests(server.port, rig.pictures, expected)
            ]
        )
        client.close()
        memory_after, metrics, alive = server.memory(), server.metrics(), server.process.poll() is None
    outcomes_by_fault = defaultdict(list)
    for outcome in tally.wrong:
        outcomes_by_fault[outcome.wrong].append(outcome)
        print(
            f"WRONG {outcome.case.name}: {outcome.wrong}; {outcome.statuses}, closed {outcome.closed}", file=sys.stderr
        )
    counted = ", ".join(f"{status} {count}" for status, count in sorted(tally.statuses.items(), key=str))
    lines = [
        "## Malformed requests",
        "",
        (
            f"{len(cases):,} requests in {seconds:.0f} s: {known} known cases, bodies up to {MAX_OFFERED_BYTES // MIB} MiB; the others from "
            f"seed {rig.seed}."
        ),
        "",
        f"- first statuses: {counted}",
        (
            f"- 500: {tally.statuses[500]}; neither responded nor closed: "
            f"{sum(o.wrong.startswith('neither') for o in tally.wrong)}"
        ),
        f"- other violations: {sum(map(len, outcomes_by_fault.values()))}"
        + "".join(
            f"; {why}: {', '.join(o.case.name for o in outcomes[:6])}" for why, outcomes in outcomes_by_fault.items()
        ),
        f"- slowest: {tally.slowest.case.name}, {tally.slowest.seconds:.1f} s",
        f"- server alive: {alive}; {right} of {len(rig.pictures)} images correct afterwards",
        f"- restarted decoders: {metrics.get('vitreous_decoder_restarts_total', 0):.0f}",
        f"- memory {memory_before / MIB:.0f} MiB before, {memory_after / MIB:.0f} after",
        "",
    ]
    return lines


def count_computed_images(server: Server) -> float:
    """Images processed by the model so far."""
    return server.metrics().get("vitreous_batch_images_sum", 0.0)


async def measure_cancellation(rig, arguments) -> list[str]:
    """Clients that disconnect during the upload, while they wait, or within a second; eight at a time."""
    draw = random.Random(rig.seed)
    with rig.serve() as server:
        before, files, first = server.memory(), server.files(), count_computed_images(server)
        asked, seen = rig.questions(server.port), Counter()
        room = asyncio.Semaphore(8)

        async def leave(number: int) -> None:
            question = draw.choice(asked)
            raw = question.before + f"leaving-{number}".encode() + question.after
            async with room:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                phase = number % 3
                writer.write(raw[: draw.randrange(1, len(raw))] if phase == 0 else raw)
                await writer.drain()
                try:
                    head = await asyncio.wait_for(reader.read(100), draw.uniform(0, 1.0 if phase == 2 else 0.02))
                    seen[head[9:12].decode()] += 1
                except (TimeoutError, OSError):
                    pass
                writer.transport.abort()

        await asyncio.gather(*(leave(number) for number in range(arguments.attackers)))
        await asyncio.sleep(3)
        spent = count_computed_images(server) - first
        client = Client(server.port)
        right = sum([(await client.ask(question)).right for question in asked])
        client.close()
        await asyncio.sleep(0.5)
        after, left, metrics = server.memory(), server.files(), server.metrics()
    waiting = sum(number % 3 != 0 for number in range(arguments.attackers))
    return [
        "## Clients that disconnect",
        "",
        (
            f"{arguments.attackers} clients, 8 at a time: a third during the upload, a third within 20 ms after it, a third "
            "within 1 s."
        ),
        "",
        f"- {waiting} had sent the complete request; {seen['200']} received a response and {seen['429']} a rejection before they disconnected",
        f"- images computed: {spent:.0f}; counted as cancelled: {metrics.get('vitreous_cancelled_total', 0):.0f}",
        f"- afterwards {right} of {len(asked)} images correct",
        f"- memory {before / MIB:.0f} MiB before, {after / MIB:.0f} after; descriptors {files} before, {left} after",
        "",
    ]
