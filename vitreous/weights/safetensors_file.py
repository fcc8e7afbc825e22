"""Read safetensors files. Every byte of the header is checked before a tensor is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from vitreous.weights.entry import (
    DOWNLOAD_AGAIN_HINT,
    FLOATING_DTYPES,
    MAX_TENSORS,
    SAVE_AGAIN_HINT,
    SAVE_WITHOUT_OPTIMIZER_HINT,
    TensorInfo,
    check_tensor_infos,
    open_regular_file,
    reject_weights_file,
    sanitise_name,
)

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER_BYTES = 8 << 20  # bytes of a safetensors header
# bytes of a header that is not plain ASCII: one wide character makes Python store four bytes for each
MAX_NON_ASCII_HEADER_BYTES = 1 << 20
MAX_HEADER_COMMAS = 60_000  # commas in a header; each becomes an object in memory, and a tensor takes six or seven

#: safetensors' name of a dtype -> torch's
SAFETENSORS_DTYPES = {
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


def read_safetensors_header(
    path: Path, file: BinaryIO, size: int
) -> tuple[dict[str, TensorInfo], dict[str, str], dict[str, int]]:
    """Read the header: the tensors, the metadata, and the file offset (bytes) of each tensor. Raises WeightsError for
    any unexpected byte."""
    file.seek(0)
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length < 2 or length > size - 8:
        reject_weights_file(
            path,
            "is truncated, or not a safetensors file: the header length does not match the file size",
            DOWNLOAD_AGAIN_HINT,
        )
    if length > MAX_HEADER_BYTES:
        reject_weights_file(
            path, f"has a header of {length:,} bytes, more than {MAX_HEADER_BYTES:,}", "save it without its metadata"
        )
    header = parse_header_json(path, file.read(length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        reject_weights_file(path, "has metadata that is not text", "save it with strings as metadata")
    tensor_spans = {name: parse_header_entry(path, name, value) for name, value in header.items()}
    entries = check_tensor_infos(path, {name: entry for name, (entry, _, _) in tensor_spans.items()})
    position = 0
    for name, (entry, begin, end) in sorted(tensor_spans.items(), key=lambda item: item[1][1]):
        if begin != position:
            reject_weights_file(
                path,
                f"has {'a gap before' if begin > position else 'a tensor that overlaps'} {sanitise_name(name)}",
                SAVE_AGAIN_HINT,
            )
        if end - begin != entry.nbytes:
            reject_weights_file(
                path,
                f"has {end - begin:,} bytes for {sanitise_name(name)}; shape {entry.shape} needs {entry.nbytes:,}",
                SAVE_AGAIN_HINT,
            )
        position = end
    if position != size - 8 - length:
        reason = "is truncated" if position > size - 8 - length else "has bytes after its last tensor"
        reject_weights_file(
            path,
            f"{reason}: the tensors need {position:,} bytes, the file has {size - 8 - length:,}",
            DOWNLOAD_AGAIN_HINT,
        )
    return entries, metadata, {name: 8 + length + begin for name, (_, begin, _) in tensor_spans.items()}


def parse_header_json(path: Path, text: bytes) -> dict[str, Any]:
    """Parse the JSON object of a header. Raises WeightsError for duplicate keys, NaN, and more values than a header of
    tensors needs."""
    if text.count(b'"data_offsets"') > MAX_TENSORS:
        reject_weights_file(path, f"contains more than {MAX_TENSORS:,} tensors", SAVE_WITHOUT_OPTIMIZER_HINT)
    if text.count(b",") > MAX_HEADER_COMMAS:
        reject_weights_file(
            path,
            f"has a header of more than {MAX_HEADER_COMMAS:,} fields",
            "save the model without its optimizer and metadata",
        )
    if len(text) > MAX_NON_ASCII_HEADER_BYTES and not (text.isascii() and b"\\u" not in text):
        reject_weights_file(
            path,
            f"has a header over {MAX_NON_ASCII_HEADER_BYTES:,} bytes that is not plain ASCII",
            "save it without its metadata",
        )

    def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return the pairs of a JSON object as a dict. Raises WeightsError if a key occurs twice."""
        fields = dict(pairs)
        if len(fields) != len(pairs):
            seen: set[str] = set()
            duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))
            reject_weights_file(
                path, f"has '{sanitise_name(duplicate)}' twice in its header", "save it again with each name once"
            )
        return fields

    def reject_constant(token: str) -> NoReturn:
        """Raise ValueError for NaN or infinity in JSON."""
        raise ValueError(f"{token} is not a number")

    try:
        header = json.loads(
            text.decode("utf-8"), object_pairs_hook=reject_duplicate_keys, parse_constant=reject_constant
        )
    # ValueError: not UTF-8, not JSON, or an integer of thousands of digits
    except (ValueError, RecursionError) as error:
        reject_weights_file(path, f"has a header that is not JSON ({str(error)[:100]})", DOWNLOAD_AGAIN_HINT)
    if not isinstance(header, dict):
        reject_weights_file(path, "has a header that is not a JSON object", DOWNLOAD_AGAIN_HINT)
    return header


def parse_header_entry(path: Path, name: str, value: Any) -> tuple[TensorInfo, int, int]:
    """Parse a tensor's entry in the header: shape and dtype, and its begin and end, in bytes after the header. Raises
    WeightsError for an invalid entry."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        reject_weights_file(
            path, f"describes {sanitise_name(name)} with keys other than dtype, shape and data_offsets", SAVE_AGAIN_HINT
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        known_dtypes = ", ".join(key for key, dtype_name in SAFETENSORS_DTYPES.items() if dtype_name in FLOATING_DTYPES)
        reject_weights_file(
            path,
            f"has {sanitise_name(name)} with dtype {sanitise_name(str(dtype))}, which weights do not use",
            f"save it as one of {known_dtypes}",
        )
    for integers in (shape, offsets):
        if type(integers) is not list or any(
            type(integer) is not int or not 0 <= integer < 1 << 63 for integer in integers
        ):
            reject_weights_file(
                path,
                f"has a shape or an offset of {sanitise_name(name)} that is not a list of nonnegative integers",
                SAVE_AGAIN_HINT,
            )
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        reject_weights_file(
            path,
            f"has invalid data offsets for {sanitise_name(name)}: "
            f"{sanitise_name(str(offsets))} is not a start and an end",
            SAVE_AGAIN_HINT,
        )
    return TensorInfo(tuple(shape), SAFETENSORS_DTYPES[dtype]), offsets[0], offsets[1]


def read_safetensors(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read the named tensors of a safetensors file, by default all, in their shapes. Raises WeightsError for a damaged
    or changed file."""
    import torch

    with open_regular_file(path) as file:
        entries, _, offsets = read_safetensors_header(path, file, os.fstat(file.fileno()).st_size)
        tensors = {}
        for name in entries if names is None else names:
            if name not in entries:
                reject_weights_file(path, f"changed while reading: {sanitise_name(name)} is missing", "read it again")
            content = bytearray(entries[name].nbytes)
            file.seek(offsets[name])
            if file.readinto(content) != len(content):  # type: ignore[attr-defined]
                reject_weights_file(path, "was truncated while it was read", "read it again")
            tensors[name] = torch.frombuffer(content, dtype=getattr(torch, entries[name].dtype)).reshape(
                entries[name].shape
            )
    return tensors
