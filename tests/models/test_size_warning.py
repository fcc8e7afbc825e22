"""A model warns about images of another size than it was created for."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import vitreous


@pytest.fixture
def small_vit():
    return vitreous.create("ViT-16x1/8", image_size=64, num_classes=2).eval()


def collect_warnings(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("verb", ["__call__", "features"])
@pytest.mark.parametrize("size", [(224, 224), (32, 32), (64, 72)])
def test_other_image_size_warns_once(small_vit, verb, size):
    call = getattr(small_vit, verb)
    text = collect_warnings(lambda: [call(torch.zeros(1, 3, *size)) for _ in range(3)])
    assert len(text) == 1
    assert text[0].startswith(
        f"images of {size[0]} x {size[1]} pixels, but the model was created for 64 x 64: positions are resized"
    )
    assert f"image_size={max(size)}" in text[0] and "any_size" in text[0]


def test_warning_points_at_the_calling_line(small_vit):
    for call in (small_vit, copy.deepcopy(small_vit).features):
        with pytest.warns(UserWarning, match="images of 224 x 224") as caught:
            call(torch.zeros(1, 3, 224, 224))
        assert caught[0].filename == __file__


def test_expected_image_sizes_do_not_warn(small_vit):
    assert collect_warnings(lambda: small_vit(torch.zeros(1, 3, 64, 64))) == []
    assert collect_warnings(lambda: small_vit.train()(torch.zeros(1, 3, 32, 48))) == []  # progressive resizing
    assert len(collect_warnings(lambda: copy.deepcopy(small_vit).train()(torch.zeros(1, 3, 72, 64)))) == 1
    small_vit.any_size = True
    assert collect_warnings(lambda: small_vit.eval()(torch.zeros(1, 3, 224, 224))) == []


def test_dynamic_size_export_has_no_guard_or_warning(small_vit):
    shapes = {"images": {2: 8 * torch.export.Dim("rows", min=2, max=64), 3: 64}}
    program = []
    text = collect_warnings(
        lambda: program.append(
            torch.export.export(small_vit, (torch.zeros(1, 3, 32, 64),), dynamic_shapes=shapes, strict=False)
        )
    )
    assert not any("pixels" in line for line in text)
    images = torch.randn(1, 3, 96, 64)
    small_vit.any_size = True
    assert torch.allclose(program[0].module()(images), small_vit(images), atol=1e-5)
