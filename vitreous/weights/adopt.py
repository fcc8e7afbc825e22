"""Initialise a model from stored weights: find and read the files, adapt the tensors to the model, and report the
result."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitreous.config import from_builtins, read_yaml
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.table import AnyPreprocess
from vitreous.errors import UsageError, VitreousError, WeightsError
from vitreous.models.config import ModelConfig
from vitreous.models.zoo import Model, build_without_init, check_model_memory
from vitreous.nn.sizes import format_size
from vitreous.tasks.base import Task
from vitreous.tasks.features import FeatureExtraction
from vitreous.tasks.table import TaskMixin, infer_task, task_of_run
from vitreous.weights.bundle import (
    DESCRIPTION_FILE,
    Bundle,
    Tokenizer,
    find_tokenizer,
    load_bundle,
    load_state_dict_strict,
)
from vitreous.weights.entry import UnsupportedModelError
from vitreous.weights.fetch import fetch_weights, missing_source_error
from vitreous.weights.foreign import DetectedCheckpoint, detect_checkpoint, find_weights_in_folder
from vitreous.weights.formats.variants import describe_heads_mismatch
from vitreous.weights.inflation import convert_key_bias, inflate_positions
from vitreous.weights.library import adapt_library_state, names_timm_model, open_library_checkpoint
from vitreous.weights.match_tensors import (
    adapt_first_layer,
    drop_prefix_and_neck,
    fold_prefix_positions,
    rename_attention_tensors,
    resize_position_tables,
)
from vitreous.weights.objective_parts import HEAD_PREFIXES, ObjectiveState, WeightsLoadResult, load_objective_state
from vitreous.weights.options import get_source_fields
from vitreous.weights.preprocessing import load_preprocessing
from vitreous.weights.pretraining import read_foreign_objective
from vitreous.weights.published import find_published_weights
from vitreous.weights.sharded import load_checkpoint_tensors
from vitreous.weights.sidecar import check_model_type, parse_class_names, parse_model_config, read_json_object

FINAL_NORM_PREFIXES = ("encoder.norm.", "pooled_norm.")  # the last norm, of every token or of pooled tokens
#: layers that are identities at initialisation, so weights may lack them: relative positions, convolutions, time
IDENTITY_AT_INIT = re.compile(
    r"encoder\.blocks\.\d+\.(attention\.part(\.part)?\.(rows|columns)|after\..*|time\..*)|temporal\..*|position\.time\.table"
)
BUNDLE_TITLE, CHECKPOINT_TITLE = "a bundle", "a checkpoint"  # titles of this package's files, which have all settings


@dataclass(frozen=True)
class PretrainedWeights(TaskMixin):
    """Weights of a detected format, before their tensors are read.

    `source`: the argument that named them. `title`: the format, for messages. `config`, `preprocess` and `task`
    describe the model. `read_state` reads the tensors under this package's names, in float32. `unused`: tensors of the
    files that the model does not have. `notes`: assumptions about settings that the files lack, one sentence each.
    `read_resized` reads the tensors for another image size, if a library defines how positions are resized.
    `tokenizer`: that of a text encoder, None if there is none.
    """

    source: str
    title: str
    config: ModelConfig
    preprocess: Preprocess
    task: Task
    read_state: Callable[[], dict[str, Tensor]]
    unused: list[str] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None
    read_resized: Callable[[ModelConfig], dict[str, Tensor]] | None = None

    def read_state_for(self, model_config: ModelConfig) -> dict[str, Tensor]:
        """Read the tensors, of any shape, for a model of this config. Those of a library's model are resized to its
        image size; other tensors are unchanged. Raises WeightsError if a library cannot load them into the model."""
        if self.read_resized:
            return self.read_resized(model_config)
        state, config = dict(self.read_state()), self.config
        return adapt_library_state(state, config, model_config, self.source) if config.library else state

    def build_bundle(self) -> Bundle:
        """Build a bundle: the model with these weights, its task and its preprocessing. Raises ResourceError, before
        tensors are read, if the model does not fit into the machine's memory."""
        model = build_without_init(self.config)
        check_model_memory(model)
        load_state_dict_strict(model, self.read_state(), self.source)
        provenance = self.provenance | {"init": self.source}
        return Bundle(model.eval(), self.task, self.preprocess, provenance, notes=self.notes, tokenizer=self.tokenizer)

    def with_resize_rule(self, rule: str, image_size: tuple[int, ...] | None) -> PretrainedWeights:
        """Return these weights with the position resize rule `rule`, unless it is "". For formats that store the image
        size, so `image_size` must be None or equal to it; raises UsageError otherwise."""
        if image_size is not None and image_size != self.config.image:
            description = f"{self.source} is {self.title} for images of {format_size(self.config.image)} pixels"
            raise UsageError(f"--source-size {format_size(image_size)}: {description}", "leave --source-size out")
        return replace(self, config=self.config.with_options(positions={"resize": rule})) if rule else self


def open_weights(
    source: str | os.PathLike[str], settings: dict[str, Any] | None = None, reference: ModelConfig | None = None
) -> PretrainedWeights:
    """Open weights: a run folder, a bundle, a file or folder of a known format, or a source that `fetch_weights`
    downloads.

    `settings`: values of config fields that the files lack, by dotted path. They take precedence over those of a
    `WeightsSource`. `reference`: the model that will load them; if a library builds it, files are read as weights of
    that model. Raises WeightsError for unsupported weights, UsageError for an invalid source or setting.
    """
    published = find_published_weights(source)
    settings = (published.get_config_fields() if published else {}) | get_source_fields(source) | (settings or {})
    weights = read_weights(source, settings, reference)
    has_tables = weights.config.has_position_tables
    if "positions.resize" in settings and not has_tables:
        description = f"{source} is {weights.config.name()}, which has no learned positions"
        raise UsageError(f"--resize {settings['positions.resize']}: {description}", "leave --resize out")
    if published and published.share:
        weights = replace(weights, preprocess=replace(weights.preprocess, share=published.share))
    is_native_format = weights.title in (BUNDLE_TITLE, CHECKPOINT_TITLE)
    return (
        weights.with_resize_rule(settings.get("positions.resize", ""), settings.get("image"))
        if is_native_format
        else weights
    )


def read_weights(
    source: str | os.PathLike[str], settings: dict[str, Any], reference: ModelConfig | None = None
) -> PretrainedWeights:
    """Detect the format of weights and describe them, before their tensors are read, as `open_weights` does.
    `settings` are used for foreign formats only, since bundles and training checkpoints contain all settings. Raises
    WeightsError for unsupported weights, UsageError for an invalid source."""
    path = fetch_weights(os.fspath(source))
    if not os.path.lexists(path):
        raise missing_source_error(os.fspath(source))
    folder = locate_bundle(path)
    if folder:
        bundle = load_bundle(folder)
        contents = bundle.model.config, bundle.preprocess, bundle.task, bundle.model.state_dict
        extras: dict[str, Any] = {"provenance": bundle.provenance, "tokenizer": bundle.tokenizer}
        return PretrainedWeights(os.fspath(source), BUNDLE_TITLE, *contents, **extras)
    if (path / "state.json").is_file():
        return open_checkpoint(path)
    if path.is_dir() and (path / "config.yaml").is_file():
        raise WeightsError(f"{path} has no {DESCRIPTION_FILE}", "use a complete run folder, or a bundle")
    files, config_json = find_weights_files(path)
    if reference is not None and reference.library:
        return read_library_weights(source, path, files=files, config_json=config_json, reference=reference)
    try:
        return read_native_weights(source, path, files=files, config_json=config_json, settings=settings)
    except WeightsError as error:
        is_unsupported = isinstance(error, UnsupportedModelError)
        if not is_unsupported and not names_timm_model(os.fspath(source), config_json):
            raise
        try:
            return read_library_weights(source, path, files=files, config_json=config_json, reference=None)
        except VitreousError as library_error:
            # a missing library or other tensors are the problem only if no format matched
            is_specific = is_unsupported and not isinstance(library_error, UsageError)
            raise (library_error if is_specific else error) from None


def read_native_weights(
    source: str | os.PathLike[str], path: Path, files: list[Path], config_json: dict[str, Any], settings: dict[str, Any]
) -> PretrainedWeights:
    """Detect the format of weights files of a model that this package implements, as `read_weights` does.
    `config_json`: the content of the config.json in their folder."""
    check_model_type(config_json)
    json_fields = parse_model_config(config_json)
    detected: DetectedCheckpoint = detect_checkpoint(files, json_fields | settings)
    if detected.format.name == "huggingface":
        check_model_type(config_json, detected.format.title)
    notes = (
        *detected.notes,
        *(describe_heads_mismatch(detected.config) if "heads" in json_fields and "heads" not in settings else ()),
    )
    preprocess = load_preprocessing(detected.format, detected.config, path if path.is_dir() else None, config_json)
    task = infer_task(detected.config, parse_class_names(detected.config, config_json))
    properties = detected.format.title, detected.config, preprocess, task, detected.read_state, detected.unused
    tokenizer = find_tokenizer(path if path.is_dir() else path.parent, detected.config)
    return PretrainedWeights(os.fspath(source), *properties, notes=notes, tokenizer=tokenizer)


def read_library_weights(
    source: str | os.PathLike[str],
    path: Path,
    files: list[Path],
    config_json: dict[str, Any],
    reference: ModelConfig | None,
) -> PretrainedWeights:
    """Describe weights files of a model that timm or transformers builds: `reference`, or the one that the source or
    its `config_json` names. Raises UsageError if nothing names a model, and the errors of `open_library_checkpoint`."""
    name = os.fspath(source)
    checkpoint = open_library_checkpoint(name, path, files=files, config_json=config_json, reference=reference)
    config: ModelConfig = checkpoint.config
    return PretrainedWeights(
        name,
        checkpoint.title,
        config=config,
        preprocess=checkpoint.preprocess,
        task=infer_task(config, parse_class_names(config, config_json)),
        read_state=lambda: checkpoint.read(config),
        unused=checkpoint.unused,
        read_resized=checkpoint.read,
    )


def find_weights_files(path: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return the weights files at a path, and the content of their config.json, {} if there is none. Raises
    WeightsError for a folder without weights."""
    if path.is_dir():
        return find_weights_in_folder(path)
    config_names = {"model.": "config.json", "pytorch_model.": "config.json", "open_clip_": "open_clip_config.json"}
    config_name = next((name for start, name in config_names.items() if path.name.startswith(start)), None)
    return [path], read_json_object(path.parent / config_name) if config_name else {}


def open_checkpoint(folder: Path) -> PretrainedWeights:
    """Open a training checkpoint: its averaged weights (EMA), or the trained ones if the run has no EMA. The
    config.yaml of its run describes the model. Raises WeightsError if there is no such config, or if the run trains
    adapters, whose weights are not a full model."""
    config_path = folder.parent.parent / "config.yaml"
    if not config_path.is_file():
        raise WeightsError(
            f"{folder} is a checkpoint without its run: {config_path} is missing",
            "use a bundle, or restore the run folder",
        )
    run_config = read_yaml(config_path.read_text("utf-8"))
    if run_config.get("tune", {}).get("lora_rank"):
        raise WeightsError(
            f"{folder} contains only the LoRA adapters of an unfinished run",
            "finish the run with --resume, then use the run folder",
        )
    model_config: ModelConfig = from_builtins(ModelConfig, run_config["model"])

    def read_state() -> dict[str, Tensor]:
        """Read the tensors of the deployed model, without their common name prefix."""
        tensors = (
            load_checkpoint_tensors(folder, "ema") or load_checkpoint_tensors(folder, "model")
        ) | load_checkpoint_tensors(folder, "frozen")
        prefix = read_json_object(folder / "state.json").get("deployed_model", "model") + "."
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    return PretrainedWeights(
        os.fspath(folder),
        CHECKPOINT_TITLE,
        config=model_config,
        preprocess=from_builtins(AnyPreprocess, run_config["preprocess"]),
        task=task_of_run(model_config, run_config, os.fspath(config_path)),
        read_state=read_state,
    )


def load_pretrained_weights(
    model: Model, source: str | os.PathLike[str] | PretrainedWeights, classes: tuple[str, ...] = ()
) -> WeightsLoadResult:
    """Load the weights of a source into a model, in place, except for a head of another shape or for other classes.

    `classes` are the model's classes or targets. If the source has the same class names in another order, its head is
    reordered; if it has other names, its head is not loaded. Position tables are resized to the model's grid by the
    rule in its config (arXiv:2010.11929, section 3.2). The first layer is adapted by `adapt_input_channels` and
    `resample_patch_projection`; image weights are inflated for clips and volumes.

    A representation layer or head that does not fit keeps its initial zeros. A last norm at another position, and
    layers that have no effect until they are trained, keep their initial values too. Raises WeightsError, which lists
    them, for other differences.
    """
    weights = source if isinstance(source, PretrainedWeights) else open_weights(source, reference=model.config)
    if model.config.has_text:
        return load_image_text_weights(model, weights)
    weights = drop_dense_head(weights)
    model_state, state = model.state_dict(), weights.read_state_for(model.config)
    fold_prefix_positions(state, model_state)
    rename_attention_tensors(state, model_state)
    convert_key_bias(state, model_state, rotary=model.config.attention.kind == "rotary")
    inflate_positions(state, model_state, weights.config, model.config)
    omitted = drop_prefix_and_neck(state, model_state, weights.config, model.config)
    resized = (
        f"{format_size(weights.config.table_grid)} -> {format_size(model.config.table_grid)}"
        if resize_position_tables(state, model_state, model.config)
        or (weights.config.library and model.config.sized_by and weights.config.grid != model.config.grid)
        else ""
    )
    patches, channels = adapt_first_layer(state, model_state, weights.config, model.config)
    source_classes = weights.task.outputs or weights.task.classes
    has_other_classes = classes and has_class_names(source_classes) and set(source_classes) != set(classes)
    if classes and not has_other_classes and has_class_names(source_classes) and source_classes != classes:
        order = torch.tensor([source_classes.index(name) for name in classes])
        state |= {
            name: state[name][order] for name in state if name.startswith("head.") and len(state[name]) == len(order)
        }
        if "classes.weight" in state:  # the last row is the "no class" embedding
            state["classes.weight"] = state["classes.weight"][torch.cat([order, torch.tensor([len(order)])])]
    dropped = [
        name
        for name in model_state
        if name.startswith(HEAD_PREFIXES)
        and (
            name not in state
            or state[name].shape != model_state[name].shape
            or (has_other_classes and name.startswith(("head.", "classes.")))
        )
    ]
    dropped += [
        name
        for name in model_state
        if (name.startswith(FINAL_NORM_PREFIXES) or IDENTITY_AT_INIT.fullmatch(name)) and name not in state
    ]
    unused = [
        name
        for name in state
        if name.startswith(HEAD_PREFIXES + FINAL_NORM_PREFIXES) and (name in dropped or name not in model_state)
    ]
    loaded = [name for name in state if name not in unused]
    load_state_dict_strict(
        model, {name: state[name] for name in loaded} | {name: model_state[name] for name in dropped}, weights.source
    )
    windows = model.config.describe_window_change(weights.config)
    unused = [*omitted, *unused, *weights.unused]
    changes: dict[str, Any] = {"resized": resized, "channels": channels, "windows": windows, "patches": patches}
    return WeightsLoadResult(
        weights.source, weights.title, loaded=loaded, initialised=dropped, unused=unused, **changes
    )


def load_image_text_weights(model: Model, weights: PretrainedWeights) -> WeightsLoadResult:
    """Load the weights of an image encoder, with or without a text encoder, into a model with both, in place.

    The image encoder is adapted as by `load_pretrained_weights`. The text encoder must match; without one in the
    weights, that of the model keeps its initial values. Raises WeightsError, which lists the differences.
    """
    result = load_pretrained_weights(model.backbone, weights)
    model_state = model.state_dict()
    if not weights.config.has_text:
        new_names = [name for name in model_state if not name.startswith("backbone.")]
        loaded, initialised = ([f"backbone.{name}" for name in names] for names in (result.loaded, result.initialised))
        return replace(result, loaded=loaded, initialised=[*initialised, *new_names])
    state = weights.read_state()
    text_state = {name: tensor for name, tensor in state.items() if not name.startswith("backbone.")}
    image_state = {name: tensor for name, tensor in model_state.items() if name.startswith("backbone.")}
    load_state_dict_strict(model, image_state | text_state, weights.source)
    return replace(result, loaded=[*(f"backbone.{name}" for name in result.loaded), *text_state])


def has_class_names(classes: tuple[str, ...]) -> bool:
    """Return whether classes have names other than their numbers."""
    return bool(classes) and classes != tuple(map(str, range(len(classes))))


@dataclass(frozen=True)
class WeightsInfo:
    """Properties of initial weights: the model's config, the preprocessing in training, notes about assumptions, and
    whether they include a head (`classifies`) or only an encoder."""

    config: ModelConfig
    preprocess: Preprocess | None = None
    notes: tuple[str, ...] = ()
    classifies: bool = True


def read_weights_info(
    source: str | os.PathLike[str], reference: ModelConfig | None = None, keep_text: bool = False
) -> WeightsInfo:
    """Read the properties of initial weights without their tensors. `reference`: the model that will load them. With
    `keep_text`, an image encoder with a text encoder is not reduced to the image encoder. Raises WeightsError for
    unsupported weights, UsageError for an invalid source."""
    weights = open_weights(source, reference=reference)
    weights = weights if keep_text and weights.config.has_text else drop_dense_head(weights)
    return WeightsInfo(weights.config, weights.preprocess, weights.notes, weights.task.has_head)


def drop_dense_head(weights: PretrainedWeights) -> PretrainedWeights:
    """Reduce the weights of a segmentation or detection model to its backbone, without adapter; other weights are
    returned unchanged."""
    config, prefix = weights.config, ""
    while config.backbone is not None:
        config, prefix = config.backbone, f"{prefix}backbone."
    if not prefix:
        return weights

    def read_state() -> dict[str, Tensor]:
        """Read the tensors of the backbone, without its name prefix."""
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in weights.read_state().items()
            if name.startswith(prefix)
        }

    return replace(weights, config=config, task=FeatureExtraction(), read_state=read_state)


def open_objective_state(source: str | os.PathLike[str], reference: ModelConfig | None = None) -> ObjectiveState | None:
    """Open the stored state with which a training objective can continue, such as a decoder or heads; None if there is
    none. `source`: a run, a bundle, or external pre-training or detector files. `reference`: the model of the
    objective; files of a library's model have no such state. Raises WeightsError if the state is damaged."""
    path = fetch_weights(os.fspath(source))
    folder = locate_bundle(path)
    if folder:
        return load_objective_state(folder, folder / DESCRIPTION_FILE) or extract_dense_head_state(open_weights(folder))
    if (path / "state.json").is_file() or (reference is not None and reference.library):
        return None
    files, config_json = find_weights_files(path)
    objective_state = read_foreign_objective(
        files,
        config_json,
        lambda: detect_checkpoint(files, parse_model_config(config_json) | get_source_fields(source)),
    )
    return objective_state or extract_dense_head_state(open_weights(source))


def extract_dense_head_state(weights: PretrainedWeights) -> ObjectiveState | None:
    """Return the tensors of a segmentation or detection model except its backbone, under the names of the training
    objective; None for other weights."""
    if not weights.task.is_dense:
        return None
    state = {
        f"model.{name}": tensor for name, tensor in weights.read_state().items() if not name.startswith("backbone.")
    }
    return ObjectiveState({"name": weights.task.name, "classes": list(weights.task.classes)}, state)


def locate_bundle(path: Path) -> Path | None:
    """Return the bundle folder of a run folder, or the folder itself if it is a bundle; None for any other path."""
    return next((folder for folder in (path / "model", path) if (folder / DESCRIPTION_FILE).is_file()), None)
