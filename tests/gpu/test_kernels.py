"""Attention by each of PyTorch's kernels, and packed images, match float64 on the CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.contracts import randomise
from tests.gpu.support import DEVICE, ON_GPU, check_close, check_tensors_close
from vitreous.models.config import AttentionConfig, MlpConfig, SwinAttentionConfig, SwinConfig, ViTConfig
from vitreous.models.packed import PackedViT
from vitreous.models.zoo import build_model
from vitreous.nn.attention import (
    Attention,
    QKNormAttention,
    Segments,
    attend_segments,
    attend_unscaled,
    dot_product_attention,
)
from vitreous.nn.position import TokenPositions
from vitreous.nn.relative import GridAttention, RelativeAttention
from vitreous.nn.rotary import RotaryAttention

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # PyTorch warns why a kernel is not used
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
DTYPE_TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
#: errors of a kernel that PyTorch does not support for these inputs
NO_KERNEL = ("No available kernel", "No viable backend", "not supported", "no backend", "cuDNN", "execution plan")

#: (batch, heads, queries, keys, channels of a head)
ATTENTION_SHAPES = {
    "ViT-B at 224": (2, 3, 197, 197, 64),
    "odd heads": (2, 3, 65, 65, 20),
    "heads of 7": (2, 2, 50, 50, 7),
    "heads of 80": (1, 4, 257, 257, 80),
    "one query": (3, 2, 1, 197, 32),
    "one token": (5, 2, 1, 1, 32),
    "windows": (50, 2, 49, 49, 32),
}
MASK_KINDS = ("none", "bool", "bias", "bias per head")


def draw_inputs(shape: tuple[int, ...], mask: str, contiguous: bool) -> tuple[list[torch.Tensor], Any]:
    """Queries, keys and values (B, h, N, d) float64 on the CPU, and a mask or bias."""
    batch, heads, queries, keys, channels = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    if contiguous:
        q, k, v = draw(batch, heads, queries, channels), *(draw(batch, heads, keys, channels) for _ in range(2))
    else:  # the memory layout of `split_heads`
        length = max(queries, keys)
        q, k, v = (x.transpose(1, 2) for x in draw(batch, length, 3, heads, channels).unbind(2))
        q, k, v = q[:, :, :queries], k[:, :, :keys], v[:, :, :keys]
    if mask == "bool":
        allowed = torch.rand(batch, 1, queries, keys, generator=generator) < 0.7
        allowed[..., 0] = True
        return [q, k, v], allowed
    if mask == "bias":
        return [q, k, v], draw(1, 1, queries, keys)
    return [q, k, v], draw(1, heads, queries, keys) if mask == "bias per head" else None


def compute_attention(inputs: list[torch.Tensor], bias: Any, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs of `dot_product_attention` on a device, and the gradients of queries, keys, values and of a bias, as float64."""
    leaves = [x.to(dtype).to(device).requires_grad_() for x in inputs]
    if bias is not None:
        bias = bias.to(device) if bias.dtype == torch.bool else bias.to(dtype).to(device).requires_grad_()
    y = dot_product_attention(*leaves, bias)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).sin().view(y.shape).to(dtype).to(device)
    inputs_with_gradient = leaves + ([bias] if bias is not None and bias.requires_grad else [])
    return [
        tensor.detach().cpu().double()
        for tensor in (y, *torch.autograd.grad((y * weights).sum(), inputs_with_gradient))
    ]


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@pytest.mark.parametrize("mask", MASK_KINDS)
@pytest.mark.parametrize("backend", [*BACKENDS, "default"])
def test_attention_matches_float64(backend, mask, contiguous):
    """Outputs and gradients for every shape and precision; kernels unsupported for an input are skipped, but the
    default must support all inputs."""
    failures, computed = [], 0
    for name, shape in ATTENTION_SHAPES.items():
        inputs, bias = draw_inputs(shape, mask, contiguous)
        expected = {}
        for dtype in DTYPE_TOLERANCES:
            rounded = [x.to(dtype).double() for x in inputs]
            own_bias = bias if bias is None or bias.dtype == torch.bool else bias.to(dtype).double()
            expected = compute_attention(rounded, own_bias, "cpu", torch.float64)
            chosen = BACKENDS.get(backend)
            try:
                with sdpa_kernel(chosen) if chosen is not None and ON_GPU else contextlib.nullcontext():
                    results = compute_attention(inputs, bias, DEVICE, dtype)
            except RuntimeError as error:
                if backend in ("default", "math") or not any(text in str(error) for text in NO_KERNEL):
                    failures.append(f"{name}, {dtype}: {type(error).__name__}: {str(error)[:300]}")
                continue
            computed += 1
            for tensor_name, ours, theirs in zip(
                ("output", "dq", "dk", "dv", "dbias"), results, expected, strict=False
            ):
                try:
                    # the gradient of a bias is a sum over the batch in float32
                    check_close(tensor_name, ours, theirs, DTYPE_TOLERANCES[dtype])
                except AssertionError as error:
                    if theirs.norm() > 1e-9:
                        failures.append(f"{name}, {dtype}, {error}")
    assert not failures, f"{backend}, {mask}: {len(failures)} failures\n" + "\n".join(failures)
    if backend in ("math", "default"):
        assert computed == len(ATTENTION_SHAPES) * len(DTYPE_TOLERANCES)


def test_attention_without_gradients_matches_float64():
    """Inference mode, five axes, and keys with more channels than values."""
    for dtype, limit in DTYPE_TOLERANCES.items():
        inputs, _ = draw_inputs((2, 3, 65, 65, 32), "none", True)
        expected = dot_product_attention(*(x.to(dtype).double() for x in inputs))
        five = [x.to(DEVICE, dtype)[:, None].expand(-1, 2, -1, -1, -1) for x in inputs]
        with torch.inference_mode():
            y = dot_product_attention(*five)
            q, k, v = (x.to(DEVICE, dtype) for x in inputs)
            unscaled = attend_unscaled(q * 32**-0.5, k, v[..., :24])
        check_close(f"five axes, {dtype}", y[:, 1], expected, limit)
        check_close(f"unscaled, {dtype}", unscaled, expected[..., :24], 2 * limit)


ATTENTION_MODULES: dict[str, Any] = {
    "plain": (lambda: Attention(48, 4), ()),
    "without bias": (lambda: Attention(48, 4, bias=False), ()),
    "normed": (lambda: QKNormAttention(48, 4), ()),
    "rotary": (lambda: RotaryAttention(48, 4), (TokenPositions((4, 6), 1),)),
    "relative": (lambda: RelativeAttention(48, 4, 25), (TokenPositions((4, 6), 1),)),
    "segments": (lambda: Attention(48, 4), (Segments((10, 8, 7)),)),
    "masked segments": (lambda: Attention(48, 4), (Segments((10, 8, 7), masked=True),)),
}


@pytest.mark.parametrize("name", ATTENTION_MODULES)
def test_attention_module_matches_cpu(name):
    """Outputs, gradients, and outputs of few queries, in float32 and bfloat16."""
    make, context = ATTENTION_MODULES[name]
    torch.manual_seed(0)
    module = randomise(make())
    x = torch.randn(2, 25, 48, generator=torch.Generator().manual_seed(1))
    results = {}
    for device, dtype in (("cpu", torch.float64), (DEVICE, torch.float32), (DEVICE, torch.bfloat16)):
        attention = make().to(device, dtype)
        attention.load_state_dict(module.state_dict())
        leaf = x.to(device, dtype, copy=True).requires_grad_()
        y = attention(leaf, *context)
        weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).sin().view(y.shape).to(device, dtype)
        (y * weights).sum().backward()
        results[dtype] = {"output": y, "dx": leaf.grad, **{n: p.grad for n, p in attention.named_parameters()}}
        if "segments" not in name:
            with torch.no_grad():
                few = attention(leaf, *context, queries=slice(0, 1))
            check_close(f"one query, {name}, {dtype}", few, y[..., :1, :], {torch.bfloat16: 3e-2}.get(dtype, 1e-4))
    expected = {key: value.detach().cpu() for key, value in results[torch.float64].items()}
    for dtype, limit in ((torch.float32, 3e-5), (torch.bfloat16, 5e-2)):
        tensors = {key: value.detach().cpu() for key, value in results[dtype].items()}
        check_tensors_close(f"{name}, {dtype}", tensors, expected, limit)


def test_grid_attention_matches_cpu():
    """Decomposed relative positions, whose queries have more channels than the values."""
    torch.manual_seed(0)
    module = randomise(GridAttention(48, 4, (4, 6))).double()
    x = torch.randn(2, 4, 6, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = module(x)
    for dtype, limit in ((torch.float32, 3e-5), (torch.bfloat16, 5e-2)):
        attention = GridAttention(48, 4, (4, 6)).to(DEVICE, dtype)
        attention.load_state_dict(module.state_dict())
        leaf = x.to(DEVICE, dtype, copy=True).requires_grad_()
        y = attention(leaf)
        y.square().sum().backward()
        check_close(f"grid attention, {dtype}", y, expected, limit)
        assert leaf.grad is not None and leaf.grad.isfinite().all()


def test_attend_segments_matches_single_sequences():
    """Attention over packed sequences, masked or consecutive, equals attention over each sequence."""
    inputs, _ = draw_inputs((1, 3, 40, 40, 32), "none", True)
    lengths = (9, 9, 14, 8)
    alone = torch.cat(
        [dot_product_attention(*sequence) for sequence in zip(*(x.split(lengths, -2) for x in inputs), strict=True)], -2
    )
    for dtype, limit in DTYPE_TOLERANCES.items():
        for masked in (False, True):
            y = attend_segments(*(x.to(DEVICE, dtype) for x in inputs), Segments(lengths, masked))
            check_close(f"masked={masked}, {dtype}", y, alone, 2 * limit)


PACKED_MODEL_OPTIONS = {
    "class token": {},
    "attention pooling, registers": {"class_token": False, "pool": "attention", "registers": 2},
    "factorised positions": {"positions": {"kind": "factorised"}},
}
IMAGE_SIZES = ((32, 32), (16, 64), (40, 8), (8, 8), (24, 56), (32, 32))


@pytest.mark.parametrize("name", PACKED_MODEL_OPTIONS)
def test_packed_images_match_single_images(name):
    """Packed images of several sizes: outputs and gradients equal those of single images, with and without a mask."""
    torch.manual_seed(0)
    config = ViTConfig(image=(32, 32), patch=(8, 8), width=32, depth=2, heads=4, classes=5, mlp=MlpConfig(hidden=64))
    model = randomise(build_model(config.with_options(**PACKED_MODEL_OPTIONS[name]))).eval()
    model.any_size = True
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(3, *size, generator=generator) for size in IMAGE_SIZES]
    expected = torch.cat([model(image[None]) for image in images])
    expected.square().sum().backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model.to(DEVICE)
    for masked in (None, True, False):
        logits = PackedViT(model, row=60, masked=masked)([image.to(DEVICE) for image in images])
        check_close(f"logits of {name}, masked={masked}", logits, expected, 1e-5)
        logits.square().sum().backward()
        packed_gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
        check_tensors_close(f"gradient of {name}, masked={masked}", packed_gradients, gradients, 1e-4)
        model.zero_grad(set_to_none=True)
        with torch.inference_mode(), torch.autocast(DEVICE.split(":")[0], torch.bfloat16):
            rounded = PackedViT(model, row=60, masked=masked)([image.to(DEVICE) for image in images])
        check_close(f"logits of {name}, masked={masked}, bf16", rounded, expected, 5e-2)


MODEL_CONFIGS: dict[str, Any] = {
    "plain": ViTConfig(image=(32, 32), patch=(8, 8), width=32, depth=2, heads=4, classes=5, mlp=MlpConfig(hidden=64)),
    "rotary": ViTConfig(
        image=(32, 32),
        patch=(8, 8),
        width=32,
        depth=2,
        heads=4,
        classes=5,
        mlp=MlpConfig(hidden=64),
        attention=AttentionConfig(kind="rotary"),
    ),
    "windows": ViTConfig(
        image=(32, 32),
        patch=(8, 8),
        width=32,
        depth=2,
        heads=4,
        classes=5,
        mlp=MlpConfig(hidden=64),
        attention=AttentionConfig(window=2, global_blocks=(1,)),
    ),
    "swin": SwinConfig(
        image=(32, 32),
        patch_size=(2, 2),
        classes=5,
        width=8,
        blocks=(2, 2),
        heads=(2, 2),
        attention=SwinAttentionConfig(window=4),
    ),
}


@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_models_match_cpu_for_all_sizes_and_memory_layouts(name):
    """Oblong, larger and single images, in contiguous, channels-last and strided layout, match the CPU."""
    torch.manual_seed(0)
    model = randomise(build_model(MODEL_CONFIGS[name])).eval()
    model.any_size = True
    batches = {"square": (3, 3, 32, 32), "oblong": (2, 3, 32, 64), "larger": (1, 3, 64, 64)}
    with torch.inference_mode():
        images = {key: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for key, shape in batches.items()}
        expected = {key: model(pixels) for key, pixels in images.items()}
        model.to(DEVICE)
        for key, pixels in images.items():
            pixels = pixels.to(DEVICE)
            layouts = {
                "contiguous": pixels,
                "channels last": pixels.contiguous(memory_format=torch.channels_last),
                "strided": torch.stack([pixels, -pixels], -1)[..., 0],
            }
            for layout, batch in layouts.items():
                check_close(f"{name}, {key}, {layout}", model(batch), expected[key], 2e-5)
