"""Runs in processes forked from one that has imported torch and computed nothing: half a second each instead of a cold
start.

A `Plan` is a command line; `start` runs it through `vitreous train` in a child, `outcome` is what must be equal bit for
bit.
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
TIMING_KEYS = {"seconds", "images_per_second", "flops_utilisation", "data_wait"}  # of metrics.jsonl and state.json
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
    """A promise that was not kept, with what is needed to see it again."""


@dataclass(frozen=True)
class RunPlan:
    """A run: pictures of `side` pixels (above 16 they are read anew every epoch, by the workers if there are any), and
    options."""

    name: str
    options: dict[str, Any]
    side: int = 20
    workers: int = 0

    def words(self, photos: Path, out: Path) -> list[str]:
        """The command line that begins the run, or goes on with it if there is something to go on with."""
        base = ["train", str(photos), "--out", str(out), "--workers", str(self.workers)]
        if (out / "config.yaml").exists():
            return [*base, "--resume"]
        return [
            *base,
            "--keep-last",  # checkpoints at the intervals of --save-every alone; test_best.py kills runs that keep the best
            *(word for name, value in self.options.items() for word in (f"--{name.replace('_', '-')}", str(value))),
        ]


ADAMW_PLAN = RunPlan("adamw", {**TINY_OPTIONS, "optimizer": "adamw"})
WORKERS_PLAN = replace(ADAMW_PLAN, name="adamw, 2 workers", workers=2)
MUON_PLAN = RunPlan("muon", {**TINY_OPTIONS, "optimizer": "muon", "batch_size": 3, "accumulate": 2}, side=16)
RUN_PLANS = (ADAMW_PLAN, MUON_PLAN, WORKERS_PLAN)


@dataclass
class ChildRun:
    """A run in progress in a process of its own."""

    pid: int
    said: Path  # its stderr
    begun: float = field(default_factory=time.monotonic)

    def wait(self, limit: float = 120.0) -> int:
        """Its exit code, negative for a signal. Raises Miss after `limit` seconds: a hang."""
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
        """SIGKILL it so long after its start. Returns whether it was killed; raises Miss if it had failed before."""
        while time.monotonic() < self.begun + seconds:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return self.ended(os.waitstatus_to_exitcode(status))
            time.sleep(0.001)
        os.kill(self.pid, signal.SIGKILL)
        return self.ended(self.wait())

    def ended(self, code: int) -> bool:
        """Whether a kill ended it; Miss for any end but that and success."""
        if code not in (0, -signal.SIGKILL):
            raise CheckFailure(f"exit {code}: {self.text}")
        return code != 0

    @property
    def text(self) -> str:
        """What it has said, without the colours and moves of a terminal."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.said.read_text("utf-8", errors="replace"))


def fork_run(words: list[str], said: Path, prepare: Callable[[], object] | None = None) -> ChildRun:
    """`vitreous WORDS` in a forked child, after `prepare` has changed there what it wants to change."""
    sys.stdout.flush()
    said.unlink(missing_ok=True)
    said.touch()
    child = os.fork()
    if child:
        return ChildRun(child, said)
    code = 70
    try:
        descriptor = os.open(said, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.setpgid(0, 0)
        torch.set_num_threads(1)
        # a quarter of a second, for a figure that is no part of an outcome
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
    """End a child as an interpreter does: its own children first."""
    import multiprocessing

    for worker in multiprocessing.active_children():
        worker.terminate()
        worker.join()
    os._exit(code)


@dataclass
class Bench:
    """Photos, runs and the outcomes that they are held to, below one folder."""

    home: Path
    seed: int = 0
    count: int = 0

    def photos(self, side: int) -> Path:
        """Four classes of PNG files, 12 to train, 4 to validate and 2 to test on."""
        root = self.home / f"photos {side}"
        return root if root.exists() else make_folder(root, {"train": 12, "val": 4, "test": 2}, CLASSES, (side, side))

    def out(self) -> Path:
        """A new place for a run."""
        self.count += 1
        return self.home / f"run {self.count}"

    def start(self, plan: RunPlan, out: Path, prepare: Callable[[], object] | None = None, *more: str) -> ChildRun:
        """Begin or continue a run."""
        return fork_run([*plan.words(self.photos(plan.side), out), *more], self.home / f"{out.name}.said", prepare)

    def start_pair(self, plan: RunPlan, out: Path) -> ChildRun:
        """Begin or continue a run in two processes of `torchrun`, in a process group of their own."""
        said = self.home / f"{out.name}.said"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, "-m", "vitreous", *plan.words(self.photos(plan.side), out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(said, "w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        return ChildRun(process.pid, said)

    @cached_property
    def pair_outcome(self) -> dict[str, Any]:
        """The outcome of an undisturbed run of two processes."""
        out = self.out()
        self.finish_pair(out)
        return read_outcome(out)

    def finish_pair(self, out: Path) -> None:
        """Let a run of two processes come to its end. Raises Miss if it fails."""
        child = self.start_pair(WORKERS_PLAN, out)
        if code := child.wait():
            raise CheckFailure(f"two processes: exit {code}: {child.text}")

    def finish(self, plan: RunPlan, out: Path, prepare: Callable[[], object] | None = None) -> str:
        """Let a run come to its end; returns what it said. Raises Miss if it fails."""
        child = self.start(plan, out, prepare)
        if code := child.wait():
            raise CheckFailure(f"{plan.name}: exit {code}: {child.text}")
        return child.text

    @cached_property
    def references(self) -> dict[str, tuple[dict[str, Any], float]]:
        """Those that there are so far."""
        self.preload()
        return {}

    def preload(self) -> None:
        """Import here what a run imports, found by a child that makes one: the children after it start with
        everything."""
        listing, out = self.home / "modules", self.out()

        def tell() -> None:
            real = command_line.main

            def main(words: list[str]) -> None:
                try:
                    real(words)
                finally:
                    listing.write_text("\n".join(sys.modules))

            command_line.main = main  # type: ignore[assignment]

        self.finish(ADAMW_PLAN, out, tell)
        for name in listing.read_text().split():
            with suppress(Exception):
                import_module(name)
        get_type_adapter(Run)

    def reference(self, plan: RunPlan) -> tuple[dict[str, Any], float]:
        """The outcome of a run that nobody disturbs, and its seconds; workers change nothing, and have none of their
        own."""
        name = plan.name.split(",")[0]
        if name not in self.references:
            out = self.out()
            begun = time.monotonic()
            self.finish(replace(plan, workers=0), out)
            seconds = time.monotonic() - begun
            found = read_outcome(out)
            steps = -(
                -round(plan.options["epochs"] * 48) // (plan.options["batch_size"] * plan.options.get("accumulate", 1))
            )
            if [line["step"] for line in found["metrics"] if "train/loss" in line] != list(range(1, steps + 1)):
                raise CheckFailure(f"{plan.name}: the steps of a run are not 1 to {steps}")
            self.references[name] = found, seconds
        return self.references[name]

    def same(self, plan: RunPlan, out: Path) -> None:
        """Raise Miss where a completed run differs from one that nobody disturbed, or left strays."""
        expected, found = self.reference(plan)[0], read_outcome(out)
        if wrong := [name for name in expected if expected[name] != found.get(name)]:
            raise CheckFailure(f"{plan.name}, {out}: {', '.join(wrong)} differ")
        if strays := list((out / "checkpoints").glob(".tmp-*")):
            raise CheckFailure(f"{plan.name}, {out}: {strays} were left")


def read_outcome(out: Path) -> dict[str, Any]:
    """Everything of a completed run that must be equal bit for bit: files as bytes, numbers and metrics without the
    times."""
    newest = max((out / "checkpoints").glob("step-*"))
    found: dict[str, Any] = {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
    numbers = json.loads((newest / "state.json").read_text())
    found["numbers"] = {name: value for name, value in numbers.items() if name not in TIMING_KEYS}
    found["bundle"] = (out / "model" / "weights.safetensors").read_bytes()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found["metrics"] = [{name: value for name, value in line.items() if name not in TIMING_KEYS} for line in lines]
    summary = json.loads((out / "summary.json").read_text())
    found["summary"] = {name: summary[name] for name in ("steps", "skipped", "train", "val", "test")}
    return found


def newest_step(out: Path) -> int:
    """The step of the newest published checkpoint, 0 where there is none."""
    return next((int(place.name[5:]) for place in CheckpointStore(out / "checkpoints").list_paths()), 0)


def steps_logged(out: Path) -> Iterator[int]:
    """The steps that stand in the metrics, in order."""
    if (out / "metrics.jsonl").exists():
        for line in (out / "metrics.jsonl").read_text().splitlines():
            if "train/loss" in line and line.endswith("}"):
                yield json.loads(line)["step"]
