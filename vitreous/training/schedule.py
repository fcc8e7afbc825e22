"""Values of the learning rate and other scheduled hyperparameters as functions of the step."""

from __future__ import annotations

import math

from vitreous.training.run import RampConfig, ScheduleConfig


def schedule_factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Return the factor of the base learning rate at `step` (0-based) of `steps`.

    The factor is a product of three factors, as in big_vision's `create_learning_rate_schedule`:

    - The curve, with p = (step - warm-up) / (steps - warm-up) in [0, 1]. cosine: end + (1 - end) (1 + cos(pi p)) / 2;
      linear: end + (1 - end) (1 - p); rsqrt: 1 / sqrt(1 + (step - warm-up) / timescale) after the warm-up; steps: 0.1
      to the power of the number of milestones passed. big_vision's cosine has no `end`.
    - The warm-up: min(1, step / warm-up), or min(1, step / (warm-up - 1)) with `warmup_includes_base`.
    - The cooldown: min(1, (steps - step) / cooldown).
    """
    warmup, end = schedule.warmup_steps, schedule.end
    progress = min(max((step - warmup) / max(steps - warmup, 1), 0.0), 1.0)
    curve = {
        "cosine": end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2,
        "linear": end + (1 - end) * (1 - progress),
        "constant": 1.0,
        "rsqrt": (1 + max(0, step - warmup) / schedule.timescale) ** -0.5,
        "steps": 0.1 ** sum(step >= share * steps for share in schedule.milestones),
    }[schedule.decay]
    if step < warmup:
        curve *= min(1.0, step / max(1, warmup - schedule.warmup_includes_base))
    if schedule.cooldown_steps:
        curve *= min(1.0, max(0, steps - step) / schedule.cooldown_steps)
    return curve


def ramp_value(schedule: RampConfig, step: int, steps: int) -> float:
    """Return the value of a scheduled hyperparameter at `step` (0-based) of `steps`.

    With p = step / (steps of the ramp) in [0, 1], or step / (steps of the ramp - 1) if the ramp `includes_end`. cosine:
    end + (start - end) (1 + cos(pi p)) / 2; linear: start + (end - start) p.
    """
    share = min(1.0, step / max(1, (schedule.steps or steps) - schedule.includes_end))
    if schedule.curve == "linear":
        return schedule.start + (schedule.end - schedule.start) * share
    return schedule.end + (schedule.start - schedule.end) * (1 + math.cos(math.pi * share)) / 2
