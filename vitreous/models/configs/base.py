"""Interface of model configs that the package relies on, for all families. Does not import PyTorch.

A config is a frozen dataclass with a field `family`, a key of `models.families`, and the fields or properties that
`ModelConfig` declares. All other properties have a conservative default, which a family overrides if it supports more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from vitreous.config import TaggedUnion, change_fields, import_object, list_field_names
from vitreous.models.configs.groups import AttentionGroup, ConfigGroup, PositionGroup, RegularizationConfig
from vitreous.models.families import FAMILIES

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

ImageSize = tuple[int, ...] | None
#: source of the mean and standard deviation that normalise each channel; `half` is 0.5 for both, `unit` 0 and 1
PixelScaling = Literal["half", "imagenet", "clip", "unit"]
#: values of `positions.kind` that are learned tables, which are resized to other grids
LEARNED_POSITIONS = ("learned", "axes", "factorised")
#: fields that other formats cannot store, so they are written to the metadata of the tensor file
METADATA_FIELDS = (
    *("image", "heads", "projection_bias", "positions.resize", "attention.qkv_bias", "attention.pad", "mlp.gelu"),
    *("norm.final", "norm.eps", "eps", "rotary.rounded"),
)
#: fields that change outputs slightly, but no shapes of tensors
NUMERICAL_FIELDS = ("mlp.gelu", "norm.eps", "eps", "numerics", "round_anchors", "rotary.rounded")


class Level(NamedTuple):
    """A map of a backbone for dense heads: pixels per position along each axis (`patch`), and channels (`width`)."""

    patch: tuple[int, ...]
    width: int

    @property
    def stride(self) -> int:
        """Return the pixels per position along the first axis, which identify the map."""
        return self.patch[0]

    def grid_of(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """Return the positions along each axis of the map, rounded up, for an image of this size in pixels."""
        return tuple(-(-length // p) for length, p in zip(image, self.patch, strict=True))


class LayerGroups(NamedTuple):
    """Patterns that assign parameters to layers, for layer-wise learning rates.

    `block` is a regular expression that matches the numbers of a block in a parameter name. `entry` are the submodules
    before the first block.
    """

    block: str = r"\bencoder\.blocks\.(\d+)\."
    entry: tuple[str, ...] = ("projection", "position", "prefix", "slots", "stem", "first_norm")


class PreprocessDefaults(NamedTuple):
    """Preprocessing of published weights whose files do not contain it: mean and standard deviation (`pixels`), the
    interpolation filter, and whether an image is cropped to the model's aspect ratio or distorted to it (`squash`)."""

    pixels: PixelScaling = "half"
    filter: Literal["bilinear", "bicubic"] = "bicubic"
    fit: Literal["crop", "squash"] = "crop"


@dataclass(frozen=True)
class ExportRules:
    """How a model is exported to ONNX and other graph formats.

    - `outputs`: names of the graph's outputs, in order.
    - `fixed_size`: the property of the model that prevents other image sizes; "" if the graph supports them.
    - `hint`: the alternative to `--dynamic-size`, for the error message.
    - `fixed_batch`: whether the graph accepts only one image at a time.
    - `patch_multiples`: whether other image sizes must be multiples of the patch.
    - `drops_guards`: whether the size guards that torch.export infers from its example are too strict and are dropped.
    """

    outputs: tuple[str, ...]
    fixed_size: str = ""
    hint: str = ""
    fixed_batch: bool = False
    patch_multiples: bool = False
    drops_guards: bool = False


class ModelConfig:
    """Base class of the configs of all families: frozen values that describe a model."""

    tagged: ClassVar[TaggedUnion] = TaggedUnion(FAMILIES, key="family", default="vit")
    module: ClassVar[str]  # the class that implements the model, as "package.module:Class"
    preset_names: ClassVar[tuple[str, ...]] = ()  # names listed by `vitreous models`
    recipe_family: ClassVar[str] = ""  # selects training recipes: vit, bit, swin, dit
    layer_groups: ClassVar[LayerGroups] = LayerGroups()

    # Every family defines these as fields, constants or properties, with narrower types. Type checkers do not accept
    # that for annotated attributes, so they have no annotations and a test compares the values.
    if TYPE_CHECKING:
        family = ""  # key of `models.families`
        image = tuple[int, ...]()  # native image size: pixels along each axis
        patch = tuple[int, ...]()  # pixels per position of the last grid along each axis
        channels = 0  # channels of an image
        classes = 0  # classes of the head; 0 without a head
        width = 0  # channels of a token
        depth = 0  # number of blocks

    # Defaults for families without such a field. This class is not a dataclass, so these are not fields.
    text: Any = None  # config of the text encoder
    backbone: Any = None  # config of the backbone, for adapters and dense heads
    prefix = 0  # number of prefix tokens
    class_token = False
    positions = PositionGroup()  # position embeddings
    attention = AttentionGroup()
    regularization = RegularizationConfig()
    batch_norm = False  # training outputs depend on the batch
    front = "conv"  # type of the first layers: patches, conv or resnet; inference computes convolutions in float32
    pool = "mean"
    arrangement = ""  # how attention over space and time is arranged
    position_grid = tuple[int, ...]()  # positions along each axis of the position table; (): those of the grid
    stem_depth = 0  # residual units before the first block
    threshold = 0.0  # minimum score of detections
    inflate = "central"  # how image weights initialise a video patch projection
    first_block = 0  # index of the first block in parameter names
    has_stages = False  # dense heads use `levels`, each with a different number of channels
    has_attention = False  # blocks contain attention
    sees_whole_image = False  # the attention of every block is over the whole image
    needs_positions = False  # blocks require token coordinates
    on_grid = False  # the input of blocks is a grid of tokens, (B, *grid, D)
    factorised = False  # tokens are grouped in time slots, (B, T, S, D)
    drops_patches = False  # patches may be dropped in training
    merges_tokens = False  # tokens may be merged in inference (`nn.merge`)
    packs_sizes = False  # images of many sizes may be packed into one sequence (`models.packed`)
    any_axes = False  # images may have any number of axes: signals and volumes
    has_time_axis = False  # the first axis of an image is time
    finds_objects = False  # outputs are detections: boxes, scores, labels and possibly masks
    generates_images = False  # outputs are images
    foreign_formats = False  # other libraries' files may contain the model
    can_be_stored = True  # the config is sufficient to rebuild the model

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the pydantic schema: any config instance for this class (`from_dict` created it before), the fields
        for a subclass."""
        from pydantic_core import core_schema

        return core_schema.is_instance_schema(cls) if cls is ModelConfig else handler(source)

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> ModelConfig | None:
        """Return the config of a model name at an image size in pixels; None selects the native size.

        Returns None for names of other families. Raises UsageError for an invalid name of this family.
        """
        return None

    def name(self) -> str:
        """Return the canonical model name, which `parse_name` parses."""
        raise NotImplementedError

    def model_class(self) -> Any:
        """Return the class that implements the model, imported on first use."""
        return import_object(self.module)

    def with_options(self, **changes: Any) -> Self:
        """Return a copy with changed fields.

        A dict changes the given fields of a group and preserves its other fields: `with_options(depth=6,
        attention={"window": 7})`. Raises UsageError for invalid values.
        """
        return change_fields(self, changes)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Return the names that `with_options` accepts."""
        return list_field_names(cls)

    @classmethod
    def option_paths(cls) -> tuple[str, ...]:
        """Return the dotted paths of all options, including the fields of each group: `depth`, `attention.window`."""
        groups = {name: getattr(cls, name, None) for name in cls.option_names()}
        return tuple(
            path
            for name, group in groups.items()
            for path in (
                [f"{name}.{field}" for field in list_field_names(group)] if isinstance(group, ConfigGroup) else [name]
            )
        )

    def values_at(self, paths: Iterable[str]) -> dict[str, Any]:
        """Return the values of options by dotted path, without options that the config does not have."""
        option_paths = self.option_paths()
        return {path: attrgetter(path)(self) for path in paths if path in option_paths}

    def check_image_size(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image size (pixels per axis) that the model does not support."""

    @property
    def encoder(self) -> ModelConfig:
        """Return the innermost backbone's config, or this config if the model has no backbone."""
        return self if self.backbone is None else self.backbone.encoder

    @property
    def has_text(self) -> bool:
        """Return whether a text encoder embeds texts in the space of the images."""
        return self.text is not None

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the positions along each axis of the last map at the native image size, rounded up."""
        return tuple(math.ceil(length / p) for length, p in zip(self.image, self.patch, strict=True))

    @property
    def table_grid(self) -> tuple[int, ...]:
        """Return the positions along each axis of the position table."""
        return self.grid

    @property
    def cell(self) -> tuple[int, ...]:
        """Return the size of a token's input along each axis, in pixels, or in positions of a stem's map."""
        return self.patch

    @property
    def width_out(self) -> int:
        """Return the channels of a token after the last block."""
        return self.width

    @property
    def num_features(self) -> int:
        """Return the number of input features of the head."""
        return self.width_out

    @property
    def has_position_tables(self) -> bool:
        """Return whether the model has learned position tables, which are resized to other image sizes."""
        return self.positions.kind in LEARNED_POSITIONS

    @property
    def projected_cell(self) -> tuple[int, ...]:
        """Return the pixels along each axis of the patches of a patch projection; () for models without a patch
        projection."""
        return self.cell if self.front == "patches" else ()

    def patch_at(self, block: int) -> tuple[int, ...]:
        """Return the pixels per token along each axis in a block, counted from 0."""
        return self.patch

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return the maps that `features_at` computes, the finest first."""
        return (Level(self.patch, self.width_out),)

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the stride of each map, in pixels along the first axis, the finest first."""
        return tuple(level.stride for level in self.levels)

    def list_unused_modules(self, strides: Sequence[int]) -> tuple[str, ...]:
        """Return the names of submodules on which no map of these strides depends, except last norms and heads."""
        return ()

    def level_at(self, stride: int) -> Level:
        """Return the map with this stride, in pixels. Raises ValueError if no map has the stride."""
        self.check_strides([stride])
        return self.levels[self.strides.index(stride)]

    def check_strides(self, strides: Sequence[int]) -> None:
        """Raise ValueError if `strides` is empty, or contains a stride that no map has."""
        if not strides or not set(strides) <= set(self.strides):
            raise ValueError(f"strides {tuple(strides)} are not among the strides of the model's maps, {self.strides}")

    def parameter_layer(self, parameter: str) -> int:
        """Return the layer index of a parameter, for layer-wise learning rate decay (arXiv:2106.08254).

        The index is 0 for modules before the blocks, 1 to L for the blocks, and L + 1 for modules after them, for heads
        and for other modules around a backbone.
        """
        if self.backbone is not None:
            _, separator, inner = parameter.partition("backbone.")
            return self.backbone.parameter_layer(inner) if separator else self.depth + 1
        groups = self.layer_groups
        match = re.search(groups.block, parameter)
        if match:
            return 1 + self.block_number(*(int(index or 0) for index in match.groups()))
        is_before_blocks = (
            parameter.startswith(tuple(f"{prefix}." for prefix in groups.entry)) or parameter in groups.entry
        )
        return 0 if is_before_blocks else self.depth + 1

    def block_number(self, *indices: int) -> int:
        """Return the index of a block, from 0, for the numbers in its parameters' names (`LayerGroups.block`)."""
        return indices[0] - self.first_block

    def macs(self, image: ImageSize = None) -> int:
        """Count the multiply-adds of one forward pass for one image of this size in pixels; None selects the native
        size.

        FLOPs are twice this number; a training step costs three forward passes. By default PyTorch counts them on the
        meta device.
        """
        return self.model_class().count_macs(self, tuple(image or self.image))

    def computed_macs(self, image: ImageSize = None, patches: int | None = None) -> int:
        """Count the multiply-adds that a forward pass performs: `macs` without the unused part of the last block.

        If `patches` is set, the blocks compute only this number of patches of the image; all patches are projected.
        """
        return self.macs(image)

    def count_activations(self, image: ImageSize = None, device: str = "cuda") -> int | None:
        """Return the number of values, of two or four bytes each, that the blocks store per image for the backward
        pass; None if unknown."""
        return None

    def describe_window_change(self, source_config: ModelConfig) -> str:
        """Return a note if the weights of the config `source_config` were not trained with the windows of this model,
        else ""."""
        return ""

    def export_rules(self) -> ExportRules:
        """Return how the model is exported."""
        outputs = ("logits", "features") if self.classes else ("features",)
        return ExportRules(outputs, fixed_size="its positions and paddings are fixed to one size")

    def default_preprocess(self) -> PreprocessDefaults:
        """Return the preprocessing of published weights whose files do not contain it."""
        return PreprocessDefaults()

    def metadata_fields(self) -> dict[str, Any]:
        """Return the fields that tensors do not determine, which other formats store as metadata."""
        return self.values_at(sorted(METADATA_FIELDS))

    def numerical_choices(self) -> dict[str, Any]:
        """Return the fields that change outputs slightly, but no shapes of tensors."""
        return self.values_at(NUMERICAL_FIELDS)

    def head_count_field(self) -> dict[str, Any]:
        """Return {"heads": number of heads} if tensors do not determine the number, else {}."""
        return {}

    def structure(self) -> dict[str, Any]:
        """Return the values on which the names and shapes of the model's tensors depend, in a canonical form.

        The result is equal for two configs whose weights are interchangeable.
        """
        return {name: getattr(self, name) for name in self.option_names() if name != "regularization"}

    def of_clips(self, frames: int) -> ModelConfig | None:
        """Return the config of the video model that weights of this model can initialise, with patches of `frames`
        frames; None if there is none."""
        return None

    def with_position_table(self) -> ModelConfig:
        """Return the config with learned positions instead of fixed positions that other formats store as a table."""
        return self
