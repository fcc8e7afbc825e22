"""Predictions of every task on a GPU match those on the CPU."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from tests.contracts import randomise
from tests.gpu.support import DEVICE, ON_GPU, check_close
from tests.inference import detectors, generators
from tests.inference.small_models import make_photo, make_tiny_bundle
from tests.models.test_segmenter import build_segmenter
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.modalities.native import NativePreprocess
from vitreous.generation.process import Flow
from vitreous.inference.engine import TorchEngine
from vitreous.models.config import MlpConfig, SwinAttentionConfig, SwinConfig, ViTConfig
from vitreous.models.zoo import build_model
from vitreous.tasks.classification import Classification
from vitreous.tasks.features import FeatureExtraction
from vitreous.tasks.segmentation import Segmentation
from vitreous.weights.bundle import Bundle

pytestmark = pytest.mark.gpu
CLASSES = ("ant", "bee", "cat")
#: maximum difference of a probability, and maximum relative error of features, compared with float32 on the CPU
PROBABILITY_LIMIT = {"fp32": 1e-5, "bf16": 0.05}
FEATURE_LIMIT = {"fp32": 1e-4, "bf16": 5e-2}
PRECISIONS = ("fp32", "bf16")


@cache
def draw_photos(count: int = 11) -> list[Image.Image]:
    """Synthetic photographs of different sizes, at most one chunk."""
    return [make_photo(64 + 9 * index, 80 - 5 * index, index) for index in range(count)]


def make_vit(classes: int, **changes: Any) -> Any:
    """A small ViT with random weights."""
    torch.manual_seed(0)
    config = ViTConfig(
        image=(32, 32), patch=(8, 8), width=32, depth=2, heads=4, classes=classes, mlp=MlpConfig(hidden=64)
    )
    return randomise(build_model(config.with_options(**changes))).eval()


def save_model(folder: Path, name: str) -> Path:
    """Save a bundle of a task in `folder`."""
    preprocess = ImagePreprocess((32, 32))
    if name == "classification":
        make_tiny_bundle().save(folder)
    elif name == "swin":
        torch.manual_seed(0)
        config = SwinConfig(
            image=(32, 32),
            patch_size=(2, 2),
            classes=3,
            width=8,
            blocks=(1, 1),
            heads=(2, 2),
            attention=SwinAttentionConfig(window=4),
        )
        Bundle(build_model(config).eval(), Classification(CLASSES), preprocess).save(folder)
    elif name == "multilabel":
        task = Classification(CLASSES, multilabel=True, loss="sigmoid")
        Bundle(make_vit(3), task, preprocess).save(folder)
    elif name == "rotary":
        Bundle(make_vit(3, attention={"kind": "rotary"}), Classification(CLASSES), preprocess).save(folder)
    elif name == "features":
        Bundle(make_vit(0), FeatureExtraction(), preprocess).save(folder)
    return folder


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["classification", "multilabel", "rotary", "swin"])
def test_probabilities_match_cpu(name, precision, tmp_path):
    folder = save_model(tmp_path / name, name)
    expected = vitreous.load(folder, device="cpu", precision="fp32").predict(draw_photos(), top=3, threshold=0.0)
    predictions = vitreous.load(folder, device=DEVICE, precision=precision).predict(draw_photos(), top=3, threshold=0.0)
    for index, (ours, theirs) in enumerate(zip(predictions, expected, strict=True)):
        reference = dict(zip(theirs.names, theirs.probabilities, strict=True))
        for label, probability in zip(ours.names, ours.probabilities, strict=True):
            if label in reference:  # one of the three most probable of four classes
                difference = abs(probability - reference[label])
                assert difference < PROBABILITY_LIMIT[precision], (
                    f"image {index}, {label}, {precision}: {probability} on {DEVICE}, {reference[label]} on the CPU"
                )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["classification", "features", "swin"])
def test_features_match_cpu(name, precision, tmp_path):
    folder = save_model(tmp_path / name, name)
    expected = vitreous.load(folder, device="cpu", precision="fp32", headless=True).embed(draw_photos())
    features = vitreous.load(folder, device=DEVICE, precision=precision, headless=True).embed(draw_photos())
    check_close(f"features of {name}, {precision}", features, expected, FEATURE_LIMIT[precision])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("backbone", "head"), [("vit", "unet"), ("swin", "upernet"), ("adapter", "multiscale")])
def test_class_maps_match_cpu(backbone, head, precision, tmp_path):
    model = build_segmenter(backbone, head).eval()
    size = model.config.backbone.image
    Bundle(model, Segmentation(CLASSES), ImagePreprocess(size)).save(tmp_path / "model")
    expected = vitreous.load(tmp_path / "model", device="cpu", precision="fp32").segment(draw_photos(4))
    class_maps = vitreous.load(tmp_path / "model", device=DEVICE, precision=precision).segment(draw_photos(4))
    for index, (ours, theirs) in enumerate(zip(class_maps, expected, strict=True)):
        same = float(np.mean(ours.classes == theirs.classes))
        # an untrained model has many undecided pixels
        assert same > {"fp32": 0.999, "bf16": 0.8}[precision], f"image {index}, {precision}: {same:.4f} of the pixels"


@pytest.mark.parametrize(
    "name", ["vit", "swin"]
)  # random heads of a BiT score all boxes equally, so that rounding decides
def test_detections_match_cpu(name, tmp_path):
    folder = detectors.save_detector(tmp_path / name, name)
    expected = vitreous.load(folder, device="cpu", precision="fp32").detect(draw_photos(5), threshold=0.05)
    detections = vitreous.load(folder, device=DEVICE, precision="fp32").detect(draw_photos(5), threshold=0.05)
    assert sum(map(len, expected))
    for index, (ours, theirs) in enumerate(zip(detections, expected, strict=True)):
        assert ours.names == theirs.names, f"image {index}: {ours.scores.tolist()}, {theirs.scores.tolist()}"
        check_close(f"scores of image {index}", ours.scores, theirs.scores, 1e-4)
        # equal scores up to rounding may be in another order
        matches = [int(np.abs(theirs.boxes - box).sum(1).argmin()) for box in ours.boxes]
        assert sorted(matches) == list(range(len(matches))), f"image {index}: {ours.boxes}, expected {theirs.boxes}"
        check_close(f"boxes of image {index}", ours.boxes, theirs.boxes[matches], 1e-3)
        if theirs.masks is not None:
            same = float(np.mean(ours.masks == theirs.masks[matches])) if theirs.masks.size else 1.0
            assert same > 0.995, f"masks of image {index}: {same:.4f} of the pixels are the same"
    rounded = vitreous.load(folder, device=DEVICE, precision="bf16").detect(draw_photos(5), threshold=0.05)
    assert all(np.isfinite(objects.scores).all() and np.isfinite(objects.boxes).all() for objects in rounded)


@pytest.mark.parametrize("name", ["diffusion", "flow"])
def test_generated_images_match_cpu(name, tmp_path):
    """Noise depends on seed and image index, so the device's images equal the CPU's up to rounding."""
    process = {"process": Flow()} if name == "flow" else {}
    folder = generators.save_generator(tmp_path / "model", **process)
    images = {}
    for device in ("cpu", DEVICE):
        options = {
            "progress": False,
            "count": 2,
            "steps": 4,
            "precision": "fp32",
            "device": device,
            "classes": ("cat",),
        }
        files = vitreous.sample(folder, tmp_path / device.replace(":", "-"), **options)["files"]
        images[device] = [np.asarray(Image.open(file)).astype(int) for file in sorted(files)]
    assert len(images["cpu"]) == 2
    for index, (ours, theirs) in enumerate(zip(images[DEVICE], images["cpu"], strict=True)):
        largest = int(np.abs(ours - theirs).max())
        assert largest <= 2, f"image {index} of {name}: pixels differ by up to {largest} of 255"
    rounded = tmp_path / "rounded"
    vitreous.sample(folder, rounded, progress=False, count=1, steps=2, precision="bf16", device=DEVICE)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_engine_with_batches_of_any_size_matches_cpu(precision):
    """Batches of 1, odd sizes and more than a chunk, in several memory layouts."""
    model = make_vit(5)
    pixels = torch.randint(0, 256, (67, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = TorchEngine(model, ImagePreprocess((32, 32)), "cpu", "fp32")(pixels)
    engine = TorchEngine(model, ImagePreprocess((32, 32)), DEVICE, precision)
    limit = {"fp32": 1e-5, "bf16": 3e-2}[precision]
    for count in (1, 2, 3, 13, 31, 32, 33, 67):
        check_close(f"{count} images, {precision}", engine(pixels[:count]), expected[:count], limit)
    last = pixels.to(memory_format=torch.channels_last)
    strided = torch.stack([pixels, 255 - pixels], -1)[..., 0]
    for layout, images in {"channels last": last, "strided": strided, "every other": pixels[::2]}.items():
        assert not images.is_contiguous()
        theirs = expected[::2] if layout == "every other" else expected
        check_close(f"{layout}, {precision}", engine(images), theirs, limit)
    assert engine(pixels[:1]).device.type == "cpu" and engine(pixels[:1]).dtype == torch.float32


@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_in_chunks_are_bit_identical_for_any_neighbours(precision):
    """`logits` promises bit-identical results regardless of batch composition."""
    engine = TorchEngine(make_vit(5), ImagePreprocess((32, 32)), DEVICE, precision)
    pixels = torch.randint(
        0, 256, (70, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    ).numpy()
    size, expected = engine.chunk_size, engine.logits(pixels)
    for count in (1, 7, 33):
        outputs = engine.logits(pixels[:count])
        different = int((outputs != expected[:count]).any(1).sum())
        assert not different, f"{different} of {count} images differ, {precision}, chunks of {size}"
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1)).numpy()
    different = int((engine.logits(pixels[order]) != expected[order]).any(1).sum())
    assert not different, f"{different} of 70 images differ in another order, {precision}"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_images_at_native_aspect_match_cpu(precision):
    """Packed images of several sizes, alone and together; `logits` is bit-identical."""
    model = make_vit(5)
    model.any_size = True
    preprocess = NativePreprocess((32, 32), patch=(8, 8), tokens=16)
    generator = torch.Generator().manual_seed(0)
    sizes = ((32, 32), (16, 64), (24, 40), (8, 8), (32, 32))
    pixels = [torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator) for size in sizes]
    expected = TorchEngine(model, preprocess, "cpu", "fp32")(pixels)
    engine = TorchEngine(model, preprocess, DEVICE, precision)
    limit = {"fp32": 1e-5, "bf16": 3e-2}[precision]
    check_close(f"all images, {precision}", engine(pixels), expected, limit)
    for index, image in enumerate(pixels):
        check_close(f"image {index} alone, {precision}", engine([image]), expected[index : index + 1], limit)
    arrays = [image.numpy() for image in pixels]
    assert np.array_equal(engine.logits(arrays)[1:2], engine.logits(arrays[1:2]))


def test_merged_tokens_match_cpu():
    """Token merging selects the same pairs on the device."""
    model = make_vit(5, class_token=True)
    pixels = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = TorchEngine(model, ImagePreprocess((32, 32)), "cpu", "fp32", merge_tokens=2)(pixels)
    logits = TorchEngine(model, ImagePreprocess((32, 32)), DEVICE, "fp32", merge_tokens=2)(pixels)
    check_close("logits with merged tokens", logits, expected, 1e-4)


def test_clips_and_volumes_match_cpu():
    """Inference engines with models of three axes."""
    for channels, image, patch in ((3, (4, 16, 16), (2, 8, 8)), (1, (16, 16, 16), (8, 8, 8))):
        model = make_vit(5, image=image, patch=patch, channels=channels)
        preprocess = ImagePreprocess(image, channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels)
        shape = (3, channels, *image)
        pixels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(preprocess.dtype)
        expected = TorchEngine(model, preprocess, "cpu", "fp32")(pixels)
        check_close(f"clips of {shape}", TorchEngine(model, preprocess, DEVICE, "fp32")(pixels), expected, 1e-5)


def test_torchao_int8_outputs_are_within_tolerance():
    """Outputs of a model with int8 weights quantised by torchao are close to the original, with all queries and with
    few."""
    if find_spec("torchao") is None:
        pytest.skip("torchao is not on the machine with a GPU")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = make_vit(5).to(DEVICE)
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        small = make_vit(5).to(DEVICE, dtype)
        quantize_(
            small, Int8WeightOnlyConfig(), lambda module, name: isinstance(module, torch.nn.Linear) and name != "head"
        )
        quantised = [type(p).__name__ for p in small.parameters() if type(p) not in (torch.nn.Parameter, torch.Tensor)]
        with torch.no_grad():
            logits, expected = small(images.to(dtype)), model(images)
            check_close(
                f"features of an int8 model, {dtype}", small.features(images.to(dtype)), model.features(images), 0.1
            )
        check_close(f"logits of an int8 model, {dtype}, quantised {sorted(set(quantised))}", logits, expected, 0.1)
    assert not ON_GPU or logits.is_cuda
