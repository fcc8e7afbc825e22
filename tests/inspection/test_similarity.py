from __future__ import annotations

import math

import pytest
import torch

from tests.contracts import randomise
from vitreous.errors import UsageError
from vitreous.inspection.similarity import compute_linear_cka, extract_layer_features
from vitreous.models.zoo import create_untrained_model


def draw_feature_matrices(n=7, widths=(3, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, width, generator=generator, dtype=torch.float64) for width in widths]


def gram_matrix(x):
    return [[sum(a * b for a, b in zip(p, q, strict=True)) for q in x.tolist()] for p in x.tolist()]


def hsic(k, m):
    """tr(K H L H) / (n - 1)^2, H = 1 - 1 / n, by loops (Gretton et al., 2005)."""
    n = len(k)
    h = [[(i == j) - 1 / n for j in range(n)] for i in range(n)]

    def product(a, b):
        return [[sum(a[i][t] * b[t][j] for t in range(n)) for j in range(n)] for i in range(n)]

    whole = product(product(product(k, h), m), h)
    return sum(whole[i][i] for i in range(n)) / (n - 1) ** 2


def hsic_unbiased(k, m):
    """Song et al. (2012), Eq. 4, term by term."""
    n = len(k)
    k, m = ([[0.0 if i == j else a[i][j] for j in range(n)] for i in range(n)] for a in (k, m))
    trace = sum(k[i][j] * m[j][i] for i in range(n) for j in range(n))
    sums = sum(map(sum, k)) * sum(map(sum, m)) / ((n - 1) * (n - 2))
    cross = sum(k[i][j] * m[j][t] for i in range(n) for j in range(n) for t in range(n)) * 2 / (n - 2)
    return (trace + sums - cross) / (n * (n - 3))


@pytest.mark.parametrize(("unbiased", "measure"), [(False, hsic), (True, hsic_unbiased)])
def test_linear_cka_matches_the_definition(unbiased, measure):
    x, y = draw_feature_matrices()
    found = compute_linear_cka([x, y], [x, y], unbiased)
    k, m = gram_matrix(x), gram_matrix(y)
    wanted = measure(k, m) / math.sqrt(measure(k, k) * measure(m, m))
    assert found[0, 1].item() == pytest.approx(wanted, abs=1e-9)
    assert found.diag().tolist() == pytest.approx([1, 1]) and torch.allclose(found, found.T)


@pytest.mark.parametrize("unbiased", [False, True])
def test_turning_scaling_and_moving_change_nothing(unbiased):
    x, y = draw_feature_matrices()
    turn, _ = torch.linalg.qr(draw_feature_matrices(5, (5,), 1)[0])
    before = compute_linear_cka([x], [y], unbiased)
    for other in (y @ turn, 7 * y, y + torch.arange(5)):
        assert torch.allclose(compute_linear_cka([x], [other], unbiased), before)
    assert not torch.allclose(compute_linear_cka([x], [y * torch.arange(1, 6)], unbiased), before, atol=1e-3)


def test_cka_of_independent_wide_layers_is_near_zero():
    """The plain estimate would say nearly one for 400 channels of 40 images."""
    x, y = draw_feature_matrices(40, (400, 400))
    assert abs(compute_linear_cka([x], [y]).item()) < 0.1 < 0.8 < compute_linear_cka([x], [y], unbiased=False).item()


def test_a_constant_layer_and_too_few_images():
    x, y = draw_feature_matrices()
    assert compute_linear_cka([torch.ones(7, 3)], [y]).item() == 0
    with pytest.raises(UsageError, match="too few"):
        compute_linear_cka([x[:3]], [y[:3]])


def test_vit_layer_features_are_means_of_patch_tokens():
    torch.manual_seed(0)
    images = torch.randn(3, 3, 16, 16)
    vit = randomise(create_untrained_model("ViT-16x2/4", image_size=16, num_classes=2)).eval()
    found = extract_layer_features(vit, images)
    assert list(found) == ["embedding", "attention 0", "mlp 0", "attention 1", "mlp 1"]
    with torch.no_grad():
        last = vit.encoder.norm
        vit.encoder.norm = torch.nn.Identity()
        assert torch.allclose(found["mlp 1"], vit.features(images)[:, 1:].mean(1), atol=1e-5)
        vit.encoder.norm = last
        assert torch.allclose(found["embedding"], vit.add_positions(vit.project(images)).mean(1), atol=1e-5)


def test_bit_layer_features_are_those_of_its_units():
    torch.manual_seed(0)
    bit = randomise(create_untrained_model("BiT-R50x1", image_size=32, blocks=(2, 1), width=16, num_classes=2)).eval()
    images = torch.randn(2, 3, 32, 32)
    found = extract_layer_features(bit, images)
    assert list(found) == ["root", "stage 0 unit 0", "stage 0 unit 1", "stage 1 unit 0"]
    with torch.no_grad():
        x = bit.body.root(images)
        assert torch.allclose(found["root"], x.mean((2, 3)))
        assert torch.allclose(found["stage 0 unit 1"], bit.body.stages[0](x).mean((2, 3)), atol=1e-5)
    assert not any(module._forward_hooks for module in bit.modules())
