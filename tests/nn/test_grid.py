import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitreous.nn.grid import (
    RESIZE_MODES,
    axis_resize_matrix,
    gather_tokens,
    patchify,
    resize_position_table,
    unpatchify,
)
from vitreous.nn.sizes import patch_grid


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3), st.integers(1, 4))
def test_unpatchify_undoes_patchify(axes, channels):
    grid, patch = zip(*axes, strict=True)
    images = torch.randn(2, channels, *(g * p for g, p in axes))
    patches = patchify(images, patch)
    assert patches.shape[:-1] == (2, *grid)
    assert torch.equal(unpatchify(patches, patch), images)


def test_patchify_matches_the_documented_loop():
    images = torch.randn(2, 3, 6, 8)
    patches = patchify(images, (3, 2))
    for i in range(2):
        for j in range(4):
            assert torch.equal(patches[:, i, j], images[:, :, 3 * i : 3 * i + 3, 2 * j : 2 * j + 2].flatten(1))


def test_patchify_and_linear_is_the_convolution():
    images, kernel = torch.randn(2, 3, 8, 12), torch.randn(5, 3, 4, 2)
    convolved = torch.nn.functional.conv2d(images, kernel, stride=(4, 2))
    assert torch.allclose(patchify(images, (4, 2)) @ kernel.flatten(1).T, convolved.movedim(1, -1), atol=1e-4)


def test_indivisible_sizes_are_rejected():
    with pytest.raises(ValueError, match="image size 222 is not divisible by patch size 16"):
        patch_grid((222, 222), (16, 16))


@pytest.mark.parametrize("old,new", [((14, 14), (24, 24)), ((7, 5), (3, 9)), ((16, 16), (9, 20))])
def test_bicubic_is_torch_interpolation_in_two_dimensions(old, new):
    table = torch.randn(*old, 8)
    reference = torch.nn.functional.interpolate(table.movedim(-1, 0)[None], size=new, mode="bicubic", antialias=True)
    assert torch.allclose(resize_position_table(table, new), reference[0].movedim(0, -1), atol=1e-5)


@pytest.mark.parametrize(
    "side,new,first,last",
    [
        (2, 3, [0, 0.5, 1], [2, 2.5, 3]),
        (3, 5, [0, 0.5, 1, 1.5, 2], [6, 6.5, 7, 7.5, 8]),
        (2, 4, [0, 1 / 3, 2 / 3, 1], [2, 7 / 3, 8 / 3, 3]),
    ],
)
def test_zoom_resize_matches_the_google_loader(side, new, first, last):
    table = torch.arange(side * side, dtype=torch.float32).view(side, side, 1)
    zoomed = resize_position_table(table, (new, new), "zoom")[..., 0]
    np.testing.assert_allclose(zoomed[0], first, atol=1e-6)
    np.testing.assert_allclose(zoomed[-1], last, atol=1e-6)


def test_resize_keeps_equal_grids_and_constant_tables():
    table = torch.randn(3, 4, 5)
    assert resize_position_table(table, (3, 4)) is table
    for how in RESIZE_MODES:
        assert torch.allclose(resize_position_table(torch.ones(3, 4, 2), (7, 2), how), torch.ones(7, 2, 2), atol=1e-6)
        assert torch.allclose(axis_resize_matrix(5, 9, how).sum(1), torch.ones(9, dtype=torch.float64))


def resize_positions_as_dino(positions, height, width, patch):
    """`interpolate_pos_encoding` of dino/vision_transformer.py and dinov2/models/vision_transformer.py, (N, D) -> (h *
    w, D).

    Stored positions are returned unchanged only if the image is square and has as many patches; otherwise both axes are
    interpolated with scale (patches + 0.1) / stored.
    """
    side = round(len(positions) ** 0.5)
    rows, columns = height // patch, width // patch
    if rows * columns == len(positions) and width == height:
        return positions
    source = positions.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    scale = ((rows + 0.1) / side, (columns + 0.1) / side)
    resized = torch.nn.functional.interpolate(source, scale_factor=scale, mode="bicubic")
    assert resized.shape[2:] == (rows, columns)
    return resized.permute(0, 2, 3, 1).reshape(rows * columns, -1)


#: native size, then image height and width, in pixels; patches of 14
DINO_SIZES = [
    (98, 98, 98),
    (98, 98, 70),
    (98, 70, 98),
    (98, 140, 98),
    (98, 140, 126),
    (518, 518, 392),
    (518, 518, 518),
    (518, 224, 224),
]


@pytest.mark.parametrize("native,height,width", DINO_SIZES)
def test_bicubic_offset_matches_dino_when_an_axis_keeps_its_length(native, height, width):
    side = native // 14
    source = torch.randn(side, side, 6, generator=torch.Generator().manual_seed(0))
    expected = resize_positions_as_dino(source.flatten(0, 1), height, width, 14).unflatten(
        0, (height // 14, width // 14)
    )
    assert (resize_position_table(source, (height // 14, width // 14), "bicubic-offset") - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("how", [how for how in RESIZE_MODES if how != "bicubic-offset"])
def test_other_resize_modes_keep_an_axis_of_equal_length(how):
    source = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([resize_position_table(source[:, column], (9,), how) for column in range(7)], 1)
    # products of other shapes may round differently
    assert torch.allclose(resize_position_table(source, (9, 7), how), expected, rtol=0, atol=1e-6)


def test_take_selects_tokens():
    tokens = torch.randn(2, 5, 3)
    indices = torch.tensor([[4, 0], [1, 1]])
    assert torch.equal(gather_tokens(tokens, indices), torch.stack([tokens[0, [4, 0]], tokens[1, [1, 1]]]))
