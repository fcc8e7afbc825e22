"""`vitreous evaluate A B`: two runs on the same images."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import TINY, document, make_folder, say
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.jobs.train import train
from vitreous.models.zoo import create_untrained_model
from vitreous.reports.compare import compare_two_runs
from vitreous.reports.evaluate import evaluate
from vitreous.tasks.classification import Classification
from vitreous.weights.bundle import Bundle, load_bundle


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Data, a run that has learned them, and one with a head drawn at random, which takes images of another size."""
    home = tmp_path_factory.mktemp("compared")
    photos = make_folder(home / "photos", {"train": 16, "val": 4, "test": 10})
    options = {**TINY, "lr": 3e-3, "drop_path": 0.0, "save_every": 50, "evaluate_every": 100, "ema": 0.5}
    train(str(photos), out=str(home / "good"), workers=0, **{**options, "epochs": 20})
    train(str(photos), out=str(home / "poor"), workers=0, image_size=24, **{**options, "epochs": 0.5})
    bundle = load_bundle(home / "poor" / "model")
    torch.manual_seed(0)
    torch.nn.init.normal_(bundle.model.head.weight)
    bundle.save(home / "poor" / "model")
    return photos, home / "good", home / "poor"


def asked(*words, cwd):
    result = say("evaluate", *map(str, words), "--workers", "0", "--device", "cpu", cwd=cwd)
    return result


def test_two_runs_of_different_sizes_are_compared_in_words(runs, tmp_path):
    photos, good, poor = runs
    found = document(asked(poor, good, "--json", cwd=tmp_path))
    alone = [evaluate(run, workers=0)["test"] for run in (poor, good)]
    for side, one in zip(("a", "b"), alone, strict=True):
        assert {name: found[side][name] for name in one} == one
    counts = found["correct"]
    assert sum(counts.values()) == found["images"] == 30
    assert counts["both"] + counts["only_b"] == round(30 * alone[1]["top1"])
    assert found["difference"]["top1"] == pytest.approx(alone[1]["top1"] - alone[0]["top1"])
    assert found["difference"]["nll"] == pytest.approx(alone[1]["nll"] - alone[0]["nll"])
    assert (
        found["significant"] and found["verdict"].startswith("good is better by ") and "McNemar p" in found["verdict"]
    )
    printed = asked(poor, good, photos, cwd=tmp_path).stdout
    assert found["verdict"] in printed and f"only the second {counts['only_b']}," in printed
    assert found["a"]["trained_on"] is False


def test_a_run_and_itself_cannot_be_told_apart(runs, tmp_path):
    _, good, _ = runs
    found = compare_two_runs(good, good / "model")
    assert not found["significant"] and "no significant difference" in found["verdict"] and found["mcnemar_p"] == 1
    assert found["interval"]["nll"] == [0, 0] and found["b"]["trained_on"] is None


def test_classes_in_another_order_are_matched_by_name(runs, tmp_path):
    """The same model with its classes turned round answers the same; one that misses a class of the data is refused by
    name."""
    photos, good, _ = runs
    bundle = load_bundle(good / "model")
    state = {name: tensor.clone() for name, tensor in bundle.model.state_dict().items()}
    state |= {name: state[name].flip(0) for name in state if name.startswith("head.")}
    bundle.model.load_state_dict(state)
    replace(bundle, task=Classification(bundle.classes[::-1])).save(tmp_path / "turned")
    found = compare_two_runs(good, tmp_path / "turned")
    assert found["correct"]["only_a"] == found["correct"]["only_b"] == 0 and found["difference"][
        "nll"
    ] == pytest.approx(0, abs=1e-6)
    replace(bundle, task=Classification(("ant", "bee", "dog"))).save(tmp_path / "other")
    result = asked(good, tmp_path / "other", cwd=tmp_path)
    assert result.returncode == 3 and "other" in result.stderr and "has no classes named cat" in result.stderr
    part = tmp_path / "part"
    part.mkdir()
    for name in ("ant", "bee"):
        (part / name).symlink_to(photos / "test" / name)
    result = asked(good, tmp_path / "other", part, cwd=tmp_path)
    assert result.returncode == 0 and "have different classes" in result.stderr


def test_images_that_one_was_trained_on_are_said(runs, tmp_path):
    _, good, _ = runs
    make_folder(tmp_path / "others", {"train": 4, "val": 2, "test": 2}, size=(20, 20))
    train(str(tmp_path / "others"), out=str(tmp_path / "third"), workers=0, **{**TINY, "epochs": 0.5})
    result = asked(good, tmp_path / "third", "--split", "train", "--json", cwd=tmp_path)
    found = document(result)
    assert found["a"]["trained_on_images"] == 48 and found["b"]["trained_on"] is False
    assert f"{good} was trained on these images" in result.stderr and "third was trained" not in result.stderr


def test_what_cannot_be_read_is_wrong_for_both(runs, tmp_path):
    photos, good, poor = runs
    copy = shutil.copytree(photos / "test", tmp_path / "test")
    (copy / "ant" / "0.png").write_bytes(b"junk")
    assert asked(good, poor, copy, cwd=tmp_path).returncode == 3
    found = document(asked(good, poor, copy, "--bad-images", "skip", "--json", cwd=tmp_path))
    assert (
        found["images"] == 30
        and found["a"]["unreadable"] == found["b"]["unreadable"] == 1
        and found["correct"]["neither"] >= 1
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (["GOOD", "POOR", "--calibrate"], "--calibrate applies to one run, not to two"),
        (["GOOD", "POOR", "--protocol", "knn"], "--protocol applies to one run, not to two"),
        (["GOOD", "PHOTOS", "PHOTOS"], "photos is not a run\n  use vitreous evaluate RUN RUN DATA"),
        (["GOOD", "POOR", "nowhere"], "no such folder"),
    ],
)
def test_what_two_runs_cannot_be_asked(runs, words, message, tmp_path):
    named = dict(zip(("PHOTOS", "GOOD", "POOR"), map(str, runs), strict=True))
    result = asked(*(named.get(word, word) for word in words), cwd=tmp_path)
    assert result.returncode in (2, 3) and message in result.stderr


def several(home, name, seed, classes=("blue", "red")):
    """A bundle that gives each image several of the classes, whatever they are."""
    torch.manual_seed(seed)
    model = create_untrained_model("ViT-16x1/8", 16, len(classes)).eval()
    torch.nn.init.normal_(model.head.weight)
    Bundle(model, Classification(classes, True, "sigmoid"), ImagePreprocess((16, 16))).save(home / name)
    return home / name


def test_several_labels_are_compared_by_map(tmp_path, runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ["path,label,split"]
    for number in range(24):
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(
            tmp_path / f"{number}.png"
        )
        lines.append(f"{number}.png,{'|'.join(('red', 'blue')[: number % 3])},{'test' if number > 4 else 'train'}")
    (tmp_path / "x.csv").write_text("\n".join(lines))
    one, other = several(tmp_path, "one", 0), several(tmp_path, "other", 1, ("red", "blue"))
    found = document(asked(one, other, tmp_path / "x.csv", "--json", cwd=tmp_path))
    for place, run in enumerate((one, other)):
        assert found["metrics"]["map"][place] == pytest.approx(
            evaluate(run, tmp_path / "x.csv", workers=0)["test"]["map"]
        )
    assert found["mcnemar_p"] is None and found["correct"] is None and "mAP" in found["verdict"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    result = asked(one, runs[1], tmp_path / "x.csv", cwd=tmp_path)
    assert result.returncode == 2 and "classifies images into 2 classes (multi-label), " in result.stderr
    for words in (["--abstain", "0.5"], ["--suspects", "s.csv"]):
        result = asked(one, tmp_path / "x.csv", *words, cwd=tmp_path)
        assert result.returncode == 2 and "needs single-label data" in result.stderr


def test_runs_without_a_test_split_are_compared_on_val(runs, tmp_path):
    photos, good, poor = runs
    part = tmp_path / "part"
    part.mkdir()
    for name in ("train", "val"):
        (part / name).symlink_to(photos / name)
    result = asked(good, poor, part, "--json", cwd=tmp_path)
    found = document(result)
    assert (found["split"], found["images"]) == (
        "val",
        12,
    ) and "part has no test split: evaluated on its 12 val images" in result.stderr
    assert asked(good, poor, part, "--split", "test", cwd=tmp_path).returncode == 3
