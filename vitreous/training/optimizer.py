"""Optimisers on flat vectors, and their state by parameter name.

PyTorch's fused AdamW and SGD are called as functions: constructing a `torch.optim.Optimizer` imports the compiler, two seconds
that a run without it would wait for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from vitreous.training.flat import Flat
from vitreous.training.muon import muon
from vitreous.training.run import Optimizer

MUON_MOMENTUM = 0.95


class Optimizers:
    """AdamW, SGD with momentum, or Muon for the matrices of the blocks with AdamW for the rest.

    AdamW and SGD are element-wise, so each group is one vector to them; Muon orthogonalises, so it takes the matrices, which
    are views of the same memory. The state is flat too: `moments` maps its names to the place where a vector begins, and the
    vector.
    """

    def __init__(self, options: Optimizer, flat: Flat) -> None:
        self.options, self.flat = options, flat
        self.steps = {group: torch.zeros((), device=flat.master.device) for group in flat.groups}
        matrix, total = flat.groups["matrix"].stop, len(flat.master)
        spans = {"exp_avg": (0, total), "exp_avg_sq": (0, total)}
        if options.name == "sgd":
            spans = {"momentum_buffer": (0, total)}
        if options.name == "muon":
            spans = {"momentum_buffer": (0, matrix), "exp_avg": (matrix, total), "exp_avg_sq": (matrix, total)}
        self.moments = {name: (start, torch.zeros_like(flat.master[start:stop])) for name, (start, stop) in spans.items()}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Move the masters, at `factor` times the base learning rates."""
        options = self.options
        for group, span in self.flat.groups.items():
            if span.start == span.stop:
                continue
            weight, grad = self.flat.master[span], self.flat.master_grad[span]
            decay = 0.0 if group == "plain" else options.weight_decay
            if options.name == "muon" and group == "matrix":
                rate, dtype = options.matrix_lr * factor, self.flat.work.dtype
                muon(*self.matrices(), lr=rate, weight_decay=decay, momentum=MUON_MOMENTUM, dtype=dtype)
            elif options.name == "sgd":
                weight.mul_(1 - options.lr * factor * decay)  # decoupled, as everywhere; torch's own would add it to the gradient
                self.sgd(weight, grad, self.moment("momentum_buffer", span), options.lr * factor)
            else:
                self.adamw(group, weight, grad, options.lr * factor, decay)

    def adamw(self, group: str, weight: Tensor, grad: Tensor, lr: float, decay: float) -> None:
        """One fused step of AdamW on a group."""
        span, (beta1, beta2) = self.flat.groups[group], self.options.betas
        first, second = self.moment("exp_avg", span), self.moment("exp_avg_sq", span)
        adamw(
            [weight], [grad], [first], [second], [], [self.steps[group]], fused=True, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=self.options.eps,
        )  # fmt: skip

    def sgd(self, weight: Tensor, grad: Tensor, momentum: Tensor, lr: float) -> None:
        """One fused step of SGD on a group."""
        sgd(
            [weight], [grad], [momentum], fused=True, maximize=False, nesterov=False, dampening=0.0,
            weight_decay=0.0, momentum=self.options.momentum, lr=lr,
        )  # fmt: skip

    def matrices(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The matrices of the blocks, their gradients and their momenta, as views."""
        master, grad = self.flat.views(self.flat.master), self.flat.views(self.flat.master_grad)
        momenta, names = self.named("momentum_buffer"), self.flat.names["matrix"]
        return [master[n] for n in names], [grad[n] for n in names], [momenta[n] for n in names]

    def moment(self, name: str, span: slice) -> Tensor:
        """A moment's part for a span of the flat vector."""
        start, vector = self.moments[name]
        return vector[span.start - start : span.stop - start]

    def named(self, name: str) -> dict[str, Tensor]:
        """A moment as views by the names of the parameters that have it."""
        start, vector = self.moments[name]
        spans = {key: (a - start, b - start) for key, (a, b) in self.flat.spans.items() if start <= a and b <= start + len(vector)}
        return {key: vector[a:b].view(self.flat.parameters[key].shape) for key, (a, b) in spans.items()}

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the optimisers' state: `exp_avg/NAME` by parameter name, the count of steps as `step/GROUP`."""
        tensors = {f"step/{group}": count for group, count in self.steps.items()}
        return tensors | {f"{name}/{key}": view for name in self.moments for key, view in self.named(name).items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state` gave."""
        for name, place in self.state().items():
            place.copy_(tensors[name])
