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
from vitreous.progress import ProgressListener
from vitreous.system.disk import remove_path, sync_and_rename, write_text_atomic

MAX_DOWNLOAD_BYTES = 32 << 30  # of one file
READ_TIMEOUT_SECONDS = 30  # seconds without a byte
DOWNLOAD_CHUNK_BYTES = 1 << 20
MAX_FAILED_ATTEMPTS = 4  # that bring nothing new, in a row
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0  # seconds before the second attempt, doubled each time, and at most
PLAIN_HTTP_HOSTS = ("127.0.0.1", "::1", "localhost")  # where plain http is allowed: nobody is in between
RETRY_STATUS_CODES = (408, 429, 500, 502, 503, 504)  # answers after which another attempt may succeed
STATUS_HINTS = {
    401: "the server asks for an account: download the file yourself, and name it",
    403: "the server refuses this machine or this address: download the file yourself, and name it",
    404: "check the address",
    429: "the server counts requests: try again later, or set VITREOUS_MIRROR to another one",
}


class IncompleteDownload(Exception):
    """A download that ended before it was whole; `pause`: seconds that the server asks to wait, or 0."""

    def __init__(self, message: str, hint: str = "", pause: float = 0.0) -> None:
        super().__init__(message)
        self.message, self.hint, self.pause = message, hint, pause


def download_file(address: str, target: Path, digest: str = "", listener: ProgressListener | None = None) -> None:
    """Bring what an address serves to the file `target`; what a cut left is gone on with, by this run or the next.

    `digest` is `sha256:HEX` or `md5:HEX`, all of it or how it begins; "" for none. Of processes that want one file, one
    downloads it. Raises WeightsError for an address, an answer or a content that cannot be taken; OSError where it
    cannot be stored.
    """
    import filelock

    require_https(address)
    target.parent.mkdir(parents=True, exist_ok=True)
    part, lock = (target.with_name(f".{target.name}.{end}") for end in ("part", "lock"))
    before = get_mtime_ns(target)
    with filelock.FileLock(lock):  # the lock's file stays: who waits has it open
        if get_mtime_ns(target) == before:
            download_with_retries(address, part, digest, listener)
            if digest and not has_digest(part, digest):
                kind, _, wanted = digest.partition(":")
                with open(part, "rb") as file:
                    actual = hashlib.file_digest(file, kind).hexdigest()
                remove_partial_file(part)
                hint = "use the hash its publisher gives today only if you trust the change"
                raise WeightsError(f"{address} has the {HASH_NAMES[kind]} {actual}, not {wanted}", hint)
            sync_and_rename(part, target)
            remove_partial_file(part)


def get_mtime_ns(path: Path) -> int | None:
    """When a file was written, in nanoseconds; None where there is none."""
    return path.stat().st_mtime_ns if path.is_file() else None


HASH_NAMES = {"sha256": "SHA-256", "md5": "MD5"}


def has_digest(path: Path, digest: str) -> bool:
    """Whether a file has a digest `sha256:HEX` or `md5:HEX`, of which HEX may be the beginning."""
    kind, _, wanted = digest.partition(":")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest().startswith(wanted)


def download_with_retries(address: str, part: Path, digest: str, listener: ProgressListener | None) -> None:
    """Download until the part is whole, with pauses. Raises WeightsError after ATTEMPTS in a row that bring nothing."""
    failures, size = 0, get_partial_size(part)
    while True:
        try:
            request_missing_bytes(address, part, digest, listener)
            return
        except IncompleteDownload as broken:
            failures = 1 if get_partial_size(part) > size else failures + 1
            size = get_partial_size(part)
            if failures >= MAX_FAILED_ATTEMPTS:
                again = f"; {size:,} bytes are stored, and the same command goes on from there" if size else ""
                raise WeightsError(
                    broken.message, (broken.hint or "check the network, and try again") + again
                ) from None
            time.sleep(min(MAX_RETRY_SECONDS, broken.pause or RETRY_SECONDS * 2 ** (failures - 1)))


def request_missing_bytes(address: str, part: Path, digest: str, listener: ProgressListener | None) -> None:
    """One request: what the part lacks, or everything where the server cannot say that it is the same file. Raises
    BrokenDownload or WeightsError."""
    known = read_validator(part, address)
    begin = get_partial_size(part) if known or digest else 0
    headers = {"User-Agent": "vitreous", "Accept-Encoding": "identity"}
    if begin:
        headers |= {"Range": f"bytes={begin}-"} | ({"If-Range": known} if known else {})
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.build_opener(HttpsRedirectHandler).open(request, timeout=READ_TIMEOUT_SECONDS) as answer:
            begin, total = parse_content_range(answer, address, begin)
            write_validator(part, address, answer.headers)
            done = write_response(answer, address, part=part, begin=begin, total=total, listener=listener)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the part is whole, or no beginning of what is served now
            if begin and error.headers.get("Content-Range") == f"bytes */{begin}":
                return
            remove_partial_file(part)
            raise IncompleteDownload(f"{address} changed while it was downloaded") from None
        message, hint = (
            f"{address} answers {error.code} ({error.reason})",
            STATUS_HINTS.get(error.code, "check the address"),
        )
        if error.code in RETRY_STATUS_CODES:
            raise IncompleteDownload(
                message, STATUS_HINTS.get(error.code, ""), parse_retry_after(error.headers)
            ) from None
        raise WeightsError(message, hint) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError and time-outs are OSErrors
        if isinstance(error, OSError) and error.filename is not None:  # of the disk, not of the network
            raise
        reason = getattr(error, "reason", None) or error
        raise IncompleteDownload(f"{address} could not be downloaded ({reason or type(error).__name__})") from None
    if total is not None and done != total:
        raise IncompleteDownload(f"{address} ended after {done:,} of {total:,} bytes")


def parse_content_range(answer: Any, address: str, begin: int) -> tuple[int, int | None]:
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
            raise IncompleteDownload(f"{address} serves another part than was asked for")
        total = None if span[3] == "*" else int(span[3])
    else:
        begin = 0
    check_download_size(address, total or 0)
    return begin, total


def write_response(
    answer: Any, address: str, part: Path, begin: int, total: int | None, listener: ProgressListener | None
) -> int:
    """Write an answer into the part from `begin`; returns the bytes that are there then. Raises WeightsError for too
    many, OSError with the file's name where it cannot be written."""
    done = begin
    with open(part, "r+b" if begin else "wb") as file:
        file.truncate(begin)
        file.seek(begin)
        while chunk := answer.read(DOWNLOAD_CHUNK_BYTES):
            try:
                file.write(chunk)
            except OSError as error:
                raise OSError(error.errno, error.strerror, os.fspath(part)) from None
            done += len(chunk)
            check_download_size(address, done)
            if listener:
                listener.progress("download", done, max(total or done, done), f"{done / 1e6:.0f} MB")
    return done


def check_download_size(address: str, size: int) -> None:
    """Raise WeightsError for more than MAX_BYTES bytes."""
    if size > MAX_DOWNLOAD_BYTES:
        raise WeightsError(f"{address} serves {size:,} bytes, more than {MAX_DOWNLOAD_BYTES:,}", "download it yourself")


def parse_retry_after(headers: Any) -> float:
    """The seconds of a Retry-After, 0 where there is none or it is a date."""
    text = headers.get("Retry-After", "")
    return float(text) if text.isdigit() else 0.0


def get_partial_size(part: Path) -> int:
    """The bytes of a part, 0 where there is none."""
    return part.stat().st_size if part.is_file() else 0


def get_resume_record_path(part: Path) -> Path:
    """The file that says which version of which address a part is of."""
    return part.with_name(part.name + ".json")


def read_validator(part: Path, address: str) -> str:
    """What tells the version of a part, for If-Range; "" for a part of another address or of no known version."""
    try:
        record = json.loads(get_resume_record_path(part).read_text("utf-8"))
        return str(record["validator"]) if record["address"] == address else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def write_validator(part: Path, address: str, headers: Any) -> None:
    """Store the strong ETag or the date of what is downloaded. Raises OSError."""
    tag = headers.get("ETag", "")
    validator = tag if tag.startswith('"') else headers.get("Last-Modified", "")
    write_text_atomic(get_resume_record_path(part), json.dumps({"address": address, "validator": validator}))


def remove_partial_file(part: Path) -> None:
    """Remove a part and its record, where they are there. Raises OSError."""
    remove_path(part)
    remove_path(get_resume_record_path(part))


def require_https(address: str) -> None:
    """Raise WeightsError unless an address is https, or of this machine."""
    parts = urllib.parse.urlsplit(address)
    if not parts.hostname or (
        parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in PLAIN_HTTP_HOSTS)
    ):
        raise WeightsError(f"{address} is not https", "name an https:// address")


class HttpsRedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to where a download may begin."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """The next request. Raises WeightsError for another scheme than https."""
        require_https(newurl)
        return super().redirect_request(req, fp, code=code, msg=msg, headers=headers, newurl=newurl)
