"""Optimisers on flat vectors, and their state by parameter name.

PyTorch's fused AdamW and SGD are called as functions. Constructing a `torch.optim.Optimizer` would import the compiler,
which takes two seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from vitreous.objectives.base import FrozenUpdate
from vitreous.training.flat import FlatParameters, copy_by_name
from vitreous.training.groups import ParameterGroup
from vitreous.training.run import OptimizerConfig
from vitreous.training.update_rules import lamb_direction, lamb_trust_ratios, lars_trust_ratios, muon_step

MUON_MOMENTUM = 0.95


class FlatOptimizer:
    """The optimiser of a run on `FlatParameters`: AdamW, SGD with momentum, LAMB, LARS or Muon.

    Muon trains the matrices of the blocks and the convolutions; AdamW trains the other parameters. AdamW and SGD are
    element-wise and update each group as a single vector. Muon orthogonalises matrices, which are views of the same
    vector. The state consists of flat vectors too: `moments` maps the name of a moment to the start of its range in the
    flat vectors, and to its values in this range.
    """

    def __init__(self, options: OptimizerConfig, flat: FlatParameters) -> None:
        self.options, self.flat = options, flat
        self.steps = {group: torch.zeros((), device=flat.master.device) for group in flat.groups}
        matrix, total = (
            max([span.stop for group, span in flat.groups.items() if group.kind == "matrix"], default=0),
            flat.length,
        )
        spans = {"exp_avg": (0, total), "exp_avg_sq": (0, total)}
        if options.name in ("sgd", "lars"):
            spans = {"momentum_buffer": (0, total)}
        if options.name == "muon":
            spans = {"momentum_buffer": (0, matrix), "exp_avg": (matrix, total), "exp_avg_sq": (matrix, total)}
        self.moments = {
            name: (start, torch.zeros_like(flat.master[start:stop])) for name, (start, stop) in spans.items()
        }

    @torch.no_grad()
    def step(self, lr_factor: float, weight_decay: float | None = None, frozen: FrozenUpdate | None = None) -> None:
        """Update the master weights from their gradients.

        Args:
            lr_lr_factor: the schedule's factor of all learning rates.
            weight_decay: replaces the weight decay of the options; None: use the options.
            frozen: for groups that start frozen: "skip" skips their update, other values set their learning rate to 0;
                None: update them like all other groups.
        """
        options = self.options
        default_decay = options.weight_decay if weight_decay is None else weight_decay
        for group, span in self.flat.groups.items():
            if group.starts_frozen and frozen == "skip":
                continue
            group_lr_factor = 0.0 if group.starts_frozen and frozen else lr_factor * group.factor
            weight, grad = self.flat.master[span], self.flat.master_grad[span]
            decay = 0.0 if group.kind == "plain" else default_decay
            if options.name == "muon" and group.kind == "matrix":
                lr, dtype = options.matrix_lr * group_lr_factor, self.flat.dtype
                muon_step(*self.matrices(group), lr=lr, weight_decay=decay, momentum=MUON_MOMENTUM, dtype=dtype)
            elif options.name == "sgd":
                # decoupled; torch's version would add it to the gradient
                weight.mul_(1 - options.lr * group_lr_factor * decay)
                self.sgd(weight, grad, self.get_moment("momentum_buffer", span), options.lr * group_lr_factor)
            elif options.name == "lars":
                self.lars(group, options.lr * group_lr_factor, decay)
            elif options.name == "lamb":
                self.lamb(group, options.lr * group_lr_factor, decay)
            else:
                self.adamw(group, weight, grad, options.lr * group_lr_factor, decay)

    def lamb(self, group: ParameterGroup, lr: float, decay: float) -> None:
        """Take one step of LAMB on a group. The trust ratio applies only to parameters with weight decay, as in
        DeiT-III's code."""
        span, names = self.flat.groups[group], self.flat.names[group]
        weight, grad = self.flat.master[span], self.flat.master_grad[span]
        first_moment, second_moment = self.get_moment("exp_avg", span), self.get_moment("exp_avg_sq", span)
        update = lamb_direction(
            grad,
            weight,
            first_moment=first_moment,
            second_moment=second_moment,
            count=self.steps[group],
            options=self.options,
            decay=decay,
        )
        if decay:
            factors = lamb_trust_ratios(self.flat.norms(weight, names), self.flat.norms(update, names))
            for name, factor in zip(names, factors, strict=True):
                start, stop = self.flat.spans[name]
                update[start - span.start : stop - span.start] *= factor
        weight.sub_(update, alpha=lr)

    def lars(self, group: ParameterGroup, lr: float, decay: float) -> None:
        """Take one step of LARS on a group. The trust ratio applies only to parameters with more than one dimension."""
        span, names = self.flat.groups[group], self.flat.names[group]
        weight, update = self.flat.master[span], self.flat.master_grad[span].add(self.flat.master[span], alpha=decay)
        factors = lars_trust_ratios(self.flat.norms(weight, names), self.flat.norms(update, names))
        for name, factor in zip(names, factors, strict=True):
            if self.flat.parameters[name].ndim > 1:
                start, stop = self.flat.spans[name]
                update[start - span.start : stop - span.start] *= factor
        self.sgd(weight, update, self.get_moment("momentum_buffer", span), lr)

    def adamw(self, group: ParameterGroup, weight: Tensor, grad: Tensor, lr: float, decay: float) -> None:
        """Take one fused step of AdamW on a group, given its weights and gradients (n,) float32."""
        span, (beta1, beta2) = self.flat.groups[group], self.options.betas
        first_moment, second_moment = self.get_moment("exp_avg", span), self.get_moment("exp_avg_sq", span)
        adamw(
            [weight], [grad], [first_moment], [second_moment], [], [self.steps[group]],
            fused=True, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=self.options.eps,
        )  # fmt: skip

    def sgd(self, weight: Tensor, grad: Tensor, momentum: Tensor, lr: float) -> None:
        """Take one fused step of SGD on a group, given its weights, gradients and momentum (n,) float32."""
        sgd(
            [weight], [grad], [momentum], fused=True, maximize=False, nesterov=False, dampening=0.0,
            weight_decay=0.0, momentum=self.options.momentum, lr=lr,
        )  # fmt: skip

    def matrices(self, group: ParameterGroup) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the matrices of a group, their gradients and their momenta, as views. Convolution filters have the
        shape (out, in kernel_height kernel_width)."""
        master, grad = self.flat.views(self.flat.master), self.flat.views(self.flat.master_grad)
        momenta, names = self.get_moment_views("momentum_buffer"), self.flat.names[group]
        weights, gradients, momentum_buffers = (
            [views[n].flatten(1) for n in names] for views in (master, grad, momenta)
        )
        return weights, gradients, momentum_buffers

    def get_moment(self, name: str, span: slice) -> Tensor:
        """Return the values (n,) of a moment in a range of the flat vectors."""
        start, vector = self.moments[name]
        return vector[span.start - start : span.stop - start]

    def get_moment_views(self, name: str) -> dict[str, Tensor]:
        """Return views of a moment in the shapes of the parameters, by parameter name. Parameters without this moment
        are missing."""
        start, vector = self.moments[name]
        spans = {
            key: (span_start - start, span_stop - start)
            for key, (span_start, span_stop) in self.flat.spans.items()
            if start <= span_start and span_stop <= start + len(vector)
        }
        return {key: vector[low:high].view(self.flat.parameters[key].shape) for key, (low, high) in spans.items()}

    def get_state(self) -> dict[str, Tensor]:
        """Return all tensors of the optimiser's state by name: MOMENT/PARAMETER in the shape of the parameter, such as
        `exp_avg/head.weight`, and the number of steps as step/GROUP, a scalar."""
        tensors = {f"step/{group.text}": count for group, count in self.steps.items()}
        return tensors | {
            f"{name}/{key}": view for name in self.moments for key, view in self.get_moment_views(name).items()
        }

    def load(
        self,
        tensors: dict[str, Tensor],
        copy_tensors: Callable[[dict[str, Tensor], dict[str, Tensor]], None] = copy_by_name,
    ) -> None:
        """Load tensors that `get_state` returned. `copy_tensors` copies full tensors into views: of the same shape, or
        of this process's shard with FSDP."""
        views = self.get_state()
        counts = {name: views.pop(name) for name in list(views) if name.startswith("step/")}
        copy_tensors(views, tensors)
        for name, count in counts.items():
            count.copy_(tensors[name].reshape(()))
