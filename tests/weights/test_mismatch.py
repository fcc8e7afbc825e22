"""Weights that do not fit their model: every difference is listed, and no tensor is loaded."""

from __future__ import annotations

import json
import os
import random
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.weights import peers, test_roundtrip
from tests.weights.peers import make_images
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import WeightsError
from vitreous.models.config import BiTConfig, ConvStemConfig, MlpConfig, StemConfig, ViTConfig
from vitreous.models.zoo import build_model
from vitreous.tasks.classification import Classification
from vitreous.weights.adopt import load_pretrained_weights, open_weights
from vitreous.weights.bundle import Bundle
from vitreous.weights.foreign import find_writable_formats

CONFIG = ViTConfig(image=(32, 32), patch=(8, 8), classes=5, width=64, depth=2, heads=1, mlp=MlpConfig(hidden=96))


def build_random_model(config=CONFIG, seed=0):
    return peers.randomise(build_model(config), seed)


def export_tensors(name="timm", config=CONFIG):
    """Return the tensors of a random model in a format, without name prefix."""
    written = find_writable_formats(config)[name].to_foreign_tensors(config, build_random_model(config).state_dict())
    return {key: tensor.contiguous() for key, tensor in written.items()}


def save_tensors(folder, state, name="weights.safetensors"):
    save_file(
        {key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in state.items()},
        folder / name,
    )
    return folder / name


def get_error_message(path, settings=None):
    """Return the error text after checking that the exit code is that of weights errors."""
    with pytest.raises(WeightsError) as error:
        open_weights(path, settings).read_state()
    assert error.value.code == 4
    return error.value.message


def list_differences(path, settings=None):
    """Return the list of differences from the error message."""
    first, *lines = get_error_message(path, settings).split("\n")
    assert first.endswith("does not fit it:")
    return [line.strip() for line in lines]


TENSOR_CHANGES = {
    "missing": (lambda s: s.pop("blocks.1.mlp.fc1.bias"), ["missing blocks.1.mlp.fc1.bias"]),
    "two missing": (lambda s: (s.pop("norm.bias"), s.pop("cls_token")), None),
    "extra": (
        lambda s: s.update({"blocks.0.attn.q_norm.weight": torch.ones(64)}),
        ["unknown blocks.0.attn.q_norm.weight"],
    ),
    "wrong shape": (lambda s: s.update({"norm.weight": torch.ones(63)}), ["norm.weight has shape (63,), not (64,)"]),
    "transposed": (
        lambda s: s.update({"blocks.1.mlp.fc1.weight": s["blocks.1.mlp.fc1.weight"].T}),
        ["blocks.1.mlp.fc1.weight has shape (64, 96), not (96, 64)"],
    ),
    "one axis too few": (
        lambda s: s.update({"cls_token": s["cls_token"][0]}),
        ["cls_token has shape (1, 64), not (1, 1, 64)"],
    ),
    "no axis": (lambda s: s.update({"norm.weight": torch.tensor(1.0)}), ["norm.weight has shape (), not (64,)"]),
    "integers": (
        lambda s: s.update({"norm.weight": torch.ones(64, dtype=torch.int8)}),
        ["norm.weight has dtype int8, not floating-point numbers"],
    ),
    "booleans": (
        lambda s: s.update({"head.bias": torch.ones(5, dtype=torch.bool)}),
        ["head.bias has dtype bool, not floating-point numbers"],
    ),
    "several": (
        lambda s: (s.pop("norm.bias"), s.update({"norm.weight": torch.ones(1), "extra": torch.ones(1)})),
        ["missing norm.bias", "norm.weight has shape (1,), not (64,)", "unknown extra"],
    ),
    "head of other width": (
        lambda s: s.update({"head.weight": torch.ones(5, 63)}),
        ["head.weight has shape (5, 63), not (5, 64)"],
    ),
    "head without bias": (lambda s: s.update({"head.bias": torch.ones(6)}), ["head.bias has shape (6,), not (5,)"]),
    "a gap between blocks": (
        lambda s: [
            s.update({k.replace("blocks.1.", "blocks.2."): s.pop(k)}) for k in list(s) if k.startswith("blocks.1.")
        ],
        None,
    ),
    "a huge block number": (
        lambda s: s.update({"blocks.999999999.norm1.weight": torch.ones(64)}),
        ["unknown blocks.999999999.norm1.weight"],
    ),
    "a block name that is not a number": (
        lambda s: s.update({"blocks.-1.norm1.weight": torch.ones(64)}),
        ["unknown blocks.-1.norm1.weight"],
    ),
    "a block numbered twice": (
        lambda s: s.update({"blocks.01.norm1.weight": torch.ones(64)}),
        ["unknown blocks.01.norm1.weight"],
    ),
}


@pytest.mark.parametrize("case", TENSOR_CHANGES)
def test_every_difference_is_listed(case, tmp_path):
    change, expected = TENSOR_CHANGES[case]
    state = export_tensors()
    change(state)
    path = save_tensors(tmp_path, state)
    if expected is None:
        assert get_error_message(path)
    else:
        assert list_differences(path) == sorted(expected)


def test_gaps_in_block_numbers_are_reported(tmp_path):
    state = export_tensors()
    TENSOR_CHANGES["a gap between blocks"][0](state)
    assert "the numbers N in its blocks.N.norm1.weight are not 0, 1, 2, ... without gaps" in get_error_message(
        save_tensors(tmp_path, state)
    )


def test_long_lists_of_differences_are_truncated_and_counted(tmp_path):
    state = {name: tensor for name, tensor in export_tensors().items() if ".attn.proj." not in name}
    state |= {f"extra.{i}": torch.ones(1) for i in range(30)}
    lines = list_differences(save_tensors(tmp_path, state))
    assert len(lines) == 21
    assert lines[-1] == f"and {30 + 2 * 2 - 20} more"
    lost = [name for name in export_tensors() if name not in state]
    assert lines[:4] == sorted(f"missing {name}" for name in lost)[:4]


def test_names_are_printed_without_control_characters(tmp_path):
    for name in ("extra\u0416" + "x" * 200, "extra\x1b[31m", "extra\u200d"):
        lines = get_error_message(save_tensors(tmp_path, export_tensors() | {name: torch.ones(1)})).replace(
            str(tmp_path), ""
        )
        assert lines.isascii() and lines.replace("\n", "").isprintable()
        assert all(len(line) < 200 for line in lines.split("\n"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_point_types_become_float32(dtype, tmp_path):
    state = {name: tensor.to(dtype) for name, tensor in export_tensors().items()}
    weights = open_weights(save_tensors(tmp_path, state)).read_state()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert torch.equal(weights["encoder.norm.weight"], state["norm.weight"].float())
    assert torch.isfinite(
        open_weights(tmp_path / "weights.safetensors").build_bundle().model(make_images((32, 32)))
    ).all()


def test_mixed_floating_point_types_are_read(tmp_path):
    state = {name: tensor.half() if i % 2 else tensor for i, (name, tensor) in enumerate(export_tensors().items())}
    weights = open_weights(save_tensors(tmp_path, state)).read_state()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_rejected(value, tmp_path):
    state = export_tensors()
    state["blocks.1.mlp.fc1.bias"][3] = value
    assert "blocks.1.mlp.fc1.bias" in get_error_message(save_tensors(tmp_path, state))


def test_values_beyond_float32_are_rejected(tmp_path):
    state = {name: tensor.double() for name, tensor in export_tensors().items()}
    state["norm.weight"][0] = 1e300
    assert "norm.weight" in get_error_message(save_tensors(tmp_path, state))


def test_complex_numbers_are_rejected(tmp_path):
    torch.save(export_tensors() | {"norm.weight": torch.ones(64, dtype=torch.complex64)}, tmp_path / "weights.pt")
    assert "omplex" in get_error_message(tmp_path / "weights.pt")
    np.savez(tmp_path / "weights.npz", **{"embedding/kernel": np.ones((4, 4, 3, 8), np.complex64)})
    assert "<c8" in get_error_message(tmp_path / "weights.npz")


def test_positions_of_another_grid_are_rejected(tmp_path):
    state = export_tensors()
    state["pos_embed"] = torch.ones(1, 21, 64)
    path = save_tensors(tmp_path, state)
    assert "21 positions form no square grid of patches" in get_error_message(path)
    assert "21 positions form no grid of that image of patches" in get_error_message(path, {"image": (64, 64)})
    assert open_weights(path, {"image": (32, 40)}).config.grid == (4, 5)
    state["pos_embed"] = torch.ones(2, 17, 64)
    assert list_differences(save_tensors(tmp_path, state)) == ["pos_embed has shape (2, 17, 64), not (1, 17, 64)"]


def test_duplicate_names_are_rejected(tmp_path):
    state = export_tensors() | {"module.norm.weight": torch.zeros(64)}
    assert "norm.weight twice" in get_error_message(save_tensors(tmp_path, state))
    state = {f"module._orig_mod.{name}": tensor for name, tensor in export_tensors().items()}
    assert open_weights(save_tensors(tmp_path, state)).read_state()


def test_unknown_layouts_are_rejected(tmp_path):
    message = get_error_message(save_tensors(tmp_path, {"layer1.0.conv1.weight": torch.ones(3, 3)}))
    assert "unknown layout: layer1.0.conv1.weight" in message


def test_a_classifier_next_to_a_distillation_token_is_not_dropped_silently(tmp_path):
    config = CONFIG.with_options(pool="distilled", classes=0, positions={"slots": 2})
    state = export_tensors("huggingface", config) | {
        "classifier.weight": torch.ones(5, 64),
        "classifier.bias": torch.ones(5),
    }
    assert list_differences(save_tensors(tmp_path, state)) == ["unknown classifier.bias", "unknown classifier.weight"]


@pytest.mark.parametrize("name", ["timm", "huggingface", "bit-npz"])
def test_resnets_with_billions_of_units_are_rejected(name, tmp_path):
    config = BiTConfig(image=(64, 64), classes=5, blocks=(1, 1), width=32)
    state = export_tensors(name, config)
    first = {
        "timm": "stages.0.blocks.0.",
        "huggingface": "encoder.stages.0.layers.0.",
        "bit-npz": "resnet/block1/unit01/",
    }[name]
    num_units = (
        first.replace(".0.blocks.0.", ".0.blocks.999999999.")
        .replace(".layers.0.", ".layers.999999999.")
        .replace("unit01", "unit999999999")
    )
    state |= {key.replace(first, num_units): tensor.clone() for key, tensor in state.items() if key.startswith(first)}
    lines = list_differences(save_tensors(tmp_path, state))
    assert lines and all(line.startswith("unknown") and "999999999" in line for line in lines)
    state = {key.replace(first, num_units): tensor for key, tensor in export_tensors(name, config).items()}
    assert get_error_message(save_tensors(tmp_path, state))


def write_sparse_file(path, shapes):
    """Write a sparse safetensors file that claims tensors of these shapes."""
    header, position = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + position)
    return path


@pytest.mark.parametrize(
    "width,depth,message",
    [(120_000, 1, "is implausible"), (40_000, 12, "is implausible"), (64, 1_200, "more than 5,000 tensors")],
)
def test_oversized_models_are_rejected_before_allocation(width, depth, message, tmp_path):
    shapes = {name: tuple(tensor.shape) for name, tensor in export_tensors(config=replace(CONFIG, depth=1)).items()}
    shapes = {name: tuple(width if size == 64 else size for size in shape) for name, shape in shapes.items()}
    shapes["blocks.0.attn.qkv.weight"], shapes["blocks.0.attn.qkv.bias"] = (3 * width, width), (3 * width,)
    block = {name: shape for name, shape in shapes.items() if name.startswith("blocks.0.")}
    for index in range(1, depth):
        shapes |= {name.replace("blocks.0.", f"blocks.{index}."): shape for name, shape in block.items()}
    assert message in get_error_message(write_sparse_file(tmp_path / "huge.safetensors", shapes))


CONFIG_CLAIMS = {
    "another width": ({"hidden_size": 128}, "settings have width 128, and its tensors have 64"),
    "another depth": ({"num_hidden_layers": 3}, "settings have depth 3"),
    "infinite depth": ({"num_hidden_layers": 10**6}, "settings have depth 1000000"),
    "a depth of 300 digits": ({"num_hidden_layers": 10**300}, "not an integer"),
    "another hidden width": ({"intermediate_size": 97}, "settings have mlp.hidden 97"),
    "another patch": ({"patch_size": 16}, "settings have patch"),
    "other channels": ({"num_channels": 1}, "settings have channels 1"),
    "another image": ({"image_size": 64}, "17 positions form no grid of that image"),
    "heads that do not divide": ({"num_attention_heads": 5}, "not divisible by 5 heads"),
    "no heads": ({"num_attention_heads": 0}, "at least 1"),
    "heads as text": ({"num_attention_heads": "twelve"}, "num_attention_heads twelve, which is not an integer"),
    "heads as a list": ({"num_attention_heads": [1]}, "not an integer"),
    "heads as a boolean": ({"num_attention_heads": True}, "not an integer"),
    "image size as text": ({"image_size": {"height": 32}}, "not an integer"),
    "epsilon as text": ({"layer_norm_eps": "1e-12"}, "not a small number"),
    "infinite epsilon": ({"layer_norm_eps": float("inf")}, "not a small number"),
    "epsilon NaN": ({"layer_norm_eps": float("nan")}, "not a small number"),
    "unknown activation": ({"hidden_act": "relu"}, "hidden_act relu, which is not supported"),
    "activation not text": ({"hidden_act": {"gelu": 1}}, "not supported"),
}


def write_model_folder(tmp_path, claims, name="huggingface", config=CONFIG):
    form = find_writable_formats(config)[name]
    save_tensors(
        tmp_path,
        {form.prefix(config) + key: tensor for key, tensor in export_tensors(name, config).items()},
        "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(form.describe(config) | claims))
    return tmp_path


@pytest.mark.parametrize("case", CONFIG_CLAIMS)
def test_configs_that_contradict_the_tensors_are_rejected(case, tmp_path):
    claims, message = CONFIG_CLAIMS[case]
    assert message in get_error_message(write_model_folder(tmp_path, claims, config=replace(CONFIG, classes=0)))


@pytest.mark.parametrize(
    "claims", [{"layer_type": "bottleneck"}, {"global_padding": "SAME"}, {"num_groups": 16}, {"hidden_act": "gelu"}]
)
def test_resnets_other_than_bit_are_rejected(claims, tmp_path):
    config = BiTConfig(image=(64, 64), classes=0, blocks=(1,), width=32)
    assert "a ResNet other than BiT" in get_error_message(write_model_folder(tmp_path, claims, config=config))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        "[1, 2]",
        "null",
        "{",
        '"gelu"',
        "\ufeff",
        "1" * 10_000,
        '{"a": ' + "1" * 5000 + "}",
    ],
    ids=[
        "nested lists",
        "nested objects",
        "a list",
        "null",
        "truncated",
        "text",
        "not text",
        "digits",
        "nested digits",
    ],
)
def test_configs_that_are_not_json_objects_are_rejected(text, tmp_path):
    folder = write_model_folder(tmp_path, {}, config=replace(CONFIG, classes=0))
    (folder / "config.json").write_text(text)
    assert "is not valid JSON for weights" in get_error_message(folder)


@pytest.mark.parametrize(
    "preprocessing",
    [
        {"image_mean": "white"},
        {"image_mean": [None, 1, 2]},
        {"image_std": [0, 0, 0]},
        {"image_std": [float("nan")] * 3},
        {"image_mean": 7},
        {"size": {"shortest_edge": "x"}, "crop_size": {"height": 3}},
        {"size": {"shortest_edge": -5}, "crop_size": {"height": 3}},
        {"resample": [3]},
    ],
)
def test_invalid_preprocessing_is_rejected(preprocessing, tmp_path):
    folder = write_model_folder(tmp_path, {}, config=replace(CONFIG, classes=0))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    assert "preprocessing of" in get_error_message(folder)


def test_irrelevant_config_fields_are_ignored(tmp_path):
    config = replace(CONFIG, classes=0)
    claims = {"pretrained_cfg": "x", "vision_config": 3, "id2label": [1], "unheard": {"of": None}, "hidden_act": None}
    assert open_weights(write_model_folder(tmp_path, claims, config=config)).read_state()


INVALID_INDEXES = {
    "a parent folder": {"weight_map": {"norm.weight": "../model.safetensors"}},
    "an absolute path": {"weight_map": {"norm.weight": "/etc/passwd"}},
    "a subfolder": {"weight_map": {"norm.weight": "below/model.safetensors"}},
    "this folder": {"weight_map": {"norm.weight": ".."}},
    "no names": {"weight_map": {}},
    "no map": {"metadata": {}},
    "a list": {"weight_map": ["model.safetensors"]},
    "numbers": {"weight_map": {"norm.weight": 7}},
    "a missing file": {"weight_map": {"norm.weight": "model-00001-of-00002.safetensors"}},
}


@pytest.mark.parametrize("case", INVALID_INDEXES)
def test_indexes_that_point_outside_are_rejected(case, tmp_path):
    (tmp_path / "sub").mkdir()
    save_tensors(tmp_path, export_tensors(), "model.safetensors")
    (tmp_path / "sub" / "model.safetensors.index.json").write_text(json.dumps(INVALID_INDEXES[case]))
    assert get_error_message(tmp_path / "sub")


def test_shards_are_combined_and_missing_tensors_are_reported(tmp_path):
    state, half = export_tensors(), {}
    for number, name in enumerate(sorted(state)):
        half.setdefault(number % 2, {})[name] = state[name]
    for number, shard in half.items():
        save_tensors(tmp_path, shard, f"model-{number}.safetensors")
    index = {"weight_map": {name: f"model-{number}.safetensors" for number, shard in half.items() for name in shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    combined = open_weights(tmp_path).read_state()
    single_file = open_weights(save_tensors(tmp_path, state, "whole.safetensors")).read_state()
    assert all(torch.equal(combined[name], single_file[name]) for name in single_file)
    lost = half[0].pop(min(half[0]))
    save_tensors(tmp_path, half[0], "model-0.safetensors")
    assert len(list_differences(tmp_path)) == 1
    save_tensors(
        tmp_path,
        half[0] | {"norm.weight": state["norm.weight"], "cls_token": lost, "norm.bias": state["norm.bias"]},
        "model-0.safetensors",
    )
    assert "twice" in get_error_message(tmp_path)


@pytest.mark.parametrize("name", [name for name, (_, formats) in test_roundtrip.MODELS.items() if formats])
def test_damaged_files_are_rejected_or_read_correctly(name, tmp_path):
    """Tensors are dropped, renamed or reshaped at random: the file is rejected, or the model equals the file."""
    config, formats = test_roundtrip.MODELS[name]
    rng = random.Random(name)
    for form in sorted(formats):
        original_state = export_tensors(form, config)
        for _ in range(6):
            state = dict(original_state)
            for key in rng.sample(sorted(state), rng.choice((1, 1, 2, 5))):
                tensor = state.pop(key)
                damage = rng.choice(("drop", "rename", "flat", "none", "axis", "short"))
                if damage == "rename":
                    state[key + "x"] = tensor
                elif damage != "drop":
                    shapes = {
                        "flat": tensor.flatten(),
                        "none": torch.tensor(1.0),
                        "axis": tensor[None],
                        "short": tensor[: len(tensor) // 2 + 1],
                    }
                    state[key] = shapes[damage]
            path = save_tensors(tmp_path, state)
            settings = {"image": config.image} | ({} if isinstance(config, BiTConfig) else {"heads": config.heads})
            try:
                weights = open_weights(path, settings)
            except WeightsError:
                pass
            else:
                assert weights.build_bundle().model.state_dict().keys() == weights.read_state().keys()


def test_mismatched_weights_leave_the_model_unchanged(tmp_path):
    target = build_random_model(seed=1)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    states = [
        export_tensors(config=CONFIG.with_options(mlp={"hidden": 64})),
        export_tensors(config=replace(CONFIG, depth=3)),
        export_tensors(config=replace(CONFIG, width=128)),
    ]
    states.append(export_tensors() | {"norm.bias": torch.full((64,), float("nan"))})
    for state in states:
        with pytest.raises(WeightsError):
            load_pretrained_weights(target, save_tensors(tmp_path, state))
        assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


def test_loading_pretrained_weights_lists_differences(tmp_path):
    path = save_tensors(tmp_path, export_tensors(config=CONFIG.with_options(mlp={"hidden": 80})))
    with pytest.raises(WeightsError) as error:
        load_pretrained_weights(build_random_model(), path)
    lines = [line.strip() for line in error.value.message.split("\n")[1:]]
    mlp_prefix = "encoder.blocks.{}.mlp.part."
    assert lines == sorted(
        f"{mlp_prefix.format(i)}{name} has shape {old}, not {new}"
        for i in range(2)
        for name, old, new in (
            ("fc1.bias", (80,), (96,)),
            ("fc1.weight", (80, 64), (96, 64)),
            ("fc2.weight", (64, 80), (64, 96)),
        )
    )


def test_a_new_head_is_zero_initialised_and_reported(tmp_path):
    path = save_tensors(tmp_path, export_tensors())
    target = build_model(replace(CONFIG, classes=3))
    report = load_pretrained_weights(target, path)
    assert not target.head.weight.any() and not target.head.bias.any()
    assert report.initialised == ["head.weight", "head.bias"] and sorted(report.unused) == ["head.bias", "head.weight"]
    assert "(kept 31 tensors, new 2, unused 2); the head is new and zero-initialised" in report.text()
    batch = make_images((32, 32))
    with torch.inference_mode():
        assert torch.equal(target.eval().features(batch), build_random_model().features(batch))
    headless = build_model(replace(CONFIG, classes=0))
    assert sorted(load_pretrained_weights(headless, path).unused) == ["head.bias", "head.weight"]


def test_positions_are_resized_by_the_rule_of_the_config(tmp_path):
    path = save_tensors(tmp_path, export_tensors())
    for rule in ("bicubic", "zoom"):
        target = build_model(CONFIG.with_options(image=(48, 40), positions={"resize": rule}))
        assert "; positions resized 4 -> 6x5" in load_pretrained_weights(target, path).text()
        source = build_model(CONFIG.with_options(positions={"resize": rule})).eval()
        source.load_state_dict(build_random_model().state_dict())
        batch = make_images((48, 40))
        with torch.inference_mode():
            assert torch.allclose(target.eval()(batch), source(batch), atol=1e-5)


def load_with_channels(config, channels, tmp_path):
    """Return a model with `channels` channels that loaded weights of a three-channel model, and the latter."""
    source = build_random_model(config)
    form = find_writable_formats(config)["timm"]
    path = save_tensors(tmp_path, form.to_foreign_tensors(config, source.state_dict()))
    target = build_model(replace(config, channels=channels)).eval()
    settings = {} if isinstance(config, BiTConfig) else {"heads": config.heads}
    report = load_pretrained_weights(target, open_weights(path, settings))
    assert f"; channels 3 -> {channels}" in report.text() and not report.initialised
    return source, target


def test_one_channel_gives_the_same_outputs_for_grey_images(tmp_path):
    source, target = load_with_channels(CONFIG, 1, tmp_path)
    grey = make_images((32, 32), channels=1)
    with torch.inference_mode():
        assert peers.compute_difference(target(grey), source(grey.expand(-1, 3, -1, -1))) <= 1e-6


@pytest.mark.parametrize("channels", [2, 4, 12])
def test_new_channels_repeat_the_old_channels(channels, tmp_path):
    source, target = load_with_channels(CONFIG, channels, tmp_path)
    old, new = (m.projection.weight.unflatten(1, (-1, 64)) for m in (source, target))
    for channel in range(channels):
        assert torch.equal(new[:, channel], old[:, channel % 3] * (3 / channels))
    if channels == 12:  # repeating an image four times does not change the outputs
        batch = make_images((32, 32))
        with torch.inference_mode():
            assert peers.compute_difference(target(batch.repeat(1, 4, 1, 1)), source(batch)) <= 1e-5


@pytest.mark.parametrize(
    "config",
    [CONFIG.with_options(stem=StemConfig((1,), 32)), BiTConfig(image=(64, 64), classes=5, blocks=(1,), width=32)],
)
def test_the_resnet_root_adapts_to_other_channels(config, tmp_path):
    source, target = load_with_channels(config, 12, tmp_path)
    batch = make_images((32, 32))
    # standardisation removes the scale: four copies of a filter each have half the weight
    with torch.inference_mode():
        assert torch.isfinite(target(batch.repeat(1, 4, 1, 1))).all()
    root = (m.stem.root if hasattr(m, "stem") else m.body.root for m in (source, target))
    old, new = (r.conv.weight for r in root)
    assert torch.equal(new, old.repeat(1, 4, 1, 1) / 4)
    source, target = load_with_channels(config, 1, tmp_path)
    root = (m.stem.root if hasattr(m, "stem") else m.body.root for m in (source, target))
    old, new = (r.conv.weight for r in root)
    assert torch.equal(new, old.sum(1, keepdim=True))


@pytest.mark.parametrize("channels", [1, 12])
def test_the_first_convolution_adapts_to_other_channels(channels, tmp_path):
    config = CONFIG.with_options(stem=ConvStemConfig(widths=(8, 16), blocks=(0, 0)))
    source, target = build_random_model(config).eval(), build_model(replace(config, channels=channels)).eval()
    Bundle(source, Classification(tuple("abcde")), ImagePreprocess((32, 32))).save(tmp_path / "model")
    assert not load_pretrained_weights(target, tmp_path / "model").initialised
    grey = make_images((32, 32), channels=1)
    with torch.inference_mode():
        assert (
            peers.compute_difference(target(grey.expand(-1, channels, -1, -1)), source(grey.expand(-1, 3, -1, -1)))
            <= 1e-5
        )


def test_heads_are_reordered_by_class_name_or_reset(tmp_path):
    config = replace(CONFIG, classes=3)
    source = build_random_model(config)
    Bundle(source.eval(), Classification(("ant", "bee", "cat")), ImagePreprocess((32, 32))).save(tmp_path / "bundle")
    same_classes, reordered_classes, other_classes = (build_model(config) for _ in range(3))
    assert not load_pretrained_weights(same_classes, tmp_path / "bundle", ("ant", "bee", "cat")).initialised
    assert torch.equal(same_classes.head.weight, source.head.weight)
    assert not load_pretrained_weights(reordered_classes, tmp_path / "bundle", ("cat", "ant", "bee")).initialised
    assert torch.equal(reordered_classes.head.weight, source.head.weight[[2, 0, 1]]) and torch.equal(
        reordered_classes.head.bias, source.head.bias[[2, 0, 1]]
    )
    adoption = load_pretrained_weights(other_classes, tmp_path / "bundle", ("ant", "bee", "cow"))
    assert sorted(adoption.initialised) == ["head.bias", "head.weight"] and "zero-initialised" in adoption.text()
    assert not other_classes.head.weight.any() and torch.equal(
        other_classes.projection.weight, source.projection.weight
    )


def test_new_attention_windows_are_reported(tmp_path):
    """The report contains the cost in GFLOPs; it is absent if the weights have windows or the model has none."""
    windowed = CONFIG.with_options(attention={"window": 3, "global_blocks": (1,)})
    Bundle(build_random_model(), Classification(tuple("abcde")), ImagePreprocess((32, 32))).save(tmp_path / "plain")
    text = load_pretrained_weights(build_random_model(windowed), tmp_path / "plain").text()
    assert "; windows of 3 x 3 tokens in 1 of 2 blocks; the weights were trained without them: " in text
    costs = " in place of ".join(f"{2 * config.macs() / 1e9:.3g}" for config in (windowed, CONFIG))
    assert f"trained without them: {costs} GFLOPs per image of 32 pixels" in text
    Bundle(build_random_model(windowed), Classification(tuple("abcde")), ImagePreprocess((32, 32))).save(
        tmp_path / "windowed"
    )
    assert "without them" not in load_pretrained_weights(build_random_model(windowed), tmp_path / "windowed").text()
    assert "without them" not in load_pretrained_weights(build_random_model(), tmp_path / "plain").text()
