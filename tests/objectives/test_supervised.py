"""Classification losses match their formulas, and micro-batch losses add up to the batch loss."""

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

NUM_CLASSES = 4
CLASS_WEIGHTS = (0.5, 1.0, 2.0, 0.0)


def cross_entropy_by_loop(logits, targets, loss, smoothing, weights):
    """Return the sum over images and classes, term by term."""
    total = 0.0
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        log_z = math.log(sum(math.exp(s) for s in row))
        for s, y, w in zip(row, target, weights, strict=True):
            y = (float(y > 0) if loss == "binary" else y) * (1 - smoothing) + smoothing / NUM_CLASSES
            if loss == "softmax":
                total -= w * y * (s - log_z)
            else:
                total -= w * (y * -math.log1p(math.exp(-s)) + (1 - y) * -math.log1p(math.exp(s)))
    return total / len(logits) / (NUM_CLASSES if loss == "binary" else 1)


@pytest.fixture
def logits():
    return 3 * torch.randn(6, NUM_CLASSES, generator=torch.Generator().manual_seed(0))


LABEL_KINDS = {
    "numbers": torch.tensor([0, 1, 2, 3, 2, 0]),
    "mixed": torch.tensor(
        [[0.3, 0.7, 0, 0], [1, 0, 0, 0], [0, 0.5, 0, 0.5], [0, 0, 1, 0], [0.9, 0, 0.1, 0], [0, 0, 0, 1]]
    ),
    "several": torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 1]]),
}


@pytest.mark.parametrize("loss", ["softmax", "sigmoid", "binary"])
@pytest.mark.parametrize("targets", LABEL_KINDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, CLASS_WEIGHTS])
def test_losses_match_their_formulas(logits, loss, targets, smoothing, weights):
    labels = LABEL_KINDS[targets]
    full = F.one_hot(labels, NUM_CLASSES).float() if labels.ndim == 1 else labels
    computed = cross_entropy(logits, labels, loss, smoothing, None if weights is None else torch.tensor(weights))
    assert float(computed) == pytest.approx(
        cross_entropy_by_loop(logits, full, loss, smoothing, weights or (1.0,) * NUM_CLASSES), rel=1e-5
    )


def test_the_binary_loss_is_torchs_mean_and_a_mixed_pair_is_two_positives(logits):
    labels = LABEL_KINDS["mixed"]
    expected = nn.BCEWithLogitsLoss()(logits, labels.gt(0).float())
    assert torch.allclose(cross_entropy(logits, labels, "binary"), expected)
    assert not torch.allclose(cross_entropy(logits, labels, "sigmoid") / NUM_CLASSES, expected)


def test_softmax_loss_is_bit_identical_to_pytorch(logits):
    labels = LABEL_KINDS["numbers"]
    assert torch.equal(
        cross_entropy(logits, labels, smoothing=0.1), F.cross_entropy(logits, labels, label_smoothing=0.1)
    )


def build_objective(loss, weights=CLASS_WEIGHTS, **options):
    torch.manual_seed(0)
    model = build_model(
        ViTConfig(
            image=(16, 16), patch=(8, 8), classes=NUM_CLASSES, width=16, depth=1, heads=2, mlp=MlpConfig(hidden=32)
        )
    )
    nn.init.normal_(model.head.weight)
    return SupervisedObjective(model, SupervisedConfig(smoothing=0.1, loss=loss, class_weights=weights, **options))


@pytest.mark.parametrize("loss", ["softmax", "sigmoid", "binary"])
@pytest.mark.parametrize("targets", LABEL_KINDS)
def test_gradients_of_uneven_micro_batches_add_up(loss, targets):
    """Micro-batches are weighted by their number of images, regardless of class weights."""
    torch.manual_seed(0)
    images, labels = torch.randn(6, 3, 16, 16), LABEL_KINDS[targets]
    gradients = []
    for ends in ((0, 6), (0, 1, 3, 6)):
        objective = build_objective(loss).eval()
        for start, stop in pairwise(ends):
            micro_loss = objective({"images": images[start:stop], "labels": labels[start:stop]})["loss"]
            (micro_loss * (stop - start) / 6).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in objective.parameters()]))
    assert gradients[0].norm() > 0.01
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


def test_zero_class_weight_gives_zero_gradient_with_sigmoid_loss():
    objective = build_objective("sigmoid", (1.0, 1.0, 1.0, 0.0))
    objective({"images": torch.randn(6, 3, 16, 16), "labels": LABEL_KINDS["several"]})["loss"].backward()
    assert (objective.model.head.weight.grad[3] == 0).all() and (objective.model.head.weight.grad[:3] != 0).any()


def test_class_weights_are_not_in_the_state_dict():
    assert set(build_objective("softmax").state_dict()) == set(build_objective("softmax", ()).state_dict())


@pytest.mark.parametrize("labels", [LABEL_KINDS["numbers"], LABEL_KINDS["several"]])
def test_balanced_class_weights_equalise_classes_and_average_one(labels):
    weights = np.array(balanced_class_weights(labels.numpy(), NUM_CLASSES))
    counts = (F.one_hot(labels, NUM_CLASSES) if labels.ndim == 1 else labels).sum(0).numpy()
    assert np.allclose(weights * counts, (weights * counts)[0])
    assert (weights * counts).sum() == pytest.approx(counts.sum())


def test_class_without_images_has_weight_one():
    assert balanced_class_weights(np.array([0, 0, 2]), 4) == pytest.approx((0.75, 1.0, 1.5, 1.0))


@pytest.mark.parametrize(
    "loss,weights,message",
    [("hinge", (), "unknown loss hinge"), ("softmax", (1.0, 2.0), "class_weights has 2 numbers for 4")],
)
def test_invalid_loss_options_are_rejected(loss, weights, message):
    with pytest.raises(UsageError, match=message):
        build_objective(loss, weights)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_non_finite_or_negative_class_weights_are_rejected(weight):
    with pytest.raises(UsageError, match="finite"):
        build_objective("sigmoid", (1.0, 1.0, 1.0, weight))
