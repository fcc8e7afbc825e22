"""Published weights by name: the table, and downloads from servers that truncate, change, refuse or corrupt files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

import vitreous
from tests.conftest import make_folder, make_image, parse_json_output, run_cli
from vitreous.errors import UsageError, WeightsError
from vitreous.models.names import MODEL_NAMES, config_from_name
from vitreous.nn.grid import RESIZE_MODES
from vitreous.weights import download as module
from vitreous.weights import published
from vitreous.weights.adopt import open_weights
from vitreous.weights.convert import convert
from vitreous.weights.download import download_file
from vitreous.weights.fetch import fetch_weights, missing_source_error
from vitreous.weights.published import PUBLISHED_WEIGHTS, PublishedWeights, find_published_name, find_published_weights
from vitreous.weights.published_speed import CPU_MILLISECONDS

CONTENT = np.random.default_rng(0).bytes(300_000)
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


class FileHandler(BaseHTTPRequestHandler):
    """Serves one file.

    The first component of a path selects a fault, and `log` records (fault, Range header).
    """

    log: list[tuple[str, str]]
    content = CONTENT
    etag = '"one"'

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing to stderr."""

    def reply(self, status: int, content: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        """Respond with the file from the requested offset, or with the fault in the path."""
        fault = self.path.split("/")[1]
        byte_range = self.headers.get("Range", "")
        self.log.append((fault, byte_range))
        begin = int(byte_range.removeprefix("bytes=").rstrip("-") or 0)
        if fault.isdigit() and fault != "206":
            wait = {"Retry_After": "0"} if fault == "429" else {}
            return self.reply(int(fault), **wait)
        if fault == "busy-once" and len(self.log) == 1:
            return self.reply(503)
        if fault == "page":
            return self.reply(200, b"<html>log in", Content_Type="text/html; charset=utf-8")
        if fault in ("ignores-range", "no-validator"):
            begin = 0
        if self.headers.get("If-Range", self.etag) != self.etag:
            begin = 0
        if begin and begin >= len(self.content):
            return self.reply(416, Content_Range=f"bytes */{len(self.content)}")
        body = self.content[begin:]
        headers = {} if fault == "no-validator" else {"ETag": self.etag}
        if begin:
            first = begin + 7 if fault == "wrong-part" else begin
            headers["Content_Range"] = f"bytes {first}-{len(self.content) - 1}/{len(self.content)}"
        cut = {"cuts": 100_000, "ignores-range": 100_000 if len(self.log) < 3 else 0, "no-validator": 5}.get(fault, 0)
        cut = 1000 if fault == "wrong-part" and not begin else cut
        missing_bytes = {"small-length": 1000, "large-length": -1000}.get(fault, 0)
        self.reply(206 if begin else 200, body[:cut] if cut else body, len(body) - missing_bytes, **headers)
        return self.connection.close() if cut or missing_bytes else None


@pytest.fixture
def server_url(tmp_path, monkeypatch) -> Iterator[str]:
    """Start a server, and use a separate cache."""
    FileHandler.log, FileHandler.content, FileHandler.etag = [], CONTENT, '"one"'
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(module, "DOWNLOAD_CHUNK_BYTES", 1 << 14)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_HUB_OFFLINE", "VITREOUS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), FileHandler)
    server.handle_error = lambda *arguments: None
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_published_entries_have_valid_names_models_and_addresses():
    assert (
        len({row.name for row in PUBLISHED_WEIGHTS})
        == len(PUBLISHED_WEIGHTS)
        == len({row.source for row in PUBLISHED_WEIGHTS})
    )
    for row in PUBLISHED_WEIGHTS:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row.name), row.name
        size = None if row.model.startswith("VideoMAE") else row.image_size  # clips also have a frame count
        assert row.model in MODEL_NAMES and config_from_name(row.model, size), row.name
        url = urlsplit(row.source)
        assert row.source.startswith("hf:") or (url.scheme == "https" and re.search(r"\.(npz|pth)$", url.path))
        assert row.digest == "" or re.fullmatch(r"(sha256|md5):[0-9a-f]{6,64}", row.digest)
        assert row.accuracy is None or 0.6 < row.accuracy < 0.91
        assert row.resize in ("", *RESIZE_MODES) and row.licence and row.reference


def test_existing_paths_take_precedence_over_published_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_published_weights("DINOv2-S14").model == "DINOv2-S/14"
    assert find_published_weights("dinov2-s15") is None and find_published_name("ViT-B/16") == "vit-b16-augreg"
    (tmp_path / "dinov2-s14").mkdir()
    assert find_published_weights("dinov2-s14") is None and fetch_weights("dinov2-s14") == Path("dinov2-s14")
    assert "did you mean dinov2-b14?" in missing_source_error("dinov2-b-14").hint


def test_interrupted_downloads_resume(server_url, tmp_path):
    download_file(f"{server_url}/cuts/a.npz", tmp_path / "a.npz", DIGEST)
    assert (tmp_path / "a.npz").read_bytes() == CONTENT
    assert FileHandler.log == [("cuts", ""), ("cuts", "bytes=100000-"), ("cuts", "bytes=200000-")]
    assert not list(tmp_path.glob(".*.part*"))


def test_the_next_call_resumes_a_partial_download(server_url, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FAILED_ATTEMPTS", 1)
    with pytest.raises(WeightsError, match="ended after 100,000 of 300,000 bytes") as cut:
        download_file(f"{server_url}/cuts/a.npz", tmp_path / "a.npz")
    assert "100,000 bytes are stored, and the same command resumes from there" in cut.value.hint
    with pytest.raises(WeightsError, match="200,000 of 300,000"):
        download_file(f"{server_url}/cuts/a.npz", tmp_path / "a.npz")
    download_file(f"{server_url}/cuts/a.npz", tmp_path / "a.npz")
    assert (tmp_path / "a.npz").read_bytes() == CONTENT


def test_changed_files_are_downloaded_from_the_start(server_url, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FAILED_ATTEMPTS", 1)
    with pytest.raises(WeightsError):
        download_file(f"{server_url}/cuts/a.npz", tmp_path / "a.npz")
    FileHandler.content, FileHandler.etag = CONTENT[::-1], '"two"'
    with pytest.raises(WeightsError, match="ended after 100,000"):
        download_file(f"{server_url}/cuts/a.npz", tmp_path / "a.npz")
    assert (tmp_path / ".a.npz.part").read_bytes() == CONTENT[::-1][:100_000]
    FileHandler.content = b"small"
    (tmp_path / ".a.npz.part").write_bytes(b"x" * 50)
    with pytest.raises(WeightsError, match="changed while"):
        download_file(f"{server_url}/whole/a.npz", tmp_path / "a.npz", DIGEST)


def test_complete_partial_downloads_are_used(server_url, tmp_path):
    (tmp_path / ".a.npz.part").write_bytes(CONTENT)
    download_file(f"{server_url}/whole/a.npz", tmp_path / "a.npz", DIGEST)
    assert (tmp_path / "a.npz").read_bytes() == CONTENT and FileHandler.log == [("whole", f"bytes={len(CONTENT)}-")]


@pytest.mark.parametrize("fault", ["ignores-range", "busy-once", "large-length", "whole"])
def test_downloads_succeed_after_retries(server_url, tmp_path, fault):
    download_file(f"{server_url}/{fault}/a.npz", tmp_path / "a.npz", DIGEST)
    assert (tmp_path / "a.npz").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "fault,message,hint,requests",
    [
        ("404", "returned HTTP status 404", "check the address", 1),
        ("403", "returned HTTP status 403", "download the file yourself", 1),
        ("429", "returned HTTP status 429", "VITREOUS_MIRROR", module.MAX_FAILED_ATTEMPTS),
        ("500", "returned HTTP status 500", "try again", module.MAX_FAILED_ATTEMPTS),
        ("page", "serves a web page, not a file", "require a login", 1),
        ("small-length", "has SHA-256", "trust the change", 1),
        ("wrong-part", "serves another byte range than requested", "try again", None),
        ("no-validator", "ended after 5 of", "try again", module.MAX_FAILED_ATTEMPTS),
    ],
)
def test_permanent_server_errors_are_reported(server_url, tmp_path, fault, message, hint, requests):
    digest = "" if fault == "no-validator" else DIGEST
    with pytest.raises(WeightsError, match=message) as rejected:
        download_file(f"{server_url}/{fault}/a.npz", tmp_path / "a.npz", digest)
    assert hint in rejected.value.hint and not (tmp_path / "a.npz").exists()
    assert requests is None or len(FileHandler.log) == requests


@pytest.mark.parametrize("digest", ["sha256:00", "md5:00"])
def test_files_with_a_wrong_digest_are_rejected_and_deleted(server_url, tmp_path, digest):
    with pytest.raises(WeightsError, match=rf"has {module.HASH_NAMES[digest[:-3]]} .*, not 00"):
        download_file(f"{server_url}/whole/a.npz", tmp_path / "a.npz", digest)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock") and path.is_file()] == []


@pytest.mark.parametrize("digest", ["sha256", "md5"])
def test_partial_digests_are_checked(server_url, tmp_path, digest):
    full_digest = hashlib.new(digest, CONTENT).hexdigest()
    download_file(f"{server_url}/whole/a.npz", tmp_path / "a.npz", f"{digest}:{full_digest[:8]}")
    assert (tmp_path / "a.npz").read_bytes() == CONTENT


def test_a_full_disk_is_reported(server_url, tmp_path, monkeypatch):
    class FullDiskFile:
        def write(self, chunk: bytes) -> int:
            raise OSError(28, "No space left on device")

        def truncate(self, size: int) -> None: ...
        def seek(self, offset: int) -> None: ...
        def __enter__(self):
            return self

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(module, "open", lambda *a: FullDiskFile(), raising=False)
    monkeypatch.setitem(published.PUBLISHED_BY_NAME, "tiny", make_tiny_entry(f"{server_url}/whole/a.npz"))
    with pytest.raises(WeightsError, match=r"cannot write to the cache .*No space left"):
        fetch_weights("tiny")


def make_tiny_entry(source: str, **fields: object) -> PublishedWeights:
    return replace(PublishedWeights("tiny", "ViT-32x2/8", source, 32, "MIT", "this test"), **fields)


def test_concurrent_processes_download_a_file_once(server_url, tmp_path):
    code = "import sys, pathlib; from vitreous.weights.download import download_file; download_file(sys.argv[1], pathlib.Path(sys.argv[2]))"
    command = [sys.executable, "-c", code, f"{server_url}/whole/a.npz", os.fspath(tmp_path / "a.npz")]
    (tmp_path / ".a.npz.lock").touch()
    import filelock

    with filelock.FileLock(tmp_path / ".a.npz.lock"):
        started = [subprocess.Popen(command) for _ in range(2)]
        with pytest.raises(subprocess.TimeoutExpired):
            started[0].wait(1.0)
    assert [process.wait(60) for process in started] == [0, 0]
    assert (tmp_path / "a.npz").read_bytes() == CONTENT
    assert len(FileHandler.log) == 1


@pytest.fixture(scope="module")
def published_files(tmp_path_factory) -> dict[str, Path]:
    """Return files of a tiny model in the published formats."""
    home = tmp_path_factory.mktemp("written")
    model = vitreous.create("ViT-32x2/8", image_size=32, num_classes=3)
    torch.nn.init.normal_(model.head.weight)
    vitreous.save(model, home / "bundle")
    convert(home / "bundle", home / "weights.npz", "google-npz")
    convert(home / "bundle", home / "weights.safetensors", "timm")
    return {"npz": home / "weights.npz", "safetensors": home / "weights.safetensors"}


def test_published_names_work_in_every_command(server_url, published_files, tmp_path, monkeypatch):
    FileHandler.content = published_files["npz"].read_bytes()
    digest = f"md5:{hashlib.md5(FileHandler.content).hexdigest()[:6]}"
    row = make_tiny_entry(f"{server_url}/cuts/tiny.npz", digest=digest, share=0.5, resize="bicubic", accuracy=0.8)
    monkeypatch.setitem(published.PUBLISHED_BY_NAME, "tiny", row)
    weights = open_weights("tiny")
    assert weights.config.positions.resize == "bicubic" and weights.preprocess.share == 0.5
    photos = make_folder(tmp_path / "photos", {"train": 4, "val": 2, "test": 2}, size=(32, 32))
    make_image(0).save(tmp_path / "a.png")
    prediction_document = parse_json_output(run_cli("predict", "tiny", str(tmp_path / "a.png"), "--json"))
    assert prediction_document
    assert vitreous.load("tiny").card.classes == ("0", "1", "2")
    converted = run_cli("convert", "tiny", str(tmp_path / "bundle"), "--json")
    assert parse_json_output(converted)["parameters"] == sum(
        p.numel() for p in weights.build_bundle().model.parameters()
    )
    train_options = {"workers": 0, "device": "cpu", "steps": 2, "batch_size": 4, "out": str(tmp_path / "run")}
    vitreous.train(str(photos), init="tiny", **train_options)
    assert json.loads((tmp_path / "run" / "model" / "model.json").read_text())["provenance"]["init"] == "tiny"
    num_requests = len(FileHandler.log)
    monkeypatch.setenv("VITREOUS_OFFLINE", "1")
    assert open_weights("tiny").config == weights.config and len(FileHandler.log) == num_requests
    cached = fetch_weights("tiny")
    cached.write_bytes(cached.read_bytes()[:-1] + b"x")
    with pytest.raises(WeightsError, match="tiny is not in the cache, and VITREOUS_OFFLINE disables downloads"):
        fetch_weights("tiny")
    monkeypatch.delenv("VITREOUS_OFFLINE")
    assert fetch_weights("tiny").read_bytes() == FileHandler.content and len(FileHandler.log) > num_requests


def test_downloads_are_reported_with_their_licence(server_url, published_files, tmp_path, monkeypatch):
    FileHandler.content = published_files["safetensors"].read_bytes()
    monkeypatch.setitem(published.PUBLISHED_BY_NAME, "tiny", make_tiny_entry(f"{server_url}/whole/tiny.safetensors"))
    make_image(0).save(tmp_path / "a.png")
    result = run_cli("predict", "tiny", str(tmp_path / "a.png"))
    assert f"tiny is ViT-32x2/8 from {server_url}/whole/tiny.safetensors, licence MIT" in result.stderr
    assert "no digest of tiny is published" in result.stderr and "download 100%" in result.stderr
    assert result.returncode == 0 and result.stdout


def test_a_mirror_is_an_address_or_a_folder(server_url, published_files, tmp_path, monkeypatch):
    source = "https://example.invalid/models/tiny.npz"
    FileHandler.content = published_files["npz"].read_bytes()
    monkeypatch.setitem(published.PUBLISHED_BY_NAME, "tiny", make_tiny_entry(source))
    monkeypatch.setenv("VITREOUS_MIRROR", f"{server_url}/whole/")
    assert fetch_weights("tiny").read_bytes() == FileHandler.content
    mirror = tmp_path / "mirror"
    monkeypatch.setenv("VITREOUS_MIRROR", os.fspath(mirror))
    pinned = f"{source}#sha256={hashlib.sha256(b'a').hexdigest()}"
    with pytest.raises(WeightsError, match=r"VITREOUS_MIRROR has no .*example\.invalid"):
        fetch_weights(pinned)
    path = mirror / "example.invalid" / "models" / "tiny.npz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"a")
    assert fetch_weights(pinned) == path
    path.write_bytes(b"b")
    with pytest.raises(WeightsError, match="does not have the digest"):
        fetch_weights(pinned)
    monkeypatch.setenv("VITREOUS_MIRROR", "http://example.invalid")
    with pytest.raises(WeightsError, match="is not https"):
        fetch_weights(f"{source}#sha256={'0' * 64}")


def test_the_names_are_listed():
    rows = parse_json_output(run_cli("models", "DINOv2*", "--weights", "--json"))["weights"]
    assert {row["name"] for row in rows} >= {"dinov2-s14", "dinov2-g14-registers"}
    assert all(row["licence"] == "Apache-2.0" and row["source"].startswith("https://") for row in rows)
    table = run_cli("models", "mae-*", "--weights").stdout
    assert "CC-BY-NC-4.0" in table and "83.6% top-1 once fine-tuned" in table
    for arguments, hint in ((["dinov2-s15"], "did you mean dinov2-s14?"), (["*", "--num-classes", "3"], "remove one")):
        result = run_cli("models", *arguments, "--weights")
        assert result.returncode == 2 and hint in result.stderr


def test_the_cpu_time_of_every_model_is_listed():
    """benchmarks/encoder_speed.py measures them; only the model of 6.7 billion parameters did not fit into memory."""
    missing = {row.model for row in PUBLISHED_WEIGHTS if row.cpu_milliseconds is None}
    assert missing == {"DINOv3-7B/16"}
    assert set(CPU_MILLISECONDS) <= {(row.model, row.image_size) for row in PUBLISHED_WEIGHTS}


def test_misspelled_names_are_corrected_in_predict(tmp_path):
    make_image(0).save(tmp_path / "a.png")
    result = run_cli("predict", "dinov2-s15", str(tmp_path / "a.png"))
    assert result.returncode == 2 and "did you mean dinov2-s14?" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,format,suffix",
    [
        ("vit-s32-augreg", "google-npz", ".npz"),
        ("dino-s16", "timm", ".pth"),
        ("deit-ti16", "timm", ".pth"),
        ("deit3-s16", "timm", ".pth"),
        ("vit5-s16", "vit5", ".pth"),
        ("dinov2-s14", "dinov2", ".pth"),
        ("dinov2-s14-registers", "dinov2", ".pth"),
        ("mae-b16", "timm", ".pth"),
        ("sam-b16", "sam", ".pth"),
        ("swin-t4", "swin", ".pth"),
        ("swinv2-t4-window16", "swin", ".pth"),
        ("bit-m-r50x1", "bit-npz", ".npz"),
        ("r26-s32-augreg", "google-npz", ".npz"),
    ],
)
def test_published_files_are_read_as_the_listed_model(name, format, suffix, tmp_path, monkeypatch):
    """The table settles all options that the file does not contain, so no note reports an assumption."""
    from safetensors.torch import load_file

    row = published.PUBLISHED_BY_NAME[name]
    model = vitreous.create(row.model, image_size=row.image_size)
    vitreous.save(model, tmp_path / "bundle")
    written = Path(convert(tmp_path / "bundle", tmp_path / "weights", format)["out"])
    path = tmp_path / "mirror" / row.source.partition("://")[2]
    path.parent.mkdir(parents=True)
    if suffix == ".npz":
        written.rename(path)
    else:
        torch.save(
            {"model": load_file(written)} if name[:4] in ("deit", "vit5", "mae-", "swin") else load_file(written), path
        )
    monkeypatch.setenv("VITREOUS_MIRROR", os.fspath(tmp_path / "mirror"))
    monkeypatch.setitem(published.PUBLISHED_BY_NAME, name, replace(row, digest=""))
    weights = open_weights(name)
    assert weights.config.image == model.config.image and type(weights.config) is type(model.config)
    assert not weights.notes
    state = weights.read_state()
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())


def test_an_unknown_pattern_is_rejected():
    with pytest.raises(UsageError, match="no published weights match resnet"):
        published.select_published_weights("resnet")
