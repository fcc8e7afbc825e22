"""`evaluate` of semantic segmentation models."""

import json

import numpy as np
import pytest
from PIL import Image

import vitreous
from tests.data.annotations.scenery import write_maps, write_objects
from tests.objectives.test_segmentation import TRAIN_OPTIONS
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError
from vitreous.inference.open_model import read_task_type
from vitreous.reports.answers import EvaluationSettings
from vitreous.reports.compare import compare_two_runs
from vitreous.reports.evaluate import evaluate
from vitreous.tasks.classification import Classification
from vitreous.tasks.segmentation import Segmentation

pytestmark = pytest.mark.drawn

CLASSES = ["ground", "square", "disc"]


@pytest.fixture(scope="module")
def scenes_run(tmp_path_factory):
    """Return a one-step run on segmentation data with a test split."""
    home = tmp_path_factory.mktemp("scenes")
    for split, count in (("train", 6), ("val", 2), ("test", 3)):
        write_maps(home / "data" / split, count, "")
    (home / "data" / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    vitreous.train(str(home / "data"), out=str(home / "run"), steps=1, **TRAIN_OPTIONS)
    return home / "run"


def test_metrics_match_counts_pixel_by_pixel(scenes_run):
    document = evaluate(scenes_run, workers=0, precision="fp32")
    predictor, split = (
        vitreous.load(scenes_run, precision="fp32"),
        open_data(str(scenes_run.parent / "data")).split("test"),
    )
    matrix = np.zeros((3, 3), int)
    for sample in range(len(split)):
        predicted = predictor.segment(split.path(sample)).classes
        np.add.at(matrix, (split.target(sample).class_map(), predicted), 1)
    union = matrix.sum(0) + matrix.sum(1) - np.diag(matrix)
    assert document["split"] == "test" and document["classes"] == CLASSES
    assert document["test"]["miou"] == pytest.approx((np.diag(matrix) / union)[union > 0].mean())
    assert document["test"]["pixel_accuracy"] == pytest.approx(np.diag(matrix).sum() / matrix.sum())
    assert document["confusion"] == matrix.tolist()
    assert document["trained_on_images"] == 0 and not document["trained_on"]
    confused_pairs = matrix[0, 1] + matrix[1, 0], matrix[0, 2] + matrix[2, 0], matrix[1, 2] + matrix[2, 1]
    assert sum(pair["count"] for pair in document["most_confused"]["unordered"]) == sum(confused_pairs)


def test_evaluate_matches_the_metrics_of_the_run(scenes_run):
    before = json.loads((scenes_run / "summary.json").read_text())["test"]
    document = evaluate(scenes_run, workers=0)
    assert document["test"]["miou"] == before["miou"] and document["test"]["images"] == 3
    lines = [json.loads(line) for line in (scenes_run / "evaluations.jsonl").open()]
    assert lines[0]["miou"] == lines[-1]["miou"] == before["miou"] and lines[-1]["split"] == "test"
    page = (scenes_run / "report.html").read_text()
    assert page.count("ground truth:") == 3 and "mIoU" in page and "Dice" in page


def test_evaluating_on_training_images_is_reported(scenes_run):
    notes = []

    class NoteListener(vitreous.progress.NullListener):
        def note(self, text):
            notes.append(text)

    document = evaluate(scenes_run, split="train", workers=0, listener=NoteListener())
    assert document["trained_on"] and any("memorisation" in note for note in notes)


def test_boundaries_are_optional_and_panoptic_quality_needs_objects(scenes_run, tmp_path):
    figures = evaluate(scenes_run, workers=0, boundary=True)["test"]
    assert 0 <= figures["boundary_f"] <= 1 and "pq" not in figures and figures["interval"]["boundary_f"]
    assert "boundary F" in (scenes_run / "report.html").read_text()
    assert "boundary_f" not in evaluate(scenes_run, workers=0)["test"]
    vitreous.save(vitreous.create("ViT-32x2/8", 32, 2), tmp_path / "images")
    with pytest.raises(UsageError, match="boundary=True is for semantic segmentation"):
        evaluate(tmp_path / "images", "digits", boundary=True)
    write_objects(tmp_path / "cells", 6)
    vitreous.train(str(tmp_path / "cells"), out=str(tmp_path / "run"), steps=1, **TRAIN_OPTIONS)
    document = evaluate(tmp_path / "run", tmp_path / "cells", workers=0)
    assert document["classes"] == ["background", "object"]
    figures = document["test"]
    assert figures["pq"] == pytest.approx(sum(v for v in (figures["pq_things"], figures["pq_stuff"])) / 2)


@pytest.mark.parametrize("option", [{"calibrate": True}, {"abstain": 0.5}, {"suspects": "x.csv"}])
def test_classification_options_are_rejected(scenes_run, option):
    with pytest.raises(UsageError, match=f"{next(iter(option))}(=True)? is for image classification"):
        evaluate(scenes_run, **option)


def test_mismatched_data_are_rejected(scenes_run, tmp_path):
    with pytest.raises(DataError, match="has no boxes, masks or class maps"):
        evaluate(scenes_run, "digits")
    write_maps(tmp_path, 2, "")
    (tmp_path / "classes.txt").write_text("ground\nsquare\nring\n")
    with pytest.raises(DataError, match="the model has ground, square, disc, the data have ground, square, ring"):
        evaluate(scenes_run, tmp_path)


def test_an_unreadable_image_fails_or_is_skipped(scenes_run, tmp_path):
    home = write_maps(tmp_path, 3, "")
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    damaged = sorted((tmp_path / "images").iterdir())[0]
    damaged.write_bytes(b"no image")
    with pytest.raises(DataError, match=damaged.name):
        evaluate(scenes_run, tmp_path, workers=0)
    document = evaluate(scenes_run, tmp_path, workers=0, bad_images="skip")
    assert document["test"]["unreadable"] == 1 and sum(map(sum, document["confusion"])) == 2 * np.prod(
        get_mask_size(home)
    )


def get_mask_size(home):
    return Image.open(next((home / "masks").iterdir())).size


def test_the_task_type_is_read_from_the_description(scenes_run, tmp_path):
    assert read_task_type(scenes_run) is read_task_type(scenes_run / "model") is Segmentation
    assert read_task_type(tmp_path) is read_task_type("hf:nobody/nothing") is Classification


def test_two_runs_are_compared_on_the_same_images(scenes_run, tmp_path):
    vitreous.train(str(scenes_run.parent / "data"), out=str(tmp_path / "b"), steps=30, lr=1e-2, **TRAIN_OPTIONS)
    document = compare_two_runs(scenes_run, tmp_path / "b", evaluation_settings=EvaluationSettings(workers=0))
    evaluations = [evaluate(run, workers=0)["test"] for run in (scenes_run, tmp_path / "b")]
    for name in ("miou", "dice", "pixel_accuracy"):
        assert document["metrics"][name] == [side[name] for side in evaluations]
        assert document["difference"][name] == pytest.approx(evaluations[1][name] - evaluations[0][name])
        low, high = document["interval"][name]
        assert low <= document["difference"][name] <= high
    assert document["significant"] == (document["interval"]["miou"][0] > 0) and "mIoU" in document["verdict"]
    assert compare_two_runs(scenes_run, scenes_run / "model", evaluation_settings=EvaluationSettings(workers=0))[
        "interval"
    ]["miou"] == [0, 0]
    vitreous.save(vitreous.create("ViT-32x2/8", 32, 2), tmp_path / "images")
    with pytest.raises(UsageError, match="does not"):
        compare_two_runs(scenes_run, tmp_path / "images")
