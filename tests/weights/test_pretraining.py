"""Pre-training files of other projects: MAE's decoder and DINO's head are loaded and give the same outputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import vitreous
from tests.conftest import make_image
from tests.reports.test_report import NoteListener
from vitreous.errors import WeightsError
from vitreous.objectives.dino import DINO, DINOConfig
from vitreous.reports.figures.reconstruction import load_restoring_objective
from vitreous.weights.adopt import open_objective_state, open_weights
from vitreous.weights.objective_parts import load_into_objective

#: names in transformers' checkpoints -> names in the original MAE
ORIGINAL_NAMES = [
    ("vit.embeddings.cls_token", "cls_token"),
    ("vit.embeddings.position_embeddings", "pos_embed"),
    ("vit.embeddings.patch_embeddings.projection.", "patch_embed.proj."),
    ("vit.layernorm.", "norm."),
    ("vit.encoder.layer.", "blocks."),
    ("decoder.decoder_layers.", "decoder_blocks."),
    ("decoder.decoder_encoder.layer.", "decoder_blocks."),
    ("decoder.mask_token", "mask_token"),
    ("decoder.decoder_", "decoder_"),
    ("layernorm_before.", "norm1."),
    ("layernorm_after.", "norm2."),
    ("attention.output.dense.", "attn.proj."),
    ("intermediate.dense.", "mlp.fc1."),
    ("output.dense.", "mlp.fc2."),
]


@pytest.fixture(scope="module")
def transformers_mae(tmp_path_factory):
    """Return a random transformers ViTMAE, saved as a folder and as a file in the original layout."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    home = tmp_path_factory.mktemp("mae")
    torch.manual_seed(3)
    model = ViTMAEForPreTraining(
        ViTMAEConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=1, intermediate_size=256, image_size=32,
            patch_size=8, decoder_hidden_size=64, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
            decoder_intermediate_size=256, norm_pix_loss=False, layer_norm_eps=1e-6, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    # otherwise transformers leaves positions at zero
    model.vit.embeddings.patch_embeddings.projection._is_hf_initialized = False
    model.vit.embeddings.initialize_weights()
    model.decoder.initialize_weights(16)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim == 1:
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(home / "transformers")
    state = load_file(home / "transformers" / "model.safetensors")
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
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
    save_file(renamed, home / "full.safetensors")
    return home, model


@pytest.mark.parametrize("layout", ["transformers", "full.safetensors"])
def test_mae_predictions_match_transformers(transformers_mae, layout):
    home, model = transformers_mae
    objective = load_restoring_objective(home / layout)
    # the file does not contain this setting, whose default is True
    assert objective.config.normalise is (layout == "full.safetensors")
    objective.config = replace(objective.config, normalise=False)
    images, noise = torch.randn(3, 3, 32, 32), torch.rand(3, 16)
    with torch.no_grad():
        expected = model(images, noise=noise)
    order = noise.argsort(1)
    visible, masked = order[:, :4].sort(1).values, order[:, 4:].sort(1).values
    predicted = objective.predict(images, visible, masked)
    # the reference stores patch pixels channels-last
    pixels = torch.arange(192).view(3, 8, 8).permute(1, 2, 0).flatten()
    logits = expected.logits[torch.arange(3)[:, None], masked]
    assert torch.allclose(predicted[..., pixels], logits, atol=1e-5)
    loss = (predicted - objective.targets(images, masked)).square().mean()
    assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)


def test_decoders_with_other_heads_are_not_loaded(transformers_mae):
    objective_state = open_objective_state(transformers_mae[0] / "full.safetensors")
    objective = load_restoring_objective(transformers_mae[0] / "full.safetensors")
    assert load_into_objective(objective, objective_state.config | {"decoder_heads": 4}, objective_state).skipped == [
        "decoder"
    ]


@pytest.mark.parametrize("layout", ["transformers", "full.safetensors"])
def test_training_continues_with_the_decoder(transformers_mae, layout, tmp_path):
    home, _ = transformers_mae
    (tmp_path / "photos").mkdir()
    for index in range(12):
        make_image(index, (32, 32), index % 3).save(tmp_path / "photos" / f"{index}.png")
    listener, sizes = NoteListener(), {"decoder_width": ["64"], "decoder_depth": ["2"], "decoder_heads": ["2"]}
    vitreous.train(
        str(tmp_path / "photos"), listener, recipe="mae", init=str(home / layout), lr=1e-30, epochs=1.0, batch_size=6,
        precision="fp32", workers=0, device="cpu", out=str(tmp_path / "run"),
        settings={f"objective.{name}": value for name, value in sizes.items()},
    )  # fmt: skip
    assert "mae continues with its decoder" in listener.notes
    before, after = open_objective_state(home / layout), open_objective_state(tmp_path / "run")
    assert before.state.keys() == after.state.keys() and len(before.state) == 31
    assert all(torch.equal(tensor, after.state[name]) for name, tensor in before.state.items())


def test_unknown_and_missing_decoder_tensors_are_listed(transformers_mae, tmp_path):
    home, _ = transformers_mae
    state = load_file(home / "full.safetensors")
    save_file({**state, "decoder_extra.weight": torch.zeros(2)}, tmp_path / "odd.safetensors")
    with pytest.raises(WeightsError, match=r"decoder_extra\.weight"):
        open_objective_state(tmp_path / "odd.safetensors")
    del state["decoder_norm.bias"]
    save_file(state, tmp_path / "short.safetensors")
    with pytest.raises(WeightsError, match=r"missing decoder_norm\.bias"):
        load_restoring_objective(tmp_path / "short.safetensors")


class OfficialDINOHead(nn.Module):
    """DINO's head restated: features of unit length and a weight-normalised last layer."""

    def __init__(self, width: int, count: int, sizes: tuple[int, int] = (24, 16)) -> None:
        super().__init__()
        a, b = sizes
        self.mlp = nn.Sequential(nn.Linear(width, a), nn.GELU(), nn.Linear(a, a), nn.GELU(), nn.Linear(a, b))
        self.last_layer = nn.utils.weight_norm(nn.Linear(b, count, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last_layer(nn.functional.normalize(self.mlp(x), dim=-1))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("fixed", [True, False])
def test_the_dino_teacher_head_gives_the_same_outputs(fixed, tmp_path):
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(4)
    backbone = VisionTransformer(16, 4, num_classes=0, embed_dim=64, depth=1, num_heads=1).eval()
    head = OfficialDINOHead(64, 40)
    head.last_layer.weight_g.data = torch.ones(40, 1) if fixed else torch.rand(40, 1) + 0.5
    state = {f"backbone.{name}": tensor for name, tensor in backbone.state_dict().items()}
    state |= {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
    file = tmp_path / ("checkpoint.pth" if fixed else "teacher.safetensors")
    if fixed:
        torch.save({"teacher": state, "student": {f"module.{k}": v for k, v in state.items()}, "epoch": 3}, file)
    else:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
    objective_state = open_objective_state(file)
    assert objective_state.config == {
        "name": "dino", "prototypes": 40, "bottleneck": 16, "head_layers": 3, "head_width": 24,
        "unit_prototypes": fixed,
    }  # fmt: skip
    assert ("head.lengths" in objective_state.state) is not fixed
    sizes = {name: value for name, value in objective_state.config.items() if name != "name"}
    objective = DINO(open_weights(file).build_bundle().model, DINOConfig(**sizes))
    assert set(load_into_objective(objective, objective_state.config, objective_state).loaded) == {
        "head",
        "teacher_head",
        *["model"] * fixed,
    }
    images = torch.randn(5, 3, 16, 16)
    expected = head(backbone(images)).detach().numpy()
    for outputs in (
        objective.head(objective.model.eval()(images)),
        objective.teacher_head(objective.teacher.eval()(images)),
    ):
        assert np.allclose(outputs.detach().numpy(), expected, atol=1e-5)
