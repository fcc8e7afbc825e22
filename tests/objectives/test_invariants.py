"""Invariants of MAE, DINO, DINOv2 and DeiT that hold for any hyperparameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.objectives.sessions import OBJECTIVE_CONFIGS, collect_losses, create_session
from tests.objectives.test_dino import SMALL_CONFIG as VIEWED
from tests.objectives.test_dino import build_objective, make_view_batch
from tests.objectives.test_distillation import OBJECTIVE_SETTING, make_student_and_batch
from tests.objectives.test_mae import SMALL_CONFIG, SMALL_MAE_CONFIG, make_batch
from vitreous.data.augmentation.augment import Augment
from vitreous.models.zoo import build_model
from vitreous.objectives.base import TrainingProgress
from vitreous.objectives.dino import DINO, cross_view_entropy
from vitreous.objectives.dinov2 import DINOv2
from vitreous.objectives.mae import MAE
from vitreous.training.loop import run_training_loop


def record_inputs(module):
    """Return a list that receives every input of the module."""
    inputs = []
    module.register_forward_pre_hook(lambda hooked, arguments: inputs.append(arguments[0].detach()))
    return inputs


@pytest.fixture
def mae_objective():
    torch.manual_seed(0)
    return MAE(build_model(SMALL_CONFIG), SMALL_MAE_CONFIG)


def test_mae_loss_of_zero_predictions_at_patch_size_16():
    objective = MAE(build_model(replace(SMALL_CONFIG, patch=(16, 16), image=(64, 64))), SMALL_MAE_CONFIG)
    torch.nn.init.zeros_(objective.decoder.head.weight)
    loss = objective(objective.prepare(make_batch(torch.randn(2, 3, 64, 64)), TrainingProgress()))["loss"]
    assert loss.item() == pytest.approx(767 / 768, rel=1e-5)


def test_mae_loss_ignores_predictions_of_visible_patches(mae_objective):
    batch = mae_objective.prepare(make_batch(torch.randn(2, 3, 32, 32)), TrainingProgress())
    before, shift = mae_objective(batch)["loss"], torch.zeros(1, 17, 1)

    def shift_outputs(module, inputs, tokens):
        return tokens + shift

    mae_objective.decoder.encoder.register_forward_hook(shift_outputs)
    shift[:, 12:] = 5.0  # the 4 visible patches and the class token
    assert mae_objective(batch)["loss"] == before
    shift[:, 11] = torch.randn(1)
    assert mae_objective(batch)["loss"] != before


def test_mae_encoder_with_all_patches_matches_the_plain_vit(mae_objective):
    images, order = torch.randn(2, 3, 32, 32), torch.stack([torch.randperm(16) for _ in range(2)])
    features, encoded = mae_objective.model.features(images), mae_objective.model.encode_patches(images, order)
    assert torch.allclose(encoded[:, :1], features[:, :1], atol=1e-5)
    assert torch.allclose(encoded[:, 1:], features[:, 1:].gather(1, order[..., None].expand(-1, -1, 32)), atol=1e-5)


def test_fixed_positions_are_not_trained(tmp_path):
    session, state = create_session("mae", tmp_path)
    positions = {name: b for name, b in state.objective.named_buffers() if "position" in name}
    before = {name: b.clone() for name, b in positions.items()}
    collect_losses(session, state)
    assert len(positions) >= 1 and not any("position" in name for name, _ in state.objective.named_parameters())
    assert all(torch.equal(b, before[name]) for name, b in positions.items())


def test_uniform_prototypes_have_loss_ln_k():
    targets, logits = torch.full((1, 2, 65536), 1 / 65536), torch.zeros(1, 10, 65536)
    assert cross_view_entropy(targets, logits).item() == pytest.approx(11.0904, abs=1e-4)


def test_dino_loss_averages_pairs_of_different_views():
    """Of the 18 terms, 2 compare global views: the student's first with the teacher's second, and vice versa."""
    targets, logits = torch.randn(5, 2, 7).softmax(-1), torch.randn(5, 10, 7)

    def entropy(teacher, view):
        return F.cross_entropy(logits[:, view], targets[:, teacher])

    local = sum(entropy(teacher, view) for teacher in range(2) for view in range(2, 10)) / 18
    mirrored = (entropy(1, 0) + entropy(0, 1)) / 18
    assert cross_view_entropy(targets, logits).item() == pytest.approx((local + mirrored).item(), rel=1e-6)


@pytest.mark.parametrize("objective_class", [DINO, DINOv2])
def test_teacher_is_deterministic_and_has_no_gradient(objective_class):
    objective = build_objective(
        objective_class, model=VIEWED.with_options(regularization={"drop_path": 0.5, "dropout": 0.3})
    )
    images = make_view_batch(objective)["images"].flatten(0, 1)
    assert (
        torch.equal(objective.teacher(images), objective.teacher(images))
        and not objective.teacher(images).requires_grad
    )
    assert not torch.equal(objective.model(images), objective.model(images))


def test_schedules_reach_their_start_and_end_values(tmp_path):
    session, state = create_session("dinov2", tmp_path)
    values_by_step = []
    run_training_loop(state, session.batches(state), [(1, lambda s: values_by_step.append(dict(s.progress.values)))])
    assert values_by_step[0]["teacher_temperature"] == pytest.approx(0.102)  # value at the second of ten steps
    assert values_by_step[-1]["teacher_temperature"] == pytest.approx(0.12)
    assert values_by_step[-1]["momentum"] == pytest.approx(1.0, abs=1e-3) and values_by_step[0][
        "momentum"
    ] == pytest.approx(0.95, abs=1e-3)
    assert values_by_step[-1]["weight_decay"] == pytest.approx(0.4, abs=5e-3)
    assert state.objective.temperature.item() == pytest.approx(0.12)


@pytest.mark.parametrize("name", ["dino", "dinov2-sinkhorn"])
def test_prototypes_train_only_after_their_freeze(name, tmp_path):
    """Neither learning rate nor weight decay changes them in the first half; other parameters change."""
    session, state = create_session(name, tmp_path, objective=replace(OBJECTIVE_CONFIGS[name], frozen=0.5))
    heads = [head for head in ("head", "patch_head") if hasattr(state.objective, head)]
    before = {head: getattr(state.objective, head).prototypes.weight.detach().clone() for head in heads}
    first = state.objective.head.mlp[0].weight.detach().clone()
    unchanged_by_step = []

    def record_unchanged(state):
        unchanged_by_step.append(
            [torch.equal(getattr(state.objective, head).prototypes.weight, before[head]) for head in heads]
        )

    run_training_loop(state, session.batches(state), [(1, record_unchanged)])
    assert all(all(row) for row in unchanged_by_step[:10]) and not any(any(row) for row in unchanged_by_step[11:])
    assert not torch.equal(state.objective.head.mlp[0].weight, first)


@pytest.mark.parametrize("registers", [0, 3])
def test_mask_tokens_have_positions_and_registers_have_none(registers):
    objective = build_objective(DINOv2, model=replace(VIEWED, registers=registers))
    for parameter in (objective.mask_token, objective.model.prefix):
        torch.nn.init.normal_(parameter)
    masks = torch.rand(3, 16) < 0.5
    inputs = record_inputs(objective.model.encoder)
    objective.encode(torch.randn(3, 3, 32, 32), masks)
    positions = objective.model.add_positions(torch.zeros(3, 4, 4, 32))
    prefix = objective.model.config.prefix
    assert torch.allclose(inputs[0][:, prefix:][masks], (objective.mask_token + positions)[masks], atol=1e-6)
    assert torch.equal(
        inputs[0][:, prefix - registers : prefix], objective.model.prefix[prefix - registers :].expand(3, -1, -1)
    )


def test_patch_loss_is_zero_without_masks():
    objective = build_objective(DINOv2, mask_probability=0.0, koleo=0.0)
    outputs = objective(make_view_batch(objective))
    assert outputs["ibot"] == 0 and outputs["loss"].item() == pytest.approx(outputs["dino"].item(), rel=1e-6)


def test_deit_teacher_runs_once_on_the_student_images():
    objective, _ = make_student_and_batch(setting=replace(OBJECTIVE_SETTING, views=Augment(mixup=0.8)))
    teacher_inputs = record_inputs(objective.teacher.model)
    batch = {
        "images": torch.randn(6, 3, 16, 16),
        "labels": torch.tensor([0, 1, 2, 0, 1, 2]),
        "positions": torch.arange(6),
        "samples": torch.arange(6),
    }
    prepared = objective.prepare(batch, TrainingProgress())
    objective(prepared)["loss"].backward()
    assert len(teacher_inputs) == 1 and torch.allclose(teacher_inputs[0], prepared["images"], atol=1e-6)
    assert not torch.allclose(teacher_inputs[0], batch["images"], atol=1e-2)  # the images are mixed
    assert not prepared["teacher_logits"].requires_grad and all(
        p.grad is None for p in objective.teacher.model.parameters()
    )


def test_the_teachers_class_is_not_mixed_with_labels():
    objective, batch = make_student_and_batch(alpha=1.0, setting=replace(OBJECTIVE_SETTING, views=Augment(mixup=0.8)))
    flipped_labels = {**batch, "labels": batch["labels"].flip(0)}
    assert objective(batch)["loss"] == objective(flipped_labels)["loss"]
    objective, batch = make_student_and_batch(alpha=0.5, setting=replace(OBJECTIVE_SETTING, views=Augment(mixup=0.8)))
    assert objective(batch)["loss"] != objective({**batch, "labels": batch["labels"].roll(1, 0)})["loss"]
