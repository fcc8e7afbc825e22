"""VideoMAE and ViViT: official weights and those of transformers give the same outputs, and survive a round trip."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from tests.weights import peers
from tests.weights.peers import check_agreement, compute_difference, open_model
from vitreous.errors import WeightsError
from vitreous.models.config import VideoConfig, transformer_config
from vitreous.models.zoo import build_model
from vitreous.weights.adopt import open_weights
from vitreous.weights.formats.transformers import has_vit_tensor_names
from vitreous.weights.options import WeightsSource
from vitreous.weights.writable import get_writable_format

transformers = pytest.importorskip("transformers")

CLIP_SIZE = (4, 16, 24)
SMALL_SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
VIDEOMAE = SMALL_SIZES | {"image_size": [16, 24], "patch_size": 8, "num_frames": 4, "tubelet_size": 2}
VIVIT = SMALL_SIZES | {"image_size": [16, 24], "num_frames": 4, "tubelet_size": [2, 8, 4]}
DECODER_SIZES = {f"decoder_{name}": value // 2 for name, value in SMALL_SIZES.items()}
MODEL_KINDS = {
    "VideoMAE, classifier": ("VideoMAEForVideoClassification", VIDEOMAE | {"num_labels": 5}),
    "VideoMAE, fine-tuned encoder": ("VideoMAEModel", VIDEOMAE),
    "VideoMAE, pre-trained encoder": ("VideoMAEModel", VIDEOMAE | {"use_mean_pooling": False, "layer_norm_eps": 1e-5}),
    "VideoMAE, with its decoder": ("VideoMAEForPreTraining", VIDEOMAE | DECODER_SIZES | {"use_mean_pooling": False}),
    "ViViT, classifier": ("VivitForVideoClassification", VIVIT | {"num_labels": 5}),
    "ViViT, encoder": ("VivitModel", VIVIT | {"qkv_bias": False, "hidden_act": "gelu"}),
}


def build_transformers_model(class_name, options):
    config = transformers.VideoMAEConfig if class_name.startswith("VideoMAE") else transformers.VivitConfig
    return getattr(transformers, class_name)(config(**options))


def make_peer(class_name, options):
    """Return the peer of a transformers model that takes (B, T, C, H, W)."""
    model = build_transformers_model(class_name, options)
    peer = peers.make_transformers_peer(model, False, (CLIP_SIZE,))
    body = getattr(model, model.base_model_prefix, model)
    peer.features = lambda x: body(x.transpose(1, 2)).last_hidden_state
    peer.logits = (lambda x: model(x.transpose(1, 2)).logits) if "Classification" in class_name else None
    return peer


@pytest.mark.parametrize("name", MODEL_KINDS)
def test_features_and_logits_match_transformers(name, tmp_path):
    class_name, options = MODEL_KINDS[name]
    peer = make_peer(class_name, options)
    model = open_model(peer.file(tmp_path))
    check_agreement(model, peer)
    assert isinstance(model.config, VideoConfig) and model.config.image == CLIP_SIZE
    form, random_model = get_writable_format("huggingface", model.config), peers.randomise(build_model(model.config), 1)
    (tmp_path / "written").mkdir()
    save_file(form.to_file(model.config, random_model.state_dict()), tmp_path / "written" / "model.safetensors")
    (tmp_path / "written" / "config.json").write_text(json.dumps(form.describe(model.config)))
    described = form.describe(model.config)["architectures"][0]
    loaded, keys = getattr(transformers, described).from_pretrained(tmp_path / "written", output_loading_info=True)
    absent = {name for name in keys["missing_keys"] if not name.startswith("pooler.")}
    assert not absent and not keys["unexpected_keys"] and not keys["mismatched_keys"]
    x = peers.make_images(CLIP_SIZE)
    with torch.inference_mode():
        outputs = loaded.eval()(x.transpose(1, 2))
        if model.config.classes:
            assert compute_difference(random_model(x), outputs.logits) <= peers.ERROR_LIMIT
        else:
            assert compute_difference(random_model.features(x), outputs.last_hidden_state) <= peers.ERROR_LIMIT
    reloaded = open_weights(tmp_path / "written")
    assert reloaded.config == replace(model.config, classes=reloaded.config.classes)
    assert all(torch.equal(tensor, random_model.state_dict()[key]) for key, tensor in reloaded.read_state().items())


def to_official_names(state, prefix=""):
    """Rename tensors of transformers' VideoMAE to the official names, with query, key and value in one matrix."""
    names = {
        "embeddings.patch_embeddings.projection": "patch_embed.proj",
        "encoder.layer.": "blocks.",
        "attention.output.dense": "attn.proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        "layernorm_before": "norm1",
        "layernorm_after": "norm2",
        "attention.attention.query.bias": "attn.q_bias",
        "attention.attention.value.bias": "attn.v_bias",
        "classifier": "head",
        "layernorm": "norm",
    }
    written = {}
    for name, tensor in state.items():
        name = name.removeprefix("videomae.")
        for old, new in names.items():
            name = name.replace(old, new)
        written[name if name.startswith(("fc_norm", "head")) else prefix + name] = tensor
    for i in range(2):
        qkv = [
            written.pop(f"{prefix}blocks.{i}.attention.attention.{projection}.weight")
            for projection in ("query", "key", "value")
        ]
        written[f"{prefix}blocks.{i}.attn.qkv.weight"] = torch.cat(qkv)
    return written


def test_official_fine_tuned_files_match(tmp_path):
    peer = make_peer("VideoMAEForVideoClassification", VIDEOMAE | {"num_labels": 5, "layer_norm_eps": 1e-6})
    peer.model.fc_norm.eps = 1e-6
    save_file(to_official_names(peer.model.state_dict()), tmp_path / "checkpoint.safetensors")
    weights = open_weights(tmp_path / "checkpoint.safetensors", {"image": CLIP_SIZE, "heads": 4})
    assert weights.title == "the original VideoMAE" and weights.preprocess.mean[0] == pytest.approx(0.485)
    check_agreement(weights.build_bundle().model, peer)
    for section in ("model", "module"):  # as their training code saves it, also with DeepSpeed
        torch.save({section: to_official_names(peer.model.state_dict())}, tmp_path / "checkpoint.pth")
        assert open_weights(tmp_path / "checkpoint.pth", {"image": CLIP_SIZE, "heads": 4}).config == weights.config
    form, config = get_writable_format("videomae", weights.config), weights.config
    assert form.to_file(config, weights.read_state()).keys() == to_official_names(peer.model.state_dict()).keys()


def test_official_pretraining_files_are_read(tmp_path):
    peer = make_peer(
        "VideoMAEForPreTraining", VIDEOMAE | DECODER_SIZES | {"use_mean_pooling": False, "layer_norm_eps": 1e-6}
    )
    encoder = {name: t for name, t in peer.model.state_dict().items() if name.startswith("videomae.")}
    decoder = {"decoder.blocks.0.attn.q_bias": torch.zeros(24), "encoder_to_decoder.weight": torch.zeros(24, 48)}
    decoder |= {"mask_token": torch.zeros(1, 1, 24), "decoder.norm.weight": torch.zeros(24)}
    path = tmp_path / "checkpoint.safetensors"
    save_file(to_official_names(encoder, "encoder.") | decoder, path)
    weights = open_weights(WeightsSource(str(path), source_size=CLIP_SIZE), {"heads": 4})
    assert sorted(weights.unused) == sorted(decoder) and weights.config.norm.final == "tokens"
    check_agreement(weights.build_bundle().model, peer)
    without_size = open_weights(WeightsSource(str(path), source_size=(16, 24)), {"heads": 4})
    assert without_size.config.image == (16, 16, 24)
    assert "assumed 16 frames of 224 x 224 pixels (--source-size FRAMES" in open_weights(path, {"heads": 4}).notes[-1]
    form = get_writable_format("videomae", weights.config)
    assert form.to_file(weights.config, weights.read_state()).keys() == to_official_names(encoder, "encoder.").keys()


def test_unsupported_video_models_are_rejected(tmp_path):
    """BEiT has the same kind of biases; a head that reads the first patch is not VideoMAE's."""
    official_state = to_official_names(build_transformers_model(*MODEL_KINDS["VideoMAE, classifier"]).state_dict())
    save_file(official_state | {"cls_token": torch.zeros(1, 1, 48)}, tmp_path / "beit.safetensors")
    with pytest.raises(WeightsError, match="a BEiT"):
        open_weights(tmp_path / "beit.safetensors")
    class_name, options = MODEL_KINDS["VideoMAE, classifier"]
    build_transformers_model(class_name, options | {"use_mean_pooling": False}).save_pretrained(tmp_path / "first")
    with pytest.raises(WeightsError, match="uses the first patch"):
        open_weights(tmp_path / "first")
    build_transformers_model(*MODEL_KINDS["ViViT, classifier"]).save_pretrained(tmp_path / "vivit")
    described = json.loads((tmp_path / "vivit" / "config.json").read_text())
    (tmp_path / "vivit" / "config.json").write_text(json.dumps(described | {"tubelet_size": [2, 8]}))
    with pytest.raises(WeightsError, match="three axes"):
        open_weights(tmp_path / "vivit")


@pytest.mark.parametrize(
    ("options", "has_names"),
    [
        ({"image": (16, 16)}, True),
        ({"image": (4, 16, 16)}, False),
        ({"image": (4, 16, 16), "arrangement": "joint"}, True),
        ({"image": (4, 16, 16), "arrangement": "joint", "attention": {"key_bias": False}}, False),
        ({"image": (4, 16, 16), "arrangement": "factorised-attention"}, False),
    ],
)
def test_a_volume_or_a_clip_has_the_tensor_names_of_a_vit_only_with_joint_attention(options, has_names):
    patch = (2, 8, 8)[-len(options["image"]) :]
    config = transformer_config(patch=patch, width=32, depth=1, heads=2, classes=3, **options)
    assert has_vit_tensor_names(config) is has_names
