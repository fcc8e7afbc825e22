"""Configs of the plain Vision Transformer (arXiv:2010.11929), and the fields that related families share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal

from vitreous.config import change_fields, is_mapping, nest_paths
from vitreous.errors import UsageError, suggest_nearest
from vitreous.models.configs.base import ExportRules, ImageSize, Level
from vitreous.models.configs.groups import (
    AttentionConfig,
    AttentionGroup,
    HeadConfig,
    MlpConfig,
    NormConfig,
    PositionConfig,
    RegularizationConfig,
    RotaryConfig,
    check_groups,
    check_rotary_options,
    check_window_options,
)
from vitreous.models.configs.vit_cost import ViTCost
from vitreous.models.families import FAMILIES, config_type
from vitreous.models.presets import PRESET_PATCHES, SIZE_WORDS, VIT_SIZES, VIT_VARIANTS
from vitreous.nn.sizes import format_size, nearest_divisible_size, patch_grid

#: option that only one family has -> the family
FAMILY_BY_OPTION = {
    "stem": "hybrid",
    "axial": "axial",
    "neck": "sam",
    "conv_blocks": "sam",
    "position_grid": "sam",
    "first_norm": "clip",
    "arrangement": "video",
}
#: families with the fields of a `ViTConfig`, one per subclass
ViTFamily = Literal["vit", "hybrid", "clip", "sam", "axial", "video"]
#: fields that identify a named variant; users may change the others (classes, image, resizing, regularisation)
DEFINING_FIELDS = (
    *("axial", "attention.kind", "attention.window", "attention.qk_norm", "attention.inner_norm"),
    *("rotary.coordinates", "neck", "first_norm"),
    *("registers", "mlp.kind", "mlp.norm", "norm.layer_scale", "norm.kind", "norm.final"),
)
#: prefixes of variants with a separate family, and without
OTHER_FAMILIES = ("PE-Core", "PE-Spatial", "CLIP", "SAM", "ViTDet", "Axial-ViT")
PLAIN_VARIANTS = tuple(prefix for prefix in VIT_VARIANTS if prefix not in OTHER_FAMILIES)
#: fields that do not affect the names and shapes of tensors
NON_STRUCTURAL_FIELDS = (
    *("regularization.dropout", "regularization.drop_path", "regularization.drop_path_rises", "positions.resize"),
    *("mlp.gelu", "norm.eps", "family", *(f"rotary.{field.name}" for field in fields(RotaryConfig))),
)
#: values of `positions.kind` that only video models support
OF_CLIPS = ("space-time", "sinusoid")
_CANONICAL = re.compile(r"(?:vit-)?(?P<size>[a-z][a-z0-9]*|\d+x\d+)/(?P<patch>\d+(?:x\d+){0,2})", re.IGNORECASE)
_TIMM = re.compile(
    r"(?:google/)?vit[-_](?P<size>[a-z]+)[-_](?:patch)?(?P<patch>\d+)(?:[-_](?P<image>\d+))?(?:[-_]in21k)?(?:\..*)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ViTConfig(ViTCost):
    """A Vision Transformer (arXiv:2010.11929, section 3.1 and Table 1); base class of related families.

    `image` and `patch` are one length per axis, in pixels; any number of axes. Raises UsageError if the image is not
    divisible by the patch or the width by the heads, or if options require tokens or a grid that the model does not
    have.
    """

    module: ClassVar[str] = "vitreous.models.vit:ViT"
    preset_names: ClassVar[tuple[str, ...]] = (
        *(f"ViT-{size}/{patch}" for size in VIT_SIZES if size not in ("mu", "e", "gopt") for patch in PRESET_PATCHES),
        *(f"{prefix}-{name}" for prefix in PLAIN_VARIANTS for name in VIT_VARIANTS[prefix]),
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
    # values of a plain ViT for fields of related families
    stem = None
    axial = first_norm = False
    neck = 0
    conv_blocks = tuple[int, ...]()
    has_attention = sees_whole_image = foreign_formats = True

    family: ViTFamily = "vit"
    image: tuple[int, ...] = (224, 224)
    patch: tuple[int, ...] = (16, 16)  # pixels per token, including the stem's reduction
    channels: int = 3
    classes: int = 1000  # 0: no head; the model outputs pooled features
    width: int = 768
    depth: int = 12
    heads: int = 12
    class_token: bool = True
    registers: int = 0  # additional prefix tokens, without positions (arXiv:2309.16588)
    # distilled: class token and distillation token, each with a head
    pool: Literal["class", "mean", "attention", "distilled"] = "class"
    projection_bias: bool = True  # the patch projection has a bias
    positions: PositionConfig = PositionConfig()
    attention: AttentionConfig = AttentionConfig()
    rotary: RotaryConfig = RotaryConfig()
    mlp: MlpConfig = MlpConfig()
    norm: NormConfig = NormConfig()
    head: HeadConfig = HeadConfig()
    regularization: RegularizationConfig = RegularizationConfig()

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> ViTConfig | None:
        """Return the config of a key of `VIT_VARIANTS`, `ViT-B/16`, `B/16` or `ViT-128x6/4`, else None. Raises
        UsageError for a patch below one pixel."""
        return parse_variant(name, image) or (
            change_config(parse_plain_vit(name), {}, image) if is_plain_vit_name(name) else None
        )

    def name(self) -> str:
        """Return `ViT-B/16`, `ViT-128x6/4` if no named size fits, or the key of `VIT_VARIANTS` with these options."""
        shape = (self.width, self.depth, self.heads, self.mlp.hidden, self.patch)
        if family_signature(self) != (*shape, *(attrgetter(path)(ViTConfig) for path in DEFINING_FIELDS), ""):
            for prefix, members in VIT_VARIANTS.items():
                for member in members:
                    if family_signature(parse_variant(f"{prefix}-{member}", None)) == family_signature(self):
                        return f"{prefix}-{member}"
        return f"ViT-{self.size_name()}"

    def size_name(self) -> str:
        """Return size and patch of the model name, `B/16` or `128x6/4`."""
        shape = (self.width, self.depth, self.heads, self.mlp.hidden)
        size = next((key for key, preset in VIT_SIZES.items() if preset == shape), f"{self.width}x{self.depth}")
        patch = format_size(self.patch) if len(self.patch) == 2 else "x".join(map(str, self.patch))
        return f"{size}/{patch}"

    def with_options(self, **changes: Any) -> Any:
        """Return a copy with changed fields, as a config of the family that has them all.

        A dict changes the given fields of a group: `with_options(depth=6, attention={"window": 7})`. Raises UsageError
        if no family has all of them, and for an unknown field of a group.
        """
        current = {field.name: getattr(self, field.name) for field in fields(self)}
        return transformer_config(
            **current | {name: fill_group(current.get(name), name, changes[name]) for name in changes}
        )

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Return the fields of a ViT, and the options of related families."""
        return tuple(dict.fromkeys((*super().option_names(), *FAMILY_BY_OPTION)))

    def __post_init__(self) -> None:
        check_groups(self)
        self.check_attention()
        if self.positions.kind in OF_CLIPS and not self.has_time_axis:
            raise UsageError(
                f"positions.kind={self.positions.kind} is only for video models", "use another kind, or a video model"
            )
        if min(self.channels, self.width, self.depth, self.heads, self.mlp.hidden) < 1:
            raise UsageError("channels, width, depth, heads and mlp.hidden must be at least 1")
        if min(self.classes, self.registers, self.positions.slots) < 0:
            raise UsageError("classes, registers and positions.slots must be at least 0")
        if self.width % self.heads:
            raise UsageError(f"width {self.width} is not divisible by {self.heads} heads", "change heads or width")
        if self.pool in ("class", "distilled") and not self.class_token:
            raise UsageError(
                f"pool={self.pool} requires a class token", "use pool=mean or pool=attention, or class_token=True"
            )
        check_window_options(self)
        check_rotary_options(self)
        self.check_image_size(self.image)
        if self.on_grid and (self.prefix or len(self.image) != 2):
            raise UsageError(
                "axial and windowed blocks require a grid of patches without prefix tokens",
                "use class_token=False, pool=mean",
            )
        positions, attention = self.positions, self.attention
        if positions.at != "input" and (
            self.on_grid or attention.kind != "plain" or positions.kind == "none" or attention.window
        ):
            raise UsageError(
                "positions before each block require positions, attention.kind=plain and no axial blocks or windows",
                "use positions.at=input",
            )

    def check_attention(self) -> None:
        """Raise UsageError for a kind of attention that this family does not support."""
        if self.attention.kind not in ("plain", "relative", "rotary"):
            hint = "use transformer_config(...), which selects the family"
            raise UsageError(f"attention.kind={self.attention.kind} is not supported by {type(self).__name__}", hint)

    @property
    def windowed_blocks(self) -> tuple[int, ...]:
        """Return the indices of the blocks whose patches attend within windows."""
        attention = self.attention
        return tuple(i for i in range(self.depth) if attention.window and i not in attention.global_blocks)

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the tokens along each axis at the native image size."""
        return patch_grid(self.image, self.patch)

    @property
    def prefix(self) -> int:
        """Return the number of prefix tokens: class token, distillation token, registers."""
        return int(self.class_token) + (self.pool == "distilled") + self.registers

    @property
    def pooled_prefix(self) -> int | None:
        """Return the number of leading tokens that pooling uses; None if it uses patches."""
        return {"class": 1, "distilled": 2}.get(self.pool)

    @property
    def prefix_position_count(self) -> int:
        """Return the number of prefix tokens with a learned position, at most `positions.slots`; 0 without a class
        token."""
        is_learned = self.positions.kind in ("learned", "axes", "factorised", "space-time")
        return min(self.positions.slots, self.prefix) if self.class_token and is_learned else 0

    def check_image_size(self, image: tuple[int, ...]) -> None:
        """Raise UsageError, with valid sizes, for an image size (pixels per axis) that is not divisible by the
        patch."""
        try:
            patch_grid(image, self.patch)
        except ValueError as error:
            suggestions = [f"--image-size {format_size(nearest_divisible_size(image, self.patch))}"]
            dividing = [p for p in range(2, min(image) + 1) if all(i % p == 0 for i in image)]
            patch = min(dividing, key=lambda p: abs(p - max(self.patch)), default=1)
            if self.front == "patches":
                suggestions.append(f"--patch-size {patch}")
            raise UsageError(str(error), "use " + ", or ".join(suggestions)) from None

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return the maps that `features_at` computes: the tokens after the last block."""
        return (Level(self.patch, self.width),)

    @property
    def any_axes(self) -> bool:
        """Return whether images may have any number of axes."""
        return self.front == "patches" and not self.on_grid

    @property
    def front(self) -> Literal["patches", "conv", "resnet"]:
        """Return the type of the first layers: a patch projection, a convolutional stem, or a ResNet."""
        return "patches"

    @property
    def drops_patches(self) -> bool:
        """Return whether patches may be dropped in training: every block attends to all remaining tokens."""
        return not self.on_grid and not self.attention.window

    @property
    def merges_tokens(self) -> bool:
        """Return whether tokens may be merged in inference (`nn.merge`)."""
        return not self.needs_positions and self.pool != "attention"

    @property
    def packs_sizes(self) -> bool:
        """Return whether images of many sizes may be packed into one sequence (`models.packed`).

        Positions must be added at the input, and every block must attend to all tokens of an image.
        """
        return not self.needs_positions

    @property
    def needs_positions(self) -> bool:
        """Return whether blocks require token coordinates (relative or rotary positions, windows, positions per
        block)."""
        attention = self.attention
        return self.on_grid or self.positions.at != "input" or attention.kind != "plain" or attention.window > 0

    @property
    def num_features(self) -> int:
        """Return the channels of the head's input."""
        return self.head.representation or (2 if self.pool == "distilled" else 1) * self.width_out

    def export_rules(self) -> ExportRules:
        """Return the export rules: images with two axes of any size, for a patch projection or a convolutional stem."""
        reason = "a ResNet stem" if self.front == "resnet" else ""
        if len(self.image) != 2:
            reason = f"images with {len(self.image)} axes"
        elif self.attention.kind == "relative":
            reason = "relative positions"
        elif self.on_grid:
            reason = "windows, axial blocks or a neck"
        windows = bool(self.attention.window)
        return replace(super().export_rules(), fixed_size=reason, patch_multiples=True, drops_guards=windows)

    def head_count_field(self) -> dict[str, Any]:
        """Return the number of heads, which tensors do not determine."""
        return {"heads": self.heads}

    def structure(self) -> dict[str, Any]:
        """Return the values on which the names and shapes of the model's tensors depend."""
        values = {
            path: attrgetter(path)(self) for path in ViTConfig.option_paths() if path not in NON_STRUCTURAL_FIELDS
        }
        values |= {"position_grid": self.table_grid, "positions.slots": self.prefix_position_count}
        return values | {
            "norm.layer_scale": self.norm.layer_scale is None,
            "head.bias": self.head.bias or not self.classes,
        }

    def of_clips(self, frames: int) -> Any:
        """Return the config with a time axis and joint attention; None for related families, which have no video
        variant."""
        if type(self) is not ViTConfig:
            return None
        current = {field.name: getattr(self, field.name) for field in fields(self)}
        clip = {"family": "video", "image": (frames, *self.image), "patch": (frames, *self.patch)}
        return config_type("video")(**current | clip)

    def with_position_table(self) -> ViTConfig:
        """Return the config with learned instead of MAE's fixed positions, which other formats store as a table; the
        class token's position is zero."""
        if self.positions.kind != "sincos":
            return self
        return self.with_options(positions={"kind": "learned", "slots": int(self.class_token)})


def transformer_config(**settings: Any) -> Any:
    """Return the config of the family that has these options, such as a `HybridConfig` for `stem=...`; by default a
    `ViTConfig`.

    A dict sets fields of a group: `attention={"window": 7}`. Raises UsageError if no family has all options, and for an
    unknown field of a group.
    """
    settings = resolve_family({"family": "vit"} | settings)
    config_class = config_type(settings["family"])
    return config_class(
        **{name: fill_group(getattr(config_class, name, None), name, value) for name, value in settings.items()}
    )


def fill_group(group: object, name: str, value: object) -> object:
    """Return the value of the named field: the group with the fields of a dict changed, or any other value
    unchanged."""
    return change_fields(group, value, f"{name}.") if is_mapping(value) and is_dataclass(group) else value


def kind_of_attention(settings: Mapping[str, Any]) -> str | None:
    """Return the `attention.kind` of options; None if they do not set it."""
    attention: AttentionGroup | Mapping[str, Any] = settings.get("attention") or {}
    return attention.kind if isinstance(attention, AttentionGroup) else attention.get("kind")


def resolve_family(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the `family` that has them all, and without defaults of a plain ViT such as
    `first_norm=False`. Raises UsageError if no family has all of them."""
    family_by_option = {name: family for name, family in FAMILY_BY_OPTION.items() if settings.get(name)}
    if kind_of_attention(settings) == "decomposed":
        family_by_option["attention.kind=decomposed"] = "sam"
    families = set(family_by_option.values())
    if len(families) > 1:
        raise UsageError(
            f"no model family has all options {' and '.join(family_by_option)}", "use options of a single family"
        )
    family_name = settings["family"]
    if family_name not in FAMILIES:
        raise UsageError(f"unknown family {family_name}", suggest_nearest(str(family_name), FAMILIES) or "leave it out")
    # the family changes only if its defining options are removed
    defining_option = {"hybrid": "stem", "axial": "axial", "clip": "first_norm"}.get(family_name)
    keeps_family = (
        kind_of_attention(settings) in (None, "decomposed")
        if family_name == "sam"
        else settings.get(defining_option or "", True)
    )
    family = families.pop() if families else family_name if keeps_family else "vit"
    if family == "sam" != family_name and kind_of_attention(settings) is None:  # explicit, so that SAM rejects it
        settings = dict(settings) | {"attention": {"kind": "plain"} | settings.get("attention", {})}
    field_names = {field.name for field in fields(config_type(family))}
    return {name: value for name, value in settings.items() if name in field_names or name not in FAMILY_BY_OPTION} | {
        "family": family
    }


def parse_variant(name: str, image: ImageSize) -> ViTConfig | None:
    """Return the config of a key of `VIT_VARIANTS`, such as `DeiT-S/16-distilled`; None for other names."""
    for prefix, members in VIT_VARIANTS.items():
        options = members.get(name.removeprefix(f"{prefix}-"))
        if options is not None and name.startswith(f"{prefix}-"):
            plain_name = options.get("like") or name.removeprefix(f"{prefix}-").partition("-")[0]
            changes = {path: value for path, value in options.items() if path != "like"}
            return change_config(parse_plain_vit(plain_name), changes, image)
    return None


def change_config(config: ViTConfig, changes: dict[str, Any], image: tuple[int, ...] | None) -> ViTConfig:
    """Return a config with changes by dotted path, at an image size in pixels if it is set."""
    patch = changes.get("patch", config.patch)
    size = (
        image or changes.get("image") or (config.image if not changes else nearest_divisible_size(config.image, patch))
    )
    return config.with_options(**nest_paths(changes | {"image": size}))


def is_plain_vit_name(name: str) -> bool:
    """Return whether a name is a plain ViT with a named size, or with a width and a depth."""
    match = _CANONICAL.fullmatch(name) or _TIMM.fullmatch(name)
    return match is not None and (find_vit_size(match["size"]) is not None or match["size"][0].isdigit())


def find_vit_size(size: str) -> tuple[int, int, int, int] | None:
    """Return width, depth, heads and hidden channels of a named size, else None. Only g and G differ by case."""
    sizes = {key.lower(): key for key in VIT_SIZES if key not in ("g", "G")} | SIZE_WORDS
    return VIT_SIZES.get(size if size in VIT_SIZES else sizes.get(size.lower(), ""))


def parse_plain_vit(name: str, pixels: int | None = None) -> ViTConfig:
    """Return the config of a plain ViT's name; `pixels` are the pixels per token if they differ from the number in the
    name. Raises UsageError for an unknown name, and for a patch below one pixel."""
    match = _CANONICAL.fullmatch(name) or _TIMM.fullmatch(name)
    if match is None or not is_plain_vit_name(name):
        raise UsageError(f"unknown model {name}", "run `vitreous models` to list the names")
    if (sizes := find_vit_size(match["size"])) is not None:
        width, depth, heads, hidden = sizes
    else:
        width, depth = map(int, match["size"].split("x"))
        heads, hidden = max(1, width // 32), 4 * width
    patch = (pixels,) if pixels else tuple(map(int, match["patch"].lower().split("x")))
    patch = patch * 2 if len(patch) == 1 else patch
    if min(patch) < 1:
        raise UsageError(f"unknown model {name}: its patch is below 1 pixel", "use patches of 1 pixel or more")
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
    """Return the values that identify a named variant of a ViT."""
    shape = (config.width, config.depth, config.heads, config.mlp.hidden, config.patch)
    is_siglip = (config.pool, config.class_token, config.mlp.gelu) == ("attention", False, "tanh")
    pool = config.pool if is_siglip or config.pool == "distilled" else ""
    return (*shape, *(attrgetter(path)(config) for path in DEFINING_FIELDS), pool)
