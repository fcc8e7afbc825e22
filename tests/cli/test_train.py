"""The header and notes of `vitreous train`, its dry run, and its required arguments."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from tests.conftest import TINY_RUN, make_folder, parse_json_output, run_cli
from vitreous.cli import train as verb
from vitreous.cli.console import Console, format_byte_count, format_split_metrics
from vitreous.jobs.train import train

TINY_ARGUMENTS = [w for k, v in {**TINY_RUN, "epochs": 1}.items() for w in (f"--{k}", str(v))]


@pytest.fixture(scope="module")
def photo_folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("home") / "photos", {"train": 8, "val": 2, "test": 2}, size=(24, 16))


def test_training_begins_with_a_header(photo_folder, tmp_path):
    result = run_cli(
        "train", str(photo_folder), "--out", str(tmp_path / "run"), "--workers", "0", "--json", *TINY_ARGUMENTS
    )
    assert parse_json_output(result)["steps"] == 2
    lines = result.stderr.splitlines()
    header = dict(line.split(maxsplit=1) for line in lines[:7])
    assert header["data"] == f"{photo_folder}: 24 train, 6 val, 6 test images"
    assert header["classes"] == "3 (ant, bee, cat)"
    assert header["model"].startswith("ViT-32x2/8 at 16x24 pixels, ") and header["model"].endswith("from scratch")
    assert header["recipe"].startswith("small, muon with learning rate 0.002")
    assert (header["device"], header["precision"]) == ("cpu", "fp32")
    assert header["steps"] == "2 of 8 x 2 images, 1 epochs"
    assert not any(line.startswith("train ") for line in lines[:7])


def test_a_dry_run_is_readable_and_shows_progress(photo_folder):
    words = [
        "train",
        str(photo_folder),
        "--dry-run",
        "--model",
        "ViT-32x2/8",
        "--image-size",
        "32",
        "--device",
        "cpu",
        "--workers",
        "0",
    ]
    result = run_cli(*words)
    assert result.returncode == 0, result.stderr
    memory = next(line for line in result.stdout.splitlines() if line.startswith("peak memory"))
    assert memory.split()[-1] in ("MiB", "GiB") and "bytes" not in memory
    assert "timing steps   0%" in result.stderr and "timing steps 100%" in result.stderr


@pytest.mark.parametrize(
    "count,text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
    ],
)
def test_bytes_are_readable(count, text):
    assert format_byte_count(count) == text
    assert format_byte_count(2**50) == "1024.0 TiB"


def test_a_run_resumes_without_a_data_argument(photo_folder, tmp_path, monkeypatch):
    """With `--resume --out RUN`, with `--resume` alone, which uses runs/latest, and from Python."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "runs" / "one"
    train(str(photo_folder), out=str(out), workers=0, **TINY_RUN)
    weights, summary = (
        (out / "model" / "weights.safetensors").read_bytes(),
        json.loads((out / "summary.json").read_text()),
    )
    calls = (
        lambda: parse_json_output(run_cli("train", "--resume", "--out", str(out), "--workers", "0", "--json")),
        lambda: parse_json_output(run_cli("train", "--resume", "--json")),
        lambda: train(out=str(out), resume=True),
    )
    for resume in calls:
        (out / "summary.json").unlink()
        shutil.rmtree(out / "model")
        shutil.rmtree(max((out / "checkpoints").glob("step-*")))
        resumed = resume()
        assert (resumed["data"], resumed["steps"], resumed["val"]) == (
            str(photo_folder),
            summary["steps"],
            summary["val"],
        )
        assert (out / "model" / "weights.safetensors").read_bytes() == weights


def test_train_without_a_run_requires_data(tmp_path):
    result = run_cli("train", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == ("error: no dataset is given\n  give DATA: `digits`, a folder of images or a CSV file\n")
    result = run_cli("train", "--resume", cwd=tmp_path)
    assert result.returncode == 2 and "is not a run folder: it has no config.yaml" in result.stderr


def test_training_few_photos_from_scratch_suggests_pretrained_weights(photo_folder, tmp_path):
    advice = "are few for training a Vision Transformer from scratch"
    large = ["--model", "ViT-32x1/16", "--image-size", "96", "--dry-run", "--device", "cpu", "--workers", "0"]
    stderr = run_cli("train", str(photo_folder), *large).stderr
    assert f"24 photographs {advice}" in stderr and "--init vit-s16-augreg" in stderr
    assert advice not in run_cli("train", "digits", *large[:2], "--image-size", "32", *large[4:]).stderr
    generator = run_cli("train", str(photo_folder), "--recipe", "sit", "--model", "DiT-32x1/16", *large[2:])
    assert generator.returncode == 0 and advice not in generator.stderr
    train(str(photo_folder), out=str(tmp_path / "run"), workers=0, **{**TINY_RUN, "epochs": 0.5, "image_size": 96})
    assert advice not in run_cli("train", str(photo_folder), "--init", str(tmp_path / "run"), *large[4:]).stderr


@pytest.mark.parametrize("name", ["ViT-B/16", "vit_base_patch16_224", "B/16"])
def test_a_model_name_is_rejected_as_weights(photo_folder, name):
    result = run_cli("train", str(photo_folder), "--init", name)
    assert (
        result.returncode == 4 and f"no weights at {name}: it is the name of a model, not of weights" in result.stderr
    )
    assert "use vit-b16-augreg, or another name of `vitreous models --weights`" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_weights_path_lists_the_supported_sources(photo_folder):
    result = run_cli("train", str(photo_folder), "--init", "missing.npz")
    assert result.returncode == 4 and "no weights at missing.npz\n" in result.stderr
    assert "timm:NAME.TAG" in result.stderr and "hf:ORG/NAME" in result.stderr


def test_metrics_of_every_evaluator_are_printed():
    """The primary metric of a summary is printed first, with its interval, even if it is unknown to the package."""
    knn = {"knn_top1": 0.75, "images": 8, "interval": {"knn_top1": [0.4, 0.95]}, "primary": "knn_top1"}
    assert (
        format_split_metrics("validation", knn)
        == "validation: k-NN top-1 75.00% (95 % interval 40.0% to 95.0%), 8 images"
    )
    unknown_metric = {"error": 12.3456, "images": 3, "interval": {}, "primary": "error", "better": "lower"}
    assert format_split_metrics("test", unknown_metric) == "test: error 12.35, 3 images"
    multilabel = {"map": 0.5, "macro_f1": 0.25, "micro_f1": 0.5, "nll": 0.7, "top1": None, "images": 4, "interval": {}}
    assert (
        format_split_metrics("val", multilabel)
        == "val: mAP 50.00%, macro F1 25.00%, micro F1 50.00%, NLL 0.700, 4 images"
    )
    assert format_split_metrics(
        "test", {"knn_top1": None, "images": 0, "interval": {}, "primary": "knn_top1"}
    ).endswith("k-NN top-1 not measured, 0 images")


def test_a_headless_run_prints_its_metrics_and_suggests_embed(tmp_path, monkeypatch, capsys):
    (tmp_path / "model.json").write_text('{"task": {"name": "features"}}')

    def launch(options, listener, begin):
        begin(SimpleNamespace(model=SimpleNamespace(classes=0), objective=SimpleNamespace(ships_features=True)), None)
        val = {"knn_top1": 0.5, "images": 4, "interval": {"knn_top1": [0.2, 0.8]}, "primary": "knn_top1"}
        return {"val": val, "test": None, "model": "ViT", "parameters": 5, "wall_seconds": 60.0, "run": str(tmp_path)}

    monkeypatch.setattr("vitreous.jobs.train.launch_training", launch)
    monkeypatch.setattr(verb, "print_header", lambda *given: None)
    verb.run(verb.Options(data="digits"), Console())
    first_line, *other_lines = capsys.readouterr().out.splitlines()
    assert first_line == "validation: k-NN top-1 50.00% (95 % interval 20.0% to 80.0%), 4 images"
    assert not any(line.startswith("test") for line in other_lines) and other_lines[-1].startswith(
        f"next       vitreous embed {tmp_path} "
    )
