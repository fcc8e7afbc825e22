"""DiT weights: the authors' files and diffusers folders are read and written; mismatched files are rejected."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import run_cli
from tests.contracts import randomise
from vitreous.errors import WeightsError
from vitreous.models.configs.dit import DiTConfig
from vitreous.models.dit import DiT
from vitreous.nn.position import sincos_position_table
from vitreous.tasks.generation import Generation
from vitreous.weights.adopt import load_pretrained_weights, open_weights
from vitreous.weights.formats.dit import DIFFUSERS, DIT

CONFIG = DiTConfig(image=(8, 8), channels=4, classes=5, width=64, depth=2, heads=1, hidden=256)


def make_official_state(config=CONFIG):
    """Return a state dict with the names and shapes of facebookresearch/DiT's model, which are listed here."""
    d, out = config.width, config.out_channels * 4
    shapes = {
        "x_embedder.proj.weight": (d, config.channels, 2, 2),
        "x_embedder.proj.bias": (d,),
        "t_embedder.mlp.0.weight": (d, 256),
        "t_embedder.mlp.0.bias": (d,),
        "t_embedder.mlp.2.weight": (d, d),
        "t_embedder.mlp.2.bias": (d,),
        "y_embedder.embedding_table.weight": (config.classes + 1, d),
        "final_layer.linear.weight": (out, d),
        "final_layer.linear.bias": (out,),
        "final_layer.adaLN_modulation.1.weight": (2 * d, d),
        "final_layer.adaLN_modulation.1.bias": (2 * d,),
    }
    for i in range(config.depth):
        for name, rows, columns in (
            ("attn.qkv", 3 * d, d),
            ("attn.proj", d, d),
            ("mlp.fc1", 4 * d, d),
            ("mlp.fc2", d, 4 * d),
            ("adaLN_modulation.1", 6 * d, d),
        ):
            shapes |= {f"blocks.{i}.{name}.weight": (rows, columns), f"blocks.{i}.{name}.bias": (rows,)}
    torch.manual_seed(0)
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    return state | {"pos_embed": sincos_position_table(config.grid, d).flatten(0, -2)[None]}


def test_official_files_are_read_and_written_bit_identically(tmp_path):
    state = make_official_state()
    torch.save(state, tmp_path / "DiT.pt")
    weights = open_weights(tmp_path / "DiT.pt")
    assert weights.config == CONFIG and weights.task == Generation(tuple("01234"))
    result = run_cli("convert", str(tmp_path / "DiT.pt"), str(tmp_path / "again"), "--to", "dit")
    assert result.returncode == 0, result.stderr
    reloaded = load_file(tmp_path / "again.safetensors")
    assert reloaded.keys() == state.keys() and all(torch.equal(reloaded[name], state[name]) for name in state)


def test_the_ema_of_a_training_checkpoint_is_read(tmp_path):
    ema, model = make_official_state(), {name: tensor + 1 for name, tensor in make_official_state().items()}
    torch.save({"model": model, "ema": ema, "opt": {}, "args": {"lr": 1e-4}}, tmp_path / "0400000.pt")
    state = open_weights(tmp_path / "0400000.pt").read_state()
    assert torch.equal(state["classes.weight"], ema["y_embedder.embedding_table.weight"])


def test_diffusers_folders_are_read_and_written_bit_identically(tmp_path):
    torch.manual_seed(0)
    config = replace(CONFIG, time_shift=1)
    model = randomise(DiT(config))
    tensors = DIFFUSERS.to_file(config, model.state_dict())
    (tmp_path / "theirs").mkdir()
    save_file(tensors, tmp_path / "theirs" / "diffusion_pytorch_model.safetensors")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(DIFFUSERS.describe(config)))
    result = run_cli("convert", str(tmp_path / "theirs"), str(tmp_path / "again"), "--to", "diffusers")
    assert result.returncode == 0, result.stderr
    reloaded = load_file(tmp_path / "again" / "diffusion_pytorch_model.safetensors")
    assert reloaded.keys() == tensors.keys() and all(torch.equal(reloaded[name], tensors[name]) for name in tensors)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["_class_name"] == "DiTTransformer2DModel"


def test_formats_reject_unsupported_configs():
    # diffusers uses other frequencies in the timestep embedding
    assert DIT.can_represent(CONFIG) and not DIFFUSERS.can_represent(CONFIG)
    assert not DIT.can_represent(replace(CONFIG, time_shift=1)) and not DIT.can_represent(replace(CONFIG, qk_norm=True))


def test_blocks_with_separate_embeddings_are_rejected(tmp_path):
    config = replace(CONFIG, time_shift=1)
    tensors = DIFFUSERS.to_file(config, DiT(config).state_dict())
    name = "transformer_blocks.1.norm1.emb.timestep_embedder.linear_1.weight"
    tensors[name] = tensors[name] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="blocks of a DiT share one"):
        open_weights(tmp_path / "model.safetensors").read_state()


def test_missing_tensors_are_listed(tmp_path):
    state = make_official_state()
    del state["blocks.1.mlp.fc2.bias"]
    save_file(state, tmp_path / "DiT.safetensors")
    with pytest.raises(WeightsError, match=r"missing blocks\.1\.mlp\.fc2\.bias"):
        open_weights(tmp_path / "DiT.safetensors")


def test_class_embeddings_are_reordered_or_reset(tmp_path):
    torch.save(make_official_state(), tmp_path / "DiT.pt")
    weights = replace(open_weights(tmp_path / "DiT.pt"), task=Generation(("a", "b", "c", "d", "e")))
    model = DiT(CONFIG)
    load_pretrained_weights(model, weights, ("e", "d", "c", "b", "a"))
    rows = weights.read_state()["classes.weight"]
    assert torch.equal(model.classes.weight, rows[[4, 3, 2, 1, 0, 5]])
    fewer = DiT(replace(CONFIG, classes=2))
    before = fewer.classes.weight.clone()
    adoption = load_pretrained_weights(fewer, weights, ("x", "y"))
    assert torch.equal(fewer.classes.weight, before) and "the class embedding is new" in adoption.text()
