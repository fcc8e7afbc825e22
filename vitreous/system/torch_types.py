"""Typed versions of PyTorch functions and classes whose annotations are missing. At run time they are PyTorch's
functions and classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import function

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from numpy import ndarray

    F = TypeVar("F", bound=Callable[..., Any])
    R = TypeVar("R")
    M = TypeVar("M", bound=nn.Module, covariant=True)

    def from_numpy(array: ndarray) -> Tensor:
        """Return a tensor that shares the memory of an array of the same shape."""
        ...

    def ndtr(x: Tensor) -> Tensor:
        """Compute the standard normal distribution function, elementwise for any shape."""
        ...

    def ndtri(p: Tensor) -> Tensor:
        """Compute the inverse of `ndtr`, elementwise for any shape."""
        ...

    def vector_norm(x: Tensor, ord: float, dim: int) -> Tensor:
        """Compute the norm along an axis of a tensor of any shape; the axis is removed."""
        ...

    def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the singular value decomposition of a matrix (M, N): U (M, M), S (min(M, N),) and V^T (N, N)."""
        ...

    def once_differentiable(backward: F) -> F:
        """Decorate a backward pass that does not support double backward."""
        ...

    def checkpoint(block: Callable[..., Tensor], *arguments: Any, use_reentrant: bool) -> Tensor:
        """Run a block and recompute its activations in the backward pass."""
        ...

    def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over a module and all its submodules with their qualified names."""
        ...

    def fork_rng(devices: Iterable[int]) -> AbstractContextManager[None]:
        """Restore the state of the random generators, of the CPU and of these devices, when the context ends."""
        ...

    def compile_module(module: nn.Module) -> None:
        """Compile a module in place with torch.compile."""
        ...

    class ModuleList(nn.ModuleList, Generic[M]):
        """A list of modules of the same type."""

        def __init__(self, modules: Iterable[M] = ()) -> None: ...

        @overload
        def __getitem__(self, idx: slice) -> ModuleList[M]: ...

        @overload
        def __getitem__(self, idx: int) -> M: ...

        def __getitem__(self, idx: int | slice) -> M | ModuleList[M]: ...

        def __iter__(self) -> Iterator[M]: ...

else:
    from_numpy, ndtr, ndtri = torch.from_numpy, torch.special.ndtr, torch.special.ndtri
    vector_norm, svd, once_differentiable = torch.linalg.vector_norm, torch.linalg.svd, function.once_differentiable
    checkpoint = torch.utils.checkpoint.checkpoint
    fork_rng = torch.random.fork_rng
    named_modules, compile_module, ModuleList = nn.Module.named_modules, nn.Module.compile, nn.ModuleList


class FunctionContext(function.FunctionCtx):
    """The context that a `torch.autograd.Function` passes from `forward` to `backward`. Functions that store more than
    tensors declare the attributes in a subclass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


def open_to_kinds(method: Callable[..., R]) -> Callable[..., R]:
    """Decorate a method whose overrides may take other arguments, such as the context of an attention class."""
    return method


def get_bias(layer: nn.Linear | nn.LayerNorm | nn.Conv2d | nn.ConvTranspose2d) -> Tensor | None:
    """Return the bias (outputs,) of a layer, or None if it has none. PyTorch's annotation lacks None."""
    return layer.bias
