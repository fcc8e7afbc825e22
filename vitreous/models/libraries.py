"""Models of timm and transformers by name: construction, description and feature extraction.

This is the only module that imports either library, inside functions; their extras are `timm` and `transformers`.

Shapes: B images, C channels, D channels of a token, P prefix tokens, N positions, F channels of the head's input.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.errors import ResourceError, UsageError, find_closest_match, install_hint
from vitreous.models.configs.foreign import BLOCK_PATTERN, FeatureLayout, ForeignConfig
from vitreous.nn.adapter import BATCH_NORMS
from vitreous.nn.no_init import NoInitMode
from vitreous.nn.sizes import format_size

LIBRARY_BY_PREFIX = {"timm": "timm", "hf": "transformers"}  # name prefix -> library
DEFAULT_IMAGE_SIZE = (224, 224)  # pixels, for models whose config contains no image size
MIN_STRIDE = 4  # minimum stride, in pixels, of maps for dense heads
#: fields of a transformers config that do not affect the module
IGNORED_CONFIG_KEYS = (
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "transformers_version",
    "torch_dtype",
    "_name_or_path",
)


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
    name, *options = text.split(",")
    if not timm.is_model(name):
        nearest = find_closest_match(name.partition(".")[0], timm.list_models())
        raise UsageError(f"timm has no model {name}", f"did you mean timm:{nearest}" if nearest else NAME_HINTS["timm"])
    arguments: dict[str, Any] = {"model_name": name}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key.isidentifier() or key in ("pretrained", "num_classes", "in_chans", "img_size"):
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
        library_config = transformers.AutoConfig.from_pretrained(source).to_dict()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"hf:{source} does not contain the config of a transformers model ({reason})", NAME_HINTS["hf"]
        ) from None
    path = Path(source)
    if path.exists():  # store only the folder's name: the local path is private and not valid on other machines
        partial_config = replace(
            partial_config, full_name=f"hf:{(path.parent if path.suffix == '.json' else path).resolve().name}"
        )
    native_size = library_config.get("image_size")
    image_size = (
        (native_size, native_size) if isinstance(native_size, int) else tuple(native_size or DEFAULT_IMAGE_SIZE)
    )
    settings = {name: value for name, value in library_config.items() if name not in IGNORED_CONFIG_KEYS}
    return replace(
        partial_config,
        library="transformers",
        image=partial_config.image or image_size,
        sized_by="image_size" if native_size else "",
        arguments=json.dumps(settings, sort_keys=True),
    )


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
            return library.create_model(num_classes=0, in_chans=config.channels, **size, **arguments)
        model_type = arguments.pop("model_type")
        size = {name: list(image) if len(set(image)) > 1 else image[0] for name, image in size.items()}
        channels = {"num_channels": config.channels} if "num_channels" in arguments else {}
        settings = library.AutoConfig.for_model(model_type, **arguments | channels | size)
        module = library.AutoModel.from_config(settings)
    except (TypeError, ValueError, AssertionError, RuntimeError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"{config.library} cannot build {config.full_name} ({reason})", "change its options") from None
    pooler = getattr(module, "pooler", None)
    if pooler is not None and next(pooler.parameters(), None) is not None:
        module.pooler = None  # the library's classifiers do not use this layer
    return module


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


class LibraryEncoder(nn.Module):
    """Wrapper of another library's module with methods for its features, the head's input, and its maps.

    `frozen_as_is` makes engines run the module unchanged, in float32. If the weights have another dtype, the module
    computes under autocast from float32 copies of them, as in its library's mixed-precision training: norms and their
    statistics stay float32. Outputs have the dtype of the weights.
    """

    frozen_as_is = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, verb: str = "forward_raw", *arguments: Any) -> Any:
        """Call the method of this class named `verb` on images (B, C, *image) or tokens (B, P + N, D).

        All methods are called through `forward`, so autocast and hooks apply to them.
        """
        dtype = next((p.dtype for p in self.module.parameters()), torch.float32)
        if dtype == torch.float32:
            return getattr(self, verb)(x.float(), *arguments)
        weights = {name: parameter.float() for name, parameter in self.named_parameters()}
        output: Tensor | list[Tensor]
        with torch.autocast(x.device.type, dtype):
            output = torch.func.functional_call(self, weights, (x, verb, *arguments))
        return [tensor.to(dtype) for tensor in output] if isinstance(output, list) else output.to(dtype)

    def forward_raw(self, images: Tensor) -> Any:
        """Return the library's output after its last block and norm, tokens or a map, for images (B, C, *image)."""
        forward_features = getattr(self.module, "forward_features", None)
        if forward_features is not None:
            return forward_features(images)
        output = self.module(images, **self.position_interpolation_options(images))
        return getattr(output, "last_hidden_state", output)

    def position_interpolation_options(self, images: Tensor) -> dict[str, bool]:
        """Return the arguments with which transformers interpolates positions, if the size of images (B, C, *image)
        differs from the module's; else {}."""
        native_size = getattr(getattr(self.module, "config", None), "image_size", None)
        native_size = (native_size, native_size) if isinstance(native_size, int) else native_size
        if native_size is None or tuple(native_size) == tuple(images.shape[2:]):
            return {}
        argument = "interpolate_pos_encoding"
        return {argument: True} if argument in inspect.signature(self.module.forward).parameters else {}

    def pool(self, tokens: Tensor, layout: FeatureLayout, prefix: int) -> Tensor:
        """Pool tokens to the head's input by the library's pooling, if it is defined: (B, P + N, D) -> (B, F).

        Otherwise return the first token if there are `prefix` tokens, or the mean of all, with the module's `layernorm`
        if the tokens are a map.
        """
        forward_head = getattr(self.module, "forward_head", None)
        if forward_head is not None:
            maps = {"channels-first": tokens.mT.unsqueeze(-1), "channels-last": tokens.unsqueeze(1)}
            return forward_head(maps.get(layout, tokens), pre_logits=True)
        if prefix:
            return tokens[:, 0]
        norm = getattr(self.module, "layernorm", None) if layout != "tokens" else None
        return tokens.mean(1) if norm is None else norm(tokens.mean(1))

    def maps(self, images: Tensor, strides: Sequence[int]) -> list[Tensor]:
        """Compute the last map of each stride, before any norm: (B, C, H, W) -> (B, h, w, D) per stride, in pixels."""
        module: Any = self.module
        stage_infos = getattr(module.feature_info, "info", module.feature_info)
        index_by_stride = {stage["reduction"]: index for index, stage in enumerate(stage_infos)}
        indices = sorted({index_by_stride[stride] for stride in strides})
        maps = module.forward_intermediates(images, indices=indices, output_fmt="NCHW", intermediates_only=True)
        maps_by_index = dict(zip(indices, maps, strict=True))
        return [maps_by_index[index_by_stride[stride]].movedim(1, -1) for stride in strides]

    def features_after(self, images: Tensor, depths: Sequence[int]) -> list[Tensor]:
        """Compute every token after t blocks, before the last norm, for each depth t: (B, C, *image) -> list of
        (B, P + N, D)."""
        module: Any = self.module
        by_depth: dict[int, Tensor]
        if hasattr(module, "forward_intermediates"):
            indices = sorted({depth - 1 for depth in depths})
            pairs = module.forward_intermediates(
                images, indices=indices, return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True
            )
            by_depth = {
                index + 1: tokens for index, tokens in zip(indices, map(join_prefix_tokens, pairs), strict=True)
            }
        else:
            options = self.position_interpolation_options(images)
            states: Sequence[Tensor] = module(images, output_hidden_states=True, **options).hidden_states
            by_depth = dict(enumerate(states))
        return [by_depth[depth] for depth in depths]

    def norm(self, tokens: Tensor) -> Tensor:
        """Apply the norm after the last block to tokens: (..., D) -> (..., D); unchanged if the module has none."""
        norm = getattr(self.module, "norm", None) or getattr(self.module, "layernorm", None)
        return tokens if norm is None else norm(tokens)


def join_prefix_tokens(pair: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    """Join patch tokens (B, N, D) and prefix tokens (B, P, D) to (B, P + N, D); return patch tokens without a prefix
    unchanged."""
    if isinstance(pair, Tensor):
        return pair
    patches, prefix = pair
    return patches if prefix is None else torch.cat([prefix, patches], 1)
