"""The measures of the structure only improve: a value above the committed one fails."""

import ast
import json

import pytest

from tests.measures import MEASURES, STORED, conditions_of, is_task_test, reads_task_attribute

COMMITTED = json.loads(STORED.read_text("utf-8"))


def test_every_measure_is_committed():
    assert COMMITTED.keys() == MEASURES.keys()


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_does_not_rise(name):
    value = MEASURES[name]()
    assert value <= COMMITTED[name], f"{name}: {value}; lower it, or justify `make measures WRITE=--write`"


@pytest.mark.parametrize(("code", "count"), [
    ("x = 1 if data.multilabel else 2", 1), ('getattr(bundle.task, "masks", False)', 1), ("y = data.multilabel", 0),
    ("isinstance(task, Detection | Segmentation)", 1), ("isinstance(task, Model)", 0), ('task.name == "detection"', 1),
    ('card.task.endpoint != "segment"', 1), ("row.name == name", 0), ("card.task.answers_at(name)", 0),
])  # fmt: skip
def test_tests_of_the_task_are_found(code, count):
    tree = ast.parse(code)
    assert sum(map(reads_task_attribute, conditions_of(tree))) + sum(map(is_task_test, ast.walk(tree))) == count
