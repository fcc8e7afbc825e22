"""Masks and boxes on multi-band images: `data check` and `train` agree, and no-data pixels are ignored."""

import json
import sys

import numpy as np
import pytest
from PIL import Image

import vitreous
from tests.conftest import run_cli
from tests.data.band_files import GEOREFERENCE, IMAGE_SIDE, make_bands, mark_as_lzw, write_scenes, write_tiff
from vitreous.apps.curation.check import check_dataset
from vitreous.data.annotations.painted import paint_class_maps
from vitreous.data.annotations.target import IGNORE_INDEX
from vitreous.data.decoding.decode import read_upright_size
from vitreous.data.decoding.tiff import read_georeference, read_nodata_tag, read_tiff_tags
from vitreous.data.modalities.bands import BandPreprocess
from vitreous.data.sources import open_data
from vitreous.data.split import ArraySplit
from vitreous.data.statistics import measure_channel_statistics
from vitreous.inference.card import Card
from vitreous.inference.predict import Predictor
from vitreous.tasks.segmentation import Segmentation

ONE_STEP_ARGUMENTS = (
    "--model",
    "ViT-32x2/8",
    "--image-size",
    "32",
    "--steps",
    "1",
    "--workers",
    "0",
    "--device",
    "cpu",
)
YOLO_BOX = "0 0.5 0.5 0.4 0.4\n"


def drop_data(number, bands):
    """Set one column of image 0 and all of image 2 to no data."""
    if number == 0:
        bands[:, :, 5] = np.nan
    if number == 2:
        bands[:] = np.nan


def write_yolo(home, save):
    """Write YOLO labels with one box for each of eight images; `save(path_without_suffix, bands)` writes an image."""
    for folder in ("images", "labels"):
        (home / folder).mkdir(parents=True)
    (home / "data.yaml").write_text("path: .\ntrain: images\nnames: [fire]\n")
    for number in range(8):
        save(home / "images" / str(number), make_bands(5, "uint16", number))
        (home / "labels" / f"{number}.txt").write_text(YOLO_BOX)
    return home


def write_coco(home, save):
    """Write the boxes of `write_yolo` in COCO format."""
    write_yolo(home, save)
    (home / "images").rename(home / "train")
    images = [
        {"id": n, "file_name": path.name, "width": IMAGE_SIDE, "height": IMAGE_SIDE}
        for n, path in enumerate(sorted((home / "train").iterdir()))
    ]
    boxes = [
        {"id": n, "image_id": n, "category_id": 1, "bbox": [10, 10, 12, 12], "area": 144, "iscrowd": 0}
        for n in range(8)
    ]
    document = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "fire"}]}
    (home / "train" / "_annotations.coco.json").write_text(json.dumps(document))
    return home


BAND_WRITERS = {
    "npy": lambda place, bands: np.save(place.with_suffix(".npy"), bands.astype(np.float32)),
    "interleaved": lambda place, bands: write_tiff(place.with_suffix(".tif"), bands),
    "planar": lambda place, bands: write_tiff(place.with_suffix(".tif"), bands, planarconfig="separate", tile=(16, 16)),
}


@pytest.mark.parametrize("file_format", BAND_WRITERS)
@pytest.mark.parametrize("write", [write_yolo, write_coco])
def test_detection_data_on_bands_are_accepted(tmp_path, file_format, write):
    home = write(tmp_path / "data", BAND_WRITERS[file_format])
    document, _ = check_dataset(home, workers=0)
    assert document["passed"] and document["annotations"]["objects"] == {"fire": 8}
    assert document["channels"] == {"count": 5, "dtype": "float32" if file_format == "npy" else "uint16"}
    assert not document["annotations"]["unreadable"] and document["target_error"] is None
    split = open_data(str(home)).split("train")
    assert all(
        split.target(sample).size == (IMAGE_SIDE, IMAGE_SIDE) and len(split.target(sample)) == 1
        for sample in range(len(split))
    )
    if (file_format, write) in (("interleaved", write_yolo), ("npy", write_coco)):
        result = run_cli("train", str(home), "--recipe", "detect", *ONE_STEP_ARGUMENTS, "--out", str(tmp_path / "run"))
        assert result.returncode == 0, result.stderr


def test_pixels_without_data_are_void_for_training_and_check(tmp_path):
    home = write_scenes(tmp_path / "data", 12, drop_data)
    (home / "classes.txt").write_text("land\nfire\n")
    document, _ = check_dataset(home, workers=0)
    assert document["passed"] and document["annotations"]["ignored_pixels"] == IMAGE_SIDE + IMAGE_SIDE * IMAGE_SIDE
    assert [row["path"].rsplit("/")[-1] for row in document["without_valid_pixels"]] == ["2.tif"]
    text = f"1 image without valid pixels; the first: {home / 'images' / '2.tif'}"
    assert [finding["message"] for finding in document["findings"] if finding["code"] == "without_valid_pixels"] == [
        text
    ]
    assert "sixteen_bit" not in {finding["code"] for finding in document["findings"]}
    assert sum(split["unreadable"] for split in document["splits"].values()) == 0 == len(document["unreadable"])
    run = tmp_path / "run"
    result = run_cli("train", str(home), "--recipe", "segment", *ONE_STEP_ARGUMENTS, "--out", str(run))
    assert result.returncode == 0, result.stderr
    first_image = next(
        name
        for name, split in open_data(str(home)).splits.items()
        for n in range(len(split))
        if "2.tif" in split.name(n)
    )
    assert first_image != "train" or "training images have no pixel with data and are left out" in result.stderr
    assert run_cli("evaluate", str(run)).returncode == 0
    out = tmp_path / "out"
    result = run_cli("predict", str(run), str(home / "images"), "--out", str(out))
    assert result.returncode == 3  # image 2 contains no data
    lines = [json.loads(line) for line in (out / "maps.jsonl").open()]
    assert [row["error"] is None for row in lines] == [not row["path"].endswith("/2.tif") for row in lines]
    assert np.unique(np.asarray(Image.open(out / "0.tif"))[:, 5]).tolist() == [255]
    assert read_georeference(out / "0.tif") == GEOREFERENCE
    assert read_upright_size((out / "0.tif").read_bytes(), "0.tif") == (IMAGE_SIDE, IMAGE_SIDE)


def test_painted_class_maps_ignore_pixels_without_data(tmp_path):
    home = write_coco(tmp_path / "data", lambda path, bands: drop_pixels(path, bands))
    path = home / "train" / "_annotations.coco.json"
    document = json.loads(path.read_text())
    for entry in document["annotations"]:
        entry["segmentation"] = [[10, 10, 22, 10, 22, 22, 10, 22]]
    path.write_text(json.dumps(document))
    split = paint_class_maps(open_data(str(home))).split("train")
    classes = split.target(0).class_map()
    assert (classes[:, 5] == IGNORE_INDEX).all() and (np.delete(classes, 5, 1) != IGNORE_INDEX).all()
    assert (classes[10:22, 10:22] == 1).all()


def drop_pixels(path, bands):
    """Write bands as .npy, with a NaN column in one band."""
    bands = bands.astype(np.float32)
    bands[3, :, 5] = np.nan
    np.save(path.with_suffix(".npy"), bands)


def test_statistics_leave_pixels_without_data_out():
    pixels = np.random.default_rng(0).normal(3, 2, (6, 16, 16, 5)).astype(np.float32)
    broken = pixels.copy()
    broken[:, :, 11:] = np.nan
    preprocess = BandPreprocess((16, 16), 5, numbers="float32")
    mean, std = measure_channel_statistics(ArraySplit(broken, np.zeros(6, np.int64)), preprocess)
    valid_pixels = pixels[:, :, :11].reshape(-1, 5).astype(np.float64)
    assert np.allclose(mean, valid_pixels.mean(0), rtol=1e-12) and np.allclose(std, valid_pixels.std(0), rtol=1e-12)


def test_check_and_train_report_a_missing_imagecodecs(tmp_path, monkeypatch):
    home = write_scenes(tmp_path / "data", 4, dtype="uint16")
    for path in (home / "images").iterdir():
        mark_as_lzw(path)
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    document, _ = check_dataset(home, workers=0)
    needed = "a TIFF with LZW compression needs imagecodecs (pip install 'vitreous[geotiff]')"
    assert not document["passed"] and {row["reason"] for row in document["unreadable"]} == {needed}
    result = run_cli("train", str(home), "--recipe", "segment", *ONE_STEP_ARGUMENTS, "--out", str(tmp_path / "run"))
    assert result.returncode == 3 and needed in result.stderr and "Traceback" not in result.stderr


class BrightestBandEngine:
    """A segmentation engine that predicts class 1 where the last band is above its mean."""

    precision = "fp32"

    def logits(self, pixels):
        return np.stack([np.zeros(pixels[:, 0].shape), pixels[:, -1] - 0.5], 1).astype(np.float32)

    objects = features = logits


def make_band_predictor(classes=("land", "fire")):
    preprocess = BandPreprocess((IMAGE_SIDE, IMAGE_SIDE), 5, (0.25,) * 5, (0.1,) * 5, numbers="float32")
    return Predictor(Card("Brightest", "1", preprocess, task=Segmentation(classes)), BrightestBandEngine())


def test_predictions_keep_the_georeference_of_their_image(tmp_path):
    home = write_scenes(tmp_path / "data", 2, drop_data, compression="zlib", tile=(16, 16))
    first, second = make_band_predictor().segment([home / "images" / "0.tif", home / "images" / "1.tif"])
    assert first.header == second.header == GEOREFERENCE
    assert (first.classes[:, 5] == IGNORE_INDEX).all() and (np.delete(first.classes, 5, 1) != IGNORE_INDEX).all()
    assert sum(first.class_shares.values()) == pytest.approx(1) and (second.classes != IGNORE_INDEX).all()
    from vitreous.inference.class_maps import MapFiles

    for classes, nodata in ((("land", "fire"), 255), (tuple(map(str, range(300))), 65535)):
        out = tmp_path / str(nodata)
        files = MapFiles(str(out), str(home / "images"), classes, str(out / "over"))
        class_maps = make_band_predictor(classes).segment([home / "images" / "0.tif"], keep_images=True)
        (written,) = files.write(class_maps)
        raw = (out / "0.tif").read_bytes()
        assert written.file == str(out / "0.tif") and written.overlay == str(out / "over" / "0.png")
        assert read_georeference(raw) == GEOREFERENCE and read_nodata_tag(read_tiff_tags(raw)) == nodata
        stored = np.asarray(Image.open(out / "0.tif"))
        assert np.array_equal(stored, np.where(first.classes == IGNORE_INDEX, nodata, first.classes))


def test_a_band_count_mismatch_is_reported_with_the_band_counts(tmp_path):
    model = tmp_path / "model"
    vitreous.save(vitreous.create("ViT-32x2/8", IMAGE_SIDE, 2), model)
    write_tiff(tmp_path / "five.tif", make_bands(5, "uint16"))
    Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE)).save(tmp_path / "photo.png")
    result = run_cli("predict", str(model), str(tmp_path / "five.tif"))
    assert result.returncode == 3
    assert "5 bands of uint16, but the model expects 3 of uint8 (RGB)" in result.stdout
    prediction = make_band_predictor().segment(tmp_path / "photo.png", bad_images="skip")
    assert prediction.error == f"{tmp_path / 'photo.png'}: 3 bands of uint8, but the model expects 5 bands of float32"
