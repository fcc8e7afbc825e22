"""The command `serve`: start, start-up errors, log, reload and shutdown."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import run_cli
from tests.inference.server_client import ServerClient, encode_noise_image, save_bundle, wait_until
from tests.inference.small_models import read_predictor_input
from vitreous.apps.server.server import Server, serve_in_thread
from vitreous.apps.server.start import serve
from vitreous.errors import ResourceError
from vitreous.inference.predict import load


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return save_bundle(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture
def start_server(tmp_path):
    """Start `vitreous serve …` in a new process; return a client, the process, and its log file."""
    processes = []

    def start(*arguments: str) -> tuple[ServerClient, subprocess.Popen[str], Path]:
        log = tmp_path / "log"
        with log.open("w") as err:
            command = [sys.executable, "-m", "vitreous", "serve", *arguments, "--port", "0", "--decoders", "1"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=environment)
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"http://[\d.]+:\d+", line)
        assert match, log.read_text()
        return ServerClient(match[0]), process, log

    yield start
    for process in processes:
        process.kill()
        process.wait()


def read_log(log: Path) -> list[dict]:
    """Return the log lines, each parsed as one JSON document."""
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.slow
def test_the_command_serves_reloads_and_stops(start_server, tmp_path):
    home = save_bundle(tmp_path / "model")
    site, process, log = start_server(str(home))
    first = site.predict(encode_noise_image(1), **{"X-Request-Id": "a-1"})[1]
    save_bundle(home, seed=1)
    process.send_signal(signal.SIGHUP)
    wait_until(lambda: site.ask("GET", "/v1/model")[1]["version"] != first["model"]["version"])
    second = site.predict(encode_noise_image(1))[1]
    assert second["predictions"] != first["predictions"] and second["model"]["version"] != first["model"]["version"]
    (home / "weights.safetensors").write_bytes(b"damaged")
    process.send_signal(signal.SIGHUP)
    wait_until(lambda: "reload refused" in log.read_text())
    assert site.predict(encode_noise_image(1))[1]["predictions"] == second["predictions"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    log_lines = read_log(log)
    assert [line["event"] for line in log_lines if "event" in line] == [
        "up",
        "reloaded",
        "reload refused",
        "draining",
        "down",
    ]
    request_line = next(line for line in log_lines if line.get("request_id") == "a-1")
    assert request_line["route"] == "predict" and request_line["status"] == 200 and request_line["images"] == 1


def test_requests_after_a_reload_use_the_new_model(tmp_path):
    home, log = save_bundle(tmp_path / "model"), []
    with serve_in_thread(load(home), run=home) as server:
        site = ServerClient(server.address)
        first = site.predict(encode_noise_image(1))[1]
        server.load = lambda: load(home)
        server.service.log.write = lambda **fields: log.append(fields)
        save_bundle(home, seed=1)
        server.loop.call_soon_threadsafe(server.reload)
        wait_until(lambda: site.ask("GET", "/v1/model")[1]["version"] != first["model"]["version"])
        second = site.predict(encode_noise_image(1))[1]
        assert second["predictions"] == FolderPredictor(home)(encode_noise_image(1)) != first["predictions"]
        (home / "weights.safetensors").write_bytes(b"damaged")
        server.loop.call_soon_threadsafe(server.reload)
        wait_until(lambda: any(line.get("event") == "reload refused" for line in log))
        assert site.predict(encode_noise_image(1))[1]["predictions"] == second["predictions"]


def test_the_server_is_alive_but_not_ready_while_loading(tmp_path):
    predictor, observed = load(save_bundle(tmp_path / "model")), []

    class SlowEngine:
        """Requests the server's health before each prediction."""

        name, precision = "torch", "fp32"

        def logits(self, pixels):
            if not observed:
                site = ServerClient(servers[0].address)
                observed.extend(site.ask("GET", path)[:2] for path in ("/healthz", "/readyz", "/v1/model"))
            return predictor.engine.logits(pixels)

    servers, server_init = [], Server.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Server, "__init__", lambda server, *arguments: (servers.append(server), server_init(server, *arguments))[1]
        )
        with serve_in_thread(replace(predictor, engine=SlowEngine())) as server:
            assert ServerClient(server.address).ask("GET", "/readyz")[0] == 200
    (alive, _), (ready, status), (predict_status, error) = observed
    assert (
        (alive, ready, predict_status) == (200, 503, 503)
        and status == {"status": "starting"}
        and error["error"]["code"] == "starting"
    )


class FolderPredictor:
    """Python predictions with the model in a folder."""

    def __init__(self, home: Path) -> None:
        self.predictor = load(home)

    def __call__(self, content: bytes) -> list[dict]:
        p = self.predictor.activations(read_predictor_input(self.predictor, content)[None])[0]
        prediction = self.predictor.prediction_format().predict(p, "")
        classes = [
            {"class": n, "probability": v} for n, v in zip(prediction.names, prediction.probabilities, strict=True)
        ]
        return [{"name": None, "classes": classes, "unsure": False, "error": None}]


@pytest.mark.slow
def test_ctrl_c_leaves_no_child_process(start_server, bundle):
    _, process, log = start_server(str(bundle), "--quiet")
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
        below = children.read().split()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and below
    wait_until(lambda: not any(Path(f"/proc/{number}").exists() for number in below))
    assert "Traceback" not in log.read_text()


def test_startup_errors_are_reported_in_one_line(bundle, tmp_path):
    short_token = tmp_path / "short"
    short_token.write_text("tooshort\n")
    with socket.create_server(("127.0.0.1", 0)) as used_socket:
        port = str(used_socket.getsockname()[1])
        cases = {
            ("--port", port): (6, f"port {port} of 127.0.0.1"),
            ("--host", "0.0.0.0"): (2, "--public"),
            ("--host", "0.0.0.0", "--public", "--token-file", str(short_token)): (2, "at least 16"),
            ("--token-file", str(tmp_path / "none")): (2, "--token-file"),
            ("--queue", "-1"): (2, "--queue"),
            ("--port", "65536"): (2, "--port"),
            ("--host", "no.such.host.invalid", "--public"): (2, "no.such.host"),
        }
        for arguments, (code, message) in cases.items():
            result = run_cli("serve", str(bundle), *arguments)
            assert result.returncode == code and message in result.stderr and "Traceback" not in result.stderr, (
                arguments
            )
    assert run_cli("serve", str(tmp_path / "nothing"), "--port", "0").returncode == 2
    damaged = save_bundle(tmp_path / "damaged")
    (damaged / "weights.safetensors").write_bytes(b"x")
    assert run_cli("serve", str(damaged), "--port", "0").returncode == 4


def test_a_missing_extra_is_reported_with_the_install_command(bundle, monkeypatch):
    monkeypatch.setattr("vitreous.errors.find_spec", lambda name: None)
    result = run_cli("serve", str(bundle))
    assert result.returncode == 6 and "pip install 'vitreous[serve]'" in result.stderr


def test_serving_on_windows_is_rejected(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ResourceError, match="does not run on Windows"):
        serve("nowhere")


@pytest.mark.slow
def test_serve_prints_its_address_as_json_and_requires_the_token(start_server, bundle):
    site, process, _ = start_server(str(bundle), "--json", "--host", "0.0.0.0", "--public", "--quiet")
    local = ServerClient(f"http://127.0.0.1:{site.port}")
    assert local.ask("GET", "/v1/model")[0] == 401 and local.ask("GET", "/readyz")[0] == 200
    process.terminate()
    assert process.wait(60) == 0
