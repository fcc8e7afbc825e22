from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from vitreous.inspection.features import compute_filter_components, fit_pca, get_first_layer_filters
from vitreous.models.zoo import create_untrained_model
from vitreous.nn.frozen import can_pack, freeze_for_inference
from vitreous.nn.grid import patchify
from vitreous.nn.resnet import standardize_weight


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (6, 3)])
def test_pca_matches_scikit_learn(shape):
    samples = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.linspace(3, 1, shape[1]) + 5
    pca, reference = fit_pca(samples, 5), PCA(min(5, *shape)).fit(samples.numpy())
    assert np.allclose(pca.share, reference.explained_variance_ratio_[: len(pca.share)], atol=1e-5)
    signs = np.sign((pca.directions.numpy() * reference.components_).sum(1, keepdims=True))
    assert np.allclose(pca.directions, signs * reference.components_, atol=1e-3)
    assert np.allclose(pca.project(samples), reference.transform(samples.numpy()) * signs.T, atol=1e-3)
    assert (pca.directions.gather(1, pca.directions.abs().argmax(1, keepdim=True)) > 0).all()


def test_constant_samples_have_no_components():
    pca = fit_pca(torch.full((5, 4), 2.0), 3)
    assert not pca.directions.any() and not pca.share.any()


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_filters_have_the_orientation_of_images(channels):
    """The product of a filter and a patch equals the model's output."""
    model = create_untrained_model("ViT-24x1/4", image_size=8, channels=channels)
    name, kernels = get_first_layer_filters(model)
    image = torch.randn(1, channels, 8, 8, generator=torch.Generator().manual_seed(1))
    expected = (image[0, :, 4:8, :4] * kernels).sum((1, 2, 3))
    assert name == "patch embedding"
    assert torch.allclose(patchify(image, (4, 4))[0, 1, 0] @ model.projection.weight.T, expected, atol=1e-5)


def test_first_layer_filters_of_each_model_kind():
    hybrid = create_untrained_model("R26+ViT-S/32", image_size=32, width=24, heads=2, depth=1, mlp={"hidden": 24})
    bit = create_untrained_model("BiT-R50x1", image_size=32, blocks=(1,), width=16)
    small = create_untrained_model("Conv+ViT-128x4/8", image_size=16, depth=1)
    shapes = {"root convolution": (64, 3, 7, 7), "first convolution of the stem": (32, 3, 3, 3)}
    for model, root in ((hybrid, hybrid.stem.root), (bit, bit.body.root)):
        name, kernels = get_first_layer_filters(model)
        assert name == "root convolution" and torch.equal(
            kernels, standardize_weight(root.conv.weight, root.conv.numerics)
        )
    for model in (hybrid, small):
        name, kernels = get_first_layer_filters(model)
        assert kernels.shape == shapes[name]
    components = compute_filter_components(small)
    assert components.components.shape == (27, 3, 3, 3) and components.count == 32
    assert components.share.sum().item() == pytest.approx(1, abs=1e-5)
    assert compute_filter_components(bit).components.shape == (15, 3, 7, 7)  # sixteen filters minus their mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_model_has_the_same_filters(dtype):
    model = create_untrained_model("ViT-24x1/4", image_size=8).eval()
    expected = get_first_layer_filters(model)[1]
    for packed in {False, can_pack(dtype)}:
        filters = get_first_layer_filters(freeze_for_inference(model, dtype, packed))[1]
        assert torch.allclose(filters, expected.to(dtype).float())
