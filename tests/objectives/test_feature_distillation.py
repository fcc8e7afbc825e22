"""Feature distillation: formulas, teachers and students of all families, and training on digits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import vitreous
from tests.conftest import make_image, run_cli
from tests.training.test_models import MODELS
from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.views import MultiCrop
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError, WeightsError
from vitreous.models.config import BiTConfig, MlpConfig, ViTConfig
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress
from vitreous.objectives.feature_distillation import (
    FeatureDistillation,
    FeatureDistillationConfig,
    FeatureTeacher,
    choose_teacher_size,
    encode_features,
    map_loss,
    standardise_positions,
)
from vitreous.progress import NullListener
from vitreous.tasks.features import FeatureExtraction
from vitreous.tasks.table import infer_task
from vitreous.weights.bundle import Bundle, load_bundle

pytestmark = pytest.mark.usefixtures("without_pages")

VIT = ViTConfig(image=(16, 16), patch=(4, 4), classes=3, width=32, depth=2, heads=2, mlp=MlpConfig(hidden=64))
RESNET = BiTConfig(image=(16, 16), classes=3, blocks=(1, 1), width=8)
SETTING = ObjectiveSetting(views=Augment(), normalisation=((0.5,) * 3, (0.5,) * 3))


def save_teacher(config, folder, seed=5, **preprocess):
    """Save a random teacher as a bundle; returns its path."""
    torch.manual_seed(seed)
    model = build_model(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    task = infer_task(config, tuple(f"class {index}" for index in range(config.classes)))
    Bundle(model, task, ImagePreprocess(config.image, **preprocess), {}).save(folder)
    return str(folder)


def build_objective(student, teacher, **settings):
    """Return the objective of a random student."""
    torch.manual_seed(0)
    model = build_model(student.with_options(classes=0))
    config = FeatureDistillationConfig(teacher=teacher, **settings)
    return FeatureDistillation(model, config, SETTING, FeatureTeacher(teacher)).train()


def make_batch(objective, side=16):
    """Return a prepared batch of random images."""
    return objective.prepare({"images": torch.randn(4, 3, side, side)}, TrainingProgress())


def test_loss_matches_the_formula(tmp_path):
    objective = build_objective(
        VIT.with_options(width=16, heads=2), save_teacher(VIT, tmp_path / "t"), pooled_weight=0.5
    )
    batch = make_batch(objective)
    outputs = objective(batch)
    pooled, patches = encode_features(objective.model, batch["images"])
    teacher = objective.teacher.model
    tokens = teacher.features(batch["images"])  # the same normalisation and size
    pooled_loss = torch.stack(
        [
            1 - F.cosine_similarity(s, t, 0)
            for s, t in zip(objective.pooled_projection(pooled), tokens[:, 0], strict=True)
        ]
    ).mean()
    student_tokens = objective.map_projection(patches).flatten(0, 2)
    targets = tokens[:, 1:].flatten(0, 1)
    targets = (targets - targets.mean(1, keepdim=True)) / targets.std(1, correction=0, keepdim=True)
    difference = (student_tokens - targets).abs()
    smooth_l1 = torch.where(difference < 1, difference.square() / 2, difference - 0.5).mean()
    patch_loss = 0.9 * (1 - F.cosine_similarity(student_tokens, targets, 1)).mean() + 0.1 * smooth_l1
    assert outputs["pooled"].item() == pytest.approx(pooled_loss.item(), rel=1e-4)
    assert outputs["patches"].item() == pytest.approx(patch_loss.item(), rel=1e-4)
    assert outputs["loss"].item() == pytest.approx((0.5 * pooled_loss + patch_loss).item(), rel=1e-4)


def test_equal_maps_have_no_loss():
    features = standardise_positions(torch.randn(2, 3, 3, 8))
    assert map_loss(features, features, 0.1) == pytest.approx(0, abs=1e-6)
    assert map_loss(features, -features, 0.0) == pytest.approx(2, rel=1e-5)


def test_projections_exist_only_for_other_widths(tmp_path):
    teacher = save_teacher(VIT, tmp_path / "t")
    same, other = build_objective(VIT, teacher), build_objective(RESNET, teacher)
    assert not list(same.pooled_projection.parameters()) + list(same.map_projection.parameters())
    assert other.pooled_projection.weight.shape == other.map_projection.weight.shape == (32, 64)


@pytest.mark.parametrize("name", ["axes at input", "rotary", "axial", "windows", "distilled", "BiT", "Swin", "hybrid"])
def test_any_family_is_teacher_and_student(name, tmp_path):
    """A ViT learns from the family, and the family from a ViT: every trained parameter gets a gradient."""
    for student, teacher in ((VIT, MODELS[name]), (MODELS[name], VIT)):
        objective = build_objective(student, save_teacher(teacher, tmp_path / type(teacher).__name__))
        batch = make_batch(objective)
        outputs = objective(batch)
        outputs["loss"].backward()
        missing = {key for key, p in objective.named_parameters() if p.requires_grad and p.grad is None}
        assert torch.isfinite(outputs["loss"]) and not missing
        assert all(p.grad is None for p in objective.teacher.model.parameters())


def test_teacher_input_has_its_normalisation_and_size(tmp_path):
    teacher = save_teacher(replace(VIT, image=(32, 32)), tmp_path / "t", mean=(0.2,) * 3, std=(0.4,) * 3)
    objective = build_objective(VIT, teacher, teacher_size=24)
    seen = []
    objective.teacher.model.projection.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    batch = objective.prepare({"images": torch.full((1, 3, 16, 16), 0.5)}, TrainingProgress())
    assert seen[0][1:3] == (6, 6) and batch["teacher_map"].shape == (1, 6, 6, 32)
    pixels = objective.teacher.to_teacher_input(torch.full((1, 3, 16, 16), 0.5), SETTING.normalisation)
    assert pixels.shape[2:] == (24, 24)
    assert torch.allclose(pixels, torch.tensor((0.75 - 0.2) / 0.4), atol=1e-4)
    assert objective(batch)["loss"] > 0  # the student's map is resized


def test_teacher_sizes():
    student = config_from_name("ViT-Ti/16")
    dinov2 = config_from_name("ViT-S/14", 518)
    assert choose_teacher_size(dinov2, student) == (224, 224)
    assert choose_teacher_size(dinov2, config_from_name("ViT-Ti/16", 32)) == (224, 224)
    assert choose_teacher_size(dinov2, config_from_name("ViT-Ti/16", 640)) == (518, 518)
    assert choose_teacher_size(VIT, student) == (16, 16)
    assert choose_teacher_size(config_from_name("Swin-T/4"), config_from_name("ViT-Ti/16", 640)) == (224, 224)


@pytest.mark.parametrize(("student", "teacher"), [("ViT-32x2/4", RESNET), ("BiT", VIT)])
def test_a_student_learns_its_teacher_on_digits(student, teacher, tmp_path):
    """The loss falls on the digits, without labels; the deployed model is the student alone."""
    grey = {"channels": 1, "mean": (0.5,), "std": (0.5,)}
    source = save_teacher(teacher.with_options(channels=1), tmp_path / "t", **grey)
    options = {"model": student}
    if student == "BiT":
        options = {"init": save_teacher(RESNET.with_options(channels=1), tmp_path / "s", 1, **grey)}
    summary = vitreous.train(
        "digits", NullListener(), recipe="distil-features", teacher=source, out=str(tmp_path / "run"), epochs=2.0,
        log_every=10, precision="fp32", device="cpu", image_size=16, **options,
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < 0.7 * losses[0] and summary["steps"] > 20
    bundle = load_bundle(tmp_path / "run" / "model")
    assert bundle.task == FeatureExtraction()
    assert not any(key.startswith(("pooled_projection", "map_projection")) for key in bundle.model.state_dict())


def test_bad_input(tmp_path):
    for settings in ({"smooth_l1": 1.5}, {"pooled_weight": -1.0}, {"pooled_weight": 0.0, "patch_weight": 0.0}):
        with pytest.raises(UsageError, match="smooth_l1 from 0 to 1"):
            FeatureDistillationConfig(**settings)
    with pytest.raises(UsageError, match="teacher_size -1 is below 0"):
        FeatureDistillationConfig(teacher_size=-1)
    with pytest.raises(UsageError, match="requires views of type augment"):
        FeatureDistillationConfig().check(VIT, (), MultiCrop())
    with pytest.raises(UsageError, match="no teacher is set"):
        FeatureDistillationConfig().with_absolute_paths(VIT, ())
    with pytest.raises(WeightsError):
        FeatureDistillationConfig(teacher=str(tmp_path / "missing")).with_absolute_paths(VIT, ())
    grey = save_teacher(replace(VIT, channels=1), tmp_path / "grey", channels=1, mean=(0.5,), std=(0.5,))
    with pytest.raises(UsageError, match="requires 1 channels, but the student has 3"):
        FeatureDistillationConfig(teacher=grey).with_absolute_paths(VIT, ())
    config = FeatureDistillationConfig(teacher=save_teacher(VIT, tmp_path / "t")).with_absolute_paths(VIT, ())
    assert config.teacher_size == 16
    with pytest.raises(UsageError, match="17"):
        replace(config, teacher_size=17).with_absolute_paths(VIT, ())


def test_a_changed_teacher_is_rejected(tmp_path):
    source = save_teacher(VIT, tmp_path / "t")
    objective = build_objective(VIT, source)
    state = objective.state_dict()
    assert "digest" in state and not any(name.startswith("teacher") for name in state)
    save_teacher(VIT, tmp_path / "other", seed=6)
    other = build_objective(VIT, str(tmp_path / "other"))
    other.load_state_dict(state)
    with pytest.raises(WeightsError, match="has changed since the run began"):
        make_batch(other)


def test_command_with_a_missing_teacher_fails_before_the_run(tmp_path):
    home = tmp_path / "flat"
    home.mkdir()
    for index in range(12):
        make_image(index, (16, 16), index % 3).save(home / f"{index}.png")
    result = run_cli("train", str(home), "--recipe", "distil-features", "--out", str(tmp_path / "run"))
    assert result.returncode == 2 and "no teacher is set" in result.stderr and "--teacher" in result.stderr
    assert not (tmp_path / "run").exists()
