from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.contracts import randomise
from vitreous.errors import UsageError
from vitreous.inspection.fourier import FourierSpectra, compute_log_amplitudes, get_diagonal_frequencies
from vitreous.models.zoo import create_untrained_model


def compute_log_amplitudes_by_loop(maps: np.ndarray) -> np.ndarray:
    """(B, n, n, D): the specification step by step: transform, logarithm, roll, mean, diagonal from the centre."""
    batch, side, _, width = maps.shape
    logs = np.zeros((side, side))
    for b in range(batch):
        for c in range(width):
            logs += np.roll(np.log(np.abs(np.fft.fft2(maps[b, :, :, c])) + 1e-6), (side // 2, side // 2), (0, 1)) / (
                batch * width
            )
    return np.diag(logs)[side // 2 :]


@pytest.mark.parametrize("side", [4, 7, 14])
def test_log_amplitudes_match_the_specification(side):
    maps = np.random.default_rng(side).normal(size=(3, side, side, 5))
    amplitudes = compute_log_amplitudes(torch.from_numpy(maps)).mean(0).numpy()
    expected = compute_log_amplitudes_by_loop(maps)
    assert amplitudes.shape == expected.shape == (math.ceil(side / 2),) == get_diagonal_frequencies((side, side)).shape
    assert np.allclose(amplitudes, expected, atol=1e-5)


def test_diagonal_frequencies():
    assert get_diagonal_frequencies((14, 14))[-1] == pytest.approx(6 / 7)
    assert get_diagonal_frequencies((7, 7)).tolist() == pytest.approx([0, 2 / 7, 4 / 7, 6 / 7])
    for grid in ((2, 9), (1, 1)):
        with pytest.raises(UsageError, match="frequencies require a grid of at least 3 patches"):
            get_diagonal_frequencies(grid)


@pytest.mark.parametrize(("grid", "rows", "columns"), [((8, 8), 2, 2), ((5, 5), 1, 1), ((4, 12), 1, 3), ((9, 6), 3, 2)])
def test_diagonal_wave_appears_only_at_its_frequency(grid, rows, columns):
    i, j = np.mgrid[: grid[0], : grid[1]]
    wave = 3 * np.cos(2 * np.pi * (rows * i / grid[0] + columns * j / grid[1])) + 1
    amplitudes = compute_log_amplitudes(torch.from_numpy(wave)[None, ..., None])[0].exp()
    at = get_diagonal_frequencies(grid).tolist().index(pytest.approx(2 * rows / grid[0]))
    expected = np.zeros(len(amplitudes))
    expected[0], expected[at] = math.prod(grid), 1.5 * math.prod(grid)
    assert np.allclose(amplitudes, expected, atol=1e-3)


@pytest.mark.parametrize("image", [(16, 16), (12, 20)])
def test_spectra_by_depth_match_blocks_run_one_by_one(image):
    """The residual stream after each sublayer, computed block by block; batching makes no difference."""
    torch.manual_seed(0)
    model = randomise(create_untrained_model("ViT-16x2/4", image_size=image, num_classes=2, registers=1)).eval()
    images = torch.randn(5, 3, *image)
    spectra = FourierSpectra(model)
    for chunk in images.split(2):
        spectra.add(chunk)
    with torch.no_grad():
        x = torch.cat(
            [
                (model.prefix + torch.cat([model.slots, torch.zeros(1, 16)])).expand(5, -1, -1),
                model.add_positions(model.project(images)),
            ],
            1,
        )
        sums = [x]
        for block in model.encoder.blocks:
            sums.append(block.attention(sums[-1]))
            sums.append(block.mlp(sums[-1]))
    expected = np.stack(
        [compute_log_amplitudes(x[:, 2:].unflatten(1, (image[0] // 4, image[1] // 4))).mean(0) for x in sums]
    )
    assert spectra.images == 5
    assert [tuple(location) for location in spectra.locations] == [
        (-1, "embedding"), (0, "attention"), (0, "mlp"), (1, "attention"), (1, "mlp")
    ]  # fmt: skip
    assert np.allclose(spectra.log_amplitude, expected, atol=1e-4)
    assert np.allclose(spectra.relative, expected - expected[:, :1], atol=1e-4)


def test_smoothing_lowers_the_line():
    noise = torch.randn(4, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    smooth = noise + noise.roll(1, 1) + noise.roll(1, 2) + noise.roll((1, 1), (1, 2))
    relative = [(a - a[0]).tolist() for a in (compute_log_amplitudes(maps).mean(0) for maps in (noise, smooth))]
    assert relative[1][-1] < relative[0][-1] - 1
