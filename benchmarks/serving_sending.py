"""Send the requests of `serving_malformed.py` on separate connections, and check the responses."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from serving_client import parse_response
from serving_malformed import MalformedRequest

RESPONSE_TIMEOUT = 20.0  # seconds until the server must respond or close the connection
MAX_RETRIES = 100  # maximum retries of requests rejected for load
CLOSE_TIMEOUT = 2.0  # maximum seconds until the server closes the connection after a rejection
FAULT_STATUSES = {
    500,
    502,
    503,
}  # statuses that a client must not be able to cause; 503 because the server neither drains nor starts here


@dataclass(frozen=True)
class CaseOutcome:
    """The received statuses, whether the server closed the connection, seconds, and the violation ("": none)."""

    case: MalformedRequest
    statuses: tuple[int, ...]
    closed: bool
    seconds: float
    wrong: str


async def send_case(port: int, case: MalformedRequest) -> CaseOutcome:
    """Send one request on a new connection and read the response."""
    clock = asyncio.get_running_loop().time
    begun, found, closed = clock(), bytearray(), False
    replies: list[tuple[int, dict[bytes, bytes], bytes]] = []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def push() -> None:
        try:
            for piece in case.pieces:
                if replies:
                    return
                writer.write(piece)
                await writer.drain()
            if case.finish:
                await asyncio.wait([pulling], timeout=0.3)
                writer.write_eof()
        except OSError:
            return

    async def pull() -> None:
        nonlocal closed
        while True:
            try:
                piece = await reader.read(65536)
            except OSError:
                piece = b""
            closed = not piece
            found.extend(piece)
            while one := parse_response(found):
                replies.extend([one] * (one[0] != 100))
            if closed or (replies and not case.strict):
                return

    pulling = asyncio.create_task(pull())
    pushing = asyncio.create_task(push())
    while not pulling.done() and clock() - begun < RESPONSE_TIMEOUT:
        answered = bool(replies)
        await asyncio.wait([pulling], timeout=CLOSE_TIMEOUT if answered else 0.25)
        if answered and not pulling.done():
            break
    for task in (pushing, pulling):
        task.cancel()
    await asyncio.gather(pushing, pulling, return_exceptions=True)
    writer.close()
    return evaluate_outcome(case, replies, closed, clock() - begun)


def evaluate_outcome(case: MalformedRequest, replies: list, closed: bool, seconds: float) -> CaseOutcome:
    """Compare the responses with the allowed ones."""
    statuses = tuple(status for status, _, _ in replies)
    wrong = ""
    if not replies and not closed:
        wrong = "neither responded nor closed"
    elif FAULT_STATUSES & set(statuses):
        wrong = "a server error"
    elif case.strict and any(status < 400 for status in statuses):
        wrong = "not refused"
    elif case.strict and (len(statuses) > 1 or not closed):
        wrong = "continued to read after a request with an ambiguous end"
    elif case.allowed and statuses and statuses[0] not in case.allowed:
        wrong = f"status not among {case.allowed}"
    elif not case.pieces[0].startswith(b"HEAD") and (
        undocumented := [r[0] for r in replies if r[0] >= 400 and not is_error_document(*r[1:])]
    ):
        wrong = f"{undocumented[0]} without its JSON error"
    return CaseOutcome(case, statuses, closed, seconds, wrong)


def is_error_document(headers: dict[bytes, bytes], body: bytes) -> bool:
    """Whether an error response has its code, message and request ID on one line of JSON."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return {"code", "message", "request_id"} <= set(error) and headers.get(b"x-request-id", b"").decode() == error[
        "request_id"
    ]


@dataclass
class OutcomeTally:
    """Many outcomes: counts by status, the violations, and the slowest."""

    statuses: Counter = field(default_factory=Counter)
    wrong: list[CaseOutcome] = field(default_factory=list)
    slowest: CaseOutcome | None = None


async def send_all(port: int, cases: Sequence[MalformedRequest], together: int = 8) -> OutcomeTally:
    """Send the requests, a few at a time."""
    tally, waiting = OutcomeTally(), iter(cases)

    async def one() -> None:
        for case in waiting:
            outcome = await send_case(port, case)
            for _ in range(MAX_RETRIES):
                if outcome.statuses[:1] != (429,):
                    break
                await asyncio.sleep(0.2)
                outcome = await send_case(port, case)
            tally.statuses[outcome.statuses[0] if outcome.statuses else "hung up"] += 1
            tally.wrong += [outcome] * bool(outcome.wrong)
            if tally.slowest is None or outcome.seconds > tally.slowest.seconds:
                tally.slowest = outcome

    await asyncio.gather(*(one() for _ in range(together)))
    return tally
