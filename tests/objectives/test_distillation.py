"""Distillation: DeiT's losses, and the teacher's input."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import vitreous
from tests.conftest import make_image, run_cli
from vitreous.data.augmentation.augment import Augment
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError, WeightsError
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.models.zoo import build_model
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress
from vitreous.objectives.distillation import DistillationConfig, DistillationObjective
from vitreous.objectives.supervised import cross_entropy
from vitreous.objectives.teacher import OnnxTeacher, WeightsTeacher, open_teacher
from vitreous.tasks.classification import Classification
from vitreous.tasks.features import FeatureExtraction
from vitreous.weights.bundle import Bundle

CLASSES = ("ant", "bee", "cat")
PLAIN_CONFIG = ViTConfig(image=(16, 16), patch=(4, 4), classes=3, width=32, depth=2, heads=2, mlp=MlpConfig(hidden=64))
DISTILLED_CONFIG = replace(PLAIN_CONFIG, pool="distilled")
OBJECTIVE_SETTING = ObjectiveSetting(classes=CLASSES, views=Augment(), normalisation=((0.5,) * 3, (0.5,) * 3))


def make_teacher_bundle(classes=CLASSES, task=None, **preprocess):
    """Return a bundle of a random teacher."""
    torch.manual_seed(5)
    model = build_model(replace(PLAIN_CONFIG, channels=preprocess.get("channels", 3), classes=len(classes)))
    torch.nn.init.normal_(model.head.weight)
    return Bundle(model.eval(), task or Classification(classes), ImagePreprocess((16, 16), **preprocess), {})


def make_student_and_batch(config=DISTILLED_CONFIG, teacher=None, setting=OBJECTIVE_SETTING, **options):
    """Return a student with random heads, and a prepared batch."""
    torch.manual_seed(0)
    model = build_model(config)
    for layer in (p for name, p in model.named_parameters() if name.startswith("head.") and p.ndim == 2):
        torch.nn.init.normal_(layer)
    objective = DistillationObjective(
        model,
        DistillationConfig(teacher="t", **options),
        setting,
        WeightsTeacher("t", teacher or make_teacher_bundle()),
    ).train()
    batch = {
        "images": torch.randn(6, 3, 16, 16),
        "labels": torch.tensor([0, 1, 2, 0, 1, 2]),
        "positions": torch.arange(6),
        "samples": torch.arange(6),
    }
    return objective, objective.prepare(batch, TrainingProgress())


def compute_head_logits(objective, batch):
    """Return the logits of the two heads."""
    tokens = objective.model.features(batch["images"])
    return objective.model.head.label(tokens[:, 0]), objective.model.head.teacher(tokens[:, 1])


def test_the_hard_loss_is_the_cross_entropy_with_the_teachers_class():
    objective, batch = make_student_and_batch(alpha=0.3, smoothing=0.1)
    label_logits, teacher_logits = compute_head_logits(objective, batch)
    expected = 0.7 * cross_entropy(label_logits, batch["labels"], smoothing=0.1)
    expected += 0.3 * F.cross_entropy(teacher_logits, batch["teacher_logits"].argmax(1))  # without label smoothing
    assert objective(batch)["loss"].item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("reduction", "divisor"), [("batchmean", 1), ("official", 3)])
def test_soft_loss_is_the_kl_divergence_at_a_temperature(reduction, divisor):
    objective, batch = make_student_and_batch(kind="soft", alpha=0.5, temperature=3.0, reduction=reduction)
    label_logits, teacher_logits = compute_head_logits(objective, batch)
    p, q = ((z / 3).softmax(1) for z in (batch["teacher_logits"], teacher_logits))
    divergence = 9 * (p * (p / q).log()).sum(1).mean() / divisor
    expected = 0.5 * cross_entropy(label_logits, batch["labels"]) + 0.5 * divergence
    assert objective(batch)["loss"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_alpha_zero_uses_only_labels():
    objective, batch = make_student_and_batch(alpha=0.0)
    loss = objective(batch)["loss"]
    loss.backward()
    assert loss.item() == pytest.approx(
        cross_entropy(compute_head_logits(objective, batch)[0], batch["labels"]).item(), rel=1e-5
    )
    assert objective.model.head.teacher.weight.grad.abs().max() == 0


def test_model_without_distillation_token_uses_one_head():
    objective, batch = make_student_and_batch(PLAIN_CONFIG, alpha=0.4)
    logits = objective.model(batch["images"])
    expected = 0.6 * F.cross_entropy(logits, batch["labels"]) + 0.4 * F.cross_entropy(
        logits, batch["teacher_logits"].argmax(1)
    )
    assert objective(batch)["loss"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_deployed_model_averages_its_heads():
    objective, batch = make_student_and_batch()
    label_logits, teacher_logits = compute_head_logits(objective.eval(), batch)
    assert torch.allclose(objective.deployed_model()(batch["images"]), (label_logits + teacher_logits) / 2, atol=1e-5)


def test_teacher_sees_mixed_images_in_its_normalisation():
    teacher = make_teacher_bundle(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1))
    setting = replace(OBJECTIVE_SETTING, views=Augment(mixup=0.8))
    objective, batch = make_student_and_batch(teacher=teacher, setting=setting)
    pixels = batch["images"] * 0.5 + 0.5
    mean, std = (torch.tensor(n).view(3, 1, 1) for n in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.1)))
    with torch.no_grad():
        assert torch.allclose(batch["teacher_logits"], teacher.model((pixels - mean) / std), atol=1e-5)
    assert batch["labels"].ndim == 2 and batch["labels"].sum(1).allclose(torch.ones(6))
    assert not objective.teacher.model.training and all(
        not p.requires_grad for p in objective.teacher.model.parameters()
    )


def test_classes_are_put_in_the_students_order():
    swapped = make_teacher_bundle(("cat", "ant", "bee"))
    objective, batch = make_student_and_batch(teacher=swapped)
    with torch.no_grad():
        assert torch.allclose(batch["teacher_logits"], swapped.model(batch["images"])[:, [1, 2, 0]], atol=1e-5)
    assert objective.class_order == [1, 2, 0]


@pytest.mark.parametrize(
    ("teacher", "text"),
    [
        (lambda: make_teacher_bundle(("ant", "bee", "dog")), "'cat' of the data"),
        (lambda: make_teacher_bundle(("ant", "bee", "cat", "dog")), "4 classes"),
        (lambda: make_teacher_bundle(task=FeatureExtraction()), "not classes"),
        (lambda: make_teacher_bundle(channels=1, mean=(0.5,), std=(0.5,)), "1 channels"),
    ],
)
def test_incompatible_teachers_are_rejected(teacher, text):
    with pytest.raises(UsageError, match=text):
        make_student_and_batch(teacher=teacher())


def test_missing_teacher_is_rejected(tmp_path):
    with pytest.raises(UsageError, match=r"objective\.teacher"):
        DistillationConfig().build(build_model(DISTILLED_CONFIG), OBJECTIVE_SETTING)
    with pytest.raises((UsageError, WeightsError)):
        DistillationConfig(teacher=str(tmp_path / "none")).build(build_model(DISTILLED_CONFIG), OBJECTIVE_SETTING)


def test_images_are_resized_to_the_teacher_size():
    teacher = WeightsTeacher("t", make_teacher_bundle())
    images = torch.rand(2, 3, 24, 24)
    teacher_input = teacher.to_teacher_input(images, ((0.0,) * 3, (1.0,) * 3))
    expected = F.interpolate((images - 0.5) / 0.5, (16, 16), mode="bicubic", antialias=True)
    assert torch.allclose(teacher_input, expected, atol=1e-6) and teacher.logits(teacher_input).shape == (2, 3)


def test_onnx_teacher_matches_the_model(tmp_path):
    teacher_bundle = make_teacher_bundle(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1))
    teacher_bundle.save(tmp_path / "teacher")
    (tmp_path / "images").mkdir()
    for index in range(8):
        make_image(index, (16, 16), index % 3).save(tmp_path / "images" / f"{index}.png")
    arguments = ("--to", "onnx", "--out", str(tmp_path / "t.onnx"), "--images", str(tmp_path / "images"))
    result = run_cli("export", str(tmp_path / "teacher"), *arguments)
    assert result.returncode == 0, result.stderr
    exported = open_teacher(str(tmp_path / "t.onnx"))
    weights_teacher = WeightsTeacher("t", teacher_bundle)
    assert isinstance(exported, OnnxTeacher) and exported.classes == CLASSES and exported.size == (16, 16)
    assert exported.normalisation == weights_teacher.normalisation
    images = torch.rand(5, 3, 16, 16)
    logits = [
        teacher.logits(teacher.to_teacher_input(images, OBJECTIVE_SETTING.normalisation))
        for teacher in (exported, weights_teacher)
    ]
    assert torch.allclose(*logits, atol=1e-4) and logits[0].std() > 0


def write_foreign_onnx(path, count=3):
    """Write a foreign ONNX file whose logits are the channel means, or `count` values."""
    import onnx
    from onnx import TensorProto, helper

    entry = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 16, 16])
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", count])
    nodes = [helper.make_node("ReduceMean", ["x"], ["y"], axes=[2, 3], keepdims=0)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [entry], [output]), opset_imports=[helper.make_opsetid("", 13)]
    )
    model.ir_version = 8
    onnx.save(model, str(path))
    return str(path)


def test_foreign_onnx_teacher_requires_normalisation_options(tmp_path):
    source = write_foreign_onnx(tmp_path / "x.onnx")
    with pytest.raises(UsageError, match="does not contain its mean") as error:
        DistillationConfig(teacher=source).with_absolute_paths(PLAIN_CONFIG, CLASSES)
    assert "--objective.teacher-mean" in error.value.hint and "--objective.teacher-std" in error.value.hint
    config = DistillationConfig(teacher=source, teacher_mean=(0.5, 0.25, 0.0), teacher_std=(1.0, 2.0, 4.0))
    assert config.with_absolute_paths(PLAIN_CONFIG, CLASSES).teacher == source
    objective = config.build(build_model(PLAIN_CONFIG), OBJECTIVE_SETTING)
    images = torch.randn(4, 3, 16, 16)
    expected = (images * 0.5 + 0.5).mean((2, 3)) - torch.tensor([0.5, 0.25, 0.0])
    assert torch.allclose(objective.compute_teacher_logits(images), expected / torch.tensor([1.0, 2.0, 4.0]), atol=1e-5)
    with pytest.raises(UsageError, match="among the 3 classes of the teacher"):
        config.with_absolute_paths(replace(PLAIN_CONFIG, classes=2), CLASSES[:2])


def test_teacher_is_identified_by_its_digest(tmp_path):
    make_teacher_bundle().save(tmp_path / "teacher")
    config = DistillationConfig(teacher=str(tmp_path / "teacher"))
    objective = config.build(build_model(PLAIN_CONFIG), OBJECTIVE_SETTING)
    state = objective.state_dict()
    assert state["digest"].shape == (32,) and not any(name.startswith("teacher") for name in state)
    second_objective = config.build(build_model(PLAIN_CONFIG), OBJECTIVE_SETTING)
    second_objective.load_state_dict(state)
    images = torch.randn(2, 3, 16, 16)
    assert second_objective.compute_teacher_logits(images).equal(objective.compute_teacher_logits(images))
    changed_teacher = make_teacher_bundle()
    torch.nn.init.ones_(changed_teacher.model.head.bias)
    (tmp_path / "teacher").rename(tmp_path / "old")
    changed_teacher.save(tmp_path / "teacher")
    changed = config.build(build_model(PLAIN_CONFIG), OBJECTIVE_SETTING)
    changed.load_state_dict(state)
    with pytest.raises(WeightsError, match="has changed since the run began"):
        changed.compute_teacher_logits(images)


def test_a_run_learns_from_a_run(photo_folder, tmp_path):
    train_options = {"workers": 0, "device": "cpu", "epochs": 1.0, "batch_size": 8, "seed": 1, "precision": "fp32"}
    vitreous.train(str(photo_folder), out=str(tmp_path / "teacher"), model="ViT-32x2/8", image_size=32, **train_options)
    settings = {"objective.teacher": [str(tmp_path / "teacher")]}
    out = tmp_path / "student"
    vitreous.train(
        str(photo_folder),
        recipe="distil",
        out=str(out),
        model="ViT-32x1/8",
        image_size=32,
        settings=settings,
        **train_options,
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert any("val/top1" in line for line in lines) and (out / "model" / "weights.safetensors").is_file()
