import pytest
import torch
from torch import nn

from tests.precision import relative_error
from vitreous.nn import kernels
from vitreous.nn.attention import Attention
from vitreous.nn.block import Block, Mlp, ResidualBranch
from vitreous.nn.encoder import Encoder, build_blocks
from vitreous.system.native import NativeLibrary, load_native_library


def test_layer_scale_of_zero_is_the_identity():
    block = Block(12, Attention(12, 3), Mlp(12, 24), layer_scale=0.0)
    x = torch.randn(2, 5, 12)
    assert torch.equal(block(x), x)


def test_stochastic_depth_drops_samples_and_preserves_the_mean():
    branch = ResidualBranch(nn.Identity(), 4, drop_path=0.25)
    nn.init.zeros_(branch.norm.weight)
    nn.init.ones_(branch.norm.bias)  # the branch adds exactly one
    torch.manual_seed(0)
    added = branch(torch.zeros(4000, 3, 4))
    values = added.flatten(1)
    assert torch.equal(values.min(1).values, values.max(1).values)  # each sample is kept or skipped entirely
    assert set(values[:, 0].unique().tolist()) <= {0.0, 1 / 0.75, torch.tensor(1 / 0.75).item()}
    assert abs(values[:, 0].mean() - 1) < 0.05
    assert torch.equal(branch.eval()(torch.zeros(2, 3, 4)), torch.ones(2, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gelu", ["none", "tanh"])
def test_recomputed_gelu_is_bit_identical(dtype, gelu, monkeypatch):
    """Neither GELU's values nor a copy of them are saved."""
    monkeypatch.setattr(kernels, "load_native_library", lambda: NativeLibrary(None, False, "left out"))
    torch.manual_seed(0)
    mlp, x = Mlp(24, 96, gelu=gelu).to(dtype), torch.randn(3, 5, 24).to(dtype).requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = mlp(x)
    assert sum(tensor.numel() == 3 * 5 * 96 for tensor in saved) == 1
    expected = mlp.fc2(mlp.forward_before_output(x))
    assert torch.equal(y, expected)
    upstream, tensors = torch.randn_like(y), [x, *mlp.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(z, tensors, upstream) for z in (y, expected)), strict=True):
        assert torch.equal(ours, theirs)
    mlp.fc2.requires_grad_(False)
    x.grad = None
    mlp(x).backward(upstream)
    assert mlp.fc2.weight.grad is None and x.grad is not None


@pytest.mark.skipif(load_native_library().library is None, reason=load_native_library().note)
@pytest.mark.parametrize("gelu", ["none", "tanh"])
@pytest.mark.parametrize("tokens", [5, 6])  # an odd and an even number of rows
def test_native_gelu_gradients_match_pytorch(gelu, tokens, monkeypatch):
    """The native kernel saves as few tensors."""
    torch.manual_seed(0)
    mlp, x = Mlp(24, 96, gelu=gelu).bfloat16(), torch.randn(3, tokens, 24).bfloat16().requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = mlp(x)
    assert sum(tensor.numel() == 3 * tokens * 96 for tensor in saved) == 1
    upstream, tensors = torch.randn_like(y), [x, *mlp.parameters()]
    gradients = torch.autograd.grad(y, tensors, upstream)
    exact = Mlp(24, 96, gelu=gelu).double()
    exact.load_state_dict(mlp.state_dict())
    wide = x.detach().double().requires_grad_()
    expected = torch.autograd.grad(exact(wide), [wide, *exact.parameters()], upstream.double())
    assert [relative_error(a, b) < 1e-2 for a, b in zip(gradients, expected, strict=True)] == [True] * len(tensors)
    mlp.fc2.requires_grad_(False)
    mlp(x).backward(upstream)
    assert mlp.fc2.weight.grad is None and relative_error(x.grad, expected[0]) < 1e-2


def test_dropout_positions_match_the_paper():
    """After the attention output, the GELU and the second layer of the MLP (appendix B.1); never on q, k, v."""
    torch.manual_seed(0)
    mlp = Mlp(4, 64, dropout=0.5)
    nn.init.ones_(mlp.fc1.bias)
    nn.init.eye_(mlp.fc2.weight)
    hidden = mlp(torch.zeros(1, 4))  # GELU(1), each hidden unit dropped or doubled
    assert set((hidden / torch.nn.functional.gelu(torch.ones(()))).round(decimals=3).flatten().tolist()) <= {0.0, 2.0}
    branch = ResidualBranch(nn.Identity(), 1000, dropout=0.5)
    zeros = (branch(torch.randn(1, 1000)) - 0 == 0).sum()
    assert zeros == 0  # the residual itself is never dropped


def test_drop_rates_rise_linearly_over_the_blocks():
    blocks = build_blocks(5, lambda index, rate: Block(8, Attention(8, 2), Mlp(8, 16), drop_path=rate), drop_path=0.2)
    assert [block.mlp.drop_path for block in blocks] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    same = build_blocks(
        3, lambda index, rate: Block(8, Attention(8, 2), Mlp(8, 16), drop_path=rate), drop_path=0.2, rises=False
    )
    assert [block.mlp.drop_path for block in same] == [0.2] * 3


def test_the_encoder_is_permutation_equivariant():
    encoder = Encoder(16, build_blocks(3, lambda index, rate: Block(16, Attention(16, 4), Mlp(16, 32)))).eval()
    x, order = torch.randn(2, 9, 16), torch.randperm(9)
    assert torch.allclose(encoder(x)[:, order], encoder(x[:, order]), atol=1e-5)


@pytest.mark.parametrize("gelu,value", [("none", 0.84134475), ("tanh", 0.84119199)])
def test_exact_and_tanh_gelu(gelu, value):
    mlp = Mlp(1, 1, gelu=gelu)
    for layer in (mlp.fc1, mlp.fc2):
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
    assert mlp(torch.ones(1)).item() == pytest.approx(value, abs=1e-6)
