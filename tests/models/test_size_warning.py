"""A model says when it is given images of another size than it was created for."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import vitreous


@pytest.fixture
def model():
    return vitreous.create("ViT-16x1/8", image_size=64, num_classes=2).eval()


def said(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("verb", ["__call__", "features"])
@pytest.mark.parametrize("size", [(224, 224), (32, 32), (64, 72)])
def test_another_size_is_said_once(model, verb, size):
    call = getattr(model, verb)
    text = said(lambda: [call(torch.zeros(1, 3, *size)) for _ in range(3)])
    assert len(text) == 1
    assert text[0].startswith(
        f"images of {size[0]} x {size[1]} pixels, but the model was created for 64 x 64: positions are resized"
    )
    assert f"image_size={max(size)}" in text[0] and "any_size" in text[0]


def test_the_warning_points_at_the_line_that_called(model):
    for call in (model, copy.deepcopy(model).features):
        with pytest.warns(UserWarning, match="images of 224 x 224") as caught:
            call(torch.zeros(1, 3, 224, 224))
        assert caught[0].filename == __file__


def test_nothing_is_said_where_the_size_is_right_or_meant(model):
    assert said(lambda: model(torch.zeros(1, 3, 64, 64))) == []
    assert said(lambda: model.train()(torch.zeros(1, 3, 32, 48))) == []  # progressive resizing
    assert len(said(lambda: copy.deepcopy(model).train()(torch.zeros(1, 3, 72, 64)))) == 1
    model.any_size = True
    assert said(lambda: model.eval()(torch.zeros(1, 3, 224, 224))) == []


def test_graphs_of_any_size_are_exported_without_a_guard_or_a_warning(model):
    shapes = {"images": {2: 8 * torch.export.Dim("rows", min=2, max=64), 3: 64}}
    program = []
    text = said(
        lambda: program.append(
            torch.export.export(model, (torch.zeros(1, 3, 32, 64),), dynamic_shapes=shapes, strict=False)
        )
    )
    assert not any("pixels" in line for line in text)
    images = torch.randn(1, 3, 96, 64)
    model.any_size = True
    assert torch.allclose(program[0].module()(images), model(images), atol=1e-5)
