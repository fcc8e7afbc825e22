"""Data and a run for the tests of evaluation protocols."""

from __future__ import annotations

import pytest

import vitreous
from tests.conftest import TINY_RUN, make_folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Return three classes with 12 training, 4 validation and 6 test images each, which differ by a tint."""
    return make_folder(tmp_path_factory.mktemp("photos") / "photos", {"train": 12, "val": 4, "test": 6})


@pytest.fixture(scope="module")
def short_run(photos, tmp_path_factory):
    """Return a run of one step."""
    out = tmp_path_factory.mktemp("run") / "run"
    vitreous.train(photos, out=out, **{**TINY_RUN, "epochs": 0.5, "workers": 0})
    return out
