"""Window attention in graphs with dynamic size gives the model's outputs for any size."""

from dataclasses import replace

import pytest
import torch

from vitreous.apps.export.graph import make_exportable, trace_model
from vitreous.apps.export.windows import lay_out_axis
from vitreous.models.config import AttentionConfig, MlpConfig, SwinAttentionConfig
from vitreous.models.configs.swin import SwinConfig
from vitreous.models.configs.vit import ViTConfig
from vitreous.models.zoo import build_model

SWIN = SwinConfig(
    image=(32, 32),
    patch_size=(2, 2),
    classes=3,
    width=16,
    blocks=(2, 2),
    heads=(1, 2),
    attention=SwinAttentionConfig(window=4),
)
VIT = ViTConfig(
    image=(24, 24),
    patch=(4, 4),
    classes=3,
    width=16,
    depth=2,
    heads=2,
    mlp=MlpConfig(hidden=32),
    attention=AttentionConfig(window=4),
)
CONFIGS = {
    **{f"Swin, {pad}": SWIN.with_options(attention={"pad": pad}) for pad in ("mask", "zeros", "zeros-after-shift")},
    "Swin V2": replace(SWIN, version=2),
    "Swin, oblong window": replace(SWIN, image=(32, 6)),
    "windows": VIT,
    "windows, no prefix": replace(VIT, class_token=False, pool="mean"),
    "windows, registers, one global": VIT.with_options(registers=2, attention={"global_blocks": (1,)}),
}


def build_random_model(config):
    torch.manual_seed(0)
    model = build_model(config).eval()
    for name, parameter in model.named_parameters():
        if name.startswith("head") or "table" in name or name.endswith(("norm.weight", "qkv.weight")):
            torch.nn.init.normal_(parameter, std=0.5)
    model.any_size = True
    return model


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_windowed_graphs_match_the_model_at_any_size(name):
    model = build_random_model(CONFIGS[name])
    graph = make_exportable(model, dynamic=True)
    for height, width in ((8, 8), (8, 36), (16, 16), (20, 44), (32, 32), (60, 28)):
        images = torch.randn(2, 3, height, width)
        assert torch.allclose(graph(images)[0], model(images), atol=1e-5), (height, width)


def test_axes_with_several_windows_are_shifted():
    assert lay_out_axis(4, 4, 2, "mask").source_indices.tolist() == [0, 1, 2, 3]
    shifted = lay_out_axis(6, 4, 2, "mask")  # padded to 8 positions, then shifted by 2
    assert shifted.source_indices.tolist() == [2, 3, 4, 5, 6, 7, 0, 1] and shifted.restore_indices.tolist() == [
        6,
        7,
        0,
        1,
        2,
        3,
    ]
    assert shifted.is_token.tolist() == [True] * 4 + [False] * 2 + [True] * 2
    assert shifted.behind.tolist() == [False] * 6 + [True] * 2
    after = lay_out_axis(6, 4, 2, "zeros-after-shift")  # shifted by 2 within the 6 positions, then padded
    assert after.source_indices.tolist() == [2, 3, 4, 5, 0, 1, 6, 7] and after.restore_indices.tolist() == [
        4,
        5,
        0,
        1,
        2,
        3,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Swin, mask", "Swin V2", "windows"])
@torch.inference_mode()
def test_traced_programs_accept_any_number_of_windows(name):
    model = build_random_model(CONFIGS[name])
    program = trace_model(model, dynamic=True).module()
    for batch, height, width in ((1, 8, 8), (2, 20, 44), (3, 32, 32)):
        images = torch.randn(batch, 3, height, width)
        assert torch.allclose(program(images)[0], model(images), atol=1e-5)
