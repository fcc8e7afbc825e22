"""Multi-label images, from a CSV file to metrics and predictions."""

from __future__ import annotations

import csv
import json
from itertools import product

import numpy as np
import pytest
from PIL import Image

from tests.conftest import TINY_RUN
from vitreous.cli import evaluate as judging
from vitreous.cli import predict as predicting
from vitreous.cli.console import Console
from vitreous.data.sources import open_data
from vitreous.errors import UsageError
from vitreous.inference.engine import InferenceOptions
from vitreous.inference.predict import load
from vitreous.jobs.train import train
from vitreous.reports.evaluate import evaluate

COLOURS = ("red", "green", "blue")
LABEL_SUBSETS = list(product((0, 1), repeat=3))  # all combinations, including the empty one


def make_table(folder, counts):
    """Write `counts` images per combination of colours for each split: noise, brighter in the colours of the labels.
    Returns the CSV file."""
    generator = np.random.default_rng(0)
    lines = ["path,label,split"]
    for split, count in counts.items():
        for index, subset in enumerate(LABEL_SUBSETS * count):
            pixels = generator.integers(0, 128, (16, 16, 3)) + 100 * np.array(subset)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{split}-{index}.png")
            names = "|".join(name for name, is_present in zip(COLOURS, subset, strict=True) if is_present)
            lines.append(f"{split}-{index}.png,{names},{split}")
    (folder / "x.csv").write_text("\n".join(lines))
    return folder / "x.csv"


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """A CSV file, the folder of a run on it, and the run's summary."""
    folder = tmp_path_factory.mktemp("several")
    source = make_table(folder, {"train": 8, "val": 2, "test": 4})
    options = {**TINY_RUN, "epochs": 25, "lr": 3e-3, "drop_path": 0.0, "save_every": 50, "evaluate_every": 100}
    return source, folder / "run", train(str(source), out=str(folder / "run"), workers=0, loss="sigmoid", **options)


def test_a_multilabel_run_learns_every_class(trained_run):
    _, out, summary = trained_run
    assert summary["test"]["map"] > 0.9 and summary["test"]["micro_f1"] > 0.8 and summary["test"]["images"] == 32
    assert summary["test"]["top1"] is None and summary["val"]["interval"]["map"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["val/map"] == summary["val"]["map"]


def test_evaluate_gives_the_same_metrics_and_a_table_of_classes(trained_run, capsys):
    source, out, summary = trained_run
    report = evaluate(out, source)
    assert report["test"] == summary["test"] and report["confusion"] is None
    assert [row["class"] for row in report["per_class"]] == ["blue", "green", "red"]
    assert np.mean([row["ap"] for row in report["per_class"]]) == pytest.approx(summary["test"]["map"])
    judging.run(judging.Options(run=str(out)), Console())
    summary_line, head, *class_lines = capsys.readouterr().out.splitlines()
    assert summary_line.startswith(f"test: mAP {summary['test']['map']:.2%}")
    assert head.split() == ["class", "images", "AP", "recall", "precision", "F1"] and len(class_lines) == 4
    assert class_lines[-1] == f"page: {out}/report.html"


def test_predict_names_every_class_above_the_threshold(trained_run, tmp_path, capsys):
    source, out, _ = trained_run
    data = open_data(source)
    test = data.splits["test"]
    files = tuple(str(path) for path in test.paths)
    predictions = predicting.run(
        predicting.Options(run=str(out), images=files, csv=str(tmp_path / "x.csv")), Console()
    )["predictions"]
    hits = [
        {row["class"] for row in prediction["classes"]}
        == {name for name, is_present in zip(data.classes, labels, strict=True) if is_present}
        for prediction, labels in zip(predictions, test.labels, strict=True)
    ]
    assert np.mean(hits) > 0.5
    assert all(row["probability"] > 0.5 for prediction in predictions for row in prediction["classes"])
    assert any(not prediction["classes"] for prediction in predictions) and any(
        len(prediction["classes"]) > 1 for prediction in predictions
    )
    printed = capsys.readouterr().out.splitlines()[1:]
    assert [line.endswith("none") for line in printed] == [not prediction["classes"] for prediction in predictions]
    records = list(csv.DictReader((tmp_path / "x.csv").read_text().splitlines()))
    assert {row["path"] for row in records} == set(files)
    assert sum(bool(row["class"]) for row in records) == sum(len(prediction["classes"]) for prediction in predictions)


def test_threshold_and_top_select_predictions(trained_run):
    source, out, _ = trained_run
    predictor = load(out, InferenceOptions(precision="fp32"))
    paths = open_data(source).splits["test"].paths
    all_predictions = predictor.predict(paths, top=3)
    assert all(len(prediction.names) == 3 for prediction in all_predictions)
    assert any(abs(sum(prediction.probabilities) - 1) > 0.1 for prediction in all_predictions)
    for threshold in (0.0, 0.2, 0.9):
        for prediction, every in zip(predictor.predict(paths, threshold=threshold), all_predictions, strict=True):
            assert list(prediction.probabilities) == [p for p in every.probabilities if p > threshold]
    assert all(len(prediction.names) <= 1 for prediction in predictor.predict(paths, top=1, threshold=0.5))


def test_an_unreadable_image_counts_as_missed(trained_run, tmp_path):
    _, out, summary = trained_run
    source = make_table(tmp_path, {"train": 8, "val": 2, "test": 4})
    (tmp_path / "test-7.png").write_bytes(b"junk")  # all three colours
    report = evaluate(out, source, bad_images="skip")
    assert (report["test"]["images"], report["test"]["unreadable"]) == (32, 1)
    assert [row["images"] for row in report["per_class"]] == [16, 16, 16]
    assert report["test"]["map"] < summary["test"]["map"]


def test_multilabel_models_are_evaluated_on_single_label_data(trained_run, tmp_path):
    """Classes are matched by name, in another order, and with fewer classes than the model has."""
    source, out, _ = trained_run
    lines = [
        f"{source.parent}/test-{index}.png,{label}"
        for index in (2, 4, 10, 12)
        for label in ["green" if index % 8 == 2 else "red"]
    ]
    (tmp_path / "y.csv").write_text("\n".join(["path,label", *lines]))
    report = evaluate(out, tmp_path / "y.csv")
    assert [row["images"] for row in report["per_class"]] == [0, 2, 2]
    assert report["test"]["map"] == np.mean([row["ap"] for row in report["per_class"] if row["images"]])


def test_single_label_models_reject_multilabel_data(trained_run, tmp_path):
    source, _, _ = trained_run
    lines = [
        f"{source.parent}/train-{index}.png,{'green' if index % 8 == 2 else 'red'}"
        for index in range(64)
        if index % 8 in (2, 4)
    ]
    (tmp_path / "y.csv").write_text("\n".join(["path,label", *lines]))
    train(str(tmp_path / "y.csv"), out=str(tmp_path / "run"), workers=0, **{**TINY_RUN, "epochs": 1})
    (tmp_path / "z.csv").write_text(
        f"path,label\n{source.parent}/test-6.png,red|green\n{source.parent}/test-4.png,red\n"
    )
    with pytest.raises(UsageError, match="is multi-label"):
        evaluate(tmp_path / "run", tmp_path / "z.csv")
