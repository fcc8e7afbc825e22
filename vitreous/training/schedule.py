"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from vitreous.training.run import Schedule


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """What the base learning rate is multiplied by at `step` (0-based) of `steps`, as in Google's code.

    p = (step - warm-up) / (steps - warm-up) in [0, 1]; cosine: end + (1 - end) (1 + cos(pi p)) / 2; linear: end + (1 - end)
    (1 - p); then times min(1, step / warm-up).
    """
    warmup = schedule.warmup_steps
    progress = min(max((step - warmup) / max(steps - warmup, 1), 0.0), 1.0)
    shape = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}[schedule.decay]
    return (schedule.end + (1 - schedule.end) * shape) * (min(1.0, step / warmup) if warmup else 1.0)
