"""Flat vectors of a sharded model. PyTorch's FSDP2 gathers the weights of a block for its passes and scatters its
gradients.

Each of W processes has 1 / W of each parameter (split along its first dimension) and of its master weight, average and
optimiser moments. The module computes with parameters in the run's precision; master weights are float32, as in
`training.flat`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitreous.models.zoo import Model
from vitreous.objectives.base import Objective
from vitreous.training.flat import FlatParameters, ema_decay_at, iterate_named_tensors
from vitreous.training.groups import GroupFunction, choose_default_group
from vitreous.training.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardedParameters(FlatParameters):
    """`FlatParameters` of the shards of one process. `averaged_model` and `masters` gather the shards of all
    processes."""

    def __init__(
        self,
        module: Objective,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
        *,
        ema: float | None = None,
        group_of: GroupFunction = choose_default_group,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.dtype, self.ranks, self.ema, self.device = dtype, ranks, ema, device
        self.module = module
        self.copy_deployed(torch.device("cpu"))
        full_tensors = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
        replicated = {
            parameter
            for child in module.children()
            if not has_trainable_parameters(child)
            for parameter in child.parameters()
        }
        for parameter in set(module.parameters()) - replicated:
            parameter.data = parameter.data.to(device, dtype)
        module.to(device)
        self.mesh = init_device_mesh(device.type, (ranks.world,))
        for name, submodule in module.named_modules():
            if (
                name.endswith("blocks")
                and isinstance(submodule, nn.ModuleList)
                and not replicated & set(submodule.parameters())
            ):
                for block in submodule:
                    fully_shard(block, mesh=self.mesh)
        fully_shard(module, mesh=self.mesh, ignored_params=replicated)
        self.moving = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.parameters = self.local_shards()
        self.spans = {}
        self.arrange({name: group_of(name, p) for name, p in self.parameters.items()})
        self.master = torch.zeros(self.length, device=device)
        self.average = self.master if ema is None else torch.zeros_like(self.master)
        self.load(full_tensors, full_tensors if ema else None)
        self.grads, self.gradient_sum = [], None

    def local_shards(self) -> dict[str, Tensor]:
        """Return this process's shard (n / W, ...) of every trainable parameter by name, as views of the memory that
        the module uses."""
        return {name: local_rows(p.detach()) for name, p in self.moving.items()}

    def zero_grad(self) -> None:
        """Set the gradients to None."""
        self.gradient_sum = None
        for parameter in self.moving.values():
            parameter.grad = None

    def collect(self) -> None:
        """Add the gradient shards, which FSDP has averaged over the processes, to the float32 gradient, and free
        them."""
        total = self.views(self.master_grad)
        for name, parameter in self.moving.items():
            if parameter.grad is not None:
                total[name].add_(local_rows(parameter.grad.detach()))
                parameter.grad = None

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient over all processes, a scalar."""
        return self.ranks.sum(self.master_grad.square().sum()).sqrt()

    def norms(self, vector: Tensor, names: list[str]) -> Tensor:
        """Return the norms (len(names),) of full parameters over all processes, from this process's range `vector`
        (n,)."""
        return self.ranks.sum(super().norms(vector, names).square()).sqrt()

    def sync(self, step: int, decay: float | None = None) -> None:
        """Update the module's parameters and the average after the `step`-th update of the master weights (from 1).
        `decay` is the decay of the average; None: `ema_decay_at`."""
        master = self.views(self.master)
        for name, shard in self.local_shards().items():
            shard.copy_(master[name])
        if self.ema is not None:
            self.average.lerp_(self.master, 1 - (ema_decay_at(self.ema, step) if decay is None else decay))

    def load(self, model: dict[str, Tensor], average: dict[str, Tensor] | None) -> None:
        """Load this process's shards of full tensors, in the shapes of the parameters, into the master weights, the
        module's parameters and, if given, the average."""
        self.copy_into_views(self.views(self.master), model)
        if average is not None:
            self.copy_into_views(self.views(self.average), average)
        master = self.views(self.master)
        for name, shard in self.local_shards().items():
            shard.copy_(master[name])

    def copy_into_views(self, views: dict[str, Tensor], full_tensors: dict[str, Tensor]) -> None:
        """Copy this process's shard of full tensors (n, ...) into the views of the same name: the rows [r c, (r + 1) c)
        for process r of W, with c = ceil(n / W)."""
        for name, view in views.items():
            size = -(-len(full_tensors[name]) // self.ranks.world)
            view.copy_(full_tensors[name][self.ranks.rank * size : (self.ranks.rank + 1) * size])

    def to_dtensors(self, views: dict[str, Tensor]) -> dict[str, DTensor]:
        """Return this process's views (n / W, ...) as DTensors of the full shape, by the same names. A name may have a
        prefix that ends with a slash, such as `exp_avg/`."""
        from torch.distributed.tensor import DTensor, Shard

        distributed = {}
        for name, view in views.items():
            parameter = self.moving[name.rpartition("/")[2]]
            distributed[name] = DTensor.from_local(
                view, self.mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        return distributed

    @torch.no_grad()
    def masters(self) -> dict[str, Tensor]:
        """Gather the float32 master weights by name, as full tensors in the shapes of the parameters. Every process has
        to call this."""
        dtensors = self.to_dtensors(self.views(self.master))
        return {name: dtensor.full_tensor() for name, dtensor in dtensors.items()}

    @torch.no_grad()
    def averaged_model(self) -> Model:
        """Return the deployed model with the averaged weights, gathered on the CPU. Every process has to call this."""
        average, live = self.to_dtensors(self.views(self.average)), dict(iterate_named_tensors(self.module))
        for name, tensor in iterate_named_tensors(self.eval_module):
            objective_name = self.shipped[name]
            if objective_name in average:
                tensor.copy_(average[objective_name].full_tensor())
            elif objective_name not in self.frozen:
                tensor.copy_(live[objective_name])
        return self.eval_module


def local_rows(tensor: Tensor) -> Tensor:
    """Return this process's shard (n / W, ...) of a tensor that FSDP shards."""
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def set_gradient_sync(module: nn.Module, syncs: bool) -> None:
    """Set whether the next backward pass of an FSDP module reduces gradients over the processes."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(syncs)


def has_trainable_parameters(module: nn.Module) -> bool:
    """Return whether any parameter of a module requires a gradient. FSDP does not shard submodules of an objective
    without trainable parameters, such as a teacher."""
    return any(parameter.requires_grad for parameter in module.parameters())


def create_cpu_group() -> dist.ProcessGroup:
    """Create a separate process group on CPUs for writing checkpoints in the background."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)  # every process is a member
    return group
