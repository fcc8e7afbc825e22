"""Cached features: the head's input, computed once, keyed by everything that they depend on, and stored completely or
not at all."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.conftest import make_image
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.split import ArraySplit, FileSplit
from vitreous.errors import NonFiniteError, ResourceError, UsageError
from vitreous.inference import features as module
from vitreous.inference.engine import InferenceOptions
from vitreous.inference.features import load_or_compute_features
from vitreous.models.zoo import create_untrained_model

PREPROCESS = ImagePreprocess((16, 16))
FP32_OPTIONS = InferenceOptions("cpu", "fp32")
MODEL_OPTIONS = {
    "class token": ("ViT-32x1/8", {}),
    "mean": ("ViT-32x1/8", {"pool": "mean", "class_token": False}),
    "representation": ("ViT-32x1/8", {"head": {"representation": 24}}),
    "headless": ("ViT-32x1/8", {"num_classes": 0}),
    "distilled": ("DeiT-Ti/16-distilled", {"depth": 1}),
    "BiT": ("BiT-R50x1", {"blocks": (1, 1), "width": 8, "image_size": 32}),
}


def build_small_model(name="class token"):
    """A small model with a nonzero head."""
    torch.manual_seed(0)
    title, fields = MODEL_OPTIONS[name]
    model = create_untrained_model(title, **{"image_size": 16, "num_classes": 3, **fields}).eval()
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.fixture(autouse=True)
def feature_cache(tmp_path, monkeypatch):
    """An empty cache for one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vitreous" / "features"


@pytest.fixture
def image_files(tmp_path):
    paths = [tmp_path / f"{index}.png" for index in range(7)]
    for index, path in enumerate(paths):
        make_image(index, tint=index).save(path)
    return FileSplit(paths, np.arange(7) % 3)


def make_noise_split(count=5, size=16):
    return ArraySplit(
        np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8), np.arange(count) % 3
    )


@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_features_are_the_input_of_the_head(name):
    model, size = build_small_model(name), MODEL_OPTIONS[name][1].get("image_size", 16)
    preprocess, split = replace(PREPROCESS, image=(size, size)), make_noise_split(size=size)
    images = preprocess.normalise(torch.from_numpy(split.pixels.transpose(0, 3, 1, 2).copy()))
    read = []
    model.head.register_forward_pre_hook(lambda head, inputs: read.append(inputs[0].detach()))
    with torch.inference_mode():
        model(images)
    cached = load_or_compute_features(model, preprocess, split, FP32_OPTIONS)
    assert cached.features.dtype == np.float32 and not cached.read_errors
    np.testing.assert_allclose(cached.features, read[0].numpy(), rtol=1e-4, atol=1e-5)


def fail_if_called(*_, **__):
    raise AssertionError("features are computed again")


def test_features_are_computed_once_for_any_labels_and_head(image_files, feature_cache, monkeypatch):
    computed = load_or_compute_features(
        build_small_model(), PREPROCESS, image_files, FP32_OPTIONS, batch_size=2, workers=0
    )
    assert not computed.reused and computed.file is not None and computed.file.parent == feature_cache
    monkeypatch.setattr(module, "make_engine", fail_if_called)
    other_model = build_small_model()
    other_model.head, other_model.config = torch.nn.Linear(32, 5), replace(other_model.config, classes=5)
    again = load_or_compute_features(
        other_model, PREPROCESS, image_files.take(np.arange(7), np.zeros(7, np.int64)), FP32_OPTIONS
    )
    assert again.reused and again.file == computed.file and np.array_equal(computed.features, again.features)


def test_feature_cache_key_covers_all_inputs(image_files, feature_cache):
    load_or_compute_features(build_small_model(), PREPROCESS, image_files, FP32_OPTIONS, workers=0)

    def list_entries():
        return {path.name for path in feature_cache.glob("*.npy")}

    other_model = build_small_model()
    with torch.no_grad():
        other_model.encoder.blocks[0].attention.part.out.weight[0, 0] += 1e-3
    cases = [
        (other_model, PREPROCESS, image_files, FP32_OPTIONS),
        (build_small_model("mean"), PREPROCESS, image_files, FP32_OPTIONS),
        (build_small_model(), replace(PREPROCESS, share=0.9), image_files, FP32_OPTIONS),
        (build_small_model(), PREPROCESS, image_files.take(np.arange(6)), FP32_OPTIONS),
        (build_small_model(), PREPROCESS, image_files.take(np.arange(7)[::-1].copy()), FP32_OPTIONS),
        (build_small_model(), PREPROCESS, image_files, replace(FP32_OPTIONS, precision="bf16")),
        (build_small_model(), PREPROCESS, image_files, replace(FP32_OPTIONS, merge_tokens=1)),
    ]
    for case in cases:
        entries = list_entries()
        assert not load_or_compute_features(*case, workers=0).reused
        assert len(list_entries() - entries) == 1
    make_image(99).save(image_files.paths[3])
    assert not load_or_compute_features(
        build_small_model(), PREPROCESS, image_files, FP32_OPTIONS, workers=0
    ).reused  # the file has changed
    assert load_or_compute_features(build_small_model(), PREPROCESS, image_files, FP32_OPTIONS, workers=0).reused


def test_interrupted_or_damaged_features_are_not_used(image_files, feature_cache):
    def stop(images):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_or_compute_features(build_small_model(), PREPROCESS, image_files, FP32_OPTIONS, workers=0, on_images=stop)
    assert not list(feature_cache.iterdir())
    cached = load_or_compute_features(build_small_model(), PREPROCESS, image_files, FP32_OPTIONS, workers=0)
    assert cached.file is not None
    metadata_file, expected, content = (
        cached.file.with_suffix(".json"),
        np.array(cached.features),
        cached.file.read_bytes(),
    )

    def assert_computed_again():
        features = load_or_compute_features(build_small_model(), PREPROCESS, image_files, FP32_OPTIONS, workers=0)
        assert not features.reused and np.array_equal(features.features, expected)

    cached.file.write_bytes(content[:-40])
    assert_computed_again()
    metadata_file.unlink()
    assert_computed_again()
    metadata_file.write_text(metadata_file.read_text()[:30])
    assert_computed_again()
    metadata_file.write_text(json.dumps({**json.loads(metadata_file.read_text()), "shape": [7, 31]}))
    assert_computed_again()
    assert load_or_compute_features(build_small_model(), PREPROCESS, image_files, FP32_OPTIONS).reused


def test_old_temporary_files_are_removed(image_files, feature_cache):
    feature_cache.mkdir(parents=True)
    old, new = feature_cache / ".a.npy.1.tmp", feature_cache / ".b.npy.2.tmp"
    old.touch(), new.touch()
    os.utime(old, (1, 1))
    load_or_compute_features(build_small_model(), PREPROCESS, image_files, FP32_OPTIONS, workers=0)
    assert not old.exists() and new.exists()


def test_features_are_not_cached_with_keep_false(image_files, feature_cache):
    features = load_or_compute_features(
        build_small_model(), PREPROCESS, image_files, FP32_OPTIONS, workers=0, keep=False
    )
    assert features.file is None and not feature_cache.exists()
    assert np.array_equal(
        features.features,
        load_or_compute_features(build_small_model(), PREPROCESS, image_files, FP32_OPTIONS, workers=0).features,
    )


def test_unreadable_images_are_reported_on_every_load(image_files):
    image_files.paths[2].write_bytes(b"no picture")
    for _ in range(2):
        features = load_or_compute_features(build_small_model(), PREPROCESS, image_files, FP32_OPTIONS, workers=0)
        assert list(features.read_errors) == [2] and "2.png" in features.read_errors[2]
        assert features.is_readable.tolist() == [True, True, False, True, True, True, True]
    assert features.reused


def test_non_finite_features_and_missing_memory_are_rejected(image_files, feature_cache, tmp_path, monkeypatch):
    model = build_small_model()
    with torch.no_grad():
        model.projection.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"0\.png are not finite"):
        load_or_compute_features(model, PREPROCESS, image_files, FP32_OPTIONS, workers=0)
    assert not list(feature_cache.iterdir())
    with pytest.raises(UsageError, match="int8"):
        load_or_compute_features(
            build_small_model(), PREPROCESS, image_files, InferenceOptions("cpu", "int8", "openvino")
        )
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("", (), {"free": 100})())
    with pytest.raises(ResourceError, match="features of 896 bytes do not fit"):
        load_or_compute_features(build_small_model(), PREPROCESS, image_files, FP32_OPTIONS, workers=0)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ResourceError, match="cache=False"):
        load_or_compute_features(build_small_model(), PREPROCESS, image_files, FP32_OPTIONS, workers=0)
