"""Write pre-training files in the formats of MAE, VideoMAE, DINO and DINOv2, from a bundle and the state of its
objective."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vitreous.errors import UsageError, WeightsError
from vitreous.models.config import ViTConfig
from vitreous.system.disk import write_text_atomic
from vitreous.weights.adopt import open_objective_state, open_weights
from vitreous.weights.bundle import Bundle
from vitreous.weights.formats import decoders
from vitreous.weights.formats.heads import write_dino_head
from vitreous.weights.objective_parts import ObjectiveState
from vitreous.weights.pretraining import DINO_HEAD_PREFIXES, LOSS_KEY, STUDENT_KEY, select_name_prefix
from vitreous.weights.table import Tensors, WeightsFormat
from vitreous.weights.writable import get_writable_format

Sections = dict[str, Tensors]  # state dicts of a file by their keys


def build_mae_sections(weights_format: WeightsFormat, config: ViTConfig, encoder: Tensors, state: Tensors) -> Sections:
    """Build the state dicts of MAE's original `mae_*_full.pth`: encoder and decoder."""
    return {"model": encoder | decoders.MAE_LAYOUT.write(config, state)}


def build_hf_vit_mae_sections(
    weights_format: WeightsFormat, config: ViTConfig, encoder: Tensors, state: Tensors
) -> Sections:
    """Build the state dict of transformers' ViTMAEForPreTraining: encoder and decoder."""
    prefixed = {f"vit.{name}": tensor for name, tensor in encoder.items()}
    return {"": prefixed | decoders.HF_MAE_LAYOUT.write(config, state)}


def build_videomae_sections(
    weights_format: WeightsFormat, config: ViTConfig, encoder: Tensors, state: Tensors
) -> Sections:
    """Build the state dicts of VideoMAE's original pre-training file: encoder and decoder."""
    return {"model": encoder | decoders.VIDEOMAE_LAYOUT.write(config, state)}


def build_hf_videomae_sections(
    weights_format: WeightsFormat, config: ViTConfig, encoder: Tensors, state: Tensors
) -> Sections:
    """Build the state dict of transformers' VideoMAEForPreTraining: encoder and decoder."""
    prefixed = {f"videomae.{name}": tensor for name, tensor in encoder.items()}
    return {"": prefixed | decoders.HF_VIDEOMAE_LAYOUT.write(config, state)}


def build_dino_sections(weights_format: WeightsFormat, config: ViTConfig, encoder: Tensors, state: Tensors) -> Sections:
    """Build the state dicts of DINO's `checkpoint.pth`: student, teacher and centre, without optimiser state."""
    student = weights_format.to_file(config, select_name_prefix(state, "model."))
    teacher_head, head = (write_dino_head(select_name_prefix(state, start)) for start in ("teacher_head.", "head."))
    return {
        STUDENT_KEY: add_name_prefixes({"module.backbone.": student, "module.head.": head}),
        "teacher": add_name_prefixes({"backbone.": encoder, "head.": teacher_head}),
        LOSS_KEY: {"center": state["centre"][None]},
    }


def build_dinov2_sections(
    weights_format: WeightsFormat, config: ViTConfig, encoder: Tensors, state: Tensors
) -> Sections:
    """Build the state dict of DINOv2's `teacher_checkpoint.pth`: the teacher, without a student."""
    backbone = encoder | {"mask_token": state["mask_token"][None]}
    heads = {
        theirs: select_name_prefix(state, f"teacher_{ours}") for ours, theirs in DINO_HEAD_PREFIXES["dinov2"].items()
    }
    head_tensors = {theirs: write_dino_head(head) for theirs, head in heads.items() if head}
    return {"teacher": add_name_prefixes({"backbone.": backbone} | head_tensors)}


def add_name_prefixes(groups: dict[str, Tensors]) -> Tensors:
    """Join groups of tensors, and add each group's prefix, the key, to its tensor names."""
    return {start + name: tensor.contiguous() for start, group in groups.items() for name, tensor in group.items()}


@dataclass(frozen=True)
class PretrainingFormat:
    """A pre-training file that `convert --to` writes.

    `objective`: the training objective whose state it contains. `encoder`: name of the encoder's format.
    `build_sections` builds the state dicts of the file from the encoder's format, the model's config, the encoder's
    foreign tensors, and the native objective state. `omitted_prefixes`: name prefixes of state that the file does not
    support. `video`: the encoder is for clips (VideoMAE).
    """

    objective: str
    encoder: str
    build_sections: Callable[[WeightsFormat, ViTConfig, Tensors, Tensors], Sections]
    suffix: str = ".pth"
    omitted_prefixes: tuple[str, ...] = ()
    video: bool = False


PRETRAINING_FORMATS = {
    "mae": PretrainingFormat("mae", "timm", build_mae_sections),
    "huggingface-mae": PretrainingFormat("mae", "huggingface", build_hf_vit_mae_sections, ""),
    "videomae-pretraining": PretrainingFormat("mae", "videomae", build_videomae_sections, video=True),
    "huggingface-videomae": PretrainingFormat("mae", "huggingface", build_hf_videomae_sections, "", video=True),
    "dino": PretrainingFormat("dino", "timm", build_dino_sections),
    "dinov2-teacher": PretrainingFormat(
        "dinov2",
        "dinov2",
        build_dinov2_sections,
        omitted_prefixes=("model.", "head.", "patch_head.", "centre", "patch_centre"),
    ),
}


def list_pretraining_formats(objective: str, config: Any) -> list[str]:
    """List the formats that contain the state of an objective, for the encoder of a config, which is for images or for
    clips."""
    video = config.has_time_axis
    return [
        name
        for name, pretraining_format in PRETRAINING_FORMATS.items()
        if pretraining_format.objective == objective and pretraining_format.video == video
    ]


def get_pretraining_format(
    to: str, config: Any, objective_state: ObjectiveState | None, source: str
) -> PretrainingFormat:
    """Return the pre-training format named `to`. Raises UsageError if the objective state is missing or that of another
    objective, and for an unsupported encoder."""
    pretraining_format, objective_name = (
        PRETRAINING_FORMATS[to],
        objective_state.config["name"] if objective_state else "",
    )
    if objective_state is None or objective_name != pretraining_format.objective:
        available = f"that of {objective_name}" if objective_name else "none"
        supported_formats = list_pretraining_formats(objective_name, config)
        hint = (
            f"use {' or '.join(supported_formats)}"
            if supported_formats
            else f"use {pretraining_format.encoder}, which contains only the encoder"
        )
        raise UsageError(
            f"--to {to} needs the training state of {pretraining_format.objective}, but {source} has {available}", hint
        )
    if pretraining_format.video != (config.has_time_axis):
        input_type = "clips" if pretraining_format.video else "images"
        raise UsageError(
            f"{to} is for encoders of {input_type}",
            f"use {' or '.join([*list_pretraining_formats(objective_name, config), 'bundle'])}",
        )
    get_writable_format(pretraining_format.encoder, config)
    if objective_state.config.get("batch_norm"):
        raise UsageError(
            f"{to} does not support heads with a batch norm", f"use a bundle, or {pretraining_format.encoder}"
        )
    if pretraining_format.video:
        if config.norm.final != "tokens" or not objective_state.config.get("normalise_channels"):
            problem = f"{to} needs normalised tokens, and pixels normalised per channel"
            raise UsageError(f"{problem}, as in --recipe videomae", "use a bundle")
        return pretraining_format
    if pretraining_format.objective == "mae" and config.prefix != 1:
        raise UsageError(
            f"{to} needs one prefix token, the class token, but the encoder has {config.prefix}", "use a bundle"
        )
    return pretraining_format


def write_pretraining(
    pretraining_format: PretrainingFormat, bundle: Bundle, objective_state: ObjectiveState, path: Path
) -> int:
    """Write encoder and objective state in a pre-training format; return the number of tensors. Raises OSError."""
    config: Any = bundle.model.config
    encoder = get_writable_format(pretraining_format.encoder, config)
    sections = pretraining_format.build_sections(
        encoder, config, encoder.to_file(config, bundle.model.state_dict()), objective_state.state
    )
    count = sum(map(len, sections.values()))
    if pretraining_format.suffix:
        torch.save(sections, path)
        return count
    assert encoder.describe
    path.mkdir()
    save_file(sections[""], path / "model.safetensors", metadata={"format": "pt"})
    config_json = decoders.to_hf_decoder_json(objective_state.config, encoder.describe(config))
    write_text_atomic(path / "config.json", json.dumps(config_json, indent=2) + "\n")
    return count


def verify_pretraining(
    pretraining_format: PretrainingFormat, path: Path, bundle: Bundle, objective_state: ObjectiveState
) -> None:
    """Read a written pre-training file and compare every tensor bit by bit. Raises WeightsError for a difference."""
    settings = {"heads": bundle.model.config.heads} if pretraining_format.suffix else None
    loaded, loaded_objective = open_weights(path, settings).read_state(), open_objective_state(path)
    expected: dict[str, Tensor] = {
        **bundle.model.state_dict(),
        **drop_name_prefixes(objective_state.state, pretraining_format.omitted_prefixes),
    }
    loaded_state = loaded | drop_name_prefixes(
        loaded_objective.state if loaded_objective else {}, pretraining_format.omitted_prefixes
    )
    different = list(expected.keys() ^ loaded_state.keys())
    different += [
        name for name in expected.keys() & loaded_state.keys() if not torch.equal(expected[name], loaded_state[name])
    ]
    if different:
        raise WeightsError(
            f"the written weights differ from the source: {', '.join(sorted(different)[:5])}",
            "nothing was saved; please report this bug in vitreous",
        )


def drop_name_prefixes(state: Tensors, prefixes: tuple[str, ...]) -> Tensors:
    """Return the tensors whose names start with none of the prefixes."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(prefixes)}
