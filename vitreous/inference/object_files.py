"""Output files for detections: tables, COCO results, YOLO text files and instance maps."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitreous.data.annotations.boxes_drawing import render_instance_map
from vitreous.data.annotations.shapes import encode_compressed_rle, rle_to_mask
from vitreous.data.annotations.yolo import format_yolo_line
from vitreous.data.layouts.file_names import normalise_name
from vitreous.errors import DataError, UsageError, escape_unprintable
from vitreous.inference.class_maps import OutputFileNames, save_png
from vitreous.inference.objects import ImageObjects, to_shortest_float
from vitreous.inference.sources import ImageSource, Item
from vitreous.system.disk import atomic_path, write_text_atomic
from vitreous.system.tables import escape_formula
from vitreous.tasks.predictions import build_error_column, build_path_columns

if TYPE_CHECKING:
    import pyarrow as pa

OBJECTS_FILE = "objects.jsonl"  # in an output folder: one line per image
OBJECT_ROWS_PER_CHUNK = 256  # images in memory at a time, with the run lengths of their masks
BOX_EDGES = ("left", "top", "right", "bottom")


class ObjectRows:
    """Output rows of detections: one row per image in JSONL and Parquet, with all its objects; one row per object in
    CSV, without masks."""

    formats: tuple[str, ...] = (".jsonl", ".csv", ".parquet")
    rows_per_chunk = OBJECT_ROWS_PER_CHUNK
    csv_columns = ("path", "number", "label", "score", *BOX_EDGES, "error")

    def to_dict(self, prediction: ImageObjects) -> dict[str, Any]:
        """Return the JSONL row of an image: path, objects and error; also the overlay file, if any."""
        overlay_fields = {} if prediction.overlay is None else {"overlay": prediction.overlay}
        return {"path": prediction.path, "objects": prediction.objects(), "error": prediction.error, **overlay_fields}

    def starts_image(self, cells: Sequence[str]) -> bool:
        """Return whether a CSV row is the first row of an image."""
        return cells[1] in ("", "1")

    def to_csv_rows(self, prediction: ImageObjects) -> list[list[str]]:
        """Return the CSV rows of an image: one per object, or one row without an object. `escape_formula` prevents
        spreadsheets from evaluating cells."""
        path_cell = escape_formula(prediction.path)
        if not len(prediction):
            return [[path_cell, *[""] * 7, escape_formula(prediction.error or "")]]
        numbered_objects = enumerate(zip(prediction.names, prediction.scores, prediction.boxes, strict=True), 1)
        return [
            [path_cell, str(number), escape_formula(name), str(score), *(f"{edge:.3f}" for edge in box), ""]
            for number, (name, score, box) in numbered_objects
        ]

    def to_arrow_table(self, predictions: Sequence[ImageObjects]) -> pa.Table:
        """Return the rows of images as an Arrow table with the columns of JSONL; `objects` is a list of structs."""
        import pyarrow as pa

        runs = pa.struct([("size", pa.list_(pa.int32())), ("counts", pa.list_(pa.int64()))])
        number_fields = [(name, pa.float64()) for name in ("score", *BOX_EDGES)]
        object_type = pa.list_(pa.struct([("label", pa.string()), *number_fields, ("segmentation", runs)]))
        objects = pa.array(
            [None if prediction.error else prediction.objects() for prediction in predictions], object_type
        )
        overlays = pa.array([prediction.overlay for prediction in predictions], pa.string())
        return pa.table(
            {
                **build_path_columns(predictions),
                "objects": objects,
                "error": build_error_column(predictions),
                "overlay": overlays,
            }
        )


class CocoResults:
    """COCO results: a JSON list with image id, category id, box, score and compressed RLE mask of each object. Ids are
    looked up in the COCO annotation file `annotations` by the names of images and classes; without such a file, images
    and classes are numbered from 1. Raises DataError for an unreadable file, or if a class of the model is missing."""

    formats: tuple[str, ...] = (".json",)
    rows_per_chunk = OBJECT_ROWS_PER_CHUNK

    def __init__(self, classes: tuple[str, ...], root: str, annotations: str | None = None) -> None:
        self.root, self.annotations_path = root, annotations
        self.images: dict[str, Any] = {}
        self.ids = {name: category_id for category_id, name in enumerate(classes, 1)}
        if annotations is not None:
            self.images, self.ids = read_coco_ids(annotations)
            if missing := next((name for name in classes if name not in self.ids), None):
                problem = (
                    f"{escape_unprintable(annotations)} has no category "
                    f"{escape_unprintable(missing)}, which is a class of the model"
                )
                raise DataError(problem, "use the annotation file with the model's classes")
        self.categories = [{"id": self.ids[name], "name": name} for name in classes]

    def to_dict(self, prediction: ImageObjects) -> dict[str, Any]:
        """Return the record of an image: path, id, name, size, results, and error. Raises DataError for an image that
        is not in the annotation file."""
        name = Path(os.path.relpath(prediction.path, self.root) if self.root else prediction.path).as_posix()
        image_id = self.image_id(prediction.path) if self.annotations_path is not None else None
        height, width = (None, None) if prediction.detections is None else prediction.detections.size
        size = {"width": width, "height": height}
        return {
            "path": prediction.path,
            "id": image_id,
            "file_name": name,
            "size": size,
            "results": self.results(prediction),
            "error": prediction.error,
        }

    def results(self, prediction: ImageObjects) -> list[dict[str, Any]]:
        """Return the COCO results of the objects of an image, without the image's id."""
        if prediction.detections is None:
            return []
        results: list[dict[str, Any]] = []
        for index, (name, (left, top, right, bottom)) in enumerate(
            zip(prediction.names, prediction.boxes.tolist(), strict=True)
        ):
            box = [round(edge, 3) for edge in (left, top, right - left, bottom - top)]
            result: dict[str, Any] = {
                "category_id": self.ids[name],
                "bbox": box,
                "score": to_shortest_float(prediction.scores[index]),
            }
            if prediction.detections.masks is not None:
                counts = encode_compressed_rle(prediction.detections.masks[index])
                result["segmentation"] = {"size": list(prediction.detections.size), "counts": counts}
            results.append(result)
        return results

    def image_id(self, path: str) -> Any:
        """Look up the id of an image in the annotation file by the end of its path. Raises DataError if it is
        missing."""
        path_parts = normalise_name(Path(path).as_posix()).split("/")
        for start in range(len(path_parts)):
            if (name := "/".join(path_parts[start:])) in self.images:
                return self.images[name]
        problem = f"{escape_unprintable(path)} is not in {escape_unprintable(self.annotations_path or '')}"
        raise DataError(problem, "use only images of that file, or leave --coco-ids out")


def read_coco_ids(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the ids of images and of categories, by name, from a COCO annotation file. Raises DataError for an invalid
    file."""
    try:
        document = json.loads(Path(path).read_bytes())
        images = {normalise_name(str(record["file_name"])): record["id"] for record in document["images"]}
        return images, {normalise_name(str(record["name"]).strip()): record["id"] for record in document["categories"]}
    except OSError as error:
        raise DataError(
            f"{escape_unprintable(path)} cannot be read ({error.strerror})", "use a COCO annotation file"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{escape_unprintable(path)} is not a COCO annotation file ({str(error)[:80]})"
        raise DataError(problem, "use a file with COCO images and categories") from None


class PlannedOutputPaths:
    """Output paths of images, planned while a source is iterated, in `output_paths`: image name -> path. Paths of
    images that an earlier job wrote are planned as well, so that they are not used twice."""

    def __init__(self, source: ImageSource, root: str, suffix: str) -> None:
        self.names, self.suffix, self.output_paths = OutputFileNames(root), suffix, dict[str, Path]()
        self.source = ImageSource(tuple(map(self.plan_paths, source.item_readers)), source.count)

    def plan_paths(self, list_items: Any) -> Any:
        """Wrap a function that lists items: the wrapped one also plans an output path for each."""

        def iterate_items() -> Any:
            """Yield the items, after planning an output path for each."""
            for item in list_items():
                self.plan_path(item)
                yield item

        return iterate_items

    def plan_path(self, item: Item) -> None:
        """Plan the output path of an image, unless it has one."""
        if item.name not in self.output_paths:
            self.output_paths[item.name] = self.names.get_output_path(item.name, self.suffix)


class ObjectFolder:
    """A folder with one output file per image, and `FOLDER/objects.jsonl` with one line per image.

    With `form` `yolo`, a text file in the label format that `train` reads: one line per object with its class index,
    and the polygon of its mask or, without masks, the centre and size of its box, relative to the image size. With
    `masks`, a PNG whose pixels are object numbers, in the order of the objects in `objects.jsonl`.
    """

    formats: tuple[str, ...] = (".jsonl",)
    rows_per_chunk = 1

    def __init__(
        self, folder: str, form: Literal["yolo", "masks"], classes: tuple[str, ...], output_paths: dict[str, Path]
    ) -> None:
        self.folder, self.form, self.output_paths = Path(folder), form, output_paths
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(self.folder / "classes.txt", "".join(f"{name}\n" for name in classes), "backslashreplace")

    @property
    def index(self) -> str:
        """Path of `objects.jsonl`, which has one line per image."""
        return os.fspath(self.folder / OBJECTS_FILE)

    def write(self, prediction: ImageObjects) -> ImageObjects:
        """Write the file of an image; return the prediction with the file's path. Raises OSError."""
        if prediction.detections is None:
            return prediction
        path = self.folder / self.output_paths[prediction.path]
        if self.form == "masks":
            save_png(
                render_instance_map(prediction.detections.masks or (), prediction.boxes, prediction.detections.size),
                path,
            )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as temporary:
                temporary.write_text("".join(format_yolo_lines(prediction)), "utf-8")
        return replace(prediction, file=os.fspath(path))

    def to_dict(self, prediction: ImageObjects) -> dict[str, Any]:
        """Return the line of objects.jsonl for an image: path, file, objects without masks, and error; also the overlay
        file, if any."""
        overlay_fields = {} if prediction.overlay is None else {"overlay": prediction.overlay}
        objects = [
            {key: value for key, value in record.items() if key != "segmentation"} for record in prediction.objects()
        ]
        return {
            "path": prediction.path,
            "file": prediction.file,
            **overlay_fields,
            "objects": objects,
            "error": prediction.error,
        }


def format_yolo_lines(prediction: ImageObjects) -> list[str]:
    """Format the objects of an image as lines of YOLO's label format: polygons of instance masks, else boxes."""
    detections = prediction.detections
    if detections is None:
        return []
    runs = detections.masks if detections.masks is not None else [None] * len(detections)
    masks = (None if mask_runs is None else rle_to_mask(mask_runs, detections.size) for mask_runs in runs)
    objects = zip(detections.labels.tolist(), prediction.boxes, masks, strict=True)
    return [format_yolo_line(label, box, detections.size, mask) + "\n" for label, box, mask in objects]


def check_overwrite(path: str, resume: bool) -> None:
    """Raise UsageError if an existing file that `predict` did not write would be overwritten."""
    if os.path.lexists(path) and not os.path.lexists(f"{path}.job.json") and not resume:
        hint = "set another file with --out"
        raise UsageError(f"{escape_unprintable(path)} was not written by `predict` and is not overwritten", hint)
