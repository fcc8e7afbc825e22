"""Heads of frozen features: all candidates of a grid are trained at once, each as if it were trained alone."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from vitreous.evaluation.head_grid import (
    MIN_STEPS,
    AttentiveHeads,
    Candidate,
    HeadSchedule,
    LinearHeads,
    build_grid,
    compute_candidate_gradients,
    compute_candidate_losses,
    compute_head_logits,
    train_candidate_heads,
)

GRID = build_grid((1e-3, 1e-2), (0.0, 3.0))
ROWS = np.arange(40)


def make_features(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw)


def make_heads(kind, candidates):
    """Heads whose moments are not those of a standard normal distribution."""
    mean, std = torch.linspace(-1, 1, 6), torch.linspace(0.5, 2, 6)
    if kind == "linear":
        return LinearHeads(mean, std, candidates, 3), make_features(40, 6)
    return AttentiveHeads(mean, std, candidates, 3, queries=2, seed=1), make_features(40, 5, 6)


def make_labels(form):
    labels = torch.arange(40) % 3
    if form == "classes":
        return labels
    if form == "several":
        return torch.stack([labels == 0, labels > 0, torch.arange(40) % 2 == 0], 1)
    return torch.softmax(make_features(40, 3, seed=5), 1).half()


@pytest.mark.parametrize("form", ["classes", "several", "shares"])
@pytest.mark.parametrize("kind", ["linear", "attentive"])
def test_a_grid_equals_training_each_candidate_alone(kind, form):
    labels, schedule = make_labels(form), HeadSchedule(12, 16, seed=3)
    heads, features = make_heads(kind, len(GRID))

    def load(rows):
        return features[torch.from_numpy(rows)]

    train_candidate_heads(heads, GRID, load, labels, rows=ROWS, schedule=schedule)
    logits = compute_head_logits(heads, load, ROWS)
    assert logits.shape == (40, 4, 3)
    for index, candidate in enumerate(GRID):
        alone, _ = make_heads(kind, 1)
        train_candidate_heads(alone, (candidate,), load, labels, rows=ROWS, schedule=schedule)
        for together, single in zip(heads.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(together[index], single[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(logits[:, index], compute_head_logits(alone, load, ROWS)[:, 0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits[:, 0], logits[:, 1]) and not torch.allclose(logits[:, 0], logits[:, 2])


@pytest.mark.parametrize("kind", ["linear", "attentive"])
def test_training_equals_adamw_with_a_cosine_schedule(kind):
    """Against `torch.optim.AdamW` and its schedule, on the same batches."""
    heads, features = make_heads(kind, 1)
    heads.weight.data.normal_(generator=torch.Generator().manual_seed(6))
    reference = copy.deepcopy(heads)
    labels, schedule, candidate = make_labels("classes"), HeadSchedule(10, 8, seed=4), Candidate(0.01, 0.5)
    train_candidate_heads(
        heads, (candidate,), lambda rows: features[torch.from_numpy(rows)], labels, rows=ROWS, schedule=schedule
    )
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for batch in schedule.iterate_batches(ROWS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(reference(features[batch])[:, 0], labels[batch]).backward()
        optimizer.step()
        cosine.step()
    for parameter, expected in zip(heads.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-6)


def test_standardisation_is_folded_into_the_weights():
    heads, features = make_heads("linear", 2)
    heads.weight.data.normal_()
    heads.bias.data.normal_()
    for index in range(2):
        weight, bias = heads.fold_standardisation(index)
        torch.testing.assert_close(features @ weight.T + bias, heads(features)[:, index].detach(), rtol=1e-4, atol=1e-5)


def test_attention_is_that_of_standardised_tokens():
    heads, tokens = make_heads("attentive", 1)
    heads.queries.data.mul_(40)
    heads.weight.data.normal_()
    mean, std = torch.linspace(-1, 1, 6), torch.linspace(0.5, 2, 6)
    z = (tokens - mean) / std
    pooled = [((z @ query / 6**0.5).softmax(1)[..., None] * z).sum(1) for query in heads.queries.detach()[0]]
    expected = torch.cat(pooled, 1) @ heads.weight.detach()[0].T + heads.bias.detach()[0]
    torch.testing.assert_close(heads(tokens)[:, 0].detach(), expected, rtol=1e-4, atol=1e-5)


def test_chunks_do_not_change_the_gradient():
    heads, tokens = make_heads("attentive", 2)
    heads.weight.data.normal_()
    labels = make_labels("classes")
    whole, parts = copy.deepcopy(heads), heads
    whole.chunk, parts.chunk = 100, 7

    def load(rows):
        return tokens[torch.from_numpy(rows)]

    expected = compute_candidate_gradients(whole, load, labels, ROWS)
    for gradient, reference in zip(compute_candidate_gradients(parts, load, labels, ROWS), expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-6)
    losses = compute_candidate_losses(whole(tokens), labels)
    one = torch.nn.functional.cross_entropy(whole(tokens)[:, 1], labels)
    torch.testing.assert_close(losses[1], one)


def test_shares_of_patches_are_flattened():
    logits, shares = make_features(6, 2, 3), make_labels("shares")[:6]
    flat = compute_candidate_losses(logits, shares)
    torch.testing.assert_close(compute_candidate_losses(logits, shares.view(2, 3, 3)), flat)
    hard = torch.eye(3)[torch.arange(6) % 3]
    torch.testing.assert_close(
        compute_candidate_losses(logits, hard), compute_candidate_losses(logits, torch.arange(6) % 3)
    )


def test_attention_finds_the_informative_patch():
    """Only one of eight patches has the class, at a random position; its mean is the same for all classes."""
    draw = np.random.default_rng(0)
    tokens, labels = torch.randn(600, 8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(600) % 3
    positions = torch.from_numpy(draw.integers(0, 8, 600))
    tokens[torch.arange(600), positions] = 4 * torch.eye(3, 6)[labels] + 4 * torch.tensor([0.0, 0, 0, 1, 1, 1])
    mean = LinearHeads(torch.zeros(6), torch.ones(6), 1, 3)
    attentive = AttentiveHeads(torch.zeros(6), torch.ones(6), 1, 3)
    accuracies = []
    for heads, load in (
        (mean, lambda rows: tokens[torch.from_numpy(rows)].mean(1)),
        (attentive, lambda rows: tokens[torch.from_numpy(rows)]),
    ):
        schedule = HeadSchedule(200, 100)
        train_candidate_heads(heads, (Candidate(0.03, 0.0),), load, labels, rows=np.arange(400), schedule=schedule)
        predicted = compute_head_logits(heads, load, np.arange(400, 600))[:, 0].argmax(1)
        accuracies.append(float((predicted == labels[400:]).float().mean()))
    assert accuracies[1] > 0.97 and accuracies[1] > accuracies[0] + 0.05


def test_the_default_length_has_a_minimum_and_every_epoch_uses_each_image_once():
    assert HeadSchedule.plan(8000, epochs=None, steps=None, seed=0) == HeadSchedule(313, 256)
    assert HeadSchedule.plan(20, epochs=None, steps=None, seed=0) == HeadSchedule(MIN_STEPS, 20)
    assert HeadSchedule.plan(8000, epochs=None, steps=None, seed=0, max_batch=16, max_steps=1000).steps == 1000
    assert HeadSchedule.plan(8000, epochs=2, steps=None, seed=0).steps == 63
    assert HeadSchedule.plan(8000, epochs=None, steps=7, seed=0).steps == 7
    batches = list(HeadSchedule(6, 20, seed=1).iterate_batches(ROWS))
    for first in (0, 2, 4):
        assert sorted(np.concatenate(batches[first : first + 2])) == ROWS.tolist()
