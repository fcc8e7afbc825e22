"""`vitreous evaluate` of one run: temperature, abstention, outliers, suspected labels, and notes."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.conftest import TINY_RUN, make_folder, parse_json_output, run_cli
from vitreous.errors import DataError, UsageError, WeightsError
from vitreous.inference.predict import load
from vitreous.jobs.train import train
from vitreous.reports.evaluate import EvaluateOptions, evaluate
from vitreous.weights.bundle import load_bundle

CLASS_NAMES = ("ant", "bee", "cat")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return tmp_path_factory.mktemp("judged")


@pytest.fixture(scope="module")
def photos(workspace):
    """Return classes that are easy to separate; in `val` and `test`, one image of each class has a wrong label."""
    root = make_folder(workspace / "photos", {"train": 16, "val": 8, "test": 8})
    for split in ("val", "test"):
        for name, wrong_name in zip(CLASS_NAMES, (*CLASS_NAMES[1:], CLASS_NAMES[0]), strict=True):
            (root / split / name / "0.png").rename(root / split / wrong_name / f"turned-from-{name}.png")
    return root


@pytest.fixture(scope="module")
def trained_run(workspace, photos):
    """Return a run trained on the classes."""
    options = {
        **TINY_RUN,
        "epochs": 20,
        "lr": 3e-3,
        "drop_path": 0.0,
        "save_every": 50,
        "evaluate_every": 100,
        "ema": 0.5,
    }
    train(str(photos), out=str(workspace / "run"), workers=0, **options)
    return workspace / "run"


@pytest.fixture
def run_copy(trained_run, tmp_path, monkeypatch):
    """Return a copy of the run that a test may modify, with a separate cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return shutil.copytree(trained_run, tmp_path / "run")


def run_evaluate_json(run, *arguments):
    """Return the document of `vitreous evaluate RUN ARGUMENTS`, and its stderr."""
    result = run_cli(
        "evaluate", str(run), *map(str, arguments), "--workers", "0", "--device", "cpu", "--json", cwd=run.parent
    )
    return parse_json_output(result), result.stderr


@pytest.mark.parametrize("layout", ["splits", "classes"])
def test_a_run_without_a_test_split_is_evaluated_on_val(photos, tmp_path, layout):
    """The report of such a run suggests this command: `vitreous evaluate RUN`."""
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train", "val") if layout == "splits" else CLASS_NAMES:
        (data / name).symlink_to(photos / (name if layout == "splits" else f"train/{name}"))
    summary = train(str(data), out=str(tmp_path / "out"), workers=0, **{**TINY_RUN, "epochs": 1})
    document, stderr = run_evaluate_json(tmp_path / "out")
    assert document["split"] == "val" and document["val"] == summary["val"] and document["test"] is None
    count = summary["val"]["images"]
    assert f"no test split: evaluated on its {count} val images" in stderr
    assert ("split from the training set" in stderr) == (layout == "classes")
    logged = [json.loads(line) for line in (tmp_path / "out" / "evaluations.jsonl").read_text().splitlines()]
    assert [reading["split"] for reading in logged] == ["val"]
    rejected = run_cli("evaluate", str(tmp_path / "out"), "--split", "test")
    assert rejected.returncode == 3 and "has no test split" in rejected.stderr
    assert run_cli("evaluate", str(tmp_path / "out")).stdout.startswith("val: top-1 ")


def test_a_temperature_is_fitted_on_val_stored_and_used(run_copy, photos):
    weights = (run_copy / "model" / "weights.safetensors").read_bytes()
    before, _ = run_evaluate_json(run_copy)
    assert before["calibration"] is None
    document, stderr = run_evaluate_json(run_copy, "--calibrate")
    calibration = document["calibration"]
    assert calibration["fitted_on"] == {"data": str(photos), "split": "val", "images": 24}
    assert f"temperature {calibration['temperature']:.3f}, fitted on 24 val images" in stderr
    assert calibration["val"]["after"]["nll"] < calibration["val"]["before"]["nll"]
    assert calibration["test"]["before"]["nll"] == pytest.approx(before["test"]["nll"])
    assert calibration["test"]["after"] == pytest.approx({name: document["test"][name] for name in ("nll", "ece")})
    for name in ("top1", "macro_f1"):
        assert document["test"][name] == before["test"][name]
    bundle = load_bundle(run_copy / "model")
    assert (
        bundle.classification.temperature == calibration["temperature"]
        and (run_copy / "model" / "weights.safetensors").read_bytes() == weights
    )
    repeated, stderr = run_evaluate_json(run_copy, "--split", "val")
    assert (
        repeated["val"]["nll"] == pytest.approx(calibration["val"]["after"]["nll"])
        and "used to fit the temperature" in stderr
    )
    # from raw logits, not from logits divided by the first temperature
    fitted_again, _ = run_evaluate_json(run_copy, "--calibrate")
    assert fitted_again["calibration"]["temperature"] == pytest.approx(calibration["temperature"])


def test_predict_divides_logits_by_the_temperature(run_copy, photos):
    files = sorted((photos / "test" / "ant").iterdir())
    predictions = load(run_copy).predict(files, top=3)
    run_evaluate_json(run_copy, "--calibrate")
    t = load_bundle(run_copy / "model").classification.temperature
    for before, after in zip(predictions, load(run_copy).predict(files, top=3), strict=True):
        assert before.names == after.names
        powers = np.array(before.probabilities) ** (1 / t)
        assert after.probabilities == pytest.approx(powers / powers.sum(), rel=1e-4)


def test_temperature_defaults_to_one_and_invalid_values_are_rejected(run_copy):
    path = run_copy / "model" / "model.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in stored.items() if name != "temperature"}))
    assert load_bundle(run_copy / "model").classification.temperature == 1.0
    for odd in (0, -1, "2", True, None, float("inf")):
        path.write_text(json.dumps(stored | {"temperature": odd}))
        with pytest.raises(WeightsError, match="temperature"):
            load_bundle(run_copy / "model")


def test_a_temperature_survives_conversion_but_not_another_head(run_copy, tmp_path):
    run_evaluate_json(run_copy, "--calibrate")
    t = load_bundle(run_copy / "model").classification.temperature
    for arguments, expected in (([], t), (["--image-size", "32"], t), (["--num-classes", "5"], 1.0)):
        out = tmp_path / f"made{len(arguments)}{expected}"
        assert run_cli("convert", str(run_copy), str(out), *arguments, cwd=tmp_path).returncode == 0
        assert load_bundle(out).classification.temperature == expected


def test_calibration_without_val_images_or_errors_is_rejected(run_copy, photos, tmp_path):
    shutil.copytree(run_copy / "model", tmp_path / "bundle")
    with pytest.raises(UsageError, match="no val split"):
        evaluate(tmp_path / "bundle", photos / "test", settings=EvaluateOptions(calibrate=True), workers=0)
    make_folder(tmp_path / "easy", {"train": 2, "val": 2, "test": 2})
    before = (tmp_path / "bundle" / "model.json").read_bytes()
    with pytest.raises(DataError, match="are predicted correctly"):
        evaluate(tmp_path / "bundle", tmp_path / "easy", settings=EvaluateOptions(calibrate=True), workers=0)
    assert (tmp_path / "bundle" / "model.json").read_bytes() == before


def test_abstention_in_evaluate_matches_predict(run_copy, photos, tmp_path):
    document, stderr = run_evaluate_json(run_copy, "--abstain", "0.9")
    files = sorted((photos / "test").glob("*/*.png"))
    predictions = load(run_copy).predict(files, top=1, abstain=0.9)
    assert document["abstain"]["rejected"] == sum(prediction.unsure for prediction in predictions)
    assert all(prediction.unsure == (prediction.probabilities[0] < 0.9) for prediction in predictions)
    assert "AURC" in stderr and 0 < document["abstain"]["coverage"] <= 1
    table = tmp_path / "x.csv"
    arguments = ("predict", str(run_copy), str(photos / "test" / "ant"), "--abstain", "1", "--csv", str(table))
    assert "unsure (" in run_cli(*arguments, cwd=tmp_path).stdout
    rows = list(csv.DictReader(table.open()))
    assert {row["unsure"] for row in rows} == {"unsure"} and rows[0]["probability"]
    assert all(
        prediction_row["unsure"]
        for prediction_row in parse_json_output(run_cli(*arguments, "--json", cwd=tmp_path))["predictions"]
    )
    for verb in ("evaluate", "predict"):
        result = run_cli(verb, str(run_copy), str(photos / "test"), "--abstain", "1.5", cwd=tmp_path)
        assert result.returncode == 2 and "--abstain must be above 0" in result.stderr


def test_wrong_labels_are_suspected(run_copy, photos, tmp_path):
    """Exactly the three wrong labels of 24 are found."""
    shutil.move(photos / "test" / "ant" / "turned-from-cat.png", photos / "test" / "ant" / "=turned-from-cat.png")
    try:
        document, stderr = run_evaluate_json(run_copy, "--suspects", tmp_path / "s.csv")
    finally:
        shutil.move(photos / "test" / "ant" / "=turned-from-cat.png", photos / "test" / "ant" / "turned-from-cat.png")
    rows = list(csv.DictReader((tmp_path / "s.csv").open()))
    assert {(row["path"].rsplit("turned-from-")[-1], row["label"]) for row in rows} == {
        ("ant.png", "bee"),
        ("bee.png", "cat"),
        ("cat.png", "ant"),
    }
    assert all(row["predicted_class"] == row["knn_class"] == row["path"].rsplit("from-")[-1][:3] for row in rows)
    assert document["suspects"]["count"] == 3 and "3 of 24 labels are suspect" in stderr
    assert document["most_confused"]["ordered"][0]["count"] == 1 and "most confused pairs" in stderr


def test_training_images_are_excluded_from_their_own_neighbours(run_copy, photos, tmp_path):
    """A training label that was changed after training is suspected, although the memory contains it."""
    copy = shutil.copytree(photos, tmp_path / "photos")
    (copy / "train" / "ant" / "3.png").rename(copy / "train" / "bee" / "was-ant.png")
    config = run_copy / "config.yaml"
    config.write_text(config.read_text().replace(str(photos), str(copy)))
    document, stderr = run_evaluate_json(run_copy, "--split", "train", "--suspects", tmp_path / "s.csv")
    assert [row["path"].endswith("was-ant.png") for row in document["suspects"]["top"]] == [True]
    assert (
        document["trained_on"] is True
        and document["trained_on_images"] == 48
        and "was trained on these images" in stderr
    )


def test_csv_cells_with_spreadsheet_formulas_are_escaped(tmp_path):
    from vitreous.system.tables import write_csv_file

    write_csv_file(str(tmp_path / "x.csv"), ["path", "score"], [["=cmd()", "-1.5"], ["@x", "2"], ["-rf", "0"]])
    assert [row[0] for row in csv.reader((tmp_path / "x.csv").open())][1:] == ["'=cmd()", "'@x", "'-rf"]
    assert (tmp_path / "x.csv").read_text().splitlines()[1].endswith(",-1.5")


def test_noise_images_score_as_outliers(run_copy, photos, tmp_path):
    noise_folder = tmp_path / "noise"  # a folder of images without classes is enough
    noise_folder.mkdir()
    for number in range(20):
        image = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        image[number % 8 :: 8] = 255
        Image.fromarray(image).save(noise_folder / f"{number}.png")
    document, stderr = run_evaluate_json(run_copy, "--outliers", tmp_path / "o.csv", "--against", noise_folder)
    rows = list(csv.DictReader((tmp_path / "o.csv").open()))
    scores = [float(row["score"]) for row in rows]
    assert len(rows) == 24 and scores == sorted(scores, reverse=True)
    assert (
        document["outliers"]["top"][0]["path"] == rows[0]["path"] and document["outliers"]["fitted_on"]["images"] == 48
    )
    assert document["outliers"]["against"]["images"] == 20 and document["outliers"]["against"]["auroc"] > 0.8
    assert "AUROC" in stderr


def test_evaluating_on_training_images_is_reported(run_copy, photos, tmp_path):
    assert run_evaluate_json(run_copy)[0]["trained_on"] is False
    document, stderr = run_evaluate_json(run_copy, photos, "--split", "train")
    assert (
        document["trained_on"] is True
        and document["trained_on_images"] == 48
        and "was trained on these images" in stderr
    )
    links = tmp_path / "links"
    for name in CLASS_NAMES:
        (links / name).mkdir(parents=True)
        (links / name / "seen").symlink_to(photos / "train" / name)
        (links / name / "unseen").symlink_to(photos / "test" / name)
    document, stderr = run_evaluate_json(run_copy, links)
    assert document["trained_on_images"] == 48 and "was trained on 48 of these 72 images" in stderr
    copied_photos = shutil.copytree(photos, tmp_path / "elsewhere")  # the same data, by fingerprint
    assert run_evaluate_json(run_copy, copied_photos, "--split", "train")[0]["trained_on_images"] == 48
    assert run_evaluate_json(run_copy, copied_photos)[0]["trained_on"] is False
    shutil.copytree(run_copy / "model", tmp_path / "bundle")
    # bundles do not contain this information
    assert run_evaluate_json(tmp_path / "bundle", photos)[0]["trained_on"] is None


def test_training_images_of_the_initial_run_are_reported(run_copy, photos, tmp_path):
    """A run that was initialised from another run also reports the training images of that run.

    A run of a grid search has used `val` to select its learning rate.
    """
    trial = tmp_path / "grid" / "trials" / "lr-0.003"
    make_folder(tmp_path / "more", {"train": 4, "val": 2})
    train(
        str(tmp_path / "more"),
        out=str(trial),
        init=str(run_copy),
        workers=0,
        keep_last=True,
        **{**TINY_RUN, "epochs": 1},
    )
    assert run_evaluate_json(trial, photos, "--split", "train")[0]["trained_on_images"] == 48
    assert run_evaluate_json(trial, "--split", "val")[0]["selected_on"] == []
    (tmp_path / "grid" / "trials.json").write_text("{}")
    document, stderr = run_evaluate_json(trial, "--split", "val")
    assert document["selected_on"] == ["choose the learning rate"] and "used to choose the learning rate" in stderr


def test_unreadable_images_are_neither_predicted_nor_suspected(run_copy, photos, tmp_path):
    copy = shutil.copytree(photos, tmp_path / "photos")
    (copy / "test" / "ant" / "1.png").write_bytes(b"junk")
    document, _ = run_evaluate_json(
        run_copy,
        copy,
        "--bad-images",
        "skip",
        "--abstain",
        "0.34",
        "--suspects",
        tmp_path / "s.csv",
        "--outliers",
        tmp_path / "o.csv",
    )
    assert (
        document["abstain"]["accepted"] == 23
        and document["suspects"]["images"] == 23
        and document["outliers"]["images"] == 23
    )
    assert document["test"]["unreadable"] == 1 and "ant/1.png" not in (tmp_path / "o.csv").read_text()


def test_one_image_is_evaluated_with_every_option(run_copy, tmp_path):
    make_folder(tmp_path / "one", {"train": 2, "test": 1})
    for name in ("bee", "cat"):
        shutil.rmtree(tmp_path / "one" / "test" / name)
    document, _ = run_evaluate_json(
        run_copy,
        tmp_path / "one",
        "--abstain",
        "0.5",
        "--suspects",
        tmp_path / "s.csv",
        "--outliers",
        tmp_path / "o.csv",
    )
    assert document["test"]["images"] == 1 and document["outliers"]["images"] == 1
    assert document["test"]["interval"]["nll"] is None


def test_int8_is_always_calibrated_on_training_images(run_copy, photos, tmp_path, monkeypatch):
    """`evaluate` and `predict` calibrate on the run's training images; a bare bundle on its input files."""
    monkeypatch.chdir(tmp_path)
    from vitreous.inference import engine
    from vitreous.inference.engine import InferenceOptions, TorchEngine

    sets = []

    def record_calibration(model, preprocess, options, iterate_images):
        sets.append([bytes(image.numpy()) for image in iterate_images()])
        return TorchEngine(model, preprocess, precision="fp32")

    monkeypatch.setattr(engine, "OpenVinoEngine", record_calibration)
    how, p = InferenceOptions("cpu", "int8", "openvino"), load_bundle(run_copy / "model").preprocess

    def get_inputs(files):
        return [bytes(p.to_array(p.decode(file))) for file in files]

    other_data, files = make_folder(tmp_path / "others", {"": 4}), sorted((photos / "test").rglob("*.png"))
    evaluate(run_copy, workers=0, how=how)
    evaluate(run_copy, str(other_data), workers=0, how=how)
    load(run_copy, how, files)
    load(run_copy, how)
    assert all(images == sets[0] for images in sets) and sorted(sets[0]) == sorted(
        get_inputs((photos / "train").rglob("*.png"))
    )
    load(run_copy / "model", how, files)
    assert sets.pop() == get_inputs(files)
    evaluate(run_copy / "model", str(photos), workers=0, how=how)
    assert sets.pop() == sets[0]  # the training split of the data
    (run_copy / "config.yaml").write_text(
        (run_copy / "config.yaml").read_text().replace(str(photos), str(tmp_path / "gone"))
    )
    load(run_copy, how, files)
    assert sets.pop() == get_inputs(files)
