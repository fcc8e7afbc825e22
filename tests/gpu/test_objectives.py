"""Training steps of every objective on a GPU match those on the CPU."""

from __future__ import annotations

import copy
import traceback
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.support import (
    DEVICE,
    GRADIENT_LIMIT,
    LOSS_LIMIT,
    OBJECTIVE_NAMES,
    ON_GPU,
    check_close,
    check_tensors_close,
    compute_relative_error,
    copy_state,
    create_objective_session,
    create_supervised_session,
    fill_zero_parameters,
    move_to,
    record_steps,
)
from tests.objectives import sessions
from vitreous.data.augmentation.augment import Augment
from vitreous.models.config import MlpConfig, SwinAttentionConfig, ViTConfig
from vitreous.models.configs.swin import SwinConfig
from vitreous.models.zoo import build_model, create_untrained_model
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress
from vitreous.objectives.detection import DetectionConfig
from vitreous.objectives.mae import MAEConfig
from vitreous.objectives.segmentation import SegmentationConfig
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.system.machine import DTYPES
from vitreous.training.flat import FlatParameters
from vitreous.training.loop import run_training_loop
from vitreous.training.run import FineTuneConfig, OptimizerConfig, RampConfig

pytestmark = pytest.mark.gpu
MULTI_HOT = (np.arange(32)[:, None] >> np.arange(3) & 1).astype(np.float32)

#: supervised options that change the computation of a step
SUPERVISED_VARIANTS: dict[str, dict[str, Any]] = {
    "sigmoid, several labels": {"labels": MULTI_HOT, "objective": SupervisedConfig(loss="sigmoid", smoothing=0.1)},
    "binary, class weights": {"objective": SupervisedConfig(loss="binary", class_weights=(0.5, 1.0, 1.5))},
    "mixup and cutmix": {"views": Augment(flip=0.5, mixup=0.8, cutmix=1.0)},
    "patch dropout": {"objective": SupervisedConfig(patch_dropout=0.5)},
    "progressive resolution": {"objective": SupervisedConfig(progressive=0.5)},
    "accumulation and micro-batches": {"accumulate": 2, "micro_batch": 3},
    "recomputed activations": {"recompute": True},
    "average and frozen blocks": {"ema": 0.9, "tune": FineTuneConfig(last_blocks=1)},
    "adapters": {"tune": FineTuneConfig(lora_rank=2)},
    "shards in order": {"shards": 2, "reproducible": True},
    "rotary positions": {"model": lambda model: model.with_options(attention={"kind": "rotary"})},
    "relative positions": {"model": lambda model: model.with_options(attention={"kind": "relative"})},
    "windows": {"model": lambda model: model.with_options(class_token=False, pool="mean", attention={"window": 2})},
    "attention pooling, registers": {
        "model": lambda model: replace(model, class_token=False, pool="attention", registers=2)
    },
}


def compute_error_limit(precision: str, limit: float, rounded: Any, exact: Any) -> float:
    """The limit of a relative error: in bfloat16 at least three times the error of bfloat16 on the CPU."""
    return limit if precision == "fp32" else max(limit, 3 * compute_relative_error(rounded, exact))


def join_tensors(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """All tensors as one vector, ordered by name."""
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def compare_steps(make_session: Any, precision: str, tmp_path: Any, **changes: Any) -> None:
    """Compare two training steps on the device with two on the CPU in float32."""
    expected_losses, expected = record_steps(*make_session(tmp_path / "cpu", epochs=0.5, **changes))
    rounded_losses, rounded = expected_losses, expected
    if precision != "fp32":
        rounded_losses, rounded = record_steps(
            *make_session(tmp_path / "rounded", epochs=0.5, precision=precision, **changes)
        )
    session, state = make_session(tmp_path / "device", epochs=0.5, device=DEVICE, precision=precision, **changes)
    losses, gradients = record_steps(session, state)
    assert len(losses) == len(expected_losses) and len(gradients) == len(expected) > 0
    # the second step starts from weights that differ by rounding
    for step, (ours, theirs, near) in enumerate(zip(gradients, expected, rounded, strict=True), 1):
        limit = compute_error_limit(precision, GRADIENT_LIMIT[precision], join_tensors(near), join_tensors(theirs))
        check_tensors_close(f"gradient of step {step}, {precision}", ours, theirs, limit)
    limit = compute_error_limit(precision, LOSS_LIMIT[precision], rounded_losses, expected_losses)
    check_close(f"losses, {precision}", losses, expected_losses, limit)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_two_steps_match_cpu(name, precision, tmp_path):
    compare_steps(lambda folder, **changes: create_objective_session(name, folder, **changes), precision, tmp_path)


@pytest.mark.parametrize("name", SUPERVISED_VARIANTS)
def test_two_steps_with_options_match_cpu(name, tmp_path):
    compare_steps(create_supervised_session, "fp32", tmp_path, **SUPERVISED_VARIANTS[name])


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lars", "muon"])
def test_optimizer_steps_match_cpu(name, tmp_path):
    """Two steps from the same gradients, with weight decay, layer decay, clipping per tensor and an average."""
    optimizer = OptimizerConfig(name=name, lr=0.01, weight_decay=0.1, layer_decay=0.8, clip=0.5, clip_by="tensor")
    states = []
    for device in ("cpu", DEVICE):
        _, state = create_supervised_session(tmp_path / device, optimizer=optimizer, ema=0.9, device=device)
        generator = torch.Generator().manual_seed(0)
        for step in (1, 2):
            gradient = torch.randn(state.flat.length, generator=generator)
            state.flat.zero_grad()
            state.flat.master_grad.copy_(gradient)
            state.flat.clip(optimizer.clip, optimizer.clip_by)
            state.optimizers.step(0.5)
            state.flat.sync(step)
        states.append(copy_state(state))
    check_tensors_close(f"state after two steps of {name}", states[1], states[0], 1e-4 if name == "muon" else 1e-5)


def make_detection() -> tuple[Any, dict[str, Any]]:
    """A detection objective with boxes and masks, and a prepared batch."""
    from tests.objectives.test_detection import objective_and_batch

    objective, batch = objective_and_batch(masks=True)
    return objective, objective.prepare(batch, TrainingProgress())


def make_segmentation(adapter: str = "none", head: str = "unet") -> tuple[Any, dict[str, Any]]:
    """A segmentation objective, and a batch whose last image has unlabelled pixels."""
    torch.manual_seed(0)
    config = SegmentationConfig(head=head, head_width=8 if head == "unet" else 1, adapter=adapter)
    objective = config.build(
        create_untrained_model("ViT-32x2/8", image_size=32, num_classes=0), ObjectiveSetting(classes=("a", "b", "c"))
    )
    generator = torch.Generator().manual_seed(1)
    classes = torch.randint(0, 3, (4, 32, 32), generator=generator, dtype=torch.int32)
    classes[3, :, 16:] = -1
    return objective, {"images": torch.randn(4, 3, 32, 32, generator=generator), "classes": classes}


def make_supervised(config: Any, images: Any) -> tuple[Any, dict[str, Any]]:
    """A supervised objective for a model, and a batch of these images."""
    torch.manual_seed(0)
    objective = SupervisedConfig().build(build_model(config), ObjectiveSetting(classes=("a", "b", "c")))
    return objective, {"images": images, "labels": torch.arange(len(images)) % 3}


def make_video_mae() -> tuple[Any, dict[str, Any]]:
    """VideoMAE with tubes, and a prepared batch of clips."""
    torch.manual_seed(0)
    config = MAEConfig(tubes=True, decoder_width=16, decoder_depth=1, decoder_heads=2, normalise_channels=True)
    objective = config.build(build_model(replace(CLIP_CONFIG, classes=0)), ObjectiveSetting())
    batch = {"images": draw_normal(4, 3, 4, 16, 16), "positions": torch.arange(4), "samples": torch.arange(4)}
    prepared = objective.prepare(batch, TrainingProgress())
    return objective, {name: entry for name, entry in prepared.items() if name != "positions"}


def draw_normal(*shape: int) -> torch.Tensor:
    """Deterministic normal random numbers of a shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


CLIP_CONFIG = ViTConfig(
    image=(4, 16, 16), patch=(2, 8, 8), classes=3, width=32, depth=2, heads=2, mlp=MlpConfig(hidden=64)
)
VOLUME_CONFIG = replace(CLIP_CONFIG, image=(16, 16, 16), patch=(8, 8, 8), channels=1)
PHOTO_CONFIG = replace(CLIP_CONFIG, image=(16, 16), patch=(4, 4))
SWIN_CONFIG = SwinConfig(
    image=(16, 16),
    patch_size=(2, 2),
    classes=3,
    width=8,
    blocks=(2, 2),
    heads=(2, 2),
    attention=SwinAttentionConfig(window=4),
)

#: objectives whose inputs are not square in-memory images of one size
BATCH_FACTORIES: dict[str, Any] = {
    "detection": make_detection,
    "segmentation": make_segmentation,
    "segmentation, adapter": lambda: make_segmentation("group", "upernet"),
    "clips": lambda: make_supervised(CLIP_CONFIG, draw_normal(4, 3, 4, 16, 16)),
    "volumes": lambda: make_supervised(VOLUME_CONFIG, draw_normal(4, 1, 16, 16, 16)),
    "signals": lambda: make_supervised(
        replace(PHOTO_CONFIG, image=(64,), patch=(8,), channels=2), draw_normal(4, 2, 64)
    ),
    "swin": lambda: make_supervised(SWIN_CONFIG, draw_normal(4, 3, 16, 16)),
    "native aspect": lambda: make_supervised(
        PHOTO_CONFIG, [draw_normal(3, *size) for size in ((16, 16), (8, 24), (4, 12), (16, 16))]
    ),
    "VideoMAE": make_video_mae,
}


def compute_batch(objective: Any, batch: dict[str, Any], device: str, precision: str) -> tuple[Any, dict[str, Any]]:
    """Scalars and gradients of a forward and backward pass of an objective's copy on a device."""
    dtype = DTYPES[precision]
    objective = copy.deepcopy(objective).train()
    flat = FlatParameters(objective, dtype, torch.device(device))
    fill_zero_parameters(flat)
    batch = move_to(batch, device)
    batch["images"] = move_to(batch["images"], device, dtype)
    outputs = objective(batch)
    outputs["loss"].backward()
    flat.collect()
    gradients = {name: view.detach().cpu() for name, view in flat.views(flat.master_grad).items()}
    return {name: value.detach().float().cpu() for name, value in outputs.items()}, gradients


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BATCH_FACTORIES)
def test_one_batch_matches_cpu(name, precision):
    objective, batch = BATCH_FACTORIES[name]()
    expected_scalars, expected = compute_batch(objective, batch, "cpu", "fp32")
    scalars, gradients = compute_batch(objective, batch, DEVICE, precision)
    if name == "detection" and precision == "bf16":  # rounding changes which proposals are selected
        assert torch.isfinite(scalars["loss"]) and all(g.isfinite().all() for g in gradients.values())
        return
    rounded_scalars, rounded = (expected_scalars, expected)
    if precision != "fp32":
        rounded_scalars, rounded = compute_batch(objective, batch, "cpu", precision)
    for key, value in expected_scalars.items():
        limit = compute_error_limit(precision, LOSS_LIMIT[precision], rounded_scalars[key], value)
        check_close(f"{key} of {name}, {precision}", scalars[key], value, limit)
    limit = compute_error_limit(precision, GRADIENT_LIMIT[precision], join_tensors(rounded), join_tensors(expected))
    check_tensors_close(f"gradient of {name}, {precision}", gradients, expected, limit)


@pytest.mark.parametrize("layout", ["channels last", "strided"])
def test_memory_layout_does_not_change_loss_or_gradients(layout):
    """A batch in another memory layout gives the loss and gradient of a contiguous batch."""
    for name in ("clips", "swin", "segmentation, adapter"):
        objective, batch = BATCH_FACTORIES[name]()
        expected_scalars, expected = compute_batch(objective, batch, DEVICE, "fp32")
        images = batch["images"].to(DEVICE)
        if layout == "channels last":
            images = images.movedim(1, -1).contiguous().movedim(-1, 1)
        else:
            images = torch.stack([images, -images], -1)[..., 0]
        assert not images.is_contiguous()
        scalars, gradients = compute_batch(objective, {**batch, "images": images}, DEVICE, "fp32")
        check_close(f"loss of {name}, {layout}", scalars["loss"], expected_scalars["loss"], 1e-5)
        check_tensors_close(f"gradient of {name}, {layout}", gradients, expected, 1e-3)


@pytest.mark.parametrize("name", ["supervised", "dino", "diffusion"])
def test_prepared_batches_match_cpu(name, tmp_path):
    """All 20 batches of a run arrive intact while the device is busy: pinned, copied asynchronously, normalised and
    augmented."""
    changes = {"views": Augment(flip=0.5, mixup=0.8, cutmix=1.0)} if name == "supervised" else {}
    session, state = create_objective_session(name, tmp_path / "device", device=DEVICE, **changes)
    load = torch.randn(1024 if ON_GPU else 16, 1024 if ON_GPU else 16, device=DEVICE)
    batches = []
    for _, batch in session.batches(state):
        for _ in range(20):
            load = load @ load * 1e-3
        batches.append(batch)
    reference_session, reference = create_objective_session(name, tmp_path / "cpu", **changes)
    count = 0
    for batch, (_, theirs) in zip(batches, reference_session.batches(reference), strict=True):
        count += 1
        assert batch.keys() == theirs.keys()
        for key, entry in theirs.items():
            if not isinstance(entry, torch.Tensor):
                continue
            if entry.is_floating_point():
                check_close(f"{key} of batch {count}", batch[key], entry, 1e-5)
            else:
                assert torch.equal(batch[key].cpu(), entry), f"{key} of batch {count} differs"
    assert count == 20


def test_uint8_batches_arrive_intact(tmp_path):
    """Pinned uint8 batches, copied asynchronously, equal those of the loader, even if the host overwrites its buffers
    afterwards."""
    images = torch.randint(0, 256, (64, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    session, _ = create_supervised_session(tmp_path, images, device=DEVICE, views=Augment(flip=0.0))
    spans = [(8 * index, 8 * index + 8) for index in range(40)]
    arrived = [
        (batch["images"].to(DEVICE, non_blocking=True), batch["samples"])
        for batch in session.loader.iterate_spans(iter(spans))
    ]
    for index, (pixels, samples) in enumerate(arrived):
        expected = images[samples].permute(0, 3, 1, 2)
        different = int((pixels.cpu().float() != expected.float()).sum())
        assert not different, f"batch {index}: {different} of {expected.numel()} values differ ({pixels.dtype})"


def test_float32_matmul_precision_is_unchanged(tmp_path):
    """Sessions and engines do not enable TF32 for float32 matrix products."""
    session, state = create_supervised_session(tmp_path, device=DEVICE, epochs=0.5)
    run_training_loop(state, session.batches(state))
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_steady_steps_do_not_wait_for_the_device(name, tmp_path):
    """From the third step on, neither batch preparation nor a step synchronises with the device. The message lists the
    lines of vitreous that do."""
    session, state = create_objective_session(name, tmp_path, device=DEVICE, precision="bf16")
    waits: dict[str, int] = {}

    def note_wait(message, category, filename, lineno, file=None, line=None) -> None:
        if "called a synchronizing" in str(message):
            frames = [
                f for f in traceback.extract_stack() if "/vitreous/" in f.filename and "/tests/" not in f.filename
            ]
            location = " < ".join(f"{f.filename.rpartition('/vitreous/')[2]}:{f.lineno}" for f in reversed(frames[-3:]))
            location += f" ({frames[-1].line})" if frames else f"{filename}:{lineno}"
            waits[location] = waits.get(location, 0) + 1

    def watch_step(state: Any) -> None:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("warn" if 2 <= state.step < 6 else "default")
        if state.step == 7:
            state.should_stop = True

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note_wait
        try:
            run_training_loop(state, session.batches(state), [(0, watch_step)])
        finally:
            if ON_GPU:
                torch.cuda.set_sync_debug_mode("default")
    lines = [f"{count} x {location}" for location, count in sorted(waits.items(), key=lambda pair: -pair[1])]
    assert not waits, f"{name}: 4 steps wait {sum(waits.values())} times:\n" + "\n".join(lines)


def test_schedules_and_teachers_match_cpu_after_a_run(tmp_path):
    """Weights, average, centre and teacher of DINO after 6 steps."""
    states = []
    for device in ("cpu", DEVICE):
        schedules = {**sessions.TEACHER_SCHEDULES, "ema": RampConfig(0.5, 0.9)}
        session, state = create_objective_session(
            "dino", tmp_path / device, device=device, epochs=1.5, ema=0.9, schedules=schedules
        )
        run_training_loop(state, session.batches(state))
        states.append(copy_state(state))
    check_tensors_close("state after 6 steps of DINO", states[1], states[0], 1e-3)


def test_detection_targets_match_cpu():
    """The federated loss samples classes by seed and position, equally on all devices."""
    from tests.objectives.test_detection import objective_and_batch

    objective, batch = objective_and_batch(scores="sigmoid", federated=1, frequencies=(3, 1))
    assert isinstance(objective.config, DetectionConfig)
    expected = objective.prepare(batch, TrainingProgress())
    prepared = objective.prepare({**move_to(batch, DEVICE), "positions": batch["positions"]}, TrainingProgress())
    for name in ("keys", "federated"):
        assert torch.equal(prepared[name].cpu(), expected[name]), name
