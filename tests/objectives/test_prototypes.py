"""DINOv2's distillation: small students trained on the prototypes of a frozen teacher."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import vitreous
from tests.conftest import make_image
from tests.reports.test_report import NoteListener
from vitreous.data.augmentation.views import MultiCrop
from vitreous.errors import UsageError, WeightsError
from vitreous.models.config import MlpConfig, ViTConfig, transformer_config
from vitreous.models.zoo import build_model
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress, reduce_single_process
from vitreous.objectives.dinov2 import DINOv2, DINOv2Config
from vitreous.objectives.prototypes import PrototypeTeacher
from vitreous.objectives.unlabelled import koleo_loss
from vitreous.weights.adopt import open_weights

TRAIN_OPTIONS = {"image_size": 16, "precision": "fp32", "batch_size": 8, "epochs": 1.0, "workers": 0, "device": "cpu"}
HEAD_SETTINGS = {
    "objective.prototypes": ["16"],
    "objective.head_width": ["16"],
    "objective.bottleneck": ["8"],
    "objective.batch_norm": ["False"],
}
PATCH_HEAD_SETTINGS = {"objective.patch_prototypes": ["12"], "objective.patch_bottleneck": ["6"]}
STUDENT_CONFIG = ViTConfig(
    image=(16, 16), patch=(8, 8), classes=0, width=24, depth=2, heads=2, mlp=MlpConfig(hidden=48)
)
TRAINING_PROGRESS = TrainingProgress(0, 0, 100, {"teacher_temperature": 0.07, "momentum": 0.9})


def train_run(home, out, model, **options):
    settings = {**HEAD_SETTINGS, **options.pop("settings", {})}
    listener = options.pop("listener", None) or NoteListener()
    return vitreous.train(
        str(home / "photos"), listener, model=model, out=str(home / out), settings=settings,
        **{"recipe": "dinov2", **TRAIN_OPTIONS, **options},
    )  # fmt: skip


@pytest.fixture(scope="module")
def teacher_runs(tmp_path_factory):
    """Return 16 unlabelled images, and a teacher with 4 x 4 patches and separate heads for images and patches."""
    teacher_runs = tmp_path_factory.mktemp("prototypes")
    (teacher_runs / "photos").mkdir()
    for index in range(16):
        make_image(index, (16, 16), index % 3).save(teacher_runs / "photos" / f"{index}.png")
    train_run(teacher_runs, "teacher", "ViT-32x1/4", settings=PATCH_HEAD_SETTINGS)
    train_run(teacher_runs, "dino", "ViT-32x1/4", recipe="dino")
    return teacher_runs


def build_objective(home, **settings):
    """Return a student of the teacher, in training mode."""
    torch.manual_seed(0)
    config = DINOv2Config(teacher=str(home / "teacher"), head_width=16, bottleneck=8, **settings)
    config = config.with_absolute_paths(STUDENT_CONFIG, ())
    setting = ObjectiveSetting(views=MultiCrop(locals=2, local_image=(8, 8)), normalisation=((0.4,) * 3, (0.2,) * 3))
    return config.build(build_model(STUDENT_CONFIG), setting).train()


def make_view_batch(objective):
    generator = torch.Generator().manual_seed(1)
    sizes = {"images": (3, 2, 3, 16, 16), "local": (3, 2, 3, 8, 8)}
    images = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    return objective.prepare({**images, "positions": torch.arange(3), "samples": torch.arange(3)}, TRAINING_PROGRESS)


def test_loss_matches_the_loop(teacher_runs):
    """The teacher uses its own normalisation, and as many 4 x 4 patches as the student has 8 x 8 patches."""
    objective, teacher = build_objective(teacher_runs), PrototypeTeacher(str(teacher_runs / "teacher"))
    assert (objective.config.prototypes, objective.config.patch_prototypes) == (16, 12)
    batch = make_view_batch(objective)
    assert batch["masks"].all() and batch["masks"].shape == (3, 2, 2, 2)
    outputs = objective(batch)
    images = batch["images"].flatten(0, 1) * 0.2 + 0.4
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in teacher.normalisation)
    small = F.interpolate((images - mean) / std, (8, 8), mode="bicubic", antialias=True)
    encoder = teacher.model
    encoder.any_size = True
    with torch.no_grad():
        tokens = encoder.features(small)
        targets = (teacher.heads[0](encoder.pool(tokens)) / 0.07).softmax(-1).view(3, 2, 16)
        patch_targets = (teacher.heads[1](tokens[:, encoder.config.prefix :]) / 0.07).softmax(-1)
        views = [*batch["images"].unbind(1), *batch["local"].unbind(1)]
        dino = 0.0
        for i in range(2):
            for v in range(4):
                if v != i:
                    logits = objective.head(objective.model(views[v])) / 0.1
                    dino = dino - (targets[:, i] * logits.log_softmax(-1)).sum(-1).mean() / 6
        student_tokens = objective.model.features(batch["images"].flatten(0, 1))
        logits = objective.patch_head(student_tokens[:, 1:].flatten(0, 1)).view(6, 4, 12) / 0.1
        ibot = -(patch_targets * logits.log_softmax(-1)).sum(-1).mean()
        koleo = sum(koleo_loss(objective.model(view), lambda rows: (rows, 0)) for view in views[:2])
    for name, expected in (("dino", dino), ("ibot", ibot), ("koleo", koleo)):
        assert outputs[name].item() == pytest.approx(float(expected), rel=1e-5), name
    assert outputs["loss"].item() == pytest.approx(float(dino + ibot + 0.1 * koleo), rel=1e-5)


def test_frozen_teacher_is_constant_and_the_student_average_follows(teacher_runs):
    objective = build_objective(teacher_runs, centring="sinkhorn")
    frozen = objective.frozen
    assert frozen is not None
    before = copy.deepcopy((frozen.model.state_dict(), frozen.heads.state_dict(), objective.teacher.state_dict()))
    objective(make_view_batch(objective))["loss"].backward()
    assert all(p.grad is not None for p in objective.parameters() if p.requires_grad)
    assert all(p.grad is None for module in (frozen.model, frozen.heads) for p in module.parameters())
    assert not any("frozen" in name for name in objective.state_dict()) and "digest" in objective.state_dict()
    with torch.no_grad():
        for p in objective.model.parameters():
            p += 1
    objective.after_step(TRAINING_PROGRESS)
    for state, module in zip(before, (frozen.model, frozen.heads), strict=False):
        assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    for name, tensor in objective.deployed_model().state_dict().items():
        assert torch.allclose(tensor, before[2][name] + 0.1, atol=1e-6), name


def test_student_run_resumes_and_ships_its_average(teacher_runs, tmp_path):
    """The teacher's path is relative to the folder where the run began; another teacher there is rejected."""
    listener = NoteListener()
    options = {
        "listener": listener,
        "settings": {"objective.teacher": [str(teacher_runs / "teacher")]},
        "save_every": 1,
    }
    train_run(teacher_runs, "student", "ViT-24x2/8", **options)
    run = teacher_runs / "student"
    bundle_state = open_weights(run).read_state()
    checkpoint_state = open_weights(max((run / "checkpoints").iterdir())).read_state()
    assert all(torch.equal(tensor, checkpoint_state[name].float()) for name, tensor in bundle_state.items())
    assert vitreous.train(str(teacher_runs / "photos"), NoteListener(), out=str(run), resume=True)["steps"] == 2
    assert open_weights(teacher_runs / "teacher").config.patch == (4, 4)
    objective = build_objective(teacher_runs)
    objective.digest[0] += 1
    with pytest.raises(WeightsError, match="has changed since the run began"):
        objective(make_view_batch(objective))


def test_teacher_head_batch_norm_uses_batch_statistics(teacher_runs):
    train_run(teacher_runs, "normed", "ViT-32x1/4", settings={"objective.batch_norm": ["True"]})
    teacher = PrototypeTeacher(str(teacher_runs / "normed"))
    assert teacher.patch_prototypes == 0 and len(teacher.heads) == 1 and teacher.heads[0].batch_norm
    images, moments = torch.randn(4, 3, 16, 16), ((0.5,) * 3, (0.5,) * 3)
    image_targets, patches = teacher.compute_targets(images, moments, (4, 4), reduce_single_process, False)
    assert image_targets.shape == (4, 16) and patches.shape == (4, 16, 16)
    first_half_targets, _ = teacher.compute_targets(images[:2], moments, (4, 4), reduce_single_process, False)
    assert not torch.allclose(image_targets[:2], first_half_targets, atol=1e-3)
    assert teacher.flops(16) > teacher.flops() > 0


@pytest.mark.parametrize(
    ("teacher", "model", "text"),
    [
        ("", STUDENT_CONFIG, "no teacher"),
        (
            "dino",
            STUDENT_CONFIG,
            "requires the heads of DINOv2, but .* has those of dino\n  use a run of recipe='dinov2'",
        ),
        ("nowhere", STUDENT_CONFIG, "no weights at"),
        (
            "teacher",
            transformer_config(**{**vars(STUDENT_CONFIG), "channels": 1}),
            "requires 3 channels, but the student has 1",
        ),
        (
            "teacher",
            transformer_config(**{**vars(STUDENT_CONFIG), "image": (16,) * 3, "patch": (8,) * 3}),
            "images with 2 axes, but the student has 3",
        ),
    ],
)
def test_invalid_teachers_are_rejected(teacher_runs, teacher, model, text):
    with pytest.raises((UsageError, WeightsError), match=text) as error:
        if teacher:
            DINOv2Config(teacher=str(teacher_runs / teacher)).with_absolute_paths(model, ())
        else:
            PrototypeTeacher("")
    assert error.value.hint


def test_dinov2_without_a_teacher_is_unfrozen():
    config = DINOv2Config()
    assert config.with_absolute_paths(STUDENT_CONFIG, ()) is config
    assert DINOv2(build_model(STUDENT_CONFIG), DINOv2Config(prototypes=8, head_width=8, bottleneck=4)).frozen is None
