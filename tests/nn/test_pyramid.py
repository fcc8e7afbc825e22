"""Feature pyramids of a single map, and of maps with different strides."""

import pytest
import torch
import torch.nn.functional as F

from vitreous.nn.pyramid import FeaturePyramid, LayerNorm2d, SimplePyramid


@pytest.mark.parametrize(("width", "parameters"), [(768, 5_560_000), (1024, 7_805_184), (1280, 10_640_192)])
def test_simple_pyramid_has_the_published_parameter_count(width, parameters):
    assert sum(p.numel() for p in SimplePyramid(width).parameters()) == parameters


def test_simple_pyramid_level_shapes():
    levels = SimplePyramid(8, 4)([torch.randn(1, 32, 32, 8)])
    assert [tuple(x.shape) for x in levels] == [(1, 4, side, side) for side in (128, 64, 32, 16, 8)]
    assert torch.equal(levels[4], F.max_pool2d(levels[3], 1, 2))
    assert [x.shape[2:] for x in SimplePyramid(8, 4)([torch.randn(1, 3, 5, 8)])] == [
        (12, 20),
        (6, 10),
        (3, 5),
        (2, 3),
        (1, 2),
    ]


def test_simple_pyramid_levels_match_the_paper():
    torch.manual_seed(0)
    pyramid, x = SimplePyramid(8, 4), torch.randn(2, 4, 6, 8)

    def norm(x, layers):
        return F.layer_norm(x.movedim(1, -1), x.shape[1:2], layers.norm.weight, layers.norm.bias, 1e-6).movedim(-1, 1)

    first_upsample, between, _, second_upsample = pyramid.upsample4
    y = x.movedim(-1, 1)
    quadruple = F.gelu(norm(F.conv_transpose2d(y, first_upsample.weight, first_upsample.bias, 2), between))
    quadruple = F.conv_transpose2d(quadruple, second_upsample.weight, second_upsample.bias, 2)
    double = F.conv_transpose2d(y, pyramid.upsample2.weight, pyramid.upsample2.bias, 2)
    for index, level in enumerate((quadruple, double, y, F.max_pool2d(y, 2))):
        for layers in (pyramid.reduce[index], pyramid.smooth[index]):
            conv, norm_layer = layers
            level = norm(F.conv2d(level, conv.weight, padding=conv.kernel_size[0] // 2), norm_layer)
        torch.testing.assert_close(pyramid([x])[index], level)


def test_feature_pyramid_matches_torchvision():
    from torchvision.ops import FeaturePyramidNetwork
    from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

    torch.manual_seed(0)
    widths, sizes = (4, 6, 8), ((12, 20), (6, 10), (3, 5))
    pyramid, peer = FeaturePyramid(widths, 8, 4), FeaturePyramidNetwork(list(widths), 8, LastLevelMaxPool())
    with torch.no_grad():
        for level, lateral, theirs in zip(pyramid.laterals, pyramid.smooth, range(3), strict=True):
            peer.inner_blocks[theirs][0].load_state_dict(level.state_dict())
            peer.layer_blocks[theirs][0].load_state_dict(lateral.state_dict())
    maps = [torch.randn(2, *size, width) for size, width in zip(sizes, widths, strict=True)]
    normed = {str(i): F.layer_norm(x, x.shape[-1:], eps=1e-6).movedim(-1, 1) for i, x in enumerate(maps)}
    for level, theirs in zip(pyramid(maps), peer(normed).values(), strict=True):
        torch.testing.assert_close(level, theirs)


def test_every_pyramid_parameter_gets_a_gradient():
    for pyramid, maps in (
        (SimplePyramid(8, 4), [torch.randn(1, 4, 4, 8)]),
        (FeaturePyramid((4, 8), 4), [torch.randn(1, 8, 8, 4), torch.randn(1, 4, 4, 8)]),
    ):
        levels = pyramid(maps)
        assert len(levels) == 5
        weights = [torch.randn_like(level) for level in levels]
        sum((level * w).sum() for level, w in zip(levels, weights, strict=True)).backward()
        assert not [name for name, p in pyramid.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


def test_unsupported_map_counts_are_rejected():
    with pytest.raises(ValueError, match="exactly one input map, got 2"):
        SimplePyramid(8)([torch.zeros(1, 2, 2, 8)] * 2)
    with pytest.raises(ValueError, match="levels"):
        FeaturePyramid((4, 8, 8), levels=2)


def test_layer_norm_2d_preserves_dtype():
    x = torch.randn(1, 4, 2, 2, dtype=torch.bfloat16)
    assert LayerNorm2d(4).to(torch.bfloat16)(x).dtype == torch.bfloat16
