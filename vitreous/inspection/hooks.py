"""Hooks that pass the inputs of a model's submodules to a `visit` function, which can compute their attention weights.

The forward pass does not change, including fused attention, and neither does the model: hooks are removed afterwards,
and modules return to their mode. A compiled model runs uncompiled for this pass.

Shapes: B batch, C channels, P prefix tokens, N patch tokens, T = P + N tokens of a sequence, D width, h heads, Q
queries; for factorised video models T time slots of S tokens.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitreous.errors import UsageError
from vitreous.models.base import VisionModel
from vitreous.models.config import ModelConfig
from vitreous.nn.block import PostNormResidualBranch, ResidualBranch
from vitreous.nn.frozen import FrozenBranch, FrozenLinear
from vitreous.nn.layout import WindowedAttention
from vitreous.nn.spacetime import SpaceTimeHeads, flatten_time_slots

ATTENTION_CHUNK_BYTES = 64 * 2**20  # size of a chunk of float32 attention probabilities

Span = Literal["all", "row", "column", "window", "space", "time"]  # the tokens to which a query attends


@dataclass(frozen=True)
class AttentionCall:
    """One attention module of a block and its input in a forward pass.

    - `layer`: the block, from 0.
    - `span`: the tokens to which a query attends: all tokens, its row or column (an axial block has a call for each),
      its window, its time slot, or its position in all time slots (a block of a factorised video model may have both).
    - `grid`: layout of the patch tokens of one sequence; `prefix`: number of tokens before them.
    - `x`: the input (..., T, D) float32, or (..., *grid, D) for attention on grids; `context`: further arguments.
    - `patch`: pixels per token along each axis.
    - `windows`: the module that splits the grid of all patch tokens, `full_grid`, into windows; None for other spans.
      `full_grid` is also set if attention is over one vector per time slot.
    """

    layer: int
    span: Span
    grid: tuple[int, ...]
    prefix: int
    module: nn.Module
    x: Tensor
    context: tuple[Any, ...] = ()
    patch: tuple[int, ...] = ()
    windows: WindowedAttention | None = None
    full_grid: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Return T, the number of tokens of one sequence."""
        return self.prefix + math.prod(self.grid)

    @torch.no_grad()
    def compute_weights(self, queries: slice = slice(None)) -> Tensor:
        """Compute the attention probabilities (..., h, Q, T) float32 of some queries; rows sum to one."""
        return self.module.compute_weights(self.x, *self.context, queries=queries).float()  # type: ignore[operator]

    def iterate_chunks(self, max_bytes: int = ATTENTION_CHUNK_BYTES) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices that cover all queries, with their attention probabilities (..., h, Q, T) of at most about
        `max_bytes` bytes."""
        batch = math.prod(self.x.shape[: -1 - (1 if self.x.shape[-2] == self.tokens else len(self.grid))])
        size = max(1, max_bytes // (4 * batch * self.module.heads * self.tokens))  # type: ignore[operator]
        module = copy.copy(self.module)
        if "qkv" in (layers := vars(module)["_modules"]):
            vars(module)["_modules"] = {**layers, "qkv": CachedLayer(layers["qkv"])}
        call = replace(self, module=module)
        for low in range(0, self.tokens, size):
            queries = slice(low, min(low + size, self.tokens))
            yield queries, call.compute_weights(queries)


class CachedLayer(nn.Module):
    """A layer that computes its output once and returns it in later calls, for chunks of queries."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.output = layer, None

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer: (..., T, D) -> (..., T, out)."""
        if self.output is None:
            self.output = self.layer(x)
        return self.output


@dataclass(frozen=True)
class ResidualState:
    """The residual stream (B, P + N, D) after the patch embedding (`layer` -1), or after the attention or MLP
    (`sublayer`) of a block, before the last norm."""

    layer: int
    sublayer: Literal["embedding", "attention", "mlp"]
    grid: tuple[int, ...]
    prefix: int
    _: KW_ONLY
    tokens: Tensor

    @property
    def patches(self) -> Tensor:
        """Return the patch tokens (B, *grid, D) float32, without the prefix tokens."""
        return self.tokens[:, self.prefix :].float().unflatten(1, self.grid)


def require_attention(model: VisionModel[Any]) -> None:
    """Raise UsageError for a model without attention over tokens; the hint names the figures that it supports."""
    if not model.config.has_attention:
        hint = "use filters, features or similarity"
        raise UsageError(f"{model.config.name()} has no attention over tokens", hint)


def get_patch_grid(model: VisionModel[Any], images: Tensor) -> tuple[int, ...]:
    """Return the grid of patches of images (B, C, *image); if a side is not divisible by the patch, it is rounded up,
    as by a convolution."""
    return tuple(-(-i // p) for i, p in zip(images.shape[2:], model.config.patch, strict=True))


def visit_attention_calls(model: VisionModel[Any], images: Tensor, visit: Callable[[AttentionCall], None]) -> None:
    """Run the model once on images (B, C, *image) and call `visit` for every attention, from the first block on.

    An `AttentionCall` may be stored, but it keeps its input in memory. Raises UsageError for a model without attention.
    """
    require_attention(model)
    grid = get_patch_grid(model, images)
    with eval_mode(model) as stack:
        for name, branch in iterate_residual_branches(model):
            if hasattr(unwrap_windowed_part(branch), "compute_weights"):
                stack.enter_context(
                    remove_hook_on_exit(
                        branch.register_forward_pre_hook(make_attention_hook(name, branch, grid, model.config, visit))
                    )
                )
        forward_to_last_norm(model, images)


def visit_residual_states(model: VisionModel[Any], images: Tensor, visit: Callable[[ResidualState], None]) -> Tensor:
    """Run the model once on images (B, C, *image), and call `visit` with the residual stream after the embedding and
    after each attention and MLP.

    Returns the tokens (B, P + N, D) after the last norm. Of axial blocks, only the branches along columns are visited;
    of blocks over space and time, only the attention over time; attention between vectors of time slots is not visited.
    Raises UsageError for a model without attention.
    """
    require_attention(model)
    config = model.config
    grid = get_patch_grid(model, images)

    def make_hook(layer: int, sublayer: Any) -> Callable[..., None]:
        """Create the hook that passes the stream after a `sublayer` of block `layer` to `visit`."""

        def hook(module: nn.Module, inputs: tuple[Any, ...], out: Tensor | None = None) -> None:
            tokens = to_raster_order(name_of[module], (inputs[0] if out is None else out).detach(), config)
            # each stage of a Swin has a different grid
            state_grid = tuple(tokens.shape[1:-1]) if tokens.dim() > 3 else grid
            visit(ResidualState(layer, sublayer, state_grid, config.prefix, tokens=tokens.flatten(1, -2)))

        return hook

    name_of = {branch: name for name, branch in iterate_residual_branches(model)}
    with eval_mode(model) as stack:
        first_branch = next(iter(name_of))
        stack.enter_context(remove_hook_on_exit(first_branch.register_forward_pre_hook(make_hook(-1, "embedding"))))
        has_time_attention = config.arrangement == "factorised-attention"  # the attention over time is the later one
        for branch, name in name_of.items():
            if (
                ".row." not in name
                and not name.startswith("temporal.")
                and not (has_time_attention and name.endswith(".attention"))
            ):
                sublayer = "attention" if hasattr(unwrap_windowed_part(branch), "compute_weights") else "mlp"
                stack.enter_context(
                    remove_hook_on_exit(
                        branch.register_forward_hook(make_hook(parse_layer_index(name, config), sublayer))
                    )
                )
        return forward_to_last_norm(model, images)


def to_raster_order(name: str, tokens: Tensor, config: ModelConfig) -> Tensor:
    """Return the residual stream at the branch `name` with its axes in the order that they have outside of the block:
    (B, T, D), or (B, *grid, D) for blocks on a grid."""
    if ".column." in name or name.endswith(".time"):
        tokens = tokens.transpose(1, 2)
    return flatten_time_slots(tokens, config.prefix) if config.factorised else tokens


def forward_to_last_norm(model: VisionModel[Any], images: Tensor) -> Tensor:
    """Run the model on images (B, C, *image) up to the last norm, on its device and in a dtype that it supports."""
    parameter = next(model.parameters())
    return model.features(
        images.to(parameter.device, parameter.dtype if parameter.is_floating_point() else torch.float32)
    )


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[ExitStack]:
    """Switch a model to evaluation mode without gradients or compilation, and restore its state on exit."""
    modes = {module: module.training for module in model.modules()}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        model.eval()
        try:
            yield stack
        finally:
            for module, mode in modes.items():
                module.training = mode


@contextmanager
def remove_hook_on_exit(handle: Any) -> Iterator[None]:
    """Context manager that removes a hook, given its handle, on exit."""
    try:
        yield
    finally:
        handle.remove()


def iterate_residual_branches(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every residual branch with its name in the model, in the order of the forward pass."""
    return (
        (name, module) for name, module in model.named_modules() if isinstance(module, (ResidualBranch, FrozenBranch))
    )


def unwrap_windowed_part(branch: nn.Module) -> nn.Module:
    """Return the attention or MLP of a residual branch, without the wrapper that splits windows."""
    module: Any = branch.part
    return module.part if isinstance(module, WindowedAttention) else module


def make_attention_hook(
    name: str, branch: nn.Module, grid: tuple[int, ...], config: ModelConfig, visit: Callable[[AttentionCall], None]
) -> Callable[..., None]:
    """Create the hook that calls `visit` with an `AttentionCall` for the input of a residual branch."""
    attention = to_float32_module(unwrap_windowed_part(branch))
    windows: Any = branch.part if isinstance(branch.part, WindowedAttention) else None

    def hook(module: Any, inputs: tuple[Any, ...]) -> None:
        x = (inputs[0] if isinstance(module, PostNormResidualBranch) else module.norm(inputs[0])).float()
        span: Span = "row" if ".row." in name else "column" if ".column." in name else "window" if windows else "all"
        sequence_grid = {"row": (1, grid[-1]), "column": (grid[0], 1), "window": windows.size if windows else ()}.get(
            span, grid
        )
        if config.factorised:
            for call_fields in iterate_space_time_calls(name, attention, x, grid, config.prefix):
                visit(
                    AttentionCall(
                        parse_layer_index(name, config), *call_fields[:5], patch=config.patch, full_grid=call_fields[5]
                    )
                )
            return
        layer, full_grid = parse_layer_index(name, config), tuple(x.shape[1:-1]) if windows else ()
        x, *context = windows.split(x) if windows else (x, *inputs[1:])
        patch = config.patch_at(layer)
        visit(
            AttentionCall(
                layer,
                span,
                grid=sequence_grid,
                prefix=config.prefix,
                module=attention,
                x=x,
                context=tuple(context),
                patch=patch,
                windows=windows,
                full_grid=full_grid,
            )
        )

    return hook


def iterate_space_time_calls(
    name: str, attention: nn.Module, x: Tensor, grid: tuple[int, ...], prefix: int
) -> Iterator[tuple[Span, tuple[int, ...], int, nn.Module, Tensor, tuple[int, ...]]]:
    """Yield span, grid, prefix, module, x and full grid of each `AttentionCall` of a factorised model's attention.

    Its input x is (B, T, S, D), (B, S, T, D) over time, or (B, T, D) for vectors of time slots. Over time, only
    sequences of patch tokens are visited, not those of prefix tokens.
    """
    slot_grid, time_grid = (1, *grid[1:]), (grid[0], *[1] * (len(grid) - 1))
    if name.startswith("temporal."):
        yield "time", time_grid, 0, attention, x, time_grid
    elif name.endswith(".time"):
        yield "time", time_grid, 0, attention, x[:, prefix:], ()
    elif isinstance(attention, SpaceTimeHeads) and grid[0] > 1:
        yield "space", slot_grid, prefix, attention.space_or_time_heads(over_time=False), x, ()
        yield "time", time_grid, 0, attention.space_or_time_heads(over_time=True), x.transpose(1, 2)[:, prefix:], ()
    else:
        yield "space", slot_grid, prefix, attention, x, ()


def parse_layer_index(name: str, config: ModelConfig) -> int:
    """Return the block index of a branch name: 3 for `encoder.blocks.3.attention`.

    The blocks of a Swin are counted over all stages. The blocks over time of a factorised encoder follow its other
    blocks.
    """
    if name.startswith("temporal."):
        return config.depth + int(name.split(".")[2])
    return config.parameter_layer(f"{name}.") - 1


def to_float32_module(module: nn.Module) -> nn.Module:
    """Return the module, or a float32 copy if its parameters are not float32. Packed products do not change."""
    if all(p.dtype == torch.float32 for p in module.parameters() if p.is_floating_point()):
        return module
    float32_copy = copy.deepcopy(module).float()
    for product in float32_copy.modules():
        if isinstance(product, FrozenLinear) and product.bias is not None:
            product.bias = product.bias.float()
    return float32_copy
