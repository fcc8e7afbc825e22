"""Modules for inference: weights are cast, packed and fused once, for forward passes without gradients.

These modules compute the same functions as the trainable modules with faster operators:

    Linear     with `packed`, the weight is stored in the layout of oneDNN's matrix product
    Branch     LayerScale is folded into the weights of the last product; in float32, the same oneDNN call adds the
               residual to the product
    Mlp        with `packed`, the first layer applies the GELU: fused into its product, or in place by this project's
               kernel where that is faster
    Attention  with few queries does not compute all keys and values (`attend_unprojected`), so these weights are not
               packed: in the last block, if the head uses only a few tokens, and in attention pooling
    LayerNorm  computes in float32 for every dtype of products; with this project's kernels, a norm before bfloat16
               products writes bfloat16 in the same pass: `BFloat16OutputNorm`
    StandardizedConv
               filters are standardised once instead of in every pass: `FrozenConv`
    WindowedAttention
               Swin's windows, in bfloat16 on a CPU, are cut after the query-key-value product, and attention is by
               batched products: `FrozenWindowedAttention`

In bfloat16, only matrix products use bfloat16. Norms, positions and the residual stream stay float32, which costs
little time and reduces the error by a third.

Shapes: N tokens, D width, M hidden width of the MLP.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.nn import kernels
from vitreous.nn.attention import ALL_QUERIES, Attention, QKNormAttention, mask_logits
from vitreous.nn.block import Mlp, ResidualBranch, SwiGLU
from vitreous.nn.encoder import Encoder
from vitreous.nn.layout import WindowedAttention
from vitreous.nn.local import LocalAttention
from vitreous.nn.pool import AttentionPool
from vitreous.nn.relative import GridAttention, RelativeAttention
from vitreous.nn.resnet import LineAttention, StandardizedConv
from vitreous.nn.rotary import InnerNormRotaryAttention, QKNormRotaryAttention, RotaryAttention
from vitreous.nn.spacetime import SpaceTimeHeads
from vitreous.nn.windows import ContinuousPositionBias, WindowAttention, attend_short_sequences
from vitreous.system.torch_types import get_bias, named_modules


def freeze_for_inference(module: nn.Module, dtype: torch.dtype = torch.float32, packed: bool = False) -> nn.Module:
    """Return a copy of `module` for inference with products in `dtype`, changed as in the table of the module
    docstring.

    `packed` selects oneDNN's packed products, or standard products if this PyTorch has none for `dtype`. The layer
    named `head`, and therefore the logits, stay float32. Weights whose dtype and layout do not change are shared with
    `module`. The copy accepts images of any floating dtype and is in evaluation mode.
    """
    with torch.no_grad():
        return copy_frozen(module, dtype, packed and can_pack(dtype)).eval().requires_grad_(False)


def copy_frozen(module: nn.Module, dtype: torch.dtype, packed: bool, omitted_child: str = "") -> nn.Module:
    """Copy a module for inference, recursively, without the child named `omitted_child`.

    Modules with a true attribute `frozen_as_is` are copied unchanged, in float32.
    """
    if getattr(module, "frozen_as_is", False):
        return deepcopy(module).float()
    if isinstance(module, LineAttention):
        dtype = torch.float32  # its logits are not scaled: bfloat16 saves little time and loses much accuracy
    if isinstance(module, ContinuousPositionBias):
        dtype, packed = torch.float32, False  # a few hundred offsets, computed once for all windows
    if isinstance(module, nn.Linear):
        return freeze_linear(module, dtype, packed)
    if isinstance(module, StandardizedConv):
        return FrozenConv(module)
    if type(module) is ResidualBranch and type(module.part) in OUTPUT_LAYER_NAMES:
        return FrozenBranch(module, dtype, packed)
    if (
        dtype == torch.bfloat16
        and isinstance(module, WindowedAttention)
        and FrozenWindowedAttention.can_replace(module)
    ):
        return FrozenWindowedAttention(module, dtype, packed)
    fused = not isinstance(module, Mlp) or (packed and (module.gelu != "quick" or uses_native_gelu(dtype)))
    frozen_class = FROZEN_CLASSES.get(type(module), type(module)) if fused else type(module)
    state = dict(vars(module))
    children: dict[str, nn.Module | None] = {}
    for name, child in state["_modules"].items():
        if frozen_class is FrozenMlp and isinstance(module, Mlp) and name == "fc1":
            children[name] = PackedLinear(module.fc1, dtype, gelu=module.gelu)
        elif isinstance(module, AttentionPool) and name == "kv":
            children[name] = FrozenLinear(module.kv, dtype)
        elif name != omitted_child:
            children[name] = (
                None if child is None else copy_frozen(child, torch.float32 if name == "head" else dtype, packed)
            )
    parameters: dict[str, nn.Parameter | None] = {}
    for name, parameter in state["_parameters"].items():
        parameters[name] = None if parameter is None else nn.Parameter(parameter.detach(), requires_grad=False)
    frozen = frozen_class.__new__(frozen_class)
    vars(frozen).update(state, _parameters=parameters, _buffers=dict(state["_buffers"]), _modules=children)
    if packed and isinstance(module, Encoder) and module.num_output_tokens:
        for name, submodule in named_modules(module.blocks[-1]):
            if isinstance(submodule, Attention) and type(submodule) in UNPROJECTED_ATTENTION:
                frozen.get_submodule(f"blocks.{len(module.blocks) - 1}.{name}").qkv = FrozenLinear(submodule.qkv, dtype)
    return frozen


class FrozenMlp(Mlp):
    """`Mlp` whose first layer, a `PackedLinear`, also applies the GELU."""

    def forward_before_output(self, x: Tensor) -> Tensor:
        """Compute the hidden layer: (..., D) -> (..., M)."""
        return self.fc1(x)


class Float32LayerNorm(nn.LayerNorm):
    """LayerNorm that computes in and returns float32."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise tokens: (..., D) -> (..., D) float32."""
        return super().forward(input.float())


class BFloat16OutputNorm(nn.LayerNorm):
    """LayerNorm that computes in float32 and returns bfloat16."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        nn.Module.__init__(self)
        self.normalized_shape, self.eps, self.elementwise_affine = norm.normalized_shape, norm.eps, True
        self.weight, self.bias = (
            nn.Parameter(x.detach().float(), requires_grad=False) for x in (norm.weight, norm.bias)
        )

    @staticmethod
    def can_replace(norm: nn.Module, dtype: torch.dtype, packed: bool) -> bool:
        """Return whether this class can replace the norm before products in `dtype`, which are packed if `packed`."""
        if type(norm) is not nn.LayerNorm or len(norm.normalized_shape) != 1 or norm.normalized_shape[0] % 16:
            return False
        return get_bias(norm) is not None and packed and uses_native_kernels(dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise tokens: (..., D) -> (..., D) bfloat16."""
        return kernels.layer_norm(input.float(), self.weight, self.bias, self.eps)


def uses_native_kernels(dtype: torch.dtype) -> bool:
    """Return whether this project's kernels compute norms, GELU and residual sums between packed products in
    `dtype`."""
    return dtype == torch.bfloat16 and kernels.has_native_kernels()


def uses_native_gelu(dtype: torch.dtype) -> bool:
    """Return whether this project's kernel applies the GELU after a packed product in `dtype`."""
    return uses_native_kernels(dtype) and kernels.is_native_gelu_faster()


#: attention that computes few queries without all keys and values, so that the weights must not be packed
UNPROJECTED_ATTENTION = (Attention, RotaryAttention, InnerNormRotaryAttention)
FROZEN_CLASSES: dict[type[nn.Module], type[nn.Module]] = {Mlp: FrozenMlp, nn.LayerNorm: Float32LayerNorm}


class FrozenConv(StandardizedConv):
    """`StandardizedConv` whose filters are standardised once.

    It stays float32, because rounding errors of a ResNet's many convolutions accumulate.
    """

    def __init__(self, conv: StandardizedConv) -> None:
        nn.Module.__init__(self)
        self.kernel, self.stride, self.numerics, self.use_same_padding = (
            conv.kernel,
            conv.stride,
            conv.numerics,
            conv.use_same_padding,
        )
        self.weight = nn.Parameter(conv.filters().detach().float(), requires_grad=False)

    def filters(self) -> Tensor:
        """Return the standardised filters (O, I, k, k)."""
        return self.weight


class FrozenWindowedAttention(WindowedAttention):
    """Swin's windowed attention in bfloat16 on a CPU.

    The query-key-value product is over the whole grid. A single copy then applies the cyclic shift, cuts the windows
    and lays out the heads for batched products. PyTorch's fused attention takes 1.7 times as long for windows of 7 x 7.

    In comments, ch and cw are the numbers of windows along height and width, T the tokens of a window, h the heads.
    """

    def __init__(self, windows: WindowedAttention, dtype: torch.dtype, packed: bool) -> None:
        attention: Any = windows.part
        super().__init__(nn.Identity(), windows.size, windows.shift, windows.pad)
        # divide the queries by sqrt(d) in the weights
        qkv_scale = torch.ones(3, attention.qkv.in_features, device=attention.qkv.weight.device)
        qkv_scale[0] *= (attention.qkv.in_features // attention.heads) ** -0.5
        self.dtype, self.heads = dtype, attention.heads
        self.qkv, self.out = (
            freeze_linear(attention.qkv, dtype, packed, qkv_scale.flatten()),
            freeze_linear(attention.out, dtype, packed),
        )
        self.position = copy_frozen(attention.position, torch.float32, False)

    @staticmethod
    def can_replace(windows: WindowedAttention) -> bool:
        """Return whether this class can replace a `WindowedAttention`."""
        return type(windows.part) is WindowAttention and windows.part.qkv.weight.device.type == "cpu"

    def forward(self, x: Tensor) -> Tensor:
        """Attend within the windows of a grid: (B, *grid, D) -> (B, *grid, D)."""
        grid, (m, n), h = tuple(x.shape[1:-1]), self.size, self.heads
        qkv = self.qkv(self.shift_and_pad_grid(x.to(self.dtype)))  # (B, ch m, cw n, 3 h d)
        rows, columns = qkv.shape[1] // m, qkv.shape[2] // n
        windowed_qkv = qkv.view(-1, rows, m, columns, n, 3, h, qkv.shape[-1] // (3 * h)).permute(5, 0, 1, 3, 6, 2, 4, 7)
        q, k, v = windowed_qkv.flatten(5, 6).flatten(1, 4)  # 3 x (B ch cw h, T, d)
        bias, mask = self.position().to(self.dtype).contiguous(), self.mask(grid, x.device)
        if mask is not None:
            bias = mask_logits(bias, mask).flatten(0, 2)  # (ch cw h, T, T)
        y = attend_short_sequences(q, k, v, bias).view(-1, rows, columns, h, m, n, v.shape[-1])
        y = y.permute(0, 1, 4, 2, 5, 3, 6).reshape(-1, rows * m, columns * n, x.shape[-1])
        return self.out(self.unshift_and_crop(y, grid))


class FrozenBranch(nn.Module):
    """Residual branch x + scale(part(norm(x))) whose LayerScale is folded into the weights of the last product."""

    def __init__(self, branch: ResidualBranch, dtype: torch.dtype, packed: bool) -> None:
        super().__init__()
        output_name = OUTPUT_LAYER_NAMES[type(branch.part)]
        use_bfloat16_norm = BFloat16OutputNorm.can_replace(branch.norm, dtype, packed)
        self.norm = BFloat16OutputNorm(branch.norm) if use_bfloat16_norm else copy_frozen(branch.norm, dtype, packed)
        module = copy_frozen(branch.part, dtype, packed, omitted_child=output_name)
        assert isinstance(module, Attention | Mlp | SwiGLU)  # types in `OUTPUT_LAYER_NAMES`
        self.part = module
        self.output_layer = freeze_linear(getattr(branch.part, output_name), dtype, packed, branch.scale)

    def forward(self, x: Tensor, *context: Any, queries: slice = ALL_QUERIES) -> Tensor:
        """Add the branch to its input: (..., N, D) -> (..., N, D) float32, or only the `queries` of the N tokens."""
        if queries == ALL_QUERIES:
            return self.output_layer.forward_add_residual(self.part.forward_before_output(self.norm(x), *context), x)
        assert isinstance(self.part, Attention)
        return self.output_layer.forward_add_residual(
            self.part.forward_before_output(self.norm(x), *context, queries=queries), x[..., queries, :]
        )


#: submodules that `FrozenBranch` supports, and the name of their linear layer after `forward_before_output`
OUTPUT_LAYER_NAMES: dict[type[nn.Module], str] = {
    Attention: "out",
    RelativeAttention: "out",
    RotaryAttention: "out",
    QKNormRotaryAttention: "out",
    InnerNormRotaryAttention: "out",
    QKNormAttention: "out",
    LocalAttention: "out",
    SpaceTimeHeads: "out",
    GridAttention: "out",
    Mlp: "fc2",
    SwiGLU: "fc2",
}


def freeze_linear(
    linear: nn.Linear, dtype: torch.dtype, packed: bool, scale: Tensor | None = None
) -> FrozenLinear | PackedLinear:
    """Convert a linear layer for inference in `dtype`; `scale` (out,) multiplies its outputs and is folded into its
    weights."""
    return (PackedLinear if packed else FrozenLinear)(linear, dtype, scale)


class FrozenLinear(nn.Module):
    """Linear layer y = (x W^T + b) scale in `dtype`, by PyTorch's standard product: (..., in) -> (..., out); scale
    (out,)."""

    is_plain_product: ClassVar[bool] = True

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, scale: Tensor | None = None) -> None:
        super().__init__()
        weight, bias = fold_output_scale(linear, dtype, scale)
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), bias

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (..., in) -> (..., out)."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def forward_add_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        """Compute residual + y: x (..., in), residual (..., out) -> (..., out)."""
        y = self(x)
        return y.add_(residual) if y.dtype == residual.dtype else residual + y


class PackedLinear(nn.Module):
    """Linear layer y = gelu((x W^T + b) scale) by oneDNN, with the weight in oneDNN's packed layout: (..., in) ->
    (..., out); scale (out,).

    `gelu` is the form of GELU, named as in PyTorch, or None for no GELU. The operators are not in PyTorch's public
    interface: `can_pack` tests them before they are used.
    """

    def __init__(
        self, linear: nn.Linear, dtype: torch.dtype, scale: Tensor | None = None, gelu: str | None = None
    ) -> None:
        super().__init__()
        weight, self.bias = fold_output_scale(linear, dtype, scale)
        self.dtype = dtype
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.gelu = gelu if uses_native_gelu(dtype) else None
        self.post_op = ("none", "") if gelu in (None, self.gelu) else ("gelu", gelu)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (..., in) -> (..., out)."""
        post_op, gelu_form = self.post_op
        y = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, post_op, [], gelu_form)
        return y if self.gelu is None else kernels.gelu_bf16_(y, self.gelu)

    def forward_add_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        """Compute residual + y: x (..., in), residual (..., out) -> (..., out)."""
        if residual.dtype != self.dtype:
            y = self(x)
            fused = uses_native_kernels(self.dtype) and residual.dtype == torch.float32 and residual.shape == y.shape
            return kernels.add_bf16_to_float32(residual, y) if fused else residual + y
        return torch.ops.mkldnn._linear_pointwise.binary(x.to(self.dtype), residual, self.weight, self.bias, "add")


def fold_output_scale(linear: nn.Linear, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weight (n, m) and bias (n,) of a linear layer in `dtype`; if `scale` (n,) is set, a factor of the layer's
    outputs, both are multiplied by it."""
    weight, layer_bias = linear.weight.detach(), get_bias(linear)
    bias = None if layer_bias is None else layer_bias.detach()
    if scale is not None:
        weight, bias = weight * scale.detach()[:, None], None if bias is None else bias * scale.detach()
    return weight.to(dtype), None if bias is None else bias.to(dtype)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this PyTorch's oneDNN operators exist, accept the arguments used here, and return correct results
    in `dtype`. Cached per process."""
    linear, x, residual = nn.Linear(32, 48), torch.linspace(-2, 2, 5 * 32).view(1, 5, 32), torch.ones(1, 5, 48)
    try:
        with torch.inference_mode():
            outputs = (
                PackedLinear(linear, dtype, gelu="none")(x),
                PackedLinear(linear, dtype).forward_add_residual(x, residual.to(dtype)),
            )
            y = linear(x)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
    expected = F.gelu(y), residual + y
    return all(
        torch.allclose(a.float(), b, atol=1e-5 if dtype == torch.float32 else 0.05)
        for a, b in zip(outputs, expected, strict=True)
    )
