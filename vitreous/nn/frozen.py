"""Parts that only infer: weights cast, packed and fused once, for forward passes that are never differentiated.

N tokens, D width. What changes is how a product is carried out, never what is computed:

    Linear     its weight lies in the layout that the processor's product wants (oneDNN), if `packed`
    Branch     LayerScale is folded into the weights of its last product, which in float32 adds the residual as it
               writes
    Mlp        the GELU is applied by the first product as it writes, if `packed`, or in place by a kernel of our own
    Encoder    where few tokens are read, the last block's keys and values are not made: its weights stay as they are
    LayerNorm  computes in float32, whatever the products compute in; where this project's kernels are compiled, one
               before products of bfloat16 writes bfloat16 in the same pass: `NarrowNorm`
    StandardizedConv
               its filters are standardised once, and not on every pass: `FrozenConv`
    Windows    those of a Swin, in bfloat16 on a CPU, are cut out of queries, keys and values, and attend by batched
               products: `FrozenWindows`

In bfloat16 only products are; norms, positions and the sum that runs through the blocks stay float32, which costs
little and takes a third off the error.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.nn import kernels
from vitreous.nn.attention import ALL, Attention, masked
from vitreous.nn.block import Branch, Mlp, SwiGLU
from vitreous.nn.encoder import Encoder
from vitreous.nn.layout import Windows
from vitreous.nn.local import LocalAttention
from vitreous.nn.relative import GridAttention, RelativeAttention, RotaryAttention
from vitreous.nn.resnet import LineAttention, StandardizedConv
from vitreous.nn.spacetime import SpaceTimeHeads
from vitreous.nn.windows import ContinuousPositionBias, WindowAttention, attend_short
from vitreous.system.torch_types import bias_of, named_modules


def frozen(module: nn.Module, dtype: torch.dtype = torch.float32, packed: bool = False) -> nn.Module:
    """A copy of `module` for inference with its products in `dtype`, its modules changed as the table above says.

    `packed` asks for oneDNN's packed products; where this PyTorch has none for `dtype`, plain ones are taken. A layer
    called `head` stays float32, so that answers are. Weights that keep their type and layout are shared with `module`.
    The copy takes images of any floating type and is in evaluation mode.
    """
    with torch.no_grad():
        return copied(module, dtype, packed and can_pack(dtype)).eval().requires_grad_(False)


def copied(module: nn.Module, dtype: torch.dtype, packed: bool, without: str = "") -> nn.Module:
    """The copy, module by module; a child called `without` is left out. A part that says `frozen_as_is` stays as it is,
    in float32."""
    if getattr(module, "frozen_as_is", False):
        return deepcopy(module).float()
    if isinstance(module, LineAttention):
        dtype = torch.float32  # its logits are not scaled: bfloat16 would cost more than it saves
    if isinstance(module, ContinuousPositionBias):
        dtype, packed = torch.float32, False  # of a few hundred offsets, once for all windows
    if isinstance(module, nn.Linear):
        return product(module, dtype, packed)
    if isinstance(module, StandardizedConv):
        return FrozenConv(module)
    if type(module) is Branch and type(module.part) in LAST:
        return FrozenBranch(module, dtype, packed)
    if dtype == torch.bfloat16 and isinstance(module, Windows) and FrozenWindows.takes(module):
        return FrozenWindows(module, dtype, packed)
    fused = not isinstance(module, Mlp) or (packed and (module.gelu != "quick" or fuses_gelu(dtype)))
    kind = FROZEN.get(type(module), type(module)) if fused else type(module)
    state = dict(vars(module))
    children: dict[str, nn.Module | None] = {}
    for name, child in state["_modules"].items():
        if kind is FrozenMlp and isinstance(module, Mlp) and name == "fc1":
            children[name] = Packed(module.fc1, dtype, gelu=module.gelu)
        elif name != without:
            children[name] = (
                None if child is None else copied(child, torch.float32 if name == "head" else dtype, packed)
            )
    own: dict[str, nn.Parameter | None] = {}
    for name, parameter in state["_parameters"].items():
        own[name] = None if parameter is None else nn.Parameter(parameter.detach(), requires_grad=False)
    twin = kind.__new__(kind)
    vars(twin).update(state, _parameters=own, _buffers=dict(state["_buffers"]), _modules=children)
    if packed and isinstance(module, Encoder) and module.read:
        for name, part in named_modules(module.blocks[-1]):
            if type(part) is Attention:
                twin.get_submodule(f"blocks.{len(module.blocks) - 1}.{name}").qkv = Plain(part.qkv, dtype)
    return twin


class FrozenAttention(Attention):
    """Attention whose layers are `Plain` or `Packed`."""

    def opened(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight (3 D, D) and bias (3 D,); None where the weight is packed."""
        return (self.qkv.weight, self.qkv.bias) if isinstance(self.qkv, Plain) else None


class FrozenMlp(Mlp):
    """An Mlp whose first product applies the GELU."""

    def inner(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., M)."""
        return self.fc1(x)


class FrozenNorm(nn.LayerNorm):
    """A LayerNorm in float32."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., D) -> (..., D) float32."""
        return super().forward(input.float())


class NarrowNorm(nn.LayerNorm):
    """A LayerNorm in float32 that writes bfloat16."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        nn.Module.__init__(self)
        self.normalized_shape, self.eps, self.elementwise_affine = norm.normalized_shape, norm.eps, True
        self.weight, self.bias = (
            nn.Parameter(x.detach().float(), requires_grad=False) for x in (norm.weight, norm.bias)
        )

    @staticmethod
    def takes(norm: nn.Module, dtype: torch.dtype, packed: bool) -> bool:
        """Whether a norm before products in `dtype` can be such."""
        if type(norm) is not nn.LayerNorm or len(norm.normalized_shape) != 1 or norm.normalized_shape[0] % 16:
            return False
        return bias_of(norm) is not None and packed and fuses(dtype)

    def forward(self, input: Tensor) -> Tensor:
        """(..., D) -> (..., D) bfloat16."""
        return kernels.layer_norm(input.float(), self.weight, self.bias, self.eps)


def fuses(dtype: torch.dtype) -> bool:
    """Whether kernels of our own compute what lies between packed products in `dtype`."""
    return dtype == torch.bfloat16 and kernels.can_fuse()


def fuses_gelu(dtype: torch.dtype) -> bool:
    """Whether a kernel of our own applies the GELU after a packed product in `dtype`."""
    return fuses(dtype) and kernels.gelu_pays()


FROZEN: dict[type[nn.Module], type[nn.Module]] = {Attention: FrozenAttention, Mlp: FrozenMlp, nn.LayerNorm: FrozenNorm}


class FrozenConv(StandardizedConv):
    """A `StandardizedConv` whose filters were standardised once. It stays float32: the roundings of a ResNet's many
    convolutions add up."""

    def __init__(self, conv: StandardizedConv) -> None:
        nn.Module.__init__(self)
        self.kernel, self.stride, self.numerics, self.same = conv.kernel, conv.stride, conv.numerics, conv.same
        self.weight = nn.Parameter(conv.filters().detach().float(), requires_grad=False)

    def filters(self) -> Tensor:
        """The filters as they are, (O, I, k, k)."""
        return self.weight


class FrozenWindows(Windows):
    """Windows of a Swin's attention in bfloat16 on a CPU.

    The first product is of the whole grid; its shift and its windows are the one copy that lays out heads for batched
    products. PyTorch's fused attention takes 1.7 times as long for windows of 7 x 7.
    """

    def __init__(self, windows: Windows, dtype: torch.dtype, packed: bool) -> None:
        part: Any = windows.part
        super().__init__(nn.Identity(), windows.size, windows.shift, windows.pad)
        # queries are divided by sqrt(d) here
        scale = torch.ones(3, part.qkv.in_features, device=part.qkv.weight.device)
        scale[0] *= (part.qkv.in_features // part.heads) ** -0.5
        self.dtype, self.heads = dtype, part.heads
        self.qkv, self.out = product(part.qkv, dtype, packed, scale.flatten()), product(part.out, dtype, packed)
        self.position = copied(part.position, torch.float32, False)

    @staticmethod
    def takes(windows: Windows) -> bool:
        """Whether windows are such."""
        return type(windows.part) is WindowAttention and windows.part.qkv.weight.device.type == "cpu"

    def forward(self, x: Tensor) -> Tensor:
        """(B, *grid, D) -> (B, *grid, D)."""
        grid, (m, n), h = tuple(x.shape[1:-1]), self.size, self.heads
        qkv = self.qkv(self.shift_and_fill(x.to(self.dtype)))  # (B, ch m, cw n, 3 h d)
        rows, columns = qkv.shape[1] // m, qkv.shape[2] // n
        parts = qkv.view(-1, rows, m, columns, n, 3, h, qkv.shape[-1] // (3 * h)).permute(5, 0, 1, 3, 6, 2, 4, 7)
        q, k, v = parts.flatten(5, 6).flatten(1, 4)  # 3 x (B ch cw h, T, d)
        bias, mask = self.position().to(self.dtype).contiguous(), self.mask(grid, x.device)
        if mask is not None:
            bias = masked(bias, mask).flatten(0, 2)  # (ch cw h, T, T)
        y = attend_short(q, k, v, bias).view(-1, rows, columns, h, m, n, v.shape[-1])
        y = y.permute(0, 1, 4, 2, 5, 3, 6).reshape(-1, rows * m, columns * n, x.shape[-1])
        return self.out(self.shift_back(y, grid))


class FrozenBranch(nn.Module):
    """x + scale(part(norm(x))) with the scale in the last product's weights."""

    def __init__(self, branch: Branch, dtype: torch.dtype, packed: bool) -> None:
        super().__init__()
        last = LAST[type(branch.part)]
        narrow = NarrowNorm.takes(branch.norm, dtype, packed)
        self.norm = NarrowNorm(branch.norm) if narrow else copied(branch.norm, dtype, packed)
        part = copied(branch.part, dtype, packed, without=last)
        assert isinstance(part, Attention | Mlp | SwiGLU)  # those of `LAST`
        self.part = part
        self.last = product(getattr(branch.part, last), dtype, packed, branch.scale)

    def forward(self, x: Tensor, *context: Any, queries: slice = ALL) -> Tensor:
        """(..., N, D) -> (..., N, D) float32, or the `queries` alone."""
        if queries == ALL:
            return self.last.onto(self.part.inner(self.norm(x), *context), x)
        assert isinstance(self.part, Attention)
        return self.last.onto(self.part.inner(self.norm(x), *context, queries=queries), x[..., queries, :])


#: the parts that `FrozenBranch` knows, and the name of the linear layer that comes after `inner`
LAST: dict[type[nn.Module], str] = {
    Attention: "out",
    RelativeAttention: "out",
    RotaryAttention: "out",
    LocalAttention: "out",
    SpaceTimeHeads: "out",
    GridAttention: "out",
    Mlp: "fc2",
    SwiGLU: "fc2",
}


def product(linear: nn.Linear, dtype: torch.dtype, packed: bool, scale: Tensor | None = None) -> Plain | Packed:
    """A linear layer for inference, its outputs multiplied by `scale` (out,) if there is one."""
    return (Packed if packed else Plain)(linear, dtype, scale)


class Plain(nn.Module):
    """y = (x W^T + b) scale in `dtype`, by PyTorch's own product: (..., n) -> (..., m), scale (m,)."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, scale: Tensor | None = None) -> None:
        super().__init__()
        weight, bias = scaled(linear, dtype, scale)
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """(..., in), (..., out) -> (..., out): residual + y."""
        y = self(x)
        return y.add_(residual) if y.dtype == residual.dtype else residual + y


class Packed(nn.Module):
    """y = gelu((x W^T + b) scale), (..., n) -> (..., m), scale (m,), by oneDNN with the weight in its own layout;
    `gelu` is torch's name of a form, or None.

    The operators are PyTorch's own but not of its public interface: `can_pack` tries them before anything relies on
    them.
    """

    def __init__(
        self, linear: nn.Linear, dtype: torch.dtype, scale: Tensor | None = None, gelu: str | None = None
    ) -> None:
        super().__init__()
        weight, self.bias = scaled(linear, dtype, scale)
        self.dtype = dtype
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.gelu = gelu if fuses_gelu(dtype) else None
        self.after = ("none", "") if gelu in (None, self.gelu) else ("gelu", gelu)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        after, form = self.after
        y = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, after, [], form)
        return y if self.gelu is None else kernels.gelu_(y, self.gelu)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """(..., in), (..., out) -> (..., out): residual + y."""
        if residual.dtype != self.dtype:
            y = self(x)
            fused = fuses(self.dtype) and residual.dtype == torch.float32 and residual.shape == y.shape
            return kernels.add(residual, y) if fused else residual + y
        return torch.ops.mkldnn._linear_pointwise.binary(x.to(self.dtype), residual, self.weight, self.bias, "add")


def scaled(linear: nn.Linear, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight (n, m) and bias (n,) of a linear layer in `dtype`, its outputs multiplied by `scale` (n,)."""
    weight, own = linear.weight.detach(), bias_of(linear)
    bias = None if own is None else own.detach()
    if scale is not None:
        weight, bias = weight * scale.detach()[:, None], None if bias is None else bias * scale.detach()
    return weight.to(dtype), None if bias is None else bias.to(dtype)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this PyTorch has oneDNN's packed products, by the names and with the arguments used here, and they are
    right."""
    linear, x, residual = nn.Linear(32, 48), torch.linspace(-2, 2, 5 * 32).view(1, 5, 32), torch.ones(1, 5, 48)
    try:
        with torch.inference_mode():
            outputs = Packed(linear, dtype, gelu="none")(x), Packed(linear, dtype).onto(x, residual.to(dtype))
            y = linear(x)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
    wanted = F.gelu(y), residual + y
    return all(
        torch.allclose(a.float(), b, atol=1e-5 if dtype == torch.float32 else 0.05)
        for a, b in zip(outputs, wanted, strict=True)
    )
