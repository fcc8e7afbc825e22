"""State of a training objective besides the model in its bundle: a decoder, heads, a student, a centre.

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

HEAD_PREFIXES = ("head.", "representation.", "classes.")  # `classes.`: a DiT's class embedding


@dataclass(frozen=True)
class ObjectiveState:
    """Config and tensors of a training objective. `config`: its fields as plain data, including `name`; `state`: its
    tensors by their names in the objective."""

    config: dict[str, Any]
    state: dict[str, Tensor]


def load_objective_state(folder: Path, description: Path) -> ObjectiveState | None:
    """Load the objective state of the bundle in `folder`; None if there is none. `description`: the bundle's
    model.json. Raises WeightsError for a file that is missing or modified."""
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
    """Names of the submodules that were loaded into an objective, and of those that do not fit and keep their initial
    values."""

    loaded: list[str]
    skipped: list[str]

    def text(self) -> str:
        """Describe the loaded and skipped submodules in one line."""
        skipped = f"; newly initialised because of another shape: {', '.join(self.skipped)}" if self.skipped else ""
        return (f"continues with its {', '.join(self.loaded)}" if self.loaded else "starts without its state") + skipped


@torch.no_grad()
def load_into_objective(
    objective: nn.Module, config: dict[str, Any], loaded_state: ObjectiveState
) -> ObjectiveLoadResult:
    """Load stored state into an objective, in place. `config`: the fields of the objective as plain data.

    A submodule consists of all tensors with the same first word in their names (first two for dense heads, whose config
    has `classes`). It is loaded if all tensors match in name and shape, and otherwise keeps its values. It also keeps
    them if the shapes match, but fields in `SHAPELESS_FIELDS` differ, with which it computes something else.
    """
    objective_tensors, groups, prefix_length = (
        objective.state_dict(),
        dict[str, list[str]](),
        2 if "classes" in loaded_state.config else 1,
    )

    def get_submodule_name(tensor: str) -> str:
        """Return the first words of a tensor name, which identify its submodule."""
        return ".".join(tensor.split(".")[:prefix_length])

    for name in loaded_state.state:
        groups.setdefault(get_submodule_name(name), []).append(name)
    result = ObjectiveLoadResult([], [])
    for group, names in groups.items():
        objective_names = {name for name in objective_tensors if get_submodule_name(name) == group}
        has_same_fields = all(
            loaded_state.config.get(field, config.get(field)) == config.get(field)
            for field in SHAPELESS_FIELDS.get(group, ())
        )
        is_compatible = (
            has_same_fields
            and objective_names == set(names)
            and all(objective_tensors[name].shape == loaded_state.state[name].shape for name in names)
        )
        (result.loaded if is_compatible else result.skipped).append(group)
        for name in names if is_compatible else ():
            objective_tensors[name].copy_(loaded_state.state[name])
    return result


@dataclass(frozen=True)
class WeightsLoadResult:
    """Result of loading weights into a model: the names of tensors that were loaded, that kept their initial values,
    and that are unused. `resized`, `channels`, `windows` and `patches`: changes of position grid, channels, attention
    windows and patch size, such as `16 -> 14`; "" if unchanged."""

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
        """Describe the source, the numbers of tensors, and the changes in one line."""
        line = (
            f"started from {self.source}, {self.title} (kept {len(self.loaded)} tensors, "
            f"new {len(self.initialised)}, unused {len(self.unused)})"
        )
        if any(name.startswith(HEAD_PREFIXES) for name in self.initialised):
            line += (
                "; the class embedding is new"
                if "classes.weight" in self.initialised
                else "; the head is new and zero-initialised"
            )
        line += f"; positions resized {self.resized}" if self.resized else ""
        line += f"; channels {self.channels}" if self.channels else ""
        line += f"; patches {self.patches}" if self.patches else ""
        return line + (f"; {self.windows}" if self.windows else "")
