"""A file from the web, whole or not at all: resumed after a cut, held against its size and digest."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from vitreous.errors import WeightsError
from vitreous.progress import Listener
from vitreous.system.disk import publish, remove, write_text

MAX_BYTES = 32 << 30  # of one file
TIMEOUT = 30  # seconds without a byte
CHUNK = 1 << 20
ATTEMPTS = 4  # that bring nothing new, in a row
PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before the second attempt, doubled each time, and at most
LOCAL = ("127.0.0.1", "::1", "localhost")  # where plain http is allowed: nobody is in between
BUSY = (408, 429, 500, 502, 503, 504)  # answers after which another attempt may succeed
HINTS = {
    401: "the server asks for an account: download the file yourself, and name it",
    403: "the server refuses this machine or this address: download the file yourself, and name it",
    404: "check the address",
    429: "the server counts requests: try again later, or set VITREOUS_MIRROR to another one",
}


class BrokenDownload(Exception):
    """A download that ended before it was whole; `pause`: seconds that the server asks to wait, or 0."""

    def __init__(self, message: str, hint: str = "", pause: float = 0.0) -> None:
        super().__init__(message)
        self.message, self.hint, self.pause = message, hint, pause


def download(address: str, target: Path, digest: str = "", listener: Listener | None = None) -> None:
    """Bring what an address serves to the file `target`; what a cut left is gone on with, by this run or the next.

    `digest` is `sha256:HEX` or `md5:HEX`, all of it or how it begins; "" for none. Of processes that want one file, one
    downloads it. Raises WeightsError for an address, an answer or a content that cannot be taken; OSError where it
    cannot be stored.
    """
    import filelock

    refuse_address(address)
    target.parent.mkdir(parents=True, exist_ok=True)
    part, lock = (target.with_name(f".{target.name}.{end}") for end in ("part", "lock"))
    before = time_of(target)
    with filelock.FileLock(lock):  # the lock's file stays: who waits has it open
        if time_of(target) == before:
            receive_all(address, part, digest, listener)
            if digest and not matches(part, digest):
                kind, _, wanted = digest.partition(":")
                with open(part, "rb") as file:
                    actual = hashlib.file_digest(file, kind).hexdigest()
                discard_part(part)
                hint = "use the hash its publisher gives today only if you trust the change"
                raise WeightsError(f"{address} has the {NAMES[kind]} {actual}, not {wanted}", hint)
            publish(part, target)
            discard_part(part)


def time_of(path: Path) -> int | None:
    """When a file was written, in nanoseconds; None where there is none."""
    return path.stat().st_mtime_ns if path.is_file() else None


NAMES = {"sha256": "SHA-256", "md5": "MD5"}


def matches(path: Path, digest: str) -> bool:
    """Whether a file has a digest `sha256:HEX` or `md5:HEX`, of which HEX may be the beginning."""
    kind, _, wanted = digest.partition(":")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest().startswith(wanted)


def receive_all(address: str, part: Path, digest: str, listener: Listener | None) -> None:
    """Download until the part is whole, with pauses. Raises WeightsError after ATTEMPTS in a row that bring nothing."""
    failures, size = 0, size_of(part)
    while True:
        try:
            receive(address, part, digest, listener)
            return
        except BrokenDownload as broken:
            failures = 1 if size_of(part) > size else failures + 1
            size = size_of(part)
            if failures >= ATTEMPTS:
                again = f"; {size:,} bytes are stored, and the same command goes on from there" if size else ""
                raise WeightsError(
                    broken.message, (broken.hint or "check the network, and try again") + again
                ) from None
            time.sleep(min(LONGEST_PAUSE, broken.pause or PAUSE * 2 ** (failures - 1)))


def receive(address: str, part: Path, digest: str, listener: Listener | None) -> None:
    """One request: what the part lacks, or everything where the server cannot say that it is the same file. Raises
    BrokenDownload or WeightsError."""
    known = validator_of(part, address)
    begin = size_of(part) if known or digest else 0
    headers = {"User-Agent": "vitreous", "Accept-Encoding": "identity"}
    if begin:
        headers |= {"Range": f"bytes={begin}-"} | ({"If-Range": known} if known else {})
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.build_opener(Redirects).open(request, timeout=TIMEOUT) as answer:
            begin, total = place_of(answer, address, begin)
            write_validator(part, address, answer.headers)
            done = store(answer, address, part=part, begin=begin, total=total, listener=listener)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the part is whole, or no beginning of what is served now
            if begin and error.headers.get("Content-Range") == f"bytes */{begin}":
                return
            discard_part(part)
            raise BrokenDownload(f"{address} changed while it was downloaded") from None
        message, hint = f"{address} answers {error.code} ({error.reason})", HINTS.get(error.code, "check the address")
        if error.code in BUSY:
            raise BrokenDownload(message, HINTS.get(error.code, ""), pause_of(error.headers)) from None
        raise WeightsError(message, hint) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError and time-outs are OSErrors
        if isinstance(error, OSError) and error.filename is not None:  # of the disk, not of the network
            raise
        reason = getattr(error, "reason", None) or error
        raise BrokenDownload(f"{address} could not be downloaded ({reason or type(error).__name__})") from None
    if total is not None and done != total:
        raise BrokenDownload(f"{address} ended after {done:,} of {total:,} bytes")


def place_of(answer: Any, address: str, begin: int) -> tuple[int, int | None]:
    """Where in the file an answer begins, in bytes, and the file's size, None where it is not told. Raises WeightsError
    for a page in the place of a file and for a file of too many bytes, BrokenDownload for another part than was asked
    for."""
    if answer.headers.get_content_type() == "text/html":
        hint = "a network that asks to log in answers so: open the address in a browser"
        raise WeightsError(f"{address} serves a web page, not a file", hint)
    length = answer.headers.get("Content-Length")
    total = int(length) if length else None
    if answer.status == 206:
        span = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", answer.headers.get("Content-Range", ""))
        if not span or int(span[1]) != begin:
            raise BrokenDownload(f"{address} serves another part than was asked for")
        total = None if span[3] == "*" else int(span[3])
    else:
        begin = 0
    refuse_size(address, total or 0)
    return begin, total


def store(answer: Any, address: str, part: Path, begin: int, total: int | None, listener: Listener | None) -> int:
    """Write an answer into the part from `begin`; returns the bytes that are there then. Raises WeightsError for too
    many, OSError with the file's name where it cannot be written."""
    done = begin
    with open(part, "r+b" if begin else "wb") as file:
        file.truncate(begin)
        file.seek(begin)
        while chunk := answer.read(CHUNK):
            try:
                file.write(chunk)
            except OSError as error:
                raise OSError(error.errno, error.strerror, os.fspath(part)) from None
            done += len(chunk)
            refuse_size(address, done)
            if listener:
                listener.progress("download", done, max(total or done, done), f"{done / 1e6:.0f} MB")
    return done


def refuse_size(address: str, size: int) -> None:
    """Raise WeightsError for more than MAX_BYTES bytes."""
    if size > MAX_BYTES:
        raise WeightsError(f"{address} serves {size:,} bytes, more than {MAX_BYTES:,}", "download it yourself")


def pause_of(headers: Any) -> float:
    """The seconds of a Retry-After, 0 where there is none or it is a date."""
    text = headers.get("Retry-After", "")
    return float(text) if text.isdigit() else 0.0


def size_of(part: Path) -> int:
    """The bytes of a part, 0 where there is none."""
    return part.stat().st_size if part.is_file() else 0


def record_of(part: Path) -> Path:
    """The file that says which version of which address a part is of."""
    return part.with_name(part.name + ".json")


def validator_of(part: Path, address: str) -> str:
    """What tells the version of a part, for If-Range; "" for a part of another address or of no known version."""
    try:
        record = json.loads(record_of(part).read_text("utf-8"))
        return str(record["validator"]) if record["address"] == address else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def write_validator(part: Path, address: str, headers: Any) -> None:
    """Store the strong ETag or the date of what is downloaded. Raises OSError."""
    tag = headers.get("ETag", "")
    validator = tag if tag.startswith('"') else headers.get("Last-Modified", "")
    write_text(record_of(part), json.dumps({"address": address, "validator": validator}))


def discard_part(part: Path) -> None:
    """Remove a part and its record, where they are there. Raises OSError."""
    remove(part)
    remove(record_of(part))


def refuse_address(address: str) -> None:
    """Raise WeightsError unless an address is https, or of this machine."""
    parts = urllib.parse.urlsplit(address)
    if not parts.hostname or (parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOCAL)):
        raise WeightsError(f"{address} is not https", "name an https:// address")


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to where a download may begin."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """The next request. Raises WeightsError for another scheme than https."""
        refuse_address(newurl)
        return super().redirect_request(req, fp, code=code, msg=msg, headers=headers, newurl=newurl)
