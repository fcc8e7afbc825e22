"""Self-attention over axis -2; every axis before it is batch (arXiv:2010.11929, appendix A).

N tokens, Q of them that ask, D width, h heads, d = D / h.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from vitreous.nn import kernels
from vitreous.system.machine import get_cpu_features
from vitreous.system.torch_types import FunctionContext, once_differentiable, open_to_kinds


@dataclass(frozen=True)
class Segments:
    """A row of tokens (..., N, D) made of sequences of these `lengths`, one after the other.

    Attention is computed for one after the other, for neighbours of one length together; with `masked` for the
    whole row at once, where what a token may not see is masked: fewer and larger pieces of work, and N^2 logits.
    """

    lengths: tuple[int, ...]
    masked: bool = False

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Lengths, each with the number of sequences that have it one after the other."""
        return [(length, len(list(same))) for length, same in groupby(self.lengths)]

    def mask(self, device: torch.device) -> Tensor:
        """(N, N) bool: true where both tokens are of one sequence."""
        numbers = torch.arange(len(self.lengths), device=device)
        owner = numbers.repeat_interleave(torch.tensor(self.lengths, device=device))
        return owner[:, None] == owner[None]


ALL_QUERIES = slice(None)
#: logits of a part of `attend_in_chunks`, which a core's cache is to hold, and the most of one image
CHUNK_LOGITS, MAX_IMAGE_LOGITS = 1 << 19, 1 << 23
#: of `attend_unscaled`: the most tokens, without gradients and learned from, and logits of a part; measured with AMX
MAX_UNFUSED_TOKENS, MAX_UNFUSED_TRAINING_TOKENS, WINDOW_CHUNK_LOGITS = 256, 1024, 1 << 21


class Attention(nn.Module):
    """Multi-head self-attention, Eqs. 5-8. `weights` answers what `forward` looked at; the forward pass never stores
    it."""

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of {heads} heads")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width)
        for part in self.qkv.weight.chunk(3):  # Xavier on each D x D matrix: on the fused one it is too small by sqrt 2
            nn.init.xavier_uniform_(part)
        nn.init.xavier_uniform_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        if bias:
            nn.init.zeros_(self.qkv.bias)

    def forward(self, x: Tensor, *context: Any, queries: slice = ALL_QUERIES) -> Tensor:
        """(..., N, D) -> (..., Q, D): the answers to the `queries`, or to all N.

        `context` is what `forward_before_output` of a kind of attention wants to know beside the tokens.
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
        """(..., N, D) -> (..., Q, D): the heads' answers side by side, before the output layer mixes them.

        `mask` (..., 1, N, N) bool is true where a query (row) may attend to a key; None: everywhere. `Segments` are
        sequences that do not see each other, and are asked for whole.
        """
        if queries != ALL_QUERIES and mask is None and (layer := self.opened()) is not None:
            return attend_few_queries(x[..., queries, :], x, *layer, self.heads)
        q, k, v = self.split(x)
        if isinstance(mask, Segments):
            return attend_segments(q, k, v, mask).transpose(-3, -2).flatten(-2)
        allowed = mask if mask is None or queries == ALL_QUERIES else mask[..., queries, :]
        return dot_product_attention(q[..., queries, :], k, v, allowed).transpose(-3, -2).flatten(-2)

    def opened(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight (3 D, D) and bias (3 D,) of the layer that makes queries, keys and values; None where it is more than
        a product, or where its weight is no plain tensor, as those that other libraries quantise."""
        if type(self.qkv) is not nn.Linear or hasattr(self.qkv.weight, "__tensor_flatten__"):
            return None
        return self.qkv.weight, self.qkv.bias

    @open_to_kinds
    def weights(self, x: Tensor, mask: Tensor | None = None, queries: slice = ALL_QUERIES) -> Tensor:
        """(..., N, D) -> (..., h, Q, N): the probabilities of the `queries`, or all N; rows are queries and sum to
        one."""
        q, k, _ = self.split(x)
        return attention_probabilities(q[..., queries, :], k, mask if mask is None else mask[..., queries, :])

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., N, D) -> queries, keys and values, each (..., h, N, d)."""
        return split_heads(self.qkv(x), self.heads)


class QKNormAttention(Attention):
    """Attention whose queries and keys are divided by their root mean square, head by head, and scaled by a learned
    vector of their d channels (RMSNorm, arXiv:1910.07467): logits cannot grow without bound (arXiv:2302.05442)."""

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__(width, heads, bias)
        self.query_norm, self.key_norm = (nn.RMSNorm(width // heads, eps=1e-6) for _ in range(2))

    def opened(self) -> None:
        """None: queries and keys are more than a product."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., N, D) -> queries and keys, normed, and values, each (..., h, N, d)."""
        q, k, v = super().split(x)
        dtype = self.query_norm.weight.dtype
        return self.query_norm(q.to(dtype)).to(v.dtype), self.key_norm(k.to(dtype)).to(v.dtype), v


class QkvLinearWithoutKeyBias(nn.Linear):
    """The layer of queries, keys and values, (..., D) -> (..., 3 D), whose keys have no bias: it would add the same to
    every logit of a query, which softmax drops (BEiT, arXiv:2106.08254)."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make one bias of all three
        self.in_features, self.out_features = width, 3 * width
        self.weight = nn.Parameter(torch.empty(3 * width, width))
        self.query_bias, self.value_bias = (nn.Parameter(torch.zeros(width)) for _ in range(2))
        for part in self.weight.chunk(3):
            nn.init.xavier_uniform_(part)

    @property
    def bias(self) -> Tensor:
        """(3 D,): those of queries and values, with zeros for keys between them."""
        return torch.cat([self.query_bias, torch.zeros_like(self.query_bias), self.value_bias])


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(..., N, 3 D) -> queries, keys and values, each (..., h, N, d)."""
    q, k, v = torch.unflatten(qkv, -1, (3, heads, -1)).unbind(-3)  # (..., N, 3, h, d) -> 3 x (..., N, h, d)
    return q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)


def attention_probabilities(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias): queries (..., h, Q, d) and keys (..., h, N, d) -> (..., h, Q, N).

    A `bias` of bool is a mask: true where a query may attend to a key.
    """
    logits = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
    if bias is not None:
        logits = mask_logits(logits, bias) if bias.dtype == torch.bool else logits + bias
    return logits.softmax(-1)


def mask_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits (..., h, Q, N), minus infinity where the `mask` (..., 1, Q, N) bool is false."""
    return logits if mask is None else logits.masked_fill(~mask, float("-inf"))


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v on (..., h, N, d), by the fastest way the device has.

    `bias` is added to the logits, or a mask, as in `attention_probabilities`; its shape goes over (..., h, N, N).

    PyTorch's fused kernel, on the four axes that it takes, everywhere but on a CPU in bfloat16. There its backward pass
    takes about eight times as long as two batched products with the probabilities kept, and without gradients it takes
    1.4 to 1.7 times as long as `attend_in_chunks`. With tiles (AMX) a kernel of our own takes half as long as either.
    """
    if q.dim() > 4 and bias is None:
        return torch.unflatten(dot_product_attention(*(x.flatten(0, -4) for x in (q, k, v))), 0, q.shape[:-3])
    if bias is None and kernels.can_attend(q, k, v):
        learning = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return TiledAttention.apply(q, k, v) if learning else kernels.attend_bf16(q, k, v)
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
    """Whether `attend_in_chunks` answers queries (B, h, Q, d) sooner than PyTorch's fused kernel, without gradients: in
    bfloat16 on a CPU, up to about a thousand tokens."""
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
    """Whether products of bfloat16 are AVX-512's: with tiles (AMX) nothing was measured. Read once a process."""
    features = get_cpu_features()
    return features.get("avx512_bf16", False) and not features.get("amx_bf16", False)


def attend_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, logits_at_once: int | None = None
) -> Tensor:
    """softmax(scale q k^T) v by batched products, without gradients: queries (B, h, Q, c), keys (B, h, N, c) and values
    (B, h, N, d) -> (B, h, Q, d); `scale` is 1 / sqrt(c) unless given.

    For each part of the batch, of `logits_at_once` logits or as many as stay in a core's cache: p = softmax(scale q
    k^T), y = p v. Logits and probabilities are in the type of q, as in training (`MaterializedAttention`).
    """
    batch, heads, asked, size = q.shape
    y = q.new_empty(batch, asked, heads, v.shape[-1]).transpose(1, 2)
    nothing, images = q.new_zeros(()), max(1, (logits_at_once or CHUNK_LOGITS) // (heads * asked * k.shape[2]))
    for start in range(0, batch, images):
        part = slice(start, start + images)
        queries, keys, values = (x[part].flatten(0, 1) for x in (q, k, v))
        logits = torch.baddbmm(nothing, queries, keys.mT, beta=0, alpha=size**-0.5 if scale is None else scale)
        y[part] = torch.unflatten(torch.bmm(logits.softmax(-1), values), 0, (-1, heads))
    return y


def attend_unscaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T) v for queries and keys (..., h, N, c) of more channels than the values (..., h, N, d) have.

    `mask` (..., 1, N, N) bool is true where a query may attend to a key. PyTorch's fused kernel, for which values are
    filled up to c channels; but on a CPU, and without a mask, products by themselves are faster for windows
    (`MAX_UNFUSED_TOKENS`), in bfloat16 with gradients up to a thousand tokens.
    """
    tokens, extra = q.shape[-2], q.shape[-1] - v.shape[-1]
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    most = MAX_UNFUSED_TRAINING_TOKENS if learning and q.dtype == torch.bfloat16 else MAX_UNFUSED_TOKENS
    tracing = is_compiling()
    if mask is not None or q.device.type != "cpu" or tokens > most or tracing:
        y = F.scaled_dot_product_attention(q, k, F.pad(v, (0, extra)), attn_mask=mask, scale=1.0)
        return y[..., : v.shape[-1]]
    if learning:
        return (q @ k.mT).softmax(-1) @ v
    windows = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    return attend_in_chunks(*windows, scale=1.0, logits_at_once=WINDOW_CHUNK_LOGITS).view(v.shape)


def attend_segments(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """(..., h, N, d) -> (..., h, N, d): `dot_product_attention` of each sequence by itself, neighbours of one length
    together.

    The row is split, not sliced: a slice's gradient is a row of zeros, for each sequence, which are then added up.
    """
    if segments.masked:
        return dot_product_attention(q, k, v, segments.mask(q.device))
    runs = segments.runs
    parts = zip(*(x.split_with_sizes([length * count for length, count in runs], -2) for x in (q, k, v)), strict=True)
    answers = [
        dot_product_attention(*(torch.unflatten(x, -2, (count, length)) for x in part)).flatten(-3, -2)
        for part, (length, count) in zip(parts, runs, strict=True)
    ]
    return torch.cat(answers, -2)


def attend_few_queries(asking: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """(..., Q, D) tokens that ask among (..., N, D) -> (..., Q, D): the heads' answers side by side, without keys or
    values of the N.

    With q = W_q a + b_q: q . (W_k x + b_k) = (W_k^T q) . x + q . b_k, where the last term is the same for all x, so
    that softmax drops it; and sum p (W_v x + b_v) = W_v (sum p x) + b_v. That is 2 Q h N D multiply-adds instead of 2 N
    D^2: less for Q < d. `weight` (3 D, D) and `bias` (3 D,) are those of queries, keys and values.
    """
    size = x.shape[-1] // heads
    asks, keys, values = torch.unflatten(weight.to(x.dtype), 0, (3, heads, size)).unbind()  # 3 x (h, d, D)
    q = torch.einsum("...qc,hdc->...hqd", asking, asks)
    if bias is not None:
        bias = torch.unflatten(bias.to(x.dtype), 0, (3, heads, 1, size))
        q = q + bias[0]
    # (..., h Q, D): all heads look at the same x
    q = torch.einsum("...hqd,hdc->...hqc", q * size**-0.5, keys).flatten(-3, -2)
    seen = (q @ x.mT).softmax(-1) @ x
    y = torch.einsum("...hqc,hdc->...hqd", torch.unflatten(seen, -2, (heads, -1)), values)
    return (y if bias is None else y + bias[2]).transpose(-3, -2).flatten(-2)


class TiledAttention(torch.autograd.Function):
    """Attention by kernels of our own (`kernels.attend_bf16`), which compute the probabilities again in the backward
    pass; queries (B, h, Q, d), keys and values (B, h, N, d) in bfloat16 -> (B, h, Q, d)."""

    @staticmethod
    def forward(ctx: FunctionContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        statistics = torch.empty(*q.shape[:-1], 2)
        y = kernels.attend_bf16(q, k, v, statistics)
        ctx.save_for_backward(q, k, v, y, statistics)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (q, k, v, y, statistics) = gradients, ctx.saved_tensors
        return kernels.attend_bf16_backward(q, k, v=v, y=y, grad=grad, statistics=statistics)


class KeptContext(FunctionContext):
    """What `MaterializedAttention` leaves to its backward pass: the shape of the bias too."""

    bias: torch.Size | None


class MaterializedAttention(torch.autograd.Function):
    """Attention by batched products that keeps its probabilities P (..., N, N) for the backward pass; q, k, v and what
    comes out are (..., N, d).

    With S = q k^T / sqrt(d) + bias, P = softmax(S), y = P v:  dv = P^T dy,  dP = dy v^T,  dS = P (dP - sum(dP P)),
    dq = dS k / sqrt(d),  dk = dS^T q / sqrt(d),  dbias = dS, added up in float32 over what shares it.
    """

    @staticmethod
    def forward(ctx: KeptContext, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = q.contiguous() * q.shape[-1] ** -0.5, k.contiguous(), v.contiguous()
        logits = torch.matmul(q, k.transpose(-2, -1))
        p = (logits if bias is None else logits.add_(bias)).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        ctx.bias = None if bias is None else bias.shape
        return p @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: KeptContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p = ctx.saved_tensors
        grad = gradients[0].contiguous()
        dv = p.transpose(-2, -1) @ grad
        ds = softmax_backward(grad @ v.transpose(-2, -1), p)
        d_bias = sum_broadcast_gradient(ds, ctx.bias) if ctx.bias is not None and ctx.needs_input_grad[3] else None
        return ds @ k * q.shape[-1] ** -0.5, ds.transpose(-2, -1) @ q, dv, d_bias


def sum_broadcast_gradient(grad: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of a tensor of this shape that was broadcast to that of `grad`: added up in float32."""
    more = grad.dim() - len(shape)
    axes = [*range(more), *(more + axis for axis, side in enumerate(shape) if side == 1 != grad.shape[more + axis])]
    return (grad.sum(axes, dtype=torch.float32).to(grad.dtype) if axes else grad).reshape(shape)


def softmax_backward(grad: Tensor, p: Tensor) -> Tensor:
    """P (dP - sum(dP P)) along the last axis of two tensors of one shape, in one pass where this version of PyTorch
    lets its own kernel be called."""
    kernel = getattr(torch, "_softmax_backward_data", None)
    if kernel is not None:
        return kernel(grad, p, -1, p.dtype)
    return p * (grad - (grad * p).sum(-1, keepdim=True))
