"""Metrics read one step late, as on a GPU, give the same run as metrics read immediately."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.objectives.sessions import create_session
from tests.training.test_loop import make_session
from vitreous.errors import NonFiniteError
from vitreous.training import loop
from vitreous.training.loop import defers_metrics, run_training_loop


class HostReadCounter(TorchDispatchMode):
    """Counts the host reads of tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        host = args[:1] and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.int64  # sample indices
        self.count += func is torch.ops.aten._local_scalar_dense.default and not host
        return func(*args, **(kwargs or {}))


def defer_metrics(monkeypatch) -> None:
    """Let the loop defer metrics on a CPU too."""
    monkeypatch.setattr(loop, "defers_metrics", lambda run, device: True)


def test_metrics_are_deferred_only_on_gpus_with_independent_steps(tmp_path):
    run, gpu = make_session(tmp_path)[0].run, torch.device("cuda", 0)
    assert defers_metrics(run, gpu) and not defers_metrics(run, torch.device("cpu"))
    for changes in ({"skip_steps": 1}, {"precision": "fp16"}, {"reproducible": True}):
        assert not defers_metrics(replace(run, **changes), gpu)


@pytest.mark.parametrize("name", ["supervised", "mae", "dinov2", "diffusion"])
def test_deferred_metrics_do_not_change_the_run(name, tmp_path, monkeypatch):
    def session(subfolder):
        if name == "supervised":
            return make_session(tmp_path / subfolder, accumulate=2, batch_size=4)
        return create_session(name, tmp_path / subfolder)

    def follow(subfolder):
        (begun, state), lines = session(subfolder), []
        record_line = lambda s: lines.append([s.step, s.counted, s.norm, s.losses, *s.scalars.values()])  # noqa: E731
        run_training_loop(state, begun.batches(state), [(3, record_line)])
        return state, lines

    (tmp_path / "now").mkdir()
    (tmp_path / "later").mkdir()
    now, lines = follow("now")
    defer_metrics(monkeypatch)
    later, expected_lines = follow("later")
    assert len(lines) > 5
    for line, expected in zip(lines, expected_lines, strict=True):
        assert line == pytest.approx(expected, rel=1e-6)  # sums over a step's micro-batches are float32 on the device
    assert torch.equal(now.flat.master, later.flat.master) and torch.equal(now.flat.average, later.flat.average)
    assert now.updates == later.updates == later.counted and not later.pending_metrics


def test_no_host_read_occurs_between_hooks(tmp_path, monkeypatch):
    session, state = make_session(tmp_path)
    defer_metrics(monkeypatch)
    monkeypatch.setattr(
        loop.DeferredMetrics, "read", lambda self: ({"loss": 0.0}, 0.0)
    )  # the read that waits for the previous step
    with HostReadCounter() as reads:
        run_training_loop(state, session.batches(state), [(5, lambda s: None)])
    assert state.step == 21 and reads.count == 0


def test_hooks_of_period_1_see_all_steps_and_period_0_does_not_wait(tmp_path, monkeypatch):
    session, state = make_session(tmp_path)
    defer_metrics(monkeypatch)
    counted: dict[int, list[int]] = {0: [], 1: []}
    for period, counts in counted.items():
        session, state = make_session(tmp_path / str(period))
        run_training_loop(state, session.batches(state), [(period, lambda s, counts=counts: counts.append(s.counted))])
    assert counted[1] == list(range(1, 22))
    assert counted[0] == [*range(20), 21]  # step 20 is missing: the host has not read its losses yet


@pytest.mark.parametrize("saves", [False, True])
def test_a_non_finite_step_ends_the_run_before_saving(saves, tmp_path, monkeypatch):
    session, state = make_session(tmp_path)
    defer_metrics(monkeypatch)

    def poison(slices):
        for index, (step_slice, batch) in enumerate(slices):
            if index == 4:
                batch["images"][1, 0, 0, 0] = math.nan
            yield step_slice, batch

    hooks = [(1, session.save)] if saves else []
    with pytest.raises(NonFiniteError, match="step 5: loss nan") as error:
        run_training_loop(state, poison(session.batches(state)), hooks)
    assert error.value.code == 5 and "nothing was saved" in error.value.message
    assert state.step == (5 if saves else 6)
    if saves:
        session.checkpointer.publish_pending(True)
        resumed, new_state = make_session(tmp_path)
        resumed.restore(new_state)
        assert new_state.step == 4 and new_state.flat.master.isfinite().all()
