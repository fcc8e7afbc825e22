"""Download a file completely or not at all: resume interrupted downloads, and verify size and digest."""

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

MAX_DOWNLOAD_BYTES = 32 << 30  # size of one file
READ_TIMEOUT_SECONDS = 30  # seconds without received data
DOWNLOAD_CHUNK_BYTES = 1 << 20
MAX_FAILED_ATTEMPTS = 4  # consecutive attempts without new data
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0  # pause before the second attempt, doubled for each further one; maximum
PLAIN_HTTP_HOSTS = ("127.0.0.1", "::1", "localhost")  # hosts that may use plain HTTP: this machine
RETRY_STATUS_CODES = (408, 429, 500, 502, 503, 504)  # status codes after which another attempt may succeed
STATUS_HINTS = {
    401: "the server requires an account: download the file yourself, and give its path",
    403: "the server denies access: download the file yourself, and give its path",
    404: "check the address",
    429: "the server limits requests: try again later, or set VITREOUS_MIRROR to another server",
}


class IncompleteDownload(Exception):
    """A download that ended early and can be retried; `pause`: seconds to wait as requested by the server, or 0."""

    def __init__(self, message: str, hint: str = "", pause: float = 0.0) -> None:
        super().__init__(message)
        self.message, self.hint, self.pause = message, hint, pause


def download_file(address: str, target: Path, digest: str = "", listener: ProgressListener | None = None) -> None:
    """Download the URL `address` to the file `target`. An interrupted download is resumed by this process or the next
    one.

    `digest` is `sha256:HEX` or `md5:HEX`, complete or a prefix; "" skips the check. If several processes request the
    same file, only one downloads it. Raises WeightsError for an invalid URL, response or content; OSError if the file
    cannot be stored.
    """
    import filelock

    require_https(address)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial_path, lock = (target.with_name(f".{target.name}.{suffix}") for suffix in ("part", "lock"))
    start_mtime = get_mtime_ns(target)
    with filelock.FileLock(lock):  # the lock file is kept: waiting processes have it open
        if get_mtime_ns(target) == start_mtime:
            download_with_retries(address, partial_path, digest, listener)
            if digest and not has_digest(partial_path, digest):
                algorithm, _, expected = digest.partition(":")
                with open(partial_path, "rb") as file:
                    actual = hashlib.file_digest(file, algorithm).hexdigest()
                remove_partial_file(partial_path)
                hint = "use the publisher's current hash only if you trust the change"
                raise WeightsError(f"{address} has {HASH_NAMES[algorithm]} {actual}, not {expected}", hint)
            sync_and_rename(partial_path, target)
            remove_partial_file(partial_path)


def get_mtime_ns(path: Path) -> int | None:
    """Return the modification time of a file in nanoseconds; None if the file does not exist."""
    return path.stat().st_mtime_ns if path.is_file() else None


HASH_NAMES = {"sha256": "SHA-256", "md5": "MD5"}


def has_digest(path: Path, digest: str) -> bool:
    """Return whether a file has the digest `sha256:HEX` or `md5:HEX`, where HEX may be a prefix."""
    algorithm, _, expected = digest.partition(":")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest().startswith(expected)


def download_with_retries(address: str, partial_path: Path, digest: str, listener: ProgressListener | None) -> None:
    """Download until the partial file is complete, and pause before each retry. Raises WeightsError after
    MAX_FAILED_ATTEMPTS consecutive attempts without new data."""
    failures, size = 0, get_partial_size(partial_path)
    while True:
        try:
            request_missing_bytes(address, partial_path, digest, listener)
            return
        except IncompleteDownload as error:
            failures = 1 if get_partial_size(partial_path) > size else failures + 1
            size = get_partial_size(partial_path)
            if failures >= MAX_FAILED_ATTEMPTS:
                resume_note = f"; {size:,} bytes are stored, and the same command resumes from there" if size else ""
                raise WeightsError(
                    error.message, (error.hint or "check the network, and try again") + resume_note
                ) from None
            time.sleep(min(MAX_RETRY_SECONDS, error.pause or RETRY_SECONDS * 2 ** (failures - 1)))


def request_missing_bytes(address: str, partial_path: Path, digest: str, listener: ProgressListener | None) -> None:
    """Send one request: for the missing bytes, or for the full file if the server cannot confirm that it is unchanged.
    Raises IncompleteDownload if another attempt can succeed, WeightsError otherwise."""
    validator = read_validator(partial_path, address)
    begin = get_partial_size(partial_path) if validator or digest else 0
    headers = {"User-Agent": "vitreous", "Accept-Encoding": "identity"}
    if begin:
        headers |= {"Range": f"bytes={begin}-"} | ({"If-Range": validator} if validator else {})
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.build_opener(HttpsRedirectHandler).open(request, timeout=READ_TIMEOUT_SECONDS) as response:
            begin, total = parse_content_range(response, address, begin)
            write_validator(partial_path, address, response.headers)
            done = write_response(
                response, address, partial_path=partial_path, begin=begin, total=total, listener=listener
            )
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the partial file is complete, or not a prefix of the current file
            if begin and error.headers.get("Content-Range") == f"bytes */{begin}":
                return
            remove_partial_file(partial_path)
            raise IncompleteDownload(f"{address} changed while it was downloaded") from None
        message, hint = (
            f"{address} returned HTTP status {error.code} ({error.reason})",
            STATUS_HINTS.get(error.code, "check the address"),
        )
        if error.code in RETRY_STATUS_CODES:
            raise IncompleteDownload(
                message, STATUS_HINTS.get(error.code, ""), parse_retry_after(error.headers)
            ) from None
        raise WeightsError(message, hint) from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError and time-outs are OSErrors
        if isinstance(error, OSError) and error.filename is not None:  # a disk error, not a network error
            raise
        reason = getattr(error, "reason", None) or error
        raise IncompleteDownload(f"{address} could not be downloaded ({reason or type(error).__name__})") from None
    if total is not None and done != total:
        raise IncompleteDownload(f"{address} ended after {done:,} of {total:,} bytes")


def parse_content_range(response: Any, address: str, begin: int) -> tuple[int, int | None]:
    """Return the file offset at which a response starts, and the total file size, None if unknown. Raises WeightsError
    for a web page instead of a file and for a file that is too large, IncompleteDownload for another range than
    requested."""
    if response.headers.get_content_type() == "text/html":
        hint = "the network may require a login: open the address in a browser"
        raise WeightsError(f"{address} serves a web page, not a file", hint)
    length = response.headers.get("Content-Length")
    total = int(length) if length else None
    if response.status == 206:
        byte_range = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("Content-Range", ""))
        if not byte_range or int(byte_range[1]) != begin:
            raise IncompleteDownload(f"{address} serves another byte range than requested")
        total = None if byte_range[3] == "*" else int(byte_range[3])
    else:
        begin = 0
    check_download_size(address, total or 0)
    return begin, total


def write_response(
    response: Any, address: str, partial_path: Path, begin: int, total: int | None, listener: ProgressListener | None
) -> int:
    """Write the body of a response to the partial file, from the offset `begin`; return the new size of the file.
    Raises WeightsError if the body is too large, OSError with the file's name if the file cannot be written."""
    done = begin
    with open(partial_path, "r+b" if begin else "wb") as file:
        file.truncate(begin)
        file.seek(begin)
        while chunk := response.read(DOWNLOAD_CHUNK_BYTES):
            try:
                file.write(chunk)
            except OSError as error:
                raise OSError(error.errno, error.strerror, os.fspath(partial_path)) from None
            done += len(chunk)
            check_download_size(address, done)
            if listener:
                listener.progress("download", done, max(total or done, done), f"{done / 1e6:.0f} MB")
    return done


def check_download_size(address: str, size: int) -> None:
    """Raise WeightsError if a download has more than MAX_DOWNLOAD_BYTES bytes."""
    if size > MAX_DOWNLOAD_BYTES:
        raise WeightsError(f"{address} serves {size:,} bytes, more than {MAX_DOWNLOAD_BYTES:,}", "download it yourself")


def parse_retry_after(headers: Any) -> float:
    """Parse the Retry-After header to seconds; 0 if it is missing or a date."""
    text = headers.get("Retry-After", "")
    return float(text) if text.isdigit() else 0.0


def get_partial_size(partial_path: Path) -> int:
    """Return the size of a partial file in bytes, 0 if it does not exist."""
    return partial_path.stat().st_size if partial_path.is_file() else 0


def get_resume_record_path(partial_path: Path) -> Path:
    """Return the path of the JSON file that records the URL and the validator of a partial file."""
    return partial_path.with_name(partial_path.name + ".json")


def read_validator(partial_path: Path, address: str) -> str:
    """Read the recorded validator of a partial file, the value of the If-Range header; "" if the URL differs or there
    is none."""
    try:
        record = json.loads(get_resume_record_path(partial_path).read_text("utf-8"))
        return str(record["validator"]) if record["address"] == address else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def write_validator(partial_path: Path, address: str, headers: Any) -> None:
    """Record the URL and the validator of a partial file: its strong ETag, else its Last-Modified date. Raises
    OSError."""
    etag = headers.get("ETag", "")
    validator = etag if etag.startswith('"') else headers.get("Last-Modified", "")
    write_text_atomic(get_resume_record_path(partial_path), json.dumps({"address": address, "validator": validator}))


def remove_partial_file(partial_path: Path) -> None:
    """Remove a partial file and its record, if they exist. Raises OSError."""
    remove_path(partial_path)
    remove_path(get_resume_record_path(partial_path))


def require_https(address: str) -> None:
    """Raise WeightsError unless a URL is https, or http on this machine."""
    url = urllib.parse.urlsplit(address)
    if not url.hostname or (url.scheme != "https" and not (url.scheme == "http" and url.hostname in PLAIN_HTTP_HOSTS)):
        raise WeightsError(f"{address} is not https", "use an https:// address")


class HttpsRedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follows redirects only to URLs from which downloads are allowed."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """Return the request for the redirect target. Raises WeightsError for a URL that is not https."""
        require_https(newurl)
        return super().redirect_request(req, fp, code=code, msg=msg, headers=headers, newurl=newurl)
