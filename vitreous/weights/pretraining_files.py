"""Write original pre-training files from a bundle and the state of its objective."""

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


def build_mae_sections(form: WeightsFormat, config: ViTConfig, encoder: Tensors, state: Tensors) -> Sections:
    """Build the original `mae_*_full.pth`."""
    return {"model": encoder | decoders.MAE_LAYOUT.write(config, state)}


def build_hf_vit_mae_sections(form: WeightsFormat, config: ViTConfig, encoder: Tensors, state: Tensors) -> Sections:
    """Build transformers' ViTMAEForPreTraining."""
    named = {f"vit.{name}": tensor for name, tensor in encoder.items()}
    return {"": named | decoders.HF_MAE_LAYOUT.write(config, state)}


def build_videomae_sections(form: WeightsFormat, config: ViTConfig, encoder: Tensors, state: Tensors) -> Sections:
    """Build the pre-training file of VideoMAE's authors."""
    return {"model": encoder | decoders.VIDEOMAE_LAYOUT.write(config, state)}


def build_hf_videomae_sections(form: WeightsFormat, config: ViTConfig, encoder: Tensors, state: Tensors) -> Sections:
    """Build transformers' VideoMAEForPreTraining."""
    named = {f"videomae.{name}": tensor for name, tensor in encoder.items()}
    return {"": named | decoders.HF_VIDEOMAE_LAYOUT.write(config, state)}


def build_dino_sections(form: WeightsFormat, config: ViTConfig, encoder: Tensors, state: Tensors) -> Sections:
    """Build DINO's `checkpoint.pth`, without optimiser state."""
    student = form.file(config, select_name_prefix(state, "model."))
    teacher_head, head = (write_dino_head(select_name_prefix(state, start)) for start in ("teacher_head.", "head."))
    return {
        STUDENT_KEY: add_name_prefixes({"module.backbone.": student, "module.head.": head}),
        "teacher": add_name_prefixes({"backbone.": encoder, "head.": teacher_head}),
        LOSS_KEY: {"center": state["centre"][None]},
    }


def build_dinov2_sections(form: WeightsFormat, config: ViTConfig, encoder: Tensors, state: Tensors) -> Sections:
    """Build DINOv2's `teacher_checkpoint.pth`: only the teacher."""
    backbone = encoder | {"mask_token": state["mask_token"][None]}
    heads = {
        theirs: select_name_prefix(state, f"teacher_{ours}") for ours, theirs in DINO_HEAD_PREFIXES["dinov2"].items()
    }
    written = {theirs: write_dino_head(head) for theirs, head in heads.items() if head}
    return {"teacher": add_name_prefixes({"backbone.": backbone} | written)}


def add_name_prefixes(groups: dict[str, Tensors]) -> Tensors:
    """Join groups of tensors, adding each group's prefix to their names."""
    return {start + name: tensor.contiguous() for start, group in groups.items() for name, tensor in group.items()}


@dataclass(frozen=True)
class PretrainingFormat:
    """A pre-training file that `convert --to` writes.

    `objective`: the objective whose state it contains; `encoder`: the format of its encoder; `sections`: builds its
    state dicts from that format, the model's config, the encoder's tensors under their names, and the state under ours.
    `leaves`: name prefixes of state that it does not support. `video`: a VideoMAE file.
    """

    objective: str
    encoder: str
    sections: Callable[[WeightsFormat, ViTConfig, Tensors, Tensors], Sections]
    suffix: str = ".pth"
    leaves: tuple[str, ...] = ()
    video: bool = False


PRETRAINING_FORMATS = {
    "mae": PretrainingFormat("mae", "timm", build_mae_sections),
    "huggingface-mae": PretrainingFormat("mae", "huggingface", build_hf_vit_mae_sections, ""),
    "videomae-pretraining": PretrainingFormat("mae", "videomae", build_videomae_sections, video=True),
    "huggingface-videomae": PretrainingFormat("mae", "huggingface", build_hf_videomae_sections, "", video=True),
    "dino": PretrainingFormat("dino", "timm", build_dino_sections),
    "dinov2-teacher": PretrainingFormat(
        "dinov2", "dinov2", build_dinov2_sections, leaves=("model.", "head.", "patch_head.", "centre", "patch_centre")
    ),
}


def list_pretraining_formats(objective: str, config: Any) -> list[str]:
    """List the formats that contain the state of this objective with an encoder of images, or of clips."""
    video = config.has_time_axis
    return [name for name, form in PRETRAINING_FORMATS.items() if form.objective == objective and form.video == video]


def get_pretraining_format(to: str, config: Any, parts: ObjectiveState | None, source: str) -> PretrainingFormat:
    """Return the format of a name. Raises UsageError if the objective state is missing or that of another objective,
    and for an unsupported encoder."""
    form, own = PRETRAINING_FORMATS[to], parts.config["name"] if parts else ""
    if parts is None or own != form.objective:
        has = f"those of {own}" if own else "none"
        able = list_pretraining_formats(own, config)
        hint = f"use {' or '.join(able)}" if able else f"use {form.encoder}, which contains only the encoder"
        raise UsageError(f"--to {to} needs the modules of {form.objective}, but {source} has {has}", hint)
    if form.video != (config.has_time_axis):
        kind = "clips" if form.video else "pictures"
        raise UsageError(
            f"{to} is for encoders of {kind}", f"use {' or '.join([*list_pretraining_formats(own, config), 'bundle'])}"
        )
    get_writable_format(form.encoder, config)
    if parts.config.get("batch_norm"):
        raise UsageError(f"{to} does not support heads with a batch norm", f"use a bundle, or {form.encoder}")
    if form.video:
        if config.norm.final != "tokens" or not parts.config.get("normalise_channels"):
            problem = f"{to} needs normalised tokens, and pixels normalised per channel"
            raise UsageError(f"{problem}, as in --recipe videomae", "use a bundle")
        return form
    if form.objective == "mae" and config.prefix != 1:
        raise UsageError(f"{to} needs a class token and no other, the encoder has {config.prefix}", "use a bundle")
    return form


def write_pretraining(form: PretrainingFormat, bundle: Bundle, parts: ObjectiveState, place: Path) -> int:
    """Write encoder and objective state; returns the number of tensors in the file. Raises OSError."""
    config: Any = bundle.model.config
    encoder = get_writable_format(form.encoder, config)
    sections = form.sections(encoder, config, encoder.file(config, bundle.model.state_dict()), parts.state)
    count = sum(map(len, sections.values()))
    if form.suffix:
        torch.save(sections, place)
        return count
    assert encoder.describe
    place.mkdir()
    save_file(sections[""], place / "model.safetensors", metadata={"format": "pt"})
    described = decoders.to_hf_decoder_json(parts.config, encoder.describe(config))
    write_text_atomic(place / "config.json", json.dumps(described, indent=2) + "\n")
    return count


def verify_pretraining(form: PretrainingFormat, place: Path, bundle: Bundle, parts: ObjectiveState) -> None:
    """Read the written file and compare every bit. Raises WeightsError for a difference."""
    settings = {"heads": bundle.model.config.heads} if form.suffix else None
    again, others = open_weights(place, settings).state(), open_objective_state(place)
    expected: dict[str, Tensor] = {**bundle.model.state_dict(), **drop_name_prefixes(parts.state, form.leaves)}
    read = again | drop_name_prefixes(others.state if others else {}, form.leaves)
    wrong = list(expected.keys() ^ read.keys())
    wrong += [name for name in expected.keys() & read.keys() if not torch.equal(expected[name], read[name])]
    if wrong:
        raise WeightsError(
            f"the written weights differ from the source: {', '.join(sorted(wrong)[:5])}",
            "nothing was saved; please report this bug in vitreous",
        )


def drop_name_prefixes(state: Tensors, starts: tuple[str, ...]) -> Tensors:
    """Return the tensors without those whose names start with a prefix."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(starts)}
