"""Foreign weight files: valid files are read bit-identically; others are rejected from the header."""

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

#: Run in a fresh process: open files and print the time and memory used. Time is the best of three measurements, so
#: that other load does not count. Memory is the peak over all files above the usage after the imports.
MEASURE_SCRIPT = """
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
MAX_MILLISECONDS, MAX_MEGABYTES = 100, 50


def collect_rejections(paths: list[Path], milliseconds: float = MAX_MILLISECONDS) -> dict[str, str]:
    """Open each file in a fresh process; return the rejections by file name.

    Each must be within the limits, execute nothing, import nothing heavy and make no connection.
    """
    process = subprocess.run(
        [sys.executable, "-c", MEASURE_SCRIPT],
        input=json.dumps([os.fspath(path) for path in paths]),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    slow = {Path(path).name: round(ms) for path, (ms, _) in report["found"].items() if ms > milliseconds}
    assert not slow, f"slower than {milliseconds} ms: {slow}"
    assert report["megabytes"] <= MAX_MEGABYTES
    assert report["events"] == []
    assert report["heavy"] == []
    return {Path(path).name: text for path, (_, text) in report["found"].items()}


def make_safetensors(header: str | bytes | dict, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with that header."""
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def make_tensor_entry(begin: int = 0, end: int = 8, shape=(2,), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def make_header(count: int, size: int = 4) -> str:
    """Return a header of `count` tensors of `size` bytes each."""
    shape = "[1]" if size else "[0]"
    lines = (
        f'"t{i}":{{"dtype":"F32","shape":{shape},"data_offsets":[{size * i},{size * (i + 1)}]}}' for i in range(count)
    )
    return "{" + ",".join(lines) + "}"


EIGHT_BYTES = bytes(8)
TENSOR_LINE = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
#: fault -> (file content, text of the message); large or sparse files are created when needed
MALFORMED_HEADERS = {
    "empty": (b"", "is empty"),
    "only a length": (struct.pack("<Q", 8), "header length does not match the file size"),
    "five bytes": (b"\0" * 5, "truncated"),
    "length 0": (make_safetensors(b"", EIGHT_BYTES), "header length does not match the file size"),
    "length 2^63": (
        make_safetensors({"a": make_tensor_entry()}, EIGHT_BYTES, 1 << 63),
        "header length does not match the file size",
    ),
    "length beyond the file": (
        make_safetensors({"a": make_tensor_entry()}, EIGHT_BYTES, 4000),
        "header length does not match the file size",
    ),
    "invalid UTF-8": (make_safetensors(b'{"\xff\xfe":{}}', EIGHT_BYTES), "not JSON"),
    "a byte order mark": (make_safetensors("\ufeff{" + TENSOR_LINE + "}", EIGHT_BYTES), "not JSON"),
    "array root": (make_safetensors("[1,2]", EIGHT_BYTES), "not a JSON object"),
    "only braces": (make_safetensors("{}"), "no tensors"),
    "cut JSON": (make_safetensors("{" + TENSOR_LINE, EIGHT_BYTES), "not JSON"),
    "negative offset": (
        make_safetensors({"a": make_tensor_entry(-8, 0)}, EIGHT_BYTES),
        "not a list of nonnegative integers",
    ),
    "end before begin": (
        make_safetensors({"a": make_tensor_entry(8, 0)}, EIGHT_BYTES),
        "offsets for a: [8, 0] is not a start and an end",
    ),
    "past the end": (make_safetensors({"a": make_tensor_entry(0, 16, (4,))}, EIGHT_BYTES), "truncated"),
    "overlap": (
        make_safetensors({"a": make_tensor_entry(0, 8), "b": make_tensor_entry(4, 12)}, bytes(12)),
        "a tensor that overlaps b",
    ),
    "overlapping tensors": (
        make_safetensors({"a": make_tensor_entry(), "b": make_tensor_entry()}, EIGHT_BYTES),
        "a tensor that overlaps b",
    ),
    "hole": (
        make_safetensors({"a": make_tensor_entry(0, 8), "b": make_tensor_entry(12, 20)}, bytes(20)),
        "a gap before b",
    ),
    "hole at the start": (make_safetensors({"a": make_tensor_entry(4, 12)}, bytes(12)), "a gap before a"),
    "trailing bytes": (make_safetensors({"a": make_tensor_entry()}, bytes(9)), "after its last tensor"),
    "a zip after the end": (
        make_safetensors({"a": make_tensor_entry()}, EIGHT_BYTES + b"PK\5\6" + bytes(18)),
        "after its last tensor",
    ),
    "shape overflow": (
        make_safetensors({"a": make_tensor_entry(0, 8, (1 << 32, 1 << 32))}, EIGHT_BYTES),
        "needs 73,786,976,294,838,206,464",
    ),
    "shape mismatch": (make_safetensors({"a": make_tensor_entry(0, 8, (3,))}, EIGHT_BYTES), "needs 12"),
    "unknown dtype": (make_safetensors({"a": make_tensor_entry(0, 8, (2,), "F31")}, EIGHT_BYTES), "dtype F31"),
    "eight-bit floats": (
        make_safetensors({"a": make_tensor_entry(0, 8, (8,), "F8_E4M3")}, EIGHT_BYTES),
        "save it as one of F64, F32, F16, BF16",
    ),
    "complex": (make_safetensors({"a": make_tensor_entry(0, 8, (1,), "C64")}, EIGHT_BYTES), "dtype C64"),
    "a list as dtype": (make_safetensors({"a": make_tensor_entry(0, 8, (2,), ["F32"])}, EIGHT_BYTES), "with dtype "),
    "negative shape": (
        make_safetensors({"a": make_tensor_entry(0, 8, (-2,))}, EIGHT_BYTES),
        "not a list of nonnegative integers",
    ),
    "fractional shape": (
        make_safetensors({"a": make_tensor_entry(0, 8, (2.0,))}, EIGHT_BYTES),
        "not a list of nonnegative integers",
    ),
    "true as a shape": (
        make_safetensors({"a": make_tensor_entry(0, 4, (True,))}, bytes(4)),
        "not a list of nonnegative integers",
    ),
    "a shape of 5,000 digits": (
        make_safetensors(TENSOR_LINE.join("{}").replace("[2]", f"[{'9' * 5000}]"), EIGHT_BYTES),
        "not JSON",
    ),
    "three offsets": (
        make_safetensors({"a": make_tensor_entry() | {"data_offsets": [0, 8, 8]}}, EIGHT_BYTES),
        "[0, 8, 8] is not a start and an end",
    ),
    "NaN as a shape": (make_safetensors(TENSOR_LINE.join("{}").replace("[2]", "[NaN]"), EIGHT_BYTES), "not JSON"),
    "one field missing": (make_safetensors({"a": {"dtype": "F32", "shape": [2]}}, EIGHT_BYTES), "with keys other than"),
    "an extra field": (
        make_safetensors({"a": make_tensor_entry() | {"stride": [1]}}, EIGHT_BYTES),
        "with keys other than",
    ),
    "a number as a tensor": (make_safetensors({"a": 3}, EIGHT_BYTES), "with keys other than"),
    "nested 100,000 deep": (
        make_safetensors("{" + TENSOR_LINE + ',"b":' + "[" * 100_000 + "]" * 100_000 + "}", EIGHT_BYTES),
        "not JSON",
    ),
    "objects 100,000 deep": (make_safetensors('{"a":' * 100_000 + "1" + "}" * 100_000, EIGHT_BYTES), "not JSON"),
    "a number in the metadata": (
        make_safetensors({"a": make_tensor_entry(), "__metadata__": {"n": 3}}, EIGHT_BYTES),
        "metadata",
    ),
    "a list as metadata": (
        make_safetensors({"a": make_tensor_entry(), "__metadata__": ["n"]}, EIGHT_BYTES),
        "metadata",
    ),
    "header of 101 MB": (lambda: struct.pack("<Q", 101 << 20) + b"{", "a header of"),
    # accepted by the safetensors library
    "a key twice": (make_safetensors("{" + TENSOR_LINE + "," + TENSOR_LINE + "}", EIGHT_BYTES), "'a' twice"),
    "a key twice, once in escapes": (
        make_safetensors("{" + TENSOR_LINE + "," + TENSOR_LINE.replace('"a"', '"\\u0061"') + "}", EIGHT_BYTES),
        "'a' twice",
    ),
    "a field twice": (
        make_safetensors(TENSOR_LINE.join("{}").replace('"F32"', '"F32","dtype":"I32"'), EIGHT_BYTES),
        "'dtype' twice",
    ),
    "no elements": (
        make_safetensors({"a": make_tensor_entry(), "z": make_tensor_entry(8, 8, (0, 3))}, EIGHT_BYTES),
        "without elements",
    ),
    "empty tensor inside another": (
        make_safetensors({"a": make_tensor_entry(), "z": make_tensor_entry(0, 0, (0,))}, EIGHT_BYTES),
        "without elements",
    ),
    "a path as a name": (make_safetensors({"../../etc/passwd": make_tensor_entry()}, EIGHT_BYTES), "not a valid name"),
    "an absolute name": (make_safetensors({"/etc/passwd": make_tensor_entry()}, EIGHT_BYTES), "not a valid name"),
    "a drive as a name": (make_safetensors({"C:\\weights": make_tensor_entry()}, EIGHT_BYTES), "not a valid name"),
    "an empty name": (make_safetensors({"": make_tensor_entry()}, EIGHT_BYTES), "not a valid name"),
    "a newline in a name": (make_safetensors({"a\nb": make_tensor_entry()}, EIGHT_BYTES), r"'a\nb'"),
    "an escape sequence as a name": (make_safetensors({"\x1b[2J": make_tensor_entry()}, EIGHT_BYTES), r"'\x1b[2J'"),
    "an incomplete character in a name": (
        make_safetensors('{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', EIGHT_BYTES),
        r"'\ud800'",
    ),
    "a name of 5,000 letters": (make_safetensors({"a" * 5000: make_tensor_entry()}, EIGHT_BYTES), "..."),
    "50 MB of metadata": (lambda: struct.pack("<Q", 50 << 20) + b'{"__metadata__":{"a":"b', "a header of"),
    "5,001 tensors": (lambda: make_safetensors(make_header(5_001), bytes(4 * 5_001)), "more than 5,000"),
    "100,000 tensors": (lambda: make_safetensors(make_header(100_000), bytes(400_000)), "more than 5,000 tensors"),
    "400,000 tensors without elements": (lambda: make_safetensors(make_header(400_000, 0)), "a header of"),
    "8 MB of empty lists": (lambda: make_safetensors("[" + "[]," * 2_700_000 + "[]]", EIGHT_BYTES), "fields"),
    "8 MB of small metadata": (
        lambda: make_safetensors(
            '{"__metadata__":{' + ",".join(f'"{i}":"b"' for i in range(600_000)) + "}}", EIGHT_BYTES
        ),
        "fields",
    ),
    "8 MB in wide characters": (
        lambda: make_safetensors('{"__metadata__":{"a":"\U0001f600' + "b" * 8_000_000 + '"}}', EIGHT_BYTES),
        "plain ASCII",
    ),
    "8 MB with one wide escape": (
        lambda: make_safetensors('{"__metadata__":{"a":"\\ud83d\\ude00' + "b" * 8_000_000 + '"}}', EIGHT_BYTES),
        "plain ASCII",
    ),
}
#: not weights
FOREIGN_FILES = {
    "page.safetensors": (b"<!DOCTYPE html><title>404</title>", "web page"),
    "pointer.safetensors": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    "one.npy": (b"\x93NUMPY\1\0v\0{", "single array"),
    "keras.h5": (b"\x89HDF\r\n\x1a\n", "HDF5"),
    "notes.txt": (b"these are no weights, but some text", "not a weights file"),
    "photo.npz": (b"\xff\xd8\xff\xe0" * 20, "not a weights file"),
    "zeros": (bytes(1000), "not a weights file"),
}


def test_malformed_headers_are_rejected_before_allocation(tmp_path):
    paths, expected = [], {}
    for name, (content, word) in {
        f"{key}.safetensors": case for key, case in MALFORMED_HEADERS.items()
    }.items() | FOREIGN_FILES.items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(content() if callable(content) else content)
        if " MB" in name:
            os.truncate(paths[-1], max(paths[-1].stat().st_size, 102 << 20))
        expected[name] = word
    refusals = collect_rejections(paths)
    assert {name: text for name, text in refusals.items() if expected[name] not in text} == {}
    assert all(name in text for name, text in refusals.items())  # each message names its file


def test_the_largest_header_is_checked_within_time_and_memory_limits(tmp_path):
    """A header of 5,000 tensors, of which the last is invalid."""
    path = tmp_path / "last one wrong.safetensors"
    path.write_bytes(make_safetensors(make_header(5_000)[:-3] + "9]}}", bytes(20_000)))
    assert "t4999" in collect_rejections([path])[path.name]


@pytest.mark.parametrize("name", ["nothing", "folder", "pipe", "a\0b"])
def test_folders_and_pipes_are_rejected_without_blocking(tmp_path, name):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif name == "pipe":
        os.mkfifo(path)
    with pytest.raises(WeightsError, match=r"no weights at|folder|cannot be opened"):
        open_weights_file(path)


def make_sample_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
        "ünïcode/naïve:0": torch.ones(1),
    }
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensors[str(dtype)] = torch.randn(3, 5, generator=generator).to(dtype)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        tensors[str(dtype)] = torch.randint(0, 100, (2, 1, 3), generator=generator).to(dtype)
    return tensors


def are_states_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "weights"])
def test_safetensors_are_read_bit_identically_under_any_file_name(tmp_path, name):
    path, tensors = tmp_path / name, make_sample_tensors()
    path.write_bytes(save(tensors, {"format": "pt", "note": "ünïcode"}))
    source = open_weights_file(path)
    assert (source.kind, source.path, source.section) == ("safetensors", path, "")
    assert source.metadata == {"format": "pt", "note": "ünïcode"}
    assert source.entries == {
        key: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for key, t in tensors.items()
    }
    assert sum(entry.nbytes for entry in source.entries.values()) == sum(t.nbytes for t in tensors.values())
    assert source.entries["torch.int8"].elements == 6
    assert are_states_equal(source.read(), tensors)
    assert list(source.read(["torch.bfloat16", "scalar", "scalar"])) == ["torch.bfloat16", "scalar"]
    assert source.read([]) == {}


def test_tensors_are_independent_of_later_file_changes(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(save({"a": torch.ones(4)}))
    tensors = open_weights_file(path).read()
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(tensors["a"], torch.ones(4))
    tensors["a"].zero_()  # is writable


def test_padded_and_unordered_headers_are_read(tmp_path):
    path = tmp_path / "weights.safetensors"
    header = json.dumps({"b": make_tensor_entry(4, 8, (1,)), "a": make_tensor_entry(0, 4, (1,), "I32")}) + " " * 13
    path.write_bytes(make_safetensors(header, struct.pack("<if", 7, 0.5)))
    tensors = open_weights_file(path).read()
    assert (tensors["a"].item(), tensors["b"].item()) == (7, 0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_non_finite_values_are_rejected_by_name(tmp_path, value, dtype):
    path, invalid_values = tmp_path / "weights.safetensors", torch.zeros(2, 3, dtype=dtype)
    invalid_values[1, 1] = value
    path.write_bytes(save({"good": torch.ones(3), "bad": invalid_values}))
    source = open_weights_file(path)
    assert list(source.read(["good"])) == ["good"]
    with pytest.raises(WeightsError, match="a value in bad that is NaN or infinite"):
        source.read()


def test_missing_tensor_names_suggest_the_nearest(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(save({"head.weight": torch.ones(3)}))
    with pytest.raises(WeightsError, match=r"no tensor head.weigth\n  did you mean head.weight"):
        open_weights_file(path).read(["head.weigth"])


def test_files_that_change_before_reading_are_rejected(tmp_path):
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


def test_fuzzed_headers_are_rejected_or_match_safetensors(tmp_path):
    """Mutated files are rejected with a WeightsError; accepted files are read as the safetensors library reads them."""
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
            mutation = rng.randrange(4)
            if mutation == 0:
                content[at] = rng.randrange(256)
            elif mutation == 1:
                del content[at : at + rng.randint(1, 6)]
            elif mutation == 2:
                content[at:at] = rng.choice(pieces)
            else:
                content[at : at + 1] = rng.choice(pieces)
        if rng.random() < 0.5:  # repair the length, so that the parser of the header is reached
            header = bytes(content[8 : len(content) - 32])
            content = bytearray(make_safetensors(header, bytes(content[-32:])))
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
            pytest.fail(f"accepted a file that the library rejects: {error} in {bytes(content[:200])}")
        except WeightsError as error:
            if "NaN" not in str(error):
                raise
    assert accepted > 20


DTYPES = [getattr(torch, name) for name in SAFETENSORS_DTYPES.values()]
TENSOR_NAMES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=12).filter(
    lambda name: ".." not in name and name[0] not in "/\\" and name[1:2] != ":" and name != "__metadata__"
)


@given(
    st.dictionaries(
        TENSOR_NAMES,
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), max_size=4)),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=100)
def test_saving_is_deterministic(tmp_path_factory, specs):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(0, 2, shape, generator=generator).to(dtype) for name, (dtype, shape) in specs.items()
    }
    path = tmp_path_factory.getbasetemp() / "round.safetensors"
    path.write_bytes(save(tensors))
    assert save(open_weights_file(path).read()) == path.read_bytes()


# npz


def to_npy_bytes(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=array.dtype.hasobject)
    return file.getvalue()


def make_npy_file(text: str, data: bytes = b"", version: int = 1) -> bytes:
    """Return a .npy file with that header."""
    raw = text.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(raw)) + raw + data


def make_zip(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return file.getvalue()


def patch_zip_entry(content: bytes, offset: int, value: bytes, directory: bool = True, local: bool = True) -> bytes:
    """Return a zip with changed bytes in its first member's entries; `offset` is that in the directory entry."""
    patched = bytearray(content)
    if directory:
        at = patched.index(b"PK\1\2") + offset
        patched[at : at + len(value)] = value
    if local:
        at = patched.index(b"PK\3\4") + offset - 2
        patched[at : at + len(value)] = value
    return bytes(patched)


class PickleMarker:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_arrays_are_read_bit_identically(tmp_path):
    arrays = {key: value.numpy() for key, value in make_sample_tensors().items() if value.dtype != torch.bfloat16}
    arrays |= {
        "Transformer/block_0/kernel": np.asfortranarray(np.arange(24, dtype=np.float32).reshape(2, 3, 4)),
        "0": np.float32(3),
    }
    for name, write in {"plain.npz": np.savez, "small.npz": np.savez_compressed, "npz.pt": np.savez}.items():
        with open(tmp_path / name, "wb") as file:
            write(file, **arrays)
        source = open_weights_file(tmp_path / name)
        assert source.kind == "npz"
        assert are_states_equal(
            source.read(), {key: torch.from_numpy(np.array(value, order="C")) for key, value in arrays.items()}
        )
        assert all(value.is_contiguous() for value in source.read().values())


@pytest.mark.parametrize("dtype_code", ["|V2", "<V2"])
def test_two_byte_void_arrays_are_bfloat16(tmp_path, dtype_code):
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    text = f"{{'descr': '{dtype_code}', 'fortran_order': False, 'shape': (4, 3), }}"
    (tmp_path / "a.npz").write_bytes(
        make_zip({"a.npy": make_npy_file(text, values.view(torch.int16).numpy().tobytes())})
    )
    assert torch.equal(open_weights_file(tmp_path / "a.npz").read()["a"], values)


def test_all_npy_header_versions_are_read(tmp_path):
    text, data = "{'descr': '<i2', 'fortran_order': False, 'shape': (2L,), }", struct.pack("<2h", 1, 2)
    (tmp_path / "a.npz").write_bytes(make_zip({f"{v}.npy": make_npy_file(text, data, v) for v in (1, 2, 3)}))
    assert all(value.tolist() == [1, 2] for value in open_weights_file(tmp_path / "a.npz").read().values())


def test_malformed_arrays_are_rejected_from_their_header(tmp_path):
    marker, array_bytes = tmp_path / "marker", to_npy_bytes(np.arange(6.0, dtype=np.float32))
    evil = to_npy_bytes(np.array([PickleMarker(marker)], dtype=object))
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"
    valid_archive = make_zip({"a.npy": array_bytes})
    big = io.BytesIO()
    with zipfile.ZipFile(big, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("bomb.npy", "w") as member:
        member.write(make_npy_file(header.replace("2,", f"{25 << 20},")))
        for _ in range(100):
            member.write(bytes(1 << 20))
    duplicate_members = make_zip({"a.npy": array_bytes, "b.npy": array_bytes}).replace(b"b.npy", b"a.npy")
    cases = {
        "objects": (make_zip({"a.npy": evil}), "has objects in 'a'"),
        "objects after a valid array": (make_zip({"a.npy": array_bytes, "b.npy": evil}), "has objects in 'b'"),
        "objects, other header": (
            make_zip({"a.npy": make_npy_file(header.replace("<f4", "|O"), bytes(8))}),
            "has objects",
        ),
        "fields": (
            make_zip({"a.npy": to_npy_bytes(np.zeros(2, [("x", "<f4"), ("y", "<f4")]))}),
            "an invalid numpy header",
        ),
        "code as a dtype": (
            make_zip(
                {"a.npy": make_npy_file(header.replace("'<f4'", "__import__('os').system('touch x')"), EIGHT_BYTES)}
            ),
            "an invalid numpy header",
        ),
        "pickle in the dtype's metadata": (
            make_zip({"a.npy": make_npy_file(header.replace("'<f4'", "('<f4', {'pickle': 1})"), EIGHT_BYTES)}),
            "objects",
        ),
        "a pickle as an array": (make_zip({"a.npy": b"cos\nsystem\n(S'touch x'\ntR."}), "which is not an array"),
        "a pickle next to arrays": (
            make_zip({"a.npy": array_bytes, "evil.pkl": b"cos\nsystem\n(S'touch x'\ntR."}),
            "evil.pkl",
        ),
        "a checkpoint next to arrays": (make_zip({"a.npy": array_bytes, "archive/data.pkl": b"."}), "data.pkl"),
        "text": (make_zip({"a.npy": to_npy_bytes(np.array(["ab"]))}), "dtype <U2"),
        "other byte order": (make_zip({"a.npy": to_npy_bytes(np.zeros(2, ">f4"))}), "dtype >f4"),
        "complex": (make_zip({"a.npy": to_npy_bytes(np.zeros(2, np.complex64))}), "dtype <c8"),
        "no elements": (make_zip({"a.npy": to_npy_bytes(np.zeros((0, 3), np.float32))}), "without elements"),
        "4 TB": (
            make_zip({"a.npy": make_npy_file(header.replace("2,", f"{1 << 40},"), EIGHT_BYTES)}),
            "needs 4,398,046,511,104",
        ),
        "4 TB, deflated": (
            make_zip({"a.npy": make_npy_file(header.replace("2,", f"{1 << 40},"), EIGHT_BYTES)}, zipfile.ZIP_DEFLATED),
            "needs 4,398",
        ),
        "more data than in the header": (
            make_zip({"a.npy": make_npy_file(header, bytes(100))}, zipfile.ZIP_DEFLATED),
            "needs 8",
        ),
        "a bomb of 100 MB": (big.getvalue(), "would unpack to 104,857,"),
        "negative shape": (
            make_zip({"a.npy": make_npy_file(header.replace("2,", "-2,"), EIGHT_BYTES)}),
            "an invalid numpy header",
        ),
        "a header longer than the member": (
            make_zip({"a.npy": b"\x93NUMPY\2\0\xff\xff\xff\x7f{"}),
            "an invalid numpy header",
        ),
        "version 9": (make_zip({"a.npy": make_npy_file(header, EIGHT_BYTES, 9)}), "which is not an array"),
        "nested brackets": (make_zip({"a.npy": make_npy_file("(" * 9000)}), "an invalid numpy header"),
        "a path as a name": (make_zip({"../../etc/a.npy": array_bytes}), "not a valid name"),
        "the same name twice": (duplicate_members, "'a.npy' twice"),
        "encrypted": (patch_zip_entry(valid_archive, 8, b"\1\0"), "encrypted"),
        "encryption flag in the directory only": (patch_zip_entry(valid_archive, 8, b"\1\0", local=False), "encrypted"),
        "encryption flag in the member only": (
            patch_zip_entry(valid_archive, 8, b"\1\0", directory=False),
            "contradicts its directory",
        ),
        "strongly encrypted": (patch_zip_entry(valid_archive, 8, b"\x40\0"), "encrypted"),
        "another method": (patch_zip_entry(valid_archive, 10, b"\x0c\0"), "method 12"),
        "another method in the member": (
            patch_zip_entry(valid_archive, 10, b"\x08\0", directory=False),
            "contradicts its directory",
        ),
        "two sizes": (patch_zip_entry(valid_archive, 24, struct.pack("<I", 9)), "contradictory sizes"),
        "a size beyond the file": (patch_zip_entry(valid_archive, 20, struct.pack("<2I", 1 << 24, 1 << 24)), "overlap"),
        "another name in the member": (valid_archive.replace(b"a.npy", b"b.npy", 1), "contradicts its directory"),
        "a member offset in the directory": (
            patch_zip_entry(valid_archive, 42, struct.pack("<I", 100), local=False),
            "contradicts its directory",
        ),
        "cut": (valid_archive[:-5], "truncated"),
        "a comment": (valid_archive[:-2] + b"\3\0abc", "after its end"),
        "data before the zip": (b"PK\3\4" + valid_archive, "before or inside"),
        "a wrong directory offset": (valid_archive[:-6] + struct.pack("<I", 7) + b"\0\0", "before or inside"),
        "a truncated directory": (
            valid_archive[:-10] + struct.pack("<2I", 10, len(valid_archive) - 32) + b"\0\0",
            "damaged zip",
        ),
        "too many members": (make_zip({f"{i}": b"" for i in range(10_001)}), "more than 10,000 members"),
        "no arrays": (make_zip({"a.txt": b"a"}), "neither numpy arrays nor"),
        "no members": (make_zip({}), "neither numpy arrays nor"),
    }
    paths = [tmp_path / f"{name}.npz" for name in cases]
    for path, (content, _) in zip(paths, cases.values(), strict=True):
        path.write_bytes(content)
    refusals = collect_rejections(paths)
    assert {
        name: refusals[f"{name}.npz"] for name, (_, word) in cases.items() if word not in refusals[f"{name}.npz"]
    } == {}
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


def test_arrays_beyond_the_memory_budget_are_rejected(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, a=np.zeros(1000), b=np.zeros(1000))
    with open(path, "rb") as file:
        archive = npz.CheckedZip(path, file, path.stat().st_size)
        assert sum(entry.nbytes for entry in npz.read_npz_infos(archive, 16_000).values()) == 16_000
        with pytest.raises(WeightsError, match="would take 16,000 bytes of memory, more than 15,999"):
            npz.read_npz_infos(archive, 15_999)
