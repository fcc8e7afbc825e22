"""The interface of every task for commands, the server and exports."""

import numpy as np
import pytest

from vitreous.data.labels import get_label_kind
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import UsageError
from vitreous.tasks.base import PREDICT_OPTIONS, PredictionOptions
from vitreous.tasks.classification import Classification
from vitreous.tasks.detection import Detection
from vitreous.tasks.features import FeatureExtraction
from vitreous.tasks.generation import Generation
from vitreous.tasks.metrics import METRICS
from vitreous.tasks.regression import Regression
from vitreous.tasks.segmentation import Segmentation
from vitreous.tasks.table import TASKS, list_task_keys, replace_task_classes, task_from_json, task_to_card, task_to_json

CLASS_NAMES = ("a", "b", "c")
ALL_TASKS = (
    Classification(CLASS_NAMES),
    Classification(CLASS_NAMES, True, "sigmoid", 2.0),
    FeatureExtraction(),
    Segmentation(CLASS_NAMES),
    Detection(CLASS_NAMES, True),
    Generation(CLASS_NAMES),
    Regression(("age", "mass"), (1.0, 2.0), (3.0, 4.0)),
)
IMAGE_TASKS = tuple(task for task in ALL_TASKS if task.reads_images)


class FakeEngine:
    """Outputs with the shapes of engine outputs, for any pixels."""

    def __init__(self, task):
        self.task = task

    def logits(self, pixels):
        grid = pixels.shape[2:] if self.task.endpoint == "segment" else ()
        return np.ones((len(pixels), len(self.task.outputs or self.task.classes), *grid), np.float32)

    def features(self, pixels):
        return np.ones((len(pixels), 7), np.float32)

    def objects(self, pixels):
        count = len(pixels)
        return (
            np.ones((count, 5, 4), np.float32),
            np.ones((count, 5), np.float32),
            np.zeros((count, 5), np.int64),
            np.ones((count, 5, 2, 2), np.float32),
        )


def test_every_task_is_registered():
    assert {type(task) for task in ALL_TASKS} == set(TASKS.values())


@pytest.mark.parametrize("task", ALL_TASKS, ids=lambda task: task.name)
def test_tasks_survive_a_round_trip_through_json_and_cards(task):
    assert task_from_json(task_to_json(task), "model.json") == task
    card = task_to_card(task)
    assert task_from_json(card, "model.onnx") == task and set(card) <= list_task_keys(task)
    assert ("task" in card) == (task.name != "classification")


@pytest.mark.parametrize("task", IMAGE_TASKS, ids=lambda task: task.name)
def test_outputs_have_the_declared_shape(task):
    outputs = task.compute(FakeEngine(task), np.zeros((2, 3, 8, 6), np.uint8))
    shape = task.output_shape((8, 6))
    assert outputs.ndim == 1 + len(shape)
    assert all(length in (None, actual) for length, actual in zip(shape, outputs.shape[1:], strict=True))


@pytest.mark.parametrize("task", [task for task in IMAGE_TASKS if task.name != "detection"], ids=lambda task: task.name)
def test_equal_outputs_agree(task):
    outputs = task.compute(FakeEngine(task), np.zeros((2, 3, 8, 6), np.uint8))
    assert task.measure_agreement(outputs, outputs) == 1


def test_detectors_pad_the_whole_image():
    preprocess, image = ImagePreprocess((8, 8)), np.full((3, 4, 8), 200, np.uint8)
    fitted = Detection(CLASS_NAMES).prepare_input(image, preprocess)
    assert fitted.shape == (3, 8, 8) and (fitted[:, :4] == 200).all() and not (fitted[:, 4:] == 200).any()


@pytest.mark.parametrize("task", ALL_TASKS, ids=lambda task: task.name)
def test_unsupported_predict_options_are_rejected(task):
    unset = dict.fromkeys(PREDICT_OPTIONS)
    task.check_predict_options("RUN", unset | {"tiles": False})
    for name, models in PREDICT_OPTIONS.items():
        if name in task.predict_options:
            task.check_predict_options("RUN", unset | {name: 0.5})
            continue
        with pytest.raises(UsageError) as error:
            task.check_predict_options("RUN", unset | {name: 0.5})
        assert error.value.message == f"--{name.replace('_', '-')} is for {models}; RUN {task.verb_phrase}"


def test_unsupported_predict_keywords_are_rejected():
    Detection(CLASS_NAMES).check_predict_keywords("ViT", PredictionOptions(threshold=0.5))
    with pytest.raises(UsageError) as error:
        Segmentation(CLASS_NAMES).check_predict_keywords("ViT", PredictionOptions(threshold=0.5))
    problem = "predict(threshold=…) is for image classifiers; ViT segments images"
    assert error.value.message == problem


@pytest.mark.parametrize(("task", "words"), [
    (Classification, "predict RUN IMAGE …"),
    (FeatureExtraction, "embed RUN IMAGE …"),
    (Segmentation, "predict RUN IMAGE … --out FOLDER"),
    (Generation, "sample RUN --count 8 --out samples.png"),
])  # fmt: skip
def test_the_example_command_matches_the_task(task, words):
    assert task.example_command("RUN", False) == f"vitreous {words}"


def test_replacing_classes_may_change_the_task():
    multilabel = Classification(CLASS_NAMES, True, "sigmoid", 2.0)
    assert replace_task_classes(multilabel, ("x",)) == Classification(("x",), True, "sigmoid", 2.0)
    assert replace_task_classes(multilabel, ()) == FeatureExtraction() and replace_task_classes(
        FeatureExtraction(), ("x",)
    ) == Classification(("x",))
    assert replace_task_classes(Generation(CLASS_NAMES), ()) == Generation()
    assert (
        multilabel.with_temperature(1.0).temperature == 1
        and FeatureExtraction().with_temperature(3.0) == FeatureExtraction()
    )


def test_classes_are_ranked_by_a_per_class_metric():
    leading = [metric for metric in METRICS.values() if metric.is_primary]
    assert {metric.key: metric.ranking_metric for metric in leading if metric.ranking_key != "f1"} == {
        "map": ("ap", "AP"),
        "miou": ("iou", "IoU"),
        "ap": ("ap", "AP"),
    }
    assert METRICS["top1"].ranking_metric == ("f1", "F1") and METRICS["miou"].counted_noun == "pixels"


def test_label_kinds_count_and_select_the_same_images():
    class_indices = np.array([2, 0, 2, 1])
    single_label, multilabel = get_label_kind(False), get_label_kind(True)
    assert single_label.metric_key == "top1" and multilabel.metric_key == "map"
    for label_kind, labels in ((single_label, class_indices), (multilabel, np.eye(4)[class_indices])):
        assert label_kind.count_classes(labels, 4).tolist() == [1, 1, 2, 0]
    present = np.array([1, 2])
    assert single_label.select_classes(class_indices, present, 4).tolist() == [1, -1, 1, 0]
    assert multilabel.select_classes(np.eye(4)[class_indices], present, 4).tolist() == [[0, 1], [0, 0], [0, 1], [1, 0]]
    shares = np.array([[0.25, 0.75]])
    np.testing.assert_allclose(np.exp(single_label.shares_to_logits(shares)), shares)
    np.testing.assert_allclose(1 / (1 + np.exp(-multilabel.shares_to_logits(shares))), shares)
