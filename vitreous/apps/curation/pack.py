"""Pack a dataset into shards for training: every image decoded and scaled once, in an open format.

The bytes depend only on the data and the options. If the same command is run again, an interrupted pack continues after
its last complete shard.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitreous.apps.curation.shards import (
    READING_INSTRUCTIONS,
    SHARD_CLASSES,
    PackPlan,
    SampleEncoder,
    StoredImage,
    encode_npy,
    make_file_record,
    write_recorded_file,
)
from vitreous.data.annotations.target import AnnotatedSplit, check_image_samples
from vitreous.data.latents import LatentEncoder
from vitreous.data.layouts.packed import (
    ARRAY_PACK_FORMS,
    PACK_DOCUMENT,
    PACK_INDEX_DTYPE,
    PACK_VERSION,
    UNFINISHED_FOLDER,
    is_pack,
    read_pack_document,
)
from vitreous.data.loader import map_in_workers
from vitreous.data.screen import unreadable_images_error
from vitreous.data.sources import open_data
from vitreous.data.split import Data, hash_file_times
from vitreous.errors import DataError, ResourceError, UsageError, escape_unprintable
from vitreous.progress import ProgressListener
from vitreous.system.cores import default_worker_count
from vitreous.system.disk import sync_and_rename

WORKER_CHUNK_SIZE = 16  # images per message of a worker
MAX_MEASURED_IMAGES = 64  # images for the size estimate before writing
DISK_SPACE_MARGIN = 1.1  # times the estimated bytes
DEFAULT_PLAN = PackPlan()


def pack_dataset(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    plan: PackPlan = DEFAULT_PLAN,
    bad_images: Literal["stop", "skip"] = "stop",
    workers: int | None = None,
    listener: ProgressListener | None = None,
    autoencoder: LatentEncoder | None = None,
) -> dict[str, Any]:
    """Write a dataset as shards into the folder `out`; returns the content of `pack.json`, and the folder as `out`.

    Splits, labels, class names and sample ids are kept, including splits that were drawn on opening. Unreadable images
    are listed: at the end, in a DataError, or with `skip` in the document. Complete shards are kept if plan and source
    are the same. `autoencoder` encodes latents if the plan has them. Raises UsageError for a folder with other content
    and for annotations of objects or pixels, which a pack does not store, ResourceError if the disk is too small.
    """
    data = open_data(source)
    check_image_samples(data.splits.values(), "packs store images")
    if any(isinstance(split, AnnotatedSplit) for split in data.splits.values()):
        problem = f"{data.name} has annotations, but a pack stores only images and their classes"
        raise UsageError(problem, f"train without a pack: vitreous train {data.name}")
    if data.targets:
        problem = f"{data.name} has values, but a pack stores only images and their classes"
        raise UsageError(problem, f"train without a pack: vitreous train {data.name}")
    plan = replace(plan, source=fingerprint_source(data))
    out = Path(out)
    if os.path.isdir(source) and out.resolve().is_relative_to(Path(source).resolve()):
        raise UsageError(
            f"{escape_unprintable(out)} is inside {escape_unprintable(source)}", "use an --out outside of it"
        )
    if is_pack(out) and (out / PACK_DOCUMENT).exists():  # it is written last
        shutil.rmtree(out / UNFINISHED_FOLDER, ignore_errors=True)
        return verify_finished_pack(out, plan)
    prepare_pack_folder(out, plan)
    if data.groups is not None and listener:
        listener.note("image groups are not stored, only the splits drawn from them")
    require_disk_space(out, data, plan, autoencoder)
    first = len(data.split("train")) if plan.mirror else None
    if first is not None:
        twice = data.split("train").take(np.tile(np.arange(first), 2))
        data = replace(data, splits=data.splits | {"train": twice})
    records, bad = {}, {}
    for name in data.splits:
        reader = SampleEncoder(data.splits[name], plan, first if name == "train" else None)
        coding = PackEncoding(reader, default_worker_count() if workers is None else workers, autoencoder)
        records[name], unreadable = pack_split(out, name, data, coding, listener)
        bad |= {(name, sample): message for sample, message in unreadable.items()}
    if bad and bad_images == "stop":
        total = sum(map(len, data.splits.values()))
        raise unreadable_images_error(
            {number: DataError(message) for number, message in enumerate(bad.values())}, total
        )
    document = {
        "vitreous_pack": PACK_VERSION,
        **asdict(plan),
        "reading_instructions": READING_INSTRUCTIONS[plan.form],
        "multilabel": data.multilabel,
        "has_drawn_splits": data.whole is not None,
        "splits": records,
        "classes": list(data.classes),
        "titles": data.titles,
    }
    write_recorded_file(
        out / PACK_DOCUMENT, json.dumps(document, indent=1, ensure_ascii=False).encode("utf-8", "surrogatepass")
    )
    shutil.rmtree(out / UNFINISHED_FOLDER)
    return {"out": os.fspath(out), **document}


def fingerprint_source(data: Data) -> str:
    """Fingerprint the data, including sizes and times of its files, if it consists of files."""
    digest = hashlib.sha256(data.fingerprint().encode())
    for split in data.splits.values():
        hash_file_times(split, digest)
    return digest.hexdigest()


def prepare_pack_folder(out: Path, plan: PackPlan) -> None:
    """Prepare a new folder for a pack, or one with an interrupted pack of the same plan. Raises UsageError for any
    other folder."""
    state = out / UNFINISHED_FOLDER
    if (state / "plan.json").is_file():
        try:
            known = json.loads((state / "plan.json").read_text("utf-8"))
        except ValueError:
            known = {}
        if other := describe_plan_differences(plan, known):
            problem = f"{escape_unprintable(out)} was started with another {other}"
            raise UsageError(problem, "use another --out, or remove that folder")
    elif out.exists() and (not out.is_dir() or any(entry != state for entry in out.iterdir())):
        raise UsageError(f"{escape_unprintable(out)} exists and is not empty", "use another --out")
    for torn in (*out.glob("*.part"), *out.rglob(".*.tmp")):
        torn.unlink()
    state.mkdir(parents=True, exist_ok=True)
    write_recorded_file(state / "plan.json", json.dumps(asdict(plan)).encode())


def describe_plan_differences(plan: PackPlan, known: dict[str, Any]) -> str:
    """Describe the fields of a plan that differ from a document; empty if none does."""
    before = asdict(DEFAULT_PLAN) | known
    return " and ".join(n.replace("_", " ") for n, value in asdict(plan).items() if before[n] != value)


def verify_finished_pack(out: Path, plan: PackPlan) -> dict[str, Any]:
    """Verify every file of a complete pack, and return its document. Raises UsageError for another plan, DataError for
    damage."""
    document = read_pack_document(out)
    if other := describe_plan_differences(plan, document):
        raise UsageError(f"{escape_unprintable(out)} is a pack of another {other}", "use another --out")
    for split in document["splits"].values():
        for known in (*split["shards"], *split["files"].values()):
            path = out / known["file"]
            if not path.is_file() or make_file_record(path)["sha256"] != known["sha256"]:
                hint = "delete the folder, and pack again"
                raise DataError(f"{escape_unprintable(path)} is missing or damaged", hint)
    return {"out": os.fspath(out), **document}


def require_disk_space(out: Path, data: Data, plan: PackPlan, autoencoder: LatentEncoder | None) -> None:
    """Raise ResourceError if the disk lacks space for a pack, estimated from some of its images."""
    share = 1.0
    if autoencoder is not None:  # two bytes per channel and position, instead of three per pixel
        share = (1 + plan.mirror) * 2 * autoencoder.channels / (3 * autoencoder.latents.stride**2)
    total = 0
    for split in data.splits.values():
        rows = np.linspace(0, len(split) - 1, min(MAX_MEASURED_IMAGES, len(split))).astype(int)
        reader = SampleEncoder(split, plan)
        sizes = [
            len(stored.content) for _, stored in (reader[int(row)] for row in rows) if isinstance(stored, StoredImage)
        ]
        total += math.ceil(np.mean(sizes) * len(split) * DISK_SPACE_MARGIN * share) if sizes else 0
    free = shutil.disk_usage(out).free + sum(entry.stat().st_size for entry in out.iterdir() if entry.is_file())
    if total > free:
        problem = f"a pack of {total:,} bytes does not fit on the disk of {escape_unprintable(out)}, which has {free:,}"
        raise ResourceError(problem, "free some space")


def strip_data_folder(data: Data, name: str) -> str:
    """Remove the data folder from the name of a sample, since a pack may be moved to another machine."""
    for home in (data.name, os.path.dirname(data.name)):
        if home and name.startswith(f"{home}/"):
            return name[len(home) + 1 :]
    return name


@dataclass(frozen=True)
class PackEncoding:
    """Encoding of samples for storage: by `workers` processes, and by an autoencoder if not None."""

    reader: SampleEncoder
    workers: int
    autoencoder: LatentEncoder | None = None

    @property
    def plan(self) -> PackPlan:
        """Return the plan, which determines the bytes."""
        return self.reader.plan

    def samples(self, start: int) -> Generator[tuple[int, StoredImage | DataError]]:
        """Yield samples from `start` on, in order; an unreadable image is a DataError. Raises
        ResourceError for a lost worker."""
        stop = len(self.reader.split)
        places = (range(low, min(low + WORKER_CHUNK_SIZE, stop)) for low in range(start, stop, WORKER_CHUNK_SIZE))
        for rows in map_in_workers(self.reader, places, self.workers, list, prefetch=4):
            for sample, stored in rows:
                yield sample, stored if isinstance(stored, DataError) else self.encode(sample, stored)

    def encode(self, sample: int, stored: StoredImage) -> StoredImage:
        """Encode the output of a worker to latents if there is an autoencoder."""
        if self.autoencoder is None:
            return stored
        shape = stored.height, stored.width, stored.channels
        pixels = np.frombuffer(stored.content, np.uint8).reshape(shape)
        numbers = self.autoencoder.encode(pixels, sample).astype(ARRAY_PACK_FORMS["latents"][0])
        return StoredImage("raw", numbers.tobytes(), *numbers.shape)


def pack_split(
    out: Path, name: str, data: Data, coding: PackEncoding, listener: ProgressListener | None
) -> tuple[dict[str, Any], dict[int, str]]:
    """Write one split. Returns its entry in `pack.json`, and the errors of unreadable samples. Raises DataError if none
    can be read."""
    split, plan = data.splits[name], coding.plan
    shards, rows, bad, at = load_finished_shards(out, name)
    kind = SHARD_CLASSES[plan.form]
    shard, first, temporary = None, at, out / "shard.part"
    unread: dict[int, str] = {}

    def close_shard(stop: int) -> None:
        """Publish the open shard, which contains the samples [first, stop)."""
        assert shard is not None
        rows.append(shard.close())
        path = out / f"{name}-{len(shards):06d}.{kind.suffix}"
        sync_and_rename(temporary, path)
        held = {**make_file_record(path), "images": shard.images}
        state = {"record": held, "first": first, "stop": stop, "errors": unread}
        write_recorded_file(out / UNFINISHED_FOLDER / f"{path.name}.npy", encode_npy(rows[-1]))
        write_recorded_file(out / UNFINISHED_FOLDER / f"{path.name}.json", json.dumps(state).encode())
        shards.append(held)

    with closing(coding.samples(at)) as stream:
        for sample, stored in stream:
            if isinstance(stored, StoredImage):
                item = sample, stored, split.labels[sample], strip_data_folder(data, split.name(sample))
                if shard is None or not shard.add(*item):
                    if shard:
                        close_shard(sample)
                        bad |= unread
                        first, unread = sample, {}
                    shard = kind(temporary, data.classes, plan.shard_size)
                    shard.add(*item)
            else:
                unread[sample] = stored.message
            if listener and ((sample + 1) % 64 == 0 or sample + 1 == len(split)):
                listener.progress(f"packing {name}", sample + 1, len(split), f"{len(shards) + 1} shards")
    if shard:
        close_shard(len(split))
    bad |= unread
    if not shards:
        raise DataError(f"none of {len(split)} images of {name} can be read; the first: {next(iter(bad.values()), '')}")
    return write_split_index(out, name, data=data, plan=plan, shards=shards, rows=rows, bad=bad), bad


def load_finished_shards(out: Path, name: str) -> tuple[list[dict[str, Any]], list[np.ndarray], dict[int, str], int]:
    """Load the complete shards of a split on disk, their index entries, (n,) of PACK_INDEX_DTYPE each, read errors, and
    the sample to continue with."""
    shards: list[dict[str, Any]] = []
    rows: list[np.ndarray] = []
    bad: dict[int, str] = {}
    at = 0
    while True:
        records = sorted((out / UNFINISHED_FOLDER).glob(f"{name}-{len(shards):06d}.*.json"))
        try:
            state = json.loads(records[0].read_text("utf-8"))
            held = np.load(records[0].with_suffix(".npy"), allow_pickle=False)
            same = make_file_record(out / records[0].stem)["sha256"] == state["record"]["sha256"]
            if not same or state["first"] != at or held.dtype != PACK_INDEX_DTYPE:
                return shards, rows, bad, at
        except (IndexError, OSError, ValueError, KeyError):
            return shards, rows, bad, at
        shards.append(state["record"])
        rows.append(held)
        bad |= {int(sample): message for sample, message in state["errors"].items()}
        at = state["stop"]


def write_split_index(
    out: Path,
    name: str,
    data: Data,
    plan: PackPlan,
    shards: list[dict[str, Any]],
    rows: list[np.ndarray],
    bad: dict[int, str],
) -> dict[str, Any]:
    """Write the index files of a split next to its shards from the entries of each, (n,) of PACK_INDEX_DTYPE, and
    remove those of an earlier attempt. Returns its entry in `pack.json`."""
    split = data.splits[name]
    for entry in out.glob(f"{name}-*"):
        if entry.name not in {shard["file"] for shard in shards}:
            entry.unlink()
    files = {}
    if plan.form in ARRAY_PACK_FORMS:
        index = np.concatenate(rows)
        samples = index["shard"].copy()
        index["shard"] = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
        labels = split.labels[samples]
        if labels.ndim == 2:
            files["labels"] = write_recorded_file(out / f"{name}.labels.npy", encode_npy(labels.astype(np.uint8)))
        else:
            index["label"] = labels
        files["index"] = write_recorded_file(out / f"{name}.index.npy", encode_npy(index))
        ids = "".join(
            f"{escape_unprintable(strip_data_folder(data, split.name(sample)))}\n" for sample in samples.tolist()
        )
        files["ids"] = write_recorded_file(out / f"{name}.ids.txt", ids.encode("utf-8", "replace"))
    return {
        "images": sum(shard["images"] for shard in shards),
        "unreadable": [
            {"id": strip_data_folder(data, split.name(row)), "reason": strip_data_folder(data, bad[row])}
            for row in sorted(bad)
        ],
        "shards": shards,
        "files": files,
    }
