"""What the losses are: the formulas, class by class, and that parts of a batch add up to the whole."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitreous.errors import UsageError
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.models.zoo import build_model
from vitreous.objectives.supervised import SupervisedConfig, SupervisedObjective, balanced_class_weights, cross_entropy

K = 4
WEIGHTS = (0.5, 1.0, 2.0, 0.0)


def by_hand(logits, targets, loss, smoothing, weights):
    """The sum over images and classes, one term after the other."""
    total = 0.0
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        log_z = math.log(sum(math.exp(s) for s in row))
        for s, y, w in zip(row, target, weights, strict=True):
            y = (float(y > 0) if loss == "binary" else y) * (1 - smoothing) + smoothing / K
            if loss == "softmax":
                total -= w * y * (s - log_z)
            else:
                total -= w * (y * -math.log1p(math.exp(-s)) + (1 - y) * -math.log1p(math.exp(s)))
    return total / len(logits) / (K if loss == "binary" else 1)


@pytest.fixture
def logits():
    return 3 * torch.randn(6, K, generator=torch.Generator().manual_seed(0))


TARGETS = {
    "numbers": torch.tensor([0, 1, 2, 3, 2, 0]),
    "mixed": torch.tensor(
        [[0.3, 0.7, 0, 0], [1, 0, 0, 0], [0, 0.5, 0, 0.5], [0, 0, 1, 0], [0.9, 0, 0.1, 0], [0, 0, 0, 1]]
    ),
    "several": torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 1]]),
}


@pytest.mark.parametrize("loss", ["softmax", "sigmoid", "binary"])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_every_loss_is_its_formula(logits, loss, targets, smoothing, weights):
    labels = TARGETS[targets]
    full = F.one_hot(labels, K).float() if labels.ndim == 1 else labels
    found = cross_entropy(logits, labels, loss, smoothing, None if weights is None else torch.tensor(weights))
    assert float(found) == pytest.approx(by_hand(logits, full, loss, smoothing, weights or (1.0,) * K), rel=1e-5)


def test_the_binary_loss_is_torchs_mean_and_a_mixed_pair_is_two_positives(logits):
    labels = TARGETS["mixed"]
    expected = nn.BCEWithLogitsLoss()(logits, labels.gt(0).float())
    assert torch.allclose(cross_entropy(logits, labels, "binary"), expected)
    assert not torch.allclose(cross_entropy(logits, labels, "sigmoid") / K, expected)


def test_the_plain_loss_is_torchs_bit_for_bit(logits):
    labels = TARGETS["numbers"]
    assert torch.equal(
        cross_entropy(logits, labels, smoothing=0.1), F.cross_entropy(logits, labels, label_smoothing=0.1)
    )


def supervised(loss, weights=WEIGHTS, **options):
    torch.manual_seed(0)
    model = build_model(
        ViTConfig(image=(16, 16), patch=(8, 8), classes=K, width=16, depth=1, heads=2, mlp=MlpConfig(hidden=32))
    )
    nn.init.normal_(model.head.weight)
    return SupervisedObjective(model, SupervisedConfig(smoothing=0.1, loss=loss, class_weights=weights, **options))


@pytest.mark.parametrize("loss", ["softmax", "sigmoid", "binary"])
@pytest.mark.parametrize("targets", TARGETS)
def test_gradients_of_uneven_parts_add_up(loss, targets):
    """Weights of classes do not change what a part weighs: its images, whatever classes they have."""
    torch.manual_seed(0)
    images, labels = torch.randn(6, 3, 16, 16), TARGETS[targets]
    found = []
    for ends in ((0, 6), (0, 1, 3, 6)):
        objective = supervised(loss).eval()
        for start, stop in pairwise(ends):
            part = objective({"images": images[start:stop], "labels": labels[start:stop]})["loss"]
            (part * (stop - start) / 6).backward()
        found.append(torch.cat([p.grad.flatten() for p in objective.parameters()]))
    assert found[0].norm() > 0.01
    assert (found[0] - found[1]).norm() < 1e-5 * found[0].norm()


def test_a_class_of_weight_zero_teaches_nothing_with_the_sigmoid_loss():
    objective = supervised("sigmoid", (1.0, 1.0, 1.0, 0.0))
    objective({"images": torch.randn(6, 3, 16, 16), "labels": TARGETS["several"]})["loss"].backward()
    assert (objective.model.head.weight.grad[3] == 0).all() and (objective.model.head.weight.grad[:3] != 0).any()


def test_class_weights_are_no_part_of_the_checkpoint():
    assert set(supervised("softmax").state_dict()) == set(supervised("softmax", ()).state_dict())


@pytest.mark.parametrize("labels", [TARGETS["numbers"], TARGETS["several"]])
def test_balanced_weights_even_the_classes_out_and_are_one_on_average(labels):
    weights = np.array(balanced_class_weights(labels.numpy(), K))
    counts = (F.one_hot(labels, K) if labels.ndim == 1 else labels).sum(0).numpy()
    assert np.allclose(weights * counts, (weights * counts)[0])
    assert (weights * counts).sum() == pytest.approx(counts.sum())


def test_a_class_without_images_weighs_one():
    assert balanced_class_weights(np.array([0, 0, 2]), 4) == pytest.approx((0.75, 1.0, 1.5, 1.0))


@pytest.mark.parametrize(
    "loss,weights,message", [("hinge", (), "unknown loss hinge"), ("softmax", (1.0, 2.0), "2 class weights for 4")]
)
def test_what_does_not_fit_is_refused(loss, weights, message):
    with pytest.raises(UsageError, match=message):
        supervised(loss, weights)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_weights_that_are_none_are_refused(weight):
    with pytest.raises(UsageError, match="finite"):
        supervised("sigmoid", (1.0, 1.0, 1.0, weight))
