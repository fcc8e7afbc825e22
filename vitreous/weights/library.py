"""Weights of models that timm or transformers builds: the model's name, its preprocessing, and its tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitreous.data.modalities.base import Preprocess
from vitreous.errors import UsageError
from vitreous.models.config import ForeignConfig, ModelConfig
from vitreous.models.libraries import build_encoder
from vitreous.models.library_weights import (
    ENCODER_PREFIX,
    LibraryLayout,
    convert_library_tensors,
    detect_library_layout,
    read_timm_defaults,
    resize_transformers_positions,
)
from vitreous.models.names import config_from_name
from vitreous.weights.files import WeightsFile, open_weights_file
from vitreous.weights.preprocessing import parse_preprocessing
from vitreous.weights.sidecar import get_nested_dict, read_json_object

MODEL_OPTION_HINT = "name it with --model timm:NAME, or --model hf:FOLDER"
TITLES = {"timm": "a timm model", "transformers": "a transformers model"}


@dataclass(frozen=True, kw_only=True)
class LibraryCheckpoint:
    """Weights files of a model that a library builds. `config`: the model with the classes of the files. `preprocess`:
    its published preprocessing. `read`: reads the tensors for a model of the same library. `unused`: other tensors of
    the files."""

    title: str
    config: ForeignConfig
    preprocess: Preprocess
    read: Callable[[ModelConfig], dict[str, Tensor]]
    unused: list[str]


def open_library_checkpoint(
    source: str, path: Path, files: list[Path], config_json: dict[str, Any], reference: ModelConfig | None
) -> LibraryCheckpoint:
    """Open weights files as those of a library's model: that of the config `reference`, else the one that the source or
    its config.json names.

    `path`: the file, or the folder of the files. Raises UsageError if nothing names a model, ResourceError if its
    library is not installed, WeightsError for tensors that do not fit it.
    """
    config: Any = find_library_config(source, path, config_json) if reference is None else reference
    opened = [open_weights_file(file) for file in files]
    locations: dict[str, WeightsFile] = {name: file for file in opened for name in file.entries}
    shapes = {name: entry.shape for file in opened for name, entry in file.entries.items()}
    layout: LibraryLayout = detect_library_layout(config, shapes, source)

    def read(target: ModelConfig) -> dict[str, Tensor]:
        """Read the tensors for a model of another image size, under the names of a `ForeignModel`."""
        tensors: dict[str, Tensor] = {}
        for file in opened:
            names = {name: inner for name, inner in layout.names.items() if locations[inner] is file}
            values = file.read(names.values())
            tensors |= {name: values[inner] for name, inner in names.items()}
        return convert_library_tensors(layout, tensors, target.image, source)

    preprocess = read_library_preprocessing(layout.config, path, config_json)
    return LibraryCheckpoint(
        title=TITLES[config.library], config=layout.config, preprocess=preprocess, read=read, unused=layout.unused
    )


def names_timm_model(source: str, config_json: dict[str, Any]) -> bool:
    """Return whether a source or its config.json names a model of timm."""
    return source.startswith("timm:") or isinstance(config_json.get("architecture"), str)


def find_library_config(source: str, path: Path, config_json: dict[str, Any]) -> ForeignConfig:
    """Return the config of the model that a source names, as `timm:NAME` or in config.json. Raises UsageError if
    nothing names a model, and the errors of `config_from_name`."""
    architecture, tag = config_json.get("architecture"), get_nested_dict(config_json, "pretrained_cfg").get("tag")
    location = source.removeprefix("timm:")
    if source.startswith("timm:") and "/" not in location:
        name = source
    elif isinstance(architecture, str):
        options = get_nested_dict(config_json, "model_args").items()
        names = [f"timm:{architecture}.{tag}", f"timm:{architecture}"] if tag else [f"timm:{architecture}"]
        known = next((name for name in names if read_timm_defaults(name)), names[-1])
        name = ",".join([known, *(f"{option}={value}" for option, value in options)])
    elif "model_type" in config_json:
        name = f"hf:{path if path.is_dir() else path.parent}"
    else:
        raise UsageError(f"{source} does not name its model", MODEL_OPTION_HINT)
    config: Any = config_from_name(name)
    is_repository = source.startswith("hf:") and not os.path.exists(source.removeprefix("hf:"))
    return replace(config, full_name=source) if is_repository else config


def read_library_preprocessing(config: ForeignConfig, path: Path, config_json: dict[str, Any]) -> Preprocess:
    """Read the published preprocessing of a library's model: from its config.json and preprocessor_config.json, else
    from timm's record of the model's name. Raises WeightsError for invalid values."""
    settings = dict(config_json)
    if config.library == "timm":
        settings["pretrained_cfg"] = read_timm_defaults(config.full_name) | get_nested_dict(
            config_json, "pretrained_cfg"
        )
    processor = read_json_object((path if path.is_dir() else path.parent) / "preprocessor_config.json")
    return parse_preprocessing(config.full_name, config, processor, settings, pixels="imagenet")


def adapt_library_state(state: dict[str, Tensor], source: Any, target: Any, origin: str) -> dict[str, Tensor]:
    """Adapt the tensors of a `ForeignModel`, of any shape, to the image size of the config `target`, by the rules of
    its library. `source` and `target` are `ForeignConfig`s. Raises WeightsError if they do not fit the model."""
    if source.image == target.image or not target.sized_by or source.library != target.library:
        return state
    encoder = {
        name.removeprefix(ENCODER_PREFIX): tensor for name, tensor in state.items() if name.startswith(ENCODER_PREFIX)
    }
    others = {name: tensor for name, tensor in state.items() if not name.startswith(ENCODER_PREFIX)}
    if target.library == "timm":
        layout = LibraryLayout(replace(target, classes=0, channels=source.channels), {}, [])
        return convert_library_tensors(layout, encoder, target.image, origin) | others
    module = build_encoder(source)
    module.load_state_dict(encoder)
    resized = resize_transformers_positions(replace(target, channels=source.channels), module)
    return state | {f"{ENCODER_PREFIX}{name}": tensor for name, tensor in resized.items()}
