"""`data check` of regression data: outliers, missing values, shared groups, duplicates with different values."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.apps.curation.test_check import draw_scene
from tests.conftest import make_folder, run_cli
from vitreous.apps.curation.check import check_dataset
from vitreous.apps.curation.checks.page import render_check_page
from vitreous.apps.curation.checks.values import compute_tukey_fences


def write_value_table(home, rows, columns="age", count=16):
    """Write distinct images and a table; `rows` are the columns after the path."""
    for number in range(count):
        draw_scene(number).save(home / f"{number}.png")
    lines = [f"{number}.png,{row}" for number, row in enumerate(rows)]
    path = home / "values.csv"
    path.write_text("\n".join([f"path,{columns}", *lines]) + "\n")
    return path


def check_findings(source, **options):
    """Map each kind of finding to its level and text."""
    document, _ = check_dataset(source, workers=0, **options)
    return {finding["code"]: (finding["level"], finding["message"]) for finding in document["findings"]}, document


def test_tukey_fences_are_three_interquartile_ranges_out():
    values = np.arange(1.0, 10)
    assert compute_tukey_fences(values) == (3 - 12, 7 + 12)
    assert compute_tukey_fences(values[:5]) is None and compute_tukey_fences(np.ones(20)) is None


def test_outlier_values_are_reported(tmp_path):
    rows = [f"{20 + number},train" for number in range(14)] + ["5000,train", "999,val"]
    findings, document = check_findings(write_value_table(tmp_path, rows, "age,split"))
    level, text = findings["outliers"]
    assert level == "warning" and text.startswith("2 images with an outlier value of age, below 2.5 or above 51.5")
    assert text.endswith(f"the first: 5000 of {tmp_path / '14.png'}") and document["passed"]
    assert findings["values"][1].startswith("age in train: 20 to 5000, median 27, mean 358.1")
    # values are compared with the training range, which contains 999
    assert document["targets"][0]["out_of_range"] == []


def test_values_outside_the_training_range_are_reported(tmp_path):
    rows = [f"{20 + number},train" for number in range(14)] + ["35,val", "12,test"]
    findings, _ = check_findings(write_value_table(tmp_path, rows, "age,split"))
    text = f"2 images with a value of age outside the range of train, 20 to 33; the first: 35 of {tmp_path / '14.png'}"
    assert findings["out_of_range"] == ("warning", text)


def test_constant_and_missing_values_fail(tmp_path):
    rows = [f"7,,{number if number % 4 else ''}" for number in range(16)]
    findings, document = check_findings(write_value_table(tmp_path, rows, "a,b,c"), targets=("a", "b", "c"))
    assert findings["constant"] == ("error", "all values of a in train are the same, 7") and not document["passed"]
    assert findings["no_values"] == ("error", "no image of train has a value of b")
    assert findings["missing_values"] == ("info", "4 of 16 images have no value of c")


def test_groups_in_two_splits_are_reported(tmp_path):
    rows = [f"{number},{'val' if number > 12 else 'train'},patient{number % 5}" for number in range(16)]
    path = write_value_table(tmp_path, rows, "age,split,group")
    findings, _ = check_findings(path)
    assert findings["groups"] == ("warning", "3 groups are in more than one split")
    assert check_findings(path, group_by="group")[0]["groups"][0] == "error"


@pytest.mark.parametrize(("value", "fails"), [("3.5", True), ("3", False)])
def test_duplicate_images_with_different_values_fail(tmp_path, value, fails):
    path = write_value_table(tmp_path, [str(number) for number in range(16)])
    (tmp_path / "copy.png").write_bytes((tmp_path / "3.png").read_bytes())
    path.write_text(path.read_text() + f"copy.png,{value}\n")
    findings, _ = check_findings(path)
    assert ("conflicting_labels" in findings) == fails and "duplicates" in findings
    if fails:
        assert findings["conflicting_labels"][1].startswith("1 image found with different values; the first: ")


def test_numeric_class_folders_are_values(tmp_path):
    make_folder(tmp_path / "ages", {"": 5}, classes=("0.5", "12", "30"))
    findings, document = check_findings(tmp_path / "ages")
    assert document["classes"] == [] and document["targets"][0]["target"] == "label"
    assert findings["values"][1].startswith("label in train: 0.5 to 30")


def test_command_and_page_report_the_findings(tmp_path):
    path = write_value_table(tmp_path, [str(number) for number in range(16)])
    result = run_cli("data", "check", str(path), "--workers", "0", "--out", str(tmp_path / "check.html"))
    assert result.returncode == 0 and "1 target; width" in result.stdout
    text = (tmp_path / "check.html").read_text()
    assert "<h2>Target values</h2>" in text and "<td>age</td><td>train</td><td>16</td>" in text
    document = json.loads(run_cli("data", "check", str(path), "--workers", "0", "--json").stdout)
    assert document["targets"][0]["splits"]["train"]["median"] == 7.5
    assert render_check_page(*check_dataset(path, workers=0))
