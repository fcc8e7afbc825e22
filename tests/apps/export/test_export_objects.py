"""Exported object detectors."""

import json
import subprocess
import sys

import numpy as np
import pytest

import vitreous
from tests.inference.detectors import CLASSES, save_detector, write_photos
from vitreous.apps.export.export import export
from vitreous.data.annotations.shapes import mask_to_rle
from vitreous.errors import UsageError
from vitreous.tasks.detection_proof import ObjectComparison, match_both_ways
from vitreous.tasks.detections import Detections

PREDICT_SCRIPT = """
import json, sys
import vitreous
answer = vitreous.load(sys.argv[1]).detect(sys.argv[2], threshold=0.1)
print(json.dumps([answer.boxes.tolist(), answer.names, answer.scores.tolist(), "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def detector_folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("detector")
    save_detector(home / "model")
    write_photos(home / "photos")
    return home


@pytest.mark.parametrize("form", [("onnx", "m.onnx"), pytest.param(("openvino", "m.xml"), marks=pytest.mark.slow)])
def test_exported_detections_match_the_run(detector_folder, tmp_path, form):
    library, name = form
    pytest.importorskip("openvino" if library == "openvino" else "onnxruntime")
    document = export(detector_folder / "model", library, tmp_path / name, [str(detector_folder / "photos")])[
        "exports"
    ][0]
    assert document["outputs"] == "objects" and document["objects"] > 100 and document["object_agreement"] > 0.999
    assert document["max_box_difference"] < 0.01 and document["max_mask_difference"] <= 0.001
    exported, original = vitreous.load(tmp_path / name), vitreous.load(detector_folder / "model", precision="fp32")
    assert exported.card.task.classes == original.card.task.classes == CLASSES
    for image in sorted((detector_folder / "photos").iterdir())[:4]:
        ours, theirs = (predictor.detect(image, threshold=0.1) for predictor in (original, exported))
        assert len(ours) > 3 and ours.names == theirs.names
        assert np.abs(ours.boxes - theirs.boxes).max() < 0.01 and np.abs(ours.scores - theirs.scores).max() < 1e-3
        assert np.mean(ours.masks == theirs.masks) > 0.999 and ours.masks.any()
    if library == "onnx":
        command = [sys.executable, "-c", PREDICT_SCRIPT, tmp_path / name, image]
        detections = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        assert detections == [theirs.boxes.tolist(), list(theirs.names), theirs.scores.tolist(), False]


@pytest.mark.slow
def test_torch_export_detections_match_the_run(detector_folder, tmp_path):
    document = export(detector_folder / "model", "torch", tmp_path / "m.pt2", [str(detector_folder / "photos")])[
        "exports"
    ][0]
    assert document["object_agreement"] == 1 and document["max_box_difference"] < 0.01


def test_unsupported_detector_exports_are_rejected(detector_folder, tmp_path):
    with pytest.raises(UsageError, match="dynamic_size"):
        export(
            detector_folder / "model", "onnx", tmp_path / "m.onnx", [str(detector_folder / "photos")], dynamic_size=True
        )
    with pytest.raises(UsageError, match="int8 is not supported for detectors"):
        export(
            detector_folder / "model", "onnx", tmp_path / "m.onnx", [str(detector_folder / "photos")], quantize="int8"
        )
    with pytest.raises(UsageError, match="does not support detectors"):
        vitreous.load(detector_folder / "model", engine="openvino")
    with pytest.raises(UsageError, match="needs a plain ViT"):
        vitreous.load(detector_folder / "model", merge_tokens=2)


def make_detections(boxes, scores, labels=None, mask=None) -> Detections:
    count = len(boxes)
    runs = None if mask is None else tuple([mask_to_rle(mask)] * count)
    labels = np.zeros(count, np.int64) if labels is None else np.array(labels)
    return Detections(
        (40, 50), np.array(boxes, np.float32).reshape(-1, 4), labels, np.array(scores, np.float32), masks=runs
    )


def test_moved_and_missing_objects_are_counted():
    first_box, second_box = [4, 4, 20, 30], [10, 8, 40, 36]
    reference = make_detections([first_box, second_box], [0.9, 0.6])
    assert match_both_ways(reference, reference, 0.05, 9) == [(0, 0, 0)] * 4
    shifted = make_detections([first_box, np.add(second_box, 0.02)], [0.9, 0.6])
    assert match_both_ways(reference, shifted, 0.05, 9).count(None) == 2
    assert match_both_ways(reference, make_detections([first_box], [0.9]), 0.05, 9).count(None) == 1
    assert (
        match_both_ways(reference, make_detections([first_box, second_box], [0.9, 0.6], [0, 1]), 0.05, 9).count(None)
        == 2
    )
    assert match_both_ways(reference, make_detections([first_box, second_box], [0.9, 0.61]), 0.05, 9).count(None) == 2
    # just below the lowest reference score
    assert match_both_ways(reference, make_detections([first_box], [0.9]), 0.5999, 9).count(None) == 0
    # the list of detections is full
    assert (
        match_both_ways(reference, make_detections([first_box, np.add(first_box, 9)], [0.9, 0.6]), 0.05, 2).count(None)
        == 0
    )
    mask, other_mask = np.zeros((40, 50), bool), np.zeros((40, 50), bool)
    mask[5:20, 5:15] = other_mask[5:20, 5:15] = True
    other_mask[5, 5:8] = False
    pair = make_detections([first_box], [0.9], mask=mask), make_detections([first_box], [0.9], mask=other_mask)
    assert match_both_ways(*pair, 0.05, 9) == [None, None]
    other_mask[5, 6:8] = True
    assert match_both_ways(pair[0], make_detections([first_box], [0.9], mask=other_mask), 0.05, 9)[0][
        2
    ] == pytest.approx(1 / 2000)


def test_export_rejection_reasons_are_specific():
    proof = ObjectComparison(
        8,
        1000,
        999,
        0.0,
        max_score_difference=0.0,
        max_mask_difference=0.0,
        images_per_second=(1.0, 1.0),
        is_finite=True,
    )
    assert not proof.get_rejection_reason(
        None
    ) and "0.1% of the objects differ (limit 0.0%)" in proof.get_rejection_reason(0.0)
    assert "cannot be verified" in ObjectComparison(
        8, 0, 0, 0, max_score_difference=0, max_mask_difference=0, images_per_second=(1.0, 1.0), is_finite=True
    ).get_rejection_reason(None)
    assert "not finite" in ObjectComparison(
        8, 9, 9, 0, max_score_difference=0, max_mask_difference=0, images_per_second=(1.0, 1.0), is_finite=False
    ).get_rejection_reason(None)
