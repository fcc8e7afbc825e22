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


def find_training_overlap(answers: SplitPredictions, data: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return which evaluated images were used for training or selection; `data` is the data set given by the user.

    `trained_on`: whether the model was trained on any, None if unknown; `trained_on_images`: how many; `selected_on`:
    choices made on the split. Images are equal if they are the same file, or the same pixels in memory; a run's data
    are identified by their fingerprint, wherever they are stored. Initial runs and the ingredients of a soup count too.
    """
    own, hit, known = identify_images(answers.split, answers.source), np.zeros(len(answers.split), dtype=bool), False
    for folder in iterate_source_runs(Path(answers.run), answers.bundle.provenance):
        for source, split in iterate_training_splits(folder, answers, data):
            known = True
            images = set(identify_images(split, source))
            hit |= np.array([image in images for image in own], dtype=bool)
    count = int(hit.sum())
    return {
        "trained_on": count > 0 if known else None,
        "trained_on_images": count if known else None,
        "selected_on": list_selection_uses(answers),
    }


def describe_training_overlap(facts: dict[str, Any], answers: SplitPredictions) -> list[str]:
    """Return notes on the overlap, one sentence each."""
    count, total = facts["trained_on_images"], len(answers.split)
    notes = []
    if count:
        which = "these images" if count == total else f"{count} of these {total} images"
        notes.append(f"{answers.run} was trained on {which}: the metrics measure memorisation, not generalisation")
    notes += [f"these images were used to {reason}: the metrics are optimistic" for reason in facts["selected_on"]]
    return notes


def iterate_source_runs(run: Path, provenance: dict[str, Any]) -> Iterator[RunFolder]:
    """Yield the folders of all runs that contributed to the weights: the run, its initial weights, a soup's
    ingredients."""
    waiting = [run, *(Path(row["run"]) for row in provenance.get("ingredients", []))]
    for _ in range(MAX_INIT_DEPTH + len(waiting)):
        if not waiting:
            return
        folder = RunFolder(waiting.pop(0))
        if folder.config.is_file():
            yield folder
            init = folder.run().init
            waiting += [Path(init)] if init else []


def iterate_training_splits(
    folder: RunFolder, answers: SplitPredictions, data: str | os.PathLike[str] | None
) -> Iterator[tuple[str, Split]]:
    """Yield sources and splits of a run's training images that may be among the evaluated ones."""
    run = folder.run().data
    mine = data is None and folder.path == Path(answers.run)
    for source in dict.fromkeys([run.source, answers.source]):
        try:
            opened = (
                answers.opened
                if mine
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
                yield source, drop_excluded(opened.split("train"), folder)
        except (VitreousError, OSError):  # moved, or other data
            continue


def drop_excluded(split: Split, folder: RunFolder) -> Split:
    """Return the training images without those that the run excluded."""
    listed = folder.path / "excluded.json"
    return (
        split.take(find_kept_samples(split, frozenset(json.loads(listed.read_text("utf-8")))))
        if listed.is_file()
        else split
    )


def list_selection_uses(answers: SplitPredictions) -> list[str]:
    """Return the selections made on the evaluated split, in words that follow `used to`."""
    folder, provenance, reasons = RunFolder(Path(answers.run)), answers.bundle.provenance, []
    if folder.config.is_file() and answers.name == "val" and is_same_source(folder.run().data.source, answers.source):
        trials = folder.path.parent
        if trials.name == "trials" and (trials.parent / "trials.json").is_file():
            reasons.append("choose the learning rate")
        if folder.run().keep_best or folder.run().early_stop:
            reasons.append("select the best weights of the run")
    if (
        provenance.get("soup") == "greedy"
        and provenance.get("split") == answers.name
        and is_same_source(provenance.get("data"), answers.source)
    ):
        reasons.append("select the ingredients of the soup")
    fitted = provenance.get("temperature")
    if fitted and fitted.get("split") == answers.name and is_same_source(fitted.get("data"), answers.source):
        reasons.append("fit the temperature")
    return reasons


def is_same_source(one: str | None, other: str | None) -> bool:
    """Return whether two sources are the same data."""
    return one is not None and other is not None and (one == other or os.path.realpath(one) == os.path.realpath(other))


def identify_images(split: Split, source: str) -> list[bytes]:
    """Return an identifier of each image of a split: its file, its position in an archive, or its pixels."""
    if isinstance(split, ClassMapSplit):
        return identify_images(split.split, source)
    if isinstance(split, FileSplit):
        real: dict[bytes, bytes] = {}
        names = []
        for sample in range(len(split)):
            home, _, name = os.fsencode(split.path(sample)).rpartition(b"/")
            if home not in real:  # links are mostly to folders, and resolving each file takes seconds
                real[home] = os.path.realpath(home or b".")
            part = split.part(sample) if isinstance(split, ClipFiles) else None
            names.append(real[home] + b"/" + name + (repr(part).encode() if part else b""))
        return names
    if isinstance(split, ArraySplit):
        return [hashlib.sha1(np.ascontiguousarray(split.raw(s)).tobytes()).digest() for s in range(len(split))]
    store, rows = (split.store, split.rows) if isinstance(split, StoreSplit) else (None, ())
    if isinstance(store, PackedImages):
        return [f"{store.shards[row['shard']]}:{row['offset']}".encode() for row in store.table[rows]]
    if isinstance(store, ArchiveIndex):
        places = [os.path.realpath(archive) for archive in store.archives]
        return [os.fsencode(places[store.samples["archive"][row]]) + b":" + store.get_member_name(row) for row in rows]
    home = os.path.realpath(source)
    return [f"{home}:{split.name(sample)}".encode("utf-8", "surrogateescape") for sample in range(len(split))]
