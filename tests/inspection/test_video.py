"""Inspection of video models: attention over space and time matches the fused forward pass."""

import pytest
import torch

from tests.inspection.test_watch import collect_attention_outputs, collect_calls
from tests.models.test_video import build_random_video_model, make_clips
from vitreous.errors import UsageError
from vitreous.inspection.attention import compute_attention_maps
from vitreous.inspection.distance import compute_attention_distances, uniform_attention_distance
from vitreous.inspection.hooks import visit_residual_states
from vitreous.nn.frozen import freeze_for_inference

ATTENTION_SPANS = {
    "joint": ["all", "all"],
    "factorised-encoder": ["space", "space", "time"],
    "factorised-attention": ["space", "time"] * 2,
    "factorised-dot-product": ["space", "time"] * 2,
}


def make_scaled_video_model(arrangement):
    """A model with activations near one, a class token and a register."""
    model = build_random_video_model({"arrangement": arrangement, "registers": 1})
    for parameter in model.parameters():
        parameter.data *= 0.3
    return model


@pytest.mark.parametrize("arrangement", ATTENTION_SPANS)
def test_attention_calls_match_the_forward_pass(arrangement):
    model = make_scaled_video_model(arrangement)
    x = make_clips(model)
    calls, outputs = collect_calls(model, x), collect_attention_outputs(model, x)
    assert [call.span for call in calls] == ATTENTION_SPANS[arrangement]
    for call in calls:
        weights = call.compute_weights()
        assert weights.shape[-3:] == (call.module.heads, call.tokens, call.tokens)
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        assert torch.allclose(torch.cat([chunk for _, chunk in call.iterate_chunks(1)], -2), weights, atol=1e-6)
    if arrangement == "factorised-dot-product":
        return
    for call, output in zip(calls, outputs, strict=True):
        heads = (call.compute_weights() @ call.module.project_qkv(call.x)[2]).transpose(-3, -2).flatten(-2)
        expected = output[:, 2:] if call.span == "time" and output.dim() == 4 else output
        assert torch.allclose(call.module.out(heads), expected, atol=1e-5)


def test_space_and_time_heads_concatenate_to_the_output():
    model = make_scaled_video_model("factorised-dot-product")
    x = make_clips(model)
    calls, outputs = collect_calls(model, x), collect_attention_outputs(model, x)
    for space, time, output in zip(calls[::2], calls[1::2], outputs, strict=True):
        attention = model.encoder.blocks[space.layer].attention.part
        values = attention.project_qkv(space.x)[2]  # (B, T, h, S, d)
        near = space.compute_weights() @ values[:, :, :1]
        time_output = (time.compute_weights() @ values[:, :, 1:, 2:].transpose(1, 3)).transpose(1, 3)
        heads = torch.cat([near[..., 2:, :], time_output], 2).transpose(-3, -2).flatten(-2)
        assert torch.allclose(attention.out(heads), output[:, :, 2:], atol=1e-5)


@pytest.mark.parametrize("arrangement", ATTENTION_SPANS)
def test_states_distances_and_frozen_models(arrangement):
    model = make_scaled_video_model(arrangement)
    x, collected = make_clips(model), []
    last = visit_residual_states(model, x, collected.append)
    assert [(state.layer, state.sublayer) for state in collected] == [
        (-1, "embedding"),
        *((i, sublayer) for i in (0, 1) for sublayer in ("attention", "mlp")),
    ]
    assert all(state.patches.shape == (2, 3, 2, 3, 24) for state in collected)
    assert torch.allclose(model.encoder.norm(collected[-1].tokens)[:, 2:], last[:, 2:], atol=1e-5)
    of_layers = compute_attention_distances(model, [x])
    assert list(of_layers.spans) == ATTENTION_SPANS[arrangement] and of_layers.per_image.isfinite().any(-1).all()
    assert set(of_layers.uniform) <= {uniform_attention_distance((3, 2, 3), (2, 4, 4)), 0.0}
    for call, frozen_call in zip(collect_calls(model, x), collect_calls(freeze_for_inference(model), x), strict=True):
        assert torch.allclose(call.compute_weights(), frozen_call.compute_weights(), atol=1e-5)
    if arrangement != "joint":
        with pytest.raises(UsageError, match="its time slot"):
            compute_attention_maps(model, x, [0])
