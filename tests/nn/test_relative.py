"""Attention with position information, axial and windowed blocks match explicit loops."""

import math

import pytest
import torch

import vitreous.nn.attention
from tests.precision import ERROR_LIMITS, relative_error
from vitreous.nn.attention import Attention, QkvLinearWithoutKeyBias
from vitreous.nn.block import Block, Mlp, SwiGLU
from vitreous.nn.grid import window_partition, window_reverse
from vitreous.nn.layout import AxialBlock, WindowedAttention
from vitreous.nn.position import (
    BlockWithPosition,
    FactorisedPosition,
    LearnedAxesPosition,
    LearnedPosition,
    SinCosPosition,
    TokenPositions,
    gather_token_positions,
)
from vitreous.nn.relative import GridAttention, RelativeAttention
from vitreous.nn.rotary import PairRotation, RotaryAttention, apply_rotary_embedding


def randomise_parameters(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def attend_by_loop(attention, x, logits):
    """(N, D) -> (N, D) by loops over heads and queries; the softmax is over `logits(head, i, j, q, k)`."""
    q, k, v = (projection[0] for projection in attention.project_qkv(x[None]))
    heads = []
    for head in range(attention.heads):
        outputs = []
        for i in range(len(x)):
            weights = torch.stack([logits(head, i, j, q[head, i], k[head, j]) for j in range(len(x))]).softmax(0)
            outputs.append(sum(weights[j] * v[head, j] for j in range(len(x))))
        heads.append(torch.stack(outputs))
    return attention.out(torch.cat(heads, -1))


@pytest.mark.parametrize("keep", [None, [[4, 0, 3], [1, 2, 5]]], ids=["all", "some"])
def test_relative_positions_match_the_loop(keep):
    attention, positions = (
        randomise_parameters(RelativeAttention(8, 2, tokens=7)),
        TokenPositions((2, 3), 1, None if keep is None else torch.tensor(keep)),
    )
    x = torch.randn(2, 7 if keep is None else 4, 8)
    output = attention(x, positions)
    for image_index in range(2):
        token_indices = list(range(7)) if keep is None else [0, *(1 + patch_index for patch_index in keep[image_index])]

        def logits(head, i, j, q, k, token_indices=token_indices):
            return (q @ k + q @ attention.table[token_indices[i] - token_indices[j] + 6, head]) / 2

        assert torch.allclose(output[image_index], attend_by_loop(attention, x[image_index], logits), atol=1e-5)
    assert torch.allclose(attention.compute_weights(x, positions).sum(-1), torch.ones(()))


def test_relative_attention_accepts_other_grid_sizes():
    attention = randomise_parameters(RelativeAttention(8, 2, tokens=7))
    assert attention(torch.randn(1, 13, 8), TokenPositions((3, 4), 1)).shape == (1, 13, 8)


def test_rotary_logits_depend_only_on_coordinate_offsets():
    """With the same q and k at all positions, a logit depends only on the offset between two patches on each axis."""
    attention = randomise_parameters(RotaryAttention(16, 2))
    x = torch.cat([torch.randn(1, 1, 16), torch.randn(1, 1, 16).expand(1, 12, 16)], 1)
    q, k, _ = attention.project_rotated_qkv(x, TokenPositions((3, 4), 1))
    logits = (q @ k.mT)[0, :, 1:, 1:].view(2, 3, 4, 3, 4)
    by_offset: dict[tuple[int, int], list] = {}
    for i in range(3):
        for j in range(4):
            for m in range(3):
                for n in range(4):
                    by_offset.setdefault((m - i, n - j), []).append(logits[:, i, j, m, n])
    assert all(
        torch.allclose(torch.stack(same), same[0].expand(len(same), -1), atol=1e-5) for same in by_offset.values()
    )
    assert not torch.allclose(by_offset[0, 0][0], by_offset[0, 1][0], atol=1e-3)
    plain_q, plain_k, _ = attention.project_qkv(x)
    # prefix tokens are not rotated
    assert torch.equal(q[..., 0, :], plain_q[..., 0, :]) and torch.equal(k[..., 0, :], plain_k[..., 0, :])


def test_rotary_positions_match_timm():
    timm = pytest.importorskip("timm.layers")
    rope = timm.RotaryEmbeddingCat(dim=8, in_pixels=False, feat_shape=[3, 4], max_res=4, temperature=10000)
    attention, q = RotaryAttention(16, 2), torch.randn(1, 2, 12, 8)
    angles = attention.angles((3, 4), 8).view(12, 4)
    # timm pairs neighbouring channels, this package channels i and i + d / 2
    ours = apply_rotary_embedding(q.unflatten(-1, (4, 2)).mT.flatten(-2), angles.cos(), angles.sin())
    theirs = timm.apply_rot_embed_cat(q, rope.get_embed()).unflatten(-1, (4, 2)).mT.flatten(-2)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_rotary_embedding_of_a_patch_subset_matches_all_patches():
    attention, x = randomise_parameters(RotaryAttention(16, 2)), torch.randn(2, 7, 16)
    keep = torch.tensor([[0, 5], [4, 1]])
    q = attention.project_rotated_qkv(x, TokenPositions((2, 3), 1))[0]
    subset = torch.stack([x[image_index][[0, *(keep[image_index] + 1).tolist()]] for image_index in range(2)])
    rotated = attention.project_rotated_qkv(subset, TokenPositions((2, 3), 1, keep))[0]
    for image_index in range(2):
        assert torch.allclose(
            rotated[image_index], q[image_index][:, [0, *(keep[image_index] + 1).tolist()]], atol=1e-6
        )


def test_decomposed_positions_match_the_loop():
    attention, x = randomise_parameters(GridAttention(8, 2, (2, 3))), torch.randn(2, 2, 3, 8)
    output = attention(x)
    assert output.shape == (2, 2, 3, 8)

    def logits(head, i, j, q, k):
        row_offset, column_offset = i // 3 - j // 3, i % 3 - j % 3
        return q @ k / 2 + q @ attention.rows[row_offset + 1] + q @ attention.columns[column_offset + 2]

    for image_index in range(2):
        assert torch.allclose(
            output[image_index].flatten(0, 1),
            attend_by_loop(attention, x[image_index].flatten(0, 1), logits),
            atol=1e-5,
        )
    assert torch.allclose(attention.compute_weights(x).sum(-1), torch.ones(()))
    assert attention(torch.randn(1, 4, 5, 8)).shape == (1, 4, 5, 8)  # tables are resized


@pytest.mark.parametrize(("short", "learned", "logits"), [(1024, 1024, 1 << 21), (1024, 1024, 3 * 20**2), (0, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_masked", [False, True])
def test_decomposed_attention_implementations_agree(short, learned, logits, dtype, is_masked, monkeypatch):
    """Matrix products, chunked or not, and the fused kernel match explicit logits."""
    for name, value in (
        ("MAX_UNFUSED_TOKENS", short),
        ("MAX_UNFUSED_TRAINING_TOKENS", learned),
        ("WINDOW_CHUNK_LOGITS", logits),
    ):
        monkeypatch.setattr(vitreous.nn.attention, name, value)
    torch.manual_seed(0)
    layer, limit = (
        randomise_parameters(GridAttention(16, 2, (4, 5))),
        ERROR_LIMITS["fp32" if dtype == torch.float32 else "bf16"],
    )
    x = torch.randn(3, 2, 4, 5, 16, requires_grad=True)
    mask = torch.ones(20, 20).tril().bool()[None, None] if is_masked else None

    def attend_explicitly(x):
        q, k, v = layer.project_qkv(x.flatten(-3, -2))
        positions = torch.arange(20)
        down, right = positions[:, None] // 5 - positions // 5, positions[:, None] % 5 - positions % 5
        bias = torch.einsum("...qc,qkc->...qk", q, layer.rows[down + 3] + layer.columns[right + 4])
        logits_with_bias = q @ k.mT / 8**0.5 + bias
        p = (logits_with_bias if mask is None else logits_with_bias.masked_fill(~mask, -math.inf)).softmax(-1)
        return layer.out((p @ v).transpose(-3, -2).flatten(-2)).unflatten(-2, (4, 5)), p

    def compute_gradients(output):
        sums = (output.float() * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
        return torch.autograd.grad(sums, (x, layer.rows, layer.columns, layer.qkv.weight))

    expected, p = attend_explicitly(x)
    learning = compute_gradients(expected)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        answer = layer(x, mask)
        with torch.no_grad():
            again = layer(x, mask)
            assert relative_error(layer.compute_weights(x, mask).float(), p.detach()) < limit
            assert relative_error(layer.compute_weights(x, mask, slice(3, 7)).float(), p.detach()[..., 3:7, :]) < limit
    assert (
        relative_error(answer.detach().float(), expected.detach()) < limit
        and relative_error(again.float(), expected.detach()) < limit
    )
    for gradient, expected_gradient in zip(compute_gradients(answer), learning, strict=True):
        assert relative_error(gradient.float(), expected_gradient) < 2 * limit


def test_axial_block_attends_along_rows_then_columns():
    torch.manual_seed(0)
    row_block, column_block = (Block(8, Attention(8, 2), Mlp(8, 16)) for _ in range(2))
    x = torch.randn(2, 3, 4, 8)
    expected = x.clone()
    for i in range(3):
        expected[:, i] = row_block(expected[:, i])
    for j in range(4):
        expected[:, :, j] = column_block(expected[:, :, j])
    assert torch.allclose(AxialBlock(row_block, column_block)(x), expected, atol=1e-6)


@pytest.mark.parametrize("size", [(2, 2), (3, 2), (5, 7)])
def test_windows_match_the_loop(size):
    """Each window separately, padded with zeros at the edge of the grid."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6, 8)
    attention = randomise_parameters(GridAttention(8, 2, size))
    expected = torch.zeros_like(x)
    for top in range(0, 5, size[0]):
        for left in range(0, 6, size[1]):
            window = torch.zeros(2, *size, 8)
            inside = x[:, top : top + size[0], left : left + size[1]]
            window[:, : inside.shape[1], : inside.shape[2]] = inside
            expected[:, top : top + size[0], left : left + size[1]] = attention(window)[
                :, : inside.shape[1], : inside.shape[2]
            ]
    assert torch.allclose(WindowedAttention(attention, size, pad="zeros")(x), expected, atol=1e-5)


def test_whole_grid_window_matches_plain_grid_attention():
    attention, x = randomise_parameters(GridAttention(8, 2, (3, 4))), torch.randn(2, 3, 4, 8)
    assert torch.allclose(WindowedAttention(attention, (3, 4))(x), attention(x), atol=1e-6)


@pytest.mark.parametrize("grid,size", [((4,), (3,)), ((4, 6), (2, 3)), ((5, 3), (2, 2)), ((2, 3, 5), (2, 2, 2))])
def test_join_windows_inverts_split_windows(grid, size):
    x = torch.randn(2, *grid, 3)
    assert torch.equal(window_reverse(window_partition(x, size), grid), x)


def test_learned_axes_positions_concatenate_one_table_per_axis():
    position = LearnedAxesPosition((2, 3), 8)
    table = position.read((2, 3))
    for i in range(2):
        for j in range(3):
            assert torch.equal(table[i, j], torch.cat([position.tables[1][j], position.tables[0][i]]))
    with pytest.raises(ValueError, match="not divisible by the number of axes"):
        LearnedAxesPosition((2, 3, 4), 8)


def test_factorised_positions_sum_axes_and_are_resized():
    position = FactorisedPosition((2, 3), 8)
    table = position.read((2, 3))
    for i in range(2):
        for j in range(3):
            assert torch.allclose(table[i, j], position.axes[0].table[i] + position.axes[1].table[j])
    wide = position.read((2, 12))
    assert wide.shape == (2, 12, 8) and torch.allclose(
        wide[1] - wide[0], (table[1] - table[0])[:1].expand(12, 8), atol=1e-6
    )


def test_sincos_positions_match_big_vision():
    """The layout of arXiv:2205.01580 and its exponent, i / (D / 4 - 1)."""
    table = SinCosPosition(8, "big-vision").read((2, 3))
    assert table[0, 0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert table[0, 1].tolist() == pytest.approx([0.84147098, 0.0001, 0.54030231, 1, 0, 0, 1, 1], abs=1e-6)
    expected = [0.90929743, 0.0002, -0.41614684, 0.99999998, 0.84147098, 0.0001, 0.54030231, 1]
    assert table[1, 2].tolist() == pytest.approx(expected, abs=1e-6)


def test_block_with_position_adds_positions_to_its_input():
    block, position, slots = (
        Block(8, Attention(8, 2), Mlp(8, 16)),
        LearnedPosition((2, 3), 8),
        torch.nn.Parameter(torch.randn(1, 8)),
    )
    x = torch.randn(2, 2 + 6, 8)  # a class token with a position embedding, a register without
    added = torch.cat([slots, torch.zeros(1, 8), position.table.view(6, 8)])
    positions = TokenPositions((2, 3), 2)
    assert torch.allclose(BlockWithPosition(block, position, slots)(x, positions), block(x + added), atol=1e-6)
    keep = torch.tensor([[5, 1], [0, 2]])
    subset = gather_token_positions(position, slots, TokenPositions((2, 3), 2, keep))
    assert torch.equal(subset[1], added[[0, 1, 2, 4]])


def test_swiglu_matches_the_formula():
    mlp, x = randomise_parameters(SwiGLU(4, 6)), torch.randn(3, 4)
    a, b = mlp.fc1(x)[:, :6], mlp.fc1(x)[:, 6:]
    assert torch.allclose(mlp(x), mlp.fc2(a * torch.sigmoid(a) * b), atol=1e-6)


def test_quick_gelu_matches_the_formula():
    mlp, x = randomise_parameters(Mlp(4, 6, gelu="quick")), torch.randn(3, 4)
    hidden = mlp.fc1(x)
    assert torch.allclose(mlp(x), mlp.fc2(hidden * torch.sigmoid(1.702 * hidden)), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [slice(None), slice(1)])
def test_rotation_without_gradients_equals_rotation_with_gradients(dtype, queries):
    attention = randomise_parameters(RotaryAttention(16, 2)).to(dtype)
    x, positions = torch.randn(2, 7, 16).to(dtype), TokenPositions((2, 3), 1)
    with torch.no_grad():
        fast = attention(x, positions, queries=queries)
    reference = attention(x, positions, queries=queries)
    assert fast.dtype == dtype and reference.requires_grad
    assert torch.allclose(fast, reference, atol=1e-6 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("with_key_bias", [True, False])
@pytest.mark.parametrize("index", [None, torch.tensor([[0, 3, 4], [1, 2, 5]])])
def test_rotary_query_subset_matches_full_attention(with_key_bias, index):
    """Values, and the gradient of the query-key-value layer."""
    attention = RotaryAttention(16, 2)
    if not with_key_bias:
        attention.qkv = QkvLinearWithoutKeyBias(16)
    randomise_parameters(attention).double()
    positions = TokenPositions((2, 3), 1, index)
    x = torch.randn(2, 7 if index is None else 4, 16, dtype=torch.float64)
    few, full = attention(x, positions, queries=slice(2)), attention(x, positions)[:, :2]
    assert torch.allclose(few, full, atol=1e-6)
    grads = [torch.autograd.grad(y.square().sum(), attention.qkv.weight)[0] for y in (few, full)]
    assert torch.allclose(*grads, atol=1e-5)


def test_rotation_has_the_gradient_of_its_formula():
    q, k = (torch.randn(2, 3, 7, 8, dtype=torch.float32, requires_grad=True) for _ in range(2))
    angles, weights = torch.randn(7, 4), torch.randn(2, 3, 7, 8)
    (PairRotation.apply(q, angles.cos(), angles.sin()) * weights).sum().backward()
    with torch.no_grad():
        k.copy_(q)
    (apply_rotary_embedding(k, angles.cos(), angles.sin()) * weights).sum().backward()
    assert torch.allclose(q.grad, k.grad, atol=1e-6)
    assert torch.equal(q.detach(), k.detach())  # the input is unchanged
