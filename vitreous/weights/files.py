"""Weight files as data: opened from their header, checked, and only then read.

Three kinds, told apart by what a file holds, never by its name: safetensors, npz (numpy's zip of arrays), and what
`torch.save` writes, whose pickle is looked at and never run. Refusing needs neither torch nor numpy, and no tensor.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from vitreous.errors import WeightsError, nearest

if TYPE_CHECKING:
    from torch import Tensor

MAX_TENSORS = 5_000  # of a file; the largest models here have 2,000, and looking at more takes longer than 0.1 s
MAX_HEADER = 8 << 20  # bytes of a safetensors header
# bytes of a header that is not plain ASCII: one wide character makes Python store four bytes for each
MAX_WIDE = 1 << 20
MAX_FIELDS = 60_000  # commas in a header; each is an object in memory once parsed, and a tensor takes six or seven
MAX_NAME = 512  # characters

#: torch's name of a dtype -> bytes of an element; what a model's weights may be stored as
ITEM = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
FLOATING = ("float32", "float16", "bfloat16", "float64")
#: safetensors' name of a dtype -> torch's
SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
PICKLED = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
#: how files begin that are taken for weights, and what they are
OTHERS = {
    b"version https://git-lfs": ("is a Git LFS pointer, not the weights", "fetch them with `git lfs pull`"),
    b"<": ("is a web page, not weights", "download it again, from the link to the file itself"),
    b"\x93NUMPY": ("is a single array", "save the weights by name: numpy.savez('weights.npz', **arrays)"),
    b"\x89HDF": ("is an HDF5 file, which is not read", "convert it to .safetensors"),
}
KINDS = "safetensors, npz and PyTorch files (.pt, .pth, .bin) are read"


@dataclass(frozen=True)
class Entry:
    """One tensor of a file, as its header has it; `dtype` is torch's name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The memory it takes."""
        return self.elements * ITEM[self.dtype]


@dataclass(frozen=True)
class Source:
    """A weights file whose header was read and found sound; none of its tensors is in memory yet.

    `section` is the key of the nested state dict that was chosen in a pickled file ("model", "teacher", ...).
    """

    path: Path
    kind: str
    entries: dict[str, Entry]
    metadata: dict[str, str] = field(default_factory=dict)
    section: str = ""

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Those tensors, or all, as they are stored, in memory of their own.

        Raises WeightsError for a name that is not there, a value that is NaN or infinite, and a file that changed.
        """
        chosen = list(self.entries) if names is None else list(dict.fromkeys(names))
        for name in chosen:
            if name not in self.entries:
                raise WeightsError(f"{self.path} has no tensor {shown(name)}", nearest(name, self.entries))
        if not chosen:
            return {}
        if self.kind == "pickle":
            from vitreous.weights import pickled

            tensors = pickled.read(self.path, self.section, {name: self.entries[name] for name in chosen})
        elif self.kind == "npz":
            from vitreous.weights import npz

            tensors = npz.read(self.path, chosen)
        else:
            tensors = read_safetensors(self.path, chosen)
        for name in chosen:
            self.verify(name, tensors[name])
        return {name: tensors[name] for name in chosen}

    def verify(self, name: str, tensor: Tensor) -> None:
        """Raise WeightsError unless a tensor is what the header promised, and finite."""
        entry = self.entries[name]
        if (tuple(tensor.shape), str(tensor.dtype)) != (entry.shape, f"torch.{entry.dtype}"):
            refuse(self.path, f"changed while it was read: {name} is another tensor", "read it again")
        if entry.dtype in FLOATING and not all(math.isfinite(end) for end in tensor.aminmax()):
            refuse(
                self.path,
                f"has a value in {name} that is NaN or infinite",
                "the training that wrote it diverged, or the file is damaged",
            )


def open_weights(path: str | os.PathLike[str]) -> Source:
    """The header of a weights file, checked. Raises WeightsError for anything that is not one, or not sound."""
    path = Path(path)
    with regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        kind = kind_of(path, file.read(32), size)
        if kind == "safetensors":
            entries, metadata, _ = safetensors_header(path, file, size)
            return Source(path, kind, entries, metadata)
        from vitreous.weights import npz, pickled

        archive = npz.Archive(path, file, size) if kind == "zip" else None
        if archive and any(name.endswith(".npy") for name in archive.members):
            return Source(path, "npz", check(path, npz.look(archive)))
        entries, section = pickled.look_archive(archive) if archive else pickled.look_stream(path, file, size)
        return Source(path, "pickle", check(path, entries), section=section)


def regular(path: Path) -> BinaryIO:
    """A regular file, open for reading. Raises WeightsError for none, a folder, a pipe or a device, without waiting for
    one."""
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise WeightsError(f"no weights at {path}", f"name a file: {KINDS}") from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be opened ({error})") from None
    if stat.S_ISREG(os.fstat(number).st_mode):
        return os.fdopen(number, "rb")
    os.close(number)
    refuse(path, "is not a file of weights but a folder, a pipe or a device", f"name a file: {KINDS}")


def kind_of(path: Path, head: bytes, size: int) -> str:
    """`safetensors`, `zip` or `pickle`, from the first bytes; the suffix only chooses between refusals."""
    if not size:
        refuse(path, "is empty", "download or save it again")
    if head[:2] == b"PK":
        return "zip"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return "safetensors"
    if head[:1] == b"\x80" and head[1] <= 5:  # PROTO, with a protocol there is
        return "pickle"
    for start, (what, hint) in OTHERS.items():
        if head.startswith(start):
            refuse(path, what, hint)
    if path.suffix.lower() in PICKLED:
        return "pickle"
    if path.suffix.lower() == ".safetensors":
        return "safetensors"
    refuse(path, "is no weights file", KINDS)


def refuse(path: Path, what: str, hint: str = "") -> NoReturn:
    """Raise WeightsError: this file is not read, and why."""
    raise WeightsError(f"{path} {what}", hint)


def shown(name: str) -> str:
    """A name from a foreign file as it may be printed: one line, ASCII, not long."""
    return ascii(name[:MAX_NAME])[1:-1] if len(name) <= 80 else ascii(name[:77])[1:-1] + "..."


def check(path: Path, entries: dict[str, Entry]) -> dict[str, Entry]:
    """The same entries. Raises WeightsError for none, too many, empty tensors, and names that are none."""
    if not entries:
        refuse(path, "holds no tensors", "save a model's state dict")
    if len(entries) > MAX_TENSORS:
        refuse(
            path, f"holds {len(entries):,} tensors, more than {MAX_TENSORS:,}", "save the model without its optimizer"
        )
    for name, entry in entries.items():
        if (
            not name
            or len(name) > MAX_NAME
            or not name.isprintable()
            or ".." in name
            or name[0] in "/\\"
            or name[1:2] == ":"
        ):
            refuse(path, f"has a tensor named '{shown(name)}', which is no name", "rename it and save the file again")
        if 0 in entry.shape:
            refuse(
                path,
                f"has the tensor {shown(name)} without elements, {entry.shape}",
                "leave it out and save the file again",
            )
    return entries


def safetensors_header(
    path: Path, file: BinaryIO, size: int
) -> tuple[dict[str, Entry], dict[str, str], dict[str, int]]:
    """Entries, metadata, and where in the file (bytes) each tensor begins. Raises WeightsError where any byte is not as
    it should be."""
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length < 2 or length > size - 8:
        refuse(
            path, "is cut short, or no safetensors file: its header does not fit into it", "download or save it again"
        )
    if length > MAX_HEADER:
        refuse(path, f"has a header of {length:,} bytes, more than {MAX_HEADER:,}", "save it without its metadata")
    header = parse(path, file.read(length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        refuse(path, "has metadata that is not text", "metadata is names and strings")
    spans = {name: span(path, name, value) for name, value in header.items()}
    entries = check(path, {name: entry for name, (entry, _, _) in spans.items()})
    position = 0
    for name, (entry, begin, end) in sorted(spans.items(), key=lambda item: item[1][1]):
        if begin != position:
            refuse(
                path,
                f"has {'a hole before' if begin > position else 'other tensors in the place of'} {shown(name)}",
                "save it again",
            )
        if end - begin != entry.bytes:
            refuse(
                path,
                f"has {end - begin:,} bytes for {shown(name)}, whose shape {entry.shape} needs {entry.bytes:,}",
                "save it again",
            )
        position = end
    if position != size - 8 - length:
        what = "is cut short" if position > size - 8 - length else "has bytes after its last tensor"
        refuse(path, f"{what}: {position:,} of tensors, {size - 8 - length:,} in the file", "download or save it again")
    return entries, metadata, {name: 8 + length + begin for name, (_, begin, _) in spans.items()}


def parse(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON object of a header: no key twice, no NaN, and never more objects than a header of tensors needs."""
    if text.count(b'"data_offsets"') > MAX_TENSORS:
        refuse(path, f"holds more than {MAX_TENSORS:,} tensors", "save the model without its optimizer")
    if text.count(b",") > MAX_FIELDS:
        refuse(
            path,
            f"has a header of more than {MAX_FIELDS:,} fields",
            "save the model without its optimizer and metadata",
        )
    if len(text) > MAX_WIDE and not (text.isascii() and b"\\u" not in text):
        refuse(path, f"has a header over {MAX_WIDE:,} bytes that is not plain ASCII", "save it without its metadata")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            refuse(
                path,
                f"has '{shown(twice)}' twice in its header",
                "which of the two is meant cannot be known; save it again",
            )
        return found

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is no number")

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    # ValueError: not UTF-8, not JSON, or an integer of thousands of digits
    except (ValueError, RecursionError) as error:
        refuse(path, f"has a header that is not JSON ({str(error)[:100]})", "download or save it again")
    if not isinstance(header, dict):
        refuse(path, "has a header that is no JSON object", "download or save it again")
    return header


def span(path: Path, name: str, value: Any) -> tuple[Entry, int, int]:
    """One line of a safetensors header -> the tensor, and where it begins and ends (bytes after the header)."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        refuse(path, f"describes {shown(name)} by other words than dtype, shape and data_offsets", "save it again")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS:
        known = ", ".join(key for key, torch in SAFETENSORS.items() if torch in FLOATING)
        refuse(
            path, f"has {shown(name)} as {shown(str(dtype))}, which a model does not take", f"save it as one of {known}"
        )
    for numbers in (shape, offsets):
        if type(numbers) is not list or any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
            refuse(
                path,
                f"has a shape or an offset of {shown(name)} that is no list of whole numbers from 0",
                "save it again",
            )
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        refuse(path, f"has {shown(name)} end before it begins", "save it again")
    return Entry(tuple(shape), SAFETENSORS[dtype]), offsets[0], offsets[1]


def read_safetensors(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Those tensors of a safetensors file, or all. Raises WeightsError as `open_weights` does."""
    import torch

    with regular(path) as file:
        entries, _, starts = safetensors_header(path, file, os.fstat(file.fileno()).st_size)
        tensors = {}
        for name in entries if names is None else names:
            if name not in entries:
                refuse(path, f"changed while it was read: {shown(name)} is gone", "read it again")
            content = bytearray(entries[name].bytes)
            file.seek(starts[name])
            if file.readinto(content) != len(content):  # type: ignore[attr-defined]
                refuse(path, "was cut short while it was read", "read it again")
            tensors[name] = torch.frombuffer(content, dtype=getattr(torch, entries[name].dtype)).reshape(
                entries[name].shape
            )
    return tensors
