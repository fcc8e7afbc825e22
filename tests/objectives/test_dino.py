"""DINO and DINOv2: losses match the loops in their docstrings, and invariants of the papers hold."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.views import MultiCrop
from vitreous.errors import UsageError
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress, gather_single_process, reduce_single_process
from vitreous.objectives.dino import (
    DINO,
    DINOConfig,
    compute_target_metrics,
    cross_view_entropy,
    detect_target_collapse,
)
from vitreous.objectives.dinov2 import DINOv2, DINOv2Config, masked_cross_entropy, masked_positions, sinkhorn_knopp
from vitreous.objectives.heads import DINOHead, HeadOptions, SyncBatchNormFunction, compute_prototype_logits
from vitreous.objectives.unlabelled import koleo_loss
from vitreous.recipes.registry import build_example_run

SMALL_CONFIG = ViTConfig(image=(32, 32), patch=(8, 8), classes=0, width=32, depth=2, heads=2, mlp=MlpConfig(hidden=64))
HEAD_OPTIONS = {"prototypes": 24, "head_width": 32, "bottleneck": 16}
VIEWS = MultiCrop(locals=3, local_image=(16, 16))
TRAINING_PROGRESS = TrainingProgress(0, 0, 100, {"teacher_temperature": 0.05, "momentum": 0.9})


def build_objective(objective_class=DINO, config=None, model=SMALL_CONFIG, **settings):
    """Return an objective on a small model, in training mode."""
    torch.manual_seed(0)
    config = config or {DINO: DINOConfig, DINOv2: DINOv2Config}[objective_class](**HEAD_OPTIONS, **settings)
    return objective_class(build_model(model), config, ObjectiveSetting(views=VIEWS)).train()


def make_view_batch(objective, images=4):
    """Return a prepared batch of random views."""
    generator = torch.Generator().manual_seed(1)
    batch = {
        "images": torch.randn(images, 2, 3, 32, 32, generator=generator),
        "local": torch.randn(images, 3, 3, 16, 16, generator=generator),
        "positions": torch.arange(images),
        "samples": torch.arange(images),
    }
    return objective.prepare(batch, TRAINING_PROGRESS)


def test_cross_view_entropy_averages_pairs_of_different_views():
    targets, logits = torch.randn(5, 2, 7).softmax(-1), torch.randn(5, 10, 7) * 3
    pairs = [
        -(targets[:, i] * logits[:, v].log_softmax(-1)).sum(-1).mean() for i in range(2) for v in range(10) if v != i
    ]
    assert len(pairs) == 18
    assert cross_view_entropy(targets, logits).item() == pytest.approx(torch.stack(pairs).mean().item(), rel=1e-6)


def test_uniform_outputs_have_the_loss_ln_k():
    targets, logits = torch.full((3, 2, 64), 1 / 64), torch.zeros(3, 5, 64)
    assert cross_view_entropy(targets, logits).item() == pytest.approx(math.log(64), rel=1e-6)


@pytest.mark.parametrize(("width", "count"), [(384, 22_352_128), (768, 23_138_560)])
def test_heads_have_the_published_parameters(width, count):
    with torch.device("meta"):
        head = DINOHead(width, HeadOptions())
    lengths = 65536  # the authors' code has trainable lengths in its parameter count, but fixes them to one
    assert sum(p.numel() for p in head.parameters()) + lengths == count


def test_prototype_lengths_are_trainable_without_unit_prototypes():
    head, x = DINOHead(32, HeadOptions(**HEAD_OPTIONS, unit_prototypes=False)), torch.randn(3, 32)
    before = head(x)
    head.lengths.data.mul_(2)
    assert torch.allclose(head(x), 2 * before)


@pytest.mark.parametrize(
    ("width", "bottleneck", "count"),
    [(1024, 384, 57_545_088), (1024, 256, 40_505_600), (1536, 384, 58_593_664), (1536, 256, 41_554_176)],
)
def test_dinov2_head_parameter_counts_match_the_published_ones(width, bottleneck, count):
    with torch.device("meta"):
        head = DINOHead(width, HeadOptions(131072, bottleneck=bottleneck, unit_prototypes=False))
    assert sum(p.numel() for p in head.parameters()) == count


def test_head_outputs_cosine_similarity_to_prototypes():
    head, x = DINOHead(32, HeadOptions(**HEAD_OPTIONS)), torch.randn(3, 32)
    hidden = x
    for number, layer in enumerate(head.mlp):
        hidden = layer(F.gelu(hidden) if number else hidden)
    expected = F.cosine_similarity(hidden[:, None], head.prototypes.weight[None], dim=-1)
    assert torch.allclose(head(x), expected, atol=1e-6)


def test_centre_is_updated_only_after_the_step():
    objective = build_objective()
    batch = make_view_batch(objective)
    before = objective(batch)["loss"]
    assert objective.centre.abs().max() == 0
    teacher_outputs = objective.compute_teacher_outputs(batch["images"])
    objective.after_step(TRAINING_PROGRESS)
    assert torch.allclose(objective.centre, 0.1 * teacher_outputs.mean((0, 1)), atol=1e-6)
    assert objective.outputs.abs().max() == 0 and objective(batch)["loss"] != before


def test_teacher_is_a_momentum_average_without_gradients():
    objective = build_objective(model=SMALL_CONFIG.with_options(regularization={"drop_path": 0.5}))
    objective(make_view_batch(objective))["loss"].backward()
    assert all(p.grad is None and not p.requires_grad for p in objective.teacher.parameters())
    assert not objective.teacher.training and objective.model.training
    shifted_state = {name: p + 1 for name, p in objective.model.state_dict().items()}
    objective.model.load_state_dict(shifted_state)
    before = {name: p.clone() for name, p in objective.teacher.state_dict().items()}
    objective.after_step(TRAINING_PROGRESS)
    for name, p in objective.teacher.state_dict().items():
        assert torch.allclose(p, 0.9 * before[name] + 0.1 * shifted_state[name], atol=1e-6)
    objective.after_step(TRAINING_PROGRESS._replace(values={"momentum": 1.0}))


def test_momentum_of_one_keeps_the_teacher():
    objective = build_objective()
    objective.model.load_state_dict({name: p + 1 for name, p in objective.model.state_dict().items()})
    before = {name: p.clone() for name, p in objective.teacher.state_dict().items()}
    objective(make_view_batch(objective))
    objective.after_step(TRAINING_PROGRESS._replace(values={"momentum": 1.0}))
    assert all(torch.equal(p, before[name]) for name, p in objective.teacher.state_dict().items())


def test_local_views_contribute_to_the_loss():
    objective = build_objective()
    batch = make_view_batch(objective)
    with_locals = objective(batch)["loss"]
    assert objective({**batch, "local": batch["local"] + 1})["loss"] != with_locals
    assert torch.isfinite(objective({**batch, "local": batch["local"][:, :0]})["loss"])


def test_koleo_loss_is_added_with_its_weight():
    without_koleo, with_koleo = (build_objective(koleo=weight) for weight in (0.0, 0.3))
    with_koleo.load_state_dict(without_koleo.state_dict())
    batch = make_view_batch(without_koleo)
    features = without_koleo.model(batch["images"].flatten(0, 1)).unflatten(0, batch["images"].shape[:2])
    expected = without_koleo(batch)["loss"] + 0.3 * sum(
        koleo_loss(view, gather_single_process) for view in features.unbind(1)
    )
    assert with_koleo(with_koleo.prepare(batch, TRAINING_PROGRESS))["loss"].item() == pytest.approx(
        expected.item(), rel=1e-5
    )
    assert DINOConfig().koleo == 0.0  # default of the authors' code


@pytest.mark.parametrize(("objective_class", "update"), [(DINO, "skip"), (DINOv2, "zero-lr")])
def test_prototypes_are_frozen_only_at_the_start(objective_class, update):
    objective = build_objective(objective_class)
    names = objective.frozen_at_start()
    assert "head.prototypes.weight" in names and set(names) <= set(dict(objective.named_parameters()))
    assert objective.frozen_update(TrainingProgress(0, 0, 1000)) == update
    assert objective.frozen_update(TrainingProgress(10, 10, 1000)) is None


def test_masked_patch_loss_is_averaged_per_image():
    masks = torch.zeros(3, 8, dtype=torch.bool)
    masks[0, :2] = masks[2, 3:8] = True
    targets, logits = torch.randn(7, 5).softmax(-1), torch.randn(7, 5)
    terms = -(targets * logits.log_softmax(-1)).sum(-1)
    expected = (terms[:2].mean() + terms[2:].mean()) / 3
    assert masked_cross_entropy(targets, logits, masks).item() == pytest.approx(expected.item(), rel=1e-6)
    assert masked_cross_entropy(targets[:0], logits[:0], masks & False) == 0


def test_koleo_loss_matches_the_loop():
    features = torch.randn(6, 10)
    x = F.normalize(features, dim=-1)
    total = 0.0
    for i in range(6):
        nearest = max((float(x[i] @ x[j]), j) for j in range(6) if j != i)[1]
        total -= math.log(float((x[i] - x[nearest] + 1e-8).norm()) + 1e-8) / 6
    assert koleo_loss(features, gather_single_process).item() == pytest.approx(total, rel=1e-5)
    assert koleo_loss(torch.eye(4), gather_single_process).item() == pytest.approx(-math.log(2) / 2, rel=1e-5)
    assert koleo_loss(torch.ones(3, 8), gather_single_process).item() == pytest.approx(17.08, abs=0.01)
    assert torch.isfinite(koleo_loss(torch.ones(3, 16, dtype=torch.float16), gather_single_process))


def test_koleo_loss_across_ranks_matches_the_whole_batch():
    batch = torch.randn(8, 5, requires_grad=True)
    loss = koleo_loss(batch, gather_single_process)
    (expected,) = torch.autograd.grad(loss, batch)
    weighted_losses = []
    for start in (0, 4):
        rows = F.normalize(batch.detach(), dim=-1)
        rank_features = batch[start : start + 4]
        rank_loss = koleo_loss(rank_features, lambda _, rows=rows, start=start: (rows, start))
        assert rank_loss.item() == pytest.approx(loss.item(), rel=1e-6)
        weighted_losses.append(rank_loss * 4 / 8)  # weighted like the loss of one process
    (gradient,) = torch.autograd.grad(sum(weighted_losses), batch)
    assert torch.allclose(gradient, expected, atol=1e-6)


def test_koleo_of_one_image_is_zero_and_batch_size_one_is_rejected():
    assert koleo_loss(torch.randn(1, 4), gather_single_process) == 0
    run = build_example_run("dinov2")
    with pytest.raises(UsageError, match="batch_size=2"):
        replace(run, batch_size=1)


def test_an_idle_batch_contributes_nothing():
    objective = build_objective()
    batch = make_view_batch(objective)
    objective.is_idle = True
    objective(batch)
    assert objective.outputs.abs().max() == 0
    assert koleo_loss(torch.randn(3, 4), gather_single_process, is_idle=True) == 0
    reduced_values = []
    sinkhorn_knopp(torch.randn(3, 5), lambda values: reduced_values.append(values) or values, is_idle=True)
    assert all(values.abs().max() == 0 for values in reduced_values)


def test_sinkhorn_matches_the_documented_loop():
    scores = torch.randn(9, 5) * 4
    q = scores.exp() / scores.exp().sum()
    for _ in range(3):
        q = q / q.sum(0) / 5
        q = q / q.sum(1, keepdim=True) / 9
    assert torch.allclose(sinkhorn_knopp(scores, reduce_single_process), q * 9, atol=1e-6)
    large = sinkhorn_knopp(scores * 300, reduce_single_process)
    assert torch.isfinite(large).all() and torch.allclose(large.sum(1), torch.ones(9), atol=1e-5)
    assert sinkhorn_knopp(scores[:0], reduce_single_process).shape == (0, 5)


def run_in_threads(count, work):
    """Return the results of `work(rank, reduce)` in `count` threads that simulate processes.

    `reduce` returns the mean of the values of all threads.
    """
    barrier, rank_values, outcome = threading.Barrier(count, timeout=20), [None] * count, [None] * count

    def run_rank(rank):
        def reduce(values):
            rank_values[rank] = values
            barrier.wait()
            mean = sum(rank_values) / count
            barrier.wait()
            return mean

        outcome[rank] = work(rank, reduce)

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return outcome


def test_sinkhorn_across_ranks_matches_the_whole_batch():
    scores = torch.randn(10, 6) * 3
    rank_scores = [scores[:3], scores[3:]]
    outcome = run_in_threads(2, lambda rank, reduce: sinkhorn_knopp(rank_scores[rank], reduce))
    assert torch.allclose(torch.cat(outcome), sinkhorn_knopp(scores, reduce_single_process), atol=1e-6)


def test_sync_batch_norm_matches_the_whole_batch():
    """Values and gradients match torch's SyncBatchNorm; rows of an idle process do not count and get no gradient."""
    torch.manual_seed(0)
    x, output_gradient = torch.randn(10, 6) * 3 + 5, torch.randn(10, 6)

    def run_rank(norm, a, b):
        rows = x[a:b].clone().requires_grad_()
        y = norm(rows)
        y.backward(output_gradient[a:b])
        return y.detach(), rows.grad

    full_batch = run_rank(lambda rows: F.batch_norm(rows, None, None, training=True), 0, 10)
    ends = [(0, 3, False), (3, 10, False), (2, 5, True)]
    rank_results = run_in_threads(
        3, lambda n, reduce: run_rank(lambda r: SyncBatchNormFunction.apply(r, reduce, ends[n][2]), *ends[n][:2])
    )
    for number in range(2):
        assert torch.allclose(torch.cat([result[number] for result in rank_results[:2]]), full_batch[number], atol=1e-6)
    assert rank_results[2][1].abs().max() == 0
    assert torch.isfinite(SyncBatchNormFunction.apply(torch.randn(0, 6), reduce_single_process, False)).all()


@pytest.mark.parametrize("objective_class", [DINO, DINOv2])
def test_head_batch_norm_removes_constant_offsets(objective_class):
    """Views of each size are normalised separately; without the norm, offsets remain."""
    for batch_norm in (True, False):
        objective = build_objective(objective_class, batch_norm=batch_norm)
        assert objective.teacher_head.batch_norm is batch_norm
        views = [torch.randn(8, 32), torch.randn(12, 32)]
        prototype_logits = compute_prototype_logits(objective.head, views, 4, reduce_single_process, False)
        shifted_logits = compute_prototype_logits(
            objective.head, [views[0] + 3, views[1] - 5], 4, reduce_single_process, False
        )
        assert prototype_logits.shape == (4, 5, 24)
        assert torch.allclose(prototype_logits, shifted_logits, atol=1e-4) is batch_norm


@pytest.mark.parametrize("centring", ["moving", "sinkhorn"])
@pytest.mark.parametrize("patch_prototypes", [0, 12])
def test_every_dinov2_parameter_gets_a_gradient(centring, patch_prototypes):
    objective = build_objective(DINOv2, centring=centring, patch_prototypes=patch_prototypes)
    outputs = objective(make_view_batch(objective))
    outputs["loss"].backward()
    assert {name for name, p in objective.named_parameters() if p.requires_grad and p.grad is None} == set()
    expected = outputs["dino"] + outputs["ibot"] + 0.1 * outputs["koleo"]
    assert outputs["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    objective.after_step(TRAINING_PROGRESS)
    assert (objective.centre.abs().max() > 0) == (centring == "moving")


def test_masked_patches_are_replaced_by_the_mask_token():
    objective = build_objective(DINOv2)
    objective.mask_token.data.normal_()
    images, masks = torch.randn(2, 3, 32, 32), torch.zeros(2, 16, dtype=torch.bool)
    masks[0, 5] = True
    features, patches = objective.encode(images, masks)
    assert patches.shape == (1, 32)
    images[0, :, 8:16, 8:16] = 9.0  # inside the masked patch
    masked_features, _ = objective.encode(images, masks)
    assert torch.allclose(features, masked_features, atol=1e-6)
    assert torch.allclose(objective.encode(images, masks & False)[0], objective.model(images), atol=1e-5)


def test_half_of_the_views_are_masked():
    objective = build_objective(DINOv2)
    masks = make_view_batch(objective, 64)["masks"].flatten(2)
    happened = masks.any(-1).float().mean().item()
    assert 0.3 < happened < 0.7 and masks.float().mean(-1).max() <= 0.5


@pytest.mark.parametrize(
    ("config", "views", "text"),
    [
        (DINOConfig(), Augment(), "requires views of type multicrop"),
        (DINOConfig(), MultiCrop(local_image=(20, 20)), "20"),
        (DINOv2Config(), Augment(), "requires views of type multicrop"),
    ],
)
def test_unsupported_models_and_views_are_rejected(config, views, text):
    with pytest.raises(UsageError, match=text):
        config.check(SMALL_CONFIG, (), views)


def test_conv_stem_does_not_leak_masked_pixels():
    config = config_from_name("Conv+ViT-128x4/8", 32).with_options(classes=0, width=32, heads=4, mlp={"hidden": 64})
    objective = DINOv2Config(prototypes=16, head_width=16, bottleneck=8).build(build_model(config), ObjectiveSetting())
    images = torch.randn(2, 3, 32, 32, requires_grad=True)
    masks = torch.zeros(2, 16, dtype=torch.bool)
    masks[0, 5:7] = True
    class_features, patches = objective.encode(images, masks)
    (class_features.square().sum() + patches.square().sum()).backward()
    is_used = images.grad.abs().amax(1).unflatten(1, (4, 8)).unflatten(3, (4, 8)).amax((2, 4)).flatten(1) > 0
    assert torch.equal(is_used, ~masks)


def test_resnets_are_supported_by_dino_but_not_dinov2():
    resnet = config_from_name("BiT-R50x1")
    DINOConfig().check(resnet, (), MultiCrop())
    with pytest.raises(UsageError, match="plain ViT"):
        DINOv2Config().check(resnet, (), MultiCrop())


@pytest.mark.parametrize(
    "settings",
    [{"prototypes": 0}, {"temperature": 0}, {"centre_momentum": 2}, {"koleo": -1}, {"mask_shares": (0.5, 0.1)}],
)
def test_invalid_hyperparameters_are_rejected(settings):
    with pytest.raises(UsageError):
        DINOv2Config(**settings)
    if "mask_shares" not in settings:
        with pytest.raises(UsageError):
            DINOConfig(**settings)


def test_target_collapse_is_detected():
    later = TrainingProgress(10, 10, 100)
    same_prototype = torch.zeros(8, 16)
    same_prototype[:, 3] = 1
    features = torch.randn(8, 4)
    for targets, name in ((same_prototype, "one prototype"), (torch.full((8, 16), 1 / 16), "uniform teacher")):
        scalars = {key: value.item() for key, value in compute_target_metrics(targets, features).items()}
        assert [warning_name for warning_name, _ in detect_target_collapse(scalars, 16, later)] == [name]
        assert not list(detect_target_collapse(scalars, 16, TrainingProgress(1, 1, 100)))
    healthy = {key: value.item() for key, value in compute_target_metrics(torch.eye(8, 16), features).items()}
    assert healthy["teacher_entropy"] == pytest.approx(0, abs=1e-6)
    assert healthy["prototype_entropy"] == pytest.approx(math.log(8), rel=1e-5)
    assert not list(detect_target_collapse(healthy, 16, later))
    assert compute_target_metrics(same_prototype, torch.ones(8, 4))["feature_std"] == 0


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_masked_positions_match_nonzero(share):
    masks = torch.rand(5, 16, generator=torch.Generator().manual_seed(0)) < share
    expected = masks.flatten().nonzero()[:, 0]
    assert torch.equal(masked_positions(masks, len(expected)), expected)
