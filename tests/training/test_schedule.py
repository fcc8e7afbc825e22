import pytest

from vitreous.training.run import Schedule
from vitreous.training.schedule import factor

STEPS = (0, 1, 250, 500, 2875, 5250, 9999, 10000)
COSINE = (0, 6e-5, 0.015, 0.03, 0.0256066017, 0.015, 8.2019e-10, 0)
LINEAR = (0, 6e-5, 0.015, 0.03, 0.0225025, 0.015005, 1.31568e-5, 1e-5)


@pytest.mark.parametrize("step,rate", list(zip(STEPS, COSINE, strict=True)))
def test_cosine_is_that_of_googles_code(step, rate):
    assert 0.03 * factor(Schedule(500, "cosine"), step, 10_000) == pytest.approx(rate, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("step,rate", list(zip(STEPS, LINEAR, strict=True))[3:])
def test_linear_ends_where_googles_code_ends(step, rate):
    assert 0.03 * factor(Schedule(500, "linear", end=1e-5 / 0.03), step, 10_000) == pytest.approx(rate, rel=1e-5)


def test_constant_and_no_warmup():
    assert [factor(Schedule(4, "constant"), step, 10) for step in (0, 2, 4, 9)] == [0, 0.5, 1, 1]
    assert factor(Schedule(0), 0, 10) == 1
    assert factor(Schedule(20), 10, 10) == 0.5  # a warm-up longer than the run


def test_steps_are_those_of_bit():
    schedule = Schedule(0, "steps", milestones=(0.3, 0.6, 0.8))
    assert [factor(schedule, step, 90) for step in (0, 26, 27, 53, 54, 71, 72, 89)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3]
    )


def test_rsqrt_halves_after_three_timescales():
    schedule = Schedule(100, "rsqrt", timescale=1000)
    assert [factor(schedule, step, 9000) for step in (50, 100, 3100)] == pytest.approx([0.5, 1, 0.5])


@pytest.mark.parametrize("decay", ["constant", "rsqrt", "cosine"])
def test_the_cooldown_is_a_line_to_the_end(decay):
    plain, cooled = Schedule(0, decay, end=0.1), Schedule(0, decay, end=0.1, cooldown_steps=20)
    assert [factor(cooled, step, 100) for step in range(81)] == [factor(plain, step, 100) for step in range(81)]
    start = factor(plain, 80, 100)
    assert factor(cooled, 90, 100) == pytest.approx((start + 0.1) / 2)
    assert factor(cooled, 100, 100) == pytest.approx(0.1)
