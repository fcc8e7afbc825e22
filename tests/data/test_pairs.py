"""Image-text pairs: the formats are read alike, captions of an image stay in one split, bad input has a message."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import make_image
from vitreous.data.pairs import Captions, PairSplit, has_pairs, require_pairs, tokenize_pairs
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError

NUM_IMAGES = 20


def list_captions():
    """Return pairs of an image index and a caption; every third image has a second caption."""
    pairs = [(index, f"a photo of number {index}") for index in range(NUM_IMAGES)]
    return pairs + [(index, f'number {index}, "again" — ü') for index in range(0, NUM_IMAGES, 3)]


def write_images(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(NUM_IMAGES):
        make_image(index, (12, 12), index % 3).save(folder / f"{index:02}.png")


def write_csv(folder, header="path,caption", rows=None):
    write_images(folder / "photos")
    rows = [(f"photos/{index:02}.png", text) for index, text in list_captions()] if rows is None else rows
    lines = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    (folder / "pairs.csv").write_text("\n".join([header, *lines]) + "\n", "utf-8")
    return folder / "pairs.csv"


def read_image_bytes(index):
    buffer = io.BytesIO()
    make_image(index, (12, 12), index % 3).save(buffer, "PNG")
    return buffer.getvalue()


def add_member(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_archives(folder, form):
    folder.mkdir()
    with tarfile.open(folder / "pairs-000.tar", "w") as archive:
        for index in range(NUM_IMAGES):
            add_member(archive, f"{index:04}.png", read_image_bytes(index))
            text = f"a photo of number {index}"
            content = json.dumps({"caption": text, "url": "x"}) if form == "json" else text + "\n"
            add_member(archive, f"{index:04}.{form}", content.encode())
    return folder


def write_parquet(folder, lists):
    folder.mkdir()
    texts = [[text for owner, text in list_captions() if owner == index] for index in range(NUM_IMAGES)]
    captions = texts if lists else [row[0] for row in texts]
    images = [{"bytes": read_image_bytes(index), "path": None} for index in range(NUM_IMAGES)]
    pq.write_table(pa.table({"image": images, "caption": captions, "url": ["x"] * NUM_IMAGES}), folder / "x.parquet")
    return folder / "x.parquet"


def write_coco(folder):
    for split, indices in {"train": range(15), "val": range(15, NUM_IMAGES)}.items():
        (folder / f"{split}2017").mkdir(parents=True)
        for index in indices:
            make_image(index, (12, 12), index % 3).save(folder / f"{split}2017" / f"{index:02}.png")
        (folder / "annotations").mkdir(exist_ok=True)
        document = {
            "images": [{"id": index, "file_name": f"{index:02}.png"} for index in indices],
            "annotations": [
                {"id": number, "image_id": index, "caption": text}
                for number, (index, text) in enumerate(list_captions())
                if index in indices
            ],
        }
        (folder / "annotations" / f"captions_{split}2017.json").write_text(json.dumps(document))
    return folder / "annotations" / "captions_train2017.json"


def collect_pairs(data):
    """Return the pairs of all splits as (pixels of the image, caption)."""
    return sorted((split.raw(i), split.caption(i)) for split in data.splits.values() for i in range(len(split)))


def test_formats_have_the_same_pairs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = sorted((read_image_bytes(index), text) for index, text in list_captions())
    first = sorted((read_image_bytes(index), text) for index, text in list_captions()[:NUM_IMAGES])
    assert collect_pairs(open_data(write_csv(tmp_path / "csv"))) == expected
    assert collect_pairs(open_data(write_coco(tmp_path / "coco"))) == expected
    assert collect_pairs(open_data(write_parquet(tmp_path / "lists", True))) == expected
    assert collect_pairs(open_data(write_parquet(tmp_path / "plain", False))) == first
    assert collect_pairs(open_data(write_archives(tmp_path / "txt", "txt"))) == first
    assert collect_pairs(open_data(write_archives(tmp_path / "json", "json"))) == first


def test_splits_of_coco_and_csv(tmp_path):
    coco = open_data(write_coco(tmp_path / "coco"))
    assert {name: len(split) for name, split in coco.splits.items()} == {"train": 20, "val": 7} and not coco.unsplit
    rows = [(f"photos/{i:02}.png", text, "train" if i % 2 else "validation") for i, text in list_captions()]
    csv = open_data(write_csv(tmp_path / "csv", "image,text,split", rows))
    assert set(csv.splits) == {"train", "val"} and not csv.unsplit


def test_captions_of_an_image_stay_in_one_split(tmp_path):
    data = open_data(write_csv(tmp_path))
    train, val = data.splits["train"], data.splits["val"]
    assert isinstance(train, PairSplit) and isinstance(val, PairSplit) and has_pairs(data) and not data.labelled
    assert not set(train.image_indices) & set(val.image_indices) and len(val)
    assert len(data.with_holdout(0.3, 1).splits["val"]) > len(val)
    other = write_csv(tmp_path / "other", rows=[(f"photos/{i:02}.png", "x") for i in range(NUM_IMAGES)])
    assert data.fingerprint() == open_data(tmp_path / "pairs.csv").fingerprint() != open_data(other).fingerprint()


def test_empty_captions_are_left_out(tmp_path):
    rows = [(f"photos/{index:02}.png", " " if index < 2 else "x") for index in range(NUM_IMAGES)]
    data = open_data(write_csv(tmp_path, rows=rows))
    assert "2 of 20 pairs have an empty caption and are left out" in data.notes
    assert sum(map(len, data.splits.values())) == 18


class LetterTokenizer:
    """Encodes a text as the numbers of its letters."""

    def encode_texts(self, texts, truncate=False):
        return np.array([[ord(letter) for letter in text[:9].ljust(9)] for text in texts])


def test_tokens_belong_to_their_captions(tmp_path):
    data = tokenize_pairs(open_data(write_csv(tmp_path)), LetterTokenizer())
    for split in data.splits.values():
        assert (LetterTokenizer().encode_texts(split.captions()) == split.tokens).all()
        assert (split.take(np.array([2, 0])).tokens == split.tokens[[2, 0]]).all()
    with pytest.raises(UsageError, match="no token ids"):
        open_data(tmp_path / "pairs.csv").splits["train"].tokens  # noqa: B018


def test_captions_keep_all_characters():
    texts = ["", "a", "ü — 日本", "\U0001f600"]
    assert list(Captions(texts)) == texts and Captions(texts)[1:3] == texts[1:3]


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("path,caption", [("photos/00.png", "x"), ("photos/gone.png", "x")], "1 of 2 files are missing"),
        ("path,caption", [("photos/00.png",)], "line 2: 1 cells for 2 columns"),
        ("path,caption", [("", "x")], "line 2: no path"),
        ("path,caption,split", [("photos/00.png", "x", "tain")], "line 2: unknown split tain"),
        ("path,caption", [("photos/00.png", "")], "no training images with captions"),
    ],
)
def test_bad_tables_are_refused(tmp_path, header, rows, message):
    with pytest.raises(DataError, match=message):
        open_data(write_csv(tmp_path, header, rows))


def test_bad_coco_captions_are_refused(tmp_path):
    path = write_coco(tmp_path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "annotations": [{"image_id": 99, "caption": "x"}]}))
    with pytest.raises(DataError, match="no image 99"):
        open_data(path)


def test_labels_are_preferred_to_captions(tmp_path):
    rows = [(f"photos/{i:02}.png", "x", f"class {i % 2}") for i in range(NUM_IMAGES)]
    data = open_data(write_csv(tmp_path, "path,caption,label", rows))
    assert data.labelled
    with pytest.raises(DataError, match="has no captions"):
        require_pairs(data)
