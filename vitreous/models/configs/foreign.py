"""Config of an encoder of another library, with the properties of a ViT."""

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
#: patterns of a block's index in parameter names of timm and transformers; the first match counts
BLOCK_PATTERN = r"^encoder\.module\.(?:\w+\.)*?(?:blocks|layers?|stages)[._]?(\d+)(?:\.|$)"
#: names of modules before the blocks in these libraries
ENTRY_MODULES = tuple(
    f"encoder.module.{name}"
    for name in ("patch_embed", "cls_token", "pos_embed", "reg_token", "norm_pre", "embeddings", "embedder", "stem")
    + ("conv1", "bn1", "conv_stem")
)


@dataclass(frozen=True)
class ForeignConfig(ModelConfig):
    """The properties of another library's model that objectives, heads and engines need.

    `image` and `patch` are in pixels per axis, `width` is the channels of a token, `prefix` the tokens before the
    patches. Everything that needs the blocks of a ViT is unsupported. `library` builds the model again, by its name
    there (`timm:NAME`) and `arguments`, in JSON: those of `timm.create_model`, or the whole config of transformers. A
    module of `wrap_backbone` has no library. The other fields are measured from the module, not set. Raises UsageError
    if the patch does not divide the image and the module has a fixed image size.
    """

    module: ClassVar[str] = "vitreous.models.foreign:ForeignModel"
    layer_groups: ClassVar[LayerGroups] = LayerGroups(BLOCK_PATTERN, ENTRY_MODULES)
    pool: ClassVar[str] = "library"

    full_name: str  # `timm:NAME`, or the class of a module
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
    pooled: int = 0  # channels of the head's input; 0: `width`
    depth: int = 0  # blocks, or stages
    first_block: int = 0  # index of the first of them in parameter names
    stages: tuple[tuple[int, int], ...] = ()  # stride in pixels, and channels, of each map for dense heads
    batch_norm: bool = False  # training outputs depend on the batch
    draws: bool = False  # has dropout or stochastic depth

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> ForeignConfig | None:
        """`timm:resnet18` or `hf:FOLDER`, resolved by the library (`models.libraries`)."""
        if not name.startswith(("timm:", "hf:")):
            return None
        return import_object("vitreous.models.libraries:parse_foreign")(name, image)

    def name(self) -> str:
        """The library and the model's name in it, or the class of a wrapped module."""
        return self.full_name

    def __post_init__(self) -> None:
        if self.library:
            self.check_image_size(self.image)

    def check_image_size(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image that does not have two axes, or if the patch has to divide it and does not."""
        if len(image) != 2:
            raise UsageError(f"{self.full_name} takes images with two axes, not {len(image)}", "use --model ViT-S/16")
        if self.sized_by and any(length % patch for length, patch in zip(image, self.patch, strict=True)):
            problem = f"image size {format_size(image)} is not divisible by patch size {format_size(self.patch)}"
            problem += f" ({self.full_name})"
            raise UsageError(problem, f"use --image-size {format_size(nearest_divisible_size(image, self.patch))}")

    @property
    def can_be_stored(self) -> bool:
        """Whether a library can rebuild the model."""
        return bool(self.library)

    @property
    def num_features(self) -> int:
        """Channels of the head's input."""
        return self.pooled or self.width

    @property
    def has_stages(self) -> bool:
        """Whether there are maps of several strides for dense heads."""
        return bool(self.stages)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The maps that `features_at` returns: the last of each stage, or the tokens after the last block."""
        return tuple(Level((stride, stride), width) for stride, width in self.stages) or (
            Level(self.patch, self.width),
        )

    @property
    def regularization(self) -> RegularizationConfig:
        """A dropout above 0 if the module is random in training; `arguments` set its rate."""
        return RegularizationConfig(dropout=float(self.draws))
