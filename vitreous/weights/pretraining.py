"""Objective state in original pre-training files: the decoder of MAE and VideoMAE, DINO's and DINOv2's
heads, a student.

| file | sign | content besides the encoder |
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
    """Remove wrapper prefixes from a name in a file, and undo renames of newer libraries."""
    name = strip_wrapper_prefixes(name).removeprefix("backbone.").removeprefix("vit.")
    for newer, older in PARAMETRIZATION_NAMES.items():
        name = name.replace(newer, older)
    return name.replace("decoder.decoder_encoder.layer.", "decoder.decoder_layers.")


def locate_tensors(sources: Iterable[WeightsFile], section: str = "") -> TensorLocations:
    """Locate the tensors of weights files, or those in a section of files opened with all sections, by their canonical
    names."""
    start = f"{section}/" * bool(section)
    return {
        canonicalise_name(name.removeprefix(start)): (source, name)
        for source in sources
        for name in source.entries
        if name.startswith(start)
    }


def get_tensor_shapes(places: TensorLocations) -> Shapes:
    """Return the shapes of tensors."""
    return {name: source.entries[theirs].shape for name, (source, theirs) in places.items()}


def read_located_tensors(places: TensorLocations) -> Tensors:
    """Read tensors, opening each file once."""
    tensors: Tensors = {}
    for source in {id(source): source for source, _ in places.values()}.values():
        mine = {name: theirs for name, (other, theirs) in places.items() if other is source}
        read = source.read(mine.values())
        tensors |= {name: read[theirs] for name, theirs in mine.items()}
    return tensors


def reject_objective_state(path: Path, title: str, lines: list[str]) -> NoReturn:
    """Raise WeightsError for invalid objective state, listing the differences."""
    listing = "".join(f"\n    {line}" for line in sorted(lines)[:20])
    raise WeightsError(f"{path} has {title} of another layout:{listing}", "to read the encoder, save it alone")


def read_foreign_objective(
    files: list[Path], beside: dict[str, Any], find: Callable[[], DetectedCheckpoint]
) -> ObjectiveState | None:
    """Read the objective state in weights files, whose encoder `find` detects, with the settings `beside` of
    transformers' config.json; None if no file has any of a known objective. Raises WeightsError for unsupported
    state."""
    sources = [open_weights_file(path) for path in files]
    places = locate_tensors(sources)
    for layout in DECODER_LAYOUTS:
        if layout.sign in places:
            return read_mae_decoder(layout, places, beside, find().config)
    for objective, heads in DINO_HEAD_PREFIXES.items():
        if f"{heads['head.']}{WEIGHT_NORM_DIRECTION}" in places:
            return read_dino_heads(objective, places, sources, find)
    return None


def read_mae_decoder(
    layout: DecoderLayout, places: TensorLocations, beside: dict[str, Any], config: Any
) -> ObjectiveState:
    """Read the decoder of MAE or VideoMAE for an encoder of this config. Raises WeightsError for missing or unknown
    tensors, and for a VideoMAE decoder of unnormalised pixels: they are in 0 .. 1, unlike MAE's."""
    owned = {
        name: place for name, place in places.items() if layout.is_decoder_tensor(name) and name != layout.positions
    }
    expected = {name for _, theirs, _ in layout.groups(config, layout.depth(set(owned))) for name in theirs}
    lines = [f"missing {name}" for name in expected - set(owned)]
    lines += [f"unknown {sanitise_name(name)}" for name in set(owned) - expected]
    settings = {ours: beside[theirs] for ours, theirs in HF_DECODER_FIELDS.items() if theirs in beside}
    if layout.video and not settings.get("normalise", True):
        lines.append("it predicts pixels in 0 .. 1 (norm_pix_loss false)")
    if lines:
        reject_objective_state(places[layout.sign][0].path, "a decoder", lines)
    state = layout.read(config, read_located_tensors(owned))
    return ObjectiveState(layout.configure(get_tensor_shapes(owned), config) | settings, state)


def read_dino_heads(
    objective: str, places: TensorLocations, sources: list[WeightsFile], find: Callable[[], DetectedCheckpoint]
) -> ObjectiveState:
    """Read the heads of DINO or DINOv2, and a student if there is one."""
    path, wanted = sources[0].path, TensorLocations()
    if STUDENT_KEY in sources[0].others:
        every = open_weights_file(path, ALL_SECTIONS)
        places = locate_tensors([every], sources[0].section)
        student = locate_tensors([every], STUDENT_KEY)
        if lines := find_head_errors(get_tensor_shapes(select_name_prefix(student, "head."))):
            reject_objective_state(path, "a student's head", lines)
        wanted = {f"student/{name}": place for name, place in student.items()}
        wanted |= {
            f"loss/{name}": place for name, place in locate_tensors([every], LOSS_KEY).items() if name == "center"
        }
    heads = {ours: select_name_prefix(places, theirs) for ours, theirs in DINO_HEAD_PREFIXES[objective].items()}
    heads = {ours: head for ours, head in heads.items() if head}
    config = {"name": objective, **infer_heads_config(path, heads)}
    wanted |= {f"teacher_{ours}{name}": place for ours, head in heads.items() for name, place in head.items()}
    if objective == "dinov2":
        wanted |= {name: place for name, place in places.items() if name == "mask_token"}
    tensors = read_located_tensors(wanted)
    theirs = {f"teacher_{ours}": select_name_prefix(tensors, f"teacher_{ours}") for ours in heads}
    vectors = {"mask_token": "mask_token", "centre": "loss/center"}
    state = {ours: tensors[name].float().flatten() for ours, name in vectors.items() if name in tensors}
    if own := select_name_prefix(tensors, "student/"):
        theirs |= {"head.": select_name_prefix(own, "head.")}
        state |= {f"model.{name}": tensor for name, tensor in convert_student_encoder(path, own, find()).items()}
    unit = all(map(has_unit_prototypes, theirs.values()))
    for ours in heads:
        theirs.setdefault(ours, theirs[f"teacher_{ours}"])
    for start, head in theirs.items():
        state |= {start + name: tensor.clone() for name, tensor in read_dino_head(head, unit).items()}
    return ObjectiveState(config | {"unit_prototypes": unit}, state)


def infer_heads_config(path: Path, heads: dict[str, TensorLocations]) -> dict[str, Any]:
    """Infer the config fields of these heads. Raises WeightsError for unsupported heads."""
    lines = [line for head in heads.values() for line in find_head_errors(get_tensor_shapes(head))]
    if lines:
        reject_objective_state(path, "a head", lines)
    fields = {ours: infer_head_fields(get_tensor_shapes(head)) for ours, head in heads.items()}
    config = fields["head."]
    if other := fields.get("patch_head."):
        config |= {"patch_prototypes": other["prototypes"], "patch_bottleneck": other["bottleneck"]}
        if any(other[name] != config[name] for name in ("head_layers", "head_width")):
            reject_objective_state(
                path, "a head", ["dino_head and ibot_head have hidden layers of different number or width"]
            )
    return config


def convert_student_encoder(path: Path, tensors: Tensors, teacher: DetectedCheckpoint) -> Tensors:
    """Convert the student's encoder, of the same layout as the teacher's, to our names. Raises WeightsError if it
    differs."""
    lines = [f"missing {name}" for name in teacher.names if name not in tensors]
    if lines:
        reject_objective_state(path, "a student", lines)
    return teacher.convert_tensors({name: tensors[name] for name in teacher.names})


def select_name_prefix(named: dict[str, Value], start: str) -> dict[str, Value]:
    """Select entries whose name starts with a prefix, by the rest of the name."""
    return {name.removeprefix(start): value for name, value in named.items() if name.startswith(start)}
