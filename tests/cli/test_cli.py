"""The command line from a user's point of view."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import TINY_RUN, make_folder, make_image, parse_json_output, run_cli, run_command
from vitreous.cli.main import VERBS, split_settings
from vitreous.jobs import doctor
from vitreous.jobs.train import train
from vitreous.recipes import options as train_options
from vitreous.recipes.options import TrainOptions
from vitreous.weights import options as weights_options

TRAIN_OPTIONS = Path(train_options.__file__).read_text() + Path(weights_options.__file__).read_text()
HEAVY_MODULES = {"torch", "torchvision", "sklearn", "matplotlib", "torchmetrics", "pydantic", "rich", "numpy"}


@pytest.fixture(scope="module")
def trained_run_and_photos(tmp_path_factory):
    """A folder of photographs and a run trained on it."""
    folder = tmp_path_factory.mktemp("trained")
    photos = make_folder(folder / "photos", {"train": 12, "val": 4, "test": 6}, size=(24, 16))
    train(
        str(photos),
        out=str(folder / "run"),
        workers=0,
        **{**TINY_RUN, "epochs": 20, "mixup": 0.0, "lr": 2e-3, "save_every": 20},
    )
    return photos, folder / "run"


TIMED_HELP_SCRIPT = """
import sys, time
from vitreous.cli.main import main
started = 0.0
for words in {lines}:
    sys.argv = ["vitreous", *words, "--help"]
    try:
        main()
    except SystemExit as end:
        print("CODE", end.code, sorted(set(sys.modules) & {heavy}), time.process_time() - started)
    started = time.process_time()
"""


def test_help_is_quick_and_imports_nothing_heavy():
    """All commands in one process: modules imported by one command are visible in the next."""
    lines = [[], *[[verb] for verb in VERBS]]
    code = TIMED_HELP_SCRIPT.format(lines=lines, heavy=HEAVY_MODULES)
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    outputs = re.findall(r"(.*?)^CODE (\d+) (\[[^]]*\]) (\S+)$", printed, re.DOTALL | re.MULTILINE)
    for words, (text, code, heavy, seconds) in zip(lines, outputs, strict=True):
        assert (code, heavy) == ("0", "[]"), words
        # processor time; a generous bound, since benchmarks/ measures the time
        assert float(seconds) < 3, words
        assert not words or (f"usage: vitreous {words[0]} " in text and "Example: vitreous" in text), words
        assert "{None}" not in text and "default: None" not in text and "default: False" not in text, words


def test_train_help_documents_every_default():
    """Each option without a default is a flag, is off, or documents the source of its value."""
    off = {"out", "config", "steps", "group_by", "exclude", "lr_grid", "ray"}
    for name, field in TrainOptions.__dataclass_fields__.items():
        if field.default is None and name not in off:
            text = re.sub(r"\s+", " ", TRAIN_OPTIONS.split(f"    {name}: ")[-1].split('"""')[1])
            assert "(default: " in text, name
    text = re.sub(r"\s+", " ", run_cli("train", "--help").stdout)
    assert "--epochs FLOAT Passes over the training images (default: from the recipe)." in text


def test_version():
    from vitreous import __version__

    assert run_command("--version").stdout.strip() == f"vitreous {__version__}"


@pytest.mark.parametrize(
    "words,expected",
    [
        (["trian", "digits"], "did you mean train?"),
        (["train", "digits", "--lerning-rate", "1"], "--learning-rate"),
        (["train", "digits", "--epoch", "3"], "--epochs"),
        (["train", "digits", "--optimizer", "adamm"], "adamw"),
        (["train", "digits", "--lr", "fast"], "fast"),
        (["train"], "no dataset is given"),
        (["evaluate"], "error: no model given"),
        (["train", "digits", "--epochs", "1", "--steps", "5"], "use one of them"),
        (["train", "digits", "--image-size", "9"], "use --image-size 8, or --patch-size 3"),
        (["train", "digits", "--optimizer.beta", "0.9", "0.95"], "did you mean betas?"),
        (["train", "digits", "--optimizer.betas", "0.9"], "optimizer.betas cannot be 0.9"),
        (
            ["train", "digits", "--accumulate", "50", "--batch-size", "512"],
            "use --accumulate 3 or a smaller --batch-size",
        ),
        (["train", "digits", "--device", "cuda:7"], "use cpu"),
        (["train", "digits", "--model", "ViT-X/16"], "unknown model ViT-X/16"),
        (["train", "digits", "--config", "missing.yaml"], "cannot read the config missing.yaml"),
        (["evaluate", "runs/nothing"], "no run at runs/nothing"),
        (["models", "ViT-BB/16"], "did you mean ViT-B/16?"),
    ],
)
def test_usage_errors_exit_2_with_a_fix(words, expected, tmp_path):
    result = run_cli(*words, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert expected in result.stderr + result.stdout
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir()), "a rejected command must write no files"


def test_underscores_and_dotted_settings():
    assert split_settings(["x", "--optimizer.betas", "0.9", "0.95", "--lr", "1", "--model.width=64"]) == (
        ["x", "--lr", "1"],
        {"optimizer.betas": ["0.9", "0.95"], "model.width": ["64"]},
    )


@pytest.mark.parametrize("words", [["missing/"], ["empty/"], ["one/"]])
def test_bad_data_exit_3(words, tmp_path):
    (tmp_path / "empty").mkdir()
    make_folder(tmp_path / "one", {"": 3}, classes=("ant",))
    started = time.process_time()
    result = run_cli("train", *words, "--json", cwd=tmp_path)
    assert result.returncode == 3 and "use DIR/CLASS" in result.stderr and "Traceback" not in result.stderr
    assert json.loads(result.stdout)["error"]["code"] == 3
    assert time.process_time() - started < 30


def test_a_dry_run_writes_nothing(trained_run_and_photos, tmp_path):
    plan = parse_json_output(
        run_cli(
            "train",
            str(trained_run_and_photos[0]),
            "--dry-run",
            "--json",
            "--model",
            "ViT-32x2/8",
            "--image_size",
            "32",
            cwd=tmp_path,
        )
    )
    assert (plan["model"], plan["resolution"], plan["tokens"]) == ("ViT-32x2/8", "32", 16)
    assert plan["parameters"] > 0 and plan["peak_memory_bytes"] > 0 and plan["seconds_per_step"] > 0
    assert plan["run"]["model"]["image"] == [32, 32]
    assert not list(tmp_path.iterdir())


def test_train_prints_only_the_json_document_on_stdout(trained_run_and_photos, tmp_path):
    words = [w for k, v in TINY_RUN.items() for w in (f"--{k}", str(v))]
    result = run_cli(
        "train",
        str(trained_run_and_photos[0]),
        "--json",
        "--out",
        str(tmp_path / "run"),
        *words,
        "--optimizer.betas",
        "0.8",
        "0.9",
    )
    summary = parse_json_output(result)
    assert summary["test"]["images"] == 18 and summary["run"] == str(tmp_path / "run")
    assert "train 100%" in result.stderr and "validation: top-1" in result.stderr
    assert "betas:\n  - 0.8\n  - 0.9" in (tmp_path / "run" / "config.yaml").read_text()
    assert "--optimizer.betas 0.8 0.9" in (tmp_path / "run" / "command.txt").read_text()


def test_evaluate_reproduces_the_run_metrics_and_records_them(trained_run_and_photos):
    photos, out = trained_run_and_photos
    summary = json.loads((out / "summary.json").read_text())
    num_evaluations = len((out / "evaluations.jsonl").read_text().splitlines())
    evaluation = parse_json_output(run_cli("evaluate", str(out), "--json"))
    assert evaluation["test"] == summary["test"]
    for words in (["--batch-size", "5"], ["--workers", "2"], [str(photos)], [str(photos / "test")]):
        assert parse_json_output(run_cli("evaluate", str(out), *words, "--json"))["test"] == summary["test"], words
    assert len((out / "evaluations.jsonl").read_text().splitlines()) == num_evaluations + 5
    assert parse_json_output(run_cli("evaluate", str(out), "--split", "val", "--json"))["val"] == summary["val"]
    assert sum(map(sum, evaluation["confusion"])) == 18
    table = run_cli("evaluate", str(out)).stdout
    assert "test: top-1" in table and "most confused with" in table


def test_evaluate_matches_classes_by_name(trained_run_and_photos, tmp_path):
    photos, out = trained_run_and_photos
    subset = tmp_path / "part"
    subset.mkdir()
    for name in ("cat", "bee"):
        (subset / name).symlink_to(photos / "test" / name)
    per_class = parse_json_output(run_cli("evaluate", str(out), str(subset), "--json"))["per_class"]
    expected = parse_json_output(run_cli("evaluate", str(out), "--json"))["per_class"]
    assert [row["recall"] for row in per_class] == [None, expected[1]["recall"], expected[2]["recall"]]
    (subset / "dog").symlink_to(photos / "test" / "ant")
    result = run_cli("evaluate", str(out), str(subset))
    assert result.returncode == 3 and "has no classes named dog" in result.stderr


def test_an_unreadable_image_stops_or_counts_as_wrong(trained_run_and_photos, tmp_path):
    out = trained_run_and_photos[1]
    make_folder(tmp_path / "photos", {"train": 12, "val": 4, "test": 6}, size=(24, 16))
    (tmp_path / "photos" / "test" / "ant" / "0.png").write_bytes(b"junk")
    result = run_cli("evaluate", str(out), str(tmp_path / "photos"))
    assert (
        result.returncode == 3 and "ant/0.png: not an image" in result.stderr and "--bad-images skip" in result.stderr
    )
    evaluation = parse_json_output(
        run_cli("evaluate", str(out), str(tmp_path / "photos"), "--bad-images", "skip", "--json")
    )["test"]
    assert evaluation["images"] == 18 and evaluation["unreadable"] == 1 and evaluation["top1"] <= 17 / 18
    (tmp_path / "photos" / "train" / "bee" / "1.png").write_bytes(b"")
    result = run_cli("train", str(tmp_path / "photos"), "--out", str(tmp_path / "run"))
    assert (
        result.returncode == 3
        and "1 of 36 images cannot be read" in result.stderr
        and "bee/1.png: empty file" in result.stderr
    )
    words = [w for k, v in TINY_RUN.items() for w in (f"--{k}", str(v))]
    result = run_cli("train", str(tmp_path / "photos"), "--out", str(tmp_path / "run"), "--bad-images", "skip", *words)
    assert result.returncode == 0, result.stderr
    assert "1 of 36 training images cannot be read and are left out" in result.stderr


def test_predict_matches_evaluate_on_every_file_format(trained_run_and_photos, tmp_path):
    """The same image in every file format gets the probabilities that evaluation computes."""
    from vitreous.data.loader import EvalLoader
    from vitreous.data.sources import open_data
    from vitreous.inference.engine import InferenceOptions, compute_split_logits
    from vitreous.inference.predict import load

    image, deep = (
        make_image(5, (24, 16), 1),
        np.asarray(make_image(5, (24, 16), 1).convert("L")).astype(np.uint16) * 257,
    )
    exif = Image.Exif()
    exif[0x0112] = 6
    encoders = {
        "rgb.png": (image, {}), "rgb.jpg": (image, {}), "rgb.bmp": (image, {}), "rgb.webp": (image, {}), "rgb.tif": (image, {}),
        "grey.png": (image.convert("L"), {}), "grey.jpg": (image.convert("L"), {}), "one.png": (image.convert("1"), {}),
        "palette.png": (image.quantize(64), {}), "animation.gif": (image, {"save_all": True, "append_images": [make_image(9, (24, 16))]}),
        "alpha.png": (image.convert("RGBA"), {}), "la.png": (image.convert("LA"), {}), "cmyk.jpg": (image.convert("CMYK"), {}),
        "deep.png": (Image.fromarray(deep), {}), "deep.tif": (Image.fromarray(deep), {}), "turned.jpg": (image, {"exif": exif}),
        "named.jpg": (image, {"format": "PNG"}),
    }  # fmt: skip
    for label in ("ant", "bee", "cat"):
        (tmp_path / "all" / label).mkdir(parents=True)
    for name, (content, options) in encoders.items():
        content.save(tmp_path / "all" / "bee" / name, **options)
    for label in ("ant", "cat"):
        make_image(1, (24, 16)).save(tmp_path / "all" / label / "x.png")
    predictor = load(trained_run_and_photos[1], InferenceOptions(precision="fp32"))
    data = open_data(tmp_path / "all")
    for split in data.splits.values():
        logits, bad = compute_split_logits(predictor.engine, EvalLoader(split, predictor.card.preprocess))
        assert not bad
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        for probabilities, path in zip(p, split.paths, strict=True):
            prediction = predictor.predict([path], top=3)[0]
            expected = dict(zip(predictor.card.classes, probabilities, strict=True))
            for name, value in zip(prediction.names, prediction.probabilities, strict=True):
                assert value == pytest.approx(expected[name], abs=1e-6), path
    upright = predictor.predict(
        [tmp_path / "all" / "bee" / name for name in ("rgb.png", "rgb.bmp", "alpha.png", "named.jpg", "rgb.tif")]
    )
    assert len({prediction.probabilities for prediction in upright}) == 1


def test_predict_prints_a_table_a_document_and_a_csv(trained_run_and_photos, tmp_path):
    photos, out = trained_run_and_photos
    files = sorted((photos / "test").rglob("*.png"))
    document = parse_json_output(
        run_cli("predict", str(out), *map(str, files), "--top", "2", "--csv", str(tmp_path / "x.csv"), "--json")
    )
    assert [row["path"] for row in document["predictions"]] == list(map(str, files))
    assert all(len(row["classes"]) == 2 and row["error"] is None for row in document["predictions"])
    right = sum(
        row["classes"][0]["class"] == path.parent.name for row, path in zip(document["predictions"], files, strict=True)
    )
    assert right / len(files) == json.loads((out / "summary.json").read_text())["test"]["top1"]
    rows = list(csv.DictReader((tmp_path / "x.csv").read_text().splitlines()))
    assert len(rows) == 2 * len(files) and rows[0]["rank"] == "1"
    assert "0.png" in run_cli("predict", str(out), str(photos / "test")).stdout


def test_predict_stops_at_or_skips_bad_files(trained_run_and_photos, tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"junk")
    make_image(0).save(tmp_path / "good.png")
    words = ["predict", str(trained_run_and_photos[1]), str(tmp_path / "bad.jpg"), str(tmp_path / "good.png")]
    result = run_cli(*words, "--bad-images", "stop")
    assert (
        result.returncode == 3
        and "error: " in result.stderr
        and "bad.jpg: not an image" in result.stderr
        and not result.stdout
    )
    result = run_cli(*words, "--json")
    predictions = json.loads(result.stdout)["predictions"]
    assert result.returncode == 3 and "1 of 2 images could not be read" in result.stderr
    printed = run_cli(*words)
    assert (
        printed.stdout.splitlines()[1].split(maxsplit=1)[1].startswith("cannot be read: not an image of a known format")
    )
    assert (printed.stdout + printed.stderr).count("bad.jpg") == 1 and "note: 1 of 2 images could not be read\n" in (
        printed.stderr
    )
    assert "not an image" in predictions[0]["error"] and predictions[1]["classes"]
    assert run_cli("predict", str(trained_run_and_photos[1]), str(tmp_path / "none.jpg")).returncode == 3
    assert run_cli("predict", str(trained_run_and_photos[1])).returncode == 2


def test_a_damaged_bundle_exits_4(trained_run_and_photos, tmp_path):
    import shutil

    shutil.copytree(trained_run_and_photos[1] / "model", tmp_path / "model")
    (tmp_path / "model" / "weights.safetensors").write_bytes(b"junk")
    result = run_cli("predict", str(tmp_path / "model"), str(trained_run_and_photos[0] / "test" / "ant" / "0.png"))
    assert result.returncode == 4
    assert "weights.safetensors is missing or was modified after it was saved" in result.stderr


def test_finetuning_at_a_higher_resolution_resizes_positions(trained_run_and_photos, tmp_path):
    words = [w for k, v in TINY_RUN.items() if k != "model" for w in (f"--{k}", str(v))]
    result = run_cli(
        "train",
        str(trained_run_and_photos[0]),
        "--init",
        str(trained_run_and_photos[1]),
        "--image-size",
        "32",
        "--out",
        str(tmp_path / "fine"),
        *words,
    )
    assert result.returncode == 0, result.stderr
    assert "started from" in result.stderr and "positions resized 2x3 -> 4" in result.stderr


def test_models_and_doctor_print_documents(monkeypatch):
    models = {entry["name"]: entry for entry in parse_json_output(run_cli("models", "--json"))["models"]}
    assert {"R50+ViT-B/16", "BiT-R152x4", "Axial-ViT-B/16", "DINOv2-g/14-registers", "SAM-H/16"} <= set(models)
    assert models["ViT-B/16"] == {
        "name": "ViT-B/16",
        "image_size": "224",
        "parameters": 86_567_656,
        "tokens": 197,
        "gflops": 35.128,
        "activation_bytes_bf16": 2 * 197 * (11 * (9 * 768 + 2 * 3072) + 2 * 768),  # only the input of the last block
    }
    assert "ViT-L/16" in run_cli("models", "vit-l*", "--image-size", "384").stdout
    custom = parse_json_output(run_cli("models", "ViT-128x6/4", "--image-size", "32", "--json"))["models"]
    assert [entry["name"] for entry in custom] == ["ViT-128x6/4"] and custom[0]["tokens"] == 65
    monkeypatch.setattr(doctor, "BENCHMARK_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "BENCHMARK_BATCH_SIZE", 2)
    document = parse_json_output(run_cli("doctor", "--json"))
    assert document["ok"] and document["train_images_per_second"] > 0 and "cpu" in document["devices"]


@pytest.mark.parametrize("words,unbuffered", [("--version", ""), ("--version", "1"), ("completion bash", "")])
def test_a_closed_stdout_pipe_is_not_an_error(words, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        command = [sys.executable, "-m", "vitreous", *words.split()]
        result = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, env=environment)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("CUDA out of memory"), RuntimeError("… can't allocate memory: you tried")]
)
def test_out_of_memory_is_reported_with_a_fix(monkeypatch, error):
    def exhaust_memory(words):
        raise error

    monkeypatch.setattr("vitreous.cli.main.run_command", exhaust_memory)
    result = run_cli("models")
    assert result.returncode == 6 and result.stderr.startswith("error: out of memory\n  use ")


def test_other_runtime_errors_are_not_reported_as_out_of_memory(monkeypatch):
    def fail(words):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr("vitreous.cli.main.run_command", fail)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run_cli("models")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes anywhere")
def test_an_unwritable_output_is_rejected_before_training(trained_run_and_photos, tmp_path):
    tmp_path.chmod(0o500)
    assert run_cli("train", "digits", "--out", str(tmp_path / "run")).returncode == 6


def test_an_output_below_a_file_is_rejected_before_training(tmp_path):
    (tmp_path / "file").write_text("x")
    result = run_cli("train", "digits", "--out", str(tmp_path / "file" / "run"))
    assert result.returncode == 6 and "choose another --out" in result.stderr
