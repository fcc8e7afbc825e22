"""The learning rate, and whatever else is scheduled, as functions of the step."""

from __future__ import annotations

import math

from vitreous.training.run import Ramp, Schedule


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """What the base learning rate is multiplied by at `step` (0-based) of `steps`, as in Google's code.

    p = (step - warm-up) / (steps - warm-up) in [0, 1]; cosine: end + (1 - end) (1 + cos(pi p)) / 2; linear: end + (1 -
    end) (1 - p); rsqrt: 1 / sqrt(1 + (step - warm-up) / timescale) after the warm-up; steps: 0.1 to the number of
    milestones passed; then times min(1, step / warm-up). In the last `cooldown_steps` the value they began with falls
    linearly to `end`.
    """
    cooldown = schedule.cooldown_steps
    if cooldown and step > steps - cooldown:
        left = max(0.0, (steps - step) / cooldown)
        return schedule.end + (plain(schedule, steps - cooldown, steps) - schedule.end) * left
    return plain(schedule, step, steps)


def plain(schedule: Schedule, step: int, steps: int) -> float:
    """The same without cooldown."""
    warmup, end = schedule.warmup_steps, schedule.end
    progress = min(max((step - warmup) / max(steps - warmup, 1), 0.0), 1.0)
    shape = {
        "cosine": end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2,
        "linear": end + (1 - end) * (1 - progress),
        "constant": 1.0,
        "rsqrt": (1 + max(0, step - warmup) / schedule.timescale) ** -0.5,
        "steps": 0.1 ** sum(step >= share * steps for share in schedule.milestones),
    }[schedule.decay]
    return shape * (min(1.0, step / warmup) if warmup else 1.0)


def ramp(schedule: Ramp, step: int, steps: int) -> float:
    """The value of a ramp at `step` (0-based) of `steps`.

    p = step / its steps in [0, 1]; cosine: end + (start - end) (1 + cos(pi p)) / 2; linear: start + (end - start) p.
    """
    share = min(1.0, step / max(1, schedule.steps or steps))
    if schedule.curve == "linear":
        return schedule.start + (schedule.end - schedule.start) * share
    return schedule.end + (schedule.start - schedule.end) * (1 + math.cos(math.pi * share)) / 2
