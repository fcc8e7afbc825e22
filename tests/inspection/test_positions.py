from __future__ import annotations

import math

import pytest
import torch

from tests.contracts import randomise
from vitreous.errors import UsageError
from vitreous.inspection.positions import (
    choose_tile_stride,
    compute_position_cosines,
    compute_rotary_kernel,
    get_position_embeddings,
    get_relative_position_tables,
    require_positions,
    similarity_range,
    summarise_similarity,
)
from vitreous.models.zoo import create_untrained_model
from vitreous.nn.grid import resize_position_table
from vitreous.nn.position import TokenPositions

GRID = (2, 3)
MODEL_SHAPE = {"image_size": (8, 12), "num_classes": 2}


def build_position_model(**changes):
    torch.manual_seed(0)
    return randomise(create_untrained_model("ViT-16x2/4", **(MODEL_SHAPE | changes)))


def compute_cosine_similarity(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def test_position_similarity_is_pairwise_cosine():
    table = get_position_embeddings(build_position_model())["input"]
    cosines = compute_position_cosines(table)
    assert cosines.shape == (*GRID, *GRID)
    for i, j, k, m in torch.cartesian_prod(*(torch.arange(n) for n in (*GRID, *GRID))).tolist():
        assert cosines[i, j, k, m].item() == pytest.approx(
            compute_cosine_similarity(table[i, j].tolist(), table[k, m].tolist()), abs=1e-5
        )
    assert torch.equal(compute_position_cosines(table, 2), cosines[::2, ::2])


def test_colour_range_excludes_self_similarity():
    cosines = compute_position_cosines(get_position_embeddings(build_position_model())["input"])
    pairs = [
        float(cosines[i, j, k, m])
        for i in range(2)
        for j in range(3)
        for k in range(2)
        for m in range(3)
        if (i, j) != (k, m)
    ]
    assert similarity_range(cosines) == pytest.approx((min(pairs), max(pairs)), abs=1e-6)
    assert similarity_range(cosines.view(6, 6)) == similarity_range(cosines)
    assert similarity_range(torch.ones(1, 1, 1, 1)) == (-1, 1)
    low, high = similarity_range(torch.full((4, 4), 0.5))
    assert high - low == pytest.approx(1e-3) and low < 0.5 < high


@pytest.mark.parametrize(("grid", "step"), [((7, 7), 1), ((14, 14), 1), ((14, 15), 2), ((28, 10), 2), ((64, 64), 5)])
def test_tile_stride_limits_tiles_to_fourteen_per_axis(grid, step):
    assert choose_tile_stride(grid) == step and -(-max(grid) // step) <= 14


def test_similarity_summary_matches_a_loop():
    similar = torch.randn(3, 4, 3, 4, generator=torch.Generator().manual_seed(0))
    sums = {"row": [], "column": [], "neither": []}
    for i, j, k, m in torch.cartesian_prod(*(torch.arange(n) for n in similar.shape)).tolist():
        if (i, j) != (k, m):
            sums["row" if i == k else "column" if j == m else "neither"].append(similar[i, j, k, m].item())
    summary = summarise_similarity(similar)
    for name, values in sums.items():
        assert getattr(summary, name) == pytest.approx(sum(values) / len(values), abs=1e-5)
    assert summary.contrast == pytest.approx((summary.row + summary.column) / 2 - summary.neither)


def test_similarity_summary_of_row_and_column_embeddings():
    """With row and column vectors concatenated, cosines are 1/2 within a row or column, and 0 elsewhere."""
    axes = torch.cat([torch.eye(4)[:, None].expand(4, 4, 4), torch.eye(4)[None].expand(4, 4, 4)], -1)
    assert summarise_similarity(compute_position_cosines(axes)) == pytest.approx((0.5, 0.5, 0.0), abs=1e-6)
    line = summarise_similarity(compute_position_cosines(torch.randn(1, 3, 8)))
    assert math.isnan(line.column) and math.isnan(line.contrast) and not math.isnan(line.row)


def test_position_embeddings_match_the_model():
    learned = build_position_model(positions={"resize": "bilinear"})
    assert torch.equal(
        get_position_embeddings(learned, (4, 5))["input"],
        resize_position_table(learned.position.table.detach(), (4, 5), "bilinear"),
    )
    per_block_model = build_position_model(positions={"at": "each", "kind": "axes"})
    assert list(get_position_embeddings(per_block_model)) == ["block 0", "block 1"]
    assert torch.equal(
        get_position_embeddings(per_block_model)["block 1"], per_block_model.encoder.blocks[1].position.read(GRID)
    )
    assert list(get_position_embeddings(build_position_model(positions={"at": "shared", "kind": "sincos"}))) == [
        "input"
    ]
    assert not get_position_embeddings(build_position_model(positions={"kind": "none"}, attention={"kind": "rotary"}))
    assert not get_position_embeddings(build_position_model()).get("input").requires_grad


def test_relative_position_tables():
    one_d = build_position_model(attention={"kind": "relative"}, positions={"kind": "none"})
    first_table, second_table = get_relative_position_tables(one_d)
    assert (first_table.layer, second_table.layer, first_table.axis) == (0, 1, "tokens")
    assert (
        first_table.vectors.shape == (one_d.config.heads, 13, 16 // one_d.config.heads) and first_table.zero_index == 6
    )  # 7 tokens
    assert torch.equal(first_table.vectors[0, 3], one_d.encoder.blocks[0].attention.part.table[3, 0])
    windows = build_position_model(
        class_token=False, pool="mean", attention={"kind": "decomposed", "window": 2, "global_blocks": (1,)}
    )
    assert [(t.layer, t.axis, t.vectors.shape[1]) for t in get_relative_position_tables(windows)] == [
        (0, "rows", 3), (0, "columns", 3), (1, "rows", 3), (1, "columns", 5)
    ]  # fmt: skip
    assert not get_relative_position_tables(build_position_model())


@pytest.mark.parametrize("grid", [GRID, (3, 4)])
def test_rotary_kernel_matches_logits_of_equal_vectors(grid):
    """Attention's rotated queries and keys of vectors whose pairs have length one, for each position."""
    rotary_model = build_position_model(attention={"kind": "rotary"}, positions={"kind": "none"})
    attention = rotary_model.encoder.blocks[0].attention.part
    kernel = compute_rotary_kernel(rotary_model, grid)
    assert kernel.shape == (2 * grid[0] - 1, 2 * grid[1] - 1)
    tokens, pairs = math.prod(grid), attention.qkv.in_features // attention.heads // 2
    same = torch.randn(pairs, 2, generator=torch.Generator().manual_seed(0))
    same = (same / same.norm(dim=1, keepdim=True)).T.flatten().expand(1, attention.heads, tokens, -1)
    attention.project_qkv = lambda x: (same, same, same)
    q, k, _ = attention.project_rotated_qkv(torch.zeros(1, tokens, 16), TokenPositions(grid))
    logits = (q[0, 0] @ k[0, 0].T / pairs).tolist()
    for a in range(tokens):
        for b in range(tokens):
            down, across = a // grid[1] - b // grid[1], a % grid[1] - b % grid[1]
            assert kernel[down + grid[0] - 1, across + grid[1] - 1].item() == pytest.approx(logits[a][b], abs=1e-5)
    assert compute_rotary_kernel(build_position_model()) is None


def test_models_without_positions_are_rejected():
    with pytest.raises(UsageError, match="BiT"):
        require_positions(create_untrained_model("BiT-R50x1", blocks=(1,), width=16))
    with pytest.raises(UsageError, match="a set"):
        require_positions(build_position_model(positions={"kind": "none"}))
    with pytest.raises(UsageError, match="rows and columns"):
        require_positions(build_position_model(axial=True, class_token=False, pool="mean", positions={"kind": "none"}))
    for changes in (
        {},
        {"positions": {"kind": "none"}, "attention": {"kind": "rotary"}},
        {"positions": {"kind": "sincos"}},
    ):
        require_positions(build_position_model(**changes))
