"""Malformed requests and hostile clients: each is rejected with an error code, without affecting other requests."""

from __future__ import annotations

import io
import json
import socket
import sys
from dataclasses import replace

import pytest
from PIL import Image

from tests.inference.server_client import (
    ServerClient,
    encode_multipart,
    encode_noise_image,
    receive_all,
    save_bundle,
    wait_until,
)
from vitreous.apps.server.responses import Refusal
from vitreous.apps.server.server import serve_in_thread
from vitreous.apps.server.settings import AccessControl, ServerLimits, ServerSettings
from vitreous.apps.server.start import parse_server_options
from vitreous.cli.serve import Options as ServeOptions
from vitreous.inference.predict import load

#: image endings that make a decoding process fail in different ways
CRASHING_DECODER_SCRIPT = """
import ctypes, sys
from vitreous.apps.server import child
def decode_or_fail(content, *rest):
    if content.endswith(b"CRASH"):
        ctypes.string_at(0)
    while content.endswith(b"SPIN"):
        pass
    if content.endswith(b"EAT"):
        held = [bytearray(2**26) for _ in range(10**6)]
    return child.decode_request_image(content, *rest)
child.serve_jobs(decode_or_fail)
"""
SERVER_LIMITS = ServerLimits(
    bytes=200_000,
    queue=4,
    images=3,
    head_seconds=0.6,
    body_seconds=0.6,
    idle_seconds=0.6,
    decode_seconds=1.0,
    decode_memory=2**29,
    pixels=90_000,
    connections=40,
)
HOST_HEADER = b"Host: localhost\r\n"


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    return load(save_bundle(tmp_path_factory.mktemp("served") / "model"))


@pytest.fixture(scope="module")
def server(predictor):
    command = (sys.executable, "-c", CRASHING_DECODER_SCRIPT)
    with serve_in_thread(
        predictor, ServerSettings(port=0, quiet=True, limits=SERVER_LIMITS, command=command)
    ) as server:
        yield server


@pytest.fixture
def site(server):
    site = ServerClient(server.address)
    yield site
    # no resources leak
    wait_until(lambda: site.metric("vitreous_queue_images") == 0 and site.metric("vitreous_held_bytes") == 0)
    assert site.predict(encode_noise_image(1))[0] == 200  # and other requests still succeed


def parse_error(response: bytes) -> tuple[int, str]:
    """Return status and error code of a raw response with one JSON document."""
    head, _, body = response.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"code", "message", "hint", "request_id"} and error["message"]
    assert b"x-request-id: " + error["request_id"].encode() in head
    return int(head.split()[1]), error["code"]


def read_response(link: socket.socket) -> bytes:
    """Read one complete response from a connection that may stay open."""
    response = b""
    while b"\r\n\r\n" not in response:
        response += link.recv(65536)
    head, _, body = response.partition(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].split()[0])
    while len(body) < size:
        body += link.recv(65536)
    return head + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/0.9\r\n" + HOST_HEADER + b"\r\n", 400),
        (b"GET / HTTP/9.9\r\n" + HOST_HEADER + b"\r\n", 400),
        (b"GET / HTTP/1.1\nHost: localhost\n\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST_HEADER + HOST_HEADER + b"\r\n", 400),
        (b"GET /\x00 HTTP/1.1\r\n" + HOST_HEADER + b"\r\n", 400),
        (b"GET http://evil/ HTTP/1.1\r\n" + HOST_HEADER + b"\r\n", 400),
        (b"GET /%ff HTTP/1.1\r\n" + HOST_HEADER + b"\r\n", 400),
        (b"CONNECT evil:1 HTTP/1.1\r\n" + HOST_HEADER + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST_HEADER + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n", 400),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + HOST_HEADER + b"\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + HOST_HEADER + b"".join(b"A%d: b\r\n" % n for n in range(200)) + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + HOST_HEADER + b"A: " + b"b" * 70_000, 431),
        (b"GET / HTTP/1.1\r\n" + HOST_HEADER + b" folded: x\r\n\r\n", 400),
        (
            b"POST /v1/predict HTTP/1.1\r\n"
            + HOST_HEADER
            + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST /v1/predict HTTP/1.1\r\n" + HOST_HEADER + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (b"POST /v1/predict HTTP/1.1\r\n" + HOST_HEADER + b"Content-Length: -1\r\n\r\n", 400),
        (b"POST /v1/predict HTTP/1.1\r\n" + HOST_HEADER + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /v1/predict HTTP/1.1\r\n" + HOST_HEADER + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /v1/predict HTTP/1.1\r\n" + HOST_HEADER + b"Content-Length: 99000000000\r\n\r\n", 413),
        (
            b"POST /v1/predict HTTP/1.1\r\n"
            + HOST_HEADER
            + b"Content-Length: 99000000000\r\nExpect: 100-continue\r\n\r\n",
            413,
        ),
        (
            b"POST /v1/predict HTTP/1.1\r\n"
            + HOST_HEADER
            + b"Transfer-Encoding: chunked\r\n\r\n"
            + b"1\r\nx\r\n" * 50_000,
            413,
        ),
        (
            b"POST /v1/predict HTTP/1.1\r\n"
            + HOST_HEADER
            + b"Transfer-Encoding: chunked\r\n\r\n"
            + (b"10000\r\n" + b"x" * 65536 + b"\r\n") * 8,
            413,
        ),
        (
            b"POST /v1/predict HTTP/1.1\r\n"
            + HOST_HEADER
            + b"Content-Encoding: gzip\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx",
            415,
        ),
        (b"GET /healthz HTTP/1.1\r\n" + HOST_HEADER + b"Content-Length: 1\r\nConnection: close\r\n\r\nx", 400),
        (b"DELETE /v1/model HTTP/1.1\r\n" + HOST_HEADER + b"Connection: close\r\n\r\n", 405),
        (b"POST / HTTP/1.1\r\n" + HOST_HEADER + b"Connection: close\r\nContent-Length: 0\r\n\r\n", 405),
        (b"GET /v1/nothing HTTP/1.1\r\n" + HOST_HEADER + b"Connection: close\r\n\r\n", 404),
        (b"GET /v1/model HTTP/1.1\r\n" + HOST_HEADER + b"X-Deadline-Ms: 1e3\r\nConnection: close\r\n\r\n", 422),
    ],
)
def test_malformed_requests_are_rejected_without_request_smuggling(site, request_, status):
    response = site.raw(
        request_ if b"Content-Length: 99" in request_ or request_.endswith((b"b", b"zz\r\n")) else request_ + b"\r\n"
    )
    assert (
        parse_error(response)[0] == status and response.count(b"x-request-id") == 1 and b"connection: close" in response
    )


@pytest.mark.parametrize(
    ("content_type", "body", "status", "code"),
    [
        ("", b"x", 415, "unsupported_media"),
        ("text/html", b"x", 415, "unsupported_media"),
        ("application/json", b"{}", 415, "unsupported_media"),
        ("image/jpeg", b"", 400, "bad_request"),
        ("image/svg+xml", b"<svg xmlns='http://169.254.169.254/'/>", 422, "unreadable_image"),
        ("multipart/form-data", b"x", 400, "bad_multipart"),
        ("multipart/form-data; boundary=", b"x", 400, "bad_multipart"),
        ("multipart/form-data; boundary=" + "b" * 71, b"x", 400, "bad_multipart"),
        ("multipart/form-data; boundary=b", b"nothing of it", 400, "bad_multipart"),
        (
            "multipart/form-data; boundary=b",
            b"--b\r\nContent-Disposition: form-data; filename=a\r\n\r\nxyz",
            400,
            "bad_multipart",
        ),
        ("multipart/form-data; boundary=b", b"--b\r\nno colon\r\n\r\nx\r\n--b--\r\n", 400, "bad_multipart"),
        (
            "multipart/form-data; boundary=b",
            b"--b\r\nA: " + b"c" * 9000 + b"\r\n\r\nx\r\n--b--\r\n",
            400,
            "bad_multipart",
        ),
        ("multipart/form-data; boundary=b", b"--b\r\nA: b\r\n\r\nx\r\n" * 100 + b"--b--\r\n", 400, "bad_multipart"),
        (
            "multipart/form-data; boundary=b",
            b"--b\r\nContent-Disposition: form-data; name=a\r\n\r\nx\r\n--b--\r\n",
            400,
            "bad_request",
        ),
        ("multipart/form-data; boundary=b", b"--b--\r\n", 400, "bad_request"),
        ("multipart/mixed; boundary=b", b"--b--\r\n", 415, "unsupported_media"),
    ],
)
def test_bodies_without_an_image_are_rejected(site, content_type, body, status, code):
    status_code, document, _ = site.ask(
        "POST", "/v1/predict", body, {"Content-Type": content_type} if content_type else {}
    )
    assert (status_code, document["error"]["code"]) == (status, code)


def test_image_formats_are_detected_from_content_not_names(site):
    body, headers = encode_multipart(('x\\"y\x00\x1b[31m', encode_noise_image(1, kind="JPEG")))
    status, document, _ = site.ask("POST", "/v1/predict?top=1", body, headers)
    assert status == 200 and document["predictions"][0]["name"] == 'x"y\x00\x1b[31m'


def encode_uniform_jpeg(size: tuple[int, int], progressive: bool = False) -> bytes:
    """Return a JPEG of one colour."""
    Image.new("RGB", size, (200, 60, 30)).save(file := io.BytesIO(), "JPEG", progressive=progressive)
    return file.getvalue()


def test_too_many_images_or_pixels_are_rejected(site):
    body, headers = encode_multipart(*((str(n), encode_noise_image(n)) for n in range(4)))
    assert site.ask("POST", "/v1/predict", body, headers)[0] == 413
    status, document, _ = site.predict(encode_noise_image(1, (400, 300), "WEBP"))
    assert status == 422 and "90,000" in document["error"]["message"]


def test_large_jpegs_are_decoded_at_reduced_size_up_to_the_limit(site):
    """JPEGs above --max-pixels, progressive ones included, are decoded at 1/2 to 1/8; the limit applies at 1/8."""
    baseline, progressive = (encode_uniform_jpeg((800, 600), progressive=choice) for choice in (False, True))
    small = site.predict(encode_uniform_jpeg((200, 150)))[1]["predictions"][0]
    for content in (baseline, progressive):
        status, document, _ = site.predict(content)
        assert status == 200, document
        assert document["predictions"][0]["name"] == small["name"]
    status, document, _ = site.predict(encode_uniform_jpeg((2500, 2400)))
    assert status == 422 and document["error"]["message"] == "image: 2500 x 2400 pixels, more than 5,760,000"


@pytest.mark.parametrize("end", [b"CRASH", b"SPIN", b"EAT"])
def test_an_image_that_crashes_its_decoder_fails_only_its_request(site, end):
    before = site.metric("vitreous_decoder_restarts_total")
    with site.connect() as link:
        content = encode_noise_image(1) + end
        link.sendall(
            b"POST /v1/predict HTTP/1.1\r\n"
            + HOST_HEADER
            + b"Content-Type: image/png\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(content)
        )
        link.sendall(content)
        status, document, _ = site.predict(encode_noise_image(2))  # sent while the decoder is busy
        assert status == 200, document
        assert parse_error(receive_all(link)) == (422, "unreadable_image")
    if end != b"EAT":  # this decoder raises MemoryError and survives
        assert site.metric("vitreous_decoder_restarts_total") == before + 1


def test_a_request_survives_a_killed_decoder(site, server):
    decoders = server.service.decoders
    wait_until(lambda: decoders.idle.qsize() == decoders.count)
    with site.connect() as link:
        content = encode_noise_image(1) + b"SPIN"
        link.sendall(
            b"POST /v1/predict HTTP/1.1\r\n"
            + HOST_HEADER
            + b"Content-Type: image/png\r\nContent-Length: %d\r\n\r\n" % len(content)
        )
        link.sendall(content)
        wait_until(lambda: decoders.idle.qsize() < decoders.count)
        (decoders.children - set(decoders.idle._queue)).pop().process.kill()
        assert parse_error(read_response(link)) == (503, "decoder_lost")


def test_slow_clients_get_408_and_are_disconnected(site):
    partial_request = (
        b"POST /v1/predict HTTP/1.1\r\n" + HOST_HEADER + b"Content-Type: image/png\r\nContent-Length: 1000\r\n\r\nxyz"
    )
    with site.connect() as head, site.connect() as body, site.connect() as idle:
        head.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        body.sendall(partial_request)
        idle.sendall(b"GET /healthz HTTP/1.1\r\n" + HOST_HEADER + b"\r\n")
        assert parse_error(receive_all(head)) == (408, "too_slow") and parse_error(receive_all(body)) == (
            408,
            "too_slow",
        )
        assert receive_all(idle).count(b"HTTP/1.1 200") == 1


def test_idle_connections_are_closed_at_the_connection_limit(site):
    links = [site.connect() for _ in range(60)]
    try:
        assert site.ask("GET", "/healthz")[0] == 200
    finally:
        for link in links:
            link.close()


class PausableEngine:
    """An engine that waits for permission to compute."""

    name, precision = "torch", "fp32"

    def __init__(self, engine) -> None:
        from threading import Event

        self.engine, self.go, self.batches = engine, Event(), []
        self.go.set()

    def logits(self, pixels):
        self.batches.append(len(pixels))
        assert self.go.wait(60)
        return self.engine.logits(pixels)

    def features(self, pixels):
        return self.engine.features(pixels)


def serve_pausable_engine(predictor):
    """Start a server with a queue of four, whose model can be paused."""
    engine = PausableEngine(predictor.engine)
    limits = ServerLimits(queue=4, images=3)
    with serve_in_thread(
        replace(predictor, engine=engine), ServerSettings(port=0, quiet=True, limits=limits, decoders=1)
    ) as server:
        yield ServerClient(server.address), engine, server
        engine.go.set()


shared_pausable_server = pytest.fixture(serve_pausable_engine, scope="module")
fresh_pausable_server = pytest.fixture(serve_pausable_engine)


@pytest.fixture
def paused_server(shared_pausable_server):
    """Pause the model until the end of the test."""
    site, engine, _ = shared_pausable_server
    engine.go.clear()
    yield shared_pausable_server
    engine.go.set()
    wait_until(lambda: site.metric("vitreous_queue_images") == 0)


def send_predict_request(site: ServerClient, content: bytes, extra: bytes = b"") -> socket.socket:
    """Send a request and return its connection."""
    link = site.connect(60)
    link.sendall(
        b"POST /v1/predict HTTP/1.1\r\n"
        + HOST_HEADER
        + extra
        + b"Content-Type: image/png\r\nContent-Length: %d\r\n\r\n" % len(content)
    )
    link.sendall(content)
    return link


def test_a_full_queue_returns_429_with_retry_after(paused_server):
    site, engine, _ = paused_server
    links = [send_predict_request(site, encode_noise_image(n)) for n in range(4)]
    wait_until(lambda: site.metric("vitreous_queue_images") == 4)
    with site.connect() as link:  # rejected on the head alone
        link.sendall(
            b"POST /v1/predict HTTP/1.1\r\n" + HOST_HEADER + b"Content-Type: image/png\r\nContent-Length: 90\r\n\r\n"
        )
        response = read_response(link)
        assert parse_error(response) == (429, "queue_full") and b"retry-after: 1\r\n" in response
        assert b"connection: close" not in response
        # the body is discarded and the connection stays open
        link.sendall(b"x" * 90 + b"GET /healthz HTTP/1.1\r\n" + HOST_HEADER + b"\r\n")
        assert b"alive" in read_response(link)
    assert site.ask("GET", "/readyz")[0] == 200 and site.ask("GET", "/v1/model")[0] == 200
    engine.go.set()
    for link in links:
        assert link.recv(65536).startswith(b"HTTP/1.1 200")
        link.close()


def test_expired_and_cancelled_requests_are_not_computed(paused_server):
    site, engine, _ = paused_server
    before, counts = len(engine.batches), [site.metric(f"vitreous_{name}_total") for name in ("expired", "cancelled")]
    links = [send_predict_request(site, encode_noise_image(0))]
    wait_until(lambda: len(engine.batches) > before)
    links += [
        send_predict_request(site, encode_noise_image(1), b"X-Deadline-Ms: 200\r\n"),
        send_predict_request(site, encode_noise_image(2)),
        send_predict_request(site, encode_noise_image(3)),
    ]
    wait_until(lambda: site.metric("vitreous_queue_images") == 4)
    assert parse_error(read_response(links[1])) == (504, "deadline")
    links[2].close()
    wait_until(lambda: site.metric("vitreous_queue_images") == 2)
    engine.go.set()
    assert links[3].recv(65536).startswith(b"HTTP/1.1 200")
    assert engine.batches[before:] == [1, 1]
    assert [site.metric(f"vitreous_{name}_total") for name in ("expired", "cancelled")] == [
        counts[0] + 1,
        counts[1] + 1,
    ]
    for link in links:
        link.close()


def test_a_hung_batch_makes_the_server_unready(paused_server, monkeypatch):
    site, _, _ = paused_server
    monkeypatch.setattr("vitreous.apps.server.batcher.HANG_SECONDS", 0.2)
    link = send_predict_request(site, encode_noise_image(0))
    wait_until(lambda: site.ask("GET", "/readyz")[0] == 503)
    assert site.predict(encode_noise_image(1))[1]["error"]["code"] == "failed" and site.ask("GET", "/healthz")[0] == 200
    link.close()


def test_a_stopping_server_completes_only_accepted_requests(fresh_pausable_server):
    site, engine, server = fresh_pausable_server
    engine.go.clear()
    links = [send_predict_request(site, encode_noise_image(n)) for n in range(3)]
    idle = site.connect()
    idle.sendall(b"GET /healthz HTTP/1.1\r\n" + HOST_HEADER + b"\r\n")
    assert b"alive" in read_response(idle)
    wait_until(lambda: site.metric("vitreous_queue_images") == 3)
    server.loop.call_soon_threadsafe(server.stop)
    idle.sendall(b"GET /readyz HTTP/1.1\r\n" + HOST_HEADER + b"\r\n")
    assert parse_readiness(read_response(idle)) == (503, "draining")

    def is_closed() -> bool:
        try:
            site.connect(1).close()
        except OSError:
            return True
        return False

    wait_until(is_closed)
    engine.go.set()
    for link in links:
        response = receive_all(link)
        assert response.startswith(b"HTTP/1.1 200") and b"connection: close" in response
        link.close()
    idle.close()


def parse_readiness(response: bytes) -> tuple[int, str]:
    """Return status and text of /readyz."""
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["status"]


def test_all_interfaces_accept_addresses_and_listed_names():
    options = ServeOptions(run="runs/pets", host="0.0.0.0", public=True, host_name=("models.example.org",))
    access, token = parse_server_options(options)[0].access, parse_server_options(options)[1]
    for host in ("192.168.1.20:8000", "[fe80::1]:8000", "models.example.org", "localhost:8000"):
        access.check({b"host": host.encode()}, needs_token=False)
    for host in ("evil.example", "192.168.1.20.evil.example", "fe80::1", "[192.168.1.20]", "1.2.3"):
        with pytest.raises(Refusal, match="unknown host name"):
            access.check({b"host": host.encode()}, needs_token=False)
    with pytest.raises(Refusal, match="unknown host name"):
        AccessControl().check({b"host": b"192.168.1.20"}, needs_token=False)
    assert token


def test_requests_without_the_token_are_rejected(predictor):
    token = b"0123456789abcdef"
    access = AccessControl(token=token)
    with serve_in_thread(predictor, ServerSettings(port=0, quiet=True, access=access, decoders=1)) as server:
        site = ServerClient(server.address)
        expected_statuses = {
            (): 401,
            (("Authorization", "Bearer " + token.decode()),): 200,
            (("Authorization", "Bearer 0123456789abcdeg"),): 401,
            (("Authorization", "Basic " + token.decode()),): 401,
        }
        for headers, status in expected_statuses.items():
            assert site.ask("GET", "/v1/model", headers=dict(headers))[0] == status
        for path in ("/", "/healthz", "/readyz", "/static/style.css"):
            assert site.ask("GET", path)[0] == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost@evil", "[::2]"):
            assert site.ask("GET", "/", headers={"Host": host})[1]["error"]["code"] == "forbidden_host"
        for host in ("localhost", "LOCALHOST:1", "[::1]:80", "127.0.0.1"):
            assert site.ask("GET", "/", headers={"Host": host})[0] == 200
        page_headers = {"Origin": f"http://127.0.0.1:{site.port}", "Authorization": "Bearer " + token.decode()}
        assert site.ask("GET", "/v1/model", headers=page_headers)[0] == 200
        for origin in ("http://evil.example", "null", f"http://localhost:{site.port}"):
            assert (
                site.ask("GET", "/v1/model", headers={**page_headers, "Origin": origin})[1]["error"]["code"]
                == "forbidden_origin"
            )
        assert "Access-Control-Allow-Origin" not in site.ask("GET", "/v1/model", headers=page_headers)[2]
