"""The verb `convert`: weights are unchanged, and requested changes are applied and reported."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from tests import contracts
from tests.conftest import parse_json_output, run_cli
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError, WeightsError
from vitreous.models.config import BiTConfig, ViTConfig, transformer_config
from vitreous.models.zoo import build_model
from vitreous.tasks.classification import Classification
from vitreous.weights import files
from vitreous.weights.adopt import open_weights
from vitreous.weights.bundle import Bundle, load_bundle
from vitreous.weights.convert import convert

SMALL_CONFIG = {
    "image": (32, 32),
    "patch": (8, 8),
    "classes": 3,
    "width": 64,
    "depth": 2,
    "heads": 2,
    "mlp": {"hidden": 96},
}


def save_bundle(path, config):
    torch.manual_seed(0)
    model = contracts.randomise(build_model(config)).eval()
    names = tuple(f"class {i}" for i in range(config.classes))
    Bundle(
        model, Classification(names), ImagePreprocess((32, 32), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), share=0.8)
    ).save(path)
    return model


@pytest.mark.parametrize("target_format", ["timm", "google-npz", "linen-npz", "huggingface", "torchvision"])
def test_a_plain_vit_survives_a_round_trip_through_every_format(target_format, tmp_path):
    model = save_bundle(tmp_path / "a", transformer_config(**SMALL_CONFIG))
    document = convert(tmp_path / "a", tmp_path / "b", target_format)
    assert document["format"] == "a bundle" and document["to"] == target_format
    conversion_back = convert(
        document["out"],
        tmp_path / "c",
        settings=None if target_format in ("google-npz", "huggingface") else {"heads": 2},
    )
    reloaded = load_bundle(tmp_path / "c")
    assert conversion_back["unused"] == conversion_back["new"] == []
    state = reloaded.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    if target_format == "huggingface":  # the only format that stores classes and preprocessing
        assert reloaded.classes == ("class 0", "class 1", "class 2")
        assert reloaded.preprocess == ImagePreprocess((32, 32), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), share=0.8)


def test_a_rectangular_grid_is_stored_in_the_file(tmp_path):
    # 48 patches and a class token, together 49: a square number
    save_bundle(tmp_path / "a", transformer_config(**{**SMALL_CONFIG, "image": (48, 64)}))
    document = convert(tmp_path / "a", tmp_path / "b", "timm")
    weights = open_weights(document["out"])
    assert isinstance(weights.config, ViTConfig)
    assert (weights.config.image, weights.config.heads, weights.config.positions.slots) == ((48, 64), 2, 1)
    with pytest.raises(UsageError, match="google-npz cannot represent"):
        convert(tmp_path / "a", tmp_path / "c", "google-npz")


def test_differences_of_the_reader_are_reported(tmp_path):
    save_bundle(tmp_path / "a", transformer_config(**SMALL_CONFIG))
    notes: list[str] = []
    assert convert(tmp_path / "a", tmp_path / "b", "google-npz", note=notes.append)["assumed_settings"] == [
        "mlp.gelu none -> tanh"
    ]
    assert "gelu none -> tanh" in notes[-1] and notes[-1].endswith(
        "(train with --model.mlp.gelu tanh for identical outputs)"
    )
    save_bundle(tmp_path / "tanh", transformer_config(**SMALL_CONFIG).with_options(mlp={"gelu": "tanh"}))
    assert convert(tmp_path / "tanh", tmp_path / "same", "google-npz", note=notes.append)["assumed_settings"] == []
    assert "assume other settings" not in notes[-1]
    assert convert(tmp_path / "a", tmp_path / "c", "huggingface")["assumed_settings"] == []
    save_bundle(tmp_path / "d", BiTConfig(image=(32, 32), classes=3, blocks=(1, 1), width=32))
    assert convert(tmp_path / "d", tmp_path / "e", "bit-npz")["assumed_settings"] == []
    assert convert(tmp_path / "d", tmp_path / "f", "timm")["assumed_settings"] == ["numerics bit -> timm"]


def test_image_size_head_and_channels_can_be_changed(tmp_path):
    save_bundle(tmp_path / "a", transformer_config(**SMALL_CONFIG))
    document = convert(tmp_path / "a", tmp_path / "b", image_size=(32, 48), num_classes=5, channels=1)
    reloaded = load_bundle(tmp_path / "b")
    assert (document["resized"], document["channels"]) == ("4 -> 4x6", "3 -> 1")
    assert sorted(document["new"]) == sorted(document["unused"]) == ["head.bias", "head.weight"]
    assert reloaded.model(torch.randn(2, 1, 32, 48)).shape == (2, 5)
    assert reloaded.preprocess.image == (32, 48) and len(reloaded.preprocess.mean) == 1 and len(reloaded.classes) == 5


def test_rejected_conversions_write_nothing(tmp_path):
    save_bundle(tmp_path / "a", transformer_config(**SMALL_CONFIG))
    before = sorted(path.name for path in tmp_path.iterdir())
    for error_type, change in (
        (UsageError, {"to": "sam"}),
        (UsageError, {"to": "timn"}),
        (UsageError, {"image_size": 33}),
        (UsageError, {"channels": 0}),
    ):
        with pytest.raises(error_type):
            convert(tmp_path / "a", tmp_path / "b", **change)
    with pytest.raises(UsageError, match="already exists"):
        convert(tmp_path / "a", tmp_path / "a")
    with pytest.raises(WeightsError, match="no weights"):
        convert(tmp_path / "nothing", tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_failed_writes_leave_no_files(tmp_path, monkeypatch):
    save_bundle(tmp_path / "a", transformer_config(**SMALL_CONFIG))

    def write_half_file(tensors, file_path, metadata=None):
        file_path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitreous.weights.convert.save_file", write_half_file)
    with pytest.raises(Exception, match="No space left") as error:
        convert(tmp_path / "a", tmp_path / "b", "timm")
    assert error.value.code == 6
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_command_line_prints_the_result(tmp_path):
    save_bundle(tmp_path / "a", transformer_config(**SMALL_CONFIG))
    arguments = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "huggingface"]
    result = parse_json_output(run_cli(*arguments, "--json"))
    assert result["model"] == "ViT-64x2/8" and result["tensors"] > 0
    assert json.loads((tmp_path / "b" / "config.json").read_text())["model_type"] == "vit"
    repeated = run_cli(*arguments)
    assert repeated.returncode == 2 and "already exists" in repeated.stderr
    rejected = run_cli("convert", str(tmp_path / "b" / "config.json"), str(tmp_path / "c"))
    assert rejected.returncode == 4 and "Traceback" not in rejected.stderr


@pytest.mark.parametrize("family", ["dinov2", "bit-npz"])
def test_wrapper_prefixes_are_removed_from_names(family, tmp_path):
    """DINOv2's training files number chunks before blocks; TensorFlow numbers layers with equal names."""
    if family == "dinov2":
        config = transformer_config(
            **{**SMALL_CONFIG, "classes": 0, "norm": {"layer_scale": 0.1}, "positions": {"resize": "bicubic-offset"}}
        )
    else:
        config = BiTConfig(image=(32, 32), classes=3, blocks=(1, 2), width=32)
    model = save_bundle(tmp_path / "a", config)
    document = convert(tmp_path / "a", tmp_path / "b", family)
    source = files.open_weights_file(document["out"])
    renamed = {
        "backbone." + name.replace("blocks.", "blocks.7.")
        if family == "dinov2"
        else name.replace("conv2d/", "conv2d_3/"): tensor
        for name, tensor in source.read().items()
    }
    if family == "bit-npz":
        renamed = {name.replace("head/conv2d_3/", "head/conv2d/"): tensor for name, tensor in renamed.items()}
    save_file({name: tensor.contiguous() for name, tensor in renamed.items()}, tmp_path / "c.safetensors")
    state = open_weights(tmp_path / "c.safetensors", {"heads": 2}).read_state()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
