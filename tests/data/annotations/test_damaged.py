"""A hundred kinds of damage to annotation files: each is reported in one message that names the file."""

import json
import shutil

import pytest

from tests.data.annotations.writing_scenes import FORMAT_WRITERS
from vitreous.data.sources import open_data
from vitreous.errors import VitreousError

HUGE_INTEGER = "1" + "0" * 400
#: format -> (damaged file, its new content or a function that edits its text)
INVALID_TEXTS = ["", "{", "[]", "null", "\x00\xff", "<html>", "true", '{"images": 1}', "[" * 5000]


def edit_json(change):
    """Return a function that edits JSON text by applying `change` to the document."""

    def edit_text(before):
        document = json.loads(before)
        change(document)
        return json.dumps(document)

    return edit_text


def replace_text(old, new):
    """Return a function that replaces `old`, which must occur in the text."""

    def edit_text(before):
        assert old in before, before
        return before.replace(old, new, 1)

    return edit_text


def set_first_entry(key, name, value):
    """Return an edit that sets `name` in the first entry of a COCO list."""
    return edit_json(lambda document: document[key][0].update({name: value}))


def drop_from_first_entry(key, name):
    """Return an edit that removes `name` from the first entry of a COCO list."""
    return edit_json(lambda document: document[key][0].pop(name))


COCO_DAMAGES = [
    *INVALID_TEXTS,
    *(edit_json(lambda document, key=key: document.pop(key)) for key in ("images", "annotations", "categories")),
    *(
        edit_json(lambda document, key=key: document.update({key: [3]}))
        for key in ("images", "annotations", "categories")
    ),
    *(drop_from_first_entry("images", name) for name in ("id", "file_name")),
    *(drop_from_first_entry("categories", name) for name in ("id", "name")),
    *(drop_from_first_entry("annotations", name) for name in ("image_id", "category_id")),
    set_first_entry("images", "id", "7"),
    set_first_entry("images", "file_name", 3),
    set_first_entry("images", "file_name", "../../etc/passwd"),
    set_first_entry("images", "file_name", "nobody.png"),
    set_first_entry("images", "id", 99),
    set_first_entry("categories", "id", True),
    set_first_entry("categories", "id", 5),
    set_first_entry("categories", "name", ""),
    set_first_entry("categories", "name", "cat"),
    set_first_entry("annotations", "image_id", 1),
    set_first_entry("annotations", "category_id", 1),
    set_first_entry("annotations", "category_id", None),
    set_first_entry("annotations", "bbox", [1, 2, 3]),
    set_first_entry("annotations", "bbox", [1, 2, -3, 4]),
    set_first_entry("annotations", "bbox", [1, 2, "x", 4]),
    set_first_entry("annotations", "bbox", [1, 2, None, 4]),
    set_first_entry("annotations", "bbox", "1 2 3 4"),
    set_first_entry("annotations", "bbox", [1, 2, float("nan"), 4]),
    set_first_entry("annotations", "bbox", [1, 2, 1e999, 4]),
    set_first_entry("annotations", "segmentation", [[1, 2, 3, 4, 5, 6, 7]]),
    set_first_entry("annotations", "segmentation", [["a", 2, 3, 4, 5, 6]]),
    set_first_entry("annotations", "segmentation", [3]),
    set_first_entry("annotations", "segmentation", 3),
    set_first_entry("annotations", "segmentation", "x"),
    set_first_entry("annotations", "segmentation", {"counts": [3, 4], "size": [24, 32]}),
    set_first_entry("annotations", "segmentation", {"counts": [-3, 771], "size": [24, 32]}),
    set_first_entry("annotations", "segmentation", {"counts": "\x01", "size": [24, 32]}),
    set_first_entry("annotations", "segmentation", {"counts": "o", "size": [24, 32]}),
    set_first_entry("annotations", "segmentation", {"counts": None, "size": [24, 32]}),
    set_first_entry("annotations", "segmentation", {"counts": [768]}),
    set_first_entry("annotations", "segmentation", {"counts": [768], "size": [24, 32, 1]}),
    set_first_entry("annotations", "segmentation", {"counts": [700], "size": [20, 35]}),
    edit_json(lambda document: [row.pop(key) for row in document["annotations"] for key in ("bbox", "segmentation")]),
    set_first_entry("images", "height", 25),
]
VOC_DAMAGES = [
    *INVALID_TEXTS[:6],
    "<a>",
    "<!DOCTYPE a [<!ENTITY b 'c'>]><annotation>&b;</annotation>",
    replace_text("<name>", "<nome>"),
    replace_text("<name>dog</name>", "<name> </name>"),
    replace_text("<xmin>", "<xmin>x"),
    replace_text("<xmin>", "<xmin>nan"),
    replace_text("<xmin>", "<xmin>9"),
    replace_text("<ymin>", "<ymin>9"),
    replace_text("<xmin>", "<xmin>" + HUGE_INTEGER),
    replace_text("<xmax>", "<xmux></xmux><xmax>1e999"),
    replace_text("<bndbox>", "<box>"),
    replace_text("<width>32", "<width>33"),
    replace_text("<height>24", "<height>2"),
]
YOLO_DAMAGES = [
    "cat 0.5 0.5 0.1 0.1",
    "0 0.5 0.5 0.1",
    "0 0.5 0.5 0.1 0.1 0.2",
    "0 0.5 0.5 0.1 0.1 0.2 0.3 0.3",
    "-1 0.5 0.5 0.1 0.1",
    "0.5 0.5 0.5 0.1 0.1",
    "3 0.5 0.5 0.1 0.1",
    "0 50 50 10 10",
    "0 nan 0.5 0.1 0.1",
    "0 inf 0.5 0.1 0.1",
    "0",
    "\x00\xff",
    "<html>",
    "1e9 0.5 0.5 0.1 0.1",
]
YAML_DAMAGES = [
    "",
    "names: 3",
    "names: []",
    "- a",
    "names: {a: cat}\ntrain: images/train",
    "names: [[a]]\ntrain: images/train",
    "names: [cat, dog, owl]",
    "names: [cat, dog, owl]\nval: images/val",
    "names: [cat, dog, owl]\ntrain: images/nowhere",
    "names: [cat, cat, owl]\ntrain: images/train",
    "names: &a [cat]\ntrain: *a",
    "{",
    "names: [cat]\ntrain: images/train",
]
LABELME_DAMAGES = [
    *INVALID_TEXTS[:3],
    '{"shapes": 3}',
    '{"shapes": [3]}',
    '{"shapes": [{"label": "cat"}]}',
    '{"shapes": [{"points": [[1, 2], [3, 4], [5, 1]]}]}',
    '{"shapes": [{"label": "cat", "points": [[1, 2], [3]]}]}',
    '{"shapes": [{"label": "cat", "points": [[1, 2], [3, 4]]}]}',
    '{"shapes": [{"label": "cat", "points": [[1, "a"], [3, 4], [5, 1]]}]}',
    '{"shapes": [{"label": "cat", "points": [[1, NaN], [3, 4], [5, 1]]}]}',
    '{"shapes": [{"label": "cat", "shape_type": "line", "points": [[1, 2], [3, 4]]}]}',
    '{"shapes": [{"label": "cat", "shape_type": "circle", "points": [[1, 2]]}]}',
    replace_text('"imageHeight": 24', '"imageHeight": 25'),
]
CSV_DAMAGES = [
    replace_text("filename", "nothing"),
    replace_text("label", "nothing"),
    replace_text("0.png,", "nobody.png,"),
    replace_text("0.png,", ","),
    replace_text("train", "exam"),
    lambda text: text.replace("\n0.png", "\n0.png,cat,9,9,3,12,train\n0.png", 1),
    lambda text: text.replace("\n0.png", "\n0.png,cat,1,1,x,2,train\n0.png", 1),
    lambda text: text.replace("\n0.png", "\n0.png,cat,1,1,inf,2,train\n0.png", 1),
    lambda text: text.replace("\n0.png", "\n0.png,,1,1,3,2,train\n0.png", 1),
    lambda text: text.replace("\n0.png", "\n0.png,cat,1,1\n0.png", 1),
    lambda text: text.replace("\n0.png", '\n"0.png,cat,1,1,3,2,train\n0.png', 1),
]
DAMAGED_FILES = {
    "coco": ("annotations/instances_train2017.json", COCO_DAMAGES),
    "voc": ("Annotations/2.xml", VOC_DAMAGES),
    "yolo": ("labels/train/2.txt", YOLO_DAMAGES),
    "yaml": ("data.yaml", YAML_DAMAGES),
    "labelme": ("train/2.json", LABELME_DAMAGES),
    "csv": ("boxes.csv", CSV_DAMAGES),
}
DAMAGE_CASES = [(form, number) for form, (_, damages) in DAMAGED_FILES.items() for number in range(len(damages))]


@pytest.fixture(scope="module")
def written_datasets(tmp_path_factory):
    """Return a folder with one dataset in every format."""
    home = tmp_path_factory.mktemp("whole")
    return {form: write(home / form) for form, write in FORMAT_WRITERS.items()} and home


def test_at_least_100_damage_cases_exist():
    assert len(DAMAGE_CASES) >= 100


@pytest.mark.parametrize(("form", "number"), DAMAGE_CASES)
def test_a_damaged_file_is_reported_in_one_message(written_datasets, tmp_path, form, number):
    inner, damages = DAMAGED_FILES[form]
    shutil.copytree(written_datasets / ("yolo" if form == "yaml" else form), tmp_path / "data")
    path, damage = tmp_path / "data" / inner, damages[number]
    text = damage(path.read_text()) if callable(damage) else damage
    path.write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(VitreousError) as error:
        data = open_data(str(path if form == "csv" else tmp_path / "data"))
        for split in data.splits.values():
            for sample in range(len(split)):
                split.target(sample)
    # either file may be named if two files disagree
    related_name = "instances_val2017.json" if form == "coco" else f"{path.stem}.png"
    assert any(name in error.value.message for name in (path.name, related_name)) or form == "yaml", error.value.message
    assert len(error.value.message) < 700


@pytest.mark.parametrize(
    ("form", "inner"),
    [
        ("coco", "train2017/0.png"),
        ("voc", "JPEGImages/0.png"),
        ("voc", "Annotations/0.xml"),
        ("yolo", "images/train/0.png"),
        ("labelme", "train/0.png"),
    ],
)
def test_a_missing_annotated_image_is_reported(written_datasets, tmp_path, form, inner):
    shutil.copytree(written_datasets / form, tmp_path / "data")
    (tmp_path / "data" / inner).unlink()
    with pytest.raises(VitreousError, match=r"\b0\b.*(does not exist|has no)"):
        open_data(str(tmp_path / "data"))


def test_a_missing_image_of_a_yolo_list_is_reported(written_datasets, tmp_path):
    shutil.copytree(written_datasets / "yolo", tmp_path / "data")
    (tmp_path / "data" / "train.txt").write_text("images/train/0.png\nimages/train/1.png\nimages/train/nobody.png\n")
    (tmp_path / "data" / "data.yaml").write_text("train: train.txt\nval: images/val\nnames: [cat, dog, owl]\n")
    with pytest.raises(VitreousError, match=r"nobody\.png does not exist"):
        open_data(str(tmp_path / "data"))
    # image 2 is not in the list
    (tmp_path / "data" / "train.txt").write_text("images/train/0.png\nimages/train/1.png\n")
    assert len(open_data(str(tmp_path / "data")).split("train")) == 2
