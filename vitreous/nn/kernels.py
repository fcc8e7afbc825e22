"""Operators implemented by this project's kernels (`native.c`), for bfloat16 on a CPU.

Element-wise kernels read and write each number once, while PyTorch's operators convert dtypes in separate passes.
Attention keeps the logits of 32 queries in a core's cache and multiplies by tiles (AMX).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.compiler import is_compiling

from vitreous.system.native import load_native_library
from vitreous.system.torch_types import ndtr

C_LONG, C_POINTER, C_FLOAT = ctypes.c_long, ctypes.c_void_p, ctypes.c_float
MAX_ATTENTION_KEYS = (
    8192  # of attention: each thread copies keys and values of a head, and on the way back keeps its N Q slopes
)
#: the f of x f(x), by the name of a GELU's form
GELU_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": ndtr,
    "tanh": lambda x: torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "quick": lambda x: torch.sigmoid(1.702 * x),
}


class AttentionArguments(ctypes.Structure):
    """The struct `Attention` of native.c."""

    _fields_ = [
        *((name, C_POINTER) for name in ("q", "k", "v", "y")),
        *((f"{name}_strides", C_LONG * 3) for name in ("q", "k", "v", "y")),
        *((name, C_LONG) for name in ("images", "heads", "queries", "keys", "channels", "parts")),
        ("scale", C_FLOAT),
        ("statistics", C_POINTER),
    ]


class GradientArguments(ctypes.Structure):
    """The struct `AttentionGradients` of native.c."""

    _fields_ = [
        *((name, C_POINTER) for name in ("q", "k", "v", "y", "dy", "dq", "dk", "dv")),
        *((f"{name}_strides", C_LONG * 3) for name in ("q", "k", "v", "y", "dy", "dq", "dk", "dv")),
        *((name, C_LONG) for name in ("images", "heads", "queries", "keys", "channels")),
        ("scale", C_FLOAT),
        ("statistics", C_POINTER),
    ]


def has_native_kernels() -> bool:
    """Return whether `layer_norm`, `add_bf16` and `gelu_bf16_` can be called."""
    return load_native_library().library is not None


def is_native_gelu_faster() -> bool:
    """Return whether `gelu_bf16_` is faster than a product that applies a GELU while writing.

    It is with tiles (AMX), where oneDNN's error function takes half as long as a product. Without them nothing was
    measured.
    """
    return load_native_library().tiles


def can_apply_gelu(x: Tensor) -> bool:
    """Return whether `gelu_bf16` supports x (..., D), and is faster."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.bfloat16
        and x.is_contiguous()
        and has_data_pointer(x)
        and is_native_gelu_faster()
    )


def can_transpose(x: Tensor) -> bool:
    """Return whether `transpose_bf16` supports x (N, D)."""
    return (
        x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and not x.shape[0] % 2
        and not x.shape[1] % 2
        and has_native_kernels()
    )


def has_data_pointer(x: Tensor) -> bool:
    """Return whether x (..., D) has data in memory. Tensors traced by torch.compile, batched by torch.vmap or wrapped
    by another library have none."""
    if is_compiling() or type(x) is not Tensor:
        return False
    try:
        return x.data_ptr() != 0
    except RuntimeError:
        return False


def can_attend(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether `attend_bf16` supports queries (B, h, Q, d), keys and values (B, h, N, d)."""
    return (
        q.device.type == "cpu"
        and q.dtype == k.dtype == v.dtype == torch.bfloat16
        and q.dim() == k.dim() == v.dim() == 4
        and q.shape[:2] == k.shape[:2] == v.shape[:2]
        and q.shape[-1] == v.shape[-1]
        and 0 < k.shape[-2] <= MAX_ATTENTION_KEYS
        and q.numel() > 0
        and all(x.stride(-1) == 1 for x in (q, k, v))
        and all(map(has_data_pointer, (q, k, v)))
        and load_native_library().tiles
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(..., D) float32 -> (..., D) bfloat16: the norm over the last axis; D is a multiple of 16."""
    x, width = x.contiguous(), x.shape[-1]
    y = torch.empty(x.shape, dtype=torch.bfloat16)
    native_library().layer_norm(
        *map(data_pointer, (x, weight, bias, y)), C_LONG(x.numel() // width), C_LONG(width), C_FLOAT(eps)
    )
    return y


def add_bf16(x: Tensor, y: Tensor) -> Tensor:
    """x + y in float32, of x float32 and y bfloat16 of one shape."""
    x, y = x.contiguous(), y.contiguous()
    total = torch.empty_like(x)
    native_library().add(*map(data_pointer, (x, y, total)), C_LONG(x.numel()))
    return total


def gelu_bf16_(x: Tensor, form: str) -> Tensor:
    """(..., D) -> (..., D): x f(x) in place, contiguous and in bfloat16, by a form of GELU; f to within 6e-5."""
    native_library().gelu(data_pointer(x), data_pointer(x), data_pointer(gelu_coefficients(form)), C_LONG(x.numel()))
    return x


def gelu_bf16(x: Tensor, form: str) -> Tensor:
    """(..., D) -> (..., D) bfloat16, contiguous: `gelu_bf16_` on a copy of x."""
    y = torch.empty_like(x)
    native_library().gelu(data_pointer(x), data_pointer(y), data_pointer(gelu_coefficients(form)), C_LONG(x.numel()))
    return y


def gelu_bf16_backward_(grad: Tensor, x: Tensor, form: str) -> Tensor:
    """Multiply `grad` (..., D) in place by the derivative of x f(x) at x (..., D); both contiguous and in bfloat16."""
    y, tables = torch.empty_like(x), (gelu_coefficients(form), gelu_slope_coefficients(form))
    native_library().gelu_backward(*map(data_pointer, (x, grad, y, *tables)), C_LONG(x.numel()))
    return y


def transpose_bf16(x: Tensor) -> Tensor:
    """(N, D) -> (D, N) contiguous, of bfloat16; N and D are even, and channels are contiguous."""
    y = x.new_empty(x.shape[1], x.shape[0])
    native_library().transpose(
        data_pointer(x), C_LONG(x.stride(0)), C_LONG(x.shape[0]), C_LONG(x.shape[1]), data_pointer(y)
    )
    return y


@cache
def gelu_coefficients(form: str) -> Tensor:
    """(3, 32) float32: constant, linear and square term of f - 1/2 around each quarter; from 7.625 on f is 1."""
    return fit_parabolas(GELU_GATES[form])


@cache
def gelu_slope_coefficients(form: str) -> Tensor:
    """(3, 32) float32: the coefficients of `gelu_coefficients` for the derivative of x f(x), which is f(x) + x
    f'(x)."""
    function, step = GELU_GATES[form], 1e-5
    return fit_parabolas(lambda x: ((x + step) * function(x + step) - (x - step) * function(x - step)) / (2 * step))


def fit_parabolas(function: Callable[[Tensor], Tensor]) -> Tensor:
    """(3, 32) float32: parabolas through three points around each quarter, sqrt(3)/16 apart (Chebyshev's)."""
    step, center = math.sqrt(3) / 16, torch.arange(32, dtype=torch.float64) / 4
    below, middles, above = (function(center + offset) - 0.5 for offset in (-step, 0, step))
    terms = torch.stack([middles, (above - below) / (2 * step), (above + below - 2 * middles) / (2 * step**2)])
    terms[:, -1] = torch.tensor([0.5, 0.0, 0.0])
    return terms.float()


def attend_bf16(q: Tensor, k: Tensor, v: Tensor, statistics: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v: queries (B, h, Q, d), keys and values (B, h, N, d) -> (B, h, Q, d), with the heads of
    a query contiguous in memory.

    Outputs do not depend on the number of threads or on other queries. `statistics` (B, h, Q, 2) float32 is written for
    `attend_bf16_backward`. Raises MemoryError.
    """
    batch, heads, queries, channels = q.shape
    y = q.new_empty(batch, queries, heads, channels).transpose(1, 2)
    threads, max_chunks = torch.get_num_threads(), math.ceil(queries / 32)
    is_uneven = batch * heads % threads and batch * heads < 4 * threads
    num_chunks = min(max_chunks, math.ceil(4 * threads / (batch * heads))) if is_uneven else 1
    arguments = AttentionArguments(
        *pointers_and_strides(q, k, v, y),
        *(batch, heads, queries, k.shape[-2], channels, num_chunks),
        channels**-0.5,
        None if statistics is None else statistics.data_ptr(),
    )
    if native_library().attend(ctypes.byref(arguments)):
        raise MemoryError("out of memory in attention")
    return y


def attend_bf16_backward(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, grad: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries (B, h, Q, d), keys and values (B, h, N, d).

    `grad` (B, h, Q, d) is the gradient of the outputs y; its channels are contiguous. In the results, the heads of a
    token are contiguous in memory. Raises MemoryError.
    """
    batch, heads, queries, channels = q.shape
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    gradients = [x.new_empty(batch, x.shape[2], heads, channels).transpose(1, 2) for x in (q, k, v)]
    arguments = GradientArguments(
        *pointers_and_strides(q, k, v, y, grad, *gradients),
        *(batch, heads, queries, k.shape[-2], channels),
        channels**-0.5,
        statistics.data_ptr(),
    )
    if native_library().attend_backward(ctypes.byref(arguments)):
        raise MemoryError("out of memory in the backward pass of attention")
    dq, dk, dv = gradients
    return dq, dk, dv


def pointers_and_strides(*tensors: Tensor) -> list[int | ctypes.Array[ctypes.c_long]]:
    """Return the data pointers of tensors (B, h, N, d), then the strides of each over its first three axes."""
    return [*(x.data_ptr() for x in tensors), *((C_LONG * 3)(*x.stride()[:3]) for x in tensors)]


def native_library() -> ctypes.CDLL:
    """Return the compiled kernels. Raises RuntimeError if they are not available."""
    if (loaded := load_native_library().library) is None:
        raise RuntimeError(f"native kernels are not available: {load_native_library().note}")
    return loaded


def data_pointer(x: Tensor) -> ctypes.c_void_p:
    """Return the address of the data of a tensor (..., D)."""
    return C_POINTER(x.data_ptr())
