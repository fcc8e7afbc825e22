"""Region decoding of JPEGs matches a crop of the full image, and rejects every file that `decode_to_pillow` rejects."""

from __future__ import annotations

import io
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.crops import AreaCrop, crop_and_resize
from vitreous.data.decoding import regions as jpeg
from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.data.decoding.regions import (
    LazyJpeg,
    LazyPixels,
    decode_jpeg_with_pillow,
    get_jpeg_decoder,
    open_lazy_image,
)
from vitreous.data.keys import fork_torch_rng
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import DataError

IMAGE_SIZE = (131, 97)


def make_noisy_image(
    size: tuple[int, int] = IMAGE_SIZE, channels: int = 3, seed: int = 0, noise: float = 20.0
) -> Image.Image:
    """Return an image of size (width, height) with slopes, blobs and some noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, channels, 7, 7, generator=generator) * 220 + 15
    fine = F.interpolate(coarse, size[::-1], mode="bicubic")[0] + noise * torch.randn(
        channels, *size[::-1], generator=generator
    )
    pixels = fine.clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels)


def encode_jpeg(image: Image.Image, orientation: int = 1, **options) -> bytes:
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    image.save(file, "JPEG", **({"exif": exif} if orientation != 1 else {}), **options)
    return file.getvalue()


JPEG_VARIANTS = {
    "4:4:4": encode_jpeg(make_noisy_image(), subsampling=0),
    "4:2:2": encode_jpeg(make_noisy_image(seed=1), subsampling=1),
    "4:2:0": encode_jpeg(make_noisy_image(seed=2), subsampling=2),
    "grey": encode_jpeg(make_noisy_image(channels=1)),
    "restarts": encode_jpeg(make_noisy_image(), restart_marker_rows=1),
    "rgb": encode_jpeg(make_noisy_image(), keep_rgb=True),
    "quality 20": encode_jpeg(make_noisy_image(), quality=20),
}


@pytest.fixture(params=["simplejpeg", "pillow"])
def either_decoder(request, monkeypatch):
    """Run the test with the optional JPEG decoder, and with the decoder hidden."""
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(jpeg, "get_jpeg_decoder", lambda: decode_jpeg_with_pillow)


def draw_boxes(width: int, height: int, count: int = 12):
    random = np.random.default_rng(0)
    yield 0, 0, width, height
    for _ in range(count):
        (left, right), (top, bottom) = (
            np.sort(random.choice(side + 1, 2, replace=False)).tolist() for side in (width, height)
        )
        yield left, top, right, bottom


def as_array(image: Image.Image) -> np.ndarray:
    array = np.asarray(image)
    return array if array.ndim == 3 else array[..., None]


@pytest.mark.usefixtures("either_decoder")
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", JPEG_VARIANTS)
def test_decoded_regions_match_crops_of_the_full_image(name, channels):
    photograph = open_lazy_image(JPEG_VARIANTS[name], channels, name)
    assert isinstance(photograph, LazyJpeg)
    full_image = decode_to_pillow(JPEG_VARIANTS[name], channels)
    assert photograph.size == full_image.size
    for box in draw_boxes(*full_image.size):
        assert np.array_equal(photograph.decode_region(box), as_array(full_image.crop(box)))


@pytest.mark.usefixtures("either_decoder")
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_region_is_upright(orientation):
    content = encode_jpeg(make_noisy_image(), orientation, subsampling=2)
    photograph, full_image = open_lazy_image(content, 3, "x"), decode_to_pillow(content)
    assert isinstance(photograph, LazyJpeg) and photograph.size == full_image.size
    for box in draw_boxes(*full_image.size):
        assert np.array_equal(photograph.decode_region(box), as_array(full_image.crop(box)))


def test_rows_below_a_crop_are_not_decoded(monkeypatch):
    rows = []
    monkeypatch.setattr(
        LazyJpeg,
        "decode_rows",
        lambda self, count, factor, decode=LazyJpeg.decode_rows: rows.append(count) or decode(self, count, factor),
    )
    photograph = open_lazy_image(JPEG_VARIANTS["4:2:0"], 3, "x")
    for bottom in (10, 33, 97):
        photograph.decode_region((0, 0, 20, bottom))
    assert rows == [32, 64, 97]
    photograph = open_lazy_image(JPEG_VARIANTS["4:4:4"], 3, "x")
    photograph.decode_region((0, 0, 20, 10))
    assert rows[-1] == 16


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("subsampling", [0, 2])
def test_reduced_decoding_is_close_to_the_full_crop(factor, subsampling, monkeypatch):
    content = encode_jpeg(make_noisy_image((800, 600), noise=8.0), orientation=6, subsampling=subsampling, quality=90)
    exact, rough = (open_lazy_image(content, 3, "x", exact) for exact in (True, False))
    size = (520 // (2 * factor), 400 // (2 * factor))
    factors = []
    monkeypatch.setattr(
        LazyJpeg,
        "decode_rows",
        lambda self, rows, f, decode=LazyJpeg.decode_rows: factors.append(f) or decode(self, rows, f),
    )
    box = (40, 48, 40 + 400, 48 + 520)
    expected, reduced_crop = (crop_and_resize(image, box, size, "bicubic").float() for image in (exact, rough))
    assert factors == [1, factor]
    assert (expected - reduced_crop).abs().mean() < 1.5 and (expected - reduced_crop).abs().max() < 24
    shifted_crop = crop_and_resize(exact, (box[0] + 8 * factor, *box[1:]), size, "bicubic").float()
    assert (expected - shifted_crop).abs().mean() > 2 * (expected - reduced_crop).abs().mean()


def test_both_jpeg_decoders_reduce_identically():
    pytest.importorskip("simplejpeg")
    for name in ("4:4:4", "4:2:0", "grey"):
        photograph = open_lazy_image(JPEG_VARIANTS[name], 3, name)
        for factor in (1, 2, 4, 8):
            shape = (-(-97 // factor), -(-131 // factor), photograph.layout.components)
            assert np.array_equal(
                get_jpeg_decoder()(photograph.content, shape, factor),
                decode_jpeg_with_pillow(photograph.content, shape, factor),
            )


def test_the_reduction_factor_keeps_enough_resolution():
    assert [jpeg.choose_reduction_factor((side, 4000), (224, 224)) for side in (447, 895, 896, 1792, 3583, 3584)] == [
        1,
        1,
        2,
        4,
        4,
        8,
    ]


DAMAGED_JPEGS = {
    "truncated": JPEG_VARIANTS["4:2:0"][:-900],
    "no end marker": JPEG_VARIANTS["4:2:0"][:-2],
    "a second image appended": JPEG_VARIANTS["4:2:0"] * 2,
    "a second image embedded": JPEG_VARIANTS["4:2:0"][:-500] + JPEG_VARIANTS["4:2:0"] + JPEG_VARIANTS["4:2:0"][-500:],
    "a marker inside the scan": JPEG_VARIANTS["4:2:0"][:-500] + b"\xff\xd8" + JPEG_VARIANTS["4:2:0"][-500:],
    "tables inside the scan": JPEG_VARIANTS["4:2:0"][:-500] + b"\xff\xc4\x00\x08123456" + JPEG_VARIANTS["4:2:0"][-500:],
    "trailing bytes": JPEG_VARIANTS["4:2:0"] + b"and more",
    "progressive": encode_jpeg(make_noisy_image(), progressive=True),
    "cmyk": encode_jpeg(make_noisy_image().convert("CMYK")),
    "not a JPEG": b"\xff\xd8\xff\xd9",
    "start marker only": b"\xff\xd8",
}


def get_pixels_or_error(call) -> tuple[str, bytes]:
    """Return ("pixels", content), or the type and text of the error."""
    try:
        return "pixels", call().tobytes()
    except DataError as error:
        return str(error), b""


@pytest.mark.usefixtures("either_decoder")
@pytest.mark.parametrize("name", DAMAGED_JPEGS)
def test_unusual_jpegs_fall_back_to_full_decoding(name):
    # these fall back, so the result is no lazy Jpeg
    opened = get_pixels_or_error(lambda: as_array(open_lazy_image(DAMAGED_JPEGS[name], 3, name)))
    assert opened == get_pixels_or_error(lambda: as_array(decode_to_pillow(DAMAGED_JPEGS[name], 3, name)))


@pytest.mark.usefixtures("either_decoder")
@pytest.mark.parametrize("seed", range(3))
def test_damaged_jpegs_match_full_decoding(seed):
    """Random byte changes, removals and insertions give the same pixels or message as `decode_to_pillow`."""
    random, num_lazy = np.random.default_rng(seed), 0
    for number in range(150):
        content = bytearray(list(JPEG_VARIANTS.values())[number % len(JPEG_VARIANTS)])
        for _ in range(random.integers(1, 4)):
            at = int(random.integers(2, len(content) if number % 2 else min(700, len(content))))
            mutation = random.integers(3)
            content[at : at + int(mutation > 0)] = bytes([int(random.integers(256))]) * int(mutation < 2)
        raw = bytes(content)
        expected = get_pixels_or_error(lambda raw=raw: as_array(decode_to_pillow(raw, 3, "x")))

        def decode_lazily(raw=raw) -> np.ndarray:
            image = open_lazy_image(raw, 3, "x")
            return as_array(image) if isinstance(image, Image.Image) else image.decode_region((0, 0, *image.size))

        assert get_pixels_or_error(decode_lazily) == expected, number
        num_lazy += isinstance(jpeg.parse_plain_jpeg(raw, 3, "x", True), LazyJpeg)
        if expected[0] != "pixels":  # a crop of it is rejected too
            with pytest.raises(DataError):
                Augment(crop=(0.1, 0.2)).augment_image(open_lazy_image(raw, 3, "x"), ImagePreprocess((16, 16)), 0)
    assert num_lazy > 30


def test_a_failing_decoder_falls_back_to_pillow(monkeypatch):
    def raise_error(content, shape, factor):
        raise ValueError("not me")

    monkeypatch.setattr(jpeg, "get_jpeg_decoder", lambda: raise_error)
    photograph = open_lazy_image(JPEG_VARIANTS["grey"], 3, "x")
    assert np.array_equal(
        photograph.decode_region((5, 6, 50, 60)), as_array(decode_to_pillow(JPEG_VARIANTS["grey"]).crop((5, 6, 50, 60)))
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_in_memory_pixels_are_cropped_without_decoding(channels):
    pixels = as_array(make_noisy_image(channels=channels))
    stored = open_lazy_image(pixels[..., 0] if channels == 1 else pixels, channels, "x")
    assert isinstance(stored, LazyPixels) and stored.size == IMAGE_SIZE
    assert np.array_equal(stored.decode_region((3, 4, 60, 50)), pixels[4:50, 3:60])
    assert np.array_equal(
        as_array(stored.decode_full()),
        as_array(decode_to_pillow(pixels[..., 0] if channels == 1 else pixels, channels)),
    )
    for mismatched in (pixels.astype(np.uint16) * 257, pixels[..., :1] if channels == 3 else np.repeat(pixels, 3, -1)):
        if mismatched.shape[-1] == 1:
            mismatched = mismatched[..., 0]
        opened = get_pixels_or_error(lambda pixels=mismatched: as_array(open_lazy_image(pixels, channels, "x")))
        assert opened == get_pixels_or_error(
            lambda pixels=mismatched: as_array(decode_to_pillow(pixels, channels, "x"))
        )


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (1, 400), (400, 1), (20, 20)])
@pytest.mark.parametrize("options", [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.9, 1.0), (1.5, 2.0))])
def test_crop_boxes_match_torchvision(size, options):
    from torchvision.transforms import v2

    ours, theirs = AreaCrop((8, 8), *options, "bicubic"), v2.RandomResizedCrop((8, 8), *options)
    blank = [torch.empty(3, size[1], size[0], device="meta")]
    for seed in range(50):
        with fork_torch_rng(seed):
            left, top, right, bottom = ours.draw_box(*size)
            state = torch.default_generator.get_state()
        with fork_torch_rng(seed):
            expected = theirs.make_params(blank)
            assert torch.equal(state, torch.default_generator.get_state())
        assert {"top": top, "left": left, "height": bottom - top, "width": right - left} == expected


@pytest.mark.parametrize("filter", ["bicubic", "bilinear"])
def test_crop_resizing_is_as_accurate_as_pillow(filter):
    image, box = make_noisy_image((300, 200), noise=30.0), (20, 10, 280, 190)
    exact = torch.from_numpy(as_array(image.crop(box)).astype(np.float64)).permute(2, 0, 1)[None]
    for size in ((64, 64), (224, 224)):
        reference = F.interpolate(exact, size, mode=filter, antialias=True)[0].clamp(0, 255)
        pillow = as_array(image.crop(box).resize(size[::-1], getattr(Image.Resampling, filter.upper()))).transpose(
            2, 0, 1
        )
        ours = crop_and_resize(image, box, size, filter).numpy()
        assert np.abs(ours - reference.numpy()).mean() < 0.35 and np.abs(ours.astype(int) - pillow).mean() < 0.35


@pytest.mark.parametrize("name", ["4:4:4", "grey"])
def test_lazy_and_decoded_images_are_augmented_identically(name):
    """A lazy JPEG, its decoded image and its pixel array are augmented identically, with the same random draws."""
    augment, preprocess = Augment(crop=(0.1, 1.0), flip=0.5, jitter=(0.2, 0.0, 0.0)), ImagePreprocess((24, 20))
    decoded = decode_to_pillow(JPEG_VARIANTS[name], 3)
    representations = [open_lazy_image(JPEG_VARIANTS[name], 3, "x"), decoded, LazyPixels(np.asarray(decoded))]
    for sample_key in range(10):
        first, *other_results = (
            augment.augment_image(representation, preprocess, sample_key) for representation in representations
        )
        assert first.is_contiguous() and all(torch.equal(first, result) for result in other_results)


def test_a_broken_jpeg_is_reported_by_name():
    photograph = open_lazy_image(JPEG_VARIANTS["4:4:4"], 3, "broken.jpg")
    with pytest.raises(DataError, match=r"broken\.jpg"):
        replace(photograph, content=photograph.content[:400]).decode_region((0, 0, 20, 20))


def test_decoded_regions_are_writable(either_decoder):
    """Crops are writable (torch warns otherwise), even if a crop is as wide as the image."""
    for content in JPEG_VARIANTS.values():
        channels = 1 if content is JPEG_VARIANTS["grey"] else 3
        for box in draw_boxes(*IMAGE_SIZE):
            lazy_image = open_lazy_image(content, channels, "x.jpg", exact=False)
            assert (
                lazy_image.decode_region(box).flags.writeable and lazy_image.decode_region(box, (8, 8)).flags.writeable
            )
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                crop_and_resize(lazy_image, box, (8, 8), "bicubic")
