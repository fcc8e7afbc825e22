"""What others' files of pre-training hold beside the encoder: the decoder of MAE and VideoMAE, DINO's and DINOv2's
heads, a student.

| file | sign | what is read beside the encoder |
|---|---|---|
| MAE, `*_full.pth` | `decoder_embed.weight` | the decoder; its positions are fixed, and computed anew |
| transformers' ViTMAEForPreTraining | `decoder.decoder_embed.weight` | the same |
| VideoMAE, pre-trained | `decoder.blocks.0.attn.q_bias` | the decoder |
| transformers' VideoMAEForPreTraining | `decoder.decoder_layers.0.attention.attention.q_bias` | the same |
| DINO, the training file | `head.last_layer.weight_v` | the teacher's head, the student with its head, the centre |
| DINOv2, `teacher_checkpoint.pth` | `dino_head.last_layer.weight_v` | heads of images and patches, the mask token |

Where a file has a teacher alone, the student starts as the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from vitreous.errors import WeightsError
from vitreous.weights.entry import shown
from vitreous.weights.files import Source, open_weights
from vitreous.weights.foreign import DetectedCheckpoint, unwrapped
from vitreous.weights.formats.decoders import LAYOUTS, SETTINGS, DecoderLayout
from vitreous.weights.formats.heads import DIRECTION, NEWER, flaws, head_fields, is_unit, read_head
from vitreous.weights.objective_parts import ObjectiveParts
from vitreous.weights.pickled import EVERY
from vitreous.weights.table import Shapes, Tensors

Value = TypeVar("Value")
Places = dict[str, tuple[Source, str]]  # a name without what wrappers put in front -> where it lies, and as what
STUDENT, LOSS = "student", "dino_loss"  # keys of DINO's training file beside the teacher
#: our heads of DINO and DINOv2 -> how theirs begin, in the teacher's section
HEADS = {"dino": {"head.": "head."}, "dinov2": {"head.": "dino_head.", "patch_head.": "ibot_head."}}


def plain(name: str) -> str:
    """A name in a file without what wrappers put in front; newer libraries have other names for some."""
    name = unwrapped(name).removeprefix("backbone.").removeprefix("vit.")
    for newer, older in NEWER.items():
        name = name.replace(newer, older)
    return name.replace("decoder.decoder_encoder.layer.", "decoder.decoder_layers.")


def places_in(sources: Iterable[Source], section: str = "") -> Places:
    """The tensors of weights files, or those in a section of files that were opened with all of theirs, by their plain
    names."""
    start = f"{section}/" * bool(section)
    return {
        plain(name.removeprefix(start)): (source, name)
        for source in sources
        for name in source.entries
        if name.startswith(start)
    }


def shapes_of(places: Places) -> Shapes:
    """The shapes of tensors."""
    return {name: source.entries[theirs].shape for name, (source, theirs) in places.items()}


def read_tensors(places: Places) -> Tensors:
    """Read tensors, each file once."""
    tensors: Tensors = {}
    for source in {id(source): source for source, _ in places.values()}.values():
        mine = {name: theirs for name, (other, theirs) in places.items() if other is source}
        read = source.read(mine.values())
        tensors |= {name: read[theirs] for name, theirs in mine.items()}
    return tensors


def refuse(path: Path, title: str, lines: list[str]) -> NoReturn:
    """Raise WeightsError for parts that are not as their kind is, listing what is wrong."""
    listing = "".join(f"\n    {line}" for line in sorted(lines)[:20])
    raise WeightsError(f"{path} has {title} of another form:{listing}", "read the encoder alone: save it without them")


def parts_beside(
    files: list[Path], beside: dict[str, Any], find: Callable[[], DetectedCheckpoint]
) -> ObjectiveParts | None:
    """The parts of an objective in weights files, whose encoder `find` detects, with what transformers' config.json
    `beside` tells of them; None where no file has any that are known. Raises WeightsError for parts of another form."""
    sources = [open_weights(path) for path in files]
    places = places_in(sources)
    for layout in LAYOUTS:
        if layout.sign in places:
            return read_decoder(layout, places, beside, find().config)
    for objective, heads in HEADS.items():
        if f"{heads['head.']}{DIRECTION}" in places:
            return read_heads(objective, places, sources, find)
    return None


def read_decoder(layout: DecoderLayout, places: Places, beside: dict[str, Any], config: Any) -> ObjectiveParts:
    """The decoder of MAE or VideoMAE beside an encoder of this config. Raises WeightsError for tensors that are missing
    or unknown, and for VideoMAE's of pixels that are not normalised: they are in 0 .. 1, which MAE's are not."""
    owned = {name: place for name, place in places.items() if layout.owns(name) and name != layout.positions}
    expected = {name for _, theirs, _ in layout.groups(config, layout.depth(set(owned))) for name in theirs}
    lines = [f"missing {name}" for name in expected - set(owned)]
    lines += [f"unknown {shown(name)}" for name in set(owned) - expected]
    settings = {ours: beside[theirs] for ours, theirs in SETTINGS.items() if theirs in beside}
    if layout.video and not settings.get("normalise", True):
        lines.append("it predicts pixels in 0 .. 1 (norm_pix_loss false)")
    if lines:
        refuse(places[layout.sign][0].path, "a decoder", lines)
    state = layout.read(config, read_tensors(owned))
    return ObjectiveParts(layout.configure(shapes_of(owned), config) | settings, state)


def read_heads(
    objective: str, places: Places, sources: list[Source], find: Callable[[], DetectedCheckpoint]
) -> ObjectiveParts:
    """The heads of DINO or DINOv2, with a student where there is one."""
    path, wanted = sources[0].path, Places()
    if STUDENT in sources[0].others:
        every = open_weights(path, EVERY)
        places = places_in([every], sources[0].section)
        student = places_in([every], STUDENT)
        if lines := flaws(shapes_of(within(student, "head."))):
            refuse(path, "a student's head", lines)
        wanted = {f"student/{name}": place for name, place in student.items()}
        wanted |= {f"loss/{name}": place for name, place in places_in([every], LOSS).items() if name == "center"}
    heads = {ours: within(places, theirs) for ours, theirs in HEADS[objective].items()}
    heads = {ours: head for ours, head in heads.items() if head}
    config = {"name": objective, **config_of(path, heads)}
    wanted |= {f"teacher_{ours}{name}": place for ours, head in heads.items() for name, place in head.items()}
    if objective == "dinov2":
        wanted |= {name: place for name, place in places.items() if name == "mask_token"}
    tensors = read_tensors(wanted)
    theirs = {f"teacher_{ours}": within(tensors, f"teacher_{ours}") for ours in heads}
    vectors = {"mask_token": "mask_token", "centre": "loss/center"}
    state = {ours: tensors[name].float().flatten() for ours, name in vectors.items() if name in tensors}
    if own := within(tensors, "student/"):
        theirs |= {"head.": within(own, "head.")}
        state |= {f"model.{name}": tensor for name, tensor in student_encoder(path, own, find()).items()}
    unit = all(map(is_unit, theirs.values()))
    for ours in heads:
        theirs.setdefault(ours, theirs[f"teacher_{ours}"])
    for start, head in theirs.items():
        state |= {start + name: tensor.clone() for name, tensor in read_head(head, unit).items()}
    return ObjectiveParts(config | {"unit_prototypes": unit}, state)


def config_of(path: Path, heads: dict[str, Places]) -> dict[str, Any]:
    """The fields of the config of these heads. Raises WeightsError for heads of another form."""
    lines = [line for head in heads.values() for line in flaws(shapes_of(head))]
    if lines:
        refuse(path, "a head", lines)
    fields = {ours: head_fields(shapes_of(head)) for ours, head in heads.items()}
    config = fields["head."]
    if other := fields.get("patch_head."):
        config |= {"patch_prototypes": other["prototypes"], "patch_bottleneck": other["bottleneck"]}
        if any(other[name] != config[name] for name in ("head_layers", "head_width")):
            refuse(path, "a head", ["dino_head and ibot_head have hidden layers of different number or width"])
    return config


def student_encoder(path: Path, tensors: Tensors, teacher: DetectedCheckpoint) -> Tensors:
    """The student's encoder, which is of the form of the teacher's, under our names. Raises WeightsError where it is
    not."""
    lines = [f"missing {name}" for name in teacher.names if name not in tensors]
    if lines:
        refuse(path, "a student", lines)
    return teacher.converted({name: tensors[name] for name in teacher.names})


def within(named: dict[str, Value], start: str) -> dict[str, Value]:
    """What has a name that begins so, by the rest of the name."""
    return {name.removeprefix(start): value for name, value in named.items() if name.startswith(start)}
