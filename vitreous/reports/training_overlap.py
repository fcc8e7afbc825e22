"""Find evaluated images on which the model was trained, or on which its hyperparameters were selected."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.data.annotations.painted import ClassMapSplit
from vitreous.data.exclusions import find_kept_samples
from vitreous.data.layouts.packed import PackedImages
from vitreous.data.layouts.video import ClipFiles
from vitreous.data.sources import open_data
from vitreous.data.split import ArraySplit, FileSplit, Split, StoreSplit
from vitreous.data.stores.tarindex import ArchiveIndex
from vitreous.errors import VitreousError
from vitreous.reports.answers import SplitPredictions
from vitreous.training.folder import RunFolder

MAX_INIT_DEPTH = 8  # maximum length of a chain of runs of which each was initialised from the previous run


def find_training_overlap(predictions: SplitPredictions, data: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return how many evaluated images the model was trained on, and which choices were made on them.

    `data` is the dataset passed by the user, None for the run's. `trained_on`: whether the model was trained on any of
    the images, None if unknown; `trained_on_images`: their number; `selected_on`: the choices made on the split. Images
    are equal if they are the same file, or the same pixels in memory. The data of a run are identified by their
    fingerprint, regardless of where they are stored. Runs that initialised the run, and ingredients of a model soup,
    are included.
    """
    identities, is_trained_on, is_known = (
        identify_images(predictions.split, predictions.source),
        np.zeros(len(predictions.split), dtype=bool),
        False,
    )
    for folder in iterate_source_runs(Path(predictions.run), predictions.bundle.provenance):
        for source, split in iterate_training_splits(folder, predictions, data):
            is_known = True
            images = set(identify_images(split, source))
            is_trained_on |= np.array([image in images for image in identities], dtype=bool)
    count = int(is_trained_on.sum())
    return {
        "trained_on": count > 0 if is_known else None,
        "trained_on_images": count if is_known else None,
        "selected_on": list_selection_uses(predictions),
    }


def describe_training_overlap(overlap: dict[str, Any], predictions: SplitPredictions) -> list[str]:
    """Return a message for each kind of overlap that makes the metrics optimistic."""
    count, total = overlap["trained_on_images"], len(predictions.split)
    notes = []
    if count:
        images_text = "these images" if count == total else f"{count} of these {total} images"
        notes.append(
            f"{predictions.run} was trained on {images_text}: the metrics measure memorisation, not generalisation"
        )
    notes += [f"these images were used to {reason}: the metrics are optimistic" for reason in overlap["selected_on"]]
    return notes


def iterate_source_runs(run: Path, provenance: dict[str, Any]) -> Iterator[RunFolder]:
    """Yield the folders of all runs that contributed to the weights: the run, the run it was initialised from, and the
    ingredients of a model soup."""
    pending = [run, *(Path(ingredient["run"]) for ingredient in provenance.get("ingredients", []))]
    for _ in range(MAX_INIT_DEPTH + len(pending)):
        if not pending:
            return
        folder = RunFolder(pending.pop(0))
        if folder.config.is_file():
            yield folder
            init = folder.run().init
            pending += [Path(init)] if init else []


def iterate_training_splits(
    folder: RunFolder, predictions: SplitPredictions, data: str | os.PathLike[str] | None
) -> Iterator[tuple[str, Split]]:
    """Yield dataset and training split of a run, for each dataset that may contain evaluated images and can be
    opened."""
    run_data = folder.run().data
    is_same_run = data is None and folder.path == Path(predictions.run)
    for source in dict.fromkeys([run_data.source, predictions.source]):
        try:
            dataset = (
                predictions.data
                if is_same_run
                else open_data(
                    source,
                    run_data.split_seed,
                    group_by=run_data.group_by,
                    stills=False,
                    axes=run_data.axes,
                    ignore_index=run_data.ignore_index,
                ).with_holdout(run_data.hold_out, run_data.split_seed)
            )
            if source == run_data.source or dataset.fingerprint() == run_data.fingerprint:
                yield source, drop_excluded_images(dataset.split("train"), folder)
        except (VitreousError, OSError):  # the dataset was moved or replaced
            continue


def drop_excluded_images(split: Split, folder: RunFolder) -> Split:
    """Remove the images that a run excluded from a training split."""
    excluded_file = folder.path / "excluded.json"
    return (
        split.take(find_kept_samples(split, frozenset(json.loads(excluded_file.read_text("utf-8")))))
        if excluded_file.is_file()
        else split
    )


def list_selection_uses(predictions: SplitPredictions) -> list[str]:
    """Return the choices made on the evaluated split, as verb phrases such as `choose the learning rate`."""
    folder, provenance, reasons = RunFolder(Path(predictions.run)), predictions.bundle.provenance, []
    if (
        folder.config.is_file()
        and predictions.name == "val"
        and is_same_source(folder.run().data.source, predictions.source)
    ):
        trials = folder.path.parent
        if trials.name == "trials" and (trials.parent / "trials.json").is_file():
            reasons.append("choose the learning rate")
        if folder.run().keep_best or folder.run().early_stop:
            reasons.append("select the best weights of the run")
    if (
        provenance.get("soup") == "greedy"
        and provenance.get("split") == predictions.name
        and is_same_source(provenance.get("data"), predictions.source)
    ):
        reasons.append("select the ingredients of the soup")
    temperature_fit = provenance.get("temperature")
    if (
        temperature_fit
        and temperature_fit.get("split") == predictions.name
        and is_same_source(temperature_fit.get("data"), predictions.source)
    ):
        reasons.append("fit the temperature")
    return reasons


def is_same_source(source: str | None, other_source: str | None) -> bool:
    """Return whether two paths are the same dataset; False if either is None."""
    return (
        source is not None
        and other_source is not None
        and (source == other_source or os.path.realpath(source) == os.path.realpath(other_source))
    )


def identify_images(split: Split, source: str) -> list[bytes]:
    """Return an identifier of each image of a split: its file, its position in an archive, or a hash of its pixels."""
    if isinstance(split, ClassMapSplit):
        return identify_images(split.split, source)
    if isinstance(split, FileSplit):
        real_folders: dict[bytes, bytes] = {}
        names = []
        for sample in range(len(split)):
            folder, _, name = os.fsencode(split.path(sample)).rpartition(b"/")
            if (
                folder not in real_folders
            ):  # resolves folders only: links are mostly to folders, and resolving each file takes seconds
                real_folders[folder] = os.path.realpath(folder or b".")
            segment = split.get_segment(sample) if isinstance(split, ClipFiles) else None
            names.append(real_folders[folder] + b"/" + name + (repr(segment).encode() if segment else b""))
        return names
    if isinstance(split, ArraySplit):
        return [hashlib.sha1(np.ascontiguousarray(split.raw(s)).tobytes()).digest() for s in range(len(split))]
    store, rows = (split.store, split.row_indices) if isinstance(split, StoreSplit) else (None, ())
    if isinstance(store, PackedImages):
        return [f"{store.shards[row['shard']]}:{row['offset']}".encode() for row in store.table[rows]]
    if isinstance(store, ArchiveIndex):
        archive_paths = [os.path.realpath(archive) for archive in store.archives]
        return [
            os.fsencode(archive_paths[store.samples["archive"][row]]) + b":" + store.get_member_name(row)
            for row in rows
        ]
    folder = os.path.realpath(source)
    return [f"{folder}:{split.name(sample)}".encode("utf-8", "surrogateescape") for sample in range(len(split))]
