"""`predict` of detectors: detected objects and their files."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tests.inference.blobs import CLASSES, make_blob_predictor, make_scene, write_scenes
from vitreous.data.annotations.boxes_drawing import draw_objects, is_light, render_instance_map
from vitreous.data.annotations.shapes import mask_to_rle, rle_to_mask
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError
from vitreous.inference.object_files import format_yolo_lines
from vitreous.inference.objects import ImageObjects
from vitreous.tasks.detections import Detections

RED_BOX, GREEN_BOX = (8, 8, 24, 32), (40, 20, 56, 44)


@pytest.fixture
def blob_predictor(monkeypatch):
    """Make `vitreous predict` load this detector, regardless of its arguments."""
    predictor = make_blob_predictor()
    monkeypatch.setattr("vitreous.inference.predict.load", lambda *words, **options: predictor)
    return predictor


def run_predict(*words):
    """Run `vitreous predict run ...`; returns the exit code."""
    from vitreous.cli.main import main

    with pytest.raises(SystemExit) as stop:
        main(["predict", "run", *map(str, words), "--json"])
    return stop.value.code


def test_detections_have_boxes_names_scores_and_masks(tmp_path):
    detections = make_blob_predictor().detect(make_scene())
    assert (
        detections.names == CLASSES
        and detections.boxes.tolist() == [list(RED_BOX), list(GREEN_BOX)]
        and len(detections) == 2
    )
    assert detections.scores.tolist() == pytest.approx([0.9, 0.6]) and detections.masks.shape == (2, 64, 64)
    expected = np.zeros((64, 64), bool)
    expected[8:32, 8:24] = True
    assert np.array_equal(detections.masks[0], expected)
    assert make_blob_predictor().detect(make_scene(), threshold=0.7).names == CLASSES[:1]
    assert make_blob_predictor(masks=False).detect(make_scene()).masks is None
    with pytest.raises(UsageError, match="keep_images=True"):
        detections.draw_overlay()
    assert make_blob_predictor().detect(make_scene((90, 70)), keep_images=True).draw_overlay().size == (90, 70)
    assert make_blob_predictor().predict(make_scene()).boxes.tolist() == [list(RED_BOX), list(GREEN_BOX)]
    assert make_blob_predictor().predict([make_scene()], threshold=0.7)[0].names == CLASSES[:1]
    with pytest.raises(UsageError, match=r"predict\(top=…\) is for image classifiers"):
        make_blob_predictor().predict(make_scene(), top=3)
    with pytest.raises(UsageError, match="is not a score"):
        make_blob_predictor().detect(make_scene(), threshold=2)
    (tmp_path / "a.png").write_bytes(b"none")
    with pytest.raises(DataError, match=r"a\.png"):
        make_blob_predictor().detect(tmp_path / "a.png")
    results = make_blob_predictor().detect([tmp_path / "a.png", make_scene()], bad_images="skip")
    assert "a.png" in results[0].error and len(results[0]) == 0 and results[0].masks is None and len(results[1]) == 2


def test_detection_at_native_size_and_by_tiles():
    large = make_scene((256, 128), (32, 32, 96, 96), None)
    assert make_blob_predictor().detect(large).boxes[0] == pytest.approx([32, 32, 96, 96], abs=4)
    small = make_scene((256, 128), (100, 40, 112, 52), None)
    assert len(make_blob_predictor().detect(small)) == 1  # 3 pixels in each direction at model size, 12 at native size
    exact = make_blob_predictor().detect(small, tiles=True)
    assert exact.boxes.tolist() == [[100, 40, 112, 52]] and exact.names == CLASSES[:1]
    assert exact.masks[0].sum() == 144


def test_json_and_csv_list_every_object(blob_predictor, tmp_path, capsys):
    images = write_scenes(tmp_path / "in")
    assert run_predict(images, "--csv", tmp_path / "rows.csv") == 0
    document = json.loads(capsys.readouterr().out)
    records = document["predictions"]
    assert [len(row["objects"]) for row in records] == [2, 2, 0] and records[2]["error"] is None
    first_object = records[0]["objects"][0]
    assert (first_object["label"], first_object["score"], first_object["left"], first_object["bottom"]) == (
        CLASSES[0],
        0.9,
        8.0,
        32.0,
    )
    mask = rle_to_mask(first_object["segmentation"]["counts"], tuple(first_object["segmentation"]["size"]))
    assert mask.sum() == 16 * 24
    table = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [(row["number"], row["label"], row["left"]) for row in table[:2]] == [
        ("1", CLASSES[0], "8.000"),
        ("2", "green", "40.000"),
    ]
    assert len(table) == 5 and table[4]["number"] == ""


@pytest.mark.parametrize("name", ["o.jsonl", "o.csv", "o.parquet", "o.json"])
def test_output_file_is_resumed(blob_predictor, tmp_path, monkeypatch, name):
    from vitreous.inference import objects

    images = write_scenes(tmp_path / "in", 6)
    assert run_predict(images, "--out", tmp_path / ("whole" + name)) == 0
    monkeypatch.setattr("vitreous.inference.object_files.ObjectRows.rows_per_chunk", 2)
    monkeypatch.setattr("vitreous.inference.object_files.CocoResults.rows_per_chunk", 2)
    iterate_objects, num_calls = objects.iterate_image_objects, blob_predictor.engine.asked

    def stopping(card, runtime, items, *rest, **more):
        for index, result in enumerate(iterate_objects(card, runtime, items, *rest, **more)):
            if index == 3:
                raise DataError("stopped")
            yield result

    monkeypatch.setattr(objects, "iterate_image_objects", stopping)
    assert run_predict(images, "--out", tmp_path / name) == 3
    monkeypatch.setattr(objects, "iterate_image_objects", iterate_objects)
    num_calls = blob_predictor.engine.asked
    assert run_predict(images, "--out", tmp_path / name) == 2
    assert run_predict(images, "--out", tmp_path / name, "--resume") == 0
    assert blob_predictor.engine.asked - num_calls <= 4
    if name.endswith("parquet"):
        parquet = pytest.importorskip("pyarrow.parquet")
        ours, uninterrupted = (parquet.read_table(tmp_path / (prefix + name)).to_pylist() for prefix in ("", "whole"))
        assert ours == uninterrupted and ours[0]["objects"][0]["segmentation"]["size"] == [64, 64]
    else:
        assert (tmp_path / name).read_bytes() == (tmp_path / ("whole" + name)).read_bytes()
    assert run_predict(images, "--out", tmp_path / name, "--threshold", 0.7, "--resume") == 2


def test_coco_results_are_readable_by_pycocotools(blob_predictor, tmp_path):
    coco = pytest.importorskip("pycocotools.coco").COCO
    images = write_scenes(tmp_path / "in")
    assert run_predict(images, "--out", tmp_path / "results.json") == 0
    listing = json.loads((tmp_path / "results.images.json").read_text())
    assert [(row["id"], row["file_name"], row["width"]) for row in listing["images"]] == [
        (n + 1, f"{n}.png", 64) for n in range(3)
    ]
    assert listing["categories"] == [{"id": 1, "name": CLASSES[0]}, {"id": 2, "name": "green"}]
    truth = coco(str(tmp_path / "results.images.json"))
    results = truth.loadRes(str(tmp_path / "results.json"))
    rows = results.loadAnns(results.getAnnIds(imgIds=[2]))
    assert [row["bbox"] for row in rows] == [[9, 8, 15, 24], [40, 20, 16, 24]] and rows[1]["category_id"] == 2
    assert results.annToMask(rows[1]).sum() == rows[1]["area"] == 16 * 24


def test_coco_results_use_ids_from_a_file(blob_predictor, tmp_path):
    images = write_scenes(tmp_path / "in")
    document = {
        "images": [{"id": 70 + n, "file_name": f"in/{n}.png"} for n in range(3)],
        "categories": [{"id": 9, "name": "green"}, {"id": 4, "name": CLASSES[0]}],
        "annotations": [],
    }
    (tmp_path / "truth.json").write_text(json.dumps(document))
    assert (
        run_predict(images, "--out", tmp_path / "r.json", "--coco-ids", tmp_path / "truth.json", "--threshold", 0.5)
        == 0
    )
    results = json.loads((tmp_path / "r.json").read_text())
    assert [(row["image_id"], row["category_id"]) for row in results] == [(70, 4), (70, 9), (71, 4), (71, 9)]
    document["images"].pop()
    (tmp_path / "truth.json").write_text(json.dumps(document))
    assert run_predict(images, "--out", tmp_path / "s.json", "--coco-ids", tmp_path / "truth.json") == 3
    document["categories"].pop()
    (tmp_path / "truth.json").write_text(json.dumps(document))
    assert run_predict(images, "--out", tmp_path / "t.json", "--coco-ids", tmp_path / "truth.json") == 3
    (tmp_path / "truth.json").write_text("[]")
    assert run_predict(images, "--out", tmp_path / "t.json", "--coco-ids", tmp_path / "truth.json") == 3


def test_yolo_files_are_readable_as_labels(blob_predictor, tmp_path):
    images = write_scenes(tmp_path / "data" / "images")
    labels = tmp_path / "data" / "labels"
    assert run_predict(images, "--out", labels, "--to", "yolo", "--overlay", tmp_path / "over") == 0
    split = open_data(str(tmp_path / "data")).split("train")
    targets = {split.path(sample).rpartition("/")[2]: split.target(sample) for sample in range(len(split))}
    assert targets["0.png"].boxes == pytest.approx(np.array([RED_BOX, GREEN_BOX]), abs=1e-4)
    assert np.array_equal(targets["0.png"].masks(), make_blob_predictor().detect(images / "0.png").masks)
    assert (labels / "2.txt").read_text() == ""
    rows = [json.loads(line) for line in (labels / "objects.jsonl").open()]
    assert rows[0]["file"] == str(labels / "0.txt") and "segmentation" not in rows[0]["objects"][0]
    assert Image.open(rows[0]["overlay"]).size == (64, 64)


def test_instance_maps_contain_object_numbers(blob_predictor, tmp_path):
    images = write_scenes(tmp_path / "in")
    assert run_predict(images, "--out", tmp_path / "out", "--overlay", tmp_path / "over") == 0
    instance_map = np.asarray(Image.open(tmp_path / "out" / "0.png"))
    assert (instance_map == 1).sum() == 16 * 24 and instance_map[21, 41] == 2 and instance_map[0, 0] == 0
    assert sorted(path.name for path in (tmp_path / "over").iterdir()) == ["0.png", "1.png", "2.png"]
    expected = make_blob_predictor().detect(images / "0.png", keep_images=True).draw_overlay()
    assert np.array_equal(np.asarray(Image.open(tmp_path / "over" / "0.png")), np.asarray(expected))
    (tmp_path / "out" / "1.png").unlink()
    lines = (tmp_path / "out" / "objects.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out" / "objects.jsonl").write_text(lines[0])
    job = tmp_path / "out" / "objects.jsonl.job.json"
    job.write_text(json.dumps(json.loads(job.read_text()) | {"finished": False}))
    assert run_predict(images, "--out", tmp_path / "out", "--overlay", tmp_path / "over", "--resume") == 0
    assert (tmp_path / "out" / "objects.jsonl").read_text() == "".join(lines) and (tmp_path / "out" / "1.png").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top", 3], "--top is for image classifiers"),
        (["--to", "coco"], "--to coco needs --out"),
        (["--to", "yolo", "--out", "a.json"], "--to yolo writes a folder"),
        (["--to", "coco", "--out", "a.csv"], "--to coco writes a .json file, and --out is a.csv"),
        (["--out", "a.npz"], "--to table writes a .jsonl or .csv or .parquet file, and --out is a.npz"),
        (["--out", "o", "--overlay", "o"], "--overlay and --out are the same folder"),
        (["--out", "a.csv", "--coco-ids", "x.json"], "--coco-ids applies to COCO results only"),
        (["--threshold", 1.5], "below 1"),
    ],
)
def test_inapplicable_options_are_rejected(blob_predictor, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert run_predict(write_scenes(tmp_path / "in"), *words) == 2 and message in capsys.readouterr().err


def test_nothing_is_overwritten(blob_predictor, tmp_path, capsys):
    images = write_scenes(tmp_path / "in")
    (tmp_path / "truth.json").write_text("{}")
    assert run_predict(images, "--out", tmp_path / "truth.json") == 2 and (tmp_path / "truth.json").read_text() == "{}"
    assert (
        run_predict(images, "--out", tmp_path / "in", "--to", "yolo") == 2
        and "which are not overwritten" in capsys.readouterr().err
    )


def test_box_detector_rejects_instance_map_output(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("vitreous.inference.predict.load", lambda *words, **options: make_blob_predictor(masks=False))
    assert (
        run_predict(write_scenes(tmp_path / "in"), "--out", tmp_path / "out") == 2
        and "--to yolo" in capsys.readouterr().err
    )


def test_unreadable_images_are_reported_and_skipped(blob_predictor, tmp_path):
    images = write_scenes(tmp_path / "in")
    (images / "0.png").write_bytes(b"none")
    for name in ("o.jsonl", "o.json", "o.csv", "masks"):
        assert run_predict(images, "--out", tmp_path / name) == 3
    results = json.loads((tmp_path / "o.json").read_text())
    assert [row["image_id"] for row in results] == [2, 2]
    assert run_predict(images) == 3 and run_predict(images, "--bad-images", "stop") == 3


def test_drawing_shows_boxes_labels_and_masks():
    grey = Image.new("RGB", (200, 160), (120, 120, 120))  # large enough for the labels
    mask = np.zeros((160, 200), bool)
    mask[60:100, 60:140] = True
    boxes = np.array([[50, 50, 150, 110], [0, 0, 200, 160]], np.float32)
    drawn = draw_objects(grey, boxes, [(250, 220, 60), (20, 20, 160)], ["cat 90%", "dog 50%"], [mask_to_rle(mask)] * 2)
    pixels = np.asarray(drawn)
    expected = 120 * 0.55 + np.array([20, 20, 160]) * 0.45
    both = np.rint(np.rint(expected) * 0.55 + np.array([250, 220, 60]) * 0.45)
    assert pixels[80, 100].tolist() == both.tolist() and pixels[130, 100].tolist() == [120, 120, 120]
    assert pixels[109, 100].tolist() == [250, 220, 60]
    assert is_light((250, 220, 60)) and not is_light((20, 20, 160))
    tiny = np.asarray(draw_objects(Image.new("RGB", (20, 20)), boxes[1:] / 10, [(255, 0, 0)], ["dog"]))
    assert tiny[0, :20].tolist() == [[255, 0, 0]] * 20 and tiny[5, 5].tolist() == [0, 0, 0]
    many = render_instance_map([mask_to_rle(mask)] * 300, np.repeat(boxes, 150, 0), mask.shape)
    assert np.asarray(many).max() == 1 and many.mode.startswith("I;16")


def test_results_contain_all_objects_and_overlays_only_those_above_the_threshold(blob_predictor, tmp_path, monkeypatch):
    monkeypatch.setattr("vitreous.inference.objects.DEFAULT_THRESHOLD", 0.7)
    images = write_scenes(tmp_path / "in")
    assert run_predict(images, "--out", tmp_path / "r.json", "--overlay", tmp_path / "over") == 0
    assert len(json.loads((tmp_path / "r.json").read_text())) == 4
    expected = make_blob_predictor().detect(images / "0.png", threshold=0.7, keep_images=True)
    assert len(expected) == 1
    drawn = np.asarray(Image.open(tmp_path / "over" / "0.png"))
    assert np.array_equal(drawn, np.asarray(expected.draw_overlay()))


def test_yolo_lines_are_mask_polygons_or_boxes():
    mask = np.zeros((8, 10), bool)
    mask[2:4, 5:9] = True
    runs = (mask_to_rle(mask), [80])
    boxes = np.array([[5, 2, 9, 4.4], [1, 1, 2, 3]], np.float32)
    detections = Detections((8, 10), boxes, np.array([1, 0]), np.array([0.9, 0.8], np.float32), masks=runs)
    lines = format_yolo_lines(ImageObjects("a.png", ("a", "b"), detections))
    words = [line.split() for line in lines]
    corners = [np.array(row[1:], float).reshape(-1, 2) * [10, 8] for row in words]
    assert [row[0] for row in words] == ["1", "0"]
    assert sorted(corners[0].round(6).tolist()) == [[5, 2], [5, 4], [9, 2], [9, 4]]
    assert corners[1] == pytest.approx(np.array([[1, 1], [2, 1], [2, 3], [1, 3]]))  # no pixel: its box
    alone = format_yolo_lines(ImageObjects("a.png", ("a", "b"), replace(detections, masks=None)))
    assert alone[1] == "0 0.15 0.25 0.1 0.25\n" and len(alone[0].split()) == 5
