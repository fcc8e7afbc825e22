"""Child process that reads a pickled weights file: it receives a request as JSON on stdin and writes a safetensors
file.

Run as a separate script, without importing this package. The request: `path`, `out`, `section` (the key of the state
dict, or ""), `names` of the tensors, `memory`, the maximum bytes of address space, and the names of the `objects` and
`mappings` that may be stored with the tensors. Inert stand-ins replace these.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections import OrderedDict
from typing import Any


class InertObject:
    """Stand-in for any object stored with the tensors; arguments and state are dropped."""

    def __new__(cls, *arguments: object) -> InertObject:
        return object.__new__(cls)

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        """Drop the state."""


class InertMapping:
    """Stand-in for a dictionary subclass, replaced by a plain dict."""

    def __new__(cls, *arguments: object) -> Any:
        return OrderedDict()


def main() -> int:
    """Execute the request. Returns 0, or 1 with the reason as the one line of stdout."""
    request = json.load(sys.stdin)
    limit_address_space(request["memory"])
    try:
        extract_tensors(request)
    except Exception as error:  # any error that torch raises for the file; the parent reports it
        print(" ".join(f"{type(error).__name__}: {error}".split())[:300])
        return 1
    return 0


def limit_address_space(memory: int) -> None:
    """Limit the address space of this process to `memory` bytes, if the system supports it."""
    try:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))
    except (ImportError, ValueError, OSError):  # Windows lacks the module, macOS the limit
        pass


def extract_tensors(request: dict[str, Any]) -> None:
    """Read the requested tensors and write them, each in separate memory and row-major."""
    zipped = zipfile.is_zipfile(request["path"])
    if zipped:  # torch does not verify checksums: a flipped bit would change a weight
        with zipfile.ZipFile(request["path"]) as archive:
            damaged = archive.testzip()
        if damaged:
            raise ValueError(f"the checksum of {damaged} is wrong: the file is damaged")
    import torch
    from safetensors.torch import save_file

    stand_ins: list[Any] = [(InertObject, name) for name in request["objects"]] + [
        (InertMapping, name) for name in request["mappings"]
    ]
    with torch.serialization.safe_globals(stand_ins):
        content = torch.load(request["path"], map_location="cpu", weights_only=True, mmap=zipped)
    tensors = {}
    for name in request["names"]:
        section, _, tensor_name = name.partition("/") if request["section"] == "*" else (request["section"], "", name)
        tensor = (content[section] if section else content)[tensor_name]
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout != torch.strided
            or tensor.device.type != "cpu"
        ):
            raise TypeError(f"{name} is not a plain tensor")
        tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    save_file(tensors, request["out"])


if __name__ == "__main__":
    sys.exit(main())
