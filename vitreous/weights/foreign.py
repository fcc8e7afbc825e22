"""Weights in foreign formats: detect format and model, and convert tensors in both directions.

Detection uses only the header: the names give the format, the shapes give the config, and every shape is compared with
the config's model. Tensors are read afterwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitreous.errors import VitreousError, WeightsError
from vitreous.models.config import ModelConfig
from vitreous.models.zoo import build_without_init
from vitreous.weights.entry import FLOATING_DTYPES, sanitise_name
from vitreous.weights.files import WeightsFile, open_weights_file
from vitreous.weights.formats import (
    dit,
    google,
    others,
    own,
    swin,
    swin_v2,
    timm,
    transformers,
    video,
    vitdet,
    vitdet_detector,
)
from vitreous.weights.formats.measure import is_ambiguous_grid
from vitreous.weights.formats.variants import VARIANTS_BY_FORMAT, describe_inferred_fields
from vitreous.weights.sidecar import (
    config_from_metadata,
    config_to_metadata,
    parse_transformers_config,
    parse_window_from_name,
    read_json_object,
)
from vitreous.weights.table import Shapes, WeightsFormat

#: in the order of detection: the first match is used
FOREIGN_FORMATS = [
    *swin.FORMATS,
    *swin_v2.FORMATS,
    *dit.FORMATS,
    *video.FORMATS,
    others.SAM,
    others.SAM_TIMM,
    others.SAM_TRANSFORMERS,
    *vitdet_detector.FORMATS,
    vitdet.VITDET,
    others.DINOV2,
    timm.DEIT_III,
    *timm.ORIGINAL_FORMATS,
    timm.TIMM,
    timm.TIMM_BIT,
    *google.FORMATS,
    transformers.DINOV2,
    transformers.VIT,
    transformers.CLIP,
    transformers.BIT,
    others.TORCHVISION,
    others.CLIP,
    *own.FORMATS,
]
WRAPPER_PREFIXES = ("module.", "_orig_mod.")  # prefixes of DistributedDataParallel and torch.compile
#: infixes in names: DINOv2's training groups blocks, and TensorFlow numbers layers of one name
NAME_SIMPLIFICATIONS = [
    (re.compile(r"\bblocks\.\d+\.(\d+)\."), r"blocks.\1."),
    (re.compile(r"standardized_conv2d_\d+/"), "standardized_conv2d/"),
]
SUPPORTED_MODELS_HINT = (
    "supported are ViTs of timm, transformers, torchvision, Google, DeiT, MAE, DINO, DINOv2, CLIP, SAM, ViTDet, ViViT, "
    "VideoMAE, BiT, Swin and DiT"
)
#: unsupported models: description -> a pattern of a unique tensor name
UNSUPPORTED_MODELS = {
    # Google's, timm's (arXiv:2105.01601)
    "an MLP-Mixer": r"(^|/)MixerBlock_\d+/token_mixing/|(^|\.)blocks\.\d+\.mlp_tokens\.",
    "a ResMLP": r"(^|\.)blocks\.\d+\.linear_tokens\.",
    "a BEiT": r"(^|\.)blocks\.\d+\.attn\.q_bias$|attention\.relative_position_bias\.relative_position_bias_table$",
}
MAX_PARAMETERS = 20_000_000_000  # limit on the size of a model
MAX_FACT_ELEMENTS = 4096  # maximum elements of a tensor whose values define the config
SHARD_INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class DetectedCheckpoint:
    """A foreign file whose header was parsed: no tensor is in memory yet.

    `names`: the format's name of a tensor -> its location: file, name there, and the row of a scanned tensor or None.
    `notes`: assumptions about settings that the files lack, one sentence each.
    """

    format: WeightsFormat
    config: ModelConfig
    names: dict[str, tuple[WeightsFile, str, int | None]]
    unused: list[str]
    _: KW_ONLY
    notes: tuple[str, ...] = ()

    def state(self) -> dict[str, Tensor]:
        """Read our tensors, float32, in our shapes. Raises WeightsError if the file cannot be read or contains NaN or
        infinities."""
        tensors: dict[str, Tensor] = {}
        for source in {id(source): source for source, _, _ in self.names.values()}.values():
            mine = {name: place for name, place in self.names.items() if place[0] is source}
            read = source.read(dict.fromkeys(place[1] for place in mine.values()))
            tensors |= {
                name: read[other] if index is None else read[other][index] for name, (_, other, index) in mine.items()
            }
        return self.convert_tensors(tensors)

    def convert_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the format's tensors, of any shape, to ours. Raises WeightsError for a value that overflows
        float32."""
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float64 and not tensor.float().isfinite().all():
                raise WeightsError(f"{self.names[name][0].path} has a value in {name} that is too large for float32")
        return self.format.read(self.config, build_without_init(self.config).state_dict(), tensors)


def detect_checkpoint(files: list[Path], beside: dict[str, Any] | None = None) -> DetectedCheckpoint:
    """Detect format and model of weights files, shards of one model; `beside`: settings of config.json and the user.

    Raises WeightsError for files that are not weights, have an unknown layout, or do not match the model they describe,
    listing the differences.
    """
    places: dict[str, tuple[WeightsFile, str, int | None]] = {}
    shapes: Shapes = {}
    noted_settings: dict[str, Any] = {}
    sections: set[str] = set()
    for path in files:
        source = open_weights_file(path)
        sections.add(source.section)
        for name, entry in source.entries.items():
            for number, (plain_name, shape) in enumerate(google.unstack_scanned_blocks(name, entry.shape)):
                if plain_name in places:
                    raise WeightsError(
                        f"{path} contains {sanitise_name(plain_name)} twice",
                        "use files in which each tensor appears once",
                    )
                places[plain_name] = (source, name, number if plain_name != name else None)
                shapes[plain_name] = shape
        noted_settings |= config_from_metadata(path, source.metadata)
    origin = files[0] if len(files) == 1 else files[0].parent
    for form in FOREIGN_FORMATS:
        names = strip_name_prefixes(form, list(shapes))
        if form.fits(names, sections):
            outside = find_unrelated_tensors(origin, form, names, shapes)
            lying = {name: places[other] for name, other in names.items()}
            sizes = {name: shapes[other] for name, other in names.items()}
            return match_format(
                origin, form, places=lying, shapes=sizes, beside=noted_settings | (beside or {}), outside=outside
            )
    for title, pattern in UNSUPPORTED_MODELS.items():
        if any(re.search(pattern, name) for name in shapes):
            raise WeightsError(f"{origin} is {title}, which is not supported", SUPPORTED_MODELS_HINT)
    some = ", ".join(sanitise_name(name) for name in sorted(shapes)[:4])
    raise WeightsError(f"{origin} has tensors of an unknown layout: {some}, …", SUPPORTED_MODELS_HINT)


def strip_name_prefixes(form: WeightsFormat, names: list[str]) -> dict[str, str]:
    """Map a format's tensor names to those in the file, which may have prefixes."""
    names_in_file: dict[str, str] = {}
    scope = find_name_scope(form, names)
    for name in names:
        if not strip_wrapper_prefixes(name).startswith(scope):
            continue
        short = strip_wrapper_prefixes(name).removeprefix(scope)
        start = next((start for start in form.strip if short.startswith(start)), "")
        names_in_file.setdefault(short.removeprefix(start), name)
    return names_in_file


def find_name_scope(form: WeightsFormat, names: Iterable[str]) -> str:
    """Return the prefix of the model's tensors if the file contains others too; else ""."""
    return next(
        (scope for scope in form.scope if any(strip_wrapper_prefixes(name).startswith(scope) for name in names)), ""
    )


def find_unrelated_tensors(origin: Path, form: WeightsFormat, names: dict[str, str], shapes: Shapes) -> list[str]:
    """List the tensors of other towers and optimisers. Raises WeightsError for two names that differ only by prefix."""
    used = set(names.values())
    outside = [name for name in shapes if name not in used]
    scope = find_name_scope(form, used)
    twice = [name for name in outside if strip_wrapper_prefixes(name).startswith(scope)]
    if twice:
        raise WeightsError(
            f"{origin} contains {sanitise_name(twice[0])} twice, under different prefixes", "save only one of them"
        )
    return outside


def strip_wrapper_prefixes(name: str) -> str:
    """Remove the prefixes and infixes that wrappers add to a name."""
    while start := next((start for start in WRAPPER_PREFIXES if name.startswith(start)), ""):
        name = name.removeprefix(start)
    for inside, plain in NAME_SIMPLIFICATIONS:
        name = inside.sub(plain, name)
    return name


def match_format(
    origin: Path,
    form: WeightsFormat,
    places: dict[str, tuple[WeightsFile, str, int | None]],
    shapes: Shapes,
    beside: dict[str, Any],
    outside: list[str],
) -> DetectedCheckpoint:
    """Infer the config from the shapes, and check every tensor's shape and type against it. Raises WeightsError for
    tensors that are missing, unknown or of another shape."""
    if form in swin_v2.FORMATS:
        beside = parse_window_from_name(origin.name) | beside
    try:
        config = form.configure(shapes, beside | read_fact_tensors(form, places, shapes))
        expected = form.write(config, build_size_checked_model(config).state_dict())
    except (KeyError, ValueError, LookupError, StopIteration, IndexError) as error:
        problem = f"lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise WeightsError(
            f"{origin} looks like {form.title}, but {problem}", "the file is damaged, or its layout is not supported"
        ) from None
    except VitreousError as error:
        raise WeightsError(f"{origin} looks like {form.title}, but {error.message}", error.hint) from None
    left = [name for name in shapes if name not in expected or name in form.adds(config)]
    wrong = [f"missing {name}" for name in expected if name not in shapes]
    wrong += [f"unknown {sanitise_name(name)}" for name in left if not form.leaves(name)]
    for name in expected.keys() & shapes.keys():
        source, theirs, _ = places[name]
        dtype = source.entries[theirs].dtype
        if shapes[name] != tuple(expected[name].shape):
            wrong.append(f"{name} is {shapes[name]}, not {tuple(expected[name].shape)}")
        elif dtype not in FLOATING_DTYPES:
            wrong.append(f"{name} has dtype {dtype}, not floating-point numbers")
    if wrong:
        listing = "".join(f"\n    {line}" for line in sorted(wrong)[:20]) + (
            f"\n    and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        )
        raise WeightsError(
            f"{origin} looks like {form.title}, {config.name()}, but does not fit it:{listing}",
            suggest_full_state_dict(wrong),
        )
    known = {*beside, *(("heads",) if form.suffix == ".npz" else ())}
    notes = (
        *describe_inferred_fields(config, known, VARIANTS_BY_FORMAT.get(form.name, ())),
        *describe_position_assumptions(origin, form, config, beside),
    )
    notes = (own.describe_assumed_fields(config, beside),) if form.name == own.STATE_DICT_FORMAT else notes
    names = {name: places[name] for name in expected if name not in left}
    return DetectedCheckpoint(form, config, names, [*(places[n][1] for n in left), *outside], notes=notes)


def read_fact_tensors(
    form: WeightsFormat, places: dict[str, tuple[WeightsFile, str, int | None]], shapes: Shapes
) -> dict[str, dict[str, Tensor]]:
    """Read the `facts` tensors of a format that a file has, of any shape and at most MAX_FACT_ELEMENTS elements. Raises
    WeightsError if the file cannot be read."""
    names = [name for name in form.facts if name in shapes and math.prod(shapes[name]) <= MAX_FACT_ELEMENTS]
    values = {name: places[name][0].read([places[name][1]])[places[name][1]].float() for name in names}
    return {"facts": values} if form.facts else {}


def suggest_full_state_dict(wrong: list[str]) -> str:
    """Return a hint for tensors that no published model of the family lacks, or ""."""
    lacking = any(
        re.fullmatch(r"missing (.*\.qkv\.bias|norm\.(weight|bias)|head\.bias|patch_embed\.proj\.bias)", line)
        for line in wrong
    )
    return "no published model of that shape lacks these tensors; save the full state dict" if lacking else ""


def describe_position_assumptions(
    origin: Path, form: WeightsFormat, config: ModelConfig, beside: dict[str, Any]
) -> Iterator[str]:
    """Describe assumptions about positions, one sentence each: their grid, and their resize rule."""
    encoder: Any = config.encoder
    for text in form.assumes(encoder, beside):
        yield f"{origin.name} does not specify {text}"
    clips = encoder.has_time_axis
    if clips and "image" not in beside:
        size = f"{encoder.image[0]} frames of {' x '.join(map(str, encoder.image[1:]))} pixels"
        yield f"{origin.name} does not specify its clip size: assumed {size} (--source-size FRAMES HEIGHT WIDTH)"
    if encoder.positions.kind != "learned":
        return
    doubt = form.doubt(encoder)
    # all other owners of such positions include them
    unplaced = encoder.class_token and not encoder.prefix_position_count and bool(doubt)
    if "image" not in beside and not clips and (is_ambiguous_grid(encoder.grid) or unplaced):
        own = ", and that the class token has none" * unplaced
        size = (
            f"{encoder.grid[0]} x {encoder.grid[1]} patches, images of {encoder.image[0]} x {encoder.image[1]} pixels"
        )
        yield f"{origin.name} does not specify its position grid: assumed {size}{own} (--source-size HEIGHT WIDTH)"
    if "positions.resize" not in beside and doubt:
        taken = f"assumed {encoder.positions.resize}, {doubt}"
        yield f"{origin.name} does not specify how its positions are resized: {taken}"


def build_size_checked_model(config: ModelConfig) -> torch.nn.Module:
    """Build the model of a config, without weights. Raises WeightsError for an implausibly large one, before it is
    built."""
    encoder: Any = config.encoder
    depth = encoder.depth + encoder.stem_depth
    if encoder.width_out > 100_000 or depth > google.MAX_BLOCKS or math.prod(encoder.image) > 1 << 28:
        raise WeightsError(f"a model of width {config.width:,} and depth {depth:,} is implausible")
    model = build_without_init(config)
    if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
        raise WeightsError("a model with that many parameters is implausible")
    return model


def find_weights_in_folder(folder: Path) -> tuple[list[Path], dict[str, Any]]:
    """Find the weights files of a folder in the layout of transformers and the Hub, and its config.json, or
    open_clip's.

    Raises WeightsError for a folder without weights, and for an index with files outside the folder.
    """
    settings = read_json_object(folder / "config.json") or read_json_object(folder / "open_clip_config.json")
    index = read_json_object(folder / SHARD_INDEX_FILE)
    if index:
        listed = index.get("weight_map")
        names = sorted({str(name) for name in listed.values()}) if isinstance(listed, dict) else []
        if not names or any(Path(name).name != name for name in names):
            raise WeightsError(
                f"{folder / SHARD_INDEX_FILE} lists files outside of its folder", "download the model again"
            )
        return [folder / name for name in names], settings
    for name in (
        "model.safetensors",
        "diffusion_pytorch_model.safetensors",
        "open_clip_model.safetensors",
        "pytorch_model.bin",
    ):
        if (folder / name).is_file():
            return [folder / name], settings
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".npz", ".pth", ".pt", ".bin"))
    if len(files) == 1:
        return files, settings
    raise WeightsError(
        f"{folder} contains no weights" if not files else f"{folder} contains several weights files", "give one file"
    )


@lru_cache(maxsize=256)
def find_writable_formats(config: ModelConfig) -> dict[str, WeightsFormat]:
    """List the formats that can represent a model, by their `--to` name; none for a stem that only this package has."""
    formats: dict[str, WeightsFormat] = {}
    if not config.foreign_formats:
        return formats
    # for all elements of every tensor; operations on meta tensors would import a compiler, which takes two seconds
    element = torch.zeros(())
    state = {name: element.expand(tensor.shape) for name, tensor in build_without_init(config).state_dict().items()}
    for form in FOREIGN_FORMATS:
        if form.name not in formats and form.holds(config) and can_round_trip(form, config, state):
            formats[form.name] = form
    return formats


def can_round_trip(form: WeightsFormat, config: ModelConfig, state: dict[str, Tensor]) -> bool:
    """Return whether a model with a state of these shapes, written in a format, is detected as the same model."""
    settings: dict[str, Any] = {"image": config.image, "heads": 0} | config.head_count_field()
    if form.describe:
        settings = parse_transformers_config(form.describe(config))
    elif form.suffix == ".safetensors":
        settings = config_from_metadata(Path(), config_to_metadata(config))
    try:
        written = form.write(config, state)
        read = form.configure({name: tuple(tensor.shape) for name, tensor in written.items()}, settings)
        return read.structure() == config.structure()
    except (LookupError, ValueError, VitreousError):
        return False
