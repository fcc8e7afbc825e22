"""Images with several labels, from a CSV file to figures and answers."""

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
LABEL_SUBSETS = list(product((0, 1), repeat=3))  # every combination, none among them


def make_table(home, counts):
    """`counts` images a combination of colours in each split: noise, brighter where a colour is there. Returns the CSV
    file."""
    generator = np.random.default_rng(0)
    lines = ["path,label,split"]
    for split, count in counts.items():
        for number, subset in enumerate(LABEL_SUBSETS * count):
            pixels = generator.integers(0, 128, (16, 16, 3)) + 100 * np.array(subset)
            Image.fromarray(pixels.astype(np.uint8)).save(home / f"{split}-{number}.png")
            names = "|".join(name for name, there in zip(COLOURS, subset, strict=True) if there)
            lines.append(f"{split}-{number}.png,{names},{split}")
    (home / "x.csv").write_text("\n".join(lines))
    return home / "x.csv"


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """A CSV file, the folder of a run on it, and what the run returned."""
    home = tmp_path_factory.mktemp("several")
    source = make_table(home, {"train": 8, "val": 2, "test": 4})
    options = {**TINY_RUN, "epochs": 25, "lr": 3e-3, "drop_path": 0.0, "save_every": 50, "evaluate_every": 100}
    return source, home / "run", train(str(source), out=str(home / "run"), workers=0, loss="sigmoid", **options)


def test_a_multilabel_run_learns_every_class(trained_run):
    _, out, summary = trained_run
    assert summary["test"]["map"] > 0.9 and summary["test"]["micro_f1"] > 0.8 and summary["test"]["images"] == 32
    assert summary["test"]["top1"] is None and summary["val"]["interval"]["map"]
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert found[-1]["val/map"] == summary["val"]["map"]


def test_evaluate_gives_the_same_metrics_and_a_table_of_classes(trained_run, capsys):
    source, out, summary = trained_run
    found = evaluate(out, source)
    assert found["test"] == summary["test"] and found["confusion"] is None
    assert [row["class"] for row in found["per_class"]] == ["blue", "green", "red"]
    assert np.mean([row["ap"] for row in found["per_class"]]) == pytest.approx(summary["test"]["map"])
    judging.run(judging.Options(run=str(out)), Console())
    first, head, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith(f"test: mAP {summary['test']['map']:.2%}")
    assert head.split() == ["class", "images", "AP", "recall", "precision", "F1"] and len(rows) == 4
    assert rows[-1] == f"page: {out}/report.html"


def test_predict_names_every_class_above_the_threshold(trained_run, tmp_path, capsys):
    source, out, _ = trained_run
    data = open_data(source)
    test = data.splits["test"]
    files = tuple(str(path) for path in test.paths)
    found = predicting.run(predicting.Options(run=str(out), images=files, csv=str(tmp_path / "x.csv")), Console())[
        "predictions"
    ]
    hits = [
        {row["class"] for row in one["classes"]}
        == {name for name, there in zip(data.classes, labels, strict=True) if there}
        for one, labels in zip(found, test.labels, strict=True)
    ]
    assert np.mean(hits) > 0.5
    assert all(row["probability"] > 0.5 for one in found for row in one["classes"])
    assert any(not one["classes"] for one in found) and any(len(one["classes"]) > 1 for one in found)
    printed = capsys.readouterr().out.splitlines()[1:]
    assert [line.endswith("none") for line in printed] == [not one["classes"] for one in found]
    rows = list(csv.DictReader((tmp_path / "x.csv").read_text().splitlines()))
    assert {row["path"] for row in rows} == set(files)
    assert sum(bool(row["class"]) for row in rows) == sum(len(one["classes"]) for one in found)


def test_threshold_and_top_select_predictions(trained_run):
    source, out, _ = trained_run
    predictor = load(out, InferenceOptions(precision="fp32"))
    paths = open_data(source).splits["test"].paths
    whole = predictor.predict(paths, top=3)
    assert all(len(one.names) == 3 for one in whole)
    assert any(abs(sum(one.probabilities) - 1) > 0.1 for one in whole)
    for threshold in (0.0, 0.2, 0.9):
        for one, every in zip(predictor.predict(paths, threshold=threshold), whole, strict=True):
            assert list(one.probabilities) == [p for p in every.probabilities if p > threshold]
    assert all(len(one.names) <= 1 for one in predictor.predict(paths, top=1, threshold=0.5))


def test_an_unreadable_image_is_missed(trained_run, tmp_path):
    _, out, summary = trained_run
    source = make_table(tmp_path, {"train": 8, "val": 2, "test": 4})
    (tmp_path / "test-7.png").write_bytes(b"junk")  # all three colours
    found = evaluate(out, source, bad_images="skip")
    assert (found["test"]["images"], found["test"]["unreadable"]) == (32, 1)
    assert [row["images"] for row in found["per_class"]] == [16, 16, 16]
    assert found["test"]["map"] < summary["test"]["map"]


def test_multilabel_models_are_evaluated_on_single_label_data(trained_run, tmp_path):
    """By class name, in another order, and with fewer classes than the model has."""
    source, out, _ = trained_run
    lines = [
        f"{source.parent}/test-{number}.png,{label}"
        for number in (2, 4, 10, 12)
        for label in ["green" if number % 8 == 2 else "red"]
    ]
    (tmp_path / "y.csv").write_text("\n".join(["path,label", *lines]))
    found = evaluate(out, tmp_path / "y.csv")
    assert [row["images"] for row in found["per_class"]] == [0, 2, 2]
    assert found["test"]["map"] == np.mean([row["ap"] for row in found["per_class"] if row["images"]])


def test_single_label_models_reject_multilabel_data(trained_run, tmp_path):
    source, _, _ = trained_run
    lines = [
        f"{source.parent}/train-{number}.png,{'green' if number % 8 == 2 else 'red'}"
        for number in range(64)
        if number % 8 in (2, 4)
    ]
    (tmp_path / "y.csv").write_text("\n".join(["path,label", *lines]))
    train(str(tmp_path / "y.csv"), out=str(tmp_path / "run"), workers=0, **{**TINY_RUN, "epochs": 1})
    (tmp_path / "z.csv").write_text(
        f"path,label\n{source.parent}/test-6.png,red|green\n{source.parent}/test-4.png,red\n"
    )
    with pytest.raises(UsageError, match="is multi-label"):
        evaluate(tmp_path / "run", tmp_path / "z.csv")
