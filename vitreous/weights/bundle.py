"""The bundle: a folder with `weights.safetensors` and `model.json`, which contain everything needed to use a trained
model.

`model.json` contains the architecture, the input (preprocessing, channels), the outputs (class names), and the SHA-256
of the weights. It cannot contain executable code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from vitreous.config import from_builtins, to_builtins
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.modalities.table import AnyPreprocess
from vitreous.data.tokenizer import TOKENIZER_FILE, Tokenizer
from vitreous.errors import UsageError, WeightsError
from vitreous.models.base import VisionModel
from vitreous.models.config import ModelConfig
from vitreous.models.zoo import Model, build_without_init
from vitreous.system.disk import atomic_path, compute_sha256, fsync_path, write_text_atomic
from vitreous.tasks.base import Task
from vitreous.tasks.classification import Classification
from vitreous.tasks.features import FeatureExtraction
from vitreous.tasks.table import TaskMixin, task_from_json, task_to_json
from vitreous.weights.files import open_weights_file
from vitreous.weights.objective_parts import OBJECTIVE_FILE, ObjectiveState
from vitreous.weights.text import find_tokenizer, make_tokenizer

BUNDLE_FORMAT_VERSION = 1
WEIGHTS_FILE, DESCRIPTION_FILE = "weights.safetensors", "model.json"


@dataclass
class Bundle(TaskMixin):
    """A model with its task, preprocessing and provenance.

    `notes`: assumptions about settings that foreign files lack, one sentence each; they are not saved.
    `objective_state`: the state of the training objective, saved with the weights; `load_bundle` does not read it,
    `load_objective_state` does. `tokenizer`: that of a text encoder, saved as tokenizer.json.
    """

    model: Model
    task: Task
    preprocess: Preprocess
    provenance: dict[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    notes: tuple[str, ...] = ()
    objective_state: ObjectiveState | None = None
    tokenizer: Tokenizer | None = None

    def save(self, folder: Path) -> None:
        """Write the bundle to `folder`. A new folder appears complete or not at all; in an existing one, files are
        replaced once all are on disk. Raises OSError."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        optional = {OBJECTIVE_FILE: self.objective_state, TOKENIZER_FILE: self.tokenizer}
        names = (WEIGHTS_FILE, *(name for name, content in optional.items() if content), DESCRIPTION_FILE)
        if not folder.exists():
            with atomic_path(folder) as temporary:
                temporary.mkdir()
                self.write_files({name: temporary / name for name in names})
        else:
            with ExitStack() as files:  # the files are renamed in reverse order when the block ends
                paths = {name: files.enter_context(atomic_path(folder / name)) for name in names}
                self.write_files(paths)
                for name in names[:-1]:
                    fsync_path(paths[name])  # slow operations come before the first rename

    def write_files(self, paths: dict[str, Path]) -> None:
        """Write the weights, the state of the training objective and the tokenizer if there are any, and `model.json`.
        `paths`: file name -> path. Raises OSError."""
        save_file(to_cpu_float32(self.model.state_dict()), paths[WEIGHTS_FILE])
        if self.objective_state:
            save_file(to_cpu_float32(self.objective_state.state), paths[OBJECTIVE_FILE])
        if self.tokenizer:
            self.tokenizer.write(paths[TOKENIZER_FILE])
        document = {
            "format": BUNDLE_FORMAT_VERSION,
            "name": self.model.config.name(),
            "architecture": to_builtins(self.model.config),
            **task_to_json(self.task),
            "preprocess": to_builtins(self.preprocess),
            "provenance": self.provenance,
            **({"objective": self.objective_state.config} if self.objective_state else {}),
            "sha256": {name: compute_sha256(path) for name, path in paths.items() if name != DESCRIPTION_FILE},
        }
        paths[DESCRIPTION_FILE].write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", "utf-8")


def to_cpu_float32(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors of any shape to contiguous float32 on the CPU."""
    return {name: tensor.detach().float().cpu().contiguous() for name, tensor in state.items()}


def save(
    model: VisionModel[ModelConfig],
    path: str | os.PathLike[str],
    classes: Sequence[str] | None = None,
    preprocess: Preprocess | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a model of `vitreous.create` as a bundle, a folder that all commands and `vitreous.load` read. Returns the
    folder.

    `classes`: names in the order of the logits (default: "0", "1", ...). `preprocess`: the model's input transform
    (default: resize the short side to the model's image size, centre crop, pixels in [-1, 1]). `tokenizer`: the
    tokenizer.json of a model with a text encoder. Raises UsageError for another type of model, names that do not match
    its head, a `preprocess` with other channels, a tokenizer of a model without a text encoder, and an existing path.
    """
    folder, config = Path(path), getattr(model, "config", None)
    if not isinstance(model, VisionModel) or config is None or not config.can_be_stored:
        raise UsageError(
            f"{type(model).__name__} is not a model of vitreous.create",
            "save the state dict of supported external models with torch.save",
        )
    names = tuple(map(str, range(config.classes))) if classes is None else tuple(classes)
    if (
        len(names) != config.classes
        or len(set(names)) != len(names)
        or not all(isinstance(name, str) and name for name in names)
    ):
        raise UsageError(
            f"{len(names)} names for a head of {config.classes} classes", "give one distinct name for each class"
        )
    if preprocess is None:
        height, width = config.image[-2:]
        middle = (0.5,) * config.channels
        preprocess = ImagePreprocess((height, width), channels=config.channels, mean=middle, std=middle)
    if preprocess.channels != config.channels:
        raise UsageError(
            f"the preprocessing outputs {preprocess.channels} channels, but the model needs {config.channels}",
            f"use a preprocessing with {config.channels} channels",
        )
    if tokenizer is not None and not config.has_text:
        raise UsageError(f"{config.name()} has no text encoder", "leave the tokenizer out")
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder} already exists", "use another folder")
    task = Classification(names) if names else FeatureExtraction()
    text_tokenizer = None if tokenizer is None else make_tokenizer(Path(tokenizer), config.text)
    Bundle(cast(Model, model), task, preprocess, tokenizer=text_tokenizer).save(folder)
    return folder


def load_bundle(folder: Path) -> Bundle:
    """Load the bundle in a folder. Raises WeightsError if a file is missing, modified, of a later format, or does not
    match the model."""
    try:
        description = json.loads((folder / DESCRIPTION_FILE).read_text("utf-8"))
        version = description["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{folder} is not a model bundle ({error})", f"use a folder with {WEIGHTS_FILE} and {DESCRIPTION_FILE}"
        ) from None
    if version != BUNDLE_FORMAT_VERSION:
        raise WeightsError(
            f"{folder} has bundle format {version}, but this version of vitreous reads {BUNDLE_FORMAT_VERSION}",
            "install a newer vitreous",
        )
    weights = folder / WEIGHTS_FILE
    if not weights.is_file() or compute_sha256(weights) != description.get("sha256", {}).get(WEIGHTS_FILE):
        raise WeightsError(f"{weights} is missing or was modified after it was saved", "restore it from a copy")
    try:
        config = from_builtins(ModelConfig, description["architecture"])
        preprocess = from_builtins(AnyPreprocess, description["preprocess"])
    except (KeyError, ValueError) as error:
        raise WeightsError(f"{folder / DESCRIPTION_FILE}: {error}") from None
    task = task_from_json(description, os.fspath(folder / DESCRIPTION_FILE))
    model = build_without_init(config)
    load_state_dict_strict(model, open_weights_file(weights).read(), os.fspath(weights))
    tokenizer = find_tokenizer(folder, config)
    digest = description.get("sha256", {}).get(TOKENIZER_FILE)
    if tokenizer and compute_sha256(tokenizer.path) != digest:
        raise WeightsError(f"{tokenizer.path} was modified after it was saved", "restore it from a copy")
    return Bundle(model.eval(), task, preprocess, description.get("provenance", {}), tokenizer=tokenizer)


def set_temperature(folder: Path, temperature: float, fitted_on: dict[str, Any]) -> None:
    """Store a softmax temperature in a bundle, and the data that it was fitted on in the provenance. The weights are
    unchanged."""
    path = folder / DESCRIPTION_FILE
    description = json.loads(path.read_text("utf-8"))
    description |= {
        "temperature": temperature,
        "provenance": description.get("provenance", {}) | {"temperature": fitted_on},
    }
    write_text_atomic(path, json.dumps(description, indent=2, ensure_ascii=False) + "\n")


def load_state_dict_strict(model: torch.nn.Module, state: dict[str, Tensor], origin: str) -> None:
    """Load a state dict into a model in float32; all names and shapes must match. Raises WeightsError, which lists
    every difference and names the `origin` of the state dict."""
    model_shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    state_shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    errors = [f"missing {name}" for name in model_shapes.keys() - state_shapes.keys()]
    errors += [f"unknown {name}" for name in state_shapes.keys() - model_shapes.keys()]
    errors += [
        f"{name} has shape {state_shapes[name]}, not {model_shapes[name]}"
        for name in model_shapes.keys() & state_shapes.keys()
        if model_shapes[name] != state_shapes[name]
    ]
    if errors:
        raise WeightsError(
            f"{origin} does not fit the model:" + "".join(f"\n    {line}" for line in sorted(errors)[:20])
        )
    integer_names = {name for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}  # counters
    values = {name: tensor.long() if name in integer_names else tensor.float() for name, tensor in state.items()}
    model.load_state_dict(values, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
