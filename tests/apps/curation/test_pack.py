"""Packs: preserved data, byte-identical output for any worker count, and resumption after a kill."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections import namedtuple

import numpy as np
import pytest
from PIL import Image

from tests.conftest import make_folder, make_image, parse_json_output, run_cli
from tests.data.resume import NUM_STARTS, assert_continues
from vitreous.apps.curation import pack as packing
from vitreous.apps.curation.pack import READING_INSTRUCTIONS, PackPlan, pack_dataset
from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.data.layouts.packed import map_npy_file
from vitreous.data.sources import open_data
from vitreous.data.split import decode_sample
from vitreous.data.stores.tar import open_archive_cached
from vitreous.errors import DataError, ResourceError, UsageError

PACK_FORMATS = ("tar", "uint8")


@pytest.fixture(autouse=True)
def isolated_cache(tmp_path, monkeypatch):
    """Give each test a separate cache, and close files of other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    map_npy_file.cache_clear()
    open_archive_cached.cache_clear()


@pytest.fixture
def photos(tmp_path):
    """Return JPEGs and PNGs of several sizes in two splits of two classes, including EXIF-rotated and grey images."""
    root = tmp_path / "photos"
    for split, count in (("train", 8), ("test", 3)):
        for label in range(2):
            home = root / split / ["ant", "bée"][label]
            home.mkdir(parents=True)
            for n in range(count):
                image = make_image(100 * label + n + 1000 * (split == "test"), (24 + n, 20 + 2 * n))
                image.save(home / f"{n}.{['png', 'jpg'][n % 2]}")
    rotated = make_image(5, (30, 20))
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated.save(root / "train" / "ant" / "rotated.jpg", exif=exif)
    make_image(6, (30, 20)).convert("L").save(root / "train" / "ant" / "grey.png")
    return root


def read_files(home):
    return {path.name: path.read_bytes() for path in sorted(home.iterdir()) if path.is_file()}


def list_sample_names(split, home=""):
    """Return the sample names, relative to their folder."""
    return [split.name(row).removeprefix(f"{home}/") for row in range(len(split))]


def read_pack_document(out):
    return json.loads((out / "pack.json").read_text("utf-8"))


@pytest.mark.parametrize("form", PACK_FORMATS)
def test_packing_preserves_splits_labels_classes_ids_and_pixels(photos, tmp_path, form):
    source = open_data(photos)
    pack_dataset(photos, tmp_path / "out", PackPlan(form, short_side=1000), workers=0)
    data = open_data(tmp_path / "out")
    assert data.classes == source.classes == ("ant", "bée") and list(data.splits) == list(source.splits) == [
        "train",
        "val",
        "test",
    ]
    for name, split in source.splits.items():
        packed_split = data.splits[name]
        assert np.array_equal(packed_split.labels, split.labels) and packed_split.labels.dtype == split.labels.dtype
        for row in range(len(split)):
            assert np.array_equal(decode_sample(packed_split, row, 3), decode_sample(split, row, 3))
            assert np.array_equal(decode_sample(packed_split, row, 1), decode_sample(split, row, 1))
    assert (
        len(data.full_train_split) == len(source.full_train_split)
        and np.bincount(data.full_train_split.labels).tolist() == np.bincount(source.full_train_split.labels).tolist()
    )
    if form == "uint8":
        assert list_sample_names(data.splits["train"]) == list_sample_names(source.splits["train"], photos)
        assert sorted(list_sample_names(data.full_train_split)) == sorted(
            list_sample_names(source.full_train_split, photos)
        )
        assert data.splits["train"].raw(0).dtype == np.uint8
        grey = [
            data.full_train_split.raw(row).ndim
            for row in range(len(data.full_train_split))
            if "grey" in data.full_train_split.name(row)
        ]
        assert grey == [2]


def test_small_jpeg_and_png_files_are_copied_and_others_resized(photos, tmp_path):
    pack_dataset(photos, tmp_path / "out", PackPlan("tar", 30), workers=0)
    source, data = open_data(photos), open_data(tmp_path / "out")
    num_copied, suffixes = 0, set()
    for name, split in source.splits.items():
        for row in range(len(split)):
            before, after = split.raw(row), data.splits[name].raw(row)
            source_image, packed_image = decode_sample(split, row, 3), decode_sample(data.splits[name], row, 3)
            suffixes.add(data.splits[name].name(row)[-4:])
            if min(source_image.size) <= 30 and "rotated" not in split.name(row):
                assert before == after
                num_copied += 1
                continue
            expected = source_image
            if min(source_image.size) > 30:
                share = 30 / min(source_image.size)
                size = round(source_image.width * share), round(source_image.height * share)
                buffer = io.BytesIO()
                source_image.resize(size, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
                expected = decode_to_pillow(buffer.getvalue())
                assert min(size) == 30
            assert np.array_equal(packed_image, expected)
    assert num_copied > 5 and suffixes == {".jpg", ".png"}


def test_lossless_packs_keep_lossless_images_exact(photos, tmp_path):
    pack_dataset(photos, tmp_path / "out", PackPlan("tar", 8, lossless=True), workers=0)
    pack_dataset(photos, tmp_path / "raw", PackPlan("uint8", 8), workers=0)
    exact, pixels = open_data(tmp_path / "out"), open_data(tmp_path / "raw")
    for row in range(len(exact.splits["train"])):
        png = exact.splits["train"].name(row).endswith("png")
        assert png == pixels.splits["train"].name(row).endswith("png")
        is_equal = np.array_equal(
            decode_sample(exact.splits["train"], row, 3), decode_sample(pixels.splits["train"], row, 3)
        )
        assert is_equal == png


@pytest.mark.parametrize("form", PACK_FORMATS)
def test_packs_are_byte_identical_for_any_number_of_workers(photos, tmp_path, form):
    for count in (0, 1, 2):
        pack_dataset(photos, tmp_path / str(count), PackPlan(form, 24, shard_size=9000), workers=count)
    first = read_files(tmp_path / "0")
    assert len(first) > 8
    assert read_files(tmp_path / "1") == first == read_files(tmp_path / "2")


@pytest.mark.parametrize("form", PACK_FORMATS)
def test_shards_have_the_requested_size_and_a_checksum(photos, tmp_path, form):
    import hashlib

    out = tmp_path / "out"
    result = pack_dataset(photos, out, PackPlan(form, 24, shard_size=12_000), workers=0)
    document = read_pack_document(out)
    assert result == {"out": str(out), **document} and not (out / ".unfinished").exists()
    for split in document["splits"].values():
        assert split["images"] == sum(shard["images"] for shard in split["shards"])
        for file in (*split["shards"], *split["files"].values()):
            content = (out / file["file"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == file["sha256"] and len(content) == file["bytes"]
        assert all(shard["bytes"] <= 12_000 + 10_240 * (form == "tar") for shard in split["shards"])
    assert len(document["splits"]["train"]["shards"]) > 2


def test_images_of_equal_size_are_one_numpy_array(tmp_path):
    make_folder(tmp_path / "x", {"train": 5, "val": 2})
    pack_dataset(tmp_path / "x", tmp_path / "out", PackPlan("uint8"), workers=0)
    array = np.load(tmp_path / "out" / "train-000000.npy", mmap_mode="r")
    assert array.shape == (15, 16, 16, 3) and array.dtype == np.uint8
    source = open_data(tmp_path / "x").splits["train"]
    assert all(np.array_equal(array[row], decode_sample(source, row, 3)) for row in range(15))


def test_the_how_to_read_snippet_works(photos, tmp_path, monkeypatch):
    pack_dataset(photos, tmp_path / "out", PackPlan("uint8", 24), workers=0)
    monkeypatch.chdir(tmp_path / "out")
    namespace = {}
    exec(read_pack_document(tmp_path / "out")["reading_instructions"], namespace)
    first = open_data(tmp_path / "out").splits["train"]
    assert (
        np.array_equal(np.squeeze(namespace["pixels"]), first.raw(0))
        and namespace["label"] == "ant"
        and namespace["name"] == first.name(0)
    )
    assert read_pack_document(tmp_path / "out")["reading_instructions"] == READING_INSTRUCTIONS["uint8"]


def test_tar_packs_are_readable_by_webdataset(photos, tmp_path):
    wds = pytest.importorskip("webdataset")
    pack_dataset(photos, tmp_path / "out", PackPlan("tar", 24, shard_size=20_000), workers=0)
    shards = [
        str(tmp_path / "out" / shard["file"])
        for shard in read_pack_document(tmp_path / "out")["splits"]["train"]["shards"]
    ]
    rows = list(wds.WebDataset(shards, shardshuffle=False).decode("pil"))
    source = open_data(photos).splits["train"]
    assert [row["cls"] for row in rows] == source.labels.tolist()
    assert [row["json"]["id"] for row in rows] == list_sample_names(source, photos)
    assert [row["json"]["label"] for row in rows] == [["ant", "bée"][label] for label in source.labels]
    packed_split = open_data(tmp_path / "out").splits["train"]
    for n, row in enumerate(rows):
        packed_image = row.get("jpg") or row["png"]
        assert np.array_equal(np.asarray(packed_image.convert("RGB")), decode_sample(packed_split, n, 3))


@pytest.mark.parametrize("form", PACK_FORMATS)
def test_multilabel_data_and_numeric_class_names_are_packed(tmp_path, form):
    """Numeric names are in natural order (2 before 10), which differs from their class indices."""
    for n in range(24):
        make_image(n).save(tmp_path / f"{n}.png")
    cells = ["10|2", "2", "", "33"]
    (tmp_path / "x.csv").write_text("path,label\n" + "".join(f"{n}.png,{cells[n % 4]}\n" for n in range(24)))
    (tmp_path / "y.csv").write_text(
        "path,label\n" + "".join(f"{n}.png,{['10', '2', '33'][n % 3]}\n" for n in range(24))
    )
    for name in ("x", "y"):
        source = open_data(tmp_path / f"{name}.csv")
        pack_dataset(tmp_path / f"{name}.csv", tmp_path / name, PackPlan(form), workers=0)
        data = open_data(tmp_path / name)
        assert data.classes == ("2", "10", "33") and data.multilabel == source.multilabel == (name == "x")
        for split in ("train", "val"):
            assert np.array_equal(data.splits[split].labels, source.splits[split].labels)
            assert data.splits[split].labels.dtype == source.splits[split].labels.dtype


@pytest.mark.parametrize("form", PACK_FORMATS)
def test_unreadable_images_are_listed_and_skipped_on_request(photos, tmp_path, form):
    (photos / "train" / "ant" / "3.jpg").write_bytes(b"<html>")
    (photos / "train" / "bée" / "7.jpg").write_bytes(b"")
    out, plan = tmp_path / "out", PackPlan(form, 24, shard_size=9000)
    with pytest.raises(DataError) as error:
        pack_dataset(photos, out, plan, workers=2)
    assert (
        "2 of 24 images cannot be read" in str(error.value)
        and "3.jpg" in str(error.value)
        and "7.jpg" in str(error.value)
    )
    with pytest.raises(DataError, match="unfinished pack"):
        open_data(out)
    shards = {name: content for name, content in read_files(out).items() if name.endswith((".tar", ".npy"))}
    pack_dataset(photos, out, plan, "skip", workers=0)
    assert {name: read_files(out)[name] for name in shards} == shards
    data, source = open_data(out), open_data(photos)
    unreadable = [entry for split in read_pack_document(out)["splits"].values() for entry in split["unreadable"]]
    assert sorted(os.path.basename(entry["id"]) for entry in unreadable) == ["3.jpg", "7.jpg"] and all(
        entry["reason"].startswith(entry["id"]) for entry in unreadable
    )
    assert len(data.full_train_split) == len(source.full_train_split) - 2
    for name, split in source.splits.items():
        readable = [
            row
            for row, sample_name in enumerate(list_sample_names(split, photos))
            if sample_name not in {entry["id"] for entry in unreadable}
        ]
        assert data.splits[name].labels.tolist() == split.labels[readable].tolist()


@pytest.mark.parametrize("form", PACK_FORMATS)
def test_a_dataset_without_readable_images_is_rejected(tmp_path, form):
    for n in range(6):
        (tmp_path / "x" / "ab"[n % 2]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / "ab"[n % 2] / f"{n}.jpg").write_bytes(b"<html>")
    with pytest.raises(DataError, match="none of 6 images of train can be read"):
        pack_dataset(tmp_path / "x", tmp_path / "out", PackPlan(form), "skip", workers=0)


class SimulatedKill(BaseException):
    """Simulates SIGKILL: nothing handles it."""


@pytest.mark.parametrize("form", PACK_FORMATS)
def test_a_pack_killed_at_any_step_resumes_byte_identical(photos, tmp_path, form, monkeypatch):
    """Killed before each `os.replace`, which publishes a file, and before the last step."""
    plan = PackPlan(form, 24, shard_size=14_000)
    pack_dataset(photos, tmp_path / "whole", plan, workers=0)
    expected = read_files(tmp_path / "whole")
    replace, calls = os.replace, []

    def replace_or_kill(*paths):
        calls.append(paths)
        if len(calls) == count:
            raise SimulatedKill
        replace(*paths)

    monkeypatch.setattr(os, "replace", replace_or_kill)
    monkeypatch.setattr(packing, "require_disk_space", lambda *arguments: None)
    decoded, encode_sample = [], packing.SampleEncoder.encode_sample
    count, stopped = 1, 0
    while True:
        calls.clear()
        decoded.clear()
        out = tmp_path / f"out{count}"
        try:
            pack_dataset(photos, out, plan, workers=0)
        except SimulatedKill:
            stopped += 1
        else:
            break
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            patch.setattr(packing, "require_disk_space", lambda *arguments: None)
            patch.setattr(
                packing.SampleEncoder,
                "encode_sample",
                lambda self, sample: decoded.append(sample) or encode_sample(self, sample),
            )
            if (out / ".unfinished" / "plan.json").exists():
                (out / "shard.part").write_bytes(b"torn")
            pack_dataset(photos, out, plan, workers=0)
        assert read_files(out) == expected, count
        assert stopped < 8 or len(decoded) < 24
        shutil.rmtree(out)
        count += 1
    assert stopped > 15


@pytest.mark.slow
def test_a_killed_process_leaves_a_resumable_pack(tmp_path):
    make_folder(tmp_path / "x", {"train": 60, "val": 2}, size=(64, 64))
    out, plan = tmp_path / "out", PackPlan("uint8", 60, shard_size=100 * 1024)
    command = [
        "data",
        "pack",
        str(tmp_path / "x"),
        "--to",
        "uint8",
        "--short-side",
        "60",
        "--shard-size",
        "100K",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "vitreous", *command, "--workers", "1"], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (out / "train-000002.npy").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert (out / "train-000002.npy").exists() and not (out / "pack.json").exists()
    modified_time = (out / "train-000001.npy").stat().st_mtime_ns
    assert pack_dataset(tmp_path / "x", out, plan, workers=0)["splits"]["train"]["images"] == 180
    assert (out / "train-000001.npy").stat().st_mtime_ns == modified_time
    pack_dataset(tmp_path / "x", tmp_path / "whole", plan, workers=0)
    assert read_files(out) == read_files(tmp_path / "whole")


def test_a_kill_after_the_last_file_leaves_a_complete_pack(photos, tmp_path, monkeypatch):
    def kill_run(*arguments, **options):
        raise SimulatedKill

    with monkeypatch.context() as patch, pytest.raises(SimulatedKill):
        patch.setattr(shutil, "rmtree", kill_run)
        pack_dataset(photos, tmp_path / "out", PackPlan("uint8"), workers=0)
    (tmp_path / "out" / ".unfinished" / "plan.json").unlink()
    assert len(open_data(tmp_path / "out").splits) == 3
    pack_dataset(photos, tmp_path / "out", PackPlan("uint8"), workers=0)
    assert not (tmp_path / "out" / ".unfinished").exists()


def test_resuming_rejects_changed_plans_sources_and_shards(photos, tmp_path):
    out, plan = tmp_path / "out", PackPlan("uint8", 24, shard_size=9000)
    pack_dataset(photos, out, plan, workers=0)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert pack_dataset(photos, out, plan, workers=0)["splits"] == read_pack_document(out)["splits"]
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    with pytest.raises(UsageError, match="another form and short side"):
        pack_dataset(photos, out, PackPlan("tar", 25, shard_size=9000))
    first = out / "train-000000.npy"
    content = first.read_bytes()
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="train-000000"):
        pack_dataset(photos, out, plan)
    first.write_bytes(content)
    make_image(77).save(photos / "train" / "ant" / "0.png")
    with pytest.raises(UsageError, match="another source"):
        pack_dataset(photos, out, plan)


def test_resuming_reuses_only_complete_shards_of_the_same_source(photos, tmp_path, monkeypatch):
    out, plan = tmp_path / "out", PackPlan("uint8", 24, shard_size=9000)
    pack_dataset(photos, tmp_path / "whole", plan, workers=0)
    with monkeypatch.context() as patch, pytest.raises(SimulatedKill):
        patch.setattr(
            packing, "write_split_index", lambda *arguments, **options: (_ for _ in ()).throw(SimulatedKill())
        )
        pack_dataset(photos, out, plan, workers=0)
    second = out / "train-000001.npy"
    second.write_bytes(second.read_bytes()[:-1] + b"\0\0")
    with pytest.raises(UsageError, match="started with another short side"):
        pack_dataset(photos, out, PackPlan("uint8", 23, shard_size=9000), workers=0)
    pack_dataset(photos, out, plan, workers=0)
    assert read_files(out) == read_files(tmp_path / "whole")
    shutil.rmtree(out)
    with monkeypatch.context() as patch, pytest.raises(SimulatedKill):
        patch.setattr(
            packing, "write_split_index", lambda *arguments, **options: (_ for _ in ()).throw(SimulatedKill())
        )
        pack_dataset(photos, out, plan, workers=0)
    (photos / "train" / "ant" / "0.png").unlink()
    with pytest.raises(UsageError, match="started with another source"):
        pack_dataset(photos, out, plan, workers=0)


def test_nonempty_folders_and_full_disks_are_rejected(photos, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="exists and is not empty"):
        pack_dataset(photos, tmp_path / "full")
    assert os.listdir(tmp_path / "full") == ["thesis.tex"]
    with pytest.raises(UsageError, match="is inside"):
        pack_dataset(photos, photos / "packed")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(10, 0, 10))
    with pytest.raises(ResourceError, match=r"a pack of [\d,]{6,} bytes does not fit") as error:
        pack_dataset(photos, tmp_path / "out", PackPlan("uint8"), workers=0)
    assert error.value.code == 6
    for options in ({"quality": 0}, {"short_side": 0}, {"shard_size": 0}, {"form": "zip"}):
        with pytest.raises(UsageError):
            PackPlan(**options)


def edit_json(record, change):
    """Return a function that edits a JSON document or a file that it refers to."""
    document = json.loads(record.read_text("utf-8"))
    change(document)
    record.write_text(json.dumps(document))


DOCUMENT_EDITS = {
    "a file outside the pack": lambda d: d["splits"]["train"]["shards"][0].update(file="../../etc/passwd"),
    "a parent folder as file": lambda d: d["splits"]["train"]["files"]["index"].update(file=".."),
    "a later version": lambda d: d.update(vitreous_pack=2),
    "no splits": lambda d: d.pop("splits"),
    "another form": lambda d: d.update(form="zip"),
    "fewer classes": lambda d: d["classes"].pop(),
    "another split": lambda d: d["splits"].update(other=d["splits"]["train"]),
    "another size": lambda d: d["splits"]["train"]["shards"][0].update(bytes=5),
    "one shard fewer": lambda d: d["splits"]["train"]["shards"].pop(),
}


@pytest.mark.parametrize("edit_name", DOCUMENT_EDITS)
def test_damaged_documents_are_rejected(photos, tmp_path, edit_name):
    pack_dataset(photos, tmp_path / "out", PackPlan("uint8", 24, shard_size=9000), workers=0)
    edit_json(tmp_path / "out" / "pack.json", DOCUMENT_EDITS[edit_name])
    with pytest.raises(DataError):
        open_data(tmp_path / "out")


@pytest.mark.parametrize(
    "field, value",
    [("offset", -1), ("offset", 10**9), ("height", 10**6), ("height", 0), ("channels", 2), ("shard", 99), ("label", 7)],
)
def test_an_index_that_does_not_match_its_shards_is_rejected(photos, tmp_path, field, value):
    pack_dataset(photos, tmp_path / "out", PackPlan("uint8", 24, shard_size=9000), workers=0)
    path = tmp_path / "out" / "train.index.npy"
    rows = np.load(path)
    rows[field][1] = value
    np.save(path, rows)
    with pytest.raises(DataError, match="does not match its shards"):
        open_data(tmp_path / "out")


def test_a_pickled_index_is_never_loaded(photos, tmp_path):
    pack_dataset(photos, tmp_path / "out", PackPlan("uint8", 24), workers=0)
    path = tmp_path / "out" / "train.index.npy"
    np.save(path, np.array([{"a": 1}] * 30, dtype=object), allow_pickle=True)
    edit_json(
        tmp_path / "out" / "pack.json",
        lambda d: d["splits"]["train"]["files"]["index"].update(bytes=path.stat().st_size),
    )
    with pytest.raises(DataError, match=r"train\.index\.npy is damaged"):
        open_data(tmp_path / "out")


def test_in_memory_and_archive_sources_are_packed(tmp_path):
    pack_dataset("digits", tmp_path / "digits", PackPlan("uint8"), workers=0)
    data, source = open_data(tmp_path / "digits"), open_data("digits")
    for name, split in source.splits.items():
        assert np.array_equal(data.splits[name].labels, split.labels)
        assert all(np.array_equal(data.splits[name].raw(row), split.raw(row)) for row in range(0, len(split), 50))
    assert np.load(tmp_path / "digits" / "train-000000.npy").shape == (1439, 8, 8, 1)
    pack_dataset(tmp_path / "digits", tmp_path / "tar", PackPlan("tar"), workers=0)
    reloaded = open_data(tmp_path / "tar")
    for name, split in source.splits.items():
        assert all(
            np.array_equal(decode_to_pillow(reloaded.splits[name].raw(row), 1), split.raw(row))
            for row in range(0, len(split), 50)
        )


def test_the_command_line_prints_the_result(photos, tmp_path):
    out = tmp_path / "out"
    result = parse_json_output(
        run_cli("data", "pack", str(photos), "--out", str(out), "--short-side", "24", "--workers", "0", "--json")
    )
    assert result["splits"]["test"]["images"] == 6 and result["form"] == "tar" and result["out"] == str(out)
    with tarfile.open(out / "test-000000.tar") as tar:
        members = tar.getnames()
        assert members[:3] == ["000000000.cls", "000000000.png", "000000000.json"]
        assert all(member.mtime == 0 and member.uid == 0 for member in tar)
        Image.open(io.BytesIO(tar.extractfile(members[1]).read())).verify()
    rejected = run_cli("data", "pack", str(photos), "--out", str(tmp_path / "b"), "--shard-size", "1X")
    assert rejected.returncode == 2 and "is not a size" in rejected.stderr


@pytest.mark.parametrize("form", PACK_FORMATS)
@pytest.mark.parametrize("workers, starts", [(0, NUM_STARTS), (1, 4), (2, 4)])
def test_a_run_over_a_pack_continues_anywhere(photos, tmp_path, form, workers, starts):
    pack_dataset(photos, tmp_path / "out", PackPlan(form, 24, shard_size=9000), workers=0)
    assert_continues(lambda: open_data(tmp_path / "out").splits["train"], workers, starts)


@pytest.mark.slow
@pytest.mark.parametrize("form", PACK_FORMATS)
@pytest.mark.parametrize("workers", [1, 2])
def test_training_on_a_pack_resumes_at_fifty_steps_with_workers(photos, tmp_path, form, workers):
    test_a_run_over_a_pack_continues_anywhere(photos, tmp_path, form, workers, NUM_STARTS)


@pytest.mark.parametrize("form", ["tar", "uint8"])
def test_unlabelled_images_stay_unlabelled(tmp_path, form):
    (tmp_path / "flat").mkdir()
    for n in range(12):
        make_image(n, (20, 16)).save(tmp_path / "flat" / f"{n}.png")
    source = open_data(tmp_path / "flat")
    pack_dataset(tmp_path / "flat", tmp_path / "out", PackPlan(form=form), workers=0)
    data = open_data(tmp_path / "out")
    assert not data.labelled and data.classes == () and data.splits["train"].labels.shape == (11, 0)
    for packed, unpacked in ((data, source), (data, open_data(tmp_path / "out"))):
        assert len(packed.splits["val"]) == len(unpacked.splits["val"]) == 1
    assert np.array_equal(
        np.asarray(decode_to_pillow(data.splits["val"].raw(0))),
        np.asarray(decode_to_pillow(source.splits["val"].raw(0))),
    )
