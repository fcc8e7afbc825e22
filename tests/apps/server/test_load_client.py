"""The load client of `benchmarks/serving.py`: latency from the due time, and detection of mixed-up responses."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path

import pytest

SERVICE_SECONDS = 0.02  # service time of one response; responses are serial


@pytest.fixture(scope="module")
def load_client():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
        yield importlib.import_module("serving_client")
        sys.modules.pop("serving_client", None)


async def run_against_fake_server(ask, answer):
    """Return the result of `ask(port)` against a server that responds with `answer(id)`: (id, document)."""
    turn = asyncio.Lock()

    async def handle(reader, writer):
        with_id = b""
        while line := await reader.readline():
            if line.lower().startswith(b"x-request-id:"):
                with_id = line.partition(b":")[2].strip()
            if line == b"\r\n":
                async with turn:
                    await asyncio.sleep(SERVICE_SECONDS)
                name, document = answer(with_id)
                body = json.dumps(document).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nX-Request-Id: %s\r\nContent-Length: %d\r\n\r\n" % (name, len(body)) + body
                )
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        return await ask(server.sockets[0].getsockname()[1])


def test_latency_counts_from_the_time_a_request_was_due(load_client):
    async def ask(port):
        client = load_client.Client(port, most=1)
        phase = await load_client.open_loop(client, [load_client.make_request(port, "/")], 200, 0.3)
        client.close()
        return phase

    phase = asyncio.run(run_against_fake_server(ask, lambda name: (name, {})))
    assert len(phase.replies) > 30 and phase.statuses() == {"200": len(phase.replies)}
    last = max(phase.replies, key=lambda reply: reply.finished)
    # it waited for all requests before it, minus the time until it was due
    assert last.seconds > SERVICE_SECONDS * len(phase.replies) - 0.3
    assert last.finished - last.sent < last.seconds / 2


def test_responses_with_wrong_ids_or_probabilities_are_errors(load_client):
    expected = [{"classes": [{"class": "a", "probability": 0.1}]}]
    responses = {
        "right": lambda name: (name, {"predictions": expected}),
        "another's": lambda name: (b"x" + name, {"predictions": expected}),
        "last digit": lambda name: (name, {"predictions": [{"classes": [{"class": "a", "probability": 0.1 + 2e-17}]}]}),
    }

    def send_request(response):
        async def ask(port):
            client = load_client.Client(port)
            reply = await client.ask(load_client.make_request(port, "/", expected=expected))
            client.close()
            return reply

        return asyncio.run(run_against_fake_server(ask, response))

    assert {name: send_request(response).right for name, response in responses.items()} == {
        "right": True,
        "another's": False,
        "last digit": False,
    }


def test_quantiles_are_observed_values(load_client):
    assert [load_client.compute_quantile([3.0, 1.0, 2.0, 4.0], share) for share in (0.25, 0.5, 0.75, 0.99, 1.0)] == [
        1,
        2,
        3,
        4,
        4,
    ]
