import pytest
import torch

from tests import contracts
from vitreous.models.config import ConvStemConfig, StemConfig, transformer_config
from vitreous.models.vit import ViT
from vitreous.models.zoo import build_model

SMALL_OPTIONS = {
    "image": (16, 16),
    "patch": (4, 4),
    "classes": 5,
    "width": 24,
    "depth": 2,
    "heads": 3,
    "mlp": {"hidden": 48},
}
MODEL_OPTIONS = {
    "class": {},
    "mean": {"pool": "mean", "class_token": False, "positions": {"slots": 0}},
    "mean, norm after pooling": {"pool": "mean", "norm": {"final": "pooled"}},
    "attention": {"pool": "attention", "class_token": False, "positions": {"slots": 0}},
    "registers": {"registers": 3},
    "pre-training head": {"head": {"representation": 24}},
    "cosine head": {"head": {"kind": "cosine", "representation": 24}},
    "layer scale": {"norm": {"layer_scale": 1e-2}, "attention": {"qkv_bias": False}, "mlp": {"gelu": "tanh"}},
    "oblong": {"image": (12, 20), "patch": (4, 2)},
    "one channel": {"channels": 1},
    "twelve channels": {"channels": 12},
    "distilled": {"pool": "distilled", "positions": {"slots": 2}},
    "learned 2-D": {"positions": {"kind": "axes"}},
    "factorised": {"positions": {"kind": "factorised"}},
    "fixed": {"positions": {"kind": "sincos"}},
    "fixed, big_vision's": {"positions": {"kind": "sincos-big-vision"}},
    "no positions": {"positions": {"kind": "none"}},
    "at each block": {"positions": {"at": "each"}},
    "2-D, at each block": {"positions": {"at": "each", "kind": "axes"}, "registers": 2},
    "shared by all blocks": {"positions": {"at": "shared"}},
    "fixed, shared by all blocks": {"positions": {"at": "shared", "kind": "sincos"}},
    "relative": {"positions": {"kind": "none"}, "attention": {"kind": "relative"}},
    "rotary": {"positions": {"kind": "none"}, "attention": {"kind": "rotary"}, "registers": 1},
    "axial": {"axial": True, "class_token": False, "pool": "mean"},
    "windows": {
        "attention": {"kind": "decomposed", "window": 3, "global_blocks": (1,)},
        "class_token": False,
        "pool": "mean",
        "neck": 8,
        "norm": {"final": "none"},
        "positions": {"resize": "bicubic"},
    },
    "windows with convolutions": {
        "attention": {"kind": "decomposed", "window": 3},
        "conv_blocks": (0, 1),
        "class_token": False,
        "pool": "mean",
        "norm": {"final": "none"},
        "position_grid": (3, 5),
    },
    "windows with prefix tokens": {"attention": {"window": 3, "global_blocks": (1,)}, "registers": 2},
    "gated": {"mlp": {"kind": "swiglu"}},
    "CLIP": {
        "first_norm": True,
        "norm": {"final": "pooled"},
        "mlp": {"gelu": "quick"},
        "projection_bias": False,
        "head": {"bias": False},
    },
    "hybrid": {"image": (32, 32), "patch": (16, 16), "stem": StemConfig((1, 1, 1), 8)},
    "hybrid, root alone": {"image": (32, 32), "patch": (16, 16), "stem": StemConfig((), 8)},
    "convolutions": {"stem": ConvStemConfig(widths=(4, 6), blocks=(1, 0)), "class_token": False, "pool": "mean"},
    "convolutions, one token per position": {"stem": ConvStemConfig(widths=(4, 6, 8), blocks=(0, 1, 1)), "channels": 1},
    "folded class position": {"positions": {"slots": 0}},
    "DINOv3": {
        "positions": {"kind": "none"},
        "attention": {"kind": "rotary", "key_bias": False},
        "rotary": {"base": 100.0, "coordinates": "centred", "rounded": True},
        "registers": 4,
        "norm": {"layer_scale": 1e-2},
    },
    "EVA-02": {
        "attention": {"kind": "rotary", "key_bias": False},
        "rotary": {"coordinates": "reference"},
        "mlp": {"kind": "swiglu", "norm": True},
        "pool": "mean",
        "norm": {"final": "pooled"},
    },
    "Perception Encoder": {
        "first_norm": True,
        "projection_bias": False,
        "attention": {"kind": "rotary"},
        "rotary": {"offset": 1},
        "pool": "attention",
        "head": {"pool_heads": 2, "pool_hidden": 12, "bias": False},
    },
    "AIMv2": {
        "class_token": False,
        "pool": "mean",
        "norm": {"kind": "rms", "patches": True},
        "attention": {"qkv_bias": False, "out_bias": False},
        "mlp": {"kind": "swiglu", "bias": False},
    },
    "ViT-5": {
        "attention": {"kind": "rotary", "qkv_bias": False, "qk_norm": True},
        "rotary": {"coordinates": "reference", "register_base": 100.0},
        "norm": {"kind": "rms", "layer_scale": 1e-2},
        "registers": 4,
        "positions": {"slots": 0},
    },
    "norms of queries and keys": {"attention": {"qk_norm": True}},
    "norm of the heads' outputs": {"attention": {"kind": "rotary", "inner_norm": True}},
}


def build_random_vit(changes):
    torch.manual_seed(0)
    return contracts.randomise(build_model(transformer_config(**SMALL_OPTIONS).with_options(**changes)))


def draw_images(model, scale=(1, 1)):
    size = [i * s for i, s in zip(model.config.image, scale, strict=True)]
    return torch.randn(3, model.config.channels, *size)


@pytest.mark.parametrize("name", MODEL_OPTIONS)
@pytest.mark.parametrize("promise", contracts.ALL_CONTRACTS)
def test_model_contract(name, promise):
    model = build_random_vit(MODEL_OPTIONS[name])
    promise(model, draw_images(model))


@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_model_accepts_other_image_sizes(name):
    model = build_random_vit(MODEL_OPTIONS[name])
    contracts.check_other_image_sizes(model, draw_images(model, (2, 2)), draw_images(model, (1, 3)))


def test_three_axes():
    model = contracts.randomise(
        ViT(transformer_config(**{**SMALL_OPTIONS, "image": (4, 8, 8), "patch": (2, 4, 4), "heads": 2}))
    )
    for promise in contracts.ALL_CONTRACTS:
        promise(model, torch.randn(2, 3, 4, 8, 8))
    assert model.features(torch.randn(1, 3, 6, 8, 12)).shape == (1, 1 + 3 * 2 * 3, 24)
