"""CLIP, SigLIP, SigLIP 2, EVA-02-CLIP and PE-Core with both encoders: parity with transformers, timm, open_clip,
big_vision and the authors' code in float32, and round trips through every format. All weights are random."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.data.test_tokenizer import save_siglip_tokenizer
from tests.weights.peers import ERROR_LIMIT, compute_difference, make_images, open_model, randomise
from tests.weights.test_modern import OriginalPE
from vitreous.data.modalities.native import NativePreprocess
from vitreous.errors import UsageError, WeightsError
from vitreous.models.config import CLIPConfig, ImageTextConfig, ViTConfig
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model
from vitreous.weights.adopt import load_pretrained_weights, open_weights
from vitreous.weights.bundle import load_bundle, save
from vitreous.weights.convert import convert
from vitreous.weights.create import create
from vitreous.weights.foreign import find_writable_formats

VISION = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 60,
    "max_position_embeddings": 9,
}
NAFLEX = {name: value for name, value in VISION.items() if name != "image_size"} | {"num_patches": 16}


def draw_tokens(vocabulary: int = 60, length: int = 9, end: int | None = None) -> Tensor:
    """Draw three texts; with `end`, each has this token at another position."""
    tokens = torch.randint(2, vocabulary - 1, (3, length), generator=torch.Generator().manual_seed(0))
    if end is not None:
        tokens[range(3), [3, length - 1, 5]] = end
    return tokens


def make_clip(**vision) -> transformers.CLIPModel:
    text = TEXT | {"eos_token_id": 59, "bos_token_id": 58}
    config = transformers.CLIPConfig(vision_config=VISION | vision, text_config=text, projection_dim=24)
    return randomise(transformers.CLIPModel(config))


def make_siglip(**vision) -> transformers.SiglipModel:
    text = TEXT | {"projection_size": 48}
    return randomise(
        transformers.SiglipModel(transformers.SiglipConfig(vision_config=VISION | vision, text_config=text))
    )


def make_siglip2() -> transformers.Siglip2Model:
    text = TEXT | {"projection_size": 48}
    return randomise(transformers.Siglip2Model(transformers.Siglip2Config(vision_config=NAFLEX, text_config=text)))


def save_and_open(model, folder: Path):
    model.save_pretrained(folder)
    ours = open_model(folder)
    ours.any_size = True
    return ours


def flatten_patches(image: Tensor, patch: int = 8) -> Tensor:
    """Flatten the patches of an image (C, H, W) in the order (row, column, channel)."""
    channels, height, width = image.shape
    grid = image.reshape(channels, height // patch, patch, width // patch, patch)
    return grid.permute(1, 3, 2, 4, 0).reshape(-1, patch * patch * channels)


@pytest.mark.parametrize("size", [(32, 32), (64, 48), (16, 40)])
@pytest.mark.parametrize("make", [make_clip, make_siglip])
@torch.inference_mode()
def test_towers_and_logits_of_transformers(make, size, tmp_path):
    theirs, tokens, images = make(), draw_tokens(end=59), make_images(size, 2)
    ours = save_and_open(theirs, tmp_path)
    expected = theirs(input_ids=tokens, pixel_values=images, interpolate_pos_encoding=True)
    assert compute_difference(ours.embed_images(images), expected.image_embeds) <= ERROR_LIMIT
    assert compute_difference(ours.embed_texts(tokens), expected.text_embeds) <= ERROR_LIMIT
    logits = ours.compute_logits(ours.embed_images(images), ours.embed_texts(tokens))
    assert compute_difference(logits, expected.logits_per_image) <= ERROR_LIMIT


@torch.inference_mode()
def test_naflex_with_mixed_aspect_ratios_in_one_batch(tmp_path):
    """The original pads all images to the longest; ours packs them, so the result does not depend on padding."""
    theirs, tokens = make_siglip2(), draw_tokens()
    ours = save_and_open(theirs, tmp_path)
    images = [make_images(size, 1)[0] for size in ((32, 32), (8, 64), (40, 24), (56, 16))]
    shapes = torch.tensor([[image.shape[1] // 8, image.shape[2] // 8] for image in images])
    for length, fill in ((16, 0.0), (20, 1e3)):
        pixels = torch.full((len(images), length, 192), fill)
        mask = torch.zeros(len(images), length, dtype=torch.int64)
        for index, image in enumerate(images):
            patches = flatten_patches(image)
            pixels[index, : len(patches)], mask[index, : len(patches)] = patches, 1
        expected = theirs(input_ids=tokens, pixel_values=pixels, pixel_attention_mask=mask, spatial_shapes=shapes)
        assert compute_difference(ours.embed_images(images), expected.image_embeds) <= ERROR_LIMIT
        logits = ours.compute_logits(ours.embed_images(images), ours.embed_texts(tokens))
        assert compute_difference(logits, expected.logits_per_image) <= ERROR_LIMIT


@pytest.mark.parametrize("kind", ["Siglip", "Siglip2"])
@torch.inference_mode()
def test_image_encoder_of_siglip_alone(kind, tmp_path):
    fields = VISION if kind == "Siglip" else NAFLEX
    config = getattr(transformers, f"{kind}VisionConfig")(**fields)
    theirs = randomise(getattr(transformers, f"{kind}VisionModel")(config))
    ours, image = save_and_open(theirs, tmp_path), make_images((32, 24), 1)
    assert type(ours.config) is ViTConfig and ours.config.pool == "attention"
    if kind == "Siglip":
        expected = theirs(pixel_values=image, interpolate_pos_encoding=True)
    else:
        patches, shape = flatten_patches(image[0])[None], torch.tensor([[4, 3]])
        mask = torch.ones(1, 12, dtype=torch.int64)
        expected = theirs(pixel_values=patches, pixel_attention_mask=mask, spatial_shapes=shape)
    assert compute_difference(ours.features(image), expected.last_hidden_state) <= ERROR_LIMIT
    assert compute_difference(ours(image), expected.pooler_output) <= ERROR_LIMIT


class OpenClipBlock(nn.Module):
    """open_clip's `ResidualAttentionBlock`."""

    def __init__(self, width: int, heads: int, hidden: int, gelu: nn.Module, eps: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, eps=eps), nn.LayerNorm(width, eps=eps)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, hidden), "c_proj": nn.Linear(hidden, width)})
        self.gelu = gelu

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp["c_proj"](self.gelu(self.mlp["c_fc"](self.ln_2(x))))


class OpenClipText(nn.Module):
    """open_clip's `TextTransformer` (src/open_clip/transformer.py): causal, or bidirectional without a mask."""

    def __init__(self, gelu: nn.Module, eps: float, causal: bool, channels: int, bias: bool) -> None:
        super().__init__()
        width, length, vocabulary = TEXT["hidden_size"], 9, TEXT["vocab_size"]
        self.causal, self.token_embedding = causal, nn.Embedding(vocabulary, width)
        self.positional_embedding = nn.Parameter(torch.empty(length, width))
        blocks = [OpenClipBlock(width, 2, 56, gelu, eps) for _ in range(2)]
        self.transformer = nn.ModuleDict({"resblocks": nn.ModuleList(blocks)})
        self.ln_final = nn.LayerNorm(width, eps=eps)
        self.text_projection = nn.Linear(width, channels) if bias else nn.Parameter(torch.empty(width, channels))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.positional_embedding
        mask = torch.full((9, 9), -torch.inf).triu_(1) if self.causal else None
        for block in self.transformer["resblocks"]:
            x = block(x, mask)
        x = self.ln_final(x)
        if isinstance(self.text_projection, nn.Linear):
            return self.text_projection(x[:, -1])
        return x[torch.arange(len(x)), tokens.argmax(-1)] @ self.text_projection


def make_open_clip_siglip(gelu: str, vocabulary: int = 60) -> nn.Module:
    """Build open_clip's SigLIP: timm's image encoder as `visual.trunk`, and a text encoder."""
    from timm.models.vision_transformer import VisionTransformer

    tanh = nn.GELU("tanh")
    trunk = VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=48,
        depth=2,
        num_heads=4,
        mlp_ratio=64 / 48,
        class_token=False,
        global_pool="map",
        num_classes=0,
        dynamic_img_size=True,
        act_layer="gelu_tanh" if gelu == "tanh" else "gelu",
    )
    model = nn.Module()
    model.visual = nn.ModuleDict({"trunk": trunk})
    model.text = OpenClipText(tanh if gelu == "tanh" else nn.GELU(), 1e-6, causal=False, channels=48, bias=True)
    model.logit_scale, model.logit_bias = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(0.0))
    return randomise(model)


def save_open_clip(model: nn.Module, folder: Path, model_config: dict | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")
    if model_config is not None:
        (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": model_config}))
    return folder


def check_open_clip(model: nn.Module, encode_image, ours, images: Tensor, tokens: Tensor) -> None:
    ours.any_size = True
    x, y = F.normalize(encode_image(images), dim=-1), F.normalize(model.text(tokens), dim=-1)
    assert compute_difference(ours.embed_images(images), x) <= ERROR_LIMIT
    assert compute_difference(ours.embed_texts(tokens), y) <= ERROR_LIMIT
    bias = model.logit_bias if hasattr(model, "logit_bias") else 0
    expected = model.logit_scale.exp() * x @ y.T + bias
    logits = ours.compute_logits(ours.embed_images(images), ours.embed_texts(tokens))
    assert compute_difference(logits, expected) <= ERROR_LIMIT


@pytest.mark.parametrize("size", [(32, 32), (64, 48)])
@pytest.mark.parametrize("gelu", ["none", "tanh"])
@torch.inference_mode()
def test_siglip_of_open_clip_with_timm_trunk(gelu, size, tmp_path):
    model = make_open_clip_siglip(gelu)
    trunk = "vit_so400m_patch16_siglip_256" if gelu == "tanh" else "vit_base_patch16_siglip_224"
    text = {"heads": 2, "no_causal_mask": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}}
    text |= {"act_kwargs": {"approximate": "tanh"}} if gelu == "tanh" else {}
    folder = save_open_clip(model, tmp_path, {"vision_cfg": {"timm_model_name": trunk}, "text_cfg": text})
    ours = open_model(folder, {"heads": 4})
    check_open_clip(model, model.visual["trunk"], ours, make_images(size), draw_tokens())


@pytest.mark.parametrize("custom_text", [False, True])
@pytest.mark.parametrize("quick", [False, True])
@torch.inference_mode()
def test_clip_of_openai_and_open_clip(quick, custom_text, tmp_path):
    """The image encoder is transformers' CLIP under OpenAI's names, which other tests compare with the original."""
    clip = make_clip(hidden_act="quick_gelu" if quick else "gelu")
    ours = save_and_open(clip, tmp_path / "transformers")
    written = find_writable_formats(ours.config)["open-clip"].to_file(ours.config, ours.state_dict())
    gelu = transformers.activations.QuickGELUActivation() if quick else nn.GELU()
    model = nn.Module()
    model.text = randomise(OpenClipText(gelu, 1e-5, causal=True, channels=24, bias=False))
    model.logit_scale = nn.Parameter(torch.tensor(1.5))
    image_state = {name: tensor for name, tensor in written.items() if name.startswith("visual.")}
    text_state = {("text." if custom_text else "") + name: tensor for name, tensor in model.text.state_dict().items()}
    folder = tmp_path / "open_clip"
    folder.mkdir()
    state = image_state | text_state | {"logit_scale": model.logit_scale.data}
    save_file(state, folder / "open_clip_model.safetensors")
    described = {"model_cfg": {"quick_gelu": quick, "text_cfg": {"heads": 2}}}
    (folder / "open_clip_config.json").write_text(json.dumps(described))
    read = open_model(folder, {"heads": 4})

    def encode_image(images: Tensor) -> Tensor:
        return clip.visual_projection(clip.vision_model(images).pooler_output)

    check_open_clip(model, encode_image, read, make_images((32, 32)), draw_tokens(end=59))


@torch.inference_mode()
def test_perception_encoder_of_its_authors(tmp_path):
    """A file of PE-Core has an image encoder `visual.*` that is not CLIP's, and CLIP's names of the text encoder."""
    image, text = (
        randomise(OriginalPE()),
        randomise(OpenClipText(nn.GELU(), 1e-5, causal=True, channels=24, bias=False)),
    )
    state = {f"visual.{name}": tensor for name, tensor in image.state_dict().items()} | text.state_dict()
    state |= {"logit_scale": torch.tensor(1.5)}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "pe.safetensors")
    weights = open_weights(tmp_path / "pe.safetensors", {"heads": 4, "text.heads": 2})
    assert weights.title == "the original Perception Encoder with its text encoder"
    assert (weights.preprocess.fit, weights.preprocess.filter) == ("squash", "bilinear")
    ours = weights.build_bundle().model
    model = nn.ModuleDict({"text": text})
    model.logit_scale = nn.Parameter(torch.tensor(1.5))
    check_open_clip(model, image, ours, make_images((32, 48)), draw_tokens(end=59))
    written = find_writable_formats(ours.config)["perception-encoder"].to_file(ours.config, ours.state_dict())
    assert written.keys() == state.keys() and all(torch.equal(written[name], state[name]) for name in state)


@torch.inference_mode()
def test_perception_encoder_of_open_clip(tmp_path):
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 24}
    name = "vit_pe_core_base_patch16_224"
    trunk = pytest.importorskip("timm").create_model(name, dynamic_img_size=True, ref_feat_shape=(4, 4), **small)
    model = nn.Module()
    model.visual = nn.ModuleDict({"trunk": trunk})
    model.text = OpenClipText(nn.GELU(), 1e-5, causal=True, channels=24, bias=False)
    model.logit_scale = nn.Parameter(torch.tensor(0.0))
    model = randomise(model).eval()
    described = {"vision_cfg": {"timm_model_name": name}, "text_cfg": {"heads": 2}}
    ours = open_model(save_open_clip(model, tmp_path, described), {"heads": 4})
    check_open_clip(model, trunk, ours, make_images((32, 32)), draw_tokens(end=59))
    written = find_writable_formats(ours.config)["open-clip"].to_file(ours.config, ours.state_dict())
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in model.state_dict().items())


@torch.inference_mode()
@pytest.mark.parametrize("names", ["open_clip", "authors"])
def test_eva02_clip(names, tmp_path):
    """The authors' files have other names of the same tensors than timm's image encoder in open_clip's files."""
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 24}
    name = "eva02_base_patch16_clip_224"
    trunk = pytest.importorskip("timm").create_model(name, dynamic_img_size=True, **small)
    model = nn.Module()
    model.visual = nn.ModuleDict({"trunk": trunk})
    model.text = OpenClipText(nn.GELU(), 1e-5, causal=True, channels=24, bias=False)
    model.logit_scale = nn.Parameter(torch.tensor(0.0))
    model = randomise(model).eval()
    state = dict(model.state_dict())
    if names == "authors":
        renames = {"trunk.": "", "q_proj.bias": "q_bias", "v_proj.bias": "v_bias", "attn.norm": "attn.inner_attn_ln"}
        renames |= {"fc1_g": "w1", "fc1_x": "w2", "mlp.fc2": "mlp.w3", "mlp.norm": "mlp.ffn_ln"}
        for theirs, ours in renames.items():
            state = {key.replace(theirs, ours) if key[:4] == "visu" else key: x for key, x in state.items()}
        state |= {f"visual.{part}rope.freqs_cos": torch.zeros(16, 16) for part in ("", "blocks.0.attn.")}
    save_file({key: x.contiguous() for key, x in state.items()}, tmp_path / "open_clip_model.safetensors")
    described = {"vision_cfg": {"timm_model_name": name}, "text_cfg": {"heads": 2}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": described}))
    ours = open_model(tmp_path, {"heads": 4})
    check_open_clip(model, trunk, ours, make_images((32, 32)), draw_tokens(end=59))
    written = find_writable_formats(ours.config)["open-clip" if names == "open_clip" else "eva02"]
    written_state = written.to_file(ours.config, ours.state_dict())
    assert written_state.keys() == {key for key in state if "rope" not in key}
    assert all(torch.equal(x, state[key]) for key, x in written_state.items())


@torch.inference_mode()
@pytest.mark.parametrize("scanned", [False, True])
def test_siglip_of_big_vision(scanned, tmp_path):
    """The npz is that of `two_towers.py`, here from the tensors of transformers' model by the rules of flax: kernels are
    (in, out), and those of attention have an axis of heads. With `scanned`, blocks are stacked in one tensor."""
    theirs, tokens, images = make_siglip(), draw_tokens(), make_images((32, 32))
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    written: dict[str, np.ndarray] = {}

    def put_dense(ours: str, name: str) -> None:
        written[f"{ours}/kernel"], written[f"{ours}/bias"] = state[f"{name}.weight"].T, state[f"{name}.bias"]

    def put_norm(ours: str, name: str) -> None:
        written[f"{ours}/scale"], written[f"{ours}/bias"] = state[f"{name}.weight"], state[f"{name}.bias"]

    def put_attention(ours: str, weights: list[np.ndarray], biases: list[np.ndarray], out: str, heads: int) -> None:
        for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            written[f"{ours}/{part}/kernel"] = weight.T.reshape(weight.shape[1], heads, -1)
            written[f"{ours}/{part}/bias"] = bias.reshape(heads, -1)
        weight = state[f"{out}.weight"]
        written[f"{ours}/out/kernel"], written[f"{ours}/out/bias"] = (
            weight.T.reshape(heads, -1, len(weight)),
            state[f"{out}.bias"],
        )

    for tower, prefix, ours, heads in (
        ("vision_model", "params/img", "Transformer", 4),
        ("text_model", "params/txt", "Encoder_0", 2),
    ):
        for i in range(2):
            layer, block = f"{tower}.encoder.layers.{i}", f"{prefix}/{ours}/encoderblock_{i}"
            put_norm(f"{block}/LayerNorm_0", f"{layer}.layer_norm1")
            put_norm(f"{block}/LayerNorm_1", f"{layer}.layer_norm2")
            names = [f"{layer}.self_attn.{letter}_proj" for letter in "qkv"]
            weights, biases = [state[f"{n}.weight"] for n in names], [state[f"{n}.bias"] for n in names]
            put_attention(
                f"{block}/MultiHeadDotProductAttention_0", weights, biases, f"{layer}.self_attn.out_proj", heads
            )
            put_dense(f"{block}/MlpBlock_0/Dense_0", f"{layer}.mlp.fc1")
            put_dense(f"{block}/MlpBlock_0/Dense_1", f"{layer}.mlp.fc2")
    put_norm("params/img/Transformer/encoder_norm", "vision_model.post_layernorm")
    put_norm("params/txt/Encoder_0/encoder_norm", "text_model.final_layer_norm")
    put_dense("params/txt/head", "text_model.head")
    head, pool = "vision_model.head", "params/img/MAPHead_0"
    weights, biases = (np.split(state[f"{head}.attention.in_proj_{x}"], 3) for x in ("weight", "bias"))
    put_attention(f"{pool}/MultiHeadDotProductAttention_0", weights, biases, f"{head}.attention.out_proj", 4)
    put_norm(f"{pool}/LayerNorm_0", f"{head}.layernorm")
    put_dense(f"{pool}/MlpBlock_0/Dense_0", f"{head}.mlp.fc1")
    put_dense(f"{pool}/MlpBlock_0/Dense_1", f"{head}.mlp.fc2")
    embeddings = "vision_model.embeddings"
    written |= {
        f"{pool}/probe": state[f"{head}.probe"],
        "params/img/embedding/kernel": state[f"{embeddings}.patch_embedding.weight"].transpose(2, 3, 1, 0),
        "params/img/embedding/bias": state[f"{embeddings}.patch_embedding.bias"],
        "params/img/pos_embedding": state[f"{embeddings}.position_embedding.weight"][None],
        "params/txt/Embed_0/embedding": state["text_model.embeddings.token_embedding.weight"],
        "params/txt/pos_embedding": state["text_model.embeddings.position_embedding.weight"][None],
        "params/t": state["logit_scale"],
        "params/b": state["logit_bias"],
    }
    if scanned:
        for name in [name for name in written if "encoderblock_0" in name]:
            blocks = [written.pop(name.replace("encoderblock_0", f"encoderblock_{i}")) for i in range(2)]
            written[name.replace("encoderblock_0", "encoderblock")] = np.stack(blocks)
    np.savez(tmp_path / "siglip.npz", **written)
    ours = open_model(tmp_path / "siglip.npz")
    assert ours.config.positions.resize == "bilinear"
    expected = theirs(input_ids=tokens, pixel_values=images)
    logits = ours.compute_logits(ours.embed_images(images), ours.embed_texts(tokens))
    assert compute_difference(logits, expected.logits_per_image) <= ERROR_LIMIT
    tensors = find_writable_formats(ours.config)["big-vision-npz"].to_file(ours.config, ours.state_dict())
    if not scanned:
        assert tensors.keys() == written.keys()
        assert all(np.array_equal(tensors[name].numpy(), written[name]) for name in written)


PAIRS = {"clip": make_clip, "siglip": make_siglip, "siglip2": make_siglip2}
FORMATS = {
    "clip": {"huggingface", "open-clip"},
    "siglip": {"huggingface", "open-clip", "big-vision-npz"},
    "siglip2": {"huggingface", "open-clip", "big-vision-npz"},
}


@pytest.mark.parametrize("kind", PAIRS)
def test_files_of_transformers_are_written_back_bit_for_bit(kind, tmp_path):
    theirs = PAIRS[kind]()
    ours = save_and_open(theirs, tmp_path / "theirs")
    weights_format = find_writable_formats(ours.config)["huggingface"]
    written, original = weights_format.to_file(ours.config, ours.state_dict()), theirs.state_dict()
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    folder = tmp_path / "ours"
    folder.mkdir()
    save_file(written, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(weights_format.describe(ours.config)))
    again = type(theirs).from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), original.values(), strict=True))
    assert open_weights(folder).config == ours.config


@pytest.mark.parametrize("kind", PAIRS)
def test_every_format_round_trips_bit_for_bit(kind, tmp_path):
    from vitreous.weights.sidecar import config_to_metadata

    ours = save_and_open(PAIRS[kind](), tmp_path / "theirs")
    formats, state = find_writable_formats(ours.config), ours.state_dict()
    assert set(formats) == FORMATS[kind]
    for name, weights_format in formats.items():
        tensors = weights_format.to_file(ours.config, state)
        path = tmp_path / f"{name}{weights_format.suffix}"
        if weights_format.suffix == ".npz":
            np.savez(path, **{key: tensor.numpy() for key, tensor in tensors.items()})
        elif weights_format.describe:
            continue
        else:
            save_file(tensors, path, config_to_metadata(ours.config))
        settings = {"positions.resize": ours.config.positions.resize} if weights_format.suffix == ".npz" else {}
        read = open_weights(path, settings)
        assert read.config.structure() == ours.config.structure()
        assert read.title == weights_format.title
        read_state = read.read_state()
        assert read_state.keys() == state.keys()
        assert all(torch.equal(read_state[key], state[key]) for key in state)


def test_pairs_of_open_clip_are_written_back_under_their_names(tmp_path):
    model = make_open_clip_siglip("none")
    ours = open_model(save_open_clip(model, tmp_path), {"heads": 4, "text.heads": 2})
    written = find_writable_formats(ours.config)["open-clip"].to_file(ours.config, ours.state_dict())
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in model.state_dict().items())


def test_gelu_of_bare_files_is_an_assumption(tmp_path):
    notes = open_weights(save_open_clip(make_open_clip_siglip("none"), tmp_path)).notes
    assert any("does not specify its form of GELU: assumed the exact function" in note for note in notes)


@pytest.mark.parametrize("make", [make_clip, make_siglip])
@torch.inference_mode()
def test_models_of_images_start_from_the_image_encoder_of_a_pair(make, tmp_path):
    pair = save_and_open(make(), tmp_path)
    weights = open_weights(tmp_path)
    assert isinstance(weights.config, ImageTextConfig) and not weights.task.has_head
    model = build_model(pair.image.config.with_options(classes=5))
    report = load_pretrained_weights(model, tmp_path)
    assert "head.weight" in report.initialised and not [name for name in report.loaded if name.startswith("text.")]
    images = make_images((32, 32))
    assert torch.equal(model.features(images), pair.features(images))
    again = build_model(pair.config)
    load_pretrained_weights(again, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), pair.state_dict().values(), strict=True))


@torch.inference_mode()
def test_create_selects_the_encoder_by_name(tmp_path):
    config = config_from_name("CLIP-B/16-text").with_options(
        text={"vocabulary": 50, "length": 9, "depth": 1, "end_id": 49}
    )
    described = find_writable_formats(config)["huggingface"]
    pair = randomise(build_model(config))
    save_file(described.to_file(config, pair.state_dict()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(described.describe(config)))
    images = make_images((224, 224), 1)
    opened = create(weights=tmp_path).eval()
    assert isinstance(opened.config, ImageTextConfig) and torch.equal(opened(images), pair(images))
    image_encoder = create("CLIP-B/16", weights=tmp_path).eval()
    assert type(image_encoder.config) is CLIPConfig and torch.equal(image_encoder(images), pair(images))
    assert create("CLIP-B/16", weights=tmp_path, num_classes=0).eval()(images).shape == (1, 768)
    with pytest.raises(UsageError, match="CLIP-B/16, not ViT-B/16"):
        create("ViT-B/16", weights=tmp_path)


def test_preprocessing_of_pairs(tmp_path):
    for make, fit, mean in (
        (make_clip, "crop", 0.48145466),
        (make_siglip, "squash", 0.5),
        (make_siglip2, "squash", 0.5),
    ):
        make().save_pretrained(tmp_path)
        preprocess = open_weights(tmp_path).preprocess
        assert (preprocess.fit, preprocess.mean[0], preprocess.image) == (fit, mean, (32, 32))


def test_naflex_keeps_the_aspect_ratio_of_images(tmp_path):
    """The sizes and pixels are those of transformers' processor, whose interpolation rounds to 8 bits."""
    make_siglip2().save_pretrained(tmp_path)
    processor = {"max_num_patches": 12, "patch_size": 8, "resample": 2}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": True, "rescale_factor": 1 / 255}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    preprocess = open_weights(tmp_path).preprocess
    assert isinstance(preprocess, NativePreprocess) and (preprocess.tokens, preprocess.rounding) == (12, "up")
    theirs = transformers.Siglip2ImageProcessor(**processor)
    for size in ((40, 90), (64, 64), (33, 20)):
        pixels = np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize(size[::-1])
        expected = theirs(image, return_tensors="pt")
        height, width = (8 * int(length) for length in expected["spatial_shapes"][0])
        ours = preprocess.transform(image)
        assert tuple(ours.shape) == (3, height, width)
        patches = expected["pixel_values"][0, : height * width // 64]
        assert (flatten_patches(ours) - patches).abs().max() < 3 / 127.5


def test_text_settings_that_contradict_the_tensors_are_rejected(tmp_path):
    make_clip().save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    for name, value, message in (
        ("vocab_size", 61, "text.vocabulary 61, and its tensors have 60"),
        ("eos_token_id", 7, "its texts end with token 7"),
        ("hidden_act", "relu", "hidden_act relu, which is not supported"),
    ):
        changed = described | {"text_config": described["text_config"] | {name: value}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(WeightsError, match=message):
            open_weights(tmp_path)


def test_a_pair_without_a_tensor_is_rejected(tmp_path):
    make_siglip().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["text_model.head.bias"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=r"missing text_model\.head\.bias"):
        open_weights(tmp_path)


@pytest.mark.parametrize("kind", PAIRS)
def test_convert_writes_pairs_or_their_image_encoder(kind, tmp_path):
    PAIRS[kind]().save_pretrained(tmp_path / "pair")
    notes: list[str] = []
    for to in ("bundle", *sorted(FORMATS[kind])):
        report = convert(tmp_path / "pair", tmp_path / to, to=to)
        assert report["to"] == to and not report["unused"]
        settings = {"positions.resize": "bilinear"} if to.endswith("npz") else {}
        if to != "open-clip":
            assert isinstance(open_weights(next(iter(tmp_path.glob(f"{to}*"))), settings).config, ImageTextConfig)
    if kind != "clip":
        convert(tmp_path / "pair", tmp_path / "timm", to="timm", note=notes.append)
        assert any("timm does not support its text encoder" in note for note in notes)


def test_bundles_store_the_tokenizer(tmp_path):
    make_siglip().save_pretrained(tmp_path / "pair")
    path, _ = save_siglip_tokenizer(tmp_path / "pair")
    bundle = open_weights(tmp_path / "pair").build_bundle()
    assert bundle.tokenizer is not None and bundle.tokenizer.path == path
    bundle.save(tmp_path / "bundle")
    again = load_bundle(tmp_path / "bundle")
    assert again.tokenizer == replace(bundle.tokenizer, path=tmp_path / "bundle" / "tokenizer.json")
    assert (tmp_path / "bundle" / "tokenizer.json").read_bytes() == path.read_bytes()
    again.save(tmp_path / "bundle")  # in place
    assert load_bundle(tmp_path / "bundle").tokenizer == again.tokenizer
    convert(tmp_path / "bundle", tmp_path / "copy")
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == path.read_bytes()
    with (tmp_path / "bundle" / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(WeightsError, match=r"tokenizer\.json was modified"):
        load_bundle(tmp_path / "bundle")
    saved = save(bundle.model, tmp_path / "saved", tokenizer=path)
    assert load_bundle(saved).tokenizer is not None
    with pytest.raises(UsageError, match="has no text encoder"):
        save(bundle.model.image, tmp_path / "image", tokenizer=path)


@torch.inference_mode()
def test_pairs_are_created_at_another_image_size(tmp_path):
    theirs, images, tokens = make_siglip(), make_images((48, 64), 2), draw_tokens()
    theirs.save_pretrained(tmp_path)
    ours = create(weights=tmp_path, image_size=(48, 64)).eval()
    assert ours.config.image == (48, 64) and ours.image.position.table.shape == (6, 8, 48)
    expected = theirs(input_ids=tokens, pixel_values=images, interpolate_pos_encoding=True)
    assert compute_difference(ours.embed_images(images), expected.image_embeds) <= ERROR_LIMIT
    assert compute_difference(ours.embed_texts(tokens), expected.text_embeds) <= ERROR_LIMIT
    convert(tmp_path, tmp_path / "larger", image_size=(48, 64))
    larger = load_bundle(tmp_path / "larger")
    assert larger.preprocess.image == (48, 64)
    assert torch.equal(larger.model.embed_images(images), ours.embed_images(images))
    for call in (
        lambda: create(weights=tmp_path, num_classes=3),
        lambda: convert(tmp_path, tmp_path / "c", num_classes=3),
    ):
        with pytest.raises(UsageError, match="has no classes: texts describe them"):
            call()
