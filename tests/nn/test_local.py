"""Windowed attention with prefix tokens matches dense attention with a mask; tokens depend only on their windows."""

from __future__ import annotations

import pytest
import torch

from vitreous.models.config import MlpConfig, ViTConfig, transformer_config
from vitreous.models.zoo import build_model
from vitreous.nn.attention import Attention
from vitreous.nn.local import LocalAttention
from vitreous.nn.position import TokenPositions


def build_local_attention(window):
    torch.manual_seed(0)
    return LocalAttention(24, 3, window)


def attend_densely_with_mask(layer, x, positions):
    """By loops: a patch attends to prefix tokens and the patches of its window, a prefix token to all tokens."""
    cells = [
        (row // layer.window, column // layer.window)
        for row in range(positions.grid[0])
        for column in range(positions.grid[1])
    ]
    count = positions.prefix + len(cells)
    is_visible = torch.ones(count, count, dtype=torch.bool)
    for i, query_cell in enumerate(cells):
        for j, key_cell in enumerate(cells):
            is_visible[positions.prefix + i, positions.prefix + j] = query_cell == key_cell
    q, k, v = layer.project_qkv(x)
    logits = (q @ k.mT * 8**-0.5).masked_fill(~is_visible, float("-inf"))
    return layer.out((logits.softmax(-1) @ v).transpose(1, 2).flatten(2)), logits.softmax(-1)


@pytest.mark.parametrize("grid", [(6, 6), (7, 8), (2, 7), (3, 3)])
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_windows_match_masked_dense_attention(grid, prefix):
    """For windows that divide the grid and windows that do not: values, gradients and probabilities."""
    layer, positions = build_local_attention(3), TokenPositions(grid, prefix)
    x = torch.randn(2, prefix + grid[0] * grid[1], 24, requires_grad=True)
    expected, probabilities = attend_densely_with_mask(layer, x, positions)
    output = layer(x, positions)
    assert torch.allclose(output, expected, atol=1e-6)
    assert torch.allclose(layer.compute_weights(x, positions), probabilities, atol=1e-6)
    upstream = torch.randn_like(output)
    ours, theirs = (torch.autograd.grad(y, x, upstream, retain_graph=True)[0] for y in (output, expected))
    assert torch.allclose(ours, theirs, atol=1e-5)
    if prefix:
        assert torch.allclose(layer(x, positions, queries=slice(prefix)), expected[:, :prefix], atol=1e-6)
        assert torch.allclose(layer.compute_weights(x, positions, slice(1)), probabilities[:, :, :1], atol=1e-6)


def test_whole_grid_window_is_bit_identical_to_plain_attention():
    plain, layer, x = Attention(24, 3), build_local_attention(4), torch.randn(2, 1 + 16, 24)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, TokenPositions((4, 4), 1)), plain(x))
    layer.window = 0
    assert torch.equal(layer(x, TokenPositions((4, 4), 1)), plain(x))


def test_local_attention_on_3d_grids_in_bfloat16():
    layer, positions = build_local_attention(2).bfloat16(), TokenPositions((3, 4, 2), 1)
    x = torch.randn(1, 25, 24).bfloat16().requires_grad_()
    output = layer(x, positions)
    with torch.no_grad():
        _, _, v = layer.project_qkv(x)
        expected = layer.out((layer.compute_weights(x, positions) @ v).transpose(1, 2).flatten(2))
    assert output.shape == (1, 25, 24) and torch.allclose(output.float(), expected.float(), atol=2e-2)
    output.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_patch_and_query_subsets_are_rejected():
    layer, x = build_local_attention(2), torch.randn(1, 5, 24)
    with pytest.raises(ValueError, match="requires all patches"):
        layer(x, TokenPositions((4, 4), 1, torch.arange(4)[None]))
    with pytest.raises(ValueError, match="requires all patches"):
        layer(torch.randn(1, 17, 24), TokenPositions((4, 4), 1), queries=slice(3))


WIDE_CONFIG = ViTConfig(
    image=(32, 48), patch=(8, 8), width=16, depth=3, heads=2, classes=5, registers=1, mlp=MlpConfig(hidden=32)
)


def test_patch_changes_stay_in_their_window_until_a_global_block():
    """From the second block on, changes also spread through prefix tokens."""
    torch.manual_seed(0)
    for depth, blocks, everything in ((1, (), False), (1, (0,), True)):
        model = build_model(
            transformer_config(
                **{**vars(WIDE_CONFIG), "depth": depth, "attention": {"window": 2, "global_blocks": blocks}}
            )
        )
        images = torch.randn(1, 3, 32, 48)
        changed_images = images.clone()
        changed_images[..., :8, :8] += 1
        moved = (model.features(images) - model.features(changed_images)).abs().amax(-1)[0] > 1e-6
        patches = moved[2:].view(4, 6)
        assert moved[:2].all(), "prefix tokens attend to every patch"
        assert patches.all() if everything else (patches[:2, :2].all() and patches.sum() == 4)


def test_windowed_vit_loads_plain_vit_weights_with_fewer_macs():
    plain, windowed = (
        build_model(WIDE_CONFIG),
        build_model(transformer_config(**{**vars(WIDE_CONFIG), "attention": {"window": 2, "global_blocks": (2,)}})),
    )
    windowed.load_state_dict(plain.state_dict())
    tokens, width = 2 + 24, 16
    # patches to patches, patches to prefix tokens and back, prefix tokens to prefix tokens
    pairs = 24 * 4 + 2 * 2 * 24 + 2 * 2
    assert plain.config.macs() - windowed.config.macs() == 2 * 2 * width * (tokens**2 - pairs)
    # the last block, which computes only the class token, is the same in both
    assert plain.config.computed_macs() - windowed.config.computed_macs() == 2 * 2 * width * (tokens**2 - pairs)
    assert not windowed.config.drops_patches and windowed.config.sees_whole_image
