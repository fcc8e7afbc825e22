"""Small photo datasets start from available published weights, or from scratch if there are none or with `--init
none`."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

import vitreous
from tests.conftest import make_folder
from tests.listeners import NoteListener
from vitreous.jobs import default_weights
from vitreous.jobs.data import prepare_data
from vitreous.jobs.default_weights import FEW_PHOTOGRAPHS, find_available_weights, is_reachable, list_candidate_weights
from vitreous.recipes.options import TrainOptions
from vitreous.weights.published import PUBLISHED_BY_NAME

DEFAULT_WEIGHTS_NAME = "vit-s16-augreg"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("home") / "photos", {"train": 4, "val": 2}, size=(80, 72))


@pytest.fixture
def cached_weights(published_weights, monkeypatch):
    monkeypatch.setenv("VITREOUS_MIRROR", str(published_weights))
    monkeypatch.setattr(default_weights, "find_available_weights", find_available_weights)


def prepare_run(data, **options):
    listener = NoteListener()
    run = prepare_data(str(data), None, TrainOptions(str(data), workers=0, **options), listener)[1]
    return run, [note for note in listener.notes if "photographs are a small dataset" in note]


def test_few_photographs_start_from_cached_weights_with_one_note(photos, cached_weights):
    run, notes = prepare_run(photos)
    assert (run.init, run.recipe, run.model.width) == (DEFAULT_WEIGHTS_NAME, "finetune", 32)
    start = f"12 photographs are a small dataset: training starts from the published weights {DEFAULT_WEIGHTS_NAME} (cached); "
    assert notes == [start + "use --init none to train from scratch"]


@pytest.mark.parametrize(
    "options",
    [
        {"init": "none"},
        {"recipe": "small"},
        {"recipe": "deit"},
        {"image_size": 32},
        {"patch_size": 8},
        {"model": "ViT-32x2/8"},
    ],
)
def test_other_options_start_from_scratch(photos, cached_weights, options):
    run, notes = prepare_run(photos, **options)
    assert run.init is None and not any("training starts from" in note for note in notes)


def test_named_model_gets_only_its_published_weights():
    named = [
        [row.name for row in list_candidate_weights(TrainOptions(model=name))]
        for name in ("vit_small_patch16_224", "Swin-S/4")
    ]
    assert named == [["vit-s16-augreg", "vit-s16-augreg-in1k-384", "deit-s16"], ["swin-s4"]]
    assert (
        list_candidate_weights(TrainOptions(model="ViT-32x2/8")) == []
        and list_candidate_weights(TrainOptions())[0].name == DEFAULT_WEIGHTS_NAME
    )


def test_many_or_small_photographs_start_from_scratch(tmp_path, photos, cached_weights, monkeypatch):
    assert prepare_run(make_folder(tmp_path / "icons", {"train": 4, "val": 2}, size=(24, 16)))[0].init is None
    monkeypatch.setattr(default_weights, "FEW_PHOTOGRAPHS", 12)
    assert FEW_PHOTOGRAPHS == 2_000 and prepare_run(photos)[0].init is None


def test_note_suggests_weights_when_none_are_cached(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(default_weights, "find_available_weights", find_available_weights)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("VITREOUS_OFFLINE", "1")
    listener = NoteListener()
    run = prepare_data(str(photos), None, TrainOptions(str(photos), workers=0), listener)[1]
    assert run.init is None and any("for example --init" in note for note in listener.notes)


def test_unresponsive_weight_server_times_out_quickly(monkeypatch):
    monkeypatch.setattr(default_weights, "PROBE_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # accepts connections and never responds
        monkeypatch.setenv("VITREOUS_MIRROR", f"http://127.0.0.1:{listening.getsockname()[1]}")
        began = time.monotonic()
        assert not is_reachable(PUBLISHED_BY_NAME[DEFAULT_WEIGHTS_NAME])
        assert time.monotonic() - began < 5


def test_weight_server_with_the_file_is_reachable(published_weights, monkeypatch):
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *parts):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(published_weights))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("VITREOUS_MIRROR", f"http://127.0.0.1:{server.server_port}")
        try:
            assert is_reachable(PUBLISHED_BY_NAME[DEFAULT_WEIGHTS_NAME]) and not is_reachable(
                PUBLISHED_BY_NAME["vit-ti16-augreg"]
            )
        finally:
            server.shutdown()
            thread.join()


def test_run_from_default_weights_resumes(photos, cached_weights, tmp_path):
    out = tmp_path / "run"
    options = {"image_size": None, "batch_size": 4, "steps": 2, "workers": 0, "device": "cpu", "precision": "fp32"}
    summary = vitreous.train(photos, out=str(out), progress=False, **options)
    assert summary["steps"] == 2 and Path(summary["bundle"]).is_dir()
    assert vitreous.train(str(out), resume=True, progress=False) == summary
