"""Windows match explicit loops on grids with any number of axes."""

import itertools

import pytest
import torch

from vitreous.nn.attention import Attention
from vitreous.nn.block import Block, Mlp
from vitreous.nn.frozen import freeze_for_inference
from vitreous.nn.layout import WindowedAttention
from vitreous.nn.relative import GridAttention

EMBED_DIM = 16


def build_block(attention=None):
    torch.manual_seed(1)
    block = Block(EMBED_DIM, attention or Attention(EMBED_DIM, 2), Mlp(EMBED_DIM, 32)).double().eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block


def make_tokens(*grid):
    return torch.randn(2, *grid, EMBED_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("grid", [(6,), (4, 6), (2, 3, 4)])
@pytest.mark.parametrize("pad", ["mask", "zeros"])
def test_whole_grid_window_matches_the_plain_block(grid, pad):
    x, block = make_tokens(*grid), build_block()
    torch.testing.assert_close(WindowedAttention(block, grid, pad=pad)(x).flatten(1, -2), block(x.flatten(1, -2)))
    shifted = WindowedAttention(block, grid, tuple(g - 1 for g in grid), pad)  # one window spans every axis: no shift
    torch.testing.assert_close(shifted(x).flatten(1, -2), block(x.flatten(1, -2)))


def attend_windows_by_loop(block, x, size, shift):
    """Attention within each window separately, without padding: tokens whose positions have the same (i - s) // w on
    every axis."""
    grid, y = x.shape[1:-1], torch.full_like(x, float("nan"))
    shift = [s if g > w else 0 for g, w, s in zip(grid, size, shift, strict=True)]
    positions = list(itertools.product(*map(range, grid)))
    of = {
        position: tuple((i - s) // w for i, w, s in zip(position, size, shift, strict=True)) for position in positions
    }
    for window in set(of.values()):
        index = torch.tensor([position for position in positions if of[position] == window]).T
        y[:, *index] = block(x[:, *index])
    return y


@pytest.mark.parametrize(
    ("grid", "size", "shift"),
    [
        ((8,), (4,), (2,)),
        ((7,), (3,), (2,)),
        ((6, 8), (3, 4), (1, 2)),
        ((5, 7), (3, 4), (1, 3)),
        ((5, 7), (2, 8), (1, 4)),
        ((5, 4), (4, 3), (0, 0)),
        ((3, 5, 4), (2, 2, 3), (1, 1, 2)),
    ],
)
def test_shifted_windows_match_the_loop_over_windows(grid, size, shift):
    x, block = make_tokens(*grid), build_block()
    torch.testing.assert_close(WindowedAttention(block, size, shift)(x), attend_windows_by_loop(block, x, size, shift))


def test_unmasked_padding_adds_zero_keys():
    x, layer = make_tokens(5, 7), Attention(EMBED_DIM, 2).double()
    padded_input = torch.nn.functional.pad(x, [0, 0, 0, 1, 0, 1])  # (6, 8)
    padded = WindowedAttention(layer, (3, 4), pad="zeros")(x)
    torch.testing.assert_close(padded, WindowedAttention(layer, (3, 4))(padded_input)[:, :5, :7])
    assert not torch.allclose(padded, WindowedAttention(layer, (3, 4))(x))
    shifted = WindowedAttention(layer, (3, 4), (1, 2), pad="zeros")(x)
    torch.testing.assert_close(shifted, WindowedAttention(layer, (3, 4), (1, 2))(padded_input)[:, :5, :7])


def test_grid_attention_supports_the_padding_mask():
    attention = GridAttention(EMBED_DIM, 2, (3, 4))
    x, block = make_tokens(6, 8), build_block(attention)
    windows = WindowedAttention(block, (3, 4), (1, 2))
    # without position tables it is plain attention
    plain = build_block(Attention(EMBED_DIM, 2))
    plain.load_state_dict(
        {name: value for name, value in block.state_dict().items() if "rows" not in name and "columns" not in name}
    )
    for table in (attention.rows, attention.columns):
        torch.nn.init.zeros_(table)
    torch.testing.assert_close(windows(x), attend_windows_by_loop(plain, x, (3, 4), (1, 2)))
    torch.nn.init.normal_(attention.rows)
    window_tokens, mask = windows.split(x)
    weights = attention.compute_weights(window_tokens, mask)
    assert weights.masked_select(~mask.expand_as(weights)).abs().max() == 0
    values = attention.project_qkv(window_tokens.flatten(-3, -2))[2]
    mixed = (weights @ values).transpose(-3, -2).flatten(-2).unflatten(-2, (3, 4))
    torch.testing.assert_close(attention(window_tokens, mask), attention.out(mixed))


def test_windows_move_with_their_tokens():
    """Swapping two windows of the input swaps them in the output; within a window, token order is irrelevant."""
    x, block = make_tokens(6, 8), build_block()
    windows = WindowedAttention(block, (3, 4))
    y = windows(x)
    torch.testing.assert_close(windows(x.roll((3, 4), (1, 2))), y.roll((3, 4), (1, 2)))
    inside = x.clone()
    inside[:, :3, :4] = x[:, :3, :4].flip(1, 2)
    torch.testing.assert_close(windows(inside)[:, :3, :4], y[:, :3, :4].flip(1, 2))
    torch.testing.assert_close(windows(inside)[:, 3:], y[:, 3:])


def test_frozen_windowed_attention_matches_and_exports():
    x = make_tokens(5, 7).float()
    windows = WindowedAttention(build_block().float(), (3, 4), (1, 2))
    for packed in (False, True):
        with torch.inference_mode():
            torch.testing.assert_close(
                freeze_for_inference(windows, packed=packed)(x), windows(x), atol=1e-5, rtol=1e-5
            )
    torch.export.export(windows, (x,))  # exports as one graph


def test_invalid_shifts_and_padding_are_rejected():
    with pytest.raises(ValueError, match="must be smaller than window size"):
        WindowedAttention(build_block(), (3, 4), (3, 0))
    with pytest.raises(ValueError, match="must be mask, zeros or"):
        WindowedAttention(build_block(), (3, 4), pad="reflect")
