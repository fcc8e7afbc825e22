"""Gradient-weighted rollout matches autograd on explicit attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.inspection.small_models import MEAN_POOLING, MODEL_KINDS, make_images, make_model
from vitreous.errors import UsageError
from vitreous.inspection.gradient import compute_relevance
from vitreous.nn import attention as plain
from vitreous.nn import relative, rotary
from vitreous.nn.frozen import can_pack, freeze_for_inference


def compute_explicit_attention(model, x, classes, monkeypatch):
    """A, and the derivative of the classes' logits by it, of every block: (B, L, h, T, T) each; and the logits."""
    maps = []

    def attend(q, k, v, bias=None):
        logits = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        return attend_values(logits if bias is None else logits + bias, v)

    def attend_values(logits, v):
        a = logits.softmax(-1)
        a.retain_grad()
        maps.append(a)
        return a @ v

    with monkeypatch.context() as patch:
        patch.setattr(relative, "attend_unscaled", lambda q, k, v, mask: attend_values(q @ k.mT, v))
        patch.setattr(plain, "dot_product_attention", attend)
        patch.setattr(relative, "dot_product_attention", attend)
        patch.setattr(rotary, "dot_product_attention", attend)
        logits = model.classify(model.pool(model.features(x))).gather(1, classes[:, None])
        logits.sum().backward()
    model.zero_grad()
    return torch.stack([a.detach() for a in maps], 1), torch.stack([a.grad for a in maps], 1), logits.detach()[:, 0]


def compute_relevance_by_loop(maps, slopes, prefix, from_class):
    """One image: R_0 = I, R_l = R_(l-1) + W_l R_(l-1); the row of R_L - I at the class token or the mean."""
    result = np.eye(maps.shape[-1])
    for a, slope in zip(np.asarray(maps, np.float64), np.asarray(slopes, np.float64), strict=True):
        result = result + np.clip(a * slope, 0, None).mean(0) @ result
    result -= np.eye(len(result))
    return result[0] if from_class else result[prefix:].mean(0)


@pytest.mark.parametrize("kind", [kind for kind in MODEL_KINDS if kind != "pooled-by-attention"])
def test_relevance_matches_autograd_on_explicit_attention(kind, monkeypatch):
    model, x, classes = make_model(kind), make_images(), torch.tensor([3, 1])
    maps, slopes, logits = compute_explicit_attention(model, x, classes, monkeypatch)
    expected = [
        compute_relevance_by_loop(a, s, model.config.prefix, model.config.pool in ("class", "distilled"))
        for a, s in zip(maps, slopes, strict=True)
    ]
    relevance = compute_relevance(model, x, classes)
    assert np.allclose(relevance.relevance, expected, rtol=1e-4, atol=2e-5) and relevance.relevance.max() > 1e-3
    assert torch.equal(relevance.classes, classes) and torch.allclose(relevance.logits, logits, atol=1e-5)
    assert torch.equal(relevance.maps[0].flatten(), relevance.relevance[0, model.config.prefix :])
    model.requires_grad_(False)
    assert torch.allclose(compute_relevance(model, x, classes).relevance, relevance.relevance, atol=1e-6)
    assert torch.allclose(
        compute_relevance(freeze_for_inference(model), x, classes).relevance, relevance.relevance, rtol=1e-3, atol=1e-5
    )
    assert torch.allclose(
        compute_relevance(model, x[1:], classes[1:]).relevance, relevance.relevance[1:], rtol=1e-3, atol=1e-5
    )


def test_relevance_in_bf16_and_default_class():
    model, x = make_model("registers"), make_images(4)
    relevance = compute_relevance(model, x)
    with torch.no_grad():
        assert torch.equal(relevance.classes, model(x).argmax(1))
    other_class = compute_relevance(model, x, (relevance.classes + 1) % 5)
    assert not torch.allclose(other_class.relevance, relevance.relevance, rtol=0.1)
    for near in (
        compute_relevance(make_model("registers").bfloat16(), x, relevance.classes),
        compute_relevance(freeze_for_inference(model, torch.bfloat16), x, relevance.classes),
    ):
        assert (near.relevance - relevance.relevance).norm() < 0.2 * relevance.relevance.norm()


def test_headless_and_packed_models_are_rejected():
    with pytest.raises(UsageError, match="no head"):
        compute_relevance(make_model(num_classes=0), make_images())
    if can_pack(torch.float32):
        with pytest.raises(UsageError, match="packed"):
            compute_relevance(freeze_for_inference(make_model("mean"), packed=True), make_images())


def test_relevance_of_attention_pooling_covers_all_patches():
    model, x = make_model("pooled-by-attention", class_token=MEAN_POOLING["class_token"]), make_images()
    relevance = compute_relevance(model, x)
    assert relevance.relevance.shape == (2, 20) and relevance.relevance.min() >= 0 and relevance.relevance.max() > 0
