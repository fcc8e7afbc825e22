"""The interface of model configs that the package relies on, for all families. Does not import PyTorch.

A config is a frozen dataclass with a field `family`, its name in `models.families`, and the fields or properties that
`ModelConfig` declares. Everything else has a conservative default, which a family overrides if it supports more.
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
#: source of the mean and standard deviation that normalise each channel; half: 0.5 and 0.5
PixelScaling = Literal["half", "imagenet", "clip"]
#: kinds of positions that are tables, resized to other grids
LEARNED_POSITIONS = ("learned", "axes", "factorised")
#: fields that other formats cannot store, so they are written to the metadata of the tensors
METADATA_FIELDS = (
    *("image", "heads", "projection_bias", "positions.resize", "attention.qkv_bias", "attention.pad", "mlp.gelu"),
    *("norm.final", "norm.eps", "eps"),
)
#: fields that change outputs slightly, but no shapes
NUMERICAL_FIELDS = ("mlp.gelu", "norm.eps", "eps", "numerics", "round_anchors")


class Level(NamedTuple):
    """A map of a backbone: pixels per position along each axis, and channels."""

    patch: tuple[int, ...]
    width: int

    @property
    def stride(self) -> int:
        """Pixels per position along the first axis, which identifies the map."""
        return self.patch[0]

    def grid_of(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """Positions per axis of the map for an image of this size in pixels, rounded up."""
        return tuple(-(-length // p) for length, p in zip(image, self.patch, strict=True))


class LayerGroups(NamedTuple):
    """Patterns that assign parameters to layers: `block` matches a block's numbers in a parameter name, `entry` are the
    submodules before the first block."""

    block: str = r"\bencoder\.blocks\.(\d+)\."
    entry: tuple[str, ...] = ("projection", "position", "prefix", "slots", "stem", "first_norm")


class PreprocessDefaults(NamedTuple):
    """Preprocessing of published weights if their files do not contain it: mean and standard deviation, and the
    interpolation filter."""

    pixels: PixelScaling = "half"
    filter: Literal["bilinear", "bicubic"] = "bicubic"


@dataclass(frozen=True)
class ExportRules:
    """How a model is exported.

    Args:
        outputs: names of the graph's outputs, in order.
        fixed_size: why the graph does not support other image sizes; "" if it does.
        hint: the alternative to `--dynamic-size`.
        fixed_batch: whether the graph takes one image at a time.
        patch_multiples: whether other image sizes must be multiples of the patch.
        drops_guards: whether size guards that torch.export infers from its example are too strict and must be dropped.
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
    module: ClassVar[str]  # the class of its models, as "package.module:Class"
    preset_names: ClassVar[tuple[str, ...]] = ()  # names listed by `vitreous models`
    recipe_family: ClassVar[str] = ""  # selects training recipes: vit, bit, swin
    layer_groups: ClassVar[LayerGroups] = LayerGroups()

    # Families narrow these types, and have them as fields, constants or properties: declarations that type checkers do
    # not accept for one annotated attribute. Without annotations they infer the types; a test compares the values.
    if TYPE_CHECKING:  # of every family
        family = ""  # the key in `models.families`
        image = tuple[int, ...]()  # native image size: pixels along each axis
        patch = tuple[int, ...]()  # pixels per position of the last grid, per axis
        channels = 0  # of an image
        classes = 0  # of the head; 0 without one
        width = 0  # channels of a token
        depth = 0  # blocks

    # Defaults for families without such a field. This class is not a dataclass, so these are not fields.
    backbone: Any = None  # the config that a model wraps
    prefix = 0  # number of prefix tokens
    class_token = False
    positions = PositionGroup()  # position embeddings
    attention = AttentionGroup()
    regularization = RegularizationConfig()
    batch_norm = False  # training outputs depend on the batch
    front = "conv"  # first layers: patches, conv or resnet; frozen convolutions compute in float32
    pool = "mean"
    arrangement = ""  # of attention over space and time
    position_grid = tuple[int, ...]()
    stem_depth = 0  # residual units before the first block
    threshold = 0.0  # minimum score of detections
    inflate = "central"  # how image weights initialise a video patch projection
    first_block = 0  # index of the first block in parameter names
    has_stages = False  # dense heads use `levels`, each with a different number of channels
    has_attention = False  # blocks contain attention
    sees_whole_image = False  # every block's attention is over the whole image at once
    needs_positions = False  # blocks need token coordinates
    on_grid = False  # blocks take tokens as a grid, (B, *grid, D)
    factorised = False  # tokens are grouped in time slots, (B, T, S, D)
    drops_patches = False  # patches may be dropped in training
    merges_tokens = False  # tokens may be merged in inference (`nn.merge`)
    packs_sizes = False  # images of many sizes may be packed into one sequence (`models.packed`)
    any_axes = False  # images may have any number of axes: signals and volumes
    has_time_axis = False  # the first axis of an image is time
    finds_objects = False  # outputs are detections, not a single tensor
    generates_images = False  # outputs are images
    foreign_formats = False  # other libraries' files may contain the model
    can_be_stored = True  # the config is sufficient to rebuild the model

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate any config instance for this class (`from_dict` created it before), and the fields of a subclass."""
        from pydantic_core import core_schema

        return core_schema.is_instance_schema(cls) if cls is ModelConfig else handler(source)

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> ModelConfig | None:
        """Return the config of a model name at an image size in pixels; None: the native size.

        Returns None for names of other families. Raises UsageError for an invalid name of this family.
        """
        return None

    def name(self) -> str:
        """The model's canonical name, which `parse_name` parses."""
        raise NotImplementedError

    def model_class(self) -> Any:
        """The class of its models, imported on first use."""
        return import_object(self.module)

    def with_options(self, **changes: Any) -> Self:
        """Return a copy with these fields.

        A dict changes the fields of a group that it names, and keeps the others: `with_options(depth=6,
        attention={"window": 7})`. Raises UsageError for invalid values.
        """
        return change_fields(self, changes)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The names that `with_options` accepts."""
        return list_field_names(cls)

    @classmethod
    def option_paths(cls) -> tuple[str, ...]:
        """The dotted paths of all options, including the fields of each group: `depth`, `attention.window`."""
        groups = {name: getattr(cls, name, None) for name in cls.option_names()}
        return tuple(
            path
            for name, group in groups.items()
            for path in (
                [f"{name}.{field}" for field in list_field_names(group)] if isinstance(group, ConfigGroup) else [name]
            )
        )

    def values_at(self, paths: Iterable[str]) -> dict[str, Any]:
        """The values of options by dotted path, without options that the config does not have."""
        option_paths = self.option_paths()
        return {path: attrgetter(path)(self) for path in paths if path in option_paths}

    def check_image_size(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image size (pixels per axis) that the model does not support."""

    @property
    def encoder(self) -> ModelConfig:
        """The innermost backbone, or the model itself if it has none."""
        return self if self.backbone is None else self.backbone.encoder

    @property
    def grid(self) -> tuple[int, ...]:
        """Positions per axis of the last map at the native image size, rounded up."""
        return tuple(math.ceil(length / p) for length, p in zip(self.image, self.patch, strict=True))

    @property
    def table_grid(self) -> tuple[int, ...]:
        """Positions per axis of the position table."""
        return self.grid

    @property
    def cell(self) -> tuple[int, ...]:
        """Size of a token's input along each axis: pixels, or positions of a stem's map."""
        return self.patch

    @property
    def width_out(self) -> int:
        """Channels of a token after the last block."""
        return self.width

    @property
    def num_features(self) -> int:
        """Number of input features of the head."""
        return self.width_out

    @property
    def has_position_tables(self) -> bool:
        """Whether there are learned positions that are resized to other image sizes."""
        return self.positions.kind in LEARNED_POSITIONS

    @property
    def projected_cell(self) -> tuple[int, ...]:
        """Pixels per axis of the patches of a patch projection; () for models without one."""
        return self.cell if self.front == "patches" else ()

    def patch_at(self, block: int) -> tuple[int, ...]:
        """Pixels per token, per axis, in a block."""
        return self.patch

    @property
    def levels(self) -> tuple[Level, ...]:
        """The maps that `features_at` returns, the finest first."""
        return (Level(self.patch, self.width_out),)

    @property
    def strides(self) -> tuple[int, ...]:
        """The stride of each map, in pixels along the first axis, the finest first."""
        return tuple(level.stride for level in self.levels)

    def list_unused_modules(self, strides: Sequence[int]) -> tuple[str, ...]:
        """Names of submodules that no map of these strides depends on, except last norms and heads."""
        return ()

    def level_at(self, stride: int) -> Level:
        """The map of a stride. Raises ValueError if no map has the stride."""
        self.check_strides([stride])
        return self.levels[self.strides.index(stride)]

    def check_strides(self, strides: Sequence[int]) -> None:
        """Raise ValueError if `strides` is empty, or if no map has one of them."""
        if not strides or not set(strides) <= set(self.strides):
            raise ValueError(f"strides {tuple(strides)} are not among the strides of the model's maps, {self.strides}")

    def parameter_layer(self, parameter: str) -> int:
        """Return the layer index of a parameter, for layer decay (arXiv:2106.08254).

        0 for modules before the blocks, 1 to L for the blocks, L + 1 for modules after them and for heads and other
        modules around a backbone.
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
        """The index of a block, from 0, from the numbers in its parameters' names."""
        return indices[0] - self.first_block

    def macs(self, image: ImageSize = None) -> int:
        """Multiply-adds of one forward pass for one image of this size in pixels; None: the native size.

        FLOPs are twice this; a training step costs three forward passes. By default PyTorch counts them on a model
        without values.
        """
        return self.model_class().count_macs(self, tuple(image or self.image))

    def computed_macs(self, image: ImageSize = None, patches: int | None = None) -> int:
        """Multiply-adds that a forward pass performs: `macs` without the unused part of the last block.

        If `patches` is set, blocks compute only that many patches of the image; all are projected.
        """
        return self.macs(image)

    def count_activations(self, image: ImageSize = None, device: str = "cuda") -> int | None:
        """Number of values, two or four bytes each, that the blocks store per image for the backward pass; None if
        unknown."""
        return None

    def describe_window_change(self, source_config: ModelConfig) -> str:
        """Return a note if the model has windows with which the weights of the config `source_config` were not trained,
        else ""."""
        return ""

    def export_rules(self) -> ExportRules:
        """How the model is exported."""
        outputs = ("logits", "features") if self.classes else ("features",)
        return ExportRules(outputs, fixed_size="its positions and paddings are fixed to one size")

    def default_preprocess(self) -> PreprocessDefaults:
        """Preprocessing of published weights if their files do not contain it."""
        return PreprocessDefaults()

    def metadata_fields(self) -> dict[str, Any]:
        """Fields that tensors do not determine, which are written as metadata in other formats."""
        return self.values_at(sorted(METADATA_FIELDS))

    def numerical_choices(self) -> dict[str, Any]:
        """Fields that change outputs slightly, but no shapes."""
        return self.values_at(NUMERICAL_FIELDS)

    def head_count_field(self) -> dict[str, Any]:
        """The field `heads`, if tensors do not determine the number of heads."""
        return {}

    def structure(self) -> dict[str, Any]:
        """The values that the model's tensors depend on, with synonyms unified.

        Equal for two configs whose weights are interchangeable.
        """
        return {name: getattr(self, name) for name in self.option_names() if name != "regularization"}

    def of_clips(self, frames: int) -> ModelConfig | None:
        """The video model that weights of this model can initialise, with patches of `frames` frames; None if there is
        none."""
        return None

    def with_position_table(self) -> ModelConfig:
        """Return the config with learned positions in place of fixed ones that other formats store as a table."""
        return self
