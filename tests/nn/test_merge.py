from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.test_contracts import build_random_vit, draw_images
from vitreous.nn.frozen import freeze_for_inference
from vitreous.nn.merge import TokenMergingEncoder, merge_similar_tokens


def merge_tokens_by_loop(tokens, metric, sizes, count, protected):
    """`merge_similar_tokens` by loops over images and pairs."""
    results = []
    for x, m, s in zip(tokens, metric, sizes, strict=True):
        m = m / m.norm(dim=-1, keepdim=True)
        sources, targets = list(range(protected, len(x), 2)), list(range(protected + 1, len(x), 2))
        pairs = {a: max(targets, key=lambda b: (m[a] @ m[b]).item()) for a in sources}
        merged_away = sorted(sources, key=lambda a: -(m[a] @ m[pairs[a]]).item())[
            : min(count, (len(x) - protected) // 2)
        ]
        total, weight = {b: x[b] * s[b] for b in targets}, {b: s[b].clone() for b in targets}
        for a in merged_away:
            total[pairs[a]] = total[pairs[a]] + x[a] * s[a]
            weight[pairs[a]] += s[a]
        tokens_left = (
            [x[p] for p in range(protected)]
            + [x[a] for a in sources if a not in merged_away]
            + [total[b] / weight[b] for b in targets]
        )
        results.append(sorted(tuple(row.tolist()) for row in tokens_left))
    return results


@given(st.integers(2, 14), st.integers(0, 2), st.integers(0, 9), st.integers(0, 2**31))
def test_merging_matches_the_loop(length, protected, count, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens, metric = (torch.randn(2, length + protected, d, generator=generator) for d in (5, 3))
    sizes = torch.randint(1, 4, (2, length + protected, 1), generator=generator).float()
    merged, total = merge_similar_tokens(tokens, metric, sizes, count, protected)
    assert merged.shape[1] == tokens.shape[1] - min(count, length // 2)
    assert torch.allclose(total.sum(1), sizes.sum(1))
    assert torch.allclose(merged[:, :protected], tokens[:, :protected])
    expected = merge_tokens_by_loop(tokens, metric, sizes, count, protected)
    for tokens_left, expected_rows in zip(merged, expected, strict=True):
        assert torch.allclose(
            torch.tensor(sorted(tuple(token_row.tolist()) for token_row in tokens_left)),
            torch.tensor(expected_rows),
            atol=1e-5,
        )
    assert torch.allclose((merged * total).sum(1), (tokens * sizes).sum(1), atol=1e-4)


def build_merging_model(model, count):
    twin = freeze_for_inference(model)
    twin.encoder = TokenMergingEncoder(twin.encoder, count, model.config.prefix, model.config.pool == "mean")
    return twin


POOLING_OPTIONS = [
    {},
    {"pool": "mean", "class_token": False, "positions": {"slots": 0}},
    {"pool": "mean", "norm": {"final": "pooled"}},
    {"registers": 2},
]


@pytest.mark.parametrize("changes", POOLING_OPTIONS)
@torch.inference_mode()
def test_zero_merges_match_the_model(changes):
    model = build_random_vit(changes).eval()
    images = draw_images(model)
    assert torch.allclose(build_merging_model(model, 0)(images), model(images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", POOLING_OPTIONS)
@torch.inference_mode()
def test_merging_identical_tokens_does_not_change_the_output(changes):
    """Proportional attention: a token of size two counts as two equal tokens, also in pooling."""
    model = build_random_vit(changes).eval()
    model.position.table.zero_()
    images = torch.randn(2, 3, 1, 1).expand(2, 3, 16, 16).contiguous()  # one colour, so all patches are the same token
    assert torch.allclose(build_merging_model(model, 3)(images), model(images), atol=1e-4, rtol=1e-4)
