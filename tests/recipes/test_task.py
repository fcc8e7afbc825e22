"""The task of a run without a recipe: chosen from the annotations, or an error if class labels are ambiguous."""

import json

import numpy as np
import pytest
from PIL import Image

import vitreous
from tests.conftest import make_folder
from tests.data.annotations.scenery import write_maps, write_objects
from tests.data.annotations.solids import write_solids
from tests.data.annotations.test_mask_layouts import PAIRS_PER_SPLIT, SPLIT_LAYOUTS, write_pairs
from tests.data.annotations.writing_scenes import write_coco, write_labelme, write_voc, write_yolo
from tests.jobs.test_train_python import TINY_OPTIONS
from vitreous.cli.main import run_command
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError, options_to_keywords
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.task import choose_recipe

BOXES_NOTE = (
    "{0} has boxes: training object detection (--recipe detect); for multi-label classification, use --recipe photos"
)
MASKS_NOTE = (
    "{0} has masks of objects: training instance segmentation (--recipe detect); for semantic segmentation, use "
    "--recipe segment; for multi-label classification, use --recipe photos"
)
CLASS_MAPS_NOTE = (
    "{0} has class maps: training semantic segmentation (--recipe segment); for multi-label classification, use "
    "--recipe photos"
)
VOLUMES_NOTE = "{0} has class maps: training semantic segmentation (--recipe segment)"


def choose_recipe_with_notes(source, **options) -> tuple[str | None, list[str]]:
    notes: list[str] = []
    recipe = choose_recipe(open_data(source), TrainOptions(str(source), **options), notes.append).recipe
    return recipe, notes


@pytest.mark.parametrize(
    ("write", "recipe", "note"),
    [
        (write_voc, "detect", BOXES_NOTE),
        (write_yolo, "detect", BOXES_NOTE),
        (write_coco, "detect", MASKS_NOTE),
        (write_labelme, "detect", MASKS_NOTE),
        (write_objects, "detect", MASKS_NOTE),
        (write_maps, "segment", CLASS_MAPS_NOTE),
        (write_solids, "segment", VOLUMES_NOTE),
    ],
)
def test_annotations_choose_the_recipe(tmp_path, write, recipe, note):
    write(tmp_path / "data")
    assert choose_recipe_with_notes(tmp_path / "data") == (recipe, [note.format(tmp_path / "data")])
    assert choose_recipe_with_notes(tmp_path / "data", recipe="photos") == ("photos", [])


def test_class_folders_select_no_recipe(tmp_path):
    assert choose_recipe_with_notes(make_folder(tmp_path / "data", {"train": 2, "val": 1})) == (None, [])


def test_initial_weights_select_finetune(tmp_path):
    write_voc(tmp_path / "data")
    assert choose_recipe_with_notes(tmp_path / "data", init="w.npz")[1][0].endswith("use --recipe finetune")


def expect_error(source, **options) -> tuple[str, str]:
    with pytest.raises(UsageError) as error:
        choose_recipe_with_notes(source, **options)
    return error.value.message.replace(f"{source}", "DATA"), error.value.hint.replace(f"{source}", "DATA")


def test_classification_options_are_rejected(tmp_path):
    write_voc(tmp_path)
    assert expect_error(tmp_path, loss="sigmoid") == (
        "--loss is for classification, and DATA has boxes",
        "leave --loss out, or add --recipe photos to classify whole images",
    )
    assert expect_error(tmp_path, lr_grid=())[0] == "--lr-grid is for classification, and DATA has boxes"


def test_annotations_without_objects_are_rejected(tmp_path):
    write_voc(tmp_path)
    for file in (tmp_path / "Annotations").glob("*.xml"):
        file.write_text("<annotation></annotation>")
    with pytest.raises(DataError, match="none of 3 training images has an annotated object"):
        choose_recipe_with_notes(tmp_path)


ANNOTATION_FILES = {
    "annotations.json": '{"images": [], "annotations": [], "categories": []}',
    "ant/0.xml": "<annotation><object><bndbox></bndbox></object></annotation>",
    "ant/0.json": '{"shapes": []}',
    "ant/0.txt": "0 0.5 0.5 0.2 0.2\n1 0.1 0.1 0.1 0.1\n",
}


@pytest.mark.parametrize("name", ANNOTATION_FILES)
@pytest.mark.parametrize("split", ["", "train/"])
def test_class_folders_with_unused_annotations_require_a_recipe(tmp_path, name, split):
    make_folder(tmp_path, {split.rstrip("/"): 12}, classes=("ant", "bee"))
    assert choose_recipe_with_notes(tmp_path) == (None, [])
    (tmp_path / split / name).write_text(ANNOTATION_FILES[name])
    file = f"DATA/{split}{name}"
    assert expect_error(tmp_path) == (
        f"DATA has class folders, and annotations in {file} that do not use them",
        f"use --recipe photos to classify whole images, or train on the annotations: {file}",
    )
    assert choose_recipe_with_notes(tmp_path, recipe="photos") == ("photos", [])


def test_text_files_next_to_images_are_not_annotations(tmp_path):
    make_folder(tmp_path, {"": 12}, classes=("ant", "bee"))
    (tmp_path / "ant" / "0.txt").write_text("a black ant, 3 mm\n")
    (tmp_path / "notes.json").write_text("{}")
    assert choose_recipe_with_notes(tmp_path) == (None, [])


def test_class_folders_named_like_images_require_a_recipe(tmp_path):
    make_folder(tmp_path, {"": 4}, classes=("images", "nir"))
    assert expect_error(tmp_path) == (
        "DATA has class folders, and one of them, images, is named like images or masks",
        "use --recipe photos if it is a class, or arrange images and annotations as docs/guides/annotations.md describes",
    )


@pytest.mark.parametrize(
    ("labels", "number"),
    [([0.5 * row for row in range(8)], "0.5"), (list(range(24)), "23"), ([1, 2] * 4, None), ([2020, 2021, 2022], None)],
)
def test_numeric_labels_are_trained_as_regression(tmp_path, labels, number):
    for row in range(len(labels)):
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / f"{row}.png")
    csv_file = tmp_path / "labels.csv"
    csv_file.write_text("path,label\n" + "".join(f"{row}.png,{label:g}\n" for row, label in enumerate(labels)))
    if number is None:
        assert choose_recipe_with_notes(csv_file) == (None, [])
        return
    count = len(set(labels))
    description = f"{count} different numbers as labels of {len(labels)} images, such as {number}"
    classes = "to learn each number as a class, use --recipe photos"
    note = f"{csv_file} has {description}: training regression (--recipe regression); {classes}"
    assert choose_recipe_with_notes(csv_file) == ("regression", [note])


SMALL_OBJECTIVE = {"width": 16, "hidden": 32, "proposals": 30, "finest": 4, "anchor": 2.0}
DETECTOR_OPTIONS = TINY_OPTIONS | {
    "model": "Conv8-16-16+ViT-32x1/8",
    "image_size": 32,
    "batch_size": 2,
    "evaluate_every": 10**6,
}


def test_camvid_folders_train_evaluate_and_predict(tmp_path, capsys):
    """CamVid's folder layout is trained without a recipe, evaluated and used for predictions."""
    data, run = tmp_path / "data", tmp_path / "run"
    for split_index, pair in enumerate(SPLIT_LAYOUTS["camvid"]):
        write_pairs(data, pair, first=PAIRS_PER_SPLIT * split_index)
    (data / "classes.txt").write_text("ground\nsquare\ndisc\n")
    words = ["--model", "ViT-16x1/8", "--image-size", "16", "--steps", "2", "--device", "cpu", "--workers", "0"]
    note = f"note: {CLASS_MAPS_NOTE.format(data)}\n"
    assert run_command(["train", str(data), "--dry-run", "--json", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err.count(note) == 1 and json.loads(captured.out)["recipe"] == "segment"
    assert run_command(["train", str(data), "--out", str(run), *words]) == 0
    assert capsys.readouterr().err.count(note) == 1
    assert run_command(["evaluate", str(run), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["test"]["primary"] == "miou" and evaluated["test"]["images"] == PAIRS_PER_SPLIT
    maps = tmp_path / "maps"
    assert run_command(["predict", str(run), str(data / "test"), "--out", str(maps)]) == 0
    assert len(list(maps.glob("*.png"))) == PAIRS_PER_SPLIT


def write_pieces(folder, polygons: bool) -> None:
    """Twelve classes and Roboflow's placeholder, ids from 0; with `polygons` a class has the placeholder's name."""
    draw = np.random.default_rng(0)
    names = [f"piece {number}" for number in range(12)]
    names[3] = "pieces" if polygons else names[3]
    for split, count in (("train", 4), ("valid", 2), ("test", 2)):
        (folder / split).mkdir(parents=True)
        images, annotations = [], []
        for number in range(count):
            Image.fromarray(draw.integers(0, 255, (32, 32, 3), np.uint8)).save(folder / split / f"{number}.jpg")
            images.append({"id": number, "file_name": f"{number}.jpg", "height": 32, "width": 32})
            for label in draw.choice(12, 6, replace=False).tolist():
                left, top = draw.integers(0, 16, 2).tolist()
                entry = {"id": len(annotations), "image_id": number, "category_id": label + 1, "iscrowd": 0}
                entry |= {"bbox": [left, top, 10, 12], "area": 120, "segmentation": []}
                corners = [left, top, left + 10, top, left + 10, top + 12, left, top + 12]
                annotations.append(entry | ({"segmentation": [corners]} if polygons else {}))
        categories = [{"id": 0, "name": "pieces", "supercategory": "none"}]
        categories += [{"id": 1 + n, "name": name, "supercategory": "pieces"} for n, name in enumerate(names)]
        document = {"images": images, "annotations": annotations, "categories": categories}
        (folder / split / "_annotations.coco.json").write_text(json.dumps(document))


@pytest.mark.parametrize("polygons", [False, True])
def test_roboflows_coco_is_trained_evaluated_and_predicted(tmp_path, capsys, polygons):
    data, run = tmp_path / "data", tmp_path / "run"
    write_pieces(data, polygons)
    opened = open_data(data)
    note = "category 0 (pieces) is ignored: no annotation uses it, and it is the supercategory of others"
    assert len(opened.classes) == 12 and note in opened.notes and ("pieces" in opened.classes) == polygons
    settings = {f"objective.{name}": [str(value)] for name, value in SMALL_OBJECTIVE.items()}
    summary = vitreous.train(str(data), out=str(run), settings=settings, **DETECTOR_OPTIONS | {"epochs": 1})
    err = capsys.readouterr().err
    assert (
        f"note: {options_to_keywords((MASKS_NOTE if polygons else BOXES_NOTE).format(data))}\n" in err
        and f"note: {note}\n" in err
    )
    assert summary["test"]["primary"] == "ap" and summary["val"]["primary"] == "ap"
    assert run_command(["evaluate", str(run), "--split", "val", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val"]["primary"] == "ap"
    results = tmp_path / "results.json"
    annotations = str(data / "test" / "_annotations.coco.json")
    options = ["--out", str(results), "--coco-ids", annotations, "--threshold", "0"]
    assert run_command(["predict", str(run), str(data / "test"), *options]) == 0
    records = json.loads(results.read_text())
    assert {record["image_id"] for record in records} <= {0, 1} and {
        record["category_id"] for record in records
    } <= set(range(1, 13))
