"""Options of `train` and the fields of `Run` that they set have the same names, types and values."""

from __future__ import annotations

import dataclasses
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from tests.recipes.test_recipes import build_example_run
from vitreous.config import get_annotated_hints, get_tagged_union
from vitreous.errors import UsageError
from vitreous.recipes.derive import apply_train_options
from vitreous.recipes.options import TrainOptions, get_run_field_options
from vitreous.training.run import Run


def list_value_types(hint: Any) -> set[Any]:
    """The types of a type hint's values without None; for literals their values."""
    members = [member for member in get_args(hint) or (hint,) if member is not NoneType]
    return {value for member in members for value in (get_args(member) or (member,))}


def list_field_types(path: str) -> list[set[Any]]:
    """The types of a field of `Run` by its dotted path, one for each member of a union that has the field."""
    head, *groups = path.split(".")
    name = groups.pop() if groups else ""
    hints = get_type_hints(Run, include_extras=True)
    if not name:
        return [list_value_types(hints[head])]
    table = get_tagged_union(hints[head])
    member_classes = [table.get_class(row_name) for row_name in table.table] if table else [hints[head]]
    member_classes = [
        getattr(member_class, "objective", member_class) if not dataclasses.is_dataclass(member_class) else member_class
        for member_class in member_classes
    ]
    hint_dicts = [get_annotated_hints(member_class) for member_class in member_classes]
    for group in groups:
        hint_dicts = [
            get_annotated_hints(member_hints[group])
            for member_hints in hint_dicts
            if dataclasses.is_dataclass(member_hints.get(group))
        ]
    return [list_value_types(member_hints[name]) for member_hints in hint_dicts if name in member_hints]


@pytest.mark.parametrize("option", get_run_field_options())
def test_option_types_match_their_run_fields(option):
    """If several objectives have the field, the option accepts the values of all; each objective rejects values of
    others."""
    option_types, field_types = (
        list_value_types(get_type_hints(TrainOptions)[option]),
        list_field_types(get_run_field_options()[option].path),
    )
    assert field_types, "no member of Run has that field"
    assert option_types <= set().union(*field_types) and all(types & option_types for types in field_types)


def test_each_option_sets_a_distinct_field():
    paths = [mark.path for mark in get_run_field_options().values()]
    assert len(paths) == len(set(paths)) == 54


@pytest.mark.parametrize(
    "options, path, value",
    [
        ({"lr": 0.5}, "optimizer.lr", 0.5),
        ({"seed": 0}, "seed", 0),
        ({"ema": 0.9}, "ema", 0.9),
        ({"ema": 0}, "ema", None),
        ({"init": "none"}, "init", None),
        ({"init": "runs/a"}, "init", "runs/a"),
        ({"compile": False}, "compile", False),
        ({"recompute": True}, "recompute", True),
        ({"resize": "bicubic"}, "model.positions.resize", "bicubic"),
    ],
)
def test_set_option_changes_only_its_field(options, path, value):
    assert TrainOptions("x", **options).collect_run_fields() == {path: value}


def test_unset_options_change_nothing():
    assert TrainOptions("x").collect_run_fields() == {}
    assert TrainOptions("x", recompute=False, bad_images="skip", image_size=32).collect_run_fields() == {}


def test_options_are_applied_together():
    """Each of the two values alone would be rejected."""
    run = build_example_run("vit-imagenet")
    batches = -(-run.data.images // run.batch_size)
    both = apply_train_options(run, TrainOptions("x", accumulate=2 * batches, batch_size=run.batch_size // 4))
    assert (both.accumulate, both.batch_size) == (2 * batches, run.batch_size // 4)
    with pytest.raises(UsageError, match=r"is above the \d+ batches of an epoch"):
        apply_train_options(run, TrainOptions("x", accumulate=2 * batches))


def test_option_without_a_matching_field_is_rejected():
    with pytest.raises(UsageError, match=r"views\.mixup is not a setting of multicrop\n  leave views\.mixup out"):
        apply_train_options(build_example_run("dino"), TrainOptions("x", mixup=0.1))
