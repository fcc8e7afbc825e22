"""Gradient-weighted rollout (arXiv:2103.15679, Eqs. 5-6): relevance of patches for a class.

B batch, P prefix tokens, T tokens with them, D width, h heads, d = D / h, Q queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.errors import UsageError
from vitreous.inspection.attention import get_readout_weights, require_global_attention
from vitreous.inspection.hooks import (
    AttentionCall,
    eval_mode,
    forward_to_last_norm,
    get_patch_grid,
    iterate_residual_branches,
    make_attention_hook,
    remove_hook_on_exit,
    require_attention,
    unwrap_windowed_part,
)
from vitreous.models.base import VisionModel
from vitreous.nn.encoder import Encoder
from vitreous.nn.frozen import FrozenBranch, PackedLinear


@dataclass(frozen=True)
class TokenRelevance:
    """Relevance for a class of each image: `rows` (B, T) float32, nonnegative, prefix tokens first.

    `classes` (B,) int64, and their `logits` (B,) float32.
    """

    grid: tuple[int, ...]
    prefix: int
    rows: Tensor
    classes: Tensor
    _: KW_ONLY
    logits: Tensor

    @property
    def maps(self) -> Tensor:
        """The relevance of the patches, (B, *grid)."""
        return self.rows[:, self.prefix :].unflatten(-1, self.grid)


def compute_relevance(model: VisionModel[Any], images: Tensor, classes: Tensor | None = None) -> TokenRelevance:
    """Compute the relevance of the tokens of (B, C, *image) inputs for `classes` (B,) int64, by default the predicted
    ones.

    With A a block's attention and y the logit: W_l = mean over heads of max(A * dy/dA, 0), R_l = R_(l-1) + W_l R_(l-1),
    R_0 = I. The result is the readout row of R_L - I (`attention.get_readout_weights`). Rows are not normalised.
    Attention stays fused: with o = A v the heads' outputs, dy/dA = dy/do v^T. Parameters get no gradients.

    Raises UsageError for a model without attention or head, with blocks without global attention, or with packed
    products.
    """
    require_attention(model)
    if not model.config.classes:
        raise UsageError("the model has no head, so there is no class logit to differentiate", "use rollout instead")
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        raise UsageError(
            "packed products have no gradients", "use the model before it is packed, or `frozen(model, packed=False)`"
        )
    looks, logits, asked, slopes = compute_attention_gradients(model, images, classes)
    first = get_readout_weights(model, looks[0])
    row = first.expand(len(images), -1)
    for look, slope in zip(reversed(looks), reversed(slopes), strict=True):
        row = row + propagate_relevance(look, slope, row)
    return TokenRelevance(looks[0].grid, looks[0].prefix, row - first, asked, logits=logits)


@torch.no_grad()
def propagate_relevance(look: AttentionCall, slope: Tensor, row: Tensor) -> Tensor:
    """Compute row W (B, T) from dy/do (B, T, D) of an attention and a row (B, T), a few queries at a time."""
    part: Any = look.part
    values = part.split(look.x.flatten(1, -2))[2].float().transpose(-2, -1)  # (B, h, d, T)
    slope = slope.float().unflatten(-1, (part.heads, -1)).transpose(1, 2)  # (B, h, T, d)
    gained = torch.zeros_like(row)
    for queries, weights in look.chunks():
        speaking = (weights * (slope[..., queries, :] @ values)).clamp_(min=0).mean(1)
        gained += torch.einsum("bq,bqt->bt", row[:, queries], speaking)
    return gained


def compute_attention_gradients(
    model: VisionModel[Any], images: Tensor, classes: Tensor | None
) -> tuple[list[AttentionCall], Tensor, Tensor, list[Tensor]]:
    """Run forward and backward; return attentions, logits (B,), classes (B,), and each attention's dy/do (B, T, D)."""
    looks: list[AttentionCall] = []
    outputs: list[Tensor] = []
    grid = get_patch_grid(model, images)
    inside = True

    def collect(look: AttentionCall) -> None:
        if inside:  # the backward pass recomputes blocks
            require_global_attention(look, model)
            looks.append(look)

    def leaf(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (given[0].detach().requires_grad_(True), *given[1:])

    def output(module: nn.Module, given: tuple[Any, ...]) -> None:
        if inside:
            outputs.append(given[0])

    with eval_mode(model) as stack, torch.enable_grad():
        for encoder in (part for part in model.modules() if isinstance(part, Encoder)):
            stack.enter_context(checkpoint_encoder_blocks(encoder))
        attentive = [
            (name, branch)
            for name, branch in iterate_residual_branches(model)
            if hasattr(unwrap_windowed_part(branch), "weights")
        ]
        stack.enter_context(remove_hook_on_exit(attentive[0][1].register_forward_pre_hook(leaf)))
        for name, branch in attentive:
            last: Any = branch.last if isinstance(branch, FrozenBranch) else unwrap_windowed_part(branch).out
            look = wrap_no_grad(make_attention_hook(name, branch, grid, model.config, collect))
            stack.enter_context(remove_hook_on_exit(branch.register_forward_pre_hook(look)))
            stack.enter_context(remove_hook_on_exit(last.register_forward_pre_hook(output)))
        answers = model.classify(model.pool(forward_to_last_norm(model, images)))
        inside = False
        asked = answers.argmax(1) if classes is None else classes.to(answers.device)
        logits = answers.gather(1, asked[:, None])[:, 0]
        slopes = torch.autograd.grad(logits.sum(), outputs)
    return looks, logits.detach().float(), asked, [slope.flatten(1, -2) for slope in slopes]


def wrap_no_grad(hook: Callable[..., None]) -> Callable[..., None]:
    """Wrap a hook so that it runs without gradients."""

    def quiet(module: Any, given: tuple[Any, ...]) -> None:
        with torch.no_grad():
            hook(module, given)

    return quiet


@contextmanager
def checkpoint_encoder_blocks(encoder: Encoder) -> Iterator[None]:
    """Checkpoint the blocks even in evaluation mode; `eval_mode` restores the mode."""
    before = encoder.recompute
    encoder.recompute, encoder.training = True, True
    try:
        yield
    finally:
        encoder.recompute = before
        if before is Encoder.recompute:
            del encoder.recompute
