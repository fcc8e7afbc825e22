"""SIGTERM and SIGINT in every phase of a run, and resuming at every kind of boundary."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.reliability.rig import (
    ADAMW_PLAN,
    MUON_PLAN,
    RUN_PLANS,
    WORKERS_PLAN,
    Bench,
    ChildRun,
    RunPlan,
    find_newest_step,
    list_logged_steps,
    read_outcome,
)
from tests.reliability.tally import Tally, expect
from vitreous.jobs import data as data_job
from vitreous.training import saving
from vitreous.training.checkpoint import CheckpointStore, find_damage
from vitreous.training.session import Session

MAX_STOP_SECONDS = 10.0  # maximum seconds from the signal to the end


def send_signal(sent: Path, number: int = signal.SIGTERM) -> None:
    """Send this process a signal, and record the time."""
    sent.write_text(str(time.monotonic()))
    os.kill(os.getpid(), number)


def run_before_call(owner: object, name: str, nth: int, do: Callable[[], object]) -> Callable[[], object]:
    """Return a function that makes a child call `do` before the `nth` call of `owner.name`."""

    def prepare() -> None:
        real, count = getattr(owner, name), 0

        def called(*arguments, **named):
            nonlocal count
            count += 1
            if count == nth:
                do()
            return real(*arguments, **named)

        setattr(owner, name, called)

    return prepare


def run_after_step(step: int, do: Callable[[], object]) -> Callable[[], object]:
    """Return a function that makes a child call `do` just after a step."""

    def prepare() -> None:
        real = Session.watch

        def watch(self, state) -> None:
            if state.step == step:
                do()
            real(self, state)

        Session.watch = watch  # type: ignore[method-assign]

    return prepare


def expect_stopped(child: ChildRun, out: Path, sent: Path, code: int = 128 + signal.SIGTERM) -> tuple[int, float]:
    """The saved step that a stopped run reported, and the seconds to its end; step 0 if there was none. Raises
    CheckFailure if anything is wrong."""
    exit_code = child.wait()
    seconds = time.monotonic() - float(sent.read_text())
    text = child.text
    expect(exit_code == code and "Traceback" not in text, f"exit {exit_code}: {text}")
    expect(seconds <= MAX_STOP_SECONDS, f"took {seconds:.1f} s")
    if "stopped at step" not in text:
        expect(
            find_newest_step(out) == 0 and not list(list_logged_steps(out)),
            f"steps were run, but no step was reported: {text}",
        )
        return 0, seconds
    step = int(text.split("stopped at step ")[1].split()[0])
    expect(
        find_newest_step(out) == step == max(list_logged_steps(out)),
        f"stopped at {step}, saved at {find_newest_step(out)}",
    )
    expect(find_damage(CheckpointStore(out / "checkpoints").get_path(step)) is None, f"checkpoint {step} is not valid")
    return step, seconds


def list_signal_phases(sent: Path, chance: random.Random) -> list[tuple[str, Callable[[], object], int | None]]:
    """The name of each phase, the patch that sends the signal in it, and the step that must be saved (None: any)."""
    signals = lambda: send_signal(sent)  # noqa: E731
    phases: list[tuple[str, Callable[[], object], int | None]] = []
    phases += [("the data scan", run_before_call(data_job, "screen_images", 1, signals), 0)] * 3
    phases += [("the building of the model", run_before_call(Session, "build", 1, signals), 1)] * 2
    phases += [("warm-up", run_after_step(step, signals), step) for step in (1, 2, 5)]
    phases += [("a step", run_after_step(step, signals), step) for step in sorted(chance.sample(range(7, 31), 5))]
    phases += [
        ("an evaluation", run_before_call(Session, "evaluate_model", nth, signals), 7 * nth) for nth in (1, 2, 3, 4)
    ]
    phases += [
        ("a save", run_before_call(saving, "write_tensors", call, signals), 3 * (-(-call // 3)))
        for call in (1, 2, 15, 18)
    ]
    return phases


def check_sigterms(bench: Bench, tally: Tally, count: int = 30) -> None:
    """SIGTERM in every phase and at random times: exit 143, the current step saved, in time, and the same outcome after
    resuming."""
    chance, sent = random.Random(bench.seed + 2), bench.home / "sent"
    slowest, phases = 0.0, list_signal_phases(sent, chance)
    for index in range(min(count, len(phases))):
        phase, prepare, step = phases[index * len(phases) // min(count, len(phases))]
        plan, out = (ADAMW_PLAN, WORKERS_PLAN)[index % 2], bench.new_run_folder()
        with tally.trial(f"SIGTERM in {phase} (step {step}), {plan.name}"):
            saved_step, seconds = expect_stopped(bench.start(plan, out, prepare), out, sent)
            expect(step in (None, saved_step), f"saved step {saved_step}, not {step}")
            slowest = max(slowest, seconds)
            bench.finish(plan, out)
            bench.check_outcome(plan, out)
    while tally.tried < count:
        plan, out = RUN_PLANS[tally.tried % len(RUN_PLANS)], bench.new_run_folder()
        delay = chance.uniform(0.1, bench.reference(plan)[1])
        child = bench.start(plan, out)
        time.sleep(delay)
        if (out / "model").exists():
            child.wait()
            continue  # the run was complete, or nearly so
        sent.write_text(str(time.monotonic()))
        os.kill(child.pid, signal.SIGTERM)
        with tally.trial(f"seed {bench.seed}, SIGTERM after {delay:.3f} s, {plan.name}"):
            slowest = max(slowest, expect_stopped(child, out, sent)[1])
            bench.finish(plan, out)
            bench.check_outcome(plan, out)
    tally.facts["slowest stop"] = f"{slowest:.1f} s"


def check_interrupts(bench: Bench, tally: Tally, count: int = 3) -> None:
    """One SIGINT: as SIGTERM, with exit code 130. Two, while the run cannot react: ends within 2 s, leaves no worker,
    and can be resumed."""
    sent = bench.home / "sent"
    for number in range(count):
        out = bench.new_run_folder()
        with tally.trial("SIGINT once"):
            child = bench.start(WORKERS_PLAN, out, run_after_step(5 + number, lambda: send_signal(sent, signal.SIGINT)))
            step, _ = expect_stopped(child, out, sent, 128 + signal.SIGINT)
            expect(step == 5 + number, f"saved step {step}")
        with tally.trial("SIGINT twice"):
            child = bench.start(
                WORKERS_PLAN,
                out,
                run_before_call(Session, "stop", 3, lambda: (sent.write_text("stuck"), time.sleep(60))),
            )
            deadline = time.monotonic() + 60
            while sent.read_text() != "stuck" and time.monotonic() < deadline:
                time.sleep(0.01)
            workers = list_children(child.pid)
            expect(len(workers) == 2, f"{len(workers)} workers")
            began = time.monotonic()
            os.kill(child.pid, signal.SIGINT)
            time.sleep(0.2)
            os.kill(child.pid, signal.SIGINT)
            code = child.wait()
            expect(code == 130 and time.monotonic() - began < 2, f"exit {code} after {time.monotonic() - began:.1f} s")
            expect("Traceback" not in child.text, child.text)
            time.sleep(0.2)
            live_workers = [pid for pid in workers if is_alive(pid)]
            expect(not live_workers, f"workers {live_workers} live on")
            bench.finish(WORKERS_PLAN, out)
            bench.check_outcome(WORKERS_PLAN, out)


def check_group_signals(
    bench: Bench, tally: Tally, number: int = signal.SIGTERM, count: int = 50, pairs: int = 5
) -> None:
    """A stop signal to the whole process group at random times: the step is saved, no worker is left, and resuming
    gives the same outcome.

    The signal also reaches the workers. `pairs` of the trials have two processes, started by `torchrun`.
    """
    chance, sent, slowest = random.Random(bench.seed + 11 + number), bench.home / "sent", 0.0
    while tally.tried < count:
        paired, out = tally.tried < pairs, bench.new_run_folder()
        delay = chance.uniform(0.0, 2.0) if paired else chance.uniform(0.05, bench.reference(WORKERS_PLAN)[1])
        child = bench.start_pair(WORKERS_PLAN, out) if paired else bench.start(WORKERS_PLAN, out)
        if paired:
            wait_for(out / "metrics.jsonl", child)
        time.sleep(delay)
        if (out / "model").exists():
            child.wait()
            continue  # the run was nearly complete
        workers = list_descendants(child.pid)
        sent.write_text(str(time.monotonic()))
        os.killpg(child.pid, number)
        with tally.trial(f"seed {bench.seed}, signal {number} to the group after {delay:.3f} s, two: {paired}"):
            if paired:  # torchrun sets the exit code
                child.wait()
                expect("stopped at step" in child.text and find_newest_step(out) > 0, child.text)
            else:
                slowest = max(slowest, expect_stopped(child, out, sent, 128 + number)[1])
            time.sleep(0.2)
            expect(
                not (live_workers := [pid for pid in workers if is_alive(pid)]),
                f"processes {live_workers} are still alive",
            )
            if paired:
                bench.finish_pair(out)
                expect(read_outcome(out) == bench.pair_outcome, "the outcome of two processes differs")
            else:
                bench.finish(WORKERS_PLAN, out)
                bench.check_outcome(WORKERS_PLAN, out)
    tally.facts["slowest stop"] = f"{slowest:.1f} s"


def check_worker_deaths(bench: Bench, tally: Tally, count: int = 5) -> None:
    """A worker killed at random times: exit 6 with one message, the newest checkpoint kept, and the same outcome after
    resuming."""
    chance, out = random.Random(bench.seed + 12), bench.new_run_folder()
    while tally.tried < count:
        out = bench.new_run_folder()
        with tally.trial("SIGKILL to a worker"):
            step = chance.randrange(5, 15)

            def kill_worker() -> None:
                os.kill(list_children(os.getpid())[0], signal.SIGKILL)
                time.sleep(0.05)

            child = bench.start(WORKERS_PLAN, out, run_after_step(step, kill_worker))
            code, text = child.wait(), child.text
            expect(code == 6 and "Traceback" not in text, f"exit {code}: {text}")
            expect("a data worker stopped" in text and "continue with --resume" in text, text)
            expect(
                find_damage(CheckpointStore(out / "checkpoints").get_path(find_newest_step(out))) is None,
                "the checkpoint is not valid",
            )
            bench.finish(WORKERS_PLAN, out)
            bench.check_outcome(WORKERS_PLAN, out)


def wait_for(file: Path, child: ChildRun, limit: float = 60.0) -> None:
    """Wait until a run has written a file. Raises CheckFailure after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not file.exists():
        expect(time.monotonic() < deadline, f"{file.name} is not there after {limit:g} s: {child.text}")
        time.sleep(0.01)


def list_descendants(pid: int) -> list[int]:
    """The process IDs of all descendants of a process."""
    try:
        below = list_children(pid)
    except OSError:
        return []
    return [*below, *(pid for child in below for pid in list_descendants(child))]


def list_children(pid: int) -> list[int]:
    """The process IDs of the children of a process."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def check_resume_boundaries(bench: Bench, tally: Tally, share: int = 1) -> None:
    """Stop and resume several times, at the first and last steps and around an epoch's end; a complete run is left
    unchanged."""
    sent = bench.home / "sent"
    cases: list[tuple[RunPlan, list[int]]] = [
        (ADAMW_PLAN, [7, 19, 31]),
        (ADAMW_PLAN, [1, 2, 38]),
        (MUON_PLAN, [8, 9, 31]),
        (MUON_PLAN, [1, 7, 24]),
    ]
    for plan, steps in cases[::share]:
        out = bench.new_run_folder()
        for step in steps:
            with tally.trial(f"{plan.name} stopped at {step}"):
                saved_step, _ = expect_stopped(
                    bench.start(plan, out, run_after_step(step, lambda: send_signal(sent))), out, sent
                )
                expect(saved_step == step, f"saved step {saved_step}")
        with tally.trial(f"{plan.name} stopped in its last evaluation"):
            expect_stopped(
                bench.start(plan, out, run_before_call(Session, "finish", 1, lambda: send_signal(sent))), out, sent
            )
            bench.finish(plan, out)
            bench.check_outcome(plan, out)
        with tally.trial(f"{plan.name}, finished, resumed"):
            files = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in out.rglob("*")}
            bench.finish(plan, out)
            expect(
                files == {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in out.rglob("*")},
                "files were touched",
            )
    with tally.trial("an interrupted evaluation, repeated after resuming, and a kill before the next checkpoint"):
        out = bench.new_run_folder()
        expect_stopped(
            bench.start(ADAMW_PLAN, out, run_before_call(Session, "evaluate_model", 1, lambda: send_signal(sent))),
            out,
            sent,
        )
        child = bench.start(ADAMW_PLAN, out, run_after_step(8, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        expect(child.wait() == -signal.SIGKILL, child.text)
        bench.finish(ADAMW_PLAN, out)
        bench.check_outcome(ADAMW_PLAN, out)
    with tally.trial("an evaluation interrupted twice, the second time after resuming"):
        out = bench.new_run_folder()
        for _ in range(2):
            step, _ = expect_stopped(
                bench.start(ADAMW_PLAN, out, run_before_call(Session, "evaluate_model", 1, lambda: send_signal(sent))),
                out,
                sent,
            )
            expect(step == 7, f"saved step {step}, not 7")
        bench.finish(ADAMW_PLAN, out)
        bench.check_outcome(ADAMW_PLAN, out)
