import pytest
import torch

from vitreous.nn import attention as attention_module
from vitreous.nn import kernels
from vitreous.nn.attention import (
    Attention,
    MaterializedAttention,
    QkvLinearWithoutKeyBias,
    attend_in_chunks,
    dot_product_attention,
    has_fast_bf16_matmul,
    prefers_chunked_attention,
)
from vitreous.nn.pool import AttentionPool
from vitreous.system.machine import CPU_FEATURES
from vitreous.system.native import NativeLibrary


@pytest.mark.parametrize("shape", [(2, 7, 12), (2, 3, 5, 12), (9, 12)])
def test_fused_attention_is_weights_times_values_over_any_batch_axes(shape):
    attention = Attention(12, heads=3)
    x = torch.randn(shape)
    weights = attention.compute_weights(x)
    assert weights.shape == (*shape[:-2], 3, shape[-2], shape[-2])
    assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
    _, _, v = attention.project_qkv(x)
    expected = attention.out((weights @ v).transpose(-3, -2).flatten(-2))
    assert torch.allclose(attention(x), expected, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 12), (2, 3, 7, 12)])
def test_query_subset_matches_full_attention(shape, bias):
    attention, x = Attention(12, 3, bias).double(), torch.randn(shape, dtype=torch.float64)
    if bias:
        torch.nn.init.normal_(attention.qkv.bias)
    few = attention(x, queries=slice(2))
    assert few.shape == (*shape[:-2], 2, 12) and torch.allclose(few, attention(x)[..., :2, :])
    attention.qkv = torch.nn.Sequential(
        attention.qkv
    )  # a layer whose weight is not accessible: keys are computed as usual
    assert torch.allclose(attention(x, queries=slice(2)), few)


def test_query_subset_without_key_bias_matches_full_attention():
    attention, x = Attention(12, 3).double(), torch.randn(2, 7, 12, dtype=torch.float64)
    attention.qkv = QkvLinearWithoutKeyBias(12).double()
    for bias in (attention.qkv.query_bias, attention.qkv.value_bias):
        torch.nn.init.normal_(bias)
    assert attention.get_qkv_parameters() is not None
    assert torch.allclose(attention(x, queries=slice(2)), attention(x)[..., :2, :])


def test_materialized_attention_passes_gradcheck():
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(MaterializedAttention.apply, (q, k, v, None))
    for shape in ((5, 5), (3, 5, 5), (1, 3, 1, 5), (2, 3, 5, 5)):
        bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(MaterializedAttention.apply, (q, k, v, bias))


def test_materialized_attention_passes_gradcheck_without_native_softmax(monkeypatch):
    monkeypatch.delattr(torch, "_softmax_backward_data")
    test_materialized_attention_passes_gradcheck()


@pytest.mark.processor
@pytest.mark.parametrize("biased", [False, True])
def test_bfloat16_training_on_cpu_matches_the_fused_kernel(biased, monkeypatch):
    monkeypatch.setattr(kernels, "load_native_library", lambda: NativeLibrary(None, False, "left out"))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 17, 8).bfloat16().requires_grad_() for _ in range(3))
    if biased:
        bias = torch.randn(1, 3, 17, 17).bfloat16()
        bias[..., 4] = float("-inf")
    else:
        bias = None
    fused = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    output = dot_product_attention(q, k, v, bias)
    assert output.grad_fn is not None and "MaterializedAttention" in type(output.grad_fn).__name__
    assert torch.allclose(output, fused, atol=3e-2)
    gradient = torch.randn_like(output)
    ours, theirs = (torch.autograd.grad(y, (q, k, v), gradient) for y in (output, fused))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=5e-2)


@pytest.mark.processor
@pytest.mark.parametrize("num_queries", [1, 17])
@pytest.mark.parametrize("logits", [1, 1800, 1 << 20])
def test_chunked_attention_is_independent_of_batch_composition(logits, num_queries, monkeypatch):
    """Chunks of one image, of two with one left over (3 heads x 17 x 17 logits each), and of all five."""
    monkeypatch.setattr(attention_module, "CHUNK_LOGITS", logits)
    torch.manual_seed(0)
    q, k, v = (2 * torch.randn(5, 17, 3, 3, 8).bfloat16()).permute(2, 0, 3, 1, 4)
    y = attend_in_chunks(q[..., :num_queries, :], k, v)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q[..., :num_queries, :], k, v)))
    assert y.dtype == q.dtype and y.shape == exact.shape and torch.allclose(y.double(), exact, atol=0.05)
    assert (y.double() - exact).norm() < 0.01 * exact.norm()
    alone = torch.cat([attend_in_chunks(*(x[i : i + 1] for x in (q[..., :num_queries, :], k, v))) for i in range(5)])
    assert torch.allclose(alone, y, atol=0.02)


@pytest.mark.parametrize(
    "best, expected", [("avx2", False), ("avx512_f", False), ("avx512_bf16", True), ("amx_bf16", False)]
)
def test_chunked_attention_is_used_only_on_cpus_with_fast_bf16_matmul(best, expected, monkeypatch):
    features = CPU_FEATURES[: CPU_FEATURES.index(best) + 1]
    monkeypatch.setattr(attention_module, "get_cpu_features", lambda: dict.fromkeys(features, True))
    has_fast_bf16_matmul.cache_clear()
    q = torch.zeros(2, 3, 17, 8, dtype=torch.bfloat16)
    try:
        assert prefers_chunked_attention(q, q) == expected
        assert not any(
            prefers_chunked_attention(x, x) for x in (q.float(), q[0], q.clone().requires_grad_(), q.to("meta"))
        )
        monkeypatch.setattr(attention_module, "MAX_IMAGE_LOGITS", 3 * 17 * 17 - 1)
        assert not prefers_chunked_attention(q, q)
    finally:
        has_fast_bf16_matmul.cache_clear()


def test_query_key_and_value_weights_have_xavier_limits():
    weight = Attention(64, heads=4).qkv.weight
    limit = (3 / 64) ** 0.5
    for chunk in weight.chunk(3):
        assert 0.97 * limit < chunk.abs().max() <= limit


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="not divisible by 5 heads"):
        Attention(12, heads=5)


def test_attention_pool_ignores_token_order():
    pool, tokens = AttentionPool(12, 3, 24), torch.randn(2, 7, 12)
    assert pool(tokens).shape == (2, 12)
    assert torch.allclose(pool(tokens), pool(tokens.flip(1)), atol=1e-6)


def test_attention_pool_without_keys_and_values_matches_the_formula():
    """Values and gradients."""
    pool, tokens = AttentionPool(12, 3, 24).double(), torch.randn(2, 7, 12, dtype=torch.float64)
    for parameter in pool.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    fast = pool(tokens)
    fast_grad = torch.autograd.grad(fast.square().sum(), pool.kv.weight)[0]
    original = pool.kv
    pool.kv = torch.nn.Sequential(original)  # a layer whose weight is not accessible
    expected = pool(tokens)
    expected_grad = torch.autograd.grad(expected.square().sum(), original.weight)[0]
    assert torch.allclose(fast, expected)
    assert torch.allclose(fast_grad, expected_grad)
