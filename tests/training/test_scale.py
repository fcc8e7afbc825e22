"""The plan of a run on many devices, computed from counts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import vitreous
from tests.objectives.test_processes import HEAD_OPTIONS
from vitreous.cli.main import main
from vitreous.errors import ResourceError
from vitreous.jobs.plan import plan_run
from vitreous.jobs.scaled import build_meta_objective, preview_distributed_run
from vitreous.progress import NullListener
from vitreous.recipes.options import TrainOptions
from vitreous.system.machine import DTYPES
from vitreous.training.folder import RunFolder
from vitreous.training.ranks import Ranks
from vitreous.training.scale import (
    ACCELERATORS,
    check_activation_memory,
    count_device_images,
    count_memory,
    count_traffic,
    forecast_step,
    measure_sizes,
)
from vitreous.training.session import Session
from vitreous.training.slices import rank_slices

RUN_OPTIONS = {
    "data": "digits",
    "model": "ViT-32x3/2",
    "batch_size": 64,
    "workers": 0,
    "shards": 1,
    "device": "cpu",
    "epochs": 1.0,
    "recipe": "digits",
}


def plan_small_run(**changes):
    """A run and its planning inputs."""
    _, run, inputs, _ = plan_run(TrainOptions(**{**RUN_OPTIONS, "precision": "bf16", **changes}), NullListener())
    return run, inputs


def count_bytes(tensors):
    """Bytes of the storages of tensors; shared storage counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_planned_state_memory_matches_the_allocated_state(optimizer, precision, tmp_path):
    run, inputs = plan_small_run(precision=precision, optimizer=optimizer, ema=0.99 if optimizer == "adamw" else None)
    state = Session(run, inputs, RunFolder(tmp_path)).build()
    flat = state.flat
    terms = count_memory(run, measure_sizes(state.objective), 1, "cpu")
    held = {
        "master_weights_bytes": count_bytes([flat.master]),
        "working_copy_bytes": count_bytes([flat.working_copy]) if flat.working_copy is not flat.master else 0,
        "ema_bytes": count_bytes([flat.average]) if run.ema else 0,
        "optimizer_state_bytes": count_bytes([vector for _, vector in state.optimizers.moments.values()]),
        "gradients_bytes": count_bytes(flat.grads),
        "gradient_sum_bytes": count_bytes([flat.master_grad]) if flat.master_grad is not flat.grad else 0,
    }
    for name, size in held.items():
        assert terms[name] == pytest.approx(size, rel=0.05), name  # parameter offsets are multiples of 64


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "ViT-64x6/2", "settings": {"objective.patch_dropout": ["0"], "objective.progressive": ["1"]}},
        {"model": "DiT-64x6/2", "recipe": "sit"},
    ],
)
def test_planned_activations_match_those_saved_by_autograd(changes, tmp_path):
    run, inputs = plan_small_run(precision="fp32", image_size=16, **changes)
    session = Session(run, inputs, RunFolder(tmp_path))
    state = session.build()
    parameter_pointers, saved_bytes = {p.untyped_storage().data_ptr() for p in state.objective.parameters()}, {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in parameter_pointers:
            saved_bytes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    state.objective.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        state.objective(next(session.batches(state))[1])
    counted = sum(size for size, _ in saved_bytes.values())
    terms = count_memory(run, measure_sizes(state.objective), 1, "cpu")
    assert terms["activations_bytes"] == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("changes", [{}, {"recipe": "sit", "model": "DiT-32x3/2", "settings": {}}])
def test_steps_beyond_the_free_memory_are_refused(monkeypatch, changes, tmp_path):
    run, _ = plan_small_run(**changes)
    check_activation_memory(run, 1)
    monkeypatch.setattr("vitreous.training.scale.get_free_memory", lambda device: 100_000)
    with pytest.raises(ResourceError, match=r"a step needs about .* GiB for activations") as error:
        check_activation_memory(run, 1)
    assert "micro_batch='auto'" in error.value.hint or "--micro-batch auto" in error.value.hint
    check_activation_memory(replace(run, batch_size=64, micro_batch=1), 64)
    out = tmp_path / "run"
    with pytest.raises(ResourceError):
        vitreous.train(**RUN_OPTIONS | {"out": str(out), "precision": "bf16", "progress": False} | changes)
    assert not out.exists()


def test_meta_objectives_have_the_same_sizes(tmp_path):
    heads = {f"objective.{name}": [str(size)] for name, size in HEAD_OPTIONS.items()}
    dino = {"recipe": "dino", "model": "ViT-32x2/4", "image_size": 16, "batch_size": 16, "settings": heads}
    for options in ({}, dino):
        run, inputs = plan_small_run(**options)
        objective = Session(run, inputs, RunFolder(tmp_path)).build().objective
        empty = build_meta_objective(run)
        assert {tensor.device.type for tensor in empty.parameters()} == {"meta"}
        with_copies, without_copies = measure_sizes(objective), measure_sizes(empty)
        assert with_copies._replace(held_bytes=0) == without_copies._replace(held_bytes=0)


def test_fsdp_shares_and_ring_communication():
    run, _ = plan_small_run()
    sizes, b = measure_sizes(build_meta_objective(run)), DTYPES[run.precision].itemsize
    assert sizes.trainable == sum(sizes.blocks) + sizes.root and len(sizes.blocks) == 3
    n = sizes.trainable
    for world in (2, 8, 64):
        assert count_traffic(run, sizes, world) == round(2 * b * n * (world - 1) / world)
        assert count_traffic(replace(run, accumulate=2), sizes, world) == round(2 * 4 * n * (world - 1) / world)
        fsdp = replace(run, parallel="fsdp")
        once = b * (2 * sum(sizes.blocks) + sizes.root)
        assert count_traffic(fsdp, sizes, world) == round((once + b * n) * (world - 1) / world)
        unsharded, sharded = count_memory(run, sizes, world), count_memory(fsdp, sizes, world)
        for name in ("master_weights_bytes", "ema_bytes", "optimizer_state_bytes"):
            assert sharded[name] == pytest.approx(unsharded[name] / world, rel=0.01)
    assert count_traffic(run, sizes, 1) == 0


def test_images_per_device_match_the_rank_slices():
    for changes in ({}, {"micro_batch": 5}):
        run = replace(plan_small_run()[0], **changes)
        for world in (1, 2, 3, 7):
            most = max(p.stop - p.start for rank in range(world) for p in rank_slices(run, Ranks(rank, world), 0))
            assert count_device_images(run, world) == min(most, changes.get("micro_batch", most))


def test_step_time_is_compute_plus_exposed_communication():
    run, _ = plan_small_run()
    sizes, device = measure_sizes(build_meta_objective(run)), ACCELERATORS["h100"]
    single, many = (forecast_step(run, sizes, world, device, 1e9) for world in (1, 64))
    assert (
        single["compute"] == pytest.approx(64 * many["compute"])
        and single["communication"] == single["total_communication"] == 0
    )
    assert many["communication"] == pytest.approx(max(0, many["total_communication"] - many["compute"] * 2 / 3))
    slow = replace(device, network=1e6)
    assert forecast_step(run, sizes, 64, slow, 1e9)["communication"] > many["total_communication"]
    assert forecast_step(run, sizes, 8, slow, 1e9) == forecast_step(run, sizes, 8, device, 1e9)  # one machine


def test_the_plan_uses_the_given_number_of_images():
    options = TrainOptions(
        **{
            **RUN_OPTIONS,
            "device": "h100",
            "world": 16,
            "images": 1_000_000,
            "dry_run": True,
            "parallel": "fsdp",
            "optimizer": "adamw",
        }
    )
    run, document = preview_distributed_run(options, NullListener())
    assert document["images"] == 1_000_000 and document["steps"] == run.steps == math.ceil(1_000_000 / 64)
    assert document["micro_batch_size"] == 4 and document["devices"] == "16 x h100, 2 machines"
    assert document["exaflops"] == pytest.approx(
        build_meta_objective(run).flops(type("P", (), {"samples": 0, "total": 1})()) * 1e6 / 1e18, rel=0.01
    )
    assert document["hours"] == pytest.approx(document["seconds_per_step"] * run.steps / 3600, rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dry-run", "--world", "8"], "error: --world needs --device\n"),
        (
            ["--dry-run", "--world", "8", "--device", "h101"],
            "error: --world needs the data sheet of a device, and --device h101 has none\n",
        ),
        (["--dry-run", "--world", "0", "--device", "h100"], "must be at least 1"),
        (["--world", "8"], "apply to --dry-run only"),
        (
            ["--dry-run", "--world", "4096", "--device", "h100", "--recipe", "digits"],
            "is below the number of processes, 4096",
        ),
    ],
)
def test_unsupported_plans_are_rejected(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", *words])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_activations_are_not_planned_for_masked_objectives():
    run, _ = plan_small_run(recipe="mae", model="ViT-32x2/4", image_size=16)
    terms = count_memory(run, measure_sizes(build_meta_objective(run)), 4)
    assert terms["activations_bytes"] is terms["peak_bytes"] is None and terms["master_weights_bytes"]
