"""Predictions on a Ray cluster: the output file is byte-identical to that of one process, also if a worker is
killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import parse_json_output, run_cli
from vitreous.cli.inference import choose_backend
from vitreous.cli.predict import Options
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import DataError, UsageError
from vitreous.inference.predict import load
from vitreous.inference.ray_backend import WORKER_CHUNK, split_into_chunks
from vitreous.inference.sources import Item
from vitreous.models.zoo import create_untrained_model
from vitreous.tasks.classification import Classification
from vitreous.weights.bundle import Bundle

NUM_FILES, NUM_FOLDERS = 50_000, 10


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """A bundle of a model for 8 x 8 pixels and five classes with a random head."""
    torch.manual_seed(0)
    model = create_untrained_model("ViT-16x1/4", 8, num_classes=5)
    torch.nn.init.normal_(model.head.weight)
    out = tmp_path_factory.mktemp("run") / "model"
    Bundle(model, Classification(tuple("abcde")), ImagePreprocess((8, 8))).save(out)
    return out


def list_process_tree(root: int) -> list[int]:
    """The process IDs of a process and all its descendants."""
    pids = [root]
    for process in pids:
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            pids += map(int, task.read_text().split())
    return pids


def list_ray_workers(root: int) -> list[int]:
    """The IDs of Ray's worker processes below a process."""
    return [
        process
        for process in list_process_tree(root)[1:]
        if b"ray::Worker" in Path(f"/proc/{process}/cmdline").read_bytes()
    ]


def test_chunks_preserve_every_item():
    def broken():
        raise DataError("it is broken")

    items = [
        Item("a\udcff\n", "/x/a\udcff\n"),
        Item("b", b"bytes of b"),
        Item("c", broken),
        Item("d", lambda: b"and of d"),
    ]
    items += [Item(str(number), f"/x/{number}") for number in range(2 * WORKER_CHUNK)]
    packed = list(split_into_chunks(iter(items)))
    assert [len(chunk) for chunk in packed] == [WORKER_CHUNK, WORKER_CHUNK, 4]
    back = [item for chunk in pickle.loads(pickle.dumps(packed)) for item in chunk]
    assert [item.name for item in back] == [item.name for item in items]
    with pytest.raises(DataError, match="it is broken"):
        back.pop(2).content()
    del items[2]
    assert [item.content() for item in back] == [item.content() for item in items]


def test_chunks_of_image_bytes_are_limited_by_size(monkeypatch):
    monkeypatch.setattr("vitreous.inference.ray_backend.MAX_SENT_BYTES", 100)
    packed = list(split_into_chunks(Item(str(number), bytes(60)) for number in range(5)))
    assert [len(chunk) for chunk in packed] == [2, 2, 1]


def test_missing_ray_error_contains_the_install_command(model_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    result = run_cli("predict", str(model_folder), str(tmp_path / "a.png"), "--ray", "local")
    assert result.returncode == 2 and "pip install 'vitreous[ray]'" in result.stderr


def test_int8_is_rejected_on_a_cluster(model_folder):
    options = Options(run=str(model_folder), images=("a.png",), ray="local", precision="int8")
    with pytest.raises(UsageError, match="int8"):
        choose_backend(options, load(model_folder))


@pytest.fixture
def shared_ray_cluster(monkeypatch):
    """Connect every command to the cluster that the first one starts; shut it down after the test."""
    import ray

    end = ray.shutdown
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    yield
    end()


@pytest.mark.slow
def test_ray_output_is_bit_identical_including_unreadable_images(model_folder, tmp_path, shared_ray_cluster):
    for index in range(3):
        Image.effect_noise((8, 8), 50 + index).convert("RGB").save(tmp_path / f"{index}.png")
    (tmp_path / "1.png").write_bytes(b"no picture")
    words = [str(tmp_path / f"{index}.png") for index in range(3)]
    for verb, suffix in (("predict", "jsonl"), ("embed", "parquet")):
        plain, on_ray = tmp_path / f"plain.{suffix}", tmp_path / f"ray.{suffix}"
        assert run_cli(verb, str(model_folder), *words, "--out", str(plain)).returncode == 3
        assert run_cli(verb, str(model_folder), *words, "--out", str(on_ray), "--ray", "local").returncode == 3
        assert on_ray.read_bytes() == plain.read_bytes()
    stopped = run_cli("predict", str(model_folder), *words, "--ray", "local", "--bad-images", "stop")
    assert stopped.returncode == 3 and "1.png" in stopped.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_output_is_complete_after_a_worker_is_killed(model_folder, tmp_path):
    draw = np.random.default_rng(0)
    for index in range(NUM_FILES):
        folder = tmp_path / "photos" / str(index % NUM_FOLDERS)
        if index < NUM_FOLDERS:
            folder.mkdir(parents=True)
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{index}.bmp")
    out, plain = tmp_path / "ray.jsonl", tmp_path / "plain.jsonl"
    command = [
        sys.executable,
        "-m",
        "vitreous",
        "predict",
        str(model_folder),
        str(tmp_path / "photos"),
        "--out",
        str(out),
        "--ray",
        "local",
        "--json",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 600
    while (
        time.monotonic() < deadline
        and process.poll() is None
        and (not out.exists() or out.read_bytes().count(b"\n") < NUM_FILES // 5)
    ):
        time.sleep(0.1)
    killed = list_ray_workers(process.pid)[0]
    os.kill(killed, signal.SIGKILL)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert json.loads(output)["images"] == NUM_FILES
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == len({row["path"] for row in records}) == NUM_FILES
    parse_json_output(run_cli("predict", str(model_folder), str(tmp_path / "photos"), "--out", str(plain), "--json"))
    assert out.read_bytes() == plain.read_bytes()
