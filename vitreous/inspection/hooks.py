"""Hooks that pass the inputs of a model's submodules to a visitor, which can compute their attention weights.

The forward pass is unchanged, including fused attention, and so is the model: hooks are removed afterwards and modules
return to their mode; a compiled model runs this one pass uncompiled.

B batch, P prefix tokens, N patch tokens, T = P + N, D width, h heads, Q queries.
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

Span = Literal["all", "row", "column", "window", "space", "time"]


@dataclass(frozen=True)
class AttentionCall:
    """One attention and its input.

    `layer` counts blocks from 0. `span` has the keys of a query: all tokens, its row or column (axial blocks give
    two calls), its window, its time slot, or its position at all times (blocks of factorised video models may give two
    calls). `grid`: patch tokens of one sequence, `prefix`: tokens before them; `patch`: pixels per token and axis. `x`
    (..., T, D) float32, or (..., *grid, D) for attention on grids. `windows` split the grid `full_grid` of all patch
    tokens; None for other spans. `full_grid` is also set if attention is over one vector per time slot.
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
        """T, the number of tokens of one sequence."""
        return self.prefix + math.prod(self.grid)

    @torch.no_grad()
    def compute_weights(self, queries: slice = slice(None)) -> Tensor:
        """Compute (..., h, Q, T) float32 attention probabilities of some queries; rows sum to one."""
        return self.module.compute_weights(self.x, *self.context, queries=queries).float()  # type: ignore[operator]

    def iterate_chunks(self, max_bytes: int = ATTENTION_CHUNK_BYTES) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of all queries with their `compute_weights`, (..., h, Q, T) of about `max_bytes` bytes at
        most."""
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
    """A layer that computes its output once and returns it for every chunk of queries."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.output = layer, None

    def forward(self, x: Tensor) -> Tensor:
        """(..., T, D) -> (..., T, out)."""
        if self.output is None:
            self.output = self.layer(x)
        return self.output


@dataclass(frozen=True)
class ResidualState:
    """The residual stream (B, P + N, D) `sublayer` the patch embedding (`layer` -1), or the attention or MLP of a
    block.

    Unnormalised, before the last norm.
    """

    layer: int
    sublayer: Literal["embedding", "attention", "mlp"]
    grid: tuple[int, ...]
    prefix: int
    _: KW_ONLY
    tokens: Tensor

    @property
    def patches(self) -> Tensor:
        """Return (B, *grid, D) float32, without the prefix tokens."""
        return self.tokens[:, self.prefix :].float().unflatten(1, self.grid)


def require_attention(model: VisionModel[Any]) -> None:
    """Raise UsageError for a model without attention over tokens, with the supported figures."""
    if not model.config.has_attention:
        hint = "use filters, features or similarity"
        raise UsageError(f"{model.config.name()} has no attention over tokens", hint)


def get_patch_grid(model: VisionModel[Any], images: Tensor) -> tuple[int, ...]:
    """Return the grid of patches of (B, C, *image); sides that are not a multiple are rounded up, as by a
    convolution."""
    return tuple(-(-i // p) for i, p in zip(images.shape[2:], model.config.patch, strict=True))


def visit_attention_calls(model: VisionModel[Any], images: Tensor, visit: Callable[[AttentionCall], None]) -> None:
    """Run the model once on (B, C, *image) and pass every attention to `visit`, from the first block on.

    An `AttentionCall` may be kept, but it keeps its x in memory. Raises UsageError for a model without
    attention.
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
    """Run the model once on (B, C, *image) and pass its residual stream to `visit`, after the embedding and each
    branch.

    Returns the (B, P + N, D) tokens after the last norm. For axial blocks the attention and the MLP along columns are
    visited, for blocks over space and time the attention over time; attention between vectors of slots is skipped.
    Raises UsageError for a model without attention.
    """
    require_attention(model)
    config = model.config
    grid = get_patch_grid(model, images)

    def make_hook(layer: int, after: Any) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], out: Tensor | None = None) -> None:
            tokens = to_raster_order(name_of[module], (inputs[0] if out is None else out).detach(), config)
            state_grid = (
                tuple(tokens.shape[1:-1]) if tokens.dim() > 3 else grid
            )  # each stage of a Swin has a different grid
            visit(ResidualState(layer, after, state_grid, config.prefix, tokens=tokens.flatten(1, -2)))

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
                after = "attention" if hasattr(unwrap_windowed_part(branch), "compute_weights") else "mlp"
                stack.enter_context(
                    remove_hook_on_exit(branch.register_forward_hook(make_hook(parse_layer_index(name, config), after)))
                )
        return forward_to_last_norm(model, images)


def to_raster_order(name: str, tokens: Tensor, config: ModelConfig) -> Tensor:
    """Return the residual stream at the branch `name` with its axes as outside of the block: (B, T, D), or (B, *grid,
    D) for blocks on a grid."""
    if ".column." in name or name.endswith(".time"):
        tokens = tokens.transpose(1, 2)
    return flatten_time_slots(tokens, config.prefix) if config.factorised else tokens


def forward_to_last_norm(model: VisionModel[Any], images: Tensor) -> Tensor:
    """Run (B, C, *image) up to the last norm, on the model's device and in a supported dtype."""
    parameter = next(model.parameters())
    return model.features(
        images.to(parameter.device, parameter.dtype if parameter.is_floating_point() else torch.float32)
    )


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[ExitStack]:
    """Switch to evaluation mode without gradients or compilation, and restore all afterwards."""
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
    """Remove a hook on exit."""
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
    """Return the module of a branch, without its windows."""
    module: Any = branch.part
    return module.part if isinstance(module, WindowedAttention) else module


def make_attention_hook(
    name: str, branch: nn.Module, grid: tuple[int, ...], config: ModelConfig, visit: Callable[[AttentionCall], None]
) -> Callable[..., None]:
    """Return the hook that creates an `AttentionCall` from a branch's input."""
    attention = to_float32_module(unwrap_windowed_part(branch))
    windows: Any = branch.part if isinstance(branch.part, WindowedAttention) else None

    def hook(module: Any, inputs: tuple[Any, ...]) -> None:
        x = (inputs[0] if isinstance(module, PostNormResidualBranch) else module.norm(inputs[0])).float()
        span: Span = "row" if ".row." in name else "column" if ".column." in name else "window" if windows else "all"
        sequence_grid = {"row": (1, grid[-1]), "column": (grid[0], 1), "window": windows.size if windows else ()}.get(
            span, grid
        )
        if config.factorised:
            for view in split_space_time_attention(name, attention, x, grid, config.prefix):
                visit(AttentionCall(parse_layer_index(name, config), *view[:5], patch=config.patch, full_grid=view[5]))
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


def split_space_time_attention(
    name: str, attention: nn.Module, x: Tensor, grid: tuple[int, ...], prefix: int
) -> Iterator[tuple[Span, tuple[int, ...], int, nn.Module, Tensor, tuple[int, ...]]]:
    """Yield span, grid, prefix, part, x and full grid of the calls of one attention of a factorised video model.

    Its input x is (B, T, S, D), (B, S, T, D) over time, or (B, T, D) of slots' vectors.

    Over time only sequences of patch tokens are visited, not those of prefix tokens.
    """
    slot, line = (1, *grid[1:]), (grid[0], *[1] * (len(grid) - 1))
    if name.startswith("temporal."):
        yield "time", line, 0, attention, x, line
    elif name.endswith(".time"):
        yield "time", line, 0, attention, x[:, prefix:], ()
    elif isinstance(attention, SpaceTimeHeads) and grid[0] > 1:
        yield "space", slot, prefix, attention.space_or_time_heads(over_time=False), x, ()
        yield "time", line, 0, attention.space_or_time_heads(over_time=True), x.transpose(1, 2)[:, prefix:], ()
    else:
        yield "space", slot, prefix, attention, x, ()


def parse_layer_index(name: str, config: ModelConfig) -> int:
    """Parse `encoder.blocks.3.attention` to 3; the blocks of a Swin are counted over all stages, and blocks over the
    time slots of a factorised encoder after the others."""
    if name.startswith("temporal."):
        return config.depth + int(name.split(".")[2])
    return config.parameter_layer(f"{name}.") - 1


def to_float32_module(module: nn.Module) -> nn.Module:
    """Return the module, or a float32 copy if its parameters are not float32; packed products are unchanged."""
    if all(p.dtype == torch.float32 for p in module.parameters() if p.is_floating_point()):
        return module
    float32_copy = copy.deepcopy(module).float()
    for product in float32_copy.modules():
        if isinstance(product, FrozenLinear) and product.bias is not None:
            product.bias = product.bias.float()
    return float32_copy
