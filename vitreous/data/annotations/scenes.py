"""Build a dataset with splits, labels and notes from scenes (images with objects), and check that their annotations are
usable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from vitreous.data.annotations.learnable import describe_lost_objects, find_objects_error, tally_objects
from vitreous.data.annotations.objects import (
    ObjectAnnotations,
    Scene,
    check_train_split,
    check_unique_classes,
    is_empty_box,
)
from vitreous.data.annotations.target import AnnotatedFiles
from vitreous.data.split import Data, Split, create_empty_labels, ensure_val_split


def build_scene_data(
    name: str, classes: Sequence[str], scenes: Mapping[str, Sequence[Scene]], split_seed: int, notes: list[str]
) -> Data:
    """Build a dataset from the scenes of each split. If there is no `val`, a tenth of `train` is held out.

    Boxes without area are dropped. A held-out split without objects is unlabelled. Notes about unusable objects are
    appended to `notes`; `Data.unlearnable` is set if `train` has no usable objects. Raises DataError if `train` has no
    images, and for two classes with the same name.
    """
    check_unique_classes(name, classes)
    check_train_split(name, scenes)
    splits: dict[str, Split] = {}
    for split, split_scenes in scenes.items():
        nonempty_scenes = [drop_empty_shapes(scene) for scene in split_scenes]
        labels = np.zeros((len(split_scenes), len(classes)), np.float32)
        for index, scene in enumerate(nonempty_scenes):
            labels[index, [shape.label for shape in scene.shapes]] = 1
        if split != "train" and not any(scene.shapes or scene.verified for scene in nonempty_scenes):
            labels = create_empty_labels(len(split_scenes))
        images = [scene.image for scene in nonempty_scenes]
        splits[split] = AnnotatedFiles(images, labels, np.arange(len(split_scenes)), ObjectAnnotations(nonempty_scenes))
    tallies = {split: tally_objects(split_scenes) for split, split_scenes in scenes.items() if split_scenes}
    unlearnable = find_objects_error(name, scenes["train"], tallies["train"])
    for split, tally in tallies.items():
        if split != "train" or unlearnable is None:
            notes += describe_lost_objects(split, scenes[split], tally)
    splits, full_train = ensure_val_split(splits, split_seed, notes)
    unsplit = full_train is not None and "test" not in splits
    return Data(
        name,
        tuple(classes),
        splits=splits,
        notes=notes,
        unsplit=unsplit,
        full_train_split=full_train,
        unlearnable=unlearnable,
    )


def drop_empty_shapes(scene: Scene) -> Scene:
    """Return a scene without its objects whose boxes have no area."""
    return replace(
        scene, shapes=tuple(shape for shape in scene.shapes if not is_empty_box(shape.compute_bounding_box()))
    )
