"""Groups of samples that are never divided between splits, such as the images of one patient. A table column defines
them, or a regular expression that is matched against the paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np

from vitreous.data.split import Data, FileSplit, Split, hold_out_val
from vitreous.errors import DataError, UsageError, escape_unprintable, format_first_names

SHARED_GROUPS_NOTE = "groups are in more than one split"  # prefix of the note about groups in several splits
MAX_GROUPS_IN_MESSAGE = 5  # groups listed in a message


def split_by_groups(data: Data, group_by: str, source: str | os.PathLike[str], split_seed: int) -> Data:
    """Split data so that no group is in two splits: if `val` is drawn from `train`, complete groups are drawn.

    `group_by` is the table column with which the data were opened, or a regular expression with one capture group, such
    as `patient(\\d+)`. The expression is searched for in each path relative to the source. Raises UsageError for an
    invalid expression. Raises DataError, with the name, for an image that the expression does not match, and for
    predefined splits that share groups.
    """
    if group_by == data.group_column:
        if note := next((note for note in data.notes if SHARED_GROUPS_NOTE in note), None):
            raise DataError(f"{data.name}: {note}", "fix the splits, or omit --group-by")
        return data
    pattern = compile_group_pattern(group_by)
    splits = data.splits
    if data.full_train_split is not None:
        splits = {"train": data.full_train_split, **{name: split for name, split in splits.items() if name == "test"}}
    keys = {name: extract_group_keys(split, pattern, source) for name, split in splits.items()}
    if shared_groups := find_shared_groups(keys):
        problems = (
            (
                f"{len(group_names)} groups are in {first_split} and in {second_split} "
                f"({format_first_names(group_names, MAX_GROUPS_IN_MESSAGE)})"
            )
            for (first_split, second_split), group_names in shared_groups.items()
        )
        raise DataError(f"{data.name}: {'; '.join(problems)}", "fix the splits, or omit --group-by")
    group_indices = {group_name: index for index, group_name in enumerate(dict.fromkeys(keys["train"]))}
    groups = np.array([group_indices[group_name] for group_name in keys["train"]], dtype=np.int64)
    if data.full_train_split is None:
        return replace(data, groups=groups)
    drawn_splits, holdout_note = hold_out_val(data.full_train_split, split_seed, groups)
    notes = [note for note in data.notes if not note.startswith("held out ")]
    drawn_splits |= {name: split for name, split in splits.items() if name == "test"}
    return replace(data, splits=drawn_splits, groups=groups, notes=[*notes, holdout_note])


def compile_group_pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression with one capture group. Raises UsageError if it is invalid."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        hint = "for example --group-by 'patient(\\d+)'"
        raise UsageError(f"--group-by {text} is not a valid regular expression ({error})", hint) from None
    if pattern.groups != 1:
        hint = "put the group name in parentheses, other parts in (?:...): --group-by 'patient(\\d+)'"
        if not pattern.groups:
            hint = f"for a column, open a CSV file with path and label; for paths, {hint}"
        raise UsageError(f"--group-by {text} has {pattern.groups} capture groups, not 1", hint)
    return pattern


def extract_group_keys(split: Split, pattern: re.Pattern[str], source: str | os.PathLike[str]) -> list[str]:
    """Return the group name of each sample: the text of the pattern's capture group. Raises DataError for a sample that
    the pattern does not match."""
    keys: dict[str, str] = {}  # intern the group names
    groups = []
    for text in iterate_group_texts(split, source):
        match = pattern.search(text)
        if match is None or match[1] is None:
            problem = f"--group-by {pattern.pattern} does not match {escape_unprintable(text)}"
            raise DataError(problem, "change the expression so that it matches every image")
        groups.append(keys.setdefault(match[1], match[1]))
    return groups


def iterate_group_texts(split: Split, source: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the text of each sample that the group pattern is matched against: its file path relative to the source
    folder or to the table's folder, or its name if the samples are not files."""
    if not isinstance(split, FileSplit):
        yield from (split.name(sample) for sample in range(len(split)))
        return
    source_folder = Path(source) if Path(source).is_dir() else Path(source).parent
    starts = [os.path.join(os.fsencode(folder), b"") for folder in (source_folder, source_folder.absolute())]
    for sample in range(len(split)):
        relative_path = split.paths.encoded_path(sample)
        for start in starts:
            relative_path = relative_path.removeprefix(start)
        yield os.fsdecode(relative_path).replace(os.sep, "/")


def find_shared_groups(keys: dict[str, list[str]]) -> dict[tuple[str, str], list[str]]:
    """Find the groups that are in two splits. `keys` is {split: group of each sample}; returns {(split, later split):
    groups in both}. Groups are in the order of the later split; pairs without shared groups are left out."""
    group_sets = {name: set(group_names) for name, group_names in keys.items()}
    pairs = {
        (name, other_name): [
            group_name for group_name in dict.fromkeys(keys[other_name]) if group_name in group_sets[name]
        ]
        for name, other_name in combinations(keys, 2)
    }
    return {pair: group_names for pair, group_names in pairs.items() if group_names}
