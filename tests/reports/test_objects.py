"""`evaluate` of object detectors."""

import json

import numpy as np
import pytest
from PIL import Image

import vitreous
from tests.data.annotations.scenery import write_objects
from tests.evaluation.detection_scenes import COCO_METRIC_NAMES, PaintedEngine, evaluate_with_pycocotools
from tests.objectives.test_detection import TRAIN_OPTIONS as DETECTING
from tests.tasks.test_detections import detect_painted_rectangles, draw_rectangles
from vitreous.cli.main import main
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.run_data import open_run_data
from vitreous.errors import DataError, UsageError
from vitreous.evaluation.coco import make_detection_function
from vitreous.inference.open_model import open_bundle, read_task_type
from vitreous.models.configs.detector import DetectorConfig
from vitreous.models.configs.vit import ViTConfig
from vitreous.models.detector import Detector
from vitreous.progress import NullListener
from vitreous.reports import dense as scenes
from vitreous.reports.answers import EvaluationSettings
from vitreous.reports.compare import compare_two_runs
from vitreous.reports.evaluate import evaluate
from vitreous.reports.pages import dense as page
from vitreous.tasks.detection import Detection
from vitreous.tasks.detections import detect_objects
from vitreous.weights.bundle import Bundle

pytestmark = pytest.mark.drawn

CLASSES = ("dark", "light")
IMAGE_SIZE = (64, 96)


def write_coco(home, count, names=CLASSES, masks=True, numbers=(1, 2)):
    """Write images of painted rectangles with a COCO file.

    In every second image, one painted rectangle is not annotated, and one annotation is displaced.
    """
    (home / "images").mkdir(parents=True)
    images, rows = [], []
    for number in range(count):
        objects = [(4, 6, 24 + 2 * number, 40, 100), (40, 10, 80, 50, 200), (4, 46, 30, 60, 200)]
        painted = list(objects)
        if number % 2:
            painted[0] = (4 + 4 + number, 6, 28 + 2 * number, 40, 100)
            painted.append((84, 2, 94, 20, 100))
        Image.fromarray(draw_rectangles(IMAGE_SIZE, *painted)[0]).save(home / "images" / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "height": IMAGE_SIZE[0], "width": IMAGE_SIZE[1]})
        for left, top, right, bottom, value in objects:
            annotation = {"id": len(rows) + 1, "image_id": number, "category_id": numbers[value // 200], "iscrowd": 0}
            annotation |= {"bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top)}
            if masks:
                annotation["segmentation"] = [[left, top, right, top, right, bottom, left, bottom]]
            rows.append(annotation)
    categories = [{"id": number, "name": name} for number, name in zip(numbers, names, strict=True)]
    document = {"images": images, "annotations": rows, "categories": categories}
    (home / "truth.json").write_text(json.dumps(document))
    return home / "truth.json"


@pytest.fixture(scope="module")
def detector_bundles(tmp_path_factory):
    """Return random detectors, one with boxes and one with masks."""
    home = tmp_path_factory.mktemp("bundles")
    for masks in (False, True):
        backbone = ViTConfig(image=(32, 32), patch=(8, 8), channels=1, width=32, depth=2, heads=2, classes=0)
        config = DetectorConfig(
            backbone=backbone, classes=2, masks=masks, heads="light", width=16, hidden=16, proposals=20, detections=10
        )
        preprocess = ImagePreprocess((32, 48), 1, (0.25,), (0.5,))
        Bundle(Detector(config), Detection(CLASSES, masks), preprocess).save(home / ("masks" if masks else "boxes"))
    return home


@pytest.fixture
def painted_engine(monkeypatch):
    """Replace the opened models by engines that find the painted rectangles."""

    def make_painted_engine(model, preprocess, *options, **keywords):
        return PaintedEngine(
            lambda pixels: detect_painted_rectangles(np.where(pixels > 150, 200, np.where(pixels > 50, 100, 0))),
            masks=model.config.masks,
        )

    monkeypatch.setattr(scenes, "build_evaluation_engine", make_painted_engine)
    monkeypatch.setattr(page, "make_engine", make_painted_engine)


def test_metrics_match_pycocotools(detector_bundles, painted_engine, tmp_path):
    truth, model = write_coco(tmp_path / "data", 6), open_bundle(detector_bundles / "masks", dense=True).model
    document = evaluate(detector_bundles / "masks", truth, workers=0, report=tmp_path / "page.html")
    split, engine = (
        open_run_data(detector_bundles / "masks", truth, None, labelled=False)[1].split("test"),
        scenes.build_evaluation_engine(model, None),
    )
    pairs = []
    for sample in range(6):
        pixels = np.asarray(Image.open(truth.parent / "images" / f"{sample}.png"))[None]
        pairs.append((detect_objects(make_detection_function(engine), pixels, engine.preprocess), split.target(sample)))
    for start, iou_type in (("", "segm"), ("box_", "bbox")):
        expected, _ = evaluate_with_pycocotools(pairs, iou_type, 2)
        figures = [document["test"][start + name] for name in COCO_METRIC_NAMES]
        assert [-1 if value is None else value for value in figures] == pytest.approx(expected, abs=1e-9)
    figures, objects = document["test"], document["objects"]
    assert figures["images"] == 6 and figures["primary"] == "ap" and 0.3 < figures["ap50"] < 1
    assert figures["interval"]["ap50"][0] <= figures["ap50"] <= figures["interval"]["ap50"][1]
    (evaluation,) = document["evaluations"]
    assert (
        evaluation["protocol"] == "coco" and next(iter(evaluation["metrics"])) == "ap" and evaluation["split"] == "test"
    )
    assert objects["errors"]["nothing"] > 0 and objects["errors"]["missed"] == 0
    assert sum(map(sum, objects["confusion"])) >= 18 and document["confusion"] is None
    assert [row["objects"] for row in document["per_class"]] == [6, 12]
    html = (tmp_path / "page.html").read_text()
    assert html.count('alt="ground truth') == html.count('alt="predictions') == 3
    assert (
        "box AP50" in html
        and "most confused with" in html
        and 'aria-label="AP50 points lost by error type boxes"' in html
    )


def test_boxes_are_evaluated_if_the_model_or_the_data_have_no_masks(detector_bundles, painted_engine, tmp_path):
    notes = []

    class NoteListener(NullListener):
        def note(self, text):
            notes.append(text)

    options = {"workers": 0, "report": tmp_path / "page.html", "listener": NoteListener()}
    datasets = [write_coco(tmp_path / str(masks), 4, masks=masks) for masks in (True, False)]
    evaluations = [evaluate(detector_bundles / "boxes", truth, **options)["test"] for truth in datasets]
    assert (
        evaluations[0]["ap"] == evaluations[1]["ap"]
        and "box_ap" not in evaluations[0]
        and not any("boxes" in note for note in notes)
    )
    with_masks = [evaluate(detector_bundles / "masks", truth, **options)["test"] for truth in datasets]
    assert with_masks[0]["box_ap"] == with_masks[1]["ap"] == evaluations[0]["ap"]
    assert any("boxes but no masks" in note for note in notes)


def test_classes_are_matched_by_name(detector_bundles, painted_engine, tmp_path):
    options = {"workers": 0, "report": tmp_path / "page.html"}
    first = evaluate(detector_bundles / "boxes", write_coco(tmp_path / "a", 4), **options)
    renumbered = evaluate(detector_bundles / "boxes", write_coco(tmp_path / "b", 4, numbers=(9, 3)), **options)
    assert first["test"] == renumbered["test"] and renumbered["classes"] == list(CLASSES)
    with pytest.raises(DataError, match="has no classes named bright"):
        evaluate(detector_bundles / "boxes", write_coco(tmp_path / "c", 4, names=("dark", "bright")), **options)
    with pytest.raises(DataError, match="has no boxes, masks or class maps"):
        evaluate(detector_bundles / "boxes", "digits", **options)


def test_objects_of_unreadable_images_count_as_missed(detector_bundles, painted_engine, tmp_path):
    truth, options = write_coco(tmp_path / "data", 4), {"workers": 0, "report": tmp_path / "page.html"}
    complete = evaluate(detector_bundles / "boxes", truth, **options)
    damaged = truth.parent / "images" / "2.png"
    damaged.write_bytes(damaged.read_bytes()[:120])
    with pytest.raises(DataError, match=r"2\.png"):
        evaluate(detector_bundles / "boxes", truth, **options)
    document = evaluate(detector_bundles / "boxes", truth, bad_images="skip", **options)
    assert document["test"]["unreadable"] == 1 and document["test"]["ar100"] < complete["test"]["ar100"]


def test_federated_data_have_metrics_by_class_frequency(detector_bundles, painted_engine, tmp_path):
    truth, options = write_coco(tmp_path / "data", 4), {"workers": 0, "report": tmp_path / "page.html"}
    without_frequencies = evaluate(detector_bundles / "boxes", truth, **options)["test"]
    document = json.loads(truth.read_text())
    for row, letter in zip(document["categories"], "rf", strict=True):
        row["frequency"] = letter
    for row in document["images"]:
        row |= {"neg_category_ids": [], "not_exhaustive_category_ids": [1]}
    truth.write_text(json.dumps(document))
    figures = evaluate(detector_bundles / "boxes", truth, **options)["test"]
    assert figures["ap"] == pytest.approx((figures["ap_rare"] + figures["ap_frequent"]) / 2)
    assert figures["ap_common"] is None
    assert figures["ap50"] > without_frequencies["ap50"]  # unannotated rectangles are not false positives


def test_large_images_are_evaluated_in_tiles(detector_bundles, painted_engine, tmp_path):
    options = {"workers": 0, "report": tmp_path / "page.html"}
    document = evaluate(detector_bundles / "boxes", write_coco(tmp_path / "data", 3), tiles=True, **options)
    assert document["objects"]["tiles"] and document["test"]["ap_large"] is None
    # at full resolution, which a downscaled image does not have
    assert document["test"]["ap_medium"] == pytest.approx(1)
    vitreous.save(vitreous.create("ViT-32x2/8", 32, 2), tmp_path / "images")
    with pytest.raises(UsageError, match="tiles=True is for object detection"):
        evaluate(tmp_path / "images", "digits", tiles=True)


def test_two_models_are_compared_on_the_same_images(detector_bundles, painted_engine, tmp_path):
    truth = write_coco(tmp_path / "data", 5)
    document = compare_two_runs(
        detector_bundles / "boxes", detector_bundles / "masks", truth, evaluation_settings=EvaluationSettings(workers=0)
    )
    assert (
        document["difference"]["ap"] == 0 and document["interval"]["ap50"] == [0, 0] and "box_ap" not in document["a"]
    )
    assert not document["significant"] and "same AP" in document["verdict"]
    vitreous.save(vitreous.create("ViT-32x2/8", 32, 2), tmp_path / "images")
    with pytest.raises(UsageError, match=r"detects objects, .* does not"):
        compare_two_runs(tmp_path / "images", detector_bundles / "boxes", truth)


def test_classification_options_are_rejected(detector_bundles, tmp_path):
    assert read_task_type(detector_bundles / "boxes") is Detection
    with pytest.raises(UsageError, match=r"abstain is for image classification, and .* detects objects"):
        evaluate(detector_bundles / "boxes", write_coco(tmp_path / "data", 2), abstain=0.5)


def test_the_command_prints_metrics_and_classes(detector_bundles, painted_engine, tmp_path, capsys):
    truth = write_coco(tmp_path / "data", 4)
    arguments = [
        "evaluate",
        str(detector_bundles / "masks"),
        str(truth),
        "--workers",
        "0",
        "--report",
        str(tmp_path / "page.html"),
    ]
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    text = capsys.readouterr().out
    assert "AP50" in text and "box AP" in text and "AP50 points lost per error type: " in text and "background" in text
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out)["evaluations"][0]["protocol"] == "coco"


def test_evaluate_matches_the_metrics_of_the_run(tmp_path):
    for split, count in (("train", 6), ("val", 3)):
        write_objects(tmp_path / "data" / split, count)
    summary = vitreous.train(str(tmp_path / "data"), out=str(tmp_path / "run"), **DETECTING | {"steps": 25, "lr": 3e-3})
    document = evaluate(tmp_path / "run", split="val", workers=0)
    evaluated = {
        name: value for name, value in document["val"].items() if name in COCO_METRIC_NAMES or name.startswith("box_")
    }
    assert evaluated == {name: summary["val"][name] for name in evaluated} and len(evaluated) == 24
    assert (tmp_path / "run" / "report-val.html").is_file() and document["trained_on_images"] == 0
    line = json.loads((tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()[-1])
    assert line["protocol"] == "coco" and line["ap"] == evaluated["ap"]
