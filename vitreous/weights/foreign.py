"""Weights in foreign formats, those of other projects: detect format and model, and convert tensors in both directions.

Detection uses only the header: the names give the format, the shapes give the config, and every shape is compared with
the config's model. Tensors are read afterwards. Native tensors are those of this package's models.
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
from vitreous.weights.entry import FLOATING_DTYPES, UnsupportedModelError, sanitise_name
from vitreous.weights.files import WeightsFile, open_weights_file
from vitreous.weights.formats import (
    aimv2,
    big_vision_pairs,
    dinov3,
    dit,
    eva,
    google,
    open_clip,
    others,
    own,
    swin,
    swin_v2,
    timm,
    transformers,
    transformers_pairs,
    video,
    vitdet,
    vitdet_detector,
)
from vitreous.weights.formats.measure import is_ambiguous_grid
from vitreous.weights.formats.variants import VARIANTS_BY_FORMAT, describe_inferred_fields
from vitreous.weights.sidecar import (
    config_from_metadata,
    config_to_metadata,
    parse_model_config,
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
    *transformers_pairs.FORMATS,
    *open_clip.FORMATS,
    big_vision_pairs.PAIR,
    others.SAM,
    others.SAM_TIMM,
    others.SAM_TRANSFORMERS,
    *vitdet_detector.FORMATS,
    vitdet.VITDET,
    *dinov3.FORMATS,
    *eva.FORMATS,
    *aimv2.FORMATS,
    others.TIPSV2,
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
#: numbers that some files add to names: DINOv2's training groups blocks, and TensorFlow numbers layers of one name
NAME_SIMPLIFICATIONS = [
    (re.compile(r"\bblocks\.\d+\.(\d+)\."), r"blocks.\1."),
    (re.compile(r"standardized_conv2d_\d+/"), "standardized_conv2d/"),
]
SUPPORTED_MODELS_HINT = (
    "supported are ViTs of timm, transformers, torchvision, Google, DeiT, MAE, DINO, DINOv2, DINOv3, EVA-02, "
    "Perception Encoder, AIMv2, TIPSv2, ViT-5, CLIP, SigLIP, SAM, ViTDet, ViViT, VideoMAE, BiT, Swin and DiT; "
    "`train` and `convert` read weights of other models of timm with --model timm:NAME"
)
#: unsupported models: description -> a pattern of a unique tensor name
UNSUPPORTED_MODELS = {
    # names in Google's and timm's files (arXiv:2105.01601)
    "an MLP-Mixer": r"(^|/)MixerBlock_\d+/token_mixing/|(^|\.)blocks\.\d+\.mlp_tokens\.",
    "a ResMLP": r"(^|\.)blocks\.\d+\.linear_tokens\.",
    "a BEiT": r"(^|\.)blocks\.\d+\.attn\.q_bias$|attention\.relative_position_bias\.relative_position_bias_table$",
}
MAX_PARAMETERS = 20_000_000_000  # limit on the size of a model
MAX_FACT_ELEMENTS = 4096  # maximum elements of a tensor whose values define the config
SHARD_INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class DetectedCheckpoint:
    """The detected format and model of foreign weights files; no tensor is in memory yet.

    `names`: tensor name in the format -> location: file, name in the file, and block index. The index is None unless
    big_vision stored all blocks in one tensor. `unused`: tensors of the files that the model does not have. `notes`:
    assumptions about settings that the files lack, one sentence each.
    """

    format: WeightsFormat
    config: ModelConfig
    names: dict[str, tuple[WeightsFile, str, int | None]]
    unused: list[str]
    _: KW_ONLY
    notes: tuple[str, ...] = ()

    def read_state(self) -> dict[str, Tensor]:
        """Read the tensors under native names, in native shapes and float32. Raises WeightsError if a file cannot be
        read or contains NaN or infinities."""
        tensors: dict[str, Tensor] = {}
        for source in {id(source): source for source, _, _ in self.names.values()}.values():
            locations = {name: location for name, location in self.names.items() if location[0] is source}
            file_tensors = source.read(dict.fromkeys(location[1] for location in locations.values()))
            tensors |= {
                name: file_tensors[file_name] if index is None else file_tensors[file_name][index]
                for name, (_, file_name, index) in locations.items()
            }
        return self.convert_tensors(tensors)

    def convert_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert foreign tensors, of any shape, to native ones. Raises WeightsError for a value that overflows
        float32."""
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float64 and not tensor.float().isfinite().all():
                raise WeightsError(f"{self.names[name][0].path} has a value in {name} that is too large for float32")
        return self.format.to_native_tensors(self.config, build_without_init(self.config).state_dict(), tensors)


def detect_checkpoint(files: list[Path], settings: dict[str, Any] | None = None) -> DetectedCheckpoint:
    """Detect format and model of weights files, which are the shards of one model. `settings`: config fields by dotted
    path, from config.json and the user. Raises WeightsError, with the differences, for files that are not weights, have
    an unknown layout, or do not match the model that they describe."""
    locations: dict[str, tuple[WeightsFile, str, int | None]] = {}
    shapes: Shapes = {}
    noted_settings: dict[str, Any] = {}
    sections: set[str] = set()
    for path in files:
        source = open_weights_file(path)
        sections.add(source.section)
        for name, entry in source.entries.items():
            for index, (plain_name, shape) in enumerate(google.unstack_scanned_blocks(name, entry.shape)):
                if plain_name in locations:
                    raise WeightsError(
                        f"{path} contains {sanitise_name(plain_name)} twice",
                        "use files in which each tensor appears once",
                    )
                locations[plain_name] = (source, name, index if plain_name != name else None)
                shapes[plain_name] = shape
        noted_settings |= config_from_metadata(path, source.metadata)
    origin = files[0] if len(files) == 1 else files[0].parent
    for weights_format in FOREIGN_FORMATS:
        names = strip_name_prefixes(weights_format, list(shapes))
        if weights_format.fits(names, sections):
            unrelated = find_unrelated_tensors(origin, weights_format, names, shapes)
            format_locations = {name: locations[file_name] for name, file_name in names.items()}
            format_shapes = {name: shapes[file_name] for name, file_name in names.items()}
            return match_format(
                origin,
                weights_format,
                locations=format_locations,
                shapes=format_shapes,
                settings=noted_settings | (settings or {}),
                unrelated=unrelated,
            )
    for title, pattern in UNSUPPORTED_MODELS.items():
        if any(re.search(pattern, name) for name in shapes):
            raise UnsupportedModelError(f"{origin} is {title}, which is not supported", SUPPORTED_MODELS_HINT)
    examples = ", ".join(sanitise_name(name) for name in sorted(shapes)[:4])
    raise UnsupportedModelError(f"{origin} has tensors of an unknown layout: {examples}, …", SUPPORTED_MODELS_HINT)


def strip_name_prefixes(weights_format: WeightsFormat, names: list[str]) -> dict[str, str]:
    """Map a format's tensor names to those in the file, which may have prefixes such as `module.`."""
    names_in_file: dict[str, str] = {}
    scope = find_name_scope(weights_format, names)
    for name in names:
        if not strip_wrapper_prefixes(name).startswith(scope):
            continue
        stripped = strip_wrapper_prefixes(name).removeprefix(scope)
        start = next((start for start in weights_format.strip if stripped.startswith(start)), "")
        names_in_file.setdefault(stripped.removeprefix(start), name)
    return names_in_file


def find_name_scope(weights_format: WeightsFormat, names: Iterable[str]) -> str:
    """Return the name prefix of the model's tensors if the file also has a text tower or optimiser state; else ""."""
    return next(
        (
            scope
            for scope in weights_format.scope
            if any(strip_wrapper_prefixes(name).startswith(scope) for name in names)
        ),
        "",
    )


def find_unrelated_tensors(
    origin: Path, weights_format: WeightsFormat, names: dict[str, str], shapes: Shapes
) -> list[str]:
    """List the tensors of text towers and optimisers. Raises WeightsError for two names that differ only by prefix."""
    used_names = set(names.values())
    unrelated = [name for name in shapes if name not in used_names]
    scope = find_name_scope(weights_format, used_names)
    duplicates = [name for name in unrelated if strip_wrapper_prefixes(name).startswith(scope)]
    if duplicates:
        raise WeightsError(
            f"{origin} contains {sanitise_name(duplicates[0])} twice, under different prefixes", "save only one of them"
        )
    return unrelated


def strip_wrapper_prefixes(name: str) -> str:
    """Remove prefixes of wrappers such as DistributedDataParallel, and numbers of layer groups, from a tensor name."""
    while start := next((start for start in WRAPPER_PREFIXES if name.startswith(start)), ""):
        name = name.removeprefix(start)
    for infix, replacement in NAME_SIMPLIFICATIONS:
        name = infix.sub(replacement, name)
    return name


def match_format(
    origin: Path,
    weights_format: WeightsFormat,
    locations: dict[str, tuple[WeightsFile, str, int | None]],
    shapes: Shapes,
    settings: dict[str, Any],
    unrelated: list[str],
) -> DetectedCheckpoint:
    """Infer the config from the shapes, and check the shape and dtype of every tensor against it. `locations` and
    `shapes` are by the format's tensor names; `unrelated`: other tensors of the file. Raises WeightsError for tensors
    that are missing, unknown or of another shape."""
    if weights_format in swin_v2.FORMATS:
        settings = parse_window_from_name(origin.name) | settings
    try:
        config = weights_format.configure(shapes, settings | read_fact_tensors(weights_format, locations, shapes))
        expected = weights_format.to_foreign_tensors(config, build_size_checked_model(config).state_dict())
    except (KeyError, ValueError, LookupError, StopIteration, IndexError) as error:
        problem = f"lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise WeightsError(
            f"{origin} looks like {weights_format.title}, but {problem}",
            "use another file: this one is damaged, or its layout is not supported",
        ) from None
    except VitreousError as error:
        raise WeightsError(f"{origin} looks like {weights_format.title}, but {error.message}", error.hint) from None
    unexpected = [name for name in shapes if name not in expected or name in weights_format.adds(config)]
    errors = [f"missing {name}" for name in expected if name not in shapes]
    errors += [f"unknown {sanitise_name(name)}" for name in unexpected if not weights_format.is_ignored(name)]
    for name in expected.keys() & shapes.keys():
        source, file_name, _ = locations[name]
        dtype = source.entries[file_name].dtype
        if shapes[name] != tuple(expected[name].shape):
            errors.append(f"{name} has shape {shapes[name]}, not {tuple(expected[name].shape)}")
        elif dtype not in FLOATING_DTYPES:
            errors.append(f"{name} has dtype {dtype}, not floating-point numbers")
    if errors:
        listing = "".join(f"\n    {line}" for line in sorted(errors)[:20]) + (
            f"\n    and {len(errors) - 20} more" if len(errors) > 20 else ""
        )
        raise WeightsError(
            f"{origin} looks like {weights_format.title}, {config.name()}, but does not fit it:{listing}",
            suggest_full_state_dict(errors),
        )
    known_fields = {*settings, *weights_format.determines, *(("heads",) if weights_format.suffix == ".npz" else ())}
    notes = (
        *describe_inferred_fields(
            config.backbone if config.has_text else config,
            known_fields,
            VARIANTS_BY_FORMAT.get(weights_format.name, ()),
        ),
        *describe_position_assumptions(origin, weights_format, config, settings),
    )
    notes = (own.describe_assumed_fields(config, settings),) if weights_format.name == own.STATE_DICT_FORMAT else notes
    names = {name: locations[name] for name in expected if name not in unexpected}
    return DetectedCheckpoint(
        weights_format, config, names, [*(locations[n][1] for n in unexpected), *unrelated], notes=notes
    )


def read_fact_tensors(
    weights_format: WeightsFormat, locations: dict[str, tuple[WeightsFile, str, int | None]], shapes: Shapes
) -> dict[str, dict[str, Tensor]]:
    """Read the tensors whose values determine the config (`facts` of the format), if the file has them. Returns
    {"facts": tensors by name}, of any shape and at most MAX_FACT_ELEMENTS elements each. Raises WeightsError if the
    file cannot be read."""
    names = [name for name in weights_format.facts if name in shapes and math.prod(shapes[name]) <= MAX_FACT_ELEMENTS]
    values = {name: locations[name][0].read([locations[name][1]])[locations[name][1]].float() for name in names}
    return {"facts": values} if weights_format.facts else {}


def suggest_full_state_dict(errors: list[str]) -> str:
    """Return a hint if a tensor is missing that every published model of the family has; else ""."""
    lacking = any(
        re.fullmatch(r"missing (.*\.qkv\.bias|norm\.(weight|bias)|head\.bias|patch_embed\.proj\.bias)", line)
        for line in errors
    )
    return "save the full state dict: no published model of that shape lacks these tensors" if lacking else ""


def describe_position_assumptions(
    origin: Path, weights_format: WeightsFormat, config: ModelConfig, settings: dict[str, Any]
) -> Iterator[str]:
    """Describe the assumptions about position embeddings, one sentence each: image size, patch grid, and resize
    rule."""
    encoder: Any = config.encoder
    for text in weights_format.assumes(encoder, settings):
        yield f"{origin.name} does not specify {text}"
    is_video = encoder.has_time_axis
    if is_video and "image" not in settings:
        size = f"{encoder.image[0]} frames of {' x '.join(map(str, encoder.image[1:]))} pixels"
        yield f"{origin.name} does not specify its clip size: assumed {size} (--source-size FRAMES HEIGHT WIDTH)"
    if encoder.positions.kind != "learned":
        return
    resize_ambiguity = weights_format.describe_ambiguity(encoder)
    # files of unambiguous formats always have a position for the class token
    lacks_class_position = encoder.class_token and not encoder.prefix_position_count and bool(resize_ambiguity)
    if "image" not in settings and not is_video and (is_ambiguous_grid(encoder.grid) or lacks_class_position):
        token_note = ", and that the class token has none" * lacks_class_position
        size = (
            f"{encoder.grid[0]} x {encoder.grid[1]} patches, images of {encoder.image[0]} x {encoder.image[1]} pixels"
        )
        yield (
            f"{origin.name} does not specify its position grid: assumed {size}{token_note} (--source-size HEIGHT WIDTH)"
        )
    if "positions.resize" not in settings and resize_ambiguity:
        assumption = f"assumed {encoder.positions.resize}, {resize_ambiguity}"
        yield f"{origin.name} does not specify how its positions are resized: {assumption}"


def build_size_checked_model(config: ModelConfig) -> torch.nn.Module:
    """Build the model of a config without initialising its weights. Raises WeightsError, before building, if it would
    be implausibly large."""
    encoder: Any = config.encoder
    depth = encoder.depth + encoder.stem_depth
    if encoder.width_out > 100_000 or depth > google.MAX_BLOCKS or math.prod(encoder.image) > 1 << 28:
        raise WeightsError(f"a model of width {config.width:,} and depth {depth:,} is implausible")
    model = build_without_init(config)
    if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
        raise WeightsError("a model with that many parameters is implausible")
    return model


def find_weights_in_folder(folder: Path) -> tuple[list[Path], dict[str, Any]]:
    """Find the weights files of a folder in the layout of transformers, open_clip or the Hub, and return them with the
    content of its config.json. Raises WeightsError for a folder without weights or with several files, and for an index
    with files outside the folder."""
    settings = read_json_object(folder / "config.json") or read_json_object(folder / "open_clip_config.json")
    index = read_json_object(folder / SHARD_INDEX_FILE)
    if index:
        weight_map = index.get("weight_map")
        names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
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
        f"{folder} contains no weights" if not files else f"{folder} contains several weights files",
        "use the path of one weights file",
    )


@lru_cache(maxsize=256)
def find_writable_formats(config: ModelConfig) -> dict[str, WeightsFormat]:
    """Find the formats that can represent a model, by `--to` name. Empty unless `config.foreign_formats` is set."""
    formats: dict[str, WeightsFormat] = {}
    if not config.foreign_formats:
        return formats
    # one element shared by all tensors; operations on meta tensors would import a compiler, which takes two seconds
    element = torch.zeros(())
    state = {name: element.expand(tensor.shape) for name, tensor in build_without_init(config).state_dict().items()}
    for weights_format in FOREIGN_FORMATS:
        if (
            weights_format.name not in formats
            and weights_format.can_represent(config)
            and can_round_trip(weights_format, config, state)
        ):
            formats[weights_format.name] = weights_format
    return formats


def can_round_trip(weights_format: WeightsFormat, config: ModelConfig, state: dict[str, Tensor]) -> bool:
    """Return whether a model, written in a format and read back, is detected as the same model; only the shapes of
    `state` matter."""
    settings: dict[str, Any] = {"image": config.image, "heads": 0} | config.head_count_field()
    if weights_format.describe:
        settings = parse_model_config(weights_format.describe(config))
    elif weights_format.suffix == ".safetensors":
        settings = config_from_metadata(Path(), config_to_metadata(config))
    try:
        tensors = weights_format.to_foreign_tensors(config, state)
        inferred = weights_format.configure({name: tuple(tensor.shape) for name, tensor in tensors.items()}, settings)
        return inferred.structure() == config.structure()
    except (LookupError, ValueError, VitreousError):
        return False
