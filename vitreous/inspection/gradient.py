"""Gradient-weighted attention rollout (arXiv:2103.15679, Eqs. 5-6): relevance of patches for a class.

Shapes: B batch, C channels, P prefix tokens, T all tokens, D width, h heads, d = D / h, Q queries.
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
    """Relevance of each token for a class: `relevance` (B, T) float32, nonnegative, prefix tokens first.

    `classes` (B,) int64 are the classes, `logits` (B,) float32 their logits, `grid` the layout of the patches.
    """

    grid: tuple[int, ...]
    prefix: int
    relevance: Tensor
    classes: Tensor
    _: KW_ONLY
    logits: Tensor

    @property
    def maps(self) -> Tensor:
        """Return the relevance of the patches (B, *grid)."""
        return self.relevance[:, self.prefix :].unflatten(-1, self.grid)


def compute_relevance(model: VisionModel[Any], images: Tensor, classes: Tensor | None = None) -> TokenRelevance:
    """Compute the relevance of the tokens of images (B, C, *image) for `classes` (B,) int64, by default the predicted
    classes.

    With A a block's attention and y the logit of the class:

        W_l = mean over heads of max(A * dy/dA, 0),  R_0 = I,  R_l = R_(l-1) + W_l R_(l-1)

    The result is the readout row of R_L - I (`attention.get_readout_weights`); rows are not normalised. Attention stays
    fused: with o = A v the heads' outputs, dy/dA = dy/do v^T. Parameters get no gradients.

    Raises UsageError for a model without attention or head, with blocks without global attention, or with packed
    products.
    """
    require_attention(model)
    if not model.config.classes:
        raise UsageError("the model has no head, so there is no class logit to differentiate", "use rollout instead")
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        raise UsageError(
            "the model's matrix products are packed for inference and have no gradients",
            "use the model before it is packed, or `freeze_for_inference(model, packed=False)`",
        )
    calls, logits, class_indices, gradients = compute_attention_gradients(model, images, classes)
    readout = get_readout_weights(model, calls[0])
    row = readout.expand(len(images), -1)
    for call, gradient in zip(reversed(calls), reversed(gradients), strict=True):
        row = row + propagate_relevance(call, gradient, row)
    return TokenRelevance(calls[0].grid, calls[0].prefix, row - readout, class_indices, logits=logits)


@torch.no_grad()
def propagate_relevance(call: AttentionCall, gradient: Tensor, row: Tensor) -> Tensor:
    """Compute row W (B, T) for a row of relevance (B, T), from dy/do (B, T, D) of an attention, a few queries at a
    time."""
    attention: Any = call.module
    values = attention.project_qkv(call.x.flatten(1, -2))[2].float().transpose(-2, -1)  # (B, h, d, T)
    gradient = gradient.float().unflatten(-1, (attention.heads, -1)).transpose(1, 2)  # (B, h, T, d)
    relevance = torch.zeros_like(row)
    for queries, weights in call.iterate_chunks():
        relevance_weights = (weights * (gradient[..., queries, :] @ values)).clamp_(min=0).mean(1)
        relevance += torch.einsum("bq,bqt->bt", row[:, queries], relevance_weights)
    return relevance


def compute_attention_gradients(
    model: VisionModel[Any], images: Tensor, classes: Tensor | None
) -> tuple[list[AttentionCall], Tensor, Tensor, list[Tensor]]:
    """Run forward and backward pass, and return the attentions, logits (B,), classes (B,), and dy/do (B, T, D) of each
    attention."""
    calls: list[AttentionCall] = []
    outputs: list[Tensor] = []
    grid = get_patch_grid(model, images)
    is_forward = True

    def store_call(call: AttentionCall) -> None:
        """Append an attention of the forward pass; calls in the backward pass, which recomputes blocks, are ignored."""
        if is_forward:  # the backward pass recomputes blocks
            require_global_attention(call, model)
            calls.append(call)

    def detach_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Detach the input of the first block, so gradients stop there."""
        return (inputs[0].detach().requires_grad_(True), *inputs[1:])

    def record_output(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Append the heads' outputs, the input of the output layer."""
        if is_forward:
            outputs.append(inputs[0])

    with eval_mode(model) as stack, torch.enable_grad():
        for encoder in (submodule for submodule in model.modules() if isinstance(submodule, Encoder)):
            stack.enter_context(checkpoint_encoder_blocks(encoder))
        attention_branches = [
            (name, branch)
            for name, branch in iterate_residual_branches(model)
            if hasattr(unwrap_windowed_part(branch), "compute_weights")
        ]
        stack.enter_context(remove_hook_on_exit(attention_branches[0][1].register_forward_pre_hook(detach_input)))
        for name, branch in attention_branches:
            projection: Any = (
                branch.output_layer if isinstance(branch, FrozenBranch) else unwrap_windowed_part(branch).out
            )
            hook = wrap_no_grad(make_attention_hook(name, branch, grid, model.config, store_call))
            stack.enter_context(remove_hook_on_exit(branch.register_forward_pre_hook(hook)))
            stack.enter_context(remove_hook_on_exit(projection.register_forward_pre_hook(record_output)))
        all_logits = model.classify(model.pool(forward_to_last_norm(model, images)))
        is_forward = False
        class_indices = all_logits.argmax(1) if classes is None else classes.to(all_logits.device)
        logits = all_logits.gather(1, class_indices[:, None])[:, 0]
        gradients = torch.autograd.grad(logits.sum(), outputs)
    return calls, logits.detach().float(), class_indices, [gradient.flatten(1, -2) for gradient in gradients]


def wrap_no_grad(hook: Callable[..., None]) -> Callable[..., None]:
    """Wrap a hook so that it runs without gradients."""

    def call_without_gradients(module: Any, inputs: tuple[Any, ...]) -> None:
        with torch.no_grad():
            hook(module, inputs)

    return call_without_gradients


@contextmanager
def checkpoint_encoder_blocks(encoder: Encoder) -> Iterator[None]:
    """Enable gradient checkpointing of the blocks, also in evaluation mode; `eval_mode` restores the mode."""
    saved_recompute = encoder.recompute
    encoder.recompute, encoder.training = True, True
    try:
        yield
    finally:
        encoder.recompute = saved_recompute
        if saved_recompute is Encoder.recompute:
            del encoder.recompute
