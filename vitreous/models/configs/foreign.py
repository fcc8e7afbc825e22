"""An encoder of another library, described in the words of a ViT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from vitreous.config import import_object
from vitreous.errors import UsageError
from vitreous.models.configs.base import ImageSize, LayerGroups, Level, ModelConfig
from vitreous.models.configs.groups import RegularizationConfig
from vitreous.nn.sizes import format_size, nearest_divisible_size

#: how an encoder gives its features: tokens (B, N, D), or maps (B, D, H, W) or (B, H, W, D)
FeatureLayout = Literal["tokens", "channels-first", "channels-last"]
#: where a block's number is in the name of its parameter, in timm and transformers: the first that matches
BLOCK_PATTERN = r"^encoder\.module\.(?:\w+\.)*?(?:blocks|layers?|stages)[._]?(\d+)(?:\.|$)"
#: what stands before the blocks, by its name there
ENTRY_MODULES = tuple(
    f"encoder.module.{name}"
    for name in ("patch_embed", "cls_token", "pos_embed", "reg_token", "norm_pre", "embeddings", "embedder", "stem")
    + ("conv1", "bn1", "conv_stem")
)


@dataclass(frozen=True)
class ForeignConfig(ModelConfig):
    """What objectives, heads and engines ask of a model, of one that another library computes.

    `image` and `patch` in pixels per axis, `width` of a token, `prefix` tokens before those of the patches. It says of
    everything that needs the blocks of a ViT that it cannot be done. `library` builds the model again, by its name
    there (`timm:NAME`) and `arguments`, in JSON: those of `timm.create_model`, or the whole config of transformers. A
    module of `wrap_backbone` has no library. The other fields are facts of the module: they are read off it, not set.
    Raises UsageError for an image that the patch does not divide, where the module is made for one size.
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
    sized_by: str = ""  # the argument that takes the image size; "": images of any size
    layout: FeatureLayout = "tokens"
    pooled: int = 0  # channels of what the head reads; 0: `width`
    depth: int = 0  # blocks, or stages
    first_block: int = 0  # the number of the first of them in the names of parameters
    stages: tuple[tuple[int, int], ...] = ()  # pixels to a place, and channels, of each map that dense heads read
    batch_norm: bool = False  # images of a batch see each other in training
    draws: bool = False  # dropout or stochastic depth

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> ForeignConfig | None:
        """`timm:resnet18` or `hf:FOLDER`, for which the library is asked (`models.libraries`)."""
        if not name.startswith(("timm:", "hf:")):
            return None
        return import_object("vitreous.models.libraries:parse_foreign")(name, image)

    def name(self) -> str:
        """The model's name in its library, after the library's, or the class of its module."""
        return self.full_name

    def __post_init__(self) -> None:
        if self.library:
            self.check_image(self.image)

    def check_image(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image of other than two axes, and where the patch has to divide it and does not."""
        if len(image) != 2:
            raise UsageError(
                f"{self.full_name} is for pictures, not for images of {len(image)} axes", "use --model ViT-S/16"
            )
        if self.sized_by and any(side % patch for side, patch in zip(image, self.patch, strict=True)):
            problem = f"image size {format_size(image)} is not divisible by patch size {format_size(self.patch)}"
            problem += f" ({self.full_name})"
            raise UsageError(problem, f"use --image-size {format_size(nearest_divisible_size(image, self.patch))}")

    @property
    def can_be_stored(self) -> bool:
        """Whether a library builds the model again."""
        return bool(self.library)

    @property
    def features(self) -> int:
        """Channels of what the head reads."""
        return self.pooled or self.width

    @property
    def has_stages(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether there are maps of several strides, which dense heads then read."""
        return bool(self.stages)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The maps that `features_at` gives: the last of each stage, or the tokens after the last block."""
        return tuple(Level((stride, stride), width) for stride, width in self.stages) or (
            Level(self.patch, self.width),
        )

    @property
    def regularization(self) -> RegularizationConfig:
        """With a dropout above 0 where the module draws at random in training; `arguments` set how much."""
        return RegularizationConfig(dropout=float(self.draws))
