"""Objective state in original pre-training files: the decoder of MAE and VideoMAE, DINO's and DINOv2's
heads, a student.

| file | identified by the tensor | content besides the encoder |
|---|---|---|
| MAE, `*_full.pth` | `decoder_embed.weight` | the decoder; its fixed positions are recomputed |
| transformers' ViTMAEForPreTraining | `decoder.decoder_embed.weight` | the same |
| VideoMAE, pre-trained | `decoder.blocks.0.attn.q_bias` | the decoder |
| transformers' VideoMAEForPreTraining | `decoder.decoder_layers.0.attention.attention.q_bias` | the same |
| DINO, the training file | `head.last_layer.weight_v` | the teacher's head, the student with its head, the centre |
| DINOv2, `teacher_checkpoint.pth` | `dino_head.last_layer.weight_v` | heads of images and patches, the mask token |

If a file has only a teacher, the student is initialised from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from vitreous.errors import WeightsError
from vitreous.weights.entry import sanitise_name
from vitreous.weights.files import WeightsFile, open_weights_file
from vitreous.weights.foreign import DetectedCheckpoint, strip_wrapper_prefixes
from vitreous.weights.formats.decoders import DECODER_LAYOUTS, HF_DECODER_FIELDS, DecoderLayout
from vitreous.weights.formats.heads import (
    PARAMETRIZATION_NAMES,
    WEIGHT_NORM_DIRECTION,
    find_head_errors,
    has_unit_prototypes,
    infer_head_fields,
    read_dino_head,
)
from vitreous.weights.objective_parts import ObjectiveState
from vitreous.weights.pickled import ALL_SECTIONS
from vitreous.weights.table import Shapes, Tensors

Value = TypeVar("Value")
TensorLocations = dict[
    str, tuple[WeightsFile, str]
]  # a name without wrapper prefixes -> its location and original name
STUDENT_KEY, LOSS_KEY = "student", "dino_loss"  # keys of DINO's training file besides the teacher
#: our heads of DINO and DINOv2 -> their name prefixes, in the teacher's section
DINO_HEAD_PREFIXES = {"dino": {"head.": "head."}, "dinov2": {"head.": "dino_head.", "patch_head.": "ibot_head."}}


def canonicalise_name(name: str) -> str:
    """Remove wrapper prefixes from a tensor name in a file, and replace newer names of libraries by the older ones."""
    name = strip_wrapper_prefixes(name).removeprefix("backbone.").removeprefix("vit.")
    for newer, older in PARAMETRIZATION_NAMES.items():
        name = name.replace(newer, older)
    return name.replace("decoder.decoder_encoder.layer.", "decoder.decoder_layers.")


def locate_tensors(sources: Iterable[WeightsFile], section: str = "") -> TensorLocations:
    """Map the canonical names of tensors to their files and names there. With a section, only its tensors are included,
    of files opened with `ALL_SECTIONS`."""
    start = f"{section}/" * bool(section)
    return {
        canonicalise_name(name.removeprefix(start)): (source, name)
        for source in sources
        for name in source.entries
        if name.startswith(start)
    }


def get_tensor_shapes(locations: TensorLocations) -> Shapes:
    """Return the shapes of located tensors, from the headers of their files."""
    return {name: source.entries[theirs].shape for name, (source, theirs) in locations.items()}


def read_located_tensors(locations: TensorLocations) -> Tensors:
    """Read located tensors, with one read per file."""
    tensors: Tensors = {}
    for source in {id(source): source for source, _ in locations.values()}.values():
        file_names = {name: theirs for name, (file, theirs) in locations.items() if file is source}
        file_tensors = source.read(file_names.values())
        tensors |= {name: file_tensors[theirs] for name, theirs in file_names.items()}
    return tensors


def reject_objective_state(path: Path, title: str, lines: list[str]) -> NoReturn:
    """Raise WeightsError for objective state that is not supported; `title` names it, `lines` are the differences."""
    listing = "".join(f"\n    {line}" for line in sorted(lines)[:20])
    raise WeightsError(
        f"{path} has {title} with an unsupported layout:{listing}", "to use only the encoder, save its tensors alone"
    )


def read_foreign_objective(
    files: list[Path], config_json: dict[str, Any], detect_encoder: Callable[[], DetectedCheckpoint]
) -> ObjectiveState | None:
    """Read the state of a training objective from original files of MAE, VideoMAE, DINO or DINOv2; None if they have
    none. `config_json`: transformers' config.json. `detect_encoder` detects the format and config of the encoder in the
    files. Raises WeightsError for unsupported state."""
    sources = [open_weights_file(path) for path in files]
    locations = locate_tensors(sources)
    for layout in DECODER_LAYOUTS:
        if layout.signature in locations:
            return read_mae_decoder(layout, locations, config_json, detect_encoder().config)
    for objective, heads in DINO_HEAD_PREFIXES.items():
        if f"{heads['head.']}{WEIGHT_NORM_DIRECTION}" in locations:
            return read_dino_heads(objective, locations, sources, detect_encoder)
    return None


def read_mae_decoder(
    layout: DecoderLayout, locations: TensorLocations, config_json: dict[str, Any], config: Any
) -> ObjectiveState:
    """Read the decoder of MAE or VideoMAE for an encoder of this config. Raises WeightsError for missing or unknown
    tensors, and for a VideoMAE decoder that predicts unnormalised pixels, which it scales to 0 .. 1, unlike MAE."""
    decoder_locations = {
        name: location
        for name, location in locations.items()
        if layout.is_decoder_tensor(name) and name != layout.positions
    }
    expected = {
        name
        for _, theirs, _ in layout.group_tensors(config, layout.count_blocks(set(decoder_locations)))
        for name in theirs
    }
    lines = [f"missing {name}" for name in expected - set(decoder_locations)]
    lines += [f"unknown {sanitise_name(name)}" for name in set(decoder_locations) - expected]
    settings = {ours: config_json[theirs] for ours, theirs in HF_DECODER_FIELDS.items() if theirs in config_json}
    if layout.video and not settings.get("normalise", True):
        lines.append("it predicts pixels in 0 .. 1 (norm_pix_loss false)")
    if lines:
        reject_objective_state(locations[layout.signature][0].path, "a decoder", lines)
    state = layout.read(config, read_located_tensors(decoder_locations))
    return ObjectiveState(layout.configure(get_tensor_shapes(decoder_locations), config) | settings, state)


def read_dino_heads(
    objective: str,
    locations: TensorLocations,
    sources: list[WeightsFile],
    detect_encoder: Callable[[], DetectedCheckpoint],
) -> ObjectiveState:
    """Read the heads of DINO or DINOv2, and the student if the file has one. Raises WeightsError for unsupported
    heads."""
    path, selected = sources[0].path, TensorLocations()
    if STUDENT_KEY in sources[0].other_sections:
        full_file = open_weights_file(path, ALL_SECTIONS)
        locations = locate_tensors([full_file], sources[0].section)
        student = locate_tensors([full_file], STUDENT_KEY)
        if lines := find_head_errors(get_tensor_shapes(select_name_prefix(student, "head."))):
            reject_objective_state(path, "a student's head", lines)
        selected = {f"student/{name}": location for name, location in student.items()}
        selected |= {
            f"loss/{name}": location
            for name, location in locate_tensors([full_file], LOSS_KEY).items()
            if name == "center"
        }
    heads = {ours: select_name_prefix(locations, theirs) for ours, theirs in DINO_HEAD_PREFIXES[objective].items()}
    heads = {ours: head for ours, head in heads.items() if head}
    config = {"name": objective, **infer_heads_config(path, heads)}
    selected |= {f"teacher_{ours}{name}": location for ours, head in heads.items() for name, location in head.items()}
    if objective == "dinov2":
        selected |= {name: location for name, location in locations.items() if name == "mask_token"}
    tensors = read_located_tensors(selected)
    theirs = {f"teacher_{ours}": select_name_prefix(tensors, f"teacher_{ours}") for ours in heads}
    vectors = {"mask_token": "mask_token", "centre": "loss/center"}
    state = {ours: tensors[name].float().flatten() for ours, name in vectors.items() if name in tensors}
    if student_state := select_name_prefix(tensors, "student/"):
        theirs |= {"head.": select_name_prefix(student_state, "head.")}
        state |= {
            f"model.{name}": tensor
            for name, tensor in convert_student_encoder(path, student_state, detect_encoder()).items()
        }
    has_unit_length = all(map(has_unit_prototypes, theirs.values()))
    for ours in heads:
        theirs.setdefault(ours, theirs[f"teacher_{ours}"])
    for start, head in theirs.items():
        state |= {start + name: tensor.clone() for name, tensor in read_dino_head(head, has_unit_length).items()}
    return ObjectiveState(config | {"unit_prototypes": has_unit_length}, state)


def infer_heads_config(path: Path, heads: dict[str, TensorLocations]) -> dict[str, Any]:
    """Infer the config fields of DINO's or DINOv2's heads from their shapes. Raises WeightsError for unsupported
    heads."""
    lines = [line for head in heads.values() for line in find_head_errors(get_tensor_shapes(head))]
    if lines:
        reject_objective_state(path, "a head", lines)
    fields = {ours: infer_head_fields(get_tensor_shapes(head)) for ours, head in heads.items()}
    config = fields["head."]
    if patch_fields := fields.get("patch_head."):
        config |= {"patch_prototypes": patch_fields["prototypes"], "patch_bottleneck": patch_fields["bottleneck"]}
        if any(patch_fields[name] != config[name] for name in ("head_layers", "head_width")):
            reject_objective_state(
                path, "a head", ["dino_head and ibot_head differ in the number or width of hidden layers"]
            )
    return config


def convert_student_encoder(path: Path, tensors: Tensors, teacher: DetectedCheckpoint) -> Tensors:
    """Convert the tensors of the student's encoder to native ones, in the format of the teacher's. Raises WeightsError
    if one is missing."""
    lines = [f"missing {name}" for name in teacher.names if name not in tensors]
    if lines:
        reject_objective_state(path, "a student", lines)
    return teacher.convert_tensors({name: tensors[name] for name in teacher.names})


def select_name_prefix(entries: dict[str, Value], prefix: str) -> dict[str, Value]:
    """Select the entries whose name starts with a prefix, and remove it from their names."""
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}
