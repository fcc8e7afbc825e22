import pytest
import torch

from tests import contracts
from vitreous.models.config import ConvStemConfig, StemConfig, ViTConfig, transformer_config
from vitreous.models.vit import ViT
from vitreous.models.zoo import build_model

SMALL = {"image": (16, 16), "patch": (4, 4), "classes": 5, "width": 24, "depth": 2, "heads": 3, "hidden": 48}
MODELS = {
    "class": {},
    "mean": {"pool": "mean", "class_token": False, "slots": 0},
    "mean, norm after pooling": {"pool": "mean", "norm": "pooled"},
    "attention": {"pool": "attention", "class_token": False, "slots": 0},
    "registers": {"registers": 3},
    "pre-training head": {"representation": 24},
    "layer scale": {"layer_scale": 1e-2, "qkv_bias": False, "gelu": "tanh"},
    "oblong": {"image": (12, 20), "patch": (4, 2)},
    "one channel": {"channels": 1},
    "twelve channels": {"channels": 12},
    "distilled": {"pool": "distilled", "slots": 2},
    "learned 2-D": {"position": "axes"},
    "factorised": {"position": "factorised"},
    "fixed": {"position": "sincos"},
    "fixed, big_vision's": {"position": "sincos-big-vision"},
    "no positions": {"position": "none"},
    "at each block": {"position_at": "each"},
    "2-D, at each block": {"position_at": "each", "position": "axes", "registers": 2},
    "shared by all blocks": {"position_at": "shared"},
    "fixed, shared by all blocks": {"position_at": "shared", "position": "sincos"},
    "relative": {"position": "none", "attention": "relative"},
    "rotary": {"position": "none", "attention": "rotary", "registers": 1},
    "axial": {"axial": True, "class_token": False, "pool": "mean"},
    "windows": {
        "attention": "decomposed",
        "window": 3,
        "global_blocks": (1,),
        "class_token": False,
        "pool": "mean",
        "neck": 8,
        "norm": "none",
        "resize": "bicubic",
    },
    "windows with convolutions": {
        "attention": "decomposed",
        "window": 3,
        "conv_blocks": (0, 1),
        "class_token": False,
        "pool": "mean",
        "norm": "none",
        "position_grid": (3, 5),
    },
    "windows beside prefix tokens": {"window": 3, "global_blocks": (1,), "registers": 2},
    "gated": {"mlp": "swiglu"},
    "CLIP": {"first_norm": True, "norm": "pooled", "gelu": "quick", "projection_bias": False, "head_bias": False},
    "hybrid": {"image": (32, 32), "patch": (16, 16), "stem": StemConfig((1, 1, 1), 8)},
    "hybrid, root alone": {"image": (32, 32), "patch": (16, 16), "stem": StemConfig((), 8)},
    "convolutions": {"stem": ConvStemConfig(widths=(4, 6), blocks=(1, 0)), "class_token": False, "pool": "mean"},
    "convolutions, a token a place": {"stem": ConvStemConfig(widths=(4, 6, 8), blocks=(0, 1, 1)), "channels": 1},
    "folded class position": {"slots": 0},
}


def build(changes):
    torch.manual_seed(0)
    return contracts.randomise(build_model(transformer_config(**{**SMALL, **changes})))


def images_for(model, scale=(1, 1)):
    size = [i * s for i, s in zip(model.config.image, scale, strict=True)]
    return torch.randn(3, model.config.channels, *size)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("promise", contracts.ALL)
def test_promise(name, promise):
    model = build(MODELS[name])
    promise(model, images_for(model))


@pytest.mark.parametrize("name", MODELS)
def test_other_sizes(name):
    model = build(MODELS[name])
    contracts.other_sizes_work(model, images_for(model, (2, 2)), images_for(model, (1, 3)))


def test_three_axes():
    model = contracts.randomise(ViT(ViTConfig(**{**SMALL, "image": (4, 8, 8), "patch": (2, 4, 4), "heads": 2})))
    for promise in contracts.ALL:
        promise(model, torch.randn(2, 3, 4, 8, 8))
    assert model.features(torch.randn(1, 3, 6, 8, 12)).shape == (1, 1 + 3 * 2 * 3, 24)
