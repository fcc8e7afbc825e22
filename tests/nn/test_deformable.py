"""Multi-scale deformable attention."""

import math

import numpy as np
import pytest
import torch

from vitreous.nn.deformable import DeformableAttention, initial_sampling_offsets, patch_centres, sample_levels

LEVEL_GRIDS = [(5, 4), (3, 2), (1, 2)]


def sample_levels_by_loop(values, grids, locations, weights):
    """The docstring's loop, in float64."""
    batch, queries, heads, _, points, _ = locations.shape
    result = np.zeros((batch, queries, heads, values.shape[-1]))
    values, locations, weights = (x.detach().numpy() for x in (values, locations, weights))
    starts = [sum(rows * columns for rows, columns in grids[:level]) for level in range(len(grids))]
    for b in range(batch):
        for q in range(queries):
            for head in range(heads):
                for level, (rows, columns) in enumerate(grids):
                    for p in range(points):
                        x, y = locations[b, q, head, level, p].tolist()
                        x, y = x * columns - 0.5, y * rows - 0.5
                        for row in (math.floor(y), math.floor(y) + 1):
                            for column in (math.floor(x), math.floor(x) + 1):
                                if 0 <= row < rows and 0 <= column < columns:
                                    share = (1 - abs(y - row)) * (1 - abs(x - column))
                                    value = values[b, starts[level] + row * columns + column, head]
                                    result[b, q, head] += weights[b, q, head, level, p] * share * value
    return torch.from_numpy(result)


def test_sample_levels_matches_the_loop():
    torch.manual_seed(0)
    values = torch.randn(2, 28, 2, 3, dtype=torch.float64)
    locations = torch.rand(2, 4, 2, 3, 3, 2, dtype=torch.float64) * 1.4 - 0.2  # outside too
    weights = torch.rand(2, 4, 2, 3, 3, dtype=torch.float64)
    expected = sample_levels_by_loop(values, LEVEL_GRIDS, locations, weights)
    torch.testing.assert_close(sample_levels(values, LEVEL_GRIDS, locations, weights), expected, rtol=0, atol=1e-12)
    single = sample_levels(values.float(), LEVEL_GRIDS, locations.float(), weights.float())
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=1e-5)


def test_deformable_attention_matches_the_loop():
    torch.manual_seed(0)
    attention = DeformableAttention(8, 2, 3, points=4, ratio=0.5).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    queries, values = torch.randn(2, 6, 8, dtype=torch.float64), torch.randn(2, 28, 8, dtype=torch.float64)
    centres = torch.rand(6, 1, 2, dtype=torch.float64)
    scale = torch.tensor([[columns, rows] for rows, columns in LEVEL_GRIDS])[:, None]
    locations = centres[:, :, None, None] + attention.offsets(queries).view(2, 6, 2, 3, 4, 2) / scale
    weights = attention.weights(queries).view(2, 6, 2, 12).softmax(-1).view(2, 6, 2, 3, 4)
    expected = attention.out(
        sample_levels_by_loop(attention.value(values).view(2, 28, 2, 2), LEVEL_GRIDS, locations, weights).flatten(2)
    )
    torch.testing.assert_close(attention(queries, centres, values, LEVEL_GRIDS), expected, rtol=0, atol=1e-5)


def test_zero_offsets_and_equal_weights_sample_the_query_position():
    torch.manual_seed(0)
    attention = DeformableAttention(8, 2, 1).double()
    torch.nn.init.zeros_(attention.offsets.bias)
    values = torch.randn(1, 20, 8, dtype=torch.float64)
    centres = patch_centres((5, 4), (1, 1)).double() / torch.tensor([4.0, 5.0])
    output = attention(values, centres[:, None], values, [(5, 4)])
    torch.testing.assert_close(output, attention.out(attention.value(values)), rtol=0, atol=1e-6)


def test_initial_sampling_offsets_lie_on_the_edges_of_squares():
    offsets = initial_sampling_offsets(4, 2, 3)
    assert offsets.shape == (4, 2, 3, 2)
    torch.testing.assert_close(offsets[:, 1, 2], torch.tensor([[3.0, 0], [0, 3], [-3, 0], [0, -3]]), rtol=0, atol=1e-6)
    assert torch.allclose(initial_sampling_offsets(8, 1, 1).abs().amax(-1), torch.ones(8, 1, 1))


def test_half_precision_samples_in_float32():
    torch.manual_seed(0)
    attention = DeformableAttention(8, 2, 3)
    queries, values, centres = torch.randn(1, 6, 8), torch.randn(1, 28, 8), torch.rand(6, 1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(queries, centres, values, LEVEL_GRIDS)
    assert torch.allclose(output.float(), attention(queries, centres, values, LEVEL_GRIDS), atol=0.05)


def test_indivisible_number_of_heads_is_rejected():
    with pytest.raises(ValueError, match="heads"):
        DeformableAttention(8, 3, 1)
