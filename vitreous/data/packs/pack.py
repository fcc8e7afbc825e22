"""A data set as shards made for training: every picture decoded and scaled once, in files that anybody can read.

The bytes are a function of the data and the options alone, whoever decodes. A pack that was interrupted goes on behind
its last whole shard when the same command is given again.
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

from vitreous.cores import default_workers
from vitreous.data.layouts.packed import DOCUMENT, ROW, UNFINISHED, VERSION, describe, is_pack
from vitreous.data.loader import in_workers
from vitreous.data.packs.shards import Encoder, PixelShard, Stored, TarShard, npy_bytes, record, write_record
from vitreous.data.screen import refuse
from vitreous.data.sources import open_data
from vitreous.data.split import Data, Files, Split
from vitreous.disk import publish
from vitreous.errors import DataError, ResourceError, UsageError, printable
from vitreous.progress import Listener

CHUNK = 16  # pictures that a worker sends at a time
PROBED = 64  # pictures whose size stands for all, before any is written
SPARE = 1.1  # of the bytes that they promise
SHARD = 256 * 2**20
INSTRUCTIONS = {
    "tar": "WebDataset archives. Of each sample: NUMBER.jpg or NUMBER.png, the picture; NUMBER.cls, the position of "
    "its class in "
    "`classes` (none where images have several); NUMBER.json, its id in the source and the name or names of its "
    "classes.",
    "uint8": "import json, numpy\n"
    "pack = json.load(open('pack.json'))\n"
    "split = pack['splits']['train']\n"
    "row = numpy.load(split['files']['index']['file'])[0]  # of the first picture\n"
    "shard = numpy.load(split['shards'][row['shard']]['file'], mmap_mode='r').reshape(-1)\n"
    "size = row['height'], row['width'], row['channels']\n"
    "pixels = shard[row['offset'] : row['offset'] + size[0] * size[1] * size[2]].reshape(size)\n"
    "label = pack['classes'][row['label']] if row['label'] >= 0 else numpy.load(split['files']['labels']['file'])[0]\n"
    "name = open(split['files']['ids']['file'], encoding='utf-8').read().split('\\n')[0]\n",
}


@dataclass(frozen=True)
class Plan:
    """What the bytes of a pack depend on. `source` is the fingerprint of the data, `short_side` in pixels, `shard_size`
    in bytes."""

    form: Literal["tar", "uint8"] = "tar"
    short_side: int = 256
    quality: int = 90
    lossless: bool = False
    shard_size: int = SHARD
    source: str = ""

    def __post_init__(self) -> None:
        if self.form not in INSTRUCTIONS:
            raise UsageError(f"no pack of the form {self.form}", f"there are {', '.join(INSTRUCTIONS)}")
        if not 1 <= self.quality <= 100:
            raise UsageError(f"a quality of {self.quality} cannot be", "JPEG has 1 to 100")
        if self.short_side < 1 or self.shard_size < 1:
            raise UsageError("the short side and the size of a shard are at least 1")


def pack(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    plan: Plan = Plan(),
    bad_images: Literal["stop", "skip"] = "stop",
    workers: int | None = None,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Write a data set as shards into the folder `out`; returns what it holds, as `pack.json` has it, and its folder.

    Splits, labels, class names and the ids of samples are kept; so are the splits that were drawn on opening. Pictures
    that cannot be read are named: at the end, with a DataError, or with `skip` in the document. Shards that are whole
    already are kept, if plan and source are the same. Raises UsageError for a folder that holds something else,
    ResourceError where the disk is too small.
    """
    data = open_data(source)
    plan = replace(plan, source=fingerprint(data))
    out = Path(out)
    if os.path.isdir(source) and out.resolve().is_relative_to(Path(source).resolve()):
        raise UsageError(f"{printable(out)} lies inside of {printable(source)}", "use an --out beside it")
    if is_pack(out) and (out / DOCUMENT).exists():  # it is written last
        shutil.rmtree(out / UNFINISHED, ignore_errors=True)
        return finished_before(out, plan)
    prepare_folder(out, plan)
    if data.groups is not None and listener:
        listener.note("the groups of images are not kept, only the splits that were drawn by them")
    count = default_workers() if workers is None else workers
    require_space(out, data, plan)
    records, bad = {}, {}
    for name in data.splits:
        records[name], unreadable = pack_split(out, name, data, plan, count, listener)
        bad |= {(name, sample): message for sample, message in unreadable.items()}
    if bad and bad_images == "stop":
        total = sum(map(len, data.splits.values()))
        raise refuse({number: DataError(message) for number, message in enumerate(bad.values())}, total)
    document = {
        "vitreous_pack": VERSION,
        **asdict(plan),
        "how_to_read": INSTRUCTIONS[plan.form],
        "several": data.multilabel,
        "drawn": data.whole is not None,
        "splits": records,
        "classes": list(data.classes),
        "titles": data.titles,
    }
    write_record(out / DOCUMENT, json.dumps(document, indent=1, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    shutil.rmtree(out / UNFINISHED)
    return {"out": os.fspath(out), **document}


def fingerprint(data: Data) -> str:
    """The data's own fingerprint, and the sizes and times of its files, where it is made of files."""
    digest = hashlib.sha256(data.fingerprint().encode())
    for split in data.splits.values():
        stamp(split, digest)
    return digest.hexdigest()


def stamp(split: Split, digest: Any) -> None:
    """Feed a digest of hashlib with the sizes and times of a split's files, where it is made of files."""
    if isinstance(split, Files):
        for path in split.paths:
            try:
                status = os.stat(path)
                digest.update(b"%d %d\n" % (status.st_size, status.st_mtime_ns))
            except OSError:
                digest.update(b"none\n")


def prepare_folder(out: Path, plan: Plan) -> None:
    """Prepare the folder of a pack, or find that it was begun with the same plan. Raises UsageError for any other
    folder."""
    state, text = out / UNFINISHED, json.dumps(asdict(plan))
    if (state / "plan.json").is_file():
        if (before := (state / "plan.json").read_text("utf-8")) != text:
            try:
                known = json.loads(before)
            except ValueError:
                known = {}
            other = [name.replace("_", " ") for name, value in asdict(plan).items() if known.get(name) != value]
            raise UsageError(
                f"{printable(out)} was begun with another {' and '.join(other)}",
                "use another --out, or remove that folder",
            )
    elif out.exists() and (not out.is_dir() or any(entry != state for entry in out.iterdir())):
        raise UsageError(f"{printable(out)} exists and is not empty", "use another --out")
    for torn in (*out.glob("*.part"), *out.rglob(".*.tmp")):
        torn.unlink()
    state.mkdir(parents=True, exist_ok=True)
    write_record(state / "plan.json", text.encode())


def finished_before(out: Path, plan: Plan) -> dict[str, Any]:
    """The document of a pack that is there already, every file checked. Raises UsageError for another plan, DataError
    for damage."""
    document = describe(out)
    other = [name.replace("_", " ") for name, value in asdict(plan).items() if document.get(name) != value]
    if other:
        raise UsageError(f"{printable(out)} is a pack of another {' and '.join(other)}", "use another --out")
    for split in document["splits"].values():
        for known in (*split["shards"], *split["files"].values()):
            path = out / known["file"]
            if not path.is_file() or record(path)["sha256"] != known["sha256"]:
                raise DataError(
                    f"{printable(path)} is not there as it was written", "remove the folder, and pack again"
                )
    return {"out": os.fspath(out), **document}


def require_space(out: Path, data: Data, plan: Plan) -> None:
    """Raise ResourceError where the disk has not the space that a pack will take, as some of its pictures tell."""
    total = 0
    for split in data.splits.values():
        rows = np.linspace(0, len(split) - 1, min(PROBED, len(split))).astype(int)
        reader = encoder(split, plan)
        sizes = [len(stored.content) for _, stored in (reader[int(row)] for row in rows) if isinstance(stored, Stored)]
        total += math.ceil(np.mean(sizes) * len(split) * SPARE) if sizes else 0
    free = shutil.disk_usage(out).free + sum(entry.stat().st_size for entry in out.iterdir() if entry.is_file())
    if total > free:
        raise ResourceError(
            f"a pack of {total:,} bytes does not fit on the disk of {printable(out)}, which has {free:,}",
            "free some space",
        )


def portable_name(data: Data, name: str) -> str:
    """What a sample is called, without the folder that the data are in: a pack may go to another machine."""
    for home in (data.name, os.path.dirname(data.name)):
        if home and name.startswith(f"{home}/"):
            return name[len(home) + 1 :]
    return name


def encoder(split: Split, plan: Plan) -> Encoder:
    """What turns the samples of a split into what is stored."""
    return Encoder(split, plan.form, plan.short_side, plan.quality, plan.lossless)


def pack_split(
    out: Path, name: str, data: Data, plan: Plan, workers: int, listener: Listener | None
) -> tuple[dict[str, Any], dict[int, str]]:
    """Write one split. Returns what `pack.json` says of it, and why samples cannot be read."""
    split = data.splits[name]
    shards, rows, bad, at = load_finished_shards(out, name)
    kind = TarShard if plan.form == "tar" else PixelShard
    shard, first, temporary, read = None, at, out / "shard.part", at
    unread: dict[int, str] = {}

    def close_shard(stop: int) -> None:
        """Publish the open shard, which has the samples [first, stop)."""
        assert shard is not None
        rows.append(shard.close())
        path = out / f"{name}-{len(shards):06d}.{kind.suffix}"
        publish(temporary, path)
        held = {**record(path), "images": shard.images}
        state = {"record": held, "first": first, "stop": stop, "unread": unread}
        write_record(out / UNFINISHED / f"{path.name}.npy", npy_bytes(rows[-1]))
        write_record(out / UNFINISHED / f"{path.name}.json", json.dumps(state).encode())
        shards.append(held)

    with closing(encode_samples(encoder(split, plan), at, len(split), workers)) as stream:
        for sample, stored in stream:
            if isinstance(stored, Stored):
                words = split.labels[sample], portable_name(data, split.name(sample))
                if shard and shard.size + shard.room(sample, stored, *words) > plan.shard_size:
                    close_shard(sample)
                    bad |= unread
                    shard, first, unread = None, sample, {}
                if not shard:
                    shard = kind(temporary, data.classes)
                shard.add(sample, stored, *words)
            else:
                unread[sample] = stored.message
            read = sample + 1
            if listener and (read % 64 == 0 or read == len(split)):
                listener.progress(f"packing {name}", read, len(split), f"{len(shards) + 1} shards")
    if shard:
        close_shard(len(split))
    bad |= unread
    if not shards:
        raise DataError(f"none of {len(split)} images of {name} can be read; the first: {next(iter(bad.values()), '')}")
    return write_index(out, name, data, plan, shards, rows, bad), bad


def encode_samples(reader: Encoder, start: int, stop: int, workers: int) -> Generator[tuple[int, Stored | DataError]]:
    """Samples [start, stop) in order, each with what is stored of it or why there is none. Raises ResourceError for a
    lost worker."""
    places = (range(low, min(low + CHUNK, stop)) for low in range(start, stop, CHUNK))
    for rows in in_workers(reader, places, workers, list, prefetch=4):
        yield from rows


def load_finished_shards(out: Path, name: str) -> tuple[list[dict[str, Any]], list[np.ndarray], dict[int, str], int]:
    """The whole shards of a split that are there, their rows, what could not be read, and the sample to go on with."""
    shards: list[dict[str, Any]] = []
    rows: list[np.ndarray] = []
    bad: dict[int, str] = {}
    at = 0
    while True:
        records = sorted((out / UNFINISHED).glob(f"{name}-{len(shards):06d}.*.json"))
        try:
            state = json.loads(records[0].read_text("utf-8"))
            held = np.load(records[0].with_suffix(".npy"), allow_pickle=False)
            same = record(out / records[0].stem)["sha256"] == state["record"]["sha256"]
        except (IndexError, OSError, ValueError, KeyError):
            return shards, rows, bad, at
        if not same or state["first"] != at or held.dtype != ROW:
            return shards, rows, bad, at
        shards.append(state["record"])
        rows.append(held)
        bad |= {int(sample): message for sample, message in state["unread"].items()}
        at = state["stop"]


def write_index(
    out: Path,
    name: str,
    data: Data,
    plan: Plan,
    shards: list[dict[str, Any]],
    rows: list[np.ndarray],
    bad: dict[int, str],
) -> dict[str, Any]:
    """Write what a split needs beside its shards, and remove what an earlier try may have left. Returns what is said of
    it."""
    split = data.splits[name]
    for entry in out.glob(f"{name}-*"):
        if entry.name not in {shard["file"] for shard in shards}:
            entry.unlink()
    files = {}
    if plan.form == "uint8":
        index = np.concatenate(rows)
        samples = index["shard"].copy()
        index["shard"] = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
        labels = split.labels[samples]
        if labels.ndim == 2:
            files["labels"] = write_record(out / f"{name}.labels.npy", npy_bytes(labels.astype(np.uint8)))
        else:
            index["label"] = labels
        files["index"] = write_record(out / f"{name}.index.npy", npy_bytes(index))
        ids = "".join(f"{printable(portable_name(data, split.name(sample)))}\n" for sample in samples.tolist())
        files["ids"] = write_record(out / f"{name}.ids.txt", ids.encode("utf-8", "replace"))
    return {
        "images": sum(shard["images"] for shard in shards),
        "unreadable": [
            {"id": portable_name(data, split.name(row)), "why": portable_name(data, bad[row])} for row in sorted(bad)
        ],
        "shards": shards,
        "files": files,
    }
