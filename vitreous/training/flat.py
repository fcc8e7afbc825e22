"""The parameters of a module as flat vectors: float32 masters, a working copy to compute with, an average.

    master (n,) float32   what the optimiser moves
    work   (n,) dtype     what the module computes with; the masters themselves where dtype is float32
    grads  (n,) dtype     where backward passes add, one a shard, gathered into `master_grad` (n,) float32, which is there only
                          from a backward pass to the end of its step, unless it is the same vector
    average (n,) float32  Polyak average of the masters, or the masters themselves

The module's parameters become views of `work`, so a step costs a handful of operations on long vectors, whatever the
number of tensors, and no weight is cast inside the forward pass.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

ALIGN = 64  # elements; every tensor starts on a cache line


class Flat:
    """Parameters grouped by what the optimiser does to them: `matrix` (hidden matrices), `decay`, `plain`."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device, ema: float | None = None, shards: int = 1) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.names: dict[str, list[str]] = {"matrix": [], "decay": [], "plain": []}
        for name, parameter in named:
            self.names[group_of(name, parameter)].append(name)
        self.parameters = dict(named)
        self.spans: dict[str, tuple[int, int]] = {}
        self.groups: dict[str, slice] = {}
        end = 0
        for group, names in self.names.items():
            start = end
            for name in names:
                self.spans[name] = (end, end + self.parameters[name].numel())
                end += -(-self.parameters[name].numel() // ALIGN) * ALIGN
            self.groups[group] = slice(start, end)
        self.master = torch.zeros(end, device=device)
        for name, view in self.views(self.master).items():
            view.copy_(self.parameters[name].detach())
        self.work = self.master if dtype == torch.float32 else self.master.to(dtype)
        self.grads = [torch.zeros_like(self.work) for _ in range(shards)]
        self.grad = self.grads[0]
        self.total = self.grad if dtype == torch.float32 else None  # what `master_grad` gives
        self.ema = ema
        self.average = self.master if ema is None else self.master.clone()
        self.twin = copy.deepcopy(module).to(device).eval().requires_grad_(False)  # computes with the average
        module.to(device)
        self.bind(module)

    def bind(self, module: nn.Module) -> None:
        """Make the module's parameters views of `work`, their gradients views of `grad`, and the twin's of `average`."""
        work, grad, average = self.views(self.work), self.views(self.grad), self.views(self.average)
        twin = dict(self.twin.named_parameters())
        for name, parameter in self.parameters.items():
            parameter.data, twin[name].data = work[name], average[name]
            parameter.grad = grad[name]

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """A flat vector as tensors by name."""
        return {name: vector[a:b].view(self.parameters[name].shape) for name, (a, b) in self.spans.items()}

    def zero(self) -> None:
        """Forget the gradients."""
        for grad in self.grads:
            grad.zero_()
        if self.total is not self.grad:
            self.total = None  # its memory is the activations' until the backward pass has freed them

    def collect(self) -> None:
        """Add what backward passes left in `grads` to the float32 sum, in their order."""
        for grad in self.grads:
            if grad is self.total:
                continue
            self.total = grad.float() if self.total is None else self.total.add_(grad)
            grad.zero_()

    @property
    def master_grad(self) -> Tensor:
        """(n,) float32: the sum of the gradients collected since `zero`."""
        if self.total is None:
            self.total = torch.zeros_like(self.master)
        return self.total

    def clip(self, limit: float | None) -> Tensor:
        """The norm of the whole gradient, which is scaled down to `limit` where it is longer."""
        norm = self.master_grad.norm()
        if limit is not None:
            self.master_grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def publish(self, step: int) -> None:
        """After the masters moved for the `step`-th time (from 1): renew the working copy and the average.

        The average warms up: its decay is min(ema, (1 + step) / (10 + step)).
        """
        if self.work is not self.master:
            self.work.copy_(self.master)
        if self.ema is not None:
            self.average.lerp_(self.master, 1 - min(self.ema, (1 + step) / (10 + step)))


def group_of(name: str, parameter: Tensor) -> str:
    """`matrix` for the matrices of the blocks, `decay` for other weight matrices, `plain` for all that is never decayed:
    biases, norms, scales, positions and tokens."""
    if parameter.ndim < 2 or not name.endswith("weight"):
        return "plain"
    return "matrix" if ".blocks." in name else "decay"
