"""Held-out splits without images or without labels are ignored with a note, in every layout."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.test_split_names import write_classes, write_image
from vitreous.apps.curation.check import check_dataset
from vitreous.data.annotations.learnable import require_learnable
from vitreous.data.sources import open_data
from vitreous.data.split import ArraySplit, create_empty_labels, drop_unusable_splits
from vitreous.errors import DataError

NO_LABELS, NO_IMAGES = "test has 2 images without labels and is ignored", "test has no images and is ignored"


def write_flat_test_folder(root: Path) -> str:
    write_classes(root / "train")
    for number in range(2):
        write_image(root / "test" / f"{number}.png")
    return NO_LABELS


def write_unknown_class_folder(root: Path) -> str:
    write_classes(root / "train")
    for number in range(2):
        write_image(root / "test" / "unknown" / f"{number}.png")
    return NO_LABELS


def write_empty_class_folders(root: Path) -> str:
    write_classes(root / "train")
    (root / "test" / "ant").mkdir(parents=True)
    return NO_IMAGES


def write_synset_folders(root: Path) -> str:
    write_classes(root / "train", ("n01440764", "n01443537"))
    for number in range(2):
        write_image(root / "test" / f"{number}.png")
    return NO_LABELS


def write_unlabelled_signals(root: Path) -> str:
    for file_name in (
        *(f"train/{name}/{n}.npz" for name in ("ant", "bee") for n in range(3)),
        "test/0.npz",
        "test/1.npz",
    ):
        (root / file_name).parent.mkdir(parents=True, exist_ok=True)
        np.savez(root / file_name, np.arange(16, dtype=np.float32))
    return NO_LABELS


def write_unlabelled_animations(root: Path) -> str:
    frames = [Image.new("L", (8, 8), value) for value in (0, 255)]
    for file_name in (
        *(f"train/{name}/{n}.gif" for name in ("ant", "bee") for n in range(3)),
        "test/0.gif",
        "test/1.gif",
    ):
        (root / file_name).parent.mkdir(parents=True, exist_ok=True)
        frames[0].save(root / file_name, save_all=True, append_images=frames[1:])
    return NO_LABELS


def write_unlabelled_table(root: Path) -> str:
    rows = [(f"{number}.png", label, "train") for number, label in enumerate("ababab")]
    rows += [(f"{number}.png", "", "test") for number in (6, 7)]
    for path, *_ in rows:
        write_image(root / path)
    with (root / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *rows])
    return NO_LABELS


def write_unlabelled_lists(root: Path, held_out: str = "6.png\n7.png\n") -> str:
    for number in range(8):
        write_image(root / f"{number}.png")
    (root / "train.txt").write_text("".join(f"{number}.png {number % 2}\n" for number in range(6)))
    (root / "test.txt").write_text(held_out)
    return NO_LABELS if held_out else NO_IMAGES


def write_empty_list(root: Path) -> str:
    return write_unlabelled_lists(root, "")


def write_unlabelled_archives(root: Path, count: int = 2) -> str:
    image = write_image(root / "image.png").read_bytes()
    (root / "image.png").unlink()
    for split, num_images in (("train", 6), ("test", count)):
        with tarfile.open(root / f"{split}-0.tar", "w") as archive:
            for number in range(num_images):
                label = [(f"{split}{number}.cls", b"%d" % (number % 2))] if split == "train" else []
                for name, content in ((f"{split}{number}.png", image), *label):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return NO_LABELS if count else NO_IMAGES


def write_empty_archive(root: Path) -> str:
    return write_unlabelled_archives(root, 0)


def write_unlabelled_parquet(root: Path, count: int = 2) -> str:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    image = write_image(root / "image.png").read_bytes()
    (root / "image.png").unlink()
    for split, labels in (("train", [0, 1] * 3), ("test", [None] * count)):
        columns = {"image": arrow.array([image] * len(labels), arrow.binary())}
        columns["label"] = arrow.array(labels, arrow.int64())
        parquet.write_table(arrow.table(columns), root / f"{split}-0.parquet")
    return NO_LABELS if count else NO_IMAGES


def write_empty_parquet(root: Path) -> str:
    return write_unlabelled_parquet(root, 0)


def write_unlabelled_coco(root: Path, count: int = 2) -> str:
    for split, num_images in (("train", 4), ("test", count)):
        (root / split).mkdir(parents=True)
        images = [{"id": number, "file_name": f"{number}.png"} for number in range(num_images)]
        boxes = [{"id": n, "image_id": n, "category_id": 1, "bbox": [1, 1, 4, 4]} for n in range(num_images)]
        for row in images:
            write_image(root / split / row["file_name"])
        document = {"images": images, "annotations": boxes if split == "train" else []}
        document["categories"] = [{"id": 1, "name": "ant"}]
        (root / split / "_annotations.coco.json").write_text(json.dumps(document))
    return NO_LABELS if count else NO_IMAGES


def write_empty_coco(root: Path) -> str:
    return write_unlabelled_coco(root, 0)


def write_unlabelled_panoptic(root: Path) -> str:
    for split, num_images in (("train", 4), ("test", 2)):
        home = root / "annotations" / f"panoptic_{split}"
        home.mkdir(parents=True)
        images = [{"id": number, "file_name": f"{number}.png"} for number in range(num_images)]
        rows = []
        for row in images:
            write_image(root / split / row["file_name"])
            Image.new("RGB", (12, 10), (7, 0, 0)).save(home / row["file_name"])
            segments = [{"id": 7, "category_id": 1}]
            rows.append({"image_id": row["id"], "file_name": row["file_name"], "segments_info": segments})
        document = {"images": images, "annotations": rows if split == "train" else []}
        document["categories"] = [{"id": 1, "name": "ant", "isthing": 1}]
        home.with_suffix(".json").write_text(json.dumps(document))
    return NO_LABELS


def write_unlabelled_yolo(root: Path, count: int = 2) -> str:
    for split, num_images in (("train", 4), ("test", count)):
        for folder in ("images", "labels"):
            (root / folder / split).mkdir(parents=True)
        for number in range(num_images):
            write_image(root / "images" / split / f"{number}.png")
            if split == "train":
                (root / "labels" / split / f"{number}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    return NO_LABELS if count else NO_IMAGES


def write_empty_yolo(root: Path) -> str:
    return write_unlabelled_yolo(root, 0)


def write_unlabelled_voc(root: Path, count: int = 2) -> str:
    (root / "Annotations").mkdir()
    (root / "ImageSets" / "Main").mkdir(parents=True)
    box = "<xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax>"
    for number in range(6):
        write_image(root / "JPEGImages" / f"{number}.jpg")
        if number < 4:
            text = f"<annotation><object><name>ant</name><bndbox>{box}</bndbox></object></annotation>"
            (root / "Annotations" / f"{number}.xml").write_text(text)
    (root / "ImageSets" / "Main" / "train.txt").write_text("0\n1\n2\n3\n")
    (root / "ImageSets" / "Main" / "test.txt").write_text("4\n5\n" if count else "")
    return NO_LABELS if count else NO_IMAGES


def write_empty_voc(root: Path) -> str:
    return write_unlabelled_voc(root, 0)


def write_unlabelled_labelme(root: Path) -> str:
    shape = {"label": "ant", "shape_type": "rectangle", "points": [[1, 1], [5, 5]]}
    for split, num_images in (("train", 4), ("test", 2)):
        for number in range(num_images):
            write_image(root / split / f"{number}.png")
            if split == "train":
                (root / split / f"{number}.json").write_text(json.dumps({"shapes": [shape]}))
    return NO_LABELS


def write_unlabelled_box_table(root: Path) -> str:
    rows = [(f"{number}.png", "ant", "train", 1, 1, 4, 4) for number in range(4)]
    rows += [(f"{number}.png", "", "test", "", "", "", "") for number in (4, 5)]
    for path, *_ in rows:
        write_image(root / path)
    with (root / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "class", "split", "left", "top", "right", "bottom"), *rows])
    return NO_LABELS


def write_unlabelled_masks(root: Path, inside: bool = True) -> str:
    for split, num_images in (("train", 4), ("test", 2)):
        for number in range(num_images):
            images, maps = (f"{split}/{folder}" if inside else f"{folder}/{split}" for folder in ("images", "masks"))
            write_image(root / images / f"{number}.png")
            if split == "train":
                (root / maps).mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.eye(10, 12, dtype=np.uint8)).save(root / maps / f"{number}.png")
    return NO_LABELS


def write_unlabelled_masks_outside(root: Path) -> str:
    return write_unlabelled_masks(root, False)


def write_unlabelled_volumes(root: Path) -> str:
    for split, num_images in (("train", 4), ("test", 2)):
        for folder in ("images", "masks") if split == "train" else ("images",):
            (root / split / folder).mkdir(parents=True)
            for number in range(num_images):
                np.savez(root / split / folder / f"{number}.npz", np.eye(4, dtype=np.uint8)[None].repeat(4, 0))
    return NO_LABELS


CLASS_WRITERS = (
    write_flat_test_folder,
    write_unknown_class_folder,
    write_empty_class_folders,
    write_synset_folders,
    write_unlabelled_signals,
    write_unlabelled_animations,
    write_unlabelled_table,
    write_unlabelled_lists,
    write_empty_list,
)
STORE_WRITERS = (write_unlabelled_archives, write_empty_archive, write_unlabelled_parquet, write_empty_parquet)
OBJECT_WRITERS = (
    write_unlabelled_coco,
    write_empty_coco,
    write_unlabelled_panoptic,
    write_unlabelled_yolo,
    write_empty_yolo,
    write_unlabelled_voc,
    write_empty_voc,
    write_unlabelled_labelme,
    write_unlabelled_box_table,
)
MASK_WRITERS = (write_unlabelled_masks, write_unlabelled_masks_outside, write_unlabelled_volumes)


@pytest.mark.parametrize(
    "write", [*CLASS_WRITERS, *STORE_WRITERS, *OBJECT_WRITERS, *MASK_WRITERS], ids=lambda write: write.__name__
)
def test_an_unusable_test_split_is_ignored(tmp_path: Path, write: Callable[[Path], str]):
    note = write(tmp_path)
    source = tmp_path / "data.csv" if (tmp_path / "data.csv").exists() else tmp_path
    data = open_data(source)
    assert note in data.notes
    assert "test" not in data.splits and data.labelled
    assert data.multilabel == (write in OBJECT_WRITERS + MASK_WRITERS)
    assert sum(map(len, data.splits.values())) == len(data.split("train")) + len(data.splits.get("val", ()))


@pytest.mark.parametrize("write", OBJECT_WRITERS + MASK_WRITERS, ids=lambda write: write.__name__)
def test_train_and_check_accept_the_other_splits(tmp_path, write):
    note = write(tmp_path)
    source = tmp_path / "data.csv" if (tmp_path / "data.csv").exists() else tmp_path
    require_learnable(open_data(source), "classes" if write in MASK_WRITERS else "objects")
    document, subject = check_dataset(source, workers=0)
    assert note in document["notes"] and document["target_error"] is document["layout_error"] is None
    assert list(subject.splits) == ["train"] and document["passed"], document["findings"]


def swap_splits(root: Path) -> Path:
    """Swap the names `train` and `test` of files and folders, and in a table."""
    for path in sorted(root.rglob("*train*"), reverse=True):
        test_path = path.with_name(path.name.replace("train", "test"))
        temporary = path.rename(path.with_name("held"))
        if test_path.exists():
            test_path.rename(path)
        temporary.rename(test_path)
    table = root / "data.csv"
    if not table.exists():
        return root
    table_text = table.read_text().replace("train", "held").replace("test", "train").replace("held", "test")
    table.write_text(table_text)
    return table


@pytest.mark.parametrize(
    "write",
    [
        write_unlabelled_coco,
        write_unlabelled_yolo,
        write_unlabelled_voc,
        write_unlabelled_labelme,
        write_unlabelled_box_table,
    ],
    ids=lambda write: write.__name__,
)
def test_train_and_check_refuse_training_images_without_objects(tmp_path, write):
    write(tmp_path)
    source = swap_splits(tmp_path)
    if write is write_unlabelled_voc:
        for name in "45":
            (tmp_path / "Annotations" / f"{name}.xml").write_text("<annotation></annotation>")
    with pytest.raises(DataError, match="none of 2 training images has an annotated object") as rejected:
        require_learnable(open_data(source), "objects")
    document, _ = check_dataset(source, workers=0)
    assert document["target_error"]["message"] == rejected.value.message and not document["passed"]


def write_void_masks(root: Path) -> None:
    write_unlabelled_masks(root)
    (root / "test" / "masks").mkdir()
    for number in range(2):
        Image.new("L", (12, 10), 255).save(root / "test" / "masks" / f"{number}.png")


def write_empty_segments(root: Path) -> None:
    write_unlabelled_panoptic(root)
    path = root / "annotations" / "panoptic_test.json"
    document = json.loads(path.read_text())
    rows = [{"image_id": n, "file_name": f"{n}.png", "segments_info": []} for n in range(2)]
    path.write_text(json.dumps(document | {"annotations": rows}))


@pytest.mark.parametrize("write", [write_void_masks, write_empty_segments])
def test_annotations_without_any_class_are_no_labels(tmp_path, write):
    write(tmp_path)
    assert NO_LABELS in open_data(tmp_path).notes


def test_val_without_labels_is_drawn_from_train(tmp_path):
    write_classes(tmp_path / "train", count=10)
    write_image(tmp_path / "val" / "0.png")
    data = open_data(tmp_path)
    assert (len(data.split("val")), len(data.split("train"))) == (2, 18)
    assert "val has 1 images without labels and is ignored" in data.notes


def test_a_class_missing_from_train_is_rejected(tmp_path):
    write_classes(tmp_path / "train")
    write_image(tmp_path / "test" / "wasp" / "0.png")
    with pytest.raises(DataError, match="train lacks: wasp"):
        open_data(tmp_path)


def test_archives_with_some_labels_missing_stay_an_error(tmp_path):
    write_unlabelled_archives(tmp_path)
    with tarfile.open(tmp_path / "train-1.tar", "w") as archive:
        content = write_image(tmp_path / "x.png").read_bytes()
        member = tarfile.TarInfo("x.png")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    with pytest.raises(DataError, match="1 of 7 samples have no label"):
        open_data(tmp_path)


def test_unlabelled_splits_are_kept_when_train_is_unlabelled():
    images = np.zeros((3, 4, 4), np.uint8)
    splits = {"train": ArraySplit(images, create_empty_labels(3)), "test": ArraySplit(images, create_empty_labels(3))}
    notes: list[str] = []
    assert list(drop_unusable_splits(splits, notes)) == ["train", "test"] and not notes
    with pytest.raises(DataError, match="train split has no images"):
        drop_unusable_splits(splits | {"train": ArraySplit(images[:0], create_empty_labels(0))}, notes)


@pytest.mark.parametrize("test_fault", ["flat", "unreadable"])
def test_training_ends_with_a_report(tmp_path, monkeypatch, test_fault):
    from vitreous.cli.main import main

    monkeypatch.chdir(tmp_path)
    write_flat_test_folder(Path("data"))
    if test_fault == "unreadable":
        for name in ("ant", "bee"):
            Path("data/test", name).mkdir()
            Path("data/test", name, "0.png").write_text("no image")
    arguments = "train data --out run --model ViT-32x2/4 --image-size 16 --steps 2 --batch-size 4 --workers 0"
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments.split(), "--bad-images", "skip"])
    assert exit_info.value.code == 0
    assert json.loads(Path("run/summary.json").read_text())["test"] is None


def test_a_run_with_an_unreadable_test_image_writes_its_summary(tmp_path, monkeypatch, capsys):
    from vitreous.cli.main import run_command

    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        write_classes(Path("data", split))
    Path("data/test/ant/0.png").write_text("no image")
    arguments = "train data --out run --model ViT-32x2/4 --image-size 16 --steps 2 --batch-size 4 --workers 0"
    assert run_command(arguments.split()) == 0
    assert json.loads(Path("run/summary.json").read_text())["test"] is None and Path("run/report.html").is_file()
    captured = capsys.readouterr()
    note = captured.err[captured.err.index("note: the test split is not evaluated: ") :]
    assert "data/test/ant/0.png: not an image" in note
    assert "; to skip such images: vitreous evaluate run --bad-images skip\n" in note
