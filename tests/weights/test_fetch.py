"""Downloads of weights from a small local Hub and web server, and their failures."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from vitreous.errors import UsageError, WeightsError
from vitreous.weights import download as module
from vitreous.weights.fetch import fetch_weights

COMMIT, OLD_COMMIT = "c0ffee" + "0" * 34, "0" * 40
WEIGHTS_INDEX = json.dumps(
    {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
).encode()
#: repository -> {path: content}
REPOSITORIES = {
    "org/complete": {
        "model.safetensors": b"whole",
        "pytorch_model.bin": b"pickle",
        "config.json": b"{}",
        "preprocessor_config.json": b"[]",
    },
    "org/bare": {"model.safetensors": b"bare"},
    "org/sharded": {
        "model.safetensors.index.json": WEIGHTS_INDEX,
        "model-00001-of-00002.safetensors": b"one",
        "model-00002-of-00002.safetensors": b"two",
        "config.json": b"{}",
    },
    "org/pickled": {"pytorch_model.bin": b"pickle", "config.json": b"{}"},
    "org/files": {"sub/other.npz": b"other", "config.json": b"{}"},
    "org/half": {"model.safetensors.index.json": WEIGHTS_INDEX, "model-00001-of-00002.safetensors": b"one"},
    "org/outside": {
        "model.safetensors.index.json": json.dumps({"weight_map": {"a": "../../../etc/passwd.safetensors"}}).encode()
    },
    "org/odd": {"model.safetensors.index.json": b"[" * 5000},
    "org/pair": {
        "model.safetensors": b"image encoder",
        "open_clip_model.safetensors": b"pair",
        "open_clip_config.json": b"{}",
        "tokenizer.json": b"[]",
    },
    "timm/vit_tiny.tag": {"model.safetensors": b"timm", "config.json": b"{}"},
    "org/private": {"model.safetensors": b"private"},
}
CONTENT = bytes(range(256)) * 5000
CONTENT_HASH = hashlib.sha256(CONTENT).hexdigest()


class HubHandler(BaseHTTPRequestHandler):
    """Serves the Hub's `resolve` addresses, and /web/ for everything else."""

    requests: list[str]

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing to stderr."""

    def respond(self, status: int, content: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        """Respond as to GET, without the content."""
        self.do_GET()

    def do_GET(self) -> None:
        """Respond with a file or an error."""
        self.requests.append(f"{self.command} {self.path}")
        match = re.fullmatch(r"/(\w+/[\w.]+)/resolve/([^/]+)/(.+)", self.path)
        return self.respond_as_hub(*match.groups()) if match else self.respond_as_web(self.path.removeprefix("/web/"))

    def respond_as_hub(self, repository: str, revision: str, file: str) -> None:
        """Respond like the Hub, with its headers."""
        if repository == "org/gated":
            return self.respond(
                403, X_Error_Code="GatedRepo", X_Error_Message="Access to model org/gated is restricted"
            )
        allowed = repository != "org/private" or self.headers.get("Authorization") == "Bearer hf_secret"
        if repository not in REPOSITORIES or not allowed:
            return self.respond(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        if revision not in ("main", COMMIT):
            return self.respond(404, X_Error_Code="RevisionNotFound", X_Repo_Commit=COMMIT)
        if file not in REPOSITORIES[repository]:
            return self.respond(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        content = REPOSITORIES[repository][file]
        return self.respond(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=COMMIT)

    def respond_as_web(self, name: str) -> None:
        """Respond with a complete or truncated file, a redirect, an invalid response or an error."""
        host = f"http://{self.headers['Host']}/web"
        redirects = {
            "moved": f"{host}/a.npz",
            "round": f"{host}/round",
            "plain": "http://example.invalid/a",
            "file": "file:///etc/passwd",
        }
        if name in redirects:
            return self.respond(302, Location=redirects[name])
        if name == "cut.npz":
            self.respond(200, CONTENT[:1000], len(CONTENT))
            return self.connection.close()
        if name == "vast.npz":
            return self.respond(200, CONTENT, 1 << 50)
        if name == "silent.npz":
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + CONTENT)
            return None
        if name == "garbage":
            self.wfile.write(b"\x80\2]q\0.\r\n\r\n")
            return None
        return (
            self.respond(200, CONTENT)
            if name in ("a.npz", "a.exe", "b.npz")
            else self.respond(404, b"<html>not here</html>")
        )


@pytest.fixture(scope="module")
def hub_server() -> Iterator[ThreadingHTTPServer]:
    HubHandler.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    server.handle_error = lambda *arguments: None  # some tests disconnect the client on purpose
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


CLIENT_SCRIPT = """
import json, os, sys
from vitreous.errors import VitreousError
from vitreous.weights.fetch import fetch_weights
for source in json.load(sys.stdin):
    try:
        print(json.dumps(os.fspath(fetch_weights(source))))
    except VitreousError as error:
        print(json.dumps([error.code, str(error)]))
"""


def fetch_in_process(home: Path, port: int, *sources: str, **environment: str) -> list:
    """Fetch `sources` from the local Hub in a new process; return paths, or errors as [code, text].

    A new process is needed because the Hub's client reads its settings on import.
    """
    child_environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("HF_") and not key.lower().endswith("_proxy")
    }
    settings = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    process = subprocess.run(
        [sys.executable, "-c", CLIENT_SCRIPT],
        input=json.dumps(sources),
        capture_output=True,
        text=True,
        timeout=280,
        env=child_environment | settings | environment,
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def read_files(folder: str) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
    }


def test_repositories_are_downloaded_once_and_work_offline(hub_server, tmp_path):
    sources = [
        "org/complete",
        "org/bare",
        "org/sharded",
        "org/pickled",
        f"org/complete@{COMMIT}",
        "org/files:sub/other.npz",
        "org/bare@main",
    ]
    sources = [f"hf:{name}" for name in sources] + ["timm:vit_tiny.tag"]
    HubHandler.requests.clear()
    results = fetch_in_process(tmp_path, hub_server.server_port, *sources)
    assert all(isinstance(path, str) and path.startswith(os.fspath(tmp_path)) for path in results), results
    complete, main_branch, sharded, pickled, pinned, file, main_again, timm = results
    assert read_files(complete) == {
        key: value for key, value in REPOSITORIES["org/complete"].items() if key != "pytorch_model.bin"
    }
    for folder, repository in {
        main_branch: "org/bare",
        sharded: "org/sharded",
        pickled: "org/pickled",
        timm: "timm/vit_tiny.tag",
    }.items():
        assert read_files(folder) == REPOSITORIES[repository]
        assert Path(folder).name == COMMIT
    assert (pinned, main_again) == (complete, main_branch)
    assert Path(file).read_bytes() == b"other"
    # no file is requested twice
    assert sum(line.startswith("GET") for line in HubHandler.requests) == 3 + 1 + 4 + 2 + 2 + 2
    before = len(HubHandler.requests)
    missing = "hf:org/never"
    *offline, error = fetch_in_process(tmp_path, hub_server.server_port, *sources, missing, HF_HUB_OFFLINE="1")
    assert (offline, len(HubHandler.requests)) == (results, before)
    assert error[0] == 4 and "HF_HUB_OFFLINE" in error[1]
    *unplugged, error = fetch_in_process(tmp_path, 9, *sources, missing)  # nothing listens on port 9
    assert unplugged == results
    assert error[0] == 4 and "http://127.0.0.1:9/org/never cannot be reached" in error[1] and "HF_ENDPOINT" in error[1]


def test_a_pair_beside_an_image_encoder_is_downloaded_with_its_tokenizer(hub_server, tmp_path):
    """Some repositories of open_clip also have the image encoder alone, under the names of timm."""
    (path,) = fetch_in_process(tmp_path, hub_server.server_port, "hf:org/pair:open_clip_model.safetensors")
    files = read_files(os.path.dirname(path))
    assert files.keys() == {"open_clip_model.safetensors", "open_clip_config.json", "tokenizer.json"}


def test_hub_errors_are_reported_with_a_hint(hub_server, tmp_path):
    cases = {
        "hf:org/nowhere": (4, "no such repository, or it is private"),
        "hf:org/private": (4, "HF_TOKEN"),
        "hf:org/gated": (4, "accept its terms at http://127.0.0.1"),
        f"hf:org/complete@{OLD_COMMIT}": (4, f"no revision {OLD_COMMIT}"),
        "hf:org/complete@v2": (4, "no revision v2"),
        "hf:org/complete:missing.npz": (4, "no file missing.npz"),
        "hf:org/files": (4, "neither model.safetensors nor pytorch_model.bin"),
        "hf:org/half": (4, "lists model-00002-of-00002.safetensors, which does not exist"),
        "hf:org/outside": (4, "files other than .safetensors in its folder"),
        "hf:org/odd": (4, "not a weights index"),
        "hf:org/x--y": (4, "is not a repository name"),
        "hf:complete": (2, "write hf:org/name"),
        "hf:org/complete:../../x": (2, "write hf:org/name"),
        "hf:": (2, "write hf:org/name"),
    }
    results = fetch_in_process(tmp_path, hub_server.server_port, *cases)
    for (source, (code, word)), result in zip(cases.items(), results, strict=True):
        assert isinstance(result, list) and result[0] == code and word in result[1], (source, result)
    (path,) = fetch_in_process(tmp_path, hub_server.server_port, "hf:org/private", HF_TOKEN="hf_secret")
    assert read_files(path) == {"model.safetensors": b"private"}


def test_a_missing_hub_client_prints_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install 'vitreous\[hub\]'"):
        fetch_weights("hf:org/name")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "runs/a", "C:/weights.pt", "../x", "ftp://host/file", "file:///etc/passwd", "https:x"]
)
def test_anything_else_is_a_path(name):
    assert fetch_weights(name) == Path(name)


class RecordingListener:
    """A listener that stores all calls."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def note(self, text: str) -> None:
        self.calls.append((text,))

    def progress(self, label: str, done: int, total: int, text: str = "") -> None:
        self.calls.append((label, done, total))


@pytest.fixture
def web_address(hub_server, tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.001)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    HubHandler.requests.clear()
    return f"http://127.0.0.1:{hub_server.server_port}/web"


def test_a_pinned_file_is_downloaded_once(web_address, tmp_path):
    listener = RecordingListener()
    path = fetch_weights(f"{web_address}/a.npz#sha256={CONTENT_HASH.upper()}", listener)
    assert path == tmp_path / "cache" / "vitreous" / "weights" / f"{CONTENT_HASH}.npz"
    assert path.read_bytes() == CONTENT
    assert listener.calls[-1] == ("download", len(CONTENT), len(CONTENT))
    assert (
        fetch_weights(f"{web_address}/a.npz#sha256={CONTENT_HASH}")
        == fetch_weights(f"{web_address}/b.npz#sha256={CONTENT_HASH}")
        == path
    )
    assert HubHandler.requests == ["GET /web/a.npz"]
    assert {item.name for item in path.parent.iterdir()} == {path.name, f".{path.name}.lock"}


def test_altered_cached_files_are_downloaded_again(web_address):
    path = fetch_weights(f"{web_address}/a.npz#sha256={CONTENT_HASH}")
    path.write_bytes(CONTENT[:-1] + b"x")
    assert fetch_weights(f"{web_address}/a.npz#sha256={CONTENT_HASH}").read_bytes() == CONTENT
    assert len(HubHandler.requests) == 2


@pytest.mark.parametrize("name", ["moved", "silent.npz", "a.exe"])
def test_redirects_and_responses_without_a_length_are_downloaded(web_address, name):
    path = fetch_weights(f"{web_address}/{name}#sha256={CONTENT_HASH}")
    assert (path.suffix, path.read_bytes()) == (".npz" if name.endswith(".npz") else "", CONTENT)


@pytest.mark.parametrize(
    "name,word",
    [
        ("a.npz", f"has SHA-256 {CONTENT_HASH}, not {'0' * 64}"),
        ("cut.npz", "ended after 1,000 of 1,280,000 bytes"),
        ("vast.npz", "serves 1,125,899,906,842,624 bytes, more than"),
        ("gone.npz", "returned HTTP status 404"),
        ("plain", "http://example.invalid/a is not https"),
        ("file", "'file:///etc/passwd' is not allowed"),
        ("round", "returned HTTP status 302"),
        ("garbage", "could not be downloaded"),
    ],
)
def test_failed_downloads_leave_no_files(web_address, tmp_path, name, word):
    with pytest.raises(WeightsError, match=re.escape(word)):
        fetch_weights(f"{web_address}/{name}#sha256={'0' * 64}")
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    left = [path.name for path in files if path.suffix not in (".json", ".lock")]
    assert left == ([f".{'0' * 64}.npz.part"] if name in ("cut.npz",) else []), (
        "only the partial file of an interrupted download may remain"
    )


def test_the_size_limit_applies_without_a_content_length(web_address, monkeypatch):
    monkeypatch.setattr(module, "MAX_DOWNLOAD_BYTES", 1 << 20)
    monkeypatch.setattr(module, "DOWNLOAD_CHUNK_BYTES", 1 << 16)
    with pytest.raises(WeightsError, match="more than 1,048,576"):
        fetch_weights(f"{web_address}/silent.npz#sha256={CONTENT_HASH}")


@pytest.mark.parametrize(
    "pin",
    [
        "",
        "#",
        "#sha256=",
        "#sha256=abc",
        f"#md5={CONTENT_HASH[:32]}",
        f"#{CONTENT_HASH}",
        f"#sha256={CONTENT_HASH[:-1]}g",
    ],
)
def test_addresses_without_a_hash_are_rejected_before_any_request(web_address, pin):
    with pytest.raises(UsageError, match="not pinned") as error:
        fetch_weights(f"{web_address}/a.npz{pin}")
    assert "sha256sum" in error.value.hint
    assert HubHandler.requests == []


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1.example.com", "localhost.example.com", "192.168.0.1", ""])
def test_plain_http_is_allowed_only_on_localhost(host):
    with pytest.raises(WeightsError, match="is not https"):
        fetch_weights(f"http://{host}/a.npz#sha256={CONTENT_HASH}")


def test_missing_network_and_cache_folder_are_reported(web_address, tmp_path, monkeypatch):
    with pytest.raises(WeightsError, match=r"could not be downloaded .*refused"):
        fetch_weights(f"http://127.0.0.1:9/a.npz#sha256={CONTENT_HASH}")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "file"))
    with pytest.raises(WeightsError, match="XDG_CACHE_HOME"):
        fetch_weights(f"{web_address}/a.npz#sha256={CONTENT_HASH}")
