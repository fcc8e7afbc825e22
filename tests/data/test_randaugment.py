"""TrivialAugment: one operation of the paper's wide space, drawn from the key alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torchvision.transforms import v2

from vitreous.config import from_yaml, to_yaml
from vitreous.data.augmentation.augment import Augment
from vitreous.data.keys import derive_keys, fork_torch_rng
from vitreous.data.modalities.base import image_to_tensor
from vitreous.data.modalities.images import ImagePreprocess

IMAGE_SIZE = (47, 61)
TRIVIAL_AUGMENT = Augment(trivial=True)
MAGNITUDE_LEVELS = np.arange(31) / 30
#: the operations of arXiv:2103.10158, Table 7 (wide), that move no pixel, at all levels
COLOUR_OPERATIONS: dict[str, Callable[[Image.Image], list[Image.Image]]] = {
    "identity": lambda image: [image],
    "autocontrast": lambda image: [ImageOps.autocontrast(image)],
    "equalize": lambda image: [ImageOps.equalize(image)],
    "posterize": lambda image: [ImageOps.posterize(image, bits) for bits in range(2, 9)],
    "solarize": lambda image: [ImageOps.solarize(image, threshold) for threshold in range(257)],
    **{
        name: lambda image, kind=kind: [
            kind(image).enhance(1 + side * 0.99 * level) for level in MAGNITUDE_LEVELS for side in (1, -1)
        ]
        for name, kind in (
            ("color", ImageEnhance.Color),
            ("contrast", ImageEnhance.Contrast),
            ("brightness", ImageEnhance.Brightness),
            ("sharpness", ImageEnhance.Sharpness),
        )
    },
}


def make_noise_image(channels: int = 3) -> Image.Image:
    """Return an image (61, 47) of coarse noise, without extreme values."""
    coarse = torch.rand(1, channels, 6, 6, generator=torch.Generator().manual_seed(1)) * 190 + 30
    fine = torch.nn.functional.interpolate(coarse, IMAGE_SIZE, mode="bilinear")[0].to(torch.uint8).numpy()
    return Image.fromarray(fine[0] if channels == 1 else np.ascontiguousarray(fine.transpose(1, 2, 0)))


@pytest.mark.parametrize("channels", [3, 1])
def test_trivial_augment_is_determined_by_the_key(channels):
    image, preprocess = make_noise_image(channels), ImagePreprocess(IMAGE_SIZE, channels)
    views = torch.stack([TRIVIAL_AUGMENT.augment_image(image, preprocess, k) for k in range(20)])
    assert views.shape == (20, channels, *IMAGE_SIZE) and views.dtype == torch.uint8
    assert torch.equal(views, torch.stack([TRIVIAL_AUGMENT.augment_image(image, preprocess, k) for k in range(20)]))
    assert len({view.numpy().tobytes() for view in views}) > 12

    pixels, keys = image_to_tensor(image)[None].repeat(20, 1, 1, 1), derive_keys(0, np.arange(20))
    batch = TRIVIAL_AUGMENT.augment_batch(pixels, keys)
    assert torch.equal(TRIVIAL_AUGMENT.augment_batch(pixels[7:], keys[7:]), batch[7:])
    assert len({view.numpy().tobytes() for view in batch}) > 12
    assert from_yaml(Augment, to_yaml(TRIVIAL_AUGMENT)) == TRIVIAL_AUGMENT


def test_trivial_augment_matches_torchvision_with_grey_fill():
    image, transform = make_noise_image(), v2.TrivialAugmentWide(fill=128)
    for k in range(40):
        with fork_torch_rng(k):
            expected = image_to_tensor(transform(image))
        assert torch.equal(TRIVIAL_AUGMENT.augment_image(image, ImagePreprocess(IMAGE_SIZE), k), expected)


def test_trivial_augment_covers_the_wide_space():
    image, counts = make_noise_image(), dict.fromkeys([*COLOUR_OPERATIONS, "moved"], 0)
    colour_results: dict[bytes, str] = {}
    for name, results in COLOUR_OPERATIONS.items():
        for result in results(image):
            colour_results.setdefault(result.tobytes(), name)
    levels = set()
    for k in range(1400):
        augmented = (
            TRIVIAL_AUGMENT.augment_image(image, ImagePreprocess(IMAGE_SIZE), k).permute(1, 2, 0).numpy().tobytes()
        )
        name = colour_results.get(augmented, "moved")
        counts[name] += 1
        levels.add((name, augmented))
    # five of the fourteen operations: two shears, two translations, a rotation
    assert abs(counts["moved"] - 500) < 70, counts
    assert all(
        abs(counts[name] - 100) < 45 for name in ("autocontrast", "equalize", "color", "contrast", "sharpness")
    ), counts
    assert sum(name == "contrast" for name, _ in levels) > 30  # in both directions from the original


def test_trivial_augment_rotates_to_135_degrees_and_shifts_32_pixels():
    """A white dot in the centre locates the image: rotation keeps it, translation moves it along an axis."""
    dark = np.full((*IMAGE_SIZE, 3), 100, np.uint8)
    dark[23, 30] = 255
    reach, corners = set(), set()
    for k in range(1400):
        augmented = TRIVIAL_AUGMENT.augment_image(Image.fromarray(dark), ImagePreprocess(IMAGE_SIZE), k)
        rows, columns = np.nonzero(augmented[0].numpy() > 200)
        if len(rows) == 1 and (rows[0] == 23) != (columns[0] == 30):
            reach |= {abs(int(rows[0]) - 23), abs(int(columns[0]) - 30)}
        corners |= {
            tuple(augmented[0, row, column].item() == 128 for row, column in itertools.product((0, -1), (0, -1)))
        }
    assert max(reach) > 18 and max(reach) <= 32
    assert (True,) * 4 in corners
