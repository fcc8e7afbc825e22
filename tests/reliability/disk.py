"""A disk that is full, fails or disappears during a run."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from tests.reliability.rig import ADAMW_PLAN, Bench, CheckFailure, find_newest_step, read_outcome
from tests.reliability.stops import run_after_step, run_before_call
from tests.reliability.tally import Tally, expect
from vitreous.training import saving
from vitreous.training.checkpoint import CheckpointStore, find_damage
from vitreous.training.folder import RunFolder

# injects a fault into this process; returns the function that removes it
DiskFault = Callable[[], Callable[[], object]]


def limit_file_size() -> Callable[[], object]:
    """No file may exceed 100,000 bytes; checkpoints do."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def limit_free_space() -> Callable[[], object]:
    """As much free space as a checkpoint needs, without the reserve of 20 %."""
    real = shutil.disk_usage
    shutil.disk_usage = lambda path: SimpleNamespace(free=550_000)  # type: ignore[assignment,return-value]
    return lambda: setattr(shutil, "disk_usage", real)


def fail_sync(number: int) -> DiskFault:
    """The disk reports an error for one sync."""

    def fault() -> Callable[[], object]:
        real = os.fsync

        def fsync(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        os.fsync = fsync
        return lambda: setattr(os, "fsync", real)

    return fault


DISK_FAULTS: dict[str, DiskFault] = {
    "file size limit": limit_file_size,
    "too little space": limit_free_space,
    "ENOSPC": fail_sync(errno.ENOSPC),
    "EDQUOT": fail_sync(errno.EDQUOT),
    "EIO": fail_sync(errno.EIO),
}


def inject_fault(
    fault: DiskFault, first: int, last: int, during_fault: Callable[[], object] = lambda: None
) -> Callable[[], object]:
    """Return a function that makes the saves `first` to `last` of a child meet a fault; `during_fault` is called
    meanwhile."""

    def prepare() -> None:
        real, count = saving.Checkpointer.save, 0

        def save(self, *arguments) -> None:
            nonlocal count
            count += 1
            remove_fault = fault() if first <= count <= last else lambda: None
            try:
                real(self, *arguments)
            finally:
                remove_fault()

        saving.Checkpointer.save = save  # type: ignore[method-assign]

    return prepare


def check_full_disks(bench: Bench, tally: Tally, share: int = 1) -> None:
    """A failed save is reported and the run continues to the same outcome; after three in a row it exits with 6 and can
    be resumed."""
    for name, fault in list(DISK_FAULTS.items())[::share]:
        out = bench.new_run_folder()
        with tally.trial(f"{name} at two saves"):
            log = " ".join(bench.finish(ADAMW_PLAN, out, inject_fault(fault, 3, 4)).split())
            for save_number in (1, 2):
                expect(f"training continues ({save_number} of 3 failures)" in log, log)
            expect(
                "checkpoint of step 9 not saved in" in log and str(out) in log.replace(" ", "").replace("run", "run "),
                log,
            )
            bench.check_outcome(ADAMW_PLAN, out)
        out = bench.new_run_folder()
        with tally.trial(f"{name} from the third save on"):
            child = bench.start(ADAMW_PLAN, out, inject_fault(fault, 3, 99))
            expect((code := child.wait()) == 6, f"exit {code}: {child.text}")
            log = " ".join(child.text.split())
            expect("checkpoint of step 15 not saved in" in log and "Traceback" not in log, log)
            expect(name != "too little space" or "1 MB and a reserve of 20 % required, but only 1 MB free" in log, log)
            expect(
                find_newest_step(out) == 6 and find_damage(CheckpointStore(out / "checkpoints").get_path(6)) is None,
                f"newest {find_newest_step(out)}",
            )
            expect(not list((out / "checkpoints").glob(".tmp-*")), "strays")
            bench.finish(ADAMW_PLAN, out)
            bench.check_outcome(ADAMW_PLAN, out)
    with tally.trial("SIGTERM when nothing can be saved"):
        out = bench.new_run_folder()
        stop = run_after_step(13, lambda: os.kill(os.getpid(), signal.SIGTERM))
        child = bench.start(ADAMW_PLAN, out, lambda: (inject_fault(limit_file_size, 5, 9)(), stop()))
        expect((code := child.wait()) == 143, f"exit {code}: {child.text}")
        expect("stopped at step 13 of 39, not saved" in child.text and find_newest_step(out) == 12, child.text)
        bench.finish(ADAMW_PLAN, out)
        bench.check_outcome(ADAMW_PLAN, out)
    with tally.trial("metrics on a full disk"):
        out = bench.new_run_folder()
        log = bench.finish(ADAMW_PLAN, out, run_before_call(RunFolder, "append", 5, raise_disk_full))
        expect("not written" in log and "training continues" in log, log)
        expected, outcome = dict(bench.reference(ADAMW_PLAN)[0]), read_outcome(out)
        expected["metrics"] = [line for save_number, line in enumerate(expected["metrics"], 1) if save_number != 5]
        expect(expected == outcome, "more differs than the line that could not be written")


def raise_disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_removed_folder(bench: Bench, tally: Tally) -> None:
    """If the run folder is removed during a run, the run exits with 6 and reports the folder, without hanging: early,
    late and at the end."""
    for step in (2, 20, 38):
        out: Path = bench.new_run_folder()
        with tally.trial(f"removed at step {step}"):
            child = bench.start(ADAMW_PLAN, out, run_after_step(step, lambda out=out: shutil.rmtree(out)))
            code, log = child.wait(60), child.text
            expect(code == 6 and "Traceback" not in log, f"exit {code}: {log}")
            if out.name.split()[-1] not in log:
                raise CheckFailure(f"no path: {log}")
            expect(
                not out.exists() or not list(out.rglob("*")),
                f"removed files were created again: {list(out.rglob('*'))}",
            )
