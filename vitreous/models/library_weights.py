"""Convert state dicts of timm and transformers to the tensors of a `ForeignModel`, by the rules of these libraries.

Their code renames tensors of original files, and resizes positions to the model's image size. Tensors are passed in
memory, so no library reads a file, unpickles or downloads.

Shapes: F channels of the head's input, K classes, O output channels, C channels of an image, P prefix tokens, N
positions, D channels of a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitreous.errors import UsageError, WeightsError
from vitreous.models.libraries import build_meta_encoder, import_model_library, remove_unused_pooler
from vitreous.system.torch_types import fork_rng, named_modules

if TYPE_CHECKING:
    from collections.abc import Generator

    from vitreous.models.configs.foreign import ForeignConfig

ENCODER_PREFIX = "encoder.module."  # prefix of the library's tensors in a `ForeignModel`
#: prefixes of training wrappers; they are removed if no tensor of the model starts with them
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "encoder.", "student.")
#: model types of transformers whose classifier is one linear layer on the pooled features -> its name
LINEAR_CLASSIFIERS = {
    "vit": "classifier",
    "convnext": "classifier",
    "convnextv2": "classifier",
    "resnet": "classifier.1",
    "regnet": "classifier.1",
}
MAX_LISTED_DIFFERENCES = 20
CONVERSION_ERRORS = (RuntimeError, KeyError, ValueError, TypeError, AssertionError, AttributeError, IndexError)
#: PyTorch's message about a tensor of another shape
SHAPE_MISMATCH = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\(\[(.*?)\]\) from checkpoint, "
    r"the shape in current model is torch\.Size\(\[(.*?)\]\)"
)


@dataclass(frozen=True)
class LibraryLayout:
    """How the tensors of a file fit a model of a library. `config`: the model, with the classes and channels of the
    file. `names`: tensor name without wrapper prefixes -> name in the file. `unused`: other tensors of the file.
    `classifier_rows`: rows of the classifier, 0 if the file has none that this package can use or skip."""

    config: ForeignConfig
    names: dict[str, str]
    unused: list[str]
    classifier_rows: int = 0


def detect_library_layout(config: ForeignConfig, shapes: dict[str, tuple[int, ...]], origin: str) -> LibraryLayout:
    """Compare the shapes of a file's tensors with a model. `origin` names the file in messages.

    Raises WeightsError, which lists the differences, if the library cannot load them into the model.
    """
    config = replace(config, image=get_native_image_size(config), classes=0)
    module_names = list(build_meta_encoder(config).state_dict())
    names, unused = match_tensor_names(shapes, module_names)
    plain_shapes = {name: shapes[file_name] for name, file_name in names.items()}
    if not plain_shapes:
        examples = ", ".join(sorted(shapes)[:4])
        raise WeightsError(f"{origin} does not fit {config.full_name}: it has the tensors {examples}, …")
    config = replace(config, channels=detect_channels(config, plain_shapes))
    if config.library == "transformers":
        load_transformers_module(
            config, {name: torch.zeros(()).expand(shape) for name, shape in plain_shapes.items()}, origin
        )
        model_type = json.loads(config.arguments)["model_type"]
        classifier = LINEAR_CLASSIFIERS.get(model_type, "")
        shape = plain_shapes.get(f"{classifier}.weight", ())
        is_usable = len(shape) == 2 and shape[1] == config.num_features and f"{classifier}.bias" in plain_shapes
        return LibraryLayout(replace(config, classes=shape[0] if is_usable else 0), names, unused)
    rows, module = find_classifier_rows(config, plain_shapes, origin)
    classifier_module = module.get_classifier() if rows else None
    is_linear = isinstance(classifier_module, nn.Linear) and classifier_module.in_features == config.num_features
    return LibraryLayout(replace(config, classes=rows if is_linear else 0), names, unused, rows)


def match_tensor_names(file_names: Iterable[str], module_names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Remove the prefixes of training wrappers. Returns the tensor names without them -> names in the file, and the
    names of tensors outside of the wrapper, such as those of a loss."""
    names, unused, module_names = {name: name for name in file_names}, list[str](), tuple(module_names)
    changed = True
    while changed:
        changed = False
        for prefix in WRAPPER_PREFIXES:
            is_wrapped = any(name.startswith(prefix) for name in names)
            if is_wrapped and not any(name.startswith(prefix) for name in module_names):
                unused += [file_name for name, file_name in names.items() if not name.startswith(prefix)]
                names = {
                    name.removeprefix(prefix): file_name for name, file_name in names.items() if name.startswith(prefix)
                }
                changed = True
    return names, unused


def get_native_image_size(config: ForeignConfig) -> tuple[int, ...]:
    """Return the image size (height, width) in pixels of the published weights of a model; the config's if its library
    defines none."""
    arguments: dict[str, Any] = json.loads(config.arguments)
    if config.library == "transformers":
        size = arguments.get("image_size")
        return (size, size) if isinstance(size, int) else tuple(size or config.image)
    pretrained_cfg = read_timm_defaults(config.full_name)
    return tuple(pretrained_cfg["input_size"][1:]) if pretrained_cfg and config.sized_by else config.image


def read_timm_defaults(full_name: str) -> dict[str, Any]:
    """Return timm's record about the weights of a name `timm:NAME[.TAG][,OPTION=VALUE…]`: preprocessing, classes and
    repository; {} if there is none. Raises ResourceError if timm is not installed."""
    timm = import_model_library("timm")
    name = full_name.removeprefix("timm:").partition(",")[0]
    pretrained_cfg = timm.get_pretrained_cfg(name, allow_unregistered=True) if timm.is_model(name) else None
    return {} if pretrained_cfg is None else pretrained_cfg.to_dict()


def detect_channels(config: ForeignConfig, shapes: dict[str, tuple[int, ...]]) -> int:
    """Return the image channels of weights, from the shape (O, C, k, k) of their first convolution."""
    module = build_meta_encoder(config)
    first = next((name for name, layer in named_modules(module) if isinstance(layer, nn.Conv2d)), "")
    prefix = getattr(module, "base_model_prefix", "")
    shape = shapes.get(f"{first}.weight", shapes.get(f"{prefix}.{first}.weight", ()))
    return shape[1] if len(shape) == 4 and shape[1] < 256 else config.channels


def find_classifier_rows(config: ForeignConfig, shapes: dict[str, tuple[int, ...]], origin: str) -> tuple[int, Any]:
    """Return the number of rows of a timm classifier in a file, 0 if there is none, and the module with it, without
    values. Raises WeightsError, which lists the differences, if the tensors do not fit the model."""
    defaults = read_timm_defaults(config.full_name)
    classifiers = defaults.get("classifier") or ()
    names = ((classifiers,) if isinstance(classifiers, str) else tuple(classifiers)) + ("head", "fc", "classifier")
    shape = next((shapes[f"{name}.weight"] for name in names if f"{name}.weight" in shapes), (0,))
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    first_error = None
    for rows in dict.fromkeys((shape[0], defaults.get("num_classes") or 0, 0)):
        try:
            with torch.device("meta"):
                return rows, load_timm_module(config, state, rows)
        except CONVERSION_ERRORS as error:
            first_error = first_error or error
    assert first_error is not None
    raise describe_library_mismatch(config, first_error, origin) from None


def load_timm_module(config: ForeignConfig, state: dict[str, Tensor], rows: int) -> nn.Module:
    """Build timm's model with a classifier of `rows` rows, and load tensors of any shape by timm's rules, which also
    read original files and resize positions to `config.image`. Raises ValueError without tensors, and the errors of
    timm and PyTorch."""
    timm = import_model_library("timm")
    image_sizes = {config.sized_by: config.image} if config.sized_by else {}
    overlay = {
        "state_dict": state,  # timm uses it instead of a file or a download
        "num_classes": rows,
        "label_offset": 0,
        "input_size": (config.channels, *config.image),
    }
    if not state:
        raise ValueError("there are no tensors")
    with fork_rng([]):
        return timm.create_model(
            **json.loads(config.arguments),
            pretrained=True,
            pretrained_cfg_overlay=overlay,
            num_classes=rows,
            in_chans=config.channels,
            **image_sizes,
        )


def describe_library_mismatch(config: ForeignConfig, error: Exception, origin: str) -> WeightsError:
    """Build the error for a state dict that a library cannot load, which lists missing, unknown and differing
    tensors."""
    text = str(error)
    differences = [f"{name} has shape ({theirs}), not ({ours})" for name, theirs, ours in SHAPE_MISMATCH.findall(text)]
    for kind, label in (("Missing", "missing"), ("Unexpected", "unknown")):
        match = re.search(rf"{kind} key\(s\) in state_dict: (.*)", text)
        differences += [f"{label} {name}" for name in re.findall(r'"([^"]*)"', match[1])] if match else []
    if not differences:
        reason = text.strip().partition("\n")[0] or type(error).__name__
        differences = [f"missing {reason}" if isinstance(error, KeyError) else reason]
    return build_mismatch_error(config, differences, origin)


def build_mismatch_error(config: ForeignConfig, differences: list[str], origin: str) -> WeightsError:
    """Build the error that lists the differences between the tensors of a file and a model."""
    listing = "".join(f"\n    {line}" for line in sorted(differences)[:MAX_LISTED_DIFFERENCES])
    if len(differences) > MAX_LISTED_DIFFERENCES:
        listing += f"\n    and {len(differences) - MAX_LISTED_DIFFERENCES} more"
    hint = "use weights of this model, or set --model to the model of the weights"
    return WeightsError(f"{origin} does not fit {config.full_name}:{listing}", hint)


def convert_library_tensors(
    layout: LibraryLayout, tensors: dict[str, Tensor], image: tuple[int, ...], origin: str
) -> dict[str, Tensor]:
    """Convert a library's tensors, of any shape, to those of a `ForeignModel` for images of the size `image`, (height,
    width) in pixels.

    Includes the head if `layout.config` has classes. Raises WeightsError, which lists the differences, if the tensors
    do not fit the model.
    """
    config = layout.config
    tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    if config.library == "transformers":
        return convert_transformers_tensors(config, tensors, image, origin)
    target = replace(config, image=image if config.sized_by else config.image)
    try:
        module: Any = load_timm_module(target, tensors, layout.classifier_rows)
    except CONVERSION_ERRORS as error:
        raise describe_library_mismatch(config, error, origin) from None
    state: dict[str, Tensor] = module.state_dict()
    converted = select_encoder_tensors(target, state, origin)
    if config.classes:
        classifier = module.get_classifier()
        bias = torch.zeros(config.classes) if classifier.bias is None else classifier.bias.detach()
        converted |= {"head.weight": classifier.weight.detach(), "head.bias": bias}
    return converted


def select_encoder_tensors(config: ForeignConfig, state: dict[str, Tensor], origin: str) -> dict[str, Tensor]:
    """Select the tensors of the model without head, of any shape, from a library's state dict, and prefix their names.
    Raises WeightsError if tensors are missing."""
    module_names = list(build_meta_encoder(config).state_dict())
    if missing := [f"missing {name}" for name in module_names if name not in state]:
        raise build_mismatch_error(config, missing, origin)
    return {f"{ENCODER_PREFIX}{name}": state[name] for name in module_names}


def convert_transformers_tensors(
    config: ForeignConfig, tensors: dict[str, Tensor], image: tuple[int, ...], origin: str
) -> dict[str, Tensor]:
    """Convert the tensors of a transformers checkpoint, of any shape, to those of a `ForeignModel`, as
    `convert_library_tensors` does."""
    native = replace(config, image=get_native_image_size(config))
    module = load_transformers_module(native, tensors, origin)
    resized = resize_transformers_positions(replace(native, image=image), module)
    converted = select_encoder_tensors(native, module.state_dict() | resized, origin)
    if config.classes:
        classifier = LINEAR_CLASSIFIERS[json.loads(config.arguments)["model_type"]]
        converted |= {f"head.{name}": tensors[f"{classifier}.{name}"] for name in ("weight", "bias")}
    return converted


def load_transformers_module(config: ForeignConfig, tensors: dict[str, Tensor], origin: str) -> nn.Module:
    """Build the module of transformers with a state dict, whose tensors of any shape it renames by its rules. Raises
    WeightsError, which lists the differences, if tensors are missing, unknown or of another shape; tensors of heads are
    skipped."""
    template: Any = build_meta_encoder(config)
    model_class: Any = template.__class__
    with fork_rng([]), silence_transformers():
        try:
            module, info = model_class.from_pretrained(
                None,
                config=template.config,
                state_dict=dict(tensors),
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except CONVERSION_ERRORS as error:
            raise describe_library_mismatch(config, error, origin) from None
    remove_unused_pooler(module)
    names: list[str] = list(module.state_dict())
    unexpected_names: set[str] = info["unexpected_keys"]
    prefix, parts = f"{module.base_model_prefix}.", {name.partition(".")[0] for name in names}
    unexpected = {name.removeprefix(prefix) for name in unexpected_names}
    differences = [f"missing {name}" for name in info["missing_keys"] if name in names]
    differences += [f"unknown {name}" for name in unexpected if name.partition(".")[0] in parts]
    differences += [
        f"{name} has shape {tuple(theirs)}, not {tuple(ours)}" for name, theirs, ours in info["mismatched_keys"]
    ]
    if differences:
        raise build_mismatch_error(config, differences, origin)
    return module


@contextmanager
def silence_transformers() -> Generator[None]:
    """Turn off the progress bar and the log messages of transformers, which this package replaces by errors."""
    log: Any = import_model_library("transformers").utils.logging
    verbosity, has_progress_bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if has_progress_bar:
            log.enable_progress_bar()


def resize_transformers_positions(config: ForeignConfig, module: nn.Module) -> dict[str, Tensor]:
    """Resize the position table of a transformers module to `config.image` by the module's own function. Returns the
    table (1, P + N, D) or (N, D) by name, {} if the module needs no other table. Tables are square: for oblong images,
    the module interpolates them in every forward pass. Raises UsageError if the module cannot resize its positions."""
    shapes = {name: tensor.shape for name, tensor in build_meta_encoder(config).state_dict().items()}
    state = module.state_dict()
    names = [name for name, tensor in state.items() if tensor.shape != shapes.get(name, tensor.shape)]
    embeddings: Any = getattr(module, "embeddings", None)
    interpolate = getattr(embeddings, "interpolate_pos_encoding", None)
    if not names:
        return {}
    if len(names) > 1 or interpolate is None or not names[0].startswith("embeddings.position"):
        raise UsageError(
            f"the positions of {config.full_name} cannot be resized to another image size", "leave --image-size out"
        )
    table_shape = shapes[names[0]]
    height, width = config.image if len(set(config.image)) == 1 else get_native_image_size(config)
    with torch.no_grad():
        table: Tensor = interpolate(torch.zeros(1, *table_shape[-2:]), height, width)
    return {names[0]: table.reshape(table_shape)}
