"""Wrong clocks, two runs in one folder, retention, and settings or data changed before resuming."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace

from tests.reliability.rig import ADAMW_PLAN, Bench, ChildRun, find_newest_step, read_outcome
from tests.reliability.stops import expect_stopped, run_after_step, send_signal
from tests.reliability.tally import Tally, expect
from vitreous.system.disk import compute_sha256
from vitreous.training.checkpoint import MANIFEST_NAME, CheckpointStore, find_damage


def expect_error(child: ChildRun, code: int, *words: str) -> None:
    """Raise CheckFailure unless a run ended with this exit code and printed these words."""
    exit_code, log = child.wait(), " ".join(child.text.split())
    expect(exit_code == code and "Traceback" not in log, f"exit {exit_code}, not {code}: {log}")
    for word in words:
        expect(word in log, f"`{word}` was not printed: {log}")


def check_clocks(bench: Bench, tally: Tally) -> None:
    """With clocks a day behind, ten years ahead or stopped, and scrambled checkpoint times, the newest checkpoint is
    the highest step."""
    sent, chance = bench.home / "sent", random.Random(bench.seed + 5)
    began = time.time()
    lies: dict[str, Callable[[], float]] = {
        "a day back": lambda: began - 86_400,
        "ten years on": lambda: began + 10 * 365 * 86_400,
        "at 0": lambda: 0.0,
    }
    for clock_name, clock in lies.items():
        out = bench.new_run_folder()
        with tally.trial(f"clock {clock_name}"):
            expect_stopped(bench.start(ADAMW_PLAN, out, run_after_step(20, lambda: send_signal(sent))), out, sent)
            for path in (out / "checkpoints").rglob("*"):
                os.utime(path, (chance.uniform(0, 4e9), chance.uniform(0, 4e9)))
            log = bench.finish(ADAMW_PLAN, out, lambda clock=clock: setattr(time, "time", clock))
            expect("resumed at step 20" in log, log)
            bench.check_outcome(ADAMW_PLAN, out)


def check_concurrent_runs(bench: Bench, tally: Tally) -> None:
    """A second run in the same folder is rejected within 2 s with the first run's process ID and changes nothing; the
    first one completes."""
    sent, out = bench.home / "sent", bench.new_run_folder()
    sent.unlink(missing_ok=True)
    first_run = bench.start(ADAMW_PLAN, out, run_after_step(10, lambda: (sent.write_text("here"), time.sleep(8))))
    while not sent.exists():
        time.sleep(0.01)
    config = (out / "config.yaml").read_bytes()
    for more in ([], ["--override", "--lr", "0.5"]):
        began = time.monotonic()
        with tally.trial(f"resumed while it runs {' '.join(more)}"):
            second_run = bench.start(ADAMW_PLAN, out, None, *more)
            expect_error(second_run, 2, f"in use by process {first_run.pid}")
            expect(time.monotonic() - began < 2, f"took {time.monotonic() - began:.1f} s")
            expect((out / "config.yaml").read_bytes() == config, "the config of the first was changed")
    with tally.trial("the first"):
        expect(first_run.wait() == 0, first_run.text)
        bench.check_outcome(ADAMW_PLAN, out)


def check_retention(bench: Bench, tally: Tally) -> None:
    """--keep 1, 2 and 5 leave the newest 2, 2 and 5 checkpoints, also after a kill; all are valid."""
    for keep, num_kept in ((1, 2), (2, 2), (5, 5)):
        plan = replace(ADAMW_PLAN, name=f"keep {keep}", options={**ADAMW_PLAN.options, "keep": keep})
        with tally.trial(plan.name):
            out = bench.new_run_folder()
            child = bench.start(plan, out, run_after_step(25, lambda: os.kill(os.getpid(), signal.SIGKILL)))
            expect(child.wait() == -signal.SIGKILL, child.text)
            bench.finish(plan, out)
            checkpoints = list(CheckpointStore(out / "checkpoints").list_paths())
            steps = [39, *range(36, 0, -3)][:num_kept]
            expect(
                [int(checkpoint.name[5:]) for checkpoint in checkpoints] == steps,
                f"{[checkpoint.name for checkpoint in checkpoints]}",
            )
            expect(all(find_damage(checkpoint) is None for checkpoint in checkpoints), "not all are valid")


def check_stale_checkpoints(bench: Bench, tally: Tally) -> None:
    """An incomplete checkpoint, one of a later version, and changed data are skipped or rejected, each with its
    reason."""
    sent, stopped_run = bench.home / "sent", bench.new_run_folder()
    expect_stopped(
        bench.start(ADAMW_PLAN, stopped_run, run_after_step(20, lambda: send_signal(sent))), stopped_run, sent
    )
    with tally.trial("half a checkpoint with a higher number"):
        out = bench.new_run_folder()
        shutil.copytree(stopped_run, out)
        (out / "checkpoints" / "step-00000099").mkdir()
        shutil.copy(out / "checkpoints" / "step-00000020" / "model.safetensors", out / "checkpoints" / "step-00000099")
        log = bench.finish(ADAMW_PLAN, out)
        expect("step-00000099 is not used" in log and "resumed at step 20" in log, log)
        weights = read_bundle_weights(out)
        expect(weights == bench.reference(ADAMW_PLAN)[0]["bundle"], "another outcome")
    with tally.trial("a later format"):
        out = bench.new_run_folder()
        shutil.copytree(stopped_run, out)
        for checkpoint in CheckpointStore(out / "checkpoints").list_paths():
            state = json.loads((checkpoint / "state.json").read_text())
            (checkpoint / "state.json").write_text(json.dumps({**state, "format": 99}))
            manifest = json.loads((checkpoint / MANIFEST_NAME).read_text())
            manifest["state.json"] = {
                "bytes": (checkpoint / "state.json").stat().st_size,
                "sha256": compute_sha256(checkpoint / "state.json"),
            }
            (checkpoint / MANIFEST_NAME).write_text(json.dumps(manifest))
        expect_error(bench.start(ADAMW_PLAN, out), 4, "format 99")
    photos, backup = bench.photos(ADAMW_PLAN.side), bench.home / "kept"
    shutil.copytree(photos, backup)
    try:
        for split in photos.iterdir():
            (split / "ant").rename(split / "axe")
        with tally.trial("another class list"):
            expect_error(bench.start(ADAMW_PLAN, stopped_run), 3, "has changed since the run started")
        for split in photos.iterdir():
            (split / "axe").rename(split / "ant")
        next((photos / "train" / "ant").iterdir()).unlink()
        with tally.trial("one image removed"):
            expect_error(
                bench.start(ADAMW_PLAN, stopped_run), 3, "has changed since the run started", "--allow-data-change"
            )
            expect(find_newest_step(stopped_run) == 20, "the run continued")
        with tally.trial("one image removed, allowed"):
            out = bench.new_run_folder()
            shutil.copytree(stopped_run, out)
            child = bench.start(ADAMW_PLAN, out, None, "--allow-data-change")
            expect_error(child, 0, "continuing with the current files")
    finally:
        shutil.rmtree(photos)
        backup.rename(photos)


def read_bundle_weights(out) -> bytes:
    """The weights file of a run's bundle."""
    return (out / "model" / "weights.safetensors").read_bytes()


def check_edited_options(bench: Bench, tally: Tally) -> None:
    """Changed options on resuming are rejected with a list; with --override the schedule continues at values computed
    by hand."""
    sent, stopped_run = bench.home / "sent", bench.new_run_folder()
    expect_stopped(
        bench.start(ADAMW_PLAN, stopped_run, run_after_step(4, lambda: send_signal(sent))), stopped_run, sent
    )
    with tally.trial("rejected, all of them listed"):
        more = ["--lr", "0.5", "--epochs", "6", "--batch-size", "4", "--mixup", "0.7"]
        expect_error(
            bench.start(ADAMW_PLAN, stopped_run, None, *more),
            2,
            "optimizer.lr",
            "epochs",
            "batch_size",
            "mixup",
            "--override",
        )
        expect(find_newest_step(stopped_run) == 4, "the run continued")
    for change, more, lr, warmup, decay in (
        ("rate", ["--lr", "0.001"], 0.001, 6, "cosine"),
        ("warm-up", ["--warmup-steps", "10"], 0.003, 10, "cosine"),
        ("shape", ["--decay", "linear"], 0.003, 6, "linear"),
    ):
        out = bench.new_run_folder()
        shutil.copytree(stopped_run, out)
        with tally.trial(f"another {change}, with --override"):
            expect_error(bench.start(ADAMW_PLAN, out, None, "--override", *more), 0, "continuing with changed settings")
            lines = [
                json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines() if "train/loss" in line
            ]
            rates = [line["lr"] for line in lines]
            before, after = (
                [0.003 * step / 6 for step in range(4)],
                [expected_learning_rate(step, lr, warmup, decay) for step in range(4, 39)],
            )
            expect(
                len(rates) == 39
                and all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(rates, before + after, strict=True)),
                f"{rates}",
            )
            expect(math.isclose(rates[warmup], lr, rel_tol=1e-9), f"{rates[warmup]} after the warm-up")
            expect(
                0 < rates[-1] < 0.04 * lr and read_outcome(out)["numbers"]["step"] == 39,
                f"{rates[-1]} at the last step",
            )


def expected_learning_rate(step: int, lr: float, warmup: int, decay: str) -> float:
    """The learning rate of a step of 39, from 0."""
    if step < warmup:
        return lr * step / warmup
    progress = (step - warmup) / (39 - warmup)
    return lr * (1 - progress if decay == "linear" else (1 + math.cos(math.pi * progress)) / 2)
