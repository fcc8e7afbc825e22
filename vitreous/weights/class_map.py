"""Which rows of a head its classes are: a head for few classes from one for many, as Swin's from ImageNet-22k to 1k."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from vitreous.errors import UsageError
from vitreous.weights.adopt import HEAD, Weights
from vitreous.weights.tasks import Classification


def read_class_map(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """The rows in a text file with a number from 0 on each line, as Microsoft's map22kto1k.txt. Raises UsageError for
    a file that is none."""
    try:
        rows = tuple(int(line) for line in Path(path).read_text("utf-8").split())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no map of classes ({str(error)[:80]})", "name a file of a number a line") from None
    if not rows or min(rows) < 0:
        raise UsageError(f"{path} is no map of classes: it has {len(rows)} rows", "name a file of a number a line")
    return rows


def select_classes(weights: Weights, path: str | os.PathLike[str]) -> Weights:
    """The weights with a head for the classes of a map alone: class i has row i of the map. Raises UsageError for
    weights without a head, and for a row that their head does not have."""
    rows, classes = read_class_map(path), weights.config.classes
    if not classes:
        raise UsageError(f"{weights.source} has no head to select classes of", "leave --class-map out")
    if max(rows) >= classes:
        raise UsageError(
            f"{path} names row {max(rows)}, and the head of {weights.source} has {classes}",
            "name the map of these weights",
        )

    def state() -> dict[str, Tensor]:
        chosen = list(rows)
        return {
            name: tensor[chosen] if name.startswith(HEAD[0]) else tensor for name, tensor in weights.state().items()
        }

    names = weights.classes
    task = Classification(tuple(names[row] for row in rows) if len(set(rows)) == len(rows) else numbered(len(rows)))
    if names == numbered(classes):
        task = Classification(numbered(len(rows)))
    return replace(weights, config=replace(weights.config, classes=len(rows)), task=task, state=state)


def numbered(count: int) -> tuple[str, ...]:
    """The names of classes that have none: their numbers."""
    return tuple(map(str, range(count)))
