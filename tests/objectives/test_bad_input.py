"""Runs without labels or teachers are rejected before writing, and self-supervised training ignores labels."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from safetensors.torch import load_file

import vitreous
from tests.conftest import make_image, run_cli
from tests.objectives.test_unlabelled import OBJECTIVE_SETTINGS
from vitreous.errors import DataError, UsageError, VitreousError, WeightsError
from vitreous.models.config import transformer_config
from vitreous.models.zoo import build_model

TINY_OPTIONS = {
    "model": "ViT-16x1/4",
    "image_size": 16,
    "device": "cpu",
    "workers": 0,
    "precision": "fp32",
    "batch_size": 8,
}


@pytest.fixture(scope="module")
def image_folders(tmp_path_factory):
    """Return a folder with 24 images (flat, and in two classes) and a short MAE run on them."""
    image_folders = tmp_path_factory.mktemp("data")
    for index in range(24):
        for folder in ("flat", f"classes/{'ab'[index % 2]}"):
            (image_folders / folder).mkdir(parents=True, exist_ok=True)
            make_image(index, (16, 16), index % 3).save(image_folders / folder / f"{index}.png")
    for suffix in ("pt", "onnx"):
        (image_folders / f"junk.{suffix}").write_text("junk")
    shape = {
        "image": (16, 16),
        "patch": (4, 4),
        "classes": 2,
        "width": 16,
        "depth": 1,
        "heads": 1,
        "mlp": {"hidden": 16},
    }
    vitreous.save(build_model(transformer_config(**shape)), image_folders / "cd", ("c", "d"))
    vitreous.save(build_model(transformer_config(**shape, channels=1)), image_folders / "grey", ("a", "b"))
    train_tiny(image_folders / "flat", "mae", image_folders / "mae", epochs=1.0)
    return image_folders


def train_tiny(data, recipe, out, settings=(), **options):
    """Train a tiny model."""
    options = {**TINY_OPTIONS, "settings": {**OBJECTIVE_SETTINGS.get(recipe, {}), **dict(settings)}, **options}
    return vitreous.train(str(data), recipe=recipe, out=str(out), progress=False, **options)


#: error -> data, recipe, options; settings; text of the message and its hint
INVALID_RUNS = {
    "all patches masked": ("flat", "mae", {}, {"objective.mask": ["0.99"]}, "16 patches leaves no visible", "smaller"),
    "one patch": ("flat", "mae", {"model": "ViT-16x1/16"}, {}, "0.75 of 1 patches leaves no", "smaller patches"),
    "no masked patch": (
        "flat",
        "masked-patches",
        {},
        {"objective.share": ["0.01"]},
        "0.01 of 16 patches",
        "smaller patches",
    ),
    "image below a patch": (
        "flat",
        "mae",
        {"image_size": 2},
        {},
        "2 is not divisible by patch size 4",
        "--image-size 4",
    ),
    "crop below a patch": (
        "flat",
        "dino",
        {},
        {"views.local_image": ["2", "2"]},
        "the size of local views, 2",
        "image 4 4",
    ),
    "crops not divisible by the patch": (
        "flat",
        "dinov2",
        {},
        {"views.local_image": ["10", "8"]},
        "10x8",
        "local-image 8 8",
    ),
    "a batch of one": (
        "flat",
        "dinov2",
        {"batch_size": 1},
        {},
        "a batch of 1 is too small for dinov2",
        "--batch-size 2",
    ),
    "not a plain ViT": (
        "flat",
        "mae",
        {"model": "BiT-R50x1"},
        {},
        "mae requires a ViT or hybrid whose blocks all attend to every token",
        "--model ViT-B/16",
    ),
    "balance": ("classes", "dino", {"sampling": "balanced"}, {}, "balanced needs classes", "leave --sampling out"),
    "class weights": (
        "classes",
        "mae",
        {"class_weights": "balanced"},
        {},
        "balanced needs classes",
        "leave --class-weights out",
    ),
    "best checkpoint without labels": (
        "flat",
        "mae",
        {"keep_best": True},
        {},
        "--keep-best requires labelled validation images, but the data has no labels",
        "classes",
    ),
    "learning rate grid": (
        "classes",
        "mae",
        {"lr_grid": (0.1,)},
        {},
        "--lr-grid needs labels to compare trials",
        "--lr",
    ),
    "no labels": ("flat", "small", {}, {}, "so there are no labels", "folder of its class"),
    "no labels for a student": ("flat", "distil", {}, {}, "so there are no labels", "folder of its class"),
    "no teacher": ("classes", "distil", {}, {}, "no teacher is set", "--objective.teacher"),
    "missing teacher path": ("classes", "distil", {}, {"objective.teacher": ["nowhere"]}, "no weights at", "name"),
    "a damaged teacher": ("classes", "distil", {}, {"objective.teacher": ["HOME/junk.pt"]}, "damaged", "again"),
    "a damaged file": ("classes", "distil", {}, {"objective.teacher": ["HOME/junk.onnx"]}, "cannot run", "again"),
    "missing teacher file": (
        "classes",
        "distil",
        {},
        {"objective.teacher": ["HOME/none.onnx"]},
        "cannot be read",
        "the path of",
    ),
    "a teacher without a head": ("classes", "distil", {}, {"objective.teacher": ["HOME/mae"]}, "not classes", "use"),
    "a teacher of other classes": ("classes", "distil", {}, {"objective.teacher": ["HOME/cd"]}, "2 classes", "fine"),
    "a teacher of grey images": (
        "classes",
        "distil",
        {},
        {"objective.teacher": ["HOME/grey"]},
        "1 channels",
        "another",
    ),
    "a standard deviation of 0": (
        "classes",
        "distil",
        {},
        {"objective.teacher_mean": ["0"], "objective.teacher_std": ["0"]},
        "one number per channel",
        "",
    ),
}


@pytest.mark.parametrize("case", INVALID_RUNS)
def test_invalid_runs_are_rejected_before_writing(image_folders, tmp_path, case):
    data, recipe, options, settings, problem, fix = INVALID_RUNS[case]
    settings = {
        path: [word.replace("HOME", str(image_folders)) for word in values] for path, values in settings.items()
    }
    with pytest.raises(VitreousError) as error:
        train_tiny(image_folders / data, recipe, tmp_path / "run", settings, epochs=1.0, **options)
    assert problem in error.value.message and fix in error.value.hint
    assert error.value.code in (UsageError.code, DataError.code, WeightsError.code) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"settings": {"objective.name": ["dino"]}, "override": True}, "objective.name: mae -> dino"),
        ({"recipe": "dino"}, "recipe: mae -> dino"),
    ],
)
def test_resuming_with_another_objective_is_rejected(image_folders, options, problem):
    before = (image_folders / "mae" / "config.yaml").read_bytes()
    with pytest.raises(UsageError, match=problem) as error:
        vitreous.train(out=str(image_folders / "mae"), resume=True, progress=False, **options)
    assert (
        f"--init {image_folders / 'mae'}" in error.value.hint
        and (image_folders / "mae" / "config.yaml").read_bytes() == before
    )


@pytest.mark.parametrize("protocol", ["knn", "linear", "fewshot"])
def test_protocols_report_missing_labels(image_folders, protocol):
    result = run_cli("evaluate", str(image_folders / "mae"), str(image_folders / "flat"), "--protocol", protocol)
    assert result.returncode == 3 and "so there are no labels" in result.stderr and "path,label" in result.stderr


def write_label_table(home, labels):
    """Write a table of the flat images with splits, and with these labels if not None."""
    path = home / f"{'none' if labels is None else ''.join(labels)}.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "split", *(["label"] if labels is not None else [])])
        for index in range(24):
            split = "val" if index % 6 == 5 else "train"
            rows.writerow([f"flat/{index}.png", split, *([labels[index]] if labels is not None else [])])
    return path


@pytest.mark.parametrize("recipe", OBJECTIVE_SETTINGS)
def test_self_supervised_training_ignores_labels(image_folders, tmp_path, recipe):
    """Weights are bit-identical with labels, permuted labels, and no labels."""
    labels = list("ab" * 12)
    permuted = [labels[at] for at in np.random.default_rng(0).permutation(24)]
    saved_weights = []
    for number, used_labels in enumerate((labels, permuted, None)):
        out = tmp_path / str(number)
        summary = train_tiny(write_label_table(image_folders, used_labels), recipe, out, epochs=2.0, evaluate_every=2)
        assert used_labels is None or summary["val"] is not None  # labels are still used for validation metrics
        saved_weights.append(load_file(out / "model" / "weights.safetensors"))
    for weights in saved_weights[1:]:
        assert weights.keys() == saved_weights[0].keys()
        assert all(weights[name].equal(tensor) for name, tensor in saved_weights[0].items())
