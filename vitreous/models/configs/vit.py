"""The plain Vision Transformer (arXiv:2010.11929), and the fields that its kin share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from vitreous.errors import UsageError, nearest
from vitreous.models.configs.base import ExportRules, Image, Level
from vitreous.models.configs.vit_cost import ViTCost
from vitreous.models.families import FAMILIES, config_type
from vitreous.models.presets import KIN, PATCHES, SIZES, WORDS
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
#: what tells families apart; everything else (classes, image, resizing, regularisation) is the user's
DEFINING = ("axial", "attention", "window", "neck", "first_norm", "registers", "mlp", "layer_scale")
#: fields that names and shapes of tensors do not depend on
UNTOLD = ("dropout", "drop_path", "drop_path_rises", "resize", "gelu", "eps", "family")
_CANONICAL = re.compile(r"(?:vit-)?(?P<size>[a-z][a-z0-9]*|\d+x\d+)/(?P<patch>\d+(?:x\d+){0,2})", re.IGNORECASE)
_TIMM = re.compile(
    r"(?:google/)?vit[-_](?P<size>[a-z]+)[-_](?:patch)?(?P<patch>\d+)(?:[-_](?P<image>\d+))?(?:[-_]in21k)?(?:\..*)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ViTConfig(ViTCost):
    """A Vision Transformer (arXiv:2010.11929, section 3.1 and Table 1) or one of its kin.

    `image` and `patch` hold one length per axis, in pixels; any number of axes. Raises UsageError where a patch does
    not divide the image, heads do not divide the width, or options ask for tokens or a grid that are not there.
    """

    module: ClassVar[str] = "vitreous.models.vit:ViT"
    preset_names: ClassVar[tuple[str, ...]] = (
        *(f"ViT-{size}/{patch}" for size in SIZES if size not in ("mu", "e") for patch in PATCHES),
        *(f"{prefix}-{name}" for prefix in ("DeiT", "DeiT-III", "DINO", "DINOv2", "MAE") for name in KIN[prefix]),
    )
    recipe_family: ClassVar[str] = "vit"
    SETTABLE: ClassVar[dict[str, Any]] = {  # options that change the family
        "attention": Literal["plain", "relative", "rotary", "decomposed"],
        "axial": bool,
        "neck": int,
        "conv_blocks": tuple[int, ...],
        "position_grid": tuple[int, ...],
        "first_norm": bool,
        "arrangement": Literal["joint", "factorised-encoder", "factorised-attention", "factorised-dot-product"],
    }
    # values of a plain ViT where kin have fields
    stem = None
    axial = first_norm = False
    neck = 0
    conv_blocks: ClassVar[tuple[int, ...]] = ()
    has_attention: ClassVar[bool] = True
    sees_whole_image: ClassVar[bool] = True
    foreign_formats: ClassVar[bool] = True

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

    @classmethod
    def parse_name(cls, name: str, image: Image) -> ViTConfig | None:
        """A row of `KIN`, `ViT-B/16`, `B/16` or `ViT-128x6/4`. Raises UsageError for a patch of less than a pixel."""
        return parse_kin(name, image) or (with_changes(plain_config(name), {}, image) if is_plain(name) else None)

    def name(self) -> str:
        """`ViT-B/16`, `ViT-128x6/4` where no size fits, or the row of `KIN` that has what the config has."""
        shape = (self.width, self.depth, self.heads, self.hidden, self.patch)
        if defining_values(self) != (*shape, *(getattr(ViTConfig, name) for name in DEFINING), False):
            for prefix, members in KIN.items():
                for member in members:
                    if defining_values(parse_kin(f"{prefix}-{member}", None)) == defining_values(self):
                        return f"{prefix}-{member}"
        return f"ViT-{self.size_name()}"

    def size_name(self) -> str:
        """`B/16`, or `128x6/4`."""
        shape = (self.width, self.depth, self.heads, self.hidden)
        size = next((key for key, row in SIZES.items() if row == shape), f"{self.width}x{self.depth}")
        patch = format_size(self.patch) if len(self.patch) == 2 else "x".join(map(str, self.patch))
        return f"{size}/{patch}"

    def with_options(self, **changes: Any) -> Any:
        """A copy with these options, of the family that has them all. Raises UsageError where no family has."""
        return transformer_config(**{field.name: getattr(self, field.name) for field in fields(self)} | changes)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The fields of a ViT, and the options of its kin."""
        return tuple(dict.fromkeys((*super().option_names(), *FAMILY_OF)))

    def __post_init__(self) -> None:
        self.check_attention()
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

    def check_attention(self) -> None:
        """Raise UsageError for an attention that other families have."""
        if self.attention not in ("plain", "relative", "rotary"):
            hint = "transformer_config(...) makes the config of the family that has it"
            raise UsageError(f"attention={self.attention} is not for {type(self).__name__}", hint)

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

    @property
    def levels(self) -> tuple[Level, ...]:
        """The maps that `features_at` gives: the tokens after the last block."""
        return (Level(self.patch, self.width),)

    @property
    def any_axes(self) -> bool:
        """Whether images may have any number of axes."""
        return self.front == "patches" and not self.on_grid

    @property
    def front(self) -> Literal["patches", "conv", "resnet"]:
        """What reads the image: a projection of its patches, a few convolutions, or a ResNet."""
        return "patches"

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
    def needs_positions(self) -> bool:
        """Whether blocks need token coordinates (relative or rotary positions, windows, positions in each block)."""
        return self.on_grid or self.position_at != "input" or self.attention != "plain" or self.window > 0

    @property
    def features(self) -> int:
        """Channels of what the head reads."""
        return self.representation or (2 if self.pool == "distilled" else 1) * self.width_out

    def export_rules(self) -> ExportRules:
        """Images of two axes and any size, behind patches or convolutions."""
        reason = "a ResNet for a stem" if self.front == "resnet" else ""
        if len(self.image) != 2:
            reason = f"images of {len(self.image)} axes"
        elif self.attention == "relative":
            reason = "relative positions"
        elif self.on_grid:
            reason = "windows, axial blocks or a neck"
        return replace(super().export_rules(), fixed_size=reason, patch_multiples=True, drops_guards=bool(self.window))

    def head_count(self) -> dict[str, Any]:
        """The number of heads, which no tensor tells."""
        return {"heads": self.heads}

    def structure(self) -> dict[str, Any]:
        """What the model's tensors depend on."""
        values = {name: getattr(self, name) for name in ViTConfig.option_names() if name not in UNTOLD}
        values |= {"position_grid": self.table_grid, "slots": self.positioned, "layer_scale": self.layer_scale is None}
        return values

    def of_clips(self, frames: int) -> Any:
        """The same with a time axis and joint attention; None for kin, whose parts have none."""
        if type(self) is not ViTConfig:
            return None
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        clip = {"family": "video", "image": (frames, *self.image), "patch": (frames, *self.patch)}
        return config_type("video")(**own | clip)

    def with_position_table(self) -> ViTConfig:
        """The config with learned positions where it has MAE's fixed ones, which others' files store: the class token
        has a row of zeros."""
        if self.position != "sincos":
            return self
        return replace(self, position="learned", slots=int(self.class_token))


def transformer_config(**settings: Any) -> Any:
    """The config of the family that has these options: with `stem=...` it is a `HybridConfig`, without any of them a
    `ViTConfig`. Raises UsageError where no family has all of them."""
    settings = resolve_family({"family": "vit"} | settings)
    return config_type(settings["family"])(**settings)


def resolve_family(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a transformer with the `family` that has them all, and without those that are not used: what a plain
    ViT is with `first_norm=True`. Raises UsageError where no family has all of them."""
    used = {name: family for name, family in FAMILY_OF.items() if settings.get(name)}
    if settings.get("attention") == "decomposed":
        used["attention=decomposed"] = "sam"
    families = set(used.values())
    if len(families) > 1:
        raise UsageError(f"no model has {' and '.join(used)}", "use the options of one family")
    own = settings["family"]
    if own not in FAMILIES:
        raise UsageError(f"there is no family {own}", nearest(str(own), FAMILIES) or "leave it out")
    # a family stays what it is until what makes it one is taken away
    makes = {"hybrid": "stem", "axial": "axial", "clip": "first_norm"}.get(own)
    stays = settings.get("attention", "decomposed") == "decomposed" if own == "sam" else settings.get(makes or "", True)
    family = families.pop() if families else own if stays else "vit"
    if family == "sam" != own:
        settings = {"attention": "plain"} | dict(settings)  # which a SAM refuses: it has to be said
    known = {field.name for field in fields(config_type(family))}
    return {name: value for name, value in settings.items() if name in known or name not in FAMILY_OF} | {
        "family": family
    }


def parse_kin(name: str, image: Image) -> ViTConfig | None:
    """A row of `KIN`, `DeiT-S/16-distilled`."""
    for prefix, members in KIN.items():
        row = members.get(name.removeprefix(f"{prefix}-"))
        if row is not None and name.startswith(f"{prefix}-"):
            return with_changes(plain_config(name.removeprefix(f"{prefix}-").partition("-")[0]), row, image)
    return None


def with_changes(config: ViTConfig, changes: dict[str, Any], image: tuple[int, ...] | None) -> ViTConfig:
    """A config with changes, at an image size if one is said."""
    patch = changes.get("patch", config.patch)
    size = image or changes.get("image") or (config.image if not changes else nearby(config.image, patch))
    return config.with_options(**(changes | {"image": size}))


def is_plain(name: str) -> bool:
    """Whether a name is that of a plain ViT of a known size, or of a width and a depth."""
    match = _CANONICAL.fullmatch(name) or _TIMM.fullmatch(name)
    return match is not None and (sizes_of(match["size"]) is not None or match["size"][0].isdigit())


def sizes_of(size: str) -> tuple[int, int, int, int] | None:
    """Width, depth, heads and hidden channels of a size by its name; None for others. Only g and G differ by case."""
    sizes = {key.lower(): key for key in SIZES if key not in ("g", "G")} | WORDS
    return SIZES.get(size if size in SIZES else sizes.get(size.lower(), ""))


def plain_config(name: str, pixels: int | None = None) -> ViTConfig:
    """The config of a plain ViT; `pixels` that a token covers, where the name's number is not that. Raises UsageError
    for an unknown name, and a patch of less than a pixel."""
    match = _CANONICAL.fullmatch(name) or _TIMM.fullmatch(name)
    if match is None or not is_plain(name):
        raise UsageError(f"unknown model {name}", "`vitreous models` lists them")
    if (sizes := sizes_of(match["size"])) is not None:
        width, depth, heads, hidden = sizes
    else:
        width, depth = map(int, match["size"].split("x"))
        heads, hidden = max(1, width // 32), 4 * width
    patch = (pixels,) if pixels else tuple(map(int, match["patch"].lower().split("x")))
    patch = patch * 2 if len(patch) == 1 else patch
    if min(patch) < 1:
        raise UsageError(f"unknown model {name}", "a patch is at least one pixel")
    image = int(match.groupdict().get("image") or 0)
    return ViTConfig(
        image=(image, image) if image else nearby((224, 224) if len(patch) == 2 else (64, 64, 64), patch),
        patch=patch,
        width=width,
        depth=depth,
        heads=heads,
        hidden=hidden,
    )


def defining_values(config: Any) -> tuple[Any, ...]:
    """The values that tell families apart."""
    shape = (config.width, config.depth, config.heads, config.hidden, config.patch)
    return (*shape, *(getattr(config, name) for name in DEFINING), config.pool == "distilled")
