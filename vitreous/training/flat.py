"""The parameters of a module as flat vectors of length n: float32 master weights, a working copy, gradients, an
average.

    master (n,) float32        updated by the optimiser
    working_copy (n,) dtype    used by the module; the same vector as `master` if dtype is float32
    grads (n,) dtype           targets of backward passes, one vector per shard of a batch
    master_grad (n,) float32   sum of `grads`; allocated after the backward pass and freed after the step, unless it
                               is the same vector as the first of `grads`
    average (n,) float32       exponential moving average of `master`, or the same vector as `master`

The module's parameters become views of `working_copy`. An optimiser step thus takes a few operations on long vectors
for any number of tensors, and the forward pass casts no weights. Parameters that do not require a gradient are not part
of the vectors and do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vitreous.errors import WeightsError
from vitreous.models.zoo import Model
from vitreous.objectives.base import Objective
from vitreous.training.groups import GROUP_KINDS, GroupFunction, ParameterGroup, choose_default_group, clip_submodule
from vitreous.training.ranks import Ranks

ALIGNMENT = 64  # elements; every parameter starts at a multiple, on a cache line
ALL_REDUCE_CHUNK = 2**22  # gradient elements that are added or exchanged at a time


class FlatParameters:
    """The trainable parameters of an objective as flat vectors, in the order of their optimiser groups: by kind
    (`matrix`, `decay`, `plain`), then by learning-rate factor.

    `group_of` returns the group of a parameter from its name and shape. `ema` is the decay of the average, None for no
    average. `shards` is the number of gradient vectors.
    """

    def __init__(
        self,
        module: Objective,
        dtype: torch.dtype,
        device: torch.device,
        ema: float | None = None,
        *,
        shards: int = 1,
        group_of: GroupFunction = choose_default_group,
    ) -> None:
        self.module, self.ema, self.dtype = module, ema, dtype
        self.parameters: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.spans: dict[str, tuple[int, int]] = {}
        self.arrange({name: group_of(name, p) for name, p in self.parameters.items()})
        self.master = torch.zeros(self.length, device=device)
        for name, view in self.views(self.master).items():
            view.copy_(self.parameters[name].detach())
        self.working_copy = self.master if dtype == torch.float32 else self.master.to(dtype)
        self.grads = [torch.zeros_like(self.working_copy) for _ in range(shards)]
        self.grad, self.versions = self.grads[0], [-1] * shards  # versions of `grads` when they were last zero
        self.gradient_sum = self.grad if dtype == torch.float32 else None  # the value of `master_grad`
        self.average = self.master if ema is None else self.master.clone()
        module.to(device)
        self.copy_deployed(device)
        for name, parameter in module.named_parameters():
            if name in self.frozen and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        self.bind(module)

    def copy_deployed(self, device: torch.device) -> None:
        """Create `eval_module`, a copy of the deployed model that computes with the averaged weights in float32.

        `shipped` maps the names of the deployed model's parameters and buffers to the objective's names. `frozen`
        contains the float32 originals of the parameters that require no gradient, by the objective's name.
        """
        deployed = self.module.deployed_model()
        self.eval_module: Model = copy.deepcopy(deployed).to(device).eval().requires_grad_(False)
        names = {id(tensor): name for name, tensor in iterate_named_tensors(self.module)}
        self.shipped = {name: names[id(tensor)] for name, tensor in iterate_named_tensors(deployed)}
        static = {id(p) for p in self.module.frozen_parameters()}
        self.frozen = {name: p.detach() for name, p in self.module.named_parameters() if id(p) in static}
        copied = dict(iterate_named_tensors(self.eval_module))
        for name, objective_name in self.shipped.items():
            if objective_name in self.frozen:
                self.frozen[objective_name] = copied[name].data

    def arrange(self, groups: dict[str, ParameterGroup]) -> None:
        """Assign a range of the flat vectors to every parameter. Sets `spans` (range by parameter name), `groups`
        (range by group), `names` (parameter names by group) and `length`."""
        order = sorted(set(groups.values()), key=lambda group: (GROUP_KINDS.index(group.kind), *group[1:]))
        self.names = {group: [name for name in groups if groups[name] == group] for group in order}
        self.groups: dict[ParameterGroup, slice] = {}
        end = 0
        for group, names in self.names.items():
            start = end
            for name in names:
                self.spans[name] = (end, end + self.parameters[name].numel())
                end += -(-self.parameters[name].numel() // ALIGNMENT) * ALIGNMENT
            self.groups[group] = slice(start, end)
        self.length = end

    def bind(self, module: nn.Module) -> None:
        """Make the module's parameters views of `working_copy`, their gradients views of `grad`, and the parameters of
        `eval_module` views of `average`."""
        work, grad, average = self.views(self.working_copy), self.views(self.grad), self.views(self.average)
        for name, parameter in self.parameters.items():
            parameter.data, parameter.grad = work[name], grad[name]
        for name, parameter in self.eval_module.named_parameters():
            if self.shipped[name] in average:
                parameter.data = average[self.shipped[name]]

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of a flat vector (n,) in the shapes of the parameters, by name."""
        return {
            name: vector[start:stop].view(self.parameters[name].shape) for name, (start, stop) in self.spans.items()
        }

    def zero_grad(self) -> None:
        """Set the gradients to zero. Gradient vectors that have not changed since `collect` are skipped."""
        for index, grad in enumerate(self.grads):
            if grad is self.gradient_sum or grad._version != self.versions[index]:
                grad.zero_()
                self.versions[index] = grad._version
        if self.gradient_sum is not self.grad:
            self.gradient_sum = None  # its memory is free for activations during the backward pass

    def collect(self) -> None:
        """Add the gradient vectors of the backward passes to the float32 sum, in the order of the shards, and set them
        to zero."""
        for index, grad in enumerate(self.grads):
            if grad is self.gradient_sum:
                continue
            if self.gradient_sum is None:
                self.gradient_sum = grad.float()
            else:
                for total, chunk in zip(
                    self.gradient_sum.split(ALL_REDUCE_CHUNK), grad.split(ALL_REDUCE_CHUNK), strict=True
                ):
                    total += chunk  # in chunks: a single addition would copy the whole vector to float32
            grad.zero_()
            self.versions[index] = grad._version

    def exchange(self, ranks: Ranks) -> None:
        """All-reduce the float32 gradient sum over all processes."""
        for chunk in self.master_grad.split(ALL_REDUCE_CHUNK):
            ranks.sum(chunk)

    def reduce_in_order(self, ranks: Ranks) -> None:
        """Add the gradients of all shards of all processes in float32, in the order of the shards. The sum is
        bit-identical for any number of processes.

            for shard in shards of process 0, of process 1, ...:  total = total + gradient of shard
        """
        if ranks.world == 1:
            return self.collect()
        total = torch.empty_like(self.master)
        for start in range(0, self.length, ALL_REDUCE_CHUNK):
            local_grads = torch.stack([grad[start : start + ALL_REDUCE_CHUNK] for grad in self.grads])
            first_grad, *other_grads = torch.cat(ranks.gather(local_grads))
            summed = first_grad.float()
            for shard_grad in other_grads:
                summed += shard_grad
            total[start : start + ALL_REDUCE_CHUNK] = summed
        if self.gradient_sum is self.grad:
            self.grad.copy_(total)
        else:
            self.gradient_sum = total

    @property
    def master_grad(self) -> Tensor:
        """The sum of the gradients since `zero_grad`, (n,) float32."""
        if self.gradient_sum is None:
            self.gradient_sum = torch.zeros_like(self.master)
        return self.gradient_sum

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient, a scalar."""
        return self.master_grad.norm()

    def norms(self, vector: Tensor, names: list[str]) -> Tensor:
        """Return the norm of each of the parameters `names`, shape (len(names),). `vector` is the range of a flat
        vector that begins with the first of these consecutive parameters."""
        offset = self.spans[names[0]][0]
        spans = (self.spans[name] for name in names)
        return torch.stack([vector[start - offset : stop - offset].norm() for start, stop in spans])

    def clip(self, limit: float | None, clip_by: str = "all") -> Tensor:
        """Clip the gradient to the norm `limit` (None: no clipping), and return the norm of the whole gradient before
        clipping, a scalar.

        `clip_by` selects the unit whose norm is limited: the whole gradient (`all`), each `tensor`, or each submodule
        of the objective (`part`, see `groups.clip_submodule`).
        """
        norm = self.norm()
        if limit is not None and clip_by == "all":
            self.master_grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        elif limit is not None:
            group_by = {name: name if clip_by == "tensor" else clip_submodule(self.module, name) for name in self.spans}
            squares: dict[str, Tensor] = {}
            for group, span in self.groups.items():
                norms = self.norms(self.master_grad[span], self.names[group])
                for name, tensor_norm in zip(self.names[group], norms, strict=True):
                    squares[group_by[name]] = squares.get(group_by[name], 0) + tensor_norm.square()
            for name, view in self.views(self.master_grad).items():
                view.mul_((limit / (squares[group_by[name]].sqrt() + 1e-6)).clamp(max=1.0))
        return norm

    def sync(self, step: int, decay: float | None = None) -> None:
        """Update the working copy and the average after the `step`-th update of the master weights (from 1). `decay` is
        the decay of the average; None: `ema_decay_at`."""
        if self.working_copy is not self.master:
            self.working_copy.copy_(self.master)
        if self.ema is not None:
            self.average.lerp_(self.master, 1 - (ema_decay_at(self.ema, step) if decay is None else decay))

    @torch.no_grad()
    def averaged_model(self) -> Model:
        """Return the deployed model with the averaged weights in float32 and the current values of all other state."""
        live = dict(iterate_named_tensors(self.module))
        for name, tensor in iterate_named_tensors(self.eval_module):
            objective_name = self.shipped[name]
            if objective_name not in self.parameters and objective_name not in self.frozen:
                tensor.copy_(live[objective_name])
        return self.eval_module

    def load(self, model: dict[str, Tensor], average: dict[str, Tensor] | None) -> None:
        """Load full tensors by name into the master weights, the working copy and, if given, the average."""
        self.copy_into_views(self.views(self.master), model)
        if average is not None:
            self.copy_into_views(self.views(self.average), average)
        if self.working_copy is not self.master:
            self.working_copy.copy_(self.master)

    def copy_into_views(self, views: dict[str, Tensor], full_tensors: dict[str, Tensor]) -> None:
        """Copy full tensors into the views of the same name."""
        copy_by_name(views, full_tensors)

    def untrained_state(self) -> dict[str, Tensor]:
        """Return all tensors that the optimiser does not update, by name: the float32 originals of frozen parameters,
        and other parameters and persistent buffers of the objective in their dtype."""
        state = self.module.state_dict() | self.frozen
        return {name: tensor for name, tensor in state.items() if name not in self.parameters}

    def masters(self) -> dict[str, Tensor]:
        """Return the float32 master weights by name, as full tensors in the shapes of the parameters."""
        return self.views(self.master)

    def training_only_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the objective that the deployed model does not contain, by name and in their shapes,
        such as a decoder, heads or a student."""
        names = set(self.shipped.values())
        return {name: tensor for name, tensor in (self.untrained_state() | self.masters()).items() if name not in names}

    @torch.no_grad()
    def load_untrained_state(self, tensors: dict[str, Tensor]) -> None:
        """Load tensors by name that `untrained_state` returned. Raises WeightsError if a tensor of the objective is
        missing; only frozen parameters may be absent."""
        for name, live in self.module.state_dict().items():
            if name in self.parameters or (name in self.frozen and name not in tensors):
                continue
            if name not in tensors:
                raise WeightsError(
                    f"the checkpoint lacks {name}: it was saved with another objective", "start a new run"
                )
            if name in self.frozen:
                self.frozen[name].copy_(tensors[name])
            self.copy_into_views({name: live.to_local() if hasattr(live, "to_local") else live}, tensors)


def iterate_named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of every parameter and buffer of a module, of any shape."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def ema_decay_at(ema: float, step: int) -> float:
    """Return the decay of the average at its `step`-th update (from 1): min(ema, (1 + step) / (10 + step)). The smaller
    decay of the first updates makes the average forget the initial weights."""
    return min(ema, (1 + step) / (10 + step))


def copy_by_name(views: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Copy each tensor into the view of the same name and shape."""
    for name, view in views.items():
        view.copy_(tensors[name])
