"""What a model is, as frozen values: everything that must be stored to build it again. Needs no PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, TypeVar, get_args

from vitreous.errors import UsageError, nearest
from vitreous.nn.sizes import by, grid_of, nearby

# whose ResNet: the rows of nn.resnet.NUMERICS
Numerics = Literal["google", "bit", "big-vision", "timm", "transformers"]
#: how positions are resized to another grid: the rows of nn.grid.RESIZE
Resize = Literal["bicubic-antialias", "bicubic", "bicubic-offset", "bicubic-aligned", "bilinear", "zoom", "zoom-scipy"]


@dataclass(frozen=True)
class StemConfig:
    """The ResNet in front of a hybrid: units of each stage (none: the root alone), width of the root (arXiv:2010.11929,
    3.1)."""

    blocks: tuple[int, ...] = (3, 4, 9)
    width: int = 64
    numerics: Numerics = "google"
    family: Literal["resnet"] = "resnet"

    @property
    def reduction(self) -> int:
        """Pixels along a side that one place of the last map stands for."""
        return 4 * 2 ** max(0, len(self.blocks) - 1)


@dataclass(frozen=True)
class ConvStemConfig:
    """A few 3x3 convolutions in front of a hybrid (arXiv:2106.14881): channels of each stage, and the residual units in
    it.

    Each stage but the last halves the map. Raises UsageError for stages that cannot be meant.
    """

    family: Literal["conv"] = "conv"
    widths: tuple[int, ...] = (32, 64, 128, 128)
    blocks: tuple[int, ...] = (0, 0, 0, 1)

    def __post_init__(self) -> None:
        if not self.widths or len(self.widths) != len(self.blocks) or min(self.widths) < 1 or min(self.blocks) < 0:
            raise UsageError(
                f"widths {self.widths} and blocks {self.blocks} are no stages of convolutions",
                "name a width of at least 1 and a number of units for each stage",
            )

    @property
    def reduction(self) -> int:
        """Pixels along a side that one place of the last map stands for."""
        return 2 ** (len(self.widths) - 1)


@dataclass(frozen=True)
class ViTConfig:
    """A Vision Transformer (arXiv:2010.11929, section 3.1 and Table 1) or one of its kin.

    `image` and `patch` hold one length per axis, in pixels; any number of axes. Raises UsageError where a patch does
    not divide the image, heads do not divide the width, or options ask for tokens or a grid that are not there.
    """

    family: Literal["vit"] = "vit"
    image: tuple[int, ...] = (224, 224)
    patch: tuple[int, ...] = (16, 16)  # pixels that a token covers, the stem's reduction included
    channels: int = 3
    classes: int = 1000  # 0: no head, the pooled representation is the output
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072  # of the MLP
    stem: StemConfig | ConvStemConfig | None = None  # a hybrid: tokens are cut from a map of convolutions
    class_token: bool = True
    slots: int = 1  # of the learned positions, for the first prefix tokens: slot 0 of E_pos in Eq. 1
    registers: int = 0  # further prefix tokens, without positions (arXiv:2309.16588)
    position: Literal["learned", "axes", "sincos", "sincos-big-vision", "none"] = "learned"  # axes: learned 2-D
    # added once, or before each block: its own or shared (Table 8)
    position_at: Literal["input", "each", "shared"] = "input"
    attention: Literal["plain", "relative", "rotary", "decomposed"] = "plain"  # what attention itself knows of places
    axial: bool = False  # blocks along rows, then along columns (D.6)
    window: int = 0  # tokens along a side of what a block sees; 0: everything
    global_blocks: tuple[int, ...] = ()  # those that see everything all the same, counted from 0
    # distilled: class and distillation token, a head each
    pool: Literal["class", "mean", "attention", "distilled"] = "class"
    norm: Literal["tokens", "pooled", "none"] = "tokens"  # the last LayerNorm: on every token, or once, after pooling
    first_norm: bool = False  # a LayerNorm before the first block (CLIP)
    neck: int = 0  # channels of the convolutions after the last block (SAM); 0: none
    representation: int | None = None  # width of the tanh layer before the head, for pre-training
    layer_scale: float | None = None
    dropout: float = 0.0
    drop_path: float = 0.0
    drop_path_rises: bool = True  # from 0 in the first block; else it is the same in each (DeiT-III)
    qkv_bias: bool = True
    projection_bias: bool = True
    head_bias: bool = True
    mlp: Literal["gelu", "swiglu"] = "gelu"
    gelu: Literal["none", "tanh", "quick"] = "none"  # torch's names: none is the exact form (erf)
    eps: float = 1e-6
    resize: Resize = "bicubic-antialias"

    def __post_init__(self) -> None:
        if min(self.channels, self.width, self.depth, self.heads, self.hidden) < 1:
            raise UsageError("channels, width, depth, heads and hidden must be at least 1")
        if min(self.classes, self.registers, self.slots, self.window, self.neck) < 0:
            raise UsageError("classes, registers, slots, window and neck must be at least 0")
        if self.width % self.heads:
            raise UsageError(f"width {self.width} is not a multiple of {self.heads} heads", "change heads or width")
        if self.pool in ("class", "distilled") and not self.class_token:
            raise UsageError(
                f"pool={self.pool} needs a class token", "use pool=mean or pool=attention, or class_token=True"
            )
        self.check_image(self.image)
        if self.stem and any(p % self.stem.reduction for p in self.patch):
            raise UsageError(
                f"patch {by(self.patch)} is not a multiple of {self.stem.reduction}, by which the stem shrinks the "
                "image"
            )
        if self.on_grid and (self.prefix or len(self.image) != 2):
            raise UsageError(
                "axial and windowed blocks take a grid of patches without prefix tokens",
                "use class_token=False, pool=mean",
            )
        if (self.axial and self.attention != "plain") or (
            self.window and (self.axial or self.attention != "decomposed")
        ):
            raise UsageError(
                "axial goes with attention=plain, window with attention=decomposed, and not with each other"
            )
        if self.position_at != "input" and (self.on_grid or self.attention != "plain" or self.position == "none"):
            raise UsageError(
                "positions before each block need a position, attention=plain and no axial blocks",
                "use position_at=input",
            )

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens per axis at the native image size."""
        return grid_of(self.image, self.patch)

    @property
    def prefix(self) -> int:
        """Tokens in front of the patches: class token, distillation token, registers."""
        return int(self.class_token) + (self.pool == "distilled") + self.registers

    @property
    def read(self) -> int | None:
        """Tokens in front that are all that is pooled; None where patches are pooled too."""
        return {"class": 1, "distilled": 2}.get(self.pool)

    @property
    def positioned(self) -> int:
        """Prefix tokens with a learned position of their own: at most `slots`, and none where there is no class
        token."""
        return min(self.slots, self.prefix) if self.class_token and self.position in ("learned", "axes") else 0

    @property
    def on_grid(self) -> bool:
        """Whether the blocks take tokens as a grid, (B, *grid, D)."""
        return self.axial or self.window > 0 or self.attention == "decomposed" or self.neck > 0

    def check_image(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image size (pixels per axis) that the patch does not divide, naming sizes that
        would do."""
        try:
            grid_of(image, self.patch)
        except ValueError as error:
            ways = [f"--image-size {by(nearby(image, self.patch))}"]
            dividing = [p for p in range(2, min(image) + 1) if all(i % p == 0 for i in image)]
            patch = min(dividing, key=lambda p: abs(p - max(self.patch)), default=1)
            if self.front == "patches":
                ways.append(f"--patch-size {patch}")
            raise UsageError(str(error), "use " + ", or ".join(ways)) from None

    @property
    def front(self) -> Literal["patches", "conv", "resnet"]:
        """What reads the image: a projection of its patches, a few convolutions, or a ResNet."""
        return self.stem.family if self.stem else "patches"

    kind: ClassVar[Literal["vit", "bit"]] = "vit"  # whose training recipes fit

    @property
    def drops_patches(self) -> bool:
        """Whether patches may be left out in training: every block attends to all tokens there are."""
        return not self.on_grid

    @property
    def merges_tokens(self) -> bool:
        """Whether tokens may be merged in inference (`nn.merge`)."""
        return not self.needs_positions and self.pool != "attention"

    @property
    def has_attention(self) -> bool:
        """Whether blocks attend from token to token."""
        return True

    @property
    def sees_whole_image(self) -> bool:
        """Whether every block attends over the whole image at once, not over rows, columns or windows."""
        return not self.axial and (not self.window or set(range(self.depth)) <= set(self.global_blocks))

    @property
    def needs_positions(self) -> bool:
        """Whether blocks need token coordinates (relative or rotary positions, windows, positions in each block)."""
        return self.on_grid or self.position_at != "input" or self.attention != "plain"

    @property
    def features(self) -> int:
        """Channels of what the head reads."""
        return self.representation or (2 if self.pool == "distilled" else 1) * (self.neck or self.width)


@dataclass(frozen=True)
class BiTConfig:
    """A BiT ResNet-v2 by the units of its stages, (3, 4, 6, 3) for R50, and the `factor` of its name: R50x3 has 3.

    (3, 4, 23, 3) is R101, (3, 8, 36, 3) R152, (3, 24, 36, 3) R200. Any image size works: each stride rounds up. Raises
    UsageError where a number cannot be meant, or where the heads of axial attention do not divide the width.
    """

    family: Literal["bit"] = "bit"
    image: tuple[int, int] = (224, 224)
    channels: int = 3
    classes: int = 1000  # 0: no head, the pooled representation is the output
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    factor: int = 1
    width: int = 64  # of the root, before `factor`
    numerics: Numerics = "bit"
    axial: bool = False  # attention in rows and columns for every 3x3 of the units; `image` sizes its positions

    def __post_init__(self) -> None:
        if self.family != "bit":
            raise UsageError(f"family={self.family} is no BiT", "use family=bit")
        if min(*self.image, self.channels, self.width, self.factor) < 1 or self.classes < 0:
            raise UsageError("image, channels, width and factor must be at least 1, classes at least 0")
        if len(self.image) != 2:
            raise UsageError(f"a BiT takes images of two axes, not {len(self.image)}", "use image=(height, width)")
        if not self.blocks or min(self.blocks) < 1:
            raise UsageError(
                "blocks must name at least one stage, each of at least 1 unit", "R50 is blocks=(3, 4, 6, 3)"
            )
        known = get_args(Numerics)
        if self.numerics not in known:
            raise UsageError(
                f"unknown numerics {self.numerics}", nearest(self.numerics, known) or f"use one of {', '.join(known)}"
            )
        if self.axial and self.width * self.factor % 16:
            raise UsageError(
                f"width {self.width * self.factor} is not a multiple of 16, twice the 8 heads", "change width or axial"
            )

    kind: ClassVar[Literal["vit", "bit"]] = "bit"

    @property
    def depth(self) -> int:
        """Residual units of all stages."""
        return sum(self.blocks)

    def check_image(self, image: tuple[int, ...]) -> None:
        """Every image size is right: each stride rounds up."""

    @property
    def front(self) -> Literal["resnet"]:
        """What reads the image."""
        return "resnet"

    @property
    def position(self) -> Literal["none"]:
        """No position is added to anything."""
        return "none"

    @property
    def attention(self) -> Literal["none"]:
        """No attention over tokens."""
        return "none"

    @property
    def pool(self) -> Literal["mean"]:
        """The mean of the last map."""
        return "mean"

    @property
    def has_attention(self) -> bool:
        """No attention over tokens."""
        return False

    drops_patches = merges_tokens = sees_whole_image = has_attention

    @property
    def patch(self) -> tuple[int, int]:
        """Pixels to a place of the last map, per axis: (32, 32) for four stages."""
        return (4 * 2 ** (len(self.blocks) - 1),) * 2

    @property
    def grid(self) -> tuple[int, int]:
        """The last map at the native image size."""
        height, width = self.image
        return math.ceil(height / self.patch[0]), math.ceil(width / self.patch[1])

    @property
    def width_out(self) -> int:
        """Channels of the last map."""
        return 4 * self.width * self.factor * 2 ** (len(self.blocks) - 1)

    @property
    def prefix(self) -> int:
        """Tokens in front of the map: none."""
        return 0

    @property
    def dropout(self) -> float:
        """None, as in the paper."""
        return 0.0

    @property
    def drop_path(self) -> float:
        """None, as in the paper."""
        return 0.0


ModelConfig = ViTConfig | BiTConfig
C = TypeVar("C", bound=ModelConfig)


def replace_fields(config: C, changes: dict[str, Any]) -> C:
    """A copy with those of the changes that the config has fields for: dropout is not for a ResNet, which stays."""
    known = {field.name for field in fields(config)}
    return replace(config, **{name: value for name, value in changes.items() if name in known})
