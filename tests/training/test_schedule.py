import math

import numpy as np
import pytest

from vitreous.training.run import RampConfig, ScheduleConfig
from vitreous.training.schedule import ramp_value, schedule_factor

STEPS = (0, 1, 250, 500, 2875, 5250, 9999, 10000)
COSINE_RATES = (0, 6e-5, 0.015, 0.03, 0.0256066017, 0.015, 8.2019e-10, 0)
LINEAR_RATES = (0, 6e-5, 0.015, 0.03, 0.0225025, 0.015005, 1.31568e-5, 1e-5)


@pytest.mark.parametrize("step,rate", list(zip(STEPS, COSINE_RATES, strict=True)))
def test_cosine_matches_the_code_of_google(step, rate):
    assert 0.03 * schedule_factor(ScheduleConfig(500, "cosine"), step, 10_000) == pytest.approx(
        rate, rel=1e-5, abs=1e-12
    )


@pytest.mark.parametrize("step,rate", list(zip(STEPS, LINEAR_RATES, strict=True))[3:])
def test_linear_matches_the_code_of_google(step, rate):
    assert 0.03 * schedule_factor(ScheduleConfig(500, "linear", end=1e-5 / 0.03), step, 10_000) == pytest.approx(
        rate, rel=1e-5
    )


def test_constant_and_no_warmup():
    assert [schedule_factor(ScheduleConfig(4, "constant"), step, 10) for step in (0, 2, 4, 9)] == [0, 0.5, 1, 1]
    assert schedule_factor(ScheduleConfig(0), 0, 10) == 1
    assert schedule_factor(ScheduleConfig(20), 10, 10) == 0.5  # a warm-up longer than the run


def test_step_schedule_matches_bit():
    schedule = ScheduleConfig(0, "steps", milestones=(0.3, 0.6, 0.8))
    assert [schedule_factor(schedule, step, 90) for step in (0, 26, 27, 53, 54, 71, 72, 89)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3]
    )


def test_rsqrt_halves_after_three_timescales():
    schedule = ScheduleConfig(100, "rsqrt", timescale=1000)
    assert [schedule_factor(schedule, step, 9000) for step in (50, 100, 3100)] == pytest.approx([0.5, 1, 0.5])


def big_vision_schedule_factor(decay, step, steps, warmup, cooldown, timescale):
    """`create_learning_rate_schedule` of big_vision."""
    progress = min(max((step - warmup) / (steps - warmup), 0), 1)
    curve = {
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "rsqrt": 1 / math.sqrt(1 + max(0, step - warmup) / timescale),
    }[decay]
    return curve * min(1, step / warmup) * min(1, (steps - step) / cooldown)


@pytest.mark.parametrize("decay", ["linear", "cosine", "rsqrt"])
def test_the_cooldown_multiplies_the_continuing_curve(decay):
    schedule = ScheduleConfig(4, decay, timescale=10, cooldown_steps=8)
    expected = [big_vision_schedule_factor(decay, step, 20, 4, 8, 10) for step in range(21)]
    assert [schedule_factor(schedule, step, 20) for step in range(21)] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("warmup", [0, 1, 2, 6, 20])
def test_warmup_including_the_base_rate_matches_linspace(warmup):
    schedule = ScheduleConfig(warmup, end=0.1, warmup_includes_base=True)
    decay = 0.1 + 0.45 * (1 + np.cos(np.pi * np.arange(20 - warmup) / max(1, 20 - warmup)))
    expected = np.concatenate([np.linspace(0, 1, warmup), decay])
    assert [schedule_factor(schedule, step, 20) for step in range(20)] == pytest.approx(expected, rel=1e-12)


def test_ramps_including_their_end_match_linspace():
    expected = [*np.linspace(0.04, 0.07, 8), *[0.07] * 12]
    values = [ramp_value(RampConfig(0.04, 0.07, "linear", 8, includes_end=True), step, 20) for step in range(20)]
    assert values == pytest.approx(expected, rel=1e-12)
