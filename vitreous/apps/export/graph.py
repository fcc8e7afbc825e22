"""Exportable graphs: a model as standard PyTorch operators, from which every exported file is made.

Shapes: B images of C channels, K classes, D features (the inputs of the head). A symbolic size is unknown until the
graph runs, with `--dynamic-size`.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.apps.export.windows import DynamicLocalAttention, DynamicWindows, size_to_tensor
from vitreous.errors import UsageError
from vitreous.inference.engine import remove_head
from vitreous.models.config import ModelConfig
from vitreous.models.zoo import Model
from vitreous.nn.frozen import FrozenConv
from vitreous.nn.layout import AxialBlock, WindowedAttention
from vitreous.nn.local import LocalAttention
from vitreous.nn.position import LearnedAxesPosition, LearnedPosition, combine_axis_tables
from vitreous.nn.resnet import ResNetRoot, StandardizedConv

INPUT_NAME, OUTPUT_NAMES = "images", ("logits", "features")
MAX_DYNAMIC_BATCH = 65536  # maximum images per batch
MAX_DYNAMIC_SIZE = 16384  # maximum height and width in pixels, with --dynamic-size
#: coefficient a of the bicubic kernel of each resize rule (Keys, 1981); other rules are bilinear
CUBIC_COEFFICIENTS = {"bicubic-antialias": -0.5, "bicubic": -0.75, "bicubic-offset": -0.75, "bicubic-aligned": -0.75}
ALIGNED_RESIZE_RULES = ("bicubic-aligned", "zoom", "zoom-scipy")  # rules that keep the first and the last position


class LogitsAndFeatures(nn.Module):
    """A model that returns both its logits and its features."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.backbone = remove_head(model)
        self.head: Any = model.head

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (B, K) logits and (B, D) features from (B, C, *image) normalised float32."""
        features = self.backbone(images)
        return self.head(features), features


class ExportableRoot(nn.Module):
    """BiT's root block with explicit zero padding. onnxruntime (1.31) fuses a padding into the pooling that follows,
    which pads with minus infinity, so that outputs would be off by 1e-3."""

    def __init__(self, root: ResNetRoot) -> None:
        super().__init__()
        self.conv = root.conv

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, pad with zeros and pool: (B, C, H, W) -> (B, width, ceil(H / 4), ceil(W / 4))."""
        x = self.conv(x)
        row = torch.zeros_like(x[:, :, :1])
        x = torch.cat([row, x, row], 2)
        column = torch.zeros_like(x[..., :1])
        return F.max_pool2d(torch.cat([column, x, column], 3), 3, 2)


class ExportableAxial(nn.Module):
    """An `AxialBlock` in which every row, then every column is a batch item. Exporters support attention over tensors
    of four axes, not five."""

    def __init__(self, axial: AxialBlock) -> None:
        super().__init__()
        self.row, self.column = axial.row, axial.column

    def forward(self, x: Tensor) -> Tensor:
        """Attend within rows, then within columns: (B, h, w, D) -> (B, h, w, D)."""
        for attention in (self.row, self.column):
            x = attention(x.flatten(0, 1)).view(x.shape).transpose(1, 2)
        return x


def symbolic_axis_weights(old_size: int, new_size: int, resize_rule: str, is_native_size: Tensor) -> Tensor:
    """Return the matrix (new, old) that resizes an axis, as `nn.grid.axis_resize_matrix` does, for a symbolic
    `new_size`. It is the identity if `is_native_size`, a scalar bool, is true."""
    indices = torch.arange(new_size, dtype=torch.float64)
    count = size_to_tensor(new_size)
    if resize_rule in ALIGNED_RESIZE_RULES:
        step = (old_size - 1) / (count - 1).clamp(min=1)
        positions = indices * step
    else:
        step = old_size / (count + 0.1 if resize_rule == "bicubic-offset" else count)
        positions = (indices + 0.5) * step - 0.5
    if resize_rule.endswith("-antialias"):
        weights = interpolation_kernel(
            (torch.arange(old_size) - positions[:, None]) / step.clamp(min=1), CUBIC_COEFFICIENTS.get(resize_rule)
        )
        weights = weights / weights.sum(1, keepdim=True)
    else:
        taps = torch.arange(-2, old_size + 2)  # positions beyond the ends repeat the end
        weights = interpolation_kernel(taps - positions[:, None], CUBIC_COEFFICIENTS.get(resize_rule))
        weights = weights @ (taps.clamp(0, old_size - 1)[:, None] == torch.arange(old_size)).to(weights.dtype)
    if resize_rule == "zoom-scipy":  # rounding may move the last coordinate beyond the table, where scipy reads zero
        is_beyond = (indices == count - 1) & (step * (count - 1) > old_size - 1)
        weights = torch.where(is_beyond[:, None], 0.0, weights)
    return torch.where(is_native_size, (torch.arange(old_size) == indices[:, None]).to(weights.dtype), weights)


def interpolation_kernel(distances: Tensor, cubic_coefficient: float | None) -> Tensor:
    """Return (n, old) interpolation weights for (n, old) distances: a cubic convolution kernel with
    `cubic_coefficient`, or a triangle (bilinear) for None."""
    distances = distances.abs()
    if cubic_coefficient is None:
        return (1 - distances).clamp(min=0)
    inner = ((cubic_coefficient + 2) * distances - (cubic_coefficient + 3)) * distances * distances + 1
    outer = (
        (cubic_coefficient * distances - 5 * cubic_coefficient) * distances + 8 * cubic_coefficient
    ) * distances - 4 * cubic_coefficient
    return torch.where(distances <= 1, inner, torch.where(distances < 2, outer, torch.zeros_like(distances)))


def resize_to_symbolic_grid(table: Tensor, grid: tuple[int, ...], resize_rule: str) -> Tensor:
    """Resize a position table as `nn.grid.resize_position_table` does, for a symbolic grid: (*old, D) -> (*grid, D)."""
    unchanged = [
        size_to_tensor(new_size) == old_size for old_size, new_size in zip(table.shape[:-1], grid, strict=True)
    ]
    all_unchanged = torch.stack(unchanged).all()
    for axis, new_size in enumerate(grid):
        is_native_size = all_unchanged if resize_rule == "bicubic-offset" else unchanged[axis]
        weights = symbolic_axis_weights(table.shape[axis], new_size, resize_rule, is_native_size).to(table)
        table = (weights @ table.movedim(axis, -2)).movedim(-2, axis)
    return table


class DynamicPositions(nn.Module):
    """Learned position embeddings for a symbolic grid. Weights are computed in float64, since F.interpolate needs fixed
    sizes in a graph."""

    def __init__(self, table: Tensor, resize_rule: str) -> None:
        """`table` is (*old, D), `resize_rule` is a rule of `nn.grid.RESIZE_MODES`."""
        super().__init__()
        self.table, self.resize_rule = nn.Parameter(table.detach(), requires_grad=False), resize_rule

    def read(self, grid: tuple[int, ...]) -> Tensor:
        """Return the embeddings of a grid, (*grid, D)."""
        return resize_to_symbolic_grid(self.table, grid, self.resize_rule)


class DynamicAxisPositions(nn.Module):
    """Learned position embeddings per axis for a symbolic grid. The last axis comes first, as in
    `LearnedAxesPosition`."""

    def __init__(self, tables: list[Tensor], resize_rule: str) -> None:
        """`tables` are (old, D), one per axis; `resize_rule` is a rule of `nn.grid.RESIZE_MODES`."""
        super().__init__()
        self.tables, self.resize_rule = (
            nn.ParameterList(nn.Parameter(t.detach(), requires_grad=False) for t in tables),
            resize_rule,
        )

    def read(self, grid: tuple[int, ...]) -> Tensor:
        """Return the embeddings of a grid, (*grid, D)."""
        return combine_axis_tables(
            [
                resize_to_symbolic_grid(table, (length,), self.resize_rule)
                for table, length in zip(self.tables, grid, strict=True)
            ],
            grid,
        )


def make_exportable(model: Model, dynamic: bool = False) -> nn.Module:
    """Make an exportable copy of the model. With `dynamic`, it accepts any image size that is divisible by the patch
    size.

    It outputs logits and features. Without a head, it outputs only features; with a dense head, only logits; a detector
    outputs objects.
    """
    exportable = deepcopy(model).cpu().eval().requires_grad_(False)
    replace_unexportable_modules(exportable, dynamic)
    return LogitsAndFeatures(exportable) if output_names(model.config) == OUTPUT_NAMES else exportable


def output_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the outputs of an exported graph."""
    return config.export_rules().outputs


def replace_unexportable_modules(module: nn.Module, dynamic: bool) -> None:
    """Replace all submodules that exporters do not support by equivalent modules that they support."""
    for name, child in module._modules.items():
        if child is None:
            continue
        replace_unexportable_modules(child, dynamic)
        if isinstance(child, StandardizedConv):
            module._modules[name] = FrozenConv(child)
        elif isinstance(child, ResNetRoot) and child.norm is None and not child.border:
            module._modules[name] = ExportableRoot(child)
        elif isinstance(child, AxialBlock):
            module._modules[name] = ExportableAxial(child)
        elif dynamic and isinstance(child, LearnedPosition):
            module._modules[name] = DynamicPositions(child.table, child.resize_rule)
        elif dynamic and isinstance(child, WindowedAttention):
            module._modules[name] = DynamicWindows(child)
        elif dynamic and isinstance(child, LocalAttention):
            module._modules[name] = DynamicLocalAttention(child)
        elif dynamic and isinstance(child, LearnedAxesPosition):
            module._modules[name] = DynamicAxisPositions(list(child.tables), child.resize_rule)


def check_dynamic_size(config: ModelConfig) -> None:
    """Raise UsageError for a model that does not support `--dynamic-size`, since a graph cannot compute its positions
    or paddings for any size."""
    rules = config.export_rules()
    if not rules.fixed_size:
        return
    if rules.hint:
        raise UsageError(f"--dynamic-size does not support {config.name()}", rules.hint)
    supported = "it supports Swins, BiTs, and ViTs with learned, sine or rotary positions after patches or convolutions"
    raise UsageError(
        f"--dynamic-size does not support {config.name()}: {rules.fixed_size}", f"remove --dynamic-size; {supported}"
    )


def make_example_input(config: ModelConfig, dynamic: bool = False) -> Tensor:
    """Make zeros to trace the model with: (2, C, *image), or (1, C, *image) for a detector. Dynamic graphs are traced
    at another size, which is not square."""
    increments = (
        [(2 + axis) * length for axis, length in enumerate(config.patch)] if dynamic else [0] * len(config.image)
    )
    count = 1 if config.export_rules().fixed_batch else 2
    return torch.zeros(
        count,
        config.channels,
        *(length + increment for length, increment in zip(config.image, increments, strict=True)),
    )


def dynamic_axes(config: ModelConfig, dynamic: bool = False) -> tuple[dict[int, Any], ...]:
    """Return the dynamic axes of the input for torch.export. A detector's batch size is fixed to one image, since it
    merges duplicate objects per image."""
    rules = config.export_rules()
    if rules.fixed_batch:
        return ({},)
    axes: dict[int, Any] = {0: torch.export.Dim("batch", min=1, max=MAX_DYNAMIC_BATCH)}
    if dynamic:
        # at least two positions of the last feature map
        for axis, (name, patch_size) in enumerate(zip(("rows", "columns"), config.patch, strict=True)):
            if rules.patch_multiples:
                axes[2 + axis] = torch.export.Dim(name, min=2, max=MAX_DYNAMIC_SIZE // patch_size) * patch_size
            else:
                axes[2 + axis] = torch.export.Dim(name, min=patch_size + 1, max=MAX_DYNAMIC_SIZE)
    return (axes,)


def trace_model(model: Model, dynamic: bool = False) -> Any:
    """Trace the model with torch.export: (B, C, *image) normalised float32 -> the outputs of `output_names`, for any B.
    A detector is traced for one image."""
    if dynamic:
        check_dynamic_size(model.config)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            make_exportable(model, dynamic),
            (make_example_input(model.config, dynamic),),
            dynamic_shapes=dynamic_axes(model.config, dynamic),
        )
    if dynamic and model.config.export_rules().drops_guards:
        program._guards_code = []
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program
