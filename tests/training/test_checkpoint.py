"""Checkpoints are published completely or not at all: every crash point of a save, and every kind of damage."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from vitreous.errors import ResourceError, WeightsError
from vitreous.training.checkpoint import MANIFEST_NAME, CheckpointStore, find_damage

FILE_CONTENTS = {"model.bin": b"weights " * 500, "optimizer.bin": b"moments " * 900, "state.json": b'{"step": 1}'}


def make_writers(step: int):
    return {
        name: (lambda path, body=body: path.write_bytes(body + str(step).encode()))
        for name, body in FILE_CONTENTS.items()
    }


def save_steps(store: CheckpointStore, *steps: int):
    for step in steps:
        store.save(step, make_writers(step), size=10_000)


def test_the_newest_checkpoint_has_the_highest_step(tmp_path):
    store = CheckpointStore(tmp_path)
    save_steps(store, 9, 10)
    os.utime(store.get_path(9), (2e9, 2e9))
    assert store.newest() == store.get_path(10)


def test_at_least_two_newest_checkpoints_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save_steps(store, 1, 2, 3, 4)
    assert [checkpoint.name for checkpoint in store.list_paths()] == ["step-00000004", "step-00000003"]


CRASH_EVENTS = {"os.mkdir", "open", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def crash_points(tmp_path: Path, at: int) -> int:
    """Save three checkpoints in a forked child that dies at its `at`-th file event; returns the number of events."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def tick():
            nonlocal count
            count += 1
            if count == at:
                os._exit(9)

        def hook(event, arguments):
            if event in CRASH_EVENTS and arguments and str(tmp_path) in str(arguments[0]):
                tick()

        real_sync, real_write = os.fsync, Path.write_bytes

        def torn(self, body):
            real_write(self, body[: len(body) // 2])
            tick()
            return real_write(self, body)

        os.fsync = lambda descriptor: (tick(), real_sync(descriptor))[1]
        Path.write_bytes = torn
        sys.addaudithook(hook)
        save_steps(CheckpointStore(tmp_path), 1, 2, 3)
        os.write(writer, str(count).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return int(pipe.read() or 0)


@pytest.mark.slow  # tests/reliability has a subset of these
def test_a_crash_during_save_keeps_published_checkpoints(tmp_path):
    points = crash_points(tmp_path / "counted", at=-1)
    assert points >= 30, "the hook misses file events"
    survived = 0
    for at in range(1, points + 1):
        folder = tmp_path / str(at)
        crash_points(folder, at)
        store = CheckpointStore(folder)
        newest = store.newest()
        published = list(store.list_paths())
        assert (newest is None and not published) or find_damage(newest) is None
        assert not list(folder.glob(".tmp-*")), "temporary files must be removed"
        save_steps(store, 7)
        assert store.newest() == store.get_path(7)
        survived += newest is not None
    assert survived > points // 2


@pytest.mark.parametrize(
    "damage",
    [
        "truncate 0",
        "truncate 1",
        "truncate half",
        "truncate -1",
        "flip",
        "delete",
        "swap",
        "empty manifest",
        "junk manifest",
        "link",
    ],
)
@pytest.mark.parametrize("name", ["model.bin", "optimizer.bin", "state.json"])
def test_damaged_checkpoints_fall_back_to_the_previous_one(tmp_path, damage, name):
    store = CheckpointStore(tmp_path)
    save_steps(store, 1, 2)
    file = store.get_path(2) / name
    content = bytearray(file.read_bytes())
    if damage.startswith("truncate"):
        length = {"0": 0, "1": 1, "half": len(content) // 2, "-1": len(content) - 1}[damage.split()[1]]
        file.write_bytes(content[:length])
    elif damage == "flip":
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    elif damage == "delete":
        file.unlink()
    elif damage == "swap":
        other_file = store.get_path(2) / ("model.bin" if name != "model.bin" else "optimizer.bin")
        content, theirs = file.read_bytes(), other_file.read_bytes()
        file.write_bytes(theirs)
        other_file.write_bytes(content)
    elif damage == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        (store.get_path(2) / MANIFEST_NAME).write_text("{}" if damage.startswith("empty") else "junk")
    warnings = []
    assert store.newest(warnings.append) == store.get_path(1)
    assert len(warnings) == 1 and "step-00000002 is not used" in warnings[0]


def test_manifests_with_outside_paths_are_rejected(tmp_path):
    store = CheckpointStore(tmp_path / "store")
    save_steps(store, 1)
    (tmp_path / "secret").write_text("x")
    manifest = json.loads((store.get_path(1) / MANIFEST_NAME).read_text())
    manifest["../../secret"] = {"bytes": 1, "sha256": ""}
    (store.get_path(1) / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert "missing" in find_damage(store.get_path(1))


def test_only_invalid_checkpoints_raise_and_an_empty_store_is_none(tmp_path):
    store = CheckpointStore(tmp_path)
    assert store.newest() is None
    save_steps(store, 1, 2)
    for checkpoint in store.list_paths():
        (checkpoint / "model.bin").unlink()
    with pytest.raises(WeightsError, match="none of the 2 checkpoints"):
        store.newest()


def test_a_full_disk_keeps_old_checkpoints_and_no_partial_files(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    save_steps(store, 1)

    def full(path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ResourceError, match="No space left") as error:
        store.save(2, {**make_writers(2), "optimizer.bin": full}, size=10)
    assert error.value.code == 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5_000_000})())
    with pytest.raises(ResourceError, match=r"8 MB and a reserve of 20 % required, but only 5 MB free"):
        store.save(2, make_writers(2), size=8_000_000)
    assert store.newest() == store.get_path(1)
    monkeypatch.undo()
    save_steps(store, 2)
    assert store.newest() == store.get_path(2)


def test_an_invalid_checkpoint_of_the_same_step_is_replaced(tmp_path):
    store = CheckpointStore(tmp_path)
    save_steps(store, 1, 2)
    (store.get_path(2) / "model.bin").unlink()
    save_steps(store, 2)
    assert store.newest() == store.get_path(2)
