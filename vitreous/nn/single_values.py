"""Batch norm for a batch of one value per channel, which a last batch of one image leaves after pooling."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def accept_single_values(module: nn.Module) -> None:
    """Let every batch norm of a module take inputs of one value per channel in training: such an input has no variance,
    so it is normalised by the running statistics, which stay as they are. PyTorch raises ValueError for it."""
    for part in module.modules():
        if isinstance(part, _BatchNorm) and part.track_running_stats:
            part.register_forward_pre_hook(use_running_statistics)
            part.register_forward_hook(use_batch_statistics, always_call=True)


def has_single_values(x: Tensor) -> bool:
    """Whether a (B, C, ...) tensor has one value per channel."""
    return x.numel() == x.shape[1]


def use_running_statistics(norm: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Before the forward pass of a batch norm: evaluation mode for a single value per channel."""
    norm.is_single = norm.training and has_single_values(inputs[0])  # type: ignore[assignment]
    if norm.is_single:
        norm.training = False


def use_batch_statistics(norm: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    """After the forward pass of a batch norm: training mode again, where it was on."""
    if norm.is_single:
        norm.training = True
