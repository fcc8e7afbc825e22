"""A long run whose memory use must not grow."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace

import numpy as np

from tests.reliability.rig import ADAMW_PLAN, Bench
from tests.reliability.tally import Tally, expect
from vitreous.training.session import Session

MAX_BYTES_PER_STEP = 1024  # maximum growth of resident memory per step, in bytes


def check_memory_growth(bench: Bench, tally: Tally, steps: int = 2000) -> None:
    """A run of `steps` with a save every ten steps: after its first quarter, resident memory, descriptors and threads
    are constant."""
    plan = replace(
        ADAMW_PLAN,
        name="soak",
        options={**ADAMW_PLAN.options, "epochs": steps * 5 / 48, "save_every": 10, "evaluate_every": steps // 4},
    )
    listing, out = bench.home / "held", bench.new_run_folder()
    listing.unlink(missing_ok=True)

    def watch() -> None:
        real, page = Session.save, os.sysconf("SC_PAGE_SIZE")

        def save(self, state) -> None:
            real(self, state)
            with open("/proc/self/statm") as statm, open("/proc/self/status") as status, open(listing, "a") as file:
                threads = next(int(line.split()[1]) for line in status if line.startswith("Threads"))
                resident = int(statm.read().split()[1]) * page
                held = [state.step, resident, len(os.listdir("/proc/self/fd")), threads, threading.active_count()]
                file.write(json.dumps(held) + "\n")

        Session.save = save  # type: ignore[method-assign]

    with tally.trial(f"{steps} steps"):
        child = bench.start(plan, out, watch)
        expect((code := child.wait(900)) == 0, f"exit {code}: {child.text}")
        samples = np.array([json.loads(line) for line in listing.read_text().splitlines()])
        expect(len(samples) == steps // 10, f"{len(samples)} saves")
        samples = samples[len(samples) // 4 :]
        slope = np.polyfit(samples[:, 0], samples[:, 1], 1)[0]
        tally.facts |= {
            "steps": steps,
            "bytes a step": f"{slope:.0f}",
            "descriptors": int(samples[-1, 2]),
            "threads": int(samples[-1, 3]),
        }
        expect(slope < MAX_BYTES_PER_STEP, f"resident memory grows by {slope:.0f} bytes a step")
        for column, counter in ((2, "descriptors"), (3, "threads"), (4, "Python threads")):
            expect(len(set(samples[:, column])) == 1, f"{counter}: {sorted(set(samples[:, column].tolist()))}")
