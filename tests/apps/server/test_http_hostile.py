"""Malformed requests: known attacks, random requests, and requests derived from the OpenAPI document.

The requests are those of `benchmarks/serving.py --parts fuzz`, which sends ten thousand, and those of schemathesis.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.inference.server_client import ServerClient, encode_noise_image, save_bundle
from vitreous.apps.server.server import serve_in_thread
from vitreous.inference.predict import load

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
NUM_RANDOM_REQUESTS, MAX_SCHEMA_EXAMPLES = 180, 240


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with serve_in_thread(load(save_bundle(tmp_path_factory.mktemp("served") / "model"))) as server:
        yield ServerClient(server.address)


@pytest.fixture(scope="module")
def request_modules():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("serving_malformed"), importlib.import_module("serving_sending")
        for name in ("serving_malformed", "serving_sending", "serving_client"):
            sys.modules.pop(name, None)


def test_malformed_requests_cause_no_server_error(site, request_modules):
    requests, sending = request_modules
    image = encode_noise_image(1, kind="JPEG")
    before = site.predict(image)
    cases = [
        *requests.list_known_cases(site.port, image),
        *requests.generate_random_cases(site.port, NUM_RANDOM_REQUESTS, 1, [image, encode_noise_image(2, kind="PNG")]),
    ]
    tally = asyncio.run(sending.send_all(site.port, cases, together=16))
    assert not tally.wrong, "\n".join(
        f"{o.case.name}: {o.wrong}; {o.statuses}, hung up: {o.closed}" for o in tally.wrong
    )
    assert sum(tally.statuses.values()) == len(cases) >= 400
    assert {200, 400, 403, 404, 405, 413, 415, 422} <= set(tally.statuses)
    after = site.predict(image)
    assert (after[0], after[1]["predictions"]) == (200, before[1]["predictions"])


def test_the_malformed_request_checker_detects_faults(request_modules):
    requests, sending = request_modules
    error = {"error": {"code": "bad_request", "message": "no", "request_id": "x"}}
    reply = ({b"x-request-id": b"x"}, json.dumps(error).encode())

    def check_replies(replies, closed=True, **rules):
        return sending.evaluate_outcome(requests.MalformedRequest("it", (b"GET",), **rules), replies, closed, 0.1).wrong

    assert check_replies([(400, *reply)], strict=True, allowed=(400,)) == ""
    assert "neither" in check_replies([], closed=False)
    assert "server error" in check_replies([(500, *reply)])
    assert "not refused" in check_replies([(200, *reply)], strict=True)
    assert "continued to read" in check_replies([(400, *reply), (404, *reply)], strict=True)
    assert "continued to read" in check_replies([(400, *reply)], closed=False, strict=True)
    assert "among" in check_replies([(422, *reply)], allowed=(400,))
    assert "JSON" in check_replies([(400, {b"x-request-id": b"y"}, reply[1])])
    assert "JSON" in check_replies([(400, reply[0], b"no")])


def test_schemathesis_requests_cause_no_server_error(site):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(f"{site.address}/openapi.json")
    sent = 0
    operations = [found_operations.ok() for found_operations in schema.get_all_operations()]
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(
            max_examples=MAX_SCHEMA_EXAMPLES // 3,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def send_case(case):
            nonlocal sent
            response = case.call(base_url=site.address, timeout=60)
            # 504: a deadline of one millisecond
            assert response.status_code < 500 or response.status_code == 504, response.text
            sent += 1

        send_case()
    assert sent >= MAX_SCHEMA_EXAMPLES
