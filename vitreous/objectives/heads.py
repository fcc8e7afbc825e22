"""The head of DINO and DINOv2 between features and prototypes.

B images, V views of each, K prototypes, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.errors import UsageError
from vitreous.objectives.base import reduce_single_process
from vitreous.system.torch_types import FunctionContext, once_differentiable

ReduceFunction = Callable[[Tensor], Tensor]
BATCH_NORM_EPS = 1e-5  # added to the variance of a batch norm


@dataclass(frozen=True)
class HeadOptions:
    """The head between features and prototypes: `head_layers` of `head_width`, the last of `bottleneck` channels.

    `unit_prototypes`: the `prototypes` have length one (`norm_last_layer`), else their lengths are learned.
    `batch_norm`: hidden layers are normalised over the batch, with neither scale nor running statistics; it helps for
    short runs and small models.
    """

    prototypes: int = 65536
    head_layers: int = 3
    head_width: int = 2048
    bottleneck: int = 256
    unit_prototypes: bool = True
    batch_norm: bool = False


def check_head(options: HeadOptions) -> None:
    """Raise UsageError for invalid options of a head."""
    if min(options.prototypes, options.head_layers, options.head_width, options.bottleneck) < 1:
        raise UsageError("prototypes, head_layers, head_width and bottleneck must be at least 1")


class DINOHead(nn.Module):
    """MLP with GELU, then the cosine to each prototype, times its length: (..., D) -> (..., K)."""

    def __init__(self, width: int, config: HeadOptions) -> None:
        super().__init__()
        widths = [width, *[config.head_width] * (config.head_layers - 1), config.bottleneck]
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
        for layer in layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.mlp = nn.ModuleList(layers)
        self.prototypes = nn.Linear(config.bottleneck, config.prototypes, bias=False)
        self.lengths = None if config.unit_prototypes else nn.Parameter(torch.ones(config.prototypes, 1))
        self.batch_norm = config.batch_norm

    def forward(self, x: Tensor, reduce: ReduceFunction = reduce_single_process, idle: bool = False) -> Tensor:
        """(n, D) features -> (n, K) float32 prototype logits. Batch norm uses the statistics of all processes that are
        not `idle`; `reduce` averages them over processes."""
        for index, layer in enumerate(self.mlp):
            x = layer(F.gelu(x) if index else x)
            if self.batch_norm and index < len(self.mlp) - 1:
                x = SyncBatchNormFunction.apply(x, reduce, idle)
        prototypes = F.normalize(self.prototypes.weight.float(), dim=-1)
        if self.lengths is not None:
            prototypes = prototypes * self.lengths.float()
        return F.linear(F.normalize(x.float(), dim=-1), prototypes)


def compute_prototype_logits(
    head: DINOHead, features: Sequence[Tensor], images: int, reduce: ReduceFunction, idle: bool
) -> Tensor:
    """Features (B v, D) of v views of each image, for each size of views -> (B, V, K): the logits of all. A batch norm
    normalises the views of each size together."""
    if head.batch_norm:
        logits = [head(view, reduce, idle) for view in features]
    else:
        logits = list(head(torch.cat(tuple(features))).split([len(view) for view in features]))
    return torch.cat([view.unflatten(0, (images, -1)) for view in logits], 1)


class RowsContext(FunctionContext):
    """Autograd context of `SyncBatchNormFunction`: the mean over samples, and whether this process is idle."""

    average: Callable[[Tensor], Tensor]
    is_idle: bool


class SyncBatchNormFunction(torch.autograd.Function):
    """Normalise (n, C) samples by the mean and std of each channel over all processes (`reduce` is the mean over them)
    that are not `idle`.

    With y = (x - m) / s:  dx = (dy - mean(dy) - y mean(dy y)) / s, the means over the same samples.
    """

    @staticmethod
    def forward(ctx: RowsContext, x: Tensor, reduce: ReduceFunction, idle: bool) -> Tensor:
        ctx.average = partial(mean_over_processes, reduce=reduce, idle=idle)
        centred = x.float() - ctx.average(x.float())
        scale = (ctx.average(centred.square()) + BATCH_NORM_EPS).rsqrt()
        y = centred * scale
        ctx.save_for_backward(y, scale)
        ctx.is_idle = idle
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: RowsContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (grad,), (y, scale) = gradients, ctx.saved_tensors
        dy = grad.float()
        dx = (dy - ctx.average(dy) - y * ctx.average(dy * y)) * scale
        return (torch.zeros_like(grad) if ctx.is_idle else dx.to(grad.dtype)), None, None


def mean_over_processes(samples: Tensor, reduce: ReduceFunction, idle: bool) -> Tensor:
    """(n, C) -> (C,): the mean of the samples of all processes that are not `idle`; 0 if there are none."""
    samples = samples[:0] if idle else samples
    sums = reduce(torch.cat([samples.sum(0), samples.new_full((1,), len(samples))]))
    return torch.where(sums[-1] > 0, sums[:-1] / sums[-1], 0.0)  # no `if`, which would synchronise with a GPU
