"""The measures of the structure only improve: a value above the committed one fails."""

import json

import pytest

from tests.measures import MEASURES, STORED

COMMITTED = json.loads(STORED.read_text("utf-8"))


def test_every_measure_is_committed():
    assert COMMITTED.keys() == MEASURES.keys()


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_does_not_rise(name):
    value = MEASURES[name]()
    assert value <= COMMITTED[name], f"{name}: {value}; lower it, or justify `make measures WRITE=--write`"
