"""Config of an encoder of another library (timm, transformers, or a wrapped module), with the properties of a ViT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from vitreous.config import import_object
from vitreous.errors import UsageError
from vitreous.models.configs.base import ImageSize, LayerGroups, Level, ModelConfig
from vitreous.models.configs.groups import RegularizationConfig
from vitreous.nn.sizes import format_size, nearest_divisible_size

#: layouts of an encoder's features: tokens (B, N, D), or maps (B, D, H, W) or (B, H, W, D)
FeatureLayout = Literal["tokens", "channels-first", "channels-last"]
#: pattern of the block index in parameter names of timm and transformers
BLOCK_PATTERN = r"^encoder\.module\.(?:\w+\.)*?(?:blocks|layers?|stages)[._]?(\d+)(?:\.|$)"
#: names of modules before the blocks in these libraries
ENTRY_MODULES = tuple(
    f"encoder.module.{name}"
    for name in ("patch_embed", "cls_token", "pos_embed", "reg_token", "norm_pre", "embeddings", "embedder", "stem")
    + ("conv1", "bn1", "conv_stem")
)


@dataclass(frozen=True)
class ForeignConfig(ModelConfig):
    """The properties of another library's model that objectives, heads and engines require.

    `image` and `patch` are in pixels along each axis, `width` is the number of channels of a token, `prefix` the number
    of tokens before the patches. Options that require the blocks of a ViT are not supported.

    `library` rebuilds the model from its name there (`full_name`, `timm:NAME`) and `arguments`, a JSON text: the
    arguments of `timm.create_model`, or the whole config of transformers. A module passed to `wrap_backbone` has no
    library. The other fields are measured on the module. Raises UsageError if the module has a fixed image size that is
    not divisible by the patch.
    """

    module: ClassVar[str] = "vitreous.models.foreign:ForeignModel"
    layer_groups: ClassVar[LayerGroups] = LayerGroups(BLOCK_PATTERN, ENTRY_MODULES)
    pool: ClassVar[str] = "library"

    full_name: str  # `timm:NAME`, `hf:NAME`, or the class of a wrapped module
    image: tuple[int, ...]
    patch: tuple[int, ...]
    width: int
    prefix: int = 0
    channels: int = 3
    classes: int = 0
    family: Literal["foreign"] = "foreign"
    library: Literal["", "timm", "transformers"] = ""
    arguments: str = "{}"
    sized_by: str = ""  # the argument that sets the image size; "": any image size
    layout: FeatureLayout = "tokens"
    pooled: int = 0  # channels of the head's input; 0 means `width`
    depth: int = 0  # number of blocks, or of stages
    first_block: int = 0  # index of the first block in parameter names
    stages: tuple[tuple[int, int], ...] = ()  # stride in pixels, and channels, of each map for dense heads
    batch_norm: bool = False  # training outputs depend on the batch
    draws: bool = False  # draws random numbers in training: has dropout or stochastic depth

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> ForeignConfig | None:
        """Return the config of `timm:resnet18` or `hf:FOLDER`, which the library describes (`models.libraries`); None
        for other names."""
        if not name.startswith(("timm:", "hf:")):
            return None
        return import_object("vitreous.models.libraries:parse_foreign")(name, image)

    def name(self) -> str:
        """Return the library and the model's name in it, or the class of a wrapped module."""
        return self.full_name

    def __post_init__(self) -> None:
        if self.library:
            self.check_image_size(self.image)

    def check_image_size(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image that does not have two axes, or that is not divisible by the patch of a model
        with a fixed image size."""
        if len(image) != 2:
            raise UsageError(
                f"{self.full_name} requires images with two axes, got {len(image)}", "use --model ViT-S/16"
            )
        if self.sized_by and any(length % patch for length, patch in zip(image, self.patch, strict=True)):
            problem = f"image size {format_size(image)} is not divisible by patch size {format_size(self.patch)}"
            problem += f" ({self.full_name})"
            raise UsageError(problem, f"use --image-size {format_size(nearest_divisible_size(image, self.patch))}")

    @property
    def num_features(self) -> int:
        """Return the channels of the head's input."""
        return self.pooled or self.width

    @property
    def has_stages(self) -> bool:
        """Return whether the model has maps of several strides for dense heads."""
        return bool(self.stages)

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return the maps that `features_at` computes: the last map of each stride, or the tokens after the last
        block."""
        return tuple(Level((stride, stride), width) for stride, width in self.stages) or (
            Level(self.patch, self.width),
        )

    @property
    def regularization(self) -> RegularizationConfig:
        """Return a dropout above 0 if the module draws random numbers in training; `arguments` set the actual rate."""
        return RegularizationConfig(dropout=float(self.draws))
