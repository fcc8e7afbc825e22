"""Modules of windowed Transformers: attention with a learned relative position bias and patch merging
(Swin, arXiv:2103.14030), and convolutional propagation between windows (ViTDet, arXiv:2203.16527).

Shapes: B batch, D width, h heads, d = D / h, T tokens of a window, Q queries; (m, n) are the window's height and width,
T = m n. `count` is the number of windows along each axis of the grid.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.nn.attention import ALL_QUERIES, Attention, attention_probabilities, dot_product_attention, mask_logits
from vitreous.nn.grid import pad_to_multiple
from vitreous.nn.pyramid import LayerNorm2d

MAX_SAFE_EXPONENT = 30.0  # e to the power of +-this is far from the range limits of float32 and bfloat16


class RelativePositionBias(nn.Module):
    """Relative position bias B of Eq. 4: a learned value for each head and each offset between two tokens of a window,
    drawn from N(0, 0.02^2).

    The table is (2 m - 1, 2 n - 1, h). Equivalent loop, with tokens i and j at (y, x):

        bias[:, i, j] = table[y[i] - y[j] + m - 1, x[i] - x[j] + n - 1]
    """

    def __init__(self, size: tuple[int, int], heads: int) -> None:
        super().__init__()
        self.size = size
        self.table = nn.Parameter(torch.empty(2 * size[0] - 1, 2 * size[1] - 1, heads))
        nn.init.trunc_normal_(self.table, std=0.02)

    def compute_offset_biases(self) -> Tensor:
        """Return the bias of each offset, query minus key, in rows and columns: (2 m - 1, 2 n - 1, h)."""
        return self.table

    def forward(self) -> Tensor:
        """Compute the bias that is added to the logits of a window: (h, T, T)."""
        return gather_offset_table(self.compute_offset_biases(), self.size)


def gather_offset_table(table: Tensor, size: tuple[int, int]) -> Tensor:
    """Gather the entry of each token pair's offset: table (2 m - 1, 2 n - 1, h) -> (h, T, T), [:, i, j] for the offset
    from j to i."""
    row_indices, column_indices = (torch.arange(length, device=table.device) for length in size)
    row_offsets, column_offsets = (
        row_indices[:, None] - row_indices + size[0] - 1,
        column_indices[:, None] - column_indices + size[1] - 1,
    )
    return (
        table[row_offsets[:, None, :, None], column_offsets[None, :, None, :]]
        .flatten(2, 3)
        .flatten(0, 1)
        .permute(2, 0, 1)
    )


class WindowAttention(Attention):
    """Attention over the T tokens of a window, with a relative position bias (Eq. 4). Windows are a batch axis.

    If windows are masked, bias and mask are combined once per grid, (count, h, T, T), and shared by all images of the
    batch, so no mask of shape (B count, T, T) is built.
    """

    def __init__(self, width: int, heads: int, size: tuple[int, int], bias: bool = True) -> None:
        super().__init__(width, heads, bias)
        self.position: RelativePositionBias | ContinuousPositionBias = RelativePositionBias(size, heads)
        for linear in (self.qkv, self.out):
            nn.init.trunc_normal_(linear.weight, std=0.02)

    def forward_before_output(self, x: Tensor, mask: Tensor | None = None, queries: slice = ALL_QUERIES) -> Tensor:
        """Compute the concatenated outputs of the heads: (B, *count, T, D) -> (B, *count, Q, D).

        `mask` (*count, 1, T, T) bool is true where a query (row) may attend to a key; None: no mask.
        """
        q, k, v = self.project_qkv(x)
        q = q[..., queries, :]
        bias = self.position().to(q.dtype)[..., queries, :]
        if mask is None:
            outputs = dot_product_attention(q.flatten(0, -4), k.flatten(0, -4), v.flatten(0, -4), bias[None])
        else:  # the windows of an image become heads, so that all images share the bias
            masked_bias = mask_logits(bias, mask[..., queries, :]).flatten(0, -3)
            outputs = dot_product_attention(q.flatten(1, -3), k.flatten(1, -3), v.flatten(1, -3), masked_bias[None])
        return outputs.reshape(q.shape).transpose(-3, -2).flatten(-2)

    def compute_weights(self, x: Tensor, mask: Tensor | None = None, queries: slice = ALL_QUERIES) -> Tensor:
        """Compute attention probabilities: (..., T, D) -> (..., h, Q, T), for the `queries` or all T tokens. Rows are
        queries and sum to one."""
        q, k, _ = self.project_qkv(x)
        bias = self.position().to(q.dtype)[..., queries, :]
        if mask is not None:
            bias = mask_logits(bias, mask[..., queries, :])
        return attention_probabilities(q[..., queries, :], k, bias)


def attend_short_sequences(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Compute softmax(q k^T + bias) v of short sequences by batched products, without gradients: q, k, v (n, T, d) ->
    (n, T, d).

    `bias` (s, T, T), with s a divisor of n, repeats every s sequences; it is minus infinity where a query may not
    attend to a key. If no logit is large enough for its exponential to overflow or underflow, the row maximum is not
    subtracted.
    """
    logits = torch.bmm(q, k.mT)
    low, high = torch.aminmax(logits)
    largest_logit = torch.maximum(-low, high) + bias.masked_fill(bias.isneginf(), 0).abs().max()
    logits.view(-1, *bias.shape).add_(bias)
    if not largest_logit < MAX_SAFE_EXPONENT:
        return torch.bmm(logits.softmax(-1), v)
    p = logits.exp_()
    return torch.bmm(p, v).div_(p.sum(-1, keepdim=True))


class ContinuousPositionBias(nn.Module):
    """Relative position bias that a small network computes from log-spaced offsets, for windows of any size (Swin V2,
    arXiv:2111.09883, Eqs. 3-4).

    `pretrained_window` is the length p of the window in pre-training; 0 means the length of this window. Along each
    axis:

        o = 8 (i - j) / (p - 1),  s = sign(o) log2(1 + |o|) / log2(8),  bias = 16 sigmoid(fc2(relu(fc1(s))))
    """

    def __init__(self, size: tuple[int, int], heads: int, pretrained_window: int = 0, hidden: int = 512) -> None:
        super().__init__()
        self.size, self.pretrained = size, pretrained_window
        self.fc1, self.fc2 = nn.Linear(2, hidden), nn.Linear(hidden, heads, bias=False)
        for linear in (self.fc1, self.fc2):
            nn.init.trunc_normal_(linear.weight, std=0.02)
        nn.init.zeros_(self.fc1.bias)

    def compute_offset_biases(self) -> Tensor:
        """Compute the bias of each offset, query minus key, in rows and columns: (2 m - 1, 2 n - 1, h)."""
        log_offsets = log_spaced_offsets(self.size, self.pretrained, self.fc1.weight.device).to(self.fc1.weight.dtype)
        return 16 * torch.sigmoid(self.fc2(self.fc1(log_offsets).relu()).float())

    def forward(self) -> Tensor:
        """Compute the bias that is added to the logits of a window: (h, T, T)."""
        return gather_offset_table(self.compute_offset_biases(), self.size)


def log_spaced_offsets(size: tuple[int, int], pretrained_window: int = 0, device: torch.device | None = None) -> Tensor:
    """Compute the log-spaced offsets in rows and columns of a window of `size` (m, n): (2 m - 1, 2 n - 1, 2) float32.

    They are s in the equation of `ContinuousPositionBias`.
    """
    axis_offsets: list[Tensor] = []
    for length in size:
        offsets = (
            torch.arange(1 - length, length, dtype=torch.float32, device=device)
            / max(1, (pretrained_window or length) - 1)
            * 8
        )
        axis_offsets.append(offsets.sign() * (offsets.abs() + 1).log2() / 3)
    return torch.stack(torch.meshgrid(*axis_offsets, indexing="ij"), -1)


class CosineWindowAttention(WindowAttention):
    """Window attention by the cosine of queries and keys, times a learned factor per head of at most 100, with a
    continuous position bias (Swin V2, arXiv:2111.09883, Eq. 2).

    Keys have no bias. `pretrained_window` is passed to `ContinuousPositionBias`.
    """

    def __init__(
        self, width: int, heads: int, size: tuple[int, int], bias: bool = True, *, pretrained_window: int = 0
    ) -> None:
        super().__init__(width, heads, size, False)
        self.position = ContinuousPositionBias(size, heads, pretrained_window)
        self.q_bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.v_bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10)))

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to scaled queries and keys, whose products times 1 / sqrt(d) are the logits, and values:
        (..., N, D) -> three tensors (..., h, N, d)."""
        qkv = self.qkv(x)
        if self.q_bias is not None and self.v_bias is not None:
            qkv = qkv + torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias]).to(qkv.dtype)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).transpose(-4, -2).unbind(-3)  # 3 x (..., h, N, d)
        # sqrt(d) compensates the division in `dot_product_attention`
        factor = self.logit_scale.clamp(max=math.log(100)).exp() * q.shape[-1] ** 0.5
        return (F.normalize(q.float(), dim=-1) * factor).to(v.dtype), F.normalize(k.float(), dim=-1).to(v.dtype), v


class PatchMerging(nn.Module):
    """Merge each 2 x 2 tokens to one token of twice the width: concatenation, LayerNorm, linear projection
    (section 3.1).

    With `post_norm` (Swin V2) the norm follows the projection. The four tokens are concatenated in the order (0, 0),
    (1, 0), (0, 1), (1, 1) of row and column. A grid of odd length is padded with zeros at its end.
    """

    def __init__(self, width: int, eps: float = 1e-5, post_norm: bool = False) -> None:
        super().__init__()
        self.post_norm = post_norm
        self.norm = nn.LayerNorm((2 if post_norm else 4) * width, eps=eps)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        nn.init.trunc_normal_(self.reduction.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Merge the tokens of a grid: (B, h, w, D) -> (B, ceil(h / 2), ceil(w / 2), 2 D)."""
        x = concatenate_2x2_tokens(x)
        return self.norm(self.reduction(x)) if self.post_norm else self.reduction(self.norm(x))


def concatenate_2x2_tokens(x: Tensor) -> Tensor:
    """Concatenate the channels of each 2 x 2 tokens: (B, h, w, D) -> (B, ceil(h / 2), ceil(w / 2), 4 D)."""
    x = pad_to_multiple(x, (2, 2))
    x = torch.unflatten(torch.unflatten(x, 2, (-1, 2)), 1, (-1, 2))  # (B, h / 2, 2, w / 2, 2, D)
    return x.permute(0, 1, 3, 4, 2, 5).flatten(3)


class ConvPropagation(nn.Module):
    """ViTDet's convolutional propagation between windows (arXiv:2203.16527, section 3): a residual bottleneck on the
    grid of tokens.

        x + norm3(conv3(gelu(norm2(conv2(gelu(norm1(conv1(x))))))))

    conv1 is 1 x 1 from D to D / 2 channels, conv2 is 3 x 3, conv3 is 1 x 1 back to D, all without bias. The norms are
    LayerNorms over channels. The scale of the last norm starts at zero, so a newly initialised module is the identity.
    Convolutions are drawn from N(0, 2 / fan_out).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.conv1, self.norm1 = nn.Conv2d(width, half, 1, bias=False), LayerNorm2d(half)
        self.conv2, self.norm2 = nn.Conv2d(half, half, 3, padding=1, bias=False), LayerNorm2d(half)
        self.conv3, self.norm3 = nn.Conv2d(half, width, 1, bias=False), LayerNorm2d(width)
        self.gelu = nn.GELU()
        for conv in (self.conv1, self.conv2, self.conv3):
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.norm3.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the bottleneck: (B, h, w, D) -> (B, h, w, D)."""
        y = x.movedim(-1, 1).to(self.conv1.weight.dtype)
        y = self.gelu(self.norm1(self.conv1(y)))
        y = self.gelu(self.norm2(self.conv2(y)))
        return x + self.norm3(self.conv3(y)).movedim(1, -1)
