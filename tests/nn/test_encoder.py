"""Intermediate features match forward hooks."""

import pytest
import torch

from vitreous.models.zoo import create_untrained_model
from vitreous.nn.encoder import Encoder, compile_blocks
from vitreous.nn.frozen import freeze_for_inference

MODEL_OPTIONS = {
    "ViT-32x4/8": {},
    "ViT-32x4/4": {"positions": {"at": "shared"}},
    "ViT-32x4/2": {"attention": {"kind": "rotary"}, "positions": {"kind": "none"}, "heads": 2},
    "Axial-ViT-32x4/8": {},
    "Conv+ViT-32x4/8": {},
}


def collect_block_outputs(model, images):
    """The input of the encoder's first block and the outputs of all blocks."""
    outputs = []
    first_handle = model.encoder.blocks[0].register_forward_pre_hook(lambda module, inputs: outputs.append(inputs[0]))
    handles = [
        first_handle,
        *(b.register_forward_hook(lambda module, inputs, out: outputs.append(out)) for b in model.encoder.blocks),
    ]
    last = model.features(images)
    for handle in handles:
        handle.remove()
    return [output.flatten(1, -2) for output in outputs], last


@pytest.mark.parametrize("name", MODEL_OPTIONS)
@pytest.mark.parametrize("fast", [False, True])
def test_intermediate_features_match_forward_hooks(name, fast):
    torch.manual_seed(0)
    model = create_untrained_model(name, image_size=16, num_classes=3, **MODEL_OPTIONS[name]).eval()
    model = freeze_for_inference(model, packed=True) if fast else model
    images = torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        outputs, last = collect_block_outputs(model, images)
        taps = model.features_after(images, (4, 0, 3))
    for tap, output in zip((4, 0, 3), taps, strict=True):
        torch.testing.assert_close(output, outputs[tap], rtol=0, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(model.encoder.norm(taps[0]), last, rtol=0, atol=0)


def test_blocks_after_the_last_requested_depth_are_skipped():
    class Stop(torch.nn.Module):
        def forward(self, x):
            raise AssertionError

    encoder = Encoder(4, [torch.nn.Identity(), torch.nn.Linear(4, 4), Stop()])
    x = torch.randn(1, 3, 4)
    first, second = encoder.features(x, (1, 2))
    assert first is x and torch.equal(second, encoder.blocks[1](x))
    for taps in ((), (-1,), (4,)):
        with pytest.raises(ValueError, match="taps must be one or more depths from 0 to 3, got "):
            encoder.features(x, taps)


def test_intermediate_features_have_gradients_with_recomputation():
    model = create_untrained_model("ViT-32x4/8", image_size=16, num_classes=3)
    images = torch.randn(2, 3, 16, 16)
    gradients = []
    for recompute in (False, True):
        model.encoder.recompute = recompute
        model.zero_grad()
        sum(tap.square().sum() for tap in model.features_after(images, (1, 3))).backward()
        gradients.append([p.grad.clone() for p in model.encoder.blocks[:3].parameters()])
        assert all(p.grad is None for p in model.encoder.blocks[3].parameters())
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


def test_compiled_blocks_share_graphs_for_all_drop_rates(monkeypatch):
    """Three graphs: the first block (drop rate 0), the blocks in between, and the last block, which computes only one
    token."""
    graphs = []

    def count_graphs(graph, inputs):
        graphs.append(graph)
        return graph

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: compile_(module, backend=count_graphs))
    torch._dynamo.reset()
    model = create_untrained_model("ViT-32x8/8", 16, 3, regularization={"drop_path": 0.3}).train()
    names = list(model.state_dict())
    compile_blocks(model)
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert len(graphs) == 3
    assert list(model.state_dict()) == names
    torch._dynamo.reset()
