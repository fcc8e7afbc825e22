"""An HTTP/1.1 client on asyncio's sockets that sends at scheduled times, independent of the server; used by
`serving.py`.

Latency counts from the scheduled time of a request, not from the time at which a connection was available: a stall of
the server counts for all waiting requests.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

REQUEST_TIMEOUT = 60.0  # seconds after which a request counts as hung
STATUS_BROKEN, STATUS_HUNG = 0, -1  # statuses of requests without a response


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request without its ID: the bytes before and after the ID, and the expected predictions."""

    before: bytes
    after: bytes
    expected: list | None = None


@dataclass(frozen=True, slots=True)
class ClientResponse:
    """A response: status, seconds since the scheduled time and since sending, its time, and whether it is correct."""

    status: int
    seconds: float
    finished: float
    sent: float
    right: bool
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""


class ClientConnection(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self.buffer, self.waiter, self.open = bytearray(), None, False
        self.transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport, self.open = transport, True

    def connection_lost(self, error) -> None:
        self.open = False
        if self.waiter and not self.waiter.done():
            self.waiter.set_result((STATUS_BROKEN, {}, b""))

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while self.waiter and not self.waiter.done() and (response := parse_response(self.buffer)):
            if response[0] != 100:
                self.waiter.set_result(response)

    def ask(self, raw: bytes) -> asyncio.Future:
        """Send a request; the future holds (status, headers, body)."""
        self.buffer.clear()
        self.waiter = asyncio.get_running_loop().create_future()
        self.transport.write(raw)
        return self.waiter


def parse_response(buffer: bytearray) -> tuple[int, dict[bytes, bytes], bytes] | None:
    """Remove a complete response with a Content-Length from the buffer and return it, or None."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    status_line, *lines = bytes(buffer[:end]).split(b"\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    size = end + 4 + int(headers.get(b"content-length", 0))
    if len(buffer) < size:
        return None
    body = bytes(buffer[end + 4 : size])
    del buffer[:size]
    return int(status_line.split()[1]), headers, body


class Client:
    """A pool of connections to a server."""

    def __init__(self, port: int, most: int = 2000, fresh: bool = False) -> None:
        self.port, self.fresh, self.idle, self.room = port, fresh, [], asyncio.Semaphore(most)
        self.numbers = itertools.count()
        self.mark = f"{random.randrange(16**6):06x}"

    async def connected(self) -> ClientConnection:
        """An idle connection that is still open, or a new one."""
        while self.idle and not self.fresh:
            line = self.idle.pop()
            if line.open:
                return line
        return (await asyncio.get_running_loop().create_connection(ClientConnection, "127.0.0.1", self.port))[1]

    async def ask(self, question: ClientRequest, due: float | None = None) -> ClientResponse:
        """Send one request and wait for its response; a broken connection or a hung request is a response too."""
        clock = asyncio.get_running_loop().time
        due, name = clock() if due is None else due, f"{self.mark}-{next(self.numbers)}".encode()
        async with self.room:
            sent = clock()
            try:
                line = await self.connected()
                sent = clock()
                status, headers, body = await asyncio.wait_for(
                    line.ask(question.before + name + question.after), REQUEST_TIMEOUT
                )
            except (OSError, TimeoutError) as error:
                return ClientResponse(
                    STATUS_HUNG if isinstance(error, TimeoutError) else STATUS_BROKEN,
                    clock() - due,
                    clock(),
                    sent,
                    False,
                )
            finished = clock()
        if status and headers.get(b"connection", b"").lower() != b"close" and not self.fresh:
            self.idle.append(line)
        elif line.open:
            line.transport.close()
        right = status == 200 and headers.get(b"x-request-id") == name and matches_expected(question.expected, body)
        return ClientResponse(status, finished - due, finished, sent, right, headers, body)

    def close(self) -> None:
        """Close all idle connections."""
        for line in self.idle:
            if line.open:
                line.transport.close()
        self.idle.clear()


def matches_expected(expected: list | None, body: bytes) -> bool:
    """Whether the predictions equal the expected ones exactly; always true without expected predictions."""
    return expected is None or json.loads(body)["predictions"] == expected


def make_request(
    port: int, path: str, body: bytes = b"", content_type: str = "", expected: list | None = None, more: str = ""
) -> ClientRequest:
    """A well-formed request: POST with a body, GET without."""
    head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{more}"
    head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n" if body else ""
    return ClientRequest(head.encode() + b"X-Request-Id: ", b"\r\n\r\n" + body, expected)


def make_upload_requests(
    port: int, images: Sequence[tuple[str, bytes]], expected: Sequence[list] | None = None
) -> list[ClientRequest]:
    """One request per image: even ones as a form with a file name, odd ones as the body."""
    requests = []
    for index, (name, raw) in enumerate(images):
        predictions = expected[index] if expected else None
        if index % 2:
            requests.append(make_request(port, "/v1/predict?top=5", raw, "image/jpeg", predictions))
        else:
            body, content_type = encode_multipart([(name, raw)])
            requests.append(make_request(port, "/v1/predict?top=5", body, content_type, predictions))
    return requests


def encode_multipart(files: Sequence[tuple[str, bytes]], boundary: str = "frontier7f3a") -> tuple[bytes, str]:
    """Encode a multipart body with these files; returns it and its Content-Type."""
    parts = []
    for name, raw in files:
        parts.append(
            f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n\r\n'.encode()
            + raw
            + b"\r\n"
        )
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


@dataclass
class LoadPhase:
    """The results of a phase of load. Rates are per second; the first `skip` seconds do not count for the goodput."""

    start: float
    seconds: float
    skip: float
    replies: list[ClientResponse]
    own: float  # processor seconds of the client per second

    @property
    def offered(self) -> float:
        """Requests sent per second."""
        return len(self.replies) / self.seconds

    @property
    def good(self) -> list[ClientResponse]:
        """The correct responses."""
        return [reply for reply in self.replies if reply.right]

    @property
    def goodput(self) -> float:
        """Correct responses per second between the skipped start and the end of sending."""
        low, high = self.start + self.skip, self.start + self.seconds
        return sum(low <= reply.finished < high for reply in self.good) / (self.seconds - self.skip)

    def statuses(self) -> dict[str, int]:
        """The number of responses by status; a 200 with incorrect predictions counts as `wrong`."""
        names = {STATUS_BROKEN: "broken", STATUS_HUNG: "hung"}
        return dict(
            Counter(
                "wrong" if r.status == 200 and not r.right else names.get(r.status, str(r.status)) for r in self.replies
            )
        )

    def latency(self, share: float, refused: bool = False) -> float:
        """A quantile of the latency of correct responses, or of rejections (429 and 503); NaN if there are none."""
        chosen = [r for r in self.replies if r.status in (429, 503)] if refused else self.good
        return compute_quantile([reply.seconds for reply in chosen], share)


def compute_quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; NaN if there are none."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)] if ordered else float("nan")


async def open_loop(
    client: Client, questions: Sequence[ClientRequest], rate: float, seconds: float, seed: int = 0
) -> LoadPhase:
    """Send requests at Poisson times of this rate, in random order; returns when all have ended."""
    draw, clock, tasks = random.Random(seed), asyncio.get_running_loop().time, []
    begun, start = time.process_time(), clock()
    due = start + draw.expovariate(rate)
    while due < start + seconds:
        if (wait := due - clock()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(client.ask(draw.choice(questions), due)))
        due += draw.expovariate(rate)
    own = (time.process_time() - begun) / seconds
    return LoadPhase(start, seconds, min(2.0, seconds / 5), await asyncio.gather(*tasks), own)


async def closed_loop(client: Client, questions: Sequence[ClientRequest], clients: int, seconds: float) -> LoadPhase:
    """A number of clients that each send the next request after a response; a rejected one waits 20 ms."""
    clock, replies = asyncio.get_running_loop().time, []
    begun, start = time.process_time(), clock()
    order = itertools.cycle(questions)

    async def one() -> None:
        while clock() < start + seconds:
            replies.append(reply := await client.ask(next(order)))
            if not reply.right:
                await asyncio.sleep(0.02)

    await asyncio.gather(*(one() for _ in range(clients)))
    return LoadPhase(start, seconds, min(2.0, seconds / 5), replies, (time.process_time() - begun) / seconds)


async def send_periodically(client: Client, path: str, every: float, over: asyncio.Event) -> list[ClientResponse]:
    """Request a path periodically until the event `over`."""
    clock, tasks, asked = asyncio.get_running_loop().time, [], make_request(client.port, path)
    due = clock()
    while not over.is_set():
        tasks.append(asyncio.create_task(client.ask(asked, due)))
        due += every
        await asyncio.sleep(max(0.0, due - clock()))
    return await asyncio.gather(*tasks)
