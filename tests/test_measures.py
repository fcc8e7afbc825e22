"""The structure measures only improve: a value above the committed one fails."""

import ast
import json

import pytest

from tests.measures import MEASURES, MEASURES_FILE, is_task_test, iterate_conditions, reads_task_attribute

COMMITTED_VALUES = json.loads(MEASURES_FILE.read_text("utf-8"))


def test_every_measure_is_committed():
    assert COMMITTED_VALUES.keys() == MEASURES.keys()


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_does_not_rise(name):
    value = MEASURES[name]()
    assert value <= COMMITTED_VALUES[name], f"{name}: {value}; lower it, or justify `make measures WRITE=--write`"


@pytest.mark.parametrize(("code", "count"), [
    ("x = 1 if data.multilabel else 2", 1), ('getattr(bundle.task, "masks", False)', 1), ("y = data.multilabel", 0),
    ("isinstance(task, Detection | Segmentation)", 1), ("isinstance(task, Model)", 0), ('task.name == "detection"', 1),
    ('card.task.endpoint != "segment"', 1), ("row.name == name", 0), ("card.task.supports_endpoint(name)", 0),
])  # fmt: skip
def test_task_conditions_are_counted(code, count):
    tree = ast.parse(code)
    assert sum(map(reads_task_attribute, iterate_conditions(tree))) + sum(map(is_task_test, ast.walk(tree))) == count
