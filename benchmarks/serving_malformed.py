"""Malformed requests with their allowed responses; `serving.py` sends thousands, the tests a few hundred.

There are lists of known cases (sizes, framing, content types, forms, paths, hosts, parameters), then random ones:
combinations of wrong parts, and forms and images with changed bytes. All depend on one seed.
"""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from serving_client import encode_multipart

MAX_OFFERED_BYTES = 24 * 2**20  # maximum bytes sent to a server whose limit is 20 MiB


@dataclass(frozen=True)
class MalformedRequest:
    """Bytes to send, in pieces. `strict`: the request must be rejected, and no later bytes of the connection may be
    parsed as a request.

    `finish`: close the sending side if there is no response soon, so that an incomplete request does not wait for its
    end. `allowed`: the allowed statuses; if it is empty, any but a server error.
    """

    name: str
    pieces: tuple[bytes, ...]
    strict: bool = False
    finish: bool = False
    allowed: tuple[int, ...] = ()


def make_post(
    port: int,
    body: bytes = b"x",
    *headers: str,
    path: str = "/v1/predict",
    length: str | None = None,
    version: str = "1.1",
) -> bytes:
    """A POST with these headers, and a Content-Length unless `length` is empty."""
    size = str(len(body)) if length is None else length
    lines = [
        f"POST {path} HTTP/{version}",
        f"Host: 127.0.0.1:{port}",
        *headers,
        *([f"Content-Length: {size}"] if size else []),
    ]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body


def iterate_size_cases(port: int) -> Iterator[MalformedRequest]:
    """S2: bodies that are too long, before or after decompression."""
    image_type, chunked = "Content-Type: image/jpeg", "Transfer-Encoding: chunked"
    for name, length in (
        ("99 GB", str(99 * 10**9)),
        ("2**63", str(2**63)),
        ("400 digits", "9" * 400),
        ("65 MB", str(65 * 2**20)),
    ):
        yield MalformedRequest(
            f"content-length {name}",
            (make_post(port, b"abc", image_type, length=length),),
            strict=True,
            allowed=(400, 413),
        )
    piece = b"10000\r\n" + bytes(65536) + b"\r\n"
    yield MalformedRequest(
        "endless chunks",
        (make_post(port, b"", image_type, chunked, length=""), *[piece] * (MAX_OFFERED_BYTES // 65536)),
        allowed=(413,),
        strict=True,
    )
    small = b"1\r\na\r\n" * 10_000
    ones = (make_post(port, b"", image_type, chunked, length=""), *[small] * 10, b"0\r\n\r\n")
    yield MalformedRequest("100,000 chunks of one byte", ones, allowed=(400, 413, 422))
    for coding, squeezed in (
        ("gzip", gzip.compress(bytes(2**24))),
        ("deflate", zlib.compress(bytes(2**24))),
        ("br", b"\x1b\0\0"),
    ):
        yield MalformedRequest(
            f"content-encoding {coding}",
            (make_post(port, squeezed, image_type, f"Content-Encoding: {coding}"),),
            allowed=(415,),
        )
    yield MalformedRequest("expect 100", (make_post(port, b"abc", image_type, "Expect: 100-continue"),), allowed=(422,))
    yield MalformedRequest(
        "expect 100, 99 GB",
        (make_post(port, b"", image_type, "Expect: 100-continue", length="99000000000"),),
        allowed=(413, 417),
    )
    yield MalformedRequest(
        "expect nonsense", (make_post(port, b"abc", image_type, "Expect: the-unexpected"),), allowed=(417, 422)
    )
    yield MalformedRequest(
        "body shorter than declared", (make_post(port, b"abc", image_type, length="50"),), finish=True
    )
    yield MalformedRequest("empty body", (make_post(port, b"", image_type),), allowed=(400, 415, 422))


def iterate_framing_cases(port: int) -> Iterator[MalformedRequest]:
    """S3: requests with ambiguous ends, or that are not HTTP."""
    next_one = f"GET /smuggled HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    image_type, host = "Content-Type: image/jpeg", f"Host: 127.0.0.1:{port}"

    def raw(name: str, text: str | bytes, **more) -> MalformedRequest:
        return MalformedRequest(
            name, (text if isinstance(text, bytes) else text.encode("latin-1"),), **({"strict": True} | more)
        )

    chunked = b"0\r\n\r\n" + next_one
    yield MalformedRequest(
        "length and chunks",
        (make_post(port, chunked, image_type, "Transfer-Encoding: chunked", length="5"),),
        strict=True,
    )
    yield MalformedRequest(
        "chunks and length",
        (make_post(port, chunked, image_type, "Content-Length: 5", "Transfer-Encoding: chunked", length=""),),
        strict=True,
    )
    for lengths in (
        ("3", "5"),
        ("5", "3"),
        ("3, 5",),
        ("-1",),
        ("+3",),
        ("0x3",),
        ("3 3",),
        ("",),
        ("3\v",),
        ("1e1",),
        ("³",),
    ):
        named = [f"Content-Length: {length}" for length in lengths]
        yield MalformedRequest(
            f"content-length {lengths}",
            (make_post(port, b"abc" + next_one, image_type, *named, length=""),),
            strict=True,
        )
    for coding in (
        "xchunked",
        "chunked, identity",
        "identity, chunked",
        "gzip, chunked",
        " \x0bchunked",
        "chunked\x00",
        "chunk",
        "chunked;q=1",
    ):
        text = make_post(port, chunked, image_type, f"Transfer-Encoding: {coding}", length="")
        yield MalformedRequest(
            f"transfer-encoding {coding!r}", (text,), strict=coding != "identity, chunked", finish=True
        )
    twice = make_post(port, chunked, image_type, "Transfer-Encoding: chunked", "Transfer-Encoding: identity", length="")
    yield MalformedRequest("two transfer-encodings", (twice,), strict=True)
    for chunk in ("-1", "zz", "0x3", "3 ", "+3", "fffffffffffffffff", "", "3;" + "a" * 70_000, "\x003", "3\n"):
        body = chunk.encode("latin-1") + b"\r\nabc\r\n0\r\n\r\n"
        loose = chunk in ("3 ",) or chunk.startswith("3;")
        text = make_post(port, body, image_type, "Transfer-Encoding: chunked", length="")
        yield MalformedRequest(f"chunk size {chunk[:20]!r}", (text,), strict=not loose, finish=True)
    yield MalformedRequest(
        "chunk longer than declared",
        (make_post(port, b"3\r\nabcdef\r\n0\r\n\r\n", image_type, "Transfer-Encoding: chunked", length=""),),
        strict=True,
    )
    trailer = make_post(
        port,
        b"3\r\nabc\r\n0\r\nContent-Length: 9\r\nHost: evil\r\n\r\n",
        image_type,
        "Transfer-Encoding: chunked",
        length="",
    )
    yield MalformedRequest("trailers", (trailer,))
    for name, line in (
        ("NUL in a header", "X-A: a\x00b"),
        ("NUL in a name", "X-\x00A: b"),
        ("space before colon", "X-A : b"),
        ("no colon", "nonsense"),
        ("obs-fold", "X-A: b\r\n c"),
        ("leading space", " X-A: b"),
        ("empty name", ": b"),
        ("bare CR", "X-A: b\rX-C: d"),
        ("DEL in a name", "X\x7f: b"),
        ("two hosts", "Host: evil.example"),
    ):
        yield raw(
            name, f"GET /v1/model HTTP/1.1\r\n{host}\r\n{line}\r\n\r\n", finish=True, strict=name not in ("bare CR",)
        )
    yield raw("bare LF", f"GET /v1/model HTTP/1.1\n{host}\n\n", strict=False, finish=True)
    yield raw("no host", "GET /v1/model HTTP/1.1\r\n\r\n", strict=False)
    yield raw("20,000 headers", f"GET /v1/model HTTP/1.1\r\n{host}\r\n" + "X-A: b\r\n" * 20_000 + "\r\n")
    yield raw("header of 1 MB", f"GET /v1/model HTTP/1.1\r\n{host}\r\nX-A: " + "b" * 2**20 + "\r\n\r\n")
    yield raw("address of 100 KB", f"GET /{'a' * 100_000} HTTP/1.1\r\n{host}\r\n\r\n")
    for version in ("0.9", "1.9", "2.0", "9.9", "1.10", "-1.1", "x.y", ""):
        yield raw(
            f"version {version!r}",
            f"GET /v1/model HTTP/{version}\r\n{host}\r\n\r\n",
            strict=version not in ("1.9",),
            finish=True,
        )
    for text in (
        "GET /v1/model\r\n\r\n",
        "GET  /v1/model HTTP/1.1\r\n",
        "GET HTTP/1.1\r\n",
        "/v1/model GET HTTP/1.1\r\n",
        "GET /a b HTTP/1.1\r\n",
    ):
        yield raw(
            f"request line {text.strip()!r}",
            f"{text}{host}\r\n\r\n" if "\r\n\r\n" not in text else text,
            finish=True,
            strict="  " not in text,
        )
    for method in ("get", "BREW", "CONNECT", "TRACE", "OPTIONS", "DELETE", "PUT", "PATCH", "G\x00T", "A" * 5000):
        yield raw(
            f"method {method[:10]!r}",
            f"{method} /v1/predict HTTP/1.1\r\n{host}\r\nContent-Length: 0\r\n\r\n",
            strict=False,
            finish=True,
        )
    yield raw("HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + "\x00" * 20, finish=True)
    yield raw("TLS", bytes.fromhex("16030100c8010000c40303") + bytes(range(200)), finish=True)
    websocket = (
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
        "dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    yield raw("websocket", f"GET /v1/predict HTTP/1.1\r\n{host}\r\n{websocket}", strict=False, finish=True)
    yield raw(
        "h2c",
        f"GET / HTTP/1.1\r\n{host}\r\nUpgrade: h2c\r\nConnection: Upgrade\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
        strict=False,
        finish=True,
    )
    yield raw("empty lines", "\r\n" * 1000, strict=False, finish=True)
    yield raw("endless line", "G" * 2**20, finish=True)
    yield raw("bytes", bytes(range(256)) * 8, finish=True)


def iterate_content_cases(port: int, image: bytes) -> Iterator[MalformedRequest]:
    """S4 and S16: bodies that do not match their content type, and unusual forms."""
    good = image
    for media_type in (
        "",
        "text/html",
        "application/json",
        "image/svg+xml",
        "text/plain; charset=utf-7",
        "image/jpeg; charset=lies",
        "nonsense",
        "/",
        "\xff",
    ):
        headers = [f"Content-Type: {media_type}"] if media_type else []
        yield MalformedRequest(f"a picture as {media_type or 'nothing'!r}", (make_post(port, good, *headers),))
    yield MalformedRequest(
        "JSON", (make_post(port, b'{"image": "%%%"}', "Content-Type: application/json"),), allowed=(415,)
    )
    yield MalformedRequest(
        "HTML as image/jpeg",
        (make_post(port, b"<html><script>alert(1)</script>", "Content-Type: image/jpeg"),),
        allowed=(422,),
    )
    yield MalformedRequest(
        "PNG header alone", (make_post(port, b"\x89PNG\r\n\x1a\n", "Content-Type: image/png"),), allowed=(422,)
    )
    mixed = "multipart/form-data"
    body, media_type = encode_multipart([("a.jpg", good)])
    edge = media_type.rpartition("=")[2].encode()
    for name, content_type in (
        ("no boundary", mixed),
        ("empty boundary", f"{mixed}; boundary="),
        ("boundary of 1,000", f"{mixed}; boundary={'b' * 1000}"),
        ("another boundary", f"{mixed}; boundary=other"),
        ("boundary with CR", f'{mixed}; boundary="a b\tc"'),
        ("two boundaries", f"{media_type}; boundary=other"),
        ("multipart/mixed", media_type.replace("form-data", "mixed")),
    ):
        yield MalformedRequest(f"form: {name}", (make_post(port, body, f"Content-Type: {content_type}"),))
    head = b"--" + edge + b'\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n'
    tail = b"\r\n--" + edge + b"--\r\n"
    forms = {
        "premature end": body[: len(body) // 2],
        "ends after a boundary": b"--" + edge + b"\r\n",
        "ends in a header": head[:-10],
        "nothing": b"",
        "only the end": b"--" + edge + b"--\r\n",
        "preamble": b"hello\r\n" + body,
        "epilogue": body + b"goodbye" * 100,
        "100,000 parts": (b"--" + edge + b"\r\n\r\n\r\n") * 100_000 + b"--" + edge + b"--\r\n",
        "header of 1 MB": head + b"X: " + b"a" * 2**20 + b"\r\n\r\n" + good + tail,
        "20,000 headers": head + b"X: a\r\n" * 20_000 + b"\r\n" + good + tail,
        "nested": head
        + b"Content-Type: multipart/mixed; boundary=in\r\n\r\n--in\r\n\r\n"
        + good
        + b"\r\n--in--"
        + tail,
        "base64": head + b"Content-Transfer-Encoding: base64\r\n\r\n%%%%" + tail,
        "no disposition": b"--" + edge + b"\r\n\r\n" + good + tail,
        "no file name": head.replace(b'; filename="a.jpg"', b"") + b"\r\n" + good + tail,
        "LF alone": body.replace(b"\r\n", b"\n") if len(body) < 10**6 else b"\n",
        "no blank line": head + good + tail,
        "17 images": encode_multipart([(f"{n}.jpg", good) for n in range(17)])[0],
        "a good and a bad": encode_multipart([("a.jpg", good), ("b.jpg", b"bad")])[0],
    }
    for name, text in forms.items():
        yield MalformedRequest(f"form: {name}", (make_post(port, text, f"Content-Type: {media_type}"),))
    for name in (
        "../../x",
        "/etc/passwd",
        "a\\0b",
        "<script>alert(1)</script>",
        "=cmd|' /C calc'!A0",
        "\x1b[31mred",
        "a" * 100_000,
        "",
        '\\"',
        "a%0d%0aX: y",
    ):
        text = head.replace(b"a.jpg", name.encode("latin-1")) + b"\r\n" + good + tail
        yield MalformedRequest(
            f"form: file name {name[:20]!r}", (make_post(port, text, f"Content-Type: {media_type}"),)
        )
    star = head.replace(b'filename="a.jpg"', b"filename*=utf-8''%ff%fe%00") + b"\r\n" + good + tail
    yield MalformedRequest("form: filename* that is no UTF-8", (make_post(port, star, f"Content-Type: {media_type}"),))
    yield MalformedRequest(
        "form: file name not UTF-8",
        (make_post(port, head.replace(b"a.jpg", b"\xff\xfe") + b"\r\n" + good + tail, f"Content-Type: {media_type}"),),
    )


def iterate_path_cases(port: int, image: bytes) -> Iterator[MalformedRequest]:
    """S15, S17, S18: path traversal, foreign hosts and origins, URLs to fetch, and invalid parameters."""
    host = f"Host: 127.0.0.1:{port}"
    climbing = (
        "/../",
        "/static/../../pyproject.toml",
        "/static/%2e%2e/%2e%2e/etc/passwd",
        "/static/..%5c..%5cx",
        "/static/%00",
        "/%252e%252e/x",
    )
    for path in (
        *climbing,
        "//etc/passwd",
        "/static//etc/passwd",
        "/static/index.html.gz",
        "/static/",
        "/%ff%fe",
        "/%zz",
        "*",
        "http://evil/x",
        "/static/..",
    ):
        text = f"GET {path} HTTP/1.1\r\n{host}\r\n\r\n"
        yield MalformedRequest(f"path {path}", (text.encode(),), allowed=(400, 403, 404, 405), finish=True)
    bomb = "bytes=" + ",".join(f"{n}-" for n in range(2000))
    yield MalformedRequest("range bomb", (f"GET / HTTP/1.1\r\n{host}\r\nRange: {bomb}\r\n\r\n".encode(),), finish=True)
    for name in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil",
        "localhost.",
        "",
        "[::1",
        "0.0.0.0",
        "127.0.0.1:99999x",
    ):
        text = f"GET /v1/model HTTP/1.1\r\nHost: {name}\r\n\r\n"
        yield MalformedRequest(f"host {name!r}", (text.encode(),), allowed=(400, 403), finish=True)
    for name in (
        "http://evil.example",
        "null",
        "file://",
        "http://127.0.0.1:1",
        "http://127.0.0.1.evil.example",
        "\xff",
    ):
        yield MalformedRequest(
            f"origin {name!r}",
            (make_post(port, image, "Content-Type: image/jpeg", f"Origin: {name}"),),
            allowed=(400, 403),
        )
    hosts = ("url=http://169.254.169.254/", "url=file:///etc/passwd")
    wrong = (
        "top=0",
        "top=-1",
        "top=abc",
        "top=1e9",
        "top=" + "9" * 5000,
        "top=5&top=6",
        "top=",
        "threshold=nan",
        "threshold=inf",
        "threshold=-1",
        "threshold=2",
    )
    for query in (*wrong, *hosts, "%ff=%fe", "unknown=1", "top[]=1", "&&&&", "a" * 8000, "top=%00", "top=٣"):
        text = make_post(
            port, image, "Content-Type: image/jpeg", path=f"/v1/predict?{query}".encode().decode("latin-1")
        )
        yield MalformedRequest(f"query {query[:30]}", (text,))
    looks = (
        "layer=99",
        "layer=-1",
        "layer=x",
        "head=99",
        "head=x",
        "query=99,99",
        "query=-1,0",
        "query=a",
        "kind=x",
        "format=exe",
        "kind=rollout&head=all",
    )
    for query in (*looks, "layer=all&head=all&format=png", "query=1,1,1", "layer=1e3"):
        yield MalformedRequest(
            f"attention {query}", (make_post(port, image, "Content-Type: image/jpeg", path=f"/v1/attention?{query}"),)
        )
    for query in ("count=0", "count=-1", "count=x", "count=99999999"):
        yield MalformedRequest(
            f"neighbours {query}", (make_post(port, image, "Content-Type: image/jpeg", path=f"/v1/neighbours?{query}"),)
        )
    for told in ("0", "-5", "abc", "1e99", "9" * 1000, "", "nan", "\xff"):
        yield MalformedRequest(
            f"deadline {told[:10]!r}", (make_post(port, image, "Content-Type: image/jpeg", f"X-Deadline-Ms: {told}"),)
        )
    for told in ("a" * 65, "a b", "\x1b[2J", "<script>", '"}\\n{"', ""):
        yield MalformedRequest(
            f"request id {told[:10]!r}", (make_post(port, image, "Content-Type: image/jpeg", f"X-Request-Id: {told}"),)
        )
    for told in ("Bearer", "Bearer \xff", "Basic YTpi", "Bearer " + "a" * 5000):
        yield MalformedRequest(
            f"authorization {told[:10]!r}",
            (make_post(port, image, "Content-Type: image/jpeg", f"Authorization: {told}"),),
        )


METHODS = ("GET", "POST", "HEAD", "PUT", "OPTIONS", "post", "GE T", "", "\x00", "POST" * 9)
PATHS = (
    "/v1/predict",
    "/v1/embed",
    "/v1/attention",
    "/v1/model",
    "/",
    "/static/x",
    "*",
    "",
    "/v1/predict?top=%",
    "//",
    "/\x7f",
    "/é",
    "http://x/",
)
VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/1.2", "HTTP/3", "http/1.1", "", "HTTP/1.1 x", "HTTP/11")
HEADERS = (
    *(
        "Host: 127.0.0.1",
        "Host: evil",
        "Content-Length: 3",
        "Content-Length: 0",
        "Content-Length: 99",
        "Content-Length: x",
    ),
    *(
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: x",
        "Content-Type: image/jpeg",
        "Content-Type: multipart/form-data; boundary=x",
    ),
    *(
        "Connection: close",
        "Connection: keep-alive, upgrade",
        "Upgrade: websocket",
        "Expect: 100-continue",
        "X: \x00",
        "Y : 1",
        " Z: 1",
    ),
    *(
        "Content-Encoding: gzip",
        "X-Deadline-Ms: 1",
        "Origin: null",
        "Cookie: " + "a=b;" * 500,
        "TE: trailers",
        "Range: bytes=0-",
    ),
)
BODIES = (
    b"",
    b"abc",
    b"3\r\nabc\r\n0\r\n\r\n",
    b"--x\r\n\r\nabc\r\n--x--\r\n",
    b"\x89PNG\r\n\x1a\n",
    b"zz\r\n",
    b"\x00" * 50,
)
LINE_ENDS = ("\r\n", "\r\n", "\r\n", "\r\n", "\r\n", "\n", "\r", "\r\n ", "")


def generate_random_cases(port: int, count: int, seed: int, images: Sequence[bytes]) -> Iterator[MalformedRequest]:
    """Random cases: a third combined, a third forms and a third images with changed bytes."""
    draw = random.Random(seed)
    for index in range(count):
        if index % 3 == 0:
            lines = [
                " ".join(
                    (
                        draw.choice(METHODS[: draw.choice((2, 10))]),
                        draw.choice(PATHS),
                        draw.choice(VERSIONS[: draw.choice((1, 8))]),
                    )
                )
            ]
            lines += ["Host: 127.0.0.1"] * (draw.random() < 0.7) + draw.sample(HEADERS, draw.randrange(5))
            text = (
                "".join(line + (draw.choice(LINE_ENDS) if draw.random() < 0.2 else "\r\n") for line in lines) + "\r\n"
            )
            yield MalformedRequest(
                f"grammar {index}", (text.encode("latin-1", "replace"), draw.choice(BODIES)), finish=True
            )
            continue
        image = draw.choice(images)
        if index % 3 == 1:
            body, content_type = encode_multipart([(f"{n}.jpg", image) for n in range(draw.randrange(1, 3))])
            body = mutate_bytes(draw, body, 400) if draw.random() < 0.7 else mutate_bytes(draw, body)
            length = draw.choice((None, None, None, str(len(body) + draw.randrange(-3, 50))))
            yield MalformedRequest(
                f"form {index}", (make_post(port, body, f"Content-Type: {content_type}", length=length),), finish=True
            )
        else:
            yield MalformedRequest(
                f"picture {index}", (make_post(port, mutate_bytes(draw, image), "Content-Type: image/jpeg"),)
            )


def mutate_bytes(draw: random.Random, raw: bytes, near: int | None = None) -> bytes:
    """Change one to eight bytes: flip, remove, duplicate, insert or truncate; within the first `near` bytes if set."""
    mutated = bytearray(raw)
    for _ in range(draw.randrange(1, 9)):
        if not mutated:
            break
        position = draw.randrange(min(len(mutated), near or len(mutated)))
        span = draw.randrange(1, 40)
        operation = draw.randrange(5 if near is None else 4)
        if operation == 0:
            mutated[position] ^= 1 << draw.randrange(8)
        elif operation == 1:
            del mutated[position : position + span]
        elif operation == 2:
            mutated[position:position] = mutated[position : position + span]
        elif operation == 3:
            mutated[position:position] = draw.choice(
                (b"\r\n", b"\x00", b"\xff\xd8", b"--", b'"', b":", b"\xff" * 8, b"\r\n\r\n", draw.randbytes(span))
            )
        elif draw.random() < 0.3:
            del mutated[position:]
    return bytes(mutated)


def list_known_cases(port: int, image: bytes) -> list[MalformedRequest]:
    """All known cases."""
    return [
        *iterate_size_cases(port),
        *iterate_framing_cases(port),
        *iterate_content_cases(port, image),
        *iterate_path_cases(port, image),
    ]
