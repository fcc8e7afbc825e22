"""Flat vectors of a sharded model: PyTorch's FSDP2 gathers weights for a block's passes and scatters its gradients.

Every process has 1 / W of each parameter (split along its first axis), and of masters, average and moments. The module
computes with parameters in the run's precision; masters are float32, as in `training.flat`.
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
    """`FlatParameters` for the shards of one process; `averaged_model` and `masters` gather the shards of all."""

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
        """This process's shard (n / W, ...) of every trainable parameter: the memory that the module uses."""
        return {name: local_rows(p.detach()) for name, p in self.moving.items()}

    def zero_grad(self) -> None:
        """Set the gradients to None."""
        self.gradient_sum = None
        for parameter in self.moving.values():
            parameter.grad = None

    def collect(self) -> None:
        """Copy the gradient shards, which FSDP has summed over the processes."""
        total = self.views(self.master_grad)
        for name, parameter in self.moving.items():
            if parameter.grad is not None:
                total[name].add_(local_rows(parameter.grad.detach()))
                parameter.grad = None

    def norm(self) -> Tensor:
        """The norm of the whole gradient, a scalar."""
        return self.ranks.sum(self.master_grad.square().sum()).sqrt()

    def norms(self, vector: Tensor, names: list[str]) -> Tensor:
        """The norms (len(names),) of whole parameters in a vector (n,)."""
        return self.ranks.sum(super().norms(vector, names).square()).sqrt()

    def sync(self, step: int, decay: float | None = None) -> None:
        """After the `step`-th update of the masters (from 1): update the module's parameters and the average."""
        master = self.views(self.master)
        for name, share in self.local_shards().items():
            share.copy_(master[name])
        if self.ema is not None:
            self.average.lerp_(self.master, 1 - (ema_decay_at(self.ema, step) if decay is None else decay))

    def load(self, model: dict[str, Tensor], average: dict[str, Tensor] | None) -> None:
        """Load this process's share of whole tensors, in the shapes of the parameters, into masters, parameters and
        average."""
        self.copy_into_views(self.views(self.master), model)
        if average is not None:
            self.copy_into_views(self.views(self.average), average)
        master = self.views(self.master)
        for name, share in self.local_shards().items():
            share.copy_(master[name])

    def copy_into_views(self, views: dict[str, Tensor], full_tensors: dict[str, Tensor]) -> None:
        """Copy this process's shard of full tensors (n, ...) into views: rows [r c, (r + 1) c) for process r of W, with
        c = ceil(n / W)."""
        for name, view in views.items():
            size = -(-len(full_tensors[name]) // self.ranks.world)
            view.copy_(full_tensors[name][self.ranks.rank * size : (self.ranks.rank + 1) * size])

    def to_dtensors(self, views: dict[str, Tensor]) -> dict[str, DTensor]:
        """Return this process's views (n / W, ...) as DTensors of the whole shape; a name may have a prefix word and a
        slash."""
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
        """The whole float32 masters by name, in the shapes of the parameters. Every process has to call this."""
        pieces = self.to_dtensors(self.views(self.master))
        return {name: piece.full_tensor() for name, piece in pieces.items()}

    @torch.no_grad()
    def averaged_model(self) -> Model:
        """The deployed module with the average, gathered on the CPU. Every process has to call this."""
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
    """Set whether the next backward pass of an FSDP module sums gradients over the processes."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(syncs)


def has_trainable_parameters(module: nn.Module) -> bool:
    """Return whether any parameter requires a gradient. Submodules of an objective without trainable parameters, such
    as a teacher, are not sharded."""
    return any(parameter.requires_grad for parameter in module.parameters())


def create_cpu_group() -> dist.ProcessGroup:
    """Create a separate process group for writing checkpoints in the background."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)  # every process is a member
    return group
