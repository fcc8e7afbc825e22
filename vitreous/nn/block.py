"""The residual block and its branches (arXiv:2010.11929, Eqs. 2-3).

N tokens, D width, M hidden width of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from vitreous.nn import kernels
from vitreous.nn.attention import ALL_QUERIES
from vitreous.system.torch_types import FunctionContext, once_differentiable


class Mlp(nn.Module):
    """Two linear layers with a GELU between them.

    `gelu` selects its form: `none` (erf) and `tanh` (Google's code), torch's names, or `quick`, x sigmoid(1.702 x)
    (OpenAI's CLIP).
    """

    def __init__(self, width: int, hidden: int, dropout: float = 0.0, gelu: str = "none") -> None:
        super().__init__()
        self.gelu, self.dropout = gelu, dropout
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        for linear in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D). Training on a CPU recomputes the GELU in the backward pass."""
        output_layer = self.fc2
        if (
            x.device.type == "cpu"
            and torch.is_grad_enabled()
            and type(output_layer) is nn.Linear
            and self.gelu != "quick"
        ):
            hidden = self.fc1(x)
            if (
                hidden.requires_grad
                and hidden.dtype == output_layer.weight.dtype
                and not (self.training and self.dropout)
            ):
                return GeluLinear.apply(hidden, output_layer.weight, output_layer.bias, self.gelu)
            return output_layer(F.dropout(F.gelu(hidden, approximate=self.gelu), self.dropout, self.training))
        return output_layer(F.dropout(self.forward_before_output(x), self.dropout, self.training))

    def forward_before_output(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., M): the hidden layer."""
        x = self.fc1(x)
        return x * torch.sigmoid(1.702 * x) if self.gelu == "quick" else F.gelu(x, approximate=self.gelu)


class GeluContext(FunctionContext):
    """Autograd context of `GeluLinear`: the form of GELU, and whether this project's kernel computes it."""

    gelu: str
    use_kernel: bool


class GeluLinear(torch.autograd.Function):
    """W gelu(h) + b, of (..., M) h -> (..., D), that stores only h for the backward pass.

    Recomputing the GELU costs about 2 % of the two products around it; storing it would take as much memory as h.
    """

    @staticmethod
    def forward(ctx: GeluContext, hidden: Tensor, weight: Tensor, bias: Tensor, gelu: str) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.gelu, ctx.use_kernel = gelu, kernels.can_apply_gelu(hidden)
        return F.linear(
            kernels.gelu_bf16(hidden, gelu) if ctx.use_kernel else F.gelu(hidden, approximate=gelu), weight, bias
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: GeluContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (hidden, weight) = gradients, ctx.saved_tensors
        of_hidden, of_weight, of_bias, _ = ctx.needs_input_grad
        flat_grad = grad.flatten(0, -2)
        d_weight = d_hidden = None
        if ctx.use_kernel and of_weight:
            d_hidden = grad @ weight
            activated = kernels.gelu_bf16_backward_(d_hidden, hidden, ctx.gelu).flatten(0, -2)
            d_weight = (
                kernels.transpose_bf16(flat_grad) @ activated
                if kernels.can_transpose(flat_grad)
                else flat_grad.mT @ activated
            )
        else:
            if of_weight:
                d_weight = (F.gelu(hidden, approximate=ctx.gelu).flatten(0, -2).mT @ flat_grad).mT
            if of_hidden:
                d_hidden = torch.ops.aten.gelu_backward(grad @ weight, hidden, approximate=ctx.gelu)
        return d_hidden, d_weight, flat_grad.sum(0) if of_bias else None, None


class SwiGLU(nn.Module):
    """fc2(silu(a) * b) with [a | b] = fc1(x) (arXiv:2002.05202), the MLP of DINOv2's largest model."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.fc1, self.fc2 = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)
        for matrix in (*self.fc1.weight.chunk(2), self.fc2.weight):
            nn.init.xavier_uniform_(matrix)
        for linear in (self.fc1, self.fc2):
            nn.init.normal_(linear.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.fc2(F.dropout(self.forward_before_output(x), self.dropout, self.training))

    def forward_before_output(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., M): the hidden layer."""
        a, b = self.fc1(x).chunk(2, -1)
        return F.silu(a) * b


def draw_drop_path_mask(y: Tensor, keep: float) -> Tensor:
    """(B, ..., D) -> (B, 1, ..., 1): 1 / keep with probability `keep`, else 0, drawn for each sample.

    Uniform numbers are compared with `keep`, because `bernoulli_` would compile one graph for each value of it, and the
    value differs from block to block.
    """
    shape = (y.shape[0], *[1] * (y.dim() - 1))
    if is_compiling():
        return (torch.rand(shape, device=y.device) < keep).to(y.dtype) / keep
    return y.new_empty(shape).bernoulli_(keep).div_(keep)


class ResidualBranch(nn.Module):
    """x + drop_path(scale(dropout(part(norm(x))))): the pre-norm residual branch of every block.

    `layer_scale` is the initial value of LayerScale (arXiv:2103.17239); None disables it. `drop_path` is the
    probability that a sample's branch is skipped in training (stochastic depth, arXiv:1603.09382); kept branches are
    divided by 1 - drop_path.
    """

    def __init__(
        self,
        module: nn.Module,
        width: int,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        *,
        layer_scale: float | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.dropout, self.drop_path = dropout, drop_path
        self.norm = nn.LayerNorm(width, eps=eps)
        self.part = module
        self.scale = None if layer_scale is None else nn.Parameter(torch.full((width,), layer_scale))

    def forward(self, x: Tensor, *context: Any, queries: slice = ALL_QUERIES) -> Tensor:
        """(B, ..., D) -> (B, ..., D). `context` and `queries`, the tokens of axis -2 to return, are passed to the
        submodule."""
        if queries == ALL_QUERIES:
            y = self.part(self.norm(x), *context)
        else:
            y, x = self.part(self.norm(x), *context, queries=queries), x[..., queries, :]
        return x + self.scale_and_drop(F.dropout(y, self.dropout, self.training))

    def scale_and_drop(self, y: Tensor) -> Tensor:
        """(B, ..., D) -> (B, ..., D): scale the branch's output and drop it for some samples in training."""
        if self.scale is not None:
            y = y * self.scale
        if self.training and self.drop_path > 0:
            y = y * draw_drop_path_mask(y, 1 - self.drop_path)
        return y


class PostNormResidualBranch(ResidualBranch):
    """x + drop_path(scale(norm(dropout(part(x))))): the norm follows the submodule (Swin V2, arXiv:2111.09883, section
    3.2).

    The norm's scale starts at 0, so that a fresh branch adds nothing. Options are those of `ResidualBranch`.
    """

    def __init__(
        self, module: nn.Module, width: int, dropout: float, drop_path: float, *, layer_scale: float | None, eps: float
    ) -> None:
        super().__init__(module, width, dropout, drop_path, layer_scale=layer_scale, eps=eps)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor, *context: Any, queries: slice = ALL_QUERIES) -> Tensor:
        """(B, ..., D) -> (B, ..., D). `context` and `queries` are passed to the submodule."""
        if queries == ALL_QUERIES:
            y = self.part(x, *context)
        else:
            y, x = self.part(x, *context, queries=queries), x[..., queries, :]
        return x + self.scale_and_drop(self.norm(F.dropout(y, self.dropout, self.training)))


class Block(nn.Module):
    """Pre-norm residual block: attention, then MLP (Eqs. 2-3), both of `width`. Options are those of `ResidualBranch`;
    with `post_norm` its branches are `PostNormResidualBranch`.

    `Block(768, Attention(768, 12), Mlp(768, 3072))`
    """

    def __init__(
        self,
        width: int,
        attention: nn.Module,
        mlp: nn.Module,
        dropout: float = 0.0,
        *,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        eps: float = 1e-6,
        post_norm: bool = False,
    ) -> None:
        super().__init__()
        branch = PostNormResidualBranch if post_norm else ResidualBranch
        self.attention, self.mlp = (
            branch(module, width, dropout, drop_path, layer_scale=layer_scale, eps=eps) for module in (attention, mlp)
        )
        self.after: nn.Module | None = None  # applied last, to all tokens on a grid

    def forward(self, x: Tensor, *context: Any, queries: slice = ALL_QUERIES) -> Tensor:
        """(..., N, D) -> (..., Q, D): the `queries`, or all N tokens; `context` is passed to the attention."""
        x = self.mlp(self.attention(x, *context, queries=queries))
        return x if self.after is None else self.after(x)
