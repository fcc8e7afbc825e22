"""Open weights files as data: the header is read and checked before any tensor.

Three types, detected by content and never by name: safetensors, npz (numpy's zip of arrays), and files of `torch.save`,
whose pickle is scanned and never run. Invalid files are rejected without importing torch or numpy, and without reading
a tensor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vitreous.errors import WeightsError, suggest_nearest
from vitreous.weights import npz, pickled
from vitreous.weights.entry import (
    DOWNLOAD_AGAIN_HINT,
    FLOATING_DTYPES,
    SUPPORTED_FILES_HINT,
    TensorInfo,
    check_tensor_infos,
    open_regular_file,
    reject_weights_file,
    sanitise_name,
)
from vitreous.weights.safetensors_file import read_safetensors, read_safetensors_header

if TYPE_CHECKING:
    from torch import Tensor

PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
#: first bytes of files that are mistaken for weights, and their description
MISTAKEN_SIGNATURES = {
    b"version https://git-lfs": ("is a Git LFS pointer, not the weights", "fetch them with `git lfs pull`"),
    b"<": ("is a web page, not weights", "download it again, from the link to the file itself"),
    b"\x93NUMPY": ("is a single array", "save the weights by name: numpy.savez('weights.npz', **arrays)"),
    b"\x89HDF": ("is an HDF5 file, which is not supported", "convert it to .safetensors"),
}


@dataclass(frozen=True)
class WeightsFile:
    """A weights file with a checked header; no tensor is in memory yet. `kind`: `safetensors`, `npz` or `pickle`.
    `section`: key of the selected nested state dict in a pickled file ("model", "teacher", ...); `other_sections`: keys
    of the other ones."""

    path: Path
    kind: str
    entries: dict[str, TensorInfo]
    metadata: dict[str, str] = field(default_factory=dict)
    section: str = ""
    other_sections: tuple[str, ...] = ()

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read the named tensors, by default all, with their stored dtype, each in separate memory. Raises WeightsError
        for a missing name, a NaN or infinite value, and a file that changed."""
        selected = list(self.entries) if names is None else list(dict.fromkeys(names))
        for name in selected:
            if name not in self.entries:
                raise WeightsError(
                    f"{self.path} has no tensor {sanitise_name(name)}", suggest_nearest(name, self.entries)
                )
        if not selected:
            return {}
        if self.kind == "pickle":
            tensors = pickled.read_pickled_tensors(
                self.path, self.section, {name: self.entries[name] for name in selected}
            )
        elif self.kind == "npz":
            tensors = npz.read_npz_tensors(self.path, selected)
        else:
            tensors = read_safetensors(self.path, selected)
        for name in selected:
            self.check_tensor(name, tensors[name])
        return {name: tensors[name] for name in selected}

    def check_tensor(self, name: str, tensor: Tensor) -> None:
        """Raise WeightsError unless a tensor has the shape and dtype in the header and only finite values."""
        entry = self.entries[name]
        if (tuple(tensor.shape), str(tensor.dtype)) != (entry.shape, f"torch.{entry.dtype}"):
            reject_weights_file(self.path, f"changed while it was read: {name} differs", "read it again")
        if entry.dtype in FLOATING_DTYPES and not all(math.isfinite(extreme) for extreme in tensor.aminmax()):
            reject_weights_file(
                self.path,
                f"has a value in {name} that is NaN or infinite",
                "use another checkpoint: the training diverged, or the file is damaged",
            )


def open_weights_file(path: str | os.PathLike[str], section: str = "") -> WeightsFile:
    """Open a weights file and check its header. Raises WeightsError for a damaged file, or one of another type. For a
    pickled file, `section` is the key of the state dict, by default that of a model. `pickled.ALL_SECTIONS` selects the
    state dicts under all keys, with names SECTION/NAME."""
    path = Path(path)
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        kind = detect_file_kind(path, file.read(32), size)
        if kind == "safetensors":
            entries, metadata, _ = read_safetensors_header(path, file, size)
            return WeightsFile(path, kind, entries, metadata)
        archive = npz.CheckedZip(path, file, size) if kind == "zip" else None
        if archive and any(name.endswith(".npy") for name in archive.members):
            return WeightsFile(path, "npz", check_tensor_infos(path, npz.read_npz_infos(archive)))
        content, size = (
            pickled.describe_torch_zip(archive) if archive else pickled.describe_legacy_file(path, file, size)
        )
        entries, section, other_sections = pickled.select_state_dict(path, content, size, section)
        return WeightsFile(
            path, "pickle", check_tensor_infos(path, entries), section=section, other_sections=other_sections
        )


def detect_file_kind(path: Path, head: bytes, size: int) -> str:
    """Detect `safetensors`, `zip` or `pickle` from the first bytes; the suffix only selects the error message. Raises
    WeightsError for other files."""
    if not size:
        reject_weights_file(path, "is empty", DOWNLOAD_AGAIN_HINT)
    if head[:2] == b"PK":
        return "zip"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return "safetensors"
    if head[:1] == b"\x80" and head[1] <= 5:  # PROTO, with a supported protocol
        return "pickle"
    for start, (reason, hint) in MISTAKEN_SIGNATURES.items():
        if head.startswith(start):
            reject_weights_file(path, reason, hint)
    if path.suffix.lower() in PICKLE_SUFFIXES:
        return "pickle"
    if path.suffix.lower() == ".safetensors":
        return "safetensors"
    reject_weights_file(path, "is not a weights file", SUPPORTED_FILES_HINT)
