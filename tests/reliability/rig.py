"""Runs in processes forked from one that has imported torch: half a second each instead of a cold start.

A `RunPlan` is a command line; `Bench.start` runs it through `vitreous train` in a child. `read_outcome` returns
everything that must be bit-identical.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.conftest import make_folder
from vitreous.cli import main as command_line
from vitreous.config import get_type_adapter
from vitreous.training import throughput
from vitreous.training.checkpoint import CheckpointStore
from vitreous.training.run import Run

CLASSES = ("ant", "bee", "cat", "dog")
# timing keys of metrics.jsonl and state.json
TIMING_KEYS = {"seconds", "images_per_second", "flops_utilisation", "data_wait"}
TINY_OPTIONS = {
    "model": "ViT-32x2/8",
    "image_size": 16,
    "epochs": 4,
    "batch_size": 5,
    "lr": 0.003,
    "warmup_steps": 6,
    "precision": "fp32",
    "ema": 0.9,
    "drop_path": 0.1,
    "mixup": 0.2,
    "label_smoothing": 0.1,
    "rand_augment": 1,
    "erase": 0.3,
    "log_every": 1,
    "evaluate_every": 7,
    "save_every": 3,
    "device": "cpu",
}


class CheckFailure(AssertionError):
    """A broken promise, with the details needed to reproduce it."""


@dataclass(frozen=True)
class RunPlan:
    """A run: its options, and images of `side` pixels. Images above 16 pixels are decoded again every epoch, by the
    workers if there are any."""

    name: str
    options: dict[str, Any]
    side: int = 20
    workers: int = 0

    def words(self, photos: Path, out: Path) -> list[str]:
        """The command line that starts the run, or resumes it if it has a checkpoint."""
        base = ["train", str(photos), "--out", str(out), "--workers", str(self.workers)]
        if (out / "config.yaml").exists():
            return [*base, "--resume"]
        return [
            *base,
            # checkpoints only at the intervals of --save-every; test_best.py kills runs that keep the best
            "--keep-last",
            *(word for name, value in self.options.items() for word in (f"--{name.replace('_', '-')}", str(value))),
        ]


ADAMW_PLAN = RunPlan("adamw", {**TINY_OPTIONS, "optimizer": "adamw"})
WORKERS_PLAN = replace(ADAMW_PLAN, name="adamw, 2 workers", workers=2)
MUON_PLAN = RunPlan("muon", {**TINY_OPTIONS, "optimizer": "muon", "batch_size": 3, "accumulate": 2}, side=16)
RUN_PLANS = (ADAMW_PLAN, MUON_PLAN, WORKERS_PLAN)


@dataclass
class ChildRun:
    """A run in progress in a separate process."""

    pid: int
    stderr_file: Path  # file of its stderr
    begun: float = field(default_factory=time.monotonic)

    def wait(self, limit: float = 120.0) -> int:
        """Return the exit code, negative for a signal. Raises CheckFailure after `limit` seconds, for a hang."""
        deadline = time.monotonic() + limit
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise CheckFailure(f"hung for {limit:g} s: {self.text}")
            time.sleep(0.002)

    def kill_after(self, seconds: float) -> bool:
        """Send SIGKILL `seconds` after the start. Returns whether it was killed; raises CheckFailure if it had failed
        before."""
        while time.monotonic() < self.begun + seconds:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return self.check_end(os.waitstatus_to_exitcode(status))
            time.sleep(0.001)
        os.kill(self.pid, signal.SIGKILL)
        return self.check_end(self.wait())

    def check_end(self, code: int) -> bool:
        """Whether a kill ended the run. Raises CheckFailure for any other end but success."""
        if code not in (0, -signal.SIGKILL):
            raise CheckFailure(f"exit {code}: {self.text}")
        return code != 0

    @property
    def text(self) -> str:
        """The stderr of the run without terminal control sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.stderr_file.read_text("utf-8", errors="replace"))


def fork_run(words: list[str], stderr_file: Path, prepare: Callable[[], object] | None = None) -> ChildRun:
    """Run `vitreous WORDS` in a forked child after `prepare` has patched the child."""
    sys.stdout.flush()
    stderr_file.unlink(missing_ok=True)
    stderr_file.touch()
    child = os.fork()
    if child:
        return ChildRun(child, stderr_file)
    code = 70
    try:
        descriptor = os.open(stderr_file, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.setpgid(0, 0)
        torch.set_num_threads(1)
        # measuring takes 0.25 s, and the metric is not part of an outcome
        throughput.measure_peak_flops = lambda device, precision: 1e12
        if prepare:
            prepare()
        command_line.main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        exit_child(code)
    raise AssertionError


def exit_child(code: int) -> None:
    """End a child as an interpreter does: its children first."""
    import multiprocessing

    for worker in multiprocessing.active_children():
        worker.terminate()
        worker.join()
    os._exit(code)


@dataclass
class Bench:
    """Photos, runs and their reference outcomes, below one folder."""

    home: Path
    seed: int = 0
    count: int = 0

    def photos(self, side: int) -> Path:
        """Four classes of PNG files with 12 training, 4 validation and 2 test images each."""
        root = self.home / f"photos {side}"
        return root if root.exists() else make_folder(root, {"train": 12, "val": 4, "test": 2}, CLASSES, (side, side))

    def new_run_folder(self) -> Path:
        self.count += 1
        return self.home / f"run {self.count}"

    def start(self, plan: RunPlan, out: Path, prepare: Callable[[], object] | None = None, *more: str) -> ChildRun:
        """Start or resume a run."""
        return fork_run([*plan.words(self.photos(plan.side), out), *more], self.home / f"{out.name}.stderr", prepare)

    def start_pair(self, plan: RunPlan, out: Path) -> ChildRun:
        """Start or resume a run of two processes with `torchrun`, in a separate process group."""
        stderr_file = self.home / f"{out.name}.stderr"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, "-m", "vitreous", *plan.words(self.photos(plan.side), out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(stderr_file, "w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        return ChildRun(process.pid, stderr_file)

    @cached_property
    def pair_outcome(self) -> dict[str, Any]:
        """The outcome of an uninterrupted run of two processes."""
        out = self.new_run_folder()
        self.finish_pair(out)
        return read_outcome(out)

    def finish_pair(self, out: Path) -> None:
        """Complete a run of two processes. Raises CheckFailure if it fails."""
        child = self.start_pair(WORKERS_PLAN, out)
        if code := child.wait():
            raise CheckFailure(f"two processes: exit {code}: {child.text}")

    def finish(self, plan: RunPlan, out: Path, prepare: Callable[[], object] | None = None) -> str:
        """Complete a run; returns its stderr. Raises CheckFailure if it fails."""
        child = self.start(plan, out, prepare)
        if code := child.wait():
            raise CheckFailure(f"{plan.name}: exit {code}: {child.text}")
        return child.text

    @cached_property
    def references(self) -> dict[str, tuple[dict[str, Any], float]]:
        """The reference outcomes computed so far."""
        self.preload()
        return {}

    def preload(self) -> None:
        """Import the modules that a run imports, as listed by a child that trains once, so that later children start
        with them."""
        listing, out = self.home / "modules", self.new_run_folder()

        def list_modules() -> None:
            real = command_line.main

            def main(words: list[str]) -> None:
                try:
                    real(words)
                finally:
                    listing.write_text("\n".join(sys.modules))

            command_line.main = main  # type: ignore[assignment]

        self.finish(ADAMW_PLAN, out, list_modules)
        for name in listing.read_text().split():
            with suppress(Exception):
                import_module(name)
        get_type_adapter(Run)

    def reference(self, plan: RunPlan) -> tuple[dict[str, Any], float]:
        """The outcome of an uninterrupted run, and its seconds; the number of workers does not change it."""
        name = plan.name.split(",")[0]
        if name not in self.references:
            out = self.new_run_folder()
            start_time = time.monotonic()
            self.finish(replace(plan, workers=0), out)
            seconds = time.monotonic() - start_time
            outcome = read_outcome(out)
            steps = -(
                -round(plan.options["epochs"] * 48) // (plan.options["batch_size"] * plan.options.get("accumulate", 1))
            )
            if [line["step"] for line in outcome["metrics"] if "train/loss" in line] != list(range(1, steps + 1)):
                raise CheckFailure(f"{plan.name}: the steps of a run are not 1 to {steps}")
            self.references[name] = outcome, seconds
        return self.references[name]

    def check_outcome(self, plan: RunPlan, out: Path) -> None:
        """Raise CheckFailure if a completed run differs from the uninterrupted one or leaves additional files."""
        expected, outcome = self.reference(plan)[0], read_outcome(out)
        if wrong := [name for name in expected if expected[name] != outcome.get(name)]:
            raise CheckFailure(f"{plan.name}, {out}: {', '.join(wrong)} differ")
        if strays := list((out / "checkpoints").glob(".tmp-*")):
            raise CheckFailure(f"{plan.name}, {out}: {strays} were left")


def read_outcome(out: Path) -> dict[str, Any]:
    """Everything of a completed run that must be bit-identical: files as bytes, state and metrics without the times."""
    newest = max((out / "checkpoints").glob("step-*"))
    outcome: dict[str, Any] = {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
    state = json.loads((newest / "state.json").read_text())
    outcome["numbers"] = {name: value for name, value in state.items() if name not in TIMING_KEYS}
    outcome["bundle"] = (out / "model" / "weights.safetensors").read_bytes()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    outcome["metrics"] = [{name: value for name, value in line.items() if name not in TIMING_KEYS} for line in lines]
    summary = json.loads((out / "summary.json").read_text())
    outcome["summary"] = {name: summary[name] for name in ("steps", "skipped", "train", "val", "test")}
    return outcome


def find_newest_step(out: Path) -> int:
    """The step of the newest published checkpoint, or 0."""
    return next((int(checkpoint.name[5:]) for checkpoint in CheckpointStore(out / "checkpoints").list_paths()), 0)


def list_logged_steps(out: Path) -> Iterator[int]:
    """The steps in the metrics file, in order."""
    if (out / "metrics.jsonl").exists():
        for line in (out / "metrics.jsonl").read_text().splitlines():
            if "train/loss" in line and line.endswith("}"):
                yield json.loads(line)["step"]
