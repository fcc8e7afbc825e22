"""Typed versions of PyTorch functions and classes with missing annotations; at run time they are PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import function

if TYPE_CHECKING:
    from numpy import ndarray

    F = TypeVar("F", bound=Callable[..., Any])
    R = TypeVar("R")
    M = TypeVar("M", bound=nn.Module, covariant=True)

    def from_numpy(array: ndarray) -> Tensor:
        """Return a tensor that shares the memory of an array."""
        ...

    def ndtr(x: Tensor) -> Tensor:
        """Compute the distribution function of the standard normal distribution, of any shape."""
        ...

    def ndtri(p: Tensor) -> Tensor:
        """Compute the inverse of `ndtr`, of any shape."""
        ...

    def vector_norm(x: Tensor, ord: float, dim: int) -> Tensor:
        """Compute the norm along an axis, which is removed."""
        ...

    def once_differentiable(backward: F) -> F:
        """Mark a backward pass as not differentiable."""
        ...

    def checkpoint(block: Callable[..., Tensor], *arguments: Any, use_reentrant: bool) -> Tensor:
        """Return a block's output for these arguments, recomputed in the backward pass."""
        ...

    def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield a module and all its submodules, by their names."""
        ...

    def compile_module(module: nn.Module) -> None:
        """Compile a module in place."""
        ...

    class ModuleList(nn.ModuleList, Generic[M]):
        """A list of modules of one type."""

        def __init__(self, modules: Iterable[M] = ()) -> None: ...

        @overload
        def __getitem__(self, idx: slice) -> ModuleList[M]: ...

        @overload
        def __getitem__(self, idx: int) -> M: ...

        def __getitem__(self, idx: int | slice) -> M | ModuleList[M]: ...

        def __iter__(self) -> Iterator[M]: ...

else:
    from_numpy, ndtr, ndtri = torch.from_numpy, torch.special.ndtr, torch.special.ndtri
    vector_norm, once_differentiable = torch.linalg.vector_norm, function.once_differentiable
    checkpoint = torch.utils.checkpoint.checkpoint
    named_modules, compile_module, ModuleList = nn.Module.named_modules, nn.Module.compile, nn.ModuleList


class FunctionContext(function.FunctionCtx):
    """The context that `forward` of a `torch.autograd.Function` passes to `backward`; a function with more attributes
    declares them in a subclass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


def open_to_kinds(method: Callable[..., R]) -> Callable[..., R]:
    """Let subclasses override a method with different arguments: the context of each attention class."""
    return method


def bias_of(layer: nn.Linear | nn.LayerNorm) -> nn.Parameter | None:
    """Return the bias of a layer, None if it has none, which PyTorch's types do not allow for."""
    return layer.bias
