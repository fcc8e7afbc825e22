"""Assemble scenes into a data set: splits, labels, notes, and whether training can learn anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from vitreous.data.annotations.learnable import loss_notes, objects_error, tally_objects
from vitreous.data.annotations.objects import ObjectFiles, Scene, check_classes, check_train, is_empty
from vitreous.data.annotations.target import AnnotatedFiles
from vitreous.data.split import Data, Split, no_labels, with_val


def data_of_scenes(
    name: str, classes: Sequence[str], scenes: Mapping[str, Sequence[Scene]], split_seed: int, notes: list[str]
) -> Data:
    """Return a data set of scenes by split; without `val`, a tenth of `train` is held out.

    Boxes without area are left out. A held-out split without objects has no labels. Notes name the objects that cannot
    be learned, and `Data.unlearnable` is set where `train` has no others. Raises DataError for splits without `train`
    or images, and for two classes of one name.
    """
    check_classes(name, classes)
    check_train(name, scenes)
    splits: dict[str, Split] = {}
    for split, rows in scenes.items():
        shown = [without_empty(scene) for scene in rows]
        labels = np.zeros((len(rows), len(classes)), np.float32)
        for row, scene in enumerate(shown):
            labels[row, [shape.label for shape in scene.shapes]] = 1
        if split != "train" and not any(scene.shapes or scene.verified for scene in shown):
            labels = no_labels(len(rows))
        images = [scene.image for scene in shown]
        splits[split] = AnnotatedFiles(images, labels, np.arange(len(rows)), ObjectFiles(shown))
    tallies = {split: tally_objects(rows) for split, rows in scenes.items() if rows}
    unlearnable = objects_error(name, scenes["train"], tallies["train"])
    for split, tally in tallies.items():
        if split != "train" or unlearnable is None:
            notes += loss_notes(split, scenes[split], tally)
    splits, whole = with_val(splits, split_seed, notes)
    unsplit = whole is not None and "test" not in splits
    return Data(name, tuple(classes), splits=splits, notes=notes, unsplit=unsplit, whole=whole, unlearnable=unlearnable)


def without_empty(scene: Scene) -> Scene:
    """Return the scene without the objects whose boxes have no area."""
    return replace(scene, shapes=tuple(shape for shape in scene.shapes if not is_empty(shape.extent())))
