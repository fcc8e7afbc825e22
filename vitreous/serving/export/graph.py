"""A model as a graph of PyTorch's own operators: what every exported file is made of.

B images of C channels, K classes, D numbers that the head reads.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.errors import UsageError
from vitreous.evaluation.features import headless
from vitreous.models.config import ModelConfig
from vitreous.models.names import name_of
from vitreous.models.zoo import Model
from vitreous.nn.layout import Axial
from vitreous.nn.position import Learned, LearnedAxes
from vitreous.nn.resnet import Root, StandardizedConv, pad_same, standardize
from vitreous.serving.export.positions import AnyAxes, AnyGrid

INPUT, OUTPUTS = "images", ("logits", "features")
MOST = 65536  # images of a batch
PIXELS = 16384  # along a side, with --dynamic-size


class Answers(nn.Module):
    """The model with two answers: logits, and what its head reads."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.body, self.head = headless(model), model.head

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, *image) float32, normalised -> (B, K) logits, (B, D) features."""
        features = self.body(images)
        return self.head(features), features


class Standardized(nn.Module):
    """A `StandardizedConv` whose filters were standardised once and for all."""

    def __init__(self, conv: StandardizedConv) -> None:
        super().__init__()
        self.weight = nn.Parameter(standardize(conv.weight.detach(), conv.numerics), requires_grad=False)
        self.kernel, self.stride, self.uneven = conv.kernel, conv.stride, conv.same and conv.stride > 1

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, H, W) -> (B, O, ceil(H / stride), ceil(W / stride))."""
        if self.uneven:
            x = pad_same(x, self.kernel, self.stride)
        return F.conv2d(x, self.weight, None, self.stride, 0 if self.uneven else (self.kernel - 1) // 2)


class Bordered(nn.Module):
    """BiT's root with its border of zeros laid on by hand: onnxruntime (1.31) takes a padding before a pooling for the
    pooling's own, which is of minus infinity, and answers are off by 1e-3."""

    def __init__(self, root: Root) -> None:
        super().__init__()
        self.conv = root.conv

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, width, ceil(H / 4), ceil(W / 4))."""
        x = self.conv(x)
        row = torch.zeros_like(x[:, :, :1])
        x = torch.cat([row, x, row], 2)
        column = torch.zeros_like(x[..., :1])
        return F.max_pool2d(torch.cat([column, x, column], 3), 3, 2)


class Lines(nn.Module):
    """`Axial` with every row, then every column, as an image of its own: exporters know attention over four axes, not
    five."""

    def __init__(self, axial: Axial) -> None:
        super().__init__()
        self.row, self.column = axial.row, axial.column

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, w, D) -> (B, h, w, D)."""
        for part in (self.row, self.column):
            x = part(x.flatten(0, 1)).view(x.shape).transpose(1, 2)
        return x


def answers(model: Model, dynamic: bool = False) -> Answers:
    """A copy of the model that exporters understand; `dynamic`: for images of any size that the patch divides."""
    twin = deepcopy(model).cpu().eval().requires_grad_(False)
    change(twin, dynamic)
    return Answers(twin)


def change(module: nn.Module, dynamic: bool) -> None:
    """Put what exporters understand in the place of what they do not, everywhere below a module."""
    for name, child in module._modules.items():
        if child is None:
            continue
        change(child, dynamic)
        if isinstance(child, StandardizedConv):
            module._modules[name] = Standardized(child)
        elif isinstance(child, Root) and child.norm is None and not child.border:
            module._modules[name] = Bordered(child)
        elif isinstance(child, Axial):
            module._modules[name] = Lines(child)
        elif dynamic and isinstance(child, Learned):
            module._modules[name] = AnyGrid(child.table, child.how)
        elif dynamic and isinstance(child, LearnedAxes):
            module._modules[name] = AnyAxes(list(child.tables), child.how)


def check_dynamic(config: ModelConfig) -> None:
    """Raise UsageError for a model whose positions or paddings cannot be worked out inside a graph."""
    if config.family == "bit":
        reason = "axial attention" if config.axial else ""
    elif len(config.image) != 2:
        reason = f"images of {len(config.image)} axes"
    elif config.on_grid or config.attention == "relative":
        reason = "relative positions" if config.attention == "relative" else "windows, axial blocks or a neck"
    else:
        reason = "a ResNet for a stem" if config.front == "resnet" else ""
    if reason:
        able = "BiTs and ViTs with learned, sine or rotary positions and patches or a convolutional stem have any size"
        raise UsageError(f"--dynamic-size is not for {name_of(config)}: {reason}", f"leave it out; {able}")


def example(config: ModelConfig, dynamic: bool = False) -> Tensor:
    """(2, C, *image) zeros: what a graph is made with. A dynamic one is made at another size than the native, and not a
    square."""
    axes = [(2 + axis) * side for axis, side in enumerate(config.patch)] if dynamic else [0] * len(config.image)
    return torch.zeros(2, config.channels, *(side + more for side, more in zip(config.image, axes, strict=True)))


def shapes(config: ModelConfig, dynamic: bool = False) -> tuple[dict[int, Any], ...]:
    """Which axes of the input have no fixed length, as torch.export has it."""
    free: dict[int, Any] = {0: torch.export.Dim("batch", min=1, max=MOST)}
    if dynamic:
        # at least two places of the last map
        for axis, (name, side) in enumerate(zip(("rows", "columns"), config.patch, strict=True)):
            if config.kind == "vit":
                free[2 + axis] = torch.export.Dim(name, min=2, max=PIXELS // side) * side
            else:
                free[2 + axis] = torch.export.Dim(name, min=side + 1, max=PIXELS)
    return (free,)


def program(model: Model, dynamic: bool = False) -> Any:
    """The model as torch.export makes it: (B, C, *image) normalised float32 -> logits, features, for any B."""
    if dynamic:
        check_dynamic(model.config)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            answers(model, dynamic), (example(model.config, dynamic),), dynamic_shapes=shapes(model.config, dynamic)
        )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of the machine that made it
    return program
