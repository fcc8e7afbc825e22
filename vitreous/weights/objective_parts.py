"""What an objective holds beside the model that its bundle ships: a decoder, heads, a student, a centre.

They lie beside the weights in `objective.safetensors`, for a run of the same objective to go on from. Nothing that only
uses the model reads them.
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
#: of a part, the fields of its config that shapes do not tell
SHAPELESS_FIELDS = {"decoder": ("decoder_heads",), "model.head": ("classes",), "model.regions": ("classes",)}

HEAD_PREFIXES = ("head.", "representation.", "classes.")  # the last is a DiT's table


@dataclass(frozen=True)
class ObjectiveState:
    """The config of an objective as plain data, with its `name`, and its tensors by the objective's names."""

    config: dict[str, Any]
    state: dict[str, Tensor]


def load_objective_state(folder: Path, description: Path) -> ObjectiveState | None:
    """Read the parts of a bundle's objective, float32 as a rule; None where it has none. Raises WeightsError for a file
    that is missing or altered."""
    document = json.loads(description.read_text("utf-8"))
    config, file = document.get("objective"), folder / OBJECTIVE_FILE
    if not config:
        return None
    if not file.is_file() or compute_sha256(file) != document["sha256"].get(OBJECTIVE_FILE):
        hint = f"restore it from a copy, or take its entry `objective` out of {description.name}"
        raise WeightsError(f"{file} is missing or was altered after it was saved", hint)
    return ObjectiveState(config, open_weights_file(file).read())


@dataclass(frozen=True)
class ObjectiveLoadResult:
    """The parts that an objective took over, and those that do not fit it, which are as they were."""

    loaded: list[str]
    left: list[str]

    def text(self) -> str:
        """One line for people."""
        left = f"; of another form, and new here: {', '.join(self.left)}" if self.left else ""
        return (f"goes on with its {', '.join(self.loaded)}" if self.loaded else "starts anew") + left


@torch.no_grad()
def load_into_objective(objective: nn.Module, config: dict[str, Any], parts: ObjectiveState) -> ObjectiveLoadResult:
    """Load parts into an objective of this config, as plain data, in place.

    A part, that is all tensors with the same first word of the name (of dense heads, whose config has `classes`, the
    first two), is loaded if they all fit in name and shape, and else stays as it is; so does a part that computes
    something else with the same shapes (`SHAPELESS_FIELDS`).
    """
    own, groups, words = objective.state_dict(), dict[str, list[str]](), 2 if "classes" in parts.config else 1

    def part_of(tensor: str) -> str:
        return ".".join(tensor.split(".")[:words])

    for name in parts.state:
        groups.setdefault(part_of(name), []).append(name)
    adoption = ObjectiveLoadResult([], [])
    for part, names in groups.items():
        mine = {name for name in own if part_of(name) == part}
        same = all(
            parts.config.get(field, config.get(field)) == config.get(field) for field in SHAPELESS_FIELDS.get(part, ())
        )
        fits = same and mine == set(names) and all(own[name].shape == parts.state[name].shape for name in names)
        (adoption.loaded if fits else adoption.left).append(part)
        for name in names if fits else ():
            own[name].copy_(parts.state[name])
    return adoption


@dataclass(frozen=True)
class WeightsLoadResult:
    """What became of the tensors of a source."""

    source: str
    title: str
    loaded: list[str]
    new: list[str]
    unused: list[str]
    resized: str = ""
    channels: str = ""
    windows: str = ""
    patches: str = ""

    def text(self) -> str:
        """One line for people."""
        line = (
            f"started from {self.source}, {self.title} (kept {len(self.loaded)} tensors, new {len(self.new)}, unused "
            f"{len(self.unused)})"
        )
        if any(name.startswith(HEAD_PREFIXES) for name in self.new):
            line += "; classes are new" if "classes.weight" in self.new else "; the head is new and zero-initialised"
        line += f"; positions resized {self.resized}" if self.resized else ""
        line += f"; channels {self.channels}" if self.channels else ""
        line += f"; patches {self.patches}" if self.patches else ""
        return line + (f"; {self.windows}" if self.windows else "")
