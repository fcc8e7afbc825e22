"""Splits keep groups together for any assignment of groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import make_image
from vitreous.data.holdout import draw_stratified_splits
from vitreous.data.sources import open_data
from vitreous.errors import DataError


@st.composite
def labels_and_groups(draw):
    """Draw labels (n,) or (n, K) of up to 60 images, and group numbers: groups of one class each, or of any classes."""
    n, num_classes, num_groups = draw(st.integers(1, 60)), draw(st.integers(1, 5)), draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    groups = rng.integers(0, num_groups, n) * 7 - 3
    if draw(st.booleans()):
        return (rng.random((n, num_classes)) < 0.4).astype(np.float32), groups
    return rng.integers(0, num_classes, n) if draw(st.booleans()) else groups % num_classes, groups


def count_classes(labels, rows):
    """Count the samples of each class among `rows`; for multi-label data, append the number of rows."""
    selected_labels = labels[rows]
    return (
        np.append(selected_labels.sum(0), len(rows))
        if labels.ndim == 2
        else np.bincount(selected_labels, minlength=labels.max() + 1)
    )


def compute_share_error(labels, rows, share):
    """Return the distance of a split from its share of every class, as `draw_stratified_splits` measures it."""
    total = count_classes(labels, np.arange(len(labels)))
    return float((((count_classes(labels, rows) - share * total) ** 2)[total > 0] / total[total > 0]).sum())


@given(labels_and_groups(), st.sampled_from([0.05, 0.1, 0.25, 0.5]), st.integers(0, 99))
def test_grouped_splits_are_as_close_to_their_shares_as_possible(case, share, seed):
    labels, groups = case
    split_rows = draw_stratified_splits(labels, seed, {"val": share}, groups)
    train, val = split_rows["train"], split_rows["val"]
    assert sorted([*train, *val]) == list(range(len(labels))) and all(
        (np.diff(rows) > 0).all() for rows in (train, val)
    )
    assert not set(groups[train]) & set(groups[val])
    assert ((count_classes(labels, train) > 0) == (count_classes(labels, np.arange(len(labels))) > 0)).all(), (
        "every class keeps a training image"
    )
    assert all(
        np.array_equal(split_rows[name], rows)
        for name, rows in draw_stratified_splits(labels, seed, {"val": share}, groups * 5 + 1).items()
    )
    for group in set(groups[train]):
        larger_val = np.sort(np.r_[val, np.flatnonzero(groups == group)])
        keeps_classes = (count_classes(labels, np.setdiff1d(train, larger_val)) > 0)[
            count_classes(labels, train) > 0
        ].all()
        assert (
            not keeps_classes
            or not len(val)
            or compute_share_error(labels, larger_val, share) >= compute_share_error(labels, val, share) - 1e-9
        )


@given(st.integers(0, 99))
def test_single_image_groups_are_stratified_like_images(seed):
    labels = np.repeat([0, 1, 2], [10, 40, 150])
    for shares in ({"val": 0.1}, {"val": 0.1, "test": 0.2}):
        split_rows = draw_stratified_splits(labels, seed, shares, np.arange(len(labels)))
        for name, share in shares.items():
            assert np.abs(np.bincount(labels[split_rows[name]]) - share * np.array([10, 40, 150])).max() == 0


def test_one_of_a_few_large_groups_is_held_out():
    labels = np.tile([0, 1], 50)
    split_rows = draw_stratified_splits(labels, 0, {"val": 0.1}, np.repeat([5, 6, 7, 8], 25))
    assert len(split_rows["val"]) == 25 and len(split_rows["train"]) == 75
    assert len(draw_stratified_splits(labels, 0, {"val": 0.1}, np.zeros(100, int))["val"]) == 0
    assert len(draw_stratified_splits(labels, 0, {"val": 0.1}, labels)["val"]) == 0, (
        "a class with a single group stays in train"
    )
    chosen = {
        tuple(draw_stratified_splits(labels, seed, {"val": 0.1}, np.repeat(range(20), 5))["val"]) for seed in range(9)
    }
    assert len(chosen) > 3, "the held-out group depends on the seed"


@pytest.fixture
def image_folder(tmp_path):
    for index in range(40):
        make_image(index).save(tmp_path / f"{index}.png")
    return tmp_path


def write_group_table(image_folder, rows, columns="path,label,group"):
    (image_folder / "x.csv").write_text(columns + "\n" + "".join(f"{row}\n" for row in rows))
    return image_folder / "x.csv"


def test_a_group_column_keeps_groups_together(image_folder):
    source = write_group_table(
        image_folder, [f"{index}.png,{'ab'[index % 2]},video {index // 5}" for index in range(40)]
    )
    data = open_data(source)
    for split_data in (data, data.with_holdout(0.3, 1), data.with_holdout(0.3, 1).with_holdout(0.2, 2)):
        groups_by_split = [{int(path.stem) // 5 for path in split_data.splits[name].paths} for name in ("train", "val")]
        assert groups_by_split[1] and not groups_by_split[0] & groups_by_split[1]
    unsplit_data = data.with_holdout(0.0, 0)
    assert len(unsplit_data.groups) == len(unsplit_data.splits["train"]) == 40
    assert len(set(unsplit_data.groups[:5])) == 1 and len(set(unsplit_data.groups)) == 8


def test_any_column_can_group_and_unused_columns_are_reported(image_folder):
    columns = "site,path,label,group,age (years),bytes"
    rows = [f"s{index // 5},{index}.png,{'ab'[index % 2]},g{index // 8},{index // 10},9" for index in range(40)]
    source = write_group_table(image_folder, rows, columns)
    for group_by, size, unread in (
        ("site", 5, "group, age (years), bytes"), ("age (years)", 10, "site, group, bytes"),
        ("group", 8, "site, age (years), bytes"), (None, 8, "site, age (years), bytes"),
        (r"(\d)\.png", None, "site, age (years), bytes"),
    ):  # fmt: skip
        data = open_data(source, 0, group_by)
        numbers = {name: {int(path.stem) for path in split.paths} for name, split in data.splits.items()}
        assert numbers["val"] and len(numbers["train"] | numbers["val"]) == 40
        home_of = (lambda number: number % 10) if size is None else (lambda number, size=size: number // size)
        assert not set(map(home_of, numbers["train"])) & set(map(home_of, numbers["val"]))
        assert f"ignored columns: {unread}" in data.notes and "groups" in data.notes[-1]
        assert data.fingerprint() == open_data(source, 0, group_by).fingerprint()
    ungrouped_data = open_data(write_group_table(image_folder, [row.split(",")[1] for row in rows[:20]], "path"))
    assert ungrouped_data.groups is None and not any("ignored columns" in note for note in ungrouped_data.notes)
    assert (
        open_data(
            write_group_table(image_folder, [row[: row.index(".png") + 4] for row in rows], columns[:9]), 0, "site"
        ).groups.max()
        == 7
    )


def test_invalid_group_columns_are_reported(image_folder):
    rows = ["0.png,a,x", "1.png,b,"]
    for columns, group_by, message in (
        ("path,label,site", "site", "line 3: no site"),
        ("path,label,site", "sites", "no column sites\n  did you mean site?"),
        ("path,label,site", "patient", "no column patient\n  columns: path, label, site; a regular expression"),
        ("path,label,splits", None, "unknown column splits\n  did you mean split?"),
        ("path,class,site", "site", "unknown column class"),
        ("path,label,label", None, "two columns label"),
        ("path,label, site", "site", "line 3: no site"),
    ):
        with pytest.raises(DataError, match=message.replace("?", r"\?")):
            open_data(write_group_table(image_folder, rows, columns), 0, group_by)
    assert not open_data(write_group_table(image_folder, ["0.png,a,x,1", "1.png,b,,2"], "path,label,,")).multilabel


def test_group_conflicts_are_reported(image_folder):
    rows = ["0.png,a,train,x", "1.png,b,train,y", "2.png,a,val,y", "3.png,b,val,z"]
    data = open_data(write_group_table(image_folder, rows, "path,label,split,group"))
    assert data.notes == ["1 groups are in more than one split; the first is y"] and data.groups.tolist() == [0, 1]
    for rows, message in (
        (["0.png,a,x", "1.png,b,"], "line 3: no group"),
        (["0.png,a,x", "1.png,b,x", "0.png,a,y"], "contradict the groups"),
    ):
        with pytest.raises(DataError, match=message):
            open_data(write_group_table(image_folder, rows))
