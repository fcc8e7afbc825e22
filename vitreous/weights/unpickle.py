"""The child process that reads a pickled file: JSON on stdin says what, a safetensors file is what it leaves.

Run as a script, on its own, with nothing of this package imported. The order: `path`, `out`, `section` (the key of the
state dict, or ""), `names` of the tensors, `memory`, the bytes of address space it may take, and the names of the
`objects` and `mappings` that may lie beside the tensors: stand-ins take their places, which do nothing.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections import OrderedDict
from typing import Any


class InertObject:
    """Stands for any object beside the tensors; arguments and state are dropped."""

    def __new__(cls, *arguments: object) -> InertObject:
        return object.__new__(cls)

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        """Drop the state."""


class InertMapping:
    """Stands for the class of a dictionary of another type, which a plain one takes the place of."""

    def __new__(cls, *arguments: object) -> Any:
        return OrderedDict()


def main() -> int:
    """Follow the order. Returns 0, or 1 with the reason as the one line of stdout."""
    order = json.load(sys.stdin)
    limit_address_space(order["memory"])
    try:
        extract_tensors(order)
    except Exception as error:  # whatever torch raises for a file it does not like: the parent tells it
        print(" ".join(f"{type(error).__name__}: {error}".split())[:300])
        return 1
    return 0


def limit_address_space(memory: int) -> None:
    """Let this process have no more than that many bytes of addresses, where the system can be told so."""
    try:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))
    except (ImportError, ValueError, OSError):  # Windows has no such module, macOS no such limit
        pass


def extract_tensors(order: dict[str, Any]) -> None:
    """Read the tensors and write them, each in memory of its own and row by row."""
    zipped = zipfile.is_zipfile(order["path"])
    if zipped:  # torch does not look at the checksums: a flipped bit would be another weight
        with zipfile.ZipFile(order["path"]) as archive:
            damaged = archive.testzip()
        if damaged:
            raise ValueError(f"the checksum of {damaged} is wrong: the file is damaged")
    import torch
    from safetensors.torch import save_file

    stand_ins: list[Any] = [(InertObject, name) for name in order["objects"]] + [
        (InertMapping, name) for name in order["mappings"]
    ]
    with torch.serialization.safe_globals(stand_ins):
        content = torch.load(order["path"], map_location="cpu", weights_only=True, mmap=zipped)
    tensors = {}
    for name in order["names"]:
        section, _, end = name.partition("/") if order["section"] == "*" else (order["section"], "", name)
        tensor = (content[section] if section else content)[end]
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout != torch.strided
            or tensor.device.type != "cpu"
        ):
            raise TypeError(f"{name} is no plain tensor")
        tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    save_file(tensors, order["out"])


if __name__ == "__main__":
    sys.exit(main())
