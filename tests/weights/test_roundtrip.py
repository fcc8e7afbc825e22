"""Weights survive a round trip through every format that can hold them, and between formats.

Written files are also read by other libraries: transformers (folders), timm (state dicts, Google's files).
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.weights import peers
from tests.weights.peers import ERROR_LIMIT, check_agreement, compute_difference, make_images, open_model
from vitreous.errors import UsageError
from vitreous.models.config import (
    AttentionConfig,
    BiTConfig,
    ConvStemConfig,
    MlpConfig,
    PositionConfig,
    StemConfig,
    VideoConfig,
    ViTConfig,
)
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model
from vitreous.weights.adopt import open_weights
from vitreous.weights.foreign import FOREIGN_FORMATS, detect_checkpoint, find_writable_formats
from vitreous.weights.sidecar import config_to_metadata
from vitreous.weights.writable import (
    explain_unwritable,
    find_blocking_options,
    get_writable_format,
    list_writable_formats,
)

SMALL_CONFIG = ViTConfig(image=(32, 32), patch=(8, 8), classes=5, width=64, depth=2, heads=4, mlp=MlpConfig(hidden=128))
MEAN_POOLED = SMALL_CONFIG.with_options(class_token=False, pool="mean", positions={"slots": 0})
DINO = SMALL_CONFIG.with_options(classes=0, norm={"layer_scale": 1e-5})
SWIGLU = DINO.with_options(mlp={"kind": "swiglu", "hidden": 176})
CLIP = SMALL_CONFIG.with_options(
    first_norm=True,
    projection_bias=False,
    norm={"final": "pooled", "eps": 1e-5},
    mlp={"gelu": "quick"},
    head={"bias": False},
)
SAM = MEAN_POOLED.with_options(
    image=(64, 64),
    neck=24,
    classes=0,
    attention={"kind": "decomposed", "window": 3, "global_blocks": (1,)},
    norm={"final": "none"},
)
VITDET = SAM.with_options(neck=0, position_grid=(4, 4))
HYBRID = SMALL_CONFIG.with_options(stem=StemConfig((1, 2), 32), patch=(8, 8), mlp={"gelu": "tanh"})
VIDEO = VideoConfig(
    image=(4, 16, 32),
    patch=(2, 8, 8),
    classes=5,
    width=64,
    depth=2,
    heads=4,
    mlp=MlpConfig(hidden=128, gelu="tanh"),
    positions=PositionConfig(resize="bicubic"),
)
VIDEOMAE = VIDEO.with_options(
    class_token=False,
    pool="mean",
    attention=AttentionConfig(key_bias=False),
    pooled_eps=1e-5,
    norm={"final": "pooled"},
    positions={"kind": "sinusoid"},
)

EXACT = {"rounded": False}  # the periods of DINOv3's rotary positions, which only the authors' files round


def shrink(name, **changes):
    """Return a small config of a named model, with options that differ from it."""
    sizes = {"image": (32, 32), "patch": (8, 8), "width": 64, "depth": 2, "heads": 4}
    return config_from_name(name).with_options(**sizes | {"mlp": {"hidden": 128}} | changes)


BIT = BiTConfig(image=(64, 64), classes=5, blocks=(2, 1), width=32)

GOOGLE_FORMATS = {"google-npz", "linen-npz"}
MODELS = {
    "ViT": (SMALL_CONFIG, {"timm", "huggingface", "torchvision"} | GOOGLE_FORMATS),
    "ViT, no head": (replace(SMALL_CONFIG, classes=0), {"timm", "huggingface"} | GOOGLE_FORMATS),
    "ViT, tanh": (
        SMALL_CONFIG.with_options(mlp={"gelu": "tanh"}),
        {"timm", "huggingface", "torchvision"} | GOOGLE_FORMATS,
    ),
    "ViT, one channel": (replace(SMALL_CONFIG, channels=1), {"timm", "huggingface", "torchvision"} | GOOGLE_FORMATS),
    "ViT, oblong": (replace(SMALL_CONFIG, image=(32, 48), patch=(8, 4)), {"timm", "huggingface"}),
    "ViT, patches that are not square": (
        replace(SMALL_CONFIG, image=(32, 16), patch=(8, 4)),
        {"timm", "huggingface"} | GOOGLE_FORMATS,
    ),
    "ViT, pre_logits": (SMALL_CONFIG.with_options(head={"representation": 24}), {"torchvision"} | GOOGLE_FORMATS),
    "ViT, no bias on q, k, v": (SMALL_CONFIG.with_options(attention={"qkv_bias": False}), {"timm", "huggingface"}),
    "ViT, class token without position": (
        SMALL_CONFIG.with_options(positions={"slots": 0}),
        {"timm", "big-vision-npz"},
    ),
    "ViT, mean": (MEAN_POOLED, {"timm", "huggingface", "big-vision-npz"} | GOOGLE_FORMATS),
    "ViT, mean, no head": (replace(MEAN_POOLED, classes=0), {"timm", "huggingface", "big-vision-npz"} | GOOGLE_FORMATS),
    "ViT, attention pooling": (replace(MEAN_POOLED, pool="attention"), {"timm", "big-vision-npz"} | GOOGLE_FORMATS),
    "ViT, class token and mean": (SMALL_CONFIG.with_options(pool="mean", norm={"final": "pooled"}), {"timm"}),
    "ViT, class token and mean of normed tokens": (replace(SMALL_CONFIG, pool="mean"), set()),
    "ViT, registers with positions": (SMALL_CONFIG.with_options(registers=2, positions={"slots": 3}), {"timm"}),
    "ViT, registers without positions": (SMALL_CONFIG.with_options(registers=2, positions={"slots": 0}), {"timm"}),
    "ViT, registers, class token with position": (replace(SMALL_CONFIG, registers=2), set()),
    "ViT, class token normed alone": (SMALL_CONFIG.with_options(norm={"final": "pooled"}), set()),
    "DeiT": (SMALL_CONFIG.with_options(pool="distilled", positions={"slots": 2}), {"timm", "huggingface"}),
    "DeiT, no head": (
        SMALL_CONFIG.with_options(pool="distilled", classes=0, positions={"slots": 2}),
        {"timm", "huggingface"},
    ),
    "DeiT-III": (SMALL_CONFIG.with_options(norm={"layer_scale": 1e-4}, positions={"slots": 0}), {"timm"}),
    "DINOv2": (DINO, {"timm", "dinov2", "huggingface"}),
    "DINOv2, registers": (replace(DINO, registers=3), {"dinov2", "huggingface"}),
    "DINOv2, SwiGLU": (SWIGLU, {"timm", "dinov2", "huggingface"}),
    "DINOv2, SwiGLU with a fractional ratio": (SWIGLU.with_options(mlp={"hidden": 100}), {"timm", "dinov2"}),
    "DINOv2, SwiGLU and registers": (replace(SWIGLU, registers=3), {"dinov2", "huggingface"}),
    "CLIP": (CLIP, {"huggingface", "clip"}),
    "CLIP, no projection": (replace(CLIP, classes=0), {"huggingface", "clip"}),
    "CLIP as timm has it": (CLIP.with_options(norm={"final": "tokens"}, head={"bias": True}), {"timm"}),
    "SAM": (SAM, {"sam", "timm", "huggingface"}),
    "SAM, everything global": (
        SAM.with_options(attention={"window": 0, "global_blocks": ()}),
        {"sam", "timm", "huggingface"},
    ),
    "ViTDet": (VITDET, {"vitdet"}),
    "ViTDet, everything global": (VITDET.with_options(attention={"window": 0, "global_blocks": ()}), {"vitdet"}),
    "ViTDet, convolutions": (VITDET.with_options(conv_blocks=(1,), attention={"global_blocks": ()}), {"vitdet"}),
    "hybrid": (HYBRID, {"timm"} | GOOGLE_FORMATS),
    "hybrid, root alone": (HYBRID.with_options(stem=StemConfig((), 32)), {"timm"} | GOOGLE_FORMATS),
    "convolutions": (
        SMALL_CONFIG.with_options(stem=ConvStemConfig(widths=(8, 16), blocks=(0, 1)), class_token=False, pool="mean"),
        set(),
    ),
    "BiT": (BIT, {"timm", "huggingface", "bit-npz", "big-vision-npz"}),
    "BiT, wide": (replace(BIT, width=64, factor=2, blocks=(1,)), {"timm", "huggingface", "bit-npz", "big-vision-npz"}),
    "BiT, no head": (replace(BIT, classes=0), {"timm", "huggingface", "bit-npz", "big-vision-npz"}),
    "axial ResNet": (BIT.with_options(axial=True), set()),
    "axial": (MEAN_POOLED.with_options(axial=True), set()),
    "DINOv3": (shrink("DINOv3-S/16", rotary=EXACT), {"dinov3", "timm", "huggingface"}),
    "DINOv3, SwiGLU": (shrink("DINOv3-S+/16", rotary=EXACT), {"dinov3", "timm", "huggingface"}),
    "DINOv3, no bias on q, k, v": (shrink("DINOv3-7B/16", rotary=EXACT), {"dinov3", "timm", "huggingface"}),
    "DINOv3, with a head": (shrink("DINOv3-S/16", classes=5), set()),
    "EVA-02": (shrink("EVA02-S/14", classes=5), {"timm"}),
    "EVA-02, norm in the MLP": (shrink("EVA02-B/14"), {"timm", "eva02"}),
    "Perception Encoder": (shrink("PE-Core-B/16", classes=24), {"perception-encoder"}),
    "Perception Encoder, no class token": (
        shrink("PE-Core-G/14", heads=4, head={"pool_hidden": 96}),
        {"perception-encoder"},
    ),
    "Perception Encoder, no head": (shrink("PE-Core-S/16", classes=0), {"timm", "perception-encoder"}),
    "Perception Encoder, dense": (shrink("PE-Spatial-B/16"), {"timm", "perception-encoder"}),
    "AIMv2": (shrink("AIMv2-L/14"), {"timm", "aimv2", "huggingface"}),
    "AIMv2, with a head": (shrink("AIMv2-L/14", classes=5), {"timm"}),
    "ViT-5": (shrink("ViT-5-S/16", classes=5, rotary={"reference": 4}), {"vit5"}),
    "TIPSv2": (shrink("TIPSv2-B/14"), {"dinov2", "huggingface"}),
    "relative": (SMALL_CONFIG.with_options(attention={"kind": "relative"}), set()),
    "rotary": (SMALL_CONFIG.with_options(attention={"kind": "rotary"}), set()),
    "sines": (SMALL_CONFIG.with_options(positions={"kind": "sincos", "slots": 0}), set()),
    "sines as big_vision has them": (
        MEAN_POOLED.with_options(positions={"kind": "sincos-big-vision"}),
        {"big-vision-npz"},
    ),
    "positions by axis": (SMALL_CONFIG.with_options(positions={"kind": "axes"}), set()),
    "positions by axis, added up": (SMALL_CONFIG.with_options(positions={"kind": "factorised"}), set()),
    "positions in each block": (SMALL_CONFIG.with_options(positions={"at": "each"}), set()),
    "video": (replace(SMALL_CONFIG, image=(4, 32, 32), patch=(2, 8, 8)), set()),
    "ViViT": (VIDEO, {"huggingface"}),
    "ViViT, no head": (replace(VIDEO, classes=0), {"huggingface"}),
    "ViViT, mean": (replace(VIDEO, class_token=False, pool="mean"), set()),
    "ViViT, factorised": (replace(VIDEO, arrangement="factorised-dot-product"), set()),
    "VideoMAE": (VIDEOMAE, {"huggingface", "videomae"}),
    "VideoMAE, encoder": (
        VIDEOMAE.with_options(classes=0, pooled_eps=None, norm={"final": "tokens"}),
        {"huggingface", "videomae"},
    ),
    "VideoMAE, without head and norm": (VIDEOMAE.with_options(classes=0, norm={"final": "none"}), {"huggingface"}),
    "VideoMAE, learned positions": (VIDEOMAE.with_options(positions={"kind": "learned"}), set()),
}


#: transformers' encoders with a pooling layer, which our weights do not contain
MODELS_WITH_POOLING_LAYER = ("ViTModel", "DeiTModel", "IJepaModel", "VivitModel")


def build_random_model(config, seed=0):
    """Return a model with random parameters."""
    return peers.randomise(build_model(config), seed)


def write_tensors(form, config, state):
    """Return all tensors of a file in that format."""
    return form.to_file(config, state)


def save_in_format(form, config, tensors, file_path):
    """Save tensors as the file or folder of a format."""
    if form.suffix == ".npz":
        path = file_path.with_suffix(".npz")
        with open(path, "wb") as file:
            np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})
        return path
    if form.describe is None:
        path = file_path.with_suffix(".safetensors")
        save_file(tensors, path, metadata=config_to_metadata(config))
        return path
    file_path.mkdir()
    save_file(tensors, file_path / "model.safetensors", metadata={"format": "pt"})
    (file_path / "config.json").write_text(json.dumps(form.describe(config)))
    return file_path


def open_saved_format(form, config, path):
    """Return our config and tensors; image size and heads are set if the file does not contain them."""
    settings = {"image": config.image} | (
        {} if form.describe or isinstance(config, BiTConfig) else {"heads": config.heads}
    )
    weights = open_weights(path, settings)
    assert weights.title == form.title
    return weights.config, weights.read_state()


def are_states_equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", MODELS)
def test_each_model_has_exactly_these_formats(name):
    config, expected = MODELS[name]
    assert set(find_writable_formats(config)) == expected
    for form in {form.name for form in FOREIGN_FORMATS} - expected:
        with pytest.raises(UsageError, match=f"{form} cannot represent"):
            get_writable_format(form, config)
    with pytest.raises(UsageError, match="gguf is not a weights format"):
        get_writable_format("gguf", config)


BLOCKING_OPTIONS = {
    ("convolutions", "timm"): ["stem of convolutions (Conv+…)"],
    ("convolutions", "huggingface"): ["stem of convolutions (Conv+…)"],
    ("hybrid", "huggingface"): ["stem of a ResNet (R50+…)"],
    ("ViT, class token and mean of normed tokens", "huggingface"): ["--model.pool mean"],
    ("ViT, mean", "torchvision"): ["--model.pool mean --model.class-token false"],
    ("ViT, attention pooling", "huggingface"): ["--model.pool attention --model.class-token false"],
    ("rotary", "timm"): ["--model.attention.kind rotary"],
    ("sines", "google-npz"): ["--model.positions.kind sincos"],
    ("ViT, oblong", "google-npz"): ["image or patch that is not a square"],
    ("ViT, no head", "torchvision"): ["model without a head (classes 0)"],
    ("DeiT-III", "huggingface"): ["--model.positions.slots 0", "--model.norm.layer-scale 0.0001"],
    ("ViT, no bias on q, k, v", "torchvision"): ["--model.attention.qkv-bias false"],
    ("BiT", "google-npz"): [],
    ("ViT", "sam"): [],
}


@pytest.mark.parametrize("name,form", BLOCKING_OPTIONS)
def test_options_that_block_a_format_are_named(name, form):
    config = MODELS[name][0]
    assert find_blocking_options(form, config) == BLOCKING_OPTIONS[name, form]
    with pytest.raises(UsageError) as error:
        get_writable_format(form, config)
    assert (
        explain_unwritable(form, config) in error.value.message
        and "bundle" in error.value.hint
        and "export --to onnx" in error.value.hint
    )
    assert all(option in error.value.message for option in BLOCKING_OPTIONS[name, form])


def test_formats_that_can_hold_a_model_are_listed():
    assert list_writable_formats(SMALL_CONFIG) == sorted(MODELS["ViT"][1])
    assert "huggingface" not in list_writable_formats(MODELS["convolutions"][0])
    assert explain_unwritable("huggingface", MODELS["convolutions"][0]).startswith("it has no stem of convolutions")


@pytest.mark.parametrize("name", [name for name, (_, formats) in MODELS.items() if formats])
def test_models_survive_a_round_trip_between_formats(name, tmp_path):
    config, formats = MODELS[name]
    ours, writable_formats = build_random_model(config).state_dict(), find_writable_formats(config)
    for a in sorted(formats):
        first = write_tensors(writable_formats[a], config, ours)
        config_a, from_a = open_saved_format(
            writable_formats[a], config, save_in_format(writable_formats[a], config, first, tmp_path / a)
        )
        assert are_states_equal(from_a, ours), a
        for b in sorted(formats - {a}):
            second = write_tensors(writable_formats[b], config_a, from_a)
            config_b, from_b = open_saved_format(
                writable_formats[b],
                config,
                save_in_format(writable_formats[b], config_a, second, tmp_path / f"{a}-{b}"),
            )
            third = write_tensors(writable_formats[a], config_b, from_b)
            assert are_states_equal(third, first), (a, b)
            assert {key: tensor.shape for key, tensor in third.items()} == {
                key: tensor.shape for key, tensor in first.items()
            }


@pytest.mark.parametrize("name", [name for name, (_, formats) in MODELS.items() if "huggingface" in formats])
def test_transformers_opens_the_folder(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = MODELS[name][0]
    if isinstance(config, BiTConfig):
        config = replace(config, numerics="transformers")
    model, form = build_random_model(config), get_writable_format("huggingface", config)
    folder = save_in_format(form, config, write_tensors(form, config, model.state_dict()), tmp_path / "model")
    class_name = form.describe(config)["architectures"][0]
    options = {"add_pooling_layer": False} if class_name in MODELS_WITH_POOLING_LAYER else {}
    theirs, loading_info = getattr(transformers, class_name).from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(loading_info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), (
        loading_info
    )
    theirs.eval()
    batch = make_images(config.image, channels=config.channels)
    with torch.inference_mode():
        model_input = batch.transpose(1, 2) if batch.ndim == 5 else batch  # clips: frames before channels
        outputs, features = theirs(model_input), model.features(batch)
        base = theirs if "last_hidden_state" in outputs else getattr(theirs, theirs.base_model_prefix)
        tokens = base(model_input).last_hidden_state
        tokens = tokens.flatten(2).transpose(1, 2) if tokens.ndim == 4 else tokens
        assert compute_difference(features, tokens) <= ERROR_LIMIT
        if config.classes:
            logits = outputs.image_embeds if "image_embeds" in outputs else outputs.logits
            assert compute_difference(model(batch), logits) <= ERROR_LIMIT


@pytest.mark.parametrize("name", [name for name, (_, formats) in MODELS.items() if "huggingface" in formats])
def test_transformers_saves_the_same_tensors(name, tmp_path):
    """Tensors are unchanged after saving a folder, loading it with transformers, and saving it again."""
    transformers = pytest.importorskip("transformers")
    config = MODELS[name][0]
    form, ours = get_writable_format("huggingface", config), build_random_model(config).state_dict()
    folder = save_in_format(form, config, write_tensors(form, config, ours), tmp_path / "model")
    class_name = form.describe(config)["architectures"][0]
    options = {"add_pooling_layer": False} if class_name in MODELS_WITH_POOLING_LAYER else {}
    getattr(transformers, class_name).from_pretrained(folder, **options).save_pretrained(tmp_path / "again")
    assert are_states_equal(open_weights(tmp_path / "again").read_state(), ours)


TIMM_PEERS = {
    "ViT": peers.make_timm_vit,
    "no head": lambda: peers.make_timm_vit(num_classes=0),
    "mean": lambda: peers.make_timm_vit(global_pool="avg"),
    "mean, no class token": lambda: peers.make_timm_vit(global_pool="avg", class_token=False, fc_norm=False),
    "attention": lambda: peers.make_timm_vit(global_pool="map", class_token=False),
    "registers": lambda: peers.make_timm_vit(reg_tokens=4, no_embed_class=True, init_values=1e-5),
    "registers with positions": lambda: peers.make_timm_vit(reg_tokens=4),
    "oblong": lambda: peers.make_timm_vit(
        img_size=(32, 48), patch_size=(8, 4), settings={"image": (32, 48)}, sizes=((32, 48),)
    ),
    "distilled": peers.make_timm_distilled,
    "hybrid": lambda: peers.make_timm_hybrid((1, 2), 1, (32, 32), (64, 48)),
    "hybrid, root alone": lambda: peers.make_timm_hybrid((), 2, (32, 32), (48, 40)),
    "BiT": peers.make_timm_bit,
    "SAM": peers.make_timm_sam,
}


@pytest.mark.parametrize("name", TIMM_PEERS)
def test_timm_loads_written_weights_strictly(name, tmp_path):
    pytest.importorskip("timm")
    peer = TIMM_PEERS[name]()
    config = open_model(peer.file(tmp_path), peer.settings).config
    model = build_random_model(config, seed=1)
    peer.model.load_state_dict(
        get_writable_format("timm", config).to_foreign_tensors(config, model.state_dict()), strict=True
    )
    peer.logits = peer.logits if config.classes else None
    check_agreement(model, peer)


@pytest.mark.parametrize(
    "name,form",
    [("ViT", "google-npz"), ("hybrid", "google-npz"), ("hybrid, root alone", "google-npz"), ("BiT", "bit-npz")],
)
def test_the_npz_loader_of_timm_reads_written_files(name, form, tmp_path):
    pytest.importorskip("timm")
    peer = TIMM_PEERS[name]()
    config = open_model(peer.file(tmp_path), peer.settings).config
    model = build_random_model(config, seed=1)
    written = write_tensors(get_writable_format(form, config), config, model.state_dict())
    peer.model.load_pretrained(
        str(save_in_format(get_writable_format(form, config), config, written, tmp_path / "written"))
    )
    check_agreement(model, peer)


@pytest.mark.parametrize("representation", [None, 20])
def test_torchvision_loads_written_weights_strictly(representation, tmp_path):
    peer = peers.make_torchvision_vit(representation)
    config = open_model(peer.file(tmp_path), peer.settings).config
    model = build_random_model(config, seed=1)
    peer.model.load_state_dict(
        get_writable_format("torchvision", config).to_foreign_tensors(config, model.state_dict()), strict=True
    )
    check_agreement(model, peer)


@pytest.mark.parametrize("name", ["DINOv2", "DINOv2, registers", "DINOv2, SwiGLU"])
def test_the_mask_token_of_dinov2_is_written_as_zeros(name, tmp_path):
    config = MODELS[name][0]
    written = get_writable_format("dinov2", config).to_foreign_tensors(config, build_random_model(config).state_dict())
    assert written["mask_token"].shape == (1, config.width) and not written["mask_token"].any()
    save_file({key: tensor.contiguous() for key, tensor in written.items()}, tmp_path / "dino.safetensors")
    assert detect_checkpoint([tmp_path / "dino.safetensors"], {"heads": 4}).unused == ["mask_token"]
