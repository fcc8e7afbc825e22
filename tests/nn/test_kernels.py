"""Native kernels match PyTorch's operators, and are optional."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from tests.precision import relative_error
from vitreous.nn import kernels
from vitreous.nn.attention import dot_product_attention
from vitreous.nn.block import Mlp, ResidualBranch
from vitreous.nn.frozen import BFloat16OutputNorm, can_pack, freeze_for_inference
from vitreous.nn.rotary import apply_rotary_embedding
from vitreous.system.native import NativeLibrary, load_native_library

BF16_ROUNDING = 2.0**-8  # maximum relative rounding error of bfloat16
#: images, heads, queries, keys, channels: a single key, less than a tile, several tiles and a fraction, channels that
#: do not fill a tile
ATTENTION_SIZES = [
    (1, 1, 1, 1, 1),
    (2, 3, 5, 17, 8),
    (2, 6, 197, 197, 64),
    (3, 2, 33, 31, 80),
    (1, 2, 64, 65, 96),
    (2, 1, 1, 300, 72),
]
needs_native_kernels = pytest.mark.skipif(load_native_library().library is None, reason=load_native_library().note)
needs_amx_tiles = pytest.mark.skipif(
    not load_native_library().tiles, reason=f"tiles (AMX): {load_native_library().note}"
)


@needs_native_kernels
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 48), (2, 197, 384), (0, 32)])
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_layer_norm_matches_rounded_float32(shape, offset):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape) * 5 + offset, torch.randn(shape[-1]), torch.randn(shape[-1])
    normed, expected = kernels.layer_norm(x, weight, bias, 1e-6), F.layer_norm(x, shape[-1:], weight, bias, 1e-6)
    assert normed.dtype == torch.bfloat16 and normed.shape == x.shape
    assert torch.allclose(normed.float(), expected, rtol=BF16_ROUNDING, atol=1e-5 if offset == 0 else 1e-3)


@needs_native_kernels
def test_layer_norm_accepts_strided_and_constant_inputs():
    x, ones, zeros = torch.randn(4, 9, 32)[:, ::2], torch.ones(32), torch.zeros(32)
    expected = F.layer_norm(x, (32,), ones, zeros, 1e-6)
    assert torch.allclose(kernels.layer_norm(x, ones, zeros, 1e-6).float(), expected, rtol=BF16_ROUNDING, atol=1e-5)
    assert torch.equal(kernels.layer_norm(torch.full((2, 32), 7.0), ones, zeros, 1e-6), torch.zeros(2, 32).bfloat16())


@needs_native_kernels
@pytest.mark.parametrize("shape", [(1,), (15,), (16,), (17,), (3, 5, 7), (2, 197, 384)])
def test_mixed_precision_sum_is_exact(shape):
    x, y = torch.randn(shape), torch.randn(shape).bfloat16()
    assert torch.equal(kernels.add_bf16_to_float32(x, y), x + y)
    assert torch.equal(kernels.add_bf16_to_float32(x.mT.contiguous().mT if x.dim() > 1 else x, y), x + y)


@needs_native_kernels
@pytest.mark.parametrize("size", [(1, 1, 1, 2), (2, 3, 7, 24), (3, 6, 201, 64), (2, 4, 130, 96)])
@pytest.mark.parametrize("per_image", [False, True])
def test_rotation_rounds_the_float32_rotation(size, per_image):
    """For heads of a query-key-value product, which are not contiguous, and factors of all or of each image."""
    torch.manual_seed(0)
    images, heads, tokens, channels = size
    x = torch.randn(images, tokens, 3, heads, channels).bfloat16()[:, :, 1].transpose(1, 2)
    angles = torch.randn(*((images, 1) if per_image else ()), tokens, channels // 2)
    cos, sin = angles.cos(), angles.sin()
    expected = apply_rotary_embedding(x.float(), cos, sin)
    rotated = kernels.rotate_bf16(x, cos, sin)
    assert rotated.is_contiguous() and torch.allclose(rotated.float(), expected, rtol=BF16_ROUNDING, atol=1e-6)
    expected = apply_rotary_embedding(x.float(), cos, -sin)
    returned = kernels.rotate_bf16(x, cos, sin, is_backward=True)
    assert torch.allclose(returned.float(), expected, rtol=BF16_ROUNDING, atol=1e-6)


@needs_native_kernels
@pytest.mark.parametrize("form", list(kernels.GELU_GATES))
def test_gelu_matches_the_formula_for_all_bfloat16_values(form):
    """Within 5e-5 or the rounding of the result; infinite and NaN inputs give x f(x)."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = x[x.isfinite()]
    exact = x.double() * kernels.GELU_GATES[form](x.double()).nan_to_num(0.0)
    activated = kernels.gelu_bf16_(x.clone(), form).double()
    small = x.abs() < 1e4
    assert torch.allclose(activated[small], exact[small], rtol=BF16_ROUNDING, atol=5e-5)
    assert torch.equal(activated[~small], x[~small].double().clamp(min=0))
    assert kernels.gelu_bf16_(torch.tensor([math.inf, math.nan]).bfloat16(), form).tolist()[0] == math.inf
    assert kernels.gelu_bf16_(torch.tensor([math.nan] * 33).bfloat16(), form).isnan().all()


def build_gelu_derivative(form):
    """The derivative of x f(x), by autograd."""

    def compute(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad((x * kernels.GELU_GATES[form](x)).sum(), x)[0]

    return compute


@pytest.mark.parametrize("form", list(kernels.GELU_GATES))
def test_gelu_tables_approximate_their_functions(form):
    """The kernels' table lookup in float32, on any machine."""
    x = torch.linspace(0, 7.875, 10001)[:-1]
    index = (4 * x).round().long()
    offset = x - index / 4
    for table, function, most in (
        (kernels.gelu_coefficients, kernels.GELU_GATES[form], 6e-5),
        (kernels.gelu_slope_coefficients, build_gelu_derivative(form), 2.5e-4),
    ):
        constant, linear, square = table(form)[:, index]
        error = (constant + linear * offset + square * offset**2 + 0.5 - function(x.double())).abs().max()
        assert error < most


@needs_native_kernels
@pytest.mark.parametrize("form", list(kernels.GELU_GATES))
@pytest.mark.parametrize("count", [1, 31, 64, 1000])
def test_gelu_gradients_match_the_formula(form, count):
    torch.manual_seed(0)
    x, grad = (3 * torch.randn(count)).bfloat16(), torch.randn(count).bfloat16()
    of_x = grad.clone()
    assert torch.equal(kernels.gelu_bf16_backward_(of_x, x, form), kernels.gelu_bf16(x, form))
    expected = grad.double() * build_gelu_derivative(form)(x.double())
    assert torch.allclose(of_x.double(), expected, rtol=BF16_ROUNDING, atol=1e-3)
    assert torch.equal(kernels.gelu_bf16(x, form), kernels.gelu_bf16_(x.clone(), form))


@needs_native_kernels
@pytest.mark.parametrize("shape", [(2, 2), (34, 50), (64, 32), (1576, 384)])
def test_a_transpose_is_exact(shape):
    x = torch.randn(shape).bfloat16()
    assert kernels.can_transpose(x) and torch.equal(kernels.transpose_bf16(x), x.mT)
    wide = torch.randn(shape[0], 3 * shape[1]).bfloat16()[:, shape[1] : 2 * shape[1]]
    assert torch.equal(kernels.transpose_bf16(wide), wide.mT) and kernels.transpose_bf16(wide).is_contiguous()
    assert not any(kernels.can_transpose(y) for y in (x.mT, x.float(), x[1:], x[:, 1:]))


def make_qkv(batch, heads, num_queries, tokens, channels):
    """Queries, keys and values in the memory layout of a layer: heads next to each other."""
    torch.manual_seed(0)
    q = torch.randn(batch, num_queries, heads, channels).bfloat16().transpose(1, 2) * 2
    k, v = torch.randn(batch, tokens, 2, heads, channels).bfloat16().permute(2, 0, 3, 1, 4)
    return q, k, v


@needs_amx_tiles
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("sizes", ATTENTION_SIZES)
def test_tiled_attention_matches_float64_attention(sizes, threads):
    q, k, v = make_qkv(*sizes)
    assert kernels.can_attend(q, k, v)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        outputs = kernels.attend_bf16(q, k, v)
    finally:
        torch.set_num_threads(num_threads)
    exact = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)))
    assert outputs.shape == q.shape and outputs.dtype == q.dtype and relative_error(outputs, exact) < 4e-3
    assert torch.equal(dot_product_attention(q, k, v), outputs)  # for any number of threads
    assert outputs.transpose(1, 2).is_contiguous()


@needs_amx_tiles
@pytest.mark.parametrize("sizes", ATTENTION_SIZES)
def test_tiled_attention_gradients_match_float64(sizes):
    """For an upstream gradient in the next layer's memory layout, and for a strided one."""
    torch.manual_seed(1)
    q, k, v = (x.requires_grad_() for x in make_qkv(*sizes))
    y = dot_product_attention(q, k, v)
    assert "TiledAttention" in type(y.grad_fn).__name__
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    output = F.scaled_dot_product_attention(*exact)
    laid_out = torch.randn(y.transpose(1, 2).shape).bfloat16().transpose(1, 2)
    for upstream in (laid_out, torch.randn(y.shape).bfloat16(), torch.ones(()).bfloat16().expand(y.shape)):
        gradients = torch.autograd.grad(y, (q, k, v), upstream, retain_graph=True)
        expected = torch.autograd.grad(output, exact, upstream.double(), retain_graph=True)
        for ours, theirs, tensor in zip(gradients, expected, (q, k, v), strict=True):
            assert ours.dtype == torch.bfloat16 and ours.shape == tensor.shape
            assert (ours.double() - theirs).norm() < 1e-2 * theirs.norm() + 1e-2 * upstream.norm() / 30


@needs_amx_tiles
def test_tiled_gradients_are_independent_of_threads_and_batch():
    q, k, v = make_qkv(3, 2, 70, 70, 64)
    grad, statistics = torch.randn(q.shape).bfloat16(), torch.empty(*q.shape[:-1], 2)
    y = kernels.attend_bf16(q, k, v, statistics)
    together = kernels.attend_bf16_backward(q, k, v, y, grad, statistics)
    assert all(x.isfinite().all() for x in together)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for image in range(3):
            single = [x[image : image + 1] for x in (q, k, v, y, grad, statistics)]
            for alone, of_all in zip(kernels.attend_bf16_backward(*single), together, strict=True):
                assert torch.equal(alone, of_all[image : image + 1])
    finally:
        torch.set_num_threads(num_threads)


@needs_amx_tiles
def test_tiled_attention_is_independent_of_batch_and_query_subset():
    q, k, v = make_qkv(3, 2, 70, 70, 64)
    together, few = kernels.attend_bf16(q, k, v), kernels.attend_bf16(q[:, :, 7:9], k, v)
    for image in range(3):
        image_slice = slice(image, image + 1)
        assert torch.equal(kernels.attend_bf16(q[image_slice], k[image_slice], v[image_slice]), together[image_slice])
    assert torch.equal(few, together[:, :, 7:9])
    with ThreadPoolExecutor(4) as pool:
        for output in pool.map(lambda _: kernels.attend_bf16(q, k, v), range(16)):
            assert torch.equal(output, together)


@needs_amx_tiles
def test_tiled_attention_handles_large_logits_and_propagates_nan():
    q, k, v = make_qkv(1, 2, 40, 40, 32)
    outputs = kernels.attend_bf16(q * 200, k, v)
    exact = F.scaled_dot_product_attention(*((x * s).double() for x, s in ((q, 200), (k, 1), (v, 1))))
    assert outputs.isfinite().all() and relative_error(outputs, exact) < 2e-2
    q[0, 1, 3] = math.nan
    undefined = kernels.attend_bf16(q, k, v).isnan()
    assert undefined[0, 1, 3].all() and undefined.sum() == 32


@needs_amx_tiles
def test_tiled_attention_does_not_disturb_pytorch_matmuls():
    """Both configure the processor's tiles."""
    q, k, v = make_qkv(1, 2, 40, 40, 32)
    a, b = torch.randn(64, 96).bfloat16(), torch.randn(96, 80).bfloat16()
    expected, product, fused_attention = kernels.attend_bf16(q, k, v), a @ b, F.scaled_dot_product_attention(q, k, v)
    for _ in range(3):
        assert torch.equal(a @ b, product)
        assert torch.equal(kernels.attend_bf16(q, k, v), expected)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), fused_attention)


def test_tiled_attention_accepts_only_supported_tensors(monkeypatch):
    q, k, v = make_qkv(2, 3, 5, 5, 8)
    monkeypatch.setattr(kernels, "load_native_library", lambda: NativeLibrary(None, True, "pretended"))
    assert kernels.can_attend(q, k, v)
    for unsupported in (q.float(), q[0], q.to("meta"), q[:, :, :, ::2], q[:, :0]):
        assert not kernels.can_attend(unsupported, k, v)
    assert not kernels.can_attend(q, k[:, :1], v) and not kernels.can_attend(q, k, v[..., :4])
    monkeypatch.setattr(kernels, "MAX_ATTENTION_KEYS", 4)
    assert not kernels.can_attend(q, k, v)
    monkeypatch.setattr(kernels, "load_native_library", lambda: NativeLibrary(None, False, "pretended"))
    monkeypatch.setattr(kernels, "MAX_ATTENTION_KEYS", 5)
    assert not kernels.can_attend(q, k, v)


@needs_amx_tiles
def test_vmap_export_and_tensor_subclasses_use_pytorch_operators():
    """Tensors batched by torch.vmap, traced tensors, and tensor subclasses."""

    class Marked(torch.Tensor):
        pass

    q, k, v = make_qkv(2, 3, 5, 5, 8)
    together = torch.vmap(lambda q, k, v: dot_product_attention(q[None], k[None], v[None])[0])(q, k, v)
    assert relative_error(together, dot_product_attention(q, k, v)) < 1e-2
    assert not kernels.can_attend(q.as_subclass(Marked), k, v) and not kernels.can_apply_gelu(q.as_subclass(Marked))
    exported = torch.export.export(ResidualBranch(Mlp(32, 64), 32).bfloat16(), (torch.randn(2, 5, 32).bfloat16(),))
    assert "gelu" in str(exported.graph)


def test_missing_native_kernels_raise_a_clear_error(monkeypatch):
    monkeypatch.setattr(kernels, "load_native_library", lambda: NativeLibrary(None, False, "no C compiler"))
    with pytest.raises(RuntimeError, match="native kernels are not available: no C compiler"):
        kernels.add_bf16_to_float32(torch.zeros(1), torch.zeros(1).bfloat16())


@needs_native_kernels
@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this PyTorch packs no products")
def test_frozen_branches_use_native_kernels_where_available(monkeypatch):
    """A norm of an unsupported width uses PyTorch."""
    branch, odd = ResidualBranch(Mlp(32, 64), 32), ResidualBranch(Mlp(24, 64), 24)
    assert isinstance(freeze_for_inference(branch, torch.bfloat16, True).norm, BFloat16OutputNorm)
    assert not isinstance(freeze_for_inference(odd, torch.bfloat16, True).norm, BFloat16OutputNorm)
    assert not isinstance(freeze_for_inference(branch, torch.float32, True).norm, BFloat16OutputNorm)
    assert not isinstance(freeze_for_inference(branch, torch.bfloat16, False).norm, BFloat16OutputNorm)
    x = torch.randn(2, 5, 24)
    with torch.inference_mode():
        assert relative_error(freeze_for_inference(odd, torch.bfloat16, True)(x), odd(x)) < 1e-2
    monkeypatch.setattr(kernels, "load_native_library", lambda: NativeLibrary(None, False, "none"))
    assert not isinstance(freeze_for_inference(branch, torch.bfloat16, True).norm, BFloat16OutputNorm)
