"""A long run: what it holds must not grow."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace

import numpy as np

from tests.reliability.rig import ADAMW_PLAN, Bench
from tests.reliability.tally import Tally, expect
from vitreous.training.session import Session

MAX_BYTES_PER_STEP = 1024  # bytes of resident memory a step that a run may grow by


def check_memory_growth(bench: Bench, tally: Tally, steps: int = 2000) -> None:
    """A run of `steps` with a save every ten: from its second quarter on, resident memory is flat, and as many
    descriptors and threads."""
    plan = replace(
        ADAMW_PLAN,
        name="soak",
        options={**ADAMW_PLAN.options, "epochs": steps * 5 / 48, "save_every": 10, "evaluate_every": steps // 4},
    )
    listing, out = bench.home / "held", bench.out()
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
        rows = np.array([json.loads(line) for line in listing.read_text().splitlines()])
        expect(len(rows) == steps // 10, f"{len(rows)} saves")
        rows = rows[len(rows) // 4 :]
        slope = np.polyfit(rows[:, 0], rows[:, 1], 1)[0]
        tally.facts |= {
            "steps": steps,
            "bytes a step": f"{slope:.0f}",
            "descriptors": int(rows[-1, 2]),
            "threads": int(rows[-1, 3]),
        }
        expect(slope < MAX_BYTES_PER_STEP, f"resident memory grows by {slope:.0f} bytes a step")
        for column, what in ((2, "descriptors"), (3, "threads"), (4, "Python threads")):
            expect(len(set(rows[:, column])) == 1, f"{what}: {sorted(set(rows[:, column].tolist()))}")
