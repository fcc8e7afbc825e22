"""Start a model from weights: find them, read them, and say what was kept, new, unused and resized."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitreous.data.preprocess import Preprocess
from vitreous.errors import WeightsError
from vitreous.models.config import ViTConfig
from vitreous.models.vit import ViT
from vitreous.nn.grid import by, resize
from vitreous.weights import timm
from vitreous.weights.bundle import DESCRIPTION, fill, load_bundle, read_safetensors

HEAD = ("head.", "representation.")


@dataclass(frozen=True)
class Adoption:
    """What became of the tensors of a source."""

    source: str
    kept: list[str]
    new: list[str]
    unused: list[str]
    resized: str = ""

    def text(self) -> str:
        """One line for people."""
        line = f"started from {self.source} (kept {len(self.kept)} tensors, new {len(self.new)}, unused {len(self.unused)})"
        if any(name.startswith(HEAD) for name in self.new):
            line += "; the head is new and zero-initialised"
        return line + (f"; positions resized {self.resized}" if self.resized else "")


def read_weights(source: str | os.PathLike[str]) -> tuple[ViTConfig, dict[str, Tensor]]:
    """Weights and the config they fit, from a run folder, a bundle, or a safetensors file with timm's keys.

    Raises WeightsError for anything else.
    """
    path = Path(source)
    folder = bundle_in(path)
    if folder:
        model = load_bundle(folder).model
        return model.config, model.state_dict()
    if not path.exists():
        raise WeightsError(f"no weights at {path}", "name a run folder, a bundle, or a .safetensors file")
    if path.is_dir():
        raise WeightsError(f"{path} holds no {DESCRIPTION}", "name a run folder that finished, or a bundle")
    if path.suffix != ".safetensors":
        raise WeightsError(f"{path} is of a kind that is not read yet", "save it as .safetensors first")
    state = read_safetensors(path)
    if not timm.is_timm(state):
        raise WeightsError(f"{path} has tensors of an unknown layout", "timm's plain ViTs are read")
    return timm.read(state)


def adopt(model: ViT, source: str | os.PathLike[str]) -> Adoption:
    """Give a model, in place, the weights of a source: everything but a head of another shape.

    Positions are resized to the model's grid (arXiv:2010.11929, section 3.2), a representation layer or a head that does
    not fit is left as it was initialised: at zero. Raises WeightsError where anything else differs, listing it.
    """
    _, state = read_weights(source)
    own = model.state_dict()
    state, resized = dict(state), ""
    if "class_position" in state and "class_position" not in own:
        state["prefix"] = torch.cat([state["prefix"][:1] + state["class_position"], state["prefix"][1:]])
        del state["class_position"]
    elif "class_position" in own and "class_position" not in state:
        state["class_position"] = torch.zeros_like(own["class_position"])
    table = state["position.table"]
    if table.shape[:-1] != model.config.grid:
        state["position.table"] = resize(table, model.config.grid, model.config.resize)
        resized = f"{by(tuple(table.shape[:-1]))} -> {by(model.config.grid)}"
    dropped = [name for name in own if name.startswith(HEAD) and (name not in state or state[name].shape != own[name].shape)]
    unused = [name for name in state if name.startswith(HEAD) and (name in dropped or name not in own)]
    kept = [name for name in state if name not in unused]
    fill(model, {name: state[name] for name in kept} | {name: own[name] for name in dropped}, os.fspath(source))
    return Adoption(os.fspath(source), kept, dropped, unused, resized)


@dataclass(frozen=True)
class Start:
    """Where a model starts: the config of the weights and, if they are a bundle, the preprocessing they were trained with."""

    config: ViTConfig
    preprocess: Preprocess | None = None


def starting_point(source: str | os.PathLike[str]) -> Start:
    """What a new run has to know of the weights that it starts from. Raises WeightsError as `read_weights` does."""
    folder = bundle_in(Path(source))
    if folder:
        bundle = load_bundle(folder)
        return Start(bundle.model.config, bundle.preprocess)
    return Start(read_weights(source)[0])


def bundle_in(path: Path) -> Path | None:
    """The bundle of a run folder, or the folder itself if it is one."""
    return next((folder for folder in (path / "model", path) if (folder / DESCRIPTION).is_file()), None)
