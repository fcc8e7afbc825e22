"""Weights of ViTDet backbones under detectron2's names, compared with transformers' implementation."""

import re

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.weights import peers
from vitreous.errors import WeightsError
from vitreous.weights.adopt import open_weights
from vitreous.weights.formats.vitdet import VITDET

NAME_PATTERNS = (
    (r"^embeddings\.position_embeddings", "pos_embed"),
    (r"^embeddings\.projection", "patch_embed.proj"),
    (r"^encoder\.layer\.(\d+)\.attention\.", r"blocks.\1.attn."),
    (r"^encoder\.layer\.(\d+)\.", r"blocks.\1."),
)


def make_peer(convolutions=(), image=64):
    """Return transformers' ViTDet, and its tensors under detectron2's names."""
    torch.manual_seed(0)
    config = transformers.VitDetConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=image,
        pretrain_image_size=32,
        patch_size=8,
        window_size=3,
        window_block_indices=[0, 1, 2, 3] if convolutions else [0, 2],
        residual_block_indices=list(convolutions),
        use_absolute_position_embeddings=True,
        use_relative_position_embeddings=True,
    )
    model = peers.randomise(transformers.VitDetModel(config)).eval()
    state = {}
    for name, tensor in model.state_dict().items():
        for before, after in NAME_PATTERNS:
            name = re.sub(before, after, name)
        state[f"backbone.net.{name}"] = tensor.contiguous()
    return model, state


@pytest.mark.parametrize("convolutions", [(), (1, 3)])
def test_features_match_detectron2(convolutions, tmp_path):
    model, state = make_peer(convolutions)
    unused_tensors = {"backbone.simfp_2.0.weight": torch.ones(2), "roi_heads.box_head.fc1.weight": torch.ones(2)}
    save_file(state | unused_tensors, tmp_path / "model_final.safetensors")
    weights = open_weights(tmp_path / "model_final.safetensors", {"image": (64, 64)} if convolutions else {})
    config = weights.config
    assert (config.image, config.heads, config.attention.window, config.table_grid) == ((64, 64), 2, 3, (4, 4))
    assert (config.attention.global_blocks, config.conv_blocks) == (() if convolutions else (1, 3), convolutions)
    assert sorted(weights.unused) == sorted(unused_tensors)
    ours = weights.build_bundle().model
    ours.any_size = True
    for size in ((64, 64), (40, 88)):
        images = peers.make_images(size)
        with torch.inference_mode():
            theirs = model(images).last_hidden_state.movedim(1, -1)
            assert peers.compute_difference(ours.features_at(images, [8])[0], theirs) <= peers.ERROR_LIMIT


def test_written_files_have_the_names_of_detectron2(tmp_path):
    _, state = make_peer((2,))
    save_file(state, tmp_path / "given.safetensors")
    weights = open_weights(tmp_path / "given.safetensors", {"image": (64, 64)})
    written = VITDET.to_file(weights.config, weights.read_state())
    assert {name: tensor.shape for name, tensor in written.items()} == {n: t.shape for n, t in state.items()}
    for name, tensor in written.items():
        assert torch.equal(tensor[:, 1:] if "pos_embed" in name else tensor, state[name][:, 1:] if "pos_embed" in name
                           else state[name])  # fmt: skip


def test_tables_for_different_windows_are_rejected(tmp_path):
    _, state = make_peer()
    state["backbone.net.blocks.2.attn.rel_pos_h"] = torch.zeros(9, 16)
    save_file(state, tmp_path / "odd.safetensors")
    with pytest.raises(WeightsError, match="3 different window sizes"):
        open_weights(tmp_path / "odd.safetensors")
