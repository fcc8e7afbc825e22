"""`--recipe segment` chooses flips and quarter turns from the class maps once; the choice is stored, resumed, and
overridden by options."""

import json
from typing import Any

import pytest
import torch
from PIL import Image

import vitreous
from tests.data.annotations.solids import write_solids
from tests.data.annotations.streets import STREET_CLASSES, draw_nuclei, write_streets
from tests.data.annotations.writing_scenes import write_coco
from vitreous.cli.main import run_command
from vitreous.data.annotations.map_statistics import MapSymmetry
from vitreous.data.sources import open_data
from vitreous.errors import UsageError
from vitreous.jobs import derive_run as data_job
from vitreous.progress import NullListener
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.registry import RECIPES
from vitreous.training.folder import RunFolder
from vitreous.weights.bundle import load_bundle

TRAIN_OPTIONS: dict[str, Any] = {
    "recipe": "segment", "model": "ViT-16x1/8", "image_size": 16, "batch_size": 4, "workers": 0, "device": "cpu",
    "precision": "fp32", "evaluate_every": 10**6, "progress": False, "settings": {"objective.head_width": ["8"]},
}  # fmt: skip
UPRIGHT_NOTE = (
    "note: augmentation: horizontal flips only, as classes have fixed vertical positions (sky above road); "
    "to change this, set --views.flip, --views.flip_vertical or --views.turn\n"
)


@pytest.fixture(scope="module")
def streets_data(tmp_path_factory):
    return write_streets(tmp_path_factory.mktemp("streets") / "data")


def write_nuclei(path):
    for folder in ("images", "masks"):
        (path / folder).mkdir(parents=True)
    for number in range(16):
        classes = draw_nuclei(number)
        Image.fromarray(classes * 150 + 40).save(path / "images" / f"{number}.png")
        Image.fromarray(classes).save(path / "masks" / f"{number}.png")
    return path


def read_flips(out) -> tuple[float, float, bool]:
    views: Any = RunFolder(out).run().views
    return views.flip, views.flip_vertical, views.turn


def test_streets_get_horizontal_flips_and_nuclei_all(streets_data, tmp_path):
    vitreous.train(str(streets_data), out=str(tmp_path / "streets"), steps=1, **TRAIN_OPTIONS)
    vitreous.train(str(write_nuclei(tmp_path / "data")), out=str(tmp_path / "nuclei"), steps=1, **TRAIN_OPTIONS)
    assert read_flips(tmp_path / "streets") == (0.5, 0.0, False)
    assert read_flips(tmp_path / "nuclei") == (0.5, 0.5, True)


def test_dry_run_logs_the_augmentation_choice_once(streets_data, capsys):
    words = ["--model", "ViT-16x1/8", "--image-size", "16", "--steps", "2", "--device", "cpu", "--workers", "0"]
    assert run_command(["train", str(streets_data), "--dry-run", "--json", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err.count(UPRIGHT_NOTE) == 1 and json.loads(captured.out)["recipe"] == "segment"
    assert run_command(["train", str(streets_data), "--dry-run", "--json", *words, "--views.flip_vertical", "0.5"]) == 0
    assert "augmentation:" not in capsys.readouterr().err


def test_option_overrides_only_its_augmentation(streets_data, tmp_path):
    options: dict[str, Any] = TRAIN_OPTIONS | {
        "settings": TRAIN_OPTIONS["settings"] | {"views.flip": ["0.25"], "views.turn": ["true"]}
    }
    vitreous.train(str(streets_data), out=str(tmp_path / "run"), steps=1, **options)
    assert read_flips(tmp_path / "run") == (0.25, 0.0, True)


class StopAfterImages(NullListener):
    """Stop a run after `images` images, as a crash would."""

    def __init__(self, images: int) -> None:
        self.images = images

    def progress(self, label, done, total, text=""):
        if label == "train" and done >= self.images:
            raise KeyError("stopped")


def test_a_resumed_run_keeps_the_choice_and_is_bit_identical(streets_data, tmp_path, monkeypatch):
    options: dict[str, Any] = TRAIN_OPTIONS | {"steps": 4, "save_every": 2, "log_every": 1}
    vitreous.train(str(streets_data), out=str(tmp_path / "whole"), **options)
    with pytest.raises(KeyError, match="stopped"):
        stop: dict[str, Any] = {name: value for name, value in options.items() if name != "progress"}
        vitreous.train(str(streets_data), out=str(tmp_path / "stopped"), listener=StopAfterImages(12), **stop)
    monkeypatch.setattr(data_job, "measure_class_maps", None)  # a call would raise
    vitreous.train(out=str(tmp_path / "stopped"), resume=True, progress=False)
    assert read_flips(tmp_path / "stopped") == (0.5, 0.0, False)
    uninterrupted, stopped = (
        load_bundle(tmp_path / name / "model").model.state_dict() for name in ("whole", "stopped")
    )
    assert all(torch.equal(uninterrupted[name], stopped[name]) for name in uninterrupted)


def train_and_read_class_weights(data, out, **options) -> tuple[float, ...]:
    vitreous.train(str(data), out=str(out), steps=1, **TRAIN_OPTIONS | options)
    objective: Any = RunFolder(out).run().objective
    return objective.class_weights


def test_rare_classes_get_larger_weights_unless_overridden(streets_data, tmp_path):
    weights = dict(zip(STREET_CLASSES, train_and_read_class_weights(streets_data, tmp_path / "default"), strict=True))
    assert weights["road"] < weights["car"] < weights["bicyclist"] and len(weights) == 11
    assert weights["bicyclist"] == 49.21 and weights["road"] < 4
    assert train_and_read_class_weights(streets_data, tmp_path / "even", class_weights="even") == ()
    settings = TRAIN_OPTIONS["settings"] | {"objective.class_weights": [str(1 + k) for k in range(11)]}
    assert train_and_read_class_weights(streets_data, tmp_path / "set", settings=settings) == tuple(
        float(1 + k) for k in range(11)
    )


def test_few_classes_are_weighted_equally_by_default(tmp_path):
    data = write_nuclei(tmp_path / "data")
    assert train_and_read_class_weights(data, tmp_path / "default") == ()
    background, nucleus = train_and_read_class_weights(data, tmp_path / "balanced", class_weights="balanced")
    assert 1.4 < background < nucleus < 50.5


def test_a_dry_run_shows_the_class_weights(streets_data, capsys):
    words = ["--model", "ViT-16x1/8", "--image-size", "16", "--steps", "2", "--device", "cpu", "--workers", "0"]
    assert run_command(["train", str(streets_data), "--dry-run", *words]) == 0
    note = "49.2; the rarest class, bicyclist, has 0.05% of the pixels; for equal weights, set --class-weights even\n"
    shown = capsys.readouterr().err
    assert shown.count("note: class weights of the loss: ") == 1 and shown.count(note) == 1
    assert run_command(["train", str(streets_data), "--dry-run", *words, "--class-weights", "even"]) == 0
    assert "class weights" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["swin-upernet", "adapter-upernet", "dinov2-segment", "detect", "photos"])
def test_other_recipes_skip_class_map_measurement(streets_data, name, monkeypatch):
    monkeypatch.setattr(data_job, "measure_class_maps", None)
    assert data_job.measure_recipe_maps(open_data(streets_data), TrainOptions(str(streets_data), recipe=name)) is None
    assert not RECIPES[name].by_maps


def test_balance_is_accepted_for_volumes_and_rejected_for_boxes(tmp_path):
    solids = write_solids(tmp_path / "solids")
    options = TrainOptions(str(solids), recipe="segment", class_weights="balanced")
    maps = data_job.measure_recipe_maps(open_data(solids), options)
    assert maps is not None and maps.symmetry == MapSymmetry() and sum(maps.class_shares) == pytest.approx(1)
    squares = write_coco(tmp_path / "squares")
    with pytest.raises(UsageError, match="class_weights='balanced' needs classes"):
        vitreous.train(str(squares), recipe="detect", class_weights="balanced", image_size=64, progress=False)


def test_volumes_are_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(data_job, "measure_class_maps", None)
    solids = open_data(write_solids(tmp_path / "data"))
    assert data_job.measure_recipe_maps(solids, TrainOptions(str(tmp_path), recipe="segment")) is None
