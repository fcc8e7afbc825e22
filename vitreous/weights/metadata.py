"""What this project notes in the metadata of a safetensors file that it writes: what shapes do not tell of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitreous.errors import WeightsError
from vitreous.models.config import ModelConfig
from vitreous.nn.grid import RESIZE
from vitreous.weights.files import shown

KEY = "vitreous"
#: field of the config -> whether a note may say that of it
FIELDS: dict[str, Callable[[Any], bool]] = {
    "image": lambda v: (
        isinstance(v, list) and 0 < len(v) < 5 and all(isinstance(side, int) and 0 < side < 1 << 16 for side in v)
    ),
    "heads": lambda v: isinstance(v, int) and 0 < v < 1 << 12,
    "gelu": lambda v: v in ("none", "tanh", "quick"),
    "eps": lambda v: isinstance(v, float) and 0 < v < 1,
    "resize": lambda v: v in RESIZE,
    "norm": lambda v: v in ("tokens", "pooled", "none"),
    "qkv_bias": lambda v: isinstance(v, bool),
    "projection_bias": lambda v: isinstance(v, bool),
}


def note(config: ModelConfig) -> dict[str, str]:
    """The metadata to write beside a model's tensors."""
    return {KEY: json.dumps({name: getattr(config, name) for name in FIELDS if hasattr(config, name)})}


def noted(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """What a file's metadata says, in fields of the config. Raises WeightsError where that is not what this project
    writes."""
    if KEY not in metadata:
        return {}
    try:
        found = json.loads(metadata[KEY])
        wrong = [name for name in found if name not in FIELDS or not FIELDS[name](found[name])]
        if wrong or not isinstance(found, dict):
            raise ValueError(f"of {shown(str(wrong[0] if wrong else found))}")
    except (ValueError, TypeError, RecursionError) as error:
        raise WeightsError(f"{path} has a damaged note ({error})", "restore the file from a copy") from None
    return found | ({"image": tuple(found["image"])} if "image" in found else {})
