"""Captions of COCO (arXiv:1504.00325): a JSON file with the captions of the images of a split.

    DIR/annotations/captions_train2017.json   DIR/train2017/*.jpg, or another folder of `coco.index_nearby_images`

If the name of the file contains a split, files of the other splits next to it are read too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.annotations.coco import get_image_file_name, group_files_by_split, index_nearby_images
from vitreous.data.annotations.fields import read_id, shorten_value
from vitreous.data.layouts.split_names import find_split_word
from vitreous.data.pairs import build_pair_data
from vitreous.data.split import Data, FileSplit, create_empty_labels
from vitreous.data.text_files import read_text
from vitreous.errors import DataError, escape_unprintable

CAPTIONS_PATTERN = "captions_*.json"
MAX_SEARCHED_CHARS = 20_000_000  # first characters of a JSON file that are searched for the key of a caption


def is_captions_file(path: Path) -> bool:
    """Return whether a JSON file has captions of images: its name is that of COCO's, or its annotations have captions
    and no categories."""
    if path.match(CAPTIONS_PATTERN):
        return True
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(MAX_SEARCHED_CHARS)
    except (OSError, UnicodeDecodeError):
        return False
    return '"caption"' in text and '"category_id"' not in text


def open_coco_captions(source: Path, split_seed: int = 0) -> Data:
    """Open the image-text pairs of a JSON file of captions, and of the files of other splits next to it. If there is no
    `val`, a tenth of the training images is held out. Raises DataError for invalid entries and missing images."""
    files = {"train": [source]}
    if find_split_word(source.stem) is not None and source.match(CAPTIONS_PATTERN):
        siblings = group_files_by_split(source.parent, (CAPTIONS_PATTERN,))
        files = siblings if "train" in siblings else files
    paths: list[Path] = []
    image_indices, captions, pairs_by_split = list[int](), list[str](), dict[str, np.ndarray]()
    for split, split_files in files.items():
        start = len(captions)
        for file in split_files:
            file_paths, file_indices, file_captions = read_captions_file(file)
            image_indices += [len(paths) + index for index in file_indices]
            paths += file_paths
            captions += file_captions
        pairs_by_split[split] = np.arange(start, len(captions))
    return build_pair_data(
        escape_unprintable(source),
        FileSplit(paths, create_empty_labels(len(paths))),
        np.array(image_indices, np.int64),
        captions,
        pairs_by_split=pairs_by_split,
        split_seed=split_seed,
        notes=[],
        unsplit=len(files) == 1,
    )


def read_captions_file(path: Path) -> tuple[list[Path], list[int], list[str]]:
    """Read a JSON file of captions: the images, the index of the image of each caption, and the captions. Raises
    DataError for invalid entries and missing images."""
    origin = escape_unprintable(path)
    try:
        document: Any = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin} is not valid JSON ({str(error)[:80]})", "fix or replace the file") from None
    lists = ("images", "annotations")
    if not isinstance(document, dict) or not all(isinstance(document.get(name), list) for name in lists):
        raise DataError(f"{origin} is not a captions file of COCO", f"it needs the lists {' and '.join(lists)}")
    images, index_by_id = index_nearby_images(path), dict[int, int]()
    paths: list[Path] = []
    for entry in document["images"]:
        location = f"{origin}, image {shorten_value(entry)}"
        file_name = get_image_file_name(entry) if isinstance(entry, dict) else None
        if not isinstance(file_name, str):
            raise DataError(f"{location} has no file_name", "add the name of its image file")
        index_by_id[read_id(entry, "id", location)] = len(paths)
        paths.append(images.find(file_name, origin))
    image_indices, captions = list[int](), list[str]()
    for entry in document["annotations"]:
        location = f"{origin}, annotation {shorten_value(entry)}"
        if not isinstance(entry, dict) or not isinstance(entry.get("caption"), str):
            raise DataError(f"{location} has no caption", "add its text, or delete the annotation")
        image_id = read_id(entry, "image_id", location)
        if image_id not in index_by_id:
            raise DataError(f"{location}: there is no image {image_id}", "add the image, or delete the annotation")
        image_indices.append(index_by_id[image_id])
        captions.append(entry["caption"])
    return paths, image_indices, captions
