"""Every hyperparameter of every recipe has a line in `sources.csv` with its source; the two must agree."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.recipes.hyperparameters import VERDICTS, get_recipe_settings, list_published_metrics, read_sources
from vitreous.recipes.names import RECIPE_NAMES
from vitreous.recipes.registry import RECIPES

SOURCE_ROWS = list(enumerate(read_sources(), 2))  # line number in the file, row
#: file and line of a repository at a commit
SOURCE_PATTERN = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{7,} \S+(:\d+)?")


def list_recipe_models(name: str) -> tuple[str, ...]:
    """Return the models of a recipe; `-` if it has none."""
    return RECIPES[name].models or ("-",)


def list_expected_values(name: str) -> dict[tuple[str, str], Any]:
    """Return all hyperparameters of a recipe and its published metrics, by model and setting."""
    settings = {model: get_recipe_settings(name, None if model == "-" else model) for model in list_recipe_models(name)}
    values = {(model, key): value for model, of_model in settings.items() for key, value in of_model.items()}
    return values | list_published_metrics(name)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_every_hyperparameter_matches_sources_csv(name):
    problems = []
    for (model, setting), value in list_expected_values(name).items():
        matches = [(line, row) for line, row in SOURCE_ROWS if row.setting == setting and row.covers(name, model)]
        description = f"{name}, {model}: {setting} = {json.dumps(value)}"
        if len(matches) != 1:
            problems.append(f"{description} has {len(matches)} rows, at lines {[line for line, _ in matches]}")
        elif json.loads(matches[0][1].value) != value:
            line, row = matches[0]
            problems.append(f"{description}, and line {line} has {row.value} from {row.source}")
    assert not problems, "compare with the source, then write value, source and agrees into sources.csv:\n" + "\n".join(
        problems
    )


def test_every_source_row_matches_a_hyperparameter():
    values = {name: list_expected_values(name) for name in RECIPE_NAMES}
    for line, row in SOURCE_ROWS:
        location = f"sources.csv:{line}"
        targets = [
            (name, model) for name in RECIPE_NAMES for model in list_recipe_models(name) if row.covers(name, model)
        ]
        if row.setting.startswith("published"):
            targets = [(name, model) for name in RECIPE_NAMES for model, _ in values[name] if row.covers(name, model)][
                :1
            ]
        assert targets, f"{location}: there is no recipe for {row.recipes}, {row.models}"
        for name, model in targets:
            assert (model, row.setting) in values[name], f"{location}: {name} has no {row.setting} for {model}"
        assert row.agrees in VERDICTS and row.source, f"{location}: {row.agrees} is not among {VERDICTS}, or no source"
        assert row.note or row.agrees != "differs", f"{location}: a difference needs a note"
        if "@" in row.source:
            assert SOURCE_PATTERN.match(row.source), f"{location}: {row.source} is not owner/name@commit path:line"


def test_changed_hyperparameter_is_detected(monkeypatch):
    original = get_recipe_settings

    def changed(name, model=None):
        settings = original(name, model)
        return settings | {"optimizer.lr": settings["optimizer.lr"] * 2}

    monkeypatch.setitem(globals(), "get_recipe_settings", changed)
    with pytest.raises(AssertionError, match=r"optimizer\.lr = 0\.002, and line \d+ has 0\.001 from facebookresearch"):
        test_every_hyperparameter_matches_sources_csv("deit")
