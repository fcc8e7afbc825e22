"""ResNets of Big Transfer (BiT, arXiv:1912.11370), with group norm instead of batch norm and weight standardisation.

The same bottleneck is used in two arrangements:

- `ResNet`, the baseline, is a ResNet-v2 with norms before convolutions.
- `ResNetStem`, the stem of hybrid Vision Transformers (arXiv:2010.11929, section 3.1), has norms after convolutions,
  the stride in the 3x3 convolution and TensorFlow's padding.

Each stage but the first halves the map and rounds up, so any image size works.

Shapes: B batch, C channels, I inputs and O outputs of a layer, H and W image, h and w map, r pixels per position of the
last map; in line attention L tokens of a row or column and d channels of a head's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.nn.grid import resize_position_table


class ResNetNumerics(NamedTuple):
    """Small numerical differences between implementations of BiT.

    - `eps`: the eps of weight standardisation. `eps_placement` is where it is added: to the standard deviation
      (`deviation`), or to the variance under the root (`variance`).
    - `norm_eps`: the eps of group norms.
    - `border`: the value that pads the map before BiT's max-pooling. With zeros, a maximum at the edge is never
      negative.
    """

    eps: float
    eps_placement: str
    norm_eps: float
    border: float = 0.0


#: Numerics by source of the weights. With the numerics of another source, outputs differ slightly.
NUMERICS: dict[str, ResNetNumerics] = {
    # vision_transformer/vit_jax/models_resnet.py, big_vision/models/bit.py
    "google": ResNetNumerics(1e-5, "deviation", 1e-6),
    "bit": ResNetNumerics(1e-10, "variance", 1e-5),  # big_transfer/bit_pytorch/models.py, pads with 0
    # big_vision/models/bit_paper.py: flax pads a max-pooling with -inf
    "big-vision": ResNetNumerics(1e-10, "variance", 1e-5, -math.inf),
    "timm": ResNetNumerics(1e-8, "variance", 1e-5),  # timm 1.0.31: resnetv2_*_bit and the backbones of vit_*_r*
    "transformers": ResNetNumerics(1e-8, "variance", 1e-5),  # transformers 5.23: BitModel, and hybrids built on it
}


def standardize_weight(weight: Tensor, numerics: str) -> Tensor:
    """Normalise each filter to mean 0 and std 1 (arXiv:1903.10520): (O, I, k, k) -> (O, I, k, k). The std is the biased
    std over I, k, k.

    Equivalent loop, for eps added to the std:

        for filter in weight: filter = (filter - filter.mean()) / (filter.std(correction=0) + eps)

    Half precision is computed in float32, where 1e-10 is not zero and squares of small weights do not underflow.
    """
    eps, eps_placement, *_ = NUMERICS[numerics]
    float_weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    variance, mean = torch.var_mean(float_weight, dim=(1, 2, 3), correction=0, keepdim=True)
    std = variance.sqrt() + eps if eps_placement == "deviation" else (variance + eps).sqrt()
    return ((float_weight - mean) / std).to(weight.dtype)


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return the zeros before and after an axis of `size` under TensorFlow's SAME padding, which yields
    ceil(size / stride) outputs.

    If the total is odd, the additional zero is after the axis: a kernel of 7 with stride 2 pads an even size by (2, 3),
    a kernel of 3 by (0, 1). Symmetric padding, (3, 3) and (1, 1), would cover other pixels, so weights would not
    transfer.
    """
    padding = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
    return padding // 2, padding - padding // 2


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad height and width with `value` as TensorFlow's SAME does: (B, C, H, W) -> (B, C, H + rows, W + columns)."""
    (top, bottom), (left, right) = (same_padding(size, kernel, stride) for size in x.shape[-2:])
    return F.pad(x, (left, right, top, bottom), value=value) if top + bottom + left + right else x


def group_norm(channels: int, numerics: str) -> nn.GroupNorm:
    """Build GroupNorm with gcd(32, channels) groups; `numerics`, a key of `NUMERICS`, sets its epsilon."""
    return nn.GroupNorm(math.gcd(32, channels), channels, NUMERICS[numerics].norm_eps)


class StandardizedConv(nn.Module):
    """Square convolution without bias whose filters are standardised in every pass.

    `same` selects TensorFlow's SAME padding instead of (k - 1) / 2. Weights are initialised LeCun normal, truncated at
    two standard deviations, flax's default; only their directions matter after standardisation.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, *, numerics: str = "google", same: bool = False
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.numerics, self.use_same_padding = kernel, stride, numerics, same
        self.weight = nn.Parameter(torch.empty(outputs, inputs, kernel, kernel))
        std = (inputs * kernel**2) ** -0.5 / 0.87962566103423978  # corrects for truncation at 2 std
        nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve a map: (B, I, H, W) -> (B, O, ceil(H / stride), ceil(W / stride))."""
        # with stride 1 and an odd kernel, SAME is symmetric padding, for which conv2d needs no padded copy
        needs_same_padding = self.use_same_padding and self.stride > 1
        x = pad_same(x, self.kernel, self.stride) if needs_same_padding else x
        return F.conv2d(x, self.filters(), None, self.stride, 0 if needs_same_padding else (self.kernel - 1) // 2)

    def filters(self) -> Tensor:
        """Compute the standardised filters (O, I, k, k)."""
        return standardize_weight(self.weight, self.numerics)


class Shortcut(nn.Module):
    """Shortcut of a unit that changes the shape: a 1x1 convolution, and with `norm` (post-activation units) a group
    norm."""

    def __init__(self, inputs: int, outputs: int, stride: int, numerics: str, *, norm: bool) -> None:
        super().__init__()
        self.conv = StandardizedConv(inputs, outputs, 1, stride, numerics=numerics)
        self.norm = group_norm(outputs, numerics) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Project the unit's input to the shape of its output: (B, I, H, W) -> (B, O, ceil(H / stride),
        ceil(W / stride))."""
        return self.norm(self.conv(x))


class PostActivationBottleneck(nn.Module):
    """Bottleneck of the hybrid stem, with norm and ReLU after each convolution; `width` channels inside, 4 `width`
    outside.

    The stride is in conv2, the 3x3 convolution. The scale of norm3 starts at zero, so a newly initialised unit returns
    its shortcut.
    """

    def __init__(self, inputs: int, width: int, stride: int, numerics: str) -> None:
        super().__init__()
        changes_shape = stride > 1 or inputs != 4 * width
        self.shortcut = Shortcut(inputs, 4 * width, stride, numerics, norm=True) if changes_shape else None
        self.conv1, self.norm1 = StandardizedConv(inputs, width, 1, 1, numerics=numerics), group_norm(width, numerics)
        self.conv2 = StandardizedConv(width, width, 3, stride, numerics=numerics, same=True)
        self.norm2 = group_norm(width, numerics)
        self.conv3, self.norm3 = (
            StandardizedConv(width, 4 * width, 1, 1, numerics=numerics),
            group_norm(4 * width, numerics),
        )
        nn.init.zeros_(self.norm3.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the unit: (B, I, H, W) -> (B, 4 width, ceil(H / stride), ceil(W / stride))."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class PreActivationBottleneck(nn.Module):
    """Bottleneck of BiT (ResNet-v2, arXiv:1603.05027), with norm and ReLU before each convolution and no ReLU after the
    sum.

    A shortcut with a convolution starts after the first norm and ReLU, an identity shortcut before. If `axial` is set,
    conv2 is an `AxialAttention`; `axial` are the native lengths of a row and of a column.
    """

    def __init__(
        self, inputs: int, width: int, stride: int, numerics: str, *, axial: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        changes_shape = stride > 1 or inputs != 4 * width
        self.shortcut = Shortcut(inputs, 4 * width, stride, numerics, norm=False) if changes_shape else None
        self.norm1, self.conv1 = group_norm(inputs, numerics), StandardizedConv(inputs, width, 1, 1, numerics=numerics)
        self.norm2 = group_norm(width, numerics)
        self.conv2 = (
            AxialAttention(width, axial, stride, numerics)
            if axial
            else StandardizedConv(width, width, 3, stride, numerics=numerics)
        )
        self.norm3, self.conv3 = (
            group_norm(width, numerics),
            StandardizedConv(width, 4 * width, 1, 1, numerics=numerics),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the unit: (B, I, H, W) -> (B, 4 width, ceil(H / stride), ceil(W / stride))."""
        activated = F.relu(self.norm1(x))
        y = self.conv1(activated)
        y = self.conv2(F.relu(self.norm2(y)))
        y = self.conv3(F.relu(self.norm3(y)))
        return y + (x if self.shortcut is None else self.shortcut(activated))


class LineAttention(nn.Module):
    """Multi-head attention along a row or column with position-sensitive relative positions (Axial-DeepLab,
    arXiv:2003.07853, Eq. 4).

    Equivalent loop, for one head and the query at i:

        logits = [q[i] @ k[j] + q[i] @ rq[j - i] + k[j] @ rk[j - i] for j in range(L)]
        y[i] = sum(p * (v[j] + rv[j - i]) for j, p in enumerate(softmax(logits)))

    Queries and keys have half the width of values. `relative` contains rq, rk and rv for each offset from 1 - `length`
    to `length` - 1; it is shared by the heads and resized for lines of another length. Group norms within the line
    replace the batch norms around the projection and the output, as in Scenic's axial_resnet.py. Logits are neither
    scaled nor normalised. Raises ValueError if the width is not divisible by twice the number of heads.
    """

    def __init__(self, width: int, length: int, numerics: str, heads: int = 8) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width {width} is not divisible by {2 * heads}, twice the number of heads")
        self.heads, head_width = heads, width // heads
        self.split_sizes = (head_width // 2, head_width // 2, head_width)  # channels of q, k, v of a head
        self.qkv = nn.Linear(width, 2 * width, bias=False)
        self.norm_qkv, self.norm_out = group_norm(2 * width, numerics), group_norm(width, numerics)
        self.relative = nn.Parameter(torch.empty(2 * length - 1, 2 * head_width))
        nn.init.normal_(self.qkv.weight, std=width**-0.5)
        nn.init.normal_(self.relative, std=head_width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Attend along the lines: (..., L, C) -> (..., L, C)."""
        q, k, v = self.project_qkv(x)
        rq, rk, rv = self.offsets(x.shape[-2])
        p = compute_line_attention_probabilities(q, k, rq, rk)
        y = p @ v + torch.einsum("...ij,ijd->...id", p, rv)
        return group_norm_per_line(self.norm_out, y.transpose(-3, -2).flatten(-2))

    def compute_weights(self, x: Tensor) -> Tensor:
        """Compute attention probabilities: (..., L, C) -> (..., heads, L, L). Rows are queries and sum to one."""
        q, k, _ = self.project_qkv(x)
        rq, rk, _ = self.offsets(x.shape[-2])
        return compute_line_attention_probabilities(q, k, rq, rk)

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens (..., L, C) to queries and keys (..., heads, L, d / 2) and values (..., heads, L, d)."""
        qkv = group_norm_per_line(self.norm_qkv, self.qkv(x).to(self.relative.dtype))
        heads = torch.unflatten(qkv, -1, (self.heads, -1)).transpose(-3, -2)
        q, k, v = heads.split_with_sizes(self.split_sizes, -1)
        return q, k, v

    def offsets(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gather the relative position vectors of all token pairs: rq and rk, each (L, L, d / 2), and rv, (L, L, d).

        Entry [i, j] is the vector of the offset j - i.
        """
        table, indices = (
            resize_position_table(self.relative, (2 * length - 1,)),
            torch.arange(length, device=self.relative.device),
        )
        rq, rk, rv = table[indices - indices[:, None] + length - 1].split_with_sizes(self.split_sizes, -1)
        return rq, rk, rv


def compute_line_attention_probabilities(q: Tensor, k: Tensor, rq: Tensor, rk: Tensor) -> Tensor:
    """Compute the softmax over keys j of q_i k_j + q_i rq_ij + k_j rk_ij: q and k (..., heads, L, d / 2), rq and rk
    (L, L, d / 2) -> (..., heads, L, L)."""
    logits = q @ k.transpose(-2, -1) + torch.einsum("...id,ijd->...ij", q, rq) + torch.einsum("...jd,ijd->...ij", k, rk)
    return logits.softmax(-1)


def group_norm_per_line(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    """Apply a group norm with separate statistics for each line: (..., L, C) -> (..., L, C)."""
    return norm(x.flatten(0, -3).transpose(1, 2)).transpose(1, 2).reshape(x.shape)


class AxialAttention(nn.Module):
    """AxialResNet's replacement of a 3x3 convolution: attention along rows, then along columns (arXiv:2010.11929,
    appendix D.6).

    `lengths` are the native lengths of a row and of a column. A stride above 1 is average pooling after the attention;
    at an odd edge it averages the remaining values.
    """

    def __init__(self, width: int, lengths: tuple[int, int], stride: int, numerics: str) -> None:
        super().__init__()
        self.stride = stride
        self.row, self.column = (LineAttention(width, length, numerics) for length in lengths)

    def forward(self, x: Tensor) -> Tensor:
        """Attend along rows and columns, then pool: (B, C, h, w) -> (B, C, ceil(h / stride), ceil(w / stride))."""
        x = self.row(x.permute(0, 2, 3, 1))  # (B, h, w, C)
        x = self.column(x.transpose(1, 2)).permute(0, 3, 2, 1)  # (B, w, h, C) -> (B, C, h, w)
        return F.avg_pool2d(x, self.stride, ceil_mode=True) if self.stride > 1 else x


class ResNetRoot(nn.Module):
    """First layers of a ResNet: 7x7 convolution and 3x3 max-pooling, each of stride 2, to a quarter of the image's
    size.

    With `hybrid`, padding is SAME, with -inf for the pooling, and norm and ReLU are between the two layers. Otherwise,
    as in BiT, the convolution pads by 3, and the map is padded by 1 with the border of its `numerics` before pooling:
    zeros, which can be the maximum, or -inf in big_vision.
    """

    def __init__(self, channels: int, width: int, numerics: str, hybrid: bool) -> None:
        super().__init__()
        self.conv = StandardizedConv(channels, width, 7, 2, numerics=numerics, same=hybrid)
        self.norm = group_norm(width, numerics) if hybrid else None
        self.border = NUMERICS[numerics].border

    def forward(self, x: Tensor) -> Tensor:
        """Compute the first map of an image: (B, C, H, W) -> (B, width, ceil(H / 4), ceil(W / 4))."""
        x = self.conv(x)
        if self.norm is not None:
            return F.max_pool2d(pad_same(F.relu(self.norm(x)), 3, 2, -math.inf), 3, 2)
        if self.border:
            return F.max_pool2d(x, 3, 2, 1)  # pads with -inf
        return F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)


class ResNetStage(nn.Module):
    """Residual units of the same width in sequence; the first unit changes the shape."""

    def __init__(self, units: list[nn.Module]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the units: (B, I, H, W) -> (B, 4 width, h, w)."""
        for unit in self.units:
            x = unit(x)
        return x


def build_resnet_stages(
    blocks: tuple[int, ...], width: int, unit: Callable[[int, int, int, int], nn.Module]
) -> nn.ModuleList:
    """Build the stages of a ResNet, stage i with `blocks[i]` units; from stage to stage the width doubles and the map
    halves.

    Each unit is built by unit(inputs, width, stride, scale), where `scale` is the pixels per position of its input.
    """
    stages, inputs = list[nn.Module](), width
    for stage, depth in enumerate(blocks):
        inner, units = width * 2**stage, list[nn.Module]()
        for index in range(depth):
            stride = 2 if stage and not index else 1
            scale = 4 * 2 ** (stage - 1 if stride == 2 else stage)
            units.append(unit(inputs, inner, stride, scale))
            inputs = 4 * inner
        stages.append(ResNetStage(units))
    return nn.ModuleList(stages)


class ResNetStem(nn.Module):
    """ResNet of a hybrid Vision Transformer (arXiv:2010.11929, section 3.1): computes a grid of tokens from an image,
    `reduction` pixels per token along each axis.

    `blocks` are the units of each stage. (3, 4, 9) is the paper's R50 with stage 4 moved into stage 3, at 1/16 of the
    image's size; () is only the root, at 1/4.
    """

    def __init__(self, blocks: tuple[int, ...], width: int = 64, channels: int = 3, numerics: str = "google") -> None:
        super().__init__()
        self.reduction, self.width_out = output_stride_and_width(blocks, width)
        self.root = ResNetRoot(channels, width, numerics, hybrid=True)
        self.stages = build_resnet_stages(
            blocks, width, lambda inputs, inner, stride, _: PostActivationBottleneck(inputs, inner, stride, numerics)
        )

    def first_layer(self) -> nn.Module:
        """Return the first convolution, whose input is the image."""
        return self.root.conv

    def forward(self, images: Tensor) -> Tensor:
        """Compute a grid of tokens, channels last: (B, C, H, W) -> (B, ceil(H / r), ceil(W / r), width_out)."""
        return self.maps(images)[-1]

    def maps(self, images: Tensor) -> list[Tensor]:
        """Compute the map after each stage, or after the root if there are no stages: (B, C, H, W) -> list of
        (B, h, w, width)."""
        return [x.movedim(1, -1) for x in run_resnet_stages(self.root(images), self.stages)]


class ResNet(nn.Module):
    """BiT's ResNet-v2 without its head (arXiv:1912.11370): root, stages of pre-activation units, norm and ReLU.

    If `axial` is set, axial attention replaces each 3x3 convolution of the units; `axial` is the native image size
    (height, width) of its positions.
    """

    def __init__(
        self,
        blocks: tuple[int, ...],
        width: int = 64,
        channels: int = 3,
        numerics: str = "bit",
        *,
        axial: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()

        def build_unit(inputs: int, inner: int, stride: int, scale: int) -> PreActivationBottleneck:
            """Build a unit whose input has `scale` pixels per position."""
            lengths = None if axial is None else (math.ceil(axial[1] / scale), math.ceil(axial[0] / scale))
            return PreActivationBottleneck(inputs, inner, stride, numerics, axial=lengths)

        self.reduction, self.width_out = output_stride_and_width(blocks, width)
        self.root = ResNetRoot(channels, width, numerics, hybrid=False)
        self.stages = build_resnet_stages(blocks, width, build_unit)
        self.norm = group_norm(self.width_out, numerics)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the last map after the final norm and ReLU: (B, C, H, W) -> (B, width_out, ceil(H / r), ceil(W /
        r))."""
        return F.relu(self.norm(self.maps(images)[-1]))

    def maps(self, images: Tensor) -> list[Tensor]:
        """Compute the map after each stage, before the final norm: (B, C, H, W) -> list of (B, width, h, w)."""
        return run_resnet_stages(self.root(images), self.stages)


def run_resnet_stages(x: Tensor, stages: nn.ModuleList) -> list[Tensor]:
    """Apply the stages to the root's map: (B, C, h, w) -> the map after each stage, or [root's map] if there are no
    stages."""
    maps = list(accumulate(stages, lambda y, stage: stage(y), initial=x))
    return maps[1:] or maps


def output_stride_and_width(blocks: tuple[int, ...], width: int) -> tuple[int, int]:
    """Return the pixels per position of the last map along each axis, and its number of channels."""
    if not blocks:
        return 4, width
    return 4 * 2 ** (len(blocks) - 1), 4 * width * 2 ** (len(blocks) - 1)
