"""`vitreous evaluate A B`: comparison of two runs on the same images."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import TINY_RUN, make_folder, parse_json_output, run_cli
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.jobs.train import train
from vitreous.models.zoo import create_untrained_model
from vitreous.reports.compare import compare_two_runs
from vitreous.reports.evaluate import evaluate
from vitreous.tasks.classification import Classification
from vitreous.weights.bundle import Bundle, load_bundle


@pytest.fixture(scope="module")
def compared_runs(tmp_path_factory):
    """Return data, a trained run, and an untrained run of another image size."""
    home = tmp_path_factory.mktemp("compared")
    photos = make_folder(home / "photos", {"train": 16, "val": 4, "test": 10})
    options = {**TINY_RUN, "lr": 3e-3, "drop_path": 0.0, "save_every": 50, "evaluate_every": 100, "ema": 0.5}
    train(str(photos), out=str(home / "good"), workers=0, **{**options, "epochs": 20})
    train(str(photos), out=str(home / "poor"), workers=0, image_size=24, **{**options, "epochs": 0.5})
    bundle = load_bundle(home / "poor" / "model")
    torch.manual_seed(0)
    torch.nn.init.normal_(bundle.model.head.weight)
    bundle.save(home / "poor" / "model")
    return photos, home / "good", home / "poor"


def run_evaluate(*arguments, cwd):
    result = run_cli("evaluate", *map(str, arguments), "--workers", "0", "--device", "cpu", cwd=cwd)
    return result


def test_runs_of_different_image_sizes_are_compared(compared_runs, tmp_path):
    photos, good, poor = compared_runs
    document = parse_json_output(run_evaluate(poor, good, "--json", cwd=tmp_path))
    evaluations = [evaluate(run, workers=0)["test"] for run in (poor, good)]
    for side, evaluation in zip(("a", "b"), evaluations, strict=True):
        assert {name: document[side][name] for name in evaluation} == evaluation
    counts = document["correct"]
    assert sum(counts.values()) == document["images"] == 30
    assert counts["both"] + counts["only_b"] == round(30 * evaluations[1]["top1"])
    assert document["difference"]["top1"] == pytest.approx(evaluations[1]["top1"] - evaluations[0]["top1"])
    assert document["difference"]["nll"] == pytest.approx(evaluations[1]["nll"] - evaluations[0]["nll"])
    assert (
        document["significant"]
        and document["verdict"].startswith("good is better by ")
        and "McNemar p" in document["verdict"]
    )
    printed = run_evaluate(poor, good, photos, cwd=tmp_path).stdout
    assert document["verdict"] in printed and f"only the second {counts['only_b']}," in printed
    assert document["a"]["trained_on"] is False


def test_a_run_does_not_differ_from_itself(compared_runs, tmp_path):
    _, good, _ = compared_runs
    document = compare_two_runs(good, good / "model")
    assert (
        not document["significant"]
        and "no significant difference" in document["verdict"]
        and document["mcnemar_p"] == 1
    )
    assert document["interval"]["nll"] == [0, 0] and document["b"]["trained_on"] is None


def test_classes_in_another_order_are_matched_by_name(compared_runs, tmp_path):
    """Reordering the classes of a model changes nothing; a model that lacks a class of the data is rejected by name."""
    photos, good, _ = compared_runs
    bundle = load_bundle(good / "model")
    state = {name: tensor.clone() for name, tensor in bundle.model.state_dict().items()}
    state |= {name: state[name].flip(0) for name in state if name.startswith("head.")}
    bundle.model.load_state_dict(state)
    replace(bundle, task=Classification(bundle.classes[::-1])).save(tmp_path / "turned")
    document = compare_two_runs(good, tmp_path / "turned")
    assert document["correct"]["only_a"] == document["correct"]["only_b"] == 0 and document["difference"][
        "nll"
    ] == pytest.approx(0, abs=1e-6)
    replace(bundle, task=Classification(("ant", "bee", "dog"))).save(tmp_path / "other")
    result = run_evaluate(good, tmp_path / "other", cwd=tmp_path)
    assert result.returncode == 3 and "other" in result.stderr and "has no classes named cat" in result.stderr
    two_classes = tmp_path / "part"
    two_classes.mkdir()
    for name in ("ant", "bee"):
        (two_classes / name).symlink_to(photos / "test" / name)
    result = run_evaluate(good, tmp_path / "other", two_classes, cwd=tmp_path)
    assert result.returncode == 0 and "have different classes" in result.stderr


def test_training_images_of_one_run_are_reported(compared_runs, tmp_path):
    _, good, _ = compared_runs
    make_folder(tmp_path / "others", {"train": 4, "val": 2, "test": 2}, size=(20, 20))
    train(str(tmp_path / "others"), out=str(tmp_path / "third"), workers=0, **{**TINY_RUN, "epochs": 0.5})
    result = run_evaluate(good, tmp_path / "third", "--split", "train", "--json", cwd=tmp_path)
    document = parse_json_output(result)
    assert document["a"]["trained_on_images"] == 48 and document["b"]["trained_on"] is False
    assert f"{good} was trained on these images" in result.stderr and "third was trained" not in result.stderr


def test_unreadable_images_count_as_wrong_for_both_runs(compared_runs, tmp_path):
    photos, good, poor = compared_runs
    copy = shutil.copytree(photos / "test", tmp_path / "test")
    (copy / "ant" / "0.png").write_bytes(b"junk")
    assert run_evaluate(good, poor, copy, cwd=tmp_path).returncode == 3
    document = parse_json_output(run_evaluate(good, poor, copy, "--bad-images", "skip", "--json", cwd=tmp_path))
    assert (
        document["images"] == 30
        and document["a"]["unreadable"] == document["b"]["unreadable"] == 1
        and document["correct"]["neither"] >= 1
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["GOOD", "POOR", "--calibrate"], "--calibrate applies to one run, not to two"),
        (["GOOD", "POOR", "--protocol", "knn"], "--protocol applies to one run, not to two"),
        (["GOOD", "PHOTOS", "PHOTOS"], "photos is not a run\n  use vitreous evaluate RUN RUN DATA"),
        (["GOOD", "POOR", "nowhere"], "no such folder"),
    ],
)
def test_invalid_comparisons_are_rejected(compared_runs, arguments, message, tmp_path):
    paths = dict(zip(("PHOTOS", "GOOD", "POOR"), map(str, compared_runs), strict=True))
    result = run_evaluate(*(paths.get(word, word) for word in arguments), cwd=tmp_path)
    assert result.returncode in (2, 3) and message in result.stderr


def save_multilabel_bundle(home, name, seed, classes=("blue", "red")):
    """Save a bundle with an independent probability for each class."""
    torch.manual_seed(seed)
    model = create_untrained_model("ViT-16x1/8", 16, len(classes)).eval()
    torch.nn.init.normal_(model.head.weight)
    Bundle(model, Classification(classes, True, "sigmoid"), ImagePreprocess((16, 16))).save(home / name)
    return home / name


def test_multilabel_runs_are_compared_by_map(tmp_path, compared_runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ["path,label,split"]
    for number in range(24):
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(
            tmp_path / f"{number}.png"
        )
        lines.append(f"{number}.png,{'|'.join(('red', 'blue')[: number % 3])},{'test' if number > 4 else 'train'}")
    (tmp_path / "x.csv").write_text("\n".join(lines))
    first_bundle, second_bundle = (
        save_multilabel_bundle(tmp_path, "one", 0),
        save_multilabel_bundle(tmp_path, "other", 1, ("red", "blue")),
    )
    document = parse_json_output(run_evaluate(first_bundle, second_bundle, tmp_path / "x.csv", "--json", cwd=tmp_path))
    for run_index, run in enumerate((first_bundle, second_bundle)):
        assert document["metrics"]["map"][run_index] == pytest.approx(
            evaluate(run, tmp_path / "x.csv", workers=0)["test"]["map"]
        )
    assert document["mcnemar_p"] is None and document["correct"] is None and "mAP" in document["verdict"]
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    result = run_evaluate(first_bundle, compared_runs[1], tmp_path / "x.csv", cwd=tmp_path)
    assert result.returncode == 2 and "classifies images into 2 classes (multi-label), " in result.stderr
    for arguments in (["--abstain", "0.5"], ["--suspects", "s.csv"]):
        result = run_evaluate(first_bundle, tmp_path / "x.csv", *arguments, cwd=tmp_path)
        assert result.returncode == 2 and "needs single-label data" in result.stderr


def test_runs_without_a_test_split_are_compared_on_val(compared_runs, tmp_path):
    photos, good, poor = compared_runs
    train_and_val = tmp_path / "part"
    train_and_val.mkdir()
    for name in ("train", "val"):
        (train_and_val / name).symlink_to(photos / name)
    result = run_evaluate(good, poor, train_and_val, "--json", cwd=tmp_path)
    document = parse_json_output(result)
    assert (document["split"], document["images"]) == (
        "val",
        12,
    ) and "part has no test split: evaluated on its 12 val images" in result.stderr
    assert run_evaluate(good, poor, train_and_val, "--split", "test", cwd=tmp_path).returncode == 3
