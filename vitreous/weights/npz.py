"""Read npz files, and check the zip archives of npz and PyTorch files before anything is unpacked.

An array's shape and dtype come from its header, which is parsed as text; arrays of Python objects are rejected.
"""

from __future__ import annotations

import math
import os
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vitreous.weights.entry import (
    DOWNLOAD_AGAIN_HINT,
    SAVE_AGAIN_HINT,
    SAVE_WITHOUT_OPTIMIZER_HINT,
    TensorInfo,
    open_regular_file,
    reject_weights_file,
    sanitise_name,
)

if TYPE_CHECKING:
    from torch import Tensor

MAX_ZIP_MEMBERS, MAX_DIRECTORY_BYTES = 10_000, 2 << 20  # of a zip; the directory size is in bytes
MAX_UNPACK_RATIO, UNPACK_ALLOWANCE_BYTES = 20, 64 << 20  # a zip may unpack to 20 times its size, or to 64 MiB
MAX_ARRAY_BYTES = 16 << 30  # total bytes of all arrays of a file
MAX_NPY_HEADER_BYTES = 10_000  # bytes of an array's header, numpy's limit

#: numpy's header: the text of a dict, with keys in this order; `L` is the suffix of Python 2's integers
NPY_HEADER = re.compile(
    r"\{'descr': '([<>|=]?\w+)', 'fortran_order': (True|False), 'shape': \(((?:\d{1,19}L?(?:, ?|(?=\))))*)\),? *\} *\n?"
)
#: numpy's name of a dtype -> torch's; numpy has no bfloat16 and stores it as two opaque bytes
NUMPY_DTYPES = {
    "<f8": "float64",
    "<f4": "float32",
    "<f2": "float16",
    "|V2": "bfloat16",
    "<V2": "bfloat16",
    "<i8": "int64",
    "<i4": "int32",
    "<i2": "int16",
    "|i1": "int8",
    "|u1": "uint8",
    "|b1": "bool",
}


class CheckedZip:
    """A zip archive with a checked directory: no duplicate, encrypted or overlapping members, and no implausible
    compression ratio. `members`: directory entries by name. Only `read` and `read_start` unpack, never more than the
    directory states. Raises WeightsError for other archives."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file = path, file
        self.directory_offset = self.find_directory(size)
        try:
            infos = zipfile.ZipFile(file).infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OSError) as error:
            reject_weights_file(path, f"is a damaged zip ({error})", DOWNLOAD_AGAIN_HINT)
        self.members: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            self.check_member(info)
        packed_bytes, unpacked_bytes = sum(info.compress_size for info in infos), sum(info.file_size for info in infos)
        if packed_bytes > size:
            reject_weights_file(path, "is a zip whose members overlap", "download it again from a trusted source")
        if unpacked_bytes > max(UNPACK_ALLOWANCE_BYTES, MAX_UNPACK_RATIO * size):
            reject_weights_file(
                path,
                f"is a zip of {size:,} bytes that would unpack to {unpacked_bytes:,}",
                "save it again: weights do not compress this well",
            )

    def find_directory(self, size: int) -> int:
        """Return the offset of the zip's directory. Raises WeightsError for a comment, a gap, or too many members,
        before the directory is parsed."""
        self.file.seek(max(0, size - 98))
        tail = self.file.read(98)
        if size < 22 or tail[-22:-18] != b"PK\5\6" or tail[-2:] != b"\0\0":
            reject_weights_file(self.path, "is a zip that is truncated, or has data after its end", DOWNLOAD_AGAIN_HINT)
        length, begin = struct.unpack("<2I", tail[-10:-2])
        end = size - 22
        if tail[-42:-38] == b"PK\6\7":  # zip64: the same two numbers, with more bits, in a preceding record
            end = size - 98
            if tail[:4] != b"PK\6\6":
                reject_weights_file(self.path, "is a zip with a damaged directory", DOWNLOAD_AGAIN_HINT)
            length, begin = struct.unpack("<2Q", tail[40:56])
        if begin + length != end:
            reject_weights_file(self.path, "is a zip with data before or inside its directory", DOWNLOAD_AGAIN_HINT)
        self.file.seek(begin)
        if length > MAX_DIRECTORY_BYTES or self.file.read(length).count(b"PK\1\2") > MAX_ZIP_MEMBERS:
            reject_weights_file(
                self.path, f"is a zip of more than {MAX_ZIP_MEMBERS:,} members", SAVE_WITHOUT_OPTIMIZER_HINT
            )
        return begin

    def check_member(self, info: zipfile.ZipInfo) -> None:
        """Check a directory entry and add it to `members`. Raises WeightsError for an entry that weights files do not
        have."""
        name, member = info.orig_filename, f"has the member '{sanitise_name(info.orig_filename)}'"
        if name in self.members:
            reject_weights_file(self.path, f"{member} twice", "save it again with each member once")
        if info.flag_bits & ~0x80E:  # bits 1 and 2: level; 3: sizes follow the data; 11: the name is UTF-8
            reject_weights_file(
                self.path,
                f"{member} with the flags {info.flag_bits:#x}: encrypted, or unsupported",
                "save it again without a password",
            )
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            reject_weights_file(
                self.path, f"{member} compressed by method {info.compress_type}", "save it uncompressed or deflated"
            )
        if info.compress_type == zipfile.ZIP_STORED and info.file_size != info.compress_size:
            reject_weights_file(self.path, f"{member} with contradictory sizes", DOWNLOAD_AGAIN_HINT)
        self.members[name] = info

    def find_member_data(self, info: zipfile.ZipInfo) -> int:
        """Return the offset of a member's data, and move the file there. Raises WeightsError if the member's local
        header contradicts the directory."""
        self.file.seek(info.header_offset)
        header = self.file.read(30)
        signature, flags, method, name, extra = (
            struct.unpack("<4s2x2H16x2H", header) if len(header) == 30 else (b"", 0, 0, 0, 0)
        )
        text = info.orig_filename.encode("utf-8" if flags & 0x800 else "cp437")
        begin = info.header_offset + 30 + name + extra
        if (signature, flags, method) != (b"PK\3\4", info.flag_bits, info.compress_type) or self.file.read(
            name
        ) != text:
            reject_weights_file(
                self.path,
                f"has a member '{sanitise_name(info.orig_filename)}' that contradicts its directory",
                SAVE_AGAIN_HINT,
            )
        if begin + info.compress_size > self.directory_offset:
            reject_weights_file(
                self.path,
                f"has a member '{sanitise_name(info.orig_filename)}' that overlaps the directory",
                DOWNLOAD_AGAIN_HINT,
            )
        self.file.seek(begin)
        return begin

    def read_start(self, name: str, count: int) -> bytes:
        """Unpack and return the first bytes of a member, at most `count`. Raises WeightsError if it is damaged."""
        info = self.members[name]
        self.find_member_data(info)
        packed = self.file.read(min(count, info.compress_size))
        if info.compress_type == zipfile.ZIP_STORED:
            return packed
        try:
            return zlib.decompressobj(-15).decompress(packed, count)
        except zlib.error as error:
            reject_weights_file(
                self.path, f"has a damaged member '{sanitise_name(name)}' ({error})", DOWNLOAD_AGAIN_HINT
            )

    def read(self, name: str) -> bytearray:
        """Unpack and return a full member. Raises WeightsError if its size or checksum differs from the directory's."""
        info = self.members[name]
        self.find_member_data(info)
        content = bytearray(info.compress_size)
        self.file.readinto(content)  # type: ignore[attr-defined]
        if info.compress_type == zipfile.ZIP_DEFLATED:
            unpacker = zlib.decompressobj(-15)
            try:
                content = bytearray(unpacker.decompress(content, info.file_size + 1))
            except zlib.error as error:
                reject_weights_file(
                    self.path, f"has a damaged member '{sanitise_name(name)}' ({error})", DOWNLOAD_AGAIN_HINT
                )
        if len(content) != info.file_size or zlib.crc32(content) != info.CRC:
            reject_weights_file(
                self.path, f"is damaged: the checksum of '{sanitise_name(name)}' is wrong", DOWNLOAD_AGAIN_HINT
            )
        return content


def read_npz_infos(archive: CheckedZip, budget: int = MAX_ARRAY_BYTES) -> dict[str, TensorInfo]:
    """Read shape and dtype of every array in an npz file. Raises WeightsError for arrays of objects, members that are
    not arrays, and more than `budget` bytes in total."""
    entries = {}
    for member in archive.members:
        name = member.removesuffix(".npy")
        if name == member:
            reject_weights_file(
                archive.path,
                f"has the member '{sanitise_name(member)}', which is not an array",
                "save only the weights, with numpy.savez",
            )
        entries[name] = parse_npz_member_header(archive, member)[0]
    total = sum(entry.nbytes for entry in entries.values())
    if total > budget:
        reject_weights_file(
            archive.path, f"would take {total:,} bytes of memory, more than {budget:,}", SAVE_WITHOUT_OPTIMIZER_HINT
        )
    return entries


def parse_npz_member_header(archive: CheckedZip, member: str) -> tuple[TensorInfo, bool, int]:
    """Parse the header of an array: its shape and dtype, whether it has Fortran order, and the offset of its data in
    bytes. Raises WeightsError for an invalid header, and unless the member has the corresponding length."""
    head, name = archive.read_start(member, MAX_NPY_HEADER_BYTES + 12), sanitise_name(member.removesuffix(".npy"))
    if head[:6] != b"\x93NUMPY" or head[6:8] not in (b"\1\0", b"\2\0", b"\3\0"):
        reject_weights_file(
            archive.path, f"has the member '{name}', which is not an array", "save only the weights, with numpy.savez"
        )
    begin = 10 if head[6] == 1 else 12
    start = begin + int.from_bytes(head[8:begin], "little")
    text = head[begin:start].decode("utf-8", "replace") if start <= len(head) else ""
    matches = NPY_HEADER.fullmatch(text)
    if "'|O'" in text or "pickle" in text:
        reject_weights_file(
            archive.path,
            f"has objects in '{name}', not numbers, which would require unpickling",
            "save arrays of numbers only",
        )
    if not matches:
        reject_weights_file(
            archive.path, f"has an invalid numpy header for '{name}'", "save the weights again, with numpy.savez"
        )
    if matches[1] not in NUMPY_DTYPES:
        reject_weights_file(
            archive.path, f"has '{name}' with dtype {matches[1]}, which weights do not use", "save it as float32"
        )
    entry = TensorInfo(tuple(int(length) for length in re.findall(r"\d+", matches[3])), NUMPY_DTYPES[matches[1]])
    size = archive.members[member].file_size
    if start + entry.nbytes != size:
        reject_weights_file(
            archive.path,
            f"has {size - start:,} bytes for '{name}', whose shape {entry.shape} needs {entry.nbytes:,}",
            SAVE_AGAIN_HINT,
        )
    return entry, matches[2] == "True", start


def read_npz_tensors(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Read the named arrays as row-major tensors of their shapes. Raises WeightsError for a damaged or changed file."""
    import torch

    tensors = {}
    with open_regular_file(path) as file:
        archive = CheckedZip(path, file, os.fstat(file.fileno()).st_size)
        for name in names:
            if f"{name}.npy" not in archive.members:
                reject_weights_file(path, f"changed while reading: {sanitise_name(name)} is missing", "read it again")
            entry, fortran, start = parse_npz_member_header(archive, f"{name}.npy")
            if not math.prod(entry.shape):
                reject_weights_file(path, f"changed while it was read: {sanitise_name(name)} is empty", "read it again")
            flat = torch.frombuffer(archive.read(f"{name}.npy")[start:], dtype=getattr(torch, entry.dtype))
            if fortran:
                tensors[name] = (
                    flat.reshape(entry.shape[::-1]).permute(*range(len(entry.shape) - 1, -1, -1)).contiguous()
                )
            else:
                tensors[name] = flat.reshape(entry.shape)
    return tensors
