"""Swin windows match measured outputs of Microsoft's code, and explicit loops."""

import math

import pytest
import torch

from vitreous.nn.block import Block, Mlp
from vitreous.nn.layout import WindowedAttention
from vitreous.nn.windows import (
    ContinuousPositionBias,
    CosineWindowAttention,
    PatchMerging,
    WindowAttention,
    attend_short_sequences,
    concatenate_2x2_tokens,
    gather_offset_table,
)

EMBED_DIM, NUM_HEADS = 16, 2


def build_block(shift, size=(7, 7), pad="mask"):
    torch.manual_seed(0)
    attention = WindowAttention(EMBED_DIM, NUM_HEADS, size)
    torch.nn.init.normal_(attention.position.table)
    torch.nn.init.normal_(attention.qkv.weight, std=0.3)
    return Block(EMBED_DIM, WindowedAttention(attention, size, shift, pad), Mlp(EMBED_DIM, 32)).eval()


def disable_mask(module):
    module.attention.part.mask = lambda grid, device=None: None
    return module


@pytest.fixture(scope="module")
def grid():
    return torch.randn(1, 56, 56, EMBED_DIM, generator=torch.Generator().manual_seed(1))


def test_shifted_window_mask_matches_the_published_one():
    mask = build_block((3, 3)).attention.part.mask((56, 56)).reshape(64, 49, 49)
    assert (~mask).flatten(1).any(1).sum() == 15
    assert (~mask).sum() == 18_240
    assert build_block((0, 0)).attention.part.mask((56, 56)) is None


def test_offsets_are_numbered_as_published():
    index = gather_offset_table(torch.arange(169).view(13, 13, 1), (7, 7))[0]
    assert (index.diagonal() == 84).all()
    assert (index + index.T == 168).all()
    assert len(index.unique()) == 169


def test_offset_bias_of_an_oblong_window_matches_the_loop():
    table = torch.randn(5, 3, NUM_HEADS)
    bias = gather_offset_table(table, (3, 2))
    positions = [(y, x) for y in range(3) for x in range(2)]
    for i, (y, x) in enumerate(positions):
        for j, (v, u) in enumerate(positions):
            assert torch.equal(bias[:, i, j], table[y - v + 2, x - u + 1])


@torch.inference_mode()
def test_unshifted_windows_commute_with_rolls_by_whole_windows(grid):
    block, expected = build_block((0, 0)), build_block((0, 0))(grid)
    for by, same in ((7, True), (21, True), (3, False)):
        rolled = block(grid.roll((by, by), (1, 2))).roll((-by, -by), (1, 2))
        assert torch.allclose(rolled, expected, atol=1e-5) == same


@torch.inference_mode()
def test_unmasked_shifted_windows_match_windows_of_a_rolled_grid(grid):
    rolled = build_block((0, 0))(grid.roll((-3, -3), (1, 2))).roll((3, 3), (1, 2))
    assert torch.equal(disable_mask(build_block((3, 3)))(grid), rolled)


@torch.inference_mode()
def test_mask_changes_only_tokens_of_windows_across_a_seam(grid):
    changed = (build_block((3, 3))(grid) - disable_mask(build_block((3, 3)))(grid)).abs().amax(-1) > 1e-6
    assert changed.sum() == 56**2 - 49**2 == 735


@pytest.mark.parametrize(
    "shape,size,shift", [((8, 12), (4, 4), (2, 2)), ((7, 9), (4, 3), (2, 1)), ((3, 9), (4, 4), (2, 2))]
)
@pytest.mark.parametrize("pad", ["mask", "zeros"])
@torch.inference_mode()
def test_windowed_attention_matches_a_loop_over_tokens(shape, size, shift, pad):
    """Each token attends to the tokens of its window; the grid is padded and shifted before it is split."""
    block = build_block(shift, size, pad)
    windows, x = block.attention.part, torch.randn(2, *shape, EMBED_DIM)
    attention, output = windows.part, windows(x)
    moved = [s if g > w else 0 for g, w, s in zip(shape, size, shift, strict=True)]
    padded_shape = [-(-g // w) * w for g, w in zip(shape, size, strict=True)]
    padded = torch.zeros(2, *padded_shape, EMBED_DIM)
    padded[:, : shape[0], : shape[1]] = x
    q, k, v = attention.qkv(padded).unflatten(-1, (3, NUM_HEADS, -1)).unbind(3)
    keys = [
        (y, x)
        for y in range(padded_shape[0])
        for x in range(padded_shape[1])
        if pad == "zeros" or (y < shape[0] and x < shape[1])
    ]

    def window(position):
        return tuple((p - s) // w for p, s, w in zip(position, moved, size, strict=True))

    for i in range(shape[0]):
        for j in range(shape[1]):
            visible = [key for key in keys if window(key) == window((i, j))]
            row_indices, column_indices = (torch.tensor(axis_indices) for axis_indices in zip(*visible, strict=True))
            table = attention.position.table[i - row_indices + size[0] - 1, j - column_indices + size[1] - 1]  # (K, h)
            logits = (
                torch.einsum("bhd,bkhd->bkh", q[:, i, j], k[:, row_indices, column_indices])
                * (EMBED_DIM // NUM_HEADS) ** -0.5
                + table
            )
            y = torch.einsum("bkh,bkhd->bhd", logits.softmax(1), v[:, row_indices, column_indices]).flatten(1)
            assert torch.allclose(output[:, i, j], attention.out(y), atol=1e-6)


def test_bias_and_mask_are_shared_across_the_batch(monkeypatch):
    """The mask has no batch axis: it is not expanded to B x windows."""
    masks = []
    original = torch.nn.functional.scaled_dot_product_attention

    def attention(q, k, v, attn_mask=None):
        masks.append(attn_mask)
        return original(q, k, v, attn_mask=attn_mask)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    with torch.inference_mode():
        for shift in ((0, 0), (2, 2)):
            build_block(shift, (4, 4))(torch.randn(6, 8, 8, EMBED_DIM))
    assert masks[0].shape == (1, NUM_HEADS, 16, 16)
    assert masks[1].shape == (1, 4 * NUM_HEADS, 16, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_short_sequence_attention_matches_softmax(size, dtype):
    """For logits whose exponential is finite, and for larger ones."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(12, 9, 4).to(dtype) for _ in range(3))
    bias = torch.randn(3, 9, 9).to(dtype)
    bias[1, 2:, :2] = float("-inf")
    logits = torch.bmm(q * size, k.mT) + bias.repeat(4, 1, 1)
    assert (logits.abs().nan_to_num(posinf=0).max() > 100) == (size > 1)
    expected = logits.float().softmax(-1) @ v.float()
    outputs = attend_short_sequences(q * size, k, v, bias).float()
    assert torch.allclose(outputs, expected, atol=1e-5 if dtype == torch.float32 else 0.03)


def test_attention_weights_match_the_forward_pass():
    attention = build_block((2, 2), (4, 4)).attention.part.part
    x, mask = torch.randn(3, 2, 2, 16, EMBED_DIM), build_block((2, 2), (4, 4)).attention.part.mask((8, 8))
    values = attention.project_qkv(x)[2]
    for query_slice in (slice(None), slice(2, 5)):
        p = attention.compute_weights(x, mask, query_slice)
        assert torch.allclose(p.sum(-1), torch.ones(()), atol=1e-5)
        inner = attention.forward_before_output(x, mask, query_slice)
        assert torch.allclose((p @ values).transpose(-3, -2).flatten(-2), inner, atol=1e-5)


def test_patch_merging_concatenates_rows_before_columns():
    """On a 4 x 4 grid, the first merged token contains tokens 0, 4, 1 and 5."""
    assert concatenate_2x2_tokens(torch.arange(16.0).view(1, 4, 4, 1))[0, 0, 0].tolist() == [0, 4, 1, 5]
    x = torch.randn(2, 4, 6, 3)
    corners = (x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2])
    assert torch.equal(concatenate_2x2_tokens(x), torch.cat(corners, -1))


def test_patch_merging_pads_an_odd_grid_with_zeros():
    x = torch.randn(1, 3, 5, 4)
    filled = torch.nn.functional.pad(x, (0, 0, 0, 1, 0, 1))
    merging = PatchMerging(4)
    assert torch.equal(merging(x), merging(filled))
    assert merging(x).shape == (1, 2, 3, 8)


def test_continuous_bias_matches_the_formula():
    """For every offset: 16 sigmoid(MLP(sign(o) log2(1 + |o|) / 3)) with o = 8 (i - j) / (p - 1)."""
    bias = ContinuousPositionBias((3, 4), NUM_HEADS, pretrained_window=5)
    torch.nn.init.normal_(bias.fc2.weight)
    table = bias()

    def spaced(offset):
        o = 8 * offset / 4
        return math.copysign(math.log2(1 + abs(o)) / 3, o)

    for i, j in ((0, 0), (0, 11), (7, 2), (5, 6)):
        offsets = torch.tensor([spaced(i // 4 - j // 4), spaced(i % 4 - j % 4)])
        expected = 16 * torch.sigmoid(bias.fc2(bias.fc1(offsets).relu()))
        assert torch.allclose(table[:, i, j], expected, atol=1e-5)


def test_cosine_attention_matches_the_formula():
    attention = CosineWindowAttention(EMBED_DIM, NUM_HEADS, (2, 3)).eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    attention.logit_scale.data[:] = torch.tensor([2.0, 9.0]).view(2, 1, 1)  # the second is clipped at ln 100
    x = torch.randn(5, 6, EMBED_DIM)
    bias = torch.cat([attention.q_bias, torch.zeros(EMBED_DIM), attention.v_bias])
    q, k, v = torch.nn.functional.linear(x, attention.qkv.weight, bias).chunk(3, -1)
    outputs = []
    for head, factor in ((0, math.exp(2)), (1, 100.0)):
        head_slice = slice(head * 8, head * 8 + 8)
        cosine = torch.nn.functional.cosine_similarity(q[:, :, None, head_slice], k[:, None, :, head_slice], dim=-1)
        outputs.append((factor * cosine + attention.position()[head]).softmax(-1) @ v[..., head_slice])
    assert torch.allclose(attention(x), attention.out(torch.cat(outputs, -1)), atol=1e-4)
    p = attention.compute_weights(x)
    assert torch.allclose(
        (p @ attention.project_qkv(x)[2]).transpose(1, 2).flatten(2), torch.cat(outputs, -1), atol=1e-4
    )


def test_swin_v2_patch_merging_normalises_last():
    merging, x = PatchMerging(4, post_norm=True), torch.randn(1, 4, 4, 4)
    assert torch.equal(merging(x), merging.norm(merging.reduction(concatenate_2x2_tokens(x))))
