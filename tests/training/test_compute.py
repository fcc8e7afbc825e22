"""Micro-batches, recomputation and float16 change what a step costs, and not what it is."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.conftest import TINY, document, say
from tests.training.test_loop import losses, make
from vitreous.data.augmentation.augment import Augment
from vitreous.errors import Interrupted, NonFiniteError, ResourceError
from vitreous.jobs.train import train
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.training import probe
from vitreous.training.loop import run_training_loop
from vitreous.training.ranks import SINGLE_PROCESS
from vitreous.training.session import Session

STILL = ViTConfig(image=(16, 16), patch=(8, 8), classes=3, width=32, depth=2, heads=2, mlp=MlpConfig(hidden=64))


@pytest.mark.parametrize("micro", [1, 3, 8, 100])
def test_micro_batches_change_the_last_bits_alone(tmp_path, micro):
    whole = losses(*make(tmp_path, model=STILL))
    assert losses(*make(tmp_path, model=STILL, micro_batch=micro)) == pytest.approx(whole, abs=1e-5)


def test_recomputed_blocks_have_the_same_gradients_and_keep_less(tmp_path):
    """Dropout and stochastic depth draw the same the second time."""
    noisy = STILL.with_options(depth=6, regularization={"dropout": 0.2, "drop_path": 0.2})
    plain = losses(*make(tmp_path, model=noisy, epochs=1.0))
    assert losses(*make(tmp_path, model=noisy, epochs=1.0, recompute=True)) == plain
    kept = []
    for recompute in (False, True):
        session, state = make(tmp_path, model=replace(STILL, depth=6), recompute=recompute)
        held = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, held=held: (held.append(t.numel()), t)[1], lambda t: t):
            state.objective.train()({k: v for k, v in next(session.batches(state))[1].items() if k != "samples"})
        kept.append(sum(held))
    assert kept[1] < kept[0] / 3


def test_float16_halves_its_scale_where_it_overflows_and_doubles_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr("vitreous.training.loop.LOSS_SCALE_GROWTH_STEPS", 4)
    whole = losses(*make(tmp_path, model=STILL))
    session, state = make(tmp_path, model=STILL, precision="fp16")
    assert state.scale == 2.0**16
    scales = []

    def shrink(slices):
        for number, pair in enumerate(slices):
            if number == 6:
                state.scale = 2.0**40  # a loss of 1 is beyond float16 then
            yield pair

    run_training_loop(
        state, shrink(session.batches(state)), [(1, lambda s: scales.append((s.scale, s.updates, s.skipped)))]
    )
    assert (
        any(after == 2 * before for (before, *_), (after, *_) in pairwise(scales[:6])) and 1 < scales[-1][0] < 2.0**40
    )
    # what overflowed was left out, and costs no patience of the user's
    assert state.updates < state.step and state.skipped == 0
    assert torch.isfinite(state.flat.master).all()
    monkeypatch.undo()
    curve = losses(*make(tmp_path, model=STILL, precision="fp16"))
    assert curve[-1] == pytest.approx(whole[-1], abs=0.05)


def test_steps_that_are_not_finite_are_skipped_as_often_as_allowed(tmp_path):
    def poisoned(slices, steps):
        for number, (step_slice, batch) in enumerate(slices):
            if number in steps:
                batch["images"][0] = float("nan")
            yield step_slice, batch

    session, state = make(tmp_path, skip_steps=2)
    run_training_loop(state, poisoned(session.batches(state), (3, 7)))
    assert (state.step, state.updates, state.skipped) == (21, 19, 2) and torch.isfinite(state.flat.master).all()
    session, state = make(tmp_path, skip_steps=2)
    with pytest.raises(NonFiniteError, match="step 10"):
        run_training_loop(state, poisoned(session.batches(state), (3, 7, 9)))


@pytest.mark.parametrize(
    "model", [STILL, STILL.with_options(regularization={"drop_path": 0.2})], ids=["still", "drop path"]
)
def test_reproducible_steps_depend_on_neither_batches_nor_cores(tmp_path, model):
    ends, threads = [], torch.get_num_threads()
    try:
        for size, accumulate, cores in ((8, 1, 1), (4, 2, 1), (2, 4, 1), (8, 1, 2), (8, 1, 3)):
            torch.set_num_threads(cores)
            session, state = make(
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


def test_a_micro_batch_is_found_by_trying(tmp_path, monkeypatch):
    session, _ = make(tmp_path, model=STILL)
    tried, said = [], []

    def fits(session, state, shards, size):
        tried.append(size)
        return size <= 3

    monkeypatch.setattr(probe, "can_compute_batch", fits)
    run = probe.find_micro_batch(session.run, session.inputs, session.folder, SINGLE_PROCESS, said.append)
    assert (
        tried == [8, 4, 2]
        and run.micro_batch == 2
        and (run.batch_size, run.steps) == (session.run.batch_size, session.run.steps)
    )
    assert said == ["2 images fit into memory: batches of 8 are split into 4 micro-batches"]
    monkeypatch.setattr(probe, "can_compute_batch", lambda *_: False)
    with pytest.raises(ResourceError, match="a single image"):
        probe.find_micro_batch(session.run, session.inputs, session.folder, SINGLE_PROCESS, said.append)


def test_memory_that_runs_out_is_told_apart_from_other_errors(tmp_path, monkeypatch):
    session, _ = make(tmp_path, model=STILL)

    def run_out(self, batch, share):
        raise (
            torch.OutOfMemoryError("CUDA out of memory") if len(batch["labels"]) > 2 else RuntimeError("something else")
        )

    monkeypatch.setattr("vitreous.training.shards.Shards.backward", run_out)
    with pytest.raises(RuntimeError, match="something else"):
        probe.find_micro_batch(session.run, session.inputs, session.folder, SINGLE_PROCESS, lambda text: None)


def test_a_cpu_is_asked_for_no_more_than_it_has(tmp_path, monkeypatch):
    session, _ = make(tmp_path, model=STILL)
    one = STILL.count_activations(device="cpu") * 4
    monkeypatch.setattr(probe, "get_free_memory", lambda device: int(3.5 * one / probe.ACTIVATION_MEMORY_SHARE))
    run = probe.find_micro_batch(session.run, session.inputs, session.folder, SINGLE_PROCESS, lambda text: None)
    assert run.micro_batch == 2
    assert probe.estimate_max_images(replace(session.run, recompute=True)) == pytest.approx(
        2 * probe.estimate_max_images(session.run), rel=0.01
    )


def test_auto_and_a_number_reach_the_run_and_may_change_when_it_goes_on(folder, tmp_path):
    common = ["train", str(folder), "--out", str(tmp_path / "run"), "--workers", "0"]
    words = [w for k, v in {**TINY, "drop_path": 0.0}.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    found = document(say(*common, *words, "--micro-batch", "auto", "--json"))
    assert found["steps"] == 6
    assert "micro_batch: null" in (tmp_path / "run" / "config.yaml").read_text()
    wrong = say(*common, "--micro-batch", "none")
    assert wrong.returncode == 2


def test_what_a_run_cost_is_summed_over_its_resumptions(folder, tmp_path, monkeypatch):
    """FLOPs are those of the pictures, time that of all processes."""
    options = {**TINY, "workers": 0}
    whole = train(str(folder), **options, out=str(tmp_path / "whole"))
    watch = Session.watch

    def watched(self, state):
        watch(self, state)
        if state.step == 3:
            self.signals.received = signal.SIGTERM

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Session, "watch", watched)
        train(str(folder), **options, out=str(tmp_path / "cut"))
    stopped = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").open()][-1]
    again = train(str(folder), out=str(tmp_path / "cut"), resume=True)
    assert again["exaflops"] == whole["exaflops"] > stopped["exaflops"] > 0
    assert again["wall_seconds"] > stopped["seconds"]
    assert again["device_hours"] == pytest.approx(again["wall_seconds"] / 3600)
    assert 0 < again["flops_utilisation"] < 1
