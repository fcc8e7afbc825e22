"""WebDataset archives: layouts, label formats, rejected archives, and safety against malicious content."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import tarfile
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import make_image
from tests.data.resume import NUM_STARTS, assert_continues
from vitreous.data.layouts.tars import expand_braces
from vitreous.data.sources import open_data
from vitreous.data.split import decode_sample
from vitreous.data.stores import tarindex
from vitreous.data.stores.tar import TarArchive, open_archive_cached, read_file_stamp
from vitreous.errors import DataError


@pytest.fixture(autouse=True)
def tar_cache(tmp_path, monkeypatch):
    """Give each test a separate cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vitreous" / "tars"


def encode_sample_image(seed: int, image_format: str = "PNG", size=(16, 16)) -> bytes:
    buffer = io.BytesIO()
    make_image(seed, size, seed).save(buffer, image_format)
    return buffer.getvalue()


def write_tar(path, members, form=tarfile.USTAR_FORMAT):
    """Write an archive; a member is (name, bytes), or a TarInfo without data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            tar.addfile(info, io.BytesIO(member[1]))
    return path


def make_members(numbers, label=lambda n: b"%d" % (n % 3)):
    """Return an image member and a .cls member for each number."""
    return [
        member for n in numbers for member in ((f"{n:05d}.png", encode_sample_image(n)), (f"{n:05d}.cls", label(n)))
    ]


def get_open_error(source) -> str:
    with pytest.raises(DataError) as error:
        open_data(source)
    return str(error.value)


def contains_samples(data, split, numbers):
    """Return whether a split contains exactly these samples in order, each with the right image and class."""
    dataset_split = data.splits[split]
    assert [dataset_split.name(row).split("/")[-1] for row in range(len(dataset_split))] == [
        f"{n:05d}.png" for n in numbers
    ]
    for row, n in enumerate(numbers):
        assert dataset_split.raw(row) == encode_sample_image(n)
        assert data.classes[dataset_split.labels[row]] == str(n % 3)
    return True


def test_tar_splits_are_read_from_folders_names_and_members(tmp_path):
    folders, names = tmp_path / "folders", tmp_path / "names"
    write_tar(folders / "train" / "10.tar", make_members(range(6, 12)))
    write_tar(folders / "train" / "9.tar", make_members(range(6)))
    write_tar(folders / "validation" / "a.tar", make_members(range(12, 15)))
    write_tar(folders / "test" / "a.tar", make_members(range(15, 18)))
    write_tar(names / "x-train-10.tar", make_members(range(6, 12)))
    write_tar(names / "x-train-9.tar", make_members(range(6)))
    write_tar(names / "x-valid-0.tar", make_members(range(12, 15)))
    write_tar(names / "x-test-0.tar", make_members(range(15, 18)))
    for source in (folders, names):
        data = open_data(source)
        assert list(data.splits) == ["train", "val", "test"] and not data.unsplit and data.full_train_split is None
        assert (
            contains_samples(data, "train", range(12))
            and contains_samples(data, "val", range(12, 15))
            and contains_samples(data, "test", range(15, 18))
        )
    inside = [
        (f"./photos/{split}/c{n % 3}/{n}.png", encode_sample_image(n))
        for n, split in enumerate(["train"] * 6 + ["val"] * 3)
    ]
    data = open_data(write_tar(tmp_path / "inside.tar", inside))
    assert data.classes == ("c0", "c1", "c2") and {name: len(split) for name, split in data.splits.items()} == {
        "train": 6,
        "val": 3,
    }
    assert data.splits["val"].labels.tolist() == [0, 1, 2] and not data.unsplit


def test_archives_without_splits_hold_a_tenth_out(tmp_path):
    write_tar(tmp_path / "a" / "shard-000.tar", make_members(range(30)))
    write_tar(tmp_path / "a" / "shard-001.tar", make_members(range(30, 60)))
    data = open_data(tmp_path / "a")
    assert data.unsplit and {name: len(split) for name, split in data.splits.items()} == {"train": 54, "val": 6}
    assert len(data.full_train_split) == 60 and data.notes == [
        "held out 6 of 60 training images for validation (split seed 0)"
    ]
    sample_names = [split.name(row) for split in data.splits.values() for row in range(len(split))]
    assert len(set(sample_names)) == 60
    pattern = open_data(str(tmp_path / "a" / "shard-{000..001}.tar"))
    assert pattern.fingerprint() == data.fingerprint() != open_data(tmp_path / "a", 1).fingerprint()
    single_shard = open_data(tmp_path / "a" / "shard-001.tar")
    assert len(single_shard.full_train_split) == 30


def test_archive_patterns_are_expanded(tmp_path):
    assert [path.name for path in expand_braces("x/a-{08..11}.tar")] == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert [path.name for path in expand_braces("{a,b}-{0..1}.tar")] == ["a-0.tar", "a-1.tar", "b-0.tar", "b-1.tar"]
    write_tar(tmp_path / "s-0.tar", make_members(range(6)))
    assert "2 of 3 archives are missing" in get_open_error(str(tmp_path / "s-{0..2}.tar"))
    assert "more than 100,000" in get_open_error(str(tmp_path / "s-{0..999999999}.tar"))
    assert "more than 100,000" in get_open_error(str(tmp_path / "s-{0..999}-{0..999}.tar"))


LABEL_MEMBERS = {
    "numbers": (lambda n, name: [("cls", b" %d\n" % (9 + n % 2))], ("9", "10"), (0, 1)),
    "words": (lambda n, name: [("cls", ["bée", "Ant"][n % 2].encode())], ("Ant", "bée"), (1, 0)),
    "a number in json": (
        lambda n, name: [("json", json.dumps({"label": n % 2, "width": 3}).encode())],
        ("0", "1"),
        (0, 1),
    ),
    "text is preferred to a number": (
        lambda n, name: [("json", json.dumps({"label": n % 2, "class": name}).encode())],
        ("ant", "bee"),
        (0, 1),
    ),
    "cls before json": (lambda n, name: [("cls", b"%d" % (n % 2)), ("json", b'{"label": 7}')], ("0", "1"), (0, 1)),
    "captions are none": (lambda n, name: [("txt", b"a dog"), ("cls", name.encode())], ("ant", "bee"), (0, 1)),
}


@pytest.mark.parametrize("label_format", LABEL_MEMBERS)
def test_every_label_format_is_read(tmp_path, label_format):
    fields, classes, expected = LABEL_MEMBERS[label_format]
    members = []
    for n in range(8):
        label_members = [(f"some.dir/{n}.{ext}", content) for ext, content in fields(n, ["ant", "bee"][n % 2])]
        members += (
            [(f"some.dir/{n}.png", encode_sample_image(n)), *label_members]
            if n % 3
            else [*label_members, (f"some.dir/{n}.PNG", encode_sample_image(n))]
        )
    data = open_data(write_tar(tmp_path / "x.tar", members))
    assert data.classes == classes
    assert (
        data.full_train_split.labels.tolist() == list(expected) * 4 and data.full_train_split.labels.dtype == np.int64
    )


def test_member_folders_are_classes(tmp_path):
    members = [(f"photos/{['ant/a', 'ant/b', 'bee'][n % 3]}/{n}.png", encode_sample_image(n)) for n in range(12)]
    data = open_data(write_tar(tmp_path / "x.tar", members))
    assert data.classes == ("ant", "bee") and data.full_train_split.labels.tolist() == [0, 0, 1] * 4
    assert data.full_train_split.name(2) == "x.tar/photos/bee/2.png"


def test_multilabel_archives_are_read(tmp_path):
    sample_labels = [["cat", "dog"], ["dog"], [], ["cat"]]
    members = [
        member
        for n in range(8)
        for member in (
            (f"{n}.png", encode_sample_image(n)),
            (f"{n}.json", json.dumps({"label": sample_labels[n % 4]}).encode()),
        )
    ]
    data = open_data(write_tar(tmp_path / "x.tar", members))
    assert data.multilabel and data.classes == ("cat", "dog")
    assert (
        data.full_train_split.labels.tolist() == [[1, 1], [0, 1], [0, 0], [1, 0]] * 2
        and data.full_train_split.labels.dtype == np.float32
    )


@pytest.mark.parametrize("file", ["classes.txt", "dataset.json"])
def test_class_lists_keep_their_order(tmp_path, file):
    """A number is a class index even if a class name looks like a number; other text is a class name."""
    names = ["zebra", "ant", "0"]
    (tmp_path / file).write_text("\n".join(names) if file.endswith("txt") else json.dumps({"classes": names}))
    write_tar(tmp_path / "train" / "0.tar", make_members(range(9)))
    write_tar(tmp_path / "val" / "0.tar", make_members(range(3), lambda n: json.dumps(n).encode()))
    data = open_data(tmp_path)
    assert data.classes == tuple(names)
    assert data.splits["train"].labels.tolist() == [0, 1, 2] * 3 and data.splits["val"].labels.tolist() == [0, 1, 2]
    write_tar(tmp_path / "val" / "0.tar", make_members(range(3), lambda n: b"%d" % (n + 1)))
    assert "val has classes that are not in the list of classes: number 3" in get_open_error(tmp_path)
    write_tar(tmp_path / "val" / "0.tar", [("0.png", encode_sample_image(0)), ("0.json", b'{"class": "0"}')])
    assert open_data(tmp_path).splits["val"].labels.tolist() == [2]


def test_the_image_without_an_extra_suffix_is_read(tmp_path):
    members = []
    for n in range(6):
        members += [
            (f"{n}.seg.png", encode_sample_image(99)),
            (f"{n}.png", encode_sample_image(n)),
            (f"{n}.cls", b"%d" % (n % 2)),
        ]
    data = open_data(write_tar(tmp_path / "x.tar", members))
    assert [data.full_train_split.raw(n) for n in range(6)] == [encode_sample_image(n) for n in range(6)]


INVALID_ARCHIVES = {
    "nothing": ([], "no images in 1 archives"),
    "no label": (
        [("0.png", encode_sample_image(0)), ("1.png", encode_sample_image(1)), ("1.cls", b"0")],
        "1 of 2 samples have no label:\n    x.tar/0.png",
    ),
    "twice": ([*make_members([1, 2]), *make_members([1])], "1 samples are in two places; the first is 00001.png"),
    "apart": (
        [("0.png", encode_sample_image(0)), ("1.png", encode_sample_image(1)), ("0.cls", b"0"), ("1.cls", b"1")],
        "samples have no label",
    ),
    "a name twice": (
        [("0.png", encode_sample_image(0)), ("0.png", encode_sample_image(1)), ("0.cls", b"0")],
        "two members 0.png",
    ),
    "two images": (
        [("0.a.png", encode_sample_image(0)), ("0.b.png", encode_sample_image(1)), ("0.cls", b"0")],
        "two images of one sample: 0.a.png, 0.b.png",
    ),
    "not JSON": ([("0.png", encode_sample_image(0)), ("0.json", b"{")], "0.json is not JSON"),
    "deeply nested JSON": ([("0.png", encode_sample_image(0)), ("0.json", b"[" * 100_000)], "0.json is not JSON"),
    "label is not text": ([("0.png", encode_sample_image(0)), ("0.cls", b"\xff\xfe")], "0.cls is not UTF-8"),
    "a long label": ([("0.png", encode_sample_image(0)), ("0.cls", bytes(2**20 + 1))], "exceeds the limit of a label"),
    "case": (make_members(range(4), lambda n: [b"Cat", b"cat"][n % 2]), "differ only in case"),
}


@pytest.mark.parametrize("fault", INVALID_ARCHIVES)
def test_invalid_archives_are_rejected(tmp_path, fault):
    members, expected = INVALID_ARCHIVES[fault]
    assert expected in get_open_error(write_tar(tmp_path / "x.tar", members))


UNLABELLED_ARCHIVES = {
    "no label and no folder": ([(f"{n}.png", encode_sample_image(n)) for n in range(12)], "no sample has a label"),
    "one class": (make_members(range(12), lambda n: b"5"), "one class only (5)"),
    "one folder": ([(f"a/{n}.png", encode_sample_image(n)) for n in range(12)], "one class only (a)"),
    "empty lists": ([m for n in range(12) for m in ((f"{n}.png", encode_sample_image(n)), (f"{n}.json", b'{"label": []}'))], "no labels"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNLABELLED_ARCHIVES)
def test_images_without_labels(tmp_path, case):
    members, message = UNLABELLED_ARCHIVES[case]
    data = open_data(write_tar(tmp_path / "x.tar", members))
    assert not data.labelled and data.classes == () and message in str(data.unlabelled)
    assert data.full_train_split.labels.shape == (12, 0) and data.full_train_split.labels.dtype == np.float32
    assert data.splits["val"].labels.shape == (1, 0) and data.full_train_split.raw(3) == encode_sample_image(3)


def test_unknown_classes_and_ambiguous_splits_are_rejected(tmp_path):
    write_tar(tmp_path / "train-0.tar", make_members(range(6)))
    write_tar(tmp_path / "val-0.tar", make_members(range(3), lambda n: b"4"))
    assert "val has classes that train lacks: 4" in get_open_error(tmp_path)
    write_tar(tmp_path / "more.tar", make_members(range(3)))
    assert "more.tar has no split, but those of other archives have" in get_open_error(tmp_path)
    write_tar(tmp_path / "b" / "train-val.tar", make_members(range(3)))
    assert "contains two split names, train and val" in get_open_error(tmp_path / "b")
    write_tar(tmp_path / "c" / "test" / "0.tar", make_members(range(3)))
    assert "no training images" in get_open_error(tmp_path / "c")


def test_truncated_and_damaged_archives_are_rejected(tmp_path):
    valid_archive = write_tar(tmp_path / "x.tar", make_members(range(9)))
    content = valid_archive.read_bytes()
    assert len(open_data(valid_archive).full_train_split) == 9
    for cut in (1, 700, 5 * 512 + 3, len(content) // 2 + 100):
        valid_archive.write_bytes(content[:cut])
        assert "truncated" in (error_text := get_open_error(valid_archive)) and "x.tar" in error_text
    valid_archive.write_bytes(content[: 5 * 512] + bytes([content[5 * 512] ^ 1]) + content[5 * 512 + 1 :])
    assert "x.tar: damaged at byte 2,560" in get_open_error(valid_archive)
    valid_archive.write_bytes(b"")
    assert "empty file" in get_open_error(valid_archive)
    valid_archive.write_bytes(encode_sample_image(0) * 100)
    assert "not a tar archive" in get_open_error(valid_archive)
    with tarfile.open(valid_archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("0.png"))
    assert "a compressed archive" in (error_text := get_open_error(valid_archive)) and "gunzip" in error_text
    shutil.copy(valid_archive, tmp_path / "y.tar.gz")
    assert "gunzip" in get_open_error(tmp_path / "y.tar.gz")
    os.unlink(valid_archive)
    os.mkfifo(valid_archive)
    assert "not a regular file" in get_open_error(valid_archive)


def test_missing_end_markers_and_trailing_data_are_reported(tmp_path):
    valid_archive = write_tar(tmp_path / "x.tar", make_members(range(9)))
    content = valid_archive.read_bytes()
    end = len(content.rstrip(b"\0")) // 512 * 512 + 512
    valid_archive.write_bytes(content[:end])
    assert "1 archives have no end marker (check whether they were copied completely)" in open_data(valid_archive).notes
    valid_archive.write_bytes(content[: end + 1024] + content)
    assert any("have data after the end marker" in note for note in open_data(valid_archive).notes)


def open_archive(path):
    return TarArchive(path, read_file_stamp(path), Counter())


def make_special_member(name, member_type, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = member_type, target
    return info


class MaliciousPickle:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_archive_contents_are_never_executed_or_followed(tmp_path):
    trap = pickle.dumps(MaliciousPickle(str(tmp_path / "sprung")))
    home = tmp_path / "home"
    members = [
        *make_members(range(6)),
        ("../../out.png", encode_sample_image(1)),
        ("../../out.cls", b"1"),
        ("/tmp/absolute.png", encode_sample_image(2)),
        ("/tmp/absolute.cls", b"2"),
        *[(f"trap.{ext}", trap) for ext in ("pyd", "pkl", "pickle")],
        ("trap.png", encode_sample_image(3)),
        ("trap.cls", b"0"),
        make_special_member("link.png", tarfile.SYMTYPE, "/etc/passwd"),
        make_special_member("hard.png", tarfile.LNKTYPE, "../../etc/passwd"),
        make_special_member("pipe.png", tarfile.FIFOTYPE),
        make_special_member("device.png", tarfile.CHRTYPE),
        make_special_member("folder.png", tarfile.DIRTYPE),
        ("=cmd\n.png", encode_sample_image(4)),
        ("=cmd\n.cls", b"1"),
    ]
    write_tar(home / "x.tar", members)
    data = open_data(home / "x.tar")
    assert len(data.full_train_split) == 10
    for row in range(10):
        decode_sample(data.full_train_split, row, 3)
    assert [data.full_train_split.name(row) for row in (6, 9)] == ["x.tar/../../out.png", "x.tar/=cmd\\n.png"]
    assert data.notes[:2] == ["2 links in archives are ignored", "2 devices or pipes in archives are ignored"]
    assert sorted(os.listdir(tmp_path)) == ["cache", "home"] and os.listdir(home) == ["x.tar"]


def test_invalid_archive_images_are_rejected_by_name(tmp_path, monkeypatch):
    data = open_data(
        write_tar(
            tmp_path / "x.tar",
            [*make_members(range(4)), ("e.png", b""), ("e.cls", b"1"), ("h.png", b"<html>"), ("h.cls", b"0")],
        )
    )
    with pytest.raises(DataError, match=r"x\.tar/e\.png: empty file"):
        data.full_train_split.raw(4)
    with pytest.raises(DataError, match=r"x\.tar/h\.png: not an image"):
        decode_sample(data.full_train_split, 5, 3)
    monkeypatch.setattr(tarindex, "MAX_FILE_BYTES", 2**20 - 1)
    big = tmp_path / "big.tar"
    write_tar(big, [*make_members(range(4)), ("b.png", bytes(2**20)), ("b.cls", b"1")])
    with pytest.raises(DataError, match=r"big\.tar/b\.png: larger than"):
        open_data(big).full_train_split.raw(4)


def test_a_replaced_archive_is_detected(tmp_path):
    source = write_tar(tmp_path / "x.tar", make_members(range(6)))
    data = open_data(source)
    open_archive_cached.cache_clear()
    write_tar(source, make_members(range(10, 20)))
    with pytest.raises(DataError, match="changed since"):
        data.full_train_split.raw(0)
    reopened = open_data(source)
    assert reopened.full_train_split.raw(0) == encode_sample_image(10)


MEMBER_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300).filter(
    lambda name: name.strip("/.")
)
MEMBER_TYPES = st.sampled_from(
    [tarfile.REGTYPE] * 4 + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]
)


@given(
    st.lists(st.tuples(MEMBER_NAMES, MEMBER_TYPES, st.integers(0, 1500)), max_size=6),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_members_match_the_tarfile_module(tmp_path_factory, members, form):
    path = tmp_path_factory.mktemp("tar") / "x.tar"
    with tarfile.open(path, "w", format=form, encoding="utf-8") as tar:
        for name, member_type, size in members:
            info = make_special_member(
                name, member_type, "x" * size if member_type in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            )
            info.size = size if member_type == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(bytes(size)))
    with tarfile.open(path, encoding="utf-8") as tar:
        expected = [(m.name, m.offset_data, m.size) for m in tar.getmembers() if m.isreg()]
    file_stamp = read_file_stamp(path)
    with TarArchive(path, file_stamp, Counter()) as archive:
        members_read = [(os.fsdecode(m.name), m.start, m.size) for m in archive.members()]
    assert members_read == [member for member in expected if not member[0].endswith("/")]


def test_large_sizes_and_sparse_files_are_understood(tmp_path):
    """GNU's base-256 sizes (above 8 GiB) are parsed; a sparse member is skipped completely."""
    info = tarfile.TarInfo("big.png")
    info.size = 2**33
    header = info.tobuf(tarfile.GNU_FORMAT)
    path = tmp_path / "x.tar"
    path.write_bytes(header + bytes(512))
    with pytest.raises(DataError, match="ends at byte 8,589,935,104"), open_archive(path) as archive:
        list(archive.members())
    sparse = bytearray(make_special_member("s.png", tarfile.GNUTYPE_SPARSE).tobuf(tarfile.GNU_FORMAT))
    sparse[124:136], sparse[482] = b"00000000010\0", 1
    sparse[148:156] = b"%06o\0 " % (sum(sparse) - sum(sparse[148:156]) + 256)
    after = tarfile.TarInfo("a.png").tobuf(tarfile.GNU_FORMAT)
    path.write_bytes(bytes(sparse) + bytes(512) + bytes(512) + after + bytes(1024))
    with open_archive(path) as archive:
        assert [member.name for member in archive.members()] == [b"a.png"]
    assert archive.skipped == {"members of an unsupported type in archives are ignored": 1}


HOSTILE_HEADERS = {
    "negative size": {"size": "-1024"},
    "very negative size": {"size": str(-(2**62))},
    "invalid size": {"size": "many"},
    "invalid sparse map": {"GNU.sparse.map": "1,x", "GNU.sparse.size": "-4"},
    "short sparse map": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"},
}


@pytest.mark.parametrize("records", HOSTILE_HEADERS)
@pytest.mark.timeout(20)
def test_false_extended_headers_stop_reading(tmp_path, records):
    info = tarfile.TarInfo("a.png")
    info.pax_headers = HOSTILE_HEADERS[records]
    path = tmp_path / "x.tar"
    first = tarfile.TarInfo("0.png").tobuf(tarfile.PAX_FORMAT)
    path.write_bytes(first + info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    sizes, message = [], "x.tar: "
    try:
        with open_archive(path) as archive:
            sizes += [member.size for member in archive.members()]
    except DataError as error:
        message = str(error)
    assert set(sizes) <= {0} and "x.tar: " in message


@pytest.mark.timeout(20)
def test_extended_headers_are_bounded(tmp_path):
    """Neither a chain of 100,000 extended headers nor a header of gigabytes is followed."""
    path = tmp_path / "x.tar"
    path.write_bytes(make_special_member("x", tarfile.XHDTYPE).tobuf(tarfile.USTAR_FORMAT) * 100_000 + bytes(1024))
    with pytest.raises(DataError, match=r"x\.tar"), open_archive(path) as archive:
        list(archive.members())
    for member_type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE):
        info = make_special_member("x", member_type)
        info.size = 2**21
        path.write_bytes(tarfile.TarInfo("0.png").tobuf() + info.tobuf(tarfile.GNU_FORMAT) + bytes(2**22))
        with pytest.raises(DataError, match=r"damaged at byte 512 .*2,097,152"), open_archive(path) as archive:
            list(archive.members())


def test_random_damage_only_raises_data_errors(tmp_path):
    """400 mutations raise only DataError, and no sample extends beyond the archive."""
    content = write_tar(tmp_path / "o.tar", make_members(range(5)), tarfile.PAX_FORMAT).read_bytes()
    long_names = write_tar(
        tmp_path / "l.tar", [(f"{'d' * 120}/{n}.png", encode_sample_image(n)) for n in range(4)], tarfile.PAX_FORMAT
    ).read_bytes()
    draw, rejected = random.Random(0), []
    for trial in range(400):
        damaged = bytearray(content if trial % 2 else long_names)
        for _ in range(draw.choice((1, 1, 3))):
            low = draw.randrange(len(damaged) // 512) * 512
            damaged[low + draw.randrange(512)] = draw.choice((0, 0x80, 0xFF, 0x30, 0x37, draw.randrange(256)))
            header = damaged[low : low + 512]
            if draw.random() < 0.5 and header[257:262] == b"ustar":  # with a matching checksum
                damaged[low + 148 : low + 156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 256)
        path = tmp_path / f"{trial}.tar"
        path.write_bytes(damaged[: draw.choice((len(damaged), draw.randrange(len(damaged))))])
        try:
            index = tarindex.open_archive_index([path])
            assert (index.samples["start"] + index.samples["size"] <= path.stat().st_size).all()
        except DataError as error:
            rejected.append(f"{trial}.tar" in str(error))
        path.unlink()
    assert all(rejected) and 50 < len(rejected) < 400
    open_archive_cached.cache_clear()


def test_the_archive_index_is_cached_while_valid(tmp_path, tar_cache, monkeypatch):
    paths = [write_tar(tmp_path / f"{n}.tar", make_members(range(6 * n, 6 * n + 6))) for n in range(2)]
    first = tarindex.open_archive_index(paths)
    (cached_file,) = tar_cache.iterdir()
    opened_paths = []
    members = TarArchive.members
    monkeypatch.setattr(TarArchive, "members", lambda self: opened_paths.append(self.path) or members(self))

    def is_same_index(index):
        return np.array_equal(index.samples, first.samples) and np.array_equal(index.names, first.names)

    reopened = tarindex.open_archive_index(paths)
    assert (
        not opened_paths
        and is_same_index(reopened)
        and (reopened.label_words, reopened.folders, reopened.stamps)
        == (first.label_words, first.folders, first.stamps)
    )
    index_bytes = cached_file.read_bytes()
    for damaged in (
        b"",
        index_bytes[:-30],
        index_bytes[: len(index_bytes) // 2] + b"\1" * 40 + index_bytes[len(index_bytes) // 2 + 40 :],
        b"not a zip",
    ):
        cached_file.write_bytes(damaged)
        opened_paths.clear()
        assert is_same_index(tarindex.open_archive_index(paths)) and len(opened_paths) == 2
        assert cached_file.read_bytes() == index_bytes
    os.utime(paths[0], ns=(1, 1))
    opened_paths.clear()
    tarindex.open_archive_index(paths)
    assert len(opened_paths) == 2
    shutil.rmtree(tar_cache)
    tar_cache.write_text("in the way")
    assert is_same_index(tarindex.open_archive_index(paths))


def test_the_fingerprint_does_not_depend_on_path_or_mtime(tmp_path):
    write_tar(tmp_path / "a" / "x.tar", make_members(range(12)))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b" / "x.tar", ns=(1, 1))
    assert open_data(tmp_path / "a").fingerprint() == open_data(tmp_path / "b").fingerprint()
    write_tar(tmp_path / "b" / "x.tar", make_members([*range(11), 40]))
    assert open_data(tmp_path / "a").fingerprint() != open_data(tmp_path / "b").fingerprint()


def test_image_folders_next_to_an_archive_are_read(tmp_path):
    write_tar(tmp_path / "original.tar", make_members(range(3)))
    for n in range(6):
        (tmp_path / "ab"[n % 2]).mkdir(exist_ok=True)
        make_image(n).save(tmp_path / "ab"[n % 2] / f"{n}.png")
    assert open_data(tmp_path).classes == ("a", "b")


@pytest.mark.parametrize("workers, starts", [(0, NUM_STARTS), (1, 4), (2, 4)])
def test_a_run_over_archives_continues_anywhere(tmp_path, workers, starts):
    for n in range(3):
        write_tar(tmp_path / "x" / f"{n}.tar", make_members(range(5 * n, 5 * n + 5)))
    assert_continues(lambda: open_data(tmp_path / "x").splits["train"], workers, starts)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_training_on_archives_resumes_at_fifty_steps_with_workers(tmp_path, workers):
    test_a_run_over_archives_continues_anywhere(tmp_path, workers, NUM_STARTS)
