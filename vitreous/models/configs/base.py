"""The contract of model families: what the package asks of a config, whatever its family. Needs no PyTorch.

A config is a frozen dataclass with a field `family`, its name in `models.families`. It has the fields or properties
that `ModelConfig` declares; everything else has a default that claims nothing, which a family overrides where it can do
more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from vitreous.config import TaggedUnion, change_fields, import_object
from vitreous.models.configs.groups import AttentionGroup, ConfigGroup, PositionGroup, RegularizationConfig
from vitreous.models.families import FAMILIES

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

ImageSize = tuple[int, ...] | None
#: whose mean and standard deviation of each channel images are normalised with; half: 0.5 and 0.5
PixelScaling = Literal["half", "imagenet", "clip"]
#: rules of positions that are tables, resized to other grids
LEARNED_POSITIONS = ("learned", "axes", "factorised")
#: fields that weights files of others' formats have no place for, which are noted beside the tensors
METADATA_FIELDS = (
    *("image", "heads", "projection_bias", "positions.resize", "attention.qkv_bias", "attention.pad", "mlp.gelu"),
    *("norm.final", "norm.eps", "eps"),
)
#: fields that change outputs slightly, and no shape
NUMERICAL_FIELDS = ("mlp.gelu", "norm.eps", "eps", "numerics", "round_anchors")


class Level(NamedTuple):
    """A map of a backbone: the pixels per axis that a place of it stands for, and its channels."""

    patch: tuple[int, ...]
    width: int

    @property
    def stride(self) -> int:
        """Pixels to a place along the first axis, by which a map is asked for."""
        return self.patch[0]

    def grid_of(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """Places per axis of the map of an image of these sides, in pixels: a remainder is a place too."""
        return tuple(-(-side // p) for side, p in zip(image, self.patch, strict=True))


class LayerGroups(NamedTuple):
    """Which layer a parameter belongs to: `block` finds the numbers of a block in the name of its parameter, `entry`
    are the submodules before the first block."""

    block: str = r"\bencoder\.blocks\.(\d+)\."
    entry: tuple[str, ...] = ("projection", "position", "prefix", "slots", "stem", "first_norm")


class PreprocessDefaults(NamedTuple):
    """How images were prepared for published weights, where no file beside them tells: mean and standard deviation, and
    the filter that resizes them."""

    pixels: PixelScaling = "half"
    filter: Literal["bilinear", "bicubic"] = "bicubic"


@dataclass(frozen=True)
class ExportRules:
    """How a model is exported.

    Args:
        outputs: names of the outputs of its graph, in order.
        fixed_size: why images of other sizes are no input of its graph; "" where they are.
        hint: what to do instead of `--dynamic-size`.
        fixed_batch: whether the graph takes one image at a time.
        patch_multiples: whether images of other sizes are multiples of the patch.
        drops_guards: whether what torch.export concludes of sizes from its example does not hold for all of them.
    """

    outputs: tuple[str, ...]
    fixed_size: str = ""
    hint: str = ""
    fixed_batch: bool = False
    patch_multiples: bool = False
    drops_guards: bool = False


class ModelConfig:
    """What a model is, as frozen values; the base class of the configs of all families."""

    tagged: ClassVar[TaggedUnion] = TaggedUnion(FAMILIES, key="family", default="vit")
    module: ClassVar[str]  # the class of its models, as "package.module:Class"
    preset_names: ClassVar[tuple[str, ...]] = ()  # what `vitreous models` lists
    recipe_family: ClassVar[str] = ""  # the models whose training recipes fit: vit, bit, swin
    layer_groups: ClassVar[LayerGroups] = LayerGroups()

    if TYPE_CHECKING:  # fields or properties of every family

        @property
        def family(self) -> str:
            """The row of `models.families`."""
            ...

        @property
        def image(self) -> tuple[int, ...]:
            """Pixels along each axis of the images that the model was created for."""
            ...

        @property
        def patch(self) -> tuple[int, ...]:
            """Pixels to a place of the last grid, per axis."""
            ...

        @property
        def channels(self) -> int:
            """Channels of an image."""
            ...

        @property
        def classes(self) -> int:
            """Classes of the head; 0 without one."""
            ...

        @property
        def width(self) -> int:
            """Channels of a token."""
            ...

        @property
        def depth(self) -> int:
            """Blocks."""
            ...

    # What a family has no field for. These are no fields of this class, which is no dataclass.
    backbone: Any = None  # the config that a model wraps
    prefix: int = 0  # tokens in front of the patches
    class_token: bool = False
    positions: PositionGroup = PositionGroup()  # what is added to tokens
    attention: AttentionGroup = AttentionGroup()
    regularization: RegularizationConfig = RegularizationConfig()
    batch_norm: bool = False  # images of a batch see each other in training
    front: str = "conv"  # what reads the image: patches, conv or resnet; convolutions compute in float32 where frozen
    pool: str = "mean"
    arrangement: str = ""  # of attention over space and time
    position_grid: tuple[int, ...] = ()
    stem_depth: int = 0  # residual units before the first block
    threshold: float = 0.0  # score from which objects are given
    inflate: str = "central"  # how weights of images start a projection of clips
    first_block: int = 0  # the number of the first block in the names of parameters
    has_stages: bool = False  # dense heads read `levels`, each with its own channels
    has_attention: bool = False  # blocks attend from token to token
    sees_whole_image: bool = False  # every block's attention is over the whole image at once
    needs_positions: bool = False  # blocks need token coordinates
    on_grid: bool = False  # blocks take tokens as a grid, (B, *grid, D)
    factorised: bool = False  # tokens lie in time slots, (B, T, S, D)
    drops_patches: bool = False  # patches may be left out in training
    merges_tokens: bool = False  # tokens may be merged in inference (`nn.merge`)
    packs_sizes: bool = False  # images of many sizes may lie in one row of tokens (`models.packed`)
    any_axes: bool = False  # images may have any number of axes: signals and volumes
    has_time_axis: bool = False  # the first axis of an image is time
    finds_objects: bool = False  # outputs are objects, not one tensor
    generates_images: bool = False  # outputs are images
    foreign_formats: bool = False  # others' files may hold the model
    can_be_stored: bool = True  # the config tells all that is needed to build the model again

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Any config for this class, which `from_dict` has made one before; the fields of a subclass."""
        from pydantic_core import core_schema

        return core_schema.is_instance_schema(cls) if cls is ModelConfig else handler(source)

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> ModelConfig | None:
        """The config of a model's name, at an image size in pixels, None: its own. None for names of other families.
        Raises UsageError for a name of this family that cannot be."""
        return None

    def name(self) -> str:
        """The model's canonical name, which `parse_name` reads."""
        raise NotImplementedError

    def model_class(self) -> Any:
        """The class of its models, imported when it is asked for."""
        return import_object(self.module)

    def with_options(self, **changes: Any) -> Self:
        """A copy with these fields. A dict changes the fields of a group that it names, and leaves the others:
        `with_options(depth=6, attention={"window": 7})`. Raises UsageError for values that cannot be."""
        return change_fields(self, changes)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """What `with_options` takes."""
        return tuple(field.name for field in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def option_paths(cls) -> tuple[str, ...]:
        """The options with those of groups one by one, by their dotted paths: `depth`, `attention.window`."""
        groups = {name: getattr(cls, name, None) for name in cls.option_names()}
        return tuple(
            path
            for name, group in groups.items()
            for path in (
                [f"{name}.{field.name}" for field in fields(group)] if isinstance(group, ConfigGroup) else [name]  # type: ignore[arg-type]
            )
        )

    def values_at(self, paths: Iterable[str]) -> dict[str, Any]:
        """The values of options by their dotted paths, without those that the config does not have."""
        own = self.option_paths()
        return {path: attrgetter(path)(self) for path in paths if path in own}

    def check_image(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image size (pixels per axis) that the model cannot take."""

    @property
    def encoder(self) -> ModelConfig:
        """The innermost backbone: of a model that wraps none, itself."""
        return self if self.backbone is None else self.backbone.encoder

    @property
    def grid(self) -> tuple[int, ...]:
        """Places per axis of the last map at the native image size; a remainder is a place too."""
        return tuple(math.ceil(side / p) for side, p in zip(self.image, self.patch, strict=True))

    @property
    def table_grid(self) -> tuple[int, ...]:
        """Places per axis of the table of positions."""
        return self.grid

    @property
    def cell(self) -> tuple[int, ...]:
        """What a token is cut from, along each axis: pixels, or places of a stem's map."""
        return self.patch

    @property
    def width_out(self) -> int:
        """Channels of a token after the last block."""
        return self.width

    @property
    def features(self) -> int:
        """Channels of the head's input."""
        return self.width_out

    @property
    def has_position_tables(self) -> bool:
        """Whether there are learned positions that are resized to other image sizes."""
        return self.positions.kind in LEARNED_POSITIONS

    @property
    def projected_cell(self) -> tuple[int, ...]:
        """Pixels per axis of the patches that one projection reads; () for models that read images otherwise."""
        return self.cell if self.front == "patches" else ()

    def patch_at(self, block: int) -> tuple[int, ...]:
        """Pixels to a token, per axis, in a block."""
        return self.patch

    @property
    def levels(self) -> tuple[Level, ...]:
        """The maps that `features_at` gives, the finest first."""
        return (Level(self.patch, self.width_out),)

    @property
    def strides(self) -> tuple[int, ...]:
        """The stride of each map, in pixels along the first axis, the finest first."""
        return tuple(level.stride for level in self.levels)

    def unread(self, strides: Sequence[int]) -> tuple[str, ...]:
        """The names of parts of the model that no map of these strides depends on, beside last norms and heads."""
        return ()

    def level_at(self, stride: int) -> Level:
        """The map of a stride. Raises ValueError for a stride of no map."""
        self.check_strides([stride])
        return self.levels[self.strides.index(stride)]

    def check_strides(self, strides: Sequence[int]) -> None:
        """Raise ValueError for no strides, and for one of no map."""
        if not strides or not set(strides) <= set(self.strides):
            raise ValueError(f"strides {tuple(strides)} are not among {self.strides}, those of the model's maps")

    def parameter_layer(self, parameter: str) -> int:
        """The layer of a parameter, for layer decay (arXiv:2106.08254): 0 for what comes before the blocks, 1 to L for
        the blocks, L + 1 for what follows them, and for what stands on or beside a backbone."""
        if self.backbone is not None:
            _, inside, inner = parameter.partition("backbone.")
            return self.backbone.parameter_layer(inner) if inside else self.depth + 1
        groups = self.layer_groups
        match = re.search(groups.block, parameter)
        if match:
            return 1 + self.block_number(*(int(number or 0) for number in match.groups()))
        before = parameter.startswith(tuple(f"{part}." for part in groups.entry)) or parameter in groups.entry
        return 0 if before else self.depth + 1

    def block_number(self, *numbers: int) -> int:
        """The number of a block, from 0, by those in the names of its parameters."""
        return numbers[0] - self.first_block

    def macs(self, image: ImageSize = None) -> int:
        """Multiply-adds of one forward pass for one image of these sides, in pixels, None: the native size. FLOPs are
        twice this; a training step costs three forward passes. By default PyTorch counts them on a model without
        values."""
        return self.model_class().count_macs(self, tuple(image or self.image))

    def computed_macs(self, image: ImageSize = None, patches: int | None = None) -> int:
        """Multiply-adds that a forward pass carries out: `macs` without what of the last block is not read. Blocks
        compute only so many `patches` of the image, where they drop the others; all are projected."""
        return self.macs(image)

    def count_activations(self, image: ImageSize = None, device: str = "cuda") -> int | None:
        """Numbers that the blocks keep of one image for the backward pass, two or four bytes each; None where nobody
        has counted them."""
        return None

    def describe_window_change(self, before: ModelConfig) -> str:
        """A note on windows that weights of the config `before` were not trained with; "" where there are none."""
        return ""

    def export_rules(self) -> ExportRules:
        """How the model is exported."""
        outputs = ("logits", "features") if self.classes else ("features",)
        return ExportRules(outputs, fixed_size="its positions and paddings are those of one size")

    def default_preprocess(self) -> PreprocessDefaults:
        """How images were prepared for published weights, where no file beside them tells."""
        return PreprocessDefaults()

    def metadata_fields(self) -> dict[str, Any]:
        """Fields that no tensor tells, which are written beside tensors in others' formats."""
        return self.values_at(sorted(METADATA_FIELDS))

    def numerical_choices(self) -> dict[str, Any]:
        """Choices that change outputs slightly, and no shape."""
        return self.values_at(NUMERICAL_FIELDS)

    def head_count_field(self) -> dict[str, Any]:
        """The field `heads` where no tensor tells the number of heads."""
        return {}

    def structure(self) -> dict[str, Any]:
        """What the model's tensors depend on, synonyms unified: equal for two configs whose weights are
        interchangeable."""
        return {name: getattr(self, name) for name in self.option_names() if name != "regularization"}

    def of_clips(self, frames: int) -> ModelConfig | None:
        """The model of clips that weights of this model start, with patches of so many frames; None without one."""
        return None

    def with_position_table(self) -> ModelConfig:
        """The config with learned positions where it has fixed ones that others' files store as a table."""
        return self
