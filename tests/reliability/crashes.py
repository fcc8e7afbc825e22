"""Runs are killed before every file change, with torn writes, and resumed."""

from __future__ import annotations

import builtins
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.reliability.rig import ADAMW_PLAN, Bench, RunPlan
from tests.reliability.tally import Tally, expect
from vitreous.training import saving
from vitreous.training.checkpoint import CheckpointStore, find_damage
from vitreous.weights import bundle

#: nine steps and three saves; the last save removes the first checkpoint
SHORT_PLAN = RunPlan("nine steps", {**ADAMW_PLAN.options, "epochs": 45 / 48})
WATCHED_EVENTS = {"os.mkdir", "open", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class FileChangeRecorder:
    """Counts the file changes below `out` in this process and kills it at change `at`; `listing` gets a line for
    each."""

    def __init__(self, out: Path, listing: Path, at: int = 0) -> None:
        self.out, self.at, self.count, self.saving = str(out), at, 0, False
        self.listing = os.open(listing, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def tick(self, change: str, tear: Callable[[], object] | None = None) -> None:
        """Record one crash point. `tear` leaves behind the partial content of an interrupted write."""
        self.count += 1
        os.write(self.listing, f"{'save' if self.saving else 'else'} {change}\n".encode())
        if self.count == self.at:
            if tear:
                tear()
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Audit hook. Removals by `shutil.rmtree` contain no folder, so all of them count."""
        if event not in WATCHED_EVENTS:
            return
        inside = self.out in str(arguments[0]) or (
            event in ("os.remove", "os.rmdir") and arguments[1] not in (-1, None)
        )
        reads = event == "open" and not (arguments[2] or 0) & WRITE_FLAGS
        if inside and not reads:
            self.tick(event + (" to step" if event == "os.rename" and "/step-" in str(arguments[1]) else ""))

    def install(self) -> None:
        """Start to record the file changes of this process."""
        sync, opened, save = os.fsync, builtins.open, saving.Checkpointer.save

        def fsync(descriptor: int) -> None:
            self.tick("fsync")
            sync(descriptor)

        def opens(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            file_object = opened(file, mode, *rest, **named)
            return (
                TornTextFile(file_object, self)
                if self.out in str(file) and set(mode) & set("wa+") and "b" not in mode
                else file_object
            )

        def keeps(keeper: Any, *arguments: Any) -> None:
            self.saving = True
            save(keeper, *arguments)
            self.saving = False

        os.fsync, builtins.open, io.open, saving.Checkpointer.save = fsync, opens, opens, keeps  # type: ignore[assignment]
        for module in (saving, bundle):
            module.save_file = self.tensors(module.save_file)
        sys.addaudithook(self.hook)

    def tensors(self, real: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """Return a `save_file` that may be cut off at 4096 bytes or at half; its writes are invisible to Python."""

        def save_file(held: Any, path: Any) -> None:
            self.tick("tensors, nothing written")
            real(held, path)
            for size in (4096, os.path.getsize(path) // 2):
                self.tick(f"tensors torn at {size}", lambda size=size: os.truncate(path, size))

        return save_file


class TornTextFile:
    """A text file whose writes may be cut off at half."""

    def __init__(self, file: Any, recorder: FileChangeRecorder) -> None:
        self.file, self.recorder = file, recorder

    def write(self, text: str) -> int:
        """Write the text, or half of it before the process is killed."""
        self.recorder.tick("text torn", lambda: (self.file.write(text[: len(text) // 2]), self.file.flush()))
        return self.file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> TornTextFile:
        return self

    def __exit__(self, *what: object) -> None:
        self.file.close()


def install_recorder(out: Path, listing: Path, at: int = 0) -> Callable[[], object]:
    """Return a function that makes a child record its file changes and die at change `at`."""
    return lambda: FileChangeRecorder(out, listing, at).install()


def list_crash_points(bench: Bench) -> list[str]:
    """Every crash point of an uninterrupted run, in order."""
    out, listing = bench.new_run_folder(), bench.home / "points"
    bench.finish(SHORT_PLAN, out, install_recorder(out, listing))
    bench.check_outcome(SHORT_PLAN, out)
    return listing.read_text().splitlines()


def check_crash_points(bench: Bench, tally: Tally, every: int = 1) -> None:
    """Kill a run at every point (or every `every`-th), resume it and compare; once there is a valid checkpoint, there
    always is."""
    points = list_crash_points(bench)
    inside = sum(point.startswith("save") for point in points)
    expect(inside >= 30, f"only {inside} points inside a save: the recorder misses file changes")
    published = next(index for index, point in enumerate(points) if point == "save os.rename to step")
    for at in range(1, len(points) + 1, every):
        out = bench.new_run_folder()
        with tally.trial(f"point {at} of {len(points)}, {points[at - 1]}"):
            child = bench.start(SHORT_PLAN, out, install_recorder(out, bench.home / "seen", at))
            code = child.wait()
            expect(code == -signal.SIGKILL, f"exit {code}: {child.text}")
            valid = [
                checkpoint
                for checkpoint in CheckpointStore(out / "checkpoints").list_paths()
                if find_damage(checkpoint) is None
            ]
            expect(valid or at <= published + 1, "the earlier checkpoint is gone")
            bench.finish(SHORT_PLAN, out)
            bench.check_outcome(SHORT_PLAN, out)
    tally.facts |= {"points of the run": len(points), "of them inside a save": inside}
