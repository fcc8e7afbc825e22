"""Training at native aspect ratio: outputs equal those of single images; evaluation, prediction and resumption."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from tests.conftest import make_image, run_cli
from tests.data.films import write_moves
from tests.objectives.test_clips import StoppingListener
from vitreous.config import from_yaml
from vitreous.data.augmentation.augment import Augment
from vitreous.data.batch import slice_batch
from vitreous.data.loader import TrainLoader
from vitreous.data.modalities.native import NativePreprocess
from vitreous.data.modalities.volumes import VolumePreprocess
from vitreous.data.sources import open_data
from vitreous.errors import UsageError
from vitreous.inference.engine import TorchEngine
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.models.zoo import build_model
from vitreous.nn.sizes import fit_size_to_tokens
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress
from vitreous.objectives.supervised import SupervisedConfig, SupervisedObjective
from vitreous.recipes.own_aspect import parse_token_range
from vitreous.training.run import Run
from vitreous.weights.bundle import load_bundle

IMAGE_SIZES = ((16, 16), (40, 12), (12, 40), (24, 16), (64, 8))
TRAIN_OPTIONS = {"workers": 0, "device": "cpu", "precision": "fp32", "batch_size": 12, "model": "ViT-32x2/4"}
NATIVE_ASPECT_OPTIONS = {**TRAIN_OPTIONS, "native_aspect": True, "tokens": "8-16"}


@pytest.fixture(scope="module")
def aspect_data(tmp_path_factory):
    """Return three classes of different colours, in images of five sizes."""
    aspect_data = tmp_path_factory.mktemp("aspects")
    for split_index, (split, count) in enumerate((("train", 12), ("val", 3), ("test", 5))):
        for label, name in enumerate(("ant", "bee", "cat")):
            (aspect_data / split / name).mkdir(parents=True)
            for index in range(count):
                image = make_image(
                    1000 * split_index + 100 * label + index, IMAGE_SIZES[(index + label) % len(IMAGE_SIZES)], label
                )
                image.save(aspect_data / split / name / f"{index}.png")
    return aspect_data


@pytest.fixture(scope="module")
def aspect_run(aspect_data, tmp_path_factory):
    """Return a run trained on the colours."""
    out = tmp_path_factory.mktemp("runs") / "run"
    vitreous.train(str(aspect_data), out=str(out), steps=30, progress=False, **NATIVE_ASPECT_OPTIONS)
    return out


def build_objective(**config):
    torch.manual_seed(0)
    model = build_model(
        ViTConfig(image=(16, 16), patch=(4, 4), width=32, depth=2, heads=2, classes=3, mlp=MlpConfig(hidden=64))
    ).train()
    torch.nn.init.normal_(model.head.weight, std=0.3)
    model.any_size = True
    return SupervisedObjective(model, SupervisedConfig(**config), ObjectiveSetting(seed=3, views=Augment()))


def make_batch(count=5):
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(3, height, width, generator=generator) for width, height in IMAGE_SIZES[:count]]
    positions = torch.arange(40, 40 + count)
    return {"images": images, "labels": torch.tensor([0, 1, 2, 0, 1])[:count], "positions": positions}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_packed_loss_and_gradients_match_single_images(dropout):
    objective, progress = build_objective(patch_dropout=dropout, smoothing=0.1), TrainingProgress(0, 0, 100, {})
    batch = objective.prepare(make_batch(), progress)
    assert ("keep" in batch) == bool(dropout)
    loss = objective(batch)["loss"]
    loss.backward()
    packed = {name: p.grad.clone() for name, p in objective.named_parameters()}
    objective.zero_grad()
    total_loss = 0.0
    for number in range(5):  # as an unpacked image (1, C, h, w)
        sample = {name: entry[number : number + 1] for name, entry in batch.items()}
        sample["images"] = sample["images"][0][None]
        if dropout:
            sample["keep"] = sample["keep"][0][None]
            patches = math.prod(sample["images"].shape[2:]) // 16
            assert sample["keep"].shape[1] == round(patches * (1 - dropout))
        sample_loss = objective(sample)["loss"] / 5
        sample_loss.backward()
        total_loss += float(sample_loss.detach())
    assert float(loss.detach()) == pytest.approx(total_loss, abs=1e-5)
    for name, parameter in objective.named_parameters():
        assert torch.allclose(packed[name], parameter.grad, atol=1e-5), name


def test_patch_dropout_is_identical_in_micro_batches():
    objective, progress, batch = build_objective(patch_dropout=0.5), TrainingProgress(0, 0, 100, {}), make_batch()
    full_batch, micro_batch = objective.prepare(batch, progress), objective.prepare(slice_batch(batch, 2, 5), progress)
    assert all(torch.equal(a, b) for a, b in zip(full_batch["keep"][2:], micro_batch["keep"], strict=True))


def test_native_aspect_views_depend_only_on_the_sample(aspect_data):
    preprocess = NativePreprocess((16, 16), 3, tokens=16, patch=(4, 4))
    views = Augment(crop=(0.3, 1.0), ratio=(0.9, 1.1), flip=0.5, fewest_tokens=6)
    split = open_data(str(aspect_data)).split("train")
    loader = TrainLoader(split, preprocess, views, seed=5)
    batch = next(loader.iterate_batches(0, 72, 72))
    assert isinstance(batch["images"], list) and len(batch["images"]) == 72
    counts = [math.prod(image.shape[1:]) // 16 for image in batch["images"]]
    assert min(counts) >= 1 and max(counts) <= 16 and len(set(counts)) > 5
    for image, sample in zip(batch["images"], batch["samples"].tolist(), strict=True):
        source_size = preprocess.decode(split.raw(sample)).size
        source_aspect, view_aspect = source_size[0] / source_size[1], image.shape[2] / image.shape[1]
        assert image.dtype == torch.uint8 and not any(side % 4 for side in image.shape[1:])
        assert (source_aspect - 1) * (view_aspect - 1) >= 0 or source_aspect == pytest.approx(1, rel=0.6)
    later = next(loader.iterate_batches(36, 72, 36))
    with_workers = next(replace(loader, workers=1).iterate_batches(0, 72, 72))
    assert all(torch.equal(a, b) for a, b in zip(batch["images"][36:], later["images"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(batch["images"], with_workers["images"], strict=True))
    image_loader = TrainLoader(split, preprocess, Augment(), seed=5)
    for image, sample in zip(
        *(next(image_loader.iterate_batches(0, 9, 9))[name] for name in ("images", "samples")), strict=True
    ):
        assert torch.equal(image, preprocess.to_tensor(preprocess.decode(split.raw(int(sample)))))


def test_images_are_resized_to_whole_patches_at_their_aspect():
    preprocess = NativePreprocess((32, 32), 3, tokens=16, patch=(8, 8))
    for size in ((100, 100), (400, 50), (30, 90)):
        pixels = preprocess.to_tensor(preprocess.decode(Image.new("RGB", size)))
        assert tuple(pixels.shape[1:]) == fit_size_to_tokens(size[::-1], (8, 8), 16)
    for options in ({"tokens": 0}, {"patch": (4, 4, 4)}, {"image": (8, 8, 8)}):
        with pytest.raises(UsageError):
            NativePreprocess(**{"image": (8, 8), "tokens": 5, "patch": (4, 4), **options})
    with pytest.raises(UsageError, match="volumes of voxels do not support native aspect ratios"):
        NativePreprocess.from_preprocess(VolumePreprocess((8, 8, 8), 1), 5, (4, 4))


def test_engine_outputs_match_single_images(aspect_run):
    bundle = load_bundle(aspect_run / "model")
    images = [torch.randint(0, 256, (3, h, w), dtype=torch.uint8) for w, h in IMAGE_SIZES]
    engine = TorchEngine(bundle.model, bundle.preprocess, "cpu", "fp32")
    bundle.model.any_size = True
    with torch.no_grad():
        expected = torch.cat([bundle.model(bundle.preprocess.normalise(single_image[None])) for single_image in images])
    assert torch.allclose(engine(images), expected, atol=1e-5)
    assert torch.allclose(engine(images[::-1]), expected.flip(0), atol=1e-5)
    arrays = [image.numpy() for image in images]
    assert np.array_equal(engine.logits(arrays)[1:2], engine.logits(arrays[1:2]))


def test_native_aspect_run_learns_and_works_with_every_verb(aspect_data, aspect_run, tmp_path):
    summary = json.loads((aspect_run / "summary.json").read_text())
    assert summary["test"]["top1"] > 0.9, summary["test"]
    preprocess = load_bundle(aspect_run / "model").preprocess
    assert (preprocess.name, preprocess.tokens, preprocess.patch) == ("native", 16, (4, 4))
    stored = from_yaml(Run, (aspect_run / "config.yaml").read_text())
    assert stored.views.fewest_tokens == 8 and stored.model.image == (16, 16)
    assert "data:image/" in (aspect_run / "report.html").read_text()
    document = vitreous.evaluate(str(aspect_run), device="cpu", precision="fp32")
    assert document["test"]["nll"] == pytest.approx(summary["test"]["nll"], abs=1e-4)
    files = sorted((aspect_data / "test").glob("*/*.png"))
    predictor = vitreous.load(aspect_run, device="cpu", precision="fp32")
    predictions = predictor.predict(files)
    for file, prediction in zip(files, predictions, strict=True):
        # bit-identical, regardless of batch composition
        assert predictor.predict(file).probabilities == prediction.probabilities
    assert predictor.embed(files).shape == (15, 32)
    right = np.mean(
        [prediction.names[0] == file.parent.name for file, prediction in zip(files, predictions, strict=True)]
    )
    assert right == pytest.approx(summary["test"]["top1"])
    fewer = vitreous.load(aspect_run, device="cpu", precision="fp32", tokens=6).predict(files[0])
    assert fewer.probabilities != predictions[0].probabilities
    result = run_cli("export", str(aspect_run), "--to", "onnx", "--out", str(tmp_path / "x.onnx"))
    assert result.returncode == 2 and "uses native aspect ratios, but a graph needs a fixed image size" in result.stderr
    result = run_cli(
        "inspect", str(aspect_run), str(files[0]), "--figures", "rollout", "--out", str(tmp_path / "figures")
    )
    assert result.returncode == 0 and "squashed to the model's image size" in result.stderr


def test_plain_vits_predict_at_native_aspect_ratio(aspect_data, tmp_path):
    vitreous.save(vitreous.create("ViT-32x2/8", 32, 3), tmp_path / "vit")
    vitreous.save(vitreous.create("Swin-32x2-2/2-window4", 32, 3), tmp_path / "swin")
    file = next((aspect_data / "test").glob("*/1.png"))
    vit = vitreous.load(tmp_path / "vit", device="cpu", precision="fp32", native_aspect=True)
    size = vit.card.preprocess.to_tensor(vit.card.preprocess.decode(file)).shape
    assert math.prod(size[1:]) <= 16 * 64 and size[1] != size[2]
    result = run_cli("predict", str(tmp_path / "vit"), str(file), "--native-aspect", "--tokens", "9", "--json")
    assert result.returncode == 0 and json.loads(result.stdout), result.stderr
    for arguments, hint in (
        (("swin", "--native-aspect"), "(native aspect ratio) requires a plain ViT"),
        (("vit", "--tokens", "9"), "add --native-aspect"),
        (("vit", "--native-aspect", "--tokens", "3"), "use 4 or more, for example --tokens 256"),
        (("vit", "--native-aspect", "--merge-tokens", "2"), "leave --merge-tokens"),
    ):
        result = run_cli("predict", str(tmp_path / arguments[0]), str(file), *arguments[1:])
        assert result.returncode == 2 and hint in result.stderr and "Traceback" not in result.stderr, result.stderr


@pytest.mark.usefixtures("without_pages")
def test_resumed_native_aspect_run_is_bit_identical(aspect_data, tmp_path):
    options = {**NATIVE_ASPECT_OPTIONS, "steps": 6, "save_every": 2, "patch_dropout": 0.25}
    vitreous.train(str(aspect_data), out=str(tmp_path / "whole"), progress=False, **options)
    with pytest.raises(KeyError):
        stop = {**options, "workers": 2, "log_every": 1}
        vitreous.train(str(aspect_data), out=str(tmp_path / "stopped"), listener=StoppingListener(36), **stop)
    vitreous.train(out=str(tmp_path / "stopped"), resume=True, progress=False)
    uninterrupted, resumed = (
        load_bundle(tmp_path / name / "model").model.state_dict() for name in ("whole", "stopped")
    )
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)
    with pytest.raises(UsageError, match="tokens"):
        vitreous.train(out=str(tmp_path / "stopped"), resume=True, native_aspect=True, tokens="16", progress=False)


def test_options_incompatible_with_native_aspect_are_rejected(aspect_data, tmp_path):
    assert parse_token_range("256") == (256, 256) and parse_token_range("64-256") == (64, 256)
    write_moves(tmp_path / "clips" / "train", 3, first=0)
    for data, changes, match in (
        (aspect_data, {"tokens": "3"}, "is too small for images at native aspect ratio"),
        (aspect_data, {"tokens": "many"}, "invalid tokens many"),
        (aspect_data, {"tokens": "64-16"}, "invalid tokens"),
        (aspect_data, {"native_aspect": False}, "add native_aspect=True"),
        (aspect_data, {"image_size": 32}, "tokens=256"),
        (aspect_data, {"model": "Swin-32x2-2/2-window4"}, "(native aspect ratio) requires a plain ViT"),
        (aspect_data, {"model": "BiT-R50x1"}, "(native aspect ratio) requires a plain ViT"),
        (aspect_data, {"mixup": 0.2}, "mixup=0"),
        (aspect_data, {"drop_path": 0.1}, "drop_path=0"),
        (aspect_data, {"progressive": 0.5}, "progressive=1"),
        (aspect_data, {"recipe": "mae", "model": None}, "one size"),
        (tmp_path / "clips", {"model": None}, "leave native_aspect=True out"),
    ):
        with pytest.raises(UsageError) as error:
            vitreous.train(str(data), out=str(tmp_path / "no"), progress=False, **{**NATIVE_ASPECT_OPTIONS, **changes})
        assert match in f"{error.value} {error.value.hint}", (changes, error.value.hint)
    assert not (tmp_path / "no").exists()
