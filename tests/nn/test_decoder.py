"""Dense heads, for pictures and volumes."""

import pytest
import torch

from vitreous.nn.decoder import LinearDecoder, UNETDecoder


@pytest.mark.parametrize(
    ("image", "patch"), [((16, 24), (8, 8)), ((16, 16), (4, 8)), ((8, 16, 16), (2, 8, 8)), ((9,), (4,))]
)
def test_a_unet_answers_for_every_pixel(image, patch):
    steps = max(patch).bit_length() - 1
    widths, patches = [12] * steps, [patch] * steps
    decoder = UNETDecoder(3, widths, patches, 5, width=4)
    grid = [-(-side // p) for side, p in zip(image, patch, strict=True)]
    maps = [torch.randn(2, *grid, 12, requires_grad=True) for _ in widths]
    answer = decoder(torch.randn(2, 3, *image), maps)
    assert answer.shape == (2, 5, *image)
    answer.square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in decoder.parameters())
    assert all(x.grad.abs().sum() > 0 for x in maps)


def test_maps_of_stages_meet_at_their_own_resolution():
    widths, patches = [32, 16, 8], [(16, 16), (8, 8), (4, 4)]
    decoder = UNETDecoder(3, widths, patches, 2, width=4)
    maps = [torch.randn(1, 48 // p, 32 // p, width) for width, (p, _) in zip(widths, patches, strict=True)]
    assert decoder(torch.randn(1, 3, 48, 32), maps).shape == (1, 2, 48, 32)


def test_a_linear_head_is_a_layer_on_each_token_read_at_the_images_size():
    decoder, tokens = LinearDecoder([6, 6], 3), [torch.randn(2, 4, 5, 6) for _ in range(2)]
    answer = decoder(torch.zeros(2, 3, 4, 5), tokens)
    wanted = torch.cat(tokens, -1) @ decoder.head.weight.T + decoder.head.bias
    assert torch.allclose(answer, wanted.movedim(-1, 1), atol=1e-6)
    assert decoder(torch.zeros(2, 3, 32, 40), tokens).shape == (2, 3, 32, 40)
