import pytest
import torch
import torch.nn.functional as F

from tests import contracts
from vitreous.nn.convstem import ConvStem


def compute_reference_stem(stem, images):
    """The same computed with unfolded images and sums, in channels-first layout: conv, units, pooling, norm, ReLU."""

    def conv(x, weight):
        columns = F.unfold(x, 3, padding=1)  # (B, 9 I, h w)
        return (weight.flatten(1) @ columns).unflatten(-1, x.shape[2:])

    def norm(x, module):
        mean, variance = x.mean(1, keepdim=True), x.var(1, correction=0, keepdim=True)
        scale, shift = (p[:, None, None] for p in (module.norm.weight, module.norm.bias))
        return ((x - mean) / (variance + 1e-6).sqrt() * scale + shift).clamp(min=0)

    x = images
    for stage_index, stage in enumerate(stem.stages):
        x = conv(x, stage.conv.weight)
        for unit in stage.units:
            x = x + conv(norm(x, unit.norm), unit.conv.weight)
        if stage_index + 1 < len(stem.stages):
            height, width = (-(-side // 2) for side in x.shape[2:])
            pooled_rows = [
                [x[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].amax((2, 3)) for j in range(width)]
                for i in range(height)
            ]
            x = torch.stack([torch.stack(pooled_row, -1) for pooled_row in pooled_rows], -2)
        x = norm(x, stage.norm)
    return x.movedim(1, -1)


@pytest.mark.parametrize("size", [(8, 8), (12, 20), (7, 9)])
@pytest.mark.parametrize("channels", [1, 3])
def test_stem_matches_the_reference(size, channels):
    torch.manual_seed(0)
    stem = contracts.randomise(ConvStem((4, 6, 8), (1, 0, 2), channels)).double()
    images = torch.randn(2, channels, *size, dtype=torch.float64)
    assert torch.allclose(stem(images), compute_reference_stem(stem, images), atol=1e-9)


def test_stem_fulfils_the_model_contract():
    torch.manual_seed(0)
    stem = contracts.randomise(ConvStem((4, 6, 8), (1, 0, 1), channels=2))
    images = torch.randn(3, 2, 16, 24)
    contracts.check_batch_independence(stem, images)
    contracts.check_all_gradients(stem, images)
    contracts.check_export_matches(stem, images)


@pytest.mark.parametrize("widths", [(8,), (8, 16), (4, 8, 16, 16)])
def test_the_grid_is_the_image_over_the_reduction(widths):
    stem = ConvStem(widths, (0,) * len(widths))
    assert stem.reduction == 2 ** (len(widths) - 1)
    assert stem(torch.randn(1, 3, 33, 50)).shape == (1, -(-33 // stem.reduction), -(-50 // stem.reduction), widths[-1])


def test_an_initial_stem_keeps_the_scale_of_activations():
    torch.manual_seed(0)
    tokens = ConvStem((32, 64, 128, 128), (1, 1, 1, 1))(torch.randn(4, 3, 32, 32))
    assert 0.3 < tokens.pow(2).mean().sqrt() < 1.5


def test_stages_must_agree():
    with pytest.raises(ValueError, match="widths and blocks must have one entry per stage, got 2 and 3"):
        ConvStem((8, 16), (0, 0, 1))
