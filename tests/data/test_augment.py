"""Each augmentation matches its reference, for files and images in memory, and depends only on the key."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from timm.data import auto_augment as peer
from torchvision.transforms import v2

from tests.conftest import make_image
from vitreous.config import from_yaml, to_yaml
from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.crops import InceptionCrop, resize_with_pillow
from vitreous.data.augmentation.randaugment import BIG_VISION_OPERATIONS, TIMM_OPERATIONS, RandAugment
from vitreous.data.keys import derive_keys, fork_torch_rng
from vitreous.data.modalities.base import IMAGENET_MOMENTS, image_to_tensor
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError

IMAGE_SIZE = (20, 24)
AUGMENT_OPTIONS = {
    "inception": {"crop": (0.05, 1.0), "crop_style": "inception", "crop_filter": "aliased"},
    "inception bicubic": {"crop": (0.3, 1.0), "crop_style": "inception", "crop_filter": "bicubic"},
    "bilinear": {"crop": (0.3, 1.0), "crop_filter": "bilinear"},
    "simple": {"crop_style": "simple"},
    "big_vision": {"rand_style": "big_vision", "rand_layers": 2, "rand_magnitude": 15},
    "timm": {"rand_style": "timm", "rand_layers": 4, "rand_spread": 0.5},
    "three": {"three": True},
    "jitter": {"jitter": (0.3, 0.3, 0.3)},
    "erase": {"erase": 1.0, "erase_noise": True},
}
DEIT3_OPTIONS = {"three": True, "jitter": (0.3, 0.3, 0.3), "flip": 0.5}
AUGMENT_OPTIONS["all"] = {
    **AUGMENT_OPTIONS["inception"],
    **AUGMENT_OPTIONS["timm"],
    **DEIT3_OPTIONS,
    **AUGMENT_OPTIONS["erase"],
}


def make_smooth_image(size: tuple[int, int], channels: int = 3, seed: int = 0) -> Image.Image:
    """Return an image of size (width, height) with slopes and blobs, which every operation changes."""
    coarse = torch.rand(1, channels, 5, 5, generator=torch.Generator().manual_seed(seed)) * 200 + 30
    fine = F.interpolate(coarse, size[::-1], mode="bicubic").clamp(0, 255)[0].to(torch.uint8)
    return Image.fromarray(fine[0].numpy() if channels == 1 else fine.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", AUGMENT_OPTIONS)
def test_augmentation_is_determined_by_the_key(name, channels):
    augment, preprocess = Augment(**AUGMENT_OPTIONS[name]), ImagePreprocess(IMAGE_SIZE, channels)
    file, small = make_smooth_image((50, 40), channels), make_smooth_image(IMAGE_SIZE[::-1], channels)
    views = torch.stack([augment.augment_image(file, preprocess, k) for k in range(12)])
    assert views.shape == (12, channels, *IMAGE_SIZE) and views.dtype == torch.uint8
    assert torch.equal(views, torch.stack([augment.augment_image(file, preprocess, k) for k in range(12)]))
    different = 3 if name == "three" else 9
    assert len({view.numpy().tobytes() for view in views}) >= different

    pixels, keys = image_to_tensor(small)[None].repeat(12, 1, 1, 1), derive_keys(0, np.arange(12))
    batch = augment.augment_batch(pixels, keys)
    assert (
        batch.shape == pixels.shape
        and batch.dtype in (torch.uint8, torch.float32)
        and batch.min() >= 0
        and batch.max() <= 255
    )
    assert torch.allclose(augment.augment_batch(pixels[5:], keys[5:]), batch[5:], atol=1e-3)
    assert len({image.numpy().tobytes() for image in batch}) >= different


@pytest.mark.parametrize("name", AUGMENT_OPTIONS)
def test_augment_options_survive_a_config_round_trip(name):
    augment = Augment(**AUGMENT_OPTIONS[name])
    assert from_yaml(Augment, to_yaml(augment)) == augment


def make_timm_operation(name: str, magnitude: float, side: int, monkeypatch, **options) -> Image.Image:
    """Return the image after timm's operation at a magnitude, always applied, in the direction of `side`."""
    monkeypatch.setattr(peer.random, "random", lambda: 0.0 if side > 0 else 1.0)
    operation = peer.AugmentOp(name, prob=1.0, magnitude=magnitude, hparams={"img_mean": (128, 128, 128), **options})
    return operation(make_smooth_image((61, 47)))


@pytest.mark.parametrize("filter", [Image.Resampling.BICUBIC, Image.Resampling.BILINEAR])
@pytest.mark.parametrize("name", peer._RAND_INCREASING_TRANSFORMS)
def test_timm_style_matches_timm(name, filter, monkeypatch):
    ours = TIMM_OPERATIONS[name.removesuffix("Increasing").removesuffix("Rel")]
    for magnitude, side in itertools.product((0, 0.3, 3, 8.6, 10), (1, -1)):
        augmented = ours(make_smooth_image((61, 47)), side * magnitude / 10, filter)
        # Pillow 13 raises for 0 bits, where earlier versions return black
        if name == "PosterizeIncreasing" and magnitude == 10:
            assert augmented.getextrema() == ((0, 0),) * 3
        else:
            assert augmented == make_timm_operation(name, magnitude, side, monkeypatch, interpolation=filter)
    assert len(TIMM_OPERATIONS) == len(peer._RAND_INCREASING_TRANSFORMS)


@pytest.mark.parametrize("name", sorted(set(BIG_VISION_OPERATIONS) - {"Cutout"}))
def test_big_vision_style_is_timms_older_operations(name, monkeypatch):
    """timm keeps the levels of TensorFlow's RandAugment, up to 10, with translation in pixels."""
    for magnitude, side in itertools.product((3, 6, 10), (1, -1)):
        across = 61 if name == "TranslateX" else 47
        expected = make_timm_operation(
            name,
            magnitude,
            side,
            monkeypatch,
            interpolation=Image.Resampling.NEAREST,
            translate_const=100 * across / 224,
        )
        assert (
            BIG_VISION_OPERATIONS[name](make_smooth_image((61, 47)), side * magnitude / 10, Image.Resampling.NEAREST)
            == expected
        )
    assert len(BIG_VISION_OPERATIONS) == 16


def test_big_vision_levels_extrapolate_above_ten():
    image = make_smooth_image((61, 47))
    nearest = Image.Resampling.NEAREST
    assert BIG_VISION_OPERATIONS["Contrast"](image, 2.0, nearest) == ImageEnhance.Contrast(image).enhance(3.7)
    assert BIG_VISION_OPERATIONS["Posterize"](image, 2.0, nearest) == image
    assert BIG_VISION_OPERATIONS["Posterize"](image, 0.0, nearest) == ImageOps.posterize(image, 1)
    assert BIG_VISION_OPERATIONS["Rotate"](image, 1.5, nearest) == image.rotate(45, nearest, fillcolor=(128, 128, 128))


def test_cutout_is_a_grey_square_anywhere():
    black = Image.new("RGB", (224, 224))
    centres = set()
    for seed in range(40):
        torch.manual_seed(seed)
        cutout = np.asarray(BIG_VISION_OPERATIONS["Cutout"](black, 1.0, Image.Resampling.NEAREST)) == 128
        rows, columns = cutout.all(-1).any(1).nonzero()[0], cutout.all(-1).any(0).nonzero()[0]
        assert cutout[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all() and cutout.sum() == 3 * len(
            rows
        ) * len(columns)
        assert 40 <= len(rows) <= 80 and 40 <= len(columns) <= 80
        centres.add((rows[0], columns[0]))
    assert len(centres) > 20


@pytest.mark.parametrize("probability", [0.5, 1.0])
def test_rand_augment_draws_operations_levels_and_directions(probability):
    drawn_operations = []
    table = {
        name: lambda image, level, filter, name=name: drawn_operations.append((name, level)) or image for name in "abc"
    }
    torch.manual_seed(0)
    augment = RandAugment(table, 2, 9, Image.Resampling.BICUBIC, probability, spread=0.5, highest=10)
    for _ in range(1000):
        augment(make_image(0))
    names, levels = [name for name, _ in drawn_operations], np.array([level for _, level in drawn_operations])
    assert abs(len(drawn_operations) / 2000 - probability) < 0.04
    assert all(abs(names.count(name) / len(drawn_operations) - 1 / 3) < 0.05 for name in "abc")
    assert abs((levels > 0).mean() - 0.5) < 0.05
    strength = np.abs(levels)
    assert strength.max() == 1.0 and abs(np.median(strength) - 0.9) < 0.01 and abs(strength.std() - 0.05) < 0.01


def test_inception_boxes_keep_area_and_aspect_with_uniform_heights():
    crop = InceptionCrop((8, 8), (0.05, 1.0), (0.75, 1.33), "aliased")
    torch.manual_seed(0)
    boxes = np.array([crop.draw_box(500, 400) for _ in range(3000)])
    left, top, right, bottom = boxes.T
    box_width, box_height = right - left, bottom - top
    assert (boxes >= 0).all() and right.max() == 500 and bottom.max() == 400 and left.min() == top.min() == 0
    area, ratio = box_width * box_height / 200_000, box_width / box_height
    assert area.min() >= 0.05 and area.max() <= 1 and ratio.min() > 0.74 and ratio.max() < 1.34
    assert abs(ratio.mean() - 1.04) < 0.01
    square = InceptionCrop((8, 8), (0.04, 1.0), (1.0, 1.0), "aliased")
    heights = np.array([b - t for _, t, _, b in (square.draw_box(1000, 1000) for _ in range(3000))])
    assert np.abs(np.histogram(heights, 4, (200, 1000))[0] / 3000 - 0.25).max() < 0.03
    assert crop.draw_box(1000, 3) == (0, 0, 1000, 3)


def test_in_memory_inception_crops_match_file_crops():
    keys = derive_keys(0, np.arange(20_000))
    maps = (
        Augment(crop=(0.05, 1.0), ratio=(0.75, 1.33), crop_style="inception").draw_affine_maps(keys, (400, 500)).numpy()
    )
    box_widths, box_heights = maps[:, 0, 0] * 500, maps[:, 1, 1] * 400
    crop = InceptionCrop((8, 8), (0.05, 1.0), (0.75, 1.33), "aliased")
    torch.manual_seed(0)
    boxes = np.array([crop.draw_box(500, 400) for _ in range(5000)])
    for ours, theirs in ((box_widths, boxes[:, 2] - boxes[:, 0]), (box_heights, boxes[:, 3] - boxes[:, 1])):
        assert (
            np.abs(np.quantile(ours, (0.1, 0.3, 0.5, 0.7, 0.9)) - np.quantile(theirs, (0.1, 0.3, 0.5, 0.7, 0.9))).max()
            < 10
        )
    area = box_widths * box_heights / 200_000
    assert area.min() > 0.0499 and area.max() < 1.0001
    assert (np.abs(maps[:, 0, 2]) + maps[:, 0, 0] < 1.0001).all() and (
        np.abs(maps[:, 1, 2]) + maps[:, 1, 1] < 1.0001
    ).all()
    oblong = Augment(crop=(0.9, 1.0), crop_style="inception").draw_affine_maps(keys[:9], (100, 10)).numpy()
    assert np.allclose(oblong, np.eye(2, 3))


def test_aliased_reads_four_neighbours_as_tensorflow_does():
    image = make_image(3, (97, 61))
    ours = image_to_tensor(resize_with_pillow(image, (20, 30), "aliased")).float()
    expected = F.interpolate(image_to_tensor(image)[None].float(), (20, 30), mode="bilinear", align_corners=False)[0]
    assert (ours - expected).abs().max() < 1.01
    assert (image_to_tensor(resize_with_pillow(image, (20, 30), "bilinear")).float() - expected).abs().max() > 20


def test_in_memory_crops_use_the_crop_filter():
    pixels, keys = image_to_tensor(make_image(0, (24, 20)))[None], derive_keys(0, np.arange(1))
    options = {"crop": (0.3, 0.5)}
    default, linear, cubic = (
        Augment(**options, crop_filter=f).augment_batch(pixels, keys) for f in (None, "bilinear", "bicubic")
    )
    assert torch.equal(default, linear) and not torch.equal(default, cubic)


@pytest.mark.parametrize("memory", [False, True])
def test_a_simple_crop_is_a_window_of_the_padded_image(memory):
    pixels, augment = image_to_tensor(make_image(1, (24, 20))), Augment(crop_style="simple")
    padded = F.pad(pixels.float()[None], (4, 4, 4, 4), mode="reflect")[0]
    if memory:
        augmented = augment.augment_batch(pixels[None].repeat(60, 1, 1, 1), derive_keys(0, np.arange(60))).float()
    else:
        augmented = torch.stack(
            [augment.augment_image(make_image(1, (24, 20)), ImagePreprocess(IMAGE_SIZE), k) for k in range(60)]
        ).float()
    positions = [(y, x) for y, x in itertools.product(range(9), range(9))]
    matches_by_image = [
        [p for p in positions if torch.allclose(padded[:, p[0] : p[0] + 20, p[1] : p[1] + 24], image, atol=0.01)]
        for image in augmented
    ]
    assert all(len(matches) == 1 for matches in matches_by_image)
    rows, columns = ({matches[0][axis] for matches in matches_by_image} for axis in (0, 1))
    assert rows == columns == set(range(9))


def test_a_simple_crop_resizes_the_short_side():
    strip = np.zeros((40, 400, 3), np.uint8)
    strip[..., 0] = np.linspace(0, 255, 400)
    resized = [
        Augment(crop_style="simple").augment_image(Image.fromarray(strip), ImagePreprocess((20, 20)), k).float()
        for k in range(60)
    ]
    means = [float(image[0].mean()) for image in resized]
    assert min(means) < 40 and max(means) > 215
    assert max(float(image[0].max() - image[0].min()) for image in resized) < 40


def test_three_augment_applies_one_of_three_operations():
    image = make_smooth_image((24, 20))
    grey, bright = image_to_tensor(image.convert("L").convert("RGB")), image_to_tensor(ImageOps.solarize(image))
    strongest = image_to_tensor(image.filter(ImageFilter.GaussianBlur(2))).float()
    counts, reach = [0, 0, 0], float((strongest - image_to_tensor(image)).abs().max())
    for k in range(600):
        augmented = Augment(three=True).augment_image(image, ImagePreprocess(IMAGE_SIZE), k)
        operation_index = 0 if torch.equal(augmented, grey) else 1 if torch.equal(augmented, bright) else 2
        counts[operation_index] += 1
        assert operation_index < 2 or (augmented.float() - image_to_tensor(image)).abs().max() <= reach + 1
    assert all(abs(count - 200) < 45 for count in counts)


@pytest.mark.parametrize("memory", [False, True])
def test_jitter_stays_within_its_range(memory):
    augment, uniform_image = Augment(jitter=(0.3, 0.0, 0.0)), Image.new("RGB", IMAGE_SIZE[::-1], (100, 150, 50))
    keys = derive_keys(0, np.arange(200))
    if memory:
        augmented = augment.augment_batch(image_to_tensor(uniform_image)[None].repeat(200, 1, 1, 1), keys)
    else:
        augmented = torch.stack(
            [augment.augment_image(uniform_image, ImagePreprocess(IMAGE_SIZE), int(k)) for k in keys]
        )
    factors = augmented[:, :, 0, 0].float() / torch.tensor([100.0, 150.0, 50.0])
    assert factors.min() > 0.68 and factors.max() < 1.31 and factors[:, 1].std() > 0.1
    assert (factors.max(1).values - factors.min(1).values).max() < 0.04


@pytest.mark.parametrize("channels", [3, 1])
def test_erased_noise_fills_a_box_with_pixels_like_imagenets(channels):
    uniform_image = Image.new("RGB" if channels == 3 else "L", (64, 64))
    values, untouched = [], 0
    for k in range(400):
        augmented = Augment(erase=0.5, erase_noise=True).augment_image(
            uniform_image, ImagePreprocess((64, 64), channels), k
        )
        erased_pixels = (augmented > 0).any(0)
        if not erased_pixels.any():
            untouched += 1
            continue
        rows, columns = erased_pixels.any(1).nonzero().flatten(), erased_pixels.any(0).nonzero().flatten()
        box = augmented[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert 0.01 < box[0].numel() / 64**2 < 0.36
        values.append(box.flatten(1).float())
    assert 150 < untouched < 250
    noise = torch.cat(values, 1).mean(1) / 255
    expected = torch.tensor(IMAGENET_MOMENTS[0])
    assert torch.allclose(noise, expected if channels == 3 else expected.mean()[None], atol=0.01)
    assert 0.15 < float(torch.cat(values, 1).std() / 255) < 0.25


@pytest.mark.parametrize("options", [{"mixup": 0.8}, {"cutmix": 1.0}])
@pytest.mark.parametrize("multilabel", [False, True])
def test_labels_are_mixed_like_the_images(options, multilabel):
    """Each image has one constant value, so the mixed value gives the weight of each label."""
    generator = torch.Generator().manual_seed(0)
    labels = (
        torch.randint(0, 2, (6, 4), generator=generator).float()
        if multilabel
        else torch.randint(0, 4, (6,), generator=generator)
    )
    hot = labels if multilabel else F.one_hot(labels, 4).float()
    images = torch.arange(6.0)[:, None, None, None].expand(6, 3, 16, 16).clone()
    shares = set()
    for batch in range(10):
        mixed, soft = Augment(**options).mix_batch(images, labels, 4, seed=0, batch=batch)
        own_weight = float(1 - (mixed[1].mean() - 1) / (0 - 1))  # image 1 is mixed with image 0
        assert torch.allclose(soft, own_weight * hot + (1 - own_weight) * hot.roll(1, 0), atol=1e-5)
        shares.add(own_weight)
    assert len(shares) > 5 and all(0 <= share <= 1 for share in shares)


@pytest.mark.parametrize("options", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_mixing_matches_torchvision(options):
    images, labels = torch.randn(6, 3, 12, 20), torch.tensor([0, 1, 2, 2, 1, 0])
    for batch in range(20):
        ours = Augment(**options).mix_batch(images, labels, 3, seed=0, batch=batch)
        with fork_torch_rng(0, batch):
            cut = "cutmix" in options and (len(options) == 1 or bool(torch.rand(()) < 0.5))
            expected = (v2.CutMix if cut else v2.MixUp)(alpha=options["cutmix" if cut else "mixup"], num_classes=3)(
                images, labels
            )
        assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])


def test_repeated_images_are_mixed_with_different_images():
    images, labels = torch.arange(9.0)[:, None, None, None].expand(9, 3, 8, 8).clone(), torch.arange(9) // 3
    for batch in range(10):
        _, soft = Augment(mixup=0.8).mix_batch(images, labels, 3, 0, batch, offset=3)
        own_weight = soft[0, 0]
        assert torch.allclose(
            soft, own_weight * F.one_hot(labels, 3) + (1 - own_weight) * F.one_hot((labels - 1) % 3, 3)
        )


def test_batches_are_mixed_with_the_mix_probability():
    images, labels = torch.randn(4, 3, 8, 8), torch.arange(4)
    mixed = [
        Augment(mixup=0.8, cutmix=1.0, mix_probability=0.3).mix_batch(images, labels, 4, 0, batch)[1].ndim == 2
        for batch in range(400)
    ]
    assert abs(sum(mixed) / 400 - 0.3) < 0.07
    assert not any(
        Augment(mixup=0.8, mix_probability=0.0).mix_batch(images, labels, 4, 0, batch)[1].ndim == 2
        for batch in range(20)
    )


@pytest.mark.parametrize(
    "options, word",
    [
        ({"flip": 1.5}, "flip"),
        ({"mix_probability": -0.1}, "mix_probability"),
        ({"crop": (0.0, 1.0)}, "area"),
        ({"crop": (0.9, 0.5)}, "area"),
        ({"crop": (0.5, 1.0), "ratio": (2.0, 1.0)}, "ratio"),
        ({"crop": (0.5, 1.0), "crop_style": "simple"}, "simple"),
        ({"crop": (0.5, 1.0), "crop_filter": "aliased"}, "antialiases"),
        ({"rand_layers": 2, "rand_spread": 0.5}, "rand_spread"),
        ({"rand_layers": 2, "rand_spread": 0.5, "rand_style": "big_vision"}, "rand_spread"),
        ({"rand_layers": 2, "rand_magnitude": 31}, "30"),
        ({"jitter": (-0.1, 0.0, 0.0)}, "jitter"),
    ],
)
def test_invalid_augment_options_are_rejected(options, word):
    with pytest.raises(UsageError, match=word):
        Augment(**options)
