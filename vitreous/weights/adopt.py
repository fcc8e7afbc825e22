"""Initialise a model from weights: find and read them, adapt them to the model, and report the result."""

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
from vitreous.errors import UsageError, WeightsError
from vitreous.models.config import ModelConfig
from vitreous.models.zoo import Model, build_without_init
from vitreous.nn.grid import axis_resize_matrix, resize_position_table
from vitreous.nn.position import SinCosPosition
from vitreous.nn.sizes import format_size
from vitreous.tasks.base import Task
from vitreous.tasks.features import FeatureExtraction
from vitreous.tasks.table import TaskMixin, infer_task, task_of_run
from vitreous.weights.bundle import DESCRIPTION_FILE, Bundle, load_bundle, load_state_dict_strict
from vitreous.weights.fetch import fetch_weights, missing_source_error
from vitreous.weights.foreign import DetectedCheckpoint, detect_checkpoint, find_weights_in_folder
from vitreous.weights.formats.variants import describe_heads_mismatch
from vitreous.weights.inflation import convert_key_bias, inflate_kernel, inflate_positions
from vitreous.weights.objective_parts import HEAD_PREFIXES, ObjectiveState, WeightsLoadResult, load_objective_state
from vitreous.weights.options import get_source_fields
from vitreous.weights.pretraining import read_foreign_objective
from vitreous.weights.published import find_published_weights
from vitreous.weights.sharded import load_checkpoint_tensors
from vitreous.weights.sidecar import (
    check_model_type,
    load_preprocessing,
    parse_class_names,
    parse_model_config,
    read_json_object,
)

FINAL_NORM_PREFIXES = ("encoder.norm.", "pooled_norm.")  # the last norm, of every token or of pooled tokens
#: layers that have no effect until they are trained, so weights may lack them: relative positions, convolutions, time
IDENTITY_AT_INIT = re.compile(
    r"encoder\.blocks\.\d+\.(attention\.part(\.part)?\.(rows|columns)|after\..*|time\..*)|temporal\..*|position\.time\.table"
)
BUNDLE_TITLE, CHECKPOINT_TITLE = (
    "a bundle",
    "a checkpoint",
)  # titles of files written by this package, which contain all settings
POSITION_TABLE_NAMES = re.compile(
    r"(^|\.)(table|tables\.\d+|rows|columns|relative)$"
)  # names of tensors that depend on the grid
#: the first layer: the first of these names that exists
FIRST_LAYER_NAMES = ("stem.root.conv.weight", "stem.stages.0.conv.weight", "body.root.conv.weight", "projection.weight")


@dataclass(frozen=True)
class PretrainedWeights(TaskMixin):
    """Detected weights; `state` reads them under this project's names, in float32.

    `notes`: assumptions about settings that the files lack, one sentence each.
    """

    source: str
    title: str
    config: ModelConfig
    preprocess: Preprocess
    task: Task
    state: Callable[[], dict[str, Tensor]]
    unused: list[str] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def bundle(self) -> Bundle:
        """Return the model with these weights, as a bundle."""
        model = build_without_init(self.config)
        load_state_dict_strict(model, self.state(), self.source)
        provenance = self.provenance | {"init": self.source}
        return Bundle(model.eval(), self.task, self.preprocess, provenance, notes=self.notes)

    def with_resize_rule(self, rule: str, sides: tuple[int, ...] | None) -> PretrainedWeights:
        """Return these weights, whose positions are fully described, with another resize rule. Raises UsageError for
        another size."""
        if sides is not None and sides != self.config.image:
            own = f"{self.title} for images of {format_size(self.config.image)} pixels"
            raise UsageError(f"--source-size {format_size(sides)}: {self.source} is {own}", "leave it out")
        return replace(self, config=self.config.with_options(positions={"resize": rule})) if rule else self


def open_weights(source: str | os.PathLike[str], settings: dict[str, Any] | None = None) -> PretrainedWeights:
    """Open a run folder, bundle, file or folder of a known format, or a source that `fetch_weights` downloads.

    `settings`: fields of the model's config, by their dotted paths, that its files lack; a `WeightsSource` has such
    fields too. Raises WeightsError for unsupported weights, UsageError for an invalid source or setting.
    """
    row = find_published_weights(source)
    settings = (row.facts() if row else {}) | get_source_fields(source) | (settings or {})
    weights = read_weights(source, settings)
    tables = weights.config.has_position_tables
    if "positions.resize" in settings and not tables:
        own = f"{source} is {weights.config.name()}, which has no learned positions"
        raise UsageError(f"--resize {settings['positions.resize']}: {own}", "leave it out")
    if row and row.share:
        weights = replace(weights, preprocess=replace(weights.preprocess, share=row.share))
    own_title = weights.title in (BUNDLE_TITLE, CHECKPOINT_TITLE)
    return (
        weights.with_resize_rule(settings.get("positions.resize", ""), settings.get("image")) if own_title else weights
    )


def read_weights(source: str | os.PathLike[str], settings: dict[str, Any]) -> PretrainedWeights:
    """Open weights like `open_weights`, but without the resize rule in `settings` for bundles and checkpoints, which
    define it themselves. Raises WeightsError likewise."""
    path = fetch_weights(os.fspath(source))
    if not os.path.lexists(path):
        raise missing_source_error(os.fspath(source))
    folder = locate_bundle(path)
    if folder:
        bundle = load_bundle(folder)
        parts = bundle.model.config, bundle.preprocess, bundle.task, bundle.model.state_dict
        return PretrainedWeights(os.fspath(source), BUNDLE_TITLE, *parts, provenance=bundle.provenance)
    if (path / "state.json").is_file():
        return open_checkpoint(path)
    if path.is_dir() and (path / "config.yaml").is_file():
        raise WeightsError(f"{path} has no {DESCRIPTION_FILE}", "use a complete run folder, or a bundle")
    files, beside = find_weights_files(path)
    check_model_type(beside)
    beside_fields = parse_model_config(beside)
    detected: DetectedCheckpoint = detect_checkpoint(files, beside_fields | settings)
    if detected.format.name == "huggingface":
        check_model_type(beside, detected.format.title)
    notes = (
        *detected.notes,
        *(describe_heads_mismatch(detected.config) if "heads" in beside_fields and "heads" not in settings else ()),
    )
    preprocess = load_preprocessing(detected.format, detected.config, path if path.is_dir() else None, beside)
    task = infer_task(detected.config, parse_class_names(detected.config, beside))
    facts = detected.format.title, detected.config, preprocess, task, detected.state, detected.unused
    return PretrainedWeights(os.fspath(source), *facts, notes=notes)


def find_weights_files(path: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return the weights files at a path, and the content of their config.json. Raises WeightsError as
    `find_weights_in_folder`."""
    if path.is_dir():
        return find_weights_in_folder(path)
    named = path.name.startswith(("model.", "pytorch_model."))
    return [path], read_json_object(path.parent / "config.json") if named else {}


def open_checkpoint(place: Path) -> PretrainedWeights:
    """Open the averaged weights of a training checkpoint, described by its run's config.yaml.

    Raises WeightsError if there is no such config, or if the run trains adapters, whose weights are not a full model.
    """
    config = place.parent.parent / "config.yaml"
    if not config.is_file():
        raise WeightsError(
            f"{place} is a checkpoint without its run: {config} is missing", "use a bundle, or restore the run folder"
        )
    run = read_yaml(config.read_text("utf-8"))
    if run.get("tune", {}).get("lora_rank"):
        raise WeightsError(
            f"{place} contains adapters of an incomplete run", "complete it with --resume, then use the run"
        )
    model: ModelConfig = from_builtins(ModelConfig, run["model"])

    def state() -> dict[str, Tensor]:
        held = (
            load_checkpoint_tensors(place, "ema") or load_checkpoint_tensors(place, "model")
        ) | load_checkpoint_tensors(place, "frozen")
        shipped = read_json_object(place / "state.json").get("deployed_model", "model") + "."
        return {name.removeprefix(shipped): tensor for name, tensor in held.items() if name.startswith(shipped)}

    return PretrainedWeights(
        os.fspath(place),
        CHECKPOINT_TITLE,
        config=model,
        preprocess=from_builtins(AnyPreprocess, run["preprocess"]),
        task=task_of_run(model, run, os.fspath(config)),
        state=state,
    )


def load_pretrained_weights(
    model: Model, source: str | os.PathLike[str] | PretrainedWeights, classes: tuple[str, ...] = ()
) -> WeightsLoadResult:
    """Load the weights of a source into a model, in place, except for a head of another shape or for other classes.

    `classes` are the model's classes or targets. If the source has class names too, a head with the same ones is
    reordered, and a head with others is dropped. Positions are resized to the model's grid by the rule in its config
    (arXiv:2010.11929, section 3.2), channels are changed by `adapt_input_channels` and patches by
    `resample_patch_projection`; image weights are inflated for clips and volumes. A representation layer or head that
    does not fit keeps its initial zeros; so do a last norm at another position, and layers that have no effect until
    they are trained. Raises WeightsError, listing them, for other differences.
    """
    weights = drop_dense_head(source if isinstance(source, PretrainedWeights) else open_weights(source))
    own, state = model.state_dict(), dict(weights.state())
    fold_prefix_positions(state, own)
    rename_attention_tensors(state, own)
    convert_key_bias(state, own)
    inflate_positions(state, own, weights.config, model.config)
    omitted = drop_prefix_and_neck(state, own, weights.config, model.config)
    resized = (
        f"{format_size(weights.config.table_grid)} -> {format_size(model.config.table_grid)}"
        if resize_position_tables(state, own, model.config)
        else ""
    )
    patches, channels = adapt_first_layer(state, own, weights.config, model.config)
    theirs = weights.task.outputs or weights.task.classes
    foreign = classes and has_class_names(theirs) and set(theirs) != set(classes)
    if classes and not foreign and has_class_names(theirs) and theirs != classes:
        order = torch.tensor([theirs.index(name) for name in classes])
        state |= {
            name: state[name][order] for name in state if name.startswith("head.") and len(state[name]) == len(order)
        }
        if "classes.weight" in state:  # the last row is the "no class" embedding
            state["classes.weight"] = state["classes.weight"][torch.cat([order, torch.tensor([len(order)])])]
    dropped = [
        name
        for name in own
        if name.startswith(HEAD_PREFIXES)
        and (
            name not in state
            or state[name].shape != own[name].shape
            or (foreign and name.startswith(("head.", "classes.")))
        )
    ]
    dropped += [
        name
        for name in own
        if (name.startswith(FINAL_NORM_PREFIXES) or IDENTITY_AT_INIT.fullmatch(name)) and name not in state
    ]
    unused = [
        name
        for name in state
        if name.startswith(HEAD_PREFIXES + FINAL_NORM_PREFIXES) and (name in dropped or name not in own)
    ]
    loaded = [name for name in state if name not in unused]
    load_state_dict_strict(
        model, {name: state[name] for name in loaded} | {name: own[name] for name in dropped}, weights.source
    )
    windows = model.config.describe_window_change(weights.config)
    unused = [*omitted, *unused, *weights.unused]
    return WeightsLoadResult(
        weights.source,
        weights.title,
        loaded=loaded,
        new=dropped,
        unused=unused,
        resized=resized,
        channels=channels,
        windows=windows,
        patches=patches,
    )


def has_class_names(classes: tuple[str, ...]) -> bool:
    """Return whether classes have names, not only numbers."""
    return bool(classes) and classes != tuple(map(str, range(len(classes))))


def resize_position_tables(state: dict[str, Tensor], own: dict[str, Tensor], config: ModelConfig) -> bool:
    """Resize position tables in `state`, in place, to the model's shapes; returns whether any changed."""
    resized = False
    for name, tensor in own.items():
        if not POSITION_TABLE_NAMES.search(name) or name not in state or state[name].shape == tensor.shape:
            continue
        table, absolute = state[name], "position" in name
        if table.ndim == tensor.ndim and table.shape[-1] == tensor.shape[-1]:
            axes = len(tensor.shape) - 1 if absolute else 1
            flat = table.flatten(axes) if not absolute else table
            state[name] = resize_position_table(
                flat, tuple(tensor.shape[:axes]), config.positions.resize if absolute else "bilinear"
            ).reshape(tensor.shape)
            resized = True
    return resized


def fold_prefix_positions(state: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Fold the positions of prefix tokens into the tokens in `state`, or add zeros, in place, to match the model: rows
    (S, D)."""
    if "slots" in state and ("slots" not in own or own["slots"].shape != state["slots"].shape):
        slots = state.pop("slots")
        state["prefix"] = torch.cat([state["prefix"][: len(slots)] + slots, state["prefix"][len(slots) :]])
    if "slots" in own and "slots" not in state:
        state["slots"] = torch.zeros_like(own["slots"])


def rename_attention_tensors(state: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Rename attention tensors in `state`, in place and of any shape, if a block uses windows in the model but not in
    the weights, or vice versa."""
    named = {name.replace(".part.part.", ".part."): name for name in own}
    for name in list(state):
        target = named.get(name.replace(".part.part.", ".part."), name)
        if target != name and target not in state:
            state[target] = state.pop(name)


def drop_prefix_and_neck(
    state: dict[str, Tensor], own: dict[str, Tensor], before: ModelConfig, after: ModelConfig
) -> list[str]:
    """Remove tensors from `state`, in place, that a model on a grid does not have: prefix tokens (P, D), and SAM's neck
    (as ViTDet initialised from MAE, arXiv:2203.16527). Returns their names. Fixed positions become a table."""
    if after.attention.kind != "decomposed":
        return []
    table = before.positions.kind.startswith("sincos") and "position.table" in own
    if table and "position.table" not in state:
        form = before.positions.kind.removeprefix("sincos-")
        state["position.table"] = SinCosPosition(before.width, form).read(before.grid)
    names = [name for name in state if name not in own and (name == "prefix" or name.startswith("neck."))]
    for name in names:
        del state[name]
    return names


def adapt_first_layer(
    state: dict[str, Tensor], own: dict[str, Tensor], before: ModelConfig, after: ModelConfig
) -> tuple[str, str]:
    """Adapt the first layer in `state`, (D, C p q) or (O, C, k, k), in place, to the patch size and channels of the
    model. Returns the change of each, such as `16 -> 14`, or "" if there is none."""
    name = next((name for name in FIRST_LAYER_NAMES if name in state and name in own), "")
    patches = channels = ""
    if not name:
        return patches, channels
    old, new, more = before.projected_cell, after.projected_cell, len(after.image) - len(before.image)
    if old and new and old != new and more in (0, 1):
        patches, space = f"{format_size(old)} -> {format_size(new)}", new[more:]
        if old != space:
            state[name] = resample_patch_projection(state[name], before.channels, old, space)
        if more:
            inflate = after.inflate
            state[name] = inflate_kernel(state[name], before.channels, space, new[0], inflate)
            patches += f" ({inflate} inflation)"
    if before.channels != after.channels:
        state[name] = adapt_input_channels(state[name], before.channels, after.channels)
        channels = f"{before.channels} -> {after.channels}"
    return patches, channels


def resample_patch_projection(weight: Tensor, channels: int, before: tuple[int, ...], after: tuple[int, ...]) -> Tensor:
    """Resample the projection (D, C prod(before)) of patches of size `before`, in pixels, to patches of another size.

    A larger patch that is a bilinearly enlarged smaller one yields the same token as the smaller one: the weights are
    the pseudo-inverse of that resizing applied to the old ones (FlexiViT, arXiv:2212.08013, section 3.4), one axis
    after the other.
    """
    kernel = weight.double().unflatten(1, (channels, *before))
    for axis, (old, new) in enumerate(zip(before, after, strict=True), 2):
        inverse = torch.linalg.pinv(axis_resize_matrix(old, new, "bilinear").T)  # (new, old)
        kernel = (kernel.movedim(axis, -1) @ inverse.T).movedim(-1, axis)
    return kernel.flatten(1).to(weight.dtype)


def adapt_input_channels(weight: Tensor, before: int, after: int) -> Tensor:
    """Adapt the first layer's weights, (D, C p q) or (O, C, k, k), to another number of channels.

    One channel gets the sum over the old ones, so a grey image yields the same output as with three equal channels.
    More channels repeat the old ones, times before / after, which preserves the output scale: channel c is old channel
    c mod before. A ResNet standardises its filters in every forward pass, so only their directions are kept, and
    outputs differ.
    """
    split = weight.unflatten(1, (before, -1)) if weight.ndim == 2 else weight.flatten(2)  # (O, C, rest)
    changed = split.sum(1, keepdim=True) if after == 1 else split[:, torch.arange(after) % before] * (before / after)
    return changed.flatten(1) if weight.ndim == 2 else changed.reshape(len(weight), after, *weight.shape[2:])


@dataclass(frozen=True)
class WeightsInfo:
    """Properties of initial weights: the config of the model, the preprocessing in training, assumptions, and whether
    they are a classifier or only an encoder."""

    config: ModelConfig
    preprocess: Preprocess | None = None
    notes: tuple[str, ...] = ()
    classifies: bool = True


def read_weights_info(source: str | os.PathLike[str]) -> WeightsInfo:
    """Read the properties of initial weights from their header. Raises WeightsError and UsageError."""
    weights = drop_dense_head(open_weights(source))
    return WeightsInfo(weights.config, weights.preprocess, weights.notes, weights.task.has_head)


def drop_dense_head(weights: PretrainedWeights) -> PretrainedWeights:
    """Return the backbone, without adapter, of weights for segmentation or detection; other weights are returned
    unchanged."""
    config, prefix = weights.config, ""
    while config.backbone is not None:
        config, prefix = config.backbone, f"{prefix}backbone."
    if not prefix:
        return weights

    def state() -> dict[str, Tensor]:
        return {name.removeprefix(prefix): row for name, row in weights.state().items() if name.startswith(prefix)}

    return replace(weights, config=config, task=FeatureExtraction(), state=state)


def open_objective_state(source: str | os.PathLike[str]) -> ObjectiveState | None:
    """Return the state with which an objective can continue from a run, a bundle, or external pre-training or detector
    files; None if there is none. Raises WeightsError if it is damaged."""
    path = fetch_weights(os.fspath(source))
    folder = locate_bundle(path)
    if folder:
        return load_objective_state(folder, folder / DESCRIPTION_FILE) or extract_dense_head_state(open_weights(folder))
    if (path / "state.json").is_file():
        return None
    files, beside = find_weights_files(path)
    own = read_foreign_objective(
        files, beside, lambda: detect_checkpoint(files, parse_model_config(beside) | get_source_fields(source))
    )
    return own or extract_dense_head_state(open_weights(source))


def extract_dense_head_state(weights: PretrainedWeights) -> ObjectiveState | None:
    """Return the tensors besides the backbone of weights for segmentation or detection, by the names of their
    objective; None for others."""
    if not weights.task.is_dense:
        return None
    state = {f"model.{name}": row for name, row in weights.state().items() if not name.startswith("backbone.")}
    return ObjectiveState({"name": weights.task.name, "classes": list(weights.task.classes)}, state)


def locate_bundle(path: Path) -> Path | None:
    """Return the bundle of a run folder, or the folder itself if it is a bundle."""
    return next((folder for folder in (path / "model", path) if (folder / DESCRIPTION_FILE).is_file()), None)
