"""Regression: the loss matches its loop, missing labels, and runs of `train`."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import vitreous
from tests.conftest import TINY_RUN, make_image, run_cli
from tests.objectives.sessions import create_session
from vitreous.data.augmentation.augment import Augment
from vitreous.errors import DataError, UsageError
from vitreous.jobs.soup import soup
from vitreous.models.config import MlpConfig, ViTConfig
from vitreous.models.zoo import build_model
from vitreous.objectives.base import ObjectiveSetting, TrainingProgress
from vitreous.objectives.regression import RegressionConfig, RegressionObjective, value_loss
from vitreous.recipes.architecture import choose_architecture
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo
from vitreous.recipes.registry import RECIPES
from vitreous.reports.answers import EvaluationSettings
from vitreous.reports.compare import compare_two_runs
from vitreous.reports.evaluate import evaluate
from vitreous.tasks.regression import Regression as RegressionTask
from vitreous.training.folder import RunFolder
from vitreous.training.loop import run_training_loop
from vitreous.weights.adopt import open_weights, read_weights_info
from vitreous.weights.bundle import load_bundle

QUICK_OPTIONS = {key: value for key, value in TINY_RUN.items() if key not in ("mixup", "epochs")} | {
    "epochs": 2,
    "workers": 0,
}
MODEL_CONFIG = ViTConfig(image=(8, 8), patch=(4, 4), classes=2, width=16, depth=1, heads=2, mlp=MlpConfig(hidden=32))
LOSS_FORMULAS = {
    "mse": lambda e: e * e,
    "l1": abs,
    "huber": lambda e: e * e / 2 if abs(e) <= 0.7 else 0.7 * (abs(e) - 0.35),
}


@pytest.mark.parametrize("loss", LOSS_FORMULAS)
def test_value_loss_matches_the_loop(loss):
    outputs, labels = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    labels[0, 1], labels[3] = math.nan, math.nan
    weights = torch.tensor([1.0, 2.0, 0.5])
    total = 0.0
    for row in range(5):
        for target_index in range(3):
            if not math.isnan(labels[row, target_index]):
                total += weights[target_index] * LOSS_FORMULAS[loss](
                    (outputs[row, target_index] - labels[row, target_index]).item()
                )
    outputs.requires_grad_(True)
    computed = value_loss(outputs, labels, loss, delta=0.7, weights=weights)
    assert computed.item() == pytest.approx(total.item() / 15)
    computed.backward()
    assert outputs.grad.isfinite().all() and not outputs.grad[3].any() and outputs.grad[0, 1] == 0


def test_micro_batch_losses_average_to_the_batch_loss(tmp_path):
    """With missing values, the sum is divided by the number of images, not of values."""
    session, state = create_session("values", tmp_path)
    _, batch = next(session.batches(state))
    assert batch["labels"].isnan().any()
    micro_losses = [
        state.objective({name: e[a : a + 2] for name, e in batch.items()})["loss"].item() for a in range(0, 8, 2)
    ]
    assert np.mean(micro_losses) == pytest.approx(state.objective(batch)["loss"].item(), rel=1e-5)


def test_targets_are_standardised():
    labels = np.array([[2001.5, 1.0], [2003.5, math.nan], [2005.5, 3.0]])
    config = RegressionConfig().fitted(labels)
    assert config.mean == (2003.5, 2.0) and config.std == pytest.approx((math.sqrt(8 / 3), 1.0))
    assert config.present == pytest.approx((1, 2 / 3)) and config.fitted(labels * 2) == config
    objective = RegressionObjective(
        build_model(MODEL_CONFIG), config, ObjectiveSetting(targets=("year", "size"), views=Augment())
    )
    batch = {"images": torch.zeros(3, 3, 8, 8), "labels": torch.from_numpy(labels), "positions": torch.arange(3)}
    standardised = objective.prepare(batch, TrainingProgress())["labels"]
    assert standardised.dtype == torch.float32
    assert torch.allclose(standardised.nanmean(0), torch.zeros(2), atol=1e-6) and standardised[1].isnan().tolist() == [
        False,
        True,
    ]
    assert objective.task() == RegressionTask(("year", "size"), config.mean, config.std)
    # targets have equal weight: missing labels are compensated for
    assert objective.weights.tolist() == pytest.approx([1, 1.5])


@pytest.mark.parametrize(("changes", "message"), [
    ({"loss": "softmax"}, "unknown regression loss softmax"), ({"delta": 0.0}, "delta must be above 0"),
    ({"mean": (1.0,)}, "must have one number per target"), ({"std": (0.0,), "mean": (1.0,), "present": (1.0,)}, "above 0"),
    ({"patch_dropout": 1.0}, "patch_dropout must be"),
])  # fmt: skip
def test_invalid_settings_are_rejected(changes, message):
    with pytest.raises(UsageError, match=message):
        RegressionConfig(**changes)


def test_incompatible_models_and_views_are_rejected():
    config = RegressionConfig()
    config.check(MODEL_CONFIG, ("a", "b"), Augment())
    with pytest.raises(UsageError, match="the model has 2 outputs, but the data have 1 targets"):
        config.check(MODEL_CONFIG, ("a",), Augment())
    with pytest.raises(UsageError, match="MixUp and CutMix mix classes"):
        config.check(MODEL_CONFIG, ("a", "b"), Augment(mixup=0.2))


def test_regression_learns_one_batch(tmp_path):
    """The targets are the mean red and blue of 32 images; every step uses the same batch."""
    session, state = create_session("values", tmp_path, batch_size=32, epochs=60.0)
    pair, losses = next(session.batches(state)), []
    run_training_loop(
        state, iter(lambda: pair, None), [(1, lambda s: (losses.append(s.losses), setattr(s, "losses", 0.0)))]
    )
    assert losses[0] > 0.3 and np.mean(losses[-10:]) < 0.1 * losses[0]


@pytest.fixture(scope="module")
def measured_images(tmp_path_factory):
    """Return a table of 40 images with their brightness in an arbitrary unit, and a size of which half are missing."""
    home = tmp_path_factory.mktemp("measured")
    rows = ["path,glow,size,split"]
    for index in range(40):
        image = make_image(index, (16, 16), index % 3).point(lambda v, i=index: v * (0.3 + i / 60))
        image.save(home / f"{index}.png")
        glow = 1000 + np.asarray(image).mean() / 8
        split = "test" if index % 10 == 9 else "val" if index % 10 == 8 else "train"
        rows.append(f"{index}.png,{glow:.4f},{'' if index % 2 else index},{split}")
    (home / "values.csv").write_text("\n".join(rows) + "\n")
    return home


@pytest.fixture(scope="module")
def regression_run(measured_images, tmp_path_factory):
    """Return a run with two targets, and its summary."""
    out = tmp_path_factory.mktemp("run") / "run"
    return out, vitreous.train(measured_images / "values.csv", out=out, progress=False, **QUICK_OPTIONS)


def test_run_stores_targets_and_standardisation(measured_images, regression_run):
    out, summary = regression_run
    bundle = load_bundle(out / "model")
    assert bundle.task.targets == ("glow", "size") and bundle.classes == ()
    labels = np.genfromtxt(measured_images / "values.csv", delimiter=",", skip_header=1)[:, 1]
    train = labels[np.arange(40) % 10 < 8]
    assert bundle.task.mean[0] == pytest.approx(train.mean()) and bundle.task.std[0] == pytest.approx(train.std())
    stored = RunFolder(out).run()
    assert stored.recipe == "regression" and stored.data.targets == ("glow", "size") and stored.data.classes == ()
    assert summary["val"]["primary"] == "r2" and summary["test"]["images"] == 4
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert any(line.get("val/mae") is not None for line in lines)
    page = (out / "report.html").read_text()
    assert "glow: predicted and true" in page and "glow: residuals" in page and "<h2>Targets</h2>" in page
    assert "size: residuals" not in page  # no test image has a size
    assert "Images with the largest error" in page and "<h2>Metrics per class</h2>" not in page


class StopRun(Exception):
    """Raised by a listener to stop a run."""


class StopAfterImages(vitreous.progress.NullListener):
    """Stops a run after `images` training images."""

    def __init__(self, images: int) -> None:
        self.images = images

    def progress(self, verb, done, total, text):
        if verb == "train" and done >= self.images:
            raise StopRun


def test_resumed_regression_run_is_bit_identical(measured_images, regression_run, tmp_path):
    out, _ = regression_run
    stopped = tmp_path / "stopped"
    with pytest.raises(StopRun):
        vitreous.train(measured_images / "values.csv", out=stopped, listener=StopAfterImages(32), **QUICK_OPTIONS)
    assert not (stopped / "model").exists() and list((stopped / "checkpoints").glob("step-*"))
    vitreous.train(resume=True, out=stopped, progress=False)
    uninterrupted, resumed = (load_bundle(model_path / "model") for model_path in (out, stopped))
    assert uninterrupted.task == resumed.task
    tensors = resumed.model.state_dict()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in uninterrupted.model.state_dict().items())


def test_evaluate_and_predict_agree(measured_images, regression_run, tmp_path):
    out, summary = regression_run
    document = vitreous.evaluate(out)
    assert document["test"]["mae"] == pytest.approx(summary["test"]["mae"])
    assert [row["target"] for row in document["targets"]] == ["glow", "size"] and document["most_confused"] is None
    paths = [measured_images / f"{index}.png" for index in range(9, 40, 10)]
    predictions = vitreous.load(out, device="cpu").predict(paths)
    labels = [
        float((measured_images / "values.csv").read_text().splitlines()[1 + index].split(",")[1])
        for index in range(9, 40, 10)
    ]
    errors = [abs(prediction.values[0] - label) for prediction, label in zip(predictions, labels, strict=True)]
    assert np.mean(errors) == pytest.approx(document["targets"][0]["mae"], rel=1e-3)
    arguments = ["predict", str(out), *map(str, paths), "--device", "cpu"]
    assert run_cli(*arguments, "--out", str(tmp_path / "p.csv")).returncode == 0
    head, *rows = (tmp_path / "p.csv").read_text().splitlines()
    assert head == "path,glow,size,error"
    assert [float(row.split(",")[1]) for row in rows] == pytest.approx(
        [prediction.values[0] for prediction in predictions], rel=1e-6
    )
    listed = json.loads(run_cli(*arguments, "--json").stdout)["predictions"]
    assert [row["values"]["size"] for row in listed] == pytest.approx(
        [prediction.values[1] for prediction in predictions]
    )


def test_prediction_file_is_resumed(measured_images, regression_run, tmp_path):
    """One row per image; a first value of 1 is not treated as a rank."""
    out, _ = regression_run
    arguments = ["predict", str(out), *(str(measured_images / f"{n}.png") for n in range(6)), "--device", "cpu"]
    arguments += ["--out", str(tmp_path / "p.csv")]
    assert run_cli(*arguments).returncode == 0
    complete_text = (tmp_path / "p.csv").read_text()
    (tmp_path / "p.csv").write_text("".join(line + "\n" for line in complete_text.splitlines()[:4]))
    job = json.loads((tmp_path / "p.csv.job.json").read_text())
    (tmp_path / "p.csv.job.json").write_text(json.dumps(job | {"finished": False}))
    assert run_cli(*arguments, "--resume").returncode == 0
    assert (tmp_path / "p.csv").read_text() == complete_text


@pytest.mark.parametrize(("arguments", "message"), [
    (["evaluate", "RUN", "--calibrate"], "--calibrate is for image classification, and RUN predicts values of"),
    (["evaluate", "RUN", "--protocol", "knn"], "--protocol knn is for classes, but DATA has values of glow, size"),
    (["predict", "RUN", "IMAGE", "--top", "2"], "--top is for image classifiers"),
    (["train", "DATA", "--recipe", "photos"], "photos learns classes, but DATA has values of glow (32 images), size"),
    (["train", "DATA", "--mixup", "0.2"], "MixUp and CutMix mix classes"),
    (["train", "DATA", "--loss", "softmax"], "unknown regression loss softmax"),
    (["train", "DATA", "--sampling", "balanced"], "--sampling balanced needs classes, and regression does"),
    (["train", "DATA", "--class-weights", "balanced"], "--class-weights balanced needs classes, and regression"),
    (["train", "DATA", "--targets", "age"], "has no column age"),
    (["train", "--resume", "RUN", "--targets", "size", "--epochs", "9"], "targets: ('glow', 'size') -> ('size',)"),
    (["data", "pack", "DATA", "--out", "PACK"], "DATA has values, but a pack stores only images and their classes"),
])  # fmt: skip
def test_classification_options_are_rejected(measured_images, regression_run, tmp_path, arguments, message):
    names = {"RUN": regression_run[0], "DATA": measured_images / "values.csv", "IMAGE": measured_images / "1.png"}
    result = run_cli(*(str(names.get(word, word)) for word in arguments), cwd=tmp_path)
    for name, path in names.items():
        message = message.replace(name, str(path))
    assert result.returncode and message in result.stderr and "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def worse_run(regression_run, tmp_path_factory):
    """Return the model of `regression_run` with swapped targets and a mean that is off by one std."""
    bundle = load_bundle(regression_run[0] / "model")
    task, state = bundle.task, bundle.model.state_dict()
    bundle.model.load_state_dict(state | {name: state[name].flip(0) for name in state if name.startswith("head.")})
    bundle.model.head.bias.data += 1
    path = tmp_path_factory.mktemp("worse") / "worse"
    replace(bundle, task=RegressionTask(task.targets[::-1], task.mean[::-1], task.std[::-1])).save(path)
    return path


def test_paired_comparison_of_regression_runs(measured_images, regression_run, worse_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # reports of bundles are written to the working directory
    out, _ = regression_run
    document = compare_two_runs(out, worse_run, split="train", evaluation_settings=EvaluationSettings(workers=0))
    evaluations = [
        evaluate(run, measured_images / "values.csv", split="train", workers=0)["train"] for run in (out, worse_run)
    ]
    for key in ("r2", "mae", "rmse", "spearman"):
        assert document["metrics"][key] == pytest.approx([evaluation[key] for evaluation in evaluations])
        assert document["difference"][key] == pytest.approx(evaluations[1][key] - evaluations[0][key])
    assert [row["target"] for row in document["targets"]] == ["glow", "size"]
    assert [row["images"] for row in document["targets"]] == [32, 16]
    low, high = document["interval"]["r2"]
    assert low <= document["difference"]["r2"] <= high
    assert json.loads(json.dumps(document, allow_nan=False)) == document and document["mcnemar_p"] is None
    itself = compare_two_runs(out, out / "model", split="val", evaluation_settings=EvaluationSettings(workers=0))
    assert itself["verdict"] == "no significant difference: both have the same R² (95 % interval 0.000 to 0.000)"


def test_a_comparison_is_printed(regression_run, worse_run, tmp_path):
    result = run_cli(
        "evaluate", str(regression_run[0]), str(worse_run), "--split", "train", "--workers", "0", cwd=tmp_path
    )
    assert result.returncode == 0 and "second minus first" in result.stdout and "MAE +" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("run is better by ") and " R² (95 % interval " in result.stdout


def test_comparing_runs_without_common_targets_is_rejected(regression_run, tmp_path):
    bundle = load_bundle(regression_run[0] / "model")
    replace(bundle, task=RegressionTask(("age", "height"), (0.0, 0.0), (1.0, 1.0))).save(tmp_path / "other")
    with pytest.raises(UsageError, match=r"run predicts glow, size, .*other predicts age, height: they have no target"):
        compare_two_runs(regression_run[0], tmp_path / "other")


def test_regression_soup_is_selected_by_r2(measured_images, regression_run, worse_run, tmp_path):
    """Heads are averaged by target name, and a soup with a biased model is not selected."""
    runs = [regression_run[0], worse_run]
    document = soup(runs, tmp_path / "both", workers=0)
    ours, theirs, averaged = (
        load_bundle(model_path) for model_path in (runs[0] / "model", worse_run, tmp_path / "both")
    )
    order = [averaged.task.targets.index(name) for name in ours.task.targets]
    rows = averaged.model.head.bias.detach()[order], ours.model.head.bias.detach() + 0.5
    assert torch.allclose(*rows) and averaged.task.outputs in (ours.task.outputs, theirs.task.outputs)
    scores = {row["run"]: row["score"] for row in document["ingredients"]}
    assert document["val"]["primary"] == "r2"
    measured_alone = evaluate(runs[0], measured_images / "values.csv", split="val", workers=0)["val"]
    assert scores[str(runs[0])] == pytest.approx(measured_alone["r2"])
    greedy = soup(runs, tmp_path / "greedy", greedy=True, workers=0)
    best = max(greedy["ingredients"], key=lambda row: row["score"])
    assert best["selected"] and greedy["val"]["r2"] >= best["score"]


def test_soup_rejects_differently_standardised_targets(regression_run, tmp_path):
    bundle = load_bundle(regression_run[0] / "model")
    mean, std = (1.0, *bundle.task.mean[1:]), bundle.task.std
    bundle.model.head.bias.data += 1
    replace(bundle, task=RegressionTask(bundle.task.targets, mean, std)).save(tmp_path / "other")
    with pytest.raises(UsageError, match=r"cannot be averaged:\n    mean and std of glow: \(.*\) -> \(.*\)"):
        soup([regression_run[0], tmp_path / "other"], tmp_path / "soup", workers=0)


def test_checkpoint_stores_the_regression_task(regression_run):
    """The checkpoint's config.yaml contains the targets and their standardisation."""
    path = next((regression_run[0] / "checkpoints").glob("step-*"))
    task = load_bundle(regression_run[0] / "model").task
    assert open_weights(path).task == task and read_weights_info(path).classifies


def test_regression_fine_tuning_with_same_and_other_targets(measured_images, regression_run, tmp_path):
    """The head is reused for the same targets and reset for others; `--init` uses fine-tuning hyperparameters."""
    out, _ = regression_run
    options = {**QUICK_OPTIONS, "epochs": 1, "init": str(out / "model"), "ema": 0, "progress": False}
    options.pop("model")
    same_targets, other_targets = tmp_path / "same", tmp_path / "other"
    vitreous.train(measured_images / "values.csv", out=same_targets, **options, lr=1e-9, weight_decay=0.0)
    before, after = (load_bundle(model_path / "model").model.state_dict() for model_path in (out, same_targets))
    assert torch.allclose(before["head.weight"], after["head.weight"], atol=1e-6)
    vitreous.train(measured_images / "values.csv", out=other_targets, targets=["size"], loss="l1", **options)
    task = load_bundle(other_targets / "model").task
    assert task.targets == ("size",) and RunFolder(other_targets).run().objective.loss == "l1"


def test_a_loader_gives_values(measured_images):
    loader = vitreous.create_loader(measured_images / "values.csv", batch_size=8, model="ViT-32x2/8")
    assert "targets: 2 (glow, size)" in repr(loader)
    batch = next(iter(loader))
    assert batch["labels"].shape == (8, 2) and batch["labels"][:, 0].min() > 1000


def test_lr_grid_is_scored_by_r2(measured_images, tmp_path):
    summary = vitreous.train(
        measured_images / "values.csv",
        out=tmp_path / "grid",
        lr_grid=(1e-3, 3e-3),
        progress=False,
        **QUICK_OPTIONS | {"epochs": 1},
    )
    reason = summary["lr_grid"]["choice"]["reason"]
    assert summary["lr_grid"]["trials"][0]["metric"] == "r2" and "%" not in reason


def test_non_numeric_labels_are_rejected(tmp_path):
    make_image(0).save(tmp_path / "a.png"), make_image(1).save(tmp_path / "b.png")
    (tmp_path / "t.csv").write_text("path,label\na.png,cat\nb.png,dog\n")
    with pytest.raises(DataError, match="has classes, such as cat, but no values"):
        vitreous.train(tmp_path / "t.csv", recipe="regression", out=tmp_path / "run", progress=False)


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [((160, 120), {}, 160), ((100, 100), {}, 96), ((600, 800), {}, 224), ((160, 120), {"image_size": 192}, 192)],
)
def test_small_photos_are_not_enlarged_from_scratch(size, options, expected):
    recipe, data = RECIPES["regression"], DatasetInfo(500, size, 3)
    model = choose_architecture(TrainOptions("table", **options), data, 1, recipe=recipe)
    assert model.image == (expected, expected)
    enlarged = choose_architecture(TrainOptions("table", **options), data, 2, recipe=RECIPES["photos"])
    assert enlarged.image == ((options.get("image_size") or 224,) * 2)
