"""Evaluation protocols on the command line: metrics match references, features are computed once."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

import vitreous
from tests.conftest import make_folder, make_image, parse_json_output, run_cli
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sources import open_data
from vitreous.data.split import ArraySplit, Data
from vitreous.errors import DataError, UsageError
from vitreous.inference import features
from vitreous.inference.open_model import open_bundle
from vitreous.models.zoo import create_untrained_model
from vitreous.reports.answers import EvaluationSettings
from vitreous.reports.protocols.answer_sets import map_imagenet_classes, normalise_class_name
from vitreous.reports.protocols.probes import PROBES
from vitreous.reports.protocols.task import ProtocolOptions, ProtocolTask
from vitreous.tasks.classification import Classification
from vitreous.tasks.classification_metrics import evaluate_label_sets
from vitreous.tasks.features import FeatureExtraction
from vitreous.tasks.intervals import wilson_interval
from vitreous.weights.bundle import Bundle

CPU_OPTIONS = ("--precision", "fp32", "--device", "cpu", "--workers", "0")


@pytest.fixture(scope="module", autouse=True)
def feature_cache(tmp_path_factory):
    """Use a separate feature cache for this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def run_evaluate_json(run, *arguments):
    return parse_json_output(run_cli("evaluate", str(run), *arguments, *CPU_OPTIONS, "--json", cwd=run.parent))


def expect_error(code, run, *arguments):
    result = run_cli("evaluate", str(run), *arguments, *CPU_OPTIONS, cwd=run.parent)
    assert result.returncode == code, result.stderr
    return result.stderr


def compute_features(run, split):
    """Return the features computed by the model, and the labels."""
    bundle = open_bundle(run)
    images = [bundle.preprocess.to_tensor(bundle.preprocess.decode(split.raw(s))) for s in range(len(split))]
    with torch.inference_mode():
        return bundle.model.pool(
            bundle.model.features(bundle.preprocess.normalise(torch.stack(images)))
        ).numpy(), split.labels


def test_knn_matches_scikit_learn(short_run, photos):
    document, data = run_evaluate_json(short_run, "--protocol", "knn", "--k", "3", "20", "9"), open_data(photos)
    train, test = compute_features(short_run, data.split("train")), compute_features(short_run, data.split("test"))
    assert [row["k"] for row in document["results"]] == [3, 9, 20] and document["k"] == 20
    for row in document["results"]:
        classifier = KNeighborsClassifier(
            row["k"], metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07)
        )
        right = int((classifier.fit(*train).predict(test[0]) == test[1]).sum())
        assert (row["top1"], row["interval"]["top1"]) == (right / 18, list(wilson_interval(right, 18)))
    headline = {name: value for name, value in document["results"][2].items() if name != "k"}
    assert document["test"] == headline and document["test"]["nll"] is None
    assert (
        document["protocol"] == "knn"
        and document["classes"] == ["ant", "bee", "cat"]
        and len(document["confusion"]) == 3
    )
    assert (
        vitreous.create("ViT-32x2/8", image_size=16, num_classes=3).config.width
        == document["features"]["train"]["width"]
    )


@pytest.mark.parametrize("protocol", ["knn", "linear", "fewshot"])
def test_training_and_evaluation_images_are_reported(short_run, photos, tmp_path, protocol):
    """For data with splits, and for a folder of classes, from which evaluation images are split."""
    flat_folder = tmp_path / "flat"
    flat_folder.symlink_to(photos / "train")
    for arguments, source, split, bank, count in (
        ([], photos, "test", 36, 18),
        ([str(flat_folder)], flat_folder, "val", 33, 3),
    ):
        result = run_cli(
            "evaluate", str(short_run), *arguments, "--protocol", protocol, *CPU_OPTIONS, "--json", cwd=short_run.parent
        )
        document = parse_json_output(result)
        assert document["train_data"] == {"data": str(source), "splits": ["train"], "images": bank}
        assert document["evaluated"] == {"data": str(source), "split": split, "images": count}
        assert (document["split"], document[split]["images"]) == (split, count)
        assert (
            f"{protocol} trains on {bank} images of {source} (train) and is evaluated on {count} {split} images"
            in result.stderr
        )


def test_features_are_computed_once_for_all_protocols(short_run, monkeypatch):
    run_evaluate_json(short_run, "--protocol", "knn")
    monkeypatch.setattr(features, "make_engine", None)  # a call would fail
    for protocol in ("knn", "linear", "fewshot"):
        document = run_evaluate_json(short_run, "--protocol", protocol)
        assert all(split_features["reused"] for split_features in document["features"].values())
        assert {name: split_features["images"] for name, split_features in document["features"].items()} == {
            "train": 36,
            "test": 18,
        }
    with pytest.raises(TypeError):
        vitreous.evaluate(short_run, protocol=ProtocolOptions("knn", cache=False))


def test_linear_reports_its_penalty_and_how_it_was_selected(short_run):
    document = run_evaluate_json(short_run, "--protocol", "linear")
    assert document["held_out"]["images"] == 6 and document["held_out"]["top1"] == max(
        row["top1"] for row in document["held_out"]["candidates"]
    )
    assert document["l2"] in [row["l2"] for row in document["held_out"]["candidates"]]
    assert document["test"]["top1"] > 0.8 and document["test"]["nll"] < np.log(3)
    fixed = run_evaluate_json(short_run, "--protocol", "linear", "--l2", "0.5")
    assert (fixed["l2"], fixed["held_out"]) == (0.5, None)


def test_fewshot_matches_a_direct_ridge_solve(short_run, photos):
    document, data = (
        run_evaluate_json(short_run, "--protocol", "fewshot", "--shots", "2", "5", "--seed", "1"),
        open_data(photos),
    )
    (x, y), (test, test_labels) = (
        compute_features(short_run, data.split("train")),
        compute_features(short_run, data.split("test")),
    )
    for row in document["results"]:
        top1 = []
        for seed in (1, 2, 3):
            generator = np.random.default_rng(seed)
            shot_indices = np.concatenate(
                [generator.permutation(np.flatnonzero(y == c))[: row["shots"]] for c in range(3)]
            )
            mean, std = x[shot_indices].mean(0, dtype=float), x[shot_indices].std(0, dtype=float) + 1e-5
            train_features, test_features = (
                [np.append((vector - mean) / std, 100.0) for vector in features] for features in (x[shot_indices], test)
            )
            a, b = np.array(train_features), np.eye(3)[y[shot_indices]] * 2 - 1
            weight = np.linalg.solve(a.T @ a + 1024 * np.eye(33), a.T @ b)
            top1.append(float(((np.array(test_features) @ weight).argmax(1) == test_labels).mean()))
        assert [result["top1"] for result in row["per_seed"]] == top1
        assert row["top1"] == pytest.approx(np.mean(top1)) and row["std"] == pytest.approx(np.std(top1, ddof=1))
    assert document["shots"] == 5 and document["test"]["top1"] == document["results"][1]["top1"]


def test_classes_with_fewer_images_than_shots_are_reported(short_run):
    result = run_cli(
        "evaluate",
        str(short_run),
        "--protocol",
        "fewshot",
        "--shots",
        "25",
        "--seeds",
        "1",
        *CPU_OPTIONS,
        cwd=short_run.parent,
    )
    assert result.returncode == 0 and "3 of 3 classes have fewer than 25 training images" in result.stderr
    document = run_evaluate_json(short_run, "--protocol", "fewshot")
    # of the default shots, those with enough images in a class
    assert [row["shots"] for row in document["results"]] == [1, 5, 10]


def test_each_evaluation_is_recorded(short_run):
    run_evaluate_json(short_run, "--protocol", "knn", "--k", "4")
    last = json.loads((short_run / "evaluations.jsonl").read_text().splitlines()[-1])
    assert (last["protocol"], last["k"], last["split"], last["images"]) == ("knn", 4, "test", 18)


def test_val_images_are_not_used_for_training(short_run, tmp_path):
    document = run_evaluate_json(short_run, "--protocol", "knn", "--split", "val")
    assert document["features"]["train"]["images"] == 36 and document["val"]["images"] == 12
    flat_folder = make_folder(tmp_path / "flat", {"": 20})
    result = run_cli(
        "evaluate", str(short_run), str(flat_folder), "--protocol", "knn", *CPU_OPTIONS, "--json", cwd=tmp_path
    )
    assert "evaluated on its 6 val images, split from the training set" in result.stderr
    document = parse_json_output(result)
    assert (document["features"]["train"]["images"], document["val"]["images"]) == (54, 6)


def test_evaluation_on_test_trains_on_all_training_images(short_run, tmp_path):
    source = make_folder(tmp_path / "two", {"train": 10, "test": 2})
    # includes images that are held out for validation
    assert run_evaluate_json(short_run, str(source), "--protocol", "knn")["features"]["train"]["images"] == 30


def test_protocols_work_with_new_classes_and_headless_models(short_run, tmp_path):
    source = make_folder(tmp_path / "other", {"train": 6, "test": 2}, ("x", "y"))
    torch.manual_seed(0)
    Bundle(
        create_untrained_model("ViT-32x1/8", image_size=16, num_classes=0),
        FeatureExtraction(),
        ImagePreprocess((16, 16)),
    ).save(tmp_path / "bundle")
    for model_path in (short_run, tmp_path / "bundle"):
        document = run_evaluate_json(model_path, str(source), "--protocol", "linear")
        assert document["classes"] == ["x", "y"] and document["test"]["top1"] == 1.0


def test_multilabel_data_give_map(short_run, tmp_path):
    rows = ["path,label,split"]
    for index in range(30):
        make_image(index, tint=index % 3).save(tmp_path / f"{index}.png")
        rows.append(f"{index}.png,{('red', 'green', 'green|blue')[index % 3]},{'test' if index > 20 else 'train'}")
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    data = open_data(tmp_path / "table.csv")
    assert data.multilabel
    for protocol in ("knn", "linear"):
        document = run_evaluate_json(short_run, str(tmp_path / "table.csv"), "--protocol", protocol)
        assert document["test"]["map"] > 0.9 and document["test"]["top1"] is None
    assert "few-shot needs one" in expect_error(2, short_run, str(tmp_path / "table.csv"), "--protocol", "fewshot")


def test_unreadable_images_stop_or_count_as_wrong(short_run, tmp_path):
    source = make_folder(tmp_path / "photos", {"train": 12, "test": 6})
    readable_result = run_evaluate_json(short_run, str(source), "--protocol", "knn", "--k", "5")["test"]
    for damaged_file in ("test/ant/2.png", "train/bee/0.png"):
        (source / damaged_file).write_bytes(b"not an image")
    assert "train/bee/0.png" in expect_error(3, short_run, str(source), "--protocol", "knn", "--k", "5")
    document = run_evaluate_json(short_run, str(source), "--protocol", "knn", "--k", "5", "--bad-images", "skip")[
        "test"
    ]
    assert (readable_result["top1"], document["unreadable"]) == (1.0, 1) and document["top1"] == 17 / 18
    shots = run_evaluate_json(short_run, str(source), "--protocol", "fewshot", "--shots", "5", "--bad-images", "skip")
    assert shots["test"]["top1"] <= 17 / 18 and shots["test"]["unreadable"] == 1


def test_protocol_errors_have_a_fix(short_run, tmp_path):
    assert "--k 37 exceeds the 36 training images" in expect_error(2, short_run, "--protocol", "knn", "--k", "5", "37")
    assert "evaluate val or test" in expect_error(2, short_run, "--protocol", "linear", "--split", "train")
    assert "at least 1" in expect_error(2, short_run, "--protocol", "knn", "--k", "0")
    assert "above 0" in expect_error(2, short_run, "--protocol", "knn", "--temperature", "0")
    assert "a folder with a subfolder for each task" in expect_error(2, short_run, "--protocol", "vtab")
    assert "needs --labels FILE" in expect_error(2, short_run, "--protocol", "real")
    assert "--calibrate applies to predictions of the head" in expect_error(
        2, short_run, "--protocol", "knn", "--calibrate"
    )
    with pytest.raises(UsageError, match="did you mean linear"):
        vitreous.evaluate(short_run, protocol="liner")


@pytest.mark.parametrize("protocol", PROBES)
def test_data_without_training_images_or_with_one_class_are_rejected(short_run, protocol):
    pixels, labels = np.zeros((4, 16, 16, 3), np.uint8), np.zeros(4, np.int64)
    for splits, message in (({"test"}, "no training images"), ({"train", "test"}, "have one class")):
        data = Data("made", ("a", "b"), {name: ArraySplit(pixels, labels) for name in splits})
        task = ProtocolTask(
            "run",
            "made",
            data,
            "test",
            open_bundle(short_run),
            ProtocolOptions(protocol),
            EvaluationSettings(workers=0),
        )
        with pytest.raises(DataError, match=message):
            PROBES[protocol](task)


# ImageNet's alternative labels


def test_label_set_metrics_match_values_by_hand():
    logits = np.array(
        [[5, 4, 3, 2, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6], [9, 0, 0, 0, 0, 0, 0], [9, 8, 7, 6, 5, 4, 3]], float
    )
    is_correct = np.zeros((4, 7), bool)
    # ranks of a correct label: second, first, none, sixth
    is_correct[0, [1, 6]], is_correct[1, [6, 0]], is_correct[3, 5] = True, True, True
    report = evaluate_label_sets(logits, is_correct, np.ones(4, bool))
    assert (report.images, report.metrics["top1"], report.metrics["top5"]) == (3, 1 / 3, 2 / 3)
    assert report.intervals["top1"] == wilson_interval(1, 3)
    report = evaluate_label_sets(logits, is_correct, np.array([True, False, True, True]))
    assert (report.metrics["top1"], report.metrics["top5"], report.unreadable) == (0, 1 / 3, 1)


@pytest.fixture(scope="module")
def thousand_class_bundle(tmp_path_factory):
    """Return a random bundle with 1,000 classes."""
    torch.manual_seed(0)
    model = create_untrained_model("ViT-32x1/8", image_size=16, num_classes=1000).eval()
    torch.nn.init.normal_(model.head.weight)
    home = tmp_path_factory.mktemp("thousand") / "model"
    Bundle(model, Classification(tuple(map(str, range(1000)))), ImagePreprocess((16, 16))).save(home)
    return home


def compute_logits(home, files):
    """Return the model's logits of image files."""
    bundle = open_bundle(home)
    images = [bundle.preprocess.to_tensor(bundle.preprocess.decode(str(file))) for file in files]
    with torch.inference_mode():
        return bundle.model(bundle.preprocess.normalise(torch.stack(images))).numpy()


def test_real_uses_label_sets_in_file_name_order(thousand_class_bundle, tmp_path):
    names = [f"n0000000{number % 2}/ILSVRC2012_val_0000000{number}.png" for number in (1, 2, 3, 4, 6)]
    for number, name in enumerate(names):
        (tmp_path / "val" / name).parent.mkdir(parents=True, exist_ok=True)
        make_image(number).save(tmp_path / "val" / name)
    best = np.argsort(-compute_logits(thousand_class_bundle, [tmp_path / "val" / name for name in names]), 1)
    # for images 1, 2, 3, 4, 5, 6
    sets = [[int(best[0, 0])], [7, int(best[1, 0])], [], [int(best[3, 3])], [1, 2], [int(best[4, 9])]]
    (tmp_path / "real.json").write_text(json.dumps(sets))
    document = run_evaluate_json(
        thousand_class_bundle, str(tmp_path / "val"), "--protocol", "real", "--labels", str(tmp_path / "real.json")
    )
    figures = document["results"][0]
    assert (figures["top1"], figures["top5"], figures["images"], document["images_without_label"]) == (
        2 / 4,
        3 / 4,
        4,
        1,
    )

    def get_error(content, source="val"):
        (tmp_path / "bad.json").write_text(content)
        return expect_error(
            3,
            thousand_class_bundle,
            str(tmp_path / source),
            "--protocol",
            "real",
            "--labels",
            str(tmp_path / "bad.json"),
        )

    assert "do not all have one of the 3 label sets" in get_error("[[1], [2], [3]]")
    assert "the labels of image 2 are [1000]" in get_error("[[1], [1000], [3]]")
    assert "not a list of lists" in get_error('{"1": [2]}')
    assert "bad.json is not valid JSON" in get_error("[[1], ")
    assert "no image of" in get_error(json.dumps([[]] * 6))
    make_folder(tmp_path / "other", {"": 2}, ("n00000001", "n00000002"))
    assert "0.png is not an ImageNet validation image" in get_error(json.dumps(sets), "other")


@pytest.mark.parametrize("form", ["json", "csv"])
def test_objectnet_maps_classes_and_cuts_the_frame(thousand_class_bundle, tmp_path, form):
    names, files = ("air_freshener", "alarm_clock", "banana"), []
    for number, name in enumerate(names):
        home = tmp_path / "images" / name
        home.mkdir(parents=True)
        for index in range(2):
            unframed = make_image(10 * number + index)
            unframed.save(tmp_path / f"{name}{index}.png")
            framed = Image.new("RGB", (18, 18), (255, 0, 0))
            framed.paste(unframed, (1, 1))
            framed.save(home / f"{index}.png")
            files.append(tmp_path / f"{name}{index}.png")
    scores = compute_logits(thousand_class_bundle, files)
    best = np.argsort(-scores, 1)
    numbers = {"Alarm clock": [int(best[2, 0]), int(best[3, 7])], "Banana": [int(best[4, 2])], "Tench": [0]}
    if form == "json":
        (tmp_path / "map.json").write_text(json.dumps(numbers))
    else:
        rows = [f"{name},{number}" for name, class_numbers in numbers.items() for number in class_numbers]
        (tmp_path / "map.csv").write_text("\n".join(["class,number", *rows]))
    document = run_evaluate_json(
        thousand_class_bundle,
        str(tmp_path / "images"),
        "--protocol",
        "objectnet",
        "--labels",
        str(tmp_path / f"map.{form}"),
    )
    mapped = sorted({number for name in ("Alarm clock", "Banana") for number in numbers[name]})
    counts = {"all": [0, 0], "mapped": [0, 0]}
    for row, name in ((2, "Alarm clock"), (3, "Alarm clock"), (4, "Banana"), (5, "Banana")):
        among = {"all": list(best[row]), "mapped": [c for c in best[row] if c in mapped]}
        for class_set, ranked in among.items():
            counts[class_set][0] += ranked[0] in numbers[name]
            counts[class_set][1] += bool(set(ranked[:5]) & set(numbers[name]))
    for row in document["results"]:
        assert [row["top1"] * 4, row["top5"] * 4] == counts[row["candidate_classes"]]
    assert (document["classes_mapped"], document["images_not_mapped"], document["test"]["images"]) == (2, 2, 4)
    assert document["test"]["top1"] == document["results"][0]["top1"]


def test_invalid_class_maps_are_rejected(thousand_class_bundle, tmp_path):
    source = make_folder(tmp_path / "images", {"": 2})

    def get_error(name, content):
        (tmp_path / name).write_text(content)
        return expect_error(
            3, thousand_class_bundle, str(source), "--protocol", "objectnet", "--labels", str(tmp_path / name)
        )

    assert "contains no class of" in get_error("map.json", '{"dog": 1}')
    assert "line 3: cat,x" in get_error("map.csv", "class,number\nant,3\ncat,x\n")
    assert "ant is [1, true]" in get_error("map.json", '{"ant": [1, true]}').replace("True", "true")
    assert "cannot be read" in expect_error(
        3, thousand_class_bundle, str(source), "--protocol", "objectnet", "--labels", str(tmp_path / "none.json")
    )


def test_imagenet_heads_are_recognised():
    from vitreous.data.layouts.imagenet import get_torchvision_names

    assert map_imagenet_classes("m", tuple(map(str, range(1000)))).tolist() == list(range(1000))
    assert map_imagenet_classes("m", tuple(f"{name}, other" for name in get_torchvision_names())).tolist() == list(
        range(1000)
    )
    with pytest.raises(UsageError, match="1,000 classes"):
        map_imagenet_classes("m", tuple(reversed(get_torchvision_names())))
    with pytest.raises(UsageError, match="1,000 classes"):
        map_imagenet_classes("m", ("cat", "dog"))
    assert normalise_class_name("Wine-bottle (red)") == "wine_bottle_red"
