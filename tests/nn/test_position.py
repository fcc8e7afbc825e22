import numpy as np
import torch

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
