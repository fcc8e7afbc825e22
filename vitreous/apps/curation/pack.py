"""The verb `data pack`: write a dataset as shards for training, with every image decoded and scaled once, in an open
format.

The bytes of a pack depend only on the data and the options. If the same command is run again, an interrupted pack
continues after its last complete shard.
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
from vitreous.data.pairs import has_pairs
from vitreous.data.screen import unreadable_images_error
from vitreous.data.sources import open_data
from vitreous.data.split import Data, hash_file_times
from vitreous.errors import DataError, ResourceError, UsageError, escape_unprintable
from vitreous.progress import ProgressListener
from vitreous.system.cores import default_worker_count
from vitreous.system.disk import sync_and_rename

WORKER_CHUNK_SIZE = 16  # images per message of a worker
MAX_MEASURED_IMAGES = 64  # images of each split that are encoded to estimate the size of a pack
DISK_SPACE_MARGIN = 1.1  # factor on the estimated bytes
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
    """Write a dataset as shards into the folder `out`. Return the content of `pack.json`, and the folder as `out`.

    Splits, including those drawn on opening, labels, class names and sample ids are kept. With `bad_images="stop"`,
    unreadable images are listed in a DataError at the end; with `skip`, in the document. Shards of an interrupted pack
    are kept if plan and source are the same. `autoencoder` encodes latents, if the plan has them.

    Raises UsageError for a folder with other content, and for annotations of objects or pixels, numeric targets and
    captions, which a pack does not store; ResourceError if the disk is too small.
    """
    data = open_data(source)
    check_image_samples(data.splits.values(), "packs store images")
    if any(isinstance(split, AnnotatedSplit) for split in data.splits.values()):
        problem = f"{data.name} has annotations, but a pack stores only images and their classes"
        raise UsageError(problem, f"train without a pack: vitreous train {data.name}")
    if data.targets or has_pairs(data):
        content = "values" if data.targets else "captions"
        problem = f"{data.name} has {content}, but a pack stores only images and their classes"
        raise UsageError(problem, f"train without a pack: vitreous train {data.name}")
    plan = replace(plan, source=fingerprint_source(data))
    out = Path(out)
    if os.path.isdir(source) and out.resolve().is_relative_to(Path(source).resolve()):
        raise UsageError(
            f"{escape_unprintable(out)} is inside {escape_unprintable(source)}", "use an --out outside of the dataset"
        )
    if is_pack(out) and (out / PACK_DOCUMENT).exists():  # it is written last
        shutil.rmtree(out / UNFINISHED_FOLDER, ignore_errors=True)
        return verify_finished_pack(out, plan)
    prepare_pack_folder(out, plan)
    if data.groups is not None and listener:
        listener.note("image groups are not stored, only the splits drawn from them")
    require_disk_space(out, data, plan, autoencoder)
    num_unmirrored = len(data.split("train")) if plan.mirror else None
    if num_unmirrored is not None:
        doubled = data.split("train").take(np.tile(np.arange(num_unmirrored), 2))
        data = replace(data, splits=data.splits | {"train": doubled})
    records, errors = {}, {}
    for name in data.splits:
        reader = SampleEncoder(data.splits[name], plan, num_unmirrored if name == "train" else None)
        encoding = PackEncoding(reader, default_worker_count() if workers is None else workers, autoencoder)
        records[name], unreadable = pack_split(out, name, data, encoding, listener)
        errors |= {(name, sample): message for sample, message in unreadable.items()}
    if errors and bad_images == "stop":
        total = sum(map(len, data.splits.values()))
        raise unreadable_images_error(
            {index: DataError(message) for index, message in enumerate(errors.values())}, total
        )
    document = {
        "vitreous_pack": PACK_VERSION,
        **asdict(plan),
        "reading_instructions": READING_INSTRUCTIONS[plan.form],
        "multilabel": data.multilabel,
        "has_drawn_splits": data.full_train_split is not None,
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
    """Return a fingerprint of the data, including the sizes and times of its files."""
    digest = hashlib.sha256(data.fingerprint().encode())
    for split in data.splits.values():
        hash_file_times(split, digest)
    return digest.hexdigest()


def prepare_pack_folder(out: Path, plan: PackPlan) -> None:
    """Prepare a folder for a pack: a new folder, or the folder of an interrupted pack of the same plan. Raises
    UsageError for any other folder."""
    state = out / UNFINISHED_FOLDER
    if (state / "plan.json").is_file():
        try:
            stored_plan = json.loads((state / "plan.json").read_text("utf-8"))
        except ValueError:
            stored_plan = {}
        if differences := describe_plan_differences(plan, stored_plan):
            problem = f"{escape_unprintable(out)} was started with another {differences}"
            raise UsageError(problem, "use another --out, or remove that folder")
    elif out.exists() and (not out.is_dir() or any(entry != state for entry in out.iterdir())):
        raise UsageError(f"{escape_unprintable(out)} exists and is not empty", "use another --out")
    for incomplete_file in (*out.glob("*.part"), *out.rglob(".*.tmp")):
        incomplete_file.unlink()
    state.mkdir(parents=True, exist_ok=True)
    write_recorded_file(state / "plan.json", json.dumps(asdict(plan)).encode())


def describe_plan_differences(plan: PackPlan, document: dict[str, Any]) -> str:
    """Describe the fields of a plan that differ from a stored document; an empty string if none does."""
    stored = asdict(DEFAULT_PLAN) | document
    return " and ".join(name.replace("_", " ") for name, value in asdict(plan).items() if stored[name] != value)


def verify_finished_pack(out: Path, plan: PackPlan) -> dict[str, Any]:
    """Verify every file of a complete pack, and return its document. Raises UsageError if it has another plan,
    DataError for missing or damaged files."""
    document = read_pack_document(out)
    if differences := describe_plan_differences(plan, document):
        raise UsageError(f"{escape_unprintable(out)} is a pack of another {differences}", "use another --out")
    for split in document["splits"].values():
        for record in (*split["shards"], *split["files"].values()):
            path = out / record["file"]
            if not path.is_file() or make_file_record(path)["sha256"] != record["sha256"]:
                hint = "delete the folder, and pack again"
                raise DataError(f"{escape_unprintable(path)} is missing or damaged", hint)
    return {"out": os.fspath(out), **document}


def require_disk_space(out: Path, data: Data, plan: PackPlan, autoencoder: LatentEncoder | None) -> None:
    """Raise ResourceError if the disk lacks space for a pack, whose size is estimated from some of the images."""
    share = 1.0
    if autoencoder is not None:  # two bytes per channel and position, instead of three per pixel
        share = (1 + plan.mirror) * 2 * autoencoder.channels / (3 * autoencoder.latents.stride**2)
    total = 0
    for split in data.splits.values():
        samples = np.linspace(0, len(split) - 1, min(MAX_MEASURED_IMAGES, len(split))).astype(int)
        reader = SampleEncoder(split, plan)
        sizes = [
            len(stored.content)
            for _, stored in (reader[int(sample)] for sample in samples)
            if isinstance(stored, StoredImage)
        ]
        total += math.ceil(np.mean(sizes) * len(split) * DISK_SPACE_MARGIN * share) if sizes else 0
    free = shutil.disk_usage(out).free + sum(entry.stat().st_size for entry in out.iterdir() if entry.is_file())
    if total > free:
        problem = f"a pack of {total:,} bytes does not fit on the disk of {escape_unprintable(out)}, which has {free:,}"
        raise ResourceError(problem, "free some space")


def strip_data_folder(data: Data, name: str) -> str:
    """Remove the data folder from the name of a sample, since the pack may be moved to another machine."""
    for folder in (data.name, os.path.dirname(data.name)):
        if folder and name.startswith(f"{folder}/"):
            return name[len(folder) + 1 :]
    return name


@dataclass(frozen=True)
class PackEncoding:
    """The encoder of a split's samples: `reader` encodes them in `workers` processes, then the autoencoder, if there is
    one."""

    reader: SampleEncoder
    workers: int
    autoencoder: LatentEncoder | None = None

    @property
    def plan(self) -> PackPlan:
        """Return the plan, which determines the bytes of the pack."""
        return self.reader.plan

    def iterate_samples(self, start: int) -> Generator[tuple[int, StoredImage | DataError]]:
        """Yield (sample index, encoded image) from the sample `start` on, in order; an unreadable image yields a
        DataError instead. Raises ResourceError if a worker process ends."""
        stop = len(self.reader.split)
        spans = (range(low, min(low + WORKER_CHUNK_SIZE, stop)) for low in range(start, stop, WORKER_CHUNK_SIZE))
        for chunk in map_in_workers(self.reader, spans, self.workers, list, prefetch=4):
            for sample, stored in chunk:
                yield sample, stored if isinstance(stored, DataError) else self.encode(sample, stored)

    def encode(self, sample: int, stored: StoredImage) -> StoredImage:
        """Encode the pixels of a worker as latents, if there is an autoencoder."""
        if self.autoencoder is None:
            return stored
        shape = stored.height, stored.width, stored.channels
        pixels = np.frombuffer(stored.content, np.uint8).reshape(shape)
        latents = self.autoencoder.encode(pixels, sample).astype(ARRAY_PACK_FORMS["latents"][0])
        return StoredImage("raw", latents.tobytes(), *latents.shape)


def pack_split(
    out: Path, name: str, data: Data, encoding: PackEncoding, listener: ProgressListener | None
) -> tuple[dict[str, Any], dict[int, str]]:
    """Write the shards and the index of one split. Return the split's entry in `pack.json`, and the errors of
    unreadable samples. Raises DataError if no image can be read."""
    split, plan = data.splits[name], encoding.plan
    shards, index_entries, errors, next_sample = load_finished_shards(out, name)
    shard_class = SHARD_CLASSES[plan.form]
    shard, shard_start, temporary = None, next_sample, out / "shard.part"
    shard_errors: dict[int, str] = {}

    def close_shard(stop: int) -> None:
        """Close the open shard, which contains the samples from `shard_start` to below `stop`, and record it as
        complete."""
        assert shard is not None
        index_entries.append(shard.close())
        path = out / f"{name}-{len(shards):06d}.{shard_class.suffix}"
        sync_and_rename(temporary, path)
        record = {**make_file_record(path), "images": shard.images}
        state = {"record": record, "first": shard_start, "stop": stop, "errors": shard_errors}
        write_recorded_file(out / UNFINISHED_FOLDER / f"{path.name}.npy", encode_npy(index_entries[-1]))
        write_recorded_file(out / UNFINISHED_FOLDER / f"{path.name}.json", json.dumps(state).encode())
        shards.append(record)

    with closing(encoding.iterate_samples(next_sample)) as stream:
        for sample, stored in stream:
            if isinstance(stored, StoredImage):
                item = sample, stored, split.labels[sample], strip_data_folder(data, split.name(sample))
                if shard is None or not shard.add(*item):
                    if shard:
                        close_shard(sample)
                        errors |= shard_errors
                        shard_start, shard_errors = sample, {}
                    shard = shard_class(temporary, data.classes, plan.shard_size)
                    shard.add(*item)
            else:
                shard_errors[sample] = stored.message
            if listener and ((sample + 1) % 64 == 0 or sample + 1 == len(split)):
                listener.progress(f"packing {name}", sample + 1, len(split), f"{len(shards) + 1} shards")
    if shard:
        close_shard(len(split))
    errors |= shard_errors
    if not shards:
        raise DataError(
            f"none of {len(split)} images of {name} can be read; the first: {next(iter(errors.values()), '')}"
        )
    return write_split_index(
        out, name, data=data, plan=plan, shards=shards, index_entries=index_entries, errors=errors
    ), errors


def load_finished_shards(out: Path, name: str) -> tuple[list[dict[str, Any]], list[np.ndarray], dict[int, str], int]:
    """Load the complete shards of an interrupted split. Return their records, their index entries ((n,) of dtype
    `PACK_INDEX_DTYPE` each), the read errors, and the sample to continue with."""
    shards: list[dict[str, Any]] = []
    index_entries: list[np.ndarray] = []
    errors: dict[int, str] = {}
    next_sample = 0
    while True:
        records = sorted((out / UNFINISHED_FOLDER).glob(f"{name}-{len(shards):06d}.*.json"))
        try:
            state = json.loads(records[0].read_text("utf-8"))
            entries = np.load(records[0].with_suffix(".npy"), allow_pickle=False)
            is_intact = make_file_record(out / records[0].stem)["sha256"] == state["record"]["sha256"]
            if not is_intact or state["first"] != next_sample or entries.dtype != PACK_INDEX_DTYPE:
                return shards, index_entries, errors, next_sample
        except (IndexError, OSError, ValueError, KeyError):
            return shards, index_entries, errors, next_sample
        shards.append(state["record"])
        index_entries.append(entries)
        errors |= {int(sample): message for sample, message in state["errors"].items()}
        next_sample = state["stop"]


def write_split_index(
    out: Path,
    name: str,
    data: Data,
    plan: PackPlan,
    shards: list[dict[str, Any]],
    index_entries: list[np.ndarray],
    errors: dict[int, str],
) -> dict[str, Any]:
    """Write the index files of a split next to its shards, from the index entries of each shard, (n,) of dtype
    `PACK_INDEX_DTYPE`. Remove files of an earlier attempt. Return the split's entry in `pack.json`."""
    split = data.splits[name]
    for entry in out.glob(f"{name}-*"):
        if entry.name not in {shard["file"] for shard in shards}:
            entry.unlink()
    files = {}
    if plan.form in ARRAY_PACK_FORMS:
        index = np.concatenate(index_entries)
        samples = index["shard"].copy()
        index["shard"] = np.repeat(np.arange(len(index_entries)), [len(entries) for entries in index_entries])
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
            {
                "id": strip_data_folder(data, split.name(bad_sample)),
                "reason": strip_data_folder(data, errors[bad_sample]),
            }
            for bad_sample in sorted(errors)
        ],
        "shards": shards,
        "files": files,
    }
