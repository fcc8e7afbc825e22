"""Every fast path matches the reference path: relative error 1e-5 in float32, 1e-2 in bfloat16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import contracts
from tests.models.test_contracts import MODEL_OPTIONS, build_random_vit, draw_images
from tests.precision import ERROR_LIMITS, relative_error
from vitreous.config import to_builtins
from vitreous.inference.engine import choose_input_dtype
from vitreous.models import zoo
from vitreous.models.config import BiTConfig, StemConfig, ViTConfig
from vitreous.models.names import MODEL_NAMES, config_from_name
from vitreous.nn import kernels, resnet
from vitreous.nn.frozen import PackedLinear, can_pack, freeze_for_inference
from vitreous.system.native import NativeLibrary, load_native_library

pytestmark = pytest.mark.processor
SIZE_FIELDS = ("width", "heads", "hidden", "depth")
FAST_PATHS = [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)]


NO_NATIVE_LIBRARY = NativeLibrary(None, False, "left out")


def list_fast_paths():
    """The fast paths supported by this machine and PyTorch; packed bfloat16 products with native kernels, if there are
    any, and without."""
    for dtype, packed in FAST_PATHS:
        if not packed or can_pack(dtype):
            yield dtype, packed, NO_NATIVE_LIBRARY
    if can_pack(torch.bfloat16) and load_native_library().library is not None:
        yield torch.bfloat16, True, load_native_library()


@torch.inference_mode()
def assert_fast_paths_match(model, *batches):
    expected_outputs = [model.eval()(images) for images in batches]
    for dtype, packed, library in list_fast_paths():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "load_native_library", lambda library=library: library)
            fast = freeze_for_inference(model, dtype, packed)
            for images, expected in zip(batches, expected_outputs, strict=True):
                outputs = fast(images.to(choose_input_dtype(model.config, dtype)))
                assert outputs.dtype == torch.float32
                limit = ERROR_LIMITS["fp32" if dtype == torch.float32 else "bf16"]
                if isinstance(model.config, ViTConfig) and model.config.attention.inner_norm:
                    limit *= 1.5  # the norm of the heads' outputs gives the rounding of attention more weight
                assert relative_error(outputs, expected) < limit, (dtype, packed, library.note)


@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_fast_paths_match_for_every_model_option(name):
    model = build_random_vit(MODEL_OPTIONS[name])
    assert_fast_paths_match(model, draw_images(model), draw_images(model, (1, 3)))


def shrink_config(name):
    """A zoo model with its width, heads and patch, but one or two blocks, one unit per stage, and 2 x 2 patches."""
    config = config_from_name(name)
    image = (2 * config.patch[0], 2 * config.patch[1])
    if isinstance(config, BiTConfig):
        return config.with_options(image=image, classes=1000, blocks=(1, 1, 1, 1), factor=1)
    if not isinstance(config, ViTConfig):
        return config.with_options(image=image, classes=1000, blocks=tuple(min(2, count) for count in config.blocks))
    stem = (
        replace(config.stem, blocks=(1,) * len(config.stem.blocks))
        if isinstance(config.stem, StemConfig)
        else config.stem
    )
    depth = 2 if config.width < 1000 else 1
    blocks = tuple(block for block in config.attention.global_blocks if block < depth)
    return config.with_options(image=image, classes=1000, depth=depth, stem=stem, attention={"global_blocks": blocks})


def list_distinct_models():
    """Names of the zoo models that remain distinct after shrinking; models that differ only in the patch count once,
    and every patch size is included.

    Models with a new size, patch or type are quick; the others combine features of these.
    """
    features, names = set(), []
    # in tests/models: latent models (test_dit.py), clip models (test_video.py), text encoders (test_image_text.py)
    for name in (name for name in MODEL_NAMES if config_from_name(name).family not in ("dit", "video", "image-text")):
        config = shrink_config(name)
        plain = {**to_builtins(config), "patch": None, "image": None}
        size = str([plain.get(key) for key in SIZE_FIELDS])
        make = str({key: value for key, value in plain.items() if key not in SIZE_FIELDS})
        if not {str(plain), config.patch} <= features:
            # as the smaller models, with wider stages or blocks
            wider = ("Swin-L", "Swin-B", "SwinV2-B", "SwinV2-L", "DINOv3-7B", "PE-Core-G", "AIMv2-1B", "AIMv2-3B")
            large = name.startswith(wider)
            quick = {size, config.patch, make} - features and not large
            names.append(pytest.param(name, marks=() if quick else pytest.mark.slow))
        features |= {str(plain), config.patch, size, make}
    return names


@pytest.mark.parametrize("name", list_distinct_models())
def test_fast_paths_match_for_every_zoo_model(name):
    """On a square and on a non-square image."""
    torch.manual_seed(0)
    model = zoo.build_model(shrink_config(name))
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    height, width = model.config.patch
    assert_fast_paths_match(model, torch.randn(3, 3, 2 * height, 2 * width), torch.randn(3, 3, height, 3 * width))


def test_linear_layers_are_packed_where_supported():
    model = build_random_vit({"pool": "attention"})
    count = sum(
        isinstance(module, PackedLinear) for module in freeze_for_inference(model, torch.float32, True).modules()
    )
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    # attention pooling does not compute keys and values
    assert count == (linears - 1 if can_pack(torch.float32) else 0)


@pytest.mark.parametrize("removed", ["_reorder_linear_weight", "_linear_pointwise"])
def test_missing_packed_operators_fall_back_to_plain_linear(removed, monkeypatch):
    """The packed operators are private: a release may remove, rename or change them."""
    names = [name for name in ("_reorder_linear_weight", "_linear_pointwise") if name != removed]
    operators = type(
        "mkldnn", (), {name: getattr(torch.ops.mkldnn, name) for name in names if hasattr(torch.ops.mkldnn, name)}
    )
    monkeypatch.setattr(torch.ops, "mkldnn", operators)
    can_pack.cache_clear()
    try:
        assert not can_pack(torch.float32)
        assert_fast_paths_match(build_random_vit({}), draw_images(build_random_vit({})))
        assert not any(
            isinstance(module, PackedLinear)
            for module in freeze_for_inference(build_random_vit({}), torch.float32, True).modules()
        )
    finally:
        can_pack.cache_clear()


def test_incompatible_packed_operators_fall_back_to_plain_linear(monkeypatch):
    wrong = type(
        "mkldnn", (), {"_reorder_linear_weight": lambda w, n: w, "_linear_pointwise": lambda x, w, b, *rest: x @ w.T}
    )
    monkeypatch.setattr(torch.ops, "mkldnn", wrong)
    can_pack.cache_clear()
    try:
        assert not can_pack(torch.float32)
    finally:
        can_pack.cache_clear()


def test_freezing_leaves_the_original_model_unchanged():
    model = contracts.randomise(build_random_vit({"norm": {"layer_scale": 0.5}})).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    freeze_for_inference(model, torch.bfloat16)
    assert model.training and all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_unchanged_weights_share_memory_with_the_original():
    model = build_random_vit({})
    twin = freeze_for_inference(model)
    assert twin.projection.weight.data_ptr() == model.projection.weight.data_ptr()


def test_filters_are_standardised_once(monkeypatch):
    """Also for a copy of a copy, whose filters must not be standardised twice."""
    model = zoo.create_untrained_model("BiT-R50x1", image_size=32, blocks=(1, 1), num_classes=3).eval()
    images = torch.rand(2, 3, 32, 32)
    expected, twice = model(images), freeze_for_inference(freeze_for_inference(model))
    monkeypatch.setattr(resnet, "standardize_weight", None)
    assert torch.allclose(twice(images), expected, atol=1e-6)
