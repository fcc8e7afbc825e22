"""Figures of a step: its loss, what else the objective logs, and the norm of its gradient.

A processor has them when the step is done. A GPU computes behind the program that gives it work: to ask it for a number
is to wait until it has caught up, and to leave it idle while the next step is prepared. So there the figures of a step
are read when the next one has been handed over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitreous.training.ranks import Ranks
from vitreous.training.run import Run
from vitreous.training.shards import Scalars


def reads_late(run: Run, device: torch.device) -> bool:
    """Whether the loop reads the figures of a step when the next one has been handed over: on CUDA, where nothing in
    the next step depends on them, as the scale of a float16 loss, or the count of steps that were left out."""
    return device.type == "cuda" and not (run.reproducible or run.skip_steps or run.precision == "fp16")


def sum_on_host(names: Sequence[str], scalars: Scalars, device: torch.device, ranks: Ranks) -> dict[str, float]:
    """The figures of those names, summed over all processes."""
    return {name: ranks.sum_number(float(scalars.get(name, 0.0)), str(device)) for name in names}


class HeldFigures:
    """The figures of step `number` (from 1), summed over all processes, on their way from the device.

    `scalars` are this process's shares, tensors without axes, and `norm` one of the whole gradient; `samples` (n,)
    int64 are the step's, on the processor.
    """

    def __init__(
        self, number: int, names: Sequence[str], scalars: Scalars, norm: Tensor, samples: Tensor, ranks: Ranks
    ) -> None:
        self.number, self.names, self.samples = number, names, samples
        zero = norm.new_zeros((), dtype=torch.float32)
        shares = [zero + scalars.get(name, 0.0) for name in names]
        values = torch.cat([ranks.sum(torch.stack(shares)), norm.detach().float()[None]])
        self.values = torch.empty(len(values), pin_memory=values.is_cuda)
        self.values.copy_(values, non_blocking=True)
        self.arrived = torch.cuda.Event() if values.is_cuda else None
        if self.arrived is not None:
            self.arrived.record()

    def read(self) -> tuple[dict[str, float], float]:
        """The figures by name, and the norm of the gradient; waits for the step."""
        if self.arrived is not None:
            self.arrived.synchronize()
        *figures, norm = self.values.tolist()
        return dict(zip(self.names, figures, strict=True)), norm
