"""Inspection of Swin: shifted windows, stages of different grids and heads, and unsupported methods."""

import pytest
import torch

from vitreous.errors import UsageError
from vitreous.inspection.attention import compute_attention_maps
from vitreous.inspection.distance import compute_attention_distances
from vitreous.inspection.features import compute_filter_components, extract_patch_tokens
from vitreous.inspection.fourier import FourierSpectra
from vitreous.inspection.gradient import compute_relevance
from vitreous.inspection.hooks import visit_attention_calls
from vitreous.inspection.positions import get_relative_position_biases, require_positions
from vitreous.inspection.rollout import compute_rollout
from vitreous.inspection.similarity import extract_layer_features
from vitreous.models.config import SwinAttentionConfig, SwinConfig
from vitreous.models.zoo import build_model

IMAGE_SIZE = (20, 28)


@pytest.fixture(scope="module")
def swin_model():
    torch.manual_seed(0)
    swin = build_model(
        SwinConfig(
            image=(32, 32),
            patch_size=(2, 2),
            width=8,
            blocks=(2, 2),
            heads=(1, 2),
            classes=3,
            attention=SwinAttentionConfig(window=4),
        )
    ).eval()
    for name, parameter in swin.named_parameters():
        if name.endswith(("table", "qkv.weight")):
            torch.nn.init.normal_(parameter, std=0.5)
    return swin


@pytest.fixture(scope="module")
def images():
    return torch.randn(2, 3, *IMAGE_SIZE, generator=torch.Generator().manual_seed(1))


def test_attention_weights_match_the_forward_pass(swin_model, images):
    """On grids that are not multiples of the window, shifted and not: probabilities times values equal the block's
    attention output."""
    calls, outputs = [], []
    attentions = [block.attention.part.part for block in swin_model.blocks()]
    hooks = [
        attention.out.register_forward_pre_hook(lambda module, inputs: outputs.append(inputs[0]))
        for attention in attentions
    ]
    visit_attention_calls(swin_model, images, calls.append)
    for hook in hooks:
        hook.remove()
    assert [call.layer for call in calls] == [0, 1, 2, 3]
    assert [call.full_grid for call in calls] == [(10, 14)] * 2 + [(5, 7)] * 2
    assert [call.patch for call in calls] == [(2, 2)] * 2 + [(4, 4)] * 2
    for call, output in zip(calls, outputs, strict=True):
        expected = call.compute_weights() @ call.module.project_qkv(call.x)[2]
        assert torch.allclose(expected.transpose(-3, -2).flatten(-2), output, atol=1e-5)


def test_uniform_heads_have_the_uniform_attention_distance(images):
    torch.manual_seed(0)
    flat = build_model(
        SwinConfig(
            image=(32, 32),
            patch_size=(2, 2),
            width=8,
            blocks=(2, 2),
            heads=(1, 2),
            attention=SwinAttentionConfig(window=4),
        )
    ).eval()
    for name, parameter in flat.named_parameters():
        if name.endswith(("table", "qkv.weight")):
            torch.nn.init.zeros_(parameter)
    measured = compute_attention_distances(flat, [images])
    assert measured.mean.shape == (4, 2)
    assert measured.mean[:2, 1].isnan().all() and not measured.mean[:, 0].isnan().any()
    assert measured.mean[:, 0].tolist() == pytest.approx(measured.uniform, rel=1e-5)
    assert measured.mean[2:, 1].tolist() == pytest.approx(measured.uniform[2:], rel=1e-5)
    assert len(set(measured.uniform)) == 3  # 10 x 14 in windows of 4 has the same window lengths, shifted by 2 or not


def test_position_biases_are_indexed_by_key_query_offset(swin_model):
    tables = get_relative_position_biases(swin_model)
    assert {layer: tuple(bias.shape) for layer, bias in tables.items()} == {0: (1, 7, 7), 1: (1, 7, 7)} | dict.fromkeys(
        (2, 3), (2, 7, 7)
    )
    position = swin_model.blocks()[2].attention.part.part.position
    # from the query at row 0, column 0 to the key at row 1, column 3: token 7 of a window of 4 x 4
    assert torch.equal(tables[2][:, 3 + 1, 3 + 3], position()[:, 0, 7].detach())
    require_positions(swin_model)


def test_swin_features_filters_and_layers(swin_model, images):
    assert extract_patch_tokens(swin_model, images).shape == (2, 5, 7, 16)
    assert compute_filter_components(swin_model, 4).components.shape == (4, 3, 2, 2)
    assert list(extract_layer_features(swin_model, images))[-1] == "mlp 3"


def test_methods_that_require_all_tokens_reject_swin(swin_model, images):
    for inspect_model in (
        lambda: compute_rollout(swin_model, images),
        lambda: compute_relevance(swin_model, images),
        lambda: compute_attention_maps(swin_model, images, [3]),
    ):
        with pytest.raises(UsageError, match="attends only to its window, not to all tokens"):
            inspect_model()
    with pytest.raises(UsageError, match="grids of different sizes"):
        FourierSpectra(swin_model).add(images)
