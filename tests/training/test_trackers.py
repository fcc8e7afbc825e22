"""Trackers receive the content of metrics.jsonl, also after a crash and a resume, and cannot stop a run."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import TINY_RUN, make_folder, run_cli
from tests.training import trackers_read as read
from vitreous.errors import Interrupted, ResourceError
from vitreous.jobs.train import train
from vitreous.progress import ABANDONED_THREADS, NullListener
from vitreous.training.folder import RunFolder, read_json_lines
from vitreous.training.trackers import trackers
from vitreous.training.trackers.base import RunInfo, flatten_config
from vitreous.training.trackers.channel import TRACKERS_FILE, line_mark
from vitreous.training.trackers.trackers import Trackers, run_trackers

COMPARED_METRICS = {"train/loss", "lr", "val/top1", "val/nll", "gradient_norm", "epoch"}  # equal if a step is repeated


def skip_without(library: str):
    """Skip a test if the tracker's library is not installed."""
    return pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("home") / "photos", {"train": 12, "val": 4, "test": 4})


class CrashingListener(NullListener):
    """A listener that records its calls, and raises at a step to simulate a crash."""

    def __init__(self, crash_at: int | None = None) -> None:
        self.texts, self.crash_at = list[str](), crash_at

    def note(self, text):
        self.texts.append(text)

    def progress(self, label, done, total, text=""):
        if label == "train" and done == self.crash_at:
            raise RuntimeError("crash")


def crash_and_resume(photos, out: Path, names: tuple[str, ...]) -> None:
    """Run until a crash two steps after the last checkpoint, then resume without the tracker options."""
    patient = {"out": str(out), "log_timeout": 120.0}  # for a server on a busy machine
    with pytest.raises(RuntimeError, match="crash"):
        train(
            str(photos),
            listener=CrashingListener(crash_at=80),
            log_to=names,
            workers=0,
            **{**TINY_RUN, "save_every": 2},
            **patient,
        )
    assert read_json_lines(RunFolder(out).metrics)[-1]["step"] == 5
    train(listener=CrashingListener(), resume=True, **patient)


def round_to_float32(history: read.MetricHistory) -> read.MetricHistory:
    """Round metrics to float32."""
    return {name: [(step, float(np.float32(value))) for step, value in points] for name, points in history.items()}


@pytest.fixture(scope="module")
def resumed_run(photos, tmp_path_factory):
    """A crashed and resumed run with every installed tracker, offline."""
    folder = tmp_path_factory.mktemp("resumed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.delenv("WANDB_DIR", raising=False)
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow's file store, which needs no database
        patch.setenv("MLFLOW_TRACKING_URI", (folder / "store").as_uri())
        crash_and_resume(photos, folder / "run", tuple(name for name in trackers.TRACKERS if find_spec(name)))
        yield folder / "run"


@skip_without("tensorboard")
def test_tensorboard_has_metrics_config_and_images_of_a_resumed_run(resumed_run):
    assert read.read_tensorboard(resumed_run) == round_to_float32(read.read_metrics(resumed_run))
    events = read.load_events(resumed_run)
    assert {"confusion", "unsure"} <= set(events.Tags()["images"])
    image = events.Images("confusion")[0]
    assert image.step == json.loads((resumed_run / "summary.json").read_text())["steps"]
    assert image.width > 100 and image.height > 100
    assert b"batch_size: 8" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


@skip_without("wandb")
def test_offline_wandb_has_each_line_once_and_one_run(resumed_run):
    out = resumed_run
    history, records = read.read_wandb(out)
    expected = read.read_metrics(out)
    assert history.keys() == expected.keys()
    assert {name: history[name] for name in COMPARED_METRICS} == {name: expected[name] for name in COMPARED_METRICS}
    runs = {record.run.run_id for record in records if record.WhichOneof("record_type") == "run"}
    assert runs == {json.loads((out / TRACKERS_FILE).read_text())["wandb"]["id"]}
    artifacts = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    requests = [r.request.log_artifact.artifact for r in records if r.request.HasField("log_artifact")]
    files = {entry.path for artifact in artifacts + requests for entry in artifact.manifest.contents}
    assert {"model.json", "weights.safetensors"} <= files
    config = [item for record in records for item in (*record.run.config.update, *record.config.update)]
    assert any(item.key == "batch_size" and item.value_json == "8" for item in config)


def check_mlflow(out: Path) -> None:
    """Check that the run at MLFLOW_TRACKING_URI matches the crashed and resumed run in the folder."""
    from mlflow import MlflowClient
    from mlflow.artifacts import download_artifacts

    identity = json.loads((out / TRACKERS_FILE).read_text())["mlflow"]["id"]
    history, expected = read.read_mlflow(identity), read.read_metrics(out)
    assert history.keys() == expected.keys()
    assert {name: history[name] for name in COMPARED_METRICS} == {
        name: sorted(expected[name]) for name in COMPARED_METRICS
    }
    run = MlflowClient().get_run(identity)
    assert (run.info.status, run.info.run_name, run.data.params["batch_size"]) == ("FINISHED", "run", "8")
    assert run.data.params["optimizer.name"] == "muon"
    downloaded = Path(download_artifacts(run_id=identity, dst_path=str(out.parent / "back")))
    weights = "model/weights.safetensors"
    assert (downloaded / weights).read_bytes() == (out / weights).read_bytes()
    assert Image.open(downloaded / "images" / "confusion.png").width > 100
    assert json.loads((downloaded / "summary.json").read_text())["val"]["images"] == 12


@skip_without("mlflow")
def test_an_mlflow_store_has_each_line_once_and_one_run(resumed_run):
    check_mlflow(resumed_run)


@pytest.mark.slow
@skip_without("mlflow")
@skip_without("flask")
def test_an_mlflow_server_has_each_line_once_and_one_run(photos, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = f"sqlite:///{tmp_path}/mlflow.db"
    words = [
        "server",
        "--port",
        str(port),
        "--backend-store-uri",
        store,
        "--artifacts-destination",
        str(tmp_path / "files"),
    ]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words, "--workers", "1"], cwd=tmp_path, start_new_session=True
    )
    try:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        wait_for(port)
        crash_and_resume(photos, tmp_path / "run", ("mlflow",))
        check_mlflow(tmp_path / "run")
    finally:
        os.killpg(server.pid, 15)
        server.wait()


def wait_for(port: int, seconds: float = 120) -> None:
    """Wait until a server listens on a local port."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.5)


@skip_without("tensorboard")
def test_a_tracker_added_on_resume_receives_earlier_lines(photos, tmp_path):
    options = {**TINY_RUN, "out": str(tmp_path / "run"), "workers": 0, "save_every": 2}
    with pytest.raises(RuntimeError, match="crash"):
        train(str(photos), listener=CrashingListener(crash_at=80), **options)
    train(listener=CrashingListener(), out=str(tmp_path / "run"), resume=True, log_to=("tensorboard",))
    assert read.read_tensorboard(tmp_path / "run") == round_to_float32(read.read_metrics(tmp_path / "run"))


class FaultyTracker:
    """A tracker that records lines, and fails in one of its calls."""

    rewinds = False

    def __init__(self, call: str, fail, keep: list) -> None:
        self.call, self.fail, self.lines = call, fail, keep

    def __getattr__(self, name):
        if name not in ("start", "log_line", "log_images", "log_bundle", "finish"):
            raise AttributeError(name)

        def record_call(*arguments):
            if name == self.call:
                self.fail()
            if name == "log_line":
                self.lines.append(arguments[0])
            return "identity"

        return record_call


class FaultyTrackerEntry:
    library, extra = "json", "tensorboard"

    def __init__(self, call: str, fail) -> None:
        self.call, self.fail, self.lines = call, fail, []

    def make(self):
        return FaultyTracker(self.call, self.fail, self.lines)


def raise_disk_full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def exit_process():
    sys.exit("this library ends the process")


@pytest.mark.parametrize("call", ["start", "log_images", "log_bundle", "finish"])
def test_a_failing_tracker_is_reported_once(tmp_path, monkeypatch, call):
    entry, notes = FaultyTrackerEntry(call, raise_disk_full), CrashingListener()
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", entry)
    with run_trackers(("tensorboard",), make_config_folder(tmp_path), notes, 10) as opened:
        opened.resume_from(0, [])
        opened.log_line({"step": 1, "lr": 0.1})
        opened.log_images({}, 1)
        opened.log_bundle(tmp_path)
    (note,) = notes.texts
    assert "tensorboard no longer receives this run (OSError: [Errno 28] No space left on device)" in note
    assert len(entry.lines) == (call != "start")


@pytest.mark.usefixtures("without_pages")
def test_runs_survive_trackers_that_exit_or_hang(photos, tmp_path, monkeypatch):
    release = threading.Event()
    entries = {
        "tensorboard": FaultyTrackerEntry("log_line", exit_process),
        "wandb": FaultyTrackerEntry("log_bundle", release.wait),
    }
    for name, entry in entries.items():
        monkeypatch.setitem(trackers.TRACKERS, name, entry)
    notes, out = CrashingListener(), tmp_path / "run"
    options = {**TINY_RUN, "epochs": 1, "out": str(out), "workers": 0}
    try:
        summary = train(str(photos), listener=notes, log_to=tuple(entries), log_timeout=0.5, **options)
        lines = read_json_lines(RunFolder(out).metrics)
        assert summary["steps"] == 3 and [line["step"] for line in lines if "lr" in line] == [1, 2, 3]
        first_note, second_note = (text for text in notes.texts if "no longer receives this run" in text)
        assert (
            first_note.startswith("tensorboard ")
            and "this library ends the process" in first_note
            and "\n" not in first_note
        )
        assert second_note.startswith("wandb ") and "did not respond in time" in second_note
        assert (entries["tensorboard"].lines, entries["wandb"].lines) == ([], lines)
        assert {"tracker wandb"} == ABANDONED_THREADS
    finally:
        release.set()
        ABANDONED_THREADS.clear()


def test_all_trackers_share_one_timeout_at_the_end(tmp_path, monkeypatch):
    release = threading.Event()
    for name in ("tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(trackers.TRACKERS, name, FaultyTrackerEntry("start", release.wait))
    folder, notes = make_config_folder(tmp_path), CrashingListener()
    with run_trackers(("tensorboard", "wandb", "mlflow"), folder, notes, 0.6) as opened:
        opened.resume_from(0, [])
        began = time.monotonic()
    assert time.monotonic() - began < 1.5  # the timeout is shared: not three times 0.6
    assert len(notes.texts) == 3
    release.set()
    ABANDONED_THREADS.clear()


def make_config_folder(path: Path) -> RunFolder:
    """A run folder that contains only a config."""
    (path / "config.yaml").write_text("seed: 1\n")
    return RunFolder(path)


def test_a_full_queue_drops_lines_and_does_not_block(tmp_path, monkeypatch):
    release, notes = threading.Event(), CrashingListener()
    entry = FaultyTrackerEntry("start", release.wait)
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", entry)
    sent = Trackers(("tensorboard",), make_config_folder(tmp_path), notes)
    sent.resume_from(0, [])
    began = time.monotonic()
    for step in range(5_000):
        sent.log_line({"step": step, "lr": 0.1})
    sent.close("finished", 5.0)
    assert time.monotonic() - began < 4
    (note,) = notes.texts
    assert "the tracker does not respond, and 1,000 calls are queued" in note
    release.set()
    ABANDONED_THREADS.clear()


def test_a_resumed_run_sends_missing_lines(tmp_path, monkeypatch):
    """Lines 1 to 3 arrive, 4 and 5 do not; the run resumes from step 2."""
    folder = make_config_folder(tmp_path)
    lines = [{"step": step, "epoch": step, "lr": 0.1} for step in range(1, 6)]
    for line in lines:
        folder.append(line)
    entry = FaultyTrackerEntry("", None)
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", entry)
    first_trackers = Trackers(("tensorboard",), folder, CrashingListener())
    first_trackers.resume_from(0, [])
    for line in lines[:3]:
        first_trackers.log_line(line)
    first_trackers.close("failed", 10)
    assert entry.lines == lines[:3]
    folder.rewind(2)
    second_trackers = Trackers(("tensorboard",), folder, CrashingListener())
    second_trackers.resume_from(2, read_json_lines(folder.metrics))
    for line in lines[2:]:
        second_trackers.log_line(line)
    second_trackers.close("finished", 10)
    assert entry.lines == lines
    assert json.loads((tmp_path / TRACKERS_FILE).read_text()) == {"tensorboard": {"id": "identity", "at": [5, 0]}}


def test_lines_are_in_order():
    lines = [{"step": 1, "lr": 0.1}, {"step": 1, "val/top1": 0.5}, {"step": 2, "lr": 0.1}]
    assert [line_mark(line) for line in lines] == [(1, 0), (1, 1), (2, 0)]


def test_trackers_receive_the_final_status(tmp_path, monkeypatch):
    ends = []

    class Row(FaultyTrackerEntry):
        def make(self):
            tracker = super().make()
            tracker.finish = lambda status, summary: ends.append((status, summary))
            return tracker

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", Row("", None))
    folder = make_config_folder(tmp_path)
    folder.summary.write_text('{"steps": 3}')
    for error in (None, Interrupted("stopped"), ResourceError("full")):
        try:
            with run_trackers(("tensorboard",), folder, CrashingListener(), 10) as opened:
                opened.resume_from(0, [])
                if error:
                    raise error
        except (Interrupted, ResourceError):
            pass
    assert ends == [("finished", {"steps": 3}), ("stopped", {}), ("failed", {})]


def test_a_missing_tracker_library_is_reported_with_its_extra(photos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    result = run_cli("train", str(photos), "--log-to", "wandb", "--out", str(tmp_path / "run"))
    assert result.returncode == 6 and not (tmp_path / "run").exists()
    assert "error: wandb is not installed\n  pip install 'vitreous[wandb]'" in result.stderr


def test_unknown_trackers_are_rejected(photos):
    result = run_cli("train", str(photos), "--log-to", "wandbb")
    assert result.returncode == 2 and "wandb" in result.stderr + result.stdout


def test_configs_are_flattened_by_path():
    assert flatten_config({"a": {"b": 1, "c": {"d": [2]}}, "e": None}) == {"a.b": 1, "a.c.d": [2], "e": None}
    assert RunInfo(Path("runs/pets"), "", 0, {}).name == "pets"
