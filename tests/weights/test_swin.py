"""Swin Transformers of other libraries: same features and logits at any size; round trips of their files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weights import peers
from tests.weights.peers import (
    ERROR_LIMIT,
    Peer,
    check_agreement,
    compute_difference,
    make_images,
    open_model,
    randomise,
)
from vitreous.errors import UsageError, WeightsError
from vitreous.models.config import SwinAttentionConfig, SwinConfig
from vitreous.models.zoo import build_model
from vitreous.weights.adopt import load_pretrained_weights, open_weights
from vitreous.weights.bundle import load_bundle
from vitreous.weights.convert import convert, select_classes
from vitreous.weights.foreign import find_writable_formats
from vitreous.weights.sidecar import config_to_metadata
from vitreous.weights.writable import get_writable_format

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

#: grids of 16 and 8 at the native size; grids of 18 x 21 and 9 x 11 are not divisible into windows
IMAGE_SIZES = ((32, 32), (36, 42))
SMALL_SWIN = SwinConfig(
    image=(32, 32),
    patch_size=(2, 2),
    width=16,
    blocks=(2, 2),
    heads=(2, 4),
    classes=7,
    attention=SwinAttentionConfig(window=4, pad="zeros"),
)

SMALL_SWIN_V2 = replace(SMALL_SWIN, version=2)


def make_timm_swin(version=1, **options) -> Peer:
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    small = {
        "img_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_size": 4,
        "num_classes": 7,
        "strict_img_size": False,
    }
    model = randomise((SwinTransformer if version == 1 else SwinTransformerV2)(**small | options))
    image = options.get("img_size", 32)
    settings = {"image": image if isinstance(image, tuple) else (image, image)}
    if version == 2:  # the state dict does not determine these
        settings["attention.window"] = (small | options)["window_size"]
        settings["attention.pretrained_window"] = options.get("pretrained_window_sizes", ())
    return Peer(model, lambda x: model.forward_features(x).flatten(1, 2), model, IMAGE_SIZES, settings)


def make_transformers_swin(classes=7, version=1, **options) -> Peer:
    small = {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "num_labels": max(1, classes),
    }
    name = "Swin" if version == 1 else "Swinv2"
    config = getattr(transformers, f"{name}Config")(**small | options)
    model = getattr(transformers, f"{name}{'ForImageClassification' if classes else 'Model'}")(config)
    return peers.make_transformers_peer(model, bool(classes), IMAGE_SIZES)


def make_torchvision_swin(version=1, **options) -> Peer:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    options |= {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2} if version == 2 else {}
    small = {
        "patch_size": [2, 2],
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": [4, 4],
        "num_classes": 7,
    }
    model = randomise(SwinTransformer(**small | options))
    settings = {"image": (32, 32)}
    return Peer(model, lambda x: model.norm(model.features(x)).flatten(1, 2), model, IMAGE_SIZES, settings)


PEERS = {
    "timm": make_timm_swin,
    "timm, three stages and an oblong image": lambda: make_timm_swin(
        img_size=(32, 48), depths=(1, 2, 1), num_heads=(1, 2, 4), mlp_ratio=2.0
    ),
    "timm, a stage smaller than a window": lambda: make_timm_swin(window_size=7, img_size=12),
    "transformers": make_transformers_swin,
    "transformers, no head": lambda: make_transformers_swin(classes=0),
    "transformers, tanh GELU, no bias on q, k, v": lambda: make_transformers_swin(
        hidden_act="gelu_new", qkv_bias=False
    ),
    "torchvision": make_torchvision_swin,
    "timm, V2": lambda: make_timm_swin(2),
    "timm, V2, positions of other windows": lambda: make_timm_swin(2, pretrained_window_sizes=(3, 2)),
    "timm, V2, a stage smaller than a window, no bias": lambda: make_timm_swin(
        2, window_size=7, img_size=12, qkv_bias=False
    ),
    "transformers, V2": lambda: make_transformers_swin(version=2),
    "transformers, V2, no head, positions of other windows": lambda: make_transformers_swin(
        0, 2, pretrained_window_sizes=[3, 2], hidden_act="gelu_new"
    ),
    "torchvision, V2": lambda: make_torchvision_swin(2),
}


@pytest.mark.parametrize("name", PEERS)
def test_features_and_logits_match_the_peer(name, tmp_path):
    peer = PEERS[name]()
    ours = open_model(peer.file(tmp_path), peer.settings)
    assert ours.config.attention.pad == ("zeros-after-shift" if "timm" in name else "zeros")
    check_agreement(ours, peer)


def to_microsoft_names(state):
    """Convert timm's names to Microsoft's: merging at the end of a stage, buffers, and a plain head."""
    renamed = {}
    for name, tensor in state.items():
        name_parts = name.split(".")
        if "downsample" in name_parts:
            name_parts[1] = str(int(name_parts[1]) - 1)
        renamed[".".join(name_parts).replace("head.fc.", "head.")] = tensor
    for name in [name for name in renamed if name.endswith("bias_table")]:
        base = name.removesuffix("attn.relative_position_bias_table")
        renamed[base + "attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.int64)
        renamed[base + "attn_mask"] = torch.zeros(4, 16, 16)
    return renamed


@pytest.fixture
def microsoft_checkpoint(tmp_path):
    """Return a safetensors file in Microsoft's layout, with a .pth of the same tensors next to it, and its model."""
    peer = make_timm_swin()
    state = to_microsoft_names(peer.model.state_dict())
    torch.save({"model": state}, tmp_path / "swin.pth")
    save_file(state, tmp_path / "swin.safetensors")  # .pth files are read in a child process, which takes seconds
    return tmp_path / "swin.safetensors", peer


def test_microsoft_files_with_buffers_match(microsoft_checkpoint):
    path, peer = microsoft_checkpoint
    weights = open_weights(path, {"image": (32, 32)})
    assert weights.title == "Microsoft's Swin"
    assert weights.config == SMALL_SWIN.with_options(attention={"pad": "mask"})
    assert sum("attn_mask" in name for name in weights.unused) == 4
    without_size = open_weights(path)
    assert without_size.config.image == (16, 16)  # the smallest size whose last grid is one window
    assert "--source-size" in without_size.notes[0]
    ours, batch = open_model(path.with_suffix(".pth"), {"image": (32, 32)}), make_images((32, 32))
    assert compute_difference(ours(batch), peer.model(batch)) <= ERROR_LIMIT
    check_agreement(open_model(path, {"image": (32, 32), "attention.pad": "zeros-after-shift"}), peer)


MODELS = {
    "plain": (SMALL_SWIN, {"swin", "timm", "huggingface", "torchvision"}),
    "no head": (replace(SMALL_SWIN, classes=0), {"swin", "timm", "huggingface"}),
    "a grid smaller than the window": (SMALL_SWIN.with_options(attention={"window": 12}), {"swin", "timm"}),
    "oblong": (replace(SMALL_SWIN, image=(32, 48)), {"swin", "timm", "torchvision"}),
    "four stages": (
        SMALL_SWIN.with_options(
            blocks=(1, 1, 2, 1), heads=(1, 2, 4, 8), channels=1, attention={"window": 2, "qkv_bias": False}
        ),
        {"swin", "timm", "huggingface", "torchvision"},
    ),
    "one stage": (replace(SMALL_SWIN, blocks=(2,), heads=(2,)), {"timm", "huggingface", "torchvision"}),
    "windows that are not square": (replace(SMALL_SWIN, image=(32, 8)), set()),
    "V2": (SMALL_SWIN_V2, {"swin", "timm", "huggingface", "torchvision"}),
    "V2, no head, no bias on q and v": (
        SMALL_SWIN_V2.with_options(classes=0, attention={"qkv_bias": False}),
        {"swin", "timm", "huggingface"},
    ),
    "V2, positions of other windows": (
        SMALL_SWIN_V2.with_options(attention={"pretrained_window": (3, 2)}),
        {"swin", "timm", "huggingface"},
    ),
    "V2, a grid smaller than the window": (
        SMALL_SWIN_V2.with_options(attention={"window": 12}),
        {"swin", "timm", "huggingface"},
    ),
}


def save_in_format(form, config, tensors, path):
    """Save tensors as the file or folder of a format."""
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    if form.describe:
        (path / "config.json").write_text(json.dumps(form.describe(config)))
    return path


@pytest.mark.parametrize("name", MODELS)
def test_models_survive_a_round_trip_between_formats(name, tmp_path):
    """Every tensor, buffers included, is bit-identical after two conversions."""
    config, formats = MODELS[name]
    writable_formats = find_writable_formats(config)
    assert set(writable_formats) == formats
    ours = randomise(build_model(config)).state_dict()
    for a in formats:
        first = writable_formats[a].to_file(config, ours)
        settings = {"image": config.image} | (
            {} if config.version == 1 else {"attention.window": config.attention.window}
        )
        settings |= (
            {"attention.pretrained_window": config.attention.pretrained_window}
            if config.attention.pretrained_window
            else {}
        )
        weights = open_weights(save_in_format(writable_formats[a], config, first, tmp_path / a), settings)
        assert weights.title == writable_formats[a].title
        assert (weights.config.windows, weights.config.blocks) == (config.windows, config.blocks)
        for b in formats - {a}:
            path = save_in_format(
                writable_formats[b],
                config,
                writable_formats[b].to_file(weights.config, weights.read_state()),
                tmp_path / f"{a} {b}",
            )
            reloaded = open_weights(path, settings)
            third = writable_formats[a].to_file(reloaded.config, reloaded.read_state())
            assert third.keys() == first.keys()
            assert all(torch.equal(third[key], first[key]) for key in first), (a, b)


@pytest.mark.parametrize("config", [SMALL_SWIN, SMALL_SWIN_V2], ids=["V1", "V2"])
def test_other_libraries_load_written_weights(config, tmp_path):
    model = randomise(build_model(config))
    batch = make_images((32, 32))
    expected = model(batch)
    for name, peer in (
        ("timm", make_timm_swin(config.version)),
        ("torchvision", make_torchvision_swin(config.version)),
    ):
        before = peer.model.state_dict()
        written = get_writable_format(name, config).to_file(config, model.state_dict())
        peer.model.load_state_dict(written, strict=True)
        assert compute_difference(expected, peer.model(batch)) <= ERROR_LIMIT
        buffers = [key for key in before if key.endswith(("index", "coords_table"))]  # buffers that are computed
        assert all(torch.equal(written[key], before[key]) for key in buffers)
    form = get_writable_format("huggingface", config)
    folder = save_in_format(form, config, form.to_file(config, model.state_dict()), tmp_path / "folder")
    model_class = getattr(transformers, f"Swin{'v2' * (config.version == 2)}ForImageClassification")
    theirs, info = model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), (
        info
    )
    assert compute_difference(expected, theirs.eval()(batch).logits) <= ERROR_LIMIT
    theirs.save_pretrained(tmp_path / "again")
    reloaded = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(reloaded[key], tensor) for key, tensor in form.to_file(config, model.state_dict()).items())


@pytest.mark.parametrize("config", [SMALL_SWIN, SMALL_SWIN_V2], ids=["V1", "V2"])
def test_bare_state_dicts_are_read(config, tmp_path):
    model = randomise(build_model(config.with_options(attention={"pad": "mask"})))
    save_file(model.state_dict(), tmp_path / "ours.safetensors")
    weights = open_weights(tmp_path / "ours.safetensors", {"image": (32, 32), "attention.window": 4})
    assert weights.title == "a state dict of vitreous' Swin" + " V2" * (config.version == 2)
    assert torch.equal(weights.build_bundle().model(make_images((32, 32))), model(make_images((32, 32))))


def test_other_windows_use_the_resize_rule_of_microsoft(tmp_path):
    """Bicubic interpolation of the offset table, as in `load_pretrained` of Microsoft's utils.py."""
    peer = make_timm_swin()
    wide = build_model(SMALL_SWIN.with_options(attention={"window": 8}))
    weights = load_pretrained_weights(wide, open_weights(peer.file(tmp_path), {"image": (32, 32)}))
    assert weights.resized == "4 -> 8"
    theirs = peer.model.layers[1].blocks[1].attn.relative_position_bias_table
    table = theirs.detach().T.reshape(1, 4, 7, 7)
    resized_table = torch.nn.functional.interpolate(table, size=(15, 15), mode="bicubic")[0].permute(1, 2, 0)
    assert torch.allclose(wide.stages[1].blocks[1].attention.part.part.position.table, resized_table, atol=1e-6)


def test_unsupported_files_are_rejected_with_a_hint(tmp_path):
    peer = make_timm_swin(window_size=7, img_size=12)  # windows of 6 and 3
    path = peer.file(tmp_path)
    assert open_weights(path).config.image == (12, 12)
    with pytest.raises(WeightsError, match="windows are 6 x 6, 3 x 3"):
        open_weights(path, {"image": (32, 32)})
    state = make_timm_swin().model.state_dict()
    state["layers.0.blocks.0.attn.relative_position_bias_table"] = torch.zeros(50, 2)
    save_file(state, tmp_path / "odd.safetensors")
    with pytest.raises(WeightsError, match="50 relative positions do not match a square window"):
        open_weights(tmp_path / "odd.safetensors")
    with pytest.raises(UsageError, match="huggingface cannot represent"):
        get_writable_format("huggingface", replace(SMALL_SWIN, image=(32, 48)))
    folder = make_transformers_swin().file(tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"use_absolute_embeddings": True}))
    with pytest.raises(WeightsError, match="use_absolute_embeddings"):
        open_weights(folder)


def test_a_class_map_selects_rows_of_the_head(microsoft_checkpoint, tmp_path):
    """As in Microsoft's 22k-to-1k conversion, class i uses the head row named in line i."""
    path, peer = microsoft_checkpoint
    (tmp_path / "map.txt").write_text("5\n0\n6\n")
    settings = {"image": (32, 32)}
    document = convert(path, tmp_path / "few", settings=settings, class_map=tmp_path / "map.txt")
    assert document["loaded"] == len(peer.model.state_dict())
    batch = make_images((32, 32))
    selected = load_bundle(tmp_path / "few")
    assert selected.classes == ("0", "1", "2")
    assert compute_difference(selected.model(batch), peer.model(batch)[:, [5, 0, 6]]) <= ERROR_LIMIT
    for text, message in (("7\n", "selects row 7"), ("a b", "not a class map"), ("", "not a class map: it is empty")):
        (tmp_path / "wrong.txt").write_text(text)
        with pytest.raises(UsageError, match=message):
            select_classes(open_weights(path, settings), tmp_path / "wrong.txt")
    save_file(build_model(replace(SMALL_SWIN, classes=0)).state_dict(), tmp_path / "bare.safetensors")
    with pytest.raises(UsageError, match="no head"):
        select_classes(open_weights(tmp_path / "bare.safetensors", settings), tmp_path / "map.txt")


def test_v2_files_take_the_window_from_name_or_buffers(tmp_path):
    """The window size is read from buffers, file name, metadata or options; otherwise 8 is assumed with a note."""
    state = make_timm_swin(2, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2)).model.state_dict()
    for name, window, trained, image in (
        ("swinv2_tiny_window16_256", 16, (), 256),
        ("swinv2_base_patch4_window12to24_192to384", 24, (12, 12, 12, 6), 384),
        ("plain", 8, (), 256),
    ):
        save_file(state, tmp_path / f"{name}.safetensors")
        weights = open_weights(tmp_path / f"{name}.safetensors")
        # patch size 2: half the published image size
        assert (weights.config.attention.window, weights.config.attention.pretrained_window) == (window, trained), name
        assert weights.config.image == (image // 2, image // 2), name
        assert any("windows" in text for text in weights.notes) == (name == "plain")
    path = make_torchvision_swin(2).file(tmp_path)
    assert open_weights(path).config.attention.window == 4
    written = tmp_path / "written.safetensors"
    config = SMALL_SWIN_V2.with_options(attention={"pretrained_window": (3, 2)})
    convert_to = get_writable_format("timm", config).to_file(config, build_model(config).state_dict())
    save_file(convert_to, written, metadata=config_to_metadata(config))
    assert open_weights(written).config.with_options(attention={"pad": "zeros"}) == config


def test_unused_key_biases_of_torchvision_are_zero(tmp_path):
    peer = make_torchvision_swin(2)
    weights = open_weights(peer.file(tmp_path))
    written = get_writable_format("torchvision", weights.config).to_file(weights.config, weights.read_state())
    theirs = peer.model.state_dict()
    for name, tensor in theirs.items():
        if name.endswith("qkv.bias"):
            q, k, v = written[name].chunk(3)
            assert torch.equal(torch.cat([q, v]), torch.cat([tensor.chunk(3)[0], tensor.chunk(3)[2]])) and not k.any()
        else:
            assert torch.equal(written[name], tensor)
