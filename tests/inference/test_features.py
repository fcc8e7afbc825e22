"""Features: what the head reads, computed once, kept whole or not at all, and found again by everything they depend
on."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.conftest import picture
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.split import ArraySplit, FileSplit
from vitreous.errors import NonFiniteError, ResourceError, UsageError
from vitreous.inference import features as module
from vitreous.inference.engine import InferenceOptions
from vitreous.inference.features import load_or_compute_features
from vitreous.models.zoo import create_untrained_model

PREPROCESS = ImagePreprocess((16, 16))
FP32 = InferenceOptions("cpu", "fp32")
MODELS = {
    "class token": ("ViT-32x1/8", {}),
    "mean": ("ViT-32x1/8", {"pool": "mean", "class_token": False}),
    "representation": ("ViT-32x1/8", {"head": {"representation": 24}}),
    "headless": ("ViT-32x1/8", {"num_classes": 0}),
    "distilled": ("DeiT-Ti/16-distilled", {"depth": 1}),
    "BiT": ("BiT-R50x1", {"blocks": (1, 1), "width": 8, "image_size": 32}),
}


def made(name="class token"):
    """A small model whose head is not zero."""
    torch.manual_seed(0)
    title, fields = MODELS[name]
    model = create_untrained_model(title, **{"image_size": 16, "num_classes": 3, **fields}).eval()
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.fixture(autouse=True)
def feature_cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vitreous" / "features"


@pytest.fixture
def files(tmp_path):
    """Seven images as files."""
    paths = [tmp_path / f"{index}.png" for index in range(7)]
    for index, path in enumerate(paths):
        picture(index, tint=index).save(path)
    return FileSplit(paths, np.arange(7) % 3)


def noise(count=5, size=16):
    return ArraySplit(
        np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8), np.arange(count) % 3
    )


@pytest.mark.parametrize("name", MODELS)
def test_they_are_what_the_head_reads(name):
    model, size = made(name), MODELS[name][1].get("image_size", 16)
    preprocess, split = replace(PREPROCESS, image=(size, size)), noise(size=size)
    images = preprocess.normalise(torch.from_numpy(split.pixels.transpose(0, 3, 1, 2).copy()))
    read = []
    model.head.register_forward_pre_hook(lambda head, inputs: read.append(inputs[0].detach()))
    with torch.inference_mode():
        model(images)
    found = load_or_compute_features(model, preprocess, split, FP32)
    assert found.features.dtype == np.float32 and not found.read_errors
    np.testing.assert_allclose(found.features, read[0].numpy(), rtol=1e-4, atol=1e-5)


def never(*_, **__):
    raise AssertionError("features are computed again")


def test_they_are_computed_once_for_any_labels_and_any_head(files, feature_cache, monkeypatch):
    first = load_or_compute_features(made(), PREPROCESS, files, FP32, batch_size=2, workers=0)
    assert not first.reused and first.file is not None and first.file.parent == feature_cache
    monkeypatch.setattr(module, "make_engine", never)
    other = made()
    other.head, other.config = torch.nn.Linear(32, 5), replace(other.config, classes=5)
    again = load_or_compute_features(other, PREPROCESS, files.take(np.arange(7), np.zeros(7, np.int64)), FP32)
    assert again.reused and again.file == first.file and np.array_equal(first.features, again.features)


def test_everything_they_depend_on_is_in_the_key(files, feature_cache):
    load_or_compute_features(made(), PREPROCESS, files, FP32, workers=0)

    def kept_now():
        return {path.name for path in feature_cache.glob("*.npy")}

    other = made()
    with torch.no_grad():
        other.encoder.blocks[0].attention.part.out.weight[0, 0] += 1e-3
    cases = [
        (other, PREPROCESS, files, FP32),
        (made("mean"), PREPROCESS, files, FP32),
        (made(), replace(PREPROCESS, share=0.9), files, FP32),
        (made(), PREPROCESS, files.take(np.arange(6)), FP32),
        (made(), PREPROCESS, files.take(np.arange(7)[::-1].copy()), FP32),
        (made(), PREPROCESS, files, replace(FP32, precision="bf16")),
        (made(), PREPROCESS, files, replace(FP32, merge_tokens=1)),
    ]
    for case in cases:
        before = kept_now()
        assert not load_or_compute_features(*case, workers=0).reused
        assert len(kept_now() - before) == 1
    picture(99).save(files.paths[3])
    assert not load_or_compute_features(
        made(), PREPROCESS, files, FP32, workers=0
    ).reused  # the file is another one now
    assert load_or_compute_features(made(), PREPROCESS, files, FP32, workers=0).reused


def test_what_was_interrupted_is_never_used(files, feature_cache):
    def stop(images):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_or_compute_features(made(), PREPROCESS, files, FP32, workers=0, on_images=stop)
    assert not list(feature_cache.iterdir())
    whole = load_or_compute_features(made(), PREPROCESS, files, FP32, workers=0)
    assert whole.file is not None
    told, rows, content = whole.file.with_suffix(".json"), np.array(whole.features), whole.file.read_bytes()

    def again():
        found = load_or_compute_features(made(), PREPROCESS, files, FP32, workers=0)
        assert not found.reused and np.array_equal(found.features, rows)

    whole.file.write_bytes(content[:-40])
    again()
    told.unlink()
    again()
    told.write_text(told.read_text()[:30])
    again()
    told.write_text(json.dumps({**json.loads(told.read_text()), "shape": [7, 31]}))
    again()
    assert load_or_compute_features(made(), PREPROCESS, files, FP32).reused


def test_what_others_left_behind_goes_when_it_is_old(files, feature_cache):
    feature_cache.mkdir(parents=True)
    old, new = feature_cache / ".a.npy.1.tmp", feature_cache / ".b.npy.2.tmp"
    old.touch(), new.touch()
    os.utime(old, (1, 1))
    load_or_compute_features(made(), PREPROCESS, files, FP32, workers=0)
    assert not old.exists() and new.exists()


def test_nothing_is_kept_unless_asked(files, feature_cache):
    found = load_or_compute_features(made(), PREPROCESS, files, FP32, workers=0, keep=False)
    assert found.file is None and not feature_cache.exists()
    assert np.array_equal(found.features, load_or_compute_features(made(), PREPROCESS, files, FP32, workers=0).features)


def test_unreadable_images_are_told_also_later(files):
    files.paths[2].write_bytes(b"no picture")
    for _ in range(2):
        found = load_or_compute_features(made(), PREPROCESS, files, FP32, workers=0)
        assert list(found.read_errors) == [2] and "2.png" in found.read_errors[2]
        assert found.is_readable.tolist() == [True, True, False, True, True, True, True]
    assert found.reused


def test_refusals(files, feature_cache, tmp_path, monkeypatch):
    model = made()
    with torch.no_grad():
        model.projection.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"0\.png are not finite"):
        load_or_compute_features(model, PREPROCESS, files, FP32, workers=0)
    assert not list(feature_cache.iterdir())
    with pytest.raises(UsageError, match="int8"):
        load_or_compute_features(made(), PREPROCESS, files, InferenceOptions("cpu", "int8", "openvino"))
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("", (), {"free": 100})())
    with pytest.raises(ResourceError, match="features of 896 bytes do not fit"):
        load_or_compute_features(made(), PREPROCESS, files, FP32, workers=0)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ResourceError, match="cache=False"):
        load_or_compute_features(made(), PREPROCESS, files, FP32, workers=0)
