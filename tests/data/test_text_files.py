"""Text files in every Unicode encoding are read; other encodings are rejected by name."""

import csv
import json
import re

import numpy as np
import pytest
from PIL import Image

from tests.data.annotations.scenery import write_maps
from tests.data.annotations.writing_scenes import FORMAT_WRITERS
from vitreous.data.exclusions import read_exclusion_list
from vitreous.data.sources import open_data
from vitreous.data.text_files import decode_text, read_lines, read_text
from vitreous.errors import DataError

READABLE_ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-32")
REJECTED_ENCODINGS = {
    "latin-1": "Latin-1",
    "cp1252": "Windows-1252",
    "utf-16-le": "UTF-16 LE",
    "utf-16-be": "UTF-16 BE",
}
ENCODED_NAMES = {"latin-1": "zèbre", "cp1252": "zèbre “b”"}


@pytest.mark.parametrize("encoding", READABLE_ENCODINGS)
def test_unicode_encodings_are_read(tmp_path, encoding):
    path = tmp_path / "names.txt"
    path.write_bytes("zèbre\r\nnut\rowl\n".encode(encoding))
    assert read_lines(path) == ["zèbre", "nut", "owl"]
    assert read_text(path) == "zèbre\r\nnut\rowl\n"


@pytest.mark.parametrize("encoding", REJECTED_ENCODINGS)
def test_other_encodings_are_rejected_by_name(encoding):
    text = "cell\n" + ENCODED_NAMES.get(encoding, "zebre") + "\n"
    with pytest.raises(DataError, match=REJECTED_ENCODINGS[encoding]) as error:
        decode_text(text.encode(encoding), "names.txt")
    assert "UTF-8" in error.value.hint
    if encoding in ENCODED_NAMES:
        assert "line 2" in error.value.message


def test_damaged_and_binary_files_are_rejected(tmp_path):
    with pytest.raises(DataError, match="not valid UTF-16"):
        decode_text(b"\xff\xfea\x00b", "names.txt")
    with pytest.raises(DataError, match="NUL bytes"):
        decode_text(b"cell\n\x00\x00\x00\x00abcdefghijk\n", "names.txt")
    path = tmp_path / "empty.txt"
    path.write_bytes(b"")
    assert read_text(path) == "" and read_lines(path) == []


def test_byte_order_marks_inside_the_text_are_removed():
    assert decode_text("\ufeffa\n\ufeffb".encode(), "names.txt") == "a\nb"


def rename_class(text):
    """Rename a class to a name with a non-ASCII letter."""
    return re.sub(r"\bcat\b", "c\u00e4t", text)


def rewrite_encoded(path, encoding, change=lambda text: text):
    """Rewrite a text file in another encoding."""
    path.write_bytes(change(path.read_text("utf-8")).encode(encoding))


#: format -> the files to rewrite in another encoding
TEXT_FILES = {
    "coco": ["annotations/instances_train2017.json", "annotations/instances_val2017.json"],
    "voc": [
        *(f"Annotations/{number}.xml" for number in range(5)),
        *(f"ImageSets/Main/{s}.txt" for s in ("train", "val")),
    ],
    "yolo": ["data.yaml", "labels/train/0.txt", "labels/train/2.txt"],
    "labelme": [
        f"{split}/{number}.json" for split, number in zip(("train",) * 3 + ("val",) * 2, range(5), strict=True)
    ],
    "csv": ["boxes.csv"],
}


@pytest.mark.parametrize("encoding", READABLE_ENCODINGS[1:])
@pytest.mark.parametrize("form", TEXT_FILES)
def test_annotations_in_unicode_encodings(tmp_path, form, encoding):
    source = FORMAT_WRITERS[form](tmp_path)
    original = open_data(str(source))
    for name in TEXT_FILES[form]:
        rewrite_encoded(tmp_path / name, encoding, rename_class)
    data = open_data(str(source))
    assert data.classes != original.classes and set(data.classes) == {"c\u00e4t", "dog", "owl"}
    for name, split in original.splits.items():
        for sample in range(len(split)):
            assert np.array_equal(split.target(sample).boxes, data.splits[name].target(sample).boxes)


@pytest.mark.parametrize("form", TEXT_FILES)
def test_annotations_in_latin_1_are_rejected(tmp_path, form):
    source = FORMAT_WRITERS[form](tmp_path)
    for name in TEXT_FILES[form]:
        rewrite_encoded(tmp_path / name, "latin-1", rename_class)
    with pytest.raises(DataError, match=r"byte 0xE4 is not valid UTF-8; the file looks like Latin-1"):
        open_data(str(source))


def test_declared_xml_encodings_are_read(tmp_path):
    source = FORMAT_WRITERS["voc"](tmp_path)
    head = '<?xml version="1.0" encoding="ISO-8859-1"?>'
    for number in range(5):
        rewrite_encoded(tmp_path / "Annotations" / f"{number}.xml", "latin-1", lambda text: head + rename_class(text))
    assert "c\u00e4t" in open_data(str(source)).classes


@pytest.mark.parametrize("encoding", READABLE_ENCODINGS)
def test_mask_class_lists_are_read_in_every_encoding(tmp_path, encoding):
    write_maps(tmp_path, names="")
    (tmp_path / "classes.txt").write_bytes("ground\nz\u00e8bre  b\ndisc\n".encode(encoding))
    assert open_data(str(tmp_path)).classes == ("ground", "z\u00e8bre  b", "disc")


def test_class_lists_in_latin_1_are_rejected(tmp_path):
    write_maps(tmp_path, names="")
    (tmp_path / "classes.txt").write_bytes("ground\nz\u00e8bre\ndisc\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"classes.txt, line 2.*Latin-1"):
        open_data(str(tmp_path))


def test_table_encodings_are_read_or_rejected(tmp_path):
    for name in "ab":
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / f"{name}.png")
    (tmp_path / "t.csv").write_bytes("path,label\na.png,é\nb.png,o\n".encode("utf-16"))
    assert open_data(str(tmp_path / "t.csv")).classes == ("o", "é")
    (tmp_path / "t.csv").write_bytes("path,label\na.png,é\nb.png,o\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"t.csv, line 2.*Latin-1"):
        open_data(str(tmp_path / "t.csv"))
    with (tmp_path / "copies.csv").open("w", encoding="utf-16", newline="") as file:
        csv.writer(file).writerows([["path"], ["é.png"]])
    assert read_exclusion_list(tmp_path / "copies.csv") == {"é.png"}


@pytest.mark.parametrize("value", [[1], {"a": 1}, "1", None, True, 1.5, "absent"])
@pytest.mark.parametrize("key", ["image_id", "category_id"])
def test_non_integer_coco_ids_are_rejected(tmp_path, key, value):
    source = FORMAT_WRITERS["coco"](tmp_path)
    path = tmp_path / "annotations" / "instances_train2017.json"
    document = json.loads(path.read_text())
    document["annotations"][0][key] = value
    if value == "absent":
        del document["annotations"][0][key]
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=key):
        open_data(str(source))


def test_integral_float_coco_ids_are_accepted(tmp_path):
    source = FORMAT_WRITERS["coco"](tmp_path)
    for path in (tmp_path / "annotations").iterdir():
        document = json.loads(path.read_text())
        for entry in (*document["annotations"], *document["images"], *document["categories"]):
            entry |= {key: float(entry[key]) for key in ("id", "image_id", "category_id") if key in entry}
        path.write_text(json.dumps(document))
    assert len(open_data(str(source)).split("train")) == 3
