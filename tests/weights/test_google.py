"""Google's `.npz` files compared with a reference forward pass in numpy, and with timm's loader.

The reference follows the papers' code (vision_transformer/vit_jax, big_vision), for one image at a time, in float64.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.weights.peers import (
    compute_difference,
    make_images,
    make_timm_bit,
    make_timm_hybrid,
    make_timm_vit,
    randomise,
)
from vitreous.models.config import StemConfig
from vitreous.weights.adopt import open_weights
from vitreous.weights.formats.google import unstack_scanned_blocks

WIDTH, HEADS, HIDDEN, DEPTH, CLASSES, PATCH = 24, 3, 40, 3, 5, 4
BLOCK_PREFIX = "Transformer/encoderblock_{}/"


def make_golden_arrays(classes=CLASSES, pre_logits=None, token=True, pool=False, stem=None, seed=0):
    """Return arrays of a small ViT under their oldest names; `stem` lists the units of each ResNet stage."""
    rng = np.random.default_rng(seed)
    arrays = {}

    def add_array(name, *shape, mean=0.0, scale=None):
        fan_in = np.prod(shape[:-1]) if len(shape) > 1 else 25
        arrays[name] = (mean + rng.normal(size=shape) * (scale or fan_in**-0.5)).astype(np.float32)

    def add_dense(name, *shape):
        add_array(f"{name}/kernel", *shape)
        add_array(f"{name}/bias", *shape[1:])

    def add_norm(name, width):
        add_array(f"{name}/scale", width, mean=1.0)
        add_array(f"{name}/bias", width)

    def add_attention(name):
        for projection in ("query", "key", "value"):
            add_array(f"{name}/{projection}/kernel", WIDTH, HEADS, WIDTH // HEADS, scale=WIDTH**-0.5)
            add_array(f"{name}/{projection}/bias", HEADS, WIDTH // HEADS, scale=0.2)
        add_array(f"{name}/out/kernel", HEADS, WIDTH // HEADS, WIDTH)
        add_array(f"{name}/out/bias", WIDTH)

    def add_mlp(name):
        add_dense(f"{name}/Dense_0", WIDTH, HIDDEN)
        add_dense(f"{name}/Dense_1", HIDDEN, WIDTH)

    channels, patch = 3, PATCH
    if stem is not None:
        channels, patch = 32, 2 if not stem else 1
        add_array("conv_root/kernel", 7, 7, 3, 32)
        add_norm("gn_root", 32)
        for stage, units in enumerate(stem, 1):
            inner = 32 * 2 ** (stage - 1)
            for unit in range(1, units + 1):
                name = f"block{stage}/unit{unit}/"
                for number, shape in enumerate(
                    ((1, 1, channels, inner), (3, 3, inner, inner), (1, 1, inner, 4 * inner)), 1
                ):
                    add_array(f"{name}conv{number}/kernel", *shape)
                    add_norm(f"{name}gn{number}", shape[3])
                if unit == 1:
                    add_array(f"{name}conv_proj/kernel", 1, 1, channels, 4 * inner)
                    add_norm(f"{name}gn_proj", 4 * inner)
                channels = 4 * inner
    add_dense("embedding", patch, patch, channels, WIDTH)
    arrays["embedding/bias"] = arrays["embedding/bias"].ravel()[:WIDTH].copy()
    if token:
        add_array("cls", 1, 1, WIDTH, scale=0.5)
    add_array("Transformer/posembed_input/pos_embedding", 1, 16 + token, WIDTH, scale=0.5)
    for index in range(DEPTH):
        block = BLOCK_PREFIX.format(index)
        add_norm(f"{block}LayerNorm_0", WIDTH)
        add_attention(f"{block}MultiHeadDotProductAttention_1")
        add_norm(f"{block}LayerNorm_2", WIDTH)
        add_mlp(f"{block}MlpBlock_3")
    add_norm("Transformer/encoder_norm", WIDTH)
    if pool:
        add_array("MAPHead_0/probe", 1, 1, WIDTH, scale=0.5)
        add_attention("MAPHead_0/MultiHeadDotProductAttention_0")
        add_norm("MAPHead_0/LayerNorm_0", WIDTH)
        add_mlp("MAPHead_0/MlpBlock_0")
    if pre_logits:
        add_dense("pre_logits", WIDTH, pre_logits)
    if classes:
        add_dense("head", pre_logits or WIDTH, classes)
    return arrays


def layer_norm(p, name, x):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6) * p[f"{name}/scale"] + p[f"{name}/bias"]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def dense(p, name, x):
    return x @ p[f"{name}/kernel"] + p[f"{name}/bias"]


def mlp(p, name, x):
    return dense(p, f"{name}/Dense_1", gelu(dense(p, f"{name}/Dense_0", x)))


def attention(p, name, queries, x):
    """Compute attention head by head: queries (M, D) and tokens (N, D) -> (M, D)."""
    out = p[f"{name}/out/bias"].copy()
    for head in range(HEADS):
        q = queries @ p[f"{name}/query/kernel"][:, head] + p[f"{name}/query/bias"][head]
        k = x @ p[f"{name}/key/kernel"][:, head] + p[f"{name}/key/bias"][head]
        v = x @ p[f"{name}/value/kernel"][:, head] + p[f"{name}/value/bias"][head]
        logits = q / np.sqrt(WIDTH // HEADS) @ k.T
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = out + weights @ v @ p[f"{name}/out/kernel"][head]
    return out


def extract_windows(x, size, stride, fill):
    """Return all windows of (H, W, C) with TensorFlow's SAME padding as (h, w, size, size, C)."""
    pads = []
    for length in x.shape[:2]:
        total = max((-(-length // stride) - 1) * stride + size - length, 0)
        pads.append((total // 2, total - total // 2))
    x = np.pad(x, (*pads, (0, 0)), constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (0, 1))[::stride, ::stride]
    return windows.transpose(0, 1, 3, 4, 2)


def convolution(p, name, x, stride=1):
    """Convolve with standardised filters: mean 0, std 1, with 1e-5 added to the std."""
    kernel = p[f"{name}/kernel"]
    mean, deviation = kernel.mean((0, 1, 2)), kernel.std((0, 1, 2))
    return np.tensordot(extract_windows(x, kernel.shape[0], stride, 0.0), (kernel - mean) / (deviation + 1e-5), 3)


def group_norm(p, name, x):
    groups = x.reshape(*x.shape[:2], 32, -1)
    mean, variance = groups.mean((0, 1, 3), keepdims=True), groups.var((0, 1, 3), keepdims=True)
    return ((groups - mean) / np.sqrt(variance + 1e-6)).reshape(x.shape) * p[f"{name}/scale"].ravel() + p[
        f"{name}/bias"
    ].ravel()


def relu(x):
    return np.maximum(x, 0)


def resnet(p, x):
    """Apply the hybrid's ResNet: (H, W, 3) -> (h, w, C)."""
    x = relu(group_norm(p, "gn_root", convolution(p, "conv_root", x, 2)))
    x = extract_windows(x, 3, 2, -np.inf).max((2, 3))
    stage = 1
    while f"block{stage}/unit1/conv1/kernel" in p:
        unit = 1
        while f"block{stage}/unit{unit}/conv1/kernel" in p:
            name, stride = f"block{stage}/unit{unit}/", 2 if stage > 1 and unit == 1 else 1
            y = relu(group_norm(p, f"{name}gn1", convolution(p, f"{name}conv1", x)))
            y = relu(group_norm(p, f"{name}gn2", convolution(p, f"{name}conv2", y, stride)))
            y = group_norm(p, f"{name}gn3", convolution(p, f"{name}conv3", y))
            if f"{name}conv_proj/kernel" in p:
                x = group_norm(p, f"{name}gn_proj", convolution(p, f"{name}conv_proj", x, stride))
            x = relu(x + y)
            unit += 1
        stage += 1
    return x


def forward(p, image):
    """Map an image (C, H, W) to tokens (T, D) after the last norm, and logits or the head's input features."""
    p = {name: array.astype(np.float64) for name, array in p.items()}
    x = image.transpose(1, 2, 0).astype(np.float64)
    if "conv_root/kernel" in p:
        x = resnet(p, x)
    kernel = p["embedding/kernel"]
    side = kernel.shape[0]
    corners = [(i, j) for i in range(0, x.shape[0], side) for j in range(0, x.shape[1], side)]
    x = np.array([np.tensordot(x[i : i + side, j : j + side], kernel, 3) + p["embedding/bias"] for i, j in corners])
    if "cls" in p:
        x = np.concatenate([p["cls"][0], x])
    x = x + p["Transformer/posembed_input/pos_embedding"][0]
    for index in range(DEPTH):
        block = BLOCK_PREFIX.format(index)
        y = layer_norm(p, f"{block}LayerNorm_0", x)
        x = x + attention(p, f"{block}MultiHeadDotProductAttention_1", y, y)
        x = x + mlp(p, f"{block}MlpBlock_3", layer_norm(p, f"{block}LayerNorm_2", x))
    x = layer_norm(p, "Transformer/encoder_norm", x)
    if "MAPHead_0/probe" in p:
        y = attention(p, "MAPHead_0/MultiHeadDotProductAttention_0", p["MAPHead_0/probe"][0], x)
        pooled = (y + mlp(p, "MAPHead_0/MlpBlock_0", layer_norm(p, "MAPHead_0/LayerNorm_0", y)))[0]
    else:
        pooled = x[0] if "cls" in p else x.mean(0)
    if "pre_logits/kernel" in p:
        pooled = np.tanh(dense(p, "pre_logits", pooled))
    return x, dense(p, "head", pooled) if "head/kernel" in p else pooled


def to_oldest_names(p):
    return p


def to_linen_names(p):
    """Rename arrays to the names that flax.linen gives the modules."""
    names = (
        ("MultiHeadDotProductAttention_1", "MultiHeadDotProductAttention_0"),
        ("LayerNorm_2", "LayerNorm_1"),
        ("MlpBlock_3", "MlpBlock_0"),
    )
    for old, new in names:
        p = {name.replace(old, new): array for name, array in p.items()}
    return p


def big_vision(p):
    """Rename arrays to big_vision's layout.

    Names are those of linen under `params/`; the position of the class token is added to the token.
    """
    p = to_linen_names(p)
    positions = p.pop("Transformer/posembed_input/pos_embedding")
    if "cls" in p:
        p["cls"], positions = p["cls"] + positions[:, :1], positions[:, 1:]
    return {f"params/{name}": array for name, array in (p | {"pos_embedding": positions}).items()}


def to_scanned_blocks(p):
    """Return big_vision's layout with all blocks stacked in one array."""
    p = big_vision(p)
    stacked = {name: array for name, array in p.items() if "encoderblock_" not in name}
    for name in [name for name in p if "encoderblock_0/" in name]:
        blocks = [p[name.replace("encoderblock_0", f"encoderblock_{index}")] for index in range(DEPTH)]
        stacked[name.replace("encoderblock_0", "encoderblock")] = np.stack(blocks)
    return stacked


def to_image_tower(p):
    """Return the image tower of an image-text model."""
    text = {
        "params/txt/head/kernel": np.ones((3, 3), np.float32),
        "params/t": np.ones(1, np.float32),
        "params/b": np.ones(1, np.float32),
    }
    return {name.replace("params/", "params/img/"): array for name, array in big_vision(p).items()} | text


def to_wide_norms(p):
    """Reshape group norms to (1, 1, 1, C)."""
    return {
        name: array[None, None, None] if re.search(r"gn(\d|_root|_proj)/", name) else array for name, array in p.items()
    }


def add_optimizer_prefix(p):
    return {f"opt/target/{name}": array for name, array in p.items()}


LAYOUTS = [to_oldest_names, to_linen_names, big_vision, to_scanned_blocks, to_image_tower, add_optimizer_prefix]
MODELS = {
    "pre_logits": {"pre_logits": 12},
    "AugReg": {},
    "no head": {"classes": 0},
    "mean": {"token": False},
    "attention": {"token": False, "pool": True},
}
HYBRIDS = {"root": (), "one stage": (1,), "two stages": (1, 2)}
#: image size that gives 16 tokens
IMAGE_SIDES = {None: 16, (): 32, (1,): 16, (1, 2): 32}


def write_npz(path, arrays):
    with open(path, "wb") as file:
        np.savez(file, **arrays)
    return path


def compare_outputs(weights, p, side, limit=1e-4):
    model, batch = weights.build_bundle().model, make_images((side, side))
    with torch.inference_mode():
        features, logits = model.features(batch), model(batch)
    for number, image in enumerate(batch.numpy()):
        expected = forward(p, image)
        assert compute_difference(features[number].double(), torch.from_numpy(expected[0])) <= limit
        assert compute_difference(logits[number].double(), torch.from_numpy(expected[1])) <= limit


def test_the_reference_forward_pass_matches_values_by_hand():
    tanh = [-0.00363739, -0.15880801, -0.15428599, 0.34571401, 0.84119199, 1.95459769, 2.99636261]
    assert np.allclose(gelu(np.array([-3, -1, -0.5, 0.5, 1, 2, 3])), tanh, atol=1e-8)
    filters = {"conv/kernel": np.arange(1.0, 9).reshape(2, 2, 2, 1)}
    standard = [convolution(filters, "conv", image.reshape(2, 2, 2), 2).item() for image in np.eye(8)]
    positive = [0.21821694, 0.65465081, 1.09108469, 1.52751857]
    assert np.allclose(standard, [-value for value in reversed(positive)] + positive, atol=1e-8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_name_layout_gives_the_same_model(model, layout, tmp_path):
    p = make_golden_arrays(**MODELS[model])
    weights = open_weights(write_npz(tmp_path / "vit.npz", layout(p)))
    assert (weights.config.heads, weights.config.mlp.gelu, weights.config.positions.resize) == (
        HEADS,
        "tanh",
        "zoom-scipy",
    )
    assert weights.config.head.representation == MODELS[model].get("pre_logits")
    compare_outputs(weights, p, IMAGE_SIDES[None], 1e-5)


@pytest.mark.parametrize("norms", [to_oldest_names, to_wide_norms])
@pytest.mark.parametrize("stem", HYBRIDS)
def test_hybrids_match_the_reference_forward_pass(stem, norms, tmp_path):
    p = make_golden_arrays(stem=HYBRIDS[stem])
    weights = open_weights(write_npz(tmp_path / "hybrid.npz", norms(p)))
    assert weights.config.stem == StemConfig(HYBRIDS[stem], 32, "google")
    compare_outputs(weights, p, IMAGE_SIDES[HYBRIDS[stem]])


def test_odd_image_sizes_are_padded_like_tensorflow(tmp_path):
    p = make_golden_arrays(stem=(1,))
    side = 28  # the map of 14 is reduced to 7, with other padding than from 16
    p["Transformer/posembed_input/pos_embedding"] = np.tile(p["Transformer/posembed_input/pos_embedding"], (1, 3, 1))[
        :, :50
    ]
    compare_outputs(open_weights(write_npz(tmp_path / "hybrid.npz", p)), p, side)


def test_two_byte_void_arrays_are_bfloat16(tmp_path):
    p = make_golden_arrays()
    halves = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in p.items()}
    weights = open_weights(write_npz(tmp_path / "half.npz", {name: array.view("V2") for name, array in halves.items()}))
    rounded = {name: (array.astype(np.uint32) << 16).view(np.float32) for name, array in halves.items()}
    assert any((rounded[name] != p[name]).any() for name in p)
    assert all(tensor.dtype == torch.float32 for tensor in weights.read_state().values())
    compare_outputs(weights, rounded, IMAGE_SIDES[None], 1e-5)


def test_weight_standardisation_uses_the_published_epsilon(tmp_path):
    """Filters with small values make the variants of weight standardisation distinguishable."""
    p = make_golden_arrays(stem=(1,))
    p = {name: array * 1e-4 if "conv" in name else array for name, array in p.items()}
    weights = open_weights(write_npz(tmp_path / "hybrid.npz", p))
    compare_outputs(weights, p, 16)
    timm_numerics = replace(
        weights, config=weights.config.with_options(stem=replace(weights.config.stem, numerics="timm"))
    )
    with torch.inference_mode():
        batch = make_images((16, 16))
        assert compute_difference(timm_numerics.build_bundle().model(batch), weights.build_bundle().model(batch)) > 1e-3


def test_oversized_block_stacks_are_not_unstacked():
    assert unstack_scanned_blocks("Transformer/encoderblock/LayerNorm_0/scale", (10**12, 1)) == [
        ("Transformer/encoderblock/LayerNorm_0/scale", (10**12, 1))
    ]
    assert unstack_scanned_blocks("Transformer/encoderblock/LayerNorm_0/scale", ()) == [
        ("Transformer/encoderblock/LayerNorm_0/scale", ())
    ]


UNSUPPORTED_COMBINATION = ("attention", to_oldest_names)  # the oldest names predate attention pooling


def compare_with_timm(model, path, settings=None, limit=1e-5, side=16):
    randomise(model, 1).load_pretrained(str(path))
    weights = open_weights(path, settings)
    batch = make_images((side, side))
    with torch.inference_mode():
        assert compute_difference(weights.build_bundle().model(batch), model(batch)) <= limit


@pytest.mark.parametrize(
    "pooling,layout",
    [
        (pooling, layout)
        for pooling in ("AugReg", "mean", "attention")
        for layout in (to_oldest_names, big_vision, to_scanned_blocks)
        if (pooling, layout) != UNSUPPORTED_COMBINATION
    ],
)
def test_timm_loads_the_same_vit(pooling, layout, tmp_path):
    pytest.importorskip("timm")
    options = {"AugReg": {}, "mean": {"class_token": False, "global_pool": "avg", "fc_norm": False}}
    options["attention"] = {"class_token": False, "global_pool": "map"}
    shape = {"img_size": 16, "patch_size": PATCH, "embed_dim": WIDTH, "num_heads": HEADS, "mlp_ratio": HIDDEN / WIDTH}
    embed_options = {"no_embed_class": True} if layout is not to_oldest_names and pooling == "AugReg" else {}
    peer = make_timm_vit(**shape, num_classes=CLASSES, act_layer="gelu_tanh", **options[pooling], **embed_options)
    compare_with_timm(peer.model, write_npz(tmp_path / "vit.npz", layout(make_golden_arrays(**MODELS[pooling]))))


@pytest.mark.parametrize("stem", HYBRIDS)
def test_timm_loads_the_same_hybrid(stem, tmp_path):
    pytest.importorskip("timm")
    blocks, side = HYBRIDS[stem], IMAGE_SIDES[HYBRIDS[stem]]
    shape = {
        "embed_dim": WIDTH,
        "num_heads": HEADS,
        "depth": DEPTH,
        "mlp_ratio": HIDDEN / WIDTH,
        "num_classes": CLASSES,
    }
    peer = make_timm_hybrid(blocks, 1 if blocks else 2, (side, side), (side, side), act_layer="gelu_tanh", **shape)
    path = write_npz(tmp_path / "hybrid.npz", to_wide_norms(make_golden_arrays(stem=blocks)))
    compare_with_timm(peer.model, path, {"stem": StemConfig(blocks, 32, "timm")}, side=side)


def make_golden_bit(blocks, classes=7):
    """Return arrays of a BiT of half the width under TensorFlow's names."""
    rng = np.random.default_rng(0)
    arrays = {}

    def add_convolution(name, *shape):
        arrays[f"resnet/{name}/kernel"] = (0.1 * rng.normal(size=shape)).astype(np.float32)

    def add_norm(name, width):
        arrays[f"resnet/{name}/gamma"] = (1 + 0.2 * rng.normal(size=width)).astype(np.float32)
        arrays[f"resnet/{name}/beta"] = (0.2 * rng.normal(size=width)).astype(np.float32)

    add_convolution("root_block/standardized_conv2d", 7, 7, 3, 32)
    channels = 32
    for stage, units in enumerate(blocks, 1):
        inner = 32 * 2 ** (stage - 1)
        for unit in range(1, units + 1):
            name = f"block{stage}/unit{unit:02d}/"
            for letter, shape in (
                ("a", (1, 1, channels, inner)),
                ("b", (3, 3, inner, inner)),
                ("c", (1, 1, inner, 4 * inner)),
            ):
                add_norm(f"{name}{letter}/group_norm", shape[2])
                add_convolution(f"{name}{letter}/standardized_conv2d", *shape)
            if unit == 1:
                add_convolution(f"{name}a/proj/standardized_conv2d", 1, 1, channels, 4 * inner)
            channels = 4 * inner
    add_norm("group_norm", channels)
    add_convolution("head/conv2d", 1, 1, channels, classes)
    arrays["resnet/head/conv2d/bias"] = rng.normal(size=classes).astype(np.float32)
    return arrays


@pytest.mark.parametrize("blocks", [(1,), (2, 1, 1)])
def test_timm_loads_the_same_bit(blocks, tmp_path):
    pytest.importorskip("timm")
    path = write_npz(tmp_path / "bit.npz", make_golden_bit(blocks))
    assert open_weights(path).config.numerics == "bit"
    compare_with_timm(make_timm_bit(blocks).model, path, side=64)
