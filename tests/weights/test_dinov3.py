"""DINOv3: parity with its authors' code restated here, with timm and with transformers, and files in all three formats."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.weights.peers import ERROR_LIMIT, compute_difference, make_images, open_model, randomise
from vitreous.errors import UsageError, WeightsError
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model, build_without_init
from vitreous.tasks.classification import Classification
from vitreous.weights.adopt import load_pretrained_weights, open_weights
from vitreous.weights.bundle import Bundle
from vitreous.weights.convert import convert
from vitreous.weights.formats.dinov3 import compute_periods

SIZES = ((32, 32), (48, 48), (32, 64))
#: arXiv:2508.10104 and timm 1.0.31: parameters without the mask token and the masked key bias
PARAMETERS = {
    "DINOv3-S/16": 21_596_160,
    "DINOv3-S+/16": 28_692_480,
    "DINOv3-B/16": 85_659_648,
    "DINOv3-L/16": 303_128_576,
    "DINOv3-H+/16": 840_591_360,
    "DINOv3-7B/16": 6_716_030_976,
}


class OriginalAttention(nn.Module):
    """Attention of DINOv3's authors (dinov3/layers/attention.py): masked key bias, rotation by halves of the
    channels."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width, bias), nn.Linear(width, width)
        if bias:
            self.qkv.register_buffer("bias_mask", torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(width))

    def forward(self, x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        """Attend: (B, P + N, D) -> (B, P + N, D); sines and cosines are (N, d)."""
        bias = None if self.qkv.bias is None else self.qkv.bias * self.qkv.bias_mask
        q, k, v = F.linear(x, self.qkv.weight, bias).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        prefix = x.shape[1] - len(sin)
        rotated = []
        for part in (q, k):
            patches = part[:, :, prefix:]
            first, second = patches.chunk(2, -1)
            patches = patches * cos + torch.cat([-second, first], -1) * sin
            rotated.append(torch.cat([part[:, :, :prefix], patches], 2))
        weights = (rotated[0] @ rotated[1].mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class OriginalBlock(nn.Module):
    """Block of DINOv3's authors: LayerScale after attention and after the MLP."""

    def __init__(self, width: int, heads: int, hidden: int, gated: bool, bias: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-5), nn.LayerNorm(width, eps=1e-5)
        self.attn = OriginalAttention(width, heads, bias)
        self.ls1, self.ls2 = (nn.ParameterDict({"gamma": torch.ones(width)}) for _ in range(2))
        names = ("w1", "w2") if gated else ("fc1",)
        layers = {name: nn.Linear(width, hidden) for name in names}
        self.mlp = nn.ModuleDict(layers | {"w3" if gated else "fc2": nn.Linear(hidden, width)})

    def forward(self, x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        """Apply the block: (B, P + N, D) -> (B, P + N, D)."""
        x = x + self.ls1["gamma"] * self.attn(self.norm1(x), sin, cos)
        y, mlp = self.norm2(x), self.mlp
        y = mlp["w3"](F.silu(mlp["w1"](y)) * mlp["w2"](y)) if "w1" in mlp else mlp["fc2"](F.gelu(mlp["fc1"](y)))
        return x + self.ls2["gamma"] * y


class Original(nn.Module):
    """DINOv3's encoder by its authors' formulas, with the tensor names of their files."""

    def __init__(self, gated: bool = False, bias: bool = True, head_width: int = 16) -> None:
        super().__init__()
        width = 3 * head_width
        self.cls_token, self.mask_token = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, width))
        self.storage_tokens = nn.Parameter(torch.zeros(1, 4, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, 8, 8)})
        self.rope_embed = nn.Module()
        self.rope_embed.register_buffer("periods", compute_periods(head_width))
        self.blocks = nn.ModuleList(OriginalBlock(width, 3, 64, gated, bias) for _ in range(3))
        self.norm = nn.LayerNorm(width, eps=1e-5)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Compute the tokens (B, 5 + N, D) before the first block and after each, without the last norm."""
        maps = self.patch_embed["proj"](images)
        height, width = maps.shape[2:]
        rows, columns = (2 * torch.arange(0.5, length) / length - 1 for length in (height, width))
        grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)
        angles = (2 * math.pi * grid[:, :, None] / self.rope_embed.periods).flatten(1).tile(2)
        front = torch.cat([self.cls_token, self.storage_tokens], 1).expand(len(images), -1, -1)
        outputs = [torch.cat([front, maps.flatten(2).mT], 1)]
        for block in self.blocks:
            outputs.append(block(outputs[-1], angles.sin(), angles.cos()))
        return outputs


def save_original(folder: Path, **options) -> tuple[Original, Path]:
    """Save a randomised original model and return it with its file."""
    original = randomise(Original(**options))
    torch.save(original.state_dict(), folder / "original.pth")
    return original, folder / "original.pth"


@pytest.mark.parametrize("options", [{}, {"gated": True}, {"gated": True, "bias": False, "head_width": 32}])
def test_every_layer_matches_the_original_code(tmp_path, options):
    original, path = save_original(tmp_path, **options)
    weights = open_weights(path)
    assert (weights.title, weights.config.heads, weights.notes) == ("the original DINOv3", 3, ())
    assert weights.config.rotary.rounded
    model = weights.build_bundle().model
    model.any_size = True
    for size in SIZES:
        images = make_images(size)
        theirs = original(images)
        assert compute_difference(model.features(images), original.norm(theirs[-1])) <= ERROR_LIMIT
        for ours, reference in zip(model.features_after(images, [0, 1, 2, 3]), theirs, strict=True):
            assert compute_difference(ours, reference) <= ERROR_LIMIT


def make_timm_dinov3(name: str) -> nn.Module:
    """Return a small DINOv3 of timm."""
    timm = pytest.importorskip("timm")
    sizes = {"embed_dim": 48, "depth": 3, "num_heads": 3, "patch_size": 8, "img_size": 32, "mlp_ratio": 64 / 48}
    return randomise(timm.create_model(name, num_classes=0, dynamic_img_size=True, **sizes))


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_dinov3_qkvb", "vit_small_plus_patch16_dinov3_qkvb", "vit_small_patch16_dinov3"]
)
def test_features_match_timm(tmp_path, name):
    peer = make_timm_dinov3(name)
    save_file(peer.state_dict(), tmp_path / "timm.safetensors")
    weights = open_weights(tmp_path / "timm.safetensors", {"heads": 3})
    assert weights.title == "timm's DINOv3" and not weights.config.rotary.rounded
    model = weights.build_bundle().model
    model.any_size = True
    for size in SIZES:
        images = make_images(size)
        assert compute_difference(model.features(images), peer.forward_features(images)) <= ERROR_LIMIT


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("start", ["", "model."])
def test_features_match_transformers(tmp_path, gated, start):
    transformers = pytest.importorskip("transformers")
    config = transformers.DINOv3ViTConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_register_tokens=4,
        use_gated_mlp=gated,
        hidden_act="silu" if gated else "gelu",
    )
    peer = randomise(transformers.DINOv3ViTModel(config))
    peer.save_pretrained(tmp_path)
    if start:  # names of files that transformers 5 wrote
        state = load_file(tmp_path / "model.safetensors")
        renamed = {f"{start}{name}" if name.startswith("layer.") else name: x for name, x in state.items()}
        save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = open_model(tmp_path)
    model.any_size = True
    for size in SIZES:
        images = make_images(size)
        with torch.inference_mode():
            assert compute_difference(model.features(images), peer(images).last_hidden_state) <= ERROR_LIMIT


@pytest.mark.parametrize("to", ["dinov3", "timm", "huggingface"])
def test_written_files_are_read_by_their_library_and_back(tmp_path, to):
    _, path = save_original(tmp_path, gated=True)
    converted = Path(convert(path, tmp_path / "converted", to=to)["out"])
    state, back = open_weights(path).read_state(), open_weights(converted, {"heads": 3}).read_state()
    assert state.keys() == back.keys() and all(torch.equal(state[name], back[name]) for name in state)
    if to == "dinov3":
        assert not any(Original(gated=True).load_state_dict(load_file(converted)))
    elif to == "timm":
        make_timm_dinov3("vit_small_plus_patch16_dinov3_qkvb").load_state_dict(load_file(converted))
    else:
        transformers = pytest.importorskip("transformers")
        _, report = transformers.DINOv3ViTModel.from_pretrained(converted, output_loading_info=True)
        assert not any(report.values())


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_those_of_the_published_models(name):
    config = config_from_name(name)
    assert config.name() == name
    assert sum(p.numel() for p in build_without_init(config).parameters()) == PARAMETERS[name]


def test_a_file_with_other_rotary_positions_is_refused(tmp_path):
    original, path = save_original(tmp_path)
    original.rope_embed.periods *= 1.5
    torch.save(original.state_dict(), path)
    with pytest.raises(WeightsError, match="rotary positions have another base than 100"):
        open_weights(path)


def test_weights_of_another_variant_are_refused_with_the_tensors(tmp_path):
    """S+ has the widths of S, and another MLP."""
    _, path = save_original(tmp_path, gated=True)
    model = build_model(open_weights(path).config.with_options(mlp={"kind": "gelu"}))
    with pytest.raises(WeightsError, match=r"encoder\.blocks\.0\.mlp\.part\.fc1"):
        load_pretrained_weights(model, path)


def test_a_key_bias_is_not_dropped_with_rotary_positions(tmp_path):
    """Rotations make a key bias depend on positions, so softmax does not cancel it."""
    _, path = save_original(tmp_path)
    config = open_weights(path).config
    source = build_model(config.with_options(attention={"key_bias": True}))
    torch.nn.init.ones_(source.encoder.blocks[0].attention.part.qkv.bias)
    weights = open_weights(path).build_bundle()
    Bundle(source, weights.task, weights.preprocess).save(tmp_path / "bundle")
    with pytest.raises(WeightsError, match=r"qkv\.bias"):
        load_pretrained_weights(build_model(config), tmp_path / "bundle")


def test_training_draws_one_scale_of_the_coordinates_per_pass():
    """Coordinates are scaled log-uniformly between 1 / rescale and rescale, only in training (DINOv3, rescale 2)."""
    config = config_from_name("DINOv3-S/16").with_options(
        image=(32, 32), patch=(8, 8), width=48, depth=1, heads=3, rotary={"rescale": 2.0}
    )
    model = build_model(config)
    tokens = torch.zeros(2, 4, 4, 48)
    scales = torch.cat([model.make_token_positions(tokens).scale for _ in range(400)])
    assert scales.min() < 0.55 and scales.max() > 1.8 and abs(scales.log().mean()) < 0.1
    assert model.eval().make_token_positions(tokens).scale is None
    assert build_model(config.with_options(rotary={"rescale": 1.0})).make_token_positions(tokens).scale is None


def test_the_encoder_of_a_fine_tuned_model_is_converted(tmp_path):
    """No format of DINOv3 has a head; the message names the option that omits it."""
    _, path = save_original(tmp_path)
    weights = open_weights(path)
    model = build_model(weights.config.with_options(classes=3))
    load_pretrained_weights(model, path)
    Bundle(model, Classification(("a", "b", "c")), weights.preprocess).save(tmp_path / "tuned")
    with pytest.raises(UsageError, match="it has no head for this model") as caught:
        convert(tmp_path / "tuned", tmp_path / "timm", "timm")
    assert "add --num-classes 0" in caught.value.hint
    out = convert(tmp_path / "tuned", tmp_path / "timm", "timm", num_classes=0)["out"]
    state = weights.read_state()
    assert all(torch.equal(tensor, state[name]) for name, tensor in open_weights(out).read_state().items())
