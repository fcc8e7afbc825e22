"""Views for segmentation: an image and its class map move together, and randomness depends only on the key."""

import colorsys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.annotations.scenery import write_maps
from vitreous.data.annotations.target import IGNORE_INDEX, create_empty_target
from vitreous.data.augmentation.photometric import DISTORTION_DRAWS, distort_colours, measure_largest_class
from vitreous.data.augmentation.scenes import SceneViews
from vitreous.data.loader import TrainLoader
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sources import open_data
from vitreous.errors import UsageError

IDENTITY_VIEWS = SceneViews(scale=(1.0, 1.0), flip=0.0)


def make_ramp_view(scenes, image=(24, 32), key=5):
    """Return a view of a (24, 32) image whose values rise by 4 per row and 2 per column; each value is a class."""
    ramp = 4 * np.arange(24)[:, None] + 2 * np.arange(32)[None]
    image_ramp = Image.fromarray(np.stack([ramp.astype(np.uint8)] * 3, -1))
    return scenes.augment_scene(
        image_ramp, create_empty_target((24, 32), ramp.astype(np.int32)), ImagePreprocess(image), key
    ), ramp


def test_an_identity_view_is_the_image():
    view, classes = make_ramp_view(IDENTITY_VIEWS)
    assert np.array_equal(view["images"].numpy(), np.stack([classes] * 3))
    assert np.array_equal(view["classes"].numpy(), classes)


@pytest.mark.parametrize("change", [
    {"flip": 1.0}, {"flip_vertical": 1.0}, {"turn": True}, {"scale": (0.5, 3.0)}, {"fit": "whole", "scale": (0.5, 2.0)},
])  # fmt: skip
def test_images_and_class_maps_move_together(change):
    scenes = replace(IDENTITY_VIEWS, **change)
    num_moved = 0
    for key in range(12):
        view, classes = make_ramp_view(scenes, image=(32, 32), key=key)
        is_valid, pixels = view["classes"] != IGNORE_INDEX, view["images"][0].int()
        assert is_valid.float().mean() > 0.05
        # nearest-neighbour error of half a pixel along both axes, and interpolation beyond the edge of the image
        assert (pixels - view["classes"])[is_valid].abs().max() <= 6
        assert (pixels - view["classes"])[is_valid].float().mean().abs() <= 3
        assert (pixels[~is_valid] == 0).all()
        num_moved += not np.array_equal(view["classes"][:24].numpy(), classes)
    assert num_moved >= 4


def test_pixels_outside_the_image_are_ignored():
    view, classes = make_ramp_view(IDENTITY_VIEWS, image=(48, 48))
    # with an offset of half a pixel, edge pixels are interpolated with the padding
    is_valid = view["classes"] != IGNORE_INDEX
    assert (24 - 1) * (32 - 1) <= is_valid.sum() <= classes.size
    assert is_valid.any(0).sum() * is_valid.any(1).sum() == is_valid.sum()
    assert (view["images"][:, view["classes"] == IGNORE_INDEX] == 0).all()


def test_views_depend_only_on_their_key():
    scenes = SceneViews(jitter=(0.3, 0.3, 0.3), turn=True, flip_vertical=0.5)
    views = [make_ramp_view(scenes, key=key)[0] for key in (1, 1, 2)]
    assert all(torch.equal(views[0][name], views[1][name]) for name in views[0])
    assert not torch.equal(views[0]["images"], views[2]["images"])


def test_batches_are_identical_for_any_workers(tmp_path):
    data = open_data(write_maps(tmp_path))
    loaders = [
        TrainLoader(data.splits["train"], ImagePreprocess((16, 16)), SceneViews(), 3, workers=workers)
        for workers in (0, 2)
    ]
    first, second = (list(loader.iterate_spans([(0, 4), (4, 4), (4, 7)])) for loader in loaders)
    for first_batch, second_batch in zip(first, second, strict=True):
        assert first_batch.keys() == second_batch.keys() == {"images", "classes", "samples"}
        assert all(torch.equal(first_batch[name], second_batch[name]) for name in first_batch)
    assert first[1]["images"].shape == (0, 3, 16, 16) and first[1]["classes"].shape == (0, 16, 16)


@pytest.mark.parametrize(
    "change",
    [
        *({"scale": (0.0, 1.0)}, {"scale": (2.0, 1.0)}, {"flip": 1.5}, {"jitter": (-1, 0, 0)}),
        *({"hue": 0.6}, {"max_class_share": 0.0}, {"max_class_share": 1.5}),
    ],
)
def test_invalid_scene_views_are_rejected(change):
    with pytest.raises(UsageError):
        SceneViews(**change)


def distort_as_mmsegmentation(pixels, draws):
    """Apply mmsegmentation's `PhotoMetricDistortion` in a loop over pixels.

    Brightness +-32, contrast and saturation 0.5 to 1.5, hue +-18 of 180; each with probability 0.5.
    """

    def to_bytes(values):
        return [int(min(255, max(0, value))) for value in values]

    use_brightness, use_contrast, use_saturation, use_hue = draws[:4] < 0.5
    contrast_last = draws[8] >= 0.5
    for row in pixels.reshape(3, -1).T:
        rgb = [float(v) for v in row]
        if use_brightness:
            rgb = to_bytes([v + 64 * draws[4] - 32 for v in rgb])
        if use_contrast and not contrast_last:
            rgb = to_bytes([v * (0.5 + draws[5]) for v in rgb])
        hue, saturation, value = colorsys.rgb_to_hsv(*(v / 255 for v in rgb))
        if use_saturation:
            saturation = min(1.0, saturation * (0.5 + draws[6]))
        if use_hue:
            hue = (hue + (36 * draws[7] - 18) / 180) % 1
        rgb = [255 * v for v in colorsys.hsv_to_rgb(hue, saturation, value)]
        if use_contrast and contrast_last:
            rgb = to_bytes([v * (0.5 + draws[5]) for v in rgb])
        row[:] = rgb
    return pixels


def test_colours_are_distorted_as_in_mmsegmentation():
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (3, 6, 7), dtype=np.uint8)
    for _ in range(40):
        draws = generator.random(DISTORTION_DRAWS)
        ours = distort_colours(torch.from_numpy(pixels.copy()), (32 / 255, 0.5, 0.5), 0.1, 0.5, draws).numpy()
        theirs = distort_as_mmsegmentation(pixels.astype(np.float64), draws)
        # rounding of hue and saturation to bytes, which contrast may scale by 1.5
        assert np.abs(ours - theirs).max() < 8 and np.abs(ours - theirs).mean() < 2
    undistorted = distort_colours(
        torch.from_numpy(pixels), (0.1, 0.5, 0.5), 0.1, 0.0, generator.random(DISTORTION_DRAWS)
    )
    assert np.array_equal(undistorted.numpy(), pixels)
    assert distort_colours(torch.from_numpy(pixels[:1]), (0.1, 0.5, 0.5), 0.1, 1.0, draws).shape == (1, 6, 7)


def test_padding_keeps_its_colour_under_jitter():
    style = {"jitter": (0.1, 0.5, 0.5), "hue": 0.1, "jitter_style": "mmsegmentation", "jitter_probability": 1.0}
    view, _ = make_ramp_view(replace(IDENTITY_VIEWS, fill="mean", **style), image=(48, 48))
    assert (view["images"][:, view["classes"] == IGNORE_INDEX] == 128).float().mean() > 0.99
    assert not torch.equal(
        view["images"], make_ramp_view(replace(IDENTITY_VIEWS, fill="mean"), image=(48, 48))[0]["images"]
    )


def test_crops_dominated_by_one_class_are_redrawn():
    classes = np.zeros((64, 256), np.int32)
    classes[:, 224:] = 1  # one eighth: 1 of 9 positions of a 32-pixel crop contains enough of both classes
    image, target = Image.new("RGB", (256, 64)), create_empty_target((64, 256), classes)

    def measure_shares(scenes):
        views = (
            scenes.augment_scene(image, target, ImagePreprocess((32, 32)), key)["classes"].numpy() for key in range(300)
        )
        return np.array([measure_largest_class(view, IGNORE_INDEX) for view in views])

    assert (measure_shares(IDENTITY_VIEWS) >= 0.75).mean() == pytest.approx(1 - 16 / 224, abs=0.05)
    dominated_share = (measure_shares(replace(IDENTITY_VIEWS, max_class_share=0.75)) >= 0.75).mean()
    # mmsegmentation checks ten crops and keeps the eleventh
    assert dominated_share == pytest.approx((1 - 16 / 224) ** 11, abs=0.08)
    assert measure_largest_class(np.full((4, 4), IGNORE_INDEX), IGNORE_INDEX) == 1


def test_scales_follow_the_fit_and_spacing_options():
    generator = np.random.default_rng(0)
    for fit, unit in (("native", 1.0), ("whole", 0.25), ("short", 0.5)):
        for spacing, mean in (("linear", 1.25), ("log", 1.5 / np.log(4))):
            scenes = SceneViews(scale=(0.5, 2.0), fit=fit, scale_spacing=spacing)
            regions = [scenes.draw_crop_region((128, 256), (64, 64), draws) for draws in generator.random((2000, 3))]
            assert np.mean([64 / region.height for region in regions]) == pytest.approx(unit * mean, rel=0.03)
