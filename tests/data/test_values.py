"""Regression targets: numeric columns of tables and Parquet files, numeric class folders, and their splits."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from tests.conftest import make_folder
from vitreous.data.holdout import draw_stratified_splits
from vitreous.data.sources import open_data
from vitreous.data.values import are_measurements, require_values
from vitreous.errors import DataError


def write_value_table(home, text, count=12):
    """Write a table, and black images for its rows."""
    for row in range(count):
        Image.new("L", (4, 4)).save(home / f"{row}.png")
    path = home / "values.csv"
    path.write_text(text)
    return path


def format_table(*columns, count=12):
    """Return CSV text with a header; each column is a function of the row number."""
    names = ["path", *(name for name, _ in columns)]
    rows = [[f"{r}.png", *(str(value(r)) for _, value in columns)] for r in range(count)]
    return "\n".join(",".join(row) for row in [names, *rows]) + "\n"


def test_numeric_columns_are_targets(tmp_path):
    path = write_value_table(
        tmp_path,
        format_table(
            ("age", lambda r: r + 0.5),
            ("height", lambda r: "" if r % 3 == 0 else r),
            ("split", lambda r: "val" if r > 8 else "train"),
        ),
    )
    data = open_data(path)
    train, val = data.splits["train"].labels, data.splits["val"].labels
    assert data.targets == ("age", "height") and data.classes == () and data.labelled and not data.multilabel
    assert train.dtype == np.float64 and train[:, 0].tolist() == [r + 0.5 for r in range(9)] and val.shape == (3, 2)
    assert np.isnan(train[::3, 1]).all() and train[1, 1] == 1
    require_values(data)
    assert open_data(path, targets=("height",)).splits["train"].labels.shape == (9, 1)
    assert data.fingerprint() != open_data(path, targets=("age",)).fingerprint()


def test_named_target_columns_replace_labels(tmp_path):
    path = write_value_table(
        tmp_path, format_table(("label", lambda r: "ab"[r % 2]), ("age", lambda r: r), ("site", lambda r: "x"))
    )
    assert open_data(path).classes == ("a", "b")
    data = open_data(path, targets=("age",))
    assert data.targets == ("age",) and data.splits["train"].labels.shape == (11, 1)
    assert data.notes == [
        "ignored columns: label, site",
        "held out 1 of 12 training images for validation (split seed 0)",
    ]


def test_groups_stay_together(tmp_path):
    path = write_value_table(tmp_path, format_table(("age", lambda r: r), ("group", lambda r: f"g{r // 3}")))
    data = open_data(path)
    assert {int(v) // 3 for v in data.splits["val"].labels[:, 0]}.isdisjoint(
        int(v) // 3 for v in data.splits["train"].labels[:, 0]
    )


@pytest.mark.parametrize(("columns", "targets", "message", "hint"), [
    ([("age", lambda r: "old" if r == 4 else r)], (), "values.csv, line 1: unknown column age", "use a header"),
    ([("age", lambda r: "old" if r == 4 else r)], ("age",), "line 6: age is old, which is not a number", "leave the cell"),
    ([("age", lambda r: '"1,5"')], ("age",), "line 2: age is 1,5, which is not a number", "write decimals with a point"),
    ([("age", lambda r: "inf")], ("age",), "line 2: age is inf", "leave the cell"),
    ([("age", lambda r: r)], ("agee",), "has no column agee", "did you mean age?"),
    ([("age", lambda r: r), ("split", lambda r: "train")], ("split",), "the column split cannot be a target", "choose columns with values"),
    ([("labels", lambda r: r)], (), "unknown column labels", "did you mean label?"),
    ([("age", lambda r: "")], (), "unknown column age", "use a header"),
    ([("age", lambda r: r), ("city", lambda r: "x")], (), "unknown column city", "for regression, choose columns in train, "),
])  # fmt: skip
def test_non_numeric_targets_are_rejected(tmp_path, columns, targets, message, hint):
    with pytest.raises(DataError) as error:
        open_data(write_value_table(tmp_path, format_table(*columns)), targets=targets)
    assert message in error.value.message and error.value.hint.startswith(hint)


def test_an_image_with_two_values_is_rejected(tmp_path):
    with pytest.raises(DataError, match="1 rows contradict the values of an earlier row"):
        open_data(write_value_table(tmp_path, format_table(("age", lambda r: r)) + "3.png,4\n"))
    deduplicated = open_data(write_value_table(tmp_path, format_table(("age", lambda r: r)) + "3.png,3\n"))
    assert "1 rows are duplicates and are ignored" in deduplicated.notes


@pytest.mark.parametrize(("value", "message"), [
    (lambda r: 7, "all 11 training images have the same value of age, 7"),
    (lambda r: r if r == "never" else "", "no training image has a value of age"),
])  # fmt: skip
def test_constant_or_empty_targets_are_rejected(tmp_path, value, message):
    data = open_data(
        write_value_table(tmp_path, format_table(("age", value), ("height", lambda r: r))), targets=("age", "height")
    )
    with pytest.raises(DataError, match=message):
        require_values(data)


def test_a_split_without_values_is_ignored(tmp_path):
    split = ("split", lambda r: "test" if r > 8 else "val" if r > 6 else "train")
    data = open_data(write_value_table(tmp_path, format_table(("age", lambda r: "" if r > 8 else r), split)))
    assert set(data.splits) == {"train", "val"} and "test has 3 images without labels and is ignored" in data.notes
    assert "3 of 12 images have no value" in data.notes


def write_parquet(path, **columns):
    """Write a Parquet file of small images with extra columns."""
    content = io.BytesIO()
    Image.new("L", (4, 4)).save(content, "PNG")
    count = len(next(iter(columns.values())))
    pyarrow.parquet.write_table(pa.table({"image": [content.getvalue()] * count, **columns}), path)
    return path


def test_parquet_columns_are_targets(tmp_path):
    age, height = [float(r) for r in range(12)], [None if r == 2 else r for r in range(12)]
    path = write_parquet(tmp_path / "a.parquet", age=age, height=height, name=["x"] * 12)
    data = open_data(path, targets=("age", "height"))
    assert (
        data.targets == ("age", "height")
        and data.full_train_split.labels[2, 0] == 2
        and np.isnan(data.full_train_split.labels[2, 1])
    )
    for name, message in (("name", "has type string, not numbers"), ("agee", "has no column agee")):
        with pytest.raises((DataError, Exception), match=message):
            open_data(path, targets=("age", name))
    fractions = open_data(write_parquet(tmp_path / "b.parquet", label=[r / 2 for r in range(12)]))
    assert fractions.targets == ("label",) and fractions.full_train_split.labels[:, 0].tolist() == [
        r / 2 for r in range(12)
    ]


def test_numeric_class_folders_are_targets(tmp_path):
    make_folder(tmp_path / "ages", {"": 6}, classes=("0.5", "12", "3"))
    classes = open_data(tmp_path / "ages")
    data = open_data(tmp_path / "ages", targets=("age",))
    assert are_measurements(classes) and data.targets == ("age",) and data.classes == ()
    values = np.concatenate([split.labels for split in data.splits.values()])
    assert sorted(values[:, 0].tolist()) == sorted([0.5, 3, 12] * 6)
    with pytest.raises(DataError, match="has no columns age, size"):
        open_data(tmp_path / "ages", targets=("age", "size"))
    make_folder(tmp_path / "names", {"": 6})
    with pytest.raises(DataError, match="has classes, such as ant, but no values"):
        open_data(tmp_path / "names", targets=("age",))


def test_regression_data_are_held_out_as_one_class():
    labels = np.random.default_rng(0).normal(size=(50, 2))
    split_rows = draw_stratified_splits(labels, 3, {"val": 0.2})
    expected_rows = draw_stratified_splits(np.zeros(50, np.int64), 3, {"val": 0.2})
    assert len(split_rows["val"]) == 10 and all(
        np.array_equal(split_rows[name], expected_rows[name]) for name in split_rows
    )
