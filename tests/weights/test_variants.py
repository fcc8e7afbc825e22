"""Files that lack tensors or belong to another family: accepted only if a published model is like that."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import save_file

from tests.weights import peers
from tests.weights.peers import check_agreement, open_model, randomise
from vitreous.errors import WeightsError
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.models.zoo import build_model
from vitreous.weights.adopt import open_weights
from vitreous.weights.foreign import find_writable_formats
from vitreous.weights.formats.variants import require_unpublished_tensors
from vitreous.weights.sidecar import config_to_metadata

CONFIG = ViTConfig(image=(32, 32), patch=(8, 8), classes=5, width=64, depth=2, heads=1, mlp=MlpConfig(hidden=96))


def save_random_model(folder, config=CONFIG, name="timm", without="", config_json=None):
    """Save a random model in a format, without the tensors whose names end in `without`.

    `config_json` is the content of config.json.
    """
    form = find_writable_formats(config)[name]
    tensors = {
        key: tensor.clone() for key, tensor in form.to_file(config, randomise(build_model(config)).state_dict()).items()
    }
    left = {key: tensor for key, tensor in tensors.items() if not without or not key.endswith(tuple(without.split()))}
    assert len(left) < len(tensors) or not without
    save_file(left, folder / "model.safetensors")
    if config_json is not None:
        (folder / "config.json").write_text(json.dumps(config_json))
        return folder
    return folder / "model.safetensors"


def get_error_message(path, settings=None):
    with pytest.raises(WeightsError) as error:
        open_weights(path, settings)
    return str(error.value)


MISSING_TENSORS = {
    "last norm": (" norm.weight norm.bias", ["missing norm.bias", "missing norm.weight"]),
    "biases of queries, keys and values": (
        "qkv.bias",
        ["missing blocks.0.attn.qkv.bias", "missing blocks.1.attn.qkv.bias"],
    ),
    "bias of the patches": ("patch_embed.proj.bias", ["missing patch_embed.proj.bias"]),
    "bias of the head": ("head.bias", ["missing head.bias"]),
}


@pytest.mark.parametrize("case", MISSING_TENSORS)
def test_tensors_that_every_published_model_has_are_required(case, tmp_path):
    """Reading such a state dict as a model without these tensors gave outputs that were off by 0.16 to 0.34."""
    without, expected = MISSING_TENSORS[case]
    config = replace(CONFIG, classes=0) if case == "last norm" else CONFIG
    form = find_writable_formats(config)["timm"]
    state = {
        key: tensor.clone() for key, tensor in form.to_file(config, randomise(build_model(config)).state_dict()).items()
    }
    for key in [key for key in state if key in without.split() or (without == "qkv.bias" and key.endswith(without))]:
        del state[key]
    save_file(state, tmp_path / "model.safetensors")
    message = get_error_message(tmp_path / "model.safetensors")
    assert all(line in message for line in expected)
    assert "no published model of that shape lacks these tensors" in message


PUBLISHED_FAMILIES = {
    "no bias on q, k, v": (
        CONFIG.with_options(
            class_token=False,
            pool="mean",
            positions={"slots": 0},
            norm={"layer_scale": 1e-5},
            attention={"qkv_bias": False},
        ),
        "vit_*_gap_*",
    ),
    "no last norm": (
        CONFIG.with_options(classes=0, norm={"layer_scale": 0.1, "final": "none"}),
        "vit_intern300m_patch14_448",
    ),
    "no last norm, registers": (
        CONFIG.with_options(classes=0, registers=7, positions={"slots": 0}, norm={"final": "none"}),
        "vit_*_radio_*",
    ),
}


@pytest.mark.parametrize("case", PUBLISHED_FAMILIES)
def test_tensors_absent_in_a_published_family_are_optional(case, tmp_path):
    config, family = PUBLISHED_FAMILIES[case]
    path = save_random_model(tmp_path, config)
    weights = open_weights(path, {"heads": 1})
    assert [family in text for text in weights.notes if "is in the file" in text] == [True]
    assert (weights.config.norm.final, weights.config.attention.qkv_bias) == (
        config.norm.final,
        config.attention.qkv_bias,
    )


def test_the_vit_without_qkv_bias_is_recognised_by_its_size():
    """timm's vit_base_patch16_224_miil has no such biases; other sizes of ViT with a class token have them."""
    fields = {
        "norm.final": "tokens",
        "attention.qkv_bias": False,
        "projection_bias": True,
        "head.bias": True,
        "first_norm": False,
    }
    fields |= {
        "class_token": True,
        "norm.layer_scale": None,
        "registers": 0,
        "classes": 1000,
        "width": 768,
        "depth": 12,
        "patch": (16, 16),
    }
    assert require_unpublished_tensors(fields)["attention.qkv_bias"] is False
    assert require_unpublished_tensors(fields | {"depth": 24})["attention.qkv_bias"] is True
    assert require_unpublished_tensors(fields | {"norm.layer_scale": 1e-5})["attention.qkv_bias"] is True


def test_written_files_store_their_config(tmp_path):
    """A model unlike any published family survives a round trip, because the file stores its config."""
    config = CONFIG.with_options(attention={"qkv_bias": False})
    path = save_random_model(tmp_path, config)
    assert "missing blocks.0.attn.qkv.bias" in get_error_message(path)
    form, state = find_writable_formats(config)["timm"], randomise(build_model(config)).state_dict()
    save_file(form.to_file(config, state), path, metadata=config_to_metadata(config))
    weights = open_weights(path)
    assert weights.config.attention.qkv_bias is False and not any("is in the file" in text for text in weights.notes)


def test_assumed_numbers_of_heads_are_reported(tmp_path):
    path = save_random_model(tmp_path)
    weights = open_weights(path)
    assert weights.config.heads == 1 and any("the number of heads is not in the file" in text for text in weights.notes)
    weights = open_weights(path, {"heads": 2})
    assert weights.config.heads == 2 and not any("heads" in text for text in weights.notes)
    odd = save_random_model(tmp_path, replace(CONFIG, width=200, heads=4))
    assert "must divide the width 200" in get_error_message(odd)
    assert open_weights(odd, {"heads": 4}).config.heads == 4


@pytest.mark.parametrize("heads,is_reported", [(2, True), (1, False)])
def test_unusual_numbers_of_heads_are_reported(heads, is_reported, tmp_path):
    config = replace(CONFIG, classes=0)
    described = find_writable_formats(config)["huggingface"].describe(config) | {"num_attention_heads": heads}
    weights = open_weights(save_random_model(tmp_path, config, "huggingface", config_json=described))
    assert weights.config.heads == heads
    assert [note for note in weights.notes if f"config.json has {heads} heads for a width of 64" in note] == (
        list(weights.notes) if is_reported else []
    )
    assert bool(weights.notes) == is_reported


@pytest.mark.parametrize("family", ["beit", "convnext", "siglip_text_model", "vit_hybrid", "yolos", 7])
def test_unsupported_families_are_rejected_by_name(family, tmp_path):
    config = replace(CONFIG, classes=0)
    described = find_writable_formats(config)["huggingface"].describe(config) | {"model_type": family}
    message = get_error_message(save_random_model(tmp_path, config, "huggingface", config_json=described))
    assert f"model_type {family}, which is not supported" in message and "supported types are vit, deit" in message


def test_tensors_of_a_different_family_are_rejected(tmp_path):
    config = replace(CONFIG, classes=0)
    described = find_writable_formats(config)["huggingface"].describe(config) | {"model_type": "dinov2"}
    assert "has model_type dinov2, but the tensors are those of transformers' ViT" in get_error_message(
        save_random_model(tmp_path, config, "huggingface", config_json=described)
    )


@pytest.mark.parametrize("settings", [None, True, "no"])
def test_biases_are_required_unless_the_config_disables_them(settings, tmp_path):
    config = replace(CONFIG, classes=0)
    described = {
        key: value
        for key, value in find_writable_formats(config)["huggingface"].describe(config).items()
        if key != "qkv_bias"
    }
    folder = save_random_model(
        tmp_path,
        config,
        "huggingface",
        "query.bias key.bias value.bias",
        described | ({} if settings is None else {"qkv_bias": settings}),
    )
    assert (
        "neither true nor false" if settings == "no" else "missing encoder.layer.0.attention.attention.query.bias"
    ) in get_error_message(folder)
    (folder / "config.json").write_text(json.dumps(described | {"qkv_bias": False}))
    assert open_weights(folder).config.attention.qkv_bias is False


@pytest.mark.parametrize("family", ["vit_msn", "ijepa"])
def test_families_equivalent_to_vit_are_read(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    classes = {
        "vit_msn": ("ViTMSNConfig", "ViTMSNForImageClassification"),
        "ijepa": ("IJepaConfig", "IJepaForImageClassification"),
    }
    config = getattr(transformers, classes[family][0])(**peers.SMALL_CONFIG, intermediate_size=96, num_labels=7)
    peer = peers.make_transformers_peer(
        getattr(transformers, classes[family][1])(config), True, interpolate_pos_encoding=True
    )
    check_agreement(open_model(peer.file(tmp_path)), peer)


def test_mlp_mixers_are_rejected_by_name(tmp_path):
    kernels = {
        "stem/kernel": (4, 4, 3, 8),
        "MixerBlock_0/token_mixing/Dense_0/kernel": (16, 4),
        "pre_head_layer_norm/scale": (8,),
    }
    np.savez(tmp_path / "mixer.npz", **{name: np.ones(shape, np.float32) for name, shape in kernels.items()})
    assert "is an MLP-Mixer, which is not supported" in get_error_message(tmp_path / "mixer.npz")
    pytest.importorskip("timm")
    from timm.models.mlp_mixer import MlpMixer

    save_file(
        MlpMixer(num_classes=3, img_size=32, patch_size=8, num_blocks=1, embed_dim=32).state_dict(),
        tmp_path / "mixer.safetensors",
    )
    assert "is an MLP-Mixer, which is not supported" in get_error_message(tmp_path / "mixer.safetensors")
