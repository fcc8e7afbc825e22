"""A hundred damaged files of annotations: one message that names the file, and nothing is learned from."""

import json
import shutil

import pytest

from tests.data.annotations.writing_scenes import WRITERS
from vitreous.data.sources import open_data
from vitreous.errors import VitreousError

HUGE = "1" + "0" * 400
#: of each format the files that are damaged, and what is written in their place or done to their text
TEXTS = ["", "{", "[]", "null", "\x00\xff", "<html>", "true", '{"images": 1}', "[" * 5000]


def edit(change):
    """A change of a JSON document."""

    def text(before):
        document = json.loads(before)
        change(document)
        return json.dumps(document)

    return text


def swap(old, new):
    """A change of a text, which has to have that part."""

    def text(before):
        assert old in before, before
        return before.replace(old, new, 1)

    return text


def first(key, name, value):
    """A change of the first entry of a list of COCO."""
    return edit(lambda document: document[key][0].update({name: value}))


def lack(key, name):
    """The first entry of a list of COCO without a key."""
    return edit(lambda document: document[key][0].pop(name))


COCO = [
    *TEXTS,
    *(edit(lambda document, key=key: document.pop(key)) for key in ("images", "annotations", "categories")),
    *(edit(lambda document, key=key: document.update({key: [3]})) for key in ("images", "annotations", "categories")),
    *(lack("images", name) for name in ("id", "file_name")),
    *(lack("categories", name) for name in ("id", "name")),
    *(lack("annotations", name) for name in ("image_id", "category_id")),
    first("images", "id", "7"),
    first("images", "file_name", 3),
    first("images", "file_name", "../../etc/passwd"),
    first("images", "file_name", "nobody.png"),
    first("images", "id", 99),
    first("categories", "id", True),
    first("categories", "id", 5),
    first("categories", "name", ""),
    first("categories", "name", "cat"),
    first("annotations", "image_id", 1),
    first("annotations", "category_id", 1),
    first("annotations", "category_id", None),
    first("annotations", "bbox", [1, 2, 3]),
    first("annotations", "bbox", [1, 2, -3, 4]),
    first("annotations", "bbox", [1, 2, "x", 4]),
    first("annotations", "bbox", [1, 2, None, 4]),
    first("annotations", "bbox", "1 2 3 4"),
    first("annotations", "bbox", [1, 2, float("nan"), 4]),
    first("annotations", "bbox", [1, 2, 1e999, 4]),
    first("annotations", "segmentation", [[1, 2, 3, 4, 5, 6, 7]]),
    first("annotations", "segmentation", [["a", 2, 3, 4, 5, 6]]),
    first("annotations", "segmentation", [3]),
    first("annotations", "segmentation", 3),
    first("annotations", "segmentation", "x"),
    first("annotations", "segmentation", {"counts": [3, 4], "size": [24, 32]}),
    first("annotations", "segmentation", {"counts": [-3, 771], "size": [24, 32]}),
    first("annotations", "segmentation", {"counts": "\x01", "size": [24, 32]}),
    first("annotations", "segmentation", {"counts": "o", "size": [24, 32]}),
    first("annotations", "segmentation", {"counts": None, "size": [24, 32]}),
    first("annotations", "segmentation", {"counts": [768]}),
    first("annotations", "segmentation", {"counts": [768], "size": [24, 32, 1]}),
    first("annotations", "segmentation", {"counts": [700], "size": [20, 35]}),
    edit(lambda document: [row.pop(key) for row in document["annotations"] for key in ("bbox", "segmentation")]),
    first("images", "height", 25),
]
VOC = [
    *TEXTS[:6],
    "<a>",
    "<!DOCTYPE a [<!ENTITY b 'c'>]><annotation>&b;</annotation>",
    swap("<name>", "<nome>"),
    swap("<name>dog</name>", "<name> </name>"),
    swap("<xmin>", "<xmin>x"),
    swap("<xmin>", "<xmin>nan"),
    swap("<xmin>", "<xmin>9"),
    swap("<ymin>", "<ymin>9"),
    swap("<xmin>", "<xmin>" + HUGE),
    swap("<xmax>", "<xmux></xmux><xmax>1e999"),
    swap("<bndbox>", "<box>"),
    swap("<width>32", "<width>33"),
    swap("<height>24", "<height>2"),
]
YOLO = [
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
YAML = [
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
LABELME = [
    *TEXTS[:3],
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
    swap('"imageHeight": 24', '"imageHeight": 25'),
]
CSV = [
    swap("filename", "nothing"),
    swap("label", "nothing"),
    swap("0.png,", "nobody.png,"),
    swap("0.png,", ","),
    swap("train", "exam"),
    lambda text: text.replace("\n0.png", "\n0.png,cat,9,9,3,12,train\n0.png", 1),
    lambda text: text.replace("\n0.png", "\n0.png,cat,1,1,x,2,train\n0.png", 1),
    lambda text: text.replace("\n0.png", "\n0.png,cat,1,1,inf,2,train\n0.png", 1),
    lambda text: text.replace("\n0.png", "\n0.png,,1,1,3,2,train\n0.png", 1),
    lambda text: text.replace("\n0.png", "\n0.png,cat,1,1\n0.png", 1),
    lambda text: text.replace("\n0.png", '\n"0.png,cat,1,1,3,2,train\n0.png', 1),
]
FILES = {
    "coco": ("annotations/instances_train2017.json", COCO),
    "voc": ("Annotations/2.xml", VOC),
    "yolo": ("labels/train/2.txt", YOLO),
    "yaml": ("data.yaml", YAML),
    "labelme": ("train/2.json", LABELME),
    "csv": ("boxes.csv", CSV),
}
CASES = [(form, number) for form, (_, damages) in FILES.items() for number in range(len(damages))]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder in every format."""
    home = tmp_path_factory.mktemp("whole")
    return {form: write(home / form) for form, write in WRITERS.items()} and home


def test_there_are_a_hundred():
    assert len(CASES) >= 100


@pytest.mark.parametrize(("form", "number"), CASES)
def test_one_message_names_the_file(written, tmp_path, form, number):
    inner, damages = FILES[form]
    shutil.copytree(written / ("yolo" if form == "yaml" else form), tmp_path / "data")
    place, damage = tmp_path / "data" / inner, damages[number]
    text = damage(place.read_text()) if callable(damage) else damage
    place.write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(VitreousError) as told:
        data = open_data(str(place if form == "csv" else tmp_path / "data"))
        for split in data.splits.values():
            for sample in range(len(split)):
                split.target(sample)
    other = "instances_val2017.json" if form == "coco" else f"{place.stem}.png"  # of two that disagree
    assert any(name in told.value.message for name in (place.name, other)) or form == "yaml", told.value.message
    assert len(told.value.message) < 700


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
def test_a_file_that_is_gone(written, tmp_path, form, inner):
    shutil.copytree(written / form, tmp_path / "data")
    (tmp_path / "data" / inner).unlink()
    with pytest.raises(VitreousError, match=r"\b0\b.*(does not exist|has no)"):
        open_data(str(tmp_path / "data"))


def test_an_image_of_a_list_that_is_gone(written, tmp_path):
    shutil.copytree(written / "yolo", tmp_path / "data")
    (tmp_path / "data" / "train.txt").write_text("images/train/0.png\nimages/train/1.png\nimages/train/nobody.png\n")
    (tmp_path / "data" / "data.yaml").write_text("train: train.txt\nval: images/val\nnames: [cat, dog, owl]\n")
    with pytest.raises(VitreousError, match=r"nobody\.png does not exist"):
        open_data(str(tmp_path / "data"))
    (tmp_path / "data" / "train.txt").write_text("images/train/0.png\nimages/train/1.png\n")  # 2 is not in the list
    assert len(open_data(str(tmp_path / "data")).split("train")) == 2
