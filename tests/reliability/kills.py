"""SIGKILL from outside at random times."""

from __future__ import annotations

import random

from tests.reliability.rig import ADAMW_PLAN, RUN_PLANS, Bench, find_newest_step
from tests.reliability.tally import Tally, expect

PER_RUN = 25  # maximum kills per run, so that a run can complete


def check_random_kills(bench: Bench, tally: Tally, kills: int = 100) -> None:
    """Kill runs at U(0.01 s, half the run's time) after each start, `kills` times in total; every run ends with the
    reference outcome."""
    chance = random.Random(bench.seed)
    runs = early = saving = 0
    while tally.tried < kills:
        plan, out = RUN_PLANS[runs % len(RUN_PLANS)], bench.new_run_folder()
        most = min(PER_RUN, -(-kills // 4), kills - tally.tried)
        seconds, killed, reached = bench.reference(plan)[1], 0, 0
        with tally.trial(f"seed {bench.seed}, run {runs}, {plan.name}", 0):
            while killed < most:
                if not bench.start(plan, out).kill_after(chance.uniform(0.01, seconds / 2)):
                    break
                killed += 1
                early += not find_newest_step(out)
                saving += any((out / "checkpoints").glob(".tmp-*"))
                expect(
                    find_newest_step(out) >= reached,
                    f"newest checkpoint fell from {reached} to {find_newest_step(out)}",
                )
                reached = find_newest_step(out)
            bench.finish(plan, out)
            bench.check_outcome(plan, out)
            tally.passed += killed
        tally.tried += killed
        runs += 1
    tally.facts |= {"runs": runs, "before the first checkpoint": early, "inside a save": saving}


def check_startup_kills(bench: Bench, tally: Tally, kills: int = 20) -> None:
    """Kill within 50 ms of every start, then run to the end: same outcome and no additional files."""
    chance, out = random.Random(bench.seed + 1), bench.new_run_folder()
    with tally.trial(f"seed {bench.seed}", kills):
        killed = sum(bench.start(ADAMW_PLAN, out).kill_after(chance.uniform(0, 0.05)) for _ in range(kills))
        expect(killed == kills, f"{killed} of {kills} were killed")
        bench.finish(ADAMW_PLAN, out)
        bench.check_outcome(ADAMW_PLAN, out)
