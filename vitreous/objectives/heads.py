"""Projection head of DINO and DINOv2, which maps features to logits over prototypes.

Two arguments connect its batch norm with other processes: `reduce` returns the mean of a tensor over processes, and
`idle` is `Objective.is_idle`, true if this process has no samples left in a step, so statistics exclude its batch.

Shapes: B images, V views of each, n features, K prototypes, D width, C channels of a hidden layer.
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
BATCH_NORM_EPS = 1e-5  # added to the variance in batch norms


@dataclass(frozen=True)
class HeadOptions:
    """Options of the projection head: `head_layers` layers of `head_width` channels, the last of `bottleneck` channels.

    `unit_prototypes`: the `prototypes` have length one (`norm_last_layer` in DINO's code), otherwise their lengths are
    learned. `batch_norm`: hidden layers are normalised over the batch, with neither scale nor running statistics, which
    improves short runs and small models.
    """

    prototypes: int = 65536
    head_layers: int = 3
    head_width: int = 2048
    bottleneck: int = 256
    unit_prototypes: bool = True
    batch_norm: bool = False


def check_head(options: HeadOptions) -> None:
    """Raise UsageError for invalid options of a head."""
    sizes = (options.prototypes, options.head_layers, options.head_width, options.bottleneck)
    if min(sizes) < 1:
        raise UsageError(f"prototypes, head_layers, head_width and bottleneck must be at least 1, got {sizes}")


class DINOHead(nn.Module):
    """Projection head: an MLP with GELU, then the cosine to each prototype times the prototype's length, (n, D) ->
    (n, K)."""

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
        """Compute prototype logits: features (n, D) -> (n, K) float32.

        Batch norm uses the statistics of all processes that are not `idle`; `reduce` averages them over processes.
        """
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
    """Compute the prototype logits of all views: for each view size, features (B v, D) of v views per image ->
    (B, V, K).

    A batch norm in the head normalises the views of each size separately. `images` is B.
    """
    if head.batch_norm:
        logits = [head(view_features, reduce, idle) for view_features in features]
    else:
        logits = list(head(torch.cat(tuple(features))).split([len(view_features) for view_features in features]))
    return torch.cat([view_logits.unflatten(0, (images, -1)) for view_logits in logits], 1)


class RowsContext(FunctionContext):
    """Autograd context of `SyncBatchNormFunction`: `average`, the mean over the samples of all processes, and whether
    this process is idle."""

    average: Callable[[Tensor], Tensor]
    is_idle: bool


class SyncBatchNormFunction(torch.autograd.Function):
    """Normalise samples (n, C) by the mean and std of each channel over the samples of all processes that are not
    `idle`.

    `reduce` is the mean over processes. With y = (x - m) / s, the gradient is dx = (dy - mean(dy) - y mean(dy y)) / s,
    with means over the same samples.
    """

    @staticmethod
    def forward(ctx: RowsContext, x: Tensor, reduce: ReduceFunction, idle: bool) -> Tensor:
        """Normalise samples (n, C), and save the result and the scale for the backward pass."""
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
        """Compute the gradient of the samples, which is 0 on an idle process."""
        (grad,), (y, scale) = gradients, ctx.saved_tensors
        dy = grad.float()
        dx = (dy - ctx.average(dy) - y * ctx.average(dy * y)) * scale
        return (torch.zeros_like(grad) if ctx.is_idle else dx.to(grad.dtype)), None, None


def mean_over_processes(samples: Tensor, reduce: ReduceFunction, idle: bool) -> Tensor:
    """Compute the mean of the samples of all processes that are not `idle`: (n, C) -> (C,); 0 if there are no
    samples."""
    samples = samples[:0] if idle else samples
    sums = reduce(torch.cat([samples.sum(0), samples.new_full((1,), len(samples))]))
    return torch.where(sums[-1] > 0, sums[:-1] / sums[-1], 0.0)  # an `if` would synchronise with a GPU
