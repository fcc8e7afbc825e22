"""The same synthetic detection scenes, written in every annotation format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("cat", "dog", "owl")
IMAGE_SIZE = (24, 32)
SPLITS = {"train": 3, "val": 2}


def make_objects(number: int) -> list[tuple[int, tuple[int, int, int, int]]]:
    """Return (class, (left, top, right, bottom)) of the objects of an image; image 1 has none."""
    draw = np.random.default_rng(number)
    rows = []
    for _ in range(0 if number == 1 else 1 + number % 3):
        left, top = int(draw.integers(0, 20)), int(draw.integers(0, 14))
        box = (left, top, left + int(draw.integers(3, 12)), top + int(draw.integers(3, 10)))
        rows.append((int(draw.integers(0, 3)), box))
    return rows


def list_image_numbers(split: str) -> range:
    """Return the image numbers of a split."""
    return range(3) if split == "train" else range(3, 5)


def save_image(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(number).integers(0, 255, (*IMAGE_SIZE, 3), np.uint8)).save(path)


def get_box_corners(box: tuple[int, int, int, int]) -> list[tuple[int, int]]:
    left, top, right, bottom = box
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def write_coco(home: Path) -> Path:
    """Write COCO annotations with gaps in the ids, unsorted categories, and masks as polygons."""
    for split in SPLITS:
        images, annotations = [], []
        for number in list_image_numbers(split):
            save_image(home / f"{split}2017" / f"{number}.png", number)
            images.append(
                {"id": 100 - number, "file_name": f"{number}.png", "height": IMAGE_SIZE[0], "width": IMAGE_SIZE[1]}
            )
            for label, box in make_objects(number):
                entry = {"id": 7 * len(annotations) + 3, "image_id": 100 - number, "category_id": (label + 1) * 5}
                entry["bbox"] = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
                entry["segmentation"] = [[edge for corner in get_box_corners(box) for edge in corner]]
                annotations.append(entry)
        categories = [{"id": (label + 1) * 5, "name": CLASSES[label]} for label in (2, 0, 1)]
        document = {"images": images[::-1], "annotations": annotations, "categories": categories}
        path = home / "annotations" / f"instances_{split}2017.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document))
    return home


def write_voc(home: Path) -> Path:
    for folder in ("Annotations", "ImageSets/Main"):
        (home / folder).mkdir(parents=True)
    for split in SPLITS:
        for number in list_image_numbers(split):
            save_image(home / "JPEGImages" / f"{number}.png", number)
            rows = "".join(
                f"<object><name>{CLASSES[label]}</name><bndbox><xmin>{box[0] + 1}</xmin><ymin>{box[1] + 1}</ymin>"
                f"<xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"
                for label, box in make_objects(number)
            )
            size = f"<size><width>{IMAGE_SIZE[1]}</width><height>{IMAGE_SIZE[0]}</height><depth>3</depth></size>"
            (home / "Annotations" / f"{number}.xml").write_text(f"<annotation>{size}{rows}</annotation>")
        (home / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(map(str, list_image_numbers(split))) + "\n")
    return home


def write_yolo(home: Path, polygons: bool = False) -> Path:
    for split in SPLITS:
        (home / "labels" / split).mkdir(parents=True)
        for number in list_image_numbers(split):
            save_image(home / "images" / split / f"{number}.png", number)
            lines = []
            for label, box in make_objects(number):
                left, right, top, bottom = box[0] / 32, box[2] / 32, box[1] / 24, box[3] / 24
                shares = [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
                if polygons:
                    shares = [
                        edge / side
                        for corner in get_box_corners(box)
                        for edge, side in zip(corner, (32, 24), strict=True)
                    ]
                lines.append(" ".join(map(str, [label, *shares])))
            if lines:
                (home / "labels" / split / f"{number}.txt").write_text("\n".join(lines) + "\n")
    (home / "data.yaml").write_text("path: .\ntrain: images/train\nval: images/val\nnames: [cat, dog, owl]\n")
    return home


def write_labelme(home: Path) -> Path:
    for split in SPLITS:
        for number in list_image_numbers(split):
            save_image(home / split / f"{number}.png", number)
            shapes = [
                {"label": CLASSES[label], "shape_type": "rectangle", "points": [[box[0], box[1]], [box[2], box[3]]]}
                for label, box in make_objects(number)
            ]
            document = {
                "shapes": shapes,
                "imagePath": f"{number}.png",
                "imageHeight": IMAGE_SIZE[0],
                "imageWidth": IMAGE_SIZE[1],
            }
            (home / split / f"{number}.json").write_text(json.dumps(document))
    return home


def write_csv(home: Path) -> Path:
    lines = ["filename,label,xmin,ymin,xmax,ymax,split"]
    for split in SPLITS:
        for number in list_image_numbers(split):
            save_image(home / f"{number}.png", number)
            rows = [f"{CLASSES[label]},{','.join(map(str, box))}" for label, box in make_objects(number)]
            lines += [f"{number}.png,{row},{split}" for row in rows or [",,,,"]]
    (home / "boxes.csv").write_text("\n".join(lines) + "\n")
    return home / "boxes.csv"


FORMAT_WRITERS = {"coco": write_coco, "voc": write_voc, "yolo": write_yolo, "labelme": write_labelme, "csv": write_csv}
