"""Find evaluated images that were used before, in training or in selecting hyperparameters."""

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

MAX_INIT_DEPTH = 8  # maximum length of a chain of initial runs


def find_training_overlap(predictions: SplitPredictions, data: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return which evaluated images were used for training or selection; `data` is the dataset given by the user.

    `trained_on`: whether the model was trained on any, None if unknown; `trained_on_images`: how many; `selected_on`:
    choices made on the split. Images are equal if they are the same file, or the same pixels in memory; a run's data
    are identified by their fingerprint, wherever they are stored. Initial runs and the ingredients of a soup count too.
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
    """Return notes on the overlap, one sentence each."""
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
    """Yield the folders of all runs that contributed to the weights: the run, its initial weights, a soup's
    ingredients."""
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
    """Yield sources and splits of a run's training images that may be among the evaluated ones."""
    run = folder.run().data
    is_same_run = data is None and folder.path == Path(predictions.run)
    for source in dict.fromkeys([run.source, predictions.source]):
        try:
            opened = (
                predictions.data
                if is_same_run
                else open_data(
                    source,
                    run.split_seed,
                    group_by=run.group_by,
                    stills=False,
                    axes=run.axes,
                    ignore_index=run.ignore_index,
                ).with_holdout(run.hold_out, run.split_seed)
            )
            if source == run.source or opened.fingerprint() == run.fingerprint:
                yield source, drop_excluded_images(opened.split("train"), folder)
        except (VitreousError, OSError):  # moved, or other data
            continue


def drop_excluded_images(split: Split, folder: RunFolder) -> Split:
    """Return the training images without those that the run excluded."""
    excluded_file = folder.path / "excluded.json"
    return (
        split.take(find_kept_samples(split, frozenset(json.loads(excluded_file.read_text("utf-8")))))
        if excluded_file.is_file()
        else split
    )


def list_selection_uses(predictions: SplitPredictions) -> list[str]:
    """Return the selections made on the evaluated split, in words that follow `used to`."""
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
    fitted = provenance.get("temperature")
    if fitted and fitted.get("split") == predictions.name and is_same_source(fitted.get("data"), predictions.source):
        reasons.append("fit the temperature")
    return reasons


def is_same_source(source: str | None, other_source: str | None) -> bool:
    """Return whether two sources are the same data."""
    return (
        source is not None
        and other_source is not None
        and (source == other_source or os.path.realpath(source) == os.path.realpath(other_source))
    )


def identify_images(split: Split, source: str) -> list[bytes]:
    """Return an identifier of each image of a split: its file, its position in an archive, or its pixels."""
    if isinstance(split, ClassMapSplit):
        return identify_images(split.split, source)
    if isinstance(split, FileSplit):
        real_folders: dict[bytes, bytes] = {}
        names = []
        for sample in range(len(split)):
            folder, _, name = os.fsencode(split.path(sample)).rpartition(b"/")
            if folder not in real_folders:  # links are mostly to folders, and resolving each file takes seconds
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
