"""The command: how it starts, why it does not, what it prints, how it takes a new model, and how it ends."""

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

from tests.conftest import say
from tests.inference.asking import Site, file, save_bundle, until
from tests.inference.made import read_for
from vitreous.apps.server.server import Server, serve_in_thread
from vitreous.apps.server.start import serve
from vitreous.errors import ResourceError
from vitreous.inference.predict import load


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return save_bundle(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture
def start(tmp_path):
    """`vitreous serve …` in a process of its own; its address, itself, and its log."""
    processes = []

    def begin(*words: str) -> tuple[Site, subprocess.Popen[str], Path]:
        log = tmp_path / "log"
        with log.open("w") as err:
            command = [sys.executable, "-m", "vitreous", "serve", *words, "--port", "0", "--decoders", "1"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=environment)
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", line)
        assert found, log.read_text()
        return Site(found[0]), process, log

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def events(log: Path) -> list[dict]:
    """The lines of the log, each of which is one document."""
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.slow
def test_it_starts_takes_a_new_model_refuses_a_bad_one_and_ends(start, tmp_path):
    home = save_bundle(tmp_path / "model")
    site, process, log = start(str(home))
    first = site.predict(file(1), **{"X-Request-Id": "a-1"})[1]
    save_bundle(home, seed=1)
    process.send_signal(signal.SIGHUP)
    until(lambda: site.ask("GET", "/v1/model")[1]["version"] != first["model"]["version"])
    second = site.predict(file(1))[1]
    assert second["predictions"] != first["predictions"] and second["model"]["version"] != first["model"]["version"]
    (home / "weights.safetensors").write_bytes(b"damaged")
    process.send_signal(signal.SIGHUP)
    until(lambda: "reload refused" in log.read_text())
    assert site.predict(file(1))[1]["predictions"] == second["predictions"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    told = events(log)
    assert [each["event"] for each in told if "event" in each] == [
        "up",
        "reloaded",
        "reload refused",
        "draining",
        "down",
    ]
    asked = next(each for each in told if each.get("request_id") == "a-1")
    assert asked["route"] == "predict" and asked["status"] == 200 and asked["images"] == 1


def test_a_new_model_answers_what_is_asked_after_it_and_a_bad_one_nothing(tmp_path):
    home, log = save_bundle(tmp_path / "model"), []
    with serve_in_thread(load(home), run=home) as server:
        site = Site(server.address)
        first = site.predict(file(1))[1]
        server.load = lambda: load(home)
        server.service.log.write = lambda **fields: log.append(fields)
        save_bundle(home, seed=1)
        server.loop.call_soon_threadsafe(server.reload)
        until(lambda: site.ask("GET", "/v1/model")[1]["version"] != first["model"]["version"])
        second = site.predict(file(1))[1]
        assert second["predictions"] == Predicted(home)(file(1)) != first["predictions"]
        (home / "weights.safetensors").write_bytes(b"damaged")
        server.loop.call_soon_threadsafe(server.reload)
        until(lambda: any(each.get("event") == "reload refused" for each in log))
        assert site.predict(file(1))[1]["predictions"] == second["predictions"]


def test_while_the_model_is_loaded_it_is_alive_and_not_ready(tmp_path):
    predictor, seen = load(save_bundle(tmp_path / "model")), []

    class Slow:
        """Asks the server how it is before it answers."""

        name, precision = "torch", "fp32"

        def logits(self, pixels):
            if not seen:
                site = Site(servers[0].address)
                seen.extend(site.ask("GET", path)[:2] for path in ("/healthz", "/readyz", "/v1/model"))
            return predictor.engine.logits(pixels)

    servers, made = [], Server.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "__init__", lambda server, *given: (servers.append(server), made(server, *given))[1])
        with serve_in_thread(replace(predictor, engine=Slow())) as server:
            assert Site(server.address).ask("GET", "/readyz")[0] == 200
    (alive, _), (ready, status), (other, refusal) = seen
    assert (
        (alive, ready, other) == (200, 503, 503)
        and status == {"status": "starting"}
        and refusal["error"]["code"] == "starting"
    )


class Predicted:
    """What Python answers with the model in a folder."""

    def __init__(self, home: Path) -> None:
        self.predictor = load(home)

    def __call__(self, content: bytes) -> list[dict]:
        p = self.predictor.activations(read_for(self.predictor, content)[None])[0]
        found = self.predictor.prediction_format().predict(p, "")
        classes = [{"class": n, "probability": v} for n, v in zip(found.names, found.probabilities, strict=True)]
        return [{"name": None, "classes": classes, "unsure": False, "error": None}]


@pytest.mark.slow
def test_ctrl_c_ends_it_and_leaves_no_process_behind(start, bundle):
    _, process, log = start(str(bundle), "--quiet")
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
        below = children.read().split()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and below
    until(lambda: not any(Path(f"/proc/{number}").exists() for number in below))
    assert "Traceback" not in log.read_text()


def test_what_keeps_it_from_starting_is_said_in_a_line(bundle, tmp_path):
    short = tmp_path / "short"
    short.write_text("tooshort\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = {
            ("--port", port): (6, f"port {port} of 127.0.0.1"),
            ("--host", "0.0.0.0"): (2, "--public"),
            ("--host", "0.0.0.0", "--public", "--token-file", str(short)): (2, "at least 16"),
            ("--token-file", str(tmp_path / "none")): (2, "--token-file"),
            ("--queue", "-1"): (2, "--queue"),
            ("--port", "65536"): (2, "--port"),
            ("--host", "no.such.host.invalid", "--public"): (2, "no.such.host"),
        }
        for words, (code, said) in cases.items():
            found = say("serve", str(bundle), *words)
            assert found.returncode == code and said in found.stderr and "Traceback" not in found.stderr, words
    assert say("serve", str(tmp_path / "nothing"), "--port", "0").returncode == 2
    damaged = save_bundle(tmp_path / "damaged")
    (damaged / "weights.safetensors").write_bytes(b"x")
    assert say("serve", str(damaged), "--port", "0").returncode == 4


def test_without_the_extra_it_names_the_command(bundle, monkeypatch):
    monkeypatch.setattr("vitreous.errors.find_spec", lambda name: None)
    found = say("serve", str(bundle))
    assert found.returncode == 6 and "pip install 'vitreous[serve]'" in found.stderr


def test_windows_is_told_where_it_runs(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ResourceError, match="does not run on Windows"):
        serve("nowhere")


@pytest.mark.slow
def test_the_address_as_a_document_and_a_token_for_strangers(start, bundle):
    site, process, _ = start(str(bundle), "--json", "--host", "0.0.0.0", "--public", "--quiet")
    local = Site(f"http://127.0.0.1:{site.port}")
    assert local.ask("GET", "/v1/model")[0] == 401 and local.ask("GET", "/readyz")[0] == 200
    process.terminate()
    assert process.wait(60) == 0
