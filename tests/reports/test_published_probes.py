"""The linear protocols of MAE, DINO and DINOv2 with the published hyperparameters and a frozen model.

Heads train independently, and are selected on validation images only.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitreous
from tests.conftest import make_folder, parse_json_output, run_cli
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.split import ArraySplit, Data
from vitreous.errors import DataError, NonFiniteError, UsageError
from vitreous.inference.open_model import open_bundle
from vitreous.models.zoo import create_untrained_model
from vitreous.reports.answers import EvaluationSettings
from vitreous.reports.pages.report import format_evaluation_line
from vitreous.reports.protocols.heads import HeadConfig, HeadInput, LinearHead, TokenReader, get_best_index, train_heads
from vitreous.reports.protocols.published import (
    DINOV2_LR_GRID,
    build_head_configs,
    evaluate_published_probe,
    plan_probe,
)
from vitreous.reports.protocols.task import ProtocolOptions, ProtocolTask

PROBES = ("mae", "dino", "dinov2")
CPU_OPTIONS = ("--precision", "fp32", "--device", "cpu", "--workers", "0")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Return three classes with 12 training, 4 validation and 6 test images each, which differ by a tint."""
    return make_folder(tmp_path_factory.mktemp("photos") / "photos", {"train": 12, "val": 4, "test": 6})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Return a random encoder with a class token."""
    torch.manual_seed(0)
    return save_encoder(tmp_path_factory.mktemp("bundle") / "model")


def save_encoder(path, **options):
    model = create_untrained_model("ViT-16x2/8", image_size=16, num_classes=0, **options)
    vitreous.save(model, path, preprocess=ImagePreprocess((16, 16), 3))
    return path


def run_evaluate_json(bundle, photos, *arguments):
    return parse_json_output(
        run_cli("evaluate", str(bundle), str(photos), "--protocol", "linear", *arguments, *CPU_OPTIONS, "--json")
    )


def expect_error(bundle, photos, *arguments):
    result = run_cli("evaluate", str(bundle), str(photos), *arguments, *CPU_OPTIONS)
    assert result.returncode == 2, result.stderr
    return " ".join(result.stderr.split())


def make_feature_batches(steps=30, batch=32, width=12, classes=4):
    """Return a function that generates the same batches of separable features in each call."""
    generator = torch.Generator().manual_seed(1)
    centres = 3 * torch.randn(classes, width, generator=generator)
    for step in range(steps):
        labels = torch.randint(classes, (batch,), generator=generator)
        yield centres[labels] + torch.randn(batch, width, generator=generator), labels, 1 - step / steps


# heads


def test_heads_trained_together_match_heads_trained_alone():
    configs = [HeadConfig(lr, HeadInput(1)) for lr in DINOV2_LR_GRID] + [
        HeadConfig(0.1, HeadInput(1), "lars", normed=True)
    ]
    columns = [list(range(12)), [0, 1, 2, 9, 10, 11]]
    heads = [LinearHead(config, head_columns, 4, seed=3) for config in configs for head_columns in columns]
    train_heads(heads, make_feature_batches())
    for number, head in enumerate(heads):
        single_head = LinearHead(head.config, columns[number % 2], 4, seed=3)
        before = single_head.weight.clone()
        train_heads([single_head], make_feature_batches())
        assert not torch.equal(single_head.weight, before)
        for joint_value, single_value in (
            (head.weight, single_head.weight),
            (head.bias, single_head.bias),
            (head.mean, single_head.mean),
        ):
            assert torch.allclose(joint_value, single_value, atol=1e-6, rtol=0)
    assert len({float(head.weight.norm()) for head in heads}) == len(heads)


@pytest.mark.parametrize("normed", [False, True])
def test_a_head_learns_as_pytorch_does(normed):
    """The reference uses autograd, with update steps as in torch.optim.SGD and in MAE's util/lars.py."""
    head = LinearHead(HeadConfig(0.5, HeadInput(1), "lars" if normed else "sgd", normed), list(range(12)), 4, seed=0)
    linear, norm = torch.nn.Linear(12, 4), torch.nn.BatchNorm1d(12, affine=False, eps=1e-6)
    linear.weight.data, linear.bias.data = head.weight.clone(), head.bias.clone()
    momenta = [torch.zeros_like(parameter) for parameter in linear.parameters()]
    for rows, labels, factor in make_feature_batches(10):
        head.step(rows, labels, factor)
        linear.zero_grad()
        F.cross_entropy(linear(norm(rows) if normed else rows), labels).backward()
        if normed:
            linear.weight.grad *= 0.001 * linear.weight.detach().norm() / linear.weight.grad.norm()
        for parameter, momentum in zip(linear.parameters(), momenta, strict=True):
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.data -= factor * 0.5 * len(rows) / 256 * momentum
    assert torch.allclose(head.weight, linear.weight, atol=1e-6)
    assert torch.allclose(head.bias, linear.bias, atol=1e-6)
    rows = next(iter(make_feature_batches()))[0]
    expected = linear(norm.eval()(rows) if normed else rows).detach()
    assert np.allclose(head.logits(rows.numpy()), expected.numpy(), atol=1e-5)


def test_learning_rates_scale_with_the_batch_size():
    config = create_untrained_model("ViT-16x2/8", image_size=16, num_classes=0).config
    bases = {"mae": (0.1,), "dino": (0.001,), "dinov2": DINOV2_LR_GRID * 4}
    for probe, rates in bases.items():
        heads = build_head_configs(probe, config)
        assert tuple(head.lr for head in heads) == rates
        assert [head.scale_lr(1024) for head in heads] == pytest.approx([4 * lr for lr in rates])
    assert [head.optimizer for probe in PROBES for head in build_head_configs(probe, config)[:1]] == [
        "lars",
        "sgd",
        "sgd",
    ]


def test_plans_match_the_published_settings():
    """Batch size, steps, warm-up and schedule on ImageNet; reduced for fewer images."""
    config, images = create_untrained_model("ViT-16x2/8", image_size=16, num_classes=0).config, 1_281_167
    wide = replace(config, width=768, heads=12, depth=12)
    mae, dino, dinov2 = (plan_probe(ProtocolOptions("linear", probe=probe), wide, images) for probe in PROBES)
    assert (mae.batch, mae.steps, mae.warmup) == (16_384, 7038, 782)
    assert (
        mae.get_lr_factor(391) == pytest.approx(0.5) and mae.get_lr_factor(782) == 1 and mae.get_lr_factor(7037) < 1e-6
    )
    assert (dino.batch, dino.steps) == (1024, 125_114)
    assert dino.get_lr_factor(0) == dino.get_lr_factor(1000) == 1 and dino.get_lr_factor(1300) == pytest.approx(
        (1 + np.cos(np.pi / 100)) / 2
    )
    assert (dinov2.batch, dinov2.steps, len(dinov2.heads)) == (1024, 12_500, 52)
    assert dinov2.get_lr_factor(6250) == pytest.approx(0.5)
    assert plan_probe(ProtocolOptions("linear", probe="mae"), replace(wide, width=1024, heads=16), images).steps == 3910
    assert [head.reading for head in dino.heads] == [HeadInput(1, mean=True)]
    small = plan_probe(ProtocolOptions("linear", probe="dino"), replace(config, depth=12), images)
    assert [head.reading for head in small.heads] == [HeadInput(4)]
    small_plan = plan_probe(ProtocolOptions("linear", probe="dinov2"), wide, 500)
    assert (small_plan.batch, small_plan.steps) == (500, 100)
    requested_plan = plan_probe(ProtocolOptions("linear", probe="mae", epochs=3, probe_batch=50), wide, 500)
    assert (requested_plan.batch, requested_plan.steps) == (50, 30)
    assert plan_probe(ProtocolOptions("linear", probe="dino", steps=7), wide, 500).steps == 7
    for probe, filter in zip(PROBES, ("bicubic", "bilinear", "bicubic"), strict=True):
        views = plan_probe(ProtocolOptions("linear", probe=probe), wide, 500).views
        assert (views.crop, views.crop_filter, views.flip) == ((0.08, 1.0), filter, 0.5)
        unaugmented = plan_probe(ProtocolOptions("linear", probe=probe, probe_augment=False), wide, 500).views
        assert (unaugmented.crop, unaugmented.flip) == ((1.0, 1.0), 0)


def test_probe_features_match_the_tokens_of_the_model(bundle):
    """Return the class tokens after the last norm, last block first, and the mean of the patches.

    `columns` gives the position of each.
    """
    model, images = open_bundle(bundle, headless=True).model.eval(), torch.randn(2, 3, 16, 16)
    reader = TokenReader(model, (HeadInput(1), HeadInput(2, mean=True)))
    with torch.inference_mode():
        rows, last = reader(images), model.features(images)
        first = model.encoder.norm(model.features_after(images, [1])[0])
    assert torch.allclose(rows[:, reader.get_columns(HeadInput(1))], last[:, 0])
    assert torch.allclose(
        rows[:, reader.get_columns(HeadInput(1, mean=True))], torch.cat([last[:, 0], last[:, 1:].mean(1)], 1)
    )
    expected = torch.cat([last[:, 0], first[:, 0], last[:, 1:].mean(1)], 1)
    assert torch.allclose(rows[:, reader.get_columns(HeadInput(2, mean=True))], expected)


def test_the_first_of_equal_scores_is_chosen():
    assert (
        get_best_index([0.5, None, 0.9, 0.9]) == 2 and get_best_index([None, 0.0]) == 1 and get_best_index([None]) == 0
    )


# on the command line


@pytest.mark.parametrize("probe", PROBES)
def test_each_probe_is_reproducible_and_leaves_the_bundle_unchanged(bundle, photos, probe):
    def compute_digest():
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in bundle.iterdir()}

    before, arguments = compute_digest(), ("--probe", probe, "--steps", "6", "--probe-batch", "20")
    document, repeated = run_evaluate_json(bundle, photos, *arguments), run_evaluate_json(bundle, photos, *arguments)
    assert compute_digest() == before
    assert {**document, "wall_seconds": 0, "images_per_second": 0} == {
        **repeated,
        "wall_seconds": 0,
        "images_per_second": 0,
    }
    assert (document["probe"], document["steps"], document["batch_size"]) == (probe, 6, 20)
    assert document["train_data"]["images"] == 36 and document["train_data"]["splits"] == ["train"]
    assert document["validation"] == {"split": "val", "images": 12} and document["evaluated"]["images"] == 18
    test, selection = document["test"], document["selection"]
    assert test["images"] == 18 and test["interval"]["top1"][0] <= test["top1"] <= test["interval"]["top1"][1]
    scores = [row["val"] for row in selection["candidates"]]
    assert len(scores) == {"mae": 1, "dino": 1, "dinov2": 52}[probe] and all(0 <= score <= 1 for score in scores)
    assert selection["selected"] == selection["candidates"][scores.index(max(scores))]
    assert selection["selected"]["lr"] == selection["selected"]["base_lr"] * 20 / 256


def test_notes_describe_the_probe(bundle, photos):
    result = run_cli("evaluate", str(bundle), str(photos), "--protocol", "linear", "--probe", "dinov2", *CPU_OPTIONS)
    text = " ".join((result.stdout + result.stderr).split())
    assert result.returncode == 0
    assert "trains 52 heads on 36 images" in text and "12 other images (val) select one of them" in text
    assert (
        "batch 1024 -> 36" in text and "steps 12500 -> 100" in text and "100 steps are few compared with 12500" in text
    )
    assert "selected from 52 heads on 12 validation images" in text


def test_the_page_names_the_probe_and_its_steps():
    line = {
        "time": "2026-01-02T03:04:05+0000",
        "data": "x",
        "split": "test",
        "protocol": "linear",
        "images": 9,
        "top1": 0.5,
    }
    assert (
        format_evaluation_line(line | {"probe": "mae", "steps": 90, "augmented": True})["protocol"]
        == "linear, probe mae, steps 90"
    )
    assert format_evaluation_line(line | {"probe": "mae", "steps": 9, "augmented": False})["protocol"].endswith(
        "steps 9, without crops"
    )


def test_probe_errors_have_a_fix(bundle, photos, tmp_path):
    linear = ("--protocol", "linear", "--probe")
    assert "did you mean mae" in expect_error(bundle, photos, *linear, "maee").lower()
    with pytest.raises(UsageError, match="did you mean dinov2"):
        vitreous.evaluate(bundle, photos, protocol="linear", probe="dinov")
    assert "is for --protocol linear, not knn" in expect_error(bundle, photos, "--protocol", "knn", "--probe", "mae")
    assert "not to the head add --protocol linear" in expect_error(bundle, photos, "--probe", "mae")
    assert "not to the head add --protocol linear" in expect_error(bundle, photos, "--steps", "3")
    assert "has no L2 penalty" in expect_error(bundle, photos, *linear, "mae", "--l2", "1")
    assert "exclude each other" in expect_error(bundle, photos, *linear, "mae", "--steps", "3", "--epochs", "3")
    assert "above 0" in expect_error(bundle, photos, *linear, "mae", "--epochs", "0")
    assert "at least 2" in expect_error(bundle, photos, *linear, "mae", "--probe-batch", "1")
    assert "add --probe mae" in expect_error(bundle, photos, "--protocol", "linear", "--steps", "3")
    assert "--no-probe-augment is for published training schedules" in expect_error(
        bundle, photos, "--protocol", "linear", "--no-probe-augment"
    )
    assert "leave --engine openvino" in expect_error(bundle, photos, *linear, "mae", "--merge-tokens", "1")
    without_token = save_encoder(tmp_path / "plain", class_token=False, pool="mean")
    for probe in ("dino", "dinov2"):
        assert "has none use --probe mae" in expect_error(without_token, photos, *linear, probe)
    windows = tmp_path / "windows"
    torch.manual_seed(0)
    vitreous.save(
        create_untrained_model("Swin-32x1-1/4", image_size=16, num_classes=0),
        windows,
        preprocess=ImagePreprocess((16, 16), 3),
    )
    assert "has none use --probe mae" in expect_error(windows, photos, *linear, "dino")
    for model in (without_token, windows):
        assert (
            run_evaluate_json(model, photos, "--probe", "mae", "--steps", "2")["selection"]["selected"]["blocks"] == 0
        )


# selection of heads


def make_data(counts, seed=0, splits=("train", "val", "test"), **fields):
    """Return two noisy classes that differ in brightness."""
    random, split_data = np.random.default_rng(seed), {}
    for name, count in zip(splits, counts, strict=True):
        labels = np.arange(count) % 2
        pixels = random.integers(0, 120, (count, 16, 16, 3)) + 60 * labels[:, None, None, None]
        split_data[name] = ArraySplit(pixels.astype(np.uint8), labels)
    return Data("made", ("dark", "light"), split_data, **fields)


def run_probe(bundle, data, probe="dinov2", split="test", computing=None, **options):
    options = ProtocolOptions("linear", probe=probe, **{"steps": 8, "probe_batch": 16} | options)
    opened = open_bundle(bundle, headless=True)
    return evaluate_published_probe(
        ProtocolTask("run", "made", data, split, opened, options, computing or EvaluationSettings(workers=0))
    )


def test_heads_are_selected_on_validation_images_only(bundle):
    data = make_data((40, 20, 30))
    first, test = run_probe(bundle, data), data.splits["test"]
    flipped_test = replace(data, splits=data.splits | {"test": test.take(np.arange(30), 1 - test.labels)})
    second = run_probe(bundle, flipped_test)
    assert first.extra["selection"] == second.extra["selection"]
    assert first.report.metrics["top1"] == pytest.approx(1 - second.report.metrics["top1"])
    val = data.splits["val"]
    flipped_val = replace(data, splits=data.splits | {"val": val.take(np.arange(20), 1 - val.labels)})
    third = run_probe(bundle, flipped_val).extra["selection"]
    assert third["selected"] != first.extra["selection"]["selected"]
    pairs = zip(first.extra["selection"]["candidates"], third["candidates"], strict=True)
    assert all(entry["val"] == pytest.approx(1 - two["val"]) for entry, two in pairs)


def test_heads_are_selected_on_held_out_training_images_without_val(bundle):
    with_selection = run_probe(bundle, make_data((50, 20), splits=("train", "test")))
    assert with_selection.extra["validation"] == {"split": "held out of train", "images": 10}
    assert with_selection.extra["train_data"]["images"] == 40
    without_selection = run_probe(bundle, make_data((50, 20), splits=("train", "test")), "mae")  # nothing to select
    assert without_selection.extra["validation"] is None and without_selection.extra["train_data"]["images"] == 50
    assert without_selection.extra["selection"]["candidates"][0]["val"] is None
    # evaluation images are never used for selection
    evaluated_on_val = run_probe(bundle, make_data((50, 20), splits=("train", "val")), split="val")
    assert evaluated_on_val.extra["validation"] == {"split": "held out of train", "images": 10}
    data = make_data((50, 20, 20))
    data = replace(data, full_train_split=make_data((70,), splits=("train",)).splits["train"])
    assert run_probe(bundle, data).extra["validation"] == {"split": "val", "images": 20}
    assert run_probe(bundle, data, "dino").extra["train_data"] == {
        "data": "made",
        "splits": ["train", "val"],
        "images": 70,
    }
    with pytest.raises(DataError, match="too few training images to hold some out"):
        run_probe(bundle, make_data((2, 20), splits=("train", "test")))


def test_the_encoder_is_unchanged_and_runs_once_per_batch(bundle, monkeypatch):
    opened, batch_sizes = open_bundle(bundle, headless=True), []
    before = {name: tensor.clone() for name, tensor in opened.model.state_dict().items()}
    monkeypatch.setattr("tests.reports.test_published_probes.open_bundle", lambda *_, **__: opened)
    original = TokenReader.forward

    def forward(self, images):
        batch_sizes.append(len(images))
        return original(self, images)

    monkeypatch.setattr(TokenReader, "forward", forward)
    run_probe(bundle, make_data((40, 20, 30)))
    assert sum(batch_sizes) == 8 * 16 + 20 + 30
    after = opened.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_data_with_one_class_or_multiple_labels_are_rejected(bundle, monkeypatch):
    one_class = make_data((20, 10, 10))
    train = one_class.splits["train"]
    one_class = replace(
        one_class, splits=one_class.splits | {"train": train.take(np.arange(20), np.zeros(20, np.int64))}
    )
    with pytest.raises(DataError, match="have one class"):
        run_probe(bundle, one_class)
    multilabel = make_data((20, 10, 10))
    tagged = {
        name: split_data.take(np.arange(len(split_data)), np.eye(2, dtype=np.float32)[split_data.labels])
        for name, split_data in multilabel.splits.items()
    }
    with pytest.raises(UsageError, match="several labels per image"):
        run_probe(bundle, replace(multilabel, splits=tagged))
    monkeypatch.setattr(LinearHead, "is_finite", False)
    with pytest.raises(NonFiniteError, match="not finite"):
        run_probe(bundle, multilabel, "mae")


def test_unreadable_images_fail_or_are_skipped(bundle, photos, tmp_path):
    source = tmp_path / "photos"
    shutil.copytree(photos, source)
    for split in ("train", "test"):
        next((source / split / "ant").iterdir()).write_bytes(b"not an image")
    arguments = ("--protocol", "linear", "--probe", "dino", "--steps", "2")
    stopped = run_cli("evaluate", str(bundle), str(source), *arguments, *CPU_OPTIONS)
    assert stopped.returncode and "1 of 36 images cannot be read" in stopped.stderr
    document = parse_json_output(
        run_cli("evaluate", str(bundle), str(source), *arguments, "--bad-images", "skip", *CPU_OPTIONS, "--json")
    )
    assert document["batch_size"] == 35 and document["test"]["unreadable"] == 1
    flat_folder = tmp_path / "flat"
    flat_folder.mkdir()
    shutil.copy(next((photos / "train" / "bee").iterdir()), flat_folder / "one.png")
    unlabelled = run_cli("evaluate", str(bundle), str(flat_folder), *arguments, *CPU_OPTIONS)
    assert unlabelled.returncode and "label" in unlabelled.stderr and "Traceback" not in unlabelled.stderr
