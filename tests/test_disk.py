"""Files and folders are written completely or not at all, also if the writer is killed at any point."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.killing import run_and_kill
from vitreous.errors import ResourceError
from vitreous.system.disk import (
    atomic_path,
    compute_sha256,
    open_atomic,
    sync_and_rename,
    write_output_file,
    write_text_atomic,
)

OLD_TEXT, NEW_TEXT = "old " * 1000, "new " * 3000


def write_file(path: Path) -> None:
    with open_atomic(path, "w") as file:
        file.write(NEW_TEXT[:5000])
        file.write(NEW_TEXT[5000:])


def write_folder(path: Path) -> None:
    with atomic_path(path) as temporary:
        temporary.mkdir()
        (temporary / "a").write_text(NEW_TEXT)
        (temporary / "b").mkdir()
        (temporary / "b" / "c").write_text(NEW_TEXT)


def test_killed_writers_leave_the_old_or_the_new_file(tmp_path):
    path = tmp_path / "file"
    points = run_and_kill(tmp_path, lambda: write_file(path))
    assert points >= 6 and path.read_text() == NEW_TEXT
    leftovers = []
    for at in range(1, points + 1):
        path.write_text(OLD_TEXT)
        assert run_and_kill(tmp_path, lambda: write_file(path), at) == -1
        leftovers.append(path.read_text())
        write_file(path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"], "the next writer must remove leftover files"
    assert (
        leftovers == [OLD_TEXT] * (points - 2) + [NEW_TEXT] * 2
    )  # after the rename: the folder's sync, and the cleanup


def test_killed_writers_leave_a_complete_folder_or_none(tmp_path):
    path = tmp_path / "folder"
    points = run_and_kill(tmp_path, lambda: write_folder(path))
    assert points >= 9
    for at in range(1, points + 1):
        folder = tmp_path / str(at)
        folder.mkdir()
        assert run_and_kill(folder, lambda folder=folder: write_folder(folder / "folder"), at) == -1
        if not (folder / "folder").exists():
            write_folder(folder / "folder")
        assert {file.name for file in (folder / "folder").rglob("*")} == {"a", "b", "c"}
        assert [entry.name for entry in folder.iterdir()] == ["folder"]


@pytest.mark.parametrize("shared", [False, True])
def test_exceptions_leave_only_the_old_file(tmp_path, shared):
    path = tmp_path / "file"
    path.write_text(OLD_TEXT)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), open_atomic(path, "w", shared=shared) as file:
            file.write(NEW_TEXT)
            raise error
    assert path.read_text() == OLD_TEXT and os.listdir(tmp_path) == ["file"]


def test_content_is_synced_before_the_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    order, sync, replace = [], os.fsync, os.replace

    def fsync(descriptor):
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda old, new: (order.append("rename"), replace(old, new)))
    write_text_atomic(tmp_path / "file", NEW_TEXT)
    assert order == [".file.tmp", "rename", tmp_path.name]
    order.clear()
    write_folder(tmp_path / "folder")
    assert order == ["a", "b", "c", ".folder.tmp", "rename", tmp_path.name]


def test_concurrent_writers_use_separate_files_and_remove_stale_ones(tmp_path):
    old, young = tmp_path / ".other.1.tmp", tmp_path / ".other.2.tmp"
    old.touch(), young.touch()
    os.utime(old, (1, 1))
    with (
        open_atomic(tmp_path / "file", "w", shared=True) as first_file,
        open_atomic(tmp_path / "file", "w", shared=True) as second_file,
    ):
        first_file.write("first")
        second_file.write("second")
    assert (tmp_path / "file").read_text() == "first" and young.exists() and not old.exists()


def test_unwritable_files_are_reported_by_name(tmp_path):
    with pytest.raises(ResourceError, match=r"cannot write .*nowhere"):
        write_output_file(tmp_path / "nowhere" / "file", NEW_TEXT)


def test_finished_files_are_renamed_and_hashed(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    sync_and_rename(tmp_path / "a", tmp_path / "b")
    assert compute_sha256(tmp_path / "b") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert not (tmp_path / "a").exists()
