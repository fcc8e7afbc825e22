"""Multi-head self-attention (arXiv:2010.11929, appendix A). Tokens are on axis -2; all axes before it are batch axes.

Shapes: N tokens, Q of them queries, D width, h heads, d = D / h channels per head. `queries` is a slice of the tokens
whose outputs are computed; keys and values are always those of all N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from vitreous.nn import kernels
from vitreous.system.machine import get_cpu_features
from vitreous.system.torch_types import FunctionContext, once_differentiable, open_to_kinds


@dataclass(frozen=True)
class Segments:
    """Lengths of consecutive sequences in one packed tensor of tokens (..., N, D); sequences do not attend to each
    other.

    Attention runs once per group of neighbouring sequences of the same length. With `masked` it runs once for all
    tokens, with a mask between sequences: fewer and larger operations, but N^2 logits.
    """

    lengths: tuple[int, ...]
    masked: bool = False

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Return (length, number of sequences) of each group of neighbouring sequences of the same length."""
        return [(length, len(list(group))) for length, group in groupby(self.lengths)]

    def mask(self, device: torch.device) -> Tensor:
        """Return the mask (N, N) bool: true where both tokens belong to the same sequence."""
        segment_ids = torch.arange(len(self.lengths), device=device)
        token_segments = segment_ids.repeat_interleave(torch.tensor(self.lengths, device=device))
        return token_segments[:, None] == token_segments[None]


ALL_QUERIES = slice(None)
Parameters = tuple[Tensor, Tensor | None]  # weight (n, m) and bias (n,) of a linear layer
#: of `attend_in_chunks`: the logits of a chunk, which must fit into a core's cache, and the largest number of logits of
#: one image for which it is used
CHUNK_LOGITS, MAX_IMAGE_LOGITS = 1 << 19, 1 << 23
#: of `attend_unscaled`: the most tokens for separate products without and with gradients, and the logits of a chunk;
#: measured on a CPU with AMX
MAX_UNFUSED_TOKENS, MAX_UNFUSED_TRAINING_TOKENS, WINDOW_CHUNK_LOGITS = 256, 1024, 1 << 21


class Attention(nn.Module):
    """Multi-head self-attention, Eqs. 5-8.

    `forward` does not store the attention probabilities; `compute_weights` computes them for inspection. Raises
    ValueError if `width` is not divisible by `heads`.
    """

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not divisible by {heads} heads")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width)
        for matrix in self.qkv.weight.chunk(3):  # per D x D matrix: of the fused one, Xavier's std is too small
            nn.init.xavier_uniform_(matrix)
        nn.init.xavier_uniform_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        if bias:
            nn.init.zeros_(self.qkv.bias)

    def forward(self, x: Tensor, *context: Any, queries: slice = ALL_QUERIES) -> Tensor:
        """Attend to all tokens: (..., N, D) -> (..., Q, D), the outputs of the `queries`, by default of all N tokens.

        `context` is passed to `forward_before_output`: a mask here, token positions in subclasses with relative
        positions.
        """
        return self.out(
            self.forward_before_output(x, *context)
            if queries == ALL_QUERIES
            else self.forward_before_output(x, *context, queries=queries)
        )

    @open_to_kinds
    def forward_before_output(
        self, x: Tensor, mask: Tensor | Segments | None = None, queries: slice = ALL_QUERIES
    ) -> Tensor:
        """Compute the concatenated outputs of the heads, before the output layer: (..., N, D) -> (..., Q, D).

        `mask` (..., 1, N, N) bool is true where a query (row) may attend to a key; None: no mask. A mask of type
        `Segments` describes packed sequences, and `queries` must then be all tokens.
        """
        if queries != ALL_QUERIES and mask is None and (parameters := self.get_qkv_parameters()) is not None:
            q_parameters, *kv_parameters = split_parameters(*parameters, 3, x.dtype)
            return attend_unprojected(project_heads(x[..., queries, :], q_parameters, self.heads), x, *kv_parameters)
        q, k, v = self.project_qkv(x)
        if isinstance(mask, Segments):
            return attend_segments(q, k, v, mask).transpose(-3, -2).flatten(-2)
        query_mask = mask if mask is None or queries == ALL_QUERIES else mask[..., queries, :]
        return dot_product_attention(q[..., queries, :], k, v, query_mask).transpose(-3, -2).flatten(-2)

    def get_qkv_parameters(self) -> Parameters | None:
        """Return weight (3 D, D) and bias (3 D,) of the query-key-value layer, or None if they do not describe the
        computation: those of `get_plain_parameters`."""
        return get_plain_parameters(self.qkv)

    @open_to_kinds
    def compute_weights(self, x: Tensor, mask: Tensor | None = None, queries: slice = ALL_QUERIES) -> Tensor:
        """Compute attention probabilities: (..., N, D) -> (..., h, Q, N), for the `queries` or all N tokens. Rows are
        queries and sum to one."""
        q, k, _ = self.project_qkv(x)
        return attention_probabilities(q[..., queries, :], k, mask if mask is None else mask[..., queries, :])

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries, keys and values: (..., N, D) -> three tensors (..., h, N, d)."""
        return split_heads(self.qkv(x), self.heads)


class QKNormAttention(Attention):
    """Attention with RMSNorm (arXiv:1910.07467) over the d channels of each query and key.

    Its learned scale (d,) is shared by all heads. The norm bounds the logits (arXiv:2302.05442).
    """

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__(width, heads, bias=bias)
        self.query_norm, self.key_norm = (nn.RMSNorm(width // heads, eps=1e-6) for _ in range(2))

    def get_qkv_parameters(self) -> None:
        """Return None, because normalised queries and keys are more than a matrix product."""

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to normalised queries, normalised keys and values: (..., N, D) -> three tensors
        (..., h, N, d)."""
        q, k, v = super().project_qkv(x)
        dtype = self.query_norm.weight.dtype
        return self.query_norm(q.to(dtype)).to(v.dtype), self.key_norm(k.to(dtype)).to(v.dtype), v


class QkvLinearWithoutKeyBias(nn.Linear):
    """Query-key-value layer, (..., D) -> (..., 3 D), without a bias for keys (BEiT, arXiv:2106.08254).

    A key bias would add the same value to all logits of a query, which softmax cancels.
    """

    is_plain_product: ClassVar[bool] = True

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would create a bias that includes keys
        self.in_features, self.out_features = width, 3 * width
        self.weight = nn.Parameter(torch.empty(3 * width, width))
        self.query_bias, self.value_bias = (nn.Parameter(torch.zeros(width)) for _ in range(2))
        for matrix in self.weight.chunk(3):
            nn.init.xavier_uniform_(matrix)

    @property
    def bias(self) -> Tensor:
        """Return the biases (3 D,) of queries, keys and values; those of keys are zeros."""
        return torch.cat([self.query_bias, torch.zeros_like(self.query_bias), self.value_bias])


def get_plain_parameters(layer: nn.Module) -> Parameters | None:
    """Return weight (n, m) and bias (n,) of a linear layer, or None if they do not describe it.

    They do not if the layer computes more than their product, or if another library quantised the weight. Layers other
    than `nn.Linear` that they describe have a true attribute `is_plain_product`.
    """
    if type(layer) is not nn.Linear and not getattr(layer, "is_plain_product", False):
        return None
    product: Any = layer
    return None if hasattr(product.weight, "__tensor_flatten__") else (product.weight, product.bias)


def split_parameters(weight: Tensor, bias: Tensor | None, parts: int, dtype: torch.dtype) -> list[Parameters]:
    """Cast weight (parts n, m) and bias (parts n,) of a linear layer to `dtype` and split them into those of its parts,
    (n, m) and (n,)."""
    biases = [None] * parts if bias is None else bias.to(dtype).chunk(parts)
    return list(zip(weight.to(dtype).chunk(parts), biases, strict=True))


def project_heads(x: Tensor, parameters: Parameters, heads: int) -> Tensor:
    """Apply a linear layer, and split its output by head: (..., N, D) -> (..., h, N, d)."""
    return torch.unflatten(F.linear(x, *parameters), -1, (heads, -1)).transpose(-3, -2)


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split the output of the query-key-value layer by head: (..., N, 3 D) -> queries, keys and values, each
    (..., h, N, d)."""
    q, k, v = torch.unflatten(qkv, -1, (3, heads, -1)).unbind(-3)  # (..., N, 3, h, d) -> 3 x (..., N, h, d)
    return q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)


def attention_probabilities(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute softmax(q k^T / sqrt(d) + bias): queries (..., h, Q, d) and keys (..., h, N, d) -> (..., h, Q, N).

    `bias` is broadcast to (..., h, Q, N). A bool `bias` is a mask, true where a query may attend to a key.
    """
    logits = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
    if bias is not None:
        logits = mask_logits(logits, bias) if bias.dtype == torch.bool else logits + bias
    return logits.softmax(-1)


def mask_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Set logits (..., h, Q, N) to minus infinity where the `mask` (..., 1, Q, N) bool is false."""
    return logits if mask is None else logits.masked_fill(~mask, float("-inf"))


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute softmax(q k^T / sqrt(d) + bias) v by the fastest implementation of the device.

    Queries (..., h, Q, d), keys and values (..., h, N, d) -> (..., h, Q, d).

    `bias` is broadcast to (..., h, Q, N) and added to the logits; a bool `bias` is a mask, as in
    `attention_probabilities`.

    Except for CPUs in bfloat16, PyTorch's fused kernel is used. On CPUs in bfloat16:

    - with AMX tiles, this project's kernel (`kernels.attend_bf16`) takes half as long as the alternatives below;
    - with gradients, batched products that store the probabilities (`MaterializedAttention`) take about an eighth of
      the backward time of the fused kernel;
    - without gradients, the fused kernel takes 1.4 to 1.7 times as long as `attend_in_chunks`.
    """
    if q.dim() > 4 and bias is None:
        return torch.unflatten(dot_product_attention(*(x.flatten(0, -4) for x in (q, k, v))), 0, q.shape[:-3])
    if bias is None and kernels.can_attend(q, k, v):
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return TiledAttention.apply(q, k, v) if needs_grad else kernels.attend_bf16(q, k, v)
    if (
        q.device.type == "cpu"
        and q.dtype == torch.bfloat16
        and torch.is_grad_enabled()
        and q.requires_grad
        and (bias is None or bias.dtype == q.dtype)
    ):
        return MaterializedAttention.apply(q, k, v, bias)
    if bias is None and prefers_chunked_attention(q, k):
        return attend_in_chunks(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def prefers_chunked_attention(q: Tensor, k: Tensor) -> bool:
    """Return whether `attend_in_chunks` is faster than PyTorch's fused kernel for queries (B, h, Q, d) and keys
    (B, h, N, d).

    It is faster without gradients, in bfloat16 on a CPU with AVX-512 products, and up to `MAX_IMAGE_LOGITS` logits per
    image (about a thousand tokens).
    """
    return (
        q.device.type == "cpu"
        and q.dtype == torch.bfloat16
        and q.dim() == 4
        and q.shape[1] * q.shape[2] * k.shape[2] <= MAX_IMAGE_LOGITS
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad))
        and not is_compiling()
        and has_fast_bf16_matmul()
    )


@cache
def has_fast_bf16_matmul() -> bool:
    """Return whether this CPU multiplies bfloat16 by AVX-512 and not by AMX tiles, for which chunked attention was not
    measured. Cached per process."""
    features = get_cpu_features()
    return features.get("avx512_bf16", False) and not features.get("amx_bf16", False)


def attend_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, max_chunk_logits: int | None = None
) -> Tensor:
    """Compute softmax(scale q k^T) v by batched products, without gradients: queries (B, h, Q, c), keys (B, h, N, c)
    and values (B, h, N, d) -> (B, h, Q, d). `scale` defaults to 1 / sqrt(c).

    The batch is split into chunks of at most `max_chunk_logits` logits, by default as many as fit into a core's cache.
    Logits and probabilities have the dtype of q, as in training (`MaterializedAttention`).
    """
    batch, heads, num_queries, size = q.shape
    y = q.new_empty(batch, num_queries, heads, v.shape[-1]).transpose(1, 2)
    zero, chunk_size = q.new_zeros(()), max(1, (max_chunk_logits or CHUNK_LOGITS) // (heads * num_queries * k.shape[2]))
    for start in range(0, batch, chunk_size):
        chunk = slice(start, start + chunk_size)
        queries, keys, values = (x[chunk].flatten(0, 1) for x in (q, k, v))
        logits = torch.baddbmm(zero, queries, keys.mT, beta=0, alpha=size**-0.5 if scale is None else scale)
        y[chunk] = torch.unflatten(torch.bmm(logits.softmax(-1), values), 0, (-1, heads))
    return y


def attend_unscaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute softmax(q k^T) v for queries and keys (..., h, N, c) with more channels than the values (..., h, N, d).

    `mask` (..., 1, N, N) bool is true where a query may attend to a key. PyTorch's fused kernel is used, with values
    padded to c channels. On a CPU without a mask, separate products are faster for up to `MAX_UNFUSED_TOKENS` tokens
    (windows), and in bfloat16 with gradients for up to `MAX_UNFUSED_TRAINING_TOKENS`.
    """
    tokens, padding = q.shape[-2], q.shape[-1] - v.shape[-1]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    max_tokens = MAX_UNFUSED_TRAINING_TOKENS if needs_grad and q.dtype == torch.bfloat16 else MAX_UNFUSED_TOKENS
    if mask is not None or q.device.type != "cpu" or tokens > max_tokens or is_compiling():
        y = F.scaled_dot_product_attention(q, k, F.pad(v, (0, padding)), attn_mask=mask, scale=1.0)
        return y[..., : v.shape[-1]]
    if needs_grad:
        return (q @ k.mT).softmax(-1) @ v
    windows = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    return attend_in_chunks(*windows, scale=1.0, max_chunk_logits=WINDOW_CHUNK_LOGITS).view(v.shape)


def attend_segments(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """Attend within each of the packed sequences `segments`: q, k, v (..., h, N, d) -> (..., h, N, d).

    Neighbouring sequences of the same length are computed in one call. The tensors are split, not sliced: the gradient
    of every slice would be a full tensor of zeros, and all of them would be added up.
    """
    if segments.masked:
        return dot_product_attention(q, k, v, segments.mask(q.device))
    groups = segments.runs
    group_qkv = zip(
        *(x.split_with_sizes([length * count for length, count in groups], -2) for x in (q, k, v)), strict=True
    )
    outputs = [
        dot_product_attention(*(torch.unflatten(x, -2, (count, length)) for x in qkv)).flatten(-3, -2)
        for qkv, (length, count) in zip(group_qkv, groups, strict=True)
    ]
    return torch.cat(outputs, -2)


def attend_unprojected(q: Tensor, x: Tensor, key_parameters: Parameters, value_parameters: Parameters) -> Tensor:
    """Attend to tokens without computing their keys and values: queries (..., h, Q, d), tokens x (..., N, D) -> the
    concatenated outputs of the heads (..., Q, D). The parameters are weight (D, D) and bias (D,) of the key and value
    layers.

    The key and value matrices are applied to the queries and to the outputs:

        q . (W_k x + b_k) = (W_k^T q) . x + q . b_k     softmax cancels the last term, which is equal for all x
        sum p (W_v x + b_v) = W_v (sum p x) + b_v       p are the attention probabilities

    This takes 2 Q h N D multiply-adds instead of 2 N D^2, which are fewer if Q < d.
    """
    num_heads, num_queries = q.shape[-3:-1]
    key_weights = torch.unflatten(key_parameters[0], 0, (num_heads, -1))
    # (..., h Q, D): all heads attend to the same x
    q = torch.einsum("...hqd,hdc->...hqc", q * q.shape[-1] ** -0.5, key_weights).flatten(-3, -2)
    p = torch.unflatten((q @ x.mT).softmax(-1), -2, (num_heads, num_queries))
    return project_attended_tokens(p, x, value_parameters)


def project_attended_tokens(p: Tensor, x: Tensor, value_parameters: Parameters) -> Tensor:
    """Compute the concatenated outputs of the heads without computing values, from attention probabilities
    (..., h, Q, N) and tokens x (..., N, D) -> (..., Q, D), as in `attend_unprojected`."""
    weight, bias = value_parameters
    value_weights = torch.unflatten(weight, 0, (p.shape[-3], -1))
    attended_tokens = torch.unflatten(p.flatten(-3, -2) @ x, -2, p.shape[-3:-1])
    y = torch.einsum("...hqc,hdc->...qhd", attended_tokens, value_weights).flatten(-2)
    return y if bias is None else y + bias


class TiledAttention(torch.autograd.Function):
    """Attention by this project's kernels (`kernels.attend_bf16`), which recompute the probabilities in the backward
    pass.

    Queries (B, h, Q, d), keys and values (B, h, N, d), all in bfloat16 -> (B, h, Q, d).
    """

    @staticmethod
    def forward(ctx: FunctionContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute the outputs (B, h, Q, d), and save the softmax statistics for the backward pass."""
        statistics = torch.empty(*q.shape[:-1], 2)
        y = kernels.attend_bf16(q, k, v, statistics)
        ctx.save_for_backward(q, k, v, y, statistics)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of queries, keys and values from that of the outputs."""
        (grad,), (q, k, v, y, statistics) = gradients, ctx.saved_tensors
        return kernels.attend_bf16_backward(q, k, v=v, y=y, grad=grad, statistics=statistics)


class KeptContext(FunctionContext):
    """Autograd context of `MaterializedAttention`, which also stores the shape of the bias; None without a bias."""

    bias: torch.Size | None


class MaterializedAttention(torch.autograd.Function):
    """Attention by batched products that stores its probabilities P (..., N, N) for the backward pass; q, k, v and the
    output are (..., N, d).

    With S = q k^T / sqrt(d) + bias, P = softmax(S) and y = P v, the gradients are:

        dv = P^T dy,  dP = dy v^T,  dS = P (dP - sum(dP P)),  dq = dS k / sqrt(d),  dk = dS^T q / sqrt(d),
        dbias = dS, summed in float32 over broadcast axes
    """

    @staticmethod
    def forward(ctx: KeptContext, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the outputs (..., N, d), and save the probabilities for the backward pass."""
        q, k, v = q.contiguous() * q.shape[-1] ** -0.5, k.contiguous(), v.contiguous()
        logits = torch.matmul(q, k.transpose(-2, -1))
        p = (logits if bias is None else logits.add_(bias)).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        ctx.bias = None if bias is None else bias.shape
        return p @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: KeptContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of queries, keys, values and bias from that of the outputs."""
        q, k, v, p = ctx.saved_tensors
        grad = gradients[0].contiguous()
        dv = p.transpose(-2, -1) @ grad
        ds = softmax_backward(grad @ v.transpose(-2, -1), p)
        d_bias = sum_broadcast_gradient(ds, ctx.bias) if ctx.bias is not None and ctx.needs_input_grad[3] else None
        return ds @ k * q.shape[-1] ** -0.5, ds.transpose(-2, -1) @ q, dv, d_bias


def sum_broadcast_gradient(grad: Tensor, shape: torch.Size) -> Tensor:
    """Sum the gradient of a broadcast tensor to its original `shape`, in float32."""
    extra_axes = grad.dim() - len(shape)
    axes = [
        *range(extra_axes),
        *(extra_axes + axis for axis, length in enumerate(shape) if length == 1 != grad.shape[extra_axes + axis]),
    ]
    return (grad.sum(axes, dtype=torch.float32).to(grad.dtype) if axes else grad).reshape(shape)


def softmax_backward(grad: Tensor, p: Tensor) -> Tensor:
    """Compute the gradient of a softmax over the last axis, P (dP - sum(dP P)), from `grad` dP and probabilities `p` of
    the same shape.

    If this version of PyTorch exposes its kernel, the computation is one pass.
    """
    kernel = getattr(torch, "_softmax_backward_data", None)
    if kernel is not None:
        return kernel(grad, p, -1, p.dtype)
    return p * (grad - (grad * p).sum(-1, keepdim=True))
