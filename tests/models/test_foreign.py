"""Encoders of timm and transformers with our objectives, heads and engines."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import vitreous
from tests import contracts
from tests.conftest import make_folder, run_cli
from vitreous.data.augmentation.augment import Augment
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError
from vitreous.inference.predict import build_predictor, load
from vitreous.models.families import config_type
from vitreous.models.foreign import ForeignModel, wrap_backbone
from vitreous.models.libraries import read_foreign_config
from vitreous.models.names import config_from_name
from vitreous.models.zoo import create_untrained_model
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress
from vitreous.objectives.dino import DINOConfig
from vitreous.objectives.segmentation import SegmentationConfig
from vitreous.objectives.supervised import SupervisedConfig
from vitreous.tasks.classification import Classification
from vitreous.tasks.features import FeatureExtraction
from vitreous.weights.bundle import Bundle, load_bundle

CLASSES = ("ant", "bee", "cat")


def create_timm_vit(**changes):
    import timm

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", **(sizes | {"num_classes": 5} | changes))


def create_transformers_vit(headed=True):
    from transformers import ViTConfig, ViTForImageClassification, ViTModel

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=8
    )
    return ViTForImageClassification(config) if headed else ViTModel(config, add_pooling_layer=False)


class PatchEncoder(nn.Module):
    """A minimal encoder: (B, 3, H, W) -> (B, N, 32)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 32, 8, 8)

    def forward(self, images):
        return self.layer(images).flatten(2).mT


ENCODER_FACTORIES = {
    "timm": (create_timm_vit, 1),
    "timm, mean": (lambda: create_timm_vit(class_token=False, global_pool="avg"), 0),
    "timm, registers": (lambda: create_timm_vit(reg_tokens=2), 3),
    "transformers": (create_transformers_vit, 1),
    "transformers, bare": (lambda: create_transformers_vit(False), 1),
    "plain": (PatchEncoder, 0),
}


def wrap_encoder(name, classes):
    torch.manual_seed(0)
    build, prefix = ENCODER_FACTORIES[name]
    sizes = {"image_size": 16, "patch_size": 8} if name == "plain" else {}
    return wrap_backbone(build(), classes, **sizes), prefix


@pytest.mark.parametrize("name", ENCODER_FACTORIES)
def test_wrapped_encoder_matches_the_original_features(name):
    model, prefix = wrap_encoder(name, 0)
    images = torch.randn(2, 3, 16, 16)
    config = model.eval().config
    assert (config.image, config.patch, config.width, config.prefix) == ((16, 16), (8, 8), 32, prefix)
    tokens, module = model.features(images), model.encoder.module
    assert tokens.shape == (2, prefix + 4, 32)
    if hasattr(module, "forward_head"):
        expected = module.forward_head(module.forward_features(images), pre_logits=True)
    else:
        expected = tokens[:, 0] if prefix else tokens.mean(1)
    assert torch.equal(model(images), expected)


@pytest.mark.parametrize("name", ENCODER_FACTORIES)
def test_wrapped_encoder_learns_from_labels(name, tmp_path):
    root = make_folder(tmp_path / "photos", {"train": 8})
    loader = vitreous.create_loader(root, batch_size=24)
    model, _ = wrap_encoder(name, len(loader.classes))
    setting = ObjectiveSetting(0, loader.classes, views=Augment(mixup=0.1))
    objective = SupervisedConfig(smoothing=0.1).build(model, setting)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for epoch in range(12):
        for batch in loader:
            sample_indices = torch.arange(24) + 24 * epoch
            with torch.no_grad():
                ready = objective.prepare(
                    {**batch, "positions": sample_indices}, TrainingProgress(epoch, 24 * epoch, 24 * 12)
                )
            loss = objective(ready)["loss"]
            optimizer.zero_grad()
            loss.backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert objective.deployed_model() is model and objective.task().classes == CLASSES


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["timm", "transformers"])
def test_our_engine_embeds_and_predicts(name, precision):
    from vitreous.inference.options import InferenceOptions

    model, _ = wrap_encoder(name, 3)
    nn.init.normal_(model.head.weight)
    read = ImagePreprocess((16, 16))
    arrays = [np.random.default_rng(n).integers(0, 256, (20, 16, 3), np.uint8) for n in range(3)]
    images = torch.stack([read.transform(image) for image in arrays])
    how = InferenceOptions(device="cpu", precision=precision)
    predictor = build_predictor("", Bundle(model.eval(), Classification(CLASSES), read), how)
    with torch.no_grad():
        features = model.pool(model.features(images))
        assert np.allclose(predictor.embed(arrays), features, atol=1e-4)
        best = [CLASSES[class_index] for class_index in model(images).argmax(1)]
    assert [prediction.names[0] for prediction in predictor.predict(arrays)] == best
    alone = build_predictor("", Bundle(wrap_encoder(name, 0)[0].eval(), FeatureExtraction(), read), how)
    assert np.allclose(alone.embed(arrays), features, atol=1e-4)


def test_unsupported_encoders_are_rejected(tmp_path):
    import timm

    with pytest.raises(UsageError, match="the image size of PatchEncoder is unknown"):
        wrap_backbone(PatchEncoder())
    with pytest.raises(UsageError, match="4 tokens for images of 16 pixels, which do not match patches of 4 pixels"):
        wrap_backbone(PatchEncoder(), image_size=16, patch_size=4)
    with pytest.raises(UsageError, match="does not accept images of"):
        wrap_backbone(create_timm_vit(), image_size=48)
    with pytest.raises(UsageError, match="must return tokens"):
        wrap_backbone(timm.create_model("resnet18"), image_size=32, patch_size=32)
    model, _ = wrap_encoder("timm", 3)
    with pytest.raises(UsageError, match="was built with options that it does not record"):
        vitreous.save(model, tmp_path / "model")
    with pytest.raises(UsageError, match="PatchEncoder is not a model of timm or transformers"):
        vitreous.save(wrap_encoder("plain", 3)[0], tmp_path / "model")
    with pytest.raises(UsageError, match="a model of another library"):
        ForeignModel(model.config)
    with pytest.raises(ValueError, match="takes 3 channels"):
        model(torch.zeros(1, 1, 16, 16))
    with pytest.raises(UsageError, match="no run at"):
        load(tmp_path / "model")


def create_library_module(name):
    import timm
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    return {
        "timm": lambda: timm.create_model("test_vit", in_chans=1),
        "timm, other size": lambda: timm.create_model("test_vit", img_size=64),
        "ViT": create_transformers_vit,
        "ViT with pooler": lambda: transformers.ViTModel(transformers.ViTConfig(**sizes)),
        "Beit": lambda: transformers.BeitModel(transformers.BeitConfig(**sizes)),
        "DINOv3": lambda: transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**sizes, num_register_tokens=4)),
    }[name]()


@pytest.mark.parametrize("name", ["timm", "timm, other size", "ViT", "ViT with pooler", "Beit", "DINOv3"])
def test_wrapped_modules_of_libraries_are_saved(name, tmp_path):
    module = contracts.randomise(create_library_module(name))
    model = contracts.randomise(wrap_backbone(module, num_classes=3)).eval()
    vitreous.save(model, tmp_path / "bundle", classes=CLASSES)
    bundle = load_bundle(tmp_path / "bundle")
    images = torch.randn(2, model.config.channels, *model.config.image)
    assert torch.equal(bundle.model(images), model(images)) and bundle.task.classes == CLASSES
    assert bundle.model.config.library in ("timm", "transformers")


@pytest.mark.parametrize(
    "options", [{"depth": 2}, {"drop_path_rate": 0.1}, {"global_pool": "avg"}, {"norm_layer": "rmsnorm"}]
)
def test_wrapped_modules_with_unrecorded_options_are_rejected(options, tmp_path):
    import timm

    model = wrap_backbone(timm.create_model("test_vit", **options), num_classes=3)
    with pytest.raises(UsageError, match=r"timm:test_vit\.r160_in1k was built with options that it does not record"):
        vitreous.save(model, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


TIMM_VIT_NAME = "timm:vit_tiny_patch16_224,patch_size=8,embed_dim=32,depth=2,num_heads=2"
#: name -> image size: a model with tokens, maps with batch norm, maps with layers between the last map and the head
FOREIGN_MODEL_SIZES = {
    TIMM_VIT_NAME: 16,
    "timm:test_resnet": 64,
    "timm:test_efficientnet": 64,
    "timm:test_convnext": 64,
}
TRAIN_OPTIONS = {
    "image_size": 32,
    "batch_size": 8,
    "precision": "fp32",
    "device": "cpu",
    "workers": 0,
    "progress": False,
}


def create_named_model(name, classes=3):
    torch.manual_seed(0)
    return create_untrained_model(name, FOREIGN_MODEL_SIZES[name], classes), torch.randn(
        3, 3, FOREIGN_MODEL_SIZES[name], FOREIGN_MODEL_SIZES[name]
    )


@pytest.mark.parametrize("name", FOREIGN_MODEL_SIZES)
def test_model_by_name_matches_timm_logits(name):
    import timm

    model, images = create_named_model(name)
    arguments = json.loads(model.config.arguments)
    size = {"img_size": FOREIGN_MODEL_SIZES[name]} if name == TIMM_VIT_NAME else {}
    theirs = timm.create_model(num_classes=3, **size, **arguments).eval()
    state = theirs.state_dict()
    model.eval().encoder.module.load_state_dict({n: state[n] for n in model.encoder.module.state_dict()})
    model.head.load_state_dict(
        dict(zip(("weight", "bias"), theirs.get_classifier().state_dict().values(), strict=True))
    )
    assert torch.allclose(model(images), theirs(images), atol=1e-5)
    config = model.config
    assert config.name() == name and config_type(config.family) is type(config)
    layers = {config.parameter_layer(n) for n, _ in model.named_parameters()}
    assert layers == set(range(config.depth + 2)) and len(model.blocks()) == config.depth
    assert config.macs() > 2 * sum(p.numel() for p in model.parameters() if p.ndim > 1)


@pytest.mark.parametrize("promise", contracts.ALL_CONTRACTS)
@pytest.mark.parametrize("name", [TIMM_VIT_NAME, "timm:test_resnet"])
def test_model_contract(name, promise):
    model, images = create_named_model(name)
    promise(contracts.randomise(model), images)


@pytest.mark.parametrize("name", [TIMM_VIT_NAME, "timm:test_resnet"])
def test_bfloat16_weights_use_float32_norms(name):
    model, images = create_named_model(name)
    nn.init.normal_(model.head.weight)
    expected, half = model.eval()(images), vitreous.create(name, FOREIGN_MODEL_SIZES[name], 3).eval()
    half.load_state_dict(model.state_dict())
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16()
    logits, tokens = half(images), half.features(images)
    assert tokens.dtype == half.pool(tokens).dtype == torch.bfloat16  # the inputs of objectives' heads
    assert logits.dtype == torch.bfloat16 and (logits - expected).norm() < 0.05 * expected.norm()
    half.train()(images).sum().backward()
    assert all(parameter.grad is not None for parameter in half.parameters())
    assert all(buffer.dtype != torch.bfloat16 for buffer in half.buffers())


def test_other_image_sizes_and_frozen_submodules():
    for name in (TIMM_VIT_NAME, "timm:test_resnet"):
        model, _ = create_named_model(name)
        contracts.check_other_image_sizes(model, torch.randn(2, 3, 96, 96), torch.randn(2, 3, 64, 32))
    with pytest.raises(UsageError, match="not divisible by patch size 8"):
        create_named_model(TIMM_VIT_NAME)[0](torch.zeros(1, 3, 20, 20))
    norm = model.encoder.module.bn1
    model.encoder.module.bn1.requires_grad_(False)
    assert not model.train().encoder.module.bn1.training and model.encoder.module.layer1.training
    assert norm is model.encoder.module.bn1


@pytest.fixture(scope="module")
def trained_summary(tmp_path_factory):
    """The summary of a timm ResNet trained on patterned images."""
    folder = tmp_path_factory.mktemp("foreign")
    root = make_folder(folder / "photos", {"train": 12, "val": 4})
    options = TRAIN_OPTIONS | {
        "model": "timm:test_resnet",
        "epochs": 14.0,
        "lr": 3e-3,
        "save_every": 20,
        "ema": 0.5,
        "seed": 0,
    }
    return vitreous.train(root, out=folder / "run", **options)


def test_foreign_run_learns_and_works_with_every_verb(trained_summary, tmp_path):
    assert (
        trained_summary["model"] == "timm:test_resnet"
        and trained_summary["val"]["top1"] >= 0.75
        and trained_summary["train"]["loss"] < 0.8
    )
    run = Path(trained_summary["run"])
    image = next((run.parent / "photos" / "val").rglob("*.png"))
    model = load(run, device="cpu", precision="fp32")
    prediction = model.predict([image])[0]
    assert set(prediction.names) <= set(CLASSES) and model.embed([image]).shape == (1, 96)
    for words in (("evaluate", run), ("predict", run, image), ("embed", run, image, "--out", tmp_path / "e.npz")):
        assert run_cli(*map(str, words)).returncode == 0
    assert run_cli("inspect", str(run), "--figures", "rollout").returncode == 2  # a ResNet has no attention
    again = load_bundle(run / "model")
    assert again.model.encoder.module.bn1.num_batches_tracked.dtype == torch.int64
    vitreous.save(again.model, tmp_path / "saved", CLASSES, again.preprocess)
    assert torch.equal(
        load_bundle(tmp_path / "saved").model(torch.ones(1, 3, 32, 32)), again.model(torch.ones(1, 3, 32, 32))
    )


@pytest.mark.slow
def test_onnx_export_matches_the_run(trained_summary, tmp_path):
    (exported,) = vitreous.export(trained_summary["run"], to="onnx", out=tmp_path / "model.onnx")["exports"]
    assert exported["top1_agreement"] == 1 and exported["max_abs_logit_difference"] < 1e-3


def test_resumed_run_is_bit_identical_including_batch_norm_statistics(trained_summary, tmp_path):
    run, copy = Path(trained_summary["run"]), tmp_path / "run"
    shutil.copytree(run, copy)
    newest = sorted((copy / "checkpoints").glob("step-*"))[-1]
    for model_folder in (newest, copy / "model"):
        shutil.rmtree(model_folder)
    (copy / "summary.json").unlink()
    vitreous.train(out=copy, resume=True, progress=False)
    expected, resumed = (load_file(run_folder / "model" / "weights.safetensors") for run_folder in (run, copy))
    assert expected.keys() == resumed.keys() and all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_teacher_copies_batch_norm_statistics_of_the_student():
    model, _ = create_named_model("timm:test_resnet", 0)
    objective = DINOConfig(prototypes=8, head_width=8, bottleneck=4).build(model, ObjectiveSetting()).train()
    batch = {"images": torch.randn(2, 2, 3, 32, 32), "local": torch.randn(2, 2, 3, 32, 32)}
    objective(objective.prepare(batch, TrainingProgress()))["loss"].backward()
    student_norm, teacher_norm = model.encoder.module.bn1, objective.teacher.encoder.module.bn1
    assert not torch.equal(student_norm.running_mean, teacher_norm.running_mean)
    with torch.no_grad():
        objective.after_step(TrainingProgress())
    assert (
        torch.equal(student_norm.running_mean, teacher_norm.running_mean) and student_norm.running_mean.abs().max() > 0
    )


@pytest.mark.parametrize(
    "name,head", [(TIMM_VIT_NAME, "linear"), ("timm:test_resnet", "linear"), ("timm:test_resnet", "upernet")]
)
def test_dense_head_learns_on_foreign_feature_maps(name, head):
    model, images = create_named_model(name, 0)
    images, classes = images[:2], torch.tensor([0, 2])[:, None, None].expand(2, *images.shape[2:])
    objective = SegmentationConfig(head=head, head_width=1).build(model, ObjectiveSetting(classes=CLASSES))
    optimizer, losses = torch.optim.AdamW(objective.parameters(), 1e-2), []
    for _ in range(6):
        loss = objective({"images": images, "classes": classes})["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0] and objective.deployed_model()(images).shape == (2, 3, *images.shape[2:])


def run_train_dry_run(*words):
    result = run_cli("train", "digits", "--dry-run", *words)
    assert "Traceback" not in result.stderr
    return result.returncode, result.stderr


def test_unknown_names_and_unsupported_recipes_are_reported(monkeypatch):
    assert run_train_dry_run("--model", "timm:resnet_18") == (
        2,
        "error: timm has no model resnet_18\n  did you mean timm:resnet18\n",
    )
    code, text = run_train_dry_run("--model", "timm:test_resnet,depth=x,9")
    assert code == 2 and "'9' is not an option" in text
    code, text = run_train_dry_run("--model", "timm:test_resnet,no_such=1")
    assert code == 2 and "cannot build" in text and "no_such" in text
    code, text = run_train_dry_run("--model", "hf:nowhere/at/all")
    assert code == 2 and "does not contain the config" in text
    for recipe in ("mae", "masked-patches", "dinov2"):
        code, text = run_train_dry_run("--recipe", recipe, "--model", "timm:test_resnet")
        assert code == 2 and "blocks all attend to every token" in text, text
    code, text = run_train_dry_run("--model", "timm:test_resnet", "--micro-batch", "2")
    assert code == 2 and "batch norms of timm:test_resnet" in text
    monkeypatch.setitem(sys.modules, "timm", None)
    read_foreign_config.cache_clear()
    code, text = run_train_dry_run("--model", "timm:test_resnet")
    assert code == 6 and "pip install 'vitreous[timm]'" in text


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_transformers_config_folder_is_a_model_name(kind, tmp_path):
    import transformers

    if kind == "vit":
        theirs = create_transformers_vit(False)
    else:
        small = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        theirs = transformers.ResNetModel(small)
    theirs.config.save_pretrained(tmp_path / "small")
    config = config_from_name(f"hf:{tmp_path / 'small'}", 16 if kind == "vit" else 32)
    model = create_untrained_model(f"hf:{tmp_path / 'small'}", config.image[0], 0).eval()
    model.encoder.module.load_state_dict(theirs.state_dict(), strict=False)
    images = torch.randn(2, 3, *config.image)
    output = theirs.eval()(images)
    expected = output.last_hidden_state[:, 0] if kind == "vit" else output.pooler_output.flatten(1)
    assert torch.allclose(model(images), expected, atol=1e-5) and config.name() == "hf:small"
    shutil.rmtree(tmp_path / "small")  # the config is stored in the bundle
    Bundle(model, FeatureExtraction(), ImagePreprocess(config.image)).save(tmp_path / "model")
    assert torch.equal(load_bundle(tmp_path / "model").model(images), model(images))
    if kind == "vit":
        assert torch.equal(model.last_norm(model.features_after(images, [2])[0]), model.features(images))
        assert model(torch.randn(1, 3, 32, 16)).shape == (1, 32)
