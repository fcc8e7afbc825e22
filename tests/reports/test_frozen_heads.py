"""The protocol `heads`: each image is encoded once, settings are chosen on training images only, and the linear head
can be stored."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import vitreous
from tests.conftest import make_folder, parse_json_output, run_cli
from tests.data.annotations.scenery import write_maps
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sources import open_data
from vitreous.data.split import ArraySplit, Data
from vitreous.errors import DataError, ResourceError, UsageError
from vitreous.inference import features
from vitreous.inference.engine import remove_head
from vitreous.inference.features import POOLED
from vitreous.inference.frozen_encoder import LAYERS, TOKENS, FrozenEncoder, has_block_tokens
from vitreous.inference.open_model import open_bundle
from vitreous.inference.options import InferenceOptions
from vitreous.models.zoo import create_untrained_model
from vitreous.reports.answers import EvaluationSettings
from vitreous.reports.protocols import frozen_maps
from vitreous.reports.protocols.frozen import evaluate_heads
from vitreous.reports.protocols.task import ProtocolOptions, ProtocolTask
from vitreous.tasks.features import FeatureExtraction
from vitreous.weights.bundle import Bundle

CPU = {"device": "cpu", "precision": "fp32", "workers": 0}
SHORT = {"steps": 30, "lr": (1e-3, 1e-2), "weight_decay": (0.0,), "shots": (1, 3), "k": (1, 5)}
EVALUATION_SETTINGS = EvaluationSettings(workers=0, inference_options=InferenceOptions("cpu", "fp32"))


@pytest.fixture(autouse=True)
def feature_cache(tmp_path, monkeypatch):
    """An empty cache for one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vitreous" / "features"


def evaluate(run, data=None, **options):
    return vitreous.evaluate(run, data, protocol="heads", **{**CPU, **SHORT, **options})


def make_task(num_classes=3, labels=None, train=24, test=12, model="ViT-32x2/8", **options):
    """The protocol's input for noise images whose brightness depends on the class."""
    draw = np.random.default_rng(0)
    splits = {}
    for name, count in (("train", train), ("test", test)):
        classes = np.arange(count) % num_classes
        pixels = draw.integers(0, 60, (count, 16, 16, 3)) + (60 * classes)[:, None, None, None]
        splits[name] = ArraySplit(pixels.astype(np.uint8), classes if labels is None else labels(name, classes))
    torch.manual_seed(0)
    encoder = create_untrained_model(model, image_size=16, num_classes=0).eval()
    data = Data("noise", tuple("abcdefgh"[:num_classes]), splits)
    bundle = Bundle(encoder, FeatureExtraction(), ImagePreprocess((16, 16)))
    options = ProtocolOptions("heads", **{**SHORT, **options})
    return ProtocolTask(
        "encoder", "noise", data=data, split="test", bundle=bundle, options=options,
        evaluation_settings=EVALUATION_SETTINGS,
    )  # fmt: skip


def drop_durations(results):
    return [{name: value for name, value in result.items() if name != "seconds"} for result in results]


def test_every_head_is_evaluated_and_a_cached_run_repeats_the_metrics(short_run, feature_cache, monkeypatch):
    document = evaluate(short_run)
    results = document["results"]
    assert [result["head"] for result in results] == ["knn", "linear", "blocks", "attentive", "fewshot", "fewshot"]
    for result in results:
        low, high = result["interval"]["top1"]
        assert result["images"] == 18 and low <= result["top1"] <= high
        if result["head"] != "fewshot":
            assert result["val"] == max(candidate["val"] for candidate in result["candidates"])
    assert len(results[2]["candidates"]) == 4  # two inputs, without a class token, and two learning rates
    assert results[0]["settings"]["k"] in (1, 5) and results[4]["settings"]["shots"] == 1
    best = max((result for result in results if result["val"] is not None), key=lambda result: result["val"])
    assert document["selected"] == best["head"] and document["test"]["top1"] == best["top1"]
    assert document["fit_images"] + document["held_out_images"] == 36
    shapes = {name: entry["shape"] for name, entry in document["features"].items()}
    assert shapes == {"pooled": [32], "layers": [2, 1, 32], "tokens": [4, 32]}
    assert len(list(feature_cache.glob("*.npy"))) == 6
    monkeypatch.setattr(features, "make_engine", None)  # a call would fail
    again = evaluate(short_run)
    assert drop_durations(again["results"]) == drop_durations(results)
    assert all(entry["train"]["reused"] for entry in again["features"].values())
    vitreous.evaluate(short_run, protocol="knn", **CPU)  # the pooled features are shared with the other protocols
    with pytest.raises(TypeError):
        evaluate(short_run, cache=False)


def test_results_are_the_same_without_a_cache(short_run, feature_cache):
    cached, computed = evaluate(short_run), evaluate(short_run, cache=False)
    assert drop_durations(cached["results"]) == drop_durations(computed["results"])
    assert len(list(feature_cache.glob("*.npy"))) == 6


def test_a_changed_dataset_is_encoded_again(short_run, photos, tmp_path):
    folder = make_folder(tmp_path / "photos", {"train": 12, "test": 6})
    assert not evaluate(short_run, folder, heads=("linear",))["features"]["pooled"]["train"]["reused"]
    (next((folder / "train").rglob("*.jpg"), None) or next((folder / "train").rglob("*.png"))).unlink()
    document = evaluate(short_run, folder, heads=("linear",))
    assert not document["features"]["pooled"]["train"]["reused"] and document["features"]["pooled"]["test"]["reused"]
    assert document["features"]["pooled"]["train"]["images"] == 35


def test_evaluated_labels_choose_nothing():
    result = evaluate_heads(make_task())
    shuffled = evaluate_heads(make_task(labels=lambda name, classes: classes if name == "train" else classes[::-1]))
    for one, other in zip(result.results, shuffled.results, strict=True):
        names = ("head", "settings", "val") + ("candidates",) * (one["head"] != "fewshot")
        assert {name: one[name] for name in names} == {name: other[name] for name in names}
    assert result.extra["selected"] == shuffled.extra["selected"]
    assert [entry["top1"] for entry in result.results] != [entry["top1"] for entry in shuffled.results]
    assert result.report.metrics["top1"] > 0.9
    inputs = {(entry["blocks"], entry["mean_patch"]) for entry in result.results[2]["candidates"]}
    assert inputs == {(1, False), (1, True), (2, False), (2, True)}  # of a model with a class token


def test_the_stored_linear_head_predicts_what_was_evaluated(short_run, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the page of a bundle is written to the current folder
    document = evaluate(short_run, heads=("linear", "knn"), out=str(tmp_path / "headed"))
    linear = next(result for result in document["results"] if result["head"] == "linear")
    assert document["saved"] == str(tmp_path / "headed")
    bundle = open_bundle(tmp_path / "headed")
    assert bundle.classes == ("ant", "bee", "cat") and bundle.provenance["protocol"] == "heads"
    stored = vitreous.evaluate(tmp_path / "headed", photos, **CPU)["test"]
    assert stored["top1"] == linear["top1"] and stored["nll"] == pytest.approx(linear["nll"], rel=1e-4)
    with pytest.raises(UsageError, match="already exists"):
        evaluate(short_run, out=str(tmp_path / "headed"))
    with pytest.raises(UsageError, match="out needs the linear head"):
        evaluate(short_run, heads=("knn",), out=str(tmp_path / "other"))


def test_multilabel_images(capsys):
    def mark(name, classes):
        return np.stack([classes == 0, classes > 0, classes < 2], 1).astype(np.float32)

    result = evaluate_heads(make_task(labels=mark))
    assert [entry["head"] for entry in result.results] == ["knn", "linear", "blocks", "attentive"]
    assert result.report.primary == "map" and result.report.metrics["map"] > 0.8
    with pytest.raises(UsageError, match="several labels per image"):
        evaluate_heads(make_task(labels=mark, heads=("fewshot", "knn")))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ViT-32x3/8", {}),
        ("ViT-32x2/8", {"pool": "mean", "class_token": False}),
        ("ViT-32x2/8", {"pool": "attention", "class_token": False, "registers": 2}),
        ("ViT-32x1/8", {"head": {"representation": 24}}),
        ("DeiT-Ti/16-distilled", {"depth": 1}),
        ("BiT-R50x1", {"blocks": (1, 1), "width": 8, "image_size": 32}),
    ],
)
def test_one_pass_computes_the_features_of_the_model(name, options):
    model = create_untrained_model(name, **{"image_size": 16, "num_classes": 3, **options}).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    names = (POOLED, LAYERS, TOKENS) if has_block_tokens(model) else (POOLED, TOKENS)
    encoder, images = FrozenEncoder(model, names), torch.randn(2, 3, *model.config.image)
    with torch.inference_mode():
        tensors = dict(zip(names, encoder.compute_tensors(images), strict=True))
        torch.testing.assert_close(tensors[POOLED], remove_head(model)(images), rtol=1e-4, atol=1e-5)
        tokens = model.features(images)[:, model.config.prefix :]
        torch.testing.assert_close(tensors[TOKENS], tokens, rtol=1e-4, atol=1e-5)
        if LAYERS in names:
            expected = model.get_intermediate_layers(images, encoder.blocks)[::-1]
            means = torch.stack([x.mean(1) for x in expected], 1)
            if getattr(model, "pooled_norm", None) is None or isinstance(model.pooled_norm, torch.nn.Identity):
                torch.testing.assert_close(tensors[LAYERS][:, :, -1], means, rtol=1e-4, atol=1e-5)
        assert encoder(images).shape[1] == sum(array.values for array in encoder.describe_arrays(model.config.image))


def test_a_model_with_stages_has_no_blocks_head():
    model = create_untrained_model("BiT-R50x1", blocks=(1, 1), width=8, image_size=32, num_classes=0).eval()
    preprocess = ImagePreprocess((32, 32))
    task = make_task()
    task = replace(task, bundle=replace(task.bundle, model=model, preprocess=preprocess))
    assert [result["head"] for result in evaluate_heads(task).results][:3] == ["knn", "linear", "attentive"]
    with pytest.raises(UsageError, match="no tokens of the same form"):
        evaluate_heads(replace(task, options=ProtocolOptions("heads", heads=("blocks",))))


def test_input_that_cannot_be_evaluated(short_run, photos, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="trains on the train split"):
        evaluate(short_run, split="train")
    only_test = tmp_path / "only" / "test"
    only_test.parent.mkdir()
    only_test.symlink_to(photos / "test")
    with pytest.raises(DataError, match="no train folder"):
        evaluate(short_run, only_test.parent)
    with pytest.raises(DataError, match="one class"):
        evaluate_heads(make_task(labels=lambda name, classes: classes * 0))
    with pytest.raises(DataError, match="too few training images"):
        evaluate_heads(make_task(train=3))
    with pytest.raises(UsageError, match="needs the tokens of the PyTorch model"):
        evaluate(short_run, precision="int8", engine="openvino")
    with pytest.raises(UsageError, match="few-shot alone"):
        evaluate(short_run, heads=("fewshot",))
    monkeypatch.setattr(features.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10}))
    with pytest.raises(ResourceError, match="do not fit on the disk"):
        evaluate(short_run)


@pytest.mark.parametrize(
    ("protocol", "options", "message"),
    [
        ("knn", {"heads": ("knn",)}, "heads is for protocol='heads', not knn"),
        ("linear", {"out": "folder"}, "out is for protocol='heads', not linear"),
        ("heads", {"heads": ("lineer",)}, "unknown head lineer"),
        ("heads", {"lr": (0.1, 0.0)}, "lr must be above 0, not 0"),
        ("heads", {"weight_decay": (-1.0,)}, "weight_decay must be at least 0, not -1"),
        ("heads", {"epochs": 1, "steps": 2}, "epochs and steps exclude each other"),
        ("heads", {"probe_batch": 7}, "probe_batch is for published training schedules"),
        ("heads", {"steps": 0}, "steps must be at least 1, not 0"),
    ],
)
def test_options_that_do_not_apply(protocol, options, message):
    with pytest.raises(UsageError, match=message):
        ProtocolOptions(protocol, **options)


def test_class_maps_are_segmented_at_their_size(short_run, tmp_path, monkeypatch):
    maps = write_maps(tmp_path / "maps", 40)
    document = evaluate(short_run, maps, steps=100)
    assert [result["head"] for result in document["results"]] == ["knn", "linear"]
    for result in document["results"]:
        low, high = result["interval"]["miou"]
        assert low <= result["miou"] <= high and 0 <= result["val"] <= 1
    split = open_data(maps).split("val")
    pixels = sum(split.target(sample).classes.size for sample in range(len(split)))
    assert np.array(document["confusion"]).sum() == pixels
    assert document["classes"] == ["ground", "square", "disc"]
    monkeypatch.setattr(features, "make_engine", None)
    assert drop_durations(evaluate(short_run, maps, steps=100)["results"]) == drop_durations(document["results"])
    with pytest.raises(UsageError, match="does not segment images"):
        evaluate(short_run, maps, heads=("attentive",))
    with pytest.raises(UsageError, match="out is for heads that classify images"):
        evaluate(short_run, maps, out=str(tmp_path / "headed"))
    monkeypatch.setattr(frozen_maps, "get_free_memory", lambda device: 100)
    with pytest.raises(ResourceError, match="bytes of memory are free"):
        evaluate(short_run, maps)


def test_scores_of_patches_are_resized_linearly():
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    resized = frozen_maps.resize_scores(scores, (1, 2), (2, 4))
    assert resized.shape == (2, 2, 4) and resized[0, 0].tolist() == [1.0, 0.75, 0.25, 0.0]


def test_the_command_prints_one_line_per_head(short_run):
    arguments = ("--precision", "fp32", "--device", "cpu", "--workers", "0", "--steps", "20")
    result = run_cli("evaluate", str(short_run), "--protocol", "heads", *arguments, cwd=short_run.parent)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["head", "settings", "held", "out", "top-1", "seconds"]
    assert [line.split()[0] for line in lines[1:6]] == ["knn", "linear", "blocks", "attentive", "fewshot"]
    assert "held-out training images" in result.stdout and "features of train" in result.stderr
    record = json.loads((short_run / "evaluations.jsonl").read_text().splitlines()[-1])
    assert record["protocol"] == "heads" and record["selected"] in lines[-2]
    document = parse_json_output(
        run_cli("evaluate", str(short_run), "--protocol", "heads", *arguments, "--json", cwd=short_run.parent)
    )
    assert document["protocol"] == "heads" and len(document["results"]) >= 5
    ignored = run_cli("evaluate", str(short_run), "--weight-decay", "1", cwd=short_run.parent)
    assert ignored.returncode == 2 and "--weight-decay applies to --protocol heads" in ignored.stderr
