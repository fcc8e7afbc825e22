"""Parquet files and Hugging Face Hub datasets: columns, splits, labels, and rejected files."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import make_image
from tests.data.resume import assert_continues
from vitreous.data.sources import open_data
from vitreous.data.split import decode_sample
from vitreous.errors import DataError, ResourceError, UsageError


@pytest.fixture(autouse=True)
def isolated_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def encode_random_png(seed: int) -> bytes:
    file = io.BytesIO()
    make_image(seed, (12, 10), seed).save(file, "PNG")
    return file.getvalue()


def make_image_column(count: int, start: int = 0) -> pa.Array:
    """Return an image column as Hub datasets store it."""
    return pa.array([{"bytes": encode_random_png(start + row), "path": f"{row}.png"} for row in range(count)])


def with_hub_features(table: pa.Table, features: str) -> pa.Table:
    """Return a table with the Hub's description of its column types in the metadata."""
    return table.replace_schema_metadata({"huggingface": '{"info": {"features": ' + features + "}}"})


NAMED_LABEL_FEATURES = '{"image": {"_type": "Image"}, "label": {"names": ["cat", "ant"], "_type": "ClassLabel"}}'


def write_parquet(path, columns, features=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    pq.write_table(with_hub_features(table, features) if features else table, path, **options)
    return path


def get_open_error(source, error_types=(DataError, UsageError)):
    with pytest.raises(error_types) as error:
        open_data(source)
    return str(error.value)


def test_parquet_rows_keep_their_labels_and_pixels(tmp_path):
    labels = np.arange(30) % 2
    file = write_parquet(
        tmp_path / "x.parquet",
        {"label": labels, "image": make_image_column(30), "id": np.arange(30)},
        NAMED_LABEL_FEATURES,
        row_group_size=7,
    )
    data = open_data(file)
    assert data.classes == ("cat", "ant"), "the order of the ClassLabel"
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 26, "val": 4} and data.unsplit
    assert data.full_train_split.labels.tolist() == labels.tolist()
    for split in (data.full_train_split, data.splits["train"]):
        for sample, row in enumerate(split.row_indices):
            assert split.raw(sample) == encode_random_png(row) and split.labels[sample] == row % 2
            assert split.name(sample) == f"{file}, train, row {row}"
    subset = data.full_train_split.take(np.array([5, 3]))
    assert [subset.raw(0), subset.raw(1)] == [
        encode_random_png(5),
        encode_random_png(3),
    ] and subset.labels.tolist() == [1, 1]


SPLIT_FILE_LAYOUTS = [
    [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
        "validation-00000-of-00001.parquet",
        "test.parquet",
    ],
    ["data/train-0.parquet", "data/train-1.parquet", "data/val-0.parquet", "data/test-0.parquet"],
    ["train/0.parquet", "train/1.parquet", "valid/0.parquet", "test/x.parquet"],
]


@pytest.mark.parametrize("files", SPLIT_FILE_LAYOUTS)
def test_parquet_folders_are_read_as_splits(files, tmp_path):
    for number, file in enumerate(files):
        write_parquet(tmp_path / file, {"image": make_image_column(6, 10 * number), "label": ["b", "a"] * 3})
    data = open_data(tmp_path)
    assert data.classes == ("a", "b") and data.full_train_split is None and not data.unsplit
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 12, "val": 6, "test": 6}
    assert (
        data.splits["train"].raw(7) == encode_random_png(11)
        and data.splits["val"].raw(1) == encode_random_png(21)
        and data.splits["test"].raw(0) == encode_random_png(30)
    )
    assert data.splits["train"].labels.tolist() == [1, 0] * 6


LABEL_COLUMNS = {
    "names": (["b10", "b9", "a"] * 6, ("a", "b9", "b10"), [2, 1, 0] * 6),
    "numbers": ([7, 30, 9] * 6, ("7", "9", "30"), [0, 2, 1] * 6),
    "truth": ([True, False] * 9, ("false", "true"), [1, 0] * 9),
    "dictionary": (pa.array(["x", "y"] * 9).dictionary_encode(), ("x", "y"), [0, 1] * 9),
    "several": ([["a", "b"], ["b"], []] * 6, ("a", "b"), [[1, 1], [0, 1], [0, 0]] * 6),
    "large": (pa.array(["x", "y"] * 9, pa.large_string()), ("x", "y"), [0, 1] * 9),
}


@pytest.mark.parametrize("case", LABEL_COLUMNS)
def test_every_label_type_is_read(case, tmp_path):
    column, classes, expected = LABEL_COLUMNS[case]
    data = open_data(
        write_parquet(tmp_path / "x.parquet", {"image": make_image_column(18), "label": column}, row_group_size=5)
    )
    assert data.classes == classes and data.full_train_split.labels.tolist() == expected
    assert data.multilabel == (case == "several")


def test_labels_stored_as_floats(tmp_path):
    """pandas stores integers as floats if a value is missing."""
    for name, values in {"one": [1.0, 0.0, 1.0, 2.0], "several": [[1.0, 0.0], [0.0], [], [2.0]]}.items():
        for float_type in (pa.float64(), pa.float32()):
            column = pa.array(values, pa.list_(float_type) if name == "several" else float_type)
            integer_column = pa.array(values, pa.list_(pa.int64()) if name == "several" else pa.int64())
            float_data = open_data(
                write_parquet(tmp_path / "float.parquet", {"image": make_image_column(4), "label": column})
            )
            integer_data = open_data(
                write_parquet(tmp_path / "int.parquet", {"image": make_image_column(4), "label": integer_column})
            )
            assert float_data.classes == integer_data.classes == ("0", "1", "2")
            assert np.array_equal(float_data.splits["train"].labels, integer_data.splits["train"].labels)
    fraction = write_parquet(tmp_path / "a.parquet", {"image": make_image_column(2), "label": pa.array([0.0, 1.5])})
    assert open_data(fraction).targets == ("label",)
    multilabel_file = write_parquet(
        tmp_path / "d.parquet",
        {"image": make_image_column(2), "label": pa.array([[0.0], [1.5]], pa.list_(pa.float64()))},
    )
    assert "label is 1.5 in row 1" in str(get_open_error(multilabel_file))
    missing = write_parquet(
        tmp_path / "b.parquet", {"image": make_image_column(2), "label": pa.array([0.0, float("nan")])}
    )
    assert "1 of 2 labels of train are missing" in str(get_open_error(missing))
    score = write_parquet(
        tmp_path / "c.parquet", {"image": make_image_column(4), "score": pa.array([0.0, 1.0, 0.0, 1.0])}
    )
    assert not open_data(score).classes  # a float column of another name may be anything
    assert open_data(f"{score}#label=score").classes == ("0", "1")


def test_columns_are_found_by_their_contents(tmp_path):
    columns = {
        "thumbnail_hash": [b"\1" * 8] * 20,
        "jpg": [encode_random_png(row) for row in range(20)],
        "y": ["a", "b"] * 10,
        "score": [0.5] * 20,
    }
    data = open_data(write_parquet(tmp_path / "x.parquet", columns))
    assert data.full_train_split.raw(4) == encode_random_png(4) and data.classes == ("a", "b")


def test_ambiguous_columns_require_options(tmp_path):
    features = '{"fine": {"names": ["p", "q", "r"], "_type": "ClassLabel"}, "coarse": {"names": ["s", "t"], "_type": "ClassLabel"}}'
    columns = {
        "left": make_image_column(20),
        "right": make_image_column(20, 50),
        "fine": np.arange(20) % 3,
        "coarse": np.arange(20) % 2,
        "id": np.arange(20),
    }
    file = write_parquet(tmp_path / "x.parquet", columns, features)
    error_text = get_open_error(file, UsageError)
    assert "2 columns can be the image: left, right" in error_text and f"{file}#image=left" in error_text
    error_text = get_open_error(f"{file}#image=right", UsageError)
    assert "2 columns can be the label: fine, coarse" in error_text and "#label=fine" in error_text
    data = open_data(f"{file}#image=right,label=coarse")
    assert data.classes == ("s", "t") and data.full_train_split.raw(2) == encode_random_png(52)
    assert "no column lable" in get_open_error(f"{file}#image=left,label=lable", UsageError)
    assert "the column left" in get_open_error(f"{file}#image=right,label=left", UsageError)
    assert "unknown role picture" in get_open_error(f"{file}#picture=left", UsageError)
    assert "no column can be the image" in get_open_error(
        write_parquet(tmp_path / "y.parquet", {"a": [[1.0]], "label": [1]}), UsageError
    )


INVALID_LABELS = {
    "a null": ({"label": ["a", "b", None] * 4}, "4 of 12 labels of train are missing; the first is in row 2"),
    "a number without a class name": ({"label": [0, 1, 5] * 4}, "labels of train are missing; the first is in row 2"),
    "case": ({"label": ["Cat", "cat"] * 6}, "differ only in case"),
}


@pytest.mark.parametrize("case", INVALID_LABELS)
def test_invalid_labels_are_rejected(case, tmp_path):
    columns, message = INVALID_LABELS[case]
    assert message in get_open_error(
        write_parquet(
            tmp_path / "x.parquet",
            {"image": make_image_column(12), **columns},
            NAMED_LABEL_FEATURES if "number" in case else None,
        ),
        DataError,
    )


@pytest.mark.parametrize("case", ["no column", "one class", "one of a list"])
def test_images_without_labels(case, tmp_path):
    columns = {"no column": {}, "one class": {"label": ["a"] * 12}, "one of a list": {"label": [["a"]] * 12}}[case]
    file = write_parquet(tmp_path / "train.parquet", {"image": make_image_column(12), "score": [0.5] * 12, **columns})
    write_parquet(
        tmp_path / "test.parquet",
        {"image": make_image_column(3, 50), "score": [0.5] * 3, **{k: v[:3] for k, v in columns.items()}},
    )
    for source, sizes in ((file, [11, 1]), (tmp_path, [11, 1, 3])):
        data = open_data(source)
        assert not data.labelled and data.classes == () and not data.multilabel and data.unlabelled is not None
        assert [split.labels.shape for split in data.splits.values()] == [(size, 0) for size in sizes]
        assert data.full_train_split.raw(2) == encode_random_png(2) and data.full_train_split.labels.dtype == np.float32
    assert ("no label column" if case == "no column" else "one class only (a)") in str(data.unlabelled)
    assert data.split("test").raw(1) == encode_random_png(51)


def test_inconsistent_splits_are_rejected(tmp_path):
    write_parquet(tmp_path / "a" / "train.parquet", {"image": make_image_column(4), "label": ["x", "y"] * 2})
    write_parquet(tmp_path / "a" / "test.parquet", {"image": make_image_column(2), "label": ["x", "z"]})
    assert "test has classes that train lacks: z" in get_open_error(tmp_path / "a")
    write_parquet(tmp_path / "a" / "other.parquet", {"image": make_image_column(2), "label": ["x", "z"]})
    assert "other.parquet has no split, but those of other files have" in get_open_error(tmp_path / "a")
    write_parquet(tmp_path / "b" / "test.parquet", {"image": make_image_column(2), "label": ["x", "z"]})
    assert "no split train" in get_open_error(tmp_path / "b")
    write_parquet(tmp_path / "c" / "train-0.parquet", {"image": make_image_column(4), "label": ["x", "y"] * 2})
    write_parquet(tmp_path / "c" / "train-1.parquet", {"image": make_image_column(4), "label": [1, 2] * 2})
    assert "train-1.parquet differs in columns from" in get_open_error(tmp_path / "c")
    for folder in ("full", "small"):
        write_parquet(tmp_path / "d" / folder / "train-0.parquet", {"image": make_image_column(4), "label": [1, 2] * 2})
    assert "several datasets" in get_open_error(tmp_path / "d", UsageError)


def test_an_unlabelled_test_split_is_ignored(tmp_path):
    write_parquet(
        tmp_path / "train.parquet", {"image": make_image_column(4), "label": [0, 1] * 2}, NAMED_LABEL_FEATURES
    )
    write_parquet(tmp_path / "test.parquet", {"image": make_image_column(4), "label": [-1] * 4}, NAMED_LABEL_FEATURES)
    data = open_data(tmp_path)
    assert "test" not in data.splits and "test has 4 images without labels and is ignored" in data.notes


def test_missing_images_are_reported(tmp_path):
    empty = [{"bytes": None, "path": None}, {"bytes": b"", "path": "x"}]
    rows = [*empty, {"bytes": None, "path": "beside.png"}, {"bytes": encode_random_png(3), "path": None}]
    (tmp_path / "beside.png").write_bytes(encode_random_png(9))
    split = open_data(
        write_parquet(tmp_path / "x.parquet", {"image": rows * 5, "label": ["a", "b"] * 10})
    ).full_train_split
    for sample in (0, 1):
        with pytest.raises(DataError, match=f"row {sample}: no image"):
            split.raw(sample)
    assert split.raw(2) == encode_random_png(9) and split.raw(3) == encode_random_png(3)


def test_damaged_parquet_files_are_rejected(tmp_path):
    file = write_parquet(
        tmp_path / "x.parquet",
        {"image": make_image_column(40), "label": ["a", "b"] * 20},
        compression="none",
        row_group_size=10,
    )
    whole_file = file.read_bytes()
    for content in (b"", b"PAR1", whole_file[:-20], whole_file[: len(whole_file) // 2]):
        file.write_bytes(content)
        assert "cannot be read as Parquet" in get_open_error(file, DataError)
    (tmp_path / "y.parquet").mkdir()
    assert "no images" in get_open_error(tmp_path / "y.parquet")


def test_nothing_in_a_file_is_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    schema = pa.schema([pa.field("image", pa.binary(), metadata={b"ARROW:extension:name": b"arrow.py_extension_type",
                        b"ARROW:extension:metadata": pickle.dumps(Trap())}), ("label", pa.string())])  # fmt: skip
    pq.write_table(
        pa.table([[encode_random_png(0), encode_random_png(1)] * 10, ["a", "b"] * 10], schema=schema),
        tmp_path / "x.parquet",
    )
    assert len(open_data(tmp_path / "x.parquet").full_train_split.raw(0)) == len(encode_random_png(0))
    assert not (tmp_path / "sprung").exists()


def test_the_unpacked_cache_is_reused_until_the_file_changes(tmp_path, monkeypatch):
    file = write_parquet(tmp_path / "x.parquet", {"image": make_image_column(20), "label": ["a", "b"] * 10})
    first = open_data(file)
    (cached_file,) = (tmp_path / "cache").rglob("*.arrow")
    before, fingerprint = cached_file.stat().st_mtime_ns, first.fingerprint()
    assert open_data(file).fingerprint() == fingerprint and cached_file.stat().st_mtime_ns == before
    content = cached_file.read_bytes()[:500]
    cached_file.unlink()
    cached_file.write_bytes(content)
    reopened = open_data(file)
    assert reopened.full_train_split.raw(19) == encode_random_png(19) and reopened.fingerprint() == fingerprint
    write_parquet(file, {"image": make_image_column(20, 100), "label": ["a", "b"] * 10})
    assert (
        open_data(file).full_train_split.raw(0) == encode_random_png(100)
        and open_data(file).fingerprint() != fingerprint
    )
    assert not list((tmp_path / "cache").rglob("*.tmp"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    write_parquet(file, {"image": make_image_column(20, 200), "label": ["a", "b"] * 10})
    with pytest.raises(ResourceError, match="unpacks to") as error:
        open_data(file)
    assert "XDG_CACHE_HOME" in error.value.hint


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_run_continues_anywhere(workers, tmp_path):
    write_parquet(
        tmp_path / "train-0.parquet", {"image": make_image_column(13), "label": (["a", "b"] * 7)[:13]}, row_group_size=4
    )
    write_parquet(tmp_path / "train-1.parquet", {"image": make_image_column(8, 40), "label": ["a", "b"] * 4})
    assert_continues(lambda: open_data(tmp_path).split("train"), workers, 50 if not workers else 2)


def test_a_pickled_split_does_not_contain_its_images(tmp_path):
    split = open_data(
        write_parquet(tmp_path / "x.parquet", {"image": make_image_column(20), "label": ["a", "b"] * 10})
    ).full_train_split
    split.raw(0)
    assert len(sent := pickle.dumps(split)) < 4000
    assert pickle.loads(sent).raw(7) == encode_random_png(7)


PEAK_MEMORY_SCRIPT = """
import resource, sys
from vitreous.data.sources import open_data
import pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = open_data(sys.argv[1])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_row_groups_are_streamed(tmp_path):
    noise = np.random.default_rng(0).bytes(2**20)
    rows = [noise[row * 100 : row * 100 + 20_000] for row in range(3_000)]
    file = write_parquet(
        tmp_path / "x.parquet",
        {"image": [b"\x89PNG\r\n" + row for row in rows], "label": ["a", "b"] * 1_500},
        compression="none",
    )
    assert pq.ParquetFile(file).num_row_groups == 1 and file.stat().st_size > 5.9e7
    process = subprocess.run(
        [sys.executable, "-c", PEAK_MEMORY_SCRIPT, file], capture_output=True, text=True, check=True
    ).stdout
    assert int(process) < 4e7


datasets = pytest.importorskip("datasets")


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    """Replace the Hub by local files: `hf:org/name` opens them as files in the library's cache."""
    files = {}
    for number, split in enumerate(("train", "validation", "extra")):
        dataset = datasets.Dataset.from_dict(
            {"img": [{"bytes": encode_random_png(10 * number + row), "path": None} for row in range(9)], "fine": [0, 1, 2] * 3, "coarse": [1, 0, 0] * 3},
            features=datasets.Features({"img": datasets.Image(), "fine": datasets.ClassLabel(names=["p", "q", "r"]),
                                        "coarse": datasets.ClassLabel(names=["s", "t"])}),
        )  # fmt: skip
        files[split] = str(tmp_path / f"{split}.parquet")
        dataset.to_parquet(files[split])
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_: load("parquet", data_files=files, cache_dir=str(tmp_path / "hf"))
    )
    return files


def test_hub_datasets_are_read(fake_hub):
    error_text = get_open_error("hf:org/name@plain", UsageError)
    assert "fine, coarse" in error_text and "hf:org/name@plain#label=fine" in error_text
    data = open_data("hf:org/name#label=coarse")
    assert data.classes == ("s", "t") and list(data.splits) == ["train", "val"] and data.name == "hf:org/name"
    assert data.notes == ["the split extra is ignored"]
    for number, split in enumerate(("train", "val")):
        assert data.splits[split].labels.tolist() == [1, 0, 0] * 3
        assert [data.splits[split].raw(row) for row in range(9)] == [
            encode_random_png(10 * number + row) for row in range(9)
        ]
    local = open_data(f"{fake_hub['train']}#label=coarse").with_holdout(0.0, 0).split("train")
    local_pixels, hub_pixels = (np.asarray(decode_sample(split, 4, 3)) for split in (local, data.splits["train"]))
    assert np.array_equal(local_pixels, hub_pixels)


def test_invalid_hub_datasets_are_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnist").mkdir()
    assert "is ambiguous: the local mnist would be read" in get_open_error("hf:mnist", UsageError)
    for name in ("", "a/b/c", "../x", "/etc"):
        assert "is not a repository" in get_open_error(f"hf:{name}", UsageError)

    def make_failing_loader(error):
        def load(*_):
            raise error

        monkeypatch.setattr(datasets, "load_dataset", load)
        return get_open_error("hf:org/name", DataError)

    assert "choose one: hf:org/name@CONFIG" in make_failing_loader(
        ValueError("Config name is missing. Please pick one among: ['a', 'b']")
    )
    assert "needs a loading script" in make_failing_loader(
        RuntimeError("Dataset scripts are no longer supported, but found name.py")
    )
    assert "the Hub has no such dataset" in make_failing_loader(datasets.exceptions.DatasetNotFoundError("x"))
    assert "could not be downloaded (ConnectionError: no route)" in make_failing_loader(ConnectionError("no route"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE disables" in make_failing_loader(ConnectionError("offline"))


def test_a_missing_parquet_library_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'vitreous[datasets]'" in get_open_error("hf:org/name", UsageError)
