"""Pre-training files written by `convert` are read by the original code, and by this package."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.weights.test_pretraining import ORIGINAL_NAMES, OfficialDINOHead
from vitreous.config import to_builtins
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError
from vitreous.models.config import transformer_config
from vitreous.models.vit import ViT
from vitreous.objectives.base import ObjectiveSetting
from vitreous.objectives.dino import DINOConfig
from vitreous.objectives.dinov2 import DINOv2Config
from vitreous.objectives.mae import MAEConfig
from vitreous.tasks.features import FeatureExtraction
from vitreous.weights.adopt import open_objective_state, open_weights
from vitreous.weights.bundle import Bundle
from vitreous.weights.convert import convert
from vitreous.weights.objective_parts import ObjectiveState

SMALL_CONFIG = {
    "image": (32, 32),
    "patch": (8, 8),
    "classes": 0,
    "width": 64,
    "depth": 1,
    "heads": 1,
    "mlp": {"hidden": 128},
}
HEAD_OPTIONS = {"prototypes": 12, "head_width": 20, "bottleneck": 8}


def save_pretrained_bundle(path, config, **fields):
    """Save a bundle as a run of an objective does, with random weights; return the objective."""
    torch.manual_seed(5)
    objective = config.build(ViT(transformer_config(**{**SMALL_CONFIG, **fields})), ObjectiveSetting())
    with torch.no_grad():
        for name, tensor in objective.state_dict().items():  # makes the teacher differ from its student
            if tensor.ndim < 3 and "position" not in name:
                tensor.copy_(torch.randn(tensor.shape) * 0.1)
    deployed = objective.deployed_model().eval()
    model_tensor_ids = {id(tensor) for tensor in deployed.state_dict(keep_vars=True).values()}
    state = objective.state_dict(keep_vars=True)
    objective_tensors = {name: tensor.detach() for name, tensor in state.items() if id(tensor) not in model_tensor_ids}
    assert 0 < len(objective_tensors) < len(state)
    Bundle(
        deployed,
        FeatureExtraction(),
        ImagePreprocess((32, 32)),
        objective_state=ObjectiveState(to_builtins(config), objective_tensors),
    ).save(path)
    return objective.eval()


@pytest.fixture(scope="module")
def mae_files(tmp_path_factory):
    home = tmp_path_factory.mktemp("mae")
    config = MAEConfig(decoder_width=32, decoder_depth=2, decoder_heads=2, normalise=False)
    objective = save_pretrained_bundle(home / "bundle", config, positions={"kind": "sincos"})
    notes: list[str] = []
    convert(home / "bundle", home / "hf", "huggingface-mae", note=notes.append)
    return home, objective, notes


def test_transformers_loads_the_written_mae(mae_files):
    from transformers import ViTMAEForPreTraining

    home, objective, notes = mae_files
    assert any("fixed positions are written as a table" in text for text in notes)
    model, info = ViTMAEForPreTraining.from_pretrained(home / "hf", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    images, noise = torch.randn(2, 3, 32, 32), torch.rand(2, 16)
    order = noise.argsort(1)
    visible, masked = order[:, :4].sort(1).values, order[:, 4:].sort(1).values
    with torch.no_grad():
        expected = model.eval()(images, noise=noise).loss.item()
        loss = (objective.predict(images, visible, masked) - objective.targets(images, masked)).square().mean().item()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_the_original_layout_has_the_same_tensors(mae_files):
    home, _, _ = mae_files
    document = convert(home / "bundle", home / "full", "mae")
    assert document["out"].endswith("full.pth")
    state = torch.load(document["out"], weights_only=True)["model"]
    renamed = {}
    for name, tensor in load_file(home / "hf" / "model.safetensors").items():
        for old, new in ORIGINAL_NAMES:
            name = name.replace(old, new)
        renamed[name] = tensor
    for start in sorted({name.partition("attention.attention.")[0] for name in renamed if ".query." in name}):
        for end in ("weight", "bias"):
            qkv = [
                renamed.pop(f"{start}attention.attention.{projection}.{end}")
                for projection in ("query", "key", "value")
            ]
            renamed[f"{start}attn.qkv.{end}"] = torch.cat(qkv)
    assert renamed.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in renamed.items())
    assert state["decoder_pos_embed"].shape == (1, 17, 32) and not state["decoder_pos_embed"][0, 0].any()


def test_bundles_of_foreign_weights_keep_the_decoder(mae_files):
    home, objective, _ = mae_files
    convert(home / "hf", home / "back")
    objective_state = open_objective_state(home / "back")
    assert (
        objective_state is not None
        and objective_state.config["decoder_heads"] == 2
        and objective_state.config["normalise"] is False
    )
    assert all(torch.equal(tensor, objective.state_dict()[name]) for name, tensor in objective_state.state.items())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_dino_training_files_are_written(tmp_path):
    objective = save_pretrained_bundle(tmp_path / "bundle", DINOConfig(**HEAD_OPTIONS, unit_prototypes=False))
    document = convert(tmp_path / "bundle", tmp_path / "dino.pth", "dino")
    content = torch.load(document["out"], weights_only=True)
    assert content.keys() == {"student", "teacher", "dino_loss"}
    features = torch.randn(3, 64)
    for section, start, head in (
        ("teacher", "head.", objective.teacher_head),
        ("student", "module.head.", objective.head),
    ):
        theirs = OfficialDINOHead(64, 12, (20, 8))
        section = {
            name.removeprefix(start): value for name, value in content[section].items() if ".head." in f".{name}"
        }
        theirs.load_state_dict({name: value for name, value in section.items() if not name.startswith("module.")})
        assert torch.allclose(head(features), theirs(features), atol=1e-6)
    assert torch.equal(content["dino_loss"]["center"], objective.centre[None])
    student = {name: value for name, value in content["student"].items() if "backbone" in name}
    assert len(student) == len(objective.model.state_dict()) - 1  # class token and patches share one position tensor
    assert not torch.equal(student["module.backbone.cls_token"], content["teacher"]["backbone.cls_token"])


def test_heads_with_batch_norm_are_rejected(tmp_path):
    save_pretrained_bundle(tmp_path / "bundle", DINOConfig(**HEAD_OPTIONS, batch_norm=True))
    with pytest.raises(UsageError, match=r"does not support heads with a batch norm\n  use a bundle, or timm"):
        convert(tmp_path / "bundle", tmp_path / "dino.pth", "dino")


def test_dinov2_teacher_files_are_written(tmp_path):
    config = DINOv2Config(**HEAD_OPTIONS, patch_prototypes=10, patch_bottleneck=6)
    objective = save_pretrained_bundle(tmp_path / "bundle", config, norm={"layer_scale": 1.0})
    notes: list[str] = []
    document = convert(tmp_path / "bundle", tmp_path / "teacher", "dinov2-teacher", note=notes.append)
    assert notes[-1].endswith(": centre, head, model, patch_centre, patch_head")
    content = torch.load(document["out"], weights_only=True)["teacher"]
    assert {name.partition(".")[0] for name in content} == {"backbone", "dino_head", "ibot_head"}
    assert torch.equal(content["backbone.mask_token"], objective.mask_token[None])
    objective_state = open_objective_state(document["out"])
    assert objective_state is not None and torch.equal(
        objective_state.state["head.mlp.0.weight"], objective.teacher_head.mlp[0].weight
    )
    assert objective_state.config["patch_prototypes"] == 10 and objective_state.config["patch_bottleneck"] == 6


def test_missing_or_mismatched_objective_modules_are_rejected(mae_files, tmp_path):
    home, _, _ = mae_files
    with pytest.raises(UsageError, match=r"needs the training state of dino, but .* has that of mae") as error:
        convert(home / "bundle", tmp_path / "x", "dino")
    assert error.value.hint == "use mae or huggingface-mae"
    notes: list[str] = []
    convert(home / "bundle", tmp_path / "timm", "timm", note=notes.append)
    assert notes[-1].endswith("--to mae or huggingface-mae or bundle")
    with pytest.raises(UsageError, match="has none") as error:
        convert(tmp_path / "timm.safetensors", tmp_path / "x", "mae")
    assert "timm" in error.value.hint and not (tmp_path / "x").exists()
    notes.clear()
    convert(home / "bundle", tmp_path / "grey", channels=1, note=notes.append)
    assert (
        any("mae, is omitted: it needs 3 channels, not 1" in text for text in notes)
        and open_objective_state(tmp_path / "grey") is None
    )
    reloaded = open_weights(tmp_path / "timm.safetensors", {"heads": 1}).build_bundle().model.eval()
    bundle_model = open_weights(home / "bundle").build_bundle().model.eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.allclose(reloaded(images), bundle_model(images), atol=1e-6)
