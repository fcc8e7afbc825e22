import numpy as np
import pytest
import torch
from sklearn import metrics

from tests.conftest import make_folder
from vitreous.data.loader import EvalLoader
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sources import open_data
from vitreous.errors import NonFiniteError
from vitreous.inference.engine import TorchEngine, compute_split_logits
from vitreous.models.zoo import create_untrained_model
from vitreous.tasks.classification_metrics import evaluate_classification, rank_labels
from vitreous.tasks.intervals import wilson_interval

CLASS_NAMES = tuple("abcdefghij")


@pytest.fixture
def logits_and_labels():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, 400)
    logits = generator.normal(size=(400, 10)).astype(np.float32)
    logits[np.arange(400), labels] += 1.5
    return logits, labels


def test_metrics_match_scikit_learn(logits_and_labels):
    logits, labels = logits_and_labels
    report = evaluate_classification(logits, labels, CLASS_NAMES)
    p = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum(1, keepdims=True)
    predicted = logits.argmax(1)
    assert report.metrics["top1"] == metrics.accuracy_score(labels, predicted)
    assert report.metrics["top5"] == metrics.top_k_accuracy_score(labels, logits, k=5)
    assert report.metrics["macro_f1"] == pytest.approx(metrics.f1_score(labels, predicted, average="macro"))
    assert report.metrics["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(labels, predicted))
    low, high = report.intervals["balanced_accuracy"]
    assert low < report.metrics["balanced_accuracy"] < high
    assert report.metrics["nll"] == pytest.approx(metrics.log_loss(labels, p))
    assert np.array_equal(report.confusion, metrics.confusion_matrix(labels, predicted))
    for class_index, (precision, recall) in enumerate(
        zip(
            metrics.precision_score(labels, predicted, average=None),
            metrics.recall_score(labels, predicted, average=None),
            strict=True,
        )
    ):
        assert (report.per_class[class_index]["precision"], report.per_class[class_index]["recall"]) == pytest.approx(
            (precision, recall)
        )


def test_calibration_error_matches_a_loop_over_bins(logits_and_labels):
    logits, labels = logits_and_labels
    p = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum(1, keepdims=True)
    confidence, right, error = p.max(1), p.argmax(1) == labels, 0.0
    for bin_ in range(15):
        inside = (confidence >= bin_ / 15) & (confidence < (bin_ + 1) / 15)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert evaluate_classification(logits, labels, CLASS_NAMES).metrics["ece"] == pytest.approx(error)


def test_intervals_contain_the_metric_and_are_deterministic(logits_and_labels):
    report, repeated = (
        evaluate_classification(*logits_and_labels, CLASS_NAMES),
        evaluate_classification(*logits_and_labels, CLASS_NAMES),
    )
    assert report.intervals == repeated.intervals
    for name, (low, high) in report.intervals.items():
        assert low <= report.metrics[name] <= high, name
        assert high - low < 0.2
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_wilson_intervals_have_their_nominal_coverage():
    generator = np.random.default_rng(1)
    hits = generator.binomial(200, 0.9, size=1000)
    covered = np.mean([low <= 0.9 <= high for low, high in (wilson_interval(int(h), 200) for h in hits)])
    assert 0.93 <= covered <= 0.97


def test_equal_logits_rank_by_position():
    assert rank_labels(np.zeros((3, 4)), np.array([0, 1, 3])).tolist() == [0, 1, 3]


def test_unreadable_images_count_as_wrong(logits_and_labels):
    logits, labels = logits_and_labels
    readable = np.ones(400, bool)
    readable[:40] = False
    report, all_readable = (
        evaluate_classification(logits, labels, CLASS_NAMES, readable),
        evaluate_classification(logits[40:], labels[40:], CLASS_NAMES),
    )
    assert report.images == 400 and report.unreadable == 40
    assert report.metrics["top1"] == pytest.approx(all_readable.metrics["top1"] * 360 / 400)
    assert report.metrics["nll"] == all_readable.metrics["nll"]
    assert sum(class_metrics["images"] for class_metrics in report.per_class) == 400


def test_top5_needs_ten_classes_and_recall_needs_images():
    report = evaluate_classification(np.eye(3)[[0, 1, 1]], np.array([0, 1, 1]), ("a", "b", "c"))
    assert report.metrics["top5"] is None and report.metrics["top1"] == 1.0
    assert report.per_class[2]["recall"] is None
    for count in (6, 9, 10):
        report = evaluate_classification(np.eye(count), np.arange(count), tuple(map(str, range(count))))
        assert report.metrics["top5"] == (1.0 if count == 10 else None)


def test_logits_are_bit_identical_for_any_batch_size_and_workers(tmp_path):
    data = open_data(make_folder(tmp_path / "x", {"train": 2, "val": 50}))
    torch.manual_seed(0)
    model = create_untrained_model("ViT-mu/8", 16, 3).eval()
    torch.nn.init.normal_(model.head.weight)
    all_logits = []
    engine = TorchEngine(model, ImagePreprocess((16, 16)))
    for batch_size, workers in ((64, 0), (7, 0), (150, 2), (1, 1)):
        logits, bad = compute_split_logits(
            engine, EvalLoader(data.splits["val"], engine.preprocess, workers), batch_size
        )
        assert logits.shape == (150, 3) and not bad
        all_logits.append(logits)
    assert all(np.array_equal(all_logits[0], other_logits) for other_logits in all_logits[1:])


def test_outputs_without_probabilities_are_rejected(logits_and_labels):
    logits, labels = logits_and_labels
    with pytest.raises(NonFiniteError, match="not finite"):
        evaluate_classification(np.where(np.arange(400)[:, None] == 7, np.nan, logits), labels, CLASS_NAMES)
    readable = np.arange(400) != 7
    assert (
        evaluate_classification(np.where(readable[:, None], logits, np.nan), labels, CLASS_NAMES, readable).unreadable
        == 1
    )
