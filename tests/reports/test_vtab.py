"""VTAB: label mappings, the 1,000 training images, resumption by task, and means over complete groups only."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from tests.conftest import make_folder, make_image, parse_json_output, run_cli
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sources import open_data
from vitreous.data.split import ArraySplit, Data
from vitreous.errors import DataError
from vitreous.evaluation.vtab import VTAB_GROUPS, VTAB_TASKS, average_by_group, map_to_task_classes
from vitreous.models.zoo import create_untrained_model
from vitreous.reports.protocols import vtab as module
from vitreous.reports.protocols.vtab import find_task_folders, prepare_task_data
from vitreous.tasks.features import FeatureExtraction
from vitreous.weights.bundle import Bundle


@pytest.fixture(scope="module", autouse=True)
def feature_cache(tmp_path_factory):
    """Use a separate feature cache for this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def test_there_are_19_tasks_in_three_groups():
    assert [sum(task.group == group for task in VTAB_TASKS.values()) for group in VTAB_GROUPS] == [7, 4, 8]
    unflipped = {name for name, task in VTAB_TASKS.items() if not task.flip}
    uncropped = {name for name, task in VTAB_TASKS.items() if not task.crop}
    assert unflipped == {"dsprites_orientation", "smallnorb_azimuth", "dsprites_location"}
    assert uncropped == {"clevr_count", "clevr_distance", "dmlab", "kitti", "dsprites_location"}


@pytest.mark.parametrize(
    "name, raw, classes",
    [
        ("clevr_count", [3, 5, 10], [0, 2, 7]),
        ("clevr_distance", [0.1, 8.0, 8.01, 8.5, 9.2, 9.7, 10.0, 30.0], [0, 0, 1, 1, 3, 4, 4, 5]),
        ("kitti", [-5.0, 8.0, 8.1, 20.0, 21.0, 999.0, 1000.0], [0, 0, 1, 1, 2, 2, 3]),
        ("dsprites_location", [0, 1, 2, 31], [0, 0, 1, 15]),
        ("dsprites_orientation", [0, 2, 3, 4, 5, 39], [0, 0, 1, 1, 2, 15]),
    ],
)
def test_raw_labels_become_classes(name, raw, classes):
    rule = VTAB_TASKS[name].rule
    assert rule is not None and rule(np.array(raw, dtype=float)).tolist() == classes


def test_division_is_even_and_distances_follow_their_definition():
    orientation = VTAB_TASKS["dsprites_orientation"].rule(np.arange(40.0))
    assert set(np.bincount(orientation)) == {2, 3} and len(np.bincount(orientation)) == 16
    for name, edges in (("clevr_distance", (0, 8, 8.5, 9, 9.5, 10, 100)), ("kitti", (-100, 8, 20, 999))):
        for distance in np.random.default_rng(0).uniform(0.01, 99, 50):
            expected = max(index for index, edge in enumerate(edges) if edge < distance)
            assert VTAB_TASKS[name].rule(np.array([distance]))[0] == expected


def test_only_raw_labels_are_changed():
    task = VTAB_TASKS["dsprites_orientation"]
    assert map_to_task_classes(task, tuple(map(str, range(16)))) is None
    assert map_to_task_classes(task, tuple(f"turn {n}" for n in range(40))) is None
    assert map_to_task_classes(VTAB_TASKS["dtd"], tuple(map(str, range(60)))) is None
    assert map_to_task_classes(task, tuple(map(str, range(40)))).tolist() == [math.floor(n / 2.5) for n in range(40)]


def test_means_need_complete_groups():
    top1 = {name: index / 100 for index, name in enumerate(VTAB_TASKS)}
    means = average_by_group(top1)
    assert means["natural"] == pytest.approx(0.03) and means["mean"] == pytest.approx(0.09)
    del top1["dtd"]
    assert average_by_group(top1) == {**means, "natural": None, "mean": None}


def test_folders_are_found_by_their_common_names(tmp_path):
    for name in ("cifar", "Oxford_Flowers102", "wds_vtab-clevr_closest_object_distance", "smallnorb_azi", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "dtd").touch()
    assert list(find_task_folders(tmp_path)) == ["cifar100", "flowers102", "clevr_distance", "smallnorb_azimuth"]


def make_data(images, classes=3, val=0, name="made"):
    """Return a dataset in memory."""
    splits = {
        split_name: ArraySplit(np.zeros((count, 2, 2, 3), np.uint8), np.arange(count) % classes)
        for split_name, count in images.items()
        if count
    }
    return Data(name, tuple(map(str, range(classes))), splits)


def test_1000_training_images_are_drawn_and_reported():
    task = VTAB_TASKS["svhn"]
    task_data, note = prepare_task_data(task, make_data({"train": 3000, "val": 100, "test": 30}, 10), 0)
    assert {name: len(split) for name, split in task_data.splits.items()} == {"train": 800, "val": 200, "test": 30}
    assert "1000 of 3000 training images drawn with seed 0" in note
    repeated, other_seed = (
        prepare_task_data(task, make_data({"train": 3000, "test": 30}, 10), seed)[0].split("train").labels
        for seed in (0, 1)
    )
    assert np.array_equal(task_data.split("train").labels, repeated) and not np.array_equal(repeated, other_seed)
    vtab_copy, note = prepare_task_data(task, make_data({"train": 800, "val": 200, "test": 30}, 10), 0)
    assert len(vtab_copy.split("train")) == 800 and note == ""
    assert (
        prepare_task_data(task, make_data({"train": 8, "val": 2, "test": 3}, 3), 0)[1]
        == "3 classes instead of the task's 10"
    )
    with pytest.raises(DataError, match="has no test split"):
        prepare_task_data(task, make_data({"train": 8}), 0)


def test_raw_labels_are_mapped_to_task_labels():
    task_data, _ = prepare_task_data(
        VTAB_TASKS["dsprites_orientation"], make_data({"train": 400, "val": 80, "test": 80}, 40), 0
    )
    assert len(task_data.classes) == 16 and task_data.split("test").labels.tolist() == [
        n % 40 * 2 // 5 for n in range(80)
    ]
    with pytest.raises(DataError, match="labels 0 to 62 do not belong"):
        prepare_task_data(VTAB_TASKS["dsprites_location"], make_data({"train": 400, "val": 80, "test": 80}, 64), 0)


def write_task_folder(home, seed):
    """Write a task in the common layout: 12 training, 6 validation and 9 test images, which differ by a tint."""
    split_images = {"train800": range(12), "val200": range(12, 18), "test": range(18, 27)}
    home.mkdir(parents=True)
    for name, images in split_images.items():
        for index in images:
            make_image(seed + index, (20, 12), index).save(home / f"{index}.png")
        (home / f"{name}.txt").write_text("".join(f"{index}.png {index % 3}\n" for index in images))
    (home / "train800val200.txt").write_text((home / "train800.txt").read_text() + (home / "val200.txt").read_text())


@pytest.fixture
def bundle(tmp_path):
    """Return a bundle with the same random weights in each call."""
    torch.manual_seed(0)
    Bundle(
        create_untrained_model("ViT-32x1/8", image_size=16, num_classes=0),
        FeatureExtraction(),
        ImagePreprocess((16, 16)),
    ).save(tmp_path / "model")
    return tmp_path / "model"


def test_tasks_are_resumed_one_by_one(bundle, tmp_path, monkeypatch):
    root = tmp_path / "vtab"
    for seed, name in enumerate(("dtd", "pets", "kitti")):
        write_task_folder(root / name, 100 * seed)
    (root / "kitti" / "test.txt").write_text("missing.png 0\n")
    computed, evaluate_task = [], module.evaluate_vtab_task
    monkeypatch.setattr(
        module,
        "evaluate_vtab_task",
        lambda name, *arguments: (computed.append(name), evaluate_task(name, *arguments))[1],
    )

    def evaluate_again(*command):
        computed.clear()
        command = (
            "evaluate",
            str(bundle),
            str(root),
            "--protocol",
            "vtab",
            "--workers",
            "0",
            "--precision",
            "fp32",
            *command,
        )
        return parse_json_output(run_cli(*command, "--json", cwd=tmp_path))

    document = evaluate_again()
    assert computed == ["dtd", "pets"] and len(document["missing"]) == 16
    assert list(document["failed"]) == ["kitti"] and "missing.png" in document["failed"]["kitti"]
    assert [row["task"] for row in document["results"]] == ["dtd", "pets"]
    row = document["results"][0]
    assert (row["top1"], row["images"], row["train_images"], row["group"]) == (1.0, 9, 18, "natural")
    assert row["held_out"]["images"] == 6 and row["interval"]["top1"][0] < 1
    assert (
        document["natural"] is document["mean"] is document["test"]["top1"] is None and document["test"]["images"] == 18
    )
    assert evaluate_again()["results"] == document["results"] and computed == []
    make_image(999, (20, 12), 0).save(root / "pets" / "18.png")
    evaluate_again()
    assert computed == ["pets"]
    evaluate_again("--l2", "0.1")
    assert computed == ["dtd", "pets"]
    (bundle / "vtab.json").write_text(json.dumps({"dtd": 3}) + "torn")
    evaluate_again()
    assert computed == ["dtd", "pets"]


def test_images_are_resized_without_cropping(bundle, tmp_path):
    """The ends of wide images are preserved: after a centre crop these classes would be identical."""
    root = tmp_path / "vtab"
    (root / "dtd").mkdir(parents=True)
    for index in range(24):
        image = make_image(index, (48, 16))
        image.paste((255, 255, 255) if index % 2 else (0, 0, 0), (0, 0, 12, 16))
        image.save(root / "dtd" / f"{index}.png")
    for name, rows in (("train800", range(8)), ("val200", range(8, 12)), ("test", range(12, 24))):
        (root / "dtd" / f"{name}.txt").write_text("".join(f"{index}.png {index % 2}\n" for index in rows))
    command = (
        "evaluate",
        str(bundle),
        str(root),
        "--protocol",
        "vtab",
        "--workers",
        "0",
        "--precision",
        "fp32",
        "--json",
    )
    assert parse_json_output(run_cli(*command, cwd=tmp_path))["results"][0]["top1"] == 1.0
    assert open_data(root / "dtd").classes == ("0", "1")


def test_a_folder_without_tasks_is_rejected(bundle, tmp_path):
    source = make_folder(tmp_path / "photos", {"train": 2, "test": 2})
    result = run_cli("evaluate", str(bundle), str(source), "--protocol", "vtab", cwd=tmp_path)
    assert result.returncode == 3 and "has no VTAB task" in result.stderr and "caltech101" in result.stderr
