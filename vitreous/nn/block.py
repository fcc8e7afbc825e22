"""The residual block of a Transformer and its branches, attention and MLP (arXiv:2010.11929, Eqs. 2-3).

Shapes: N tokens, Q queries (tokens whose outputs are computed), D width, M hidden width of the MLP.
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

    `gelu` selects the form of GELU: `none` (exact, by erf) and `tanh` (approximation of Google's code), both named as
    in PyTorch, or `quick`, x sigmoid(1.702 x) (OpenAI's CLIP).
    """

    def __init__(self, width: int, hidden: int, dropout: float = 0.0, gelu: str = "none") -> None:
        super().__init__()
        self.gelu, self.dropout = gelu, dropout
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        for linear in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP: (..., D) -> (..., D). Training on a CPU recomputes the GELU in the backward pass."""
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
        """Compute the hidden layer: (..., D) -> (..., M)."""
        x = self.fc1(x)
        return x * torch.sigmoid(1.702 * x) if self.gelu == "quick" else F.gelu(x, approximate=self.gelu)


class GeluContext(FunctionContext):
    """Autograd context of `GeluLinear`: the form of GELU (`gelu` of `Mlp`), and whether this project's kernel computes
    it."""

    gelu: str
    use_kernel: bool


class GeluLinear(torch.autograd.Function):
    """W gelu(h) + b, (..., M) h -> (..., D), which stores only h for the backward pass.

    Recomputing the GELU costs about 2 % of the two products around it. Storing its output would take as much memory as
    h.
    """

    @staticmethod
    def forward(ctx: GeluContext, hidden: Tensor, weight: Tensor, bias: Tensor, gelu: str) -> Tensor:
        """Compute W gelu(h) + b, and save h for the backward pass."""
        ctx.save_for_backward(hidden, weight)
        ctx.gelu, ctx.use_kernel = gelu, kernels.can_apply_gelu(hidden)
        return F.linear(
            kernels.gelu_bf16(hidden, gelu) if ctx.use_kernel else F.gelu(hidden, approximate=gelu), weight, bias
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: GeluContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Recompute the GELU, and compute the gradients of h, W and b from that of the outputs."""
        (grad,), (hidden, weight) = gradients, ctx.saved_tensors
        needs_d_hidden, needs_d_weight, needs_d_bias, _ = ctx.needs_input_grad
        flat_grad = grad.flatten(0, -2)
        d_weight = d_hidden = None
        if ctx.use_kernel and needs_d_weight:
            d_hidden = grad @ weight
            activated = kernels.gelu_bf16_backward_(d_hidden, hidden, ctx.gelu).flatten(0, -2)
            d_weight = (
                kernels.transpose_bf16(flat_grad) @ activated
                if kernels.can_transpose(flat_grad)
                else flat_grad.mT @ activated
            )
        else:
            if needs_d_weight:
                d_weight = (F.gelu(hidden, approximate=ctx.gelu).flatten(0, -2).mT @ flat_grad).mT
            if needs_d_hidden:
                d_hidden = torch.ops.aten.gelu_backward(grad @ weight, hidden, approximate=ctx.gelu)
        return d_hidden, d_weight, flat_grad.sum(0) if needs_d_bias else None, None


class SwiGLU(nn.Module):
    """fc2(norm(silu(a) * b)) with [a | b] = fc1(x) (arXiv:2002.05202), the MLP of DINOv2's and DINOv3's largest models.

    `norm_eps` is the epsilon of the LayerNorm of EVA-02 (arXiv:2303.11331); None omits the norm.
    """

    def __init__(self, width: int, hidden: int, dropout: float = 0.0, norm_eps: float | None = None) -> None:
        super().__init__()
        self.dropout = dropout
        self.fc1, self.fc2 = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)
        self.norm = nn.Identity() if norm_eps is None else nn.LayerNorm(hidden, eps=norm_eps)
        for matrix in (*self.fc1.weight.chunk(2), self.fc2.weight):
            nn.init.xavier_uniform_(matrix)
        for linear in (self.fc1, self.fc2):
            nn.init.normal_(linear.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP: (..., D) -> (..., D)."""
        return self.fc2(F.dropout(self.forward_before_output(x), self.dropout, self.training))

    def forward_before_output(self, x: Tensor) -> Tensor:
        """Compute the gated hidden layer, norm(silu(a) * b): (..., D) -> (..., M)."""
        a, b = self.fc1(x).chunk(2, -1)
        return self.norm(F.silu(a) * b)


def drop_bias(linear: nn.Linear) -> None:
    """Remove the bias of a linear layer, in place."""
    linear.register_parameter("bias", None)


def replace_layer_norms(module: nn.Module) -> None:
    """Replace every LayerNorm in a module, in place, by RMSNorm with the same size and epsilon (arXiv:1910.07467)."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.LayerNorm:
                setattr(parent, name, nn.RMSNorm(list(child.normalized_shape), eps=child.eps))


def draw_drop_path_mask(y: Tensor, keep: float) -> Tensor:
    """Draw the stochastic depth factor of each sample: 1 / keep with probability `keep`, else 0; y (B, ..., D) ->
    (B, 1, ..., 1).

    If the block is compiled, uniform random numbers are compared with `keep`: `bernoulli_` would compile a separate
    graph for each value of `keep`, which differs from block to block.
    """
    shape = (y.shape[0], *[1] * (y.dim() - 1))
    if is_compiling():
        return (torch.rand(shape, device=y.device) < keep).to(y.dtype) / keep
    return y.new_empty(shape).bernoulli_(keep).div_(keep)


class ResidualBranch(nn.Module):
    """Pre-norm residual branch around a submodule (attention or MLP): x + drop_path(scale(dropout(part(norm(x))))).

    `part` is the submodule. `layer_scale` is the initial value of LayerScale (arXiv:2103.17239); None disables it.
    `drop_path` is the probability that a sample's branch is skipped in training (stochastic depth, arXiv:1603.09382);
    branches that are not skipped are divided by 1 - drop_path.
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
        """Add the branch to its input: (B, ..., D) -> (B, ..., D). `context` is passed to the submodule. `queries` are
        the tokens of axis -2 whose outputs are computed."""
        if queries == ALL_QUERIES:
            y = self.part(self.norm(x), *context)
        else:
            y, x = self.part(self.norm(x), *context, queries=queries), x[..., queries, :]
        return x + self.scale_and_drop(F.dropout(y, self.dropout, self.training))

    def scale_and_drop(self, y: Tensor) -> Tensor:
        """Scale the branch's output by LayerScale, and set it to 0 for random samples in training: (B, ..., D) ->
        (B, ..., D)."""
        if self.scale is not None:
            y = y * self.scale
        if self.training and self.drop_path > 0:
            y = y * draw_drop_path_mask(y, 1 - self.drop_path)
        return y


class PostNormResidualBranch(ResidualBranch):
    """Residual branch whose norm follows the submodule: x + drop_path(scale(norm(dropout(part(x))))) (Swin V2,
    arXiv:2111.09883, section 3.2).

    The norm's scale starts at 0, so a newly initialised branch adds nothing. Options are those of `ResidualBranch`.
    """

    def __init__(
        self, module: nn.Module, width: int, dropout: float, drop_path: float, *, layer_scale: float | None, eps: float
    ) -> None:
        super().__init__(module, width, dropout, drop_path, layer_scale=layer_scale, eps=eps)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor, *context: Any, queries: slice = ALL_QUERIES) -> Tensor:
        """Add the branch to its input: (B, ..., D) -> (B, ..., D). `context` and `queries` are as in
        `ResidualBranch`."""
        if queries == ALL_QUERIES:
            y = self.part(x, *context)
        else:
            y, x = self.part(x, *context, queries=queries), x[..., queries, :]
        return x + self.scale_and_drop(self.norm(F.dropout(y, self.dropout, self.training)))


class Block(nn.Module):
    """Residual block of a Transformer: an attention branch, then an MLP branch (Eqs. 2-3).

    Branches are `ResidualBranch`, with `post_norm` `PostNormResidualBranch`; options are theirs. For example:
    `Block(768, Attention(768, 12), Mlp(768, 3072))`.
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
        branch_class = PostNormResidualBranch if post_norm else ResidualBranch
        self.attention, self.mlp = (
            branch_class(module, width, dropout, drop_path, layer_scale=layer_scale, eps=eps)
            for module in (attention, mlp)
        )
        self.after: nn.Module | None = None  # optional module applied after the MLP to all tokens on a grid

    def forward(self, x: Tensor, *context: Any, queries: slice = ALL_QUERIES) -> Tensor:
        """Apply the block: (..., N, D) -> (..., Q, D), the outputs of the `queries`, by default of all N tokens;
        `context` is passed to the attention."""
        x = self.mlp(self.attention(x, *context, queries=queries))
        return x if self.after is None else self.after(x)
