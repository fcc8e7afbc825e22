"""The plain Vision Transformer (arXiv:2010.11929), and the fields that its kin share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal

from vitreous.config import change_fields, nest_paths
from vitreous.errors import UsageError, suggest_nearest
from vitreous.models.configs.base import ExportRules, ImageSize, Level
from vitreous.models.configs.groups import (
    AttentionConfig,
    HeadConfig,
    MlpConfig,
    NormConfig,
    PositionConfig,
    RegularizationConfig,
    check_groups,
)
from vitreous.models.configs.vit_cost import ViTCost
from vitreous.models.families import FAMILIES, config_type
from vitreous.models.presets import PRESET_PATCHES, SIZE_WORDS, VIT_SIZES, VIT_VARIANTS
from vitreous.nn.sizes import format_size, nearest_divisible_size, patch_grid

#: option that not all families have -> the family that has it
FAMILY_BY_OPTION = {
    "stem": "hybrid",
    "axial": "axial",
    "neck": "sam",
    "conv_blocks": "sam",
    "position_grid": "sam",
    "first_norm": "clip",
    "arrangement": "video",
}
#: what tells families apart; everything else (classes, image, resizing, regularisation) is the user's
DEFINING_FIELDS = (
    *("axial", "attention.kind", "attention.window", "neck", "first_norm", "registers", "mlp.kind"),
    "norm.layer_scale",
)
#: fields that names and shapes of tensors do not depend on
NON_STRUCTURAL_FIELDS = (
    *("regularization.dropout", "regularization.drop_path", "regularization.drop_path_rises", "positions.resize"),
    *("mlp.gelu", "norm.eps", "family"),
)
#: kinds of positions that only a video model has
OF_CLIPS = ("space-time", "sinusoid")
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
        *(f"ViT-{size}/{patch}" for size in VIT_SIZES if size not in ("mu", "e") for patch in PRESET_PATCHES),
        *(
            f"{prefix}-{name}"
            for prefix in ("DeiT", "DeiT-III", "DINO", "DINOv2", "MAE")
            for name in VIT_VARIANTS[prefix]
        ),
    )
    recipe_family: ClassVar[str] = "vit"
    SETTABLE: ClassVar[dict[str, Any]] = {  # options that change the family
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
    class_token: bool = True
    registers: int = 0  # further prefix tokens, without positions (arXiv:2309.16588)
    # distilled: class and distillation token, a head each
    pool: Literal["class", "mean", "attention", "distilled"] = "class"
    projection_bias: bool = True  # of the patch projection
    positions: PositionConfig = PositionConfig()
    attention: AttentionConfig = AttentionConfig()
    mlp: MlpConfig = MlpConfig()
    norm: NormConfig = NormConfig()
    head: HeadConfig = HeadConfig()
    regularization: RegularizationConfig = RegularizationConfig()

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> ViTConfig | None:
        """A row of `VIT_VARIANTS`, `ViT-B/16`, `B/16` or `ViT-128x6/4`. Raises UsageError for a patch of less than a
        pixel."""
        return parse_variant(name, image) or (
            change_config(parse_plain_vit(name), {}, image) if is_plain_vit_name(name) else None
        )

    def name(self) -> str:
        """`ViT-B/16`, `ViT-128x6/4` where no size fits, or the row of `VIT_VARIANTS` that has what the config has."""
        shape = (self.width, self.depth, self.heads, self.mlp.hidden, self.patch)
        if family_signature(self) != (*shape, *(attrgetter(path)(ViTConfig) for path in DEFINING_FIELDS), False):
            for prefix, members in VIT_VARIANTS.items():
                for member in members:
                    if family_signature(parse_variant(f"{prefix}-{member}", None)) == family_signature(self):
                        return f"{prefix}-{member}"
        return f"ViT-{self.size_name()}"

    def size_name(self) -> str:
        """`B/16`, or `128x6/4`."""
        shape = (self.width, self.depth, self.heads, self.mlp.hidden)
        size = next((key for key, row in VIT_SIZES.items() if row == shape), f"{self.width}x{self.depth}")
        patch = format_size(self.patch) if len(self.patch) == 2 else "x".join(map(str, self.patch))
        return f"{size}/{patch}"

    def with_options(self, **changes: Any) -> Any:
        """A copy with these options, of the family that has them all. A dict changes the fields of a group that it
        names, and leaves the others: `with_options(depth=6, attention={"window": 7})`. Raises UsageError where no
        family has all of them, and for an unknown field of a group."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return transformer_config(**own | {name: fill_group(own.get(name), name, changes[name]) for name in changes})

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The fields of a ViT, and the options of its kin."""
        return tuple(dict.fromkeys((*super().option_names(), *FAMILY_BY_OPTION)))

    def __post_init__(self) -> None:
        check_groups(self)
        self.check_attention()
        if self.positions.kind in OF_CLIPS and not self.has_time_axis:
            raise UsageError(f"positions.kind={self.positions.kind} is for clips", "use another, or a video model")
        if min(self.channels, self.width, self.depth, self.heads, self.mlp.hidden) < 1:
            raise UsageError("channels, width, depth, heads and mlp.hidden must be at least 1")
        if min(self.classes, self.registers, self.positions.slots) < 0:
            raise UsageError("classes, registers and positions.slots must be at least 0")
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
        placed, attention = self.positions, self.attention
        if placed.at != "input" and (
            self.on_grid or attention.kind != "plain" or placed.kind == "none" or attention.window
        ):
            raise UsageError(
                "positions before each block need a position, attention.kind=plain and no axial blocks or windows",
                "use positions.at=input",
            )

    def check_attention(self) -> None:
        """Raise UsageError for an attention that other families have."""
        if self.attention.kind not in ("plain", "relative", "rotary"):
            hint = "transformer_config(...) makes the config of the family that has it"
            raise UsageError(f"attention.kind={self.attention.kind} is not for {type(self).__name__}", hint)

    def check_windows(self) -> None:
        """Raise UsageError for windows that cannot be."""
        window, blocks = self.attention.window, self.attention.global_blocks
        if window < 0 or not set(blocks) <= set(range(self.depth)):
            raise UsageError(
                f"attention.window={window} with attention.global_blocks={blocks} cannot be",
                f"a window is at least 1 token, or 0 for none; blocks are from 0 to {self.depth - 1}",
            )
        if window and (self.attention.kind not in ("plain", "decomposed") or self.axial):
            hint = "use attention.window=0, or attention.kind=plain and axial=False"
            raise UsageError("windows go with attention.kind=plain", hint)

    @property
    def windowed_blocks(self) -> tuple[int, ...]:
        """The blocks whose patches attend within windows."""
        attention = self.attention
        return tuple(i for i in range(self.depth) if attention.window and i not in attention.global_blocks)

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens per axis at the native image size."""
        return patch_grid(self.image, self.patch)

    @property
    def prefix(self) -> int:
        """Tokens in front of the patches: class token, distillation token, registers."""
        return int(self.class_token) + (self.pool == "distilled") + self.registers

    @property
    def pooled_prefix(self) -> int | None:
        """Tokens in front that are all that is pooled; None where patches are pooled too."""
        return {"class": 1, "distilled": 2}.get(self.pool)

    @property
    def prefix_position_count(self) -> int:
        """Prefix tokens with a learned position of their own: at most `positions.slots`, and none where there is no
        class token."""
        learned = self.positions.kind in ("learned", "axes", "factorised", "space-time")
        return min(self.positions.slots, self.prefix) if self.class_token and learned else 0

    def check_image(self, image: tuple[int, ...]) -> None:
        """Raise UsageError for an image size (pixels per axis) that the patch does not divide, naming sizes that
        would do."""
        try:
            patch_grid(image, self.patch)
        except ValueError as error:
            ways = [f"--image-size {format_size(nearest_divisible_size(image, self.patch))}"]
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
        return not self.on_grid and not self.attention.window

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
        attention = self.attention
        return self.on_grid or self.positions.at != "input" or attention.kind != "plain" or attention.window > 0

    @property
    def features(self) -> int:
        """Channels of what the head reads."""
        return self.head.representation or (2 if self.pool == "distilled" else 1) * self.width_out

    def export_rules(self) -> ExportRules:
        """Images of two axes and any size, behind patches or convolutions."""
        reason = "a ResNet for a stem" if self.front == "resnet" else ""
        if len(self.image) != 2:
            reason = f"images of {len(self.image)} axes"
        elif self.attention.kind == "relative":
            reason = "relative positions"
        elif self.on_grid:
            reason = "windows, axial blocks or a neck"
        windows = bool(self.attention.window)
        return replace(super().export_rules(), fixed_size=reason, patch_multiples=True, drops_guards=windows)

    def head_count_field(self) -> dict[str, Any]:
        """The number of heads, which no tensor tells."""
        return {"heads": self.heads}

    def structure(self) -> dict[str, Any]:
        """What the model's tensors depend on."""
        values = {
            path: attrgetter(path)(self) for path in ViTConfig.option_paths() if path not in NON_STRUCTURAL_FIELDS
        }
        values |= {"position_grid": self.table_grid, "positions.slots": self.prefix_position_count}
        return values | {"norm.layer_scale": self.norm.layer_scale is None}

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
        if self.positions.kind != "sincos":
            return self
        return self.with_options(positions={"kind": "learned", "slots": int(self.class_token)})


def transformer_config(**settings: Any) -> Any:
    """The config of the family that has these options: with `stem=...` it is a `HybridConfig`, without any of them a
    `ViTConfig`. A dict sets the fields of a group that it names: `attention={"window": 7}`. Raises UsageError where no
    family has all of them, and for an unknown field of a group."""
    settings = resolve_family({"family": "vit"} | settings)
    kind = config_type(settings["family"])
    return kind(**{name: fill_group(getattr(kind, name, None), name, value) for name, value in settings.items()})


def fill_group(group: Any, name: str, value: Any) -> Any:
    """The value of the field of this name: a group with the fields of a dict, or the value as it is."""
    return change_fields(group, value, f"{name}.") if isinstance(value, Mapping) and is_dataclass(group) else value


def kind_of_attention(settings: Mapping[str, Any]) -> str | None:
    """The `attention.kind` of options; None where they do not set it."""
    attention = settings.get("attention") or {}
    return attention.get("kind") if isinstance(attention, Mapping) else attention.kind


def resolve_family(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a transformer with the `family` that has them all, and without those that are not used: what a plain
    ViT is with `first_norm=True`. Raises UsageError where no family has all of them."""
    used = {name: family for name, family in FAMILY_BY_OPTION.items() if settings.get(name)}
    if kind_of_attention(settings) == "decomposed":
        used["attention.kind=decomposed"] = "sam"
    families = set(used.values())
    if len(families) > 1:
        raise UsageError(f"no model has {' and '.join(used)}", "use the options of one family")
    own = settings["family"]
    if own not in FAMILIES:
        raise UsageError(f"there is no family {own}", suggest_nearest(str(own), FAMILIES) or "leave it out")
    # a family stays what it is until what makes it one is taken away
    makes = {"hybrid": "stem", "axial": "axial", "clip": "first_norm"}.get(own)
    stays = kind_of_attention(settings) in (None, "decomposed") if own == "sam" else settings.get(makes or "", True)
    family = families.pop() if families else own if stays else "vit"
    if family == "sam" != own and kind_of_attention(settings) is None:  # which a SAM refuses: it has to be said
        settings = dict(settings) | {"attention": {"kind": "plain"} | settings.get("attention", {})}
    known = {field.name for field in fields(config_type(family))}
    return {name: value for name, value in settings.items() if name in known or name not in FAMILY_BY_OPTION} | {
        "family": family
    }


def parse_variant(name: str, image: ImageSize) -> ViTConfig | None:
    """A row of `VIT_VARIANTS`, `DeiT-S/16-distilled`."""
    for prefix, members in VIT_VARIANTS.items():
        row = members.get(name.removeprefix(f"{prefix}-"))
        if row is not None and name.startswith(f"{prefix}-"):
            return change_config(parse_plain_vit(name.removeprefix(f"{prefix}-").partition("-")[0]), row, image)
    return None


def change_config(config: ViTConfig, changes: dict[str, Any], image: tuple[int, ...] | None) -> ViTConfig:
    """A config with changes by their dotted paths, at an image size if one is said."""
    patch = changes.get("patch", config.patch)
    size = (
        image or changes.get("image") or (config.image if not changes else nearest_divisible_size(config.image, patch))
    )
    return config.with_options(**nest_paths(changes | {"image": size}))


def is_plain_vit_name(name: str) -> bool:
    """Whether a name is that of a plain ViT of a known size, or of a width and a depth."""
    match = _CANONICAL.fullmatch(name) or _TIMM.fullmatch(name)
    return match is not None and (find_vit_size(match["size"]) is not None or match["size"][0].isdigit())


def find_vit_size(size: str) -> tuple[int, int, int, int] | None:
    """Width, depth, heads and hidden channels of a size by its name; None for others. Only g and G differ by case."""
    sizes = {key.lower(): key for key in VIT_SIZES if key not in ("g", "G")} | SIZE_WORDS
    return VIT_SIZES.get(size if size in VIT_SIZES else sizes.get(size.lower(), ""))


def parse_plain_vit(name: str, pixels: int | None = None) -> ViTConfig:
    """The config of a plain ViT; `pixels` that a token covers, where the name's number is not that. Raises UsageError
    for an unknown name, and a patch of less than a pixel."""
    match = _CANONICAL.fullmatch(name) or _TIMM.fullmatch(name)
    if match is None or not is_plain_vit_name(name):
        raise UsageError(f"unknown model {name}", "`vitreous models` lists them")
    if (sizes := find_vit_size(match["size"])) is not None:
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
        image=(image, image)
        if image
        else nearest_divisible_size((224, 224) if len(patch) == 2 else (64, 64, 64), patch),
        patch=patch,
        width=width,
        depth=depth,
        heads=heads,
        mlp=MlpConfig(hidden),
    )


def family_signature(config: Any) -> tuple[Any, ...]:
    """The values that tell families apart."""
    shape = (config.width, config.depth, config.heads, config.mlp.hidden, config.patch)
    return (*shape, *(attrgetter(path)(config) for path in DEFINING_FIELDS), config.pool == "distilled")
