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


def compute_gram_matrix(x):
    return [[sum(a * b for a, b in zip(p, q, strict=True)) for q in x.tolist()] for p in x.tolist()]


def compute_hsic(k, m):
    """tr(K H L H) / (n - 1)^2, H = 1 - 1 / n, by loops (Gretton et al., 2005)."""
    n = len(k)
    h = [[(i == j) - 1 / n for j in range(n)] for i in range(n)]

    def product(a, b):
        return [[sum(a[i][t] * b[t][j] for t in range(n)) for j in range(n)] for i in range(n)]

    matrix = product(product(product(k, h), m), h)
    return sum(matrix[i][i] for i in range(n)) / (n - 1) ** 2


def compute_unbiased_hsic(k, m):
    """Song et al. (2012), Eq. 4, term by term."""
    n = len(k)
    k, m = ([[0.0 if i == j else a[i][j] for j in range(n)] for i in range(n)] for a in (k, m))
    trace = sum(k[i][j] * m[j][i] for i in range(n) for j in range(n))
    sums = sum(map(sum, k)) * sum(map(sum, m)) / ((n - 1) * (n - 2))
    cross = sum(k[i][j] * m[j][t] for i in range(n) for j in range(n) for t in range(n)) * 2 / (n - 2)
    return (trace + sums - cross) / (n * (n - 3))


@pytest.mark.parametrize(("unbiased", "measure"), [(False, compute_hsic), (True, compute_unbiased_hsic)])
def test_linear_cka_matches_the_definition(unbiased, measure):
    x, y = draw_feature_matrices()
    cka = compute_linear_cka([x, y], [x, y], unbiased)
    k, m = compute_gram_matrix(x), compute_gram_matrix(y)
    expected = measure(k, m) / math.sqrt(measure(k, k) * measure(m, m))
    assert cka[0, 1].item() == pytest.approx(expected, abs=1e-9)
    assert cka.diag().tolist() == pytest.approx([1, 1]) and torch.allclose(cka, cka.T)


@pytest.mark.parametrize("unbiased", [False, True])
def test_cka_is_invariant_to_rotation_scaling_and_shift(unbiased):
    x, y = draw_feature_matrices()
    rotation, _ = torch.linalg.qr(draw_feature_matrices(5, (5,), 1)[0])
    expected = compute_linear_cka([x], [y], unbiased)
    for transformed in (y @ rotation, 7 * y, y + torch.arange(5)):
        assert torch.allclose(compute_linear_cka([x], [transformed], unbiased), expected)
    assert not torch.allclose(compute_linear_cka([x], [y * torch.arange(1, 6)], unbiased), expected, atol=1e-3)


def test_cka_of_independent_wide_layers_is_near_zero():
    """The biased estimate would be nearly one for 400 channels of 40 images."""
    x, y = draw_feature_matrices(40, (400, 400))
    assert abs(compute_linear_cka([x], [y]).item()) < 0.1 < 0.8 < compute_linear_cka([x], [y], unbiased=False).item()


def test_a_constant_layer_and_too_few_images():
    x, y = draw_feature_matrices()
    assert compute_linear_cka([torch.ones(7, 3)], [y]).item() == 0
    with pytest.raises(UsageError, match="requires at least 4 images, got 3"):
        compute_linear_cka([x[:3]], [y[:3]])


def test_vit_layer_features_are_means_of_patch_tokens():
    torch.manual_seed(0)
    images = torch.randn(3, 3, 16, 16)
    vit = randomise(create_untrained_model("ViT-16x2/4", image_size=16, num_classes=2)).eval()
    features = extract_layer_features(vit, images)
    assert list(features) == ["embedding", "attention 0", "mlp 0", "attention 1", "mlp 1"]
    with torch.no_grad():
        last = vit.encoder.norm
        vit.encoder.norm = torch.nn.Identity()
        assert torch.allclose(features["mlp 1"], vit.features(images)[:, 1:].mean(1), atol=1e-5)
        vit.encoder.norm = last
        assert torch.allclose(features["embedding"], vit.add_positions(vit.project(images)).mean(1), atol=1e-5)


def test_bit_layer_features_are_the_outputs_of_its_units():
    torch.manual_seed(0)
    bit = randomise(create_untrained_model("BiT-R50x1", image_size=32, blocks=(2, 1), width=16, num_classes=2)).eval()
    images = torch.randn(2, 3, 32, 32)
    features = extract_layer_features(bit, images)
    assert list(features) == ["root", "stage 0 unit 0", "stage 0 unit 1", "stage 1 unit 0"]
    with torch.no_grad():
        x = bit.body.root(images)
        assert torch.allclose(features["root"], x.mean((2, 3)))
        assert torch.allclose(features["stage 0 unit 1"], bit.body.stages[0](x).mean((2, 3)), atol=1e-5)
    assert not any(module._forward_hooks for module in bit.modules())
