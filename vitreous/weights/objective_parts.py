"""State of an objective besides the model of its bundle: a decoder, heads, a student, a centre.

It is stored with the weights in `objective.safetensors`, so that a run of the same objective can continue. Inference
does not read it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.errors import WeightsError
from vitreous.system.disk import compute_sha256
from vitreous.weights.files import open_weights_file

OBJECTIVE_FILE = "objective.safetensors"
#: submodule -> fields of its config that shapes do not determine
SHAPELESS_FIELDS = {"decoder": ("decoder_heads",), "model.head": ("classes",), "model.regions": ("classes",)}

HEAD_PREFIXES = ("head.", "representation.", "classes.")  # the last is a DiT's table


@dataclass(frozen=True)
class ObjectiveState:
    """The config of an objective as plain data, with its `name`, and its tensors by the objective's names."""

    config: dict[str, Any]
    state: dict[str, Tensor]


def load_objective_state(folder: Path, description: Path) -> ObjectiveState | None:
    """Read the objective state of a bundle, usually float32; None if there is none. Raises WeightsError for a file that
    is missing or modified."""
    document = json.loads(description.read_text("utf-8"))
    config, file = document.get("objective"), folder / OBJECTIVE_FILE
    if not config:
        return None
    if not file.is_file() or compute_sha256(file) != document["sha256"].get(OBJECTIVE_FILE):
        hint = f"restore it from a copy, or remove the entry `objective` from {description.name}"
        raise WeightsError(f"{file} is missing or was modified after it was saved", hint)
    return ObjectiveState(config, open_weights_file(file).read())


@dataclass(frozen=True)
class ObjectiveLoadResult:
    """Submodules loaded into an objective, and those that do not fit and keep their initial values."""

    loaded: list[str]
    skipped: list[str]

    def text(self) -> str:
        """Describe the result in one line."""
        skipped = f"; newly initialised because of another shape: {', '.join(self.skipped)}" if self.skipped else ""
        return (f"continues with its {', '.join(self.loaded)}" if self.loaded else "starts without its state") + skipped


@torch.no_grad()
def load_into_objective(
    objective: nn.Module, config: dict[str, Any], loaded_state: ObjectiveState
) -> ObjectiveLoadResult:
    """Load state into an objective of this config, as plain data, in place.

    A submodule consists of all tensors with the same first word in their names (first two for dense heads, whose config
    has `classes`). It is loaded if all tensors match in name and shape, and otherwise keeps its values; so does a
    submodule with the same shapes but another computation (`SHAPELESS_FIELDS`).
    """
    own_state, groups, prefix_length = (
        objective.state_dict(),
        dict[str, list[str]](),
        2 if "classes" in loaded_state.config else 1,
    )

    def get_submodule_name(tensor: str) -> str:
        return ".".join(tensor.split(".")[:prefix_length])

    for name in loaded_state.state:
        groups.setdefault(get_submodule_name(name), []).append(name)
    result = ObjectiveLoadResult([], [])
    for group, names in groups.items():
        own_names = {name for name in own_state if get_submodule_name(name) == group}
        has_same_fields = all(
            loaded_state.config.get(field, config.get(field)) == config.get(field)
            for field in SHAPELESS_FIELDS.get(group, ())
        )
        is_compatible = (
            has_same_fields
            and own_names == set(names)
            and all(own_state[name].shape == loaded_state.state[name].shape for name in names)
        )
        (result.loaded if is_compatible else result.skipped).append(group)
        for name in names if is_compatible else ():
            own_state[name].copy_(loaded_state.state[name])
    return result


@dataclass(frozen=True)
class WeightsLoadResult:
    """Result of loading the tensors of a source."""

    source: str
    title: str
    loaded: list[str]
    initialised: list[str]
    unused: list[str]
    resized: str = ""
    channels: str = ""
    windows: str = ""
    patches: str = ""

    def text(self) -> str:
        """Describe the result in one line."""
        line = (
            f"started from {self.source}, {self.title} (kept {len(self.loaded)} tensors, "
            f"new {len(self.initialised)}, unused {len(self.unused)})"
        )
        if any(name.startswith(HEAD_PREFIXES) for name in self.initialised):
            line += (
                "; classes are new"
                if "classes.weight" in self.initialised
                else "; the head is new and zero-initialised"
            )
        line += f"; positions resized {self.resized}" if self.resized else ""
        line += f"; channels {self.channels}" if self.channels else ""
        line += f"; patches {self.patches}" if self.patches else ""
        return line + (f"; {self.windows}" if self.windows else "")
