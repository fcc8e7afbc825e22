"""Exported semantic segmentation models."""

import numpy as np
import pytest

import vitreous
from tests.reports.test_scenes import scenes_run  # noqa: F401
from vitreous.apps.export.export import export
from vitreous.errors import UsageError
from vitreous.tasks.export_proof import VerificationImages, compare_outputs
from vitreous.tasks.segmentation import Segmentation


@pytest.mark.parametrize("form", [("onnx", "m.onnx"), ("openvino", "m.xml")])
def test_exported_class_maps_match_the_run(scenes_run, tmp_path, form):  # noqa: F811
    library, name = form
    pytest.importorskip("openvino" if library == "openvino" else "onnxruntime")
    photos = sorted((scenes_run.parent / "data" / "train" / "images").iterdir())
    document = export(scenes_run, library, tmp_path / name, list(map(str, photos * 2)))["exports"][0]
    assert document["max_abs_logit_difference"] < 1e-3 and document["outputs"] == "logits"
    exported, original = vitreous.load(tmp_path / name), vitreous.load(scenes_run, precision="fp32")
    assert exported.card.task.classes == original.card.task.classes == ("ground", "square", "disc")
    for image in (photos[0], np.full((7, 90, 3), 90, np.uint8), np.full((50, 33, 3), 40, np.uint8)):
        ours, theirs = (predictor.segment(image).classes for predictor in (original, exported))
        assert ours.shape == theirs.shape and np.mean(ours == theirs) > 0.999


def test_dynamic_size_is_rejected_for_segmentation(scenes_run, tmp_path):  # noqa: F811
    with pytest.raises(UsageError, match="predicted in tiles"):
        export(scenes_run, "onnx", tmp_path / "m.onnx", dynamic_size=True)


class FixedLogitsEngine:
    """An engine with fixed logits for any pixels."""

    def __init__(self, logits):
        self.values = logits

    def logits(self, pixels):
        return self.values[: len(pixels)]


def test_agreement_counts_pixels_of_different_class():
    task = Segmentation(("a", "b"))
    logits = np.zeros((8, 2, 10, 10), np.float32)
    logits[:, 1] = 1
    flipped = logits.copy()
    flipped[0, :, 0, :4] = flipped[0, ::-1, 0, :4]
    images = VerificationImages(np.zeros((8, 3, 10, 10), np.uint8), None, "pictures")
    proof = compare_outputs(FixedLogitsEngine(logits), FixedLogitsEngine(flipped), images, task, lambda done: None)
    assert proof.agreement == pytest.approx(1 - 4 / 800) and proof.max_difference == 1 and proof.top1_accuracies is None
    assert "0.5% of its predictions differ (limit 0.1%)" in proof.get_rejection_reason(None)
    assert not proof.get_rejection_reason(None, "int8")
