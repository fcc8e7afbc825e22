"""safetensors files: the header, of which every byte is checked before a tensor is read, and the tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from vitreous.weights.entry import AGAIN, FLOATING, MAX_TENSORS, SAVE, SMALLER, Entry, check, refuse, regular, shown

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER = 8 << 20  # bytes of a safetensors header
# bytes of a header that is not plain ASCII: one wide character makes Python store four bytes for each
MAX_WIDE = 1 << 20
MAX_FIELDS = 60_000  # commas in a header; each is an object in memory once parsed, and a tensor takes six or seven

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


def safetensors_header(
    path: Path, file: BinaryIO, size: int
) -> tuple[dict[str, Entry], dict[str, str], dict[str, int]]:
    """Entries, metadata, and where in the file (bytes) each tensor begins. Raises WeightsError where any byte is not as
    it should be."""
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length < 2 or length > size - 8:
        refuse(path, "is cut short, or no safetensors file: its header does not fit into it", AGAIN)
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
                SAVE,
            )
        if end - begin != entry.bytes:
            refuse(
                path,
                f"has {end - begin:,} bytes for {shown(name)}, whose shape {entry.shape} needs {entry.bytes:,}",
                SAVE,
            )
        position = end
    if position != size - 8 - length:
        reason = "is cut short" if position > size - 8 - length else "has bytes after its last tensor"
        refuse(path, f"{reason}: {position:,} of tensors, {size - 8 - length:,} in the file", AGAIN)
    return entries, metadata, {name: 8 + length + begin for name, (_, begin, _) in spans.items()}


def parse(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON object of a header: no key twice, no NaN, and never more objects than a header of tensors needs."""
    if text.count(b'"data_offsets"') > MAX_TENSORS:
        refuse(path, f"holds more than {MAX_TENSORS:,} tensors", SMALLER)
    if text.count(b",") > MAX_FIELDS:
        refuse(
            path,
            f"has a header of more than {MAX_FIELDS:,} fields",
            "save the model without its optimizer and metadata",
        )
    if len(text) > MAX_WIDE and not (text.isascii() and b"\\u" not in text):
        refuse(path, f"has a header over {MAX_WIDE:,} bytes that is not plain ASCII", "save it without its metadata")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            refuse(
                path,
                f"has '{shown(twice)}' twice in its header",
                "which of the two is meant cannot be known; save it again",
            )
        return fields

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is no number")

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    # ValueError: not UTF-8, not JSON, or an integer of thousands of digits
    except (ValueError, RecursionError) as error:
        refuse(path, f"has a header that is not JSON ({str(error)[:100]})", AGAIN)
    if not isinstance(header, dict):
        refuse(path, "has a header that is no JSON object", AGAIN)
    return header


def span(path: Path, name: str, value: Any) -> tuple[Entry, int, int]:
    """One line of a safetensors header -> the tensor, and where it begins and ends (bytes after the header)."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        refuse(path, f"describes {shown(name)} by other words than dtype, shape and data_offsets", SAVE)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS:
        known = ", ".join(key for key, torch in SAFETENSORS.items() if torch in FLOATING)
        refuse(
            path, f"has {shown(name)} as {shown(str(dtype))}, which a model does not take", f"save it as one of {known}"
        )
    for numbers in (shape, offsets):
        if type(numbers) is not list or any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
            refuse(path, f"has a shape or an offset of {shown(name)} that is no list of whole numbers from 0", SAVE)
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        refuse(path, f"has {shown(name)} end before it begins", SAVE)
    return Entry(tuple(shape), SAFETENSORS[dtype]), offsets[0], offsets[1]


def read_safetensors(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read those tensors of a safetensors file, or all, in their shapes. Raises WeightsError as `open_weights` does."""
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
