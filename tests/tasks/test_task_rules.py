"""What every task promises to the verbs, the server and the exporter."""

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

NAMES = ("a", "b", "c")
EVERY = (
    Classification(NAMES),
    Classification(NAMES, True, "sigmoid", 2.0),
    FeatureExtraction(),
    Segmentation(NAMES),
    Detection(NAMES, True),
    Generation(NAMES),
    Regression(("age", "mass"), (1.0, 2.0), (3.0, 4.0)),
)
READING = tuple(task for task in EVERY if task.reads_images)


class Engine:
    """Outputs of the shapes that engines have, for any pixels."""

    def __init__(self, task):
        self.task = task

    def logits(self, pixels):
        places = pixels.shape[2:] if self.task.endpoint == "segment" else ()
        return np.ones((len(pixels), len(self.task.outputs or self.task.classes), *places), np.float32)

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


def test_the_table_has_every_task():
    assert {type(task) for task in EVERY} == set(TASKS.values())


@pytest.mark.parametrize("task", EVERY, ids=lambda task: task.name)
def test_a_task_is_what_its_description_and_its_card_are(task):
    assert task_from_json(task_to_json(task), "model.json") == task
    card = task_to_card(task)
    assert task_from_json(card, "model.onnx") == task and set(card) <= list_task_keys(task)
    assert ("task" in card) == (task.name != "classification")


@pytest.mark.parametrize("task", READING, ids=lambda task: task.name)
def test_outputs_have_the_shape_that_is_promised(task):
    outputs = task.compute(Engine(task), np.zeros((2, 3, 8, 6), np.uint8))
    shape = task.output_shape((8, 6))
    assert outputs.ndim == 1 + len(shape)
    assert all(length in (None, own) for length, own in zip(shape, outputs.shape[1:], strict=True))


@pytest.mark.parametrize("task", [task for task in READING if task.name != "detection"], ids=lambda task: task.name)
def test_equal_outputs_agree(task):
    outputs = task.compute(Engine(task), np.zeros((2, 3, 8, 6), np.uint8))
    assert task.measure_agreement(outputs, outputs) == 1


def test_a_detector_takes_the_whole_image():
    preprocess, image = ImagePreprocess((8, 8)), np.full((3, 4, 8), 200, np.uint8)
    fitted = Detection(NAMES).prepare_input(image, preprocess)
    assert fitted.shape == (3, 8, 8) and (fitted[:, :4] == 200).all() and not (fitted[:, 4:] == 200).any()


@pytest.mark.parametrize("task", EVERY, ids=lambda task: task.name)
def test_options_of_predict_that_a_task_lacks_are_refused(task):
    unset = dict.fromkeys(PREDICT_OPTIONS)
    task.check_predict_options("RUN", unset | {"tiles": False})
    for name, models in PREDICT_OPTIONS.items():
        if name in task.predict_options:
            task.check_predict_options("RUN", unset | {name: 0.5})
            continue
        with pytest.raises(UsageError) as error:
            task.check_predict_options("RUN", unset | {name: 0.5})
        assert error.value.message == f"--{name.replace('_', '-')} is for {models}; RUN {task.verb_phrase}"


def test_keywords_that_a_task_lacks_are_refused():
    Detection(NAMES).check_predict_keywords("ViT", PredictionOptions(threshold=0.5))
    with pytest.raises(UsageError) as error:
        Segmentation(NAMES).check_predict_keywords("ViT", PredictionOptions(threshold=0.5))
    problem = "predict(threshold=…) is for image classifiers; ViT segments images"
    assert error.value.message == problem


@pytest.mark.parametrize(("task", "words"), [
    (Classification, "predict RUN IMAGE …"),
    (FeatureExtraction, "embed RUN IMAGE …"),
    (Segmentation, "predict RUN IMAGE … --out FOLDER"),
    (Generation, "sample RUN --count 8 --out samples.png"),
])  # fmt: skip
def test_a_trained_run_is_used_by_the_verb_of_its_task(task, words):
    assert task.example_command("RUN", False) == f"vitreous {words}"


def test_a_head_of_other_classes_is_of_another_task_where_it_must():
    several = Classification(NAMES, True, "sigmoid", 2.0)
    assert replace_task_classes(several, ("x",)) == Classification(("x",), True, "sigmoid", 2.0)
    assert replace_task_classes(several, ()) == FeatureExtraction() and replace_task_classes(
        FeatureExtraction(), ("x",)
    ) == Classification(("x",))
    assert replace_task_classes(Generation(NAMES), ()) == Generation()
    assert (
        several.with_temperature(1.0).temperature == 1
        and FeatureExtraction().with_temperature(3.0) == FeatureExtraction()
    )


def test_classes_are_ranked_by_a_metric_of_theirs():
    leading = [metric for metric in METRICS.values() if metric.is_primary]
    assert {metric.key: metric.ranking_metric for metric in leading if metric.ranking_key != "f1"} == {
        "map": ("ap", "AP"),
        "miou": ("iou", "IoU"),
        "ap": ("ap", "AP"),
    }
    assert METRICS["top1"].ranking_metric == ("f1", "F1") and METRICS["miou"].counted_noun == "pixels"


def test_labels_of_one_class_and_of_several_count_the_same_images():
    numbers = np.array([2, 0, 2, 1])
    one, several = get_label_kind(False), get_label_kind(True)
    assert one.metric_key == "top1" and several.metric_key == "map"
    for kind, labels in ((one, numbers), (several, np.eye(4)[numbers])):
        assert kind.count_classes(labels, 4).tolist() == [1, 1, 2, 0]
    present = np.array([1, 2])
    assert one.select_classes(numbers, present, 4).tolist() == [1, -1, 1, 0]
    assert several.select_classes(np.eye(4)[numbers], present, 4).tolist() == [[0, 1], [0, 0], [0, 1], [1, 0]]
    shares = np.array([[0.25, 0.75]])
    np.testing.assert_allclose(np.exp(one.shares_to_logits(shares)), shares)
    np.testing.assert_allclose(1 / (1 + np.exp(-several.shares_to_logits(shares))), shares)
