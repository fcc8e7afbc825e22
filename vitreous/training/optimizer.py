"""Optimisers on flat vectors, and their state by parameter name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitreous.training.flat import Flat
from vitreous.training.muon import Muon
from vitreous.training.run import Optimizer


class Optimizers:
    """AdamW, SGD with momentum, or Muon for the matrices of the blocks with AdamW for the rest.

    AdamW and SGD are element-wise, so they run on whole groups as single vectors; Muon orthogonalises, so it runs on the
    matrices, which are views of the same memory.
    """

    def __init__(self, options: Optimizer, flat: Flat) -> None:
        self.flat = flat
        self.places: dict[str, tuple[nn.Parameter, Tensor]] = {}  # what is moved, and its gradient
        master, grad = flat.views(flat.master), flat.views(flat.master_grad)
        for group, span in flat.groups.items():
            if options.name == "muon" and group == "matrix":
                self.places |= {name: (nn.Parameter(master[name]), grad[name]) for name in flat.names[group]}
            elif span.start < span.stop:
                self.places[group] = (nn.Parameter(flat.master[span]), flat.master_grad[span])
        for parameter, gradient in self.places.values():
            parameter.grad = gradient
        self.optimizers = list(build(options, {place: parameter for place, (parameter, _) in self.places.items()}, flat.work.dtype))
        self.base = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Move the masters, at `factor` times the base learning rates."""
        for optimizer, rates in zip(self.optimizers, self.base, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
                if group.get("decoupled"):
                    group["params"][0].mul_(1 - group["lr"] * group["decoupled"])
            optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the optimisers' state: `exp_avg/NAME` by parameter name, counters as `step/PLACE`."""
        tensors = {}
        for place, (parameter, _) in self.places.items():
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if torch.is_tensor(value):
                        tensors |= {f"{key}/{name}": part for name, part in self.parts(place, value).items()}
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state` gave."""
        for place, (parameter, _) in self.places.items():
            optimizer = next(o for o in self.optimizers if any(parameter is p for g in o.param_groups for p in g["params"]))
            state = optimizer.state[parameter]
            for key in sorted({name.partition("/")[0] for name in tensors}):
                counter = tensors.get(f"{key}/{place}")
                if counter is not None and counter.dim() == 0:
                    state[key] = counter.clone()
                elif all(f"{key}/{name}" in tensors for name in self.inside(place)):
                    state[key] = torch.zeros_like(parameter)
                    for name, part in self.parts(place, state[key]).items():
                        part.copy_(tensors[f"{key}/{name}"])

    def inside(self, place: str) -> list[str]:
        """The parameters that a place holds."""
        return self.flat.names.get(place, [place])

    def parts(self, place: str, value: Tensor) -> dict[str, Tensor]:
        """A state tensor of a place as views by parameter name; a counter stays whole."""
        if value.dim() == 0 or place not in self.flat.groups:
            return {place: value}
        start = self.flat.groups[place].start
        spans = {name: self.flat.spans[name] for name in self.inside(place)}
        return {name: value[a - start : b - start].view(self.flat.parameters[name].shape) for name, (a, b) in spans.items()}


def build(options: Optimizer, parameters: dict[str, nn.Parameter], dtype: torch.dtype):
    """The optimisers that the options name, over the places that there are; `dtype` is what the run multiplies in."""
    hidden = [p for place, p in parameters.items() if place not in ("matrix", "decay", "plain")]
    groups = [
        {"params": [p], "weight_decay": 0.0 if place == "plain" else options.weight_decay}
        for place, p in parameters.items()
        if place in ("matrix", "decay", "plain")
    ]
    if hidden:
        yield Muon(hidden, options.matrix_lr, options.weight_decay, dtype=dtype)
    if options.name == "sgd":
        for group in groups:  # torch's SGD adds the decay to the gradient; here it is decoupled for every optimiser
            group["decoupled"], group["weight_decay"] = group["weight_decay"], 0.0
        yield torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, fused=True)
    else:
        yield torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True)
