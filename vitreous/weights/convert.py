"""The verb `convert`: convert weights between formats, verified by reading them back."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from vitreous.data.modalities.planar import SizedPreprocess
from vitreous.errors import ResourceError, UsageError, WeightsError
from vitreous.models.config import ModelConfig, replace_known_fields
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model
from vitreous.nn.position import sincos_position_table
from vitreous.nn.sizes import format_size
from vitreous.system.disk import sync_and_rename, write_text_atomic
from vitreous.tasks.classification import Classification
from vitreous.tasks.table import replace_task_classes
from vitreous.weights.adopt import (
    BUNDLE_TITLE,
    CHECKPOINT_TITLE,
    HEAD_PREFIXES,
    PretrainedWeights,
    WeightsLoadResult,
    drop_dense_head,
    load_pretrained_weights,
    open_objective_state,
    open_weights,
)
from vitreous.weights.bundle import Bundle, text_classes_error
from vitreous.weights.foreign import detect_checkpoint, find_writable_formats
from vitreous.weights.formats import vitdet_detector
from vitreous.weights.objective_parts import ObjectiveState
from vitreous.weights.pretraining_files import (
    PRETRAINING_FORMATS,
    PretrainingFormat,
    get_pretraining_format,
    list_pretraining_formats,
    verify_pretraining,
    write_pretraining,
)
from vitreous.weights.sidecar import config_to_metadata, parse_model_config
from vitreous.weights.table import Tensors, WeightsFormat
from vitreous.weights.writable import get_writable_format, with_learned_positions
from vitreous.weights.zero_shot import open_labelled_weights

BUNDLE_FORMAT = "bundle"


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str = BUNDLE_FORMAT,
    image_size: int | tuple[int, ...] | None = None,
    num_classes: int | None = None,
    channels: int | None = None,
    settings: dict[str, Any] | None = None,
    note: Callable[[str], None] = lambda text: None,
    class_map: str | os.PathLike[str] | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Convert weights to the format `to` at the path `out`, and verify the output by reading it back. If it is not
    bit-identical, nothing is written.

    `to`: `bundle`, `huggingface` (folders), `timm`, `google-npz` and others (files). `mae`, `huggingface-mae`,
    `videomae-pretraining`, `huggingface-videomae`, `dino` and `dinov2-teacher` also contain the state for continued
    pre-training, as a bundle does. `image_size` (pixels), `num_classes` and `channels` give the model another
    resolution, a new zero head, another first layer. `class_map`: a file that lists the head rows to keep, one per
    line, in the order of the new classes. For segmentation and detection models, formats other than `bundle` contain
    the backbone. `settings`: config fields that the files lack. `model`: name of the model of timm or transformers that
    the tensors of a file belong to, such as `timm:resnet18`. `note` is called with each message.

    Returns a report of the conversion for `--json`. Raises WeightsError for unsupported weights, UsageError for a model
    that the format cannot represent or an existing path, ResourceError if the output cannot be written.
    """
    out_path = Path(out)
    if out_path.exists() or out_path.is_symlink():
        raise UsageError(f"{out_path} already exists", "use another path")
    reference = None if model is None else parse_library_model(model)
    weights = open_labelled_weights(source, settings, reference)
    if reference is not None and weights.title in (BUNDLE_TITLE, CHECKPOINT_TITLE):
        raise UsageError(f"{weights.source} is {weights.title}, which contains its model", "leave --model out")
    weights = reduce_to_format(to, weights if class_map is None else select_classes(weights, class_map))
    config = apply_size_overrides(weights.config, image_size, num_classes, channels)
    objective_state = open_objective_state(source, reference)
    stored_config = config if to == BUNDLE_FORMAT else with_learned_positions(config)
    pretraining_format = (
        get_pretraining_format(to, stored_config, objective_state, weights.source)
        if to in PRETRAINING_FORMATS
        else None
    )
    weights_format = None if pretraining_format or to == BUNDLE_FORMAT else get_writable_format(to, stored_config)
    note(f"found {weights.title}: {weights.config.name()} at {format_size(weights.config.image)}")
    bundle, load_result = build_bundle_for_config(weights, config)
    notes = [*weights.notes, *([load_result.text()] if load_result else ())]
    if stored_config != config:
        notes.append(f"fixed positions are written as a table, as {to} requires; further training will change them")
        bundle = store_fixed_positions(bundle, stored_config)
    if objective_state and channels not in (None, weights.config.channels):
        notes.append(
            f"the state of its objective, {objective_state.config['name']}, is omitted: "
            f"it needs {weights.config.channels} channels, not {channels}"
        )
        objective_state = None
    for text in notes:
        note(text)
    state = bundle.model.state_dict()
    if pretraining_format and objective_state:
        out_path, num_tensors = write_verified_pretraining(bundle, pretraining_format, objective_state, out_path)
    else:
        bundle.objective_state = objective_state if to == BUNDLE_FORMAT else None
        out_path, num_tensors = write_verified(bundle, weights_format, out_path, state)
    if objective_state and (dropped := describe_dropped_state(objective_state, config, to, pretraining_format)):
        note(dropped)
    if differences := list_numerical_differences(weights_format, stored_config, state) if weights_format else []:
        note(
            f"readers of {to} assume other settings: {', '.join(differences)}; outputs "
            f"differ slightly{suggest_gelu_form(differences)}"
        )
    size = sum(file.stat().st_size for file in (out_path.rglob("*") if out_path.is_dir() else [out_path]))
    summary = {"to": to, "tensors": num_tensors, "assumed_settings": differences, "out": str(out_path), "bytes": size}
    return build_conversion_report(weights, config, state, load_result) | summary


def parse_library_model(name: str) -> ModelConfig:
    """Return the config of a model that timm or transformers builds. Raises UsageError for other names."""
    config = config_from_name(name)
    if not config.library:
        hint = "leave --model out: files of this model are recognised by their tensors"
        raise UsageError(f"--model {name} is not a model of timm or transformers", hint)
    return config


def reduce_to_format(to: str, weights: PretrainedWeights) -> PretrainedWeights:
    """Reduce the weights of a model around a backbone to the tensors that the format `to` supports; others are
    unchanged. Most formats support only the backbone, which a note reports. detectron2's ViTDet format supports the
    whole detector, except for the unused background boxes."""
    backbone = drop_dense_head(weights)
    has_format = weights.config.has_text and to in find_writable_formats(weights.config)
    if to == BUNDLE_FORMAT or backbone is weights or has_format:
        return weights
    if to == vitdet_detector.DETECTOR_FORMAT and vitdet_detector.is_vitdet_detector(weights.config):
        return replace(weights, read_state=lambda: vitdet_detector.zero_background_deltas(weights.read_state()))
    title = weights.config.name()
    part = "text encoder" if weights.config.has_text else "head"
    text = f"only the backbone of {title} is written, {backbone.config.name()}: {to} does not support its {part}"
    return replace(backbone, notes=(*weights.notes, text))


def build_conversion_report(
    weights: PretrainedWeights, config: ModelConfig, state: Tensors, load_result: WeightsLoadResult | None
) -> dict[str, Any]:
    """Build the report of a conversion: source, format, model, and the loaded, new and unused tensors."""
    return {
        "source": weights.source,
        "format": weights.title,
        "model": config.name(),
        "parameters": sum(tensor.numel() for tensor in state.values()),
        "image_size": list(config.image),
        "loaded": len(load_result.loaded) if load_result else len(state),
        "new": load_result.initialised if load_result else [],
        "unused": load_result.unused if load_result else weights.unused,
        "notes": list(weights.notes),
        "resized": load_result.resized if load_result else "",
        "channels": load_result.channels if load_result else "",
    }


def store_fixed_positions(bundle: Bundle, stored_config: ModelConfig) -> Bundle:
    """Return the bundle with its fixed position embeddings stored as a learned table."""
    model, config = build_model(stored_config), bundle.model.config
    position_tensors = {"position.table": sincos_position_table(config.grid, config.width)}
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items() if name == "slots"}
    model.load_state_dict(bundle.model.state_dict() | position_tensors | state)
    return replace(bundle, model=model.eval())


def describe_dropped_state(
    objective_state: ObjectiveState, config: ModelConfig, to: str, pretraining_format: PretrainingFormat | None
) -> str:
    """Describe the state of the training objective that the format omits; "" if it omits none."""
    name = objective_state.config["name"]
    if pretraining_format:
        groups = {
            tensor.partition(".")[0]
            for tensor in objective_state.state
            if tensor.startswith(pretraining_format.omitted_prefixes)
        }
        return (
            f"omitted, because {to} does not support them: {', '.join(sorted(groups))}"
            if pretraining_format.omitted_prefixes and groups
            else ""
        )
    supported_formats = list_pretraining_formats(name, config)
    if to == BUNDLE_FORMAT:
        return ""
    return (
        f"only the encoder was written; to continue training with {name} use --to "
        f"{' or '.join([*supported_formats, 'bundle'])}"
    )


def write_verified_pretraining(
    bundle: Bundle, pretraining_format: PretrainingFormat, objective_state: ObjectiveState, path: Path
) -> tuple[Path, int]:
    """Write the encoder and the state of the training objective to `path`, with the format's suffix, once a temporary
    copy was verified by reading it back. Returns the path and the number of tensors. Raises WeightsError if the tensors
    read back differ, ResourceError if the file cannot be written."""
    return publish_verified(
        path
        if not pretraining_format.suffix or path.suffix == pretraining_format.suffix
        else path.with_name(path.name + pretraining_format.suffix),
        lambda temporary: write_pretraining(pretraining_format, bundle, objective_state, temporary),
        lambda temporary: verify_pretraining(pretraining_format, temporary, bundle, objective_state),
    )


def write_verified(
    bundle: Bundle, weights_format: WeightsFormat | None, path: Path, state: Tensors
) -> tuple[Path, int]:
    """Write `state` to `path`, with the format's suffix, once a temporary copy was verified by reading it back. Returns
    the path and the number of tensors. Raises WeightsError if the tensors read back differ, ResourceError if the file
    cannot be written."""
    if weights_format and not weights_format.describe and path.suffix != weights_format.suffix:
        path = path.with_name(path.name + weights_format.suffix)
    return publish_verified(
        path,
        lambda temporary: write_weights_format(bundle, weights_format, temporary, state),
        lambda temporary: verify_round_trip(weights_format, temporary, state, bundle.model.config),
    )


def publish_verified(path: Path, write: Callable[[Path], int], verify: Callable[[Path], None]) -> tuple[Path, int]:
    """Write to a temporary path, verify the result, and move it to `path`; return the path and the number of tensors.
    Raises WeightsError if verification fails, ResourceError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".convert-") as scratch:
            temporary = Path(scratch) / path.name
            num_tensors = write(temporary)
            verify(temporary)
            sync_and_rename(temporary, path)
    except OSError as error:
        raise ResourceError(
            f"cannot write {path} ({error.strerror or error})", "free some space, or use another path"
        ) from None
    return path, num_tensors


def apply_size_overrides(
    config: ModelConfig, image_size: int | tuple[int, ...] | None, classes: int | None, channels: int | None
) -> ModelConfig:
    """Return the config with another image size, number of classes and number of channels; None leaves a value
    unchanged. Raises UsageError for an image size that is not divisible by the patch size, and for classes of a model
    with a text encoder."""
    if config.has_text:
        if classes is not None:
            raise text_classes_error(config)
        return config.with_options(backbone=apply_size_overrides(config.encoder, image_size, None, channels))
    changes: dict[str, Any] = {}
    if image_size is not None:
        frames = config.image[:1] if config.has_time_axis else ()  # the number of frames is kept
        axes = len(config.image) - len(frames)
        spatial_size = (image_size,) * axes if isinstance(image_size, int) else tuple(image_size)
        changes["image"] = (*frames, *spatial_size) if len(spatial_size) == axes else spatial_size
        config.check_image_size(changes["image"])
    if classes is not None and classes != config.classes:
        changes |= {"classes": classes, "head.kind": "linear", "head.representation": None, "head.bias": True}
    if channels is not None:
        changes["channels"] = channels
    return replace_known_fields(config, changes)


def build_bundle_for_config(weights: PretrainedWeights, config: ModelConfig) -> tuple[Bundle, WeightsLoadResult | None]:
    """Build the bundle of the weights, adapted to `config` if it differs from theirs; the load result is None if
    nothing was adapted."""
    if config == weights.config:
        return weights.build_bundle(), None
    model = build_model(config)
    load_result = load_pretrained_weights(model, weights)
    preprocess = weights.preprocess
    mean, std = (tuple((values * config.channels)[: config.channels]) for values in (preprocess.mean, preprocess.std))
    preprocess = replace(
        preprocess, image=config.image[-preprocess.axes :], channels=config.channels, mean=mean, std=std
    )
    task = weights.task
    if config.classes != weights.config.classes:
        names = tuple(map(str, range(config.classes)))
        task = replace_task_classes(task, names).with_temperature(1.0)
    bundle = Bundle(model.eval(), task, preprocess, {"init": weights.source}, tokenizer=weights.tokenizer)
    return bundle, load_result


def write_weights_format(bundle: Bundle, weights_format: WeightsFormat | None, path: Path, state: Tensors) -> int:
    """Write a bundle's tensors in a foreign format, as a file or a folder, or as a bundle if `weights_format` is None.
    Returns the number of tensors."""
    if weights_format is None:
        bundle.save(path)
        return len(state)
    config = bundle.model.config
    tensors = weights_format.to_file(config, state)
    if weights_format.suffix == ".npz":
        with open(path, "wb") as file:
            np.savez(file, allow_pickle=False, **{name: tensor.numpy() for name, tensor in tensors.items()})
    elif weights_format.describe is None:
        save_file(tensors, path, metadata={"format": "pt", **config_to_metadata(config)})
    else:
        path.mkdir()
        save_file(tensors, path / weights_format.file_in_folder, metadata={"format": "pt"})
        config_json = weights_format.describe(config)
        if config_json.get("id2label"):
            config_json |= {
                "id2label": dict(enumerate(bundle.classes)),
                "label2id": {name: i for i, name in enumerate(bundle.classes)},
            }
        write_text_atomic(path / "config.json", json.dumps(config_json, indent=2) + "\n")
        if not config.generates_images:
            write_text_atomic(
                path / "preprocessor_config.json", json.dumps(to_hf_preprocessor_json(bundle), indent=2) + "\n"
            )
    return len(tensors)


def to_hf_preprocessor_json(bundle: Bundle) -> dict[str, Any]:
    """Convert a bundle's preprocessing to transformers' preprocessor_config.json."""
    p = cast(SizedPreprocess, bundle.preprocess.with_one_size())
    height, width = p.image
    size: dict[str, Any] = {"height": height, "width": width}
    cropped: dict[str, Any] = {"do_center_crop": False}
    if p.fit == "crop":
        cropped = {"do_center_crop": True, "crop_size": size}
        size = {"shortest_edge": round(min(p.image) / p.share)}
    return {
        "image_processor_type": "BitImageProcessor" if p.fit == "crop" else "ViTImageProcessor",
        "do_resize": True,
        "size": size,
        **cropped,
        "resample": {"bilinear": 2, "bicubic": 3}[p.filter],
        "do_rescale": True,
        "rescale_factor": 1 / p.peak,
        "do_normalize": True,
        "image_mean": list(p.mean),
        "image_std": list(p.std),
    }


def list_numerical_differences(weights_format: WeightsFormat, config: ModelConfig, state: Tensors) -> list[str]:
    """List settings that code for the format assumes and that differ from the model's, such as `mlp.gelu none -> tanh`.
    Empty for most conversions."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights_format.to_foreign_tensors(config, state).items()}
    settings = parse_model_config(weights_format.describe(config)) if weights_format.describe else {}
    theirs = weights_format.configure(shapes, {"image": config.image} | config.head_count_field() | settings)
    ours, assumed = config.numerical_choices(), theirs.numerical_choices()
    return [f"{name} {ours[name]} -> {assumed[name]}" for name in ours if ours[name] != assumed[name]]


def suggest_gelu_form(differences: list[str]) -> str:
    """Return the training option that makes outputs identical, in parentheses, if the form of GELU differs; else ""."""
    gelu = next((difference.rpartition(" ")[2] for difference in differences if difference.startswith("mlp.gelu ")), "")
    return f" (train with --model.mlp.gelu {gelu} for identical outputs)" if gelu else ""


def verify_round_trip(weights_format: WeightsFormat | None, path: Path, state: Tensors, config: ModelConfig) -> None:
    """Read the written weights and compare every tensor bit by bit with `state`. Raises WeightsError for a
    difference."""
    has_config_json = weights_format is None or weights_format.describe
    loaded = (
        open_weights(path).read_state()
        if has_config_json
        else detect_checkpoint([path], config.head_count_field()).read_state()
    )
    different = [name for name in state if name not in loaded or not torch.equal(loaded[name], state[name])]
    if different or len(loaded) != len(state):
        raise WeightsError(
            f"the written weights differ from the source: {', '.join(different[:5])}",
            "nothing was saved; please report this bug in vitreous",
        )


def read_class_map(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Read a class map: the head rows to keep, numbers from 0, one per line, as in Microsoft's map22kto1k.txt. Raises
    UsageError for an invalid file."""
    try:
        class_indices = tuple(int(line) for line in Path(path).read_text("utf-8").split())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is not a class map ({str(error)[:80]})", "use a file with one number per line"
        ) from None
    if not class_indices or min(class_indices) < 0:
        raise UsageError(
            f"{path} is not a class map: {'it is empty' if not class_indices else 'it has negative numbers'}",
            "use a file with one number per line, at least 0",
        )
    return class_indices


def select_classes(weights: PretrainedWeights, path: str | os.PathLike[str]) -> PretrainedWeights:
    """Return the weights with a head for only the classes of a map: new class i has the head row in line i of the file.
    Raises UsageError for weights without a head, and for a row that the head does not have."""
    class_indices, classes = read_class_map(path), weights.config.classes
    if not classes:
        raise UsageError(f"{weights.source} has no head to select classes from", "leave --class-map out")
    if max(class_indices) >= classes:
        raise UsageError(
            f"{path} selects row {max(class_indices)}, but the head of {weights.source} has {classes}",
            "use a map for these weights",
        )

    def read_state() -> dict[str, Tensor]:
        """Read the tensors with only the selected rows of the head."""
        selected = list(class_indices)
        return {
            name: tensor[selected] if name.startswith(HEAD_PREFIXES[0]) else tensor
            for name, tensor in weights.read_state().items()
        }

    names = weights.classes
    task = Classification(
        tuple(names[index] for index in class_indices)
        if len(set(class_indices)) == len(class_indices)
        else number_class_names(len(class_indices))
    )
    if names == number_class_names(classes):
        task = Classification(number_class_names(len(class_indices)))
    return replace(
        weights, config=weights.config.with_options(classes=len(class_indices)), task=task, read_state=read_state
    )


def number_class_names(count: int) -> tuple[str, ...]:
    """Return the names "0", "1" and so on of `count` classes that have no names."""
    return tuple(map(str, range(count)))
