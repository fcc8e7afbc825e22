"""The plain Vision Transformer (arXiv:2010.11929), and the fields that its kin share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from vitreous.errors import UsageError
from vitreous.models.configs.levels import Level, Leveled
from vitreous.nn.sizes import format_size, grid_of, nearby

#: how positions are resized to another grid: the rows of nn.grid.RESIZE
Resize = Literal["bicubic-antialias", "bicubic", "bicubic-offset", "bicubic-aligned", "bilinear", "zoom", "zoom-scipy"]


#: option that not all families have -> the family that has it
FAMILY_OF = {
    "stem": "hybrid",
    "axial": "axial",
    "neck": "sam",
    "conv_blocks": "sam",
    "position_grid": "sam",
    "first_norm": "clip",
    "arrangement": "video",
}
KINDS: dict[str, type[ViTConfig]] = {}  # family -> its config; `models.config` imports them all


def resolve(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a transformer with the `family` that has them all, and without those that are not used: what a plain
    ViT is with `first_norm=True`. Raises UsageError where no family has all of them."""
    used = {name: family for name, family in FAMILY_OF.items() if settings.get(name)}
    if settings.get("attention") == "decomposed":
        used["attention=decomposed"] = "sam"
    families = set(used.values())
    if len(families) > 1:
        raise UsageError(f"no model has {' and '.join(used)}", "use the options of one family")
    own = settings.get("family", "vit")
    if not isinstance(own, str) or own not in KINDS:
        return dict(settings)
    # a family stays what it is until what makes it one is taken away
    makes = {"hybrid": "stem", "axial": "axial", "clip": "first_norm"}.get(own)
    stays = settings.get("attention", "decomposed") == "decomposed" if own == "sam" else settings.get(makes or "", True)
    family = families.pop() if families else own if stays else "vit"
    if family == "sam" != own:
        settings = {"attention": "plain"} | dict(settings)  # which a SAM refuses: it has to be said
    known = {field.name for field in fields(KINDS[family])}
    return {name: value for name, value in settings.items() if name in known or name not in FAMILY_OF} | {
        "family": family
    }


class ByOptions(type):
    """A call makes the config of the family that has the options: `ViTConfig(stem=…)` is a `HybridConfig`."""

    def __call__(cls: Any, *arguments: Any, **settings: Any) -> Any:
        settings = resolve({"family": cls.family} | settings)
        return type.__call__(KINDS[settings["family"]], *arguments, **settings)


@dataclass(frozen=True)
class ViTConfig(Leveled, metaclass=ByOptions):
    """A Vision Transformer (arXiv:2010.11929, section 3.1 and Table 1) or one of its kin.

    `image` and `patch` hold one length per axis, in pixels; any number of axes. Raises UsageError where a patch does
    not divide the image, heads do not divide the width, or options ask for tokens or a grid that are not there.
    """

    # answers of a plain ViT to what other families have fields for
    kind: ClassVar[Literal["vit"]] = "vit"  # whose training recipes fit
    SETTABLE: ClassVar[dict[str, Any]] = {  # options that change the family
        "attention": Literal["plain", "relative", "rotary", "decomposed"],
        "axial": bool,
        "neck": int,
        "conv_blocks": tuple[int, ...],
        "position_grid": tuple[int, ...],
        "first_norm": bool,
        "arrangement": Literal["joint", "factorised-encoder", "factorised-attention", "factorised-dot-product"],
    }
    stem = None
    axial = first_norm = False
    neck = 0
    arrangement = ""
    conv_blocks: ClassVar[tuple[int, ...]] = ()
    position_grid: ClassVar[tuple[int, ...]] = ()

    family: Literal["vit"] = "vit"
    image: tuple[int, ...] = (224, 224)
    patch: tuple[int, ...] = (16, 16)  # pixels that a token covers, the stem's reduction included
    channels: int = 3
    classes: int = 1000  # 0: no head, the pooled representation is the output
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072  # of the MLP
    class_token: bool = True
    slots: int = 1  # of the learned positions, for the first prefix tokens: slot 0 of E_pos in Eq. 1
    registers: int = 0  # further prefix tokens, without positions (arXiv:2309.16588)
    # axes: learned 2-D, the channels shared out among rows and columns; factorised: added up (NaViT, arXiv:2307.06304)
    position: Literal["learned", "axes", "factorised", "sincos", "sincos-big-vision", "none"] = "learned"
    # added once, or before each block: its own or shared (Table 8)
    position_at: Literal["input", "each", "shared"] = "input"
    attention: Literal["plain", "relative", "rotary"] = "plain"  # what attention itself knows of places
    window: int = 0  # tokens along a side of what patches attend to (ViTDet), prefix tokens besides; 0: everything
    global_blocks: tuple[int, ...] = ()  # those that attend to everything all the same, counted from 0
    # distilled: class and distillation token, a head each
    pool: Literal["class", "mean", "attention", "distilled"] = "class"
    norm: Literal["tokens", "pooled", "none"] = "tokens"  # the last LayerNorm: on every token, or once, after pooling
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

    def __init_subclass__(cls) -> None:
        KINDS[cls.family] = cls

    def __post_init__(self) -> None:
        if min(self.channels, self.width, self.depth, self.heads, self.hidden) < 1:
            raise UsageError("channels, width, depth, heads and hidden must be at least 1")
        if min(self.classes, self.registers, self.slots) < 0:
            raise UsageError("classes, registers and slots must be at least 0")
        if self.width % self.heads:
            raise UsageError(f"width {self.width} is not a multiple of {self.heads} heads", "change heads or width")
        if self.pool in ("class", "distilled") and not self.class_token:
            raise UsageError(
                f"pool={self.pool} needs a class token", "use pool=mean or pool=attention, or class_token=True"
            )
        self.check_windows()
        self.check_image(self.image)
        if self.on_grid and (self.prefix or len(self.image) != 2):
            raise UsageError(
                "axial and windowed blocks take a grid of patches without prefix tokens",
                "use class_token=False, pool=mean",
            )
        if self.position_at != "input" and (
            self.on_grid or self.attention != "plain" or self.position == "none" or self.window
        ):
            raise UsageError(
                "positions before each block need a position, attention=plain and no axial blocks or windows",
                "use position_at=input",
            )

    def check_windows(self) -> None:
        """Raise UsageError for windows that cannot be."""
        wrong = sorted(set(self.global_blocks) - set(range(self.depth)))
        if self.window < 0 or wrong:
            raise UsageError(
                f"window={self.window} with global_blocks={self.global_blocks} cannot be",
                f"a window is at least 1 token, or 0 for none; blocks are from 0 to {self.depth - 1}",
            )
        if self.window and (self.attention not in ("plain", "decomposed") or self.axial):
            raise UsageError("windows go with attention=plain", "use window=0, or attention=plain and axial=False")

    @property
    def windowed_blocks(self) -> tuple[int, ...]:
        """The blocks whose patches attend within windows."""
        return tuple(i for i in range(self.depth) if self.window and i not in self.global_blocks)

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens per axis at the native image size."""
        return grid_of(self.image, self.patch)

    @property
    def table_grid(self) -> tuple[int, ...]:
        """Places per axis of the table of positions, which is read at whatever grid arrives."""
        return self.position_grid or self.grid

    @property
    def prefix(self) -> int:
        """Tokens in front of the patches: class token, distillation token, registers."""
        return int(self.class_token) + (self.pool == "distilled") + self.registers

    @property
    def pooled_prefix(self) -> int | None:
        """Tokens in front that are all that is pooled; None where patches are pooled too."""
        return {"class": 1, "distilled": 2}.get(self.pool)

    @property
    def positioned(self) -> int:
        """Prefix tokens with a learned position of their own: at most `slots`, and none where there is no class
        token."""
        learned = self.position in ("learned", "axes", "factorised", "space-time")
        return min(self.slots, self.prefix) if self.class_token and learned else 0

    @property
    def on_grid(self) -> bool:
        """Whether the blocks take tokens as a grid, (B, *grid, D)."""
        return False

    def check_image(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image size (pixels per axis) that the patch does not divide, naming sizes that
        would do."""
        try:
            grid_of(image, self.patch)
        except ValueError as error:
            ways = [f"--image-size {format_size(nearby(image, self.patch))}"]
            dividing = [p for p in range(2, min(image) + 1) if all(i % p == 0 for i in image)]
            patch = min(dividing, key=lambda p: abs(p - max(self.patch)), default=1)
            if self.front == "patches":
                ways.append(f"--patch-size {patch}")
            raise UsageError(str(error), "use " + ", or ".join(ways)) from None

    def patch_at(self, block: int) -> tuple[int, ...]:
        """Pixels to a token, per axis, in a block: the same in all."""
        return self.patch

    @property
    def levels(self) -> tuple[Level, ...]:
        """The maps that `features_at` gives: the tokens after the last block."""
        return (Level(self.patch, self.width),)

    @property
    def front(self) -> Literal["patches", "conv", "resnet"]:
        """What reads the image: a projection of its patches, a few convolutions, or a ResNet."""
        return "patches"

    @property
    def cell(self) -> tuple[int, ...]:
        """What a token is cut from: pixels, or places of a stem's map, along each axis."""
        return self.patch

    @property
    def width_out(self) -> int:
        """Channels of a token after the encoder."""
        return self.width

    @property
    def drops_patches(self) -> bool:
        """Whether patches may be left out in training: every block attends to all tokens there are."""
        return not self.on_grid and not self.window

    @property
    def merges_tokens(self) -> bool:
        """Whether tokens may be merged in inference (`nn.merge`)."""
        return not self.needs_positions and self.pool != "attention"

    @property
    def packs_sizes(self) -> bool:
        """Whether images of many sizes may lie in one row of tokens (`models.packed`): positions are added at the
        input, and every block attends to all tokens of an image."""
        return not self.needs_positions

    @property
    def has_attention(self) -> bool:
        """Whether blocks attend from token to token."""
        return True

    @property
    def sees_whole_image(self) -> bool:
        """Whether every block's attention is over the whole image at once, not over rows, columns or windows apart;
        windows beside prefix tokens are, with zeros."""
        return True

    @property
    def needs_positions(self) -> bool:
        """Whether blocks need token coordinates (relative or rotary positions, windows, positions in each block)."""
        return self.on_grid or self.position_at != "input" or self.attention != "plain" or self.window > 0

    @property
    def features(self) -> int:
        """Channels of what the head reads."""
        return self.representation or (2 if self.pool == "distilled" else 1) * self.width_out


KINDS["vit"] = ViTConfig


@dataclass(frozen=True)
class AxialConfig(ViTConfig):
    """A ViT whose blocks attend along the rows of the grid, then along its columns. Raises UsageError for prefix
    tokens, other than two axes, and another attention than the plain one."""

    family: Literal["axial"] = "axial"  # pyright: ignore[reportIncompatibleVariableOverride]
    axial = True

    def __post_init__(self) -> None:
        if self.attention != "plain":
            raise UsageError("axial goes with attention=plain")
        super().__post_init__()

    @property
    def on_grid(self) -> bool:
        """The blocks take tokens as a grid."""
        return True

    @property
    def sees_whole_image(self) -> bool:
        """A block sees rows, then columns."""
        return False


@dataclass(frozen=True)
class CLIPConfig(ViTConfig):
    """A ViT with a LayerNorm before the first block."""

    family: Literal["clip"] = "clip"  # pyright: ignore[reportIncompatibleVariableOverride]
    first_norm = True


@dataclass(frozen=True)
class SAMConfig(ViTConfig):
    """A ViT on a grid with decomposed relative positions, windows in most blocks, and a neck of convolutions in SAM.

    Windows are filled up with zeros, which are attended to. What crosses windows are the `global_blocks`, or a
    bottleneck of convolutions after each of the `conv_blocks` (ViTDet's two propagation strategies, section 3).
    Positions are a table of `position_grid`, that of pre-training in ViTDet. Raises UsageError for prefix tokens, other
    than two axes, and blocks that are not there.
    """

    family: Literal["sam"] = "sam"  # pyright: ignore[reportIncompatibleVariableOverride]
    attention: Literal["decomposed"] = "decomposed"  # pyright: ignore[reportIncompatibleVariableOverride]
    neck: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]  # channels of the convolutions after the last block; 0: none
    conv_blocks: tuple[int, ...] = ()  # pyright: ignore[reportIncompatibleVariableOverride]  # counted from 0
    position_grid: tuple[int, ...] = ()  # pyright: ignore[reportIncompatibleVariableOverride]  # (): the native grid

    def __post_init__(self) -> None:
        if self.attention != "decomposed":
            raise UsageError("a neck, conv_blocks and position_grid go with attention=decomposed")
        super().__post_init__()
        if self.neck < 0:
            raise UsageError("neck must be at least 0")
        if not set(self.conv_blocks) <= set(range(self.depth)):
            raise UsageError(f"conv_blocks={self.conv_blocks} cannot be", f"blocks are from 0 to {self.depth - 1}")
        if self.position_grid and (len(self.position_grid) != 2 or min(self.position_grid) < 1):
            raise UsageError(f"position_grid={self.position_grid} is no grid", "name rows and columns: 14 14")

    @property
    def on_grid(self) -> bool:
        """The blocks take tokens as a grid."""
        return True

    @property
    def sees_whole_image(self) -> bool:
        """Whether no block is confined to windows."""
        return not self.windowed_blocks

    @property
    def width_out(self) -> int:
        """Channels of a token after the neck."""
        return self.neck or self.width
