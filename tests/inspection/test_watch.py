"""Recorded attention and residual states match the forward pass, and recording leaves the model unchanged."""

from __future__ import annotations

import pytest
import torch

from tests.inspection.small_models import IMAGE_SIZE, LOCAL_MODEL_KINDS, MODEL_KINDS, make_images, make_model
from vitreous.errors import UsageError
from vitreous.inspection.attention import compute_attention_maps
from vitreous.inspection.distance import compute_attention_distances
from vitreous.inspection.gradient import compute_relevance
from vitreous.inspection.hooks import CachedLayer, visit_attention_calls, visit_residual_states
from vitreous.inspection.rollout import compute_rollout
from vitreous.models.zoo import create_untrained_model
from vitreous.nn.frozen import can_pack, freeze_for_inference


def collect_calls(model, x):
    calls = []
    visit_attention_calls(model, x, calls.append)
    return calls


def collect_attention_outputs(model, x):
    """The outputs of every attention layer, recorded by forward hooks in execution order."""
    outputs = []
    layers = [module for module in model.modules() if hasattr(module, "compute_weights")]
    handles = [
        layer.register_forward_hook(lambda module, inputs, out: outputs.append(out.detach())) for layer in layers
    ]
    with torch.no_grad():
        model.features(x)
    for handle in handles:
        handle.remove()
    return outputs


@pytest.mark.parametrize("kind", [*MODEL_KINDS, *LOCAL_MODEL_KINDS])
def test_attention_weights_reproduce_the_fused_output(kind):
    model, x = make_model(kind), make_images()
    calls, outputs = collect_calls(model, x), collect_attention_outputs(model, x)
    assert [call.layer for call in calls] == ([0, 0, 1, 1] if kind == "axial" else [0, 1])
    assert len(outputs) == len(calls)
    for call, output in zip(calls, outputs, strict=True):
        weights = call.compute_weights()
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
        tokens = call.x if call.x.shape[-2] == call.tokens else call.x.flatten(-3, -2)
        values = call.module.project_qkv(tokens)[2]
        heads = (weights @ values).transpose(-3, -2).flatten(-2)
        assert torch.allclose(call.module.out(heads).reshape(output.shape), output, atol=1e-5)


@pytest.mark.parametrize("kind", [*MODEL_KINDS, *LOCAL_MODEL_KINDS])
def test_chunks_match_full_weights_and_compute_keys_once(kind, monkeypatch):
    calls = []
    forward = CachedLayer.forward
    monkeypatch.setattr(
        CachedLayer, "forward", lambda self, x: (calls.append(self.output is None), forward(self, x))[1]
    )
    for call in collect_calls(make_model(kind), make_images()):
        calls.clear()
        chunks = list(call.iterate_chunks(max_bytes=1))
        assert len(chunks) == call.tokens == len(calls) and sum(calls) == 1
        assert torch.allclose(torch.cat([weights for _, weights in chunks], -2), call.compute_weights(), atol=1e-6)


@pytest.mark.processor
@pytest.mark.parametrize("kind", ["registers", "relative", "decomposed", "scaled", *LOCAL_MODEL_KINDS])
def test_frozen_and_bf16_models_have_the_same_attention_weights(kind):
    model, x = make_model(kind), make_images()
    expected = [call.compute_weights() for call in collect_calls(model, x)]
    variants = [
        (freeze_for_inference(model), 1e-5),
        (freeze_for_inference(model, torch.bfloat16), 0.25),
        (make_model(kind).bfloat16(), 0.25),
    ]
    variants += [(freeze_for_inference(model, torch.float32, packed=True), 1e-5)] if can_pack(torch.float32) else []
    for variant, limit in variants:
        variant_weights = [call.compute_weights() for call in collect_calls(variant, x)]
        assert all(weights.dtype == torch.float32 for weights in variant_weights)
        assert max(((a - b).norm() / b.norm()).item() for a, b in zip(variant_weights, expected, strict=True)) < limit


def test_residual_states_lead_to_the_final_tokens():
    model, x = make_model("registers"), make_images()
    states = []
    tokens = visit_residual_states(model, x, states.append)
    assert [(state.layer, state.sublayer) for state in states] == [(-1, "embedding")] + [
        (i, a) for i in (0, 1) for a in ("attention", "mlp")
    ]
    with torch.no_grad():
        assert torch.equal(tokens, model.features(x)) and torch.equal(model.encoder.norm(states[-1].tokens), tokens)
        assert torch.equal(states[0].patches, model.add_positions(model.project(x)).unflatten(1, (4, 5)))


@pytest.mark.parametrize("train", [True, False])
def test_inspection_leaves_the_model_unchanged(train):
    model, x = make_model("plain", regularization={"dropout": 0.1, "drop_path": 0.1}).train(train), make_images()
    model.encoder.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = [sorted(vars(module)) for module in model.modules()]
    for inspect_model in (
        lambda: compute_attention_distances(model, [x]),
        lambda: compute_rollout(model, x),
        lambda: compute_relevance(model, x),
        lambda: compute_attention_maps(model, x, [0]),
    ):
        inspect_model()
        with pytest.raises(ZeroDivisionError):
            visit_attention_calls(model, x, lambda call: 1 / 0)
        assert [module.training for module in model.modules()] == modes
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
        assert not any(
            module._forward_pre_hooks or module._forward_hooks or module._backward_hooks for module in model.modules()
        )
        assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
        assert [sorted(vars(module)) for module in model.modules()] == attributes
        assert torch.is_grad_enabled()


def test_a_compiled_model_can_be_inspected_and_stays_compiled():
    model, x = make_model(), make_images()
    expected, maps, relevance = model(x), compute_rollout(model, x).joint, compute_relevance(model, x).relevance
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model.compile(backend=backend)
    assert torch.allclose(model(x), expected, atol=1e-6)
    graphs = len(compiled)
    assert graphs
    assert torch.allclose(compute_rollout(model, x).joint, maps, atol=1e-6)
    assert torch.allclose(compute_relevance(model, x).relevance, relevance, atol=1e-6)
    assert torch.allclose(model(x), expected, atol=1e-6)
    assert len(compiled) == graphs


def test_models_without_global_attention_are_rejected_with_a_hint():
    resnet = create_untrained_model("BiT-R50x1", 32, 3, blocks=(1, 1), width=16)
    for inspect_model in (
        lambda: compute_attention_distances(resnet, [make_images(1, (32, 32))]),
        lambda: compute_rollout(resnet, make_images(1, (32, 32))),
    ):
        with pytest.raises(UsageError, match="no attention") as refused:
            inspect_model()
        assert "filters" in refused.value.hint
    for kind, attention_kind in (("axial", "row"), ("windows", "window")):
        for inspect_model in (compute_rollout, compute_relevance):
            with pytest.raises(UsageError, match=attention_kind) as refused:
                inspect_model(make_model(kind), make_images())
            assert "distance" in refused.value.hint
    with pytest.raises(UsageError, match="window"):
        compute_attention_maps(make_model("windows"), make_images(), [0])
    assert compute_attention_maps(make_model("windows"), make_images(), [1])[1].shape == (
        2,
        2,
        IMAGE_SIZE[0] // 4 * IMAGE_SIZE[1] // 4,
    )
