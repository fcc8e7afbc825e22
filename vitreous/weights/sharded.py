"""Load the full tensors of a training checkpoint, written by one or many processes.

SECTION.safetensors              full tensors by name: section `model`, `ema` or `optimizer` shard-*.safetensors
shards by `SECTION/name`, as written by torch.distributed.checkpoint; their offsets in
                                 the tensor are in the file's header
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from vitreous.errors import WeightsError

DCP_METADATA_KEY, DCP_OFFSETS_KEY = "DCP_SHARDING_INFO", "saved_offsets"


def load_checkpoint_tensors(folder: Path, section: str) -> dict[str, Tensor]:
    """Load a section of a checkpoint (`model`, `ema` or `optimizer`): name -> full tensor, of any
    shape; empty if the section is missing. Raises WeightsError for an unreadable checkpoint."""
    try:
        section_path = folder / f"{section}.safetensors"
        if section_path.is_file():
            return load_file(section_path)
        shards_by_name: dict[str, list[tuple[list[int], Tensor]]] = {}
        for path in sorted(folder.glob("shard-*.safetensors")):
            with safe_open(path, "pt") as file:
                offsets = json.loads((file.metadata() or {}).get(DCP_METADATA_KEY, "{}"))
                for name in (name for name in file.keys() if name.startswith(section + "/")):  # noqa: SIM118
                    tensor = file.get_tensor(name)
                    offset = offsets.get(name, {}).get(DCP_OFFSETS_KEY, [0] * tensor.ndim)
                    shards_by_name.setdefault(name.removeprefix(section + "/"), []).append((offset, tensor))
        return {name: assemble_shards(name, shards) for name, shards in shards_by_name.items()}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise WeightsError(f"the checkpoint {folder} cannot be read ({error})", "use another checkpoint") from None


def assemble_shards(name: str, shards: list[tuple[list[int], Tensor]]) -> Tensor:
    """Assemble shards (offsets, tensor) at their offsets into the full tensor, of any shape. Raises ValueError if a
    shard is missing."""
    first_shard = shards[0][1]
    if len(shards) == 1 and not any(shards[0][0]):
        return first_shard
    shape = [max(offset[axis] + shard.shape[axis] for offset, shard in shards) for axis in range(first_shard.ndim)]
    if sum(shard.numel() for _, shard in shards) != torch.Size(shape).numel():
        raise ValueError(f"shards of {name} are missing")
    tensor = first_shard.new_empty(shape)
    for offset, shard in shards:
        tensor[tuple(slice(start, start + length) for start, length in zip(offset, shard.shape, strict=True))] = shard
    return tensor
