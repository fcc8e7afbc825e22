"""Micro-batches, recomputation and float16 change the cost of a step, not its result."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.conftest import TINY_RUN, parse_json_output, run_cli
from tests.training.test_loop import collect_losses, make_session
from vitreous.data.augmentation.augment import Augment
from vitreous.errors import Interrupted, NonFiniteError, ResourceError
from vitreous.jobs.train import train
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.training import probe
from vitreous.training.loop import run_training_loop
from vitreous.training.ranks import SINGLE_PROCESS
from vitreous.training.session import Session

DETERMINISTIC_MODEL = ViTConfig(
    image=(16, 16), patch=(8, 8), classes=3, width=32, depth=2, heads=2, mlp=MlpConfig(hidden=64)
)


@pytest.mark.parametrize("micro", [1, 3, 8, 100])
def test_micro_batches_change_only_rounding(tmp_path, micro):
    expected = collect_losses(*make_session(tmp_path, model=DETERMINISTIC_MODEL))
    assert collect_losses(*make_session(tmp_path, model=DETERMINISTIC_MODEL, micro_batch=micro)) == pytest.approx(
        expected, abs=1e-5
    )


def test_recompute_keeps_gradients_and_saves_memory(tmp_path):
    """Dropout and stochastic depth draw the same values in the second forward pass."""
    noisy = DETERMINISTIC_MODEL.with_options(depth=6, regularization={"dropout": 0.2, "drop_path": 0.2})
    plain = collect_losses(*make_session(tmp_path, model=noisy, epochs=1.0))
    assert collect_losses(*make_session(tmp_path, model=noisy, epochs=1.0, recompute=True)) == plain
    saved_bytes = []
    for recompute in (False, True):
        session, state = make_session(tmp_path, model=replace(DETERMINISTIC_MODEL, depth=6), recompute=recompute)
        held = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, held=held: (held.append(t.numel()), t)[1], lambda t: t):
            state.objective.train()({k: v for k, v in next(session.batches(state))[1].items() if k != "samples"})
        saved_bytes.append(sum(held))
    assert saved_bytes[1] < saved_bytes[0] / 3


def test_float16_loss_scale_halves_on_overflow_and_grows_again(tmp_path, monkeypatch):
    monkeypatch.setattr("vitreous.training.loop.LOSS_SCALE_GROWTH_STEPS", 4)
    expected = collect_losses(*make_session(tmp_path, model=DETERMINISTIC_MODEL))
    session, state = make_session(tmp_path, model=DETERMINISTIC_MODEL, precision="fp16")
    assert state.scale == 2.0**16
    scales = []

    def shrink(slices):
        for number, pair in enumerate(slices):
            if number == 6:
                state.scale = 2.0**40  # a loss of 1 then exceeds the range of float16
            yield pair

    run_training_loop(
        state, shrink(session.batches(state)), [(1, lambda s: scales.append((s.scale, s.updates, s.skipped)))]
    )
    assert (
        any(after == 2 * before for (before, *_), (after, *_) in pairwise(scales[:6])) and 1 < scales[-1][0] < 2.0**40
    )
    # steps with an overflow are skipped, and do not count towards the limit of non-finite steps
    assert state.updates < state.step and state.skipped == 0
    assert torch.isfinite(state.flat.master).all()
    monkeypatch.undo()
    curve = collect_losses(*make_session(tmp_path, model=DETERMINISTIC_MODEL, precision="fp16"))
    assert curve[-1] == pytest.approx(expected[-1], abs=0.05)


def test_non_finite_steps_are_skipped_up_to_the_limit(tmp_path):
    def poisoned(slices, steps):
        for number, (step_slice, batch) in enumerate(slices):
            if number in steps:
                batch["images"][0] = float("nan")
            yield step_slice, batch

    session, state = make_session(tmp_path, skip_steps=2)
    run_training_loop(state, poisoned(session.batches(state), (3, 7)))
    assert (state.step, state.updates, state.skipped) == (21, 19, 2) and torch.isfinite(state.flat.master).all()
    session, state = make_session(tmp_path, skip_steps=2)
    with pytest.raises(NonFiniteError, match="step 10"):
        run_training_loop(state, poisoned(session.batches(state), (3, 7, 9)))


@pytest.mark.parametrize(
    "model",
    [DETERMINISTIC_MODEL, DETERMINISTIC_MODEL.with_options(regularization={"drop_path": 0.2})],
    ids=["still", "drop path"],
)
def test_reproducible_steps_are_independent_of_batches_and_cores(tmp_path, model):
    ends, threads = [], torch.get_num_threads()
    try:
        for size, accumulate, cores in ((8, 1, 1), (4, 2, 1), (2, 4, 1), (8, 1, 2), (8, 1, 3)):
            torch.set_num_threads(cores)
            session, state = make_session(
                tmp_path,
                model=model,
                batch_size=size,
                accumulate=accumulate,
                reproducible=True,
                shards=4,
                epochs=1.0,
                views=Augment(mixup=0.5, shift=0.1),
            )
            run_training_loop(state, session.batches(state))
            ends.append(torch.cat([state.flat.master, state.flat.average]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(end, ends[0]) for end in ends[1:])


def test_the_micro_batch_is_found_by_trial(tmp_path, monkeypatch):
    session, _ = make_session(tmp_path, model=DETERMINISTIC_MODEL)
    tried, notes = [], []

    def fits(session, state, shards, size):
        tried.append(size)
        return size <= 3

    monkeypatch.setattr(probe, "can_compute_batch", fits)
    run = probe.find_micro_batch(session.run, session.inputs, session.folder, SINGLE_PROCESS, notes.append)
    assert (
        tried == [8, 4, 2]
        and run.micro_batch == 2
        and (run.batch_size, run.steps) == (session.run.batch_size, session.run.steps)
    )
    assert notes == ["2 images fit into memory: batches of 8 are split into 4 micro-batches"]
    monkeypatch.setattr(probe, "can_compute_batch", lambda *_: False)
    with pytest.raises(ResourceError, match="a single image"):
        probe.find_micro_batch(session.run, session.inputs, session.folder, SINGLE_PROCESS, notes.append)


def test_out_of_memory_is_distinguished_from_other_errors(tmp_path, monkeypatch):
    session, _ = make_session(tmp_path, model=DETERMINISTIC_MODEL)

    def exhaust_memory(self, batch, share):
        raise (
            torch.OutOfMemoryError("CUDA out of memory") if len(batch["labels"]) > 2 else RuntimeError("something else")
        )

    monkeypatch.setattr("vitreous.training.shards.Shards.backward", exhaust_memory)
    with pytest.raises(RuntimeError, match="something else"):
        probe.find_micro_batch(session.run, session.inputs, session.folder, SINGLE_PROCESS, lambda text: None)


def test_the_micro_batch_fits_into_cpu_memory(tmp_path, monkeypatch):
    session, _ = make_session(tmp_path, model=DETERMINISTIC_MODEL)
    activation_bytes = DETERMINISTIC_MODEL.count_activations(device="cpu") * 4
    monkeypatch.setattr(
        probe, "get_free_memory", lambda device: int(3.5 * activation_bytes / probe.ACTIVATION_MEMORY_SHARE)
    )
    run = probe.find_micro_batch(session.run, session.inputs, session.folder, SINGLE_PROCESS, lambda text: None)
    assert run.micro_batch == 2
    assert probe.estimate_max_images(replace(session.run, recompute=True)) == pytest.approx(
        2 * probe.estimate_max_images(session.run), rel=0.01
    )


def test_micro_batch_may_change_on_resume(photo_folder, tmp_path):
    common = ["train", str(photo_folder), "--out", str(tmp_path / "run"), "--workers", "0"]
    words = [w for k, v in {**TINY_RUN, "drop_path": 0.0}.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    summary = parse_json_output(run_cli(*common, *words, "--micro-batch", "auto", "--json"))
    assert summary["steps"] == 6
    assert "micro_batch: null" in (tmp_path / "run" / "config.yaml").read_text()
    wrong = run_cli(*common, "--micro-batch", "none")
    assert wrong.returncode == 2


def test_compute_cost_is_summed_over_resumptions(photo_folder, tmp_path, monkeypatch):
    """FLOPs are those of the images; time is summed over all processes."""
    options = {**TINY_RUN, "workers": 0}
    uninterrupted = train(str(photo_folder), **options, out=str(tmp_path / "whole"))
    watch = Session.watch

    def watched(self, state):
        watch(self, state)
        if state.step == 3:
            self.signals.received = signal.SIGTERM

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Session, "watch", watched)
        train(str(photo_folder), **options, out=str(tmp_path / "cut"))
    stopped = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").open()][-1]
    again = train(str(photo_folder), out=str(tmp_path / "cut"), resume=True)
    assert again["exaflops"] == uninterrupted["exaflops"] > stopped["exaflops"] > 0
    assert again["wall_seconds"] > stopped["seconds"]
    assert again["device_hours"] == pytest.approx(again["wall_seconds"] / 3600)
    assert 0 < again["flops_utilisation"] < 1
