"""The residual block and what it is made of (arXiv:2010.11929, Eqs. 2-3).

N tokens, D width, M hidden width of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.nn.attention import ALL


class Mlp(nn.Module):
    """Two layers with a GELU between them, of the form `gelu`: torch's names `none` (erf) and `tanh` (Google's code),
    or `quick`, x sigmoid(1.702 x) (OpenAI's CLIP)."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0, gelu: str = "none") -> None:
        super().__init__()
        self.gelu, self.dropout = gelu, dropout
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        for linear in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.fc2(F.dropout(self.inner(x), self.dropout, self.training))

    def inner(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., M): the hidden layer."""
        x = self.fc1(x)
        return x * torch.sigmoid(1.702 * x) if self.gelu == "quick" else F.gelu(x, approximate=self.gelu)


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
        return self.fc2(F.dropout(self.inner(x), self.dropout, self.training))

    def inner(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., M): the hidden layer."""
        a, b = self.fc1(x).chunk(2, -1)
        return F.silu(a) * b


class Branch(nn.Module):
    """x + drop_path(scale(dropout(part(norm(x))))): the pre-norm residual branch that every block is made of.

    `layer_scale` is the initial value of LayerScale (arXiv:2103.17239), None for no such parameter. `drop_path` is the
    probability that a sample's branch is skipped in training (stochastic depth, arXiv:1603.09382); the kept ones are
    divided by 1 - drop_path.
    """

    def __init__(
        self,
        part: nn.Module,
        width: int,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.dropout, self.drop_path = dropout, drop_path
        self.norm = nn.LayerNorm(width, eps=eps)
        self.part = part
        self.scale = None if layer_scale is None else nn.Parameter(torch.full((width,), layer_scale))

    def forward(self, x: Tensor, *context: Any, queries: slice = ALL) -> Tensor:
        """(B, ..., D) -> (B, ..., D); `context` goes to the part, and so do `queries`, the tokens of axis -2 to come
        out."""
        if queries == ALL:
            y = self.part(self.norm(x), *context)
        else:
            y, x = self.part(self.norm(x), *context, queries=queries), x[..., queries, :]
        y = F.dropout(y, self.dropout, self.training)
        if self.scale is not None:
            y = y * self.scale
        if self.training and self.drop_path > 0:
            keep = 1 - self.drop_path
            y = y * y.new_empty(y.shape[0], *[1] * (y.dim() - 1)).bernoulli_(keep).div_(keep)
        return x + y


class Block(nn.Module):
    """Pre-norm residual block: attention, then MLP (Eqs. 2-3), both of `width`. Options are those of `Branch`.

    `Block(768, Attention(768, 12), Mlp(768, 3072))`
    """

    def __init__(
        self,
        width: int,
        attention: nn.Module,
        mlp: nn.Module,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        residual = (width, dropout, drop_path, layer_scale, eps)
        self.attention, self.mlp = Branch(attention, *residual), Branch(mlp, *residual)

    def forward(self, x: Tensor, *context: Any, queries: slice = ALL) -> Tensor:
        """(..., N, D) -> (..., Q, D): the `queries`, or all N; `context` goes to the attention."""
        return self.mlp(self.attention(x, *context, queries=queries))
