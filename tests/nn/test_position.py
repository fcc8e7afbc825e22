import numpy as np
import pytest
import torch

from vitreous.models.config import transformer_config
from vitreous.models.zoo import build_model
from vitreous.nn.position import LearnedPosition, sincos_position_table


def test_learned_positions_are_resized_to_any_grid():
    position = LearnedPosition((3, 4), 8)
    assert position.read((3, 4)) is position.table
    assert position.read((5, 2)).shape == (5, 2, 8)


def test_sincos_matches_the_published_two_dimensional_form():
    """MAE's layout: columns first, each half [sin | cos] of 10000^(-i / (D / 4))."""
    table = sincos_position_table((2, 3), 8).numpy()
    for row in range(2):
        for column in range(3):
            frequencies = np.array([1.0, 0.01])
            expected = [
                *np.sin(column * frequencies),
                *np.cos(column * frequencies),
                *np.sin(row * frequencies),
                *np.cos(row * frequencies),
            ]
            np.testing.assert_allclose(table[row, column], expected, atol=1e-6)


def test_sincos_supports_any_number_of_axes_and_indivisible_widths():
    assert sincos_position_table((2, 3, 4), 16).shape == (2, 3, 4, 16)
    assert torch.equal(sincos_position_table((2, 3, 4), 16)[..., 12:], torch.zeros(2, 3, 4, 4))


@pytest.mark.parametrize("kind", ["sincos", "sinusoid"])
def test_a_model_with_fixed_positions_computes_in_the_precision_of_its_weights(kind):
    """A frozen teacher is cast to bfloat16; its positions must not promote the tokens to float32."""
    shape = {"image": (16, 16), "patch": (8, 8)}
    shape |= {"image": (4, 16, 16), "patch": (2, 8, 8), "family": "video"} if kind == "sinusoid" else {}
    config = transformer_config(
        **{"width": 32, "depth": 2, "heads": 2, "classes": 3, "pool": "mean", "class_token": False},
        **shape,
        positions={"kind": kind},
    )
    model = build_model(config).eval()
    images = torch.randn(2, 3, *config.image, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(images)
        outputs = model.to(torch.bfloat16)(images.bfloat16())
        assert outputs.dtype == torch.bfloat16 and torch.allclose(outputs.float(), expected, atol=0.02)
        table = model.float().position.read(config.grid)
    assert table.dtype == torch.float32
    assert torch.equal(table, build_model(config).position.read(config.grid))  # not rounded by the cast
