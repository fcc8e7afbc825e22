"""Run the reliability checks: python -m tests.reliability [--quick] [--seed N] [NAME …].

Exits 1 if a check fails. With `-` as the name, names are read from stdin, one per line; each result is printed as a
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.reliability import crashes, damage, disk, folders, kills, soak, stops
from tests.reliability.rig import Bench
from tests.reliability.tally import Tally
from vitreous.reports.pages import report

Check = Callable[[Bench, Tally], None]

ALL_CHECKS: dict[str, Check] = {
    "kills": kills.check_random_kills,
    "storm": kills.check_startup_kills,
    "crash points": crashes.check_crash_points,
    "SIGTERM": stops.check_sigterms,
    "SIGINT": stops.check_interrupts,
    "SIGTERM to the group": stops.check_group_signals,
    "SIGINT to the group": partial(stops.check_group_signals, number=signal.SIGINT),
    "worker deaths": stops.check_worker_deaths,
    "boundaries": stops.check_resume_boundaries,
    "damage": damage.check_damaged_checkpoints,
    "none valid": damage.check_no_valid_checkpoint,
    "full disk": disk.check_full_disks,
    "removed folder": disk.check_removed_folder,
    "clock": folders.check_clocks,
    "two at once": folders.check_concurrent_runs,
    "retention": folders.check_retention,
    "stale": folders.check_stale_checkpoints,
    "edits": folders.check_edited_options,
    "soak": soak.check_memory_growth,
}
#: a subset of the trials of each check, for every run of the tests
QUICK_CHECKS: dict[str, Check] = {
    "kills": partial(kills.check_random_kills, kills=1),
    "storm": partial(kills.check_startup_kills, kills=5),
    "crash points": partial(crashes.check_crash_points, every=80),
    "SIGTERM": partial(stops.check_sigterms, count=2),
    "SIGINT": partial(stops.check_interrupts, count=1),
    "SIGTERM to the group": partial(stops.check_group_signals, count=1, pairs=0),
    "SIGINT to the group": partial(stops.check_group_signals, number=signal.SIGINT, count=1, pairs=0),
    "worker deaths": partial(stops.check_worker_deaths, count=1),
    "damage": partial(damage.check_damaged_checkpoints, flips=3, resumes=1, plans=[damage.FROZEN_PLAN]),
    "none valid": partial(damage.check_no_valid_checkpoint, count=1),
    "full disk": partial(disk.check_full_disks, share=10),
}


def run_check(bench: Bench, checks: dict[str, Check], name: str) -> Tally:
    """Run one check. Raises KeyError for an unknown name."""
    tally = Tally(name)
    checks[name](bench, tally)
    return tally


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--quick", action="store_true", help="run the subset of trials that the tests use")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with SIGINT ignored
    checks, serves = (QUICK_CHECKS if args.quick else ALL_CHECKS), args.names == ["-"]
    start_time, missed = time.monotonic(), False
    # Drawing takes as long as a run here and changes no other file: only the full checks draw the pages.
    if args.quick:
        report.draw_metric_curves = report.build_loss_panel = report.draw_confusion_plot = (
            report.draw_reliability_plot
        ) = lambda *parts, **named: ""
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        bench = Bench(Path(folder), args.seed)
        for name in (line.strip() for line in sys.stdin) if serves else args.names or checks:
            tally = run_check(bench, checks, name)
            missed |= bool(tally.misses)
            print(json.dumps({"line": tally.line, "misses": tally.misses}) if serves else tally.line, flush=True)
            for miss in [] if serves else tally.misses:
                print(f"  FAILED (seed {args.seed}) {miss}", flush=True)
    if not serves:
        print(
            f"{'some checks failed' if missed else 'all checks passed'}, {time.monotonic() - start_time:.0f} s",
            flush=True,
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
