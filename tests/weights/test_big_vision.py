"""big_vision's checkpoints compared with a numpy reference: fixed positions, optimiser states, and its BiT.

The reference restates big_vision's code for one image at a time, in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.weights.peers import compute_difference, make_images
from tests.weights.test_google import (
    CLASSES,
    PATCH,
    WIDTH,
    big_vision,
    compare_outputs,
    forward,
    make_golden_arrays,
    relu,
    to_linen_names,
    to_scanned_blocks,
    write_npz,
)
from vitreous.errors import WeightsError
from vitreous.models.config import BiTConfig
from vitreous.models.zoo import build_model
from vitreous.nn.resnet import NUMERICS
from vitreous.weights.adopt import open_weights
from vitreous.weights.convert import convert


def posemb_sincos_2d(height, width, channels):
    """models/vit.py: `channels` / 4 frequencies from 1 to 1 / 10000 (inclusive), applied to each column x and row y."""
    table = np.zeros((height * width, channels))
    quarter = channels // 4
    for row in range(height):
        for column in range(width):
            for k in range(quarter):
                omega = 10_000.0 ** (-k / (quarter - 1))
                entry = table[row * width + column]
                entry[k], entry[quarter + k] = np.sin(column * omega), np.cos(column * omega)
                entry[2 * quarter + k], entry[3 * quarter + k] = np.sin(row * omega), np.cos(row * omega)
    return table


def add_fixed_positions(p, height, width):
    """Return the model under its oldest names, with sin-cos positions for a grid and zeros for the class token."""
    table = posemb_sincos_2d(height, width, WIDTH)
    table = np.concatenate([np.zeros((1, WIDTH)), table]) if "cls" in p else table
    return p | {"Transformer/posembed_input/pos_embedding": table[None]}


def remove_positions(p, layout=big_vision):
    """Return the model as big_vision saves it with fixed positions: without a position tensor."""
    return {
        name: array
        for name, array in layout(add_fixed_positions(p, 4, 4)).items()
        if not name.endswith("pos_embedding")
    }


POOLING_OPTIONS = {
    "mean": {"token": False},
    "attention": {"token": False, "pool": True},
    "class token": {},
    "hidden layer": {"pre_logits": 12},
}


@pytest.mark.parametrize("pool", POOLING_OPTIONS)
def test_fixed_positions_are_computed_for_every_grid(pool, tmp_path):
    """Native size, larger size, one native side, and an oblong image: positions are computed, not resized."""
    p = make_golden_arrays(**POOLING_OPTIONS[pool])
    weights = open_weights(write_npz(tmp_path / "vit.npz", remove_positions(p)), {"image": (16, 16)})
    assert (weights.config.positions.kind, weights.config.prefix_position_count, weights.config.image) == (
        "sincos-big-vision",
        0,
        (16, 16),
    )
    assert any("big_vision's fixed ones (sincos2d)" in text for text in weights.notes)
    model = weights.build_bundle().model
    for height, width in ((16, 16), (24, 24), (16, 24), (12, 20)):
        batch = make_images((height, width))
        grid = height // PATCH, width // PATCH
        with torch.inference_mode():
            features, logits = model.features(batch), model(batch)
        for number, image in enumerate(batch.numpy()):
            expected = forward(add_fixed_positions(p, *grid), image)
            assert compute_difference(features[number].double(), torch.from_numpy(expected[0])) <= 1e-5
            assert compute_difference(logits[number].double(), torch.from_numpy(expected[1])) <= 1e-5


def test_fixed_positions_are_detected_in_stacked_blocks(tmp_path):
    weights = open_weights(
        write_npz(tmp_path / "vit.npz", remove_positions(make_golden_arrays(token=False), to_scanned_blocks))
    )
    assert (weights.config.positions.kind, weights.config.image) == ("sincos-big-vision", (224, 224))


def test_widths_without_fixed_positions_are_rejected(tmp_path):
    arrays = {
        name: array
        for name, array in remove_positions(make_golden_arrays(token=False)).items()
        if not name.startswith("params/head")
    }
    narrow = {name: array[..., :6] if name == "params/embedding/kernel" else array for name, array in arrays.items()}
    with pytest.raises(WeightsError, match="fixed ones need a width of at least 8 that is divisible by 4, not 6"):
        open_weights(write_npz(tmp_path / "vit.npz", narrow))


def test_fixed_positions_survive_a_round_trip(tmp_path):
    path = write_npz(tmp_path / "vit.npz", remove_positions(make_golden_arrays(token=False)))
    convert(path, tmp_path / "again.npz", "big-vision-npz", settings={"image": (16, 16)})
    with np.load(tmp_path / "again.npz") as converted_arrays, np.load(path) as original_arrays:
        assert {f"params/{name}" for name in converted_arrays} == set(original_arrays)
        assert all(
            np.array_equal(converted_arrays[name.removeprefix("params/")], original_arrays[name])
            for name in original_arrays
        )


def to_training_checkpoint(p, layout):
    """Return a training checkpoint: parameters with Adam's first and second moments, step and clock."""
    p, arrays = layout(p), {}
    for name, array in p.items():
        short_name = name.removeprefix("params/")
        arrays |= {
            f"params/{short_name}": array,
            f"opt/0/1/mu/{short_name}": array + 1,
            f"opt/0/1/nu/{short_name}": array * array,
        }
    return arrays | {"opt/0/0/count": np.int32(90), "extra/accum_train_time": np.float64(3.5)}


def to_flax_checkpoint(p, layout):
    """Return a training checkpoint of flax's older optimisers."""
    target = {f"opt/target/{name.removeprefix('params/')}": array for name, array in layout(p).items()}
    state = {
        name.replace("opt/target/", "opt/state/param_states/") + "/grad_ema": array + 1
        for name, array in target.items()
    }
    return target | state | {"opt/state/step": np.int32(90)}


@pytest.mark.parametrize("layout", [big_vision, to_scanned_blocks, to_linen_names])
@pytest.mark.parametrize("state", [to_training_checkpoint, to_flax_checkpoint])
def test_parameters_are_read_from_training_checkpoints(state, layout, tmp_path):
    p = make_golden_arrays(classes=CLASSES, token=layout is not to_linen_names)
    arrays = state(p, layout)
    weights = open_weights(write_npz(tmp_path / "checkpoint.npz", arrays))
    compare_outputs(weights, p, 16, 1e-5)
    assert len(weights.unused) >= len(p) and not any(
        name.startswith(("params/", "opt/target/")) for name in weights.unused
    )


def standardize_kernel(kernel):
    centred = kernel - kernel.mean((0, 1, 2))
    return centred / np.sqrt((centred**2).mean((0, 1, 2)) + 1e-10)


def extract_padded_windows(x, size, stride, fill):
    """Return all windows of (H, W, C), padded by (size - 1) / 2, as (h, w, size, size, C)."""
    pad = (size - 1) // 2
    x = np.pad(x, ((pad, pad), (pad, pad), (0, 0)), constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (0, 1))[::stride, ::stride]
    return windows.transpose(0, 1, 3, 4, 2)


def convolve(p, name, x, stride=1):
    kernel = standardize_kernel(p[f"{name}/kernel"])
    return np.tensordot(extract_padded_windows(x, kernel.shape[0], stride, 0.0), kernel, 3)


def apply_group_norm(p, name, x):
    groups = x.reshape(*x.shape[:2], 32, -1)
    groups = groups - groups.mean((0, 1, 3), keepdims=True)
    groups = groups / np.sqrt((groups**2).mean((0, 1, 3), keepdims=True) + 1e-5)
    return groups.reshape(x.shape) * p[f"{name}/scale"].ravel() + p[f"{name}/bias"].ravel()


def forward_bit_paper(p, image, blocks, fill=-np.inf):
    """models/bit_paper.py: map an image (C, H, W) to the last feature map (h w, C) and logits.

    `fill`: padding value of the max-pooling.
    """
    p = {name.removeprefix("params/"): array.astype(np.float64) for name, array in p.items()}
    x = convolve(p, "root_block/conv_root", image.transpose(1, 2, 0).astype(np.float64), 2)
    x = extract_padded_windows(x, 3, 2, fill).max((2, 3))
    for stage, count in enumerate(blocks, 1):
        for unit in range(1, count + 1):
            name, stride = f"block{stage}/unit{unit:02d}/", 2 if stage > 1 and unit == 1 else 1
            y = relu(apply_group_norm(p, f"{name}gn1", x))
            shortcut = convolve(p, f"{name}conv_proj", y, stride) if f"{name}conv_proj/kernel" in p else x
            y = relu(apply_group_norm(p, f"{name}gn2", convolve(p, f"{name}conv1", y)))
            y = relu(apply_group_norm(p, f"{name}gn3", convolve(p, f"{name}conv2", y, stride)))
            x = convolve(p, f"{name}conv3", y) + shortcut
    x = relu(apply_group_norm(p, "norm-pre-head", x)).reshape(-1, x.shape[-1])
    return x, x.mean(0) @ p["head/kernel"] + p["head/bias"]


def make_golden_bit_paper(blocks, classes=7, seed=0):
    """Return random arrays of a small BiT under big_vision's names."""
    rng = np.random.default_rng(seed)
    arrays = {}

    def add_kernel(name, *shape):
        arrays[f"params/{name}/kernel"] = (rng.normal(size=shape) * np.prod(shape[:-1]) ** -0.5).astype(np.float32)

    def add_norm(name, width):
        arrays[f"params/{name}/scale"] = (1 + 0.2 * rng.normal(size=(1, 1, 1, width))).astype(np.float32)
        arrays[f"params/{name}/bias"] = (0.2 * rng.normal(size=(1, 1, 1, width))).astype(np.float32)

    add_kernel("root_block/conv_root", 7, 7, 3, 32)
    channels = 32
    for stage, units in enumerate(blocks, 1):
        inner = 32 * 2 ** (stage - 1)
        for unit in range(1, units + 1):
            name = f"block{stage}/unit{unit:02d}/"
            for n, shape in ((1, (1, 1, channels, inner)), (2, (3, 3, inner, inner)), (3, (1, 1, inner, 4 * inner))):
                add_norm(f"{name}gn{n}", shape[2])
                add_kernel(f"{name}conv{n}", *shape)
            if unit == 1:
                add_kernel(f"{name}conv_proj", 1, 1, channels, 4 * inner)
            channels = 4 * inner
    add_norm("norm-pre-head", channels)
    add_kernel("head", channels, classes)
    arrays["params/head/bias"] = rng.normal(size=classes).astype(np.float32)
    return arrays


@pytest.mark.parametrize("blocks", [(1,), (2, 1)])
# the original BiT code pads with zeros
def test_bit_pads_the_pooling_with_minus_infinity(blocks, tmp_path):
    p = make_golden_bit_paper(blocks)
    weights = open_weights(write_npz(tmp_path / "bit.npz", p))
    assert (weights.config.numerics, weights.config.blocks, weights.config.classes) == ("big-vision", blocks, 7)
    model = weights.build_bundle().model
    for size in ((32, 32), (40, 24)):
        batch = make_images(size)
        with torch.inference_mode():
            features, logits = model.features(batch), model(batch)
        for number, image in enumerate(batch.numpy()):
            tokens, expected = forward_bit_paper(p, image, blocks)
            assert compute_difference(features[number].double(), torch.from_numpy(tokens)) <= 1e-5
            assert compute_difference(logits[number].double(), torch.from_numpy(expected)) <= 1e-5
            zeros = forward_bit_paper(p, image, blocks, 0.0)[1]
            assert compute_difference(logits[number].double(), torch.from_numpy(zeros)) > 1e-4


def test_bit_is_written_with_the_shapes_of_big_vision(tmp_path):
    p = make_golden_bit_paper((2, 1))
    convert(write_npz(tmp_path / "bit.npz", p), tmp_path / "again.npz", "big-vision-npz")
    with np.load(tmp_path / "again.npz") as converted_arrays:
        assert {f"params/{name}": converted_arrays[name].shape for name in converted_arrays} == {
            name: array.shape for name, array in p.items()
        }
        assert all(np.array_equal(converted_arrays[name.removeprefix("params/")], p[name]) for name in p)


def test_bit_written_for_other_readers_reports_the_numerics(tmp_path):
    path = write_npz(tmp_path / "bit.npz", make_golden_bit_paper((1,)))
    document = convert(path, tmp_path / "tf.npz", "bit-npz")
    assert document["assumed_settings"] == ["numerics big-vision -> bit"]


def test_big_vision_numerics_change_only_the_border():
    assert NUMERICS["big-vision"]._replace(border=0.0) == NUMERICS["bit"]
    config = BiTConfig(image=(32, 32), classes=0, blocks=(1,), width=32, numerics="big-vision")
    model, bit_model = (
        build_model(config).eval(),
        build_model(BiTConfig(image=(32, 32), classes=0, blocks=(1,), width=32)).eval(),
    )
    bit_model.load_state_dict(model.state_dict())
    # a map without positive values, where zero padding changes the maximum at the edge
    dark = -torch.ones(1, 32, 12, 12)
    for root in (model.body.root, bit_model.body.root):
        root.conv = torch.nn.Identity()
    assert torch.equal(model.body.root(dark).unique(), torch.tensor([-1.0]))
    assert torch.equal(bit_model.body.root(dark).unique(), torch.tensor([-1.0, 0.0]))
