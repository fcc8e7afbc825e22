"""Models of timm and transformers by name: construction and description.

This is the only module that imports either library, inside functions; their extras are `timm` and `transformers`.

Shapes: B images, C channels, D channels of a token, P prefix tokens, N positions, F channels of the head's input.
"""

from __future__ import annotations

import ast
import json
import math
import re
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.errors import ResourceError, UsageError, find_closest_match, install_hint
from vitreous.models.configs.foreign import BLOCK_PATTERN, FeatureLayout, ForeignConfig
from vitreous.models.library_encoder import LibraryEncoder
from vitreous.nn.adapter import BATCH_NORMS
from vitreous.nn.no_init import NoInitMode
from vitreous.nn.sizes import format_size

LIBRARY_BY_PREFIX = {"timm": "timm", "hf": "transformers"}  # name prefix -> library
DEFAULT_IMAGE_SIZE = (224, 224)  # pixels, for models whose config contains no image size
MIN_STRIDE = 4  # minimum stride, in pixels, of maps for dense heads
#: fields of a transformers config that do not affect the module, or with which transformers would import other code
IGNORED_CONFIG_KEYS = (
    *("architectures", "dtype", "id2label", "label2id", "transformers_version", "torch_dtype", "_name_or_path"),
    *("auto_map", "custom_pipelines", "quantization_config", "use_pretrained_backbone", "use_kernels"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
)
#: options of `timm.create_model` that other settings define, or with which timm would read files or download
RESERVED_TIMM_OPTIONS = (
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "custom_load"),
    *("num_classes", "in_chans", "img_size"),
)
OPTION_SEPARATOR = re.compile(r",(?![^\[(]*[\])])")  # a comma outside of brackets
MAX_LAYERS = 1_000  # limit on the number of layers in a transformers config


def parse_foreign(name: str, image: tuple[int, ...] | None) -> ForeignConfig | None:
    """Return the config of `timm:NAME[,OPTION=VALUE…]`, with options of `timm.create_model`, or of `hf:SOURCE`.

    SOURCE is a folder or JSON file with the config of a transformers model, or a repository of the Hub. `image` is the
    (height, width) in pixels; None selects the model's. Returns None for other names. Raises UsageError for an unknown
    name and for a model that returns no features, ResourceError if the library is not installed.
    """
    prefix, _, model_name = name.partition(":")
    if prefix not in LIBRARY_BY_PREFIX or not model_name:
        return None
    return read_foreign_config(name, image)


@lru_cache(64)
def read_foreign_config(name: str, image: tuple[int, ...] | None) -> ForeignConfig:
    """Return the config of a name, measured on a module of that model without weights. Raises the errors of
    `parse_foreign`."""
    prefix, _, model_name = name.partition(":")
    partial_config = ForeignConfig(name, image or (), (1, 1), 1)
    partial_config = (
        begin_timm_config(partial_config, model_name)
        if prefix == "timm"
        else begin_transformers_config(partial_config, model_name)
    )
    if partial_config.library == "timm" and partial_config.sized_by:
        dynamic_arguments = json.dumps(
            {**json.loads(partial_config.arguments), "dynamic_img_size": True}, sort_keys=True
        )
        try:
            dynamic_config = replace(partial_config, arguments=dynamic_arguments)
            return complete_config(dynamic_config, build_meta_encoder(dynamic_config))
        except UsageError:  # the model has no `dynamic_img_size`, or an option is wrong, which is reported below
            pass
    return complete_config(partial_config, build_meta_encoder(partial_config))


def begin_timm_config(partial_config: ForeignConfig, text: str) -> ForeignConfig:
    """Return the config with library, arguments and image size set from `NAME,OPTION=VALUE`; `complete_config` sets the
    rest.

    Raises UsageError for an unknown name or option.
    """
    timm = import_model_library("timm")
    name, *options = OPTION_SEPARATOR.split(text)
    if not timm.is_model(name):
        nearest = find_closest_match(name.partition(".")[0], timm.list_models())
        raise UsageError(f"timm has no model {name}", f"did you mean timm:{nearest}" if nearest else NAME_HINTS["timm"])
    arguments: dict[str, Any] = {"model_name": name}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key.isidentifier() or key in RESERVED_TIMM_OPTIONS:
            raise UsageError(
                f"{option!r} is not an option of timm:{name}", "write options as timm:NAME,drop_path_rate=0.1"
            )
        arguments[key] = parse_literal(value)
    pretrained_cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    size = tuple(pretrained_cfg.input_size[1:]) if pretrained_cfg is not None else DEFAULT_IMAGE_SIZE
    size_option = "img_size" if pretrained_cfg is not None and pretrained_cfg.fixed_input_size else ""
    return replace(
        partial_config,
        library="timm",
        image=partial_config.image or size,
        sized_by=size_option,
        arguments=json.dumps(arguments, sort_keys=True),
    )


def begin_transformers_config(partial_config: ForeignConfig, source: str) -> ForeignConfig:
    """Return the config with library, arguments and image size of a transformers model; `complete_config` sets the
    rest.

    Raises UsageError if `source` is not the config of a transformers model.
    """
    transformers = import_model_library("transformers")
    try:
        library_config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False).to_dict()
        if any(max_integer(value) > MAX_LAYERS for key, value in library_config.items() if LAYER_KEYS.search(key)):
            raise ValueError(f"it has more than {MAX_LAYERS:,} layers")
    except Exception as error:  # transformers checks fields with its own types of errors
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"hf:{source} does not contain the config of a transformers model ({reason})", NAME_HINTS["hf"]
        ) from None
    path = Path(source)
    if path.exists():  # store only the folder's name: the local path is private and not valid on other machines
        partial_config = replace(
            partial_config, full_name=f"hf:{(path.parent if path.suffix == '.json' else path).resolve().name}"
        )
    return set_transformers_fields(partial_config, library_config)


def set_transformers_fields(partial_config: ForeignConfig, library_config: dict[str, Any]) -> ForeignConfig:
    """Return the config with library, arguments, channels and image size set from the dict of a transformers config."""
    native_size = library_config.get("image_size")
    image_size = (
        (native_size, native_size) if isinstance(native_size, int) else tuple(native_size or DEFAULT_IMAGE_SIZE)
    )
    settings = {name: value for name, value in library_config.items() if name not in IGNORED_CONFIG_KEYS}
    return replace(
        partial_config,
        library="transformers",
        image=partial_config.image or image_size,
        channels=library_config.get("num_channels") or 3,
        sized_by="image_size" if native_size else "",
        arguments=json.dumps(settings, sort_keys=True),
    )


def identify_library_module(module: nn.Module, image: tuple[int, ...]) -> ForeignConfig | None:
    """Return the config with which timm or transformers may rebuild a module, for images (height, width) in pixels: the
    name in its `pretrained_cfg`, or its transformers config. None for other modules. Options with which a timm model
    was built are not recorded in it, so the config may describe another model."""
    record: dict[str, Any] = getattr(module, "pretrained_cfg", None) or {}
    library_config: Any = getattr(module, "config", None)
    if record.get("architecture"):
        tag = f".{record['tag']}" if record.get("tag") else ""
        try:
            return read_foreign_config(f"timm:{record['architecture']}{tag}", image)
        except UsageError:
            return None
    if hasattr(library_config, "model_type") and type(module).__module__.startswith("transformers."):
        settings: dict[str, Any] = library_config.to_dict()
        partial_config = ForeignConfig(f"hf:{settings['model_type']}", image, (1, 1), 1)
        config = set_transformers_fields(partial_config, settings)
        try:
            return complete_config(config, build_meta_encoder(config))
        except UsageError:
            return None
    return None


LAYER_KEYS = re.compile(r"layers$|depths?$|layers_|blocks")  # fields of a transformers config that count layers


def max_integer(value: Any) -> int:
    """Return the largest integer in the text of a value; 0 if there is none."""
    return max(map(int, re.findall(r"\d{1,18}", str(value))), default=0)


NAME_HINTS = {
    "timm": "`timm.list_models()` lists the names",
    "hf": "use a folder or a file with its config.json, or a repository in the Hub's cache",
}


def parse_literal(text: str) -> Any:
    """Parse a value in Python syntax, such as a number, boolean or list; return other text unchanged."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def import_model_library(name: str) -> Any:
    """Import timm or transformers. Raises ResourceError, with the command that installs it, if it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        hint = install_hint(name)
        raise ResourceError(f"{name} models require {name}, which is not installed", hint) from None


def build_encoder(config: ForeignConfig) -> nn.Module:
    """Build the module of a config without its head, initialised by its library.

    Raises UsageError for arguments that the library rejects, ResourceError if the library is not installed.
    """
    arguments: dict[str, Any] = json.loads(config.arguments)
    library = import_model_library(config.library)
    size = {config.sized_by: config.image} if config.sized_by else {}
    try:
        if config.library == "timm":
            check_timm_arguments(library, arguments)
            return library.create_model(num_classes=0, in_chans=config.channels, **size, **arguments)
        model_type = arguments.pop("model_type")
        arguments = {name: value for name, value in arguments.items() if name not in IGNORED_CONFIG_KEYS}
        # position tables of transformers are square; its forward passes interpolate them for oblong images
        size = {name: image[0] for name, image in size.items() if len(set(image)) == 1}
        channels = {"num_channels": config.channels} if "num_channels" in arguments else {}
        settings = library.AutoConfig.for_model(model_type, **arguments | channels | size)
        module = library.AutoModel.from_config(settings)
    except Exception as error:  # the libraries check options with many types of errors
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"{config.library} cannot build {config.full_name} ({reason})", "change its options") from None
    remove_unused_pooler(module)
    return module


def check_timm_arguments(timm: Any, arguments: dict[str, Any]) -> None:
    """Raise ValueError for arguments of `timm.create_model`, from a bundle, that could read files or download."""
    if not timm.is_model(str(arguments.get("model_name"))) or set(arguments) & set(RESERVED_TIMM_OPTIONS):
        raise ValueError("its arguments name a file or a download")


def remove_unused_pooler(module: Any) -> None:
    """Remove the pooling layer of a transformers module, in place, if it has weights: the library's classifiers do not
    use it."""
    pooler = getattr(module, "pooler", None)
    if pooler is not None and next(pooler.parameters(), None) is not None:
        module.pooler = None  # the library's classifiers do not use this layer


def build_meta_encoder(config: ForeignConfig) -> nn.Module:
    """Build the module of a config on the meta device, with shapes but without values, in evaluation mode.

    Raises the errors of `build_encoder`.
    """
    with torch.device("meta"), NoInitMode():
        return build_encoder(config).eval()


def complete_config(config: ForeignConfig, module: nn.Module) -> ForeignConfig:
    """Return the config with the properties measured on the module.

    Raises UsageError if the module returns neither tokens nor maps, or tokens that do not match its patches.
    """
    encoder = LibraryEncoder(module)
    images = torch.zeros(1, config.channels, *config.image, device="meta")
    try:
        with torch.no_grad():
            output = encoder.forward_raw(images)
            layout = detect_feature_layout(module, output)
            tokens = flatten_features(output, layout)
            pooled = encoder.pool(tokens, layout, prefix := count_prefix_tokens(module, config, layout)).shape[-1]
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        problem = f"{config.full_name} returns no features for images of {format_size(config.image)} pixels ({reason})"
        raise UsageError(problem, "use another --image-size, or another model") from None
    patch = detect_patch_size(module, config, output, layout)
    num_patches = math.prod(-(-size // length) for size, length in zip(config.image, patch, strict=True))
    if layout == "tokens" and tokens.shape[1] - prefix != num_patches:
        problem = (
            f"{config.full_name} returns {tokens.shape[1]} tokens for images of {format_size(config.image)} pixels, "
            f"which do not match patches of {format_size(patch)} pixels"
        )
        raise UsageError(problem, "use a plain Vision Transformer or a convolutional network of the library")
    matches = [re.match(BLOCK_PATTERN, f"encoder.module.{name}") for name, _ in module.named_parameters()]
    block_numbers = {int(match[1]) for match in matches if match}
    return replace(
        config,
        patch=patch,
        width=tokens.shape[2],
        pooled=0 if pooled == tokens.shape[2] else pooled,
        prefix=prefix,
        layout=layout,
        depth=len(block_numbers),
        first_block=min(block_numbers, default=0),
        stages=detect_stages(module) if layout != "tokens" else (),
        batch_norm=any(isinstance(submodule, BATCH_NORMS) for submodule in module.modules()),
        draws=has_random_layers(module, config),
    )


def detect_feature_layout(module: nn.Module, output: Any) -> FeatureLayout:
    """Return the layout of a module's output (1, ...). Raises ValueError unless it is a tensor of three or four
    axes."""
    if not isinstance(output, Tensor) or output.ndim not in (3, 4):
        output_form = " x ".join(map(str, output.shape)) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"its output is {output_form}")
    if output.ndim == 3:
        return "tokens"
    return "channels-last" if getattr(module, "output_fmt", "NCHW") == "NHWC" else "channels-first"


def flatten_features(output: Tensor, layout: FeatureLayout) -> Tensor:
    """Flatten the library's output, tokens or a map in this layout, to tokens (B, P + N, D)."""
    if layout == "tokens":
        return output
    return output.flatten(2).mT if layout == "channels-first" else output.flatten(1, 2)


def count_prefix_tokens(module: nn.Module, config: ForeignConfig, layout: FeatureLayout) -> int:
    """Return the number of tokens before the patch tokens, such as class token and registers; 0 for maps."""
    if layout != "tokens":
        return 0
    if config.library == "timm":
        return int(getattr(module, "num_prefix_tokens", 0))
    registers: int = getattr(module.config, "num_register_tokens", 0) or 0
    names = ("cls_token", "distillation_token")
    return registers + sum(name.endswith(names) for name, _ in module.named_parameters())


def detect_patch_size(
    module: nn.Module, config: ForeignConfig, output: Tensor, layout: FeatureLayout
) -> tuple[int, ...]:
    """Return the pixels per token, or per position of the last map, along each axis, from the output (1, ...) for an
    image.

    Raises UsageError if the patch size cannot be determined.
    """
    if layout != "tokens":
        grid = output.shape[2:] if layout == "channels-first" else output.shape[1:3]
        strides = [length / positions for length, positions in zip(config.image, grid, strict=True)]
        return tuple(2 ** round(math.log2(stride)) if stride % 1 else int(stride) for stride in strides)
    patch_size = getattr(getattr(module, "patch_embed", None), "patch_size", None)
    patch_size = patch_size or getattr(getattr(module, "config", None), "patch_size", None)
    if patch_size is None:
        raise UsageError(
            f"the patch size of {config.full_name} is unknown", "use wrap_backbone() in Python, or another model"
        )
    return (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size)


def detect_stages(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """Return (stride in pixels, channels) of the module's maps for dense heads, the finest first; () if it has no maps.

    If several maps have the same stride, the last of them is used.
    """
    info = getattr(module, "feature_info", None)
    if info is None or not hasattr(module, "forward_intermediates"):
        return ()
    stage_infos = getattr(info, "info", info)
    widths = {stage["reduction"]: stage["num_chs"] for stage in stage_infos}
    selected = {stride: width for stride, width in widths.items() if stride >= MIN_STRIDE} or widths
    return tuple(sorted(selected.items()))


def has_random_layers(module: nn.Module, config: ForeignConfig) -> bool:
    """Return whether a module has dropout or stochastic depth that is active in training."""
    has_dropout = any(
        getattr(submodule, name, 0.0)
        for submodule in module.modules()
        if "drop" in type(submodule).__name__.lower()
        for name in ("p", "drop_prob")
    )
    if config.library == "timm":
        return has_dropout
    settings = json.loads(config.arguments)
    prefixes = ("drop", "attention_probs_dropout_prob")
    return has_dropout or any(
        value for key, value in settings.items() if key.startswith(prefixes) or key.endswith("dropout_prob")
    )
