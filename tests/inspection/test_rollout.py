"""Rollout matches loops and the specification's values, and highlights relevant patches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.inspection.small_models import (
    MODEL_KINDS,
    SmallChunkAttentionCall,
    draw_probabilities,
    make_attention_call,
    make_images,
    make_model,
)
from vitreous.errors import UsageError
from vitreous.inspection.attention import compute_attention_maps
from vitreous.inspection.rollout import (
    RolloutOptions,
    collect_attention_calls,
    compute_rollout,
    compute_rollout_matrix,
    compute_rollout_rows,
)
from vitreous.models.zoo import create_untrained_model

FIRST_BLOCK_ATTENTION = [[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]
SECOND_BLOCK_ATTENTION = [[0.4, 0.3, 0.3], [0.3, 0.5, 0.2], [0.1, 0.1, 0.8]]
#: one example of every kind of mixing
ROLLOUT_OPTIONS = [
    RolloutOptions(*one) for one in itertools.product((0.0, 0.3, 0.5), ("mean", "max", "min"), (0.0, 0.4, 0.95))
]


def compute_rollout_by_loop(maps, mixing):
    """(L, h, T, T) -> (T, T): the definition for one image, in float64."""
    result = np.eye(maps.shape[-1])
    for heads in np.asarray(maps, dtype=np.float64):
        fused = {"mean": heads.mean(0), "max": heads.max(0), "min": heads.min(0)}[mixing.fusion]
        order = np.argsort(fused, axis=None)[: int(mixing.discard * fused.size)]
        fused.flat[order] = 0
        mixed = mixing.residual * np.eye(len(fused)) + (1 - mixing.residual) * fused
        for q in range(len(mixed)):
            if mixed[q].sum() == 0:
                mixed[q, q] = 1
            mixed[q] /= mixed[q].sum()
        result = mixed @ result
    return result


def test_rollout_of_two_blocks_matches_the_specification():
    expected = [[0.5475, 0.2375, 0.215], [0.16, 0.70375, 0.13625], [0.13, 0.14125, 0.72875]]
    calls = [
        make_attention_call(FIRST_BLOCK_ATTENTION, (2,), 1),
        make_attention_call(SECOND_BLOCK_ATTENTION, (2,), 1, layer=1),
    ]
    assert torch.allclose(compute_rollout_matrix(calls, RolloutOptions())[0], torch.tensor(expected), atol=1e-6)
    joint, single = compute_rollout_rows(calls, torch.tensor([1.0, 0, 0]), RolloutOptions())
    assert torch.allclose(joint[0, 1], torch.tensor(expected[0]), atol=1e-6)
    assert torch.allclose(joint[0, 0], torch.tensor([0.75, 0.125, 0.125])) and torch.equal(joint[:, 0], single[:, 0])
    assert torch.allclose(single[0, 1], torch.tensor([0.7, 0.15, 0.15]))


@pytest.mark.parametrize("mixing", ROLLOUT_OPTIONS, ids=lambda m: f"{m.residual}-{m.fusion}-{m.discard}")
def test_rollout_matrices_and_rows_match_the_loop_per_image(mixing):
    maps = draw_probabilities(2, 3, 4, 6, 6)  # images, blocks, heads
    calls = [make_attention_call(maps[:, layer], (5,), 1, layer) for layer in range(3)]
    expected = np.stack([compute_rollout_by_loop(image_maps, mixing) for image_maps in maps])
    matrix = compute_rollout_matrix(calls, mixing).numpy()
    assert np.allclose(matrix, expected, atol=1e-5) and np.allclose(matrix.sum(-1), 1, atol=1e-5) and matrix.min() >= 0
    start = torch.tensor([0.5, 0, 0.25, 0.25, 0, 0])
    joint, single = compute_rollout_rows(calls, start, mixing)
    for layer in range(3):
        through = np.stack(
            [start.numpy() @ compute_rollout_by_loop(image_maps[: layer + 1], mixing) for image_maps in maps]
        )
        alone = np.stack(
            [start.numpy() @ compute_rollout_by_loop(image_maps[layer : layer + 1], mixing) for image_maps in maps]
        )
        assert np.allclose(joint[:, layer], through, atol=1e-5) and np.allclose(single[:, layer], alone, atol=1e-5)
    few = [SmallChunkAttentionCall(**vars(call)) for call in calls]
    assert torch.allclose(compute_rollout_rows(few, start, mixing)[0], joint, atol=1e-6)
    assert np.allclose(compute_rollout_matrix(few, mixing), matrix, atol=1e-6)


@pytest.mark.parametrize(
    "mixing",
    [
        RolloutOptions(),
        RolloutOptions(0.0),
        RolloutOptions(1.0),
        RolloutOptions(0.2, "min", 0.9),
        RolloutOptions(0.0, "max", 0.5),
    ],
)
def test_identity_attention_gives_identity_rollout(mixing):
    calls = [make_attention_call(torch.eye(5).expand(2, 5, 5), (2, 2), 1, layer) for layer in range(3)]
    assert torch.equal(compute_rollout_matrix(calls, mixing)[0], torch.eye(5))


def test_equal_weights_are_not_discarded():
    even = [make_attention_call(torch.full((1, 4, 4), 0.25), (4,))]
    assert torch.equal(compute_rollout_matrix(even, RolloutOptions(0.0, discard=0.9))[0], torch.full((4, 4), 0.25))


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_rollout_of_every_model_kind_follows_its_pooling(kind):
    model, x = make_model(kind), make_images()
    prefix = model.config.prefix
    rollout, full_rollout = (
        compute_rollout(model, x),
        compute_rollout_matrix(collect_attention_calls(model, x), RolloutOptions()),
    )
    read = full_rollout[:, 0] if model.config.pool in ("class", "distilled") else full_rollout[:, prefix:].mean(1)
    assert torch.allclose(rollout.joint[:, -1], read, atol=1e-6)
    assert torch.allclose(rollout.joint.sum(-1), torch.ones(2, 2), atol=1e-5)
    assert rollout.maps.shape == rollout.single_maps.shape == (2, 2, 4, 5)
    assert torch.equal(rollout.maps[1, 1].flatten(), rollout.joint[1, 1, prefix:])
    expected = np.stack(
        [
            compute_rollout_by_loop(
                torch.stack([call.compute_weights()[image] for call in collect_attention_calls(model, x)]),
                RolloutOptions(),
            )
            for image in range(2)
        ]
    )
    assert np.allclose(full_rollout, expected, atol=1e-5)
    alone = compute_rollout(model, x[1:], RolloutOptions(0.5, "max", 0.5))
    assert torch.allclose(alone.joint, compute_rollout(model, x, RolloutOptions(0.5, "max", 0.5)).joint[1:], atol=1e-5)
    raw = compute_attention_maps(model, x, [1])[1]
    weights = collect_attention_calls(model, x)[1].compute_weights()
    wanted_raw = weights[:, :, 0] if model.config.pool in ("class", "distilled") else weights[:, :, prefix:].mean(2)
    assert torch.allclose(raw, wanted_raw, atol=1e-6) and torch.allclose(raw.sum(-1), torch.ones(2, 2), atol=1e-5)


def test_rollout_of_hybrids_at_other_image_sizes():
    hybrid = create_untrained_model("Conv+ViT-16x2/8", (16, 16), 3, heads=2).eval()
    rollout = compute_rollout(hybrid, make_images(1, (32, 16)))
    assert rollout.grid == (4, 2) and rollout.maps.shape == (1, 2, 4, 2)
    assert torch.allclose(rollout.joint.sum(-1), torch.ones(1, 2), atol=1e-5)


@pytest.mark.parametrize("wrong", [(-0.1,), (1.5,), (0.5, "median"), (0.5, "mean", 1.0), (0.5, "mean", -1)])
def test_invalid_rollout_options_are_rejected(wrong):
    with pytest.raises(UsageError) as refused:
        RolloutOptions(*wrong)
    assert refused.value.hint


@pytest.fixture(scope="module")
def trained_digits():
    """A ViT with a class token, trained on scikit-learn's digits for seconds, and 400 images not used for training."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.images).float()[:, None] / 8 - 1, torch.tensor(data.target)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    unseen, training = order[:400], order[400:]
    torch.manual_seed(0)
    model = create_untrained_model("ViT-32x2/2", 8, 10, channels=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, 300)
    for _ in range(300):
        batch = training[torch.randint(0, len(training), (64,), generator=generator)]
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval(), images[unseen], labels[unseen]


def test_removing_high_rollout_patches_hurts_accuracy_most(trained_digits):
    """25 % of the patches are replaced by the mean pixel: those of the largest rollout, those nearest to the centre,
    and random ones."""
    model, images, labels = trained_digits
    count, side = 16, 4

    def accuracy(score):
        mask = torch.ones(len(score), count).scatter(1, score.topk(count // 4, 1).indices, 0).view(-1, 1, side, side)
        mask = mask.repeat_interleave(2, 2).repeat_interleave(2, 3)
        with torch.no_grad():
            return (model(images * mask + images.mean() * (1 - mask)).argmax(1) == labels).float().mean().item()

    axis = torch.arange(side) - (side - 1) / 2
    gaussian = (-(axis[:, None] ** 2 + axis**2) / 2).exp().flatten().expand(len(labels), -1)
    pointed = accuracy(compute_rollout(model, images).maps[:, -1].flatten(1))
    chances = [
        accuracy(torch.rand(len(labels), count, generator=torch.Generator().manual_seed(seed))) for seed in range(5)
    ]
    assert (model(images).argmax(1) == labels).float().mean() > 0.75
    assert pointed < min(chances) - 0.1
    assert pointed < accuracy(gaussian) - 0.05
