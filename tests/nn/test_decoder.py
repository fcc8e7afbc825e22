"""Dense heads for images and volumes."""

import pytest
import torch

from vitreous.nn.decoder import LinearDecoder, UNETDecoder
from vitreous.nn.upernet import POOLING_BINS, ResampleBlock, UPerNetDecoder, adaptive_average_pool


@pytest.mark.parametrize(
    ("image", "patch"), [((16, 24), (8, 8)), ((16, 16), (4, 8)), ((8, 16, 16), (2, 8, 8)), ((9,), (4,))]
)
def test_unet_decoder_outputs_logits_for_every_pixel(image, patch):
    steps = max(patch).bit_length() - 1
    widths, patches = [12] * steps, [patch] * steps
    decoder = UNETDecoder(3, widths, patches, 5, width=4)
    grid = [-(-side // p) for side, p in zip(image, patch, strict=True)]
    maps = [torch.randn(2, *grid, 12, requires_grad=True) for _ in widths]
    logits = decoder(torch.randn(2, 3, *image), maps)
    assert logits.shape == (2, 5, *image)
    logits.square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in decoder.parameters())
    assert all(x.grad.abs().sum() > 0 for x in maps)


def test_unet_decoder_accepts_stage_maps_of_several_strides():
    widths, patches = [32, 16, 8], [(16, 16), (8, 8), (4, 4)]
    decoder = UNETDecoder(3, widths, patches, 2, width=4)
    maps = [torch.randn(1, 48 // p, 32 // p, width) for width, (p, _) in zip(widths, patches, strict=True)]
    assert decoder(torch.randn(1, 3, 48, 32), maps).shape == (1, 2, 48, 32)


def test_linear_decoder_classifies_tokens_and_upsamples_logits():
    decoder, tokens = LinearDecoder([6, 6], 3), [torch.randn(2, 4, 5, 6) for _ in range(2)]
    logits = decoder(torch.zeros(2, 3, 4, 5), tokens)
    expected = torch.cat(tokens, -1) @ decoder.head.weight.T + decoder.head.bias
    assert torch.allclose(logits, expected.movedim(-1, 1), atol=1e-6)
    assert decoder(torch.zeros(2, 3, 32, 40), tokens).shape == (2, 3, 32, 40)


@pytest.mark.parametrize(
    ("image", "patches"),
    [((32, 48), [(8, 8)] * 4), ((64, 32), [(32, 32), (16, 16), (8, 8), (4, 4)]), ((16, 16, 32), [(8, 8, 8)] * 4)],
)
def test_upernet_outputs_logits_for_every_pixel(image, patches):
    widths = [12, 10, 8, 6]
    decoder = UPerNetDecoder(widths, patches, 5, width=16)
    grids = [[side // p for side, p in zip(image, patch, strict=True)] for patch in patches]
    maps = [torch.randn(2, *grid, width, requires_grad=True) for grid, width in zip(grids, widths, strict=True)]
    logits = decoder(torch.randn(2, 3, *image), maps)
    assert logits.shape == (2, 5, *image)
    logits.square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in decoder.parameters())
    assert all(x.grad.abs().sum() > 0 for x in maps)


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (13, 4), (6, 1)])
@pytest.mark.parametrize("bins", POOLING_BINS)
def test_adaptive_average_pool_matches_pytorch(size, bins):
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    assert torch.allclose(adaptive_average_pool(x, bins), torch.nn.functional.adaptive_avg_pool2d(x, bins), atol=1e-12)


def test_vit_maps_are_resampled_to_four_resolutions():
    x = torch.randn(1, 8, 6, 10)
    assert [ResampleBlock(8, doublings, 2)(x).shape[2:] for doublings in (-1, 0, 1, 2)] == [
        (3, 5),
        (6, 10),
        (12, 20),
        (24, 40),
    ]
    assert torch.equal(ResampleBlock(8, 0, 2)(x), x)


def test_upernet_drops_channels_before_its_head_only_in_training():
    torch.manual_seed(0)
    patches, images = [(32, 32), (16, 16), (8, 8), (4, 4)], torch.randn(2, 3, 64, 64)
    maps = [torch.randn(2, 64 // p, 64 // p, 8) for p, _ in patches]
    head_inputs = []
    decoder = UPerNetDecoder([8] * 4, patches, 5, width=64, dropout=0.25)
    decoder.head.register_forward_pre_hook(lambda _, inputs: head_inputs.append(inputs[0].detach()))
    decoder.train()(images, maps)
    decoder.eval()(images, maps)
    dropped = (head_inputs[0] == 0).all((2, 3)) & (head_inputs[1] != 0).any((2, 3))
    assert 0.1 < dropped.float().mean() < 0.4
    assert torch.allclose(head_inputs[0][~dropped], head_inputs[1][~dropped] / 0.75)


def test_upernet_parameter_count_matches_the_formula():
    widths, k, c = (1024, 512, 256, 128), 150, 512  # Swin-B on ADE20K
    decoder = UPerNetDecoder(widths, [(32, 32), (16, 16), (8, 8), (4, 4)], k, c)
    norms = 2 * c * (len(POOLING_BINS) + 1 + 3 + 3 + 1)
    pools, top = len(POOLING_BINS) * widths[0] * c, 9 * (widths[0] + len(POOLING_BINS) * c) * c
    other_parameters = sum(widths[1:]) * c + 3 * 9 * c * c + 9 * 4 * c * c + c * k + k
    assert sum(p.numel() for p in decoder.parameters()) == norms + pools + top + other_parameters
