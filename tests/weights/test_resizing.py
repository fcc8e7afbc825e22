"""How positions are resized, by whoever wrote the file: each row of docs/weights.md, beside the arithmetic of its
authors.

The arithmetic is written here again from their code, in its own terms; networks around it are timm's or torchvision's.
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

from tests.conftest import say
from tests.weights import peers
from tests.weights.peers import difference, images, timm_vit
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

PAGE = (Path(__file__).parents[2] / "docs" / "weights.md").read_text("utf-8")
#: native, larger, one side native, oblong, smaller; patches of 8 pixels
SIZES = [(32, 32), (48, 48), (32, 48), (48, 32), (40, 56), (24, 16)]


def sized(table: Tensor, height: int, width: int, **how: Any) -> Tensor:
    """(N, D), a square -> (height * width, D), by PyTorch's interpolation."""
    side = int(len(table) ** 0.5)
    source = table.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    found = F.interpolate(source, **({"size": (height, width)} if "scale_factor" not in how else {}), **how)
    return found.permute(0, 2, 3, 1).reshape(height * width, -1)


def by_dino(table: Tensor, height: int, width: int) -> Tensor:
    """`interpolate_pos_encoding` of DINO and DINOv2: the stored table for a square of as many patches alone."""
    if len(table) == height * width and height == width:
        return table
    side = int(len(table) ** 0.5)
    return sized(table, height, width, mode="bicubic", scale_factor=((height + 0.1) / side, (width + 0.1) / side))


def by_deit(table: Tensor, height: int, width: int) -> Tensor:
    """main.py of DeiT and `interpolate_pos_embed` of MAE, which have squares only, taken to other shapes."""
    return sized(table, height, width, mode="bicubic", align_corners=False)


def by_registers(table: Tensor, height: int, width: int) -> Tensor:
    """DINOv2 with `interpolate_offset=0.0, interpolate_antialias=True`."""
    if len(table) == height * width and height == width:
        return table
    return sized(table, height, width, mode="bicubic", antialias=True)


def by_torchvision(table: Tensor, height: int, width: int) -> Tensor:
    """`interpolate_embeddings`, which has squares only, taken to other shapes."""
    return sized(table, height, width, mode="bicubic", align_corners=True)


def by_google(table: Tensor, height: int, width: int) -> Tensor:
    """`interpolate_posembed`, which has squares only, taken to other shapes."""
    from scipy.ndimage import zoom

    side = int(len(table) ** 0.5)
    found = zoom(table.reshape(side, side, -1).numpy(), (height / side, width / side, 1), order=1)
    return torch.from_numpy(found).reshape(height * width, -1)


def by_timm(table: Tensor, height: int, width: int) -> Tensor:
    """`resample_abs_pos_embed`."""
    from timm.layers import resample_abs_pos_embed

    return resample_abs_pos_embed(table[None], [height, width], num_prefix_tokens=0)[0]


Rule = Callable[[Tensor, int, int], Tensor]


@torch.inference_mode()
def forward(model: Any, pixels: Tensor, rule: Rule, registers: Tensor | None = None, placed: bool = True) -> Tensor:
    """A ViT of timm with another way to resize positions, those of the class token first where it is `placed` -> all
    tokens, normed."""
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
class Made:
    """A file of some format, what answers as its authors' code does, and the format's authors' rule."""

    path: Path
    reference: Callable[[Tensor], Tensor]
    rule: str
    settings: dict[str, Any] = field(default_factory=lambda: {"heads": 4})


def small(**options: Any) -> Any:
    return timm_vit(**({"depth": 1} | options)).model


def state_of(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def pickled(folder: Path, content: Any) -> Path:
    torch.save(content, folder / "weights.pth")
    return folder / "weights.pth"


def stored(folder: Path, state: dict[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def timm_bare(folder: Path) -> Made:
    model = small()
    return Made(stored(folder, state_of(model)), lambda x: model.forward_features(x), "bicubic-antialias")


def timm_folder(folder: Path) -> Made:
    model = small()
    described = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"input_size": [3, 32, 32]}}
    (folder / "config.json").write_text(json.dumps(described))
    save_file(state_of(model), folder / "model.safetensors")
    return Made(folder, lambda x: model.forward_features(x), "bicubic-antialias")


def dino(folder: Path, head: bool = True) -> Made:
    model = small(num_classes=0)
    named = {f"backbone.{name}": tensor for name, tensor in state_of(model).items()}
    own = {
        "head.mlp.0.weight": torch.ones(3, 48),
        "head.last_layer.weight_g": torch.ones(5, 1),
        "head.last_layer.weight_v": torch.ones(5, 3),
    }
    named |= own if head else {}
    content = {"student": {f"module.{name}": tensor for name, tensor in named.items()}, "teacher": named, "epoch": 3}
    return Made(pickled(folder, content), partial(forward, model, rule=by_dino), "bicubic-offset")


def deit(folder: Path) -> Made:
    model = small()
    return Made(pickled(folder, {"model": state_of(model)}), partial(forward, model, rule=by_deit), "bicubic")


def deit_iii(folder: Path) -> Made:
    model = small(init_values=1e-6, no_embed_class=True)
    named = {re.sub(r"\.ls(\d)\.gamma", r".gamma_\1", name): tensor for name, tensor in state_of(model).items()}
    return Made(pickled(folder, {"model": named}), partial(forward, model, rule=by_deit, placed=False), "bicubic")


def mae(folder: Path) -> Made:
    model = small(num_classes=0)
    decoder = {
        "mask_token": torch.ones(1, 1, 8),
        "decoder_embed.weight": torch.ones(8, 48),
        "decoder_pos_embed": torch.ones(1, 17, 8),
    }
    return Made(stored(folder, state_of(model) | decoder), partial(forward, model, rule=by_deit), "bicubic")


def dinov2(folder: Path, registers: int = 0) -> Made:
    model = small(num_classes=0, init_values=1e-5)
    tokens = 0.3 * torch.randn(1, registers, 48, generator=torch.Generator().manual_seed(1))
    named = state_of(model) | {"mask_token": torch.ones(1, 48)} | ({"register_tokens": tokens} if registers else {})
    rule, how = (by_registers, "bicubic-antialias") if registers else (by_dino, "bicubic-offset")
    return Made(
        stored(folder, named), partial(forward, model, rule=rule, registers=tokens[0] if registers else None), how
    )


def google_npz(folder: Path, kind: str = "google-npz", **options: Any) -> Made:
    model = small(act_layer="gelu_tanh", **options)
    ours = open_weights(stored(folder, state_of(model)), {"heads": 4, "mlp.gelu": "tanh"}).build_bundle().model
    form = next(one for one in google.FORMATS if one.name == kind)
    with open(folder / "weights.npz", "wb") as file:
        np.savez(
            file, **{name: tensor.numpy() for name, tensor in form.to_file(ours.config, ours.state_dict()).items()}
        )
    return Made(folder / "weights.npz", partial(forward, model, rule=by_google, placed=not options), "zoom-scipy", {})


def torchvision(folder: Path) -> Made:
    model = peers.torchvision_vit().model

    @torch.inference_mode()
    def reference(pixels: Tensor) -> Tensor:
        x = model.conv_proj(pixels)
        positions = model.encoder.pos_embedding.detach()[0]
        table = by_torchvision(positions[1:], *x.shape[2:])
        x = torch.cat([model.class_token.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1) + torch.cat(
            [positions[:1], table]
        )
        return model.encoder.ln(model.encoder.layers(x))

    return Made(stored(folder, state_of(model)), reference, "bicubic-aligned")


#: rows of docs/weights.md whose authors' arithmetic is here; those of transformers are beside transformers itself in
#: test_parity
ROWS: dict[str, Callable[[Path], Made]] = {
    "timm, folder of the Hub": timm_folder,
    "timm, state dict alone": timm_bare,
    "DINO, with its head": dino,
    "DINO, `teacher` or `student`": lambda folder: dino(folder, head=False),
    "DeiT or MAE, under `model`": deit,
    "MAE, with its decoder": mae,
    "DeiT-III": deit_iii,
    "DINOv2": dinov2,
    "DINOv2, registers": lambda folder: dinov2(folder, 3),
    "torchvision": torchvision,
    "Google, published names": google_npz,
    "Google, linen's names": lambda folder: google_npz(folder, "linen-npz"),
    "big_vision": lambda folder: google_npz(folder, "big-vision-npz", no_embed_class=True),
}


@pytest.mark.parametrize("row", ROWS)
def test_features_at_every_kind_of_size_are_those_of_the_authors_code(row, tmp_path):
    made = ROWS[row](tmp_path)
    model = open_weights(made.path, made.settings).build_bundle().model
    assert model.config.positions.resize == made.rule
    for size in SIZES:
        batch = images(size)
        with torch.inference_mode():
            assert difference(model.features(batch), made.reference(batch)) <= peers.LIMIT, size


def test_the_zeros_that_scipy_leaves_in_the_last_row_are_those_of_googles_code(tmp_path):
    made = google_npz(tmp_path, img_size=(56, 56), patch_size=2)
    model = open_weights(made.path).build_bundle().model
    made.reference.keywords["placed"] = True
    batch = images((96, 96), 1)
    with torch.inference_mode():
        assert not model.position.read((48, 48))[-1].any()
        assert difference(model.features(batch), made.reference(batch)) <= peers.LIMIT


FOLDERS: dict[str, tuple[Callable[[], peers.Peer], str]] = {
    "transformers ViT, DeiT, ViTMAE, ViT-MSN, I-JEPA (no class token, mean)": (peers.transformers_vit, "bicubic"),
    "transformers DINOv2": (peers.transformers_dinov2, "bicubic"),
    "transformers DINOv2, registers": (lambda: peers.transformers_dinov2(3), "bicubic-antialias"),
    "transformers CLIP": (peers.transformers_clip, "bicubic"),
}


@pytest.mark.parametrize("row", FOLDERS)
def test_a_folder_of_transformers_tells_everything(row, tmp_path):
    make, rule = FOLDERS[row]
    found = open_weights(make().file(tmp_path))
    assert found.config.positions.resize == rule
    assert not [note for note in found.notes if "positions" in note]


def test_sams_encoder_of_timm_is_resized_by_timms_rule(tmp_path):
    from timm.layers import resample_abs_pos_embed_nhwc

    peer = peers.timm_sam()
    model = open_weights(peer.file(tmp_path), peer.settings).build_bundle().model
    for grid in ((8, 8), (12, 12), (8, 12), (5, 7)):
        theirs = resample_abs_pos_embed_nhwc(peer.model.pos_embed.detach(), list(grid))[0]
        assert (model.position.read(grid) - theirs).abs().max() <= 1e-5


def table() -> list[list[str]]:
    """The cells of the page's table of formats, without its head."""
    lines = [line for line in PAGE.split("## Formats")[1].split("\n##")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_has_a_row_for_each_and_its_rule():
    rows = {cells[0]: cells for cells in table()}
    assert len(rows) == len(table())
    assert {*ROWS, *FOLDERS} <= rows.keys()
    for cells in table():
        assert len(cells) == 7, cells[0]
        assert {*re.findall(r"`((?:bicubic|bilinear|zoom)[\w-]*)`", cells[2])} <= RESIZE_MODES.keys() and cells[2], (
            cells[0]
        )


@pytest.mark.parametrize("row", ROWS)
def test_the_page_says_rule_and_gelu_as_they_are_read(row, tmp_path):
    cells = {cells[0]: cells for cells in table()}[row]
    config = ROWS[row](tmp_path)
    found = open_weights(config.path, {"heads": 4}).config
    assert cells[2] == f"`{found.positions.resize}`"
    assert cells[4] == {"none": "exact", "tanh": "tanh"}[found.mlp.gelu]


#: row -> what is said of the rule that was taken; certain rows say nothing
DOUBTS = {
    "timm, state dict alone": "assumed bicubic-antialias, timm's rule; for the original DeiT and MAE: --resize bicubic, "
    "for DINO",
    "DINO, `teacher` or `student`": "assumed bicubic-offset, DINO's",
    "DeiT or MAE, under `model`": "assumed bicubic, DeiT's and MAE's rule",
    "DINOv2, registers": "assumed bicubic-antialias, the rule of the released models with registers; for the "
    "constructor's"
    " defaults: --resize bicubic-offset",
}


@pytest.mark.parametrize("row", ROWS)
def test_what_a_file_does_not_tell_is_said(row, tmp_path):
    made = ROWS[row](tmp_path)
    notes = [note for note in open_weights(made.path, made.settings).notes if "resized" in note]
    assert len(notes) == (row in DOUBTS) and all(DOUBTS[row] in note for note in notes)
    told = open_weights(made.path, made.settings | {"positions.resize": "bilinear"})
    assert told.config.positions.resize == "bilinear" and not [note for note in told.notes if "resized" in note]


def test_a_timm_model_under_model_that_neither_deit_nor_mae_has_stays_timms(tmp_path):
    found = open_weights(pickled(tmp_path, {"model": state_of(small(reg_tokens=2))}), {"heads": 4})
    assert (found.title, found.config.positions.resize) == ("timm", "bicubic-antialias")


def test_open_clips_folder_has_open_clips_rule(tmp_path):
    clip = peers.transformers_clip(hidden_size=128, num_attention_heads=2)
    bundle = open_weights(clip.file(tmp_path)).build_bundle()
    named = find_writable_formats(bundle.model.config)["clip"].to_file(bundle.model.config, bundle.model.state_dict())
    alone = open_weights(stored(tmp_path, named))
    assert alone.config.positions.resize == "bicubic" and any(
        "for open_clip: --resize bicubic-antialias" in note for note in alone.notes
    )
    (tmp_path / "other").mkdir()
    save_file(named, tmp_path / "other" / "open_clip_model.safetensors")
    (tmp_path / "other" / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"embed_dim": 24}}))
    found = open_weights(tmp_path / "other")
    assert found.config.positions.resize == "bicubic-antialias" and not [
        note for note in found.notes if "resized" in note
    ]


def oblong(folder: Path, kind: str) -> Path:
    """A model of 6 x 4 patches and a class token, in a format."""
    config = ViTConfig(image=(48, 32), patch=(8, 8), classes=3, width=48, depth=1, heads=4, mlp=MlpConfig(hidden=96))
    bundle = made_bundle(config)
    if kind == "google-npz":
        with open(folder / "weights.npz", "wb") as file:
            form = google.GOOGLE
            np.savez(
                file,
                **{name: tensor.numpy() for name, tensor in form.to_file(config, bundle.model.state_dict()).items()},
            )
        return folder / "weights.npz"
    return stored(folder, find_writable_formats(config)[kind].to_file(config, bundle.model.state_dict()))


def made_bundle(config: Any) -> Bundle:
    from vitreous.data.modalities.images import ImagePreprocess
    from vitreous.models.zoo import build_model

    model = peers.randomise(build_model(config))
    preprocess = ImagePreprocess(image=config.image, mean=(0.5,) * 3, std=(0.5,) * 3, channels=3)
    return Bundle(model, Classification(tuple(f"class {i}" for i in range(config.classes))), preprocess)


def test_six_by_four_positions_of_google_are_not_five_by_five(tmp_path):
    path = oblong(tmp_path, "google-npz")
    with pytest.raises(
        WeightsError, match="25 positions form no square grid of patches in addition to 1 for the class token"
    ) as refused:
        open_weights(path)
    assert "--source-size HEIGHT WIDTH" in refused.value.hint
    found = open_weights(WeightsSource(str(path), source_size=(48, 32))).config
    assert (found.image, found.prefix_position_count) == ((48, 32), 1)


def test_six_by_four_positions_of_timm_are_said_to_be_taken_for_five_by_five(tmp_path):
    path = oblong(tmp_path, "timm")
    found = open_weights(path, {"heads": 4})
    assert (found.config.grid, found.config.prefix_position_count) == ((5, 5), 0)
    assert any(
        "5 x 5 patches, images of 40 x 40 pixels, and that the class token has none" in note for note in found.notes
    )
    found = open_weights(path, {"heads": 4, "image": (48, 32)})
    assert found.config.grid == (6, 4) and not [note for note in found.notes if "grid" in note]


def test_a_square_that_may_be_an_oblong_is_told(tmp_path):
    found = open_weights(google_npz(tmp_path, img_size=(64, 256), patch_size=16, no_embed_class=False).path)
    assert found.config.image == (128, 128)
    assert any(
        "assumed 8 x 8 patches, images of 128 x 128 pixels (--source-size HEIGHT WIDTH)" in note for note in found.notes
    )
    other = open_weights(tmp_path / "weights.npz", {"image": (64, 256)})
    assert other.config.grid == (4, 16) and other.notes == ()
    (tmp_path / "prime").mkdir()
    # 5 x 5 is the only grid of 25
    assert open_weights(google_npz(tmp_path / "prime", img_size=(40, 40)).path).notes == ()


def test_what_is_said_and_cannot_be_is_refused(tmp_path):
    with pytest.raises(UsageError, match="unknown position resize rule bicubik"):
        WeightsSource("weights", "bicubik")  # type: ignore[arg-type]
    for size in (0, (), (3, 3, 3, 3), (32, -1)):
        with pytest.raises(UsageError, match="source_size takes one number or height and width"):
            WeightsSource("weights", None, size)
    made_bundle(BiTConfig(image=(32, 32), blocks=(1,), width=32, classes=3)).save(tmp_path / "bit")
    with pytest.raises(UsageError, match="no learned positions"):
        open_weights(WeightsSource(str(tmp_path / "bit"), "zoom"))
    config = ViTConfig(image=(32, 32), patch=(8, 8), classes=3, width=48, depth=1, heads=4, mlp=MlpConfig(hidden=96))
    made_bundle(config).save(tmp_path / "vit")
    with pytest.raises(UsageError, match=r"source_size=48: .* is a bundle for images of 32 pixels"):
        open_weights(WeightsSource(str(tmp_path / "vit"), None, 48))
    found = open_weights(WeightsSource(str(tmp_path / "vit"), "zoom", 32))
    assert (
        found.config == config.with_options(positions={"resize": "zoom"})
        and found.build_bundle().model.position.resize_rule == "zoom"
    )


@pytest.fixture(scope="module")
def state_dict_folder(tmp_path_factory):
    """A state dict alone of 6 x 4 patches, a picture, and data of two classes."""
    from PIL import Image

    state_dict_folder = tmp_path_factory.mktemp("home")
    (state_dict_folder / "weights").mkdir()
    oblong(state_dict_folder / "weights", "timm")
    draw = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2), ("test", 2)):
        for name in ("0", "1", "2"):
            (state_dict_folder / "data" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 255, (48, 32, 3), np.uint8)
                Image.fromarray(pixels).save(state_dict_folder / "data" / split / name / f"{number}.png")
    return state_dict_folder


KNOWN = ["--source-size", "48", "32", "--resize", "bicubic"]
VERBS = {
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


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_what_it_assumed_and_is_told_better(verb, state_dict_folder, monkeypatch):
    def serve(run, settings, how, exact, quick, up, vae):
        up(
            SimpleNamespace(
                service=SimpleNamespace(served=SimpleNamespace(predictor=load(run, how))), address="http://127.0.0.1"
            )
        )
        return 1  # as if it were interrupted: 0 ends the process

    monkeypatch.setattr(start, "serve", serve)
    name = re.sub(r"\W", "", verb)

    def told(*known: str) -> Any:
        words = [word.replace("WEIGHTS", "weights/weights.safetensors") for word in VERBS[verb]]
        words = [word.replace("OUT", f"{name}{len(known)}") for word in words]
        return say(*words, *known, cwd=state_dict_folder)

    without = told()
    assert "does not specify its position grid: assumed 5 x 5" in without.stderr, without.stderr
    assert "assumed bicubic-antialias" in without.stderr
    found = told(*KNOWN)
    assert found.returncode == (0 if verb != "serve" else without.returncode), found.stderr
    assert "positions" not in "".join(line for line in found.stderr.splitlines() if "does not specify" in line)


def test_what_is_said_beside_a_bundle_and_foreign_weights_is_of_the_weights(state_dict_folder):
    weights = "weights/weights.safetensors"
    assert say("convert", weights, "beside", *KNOWN, cwd=state_dict_folder).returncode == 0
    result = say("evaluate", weights, "beside", "data", *KNOWN, cwd=state_dict_folder)
    assert result.returncode == 0 and "does not specify" not in result.stderr, result.stderr
    result = say("evaluate", weights, "beside", "data", cwd=state_dict_folder)
    assert "assumed 5 x 5" in result.stderr


def test_training_keeps_what_was_said(state_dict_folder):
    words = [
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
    result = say(*words, *KNOWN, "--out", "run", cwd=state_dict_folder)
    assert result.returncode == 0, result.stderr
    config = (state_dict_folder / "run" / "config.yaml").read_text()
    assert "resize: bicubic\n" in config and re.search(r"init_source_size:\s*(\[48, 32\]|\n\s*- 48\n\s*- 32)", config)
    assert "positions resized 6x4 -> 4" in result.stderr
    result = say("train", "data", "--resize", "zoom", cwd=state_dict_folder)
    assert result.returncode == 2 and "--resize and --source-size are for initial weights" in result.stderr


def test_load_takes_both_and_an_exported_file_neither(state_dict_folder):
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
