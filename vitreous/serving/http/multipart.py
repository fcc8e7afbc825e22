"""The pictures in a request's body: the parts of multipart/form-data that have a file name (RFC 7578), or the body itself.

The body is in memory, whole and within its limit, so a part is a slice of it: nothing is copied, nothing touches a disk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vitreous.serving.http.limits import Limits
from vitreous.serving.http.messages import Refusal, Request, short

MOST_PARTS = 64  # fields of a form without a file among them
NAME = 255  # characters of a file name that are kept


@dataclass(frozen=True)
class Upload:
    """One picture as it was sent: its name, if it has one, and its bytes."""

    name: str | None
    content: memoryview


def uploads(request: Request, limits: Limits) -> list[Upload]:
    """The pictures of a request, in order. Raises Refusal: 400 for what is no multipart, 413 for too many, 415 for another type."""
    kind = request.headers.get(b"content-type", b"").decode("latin-1")
    essence = kind.split(";", 1)[0].strip().lower()
    body = memoryview(request.body)
    if essence == "multipart/form-data":
        found = [upload for upload in parts(body, boundary(kind), limits) if upload is not None]
        if not found:
            raise Refusal(400, "bad_request", "no picture in the form", "send it as a part with a file name")
        if len(found) > limits.images:
            raise Refusal(413, "too_large", f"{len(found)} pictures in one request", f"send at most {limits.images}")
        return found
    if essence.startswith("image/") or essence == "application/octet-stream":
        if not len(body):
            raise Refusal(400, "bad_request", "an empty body", "send the picture as the body")
        return [Upload(None, body)]
    message = f"a body of type {short(essence)}" if essence else "a body without a content type"
    raise Refusal(415, "unsupported_media", message, "send multipart/form-data, or a picture as image/*")


def boundary(kind: str) -> bytes:
    """What separates the parts, from the header Content-Type. Raises Refusal where there is none or it cannot be one (RFC 2046)."""
    found = re.search(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;",]{1,70}))\s*(?:;|$)', kind, re.IGNORECASE)
    text = (found[1] or found[2]) if found else ""
    if not re.fullmatch(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]", text):
        raise Refusal(400, "bad_multipart", "multipart without a boundary that can be used", "let an HTTP library make the form")
    return text.encode("ascii")


def parts(body: memoryview, mark: bytes, limits: Limits) -> list[Upload | None]:
    """The parts between the marks, None for those without a file name. Raises Refusal for anything that RFC 2046 does not allow."""
    raw: bytearray = body.obj  # type: ignore[assignment]
    found: list[Upload | None] = []
    at = 0 if raw.startswith(b"--" + mark) else raw.find(b"\r\n--" + mark) + 2
    if at == 1:
        raise Refusal(400, "bad_multipart", "the boundary does not occur in the body", "let an HTTP library make the form")
    at += 2 + len(mark)
    while raw[at : at + 2] != b"--":
        after = re.compile(rb"[ \t]{0,16}\r\n").match(raw, at)
        end = raw.find(b"\r\n--" + mark, after.end() - 2) if after else -1
        if not after or end < 0:
            raise Refusal(400, "bad_multipart", "the form ends before its last boundary", "send it whole")
        if len(found) == MOST_PARTS:
            raise Refusal(400, "bad_multipart", f"more than {MOST_PARTS} parts", f"send at most {limits.images} pictures")
        found.append(part(body, after.end(), end, limits))
        at = end + 4 + len(mark)
    return found


def part(body: memoryview, start: int, end: int, limits: Limits) -> Upload | None:
    """One part: headers, an empty line, content; None where it has no file name."""
    raw: bytearray = body.obj  # type: ignore[assignment]
    stop = raw.find(b"\r\n\r\n", start, min(end, start + limits.part_head))
    if stop < 0:
        raise Refusal(400, "bad_multipart", "a part without headers, or with too long ones", "let an HTTP library make the form")
    name = None
    for line in bytes(raw[start:stop]).decode("utf-8", "replace").split("\r\n"):
        field, colon, value = line.partition(":")
        if not colon or not field.strip():
            raise Refusal(400, "bad_multipart", "a part with a header that cannot be read", "let an HTTP library make the form")
        if field.strip().lower() == "content-disposition":
            name = file_name(value)
        if field.strip().lower() == "content-transfer-encoding" and value.strip().lower() not in ("binary", "8bit", "7bit"):
            raise Refusal(415, "unsupported_media", "a part in a transfer encoding", "send the bytes of the picture as they are")
    empty = stop + 4 >= end  # what a browser sends for a field in which no file was chosen
    return None if name is None or (empty and not name) else Upload(name, body[stop + 4 : end])


def file_name(disposition: str) -> str | None:
    """The `filename` of a Content-Disposition, the last part of its path; None where there is none."""
    found = re.search(r';\s*filename=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))', disposition, re.IGNORECASE)
    if not found:
        return None
    text = re.sub(r"\\(.)", r"\1", found[1]) if found[1] is not None else found[2]
    return re.split(r"[/\\]", text)[-1][:NAME]
