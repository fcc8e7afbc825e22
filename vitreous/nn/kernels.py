"""Operators implemented by this project's kernels (`native.c`), for bfloat16 on a CPU.

Element-wise kernels read and write each number once, while PyTorch's operators convert dtypes in separate passes. The
attention kernel keeps the logits of 32 queries in a core's cache and multiplies with AMX tiles.

GELU is written x f(x), where f is the gate of the selected form: `none` (exact, by erf), `tanh` or `quick`.
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
#: the most keys of `attend_bf16`: each thread copies the keys and values of a head, and in the backward pass stores
#: N Q gradients of its logits
MAX_ATTENTION_KEYS = 8192
#: the gate f of a GELU x f(x), by the name of its form
GELU_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": ndtr,
    "tanh": lambda x: torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "quick": lambda x: torch.sigmoid(1.702 * x),
}


class AttentionArguments(ctypes.Structure):
    """The C struct `Attention` of native.c, the arguments of `attend`."""

    _fields_ = [
        *((name, C_POINTER) for name in ("q", "k", "v", "y")),
        *((f"{name}_strides", C_LONG * 3) for name in ("q", "k", "v", "y")),
        *((name, C_LONG) for name in ("images", "heads", "queries", "keys", "channels", "parts")),
        ("scale", C_FLOAT),
        ("statistics", C_POINTER),
    ]


class GradientArguments(ctypes.Structure):
    """The C struct `AttentionGradients` of native.c, the arguments of `attend_backward`."""

    _fields_ = [
        *((name, C_POINTER) for name in ("q", "k", "v", "y", "dy", "dq", "dk", "dv")),
        *((f"{name}_strides", C_LONG * 3) for name in ("q", "k", "v", "y", "dy", "dq", "dk", "dv")),
        *((name, C_LONG) for name in ("images", "heads", "queries", "keys", "channels")),
        ("scale", C_FLOAT),
        ("statistics", C_POINTER),
    ]


class RotationArguments(ctypes.Structure):
    """The C struct `Rotation` of native.c, the arguments of `rotate`."""

    _fields_ = [
        *((name, C_POINTER) for name in ("x", "y", "cos", "sin")),
        *((f"{name}_strides", C_LONG * 3) for name in ("x", "y")),
        *((name, C_LONG) for name in ("images", "heads", "tokens", "pairs", "image_factors")),
        ("sign", C_FLOAT),
    ]


def has_native_kernels() -> bool:
    """Return whether the native library is available, and therefore `layer_norm`, `add_bf16_to_float32`,
    `transpose_bf16`, `rotate_bf16` and the GELU functions of this module."""
    return load_native_library().library is not None


def is_native_gelu_faster() -> bool:
    """Return whether `gelu_bf16_` is faster than oneDNN's product that also applies the GELU.

    It is on CPUs with AMX tiles, where oneDNN's error function takes half as long as the product. On CPUs with
    AVX512-BF16 alone, inference of ViT-B/16 is 2 % slower with it, of SigLIP-B/16 1 %.
    """
    return load_native_library().tiles


def can_apply_gelu(x: Tensor) -> bool:
    """Return whether `gelu_bf16` supports x (..., D). It is faster than PyTorch's GELU where it runs."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.bfloat16
        and x.is_contiguous()
        and has_data_pointer(x)
        and has_native_kernels()
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


def can_rotate(x: Tensor) -> bool:
    """Return whether `rotate_bf16` supports x (B, h, N, d)."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.bfloat16
        and x.dim() == 4
        and x.stride(-1) == 1
        and x.numel() > 0
        and has_data_pointer(x)
        and has_native_kernels()
    )


def has_data_pointer(x: Tensor) -> bool:
    """Return whether x (..., D) has data in memory.

    Tensors traced by torch.compile, batched by torch.vmap or wrapped by another library have none.
    """
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
    """Apply LayerNorm over the last axis: (..., D) float32 -> (..., D) bfloat16; D must be a multiple of 16."""
    x, width = x.contiguous(), x.shape[-1]
    y = torch.empty(x.shape, dtype=torch.bfloat16)
    native_library().layer_norm(
        *map(data_pointer, (x, weight, bias, y)), C_LONG(x.numel() // width), C_LONG(width), C_FLOAT(eps)
    )
    return y


def add_bf16_to_float32(x: Tensor, y: Tensor) -> Tensor:
    """Compute x + y in float32, for x float32 and y bfloat16 of the same shape."""
    x, y = x.contiguous(), y.contiguous()
    total = torch.empty_like(x)
    native_library().add(*map(data_pointer, (x, y, total)), C_LONG(x.numel()))
    return total


def gelu_bf16_(x: Tensor, gelu: str) -> Tensor:
    """Apply GELU, x f(x) with f of `GELU_GATES`, in place to contiguous bfloat16 (..., D). f is accurate to 6e-5."""
    native_library().gelu(data_pointer(x), data_pointer(x), data_pointer(gelu_coefficients(gelu)), C_LONG(x.numel()))
    return x


def gelu_bf16(x: Tensor, gelu: str) -> Tensor:
    """Apply GELU to a contiguous bfloat16 tensor (..., D) and return a new tensor (..., D)."""
    y = torch.empty_like(x)
    native_library().gelu(data_pointer(x), data_pointer(y), data_pointer(gelu_coefficients(gelu)), C_LONG(x.numel()))
    return y


def gelu_bf16_backward_(grad: Tensor, x: Tensor, gelu: str) -> Tensor:
    """Multiply `grad` (..., D) in place by the derivative of GELU at x (..., D), and return GELU(x); all contiguous and
    in bfloat16."""
    y, tables = torch.empty_like(x), (gelu_coefficients(gelu), gelu_slope_coefficients(gelu))
    native_library().gelu_backward(*map(data_pointer, (x, grad, y, *tables)), C_LONG(x.numel()))
    return y


def transpose_bf16(x: Tensor) -> Tensor:
    """Transpose a bfloat16 matrix: (N, D) -> contiguous (D, N); N and D must be even, and rows of x contiguous."""
    y = x.new_empty(x.shape[1], x.shape[0])
    native_library().transpose(
        data_pointer(x), C_LONG(x.stride(0)), C_LONG(x.shape[0]), C_LONG(x.shape[1]), data_pointer(y)
    )
    return y


def rotate_bf16(x: Tensor, cos: Tensor, sin: Tensor, *, is_backward: bool = False) -> Tensor:
    """Rotate each pair (a, b) of channels i and i + d / 2 to (a cos - b sin, b cos + a sin), in float32: x (B, h, N, d)
    bfloat16, and factors (N, d / 2) or (B, 1, N, d / 2) float32 -> contiguous (B, h, N, d) bfloat16. With
    `is_backward`, rotate by the opposite angles."""
    batch, heads, tokens, channels = x.shape
    y, cos, sin = x.new_empty(x.shape), cos.contiguous(), sin.contiguous()
    pairs = channels // 2
    image_factors = tokens * pairs if cos.dim() == 4 and len(cos) > 1 else 0
    x_pointer, y_pointer, *strides = pointers_and_strides(x, y)
    arguments = RotationArguments(
        *(x_pointer, y_pointer, cos.data_ptr(), sin.data_ptr()),
        *strides,
        *(batch, heads, tokens, pairs, image_factors),
        -1.0 if is_backward else 1.0,
    )
    native_library().rotate(ctypes.byref(arguments))
    return y


@cache
def gelu_coefficients(gelu: str) -> Tensor:
    """Compute the parabolas that approximate a GELU's gate: (3, 32) float32, the constant, linear and square terms of f
    - 1/2 around 0, 1/4, 2/4, ..., 31/4. From 7.625 on f is 1."""
    return fit_parabolas(GELU_GATES[gelu])


@cache
def gelu_slope_coefficients(gelu: str) -> Tensor:
    """Compute the parabolas that approximate the derivative of GELU, f(x) + x f'(x): (3, 32) float32 as in
    `gelu_coefficients`."""
    function, step = GELU_GATES[gelu], 1e-5
    return fit_parabolas(lambda x: ((x + step) * function(x + step) - (x - step) * function(x - step)) / (2 * step))


def fit_parabolas(function: Callable[[Tensor], Tensor]) -> Tensor:
    """Fit parabolas to `function` - 1/2 around 0, 1/4, ..., 31/4: (3, 32) float32, constant, linear and square terms.

    Each passes through three Chebyshev points, sqrt(3)/16 apart. The last parabola is the constant 1/2.
    """
    step, center = math.sqrt(3) / 16, torch.arange(32, dtype=torch.float64) / 4
    below, middle, above = (function(center + offset) - 0.5 for offset in (-step, 0, step))
    terms = torch.stack([middle, (above - below) / (2 * step), (above + below - 2 * middle) / (2 * step**2)])
    terms[:, -1] = torch.tensor([0.5, 0.0, 0.0])
    return terms.float()


def attend_bf16(q: Tensor, k: Tensor, v: Tensor, statistics: Tensor | None = None) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v with AMX tiles: queries (B, h, Q, d), keys and values (B, h, N, d) ->
    (B, h, Q, d).

    In memory, the heads of each query are contiguous. Outputs do not depend on the number of threads or on other
    queries. If `statistics` (B, h, Q, 2) float32 is passed, the softmax statistics that `attend_bf16_backward` requires
    are written to it. Raises MemoryError if memory allocation fails.
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
    """Compute the gradients of queries (B, h, Q, d), keys and values (B, h, N, d).

    `y` (B, h, Q, d) are the outputs and `statistics` (B, h, Q, 2) those of `attend_bf16`; `grad` (B, h, Q, d) is the
    gradient of y. In the results, the heads of each token are contiguous in memory. Raises MemoryError if memory
    allocation fails.
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
    """Return the loaded library of kernels. Raises RuntimeError if it is not available."""
    if (library := load_native_library().library) is None:
        raise RuntimeError(f"native kernels are not available: {load_native_library().note}")
    return library


def data_pointer(x: Tensor) -> ctypes.c_void_p:
    """Return the address of the data of a tensor (..., D)."""
    return C_POINTER(x.data_ptr())
