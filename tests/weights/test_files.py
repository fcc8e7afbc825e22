"""Foreign weight files: sound ones are read to the bit; every other is refused from its header, quickly, in little
memory."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vitreous.errors import WeightsError
from vitreous.weights import npz
from vitreous.weights.entry import TensorInfo
from vitreous.weights.files import open_weights_file
from vitreous.weights.safetensors_file import SAFETENSORS_DTYPES

#: run in a fresh process: opens files, and tells what it took. The best of three is the time, since other work on the
#: machine is no part of it; memory is the peak over all files above what the process had once it had imported the code.
MEASURE = """
import json, sys, time
from pathlib import Path
WATCHED = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.", "socket.", "pickle.", "ctypes.dlopen")
events, found = [], {}
from vitreous.errors import WeightsError
from vitreous.weights import npz, pickled
from vitreous.weights.files import open_weights_file
sys.addaudithook(lambda event, arguments: events.append(event) if event.startswith(WATCHED) else None)

def memory(word):
    status = Path("/proc/self/status")
    return int(status.read_text().split(word + ":")[1].split()[0]) if status.exists() else 0

before = memory("VmRSS")
for path in json.load(sys.stdin):
    times = []
    for _ in range(3):
        began = time.process_time()
        try:
            open_weights_file(path)
            text = ""
        except WeightsError as error:
            text = str(error)
        times.append(time.process_time() - began)
    found[path] = [1000 * min(times), text]
heavy = [name for name in ("torch", "numpy") if name in sys.modules]
print(json.dumps({"found": found, "megabytes": (memory("VmHWM") - before) / 1000, "events": events, "heavy": heavy}))
"""
MILLISECONDS, MEGABYTES = 100, 50


def refusals(paths: list[Path], milliseconds: float = MILLISECONDS) -> dict[str, str]:
    """Open each file in a fresh process -> the refusals by file name.

    Each has to be within the limits, with nothing run, nothing heavy imported, and no connection made.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        input=json.dumps([os.fspath(path) for path in paths]),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    slow = {Path(path).name: round(ms) for path, (ms, _) in report["found"].items() if ms > milliseconds}
    assert not slow, f"slower than {milliseconds} ms: {slow}"
    assert report["megabytes"] <= MEGABYTES
    assert report["events"] == []
    assert report["heavy"] == []
    return {Path(path).name: text for path, (_, text) in report["found"].items()}


def framed(header: str | bytes | dict, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of that header."""
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def tensor(begin: int = 0, end: int = 8, shape=(2,), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def many(count: int, size: int = 4) -> str:
    """A header of so many tensors of `size` bytes."""
    shape = "[1]" if size else "[0]"
    lines = (
        f'"t{i}":{{"dtype":"F32","shape":{shape},"data_offsets":[{size * i},{size * (i + 1)}]}}' for i in range(count)
    )
    return "{" + ",".join(lines) + "}"


BYTES = bytes(8)
LINE = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
#: what is wrong -> the file (large ones when they are needed; some go on with a hole), and a word of the refusal
HEADERS = {
    "empty": (b"", "is empty"),
    "only a length": (struct.pack("<Q", 8), "header length does not match the file size"),
    "five bytes": (b"\0" * 5, "truncated"),
    "length 0": (framed(b"", BYTES), "header length does not match the file size"),
    "length 2^63": (framed({"a": tensor()}, BYTES, 1 << 63), "header length does not match the file size"),
    "length beyond the file": (framed({"a": tensor()}, BYTES, 4000), "header length does not match the file size"),
    "invalid UTF-8": (framed(b'{"\xff\xfe":{}}', BYTES), "not JSON"),
    "a byte order mark": (framed("\ufeff{" + LINE + "}", BYTES), "not JSON"),
    "array root": (framed("[1,2]", BYTES), "not a JSON object"),
    "nothing but braces": (framed("{}"), "no tensors"),
    "cut JSON": (framed("{" + LINE, BYTES), "not JSON"),
    "negative offset": (framed({"a": tensor(-8, 0)}, BYTES), "not a list of nonnegative integers"),
    "end before begin": (framed({"a": tensor(8, 0)}, BYTES), "offsets for a: [8, 0] is not a start and an end"),
    "past the end": (framed({"a": tensor(0, 16, (4,))}, BYTES), "truncated"),
    "overlap": (framed({"a": tensor(0, 8), "b": tensor(4, 12)}, bytes(12)), "a tensor that overlaps b"),
    "the same place twice": (framed({"a": tensor(), "b": tensor()}, BYTES), "a tensor that overlaps b"),
    "hole": (framed({"a": tensor(0, 8), "b": tensor(12, 20)}, bytes(20)), "a gap before b"),
    "hole at the start": (framed({"a": tensor(4, 12)}, bytes(12)), "a gap before a"),
    "trailing bytes": (framed({"a": tensor()}, bytes(9)), "after its last tensor"),
    "a zip after the end": (framed({"a": tensor()}, BYTES + b"PK\5\6" + bytes(18)), "after its last tensor"),
    "shape overflow": (framed({"a": tensor(0, 8, (1 << 32, 1 << 32))}, BYTES), "needs 73,786,976,294,838,206,464"),
    "shape mismatch": (framed({"a": tensor(0, 8, (3,))}, BYTES), "needs 12"),
    "unknown dtype": (framed({"a": tensor(0, 8, (2,), "F31")}, BYTES), "as F31"),
    "eight-bit floats": (framed({"a": tensor(0, 8, (8,), "F8_E4M3")}, BYTES), "save it as one of F64, F32, F16, BF16"),
    "complex": (framed({"a": tensor(0, 8, (1,), "C64")}, BYTES), "as C64"),
    "a list as dtype": (framed({"a": tensor(0, 8, (2,), ["F32"])}, BYTES), "as "),
    "negative shape": (framed({"a": tensor(0, 8, (-2,))}, BYTES), "not a list of nonnegative integers"),
    "fractional shape": (framed({"a": tensor(0, 8, (2.0,))}, BYTES), "not a list of nonnegative integers"),
    "true as a shape": (framed({"a": tensor(0, 4, (True,))}, bytes(4)), "not a list of nonnegative integers"),
    "a shape of 5,000 digits": (framed(LINE.join("{}").replace("[2]", f"[{'9' * 5000}]"), BYTES), "not JSON"),
    "three offsets": (
        framed({"a": tensor() | {"data_offsets": [0, 8, 8]}}, BYTES),
        "[0, 8, 8] is not a start and an end",
    ),
    "NaN as a shape": (framed(LINE.join("{}").replace("[2]", "[NaN]"), BYTES), "not JSON"),
    "one field missing": (framed({"a": {"dtype": "F32", "shape": [2]}}, BYTES), "with keys other than"),
    "one field more": (framed({"a": tensor() | {"stride": [1]}}, BYTES), "with keys other than"),
    "a tensor that is a number": (framed({"a": 3}, BYTES), "with keys other than"),
    "nested 100,000 deep": (framed("{" + LINE + ',"b":' + "[" * 100_000 + "]" * 100_000 + "}", BYTES), "not JSON"),
    "objects 100,000 deep": (framed('{"a":' * 100_000 + "1" + "}" * 100_000, BYTES), "not JSON"),
    "metadata that is no text": (framed({"a": tensor(), "__metadata__": {"n": 3}}, BYTES), "metadata"),
    "metadata that is a list": (framed({"a": tensor(), "__metadata__": ["n"]}, BYTES), "metadata"),
    "header of 101 MB": (lambda: struct.pack("<Q", 101 << 20) + b"{", "a header of"),
    # what the format's own library lets pass
    "a key twice": (framed("{" + LINE + "," + LINE + "}", BYTES), "'a' twice"),
    "a key twice, once in escapes": (
        framed("{" + LINE + "," + LINE.replace('"a"', '"\\u0061"') + "}", BYTES),
        "'a' twice",
    ),
    "a field twice": (framed(LINE.join("{}").replace('"F32"', '"F32","dtype":"I32"'), BYTES), "'dtype' twice"),
    "no elements": (framed({"a": tensor(), "z": tensor(8, 8, (0, 3))}, BYTES), "without elements"),
    "no elements in the place of others": (framed({"a": tensor(), "z": tensor(0, 0, (0,))}, BYTES), "without elements"),
    "a path as a name": (framed({"../../etc/passwd": tensor()}, BYTES), "not a valid name"),
    "an absolute name": (framed({"/etc/passwd": tensor()}, BYTES), "not a valid name"),
    "a drive as a name": (framed({"C:\\weights": tensor()}, BYTES), "not a valid name"),
    "an empty name": (framed({"": tensor()}, BYTES), "not a valid name"),
    "a newline in a name": (framed({"a\nb": tensor()}, BYTES), r"'a\nb'"),
    "an escape sequence as a name": (framed({"\x1b[2J": tensor()}, BYTES), r"'\x1b[2J'"),
    "half a character as a name": (
        framed('{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', BYTES),
        r"'\ud800'",
    ),
    "a name of 5,000 letters": (framed({"a" * 5000: tensor()}, BYTES), "..."),
    "50 MB of metadata": (lambda: struct.pack("<Q", 50 << 20) + b'{"__metadata__":{"a":"b', "a header of"),
    "5,001 tensors": (lambda: framed(many(5_001), bytes(4 * 5_001)), "more than 5,000"),
    "100,000 tensors": (lambda: framed(many(100_000), bytes(400_000)), "more than 5,000 tensors"),
    "400,000 tensors without elements": (lambda: framed(many(400_000, 0)), "a header of"),
    "8 MB of empty lists": (lambda: framed("[" + "[]," * 2_700_000 + "[]]", BYTES), "fields"),
    "8 MB of small metadata": (
        lambda: framed('{"__metadata__":{' + ",".join(f'"{i}":"b"' for i in range(600_000)) + "}}", BYTES),
        "fields",
    ),
    "8 MB in wide characters": (
        lambda: framed('{"__metadata__":{"a":"\U0001f600' + "b" * 8_000_000 + '"}}', BYTES),
        "plain ASCII",
    ),
    "8 MB with one wide escape": (
        lambda: framed('{"__metadata__":{"a":"\\ud83d\\ude00' + "b" * 8_000_000 + '"}}', BYTES),
        "plain ASCII",
    ),
}
#: no weights at all
STRANGERS = {
    "page.safetensors": (b"<!DOCTYPE html><title>404</title>", "web page"),
    "pointer.safetensors": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    "one.npy": (b"\x93NUMPY\1\0v\0{", "single array"),
    "keras.h5": (b"\x89HDF\r\n\x1a\n", "HDF5"),
    "notes.txt": (b"these are no weights, but some text", "not a weights file"),
    "photo.npz": (b"\xff\xd8\xff\xe0" * 20, "not a weights file"),
    "zeros": (bytes(1000), "not a weights file"),
}


def test_every_malformed_header_is_refused_before_anything_is_allocated(tmp_path):
    paths, expected = [], {}
    for name, (content, word) in {
        f"{key}.safetensors": case for key, case in HEADERS.items()
    }.items() | STRANGERS.items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(content() if callable(content) else content)
        if " MB" in name:
            os.truncate(paths[-1], max(paths[-1].stat().st_size, 102 << 20))
        expected[name] = word
    found = refusals(paths)
    assert {name: text for name, text in found.items() if expected[name] not in text} == {}
    assert all(name in text for name, text in found.items())  # every refusal says which file


def test_a_header_as_large_as_they_may_be_is_read_to_its_end_in_little_time_and_memory(tmp_path):
    """Of 5,000 tensors the last is wrong."""
    path = tmp_path / "last one wrong.safetensors"
    path.write_bytes(framed(many(5_000)[:-3] + "9]}}", bytes(20_000)))
    assert "t4999" in refusals([path])[path.name]


@pytest.mark.parametrize("name", ["nothing", "folder", "pipe", "a\0b"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path, name):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif name == "pipe":
        os.mkfifo(path)
    with pytest.raises(WeightsError, match=r"no weights at|folder|cannot be opened"):
        open_weights_file(path)


def sample() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {"scalar": torch.tensor(2.5), "flags": torch.tensor([True, False, True]), "ünïcode/naïve:0": torch.ones(1)}
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        made[str(dtype)] = torch.randn(3, 5, generator=generator).to(dtype)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        made[str(dtype)] = torch.randint(0, 100, (2, 1, 3), generator=generator).to(dtype)
    return made


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "weights"])
def test_safetensors_are_read_to_the_bit_whatever_the_name(tmp_path, name):
    path, tensors = tmp_path / name, sample()
    path.write_bytes(save(tensors, {"format": "pt", "note": "ünïcode"}))
    source = open_weights_file(path)
    assert (source.kind, source.path, source.section) == ("safetensors", path, "")
    assert source.metadata == {"format": "pt", "note": "ünïcode"}
    assert source.entries == {
        key: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for key, t in tensors.items()
    }
    assert sum(entry.bytes for entry in source.entries.values()) == sum(t.nbytes for t in tensors.values())
    assert source.entries["torch.int8"].elements == 6
    assert same(source.read(), tensors)
    assert list(source.read(["torch.bfloat16", "scalar", "scalar"])) == ["torch.bfloat16", "scalar"]
    assert source.read([]) == {}


def test_what_was_read_does_not_change_with_the_file(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(save({"a": torch.ones(4)}))
    tensors = open_weights_file(path).read()
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(tensors["a"], torch.ones(4))
    tensors["a"].zero_()  # and is writable


def test_a_padded_header_in_any_order_is_read(tmp_path):
    path = tmp_path / "weights.safetensors"
    header = json.dumps({"b": tensor(4, 8, (1,)), "a": tensor(0, 4, (1,), "I32")}) + " " * 13
    path.write_bytes(framed(header, struct.pack("<if", 7, 0.5)))
    tensors = open_weights_file(path).read()
    assert (tensors["a"].item(), tensors["b"].item()) == (7, 0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path, value, dtype):
    path, bad = tmp_path / "weights.safetensors", torch.zeros(2, 3, dtype=dtype)
    bad[1, 1] = value
    path.write_bytes(save({"good": torch.ones(3), "bad": bad}))
    source = open_weights_file(path)
    assert list(source.read(["good"])) == ["good"]
    with pytest.raises(WeightsError, match="a value in bad that is NaN or infinite"):
        source.read()


def test_a_name_that_is_not_there_gets_the_nearest(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(save({"head.weight": torch.ones(3)}))
    with pytest.raises(WeightsError, match=r"no tensor head.weigth\n  did you mean head.weight"):
        open_weights_file(path).read(["head.weigth"])


def test_a_file_that_changes_between_looking_and_reading_is_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(save({"a": torch.ones(4), "b": torch.ones(1)}))
    source = open_weights_file(path)
    path.write_bytes(save({"a": torch.ones(4, dtype=torch.int32), "c": torch.ones(1)}))
    for name in ("a", "b"):
        with pytest.raises(WeightsError, match="changed while"):
            source.read([name])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="truncated"):
        source.read(["a"])


def test_fuzzed_headers_are_refused_or_mean_what_the_formats_library_reads(tmp_path):
    """Mutations of a sound file: never another error than a refusal, and nothing that is accepted is read otherwise."""
    rng, path = random.Random(0), tmp_path / "fuzzed.safetensors"
    sound = save(
        {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4, dtype=torch.int16)}, {"format": "pt"}
    )
    pieces = [
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"0",
        b"-1",
        b"99999999999999999999",
        b"null",
        b"\\u0000",
        b"1e3",
        b"\xff",
        b" ",
    ]
    accepted = 0
    for _ in range(1500):
        content = bytearray(sound)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(min(len(content), 8 + sound[0]))
            how = rng.randrange(4)
            if how == 0:
                content[at] = rng.randrange(256)
            elif how == 1:
                del content[at : at + rng.randint(1, 6)]
            elif how == 2:
                content[at:at] = rng.choice(pieces)
            else:
                content[at : at + 1] = rng.choice(pieces)
        if rng.random() < 0.5:  # so that more than the length is tried
            header = bytes(content[8 : len(content) - 32])
            content = bytearray(framed(header, bytes(content[-32:])))
        path.write_bytes(content)
        try:
            source = open_weights_file(path)
        except WeightsError:
            continue
        accepted += 1
        try:
            with safe_open(path, framework="pt") as theirs:
                assert set(theirs.keys()) == set(source.entries)
                ours = {name: source.read([name])[name] for name in source.entries}
                assert all(torch.equal(theirs.get_tensor(name), value) for name, value in ours.items())
        except SafetensorError as error:
            pytest.fail(f"accepted what the library refuses: {error} in {bytes(content[:200])}")
        except WeightsError as error:
            if "NaN" not in str(error):
                raise
    assert accepted > 20


DTYPES = [getattr(torch, name) for name in SAFETENSORS_DTYPES.values()]
NAMES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=12).filter(
    lambda name: ".." not in name and name[0] not in "/\\" and name[1:2] != ":" and name != "__metadata__"
)


@given(
    st.dictionaries(
        NAMES, st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), max_size=4)), min_size=1, max_size=6
    )
)
@settings(max_examples=100)
def test_what_is_saved_read_and_saved_again_is_the_same_file(tmp_path_factory, specs):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(0, 2, shape, generator=generator).to(dtype) for name, (dtype, shape) in specs.items()
    }
    path = tmp_path_factory.getbasetemp() / "round.safetensors"
    path.write_bytes(save(tensors))
    assert save(open_weights_file(path).read()) == path.read_bytes()


# npz


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=array.dtype.hasobject)
    return file.getvalue()


def header(text: str, data: bytes = b"", version: int = 1) -> bytes:
    """An .npy file with that header."""
    raw = text.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(raw)) + raw + data


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return file.getvalue()


def edited(content: bytes, offset: int, value: bytes, directory: bool = True, local: bool = True) -> bytes:
    """A zip with bytes of its first member's entries replaced, `offset` being where they are in the directory's
    entry."""
    made = bytearray(content)
    if directory:
        at = made.index(b"PK\1\2") + offset
        made[at : at + len(value)] = value
    if local:
        at = made.index(b"PK\3\4") + offset - 2
        made[at : at + len(value)] = value
    return bytes(made)


class Marker:
    """Would make a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_arrays_are_read_to_the_bit(tmp_path):
    arrays = {key: value.numpy() for key, value in sample().items() if value.dtype != torch.bfloat16}
    arrays |= {
        "Transformer/block_0/kernel": np.asfortranarray(np.arange(24, dtype=np.float32).reshape(2, 3, 4)),
        "0": np.float32(3),
    }
    for name, write in {"plain.npz": np.savez, "small.npz": np.savez_compressed, "npz.pt": np.savez}.items():
        with open(tmp_path / name, "wb") as file:
            write(file, **arrays)
        source = open_weights_file(tmp_path / name)
        assert source.kind == "npz"
        assert same(source.read(), {key: torch.from_numpy(np.array(value, order="C")) for key, value in arrays.items()})
        assert all(value.is_contiguous() for value in source.read().values())


@pytest.mark.parametrize("kind", ["|V2", "<V2"])
def test_two_bytes_of_anything_are_bfloat16(tmp_path, kind):
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': (4, 3), }}"
    (tmp_path / "a.npz").write_bytes(zipped({"a.npy": header(text, values.view(torch.int16).numpy().tobytes())}))
    assert torch.equal(open_weights_file(tmp_path / "a.npz").read()["a"], values)


def test_all_versions_of_numpys_header_are_read(tmp_path):
    text, data = "{'descr': '<i2', 'fortran_order': False, 'shape': (2L,), }", struct.pack("<2h", 1, 2)
    (tmp_path / "a.npz").write_bytes(zipped({f"{v}.npy": header(text, data, v) for v in (1, 2, 3)}))
    assert all(value.tolist() == [1, 2] for value in open_weights_file(tmp_path / "a.npz").read().values())


def test_every_array_that_is_none_is_refused_from_its_header(tmp_path):
    marker, whole = tmp_path / "marker", npy(np.arange(6.0, dtype=np.float32))
    evil = npy(np.array([Marker(marker)], dtype=object))
    plain = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"
    good = zipped({"a.npy": whole})
    big = io.BytesIO()
    with zipfile.ZipFile(big, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("bomb.npy", "w") as member:
        member.write(header(plain.replace("2,", f"{25 << 20},")))
        for _ in range(100):
            member.write(bytes(1 << 20))
    twice = zipped({"a.npy": whole, "b.npy": whole}).replace(b"b.npy", b"a.npy")
    cases = {
        "objects": (zipped({"a.npy": evil}), "has objects in 'a'"),
        "objects behind a sound array": (zipped({"a.npy": whole, "b.npy": evil}), "has objects in 'b'"),
        "objects, other header": (zipped({"a.npy": header(plain.replace("<f4", "|O"), bytes(8))}), "has objects"),
        "fields": (zipped({"a.npy": npy(np.zeros(2, [("x", "<f4"), ("y", "<f4")]))}), "is not numpy's"),
        "code as a dtype": (
            zipped({"a.npy": header(plain.replace("'<f4'", "__import__('os').system('touch x')"), BYTES)}),
            "is not numpy's",
        ),
        "pickle in the dtype's metadata": (
            zipped({"a.npy": header(plain.replace("'<f4'", "('<f4', {'pickle': 1})"), BYTES)}),
            "objects",
        ),
        "a pickle as an array": (zipped({"a.npy": b"cos\nsystem\n(S'touch x'\ntR."}), "which is not an array"),
        "a pickle beside arrays": (zipped({"a.npy": whole, "evil.pkl": b"cos\nsystem\n(S'touch x'\ntR."}), "evil.pkl"),
        "a checkpoint beside arrays": (zipped({"a.npy": whole, "archive/data.pkl": b"."}), "data.pkl"),
        "text": (zipped({"a.npy": npy(np.array(["ab"]))}), "as <U2"),
        "other byte order": (zipped({"a.npy": npy(np.zeros(2, ">f4"))}), "as >f4"),
        "complex": (zipped({"a.npy": npy(np.zeros(2, np.complex64))}), "as <c8"),
        "no elements": (zipped({"a.npy": npy(np.zeros((0, 3), np.float32))}), "without elements"),
        "4 TB": (zipped({"a.npy": header(plain.replace("2,", f"{1 << 40},"), BYTES)}), "needs 4,398,046,511,104"),
        "4 TB, deflated": (
            zipped({"a.npy": header(plain.replace("2,", f"{1 << 40},"), BYTES)}, zipfile.ZIP_DEFLATED),
            "needs 4,398",
        ),
        "more than the header says": (zipped({"a.npy": header(plain, bytes(100))}, zipfile.ZIP_DEFLATED), "needs 8"),
        "a bomb of 100 MB": (big.getvalue(), "would unpack to 104,857,"),
        "negative shape": (zipped({"a.npy": header(plain.replace("2,", "-2,"), BYTES)}), "is not numpy's"),
        "a header longer than the member": (zipped({"a.npy": b"\x93NUMPY\2\0\xff\xff\xff\x7f{"}), "is not numpy's"),
        "version 9": (zipped({"a.npy": header(plain, BYTES, 9)}), "which is not an array"),
        "nested brackets": (zipped({"a.npy": header("(" * 9000)}), "is not numpy's"),
        "a path as a name": (zipped({"../../etc/a.npy": whole}), "not a valid name"),
        "the same name twice": (twice, "'a.npy' twice"),
        "encrypted": (edited(good, 8, b"\1\0"), "encrypted"),
        "encrypted, says the directory alone": (edited(good, 8, b"\1\0", local=False), "encrypted"),
        "encrypted, says the member alone": (edited(good, 8, b"\1\0", directory=False), "contradicts its directory"),
        "strongly encrypted": (edited(good, 8, b"\x40\0"), "encrypted"),
        "another method": (edited(good, 10, b"\x0c\0"), "method 12"),
        "another method in the member": (edited(good, 10, b"\x08\0", directory=False), "contradicts its directory"),
        "two sizes": (edited(good, 24, struct.pack("<I", 9)), "contradictory sizes"),
        "a size beyond the file": (edited(good, 20, struct.pack("<2I", 1 << 24, 1 << 24)), "overlap"),
        "another name in the member": (good.replace(b"a.npy", b"b.npy", 1), "contradicts its directory"),
        "a member in the directory": (
            edited(good, 42, struct.pack("<I", 100), local=False),
            "contradicts its directory",
        ),
        "cut": (good[:-5], "truncated"),
        "a comment": (good[:-2] + b"\3\0abc", "after its end"),
        "something before": (b"PK\3\4" + good, "before or inside"),
        "a directory elsewhere": (good[:-6] + struct.pack("<I", 7) + b"\0\0", "before or inside"),
        "half a directory": (good[:-10] + struct.pack("<2I", 10, len(good) - 32) + b"\0\0", "damaged zip"),
        "members without end": (zipped({f"{i}": b"" for i in range(10_001)}), "more than 10,000 members"),
        "no arrays": (zipped({"a.txt": b"a"}), "neither numpy arrays nor"),
        "no members": (zipped({}), "neither numpy arrays nor"),
    }
    paths = [tmp_path / f"{name}.npz" for name in cases]
    for path, (content, _) in zip(paths, cases.values(), strict=True):
        path.write_bytes(content)
    found = refusals(paths)
    assert {name: found[f"{name}.npz"] for name, (_, word) in cases.items() if word not in found[f"{name}.npz"]} == {}
    assert not marker.exists()


def test_a_flipped_bit_in_an_array_is_noticed(tmp_path):
    for write in (np.savez, np.savez_compressed):
        with open(tmp_path / "a.npz", "wb") as file:
            write(file, a=np.random.default_rng(0).random(1000))
        content = bytearray((tmp_path / "a.npz").read_bytes())
        content[5000] ^= 4
        (tmp_path / "a.npz").write_bytes(content)
        source = open_weights_file(tmp_path / "a.npz")
        with pytest.raises(WeightsError, match=r"checksum|damaged"):
            source.read()


def test_arrays_beyond_the_budget_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, a=np.zeros(1000), b=np.zeros(1000))
    with open(path, "rb") as file:
        archive = npz.CheckedZip(path, file, path.stat().st_size)
        assert sum(entry.bytes for entry in npz.read_npz_infos(archive, 16_000).values()) == 16_000
        with pytest.raises(WeightsError, match="would take 16,000 bytes of memory, more than 15,999"):
            npz.read_npz_infos(archive, 15_999)
