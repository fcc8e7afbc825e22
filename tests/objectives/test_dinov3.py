"""DINOv3: the Gram loss and its gradient match the formula, and the Gram teacher follows its rule."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tests.objectives.sessions import HEAD_OPTIONS, OBJECTIVE_CONFIGS, create_session
from vitreous.data.augmentation.views import MultiCrop
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.models.zoo import build_model
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress
from vitreous.objectives.dinov2 import DINOv2
from vitreous.objectives.dinov3 import DINOv3, DINOv3Config, gram_loss, resize_patch_maps
from vitreous.training.loop import run_training_loop
from vitreous.training.saving import collect_tensors

SMALL_CONFIG = ViTConfig(image=(32, 32), patch=(8, 8), classes=0, width=32, depth=2, heads=2, mlp=MlpConfig(hidden=64))
VIEWS = MultiCrop(locals=2, local_image=(8, 8), blur=(0.0, 0.0, 0.0), anchor_scale=2.0)


def naive_gram_loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Compute the mean over images of the mean squared difference of the similarity matrices, in float64."""
    losses = []
    for x, y in zip(F.normalize(student.double(), dim=-1), F.normalize(teacher.double(), dim=-1), strict=True):
        losses.append((x @ x.T - y @ y.T).square().mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("patches", "width"), [(16, 32), (49, 32), (48, 32), (100, 8)])  # both formulas
@pytest.mark.parametrize("distance", [1.0, 1e-2])
def test_gram_loss_and_gradient_match_the_formula(patches, width, distance):
    torch.manual_seed(0)
    student = torch.randn(3, patches, width, requires_grad=True)
    teacher = student.detach() + distance * torch.randn(3, patches, width)
    expected, loss = naive_gram_loss(student, teacher), gram_loss(student, teacher)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    (gradient,), (expected_gradient,) = (torch.autograd.grad(value, student) for value in (loss, expected))
    tolerance = 1e-6 if distance == 1 else 2e-5  # the difference of similar matrices loses digits in float32
    assert (gradient - expected_gradient).norm() <= tolerance * expected_gradient.norm()


def test_gram_loss_of_equal_or_rotated_features_is_zero():
    features, rotation = torch.randn(2, 60, 16), torch.linalg.qr(torch.randn(16, 16)).Q
    assert gram_loss(features, 3 * features) == pytest.approx(0, abs=1e-12)
    assert gram_loss(features, features @ rotation) == pytest.approx(0, abs=1e-8)
    assert gram_loss(features[:, :8], features[:, :8] @ rotation) == pytest.approx(0, abs=1e-8)


def test_patch_maps_are_resized_bicubic_without_antialiasing():
    patches = torch.randn(2, 64, 5)
    expected = F.interpolate(patches.view(2, 8, 8, 5).permute(0, 3, 1, 2), (4, 2), mode="bicubic", antialias=False)
    resized = resize_patch_maps(patches, (8, 8), (4, 2))
    assert torch.equal(resized, expected.permute(0, 2, 3, 1).flatten(1, 2))
    assert torch.equal(resize_patch_maps(patches, (8, 8), (8, 8)), patches)


def build_objective(**settings):
    """Return a DINOv3 objective on a small model, in training mode."""
    torch.manual_seed(0)
    config = DINOv3Config(**HEAD_OPTIONS, **settings)
    return DINOv3(build_model(SMALL_CONFIG), config, ObjectiveSetting(views=VIEWS)).train()


def make_view_batch(objective, anchor_side=64):
    """Return a prepared batch of random views; the anchor views are those of another size."""
    generator = torch.Generator().manual_seed(1)
    batch = {
        "images": torch.randn(4, 2, 3, 32, 32, generator=generator),
        "local": torch.randn(4, 3, 3, 16, 16, generator=generator),
        "anchors": torch.randn(4, 2, 3, anchor_side, anchor_side, generator=generator),
        "positions": torch.arange(4),
        "samples": torch.arange(4),
    }
    return objective.prepare(batch, TrainingProgress())


def test_without_its_options_dinov3_is_dinov2():
    objective = build_objective()
    dinov2 = DINOv2(build_model(SMALL_CONFIG), objective.config, ObjectiveSetting(views=VIEWS)).train()
    dinov2.load_state_dict(objective.state_dict())
    batch = make_view_batch(objective)
    assert "anchors" not in batch and objective(batch)["loss"] == dinov2(batch)["loss"]


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_local_weight_scales_the_terms_of_local_views(weight):
    objective = build_objective(local_weight=weight)
    targets, logits = torch.randn(5, 2, 7).softmax(-1), torch.randn(5, 10, 7)
    pairs = {
        (i, v): -(targets[:, i] * logits[:, v].log_softmax(-1)).sum(-1).mean() for i in range(2) for v in range(10)
    }
    global_loss = torch.stack([pairs[0, 1], pairs[1, 0]]).mean()
    local_loss = torch.stack([pairs[i, v] for i in range(2) for v in range(2, 10)]).mean()
    expected = 2 / 18 * global_loss + 16 / 18 * weight * local_loss
    assert objective.compute_view_loss(targets, logits).item() == pytest.approx(expected.item(), rel=1e-6)


def test_gram_loss_compares_the_masked_student_with_the_gram_teacher():
    objective = build_objective(gram_weight=2.0, mask_probability=1.0)
    for parameter in objective.model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    batch = make_view_batch(objective)
    outputs = objective(batch)
    student = objective.encode_tokens(batch["images"].flatten(0, 1), batch["masks"].flatten(0, 1).flatten(1))
    tokens = objective.gram_teacher.features(batch["anchors"].flatten(0, 1))[:, 1:]  # without the class token
    expected = naive_gram_loss(student[:, 1:], resize_patch_maps(tokens, (8, 8), (4, 4)))
    assert outputs["gram"].item() == pytest.approx(expected.item(), rel=1e-5) and expected > 1e-4
    others = outputs["dino"] + outputs["ibot"] + 0.1 * outputs["koleo"]
    assert outputs["loss"].item() == pytest.approx((others + 2 * outputs["gram"]).item(), rel=1e-6)
    outputs["loss"].backward()
    assert all(parameter.grad is None for parameter in objective.gram_teacher.parameters())
    assert not objective.gram_teacher.training and objective.model.training


@pytest.mark.parametrize(
    ("settings", "first_step", "updates"),
    [
        ({"gram_start": 0.0}, 0, []),  # the initial encoder, for ever
        ({"gram_start": 0.0, "gram_refresh": 0.25, "gram_refreshes": 2}, 0, [5, 10]),
        ({"gram_start": 0.2, "gram_refresh": 0.25, "gram_refreshes": 3}, 5, [4, 9, 14, 19]),
        ({"gram_start": 0.2, "gram_refreshes": 3}, 5, [4]),
    ],
)
def test_gram_teacher_is_replaced_by_the_ema_teacher(settings, first_step, updates, tmp_path):
    """20 steps: the Gram teacher changes only at the end of these steps, to the EMA teacher at that time."""
    config = replace(OBJECTIVE_CONFIGS["dinov3"], **{"gram_refresh": 0.0, **settings})
    session, state = create_session("dinov3", tmp_path, objective=config, views=VIEWS)
    weights = lambda module: module.projection.weight.detach().clone()  # noqa: E731
    before, changed, losses = weights(state.objective.gram_teacher), [], []

    def record_step(state):
        nonlocal before
        after = weights(state.objective.gram_teacher)
        if not torch.equal(before, after):
            changed.append(state.step - 1)
            assert torch.equal(after, weights(state.objective.teacher))
        before = after
        losses.append(state.scalars.pop("gram"))

    run_training_loop(state, session.batches(state), [(1, record_step)])
    assert changed == updates
    assert [loss > 0 for loss in losses] == [step >= first_step for step in range(20)]


@pytest.mark.parametrize("stop", [3, 7, 12])
def test_stopped_and_resumed_run_has_the_same_bits(stop, tmp_path):
    """Before the Gram loss, with the first Gram teacher, and after its replacement."""
    whole, state = create_session("dinov3", tmp_path / "whole", views=VIEWS)
    run_training_loop(state, whole.batches(state), [])
    expected = collect_tensors(state)
    stopped, state = create_session("dinov3", tmp_path / "stopped", views=VIEWS)

    def stop_run(state):
        if state.step == stop:
            stopped.save(state)
            state.should_stop = True

    (tmp_path / "stopped").mkdir(exist_ok=True)
    run_training_loop(state, stopped.batches(state), [(1, stop_run)])
    resumed, state = create_session("dinov3", tmp_path / "stopped", views=VIEWS)
    resumed.restore(state)
    assert state.step == stop
    run_training_loop(state, resumed.batches(state), [])
    actual = collect_tensors(state)
    assert any(name.startswith("gram_teacher.") for name in expected["frozen"])
    assert expected.keys() == actual.keys()
    for section, tensors in expected.items():
        assert all(torch.equal(tensor, actual[section][name]) for name, tensor in tensors.items()), section


def test_anchor_views_are_the_global_crops_without_changes_of_colour():
    """An image of a linear gradient: crops, and their mirroring, can be compared at every pixel."""
    row, column = np.mgrid[:64, :64]
    pixels = np.stack([2 * row, 2 * column, row + column + 60], -1).astype(np.uint8)
    preprocess = ImagePreprocess((16, 16))
    crops = MultiCrop(locals=1, local_image=(8, 8), jitter_probability=0.0, grey=0.0, anchor_scale=2.0)
    crops = replace(crops, blur=(0.0, 0.0, 0.0), solarise=(0.0, 0.0, 0.0))
    views = crops.draw_views(Image.fromarray(pixels), (16, 16), 11)
    assert [tuple(view.shape) for view in views] == [(3, 16, 16)] * 2 + [(3, 8, 8)] + [(3, 32, 32)] * 2
    batch = crops.unpack_batch(torch.cat([view.flatten() for view in views])[None], preprocess)
    assert torch.equal(batch["anchors"][0, 1], views[4]) and torch.equal(batch["local"][0, 0], views[2])
    cached = torch.from_numpy(pixels[:16, :16].transpose(2, 0, 1).copy())[None]
    cached_batch = crops.unpack_batch(crops.augment_batch(cached, np.array([7], np.uint64)), preprocess)
    for views in (batch, cached_batch):
        shrunk = F.avg_pool2d(views["anchors"][0].float(), 2)
        assert (shrunk - views["images"][0].float())[:, :, 2:-2, 2:-2].abs().max() < 3
    coloured = replace(crops, jitter_probability=1.0, grey=1.0, solarise=(1.0, 1.0, 1.0), blur=(1.0, 1.0, 1.0))
    coloured_views = coloured.draw_views(Image.fromarray(pixels), (16, 16), 11)
    assert torch.equal(coloured_views[3], batch["anchors"][0, 0])
    assert not torch.equal(coloured_views[0], batch["images"][0, 0])


def test_without_anchor_views_the_other_views_are_unchanged():
    pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    keys = np.arange(3, dtype=np.uint64)
    plain, anchored = (replace(VIEWS, anchor_scale=scale).augment_batch(pixels, keys) for scale in (0.0, 1.5))
    assert torch.equal(plain, anchored[:, : plain.shape[1]])
    assert anchored.shape[1] - plain.shape[1] == 2 * 3 * 24 * 24


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"gram_weight": -1.0}, "must be at least 0"),
        ({"local_weight": -0.5}, "must be at least 0"),
        ({"gram_start": 1.0}, "shares of the run"),
        ({"gram_refresh": 1.5}, "shares of the run"),
    ],
)
def test_invalid_options_are_rejected(settings, text):
    with pytest.raises(UsageError, match=text):
        DINOv3Config(**settings)


def test_anchor_views_must_be_divisible_by_the_patch():
    config = DINOv3Config(gram_weight=1.0)
    views = MultiCrop(locals=0, anchor_scale=1.4)
    with pytest.raises(UsageError, match="anchor views, 45, is not divisible by patch size 8") as error:
        config.check(SMALL_CONFIG, (), views)
    scale = float(re.findall(r"\d+\.\d+", error.value.hint)[0])
    config.check(SMALL_CONFIG, (), replace(views, anchor_scale=scale))
    with pytest.raises(UsageError, match="below 0"):
        MultiCrop(anchor_scale=-1.0)
