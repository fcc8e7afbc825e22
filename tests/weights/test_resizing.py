"""Position resizing: each format of docs/reference/weights.md is compared with a restatement of its authors' code.

The models around the positions are those of timm or torchvision.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.conftest import run_cli
from tests.weights import peers
from tests.weights.peers import compute_difference, make_images, make_timm_vit
from vitreous.apps.server import start
from vitreous.errors import UsageError, VitreousError, WeightsError
from vitreous.inference.predict import load
from vitreous.models.config import BiTConfig, MlpConfig, ViTConfig
from vitreous.nn.grid import RESIZE_MODES
from vitreous.tasks.classification import Classification
from vitreous.weights.adopt import open_weights
from vitreous.weights.bundle import Bundle
from vitreous.weights.foreign import find_writable_formats
from vitreous.weights.formats import google
from vitreous.weights.options import WeightsSource

WEIGHTS_PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "weights.md").read_text("utf-8")
#: native, larger, one native side, oblong, smaller; patches of 8 pixels
IMAGE_SIZES = [(32, 32), (48, 48), (32, 48), (48, 32), (40, 56), (24, 16)]


def interpolate_table(table: Tensor, height: int, width: int, **options: Any) -> Tensor:
    """Interpolate a square table (N, D) to (height * width, D) with PyTorch."""
    side = int(len(table) ** 0.5)
    source = table.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    resized = F.interpolate(source, **({"size": (height, width)} if "scale_factor" not in options else {}), **options)
    return resized.permute(0, 2, 3, 1).reshape(height * width, -1)


def resize_like_dino(table: Tensor, height: int, width: int) -> Tensor:
    """`interpolate_pos_encoding` of DINO and DINOv2: unchanged only for a square with as many patches."""
    if len(table) == height * width and height == width:
        return table
    side = int(len(table) ** 0.5)
    return interpolate_table(
        table, height, width, mode="bicubic", scale_factor=((height + 0.1) / side, (width + 0.1) / side)
    )


def resize_like_deit(table: Tensor, height: int, width: int) -> Tensor:
    """main.py of DeiT and `interpolate_pos_embed` of MAE, extended from squares to other shapes."""
    return interpolate_table(table, height, width, mode="bicubic", align_corners=False)


def resize_like_dinov2_registers(table: Tensor, height: int, width: int) -> Tensor:
    """DINOv2 with `interpolate_offset=0.0, interpolate_antialias=True`."""
    if len(table) == height * width and height == width:
        return table
    return interpolate_table(table, height, width, mode="bicubic", antialias=True)


def resize_like_torchvision(table: Tensor, height: int, width: int) -> Tensor:
    """`interpolate_embeddings`, extended from squares to other shapes."""
    return interpolate_table(table, height, width, mode="bicubic", align_corners=True)


def resize_like_google(table: Tensor, height: int, width: int) -> Tensor:
    """`interpolate_posembed`, extended from squares to other shapes."""
    from scipy.ndimage import zoom

    side = int(len(table) ** 0.5)
    resized = zoom(table.reshape(side, side, -1).numpy(), (height / side, width / side, 1), order=1)
    return torch.from_numpy(resized).reshape(height * width, -1)


def resize_like_timm(table: Tensor, height: int, width: int) -> Tensor:
    """`resample_abs_pos_embed`."""
    from timm.layers import resample_abs_pos_embed

    return resample_abs_pos_embed(table[None], [height, width], num_prefix_tokens=0)[0]


ResizeRule = Callable[[Tensor, int, int], Tensor]


@torch.inference_mode()
def forward_with_rule(
    model: Any, pixels: Tensor, rule: ResizeRule, registers: Tensor | None = None, placed: bool = True
) -> Tensor:
    """Run a timm ViT with another resize rule; return all tokens after the norm.

    If `placed`, the first position belongs to the class token.
    """
    x = model.patch_embed.proj(pixels)
    height, width = x.shape[2:]
    stored = model.pos_embed.detach()[0]
    first, table = (stored[:1], stored[1:]) if placed else (torch.zeros(1, stored.shape[1]), stored)
    x = x.flatten(2).transpose(1, 2) + rule(table, height, width)
    front = (
        (model.cls_token.detach()[0] + first)
        if registers is None
        else torch.cat([model.cls_token.detach()[0] + first, registers])
    )
    return model.norm(model.blocks(torch.cat([front.expand(len(x), -1, -1), x], 1)))


@dataclass
class ReferenceFile:
    """A weights file, a reference forward pass of its authors' code, and their resize rule."""

    path: Path
    reference: Callable[[Tensor], Tensor]
    rule: str
    settings: dict[str, Any] = field(default_factory=lambda: {"heads": 4})


def build_small_vit(**options: Any) -> Any:
    return make_timm_vit(**({"depth": 1} | options)).model


def copy_state(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def save_pickle(folder: Path, content: Any) -> Path:
    torch.save(content, folder / "weights.pth")
    return folder / "weights.pth"


def save_safetensors(folder: Path, state: dict[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def write_timm_state_dict(folder: Path) -> ReferenceFile:
    model = build_small_vit()
    return ReferenceFile(
        save_safetensors(folder, copy_state(model)), lambda x: model.forward_features(x), "bicubic-antialias"
    )


def write_timm_folder(folder: Path) -> ReferenceFile:
    model = build_small_vit()
    described = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"input_size": [3, 32, 32]}}
    (folder / "config.json").write_text(json.dumps(described))
    save_file(copy_state(model), folder / "model.safetensors")
    return ReferenceFile(folder, lambda x: model.forward_features(x), "bicubic-antialias")


def write_dino(folder: Path, head: bool = True) -> ReferenceFile:
    model = build_small_vit(num_classes=0)
    renamed = {f"backbone.{name}": tensor for name, tensor in copy_state(model).items()}
    head_tensors = {
        "head.mlp.0.weight": torch.ones(3, 48),
        "head.last_layer.weight_g": torch.ones(5, 1),
        "head.last_layer.weight_v": torch.ones(5, 3),
    }
    renamed |= head_tensors if head else {}
    content = {
        "student": {f"module.{name}": tensor for name, tensor in renamed.items()},
        "teacher": renamed,
        "epoch": 3,
    }
    return ReferenceFile(
        save_pickle(folder, content), partial(forward_with_rule, model, rule=resize_like_dino), "bicubic-offset"
    )


def write_deit(folder: Path) -> ReferenceFile:
    model = build_small_vit()
    return ReferenceFile(
        save_pickle(folder, {"model": copy_state(model)}),
        partial(forward_with_rule, model, rule=resize_like_deit),
        "bicubic",
    )


def write_deit_iii(folder: Path) -> ReferenceFile:
    model = build_small_vit(init_values=1e-6, no_embed_class=True)
    renamed = {re.sub(r"\.ls(\d)\.gamma", r".gamma_\1", name): tensor for name, tensor in copy_state(model).items()}
    return ReferenceFile(
        save_pickle(folder, {"model": renamed}),
        partial(forward_with_rule, model, rule=resize_like_deit, placed=False),
        "bicubic",
    )


def write_mae(folder: Path) -> ReferenceFile:
    model = build_small_vit(num_classes=0)
    decoder = {
        "mask_token": torch.ones(1, 1, 8),
        "decoder_embed.weight": torch.ones(8, 48),
        "decoder_pos_embed": torch.ones(1, 17, 8),
    }
    return ReferenceFile(
        save_safetensors(folder, copy_state(model) | decoder),
        partial(forward_with_rule, model, rule=resize_like_deit),
        "bicubic",
    )


def write_dinov2(folder: Path, registers: int = 0) -> ReferenceFile:
    model = build_small_vit(num_classes=0, init_values=1e-5)
    tokens = 0.3 * torch.randn(1, registers, 48, generator=torch.Generator().manual_seed(1))
    renamed = copy_state(model) | {"mask_token": torch.ones(1, 48)} | ({"register_tokens": tokens} if registers else {})
    rule, resize_options = (
        (resize_like_dinov2_registers, "bicubic-antialias") if registers else (resize_like_dino, "bicubic-offset")
    )
    return ReferenceFile(
        save_safetensors(folder, renamed),
        partial(forward_with_rule, model, rule=rule, registers=tokens[0] if registers else None),
        resize_options,
    )


def write_google_npz(folder: Path, format_name: str = "google-npz", **options: Any) -> ReferenceFile:
    model = build_small_vit(act_layer="gelu_tanh", **options)
    ours = (
        open_weights(save_safetensors(folder, copy_state(model)), {"heads": 4, "mlp.gelu": "tanh"}).build_bundle().model
    )
    form = next(candidate for candidate in google.FORMATS if candidate.name == format_name)
    with open(folder / "weights.npz", "wb") as file:
        np.savez(
            file, **{name: tensor.numpy() for name, tensor in form.to_file(ours.config, ours.state_dict()).items()}
        )
    return ReferenceFile(
        folder / "weights.npz",
        partial(forward_with_rule, model, rule=resize_like_google, placed=not options),
        "zoom-scipy",
        {},
    )


def write_torchvision(folder: Path) -> ReferenceFile:
    model = peers.make_torchvision_vit().model

    @torch.inference_mode()
    def forward_reference(pixels: Tensor) -> Tensor:
        x = model.conv_proj(pixels)
        positions = model.encoder.pos_embedding.detach()[0]
        table = resize_like_torchvision(positions[1:], *x.shape[2:])
        x = torch.cat([model.class_token.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1) + torch.cat(
            [positions[:1], table]
        )
        return model.encoder.ln(model.encoder.layers(x))

    return ReferenceFile(save_safetensors(folder, copy_state(model)), forward_reference, "bicubic-aligned")


#: formats of docs/reference/weights.md whose resize code is restated here; test_parity covers those of transformers
DOCUMENTED_FORMATS: dict[str, Callable[[Path], ReferenceFile]] = {
    "timm, folder of the Hub": write_timm_folder,
    "timm, state dict alone": write_timm_state_dict,
    "DINO, with its head": write_dino,
    "DINO, `teacher` or `student`": lambda folder: write_dino(folder, head=False),
    "DeiT or MAE, under `model`": write_deit,
    "MAE, with its decoder": write_mae,
    "DeiT-III": write_deit_iii,
    "DINOv2": write_dinov2,
    "DINOv2, registers": lambda folder: write_dinov2(folder, 3),
    "torchvision": write_torchvision,
    "Google, published names": write_google_npz,
    "Google, linen's names": lambda folder: write_google_npz(folder, "linen-npz"),
    "big_vision": lambda folder: write_google_npz(folder, "big-vision-npz", no_embed_class=True),
}


@pytest.mark.parametrize("row", DOCUMENTED_FORMATS)
def test_features_match_the_official_code_at_every_size(row, tmp_path):
    reference_file = DOCUMENTED_FORMATS[row](tmp_path)
    model = open_weights(reference_file.path, reference_file.settings).build_bundle().model
    assert model.config.positions.resize == reference_file.rule
    for size in IMAGE_SIZES:
        batch = make_images(size)
        with torch.inference_mode():
            assert compute_difference(model.features(batch), reference_file.reference(batch)) <= peers.ERROR_LIMIT, size


def test_zeros_in_the_last_row_match_the_code_of_google(tmp_path):
    reference_file = write_google_npz(tmp_path, img_size=(56, 56), patch_size=2)
    model = open_weights(reference_file.path).build_bundle().model
    reference_file.reference.keywords["placed"] = True
    batch = make_images((96, 96), 1)
    with torch.inference_mode():
        assert not model.position.read((48, 48))[-1].any()
        assert compute_difference(model.features(batch), reference_file.reference(batch)) <= peers.ERROR_LIMIT


TRANSFORMERS_FOLDERS: dict[str, tuple[Callable[[], peers.Peer], str]] = {
    "transformers ViT, DeiT, ViTMAE, ViT-MSN, I-JEPA (no class token, mean)": (peers.make_transformers_vit, "bicubic"),
    "transformers DINOv2": (peers.make_transformers_dinov2, "bicubic"),
    "transformers DINOv2, registers": (lambda: peers.make_transformers_dinov2(3), "bicubic-antialias"),
    "transformers CLIP": (peers.make_transformers_clip, "bicubic"),
}


@pytest.mark.parametrize("row", TRANSFORMERS_FOLDERS)
def test_transformers_folders_define_the_resize_rule(row, tmp_path):
    make, rule = TRANSFORMERS_FOLDERS[row]
    weights = open_weights(make().file(tmp_path))
    assert weights.config.positions.resize == rule
    assert not [note for note in weights.notes if "positions" in note]


def test_the_sam_encoder_of_timm_uses_the_rule_of_timm(tmp_path):
    from timm.layers import resample_abs_pos_embed_nhwc

    peer = peers.make_timm_sam()
    model = open_weights(peer.file(tmp_path), peer.settings).build_bundle().model
    for grid in ((8, 8), (12, 12), (8, 12), (5, 7)):
        theirs = resample_abs_pos_embed_nhwc(peer.model.pos_embed.detach(), list(grid))[0]
        assert (model.position.read(grid) - theirs).abs().max() <= 1e-5


def read_format_table() -> list[list[str]]:
    """Return the cells of the format table in docs/reference/weights.md, without its header."""
    lines = [line for line in WEIGHTS_PAGE.split("## Formats")[1].split("\n##")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_lists_every_format_and_its_rule():
    rows = {cells[0]: cells for cells in read_format_table()}
    assert len(rows) == len(read_format_table())
    assert {*DOCUMENTED_FORMATS, *TRANSFORMERS_FOLDERS} <= rows.keys()
    for cells in read_format_table():
        assert len(cells) == 7, cells[0]
        assert {*re.findall(r"`((?:bicubic|bilinear|zoom)[\w-]*)`", cells[2])} <= RESIZE_MODES.keys() and cells[2], (
            cells[0]
        )


@pytest.mark.parametrize("row", DOCUMENTED_FORMATS)
def test_the_page_lists_the_rule_and_gelu_that_are_used(row, tmp_path):
    cells = {cells[0]: cells for cells in read_format_table()}[row]
    config = DOCUMENTED_FORMATS[row](tmp_path)
    weights = open_weights(config.path, {"heads": 4}).config
    assert cells[2] == f"`{weights.positions.resize}`"
    assert cells[4] == {"none": "exact", "tanh": "tanh"}[weights.mlp.gelu]


#: format -> note about the assumed rule; formats with a known rule have no note
EXPECTED_NOTES = {
    "timm, state dict alone": "assumed bicubic-antialias, timm's rule; for the original DeiT and MAE: --resize bicubic, "
    "for DINO",
    "DINO, `teacher` or `student`": "assumed bicubic-offset, DINO's",
    "DeiT or MAE, under `model`": "assumed bicubic, DeiT's and MAE's rule",
    "DINOv2, registers": "assumed bicubic-antialias, the rule of the released models with registers; for the "
    "constructor's"
    " defaults: --resize bicubic-offset",
}


@pytest.mark.parametrize("row", DOCUMENTED_FORMATS)
def test_assumed_resize_rules_are_reported(row, tmp_path):
    reference_file = DOCUMENTED_FORMATS[row](tmp_path)
    notes = [note for note in open_weights(reference_file.path, reference_file.settings).notes if "resized" in note]
    assert len(notes) == (row in EXPECTED_NOTES) and all(EXPECTED_NOTES[row] in note for note in notes)
    chosen_rule = open_weights(reference_file.path, reference_file.settings | {"positions.resize": "bilinear"})
    assert chosen_rule.config.positions.resize == "bilinear" and not [
        note for note in chosen_rule.notes if "resized" in note
    ]


def test_timm_models_with_register_tokens_keep_the_rule_of_timm(tmp_path):
    weights = open_weights(save_pickle(tmp_path, {"model": copy_state(build_small_vit(reg_tokens=2))}), {"heads": 4})
    assert (weights.title, weights.config.positions.resize) == ("timm", "bicubic-antialias")


def test_open_clips_folder_has_open_clips_rule(tmp_path):
    clip = peers.make_transformers_clip(hidden_size=128, num_attention_heads=2)
    bundle = open_weights(clip.file(tmp_path)).build_bundle()
    clip_tensors = find_writable_formats(bundle.model.config)["clip"].to_file(
        bundle.model.config, bundle.model.state_dict()
    )
    bare_weights = open_weights(save_safetensors(tmp_path, clip_tensors))
    assert bare_weights.config.positions.resize == "bicubic" and any(
        "for open_clip: --resize bicubic-antialias" in note for note in bare_weights.notes
    )
    (tmp_path / "other").mkdir()
    save_file(clip_tensors, tmp_path / "other" / "open_clip_model.safetensors")
    (tmp_path / "other" / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"embed_dim": 24}}))
    weights = open_weights(tmp_path / "other")
    assert weights.config.positions.resize == "bicubic-antialias" and not [
        note for note in weights.notes if "resized" in note
    ]


def write_oblong_model(folder: Path, format_name: str) -> Path:
    """Write a model of 6 x 4 patches and a class token in a format."""
    config = ViTConfig(image=(48, 32), patch=(8, 8), classes=3, width=48, depth=1, heads=4, mlp=MlpConfig(hidden=96))
    bundle = make_bundle(config)
    if format_name == "google-npz":
        with open(folder / "weights.npz", "wb") as file:
            form = google.GOOGLE
            np.savez(
                file,
                **{name: tensor.numpy() for name, tensor in form.to_file(config, bundle.model.state_dict()).items()},
            )
        return folder / "weights.npz"
    return save_safetensors(
        folder, find_writable_formats(config)[format_name].to_file(config, bundle.model.state_dict())
    )


def make_bundle(config: Any) -> Bundle:
    from vitreous.data.modalities.images import ImagePreprocess
    from vitreous.models.zoo import build_model

    model = peers.randomise(build_model(config))
    preprocess = ImagePreprocess(image=config.image, mean=(0.5,) * 3, std=(0.5,) * 3, channels=3)
    return Bundle(model, Classification(tuple(f"class {i}" for i in range(config.classes))), preprocess)


def test_rectangular_positions_of_google_need_the_source_size(tmp_path):
    path = write_oblong_model(tmp_path, "google-npz")
    with pytest.raises(
        WeightsError, match="25 positions form no square grid of patches in addition to 1 for the class token"
    ) as rejected:
        open_weights(path)
    assert "--source-size HEIGHT WIDTH" in rejected.value.hint
    weights = open_weights(WeightsSource(str(path), source_size=(48, 32))).config
    assert (weights.image, weights.prefix_position_count) == ((48, 32), 1)


def test_rectangular_positions_of_timm_are_reported_as_assumed_square(tmp_path):
    path = write_oblong_model(tmp_path, "timm")
    weights = open_weights(path, {"heads": 4})
    assert (weights.config.grid, weights.config.prefix_position_count) == ((5, 5), 0)
    assert any(
        "5 x 5 patches, images of 40 x 40 pixels, and that the class token has none" in note for note in weights.notes
    )
    weights = open_weights(path, {"heads": 4, "image": (48, 32)})
    assert weights.config.grid == (6, 4) and not [note for note in weights.notes if "grid" in note]


def test_ambiguous_grids_are_reported(tmp_path):
    weights = open_weights(write_google_npz(tmp_path, img_size=(64, 256), patch_size=16, no_embed_class=False).path)
    assert weights.config.image == (128, 128)
    assert any(
        "assumed 8 x 8 patches, images of 128 x 128 pixels (--source-size HEIGHT WIDTH)" in note
        for note in weights.notes
    )
    wide_grid = open_weights(tmp_path / "weights.npz", {"image": (64, 256)})
    assert wide_grid.config.grid == (4, 16) and wide_grid.notes == ()
    (tmp_path / "prime").mkdir()
    # 5 x 5 is the only possible grid
    assert open_weights(write_google_npz(tmp_path / "prime", img_size=(40, 40)).path).notes == ()


def test_invalid_source_options_are_rejected(tmp_path):
    with pytest.raises(UsageError, match="unknown position resize rule bicubik"):
        WeightsSource("weights", "bicubik")  # type: ignore[arg-type]
    for size in (0, (), (3, 3, 3, 3), (32, -1)):
        with pytest.raises(UsageError, match="source_size cannot be"):
            WeightsSource("weights", None, size)
    make_bundle(BiTConfig(image=(32, 32), blocks=(1,), width=32, classes=3)).save(tmp_path / "bit")
    with pytest.raises(UsageError, match="no learned positions"):
        open_weights(WeightsSource(str(tmp_path / "bit"), "zoom"))
    config = ViTConfig(image=(32, 32), patch=(8, 8), classes=3, width=48, depth=1, heads=4, mlp=MlpConfig(hidden=96))
    make_bundle(config).save(tmp_path / "vit")
    with pytest.raises(UsageError, match=r"source_size=48: .* is a bundle for images of 32 pixels"):
        open_weights(WeightsSource(str(tmp_path / "vit"), None, 48))
    weights = open_weights(WeightsSource(str(tmp_path / "vit"), "zoom", 32))
    assert (
        weights.config == config.with_options(positions={"resize": "zoom"})
        and weights.build_bundle().model.position.resize_rule == "zoom"
    )


@pytest.fixture(scope="module")
def state_dict_folder(tmp_path_factory):
    """Return a folder with a bare state dict of 6 x 4 patches, an image, and data of two classes."""
    from PIL import Image

    state_dict_folder = tmp_path_factory.mktemp("home")
    (state_dict_folder / "weights").mkdir()
    write_oblong_model(state_dict_folder / "weights", "timm")
    draw = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2), ("test", 2)):
        for name in ("0", "1", "2"):
            (state_dict_folder / "data" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 255, (48, 32, 3), np.uint8)
                Image.fromarray(pixels).save(state_dict_folder / "data" / split / name / f"{number}.png")
    return state_dict_folder


SOURCE_OPTIONS = ["--source-size", "48", "32", "--resize", "bicubic"]
VERB_COMMANDS = {
    "serve": ["serve", "WEIGHTS"],
    "predict": ["predict", "WEIGHTS", "data/test/0/0.png"],
    "embed": ["embed", "WEIGHTS", "data/test/0", "--out", "OUT.npz"],
    "evaluate": ["evaluate", "WEIGHTS", "data"],
    "evaluate, knn": ["evaluate", "WEIGHTS", "data", "--protocol", "knn"],
    "inspect": ["inspect", "WEIGHTS", "--figures", "positions", "--out", "OUT"],
    "export": ["export", "WEIGHTS", "--to", "timm", "--out", "OUT.safetensors"],
    "convert": ["convert", "WEIGHTS", "OUT"],
    "train": [
        "train",
        "data",
        "--init",
        "WEIGHTS",
        "--image-size",
        "32",
        "--epochs",
        "1",
        "--device",
        "cpu",
        "--dry-run",
    ],
}


@pytest.mark.parametrize("verb", VERB_COMMANDS)
def test_every_verb_reports_assumptions_and_accepts_source_options(verb, state_dict_folder, monkeypatch):
    def serve(run, settings, how, exact, quick, up, vae):
        up(
            SimpleNamespace(
                service=SimpleNamespace(served=SimpleNamespace(predictor=load(run, how))), address="http://127.0.0.1"
            )
        )
        return 1  # as if interrupted: returning 0 would end the process

    monkeypatch.setattr(start, "serve", serve)
    name = re.sub(r"\W", "", verb)

    def run_verb(*source_options: str) -> Any:
        words = [word.replace("WEIGHTS", "weights/weights.safetensors") for word in VERB_COMMANDS[verb]]
        words = [word.replace("OUT", f"{name}{len(source_options)}") for word in words]
        return run_cli(*words, *source_options, cwd=state_dict_folder)

    without = run_verb()
    assert "does not specify its position grid: assumed 5 x 5" in without.stderr, without.stderr
    assert "assumed bicubic-antialias" in without.stderr
    result = run_verb(*SOURCE_OPTIONS)
    assert result.returncode == (0 if verb != "serve" else without.returncode), result.stderr
    assert "positions" not in "".join(line for line in result.stderr.splitlines() if "does not specify" in line)


def test_source_options_apply_to_foreign_weights_not_bundles(state_dict_folder):
    weights = "weights/weights.safetensors"
    assert run_cli("convert", weights, "beside", *SOURCE_OPTIONS, cwd=state_dict_folder).returncode == 0
    result = run_cli("evaluate", weights, "beside", "data", *SOURCE_OPTIONS, cwd=state_dict_folder)
    assert result.returncode == 0 and "does not specify" not in result.stderr, result.stderr
    result = run_cli("evaluate", weights, "beside", "data", cwd=state_dict_folder)
    assert "assumed 5 x 5" in result.stderr


def test_training_stores_the_source_options(state_dict_folder):
    arguments = [
        "train",
        "data",
        "--init",
        "weights/weights.safetensors",
        "--image-size",
        "32",
        "--epochs",
        "1",
        "--device",
        "cpu",
    ]
    result = run_cli(*arguments, *SOURCE_OPTIONS, "--out", "run", cwd=state_dict_folder)
    assert result.returncode == 0, result.stderr
    config = (state_dict_folder / "run" / "config.yaml").read_text()
    assert "resize: bicubic\n" in config and re.search(r"init_source_size:\s*(\[48, 32\]|\n\s*- 48\n\s*- 32)", config)
    assert "positions resized 6x4 -> 4" in result.stderr
    result = run_cli("train", "data", "--resize", "zoom", cwd=state_dict_folder)
    assert result.returncode == 2 and "--resize and --source-size are for initial weights" in result.stderr


def test_load_accepts_source_options_except_for_exported_files(state_dict_folder):
    import vitreous

    predictor = vitreous.load(
        state_dict_folder / "weights" / "weights.safetensors", resize="zoom", source_size=(48, 32)
    )
    assert predictor.bundle is not None
    config = predictor.bundle.model.config
    assert isinstance(config, ViTConfig) and (config.positions.resize, config.grid, predictor.bundle.notes[:0]) == (
        "zoom",
        (6, 4),
        (),
    )
    with pytest.raises(VitreousError, match="is an exported file"):
        vitreous.load("model.onnx", resize="zoom")
