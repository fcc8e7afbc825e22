"""Models of timm with random weights give the same logits when opened here."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from vitreous.errors import VitreousError, WeightsError
from vitreous.models.zoo import create_untrained_model
from vitreous.weights.adopt import load_pretrained_weights, open_weights

timm = pytest.importorskip("timm")


def build_timm_model(name: str, **options):
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, **options).eval()
    for key, parameter in model.named_parameters():  # heads, tokens and biases are initialised at or near zero
        scale = 0.5 if "norm" in key else 0.05
        parameter.data += scale * torch.randn_like(parameter)
    return model


@pytest.fixture
def open_timm_model(tmp_path):
    """Return a function that saves and opens a timm model; `settings` are not in its state dict."""

    def save_and_open(model, **settings):
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        return open_weights(tmp_path / "model.safetensors", settings).build_bundle().model

    return save_and_open


@torch.inference_mode()
def compute_difference(a, b, images):
    x, y = a(images), b(images)
    assert x.shape == y.shape
    return ((x - y).abs().max() / y.abs().max().clamp(min=1)).item()


@pytest.mark.parametrize(
    "name,side,depth",
    [("vit_tiny_patch16_224", 224, 12), ("vit_small_patch16_224", 224, 12), ("vit_base_patch16_224", 96, 3)],
)
def test_logits_match_at_native_and_other_resolutions(name, side, depth, open_timm_model):
    reference = build_timm_model(name, num_classes=100, dynamic_img_size=True, img_size=side, depth=depth)
    model = open_timm_model(reference)
    for size in ((side, side), (side + 64, side + 64), (side - 64, side + 32)):
        assert compute_difference(model, reference, torch.randn(2, 3, *size)) <= 1e-5, size


#: common options of timm's vit_*_gap_* models
GAP_OPTIONS = {"qkv_bias": False, "init_values": 1e-2, "class_token": False, "global_pool": "avg", "fc_norm": False}
VARIANTS = {
    "mean pooling, norm after it": ("vit_tiny_patch16_224", {"global_pool": "avg", "class_token": False}),
    "mean pooling with a class token": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "attention pooling": ("vit_tiny_patch16_224", {"global_pool": "map", "class_token": False}),
    "registers, class token without position": ("vit_tiny_patch16_224", {"reg_tokens": 4, "no_embed_class": True}),
    "registers with positions": ("vit_tiny_patch16_224", {"reg_tokens": 4}),
    "registers and mean": (
        "vit_tiny_patch16_224",
        {"reg_tokens": 4, "no_embed_class": True, "class_token": False, "global_pool": "avg"},
    ),
    "layer scale": ("vit_tiny_patch16_224", {"init_values": 1e-2}),
    "no bias on q, k, v": ("vit_tiny_patch16_224", GAP_OPTIONS),
    "no bias on q, k, v, a register": (
        "vit_tiny_patch16_224",
        GAP_OPTIONS | {"fc_norm": None, "reg_tokens": 1, "no_embed_class": True},
    ),
    "no last norm": ("vit_tiny_patch16_224", {"final_norm": False, "init_values": 0.1, "num_classes": 0}),
    "no last norm, registers": (
        "vit_tiny_patch16_224",
        {"final_norm": False, "reg_tokens": 7, "no_embed_class": True, "num_classes": 0},
    ),
    "one channel": ("vit_tiny_patch16_224", {"in_chans": 1}),
    "no head": ("vit_tiny_patch16_224", {"num_classes": 0}),
    "patch 32": ("vit_small_patch32_224", {}),
    "other size": ("vit_tiny_patch16_224", {"img_size": 96}),
}


@pytest.mark.parametrize("case", VARIANTS)
def test_timm_variants_match(case, open_timm_model):
    name, options = VARIANTS[case]
    reference = build_timm_model(name, depth=3, **options)
    model = open_timm_model(reference)
    assert compute_difference(model, reference, torch.randn(2, model.config.channels, *model.config.image)) <= 1e-5


def test_rectangular_grids_need_the_image_size(open_timm_model):
    reference = build_timm_model("vit_tiny_patch16_224", img_size=(96, 160))
    with pytest.raises(WeightsError, match="square"):
        open_timm_model(reference)
    model = open_timm_model(reference, image=(96, 160))
    assert compute_difference(model, reference, torch.randn(2, 3, 96, 160)) <= 1e-5


def test_gelu_and_heads_can_be_set(open_timm_model):
    reference = build_timm_model("vit_tiny_patch16_224", act_layer="gelu_tanh", num_heads=6)
    assert (
        compute_difference(
            open_timm_model(reference, heads=6, **{"mlp.gelu": "tanh"}), reference, torch.randn(1, 3, 224, 224)
        )
        <= 1e-5
    )


def test_unsupported_families_are_rejected_by_name(open_timm_model):
    reference = build_timm_model("vit_tiny_patch16_224", qk_norm=True)
    with pytest.raises(WeightsError, match=r"unknown blocks.0.attn.k_norm"):
        open_timm_model(reference)


def test_gradients_match_timm(open_timm_model):
    reference = build_timm_model("vit_tiny_patch16_224", num_classes=10, img_size=32)
    model, images = open_timm_model(reference), torch.randn(2, 3, 32, 32)
    for network in (model, reference):
        network(images).pow(2).sum().backward()
    a, b = model.encoder.blocks[3].attention.part.qkv.weight.grad, reference.blocks[3].attn.qkv.weight.grad
    assert torch.allclose(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())


def test_loading_at_another_size_and_head_is_reported(tmp_path):
    reference = build_timm_model("vit_tiny_patch16_224", num_classes=7, dynamic_img_size=True)
    save_file(reference.state_dict(), tmp_path / "vit.safetensors")
    model = create_untrained_model("ViT-Ti/16", 96, num_classes=3)
    report = load_pretrained_weights(model, tmp_path / "vit.safetensors")
    assert sorted(report.initialised) == sorted(report.unused) == ["head.bias", "head.weight"]
    assert report.resized == "14 -> 6"
    assert "the head is new and zero-initialised" in report.text()
    assert not model.head.weight.any()
    images = torch.randn(1, 3, 96, 96)
    with torch.inference_mode():
        assert torch.allclose(model.eval().features(images), reference.forward_features(images), atol=1e-4)


@pytest.mark.parametrize(
    "make,message",
    [
        (None, "no weights at"),
        ("folder", "contains no weights"),
        ("run", "has no model.json"),
        ("pt", "has a damaged pickle"),
        ("junk", "is truncated, or not a safetensors file"),
    ],
)
def test_invalid_sources_are_rejected(tmp_path, make, message):
    path = (
        tmp_path
        / {None: "nothing", "folder": "folder", "run": "run", "pt": "model.pt", "junk": "model.safetensors"}[make]
    )
    if make in ("folder", "run"):
        path.mkdir()
        if make == "run":
            (path / "config.yaml").touch()
    elif make:
        path.write_bytes(b"junk")
    with pytest.raises(VitreousError, match=message):
        open_weights(path)
