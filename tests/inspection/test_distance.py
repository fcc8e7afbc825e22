"""Mean attention distance matches loops, for synthetic attention and for models."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.inspection.small_models import (
    MODEL_KINDS,
    SmallChunkAttentionCall,
    draw_probabilities,
    make_attention_call,
    make_images,
    make_model,
)
from vitreous.errors import DataError
from vitreous.inspection import distance as room
from vitreous.inspection.distance import (
    compute_attention_distances,
    mean_attention_distance,
    uniform_attention_distance,
)
from vitreous.inspection.hooks import visit_attention_calls
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.models.zoo import build_model, create_untrained_model


def compute_attention_distance_by_loop(weights, positions, prefix, patch):
    """The distance of one head's (T, T) weights; a patch without a position (padding) is None."""
    total, queries = 0.0, 0
    for q, query in enumerate(positions):
        queries += query is not None
        for k, key in enumerate(positions):
            if query is not None and key is not None:
                apart = [(a - b) * p for a, b, p in zip(query[-2:], key[-2:], patch[-2:], strict=True)]
                total += weights[prefix + q, prefix + k].item() * math.hypot(*apart)
    return total / queries


def list_grid_coordinates(grid):
    return list(itertools.product(*map(range, grid)))


@pytest.mark.parametrize(
    ("side", "patch", "pixels"),
    [(14, 16, 116.49222709), (7, 32, 115.50289414), (2, 16, 13.65685425), (3, 16, 23.25298037)],
)
def test_uniform_attention_distance_matches_the_specification(side, patch, pixels):
    grid = (side, side)
    assert uniform_attention_distance(grid, (patch, patch)) == pytest.approx(pixels, abs=1e-8)
    even = torch.full((2, side**2, side**2), 1 / side**2)
    assert mean_attention_distance(make_attention_call(even, grid), (patch, patch), grid)[0].tolist() == pytest.approx(
        [pixels] * 2, rel=1e-5
    )
    prefixed = torch.full((1, side**2 + 1, side**2 + 1), 1 / (side**2 + 1))
    patch_share = side**2 / (side**2 + 1)  # the class token's share is not redistributed to the patches
    assert mean_attention_distance(
        make_attention_call(prefixed, grid, 1), (patch, patch), grid
    ).item() == pytest.approx(pixels * patch_share, rel=1e-5)


@pytest.mark.parametrize(
    ("grid", "patch", "prefix"),
    [((3, 5), (4, 4), 0), ((4, 2), (8, 4), 3), ((1, 6), (2, 2), 1), ((2, 3, 2), (2, 4, 8), 1)],
)
def test_distances_on_any_grid_match_the_loop(grid, patch, prefix):
    tokens = prefix + math.prod(grid)
    maps = draw_probabilities(2, 3, tokens, tokens)
    distances = mean_attention_distance(make_attention_call(maps, grid, prefix), patch, grid)
    expected = [
        [compute_attention_distance_by_loop(head, list_grid_coordinates(grid), prefix, patch) for head in heads]
        for heads in maps
    ]
    assert distances.tolist() == [pytest.approx(head_distances, rel=1e-5) for head_distances in expected]
    few = SmallChunkAttentionCall(**vars(make_attention_call(maps, grid, prefix)))
    assert len(list(few.iterate_chunks())) > 1
    assert torch.allclose(mean_attention_distance(few, patch, grid), distances, rtol=1e-6)


@pytest.mark.parametrize("kind", ["plain", "registers", "axial", "windows"])
def test_model_attention_distances_match_the_loop(kind):
    model, x, grid = make_model(kind), make_images(), (4, 5)
    distances = compute_attention_distances(model, [x])
    calls = []
    visit_attention_calls(model, x, calls.append)
    for block_index, call in enumerate(calls):
        weights = call.compute_weights()
        weights = weights.reshape(2, -1, *weights.shape[-3:])  # (B, S, h, T, T)
        sequences = [list_grid_coordinates(call.grid)] * weights.shape[1]
        if call.span == "window":  # 3 x 3 windows of a 4 x 5 grid: positions beyond the grid are padding
            sequences = [
                [
                    (top + i, left + j) if top + i < 4 and left + j < 5 else None
                    for i, j in list_grid_coordinates((3, 3))
                ]
                for top in (0, 3)
                for left in (0, 3)
            ]
        shares = torch.tensor([sum(position is not None for position in positions) for positions in sequences]).double()
        for image, head in itertools.product(range(2), range(2)):
            window_distances = [
                compute_attention_distance_by_loop(w[head], positions, call.prefix, (4, 4))
                for w, positions in zip(weights[image], sequences, strict=True)
            ]
            expected_distance = (torch.tensor(window_distances).double() * shares / shares.sum()).sum().item()
            assert distances.per_image[image, block_index, head].item() == pytest.approx(expected_distance, rel=1e-5)
    expected = {"axial": ["row", "column"] * 2, "windows": ["window", "all"]}.get(kind, ["all"] * 2)
    assert list(distances.spans) == expected and distances.layers == ((0, 0, 1, 1) if kind == "axial" else (0, 1))
    assert set(distances.uniform) == {
        "axial": {uniform_attention_distance((1, 5), (4, 4)), uniform_attention_distance((4, 1), (4, 4))},
        "windows": {uniform_attention_distance(grid, (4, 4)), uniform_attention_distance(grid, (4, 4), (3, 3))},
    }.get(kind, {uniform_attention_distance(grid, (4, 4))})


def test_uniform_attention_in_windows_is_the_mean_over_all_queries():
    distance_by_size = {sides: uniform_attention_distance(sides, (4, 4)) for sides in ((3, 3), (3, 2), (1, 3), (1, 2))}
    assert uniform_attention_distance((4, 5), (4, 4), (3, 3)) == pytest.approx(
        sum(math.prod(sides) * pixels for sides, pixels in distance_by_size.items()) / 20
    )


def test_distances_are_batch_independent_and_one_image_has_zero_std(monkeypatch):
    model, x = make_model("registers"), make_images(5)
    distances = compute_attention_distances(model, [x])
    batched_distances = compute_attention_distances(model, x.split(2))
    assert distances.per_image.shape == (5, 2, 2)
    assert torch.allclose(distances.per_image, batched_distances.per_image, rtol=1e-5)
    assert torch.allclose(distances.mean, distances.per_image.mean(0)) and torch.allclose(
        distances.std, (distances.per_image - distances.mean).square().mean(0).sqrt()
    )
    assert compute_attention_distances(model, [x[:1]]).std.tolist() == [[0, 0]] * 2
    monkeypatch.setattr(
        room,
        "visit_attention_calls",
        lambda model, x, each: visit_attention_calls(
            model, x, lambda call: each(SmallChunkAttentionCall(**vars(call)))
        ),
    )
    for kind in (*MODEL_KINDS, "axial", "windows"):
        monkeypatch.undo()
        expected = compute_attention_distances(make_model(kind), [x]).per_image
        monkeypatch.setattr(
            room,
            "visit_attention_calls",
            lambda model, x, each: visit_attention_calls(
                model, x, lambda call: each(SmallChunkAttentionCall(**vars(call)))
            ),
        )
        assert torch.allclose(compute_attention_distances(make_model(kind), [x]).per_image, expected, rtol=1e-5), kind


def test_distances_of_hybrids_and_video_models_are_in_frame_pixels():
    hybrid = create_untrained_model("Conv+ViT-16x2/8", (32, 16), 3, heads=2).eval()
    for parameter in hybrid.parameters():
        parameter.data.mul_(0)
    tokens = 4 * 2 + hybrid.config.prefix
    assert compute_attention_distances(hybrid, [make_images(1, (32, 16))]).mean.flatten().tolist() == pytest.approx(
        [uniform_attention_distance((4, 2), (8, 8)) * 8 / tokens] * 4
    )
    video = build_model(
        ViTConfig(
            image=(4, 8, 12),
            patch=(2, 4, 4),
            channels=1,
            width=8,
            depth=1,
            heads=2,
            class_token=False,
            pool="mean",
            mlp=MlpConfig(hidden=8),
        )
    )
    for parameter in video.parameters():
        parameter.data.mul_(0)
    assert compute_attention_distances(video, [torch.randn(1, 1, 4, 8, 12)]).mean.tolist() == [
        pytest.approx([uniform_attention_distance((2, 3), (4, 4))] * 2)
    ]


def test_empty_input_is_rejected():
    with pytest.raises(DataError, match="no images"):
        compute_attention_distances(make_model(), [])
