"""Duplicates are assigned to the right original without false positives, and the list preserves all names."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

import vitreous
from tests.conftest import make_folder
from vitreous.apps.curation import dedup as finder
from vitreous.apps.curation.copies import search
from vitreous.apps.curation.copies.listing import copies_to_csv, remaining_to_csv
from vitreous.apps.curation.copies.scan import ConcatenatedSplits
from vitreous.apps.curation.copies.search import find_first_equal_rows, search_candidates
from vitreous.apps.curation.copies.verification import COPY_THRESHOLD, align_views, correlate_blocks
from vitreous.apps.curation.copies.windows import (
    CENTRE_BOX_INDEX,
    FREQUENCIES,
    MIRROR_SIGNS,
    SEARCH_BOXES,
    compute_descriptors,
    compute_weighted_spectrum,
    compute_whole_descriptors,
)
from vitreous.apps.curation.dedup import find_copies, read_fingerprints
from vitreous.cli.console import Console
from vitreous.cli.data_dedup import Options, run
from vitreous.data.exclusions import find_kept_samples, read_exclusion_list
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sources import open_data
from vitreous.data.split import ArraySplit, FileSplit
from vitreous.errors import DataError, UsageError
from vitreous.tasks.classification import Classification
from vitreous.weights.bundle import Bundle


def draw_photo(seed: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """Return an image with the statistics of a photo: power that falls with frequency, edges, and colours."""
    draw = np.random.default_rng(seed)
    height, width = size[1], size[0]
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    fall = 1 / np.maximum(np.hypot(fy, fx), 1 / width) ** 1.1
    planes = [np.fft.irfft2(np.fft.rfft2(draw.normal(size=(height, width))) * fall, (height, width)) for _ in range(3)]
    base = planes[0] / planes[0].std()
    y, x = np.mgrid[:height, :width]
    for _ in range(6):
        cx, cy, rx, ry = draw.uniform(0, width), draw.uniform(0, height), draw.uniform(8, 40), draw.uniform(8, 40)
        base[((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2 < 1] += draw.normal()
    colours = np.stack([base + 0.2 * plane / plane.std() for plane in planes], -1)
    return Image.fromarray((127 + 45 * colours).clip(0, 255).astype(np.uint8))


def crop_area(image: Image.Image, area: float, x: float, y: float) -> Image.Image:
    w, h = round(image.width * area**0.5), round(image.height * area**0.5)
    left, top = round(x * (image.width - w)), round(y * (image.height - h))
    return image.crop((left, top, left + w, top + h))


def compress_jpeg(image: Image.Image, quality: int) -> Image.Image:
    image.save(buffer := io.BytesIO(), "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


EDITS = {
    "cut to 90 %": lambda p: crop_area(p, 0.9, 0.2, 0.9),
    "cut to 50 %": lambda p: crop_area(p, 0.5, 0.8, 0.3),
    "scaled down": lambda p: p.resize((p.width // 3, p.height // 3)),
    "scaled up": lambda p: p.resize((p.width * 2, p.height * 2)),
    "squeezed": lambda p: p.resize((96, 96)),
    "quality 20": lambda p: compress_jpeg(p, 20),
    "mirrored": ImageOps.mirror,
    "brighter": lambda p: ImageEnhance.Brightness(p).enhance(1.4),
    "less contrast": lambda p: ImageEnhance.Contrast(p).enhance(0.5),
    "grey": lambda p: p.convert("L").convert("RGB"),
    "framed": lambda p: ImageOps.expand(p, 6, "black"),
    "several": lambda p: compress_jpeg(
        ImageOps.mirror(crop_area(ImageEnhance.Contrast(p).enhance(1.2), 0.7, 0.1, 0.6)).resize((70, 50)), 30
    ),
}


def save_image(image: Image.Image, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def to_file_split(paths) -> FileSplit:
    return FileSplit(list(paths), np.zeros(len(paths), np.int64))


@pytest.fixture(scope="module")
def original_split(tmp_path_factory):
    home = tmp_path_factory.mktemp("originals")
    return to_file_split([save_image(draw_photo(seed), home / f"{seed:03}.png") for seed in range(24)])


@pytest.mark.parametrize("change", EDITS)
def test_edited_images_match_their_original_and_others_match_none(tmp_path, original_split, change):
    edited = [save_image(EDITS[change](draw_photo(seed)), tmp_path / "own" / f"{seed:03}.png") for seed in range(6)]
    unrelated = [
        save_image(EDITS[change](draw_photo(seed)), tmp_path / "strange" / f"{seed}.png") for seed in range(100, 105)
    ]
    result = find_copies([to_file_split([*unrelated, *edited])], [original_split], workers=0)
    assert [(copy["path"], copy["duplicate_of"]) for copy in result["duplicates"]] == [
        (str(path), original_split.name(seed)) for seed, path in enumerate(edited)
    ]
    assert {copy["reason"] for copy in result["duplicates"]} == {"near"} and all(
        copy["score"] >= COPY_THRESHOLD for copy in result["duplicates"]
    )


def test_an_image_whose_crop_is_in_the_reference_data_is_found(tmp_path):
    crops = to_file_split(
        [save_image(crop_area(draw_photo(seed), 0.55, 0.5, 0.2), tmp_path / f"{seed}.png") for seed in range(6)]
    )
    originals = to_file_split([save_image(draw_photo(seed), tmp_path / "whole" / f"{seed}.png") for seed in range(12)])
    result = find_copies([originals], [crops], workers=0)
    assert [(copy["path"], copy["duplicate_of"]) for copy in result["duplicates"]] == [
        (originals.name(i), crops.name(i)) for i in range(6)
    ]


def test_byte_and_pixel_duplicates_have_different_reasons(tmp_path):
    original = save_image(draw_photo(0), tmp_path / "b" / "0.png")
    same_pixels = save_image(draw_photo(0), tmp_path / "a" / "pixels.bmp")
    (tmp_path / "a" / "bytes.png").write_bytes(original.read_bytes())
    result = find_copies(
        [to_file_split([tmp_path / "a" / "bytes.png", same_pixels])], [to_file_split([original])], workers=0
    )
    assert [(copy["reason"], copy["score"]) for copy in result["duplicates"]] == [("bytes", 1.0), ("pixels", 1.0)]


def make_noise_image(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8))


def make_gradient_image(seed):
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[0:1:48j, 0:1:64j]
    values = 128 + 100 * (draw.normal() * x + draw.normal() * y) / 3 + draw.normal(size=(48, 64)) * 2
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize(
    "make, count",
    [
        (make_noise_image, 60),
        (draw_photo, 40),
        (lambda seed: draw_photo(seed).filter(ImageFilter.GaussianBlur(6)), 24),
        (make_gradient_image, 40),
    ],
    ids=["noise", "scenes", "blurred scenes", "noisy gradients"],
)
def test_unrelated_images_are_no_duplicates(make, count):
    pixels = [np.asarray(make(seed).convert("RGB").resize((64, 48))) for seed in range(count)]
    split = ArraySplit(np.stack(pixels), np.zeros(count, np.int64))
    assert find_copies([split], [], within=True, workers=0)["duplicates"] == []


def test_images_of_the_same_digit_are_no_duplicates():
    digits = open_data("digits").full_train_split
    two_digits = digits.take(np.flatnonzero(digits.labels < 2)[:36])
    assert find_copies([two_digits], [], within=True, workers=0)["duplicates"] == []


def test_uniform_images_are_duplicates_only_if_equal():
    uniform_images = np.stack([np.full((32, 32, 3), level, np.uint8) for level in (0, 10, 200, 200)])
    result = find_copies([ArraySplit(uniform_images, np.zeros(4, np.int64))], [], within=True, workers=0)
    assert [(copy["path"], copy["duplicate_of"], copy["reason"]) for copy in result["duplicates"]] == [
        ("sample 3", "sample 2", "bytes")
    ]


def test_one_image_of_each_duplicate_group_is_kept(tmp_path):
    images = [
        draw_photo(0),
        draw_photo(1),
        draw_photo(0),
        compress_jpeg(draw_photo(0), 40),
        ImageOps.mirror(draw_photo(1)),
        draw_photo(2),
        compress_jpeg(draw_photo(0), 40),
    ]
    split = ArraySplit(np.stack([np.asarray(image) for image in images]), np.zeros(len(images), np.int64))
    result = find_copies([split], [], within=True, workers=0)
    pairs = {int(copy["path"].split()[1]): int(copy["duplicate_of"].split()[1]) for copy in result["duplicates"]}
    assert pairs == {2: 0, 3: 0, 4: 1, 6: 0}


def test_internal_duplicates_are_ignored_without_within(original_split):
    split = ArraySplit(np.stack([np.asarray(draw_photo(seed)) for seed in (200, 200, 3)]), np.zeros(3, np.int64))
    result = find_copies([split], [original_split], workers=0)
    assert [(copy["path"], copy["duplicate_of"], copy["reason"]) for copy in result["duplicates"]] == [
        ("sample 2", original_split.name(3), "pixels")
    ]


def test_unreadable_images_are_reported_and_kept(tmp_path, original_split):
    damaged = tmp_path / "bad.jpg"
    damaged.write_bytes(b"nothing")
    readable = save_image(compress_jpeg(draw_photo(5), 50), tmp_path / "good.png")
    result = find_copies([to_file_split([damaged, tmp_path / "gone.png", readable])], [original_split], workers=0)
    assert [copy["path"] for copy in result["duplicates"]] == [str(readable)]
    assert ["bad.jpg" in result["unreadable"][0], "gone.png" in result["unreadable"][1]] == [True, True]
    with pytest.raises(DataError, match="none of 1 images"):
        find_copies([to_file_split([damaged])], [], within=True, workers=0)


def test_duplicates_do_not_depend_on_workers(tmp_path, original_split):
    paths = [save_image(EDITS["several"](draw_photo(seed)), tmp_path / f"{seed}.png") for seed in (3, 4, 90)]
    assert find_copies([to_file_split(paths)], [original_split], workers=2) == find_copies(
        [to_file_split(paths)], [original_split], workers=0
    )


def test_a_comparison_needs_reference_data(original_split):
    with pytest.raises(UsageError, match="no dataset to compare with"):
        find_copies([original_split], [])


@given(st.lists(st.integers(0, 4), max_size=30))
def test_find_first_equal_returns_the_first_match(values):
    keys = np.array([(value // 2, value % 2) for value in values], np.uint64).reshape(-1, 2)
    assert find_first_equal_rows(keys).tolist() == [values.index(value) for value in values]


def test_descriptors_are_low_frequencies_of_each_box(original_split):
    views = read_fingerprints(ConcatenatedSplits([original_split]), 0)[0]["view"][:5].astype(np.float32)
    descriptors = compute_descriptors(views)
    for number, box in enumerate(SEARCH_BOXES):
        spectrum = compute_weighted_spectrum(views, box[None].repeat(5, 0), 8)
        expected = np.stack([spectrum[:, i, j] for i, j in FREQUENCIES], 1)
        np.testing.assert_allclose(
            descriptors[:, number], expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=2e-5
        )
    np.testing.assert_allclose(
        compute_whole_descriptors(views[:, :, ::-1]), descriptors[:, 0] * MIRROR_SIGNS, atol=2e-5
    )


def test_candidates_have_the_highest_cosines(original_split, monkeypatch):
    views = read_fingerprints(ConcatenatedSplits([original_split]), 0)[0]["view"]
    descriptors = compute_descriptors(views)
    monkeypatch.setattr(search, "QUERY_BLOCK_SIZE", 7)
    monkeypatch.setattr(search, "MAX_HELD_PARTS", 5 * len(SEARCH_BOXES))
    monkeypatch.setattr(search, "MAX_CANDIDATES", 3)
    expected = {}
    for i in range(16, 24):
        options = {}
        for j in range(i):
            for mirrored, signs in ((False, np.ones_like(MIRROR_SIGNS)), (True, MIRROR_SIGNS)):
                # the whole image and its centre
                queries = [descriptors[i, 0] * signs, descriptors[i, CENTRE_BOX_INDEX] * signs]
                options[i, j, mirrored, True] = max((descriptors[j] @ query).max() for query in queries)
                options[i, j, mirrored, False] = (descriptors[i] @ (descriptors[j, 0] * signs)).max()
        expected |= dict(sorted(options.items(), key=lambda item: -item[1])[:3])
    candidates = search_candidates(
        descriptors[:, 0], lambda numbers: descriptors[numbers], np.arange(16, 24), np.arange(24), floor=-1.0
    )
    assert {(row["sample"], row["of"], row["mirrored"], row["inner"]) for row in candidates} == set(expected)
    for row in candidates:
        assert row["cosine"] == pytest.approx(
            expected[row["sample"], row["of"], row["mirrored"], row["inner"]], abs=1e-5
        )


def test_inverted_lists_match_exhaustive_search(monkeypatch):
    draw = np.random.default_rng(0)
    descriptors = draw.normal(size=(3000, 4, len(FREQUENCIES))).astype(np.float32)
    descriptors[1500:, 0] = descriptors[:1500, 2] + 0.3 * draw.normal(size=(1500, len(FREQUENCIES)))
    monkeypatch.setattr(search, "CENTRE_BOX_INDEX", 0)
    descriptors /= np.linalg.norm(descriptors, axis=2, keepdims=True)
    candidates = search_candidates(
        descriptors[:, 0], lambda numbers: descriptors[numbers], np.arange(1500, 3000), np.arange(1500), probed=8
    )
    planted = {(1500 + i, i, float(SEARCH_BOXES[2, 0])) for i in range(1500)}
    assert len(planted & {(row["sample"], row["of"], float(row["box"][0])) for row in candidates}) >= 1470
    assert len(search.train_centroids(lambda numbers: descriptors[numbers], np.arange(1500))) == 13


def test_crops_are_aligned_exactly(original_split):
    photo = draw_photo(4, (256, 256))
    box = np.array([0.1, 0.2, 0.75, 0.7], np.float32)
    edges = (box[0], box[1], box[0] + box[2], box[1] + box[3])
    part_of = photo.crop(tuple(round(256 * edge) for edge in edges))
    a, b = (np.asarray(image.convert("L").resize((64, 64), 2), np.float32)[None] for image in (part_of, photo))
    cosine, aligned_boxes = align_views(a, b, box[None] + np.float32([[0.03, -0.02, 0.04, 0.03]]))
    assert cosine[0] > 0.99 and np.abs(aligned_boxes[0] - box).max() < 0.01


def test_correlation_is_computed_per_block():
    draw = np.random.default_rng(1)
    view_a = draw.normal(size=(1, 32, 32)).astype(np.float32)
    hill = 20 * np.hypot(*(np.mgrid[:32, :32] - 16.0)).astype(np.float32)
    assert correlate_blocks(view_a, 3 * view_a + 7)[0] == pytest.approx(1, abs=0.01)
    assert abs(correlate_blocks(view_a, draw.normal(size=(1, 32, 32)).astype(np.float32))[0]) < 0.1
    global_correlation = np.corrcoef((hill + view_a).ravel(), (hill - view_a).ravel())[0, 1]
    # one shared large shape is not enough
    assert global_correlation > 0.99 and correlate_blocks(hill + 60 * view_a, hill - 60 * view_a)[0] < 0


def shift_image(image, dx, dy):
    pixels = np.asarray(image)
    padded = np.pad(pixels, ((4, 4), (4, 4), (0, 0)), mode="edge")
    return Image.fromarray(np.ascontiguousarray(padded[4 + dy : 36 + dy, 4 + dx : 36 + dx]))


def letterbox_image(image):
    return ImageOps.expand(image, (0, 4, 0, 4), "black").resize((32, 32), 2)


SMALL_IMAGE_EDITS = {
    "shifted by 2": lambda p: shift_image(p, 2, -2),
    "shifted by 4": lambda p: shift_image(p, -4, 3),
    "mirrored and shifted": lambda p: shift_image(ImageOps.mirror(p), 3, 1),
    "hue and contrast": lambda p: ImageEnhance.Contrast(Image.merge("RGB", p.split()[::-1])).enhance(1.5),
    "letterboxed": letterbox_image,
    "shifted, less contrast, quality 60": lambda p: compress_jpeg(
        ImageEnhance.Contrast(shift_image(p, 2, 2)).enhance(0.6), 60
    ),
}


@pytest.mark.parametrize("change", SMALL_IMAGE_EDITS)
def test_edited_duplicates_of_32_pixels_are_found(change):
    small = [draw_photo(seed, (96, 96)).resize((32, 32), 1) for seed in range(60)]
    originals = ArraySplit(np.stack([np.asarray(image) for image in small[:40]]), np.zeros(40, np.int64))
    edited = ArraySplit(
        np.stack([np.asarray(SMALL_IMAGE_EDITS[change](image)) for image in small[20:]]), np.zeros(40, np.int64)
    )
    result = find_copies([edited], [originals], workers=0)["duplicates"]
    pairs = {int(copy["path"].split()[1]): int(copy["duplicate_of"].split()[1]) for copy in result}
    assert set(pairs.items()) <= {(i, i + 20) for i in range(20)} and len(pairs) >= 19


ESCAPED_NAMES = ["=cmd|' /C calc'!A0", "+1", "-2", "@x", "'quoted", "''two", 'a "b", c', "plain", "é", "\\n"]


def test_file_names_survive_the_csv_and_none_is_a_formula(tmp_path):
    copies = [{"path": name, "duplicate_of": name, "reason": "near", "score": 0.9} for name in ESCAPED_NAMES]
    (tmp_path / "list.csv").write_text(text := copies_to_csv(copies))
    assert read_exclusion_list(tmp_path / "list.csv") == set(ESCAPED_NAMES)
    assert not any(line[0] in "=+-@" for line in text.splitlines()) and ",=" not in text
    split = to_file_split([tmp_path / name for name in "abc"])
    assert find_kept_samples(split, frozenset({str(tmp_path / "b")})).tolist() == [0, 2]


@pytest.mark.parametrize("text", ["", "name,label\nx,y\n", 'path,duplicate_of\n"x\n', "path,duplicate_of\nx\n"])
def test_invalid_exclusion_lists_are_rejected(tmp_path, text):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(DataError):
        read_exclusion_list(tmp_path / "list.csv")


def test_the_remaining_table_is_the_dataset_without_duplicates(tmp_path):
    root = make_folder(tmp_path / "photos", {"train": 6, "test": 2})
    data = open_data(root)
    names = frozenset(str(root / "train" / name) for name in ("ant/0.png", "bee/3.png"))
    (tmp_path / "rest.csv").write_text(remaining_to_csv(data, names, tmp_path))
    remaining = open_data(tmp_path / "rest.csv")
    before = {
        (split.name(i), data.classes[split.labels[i]]) for split in data.splits.values() for i in range(len(split))
    }
    after = {
        (split.name(i), remaining.classes[split.labels[i]])
        for split in remaining.splits.values()
        for i in range(len(split))
    }
    assert after == {(name, label) for name, label in before if name not in names}
    assert len(remaining.splits["test"]) == 6
    with pytest.raises(UsageError, match="no image files"):
        remaining_to_csv(open_data("digits"), frozenset(), tmp_path)


def test_the_remaining_table_keeps_target_values(tmp_path):
    draw_photo(0).save(tmp_path / "photo.png")
    for name in "bcdefg":
        draw_photo(ord(name)).save(tmp_path / f"{name}.png")
    lines = ["path,age,size,note,split", "photo.png,1.1,,x,train", "b.png,2,30,y,train", "c.png,,7,z,test"]
    lines += [f"{name}.png,{number / 3!r},{number},w,train" for number, name in enumerate("defg")]
    (tmp_path / "values.csv").write_text("\n".join(lines))
    data = open_data(tmp_path / "values.csv", targets=("age", "size"))
    text = remaining_to_csv(data, frozenset([str(tmp_path / "b.png")]), tmp_path)
    (tmp_path / "rest.csv").write_text(text)
    remaining = open_data(tmp_path / "rest.csv")
    assert remaining.targets == ("age", "size") and text.splitlines()[0] == "path,age,size,split"

    def list_targets(opened):
        splits = opened.splits.items()
        return {
            split.name(row): (split_name, *split.labels[row])
            for split_name, split in splits
            for row in range(len(split))
        }

    before = {name: row for name, row in list_targets(data).items() if not name.endswith("b.png") and row[0] != "val"}
    after = list_targets(remaining)
    assert all(after[name][1:] == pytest.approx(row[1:], abs=0, nan_ok=True) for name, row in before.items())
    assert len(after) == 6


def test_the_command_writes_both_files_and_prints_the_references(tmp_path, monkeypatch, capsys):
    for label in ("ant", "bee"):
        for seed in range(3):
            save_image(draw_photo(seed + 50 * (label == "bee")), tmp_path / "photos" / label / f"{seed}.png")
    save_image(draw_photo(1), tmp_path / "tests" / "test" / "x" / "1.png")
    save_image(compress_jpeg(ImageOps.mirror(draw_photo(52)), 60), tmp_path / "tests" / "test" / "y" / "2.jpg")
    for name in "xy":
        save_image(draw_photo(0), tmp_path / "tests" / "train" / name / "0.png")
    monkeypatch.chdir(tmp_path)
    options = Options(data="photos", out="copies.csv", against=("tests",), apply_to="rest.csv", workers=0)
    result = run(options, Console())
    assert {copy["path"]: (copy["duplicate_of"], copy["reason"]) for copy in result["duplicates"]} == {
        "photos/ant/1.png": ("tests/test/x/1.png", "bytes"),
        "photos/bee/2.png": ("tests/test/y/2.jpg", "near"),
    }
    assert json.loads(json.dumps(result)) == result
    assert "tests: test, 2 images" in capsys.readouterr().err
    assert read_exclusion_list(tmp_path / "copies.csv") == {"photos/ant/1.png", "photos/bee/2.png"}
    assert len(open_data(tmp_path / "rest.csv").full_train_split) == 4


def test_model_features_find_duplicates_in_unlabelled_folders(tmp_path, monkeypatch):
    for seed in range(5):
        save_image(draw_photo(seed), tmp_path / "photos" / f"{seed}.png")
        save_image(crop_area(draw_photo(seed), 0.7, 0.5, 0.5), tmp_path / "tests" / f"{seed}.png")
    model = vitreous.create("ViT-32x2/8", image_size=32, num_classes=2)
    Bundle(model, Classification(("a", "b")), ImagePreprocess((32, 32))).save(tmp_path / "bundle")
    feature_shapes = []
    search = finder.search_by_features
    monkeypatch.setattr(
        finder,
        "search_by_features",
        lambda features, *arguments: feature_shapes.append(features.shape) or search(features, *arguments),
    )
    monkeypatch.chdir(tmp_path)
    document = run(
        Options(data="photos", out="list.csv", against=("tests",), model="bundle", device="cpu", workers=0), Console()
    )
    assert [copy["duplicate_of"] for copy in document["duplicates"]] == [f"tests/{seed}.png" for seed in range(5)]
    assert feature_shapes == [(10, 32)]
    with pytest.raises(UsageError, match="no classes"):
        run(Options(data="photos", out="list.csv", within=True, apply_to="x.csv"), Console())
