"""Weights of models that timm and transformers build: features of the library, training, bundles, messages."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import vitreous
from tests.conftest import make_folder, run_cli, run_command
from vitreous.errors import ResourceError, UsageError, VitreousError, WeightsError
from vitreous.inference.predict import load
from vitreous.models.foreign import ForeignModel
from vitreous.models.libraries import build_encoder, read_foreign_config
from vitreous.models.names import config_from_name
from vitreous.weights.adopt import load_pretrained_weights, open_weights, read_weights_info
from vitreous.weights.bundle import load_bundle

#: name -> image size in pixels: tokens with a class token, with RoPE, with registers; maps; windows; batch norm
TIMM_MODELS = {
    "timm:vit_tiny_patch16_224,patch_size=8,embed_dim=32,depth=2,num_heads=2": 32,
    "timm:eva02_tiny_patch14_224,patch_size=8,embed_dim=32,depth=2,num_heads=2": 32,
    "timm:vit_small_patch16_dinov3,patch_size=8,embed_dim=64,depth=2,num_heads=2": 32,
    "timm:convnext_atto,dims=(8,8,16,16),depths=(1,1,1,1)": 64,
    "timm:resnet18,layers=(1,1,1,1),channels=(8,8,16,16)": 64,
    "timm:swin_tiny_patch4_window7_224,window_size=4,embed_dim=16,depths=(1,1),num_heads=(1,2)": 32,
}
VIT, EVA, DINOV3, CONVNEXT, RESNET, SWIN = TIMM_MODELS
TRAIN_OPTIONS = {
    "batch_size": 8,
    "steps": 4,
    "save_every": 2,
    "lr": 1e-3,
    "precision": "fp32",
    "device": "cpu",
    "workers": 0,
    "progress": False,
}


def randomise_weights(module: nn.Module) -> nn.Module:
    """Add noise to every parameter, so that layers that start as identities or zeros matter."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def create_timm_model(name, classes=5, channels=3, size=None):
    import timm

    config = read_foreign_config(name, (size or TIMM_MODELS[name],) * 2)
    sizes = {"img_size": config.image} if config.sized_by else {}
    torch.manual_seed(0)
    model = timm.create_model(num_classes=classes, in_chans=channels, **sizes, **json.loads(config.arguments))
    return randomise_weights(model)


def pool_timm_features(model, images):
    return model.forward_head(model.forward_features(images), pre_logits=True)


@torch.no_grad()
@pytest.mark.parametrize("name", TIMM_MODELS)
def test_timm_state_dicts_are_read_with_every_prefix_and_file_type(name, tmp_path):
    theirs, size = create_timm_model(name), TIMM_MODELS[name]
    state = theirs.state_dict()
    save_file(state, tmp_path / "plain.safetensors")
    lightning = {f"model.{n}": t for n, t in state.items()} | {"loss.weight": torch.ones(3)}
    save_file(lightning, tmp_path / "lightning.safetensors")
    files = ["plain.safetensors", "lightning.safetensors"]
    if name == RESNET:  # files of torch.save are read in another process, which takes seconds
        torch.save({"state_dict": {f"module.{n}": t for n, t in state.items()}, "epoch": 3}, tmp_path / "ddp.pth")
        files.append("ddp.pth")
    images = torch.randn(2, 3, size, size)
    for file in files:
        ours = vitreous.create(name, weights=tmp_path / file, image_size=size).eval()
        assert torch.equal(ours.pool(ours.features(images)), pool_timm_features(theirs, images))
        assert torch.equal(ours(images), theirs(images)) and ours.config.classes == 5
        new_head = vitreous.create(name, weights=tmp_path / file, image_size=size, num_classes=3)
        assert not new_head.head.weight.any() and new_head.head.weight.shape[0] == 3
    result = load_pretrained_weights(new_head, tmp_path / "lightning.safetensors")
    assert sorted(result.unused) == ["head.bias", "head.weight", "loss.weight"]
    assert result.title == "a timm model" and "the head is new and zero-initialised" in result.text()


@torch.no_grad()
@pytest.mark.parametrize("name", TIMM_MODELS)
def test_another_image_size_and_other_channels_follow_the_rules_of_timm(name, tmp_path):
    import timm

    theirs, size = create_timm_model(name, classes=0), TIMM_MODELS[name]
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    config = read_foreign_config(name, (2 * size, 2 * size))
    for channels in (3, 1, 4):
        sizes = {"img_size": config.image} if config.sized_by else {}
        larger = timm.create_model(
            num_classes=0,
            in_chans=channels,
            pretrained=True,
            pretrained_cfg_overlay={"state_dict": theirs.state_dict()},
            **sizes,
            **json.loads(config.arguments),
        ).eval()
        images = torch.randn(2, channels, *config.image)
        ours = vitreous.create(
            name, weights=tmp_path / "theirs.safetensors", image_size=config.image, channels=channels
        ).eval()
        assert torch.equal(ours(images), pool_timm_features(larger, images)), channels
    vitreous.save(vitreous.create(name, weights=tmp_path / "theirs.safetensors", image_size=size), tmp_path / "bundle")
    from_bundle = vitreous.create(weights=tmp_path / "bundle", image_size=config.image, channels=4).eval()
    assert torch.equal(from_bundle(images), ours(images))


def create_transformers_model(kind, headed=True):
    import transformers

    vit = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    stages = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
    prefix, settings, head = {
        "vit": ("ViT", vit | {"intermediate_size": 64}, "ForImageClassification"),
        "dinov2": ("Dinov2", vit, "ForImageClassification"),
        "dinov3_vit": ("DINOv3ViT", vit | {"intermediate_size": 64, "num_register_tokens": 4}, "Model"),
        "beit": ("Beit", vit | {"intermediate_size": 64}, "ForImageClassification"),
        "convnext": ("ConvNext", stages, "ForImageClassification"),
        "convnextv2": ("ConvNextV2", stages, "ForImageClassification"),
        "regnet": ("RegNet", stages | {"embedding_size": 8, "groups_width": 8}, "ForImageClassification"),
        "resnet": ("ResNet", stages | {"embedding_size": 8, "layer_type": "basic"}, "ForImageClassification"),
    }[kind]
    config = getattr(transformers, f"{prefix}Config")(**settings, id2label={0: "cat", 1: "dog", 2: "eel"})
    torch.manual_seed(0)
    return randomise_weights(getattr(transformers, prefix + (head if headed else "Model"))(config))


def save_transformers_folder(kind, folder, **options):
    model = create_transformers_model(kind)
    model.save_pretrained(folder, **options)
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 3, "crop_pct": 0.875}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | {"size": {"shortest_edge": 32}}))
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vit", "dinov2", "dinov3_vit", "beit", "convnext", "convnextv2", "regnet", "resnet"])
def test_transformers_folders_are_read(kind, tmp_path):
    folder = tmp_path / "theirs"
    theirs = save_transformers_folder(kind, folder)
    base = getattr(theirs, theirs.base_model_prefix) if type(theirs).__name__.endswith("Classification") else theirs
    ours = vitreous.create(f"hf:{folder}", weights=folder).eval()
    images = torch.randn(2, 3, *ours.config.image)
    tokens = base(images).last_hidden_state
    assert torch.equal(ours.features(images), tokens.flatten(2).mT if tokens.ndim == 4 else tokens)
    if kind in ("vit", "convnext", "convnextv2", "regnet", "resnet"):  # one linear layer on the pooled features
        assert torch.equal(ours(images), theirs(images).logits) and ours.config.classes == 3
        assert open_weights(folder, reference=ours.config).task.classes == ("cat", "dog", "eel")
    else:
        assert ours.config.classes == 0
    for size in ((64, 64), (64, 32)):  # the second size is oblong
        resized = vitreous.create(f"hf:{folder}", weights=folder, image_size=size).eval()
        images, options = torch.randn(2, 3, *size), {}
        if kind in ("vit", "beit"):
            options = {"interpolate_pos_encoding": True}
        tokens = base(images, **options).last_hidden_state
        assert torch.equal(resized.features(images), tokens.flatten(2).mT if tokens.ndim == 4 else tokens), size
    vitreous.save(ours, tmp_path / "bundle")
    from_bundle = vitreous.create(weights=tmp_path / "bundle", image_size=(64, 32)).eval()
    assert torch.equal(from_bundle(images), resized(images))


def test_model_and_preprocessing_follow_from_the_weights(tmp_path):
    folder = tmp_path / "theirs"
    save_transformers_folder("convnext", folder)
    weights = open_weights(folder)
    assert weights.config.name() == "hf:theirs" and weights.title == "a transformers model"
    preprocess = weights.preprocess
    assert (preprocess.mean, preprocess.std, preprocess.filter) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic")
    assert preprocess.share == 0.875 and preprocess.fit == "crop"
    bundle = weights.build_bundle()
    assert isinstance(bundle.model, ForeignModel) and bundle.task.classes == ("cat", "dog", "eel")
    sharded = tmp_path / "sharded"
    theirs = save_transformers_folder("convnext", sharded, max_shard_size="4KB")
    assert (sharded / "model.safetensors.index.json").is_file()
    images = torch.randn(1, 3, 224, 224)
    assert torch.equal(open_weights(sharded).build_bundle().model(images), theirs(images).logits)
    local = read_weights_info(f"hf:{folder}")  # `hf:` accepts a folder
    assert local.config.name() == "hf:theirs" and local.preprocess == preprocess


def save_timm_folder(folder, name="test_convnext", **record):
    """Write a folder in the layout of timm's repositories on the Hub."""
    import timm

    torch.manual_seed(0)
    model = randomise_weights(timm.create_model(name, num_classes=7))
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    pretrained_cfg = {"tag": "r160_in1k", "input_size": [3, 160, 160], "num_classes": 7} | record
    (folder / "config.json").write_text(json.dumps({"architecture": name, "pretrained_cfg": pretrained_cfg}))
    return model


@torch.no_grad()
def test_timm_folders_name_their_model_and_preprocessing(tmp_path):
    record = {"mean": [0.5, 0.5, 0.5], "std": [0.4, 0.4, 0.4], "interpolation": "bilinear", "crop_pct": 0.8}
    theirs = save_timm_folder(tmp_path / "theirs", **record)
    weights = open_weights(tmp_path / "theirs")
    assert weights.config.name() == "timm:test_convnext.r160_in1k" and weights.config.classes == 7
    preprocess = weights.preprocess
    assert (preprocess.mean[0], preprocess.std[0], preprocess.share) == (0.5, 0.4, 0.8)
    assert preprocess.filter == "bilinear" and preprocess.fit == "crop"
    images = torch.randn(2, 3, 160, 160)
    assert torch.equal(weights.build_bundle().model(images), theirs(images))
    squashed = save_timm_folder(tmp_path / "squashed", crop_mode="squash") and open_weights(tmp_path / "squashed")
    assert squashed.preprocess.fit == "squash"


def test_statistics_of_a_bare_file_are_those_of_the_name(tmp_path):
    import timm

    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "vit.safetensors")
    record = timm.get_pretrained_cfg("test_vit")
    info = read_weights_info(tmp_path / "vit.safetensors", config_from_name("timm:test_vit"))
    assert (info.preprocess.mean, info.preprocess.std) == (record.mean, record.std)
    assert info.preprocess.share == record.crop_pct and info.preprocess.filter == record.interpolation


def to_official_convnext_names(state):
    """Rename timm's tensors of a ConvNeXt to those of Meta's files; DINOv3's also contain the last norm twice."""
    official = {}
    for name, tensor in state.items():
        name = name.replace("stem.", "downsample_layers.0.").replace(".blocks.", ".").replace("conv_dw", "dwconv")
        if ".downsample." in name:
            stage, _, layer = name.removeprefix("stages.").partition(".downsample.")
            name = f"downsample_layers.{stage}.{layer}"
        name = name.replace("mlp.fc", "pwconv").replace("head.norm", "norm")
        official[name] = tensor
    return official | {f"norms.3.{x}": official[f"norm.{x}"].clone() for x in ("weight", "bias")}


@pytest.mark.parametrize(
    "name,parameters", [("tiny", 27_820_128), ("small", 49_454_688), ("base", 87_566_464), ("large", 196_230_336)]
)
def test_distilled_convnexts_of_dinov3_are_backbones(name, parameters):
    config = config_from_name(f"timm:convnext_{name}.dinov3_lvd1689m", 64)
    with torch.device("meta"):
        model = ForeignModel(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert config.strides == (4, 8, 16, 32) and config.has_stages


@torch.no_grad()
def test_official_files_of_dinov3_convnexts_are_read(tmp_path):
    name = "timm:convnext_tiny.dinov3_lvd1689m,dims=(8,8,16,16),depths=(1,1,2,1)"
    theirs = create_timm_model(name, classes=0, size=64)
    official = to_official_convnext_names(theirs.state_dict())
    assert "stages.2.1.pwconv1.weight" in official and "downsample_layers.0.0.weight" in official
    save_file(official, tmp_path / "official.safetensors")
    ours = vitreous.create(name, weights=tmp_path / "official.safetensors", image_size=64).eval()
    images = torch.randn(2, 3, 64, 96)
    tokens = ours.features(images)
    assert torch.equal(ours(images), pool_timm_features(theirs, images))
    # the official class token is the norm of the mean of the last map (facebookresearch/dinov3, models/convnext.py)
    norm = theirs.head.norm
    mean = nn.functional.layer_norm(tokens.mean(1), tokens.shape[-1:], norm.weight, norm.bias, 1e-6)
    assert torch.allclose(ours(images), mean, atol=1e-5)
    maps = ours.features_at(images, (4, 8, 16, 32))
    assert [tuple(level.shape) for level in maps] == [(2, 16, 24, 8), (2, 8, 12, 8), (2, 4, 6, 16), (2, 2, 3, 16)]
    assert torch.equal(maps[-1].flatten(1, 2), tokens)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("library") / "photos", {"train": 8, "val": 4})


@pytest.mark.parametrize("name", TIMM_MODELS)
def test_run_from_timm_weights_is_saved_and_used(name, photos, tmp_path):
    save_file(create_timm_model(name).state_dict(), tmp_path / "theirs.safetensors")
    check_run(photos, tmp_path, name, tmp_path / "theirs.safetensors", TIMM_MODELS[name])
    if name == SWIN:
        check_resume(tmp_path / "run")


@pytest.mark.parametrize("kind", ["vit", "dinov2", "dinov3_vit", "convnext"])
def test_run_from_a_transformers_folder_is_saved_and_used(kind, photos, tmp_path):
    save_transformers_folder(kind, tmp_path / "theirs")
    check_run(photos, tmp_path, f"hf:{tmp_path / 'theirs'}", tmp_path / "theirs", 64)
    if kind == "dinov3_vit":
        check_resume(tmp_path / "run")


def check_run(photos, folder, name, init, size):
    """Train from weights; the run loads, and predicts as its saved and loaded model."""
    summary = vitreous.train(photos, model=name, init=str(init), image_size=size, out=folder / "run", **TRAIN_OPTIONS)
    run = Path(summary["run"])
    images = sorted((photos / "val").rglob("*.png"))[:3]
    bundle = load_bundle(run / "model")
    start = vitreous.create(name, weights=init, image_size=size).state_dict()
    trained = bundle.model.state_dict()
    assert trained.keys() >= {key for key in start if not key.startswith("head.")}
    names = [key for key, _ in bundle.model.named_parameters() if key.startswith("encoder")]
    change = max((trained[key] - start[key]).abs().max() for key in names)
    assert 0 < change < 0.1  # the run started from the weights
    model = load(run, device="cpu", precision="fp32")
    predictions = [(prediction.names, prediction.probabilities) for prediction in model.predict(images)]
    assert model.embed(images).shape == (3, bundle.model.config.num_features)
    vitreous.save(bundle.model, folder / "saved", bundle.task.classes, bundle.preprocess)
    saved = load(folder / "saved", device="cpu", precision="fp32")
    assert [(prediction.names, prediction.probabilities) for prediction in saved.predict(images)] == predictions


def check_resume(run):
    """A run that stopped at its middle ends with the same bits."""
    weights = load_file(run / "model" / "weights.safetensors")
    shutil.rmtree(run / "model")
    shutil.rmtree(sorted((run / "checkpoints").glob("step-*"))[-1])
    (run / "summary.json").unlink()
    vitreous.train(out=run, resume=True, progress=False)
    resumed = load_file(run / "model" / "weights.safetensors")
    assert all(torch.equal(resumed[key], weights[key]) for key in weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM_MODELS)
def test_onnx_export_of_a_run_from_weights(name, photos, tmp_path):
    save_file(create_timm_model(name).state_dict(), tmp_path / "theirs.safetensors")
    options = TRAIN_OPTIONS | {"steps": 2, "model": name, "init": str(tmp_path / "theirs.safetensors")}
    run = vitreous.train(photos, image_size=TIMM_MODELS[name], out=tmp_path / "run", **options)["run"]
    (exported,) = vitreous.export(run, to="onnx", out=tmp_path / "model.onnx")["exports"]
    assert exported["top1_agreement"] == 1 and exported["max_abs_logit_difference"] < 1e-3


def get_error(call):
    with pytest.raises(VitreousError) as caught:
        call()
    return type(caught.value), caught.value.message, caught.value.hint


def test_differences_are_listed_before_training(photos, tmp_path):
    import timm

    small = "vit_small_patch16_dinov3"
    state = timm.create_model(small, embed_dim=64, num_heads=1, depth=2).state_dict()
    save_file(state, file := tmp_path / "small.safetensors")
    options = ",embed_dim=64,num_heads=1"
    cases = {
        # S against S+: the gated MLP has other tensors
        f"timm:vit_small_plus_patch16_dinov3{options},depth=2": "missing blocks.0.mlp.fc1_g.bias",
        f"timm:{small}{options},depth=3": "missing blocks.2.",
        f"timm:{small}{options},depth=1": "unknown blocks.1.",
        f"timm:{small},embed_dim=32,num_heads=1,depth=2": "has shape (64), not (32)",
    }
    for name, difference in cases.items():
        kind, message, hint = get_error(lambda name=name: read_weights_info(file, config_from_name(name)))
        assert kind is WeightsError and f"does not fit {name}:" in message and difference in message, message
        assert "set model to the model of the weights" in hint or "--model" in hint
    result = run_cli("train", str(photos), "--model", f"timm:{small}", "--init", str(file), "--dry-run")
    assert result.returncode == 4 and "has shape (64), not (384)" in result.stderr and "Traceback" not in result.stderr
    folder = tmp_path / "theirs"
    save_transformers_folder("dinov2", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    kind, message, _ = get_error(lambda: read_weights_info(folder, config_from_name(f"hf:{folder}")))
    assert kind is WeightsError and "missing" in message and "2." in message


def test_weights_without_a_model_name_are_explained(photos, tmp_path):
    save_timm_folder(tmp_path / "theirs")
    shutil.copy(tmp_path / "theirs" / "model.safetensors", tmp_path / "bare.safetensors")
    kind, message, hint = get_error(lambda: open_weights(tmp_path / "bare.safetensors"))
    assert kind is not WeightsError and "tensors of an unknown layout" in message
    assert "--model timm:" in hint
    result = run_cli("train", str(photos), "--model", "timm:test_vit", "--init", str(tmp_path / "bare.safetensors"))
    assert result.returncode == 4 and "does not fit timm:test_vit" in result.stderr


def test_a_bare_state_dict_becomes_a_bundle(photos, tmp_path):
    name = RESNET
    theirs = create_timm_model(name)
    torch.save(theirs.state_dict(), tmp_path / "bare.pth")
    result = run_cli("convert", str(tmp_path / "bare.pth"), str(tmp_path / "bundle"), "--model", name)
    assert result.returncode == 0, result.stderr
    bundle = load_bundle(tmp_path / "bundle")
    images = torch.randn(2, 3, *bundle.model.config.image, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(bundle.model.eval()(images), theirs.eval()(images), atol=1e-5)
    image = next((photos / "val").rglob("*.png"))
    assert run_cli("predict", str(tmp_path / "bundle"), str(image)).returncode == 0
    for model, message in (("ViT-S/16", "not a model of timm"), ("timm:test_vit", "does not fit timm:test_vit")):
        result = run_cli("convert", str(tmp_path / "bare.pth"), str(tmp_path / "other"), "--model", model)
        assert result.returncode in (2, 4) and message in result.stderr and not (tmp_path / "other").exists()
    result = run_cli("convert", str(tmp_path / "bundle"), str(tmp_path / "other"), "--model", name)
    assert result.returncode == 2 and "is a bundle, which contains its model" in result.stderr


def test_weights_of_the_hub_are_read_from_its_cache_without_a_network(photos, tmp_path):
    repository, commit = tmp_path / "hf" / "hub" / "models--timm--test_convnext.r160_in1k", "0123456789" * 4
    save_timm_folder(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    image = next((photos / "val").rglob("*.png"))
    environment = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    # timm's default weights of the name have the tag r160_in1k
    result = run_command("predict", "timm:test_convnext", str(image), "--json", **environment)
    assert result.returncode == 0, result.stderr
    missing = run_command("predict", "timm:test_convnext2", str(image), **environment)
    assert missing.returncode == 4 and "is not in the cache, and HF_HUB_OFFLINE disables downloads" in missing.stderr


def test_missing_libraries_are_named(tmp_path, monkeypatch):
    import sys

    save_timm_folder(tmp_path / "theirs")
    save_transformers_folder("convnext", tmp_path / "hf")
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    read_foreign_config.cache_clear()
    for folder, extra in (("theirs", "timm"), ("hf", "transformers")):
        kind, message, hint = get_error(lambda folder=folder: open_weights(tmp_path / folder))
        assert kind is ResourceError and f"{extra}, which is not installed" in message and f"[{extra}]" in hint


def test_pickles_run_no_code(tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    state = create_timm_model(RESNET).state_dict()
    torch.save(dict(state) | {"extra": Malicious()}, tmp_path / "evil.pth")
    get_error(lambda: vitreous.create(RESNET, weights=tmp_path / "evil.pth", image_size=64))
    assert not (tmp_path / "executed").exists()


def test_configs_of_bundles_cannot_name_files_or_code(tmp_path):
    model = vitreous.create(RESNET, image_size=64, num_classes=2)
    for option in ("pretrained_cfg_overlay", "checkpoint_path", "pretrained"):
        arguments = json.dumps(json.loads(model.config.arguments) | {option: "evil"})
        with pytest.raises(UsageError, match="name a file or a download"):
            build_encoder(model.config.with_options(arguments=arguments))
    save_transformers_folder("vit", tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    code = {"auto_map": {"AutoModel": "evil.Model"}, "attn_implementation": "evil/kernel"}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config | code))
    read_foreign_config.cache_clear()
    stored = config_from_name(f"hf:{tmp_path / 'theirs'}")
    assert "evil" not in stored.arguments
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config | {"model_type": "evil"} | code))
    read_foreign_config.cache_clear()
    with pytest.raises(UsageError, match="does not contain the config"):
        config_from_name(f"hf:{tmp_path / 'theirs'}")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    read_foreign_config.cache_clear()
    with pytest.raises(UsageError, match="more than 1,000 layers"):
        config_from_name(f"hf:{tmp_path / 'theirs'}")


def test_converted_state_dict_is_written_once(tmp_path):
    save_file(create_timm_model(CONVNEXT).state_dict(), tmp_path / "theirs.safetensors")
    model = vitreous.create(CONVNEXT, weights=tmp_path / "theirs.safetensors", image_size=64)
    vitreous.save(model, tmp_path / "bundle", list("abcde"))
    stored = load_file(tmp_path / "bundle" / "weights.safetensors")
    assert stored.keys() == model.state_dict().keys()
