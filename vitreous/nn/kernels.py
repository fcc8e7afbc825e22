"""Operators by this project's own kernels (`native.c`), for bfloat16 on a CPU.

What lies between products reads and writes each number once, where PyTorch's operators convert in passes of their own;
attention keeps the logits of 32 queries in a core's cache and multiplies by tiles (AMX).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.compiler import is_compiling

from vitreous.system.native import native
from vitreous.system.torch_types import ndtr

LONG, POINTER, FLOAT = ctypes.c_long, ctypes.c_void_p, ctypes.c_float
MOST_KEYS = 8192  # of attention: each thread copies keys and values of a head, and on the way back keeps its N Q slopes
#: the f of x f(x), by the name of a GELU's form
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": ndtr,
    "tanh": lambda x: torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "quick": lambda x: torch.sigmoid(1.702 * x),
}


class AttentionArguments(ctypes.Structure):
    """`Attention` of native.c."""

    _fields_ = [
        *((name, POINTER) for name in ("q", "k", "v", "y")),
        *((f"{name}_strides", LONG * 3) for name in ("q", "k", "v", "y")),
        *((name, LONG) for name in ("images", "heads", "queries", "keys", "channels", "parts")),
        ("scale", FLOAT),
        ("statistics", POINTER),
    ]


class GradientArguments(ctypes.Structure):
    """`AttentionGradients` of native.c."""

    _fields_ = [
        *((name, POINTER) for name in ("q", "k", "v", "y", "dy", "dq", "dk", "dv")),
        *((f"{name}_strides", LONG * 3) for name in ("q", "k", "v", "y", "dy", "dq", "dk", "dv")),
        *((name, LONG) for name in ("images", "heads", "queries", "keys", "channels")),
        ("scale", FLOAT),
        ("statistics", POINTER),
    ]


def can_fuse() -> bool:
    """Whether `layer_norm`, `add` and `gelu_` can be called."""
    return native().library is not None


def gelu_pays() -> bool:
    """Whether `gelu_` is faster than a product that applies a GELU as it writes: with tiles, where products are so fast
    that oneDNN's error function takes as long as half of one. Without them nothing was measured."""
    return native().tiles


def takes_gelu(x: Tensor) -> bool:
    """Whether `gelu` takes x (..., D), and is faster."""
    return x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.is_contiguous() and has_memory(x) and gelu_pays()


def can_transpose(x: Tensor) -> bool:
    """Whether `transpose` takes x (N, D)."""
    return x.dtype == torch.bfloat16 and x.stride(1) == 1 and not x.shape[0] % 2 and not x.shape[1] % 2 and can_fuse()


def has_memory(x: Tensor) -> bool:
    """Whether x (..., D) is a tensor with numbers in memory: none that torch.compile traces, torch.vmap batches or
    another library has made of it."""
    if is_compiling() or type(x) is not Tensor:
        return False
    try:
        return x.data_ptr() != 0
    except RuntimeError:
        return False


def can_attend(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend` takes queries (B, h, Q, d), keys and values (B, h, N, d)."""
    return (
        q.device.type == "cpu"
        and q.dtype == k.dtype == v.dtype == torch.bfloat16
        and q.dim() == k.dim() == v.dim() == 4
        and q.shape[:2] == k.shape[:2] == v.shape[:2]
        and q.shape[-1] == v.shape[-1]
        and 0 < k.shape[-2] <= MOST_KEYS
        and q.numel() > 0
        and all(x.stride(-1) == 1 for x in (q, k, v))
        and all(map(has_memory, (q, k, v)))
        and native().tiles
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(..., D) float32 -> (..., D) bfloat16: the norm over the last axis; D is a multiple of 16."""
    x, width = x.contiguous(), x.shape[-1]
    y = torch.empty(x.shape, dtype=torch.bfloat16)
    library().layer_norm(*map(address, (x, weight, bias, y)), LONG(x.numel() // width), LONG(width), FLOAT(eps))
    return y


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y in float32, of x float32 and y bfloat16 of one shape."""
    x, y = x.contiguous(), y.contiguous()
    total = torch.empty_like(x)
    library().add(*map(address, (x, y, total)), LONG(x.numel()))
    return total


def gelu_(x: Tensor, form: str) -> Tensor:
    """(..., D) -> (..., D): x f(x) in place, contiguous and in bfloat16, by a form of GELU; f to within 6e-5."""
    library().gelu(address(x), address(x), address(table(form)), LONG(x.numel()))
    return x


def gelu(x: Tensor, form: str) -> Tensor:
    """(..., D) -> (..., D) bfloat16, contiguous: the same, x as it was."""
    y = torch.empty_like(x)
    library().gelu(address(x), address(y), address(table(form)), LONG(x.numel()))
    return y


def gelu_backward_(grad: Tensor, x: Tensor, form: str) -> Tensor:
    """(..., D), (..., D) -> (..., D): x f(x), both contiguous and in bfloat16; `grad` becomes grad times its slope."""
    y, tables = torch.empty_like(x), (table(form), slopes(form))
    library().gelu_backward(*map(address, (x, grad, y, *tables)), LONG(x.numel()))
    return y


def transpose(x: Tensor) -> Tensor:
    """(N, D) -> (D, N) contiguous, of bfloat16; N and D are even, and channels lie side by side."""
    y = x.new_empty(x.shape[1], x.shape[0])
    library().transpose(address(x), LONG(x.stride(0)), LONG(x.shape[0]), LONG(x.shape[1]), address(y))
    return y


@cache
def table(form: str) -> Tensor:
    """(3, 32) float32: constant, linear and square term of f - 1/2 around each quarter; from 7.625 on f is 1."""
    return tabulate(FORMS[form])


@cache
def slopes(form: str) -> Tensor:
    """(3, 32) float32: the same of the slope of x f(x), which is f(x) + x f'(x)."""
    function, step = FORMS[form], 1e-5
    return tabulate(lambda x: ((x + step) * function(x + step) - (x - step) * function(x - step)) / (2 * step))


def tabulate(function: Callable[[Tensor], Tensor]) -> Tensor:
    """(3, 32) float32: parabolas through three points around each quarter, sqrt(3)/16 apart (Chebyshev's)."""
    step, center = math.sqrt(3) / 16, torch.arange(32, dtype=torch.float64) / 4
    below, middles, above = (function(center + offset) - 0.5 for offset in (-step, 0, step))
    terms = torch.stack([middles, (above - below) / (2 * step), (above + below - 2 * middles) / (2 * step**2)])
    terms[:, -1] = torch.tensor([0.5, 0.0, 0.0])
    return terms.float()


def attend(q: Tensor, k: Tensor, v: Tensor, statistics: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v: (B, h, Q, d) of queries, (B, h, N, d) of keys and values -> (B, h, Q, d), heads of a
    query side by side in memory.

    An answer does not depend on the threads, or on other queries. `statistics` (B, h, Q, 2) float32 are written for
    `attend_backward`. Raises MemoryError.
    """
    batch, heads, queries, channels = q.shape
    y = q.new_empty(batch, queries, heads, channels).transpose(1, 2)
    threads, most = torch.get_num_threads(), math.ceil(queries / 32)
    uneven = batch * heads % threads and batch * heads < 4 * threads
    parts = min(most, math.ceil(4 * threads / (batch * heads))) if uneven else 1
    arguments = AttentionArguments(
        *places(q, k, v, y),
        *(batch, heads, queries, k.shape[-2], channels, parts),
        channels**-0.5,
        None if statistics is None else statistics.data_ptr(),
    )
    if library().attend(ctypes.byref(arguments)):
        raise MemoryError("no memory for attention")
    return y


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, grad: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries (B, h, Q, d), keys and values (B, h, N, d) from `grad` (B, h, Q, d), that of the answers y,
    whose channels lie side by side; heads of a token side by side in memory. Raises MemoryError."""
    batch, heads, queries, channels = q.shape
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    gradients = [x.new_empty(batch, x.shape[2], heads, channels).transpose(1, 2) for x in (q, k, v)]
    arguments = GradientArguments(
        *places(q, k, v, y, grad, *gradients),
        *(batch, heads, queries, k.shape[-2], channels),
        channels**-0.5,
        statistics.data_ptr(),
    )
    if library().attend_backward(ctypes.byref(arguments)):
        raise MemoryError("no memory for the gradients of attention")
    dq, dk, dv = gradients
    return dq, dk, dv


def places(*tensors: Tensor) -> list[int | ctypes.Array[ctypes.c_long]]:
    """Where tensors (B, h, N, d) begin, and then the strides of each over its first three axes."""
    return [*(x.data_ptr() for x in tensors), *((LONG * 3)(*x.stride()[:3]) for x in tensors)]


def library() -> ctypes.CDLL:
    """The compiled kernels. Raises RuntimeError where there are none."""
    if (loaded := native().library) is None:
        raise RuntimeError(f"no kernels of our own: {native().note}")
    return loaded


def address(x: Tensor) -> ctypes.c_void_p:
    """(..., D) -> where it begins in memory."""
    return POINTER(x.data_ptr())
