"""The training loop: exact sample counts, micro-batches, the non-finite guard, and golden curves."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import TINY_RUN, make_folder
from vitreous.data.augmentation.augment import Augment
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.options import DataOptions
from vitreous.data.split import ArraySplit
from vitreous.errors import NonFiniteError, ResourceError, UsageError
from vitreous.jobs.train import train
from vitreous.models.config import MlpConfig, RegularizationConfig, ViTConfig
from vitreous.objectives.progressive import draw_patches, image_size_at, resize_images
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.training.batches import RunInputs
from vitreous.training.folder import RunFolder
from vitreous.training.loop import run_training_loop
from vitreous.training.run import OptimizerConfig, Run, ScheduleConfig
from vitreous.training.session import Session

GOLDEN_FILE = Path(__file__).parent / "golden.json"


def make_synthetic_split(count=48, size=16):
    """Images of three tints with noise, and their labels."""
    generator = np.random.default_rng(0)
    labels = np.arange(count) % 3
    pixels = generator.integers(0, 128, (count, size, size, 3), dtype=np.uint8)
    for row, label in enumerate(labels):
        pixels[row, ..., label] += 100
    return ArraySplit(pixels, labels.astype(np.int64))


OBJECTIVE_FIELDS = {field.name for field in fields(SupervisedConfig)}


def make_session(tmp_path, **changes):
    split = make_synthetic_split()
    model = ViTConfig(
        image=(16, 16),
        patch=(8, 8),
        classes=3,
        width=32,
        depth=2,
        heads=2,
        mlp=MlpConfig(hidden=64),
        regularization=RegularizationConfig(drop_path=0.1),
    )
    run = Run(
        data=DataOptions("synthetic", ("a", "b", "c"), len(split), "", cache=True),
        model=model,
        preprocess=ImagePreprocess((16, 16)),
        views=Augment(shift=0.125, flip=0.5),
        optimizer=OptimizerConfig(lr=3e-3),
        schedule=ScheduleConfig(2),
        objective=SupervisedConfig(smoothing=0.1),
        batch_size=8,
        epochs=3.4,
        ema=0.9,
        log_every=1,
    )
    learned = {name: changes.pop(name) for name in OBJECTIVE_FIELDS & changes.keys()}
    run = replace(run, objective=replace(run.objective, **learned), **changes)
    cached = torch.from_numpy(split.pixels.transpose(0, 3, 1, 2).copy())
    session = Session(run, RunInputs(split, split, cached), RunFolder(tmp_path))
    return session, session.build()


def collect_losses(session, state):
    """The loss of every step."""
    losses = []
    run_training_loop(
        state, session.batches(state), [(1, lambda s: (losses.append(s.losses), setattr(s, "losses", 0.0)))]
    )
    return losses


#: four times the differences between processors (AVX2, AVX512-BF16) and thread counts: 3e-7 in float32, 6e-4 in bf16,
#: 1.3e-4 for Muon, whose products use bf16 if the processor supports it
TOLERANCES = {"bf16": 2.5e-3, "muon": 5e-4}
CURVE_OPTIONS = {
    "adamw": {},
    "sgd": {"optimizer": OptimizerConfig("sgd", lr=0.05)},
    "muon": {"optimizer": OptimizerConfig("muon", lr=3e-3), "mimetic": True},
    "bf16": {"precision": "bf16"},
    "accumulate": {"batch_size": 4, "accumulate": 2},
    "mixed": {"views": Augment(mixup=0.8, cutmix=1.0), "patch_dropout": 0.5},
    "progressive": {"progressive": 0.5},
}


@pytest.mark.processor
@pytest.mark.parametrize("name", CURVE_OPTIONS)
def test_golden_curve(name, tmp_path):
    """Just over twenty steps must match the stored losses. `python -m tests.training.test_loop` rewrites them."""
    curve = collect_losses(*make_session(tmp_path, **CURVE_OPTIONS[name]))
    golden = json.loads(GOLDEN_FILE.read_text())[name]
    assert len(curve) == len(golden) == 21
    assert curve == pytest.approx(golden, abs=TOLERANCES.get(name, 5e-6))
    assert curve[-1] < curve[0]


def test_every_image_is_seen_once_per_epoch(tmp_path):
    session, state = make_session(tmp_path, batch_size=10, accumulate=2, epochs=3.0, views=Augment())
    samples = torch.cat([batch["samples"] for _, batch in session.batches(state)])
    assert (torch.bincount(samples) == 3).all()
    run_training_loop(state, session.batches(state))
    assert (state.step, state.images) == (math.ceil(144 / 20), 144)


def test_micro_batches_do_not_change_the_gradient(tmp_path):
    """1 x 12, 3 x 4 and an uneven 5 + 5 + 2 give the same weights: each micro-batch is weighted by its number of
    images."""
    results = []
    for size, accumulate in ((12, 1), (4, 3), (5, 3)):
        session, state = make_session(tmp_path, batch_size=size, accumulate=accumulate, epochs=0.25, views=Augment())
        state.objective.model.eval()
        for module in state.objective.modules():
            if hasattr(module, "drop_path"):
                module.drop_path = 0.0
        run_training_loop(state, session.batches(state))
        assert state.step == 1
        results.append(state.flat.master_grad.clone())
    for result in results[1:]:
        assert torch.allclose(results[0], result, atol=1e-6)


@pytest.mark.parametrize("location", ["pixel", "gradient"])
def test_non_finite_values_do_not_reach_the_weights(tmp_path, location):
    session, state = make_session(tmp_path)
    before = {}

    def poison(slices):
        for index, (step_slice, batch) in enumerate(slices):
            if index == 4:
                before.update(
                    weights=state.flat.master.clone(),
                    average=state.flat.average.clone(),
                    optimizer=state.optimizers.get_state(),
                )
                before["optimizer"] = {k: v.clone() for k, v in before["optimizer"].items()}
                if location == "pixel":
                    batch["images"][1, 0, 0, 0] = math.nan
                else:
                    next(state.objective.parameters()).register_hook(lambda g: g * math.inf)
            yield step_slice, batch

    with pytest.raises(NonFiniteError, match="step 5") as error:
        run_training_loop(state, poison(session.batches(state)))
    assert error.value.code == 5 and "samples [" in error.value.message
    assert torch.equal(state.flat.master, before["weights"]) and torch.equal(state.flat.average, before["average"])
    after = state.optimizers.get_state()
    assert all(torch.equal(after[name], value) for name, value in before["optimizer"].items())


def make_fine_grid_session(tmp_path, **changes):
    """A session with patches of 4 x 4 pixels, thus a grid of 4 x 4."""
    model = ViTConfig(image=(16, 16), patch=(4, 4), classes=3, width=32, depth=2, heads=2, mlp=MlpConfig(hidden=64))
    return make_session(tmp_path, model=model, **changes)


def test_patch_dropout_keeps_distinct_patches_and_ends_on_time(tmp_path):
    session, state = make_fine_grid_session(tmp_path, patch_dropout=0.5, patch_dropout_until=0.5)
    images = torch.zeros(6, 3, 16, 16)
    patch_indices = draw_patches(images, (4, 4), 0.5, 0, 3)
    assert patch_indices.shape == (6, 8)
    assert all(len(set(image_patches)) == 8 for image_patches in patch_indices.tolist())
    assert not torch.equal(patch_indices, draw_patches(images, (4, 4), 0.5, 0, 4))
    with_keep = ["keep" in batch for _, batch in session.batches(state)]
    assert with_keep == [True] * 11 + [False] * 10


def test_progressive_resolution_grows_by_patches_and_ends_on_time(tmp_path):
    session, state = make_fine_grid_session(
        tmp_path, progressive=0.5, progressive_until=0.5, patch_dropout=0.5, patch_dropout_until=0.25
    )
    batches = [batch for _, batch in session.batches(state)]
    assert [batch["images"].shape[-1] for batch in batches] == [8] * 6 + [12] * 5 + [16] * 10
    assert [batch["keep"].shape[1] for batch in batches if "keep" in batch] == [2] * 6
    image = torch.rand(1, 3, 16, 16)
    run = session.run
    smallest = image_size_at(run.objective, run.model, 0, run.total)
    # every pixel contributes
    assert resize_images(image, smallest).mean().item() == pytest.approx(image.mean().item(), abs=0.01)
    assert resize_images(image, image_size_at(run.objective, run.model, run.total, run.total)) is image
    curve = collect_losses(session, state)
    assert curve[-1] < curve[0]


def test_failed_checkpoints_stop_a_run_only_after_three_failures(tmp_path, monkeypatch):
    session, state = make_session(tmp_path)
    notes = []
    session.listener.note = notes.append
    monkeypatch.setattr("vitreous.training.checkpoint.shutil.disk_usage", lambda path: type("Usage", (), {"free": 0})())
    session.save(state)
    session.save(state)
    assert len(notes) == 2 and "training continues (2 of 3 failures)" in notes[1]
    with pytest.raises(ResourceError):
        session.save(state)
    monkeypatch.undo()
    session.save(state)
    assert session.checkpointer.failures == 0


def test_accumulation_beyond_an_epoch_is_rejected(tmp_path):
    with pytest.raises(UsageError) as error:
        make_session(tmp_path, batch_size=16, accumulate=8)
    assert (
        str(error.value) == "accumulate=8 is above the 3 batches of an epoch\n  use accumulate=3 or a smaller "
        "batch_size"
    )


@pytest.mark.parametrize(
    "changes",
    [{"batch_size": 0}, {"epochs": 0}, {"ema": 1.0}, {"patch_dropout": 1.0}, {"progressive": 0.0}, {"log_every": 0}],
)
def test_invalid_runs_are_rejected(tmp_path, changes):
    with pytest.raises(UsageError):
        make_session(tmp_path, **changes)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_run_matches_an_eager_run(tmp_path, monkeypatch, backend):
    model = ViTConfig(image=(16, 16), patch=(8, 8), classes=3, width=32, depth=2, heads=2, mlp=MlpConfig(hidden=64))
    options = {"epochs": 0.5, "model": model}  # no stochastic depth, which draws different numbers in a compiled graph
    eager = collect_losses(*make_session(tmp_path, **options))
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: compile_(module, backend=backend))
    torch._dynamo.reset()
    assert collect_losses(*make_session(tmp_path, **options, compile=True)) == pytest.approx(eager, abs=1e-3)


def test_a_trained_run_has_learned_and_written_all_files(tmp_path):
    folder = make_folder(tmp_path / "photos", {"train": 12, "val": 4, "test": 4})
    out = tmp_path / "run"
    summary = train(
        str(folder), out=str(out), workers=0, **{**TINY_RUN, "epochs": 30, "mixup": 0.0, "lr": 2e-3, "save_every": 20}
    )
    assert summary["test"]["top1"] > 0.9 and summary["val"]["images"] == 12
    names = {
        "config.yaml",
        "command.txt",
        "environment.json",
        "data.json",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        "model",
        "evaluations.jsonl",
    }
    assert names <= {path.name for path in out.iterdir()}
    assert json.loads((out / "summary.json").read_text()) == summary
    keys = [
        "model",
        "parameters",
        "data",
        "steps",
        "epochs",
        "seed",
        "wall_seconds",
        "images_per_second",
        "exaflops",
        "flops_utilisation",
    ]
    assert [
        *keys,
        "peak_memory_bytes",
        "device_hours",
        "skipped",
        "train",
        "val",
        "test",
        "selection",
        "run",
        "bundle",
    ] == list(summary)
    assert {"top1", "top5", "macro_f1", "nll", "ece", "images"} <= set(summary["val"])
    assert (tmp_path / "latest").resolve() == out.resolve()
    again = train(str(folder), config=str(out / "config.yaml"), out=str(tmp_path / "again"))
    assert again["test"] == summary["test"]
    weights = [(run / "model" / "weights.safetensors").read_bytes() for run in (out, tmp_path / "again")]
    assert weights[0] == weights[1]


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        GOLDEN_FILE.write_text(
            json.dumps(
                {
                    name: collect_losses(*make_session(Path(scratch), **changes))
                    for name, changes in CURVE_OPTIONS.items()
                },
                indent=1,
            )
            + "\n"
        )
