"""Config of an image encoder with a text encoder: CLIP (arXiv:2103.00020), SigLIP (arXiv:2303.15343), SigLIP 2
(arXiv:2502.14786), EVA-02-CLIP (arXiv:2303.15389) and PE-Core (arXiv:2504.13181)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Literal

from vitreous.errors import UsageError
from vitreous.models.configs.base import ExportRules, ImageSize, Level, ModelConfig, PreprocessDefaults
from vitreous.models.configs.text import TextConfig
from vitreous.models.configs.vit import ViTConfig
from vitreous.models.configs.wrapped import BackboneTokensConfig
from vitreous.models.presets import IMAGE_TEXT_NAMES, PE_TEXT_SIZES, TEXT_SIZES, VIT_SIZES

#: fields of `text` that tensors do not determine
TEXT_METADATA_FIELDS = ("text.heads", "text.gelu", "text.eps", "text.causal", "text.pool", "text.pad_id", "text.end_id")
NON_STRUCTURAL_TEXT_FIELDS = ("text.gelu", "text.eps", "text.pad_id", "text.end_id", "text.cleaning")


@dataclass(frozen=True)
class ImageTextConfig(BackboneTokensConfig):
    """An image encoder (`backbone`) and a text encoder (`text`), whose embeddings of an image and of its text are
    similar.

    The image embedding is the output of the backbone: of its head (CLIP's projection), or, without a head, its pooled
    features (SigLIP). `bias`: whether the logits have a learned bias, as for the sigmoid loss. Raises UsageError if the
    two encoders have embeddings of different sizes.
    """

    family: Literal["image-text"] = "image-text"
    backbone: ModelConfig = field(default_factory=lambda: build_clip_backbone("CLIP-B/32", None))
    text: TextConfig = TextConfig()
    bias: bool = False

    module: ClassVar[str] = "vitreous.models.image_text:ImageTextModel"
    preset_names: ClassVar[tuple[str, ...]] = IMAGE_TEXT_NAMES
    recipe_family: ClassVar[str] = "vit"
    foreign_formats = True

    @classmethod
    def parse_name(cls, name: str, image: ImageSize) -> ImageTextConfig | None:
        """Return the config of `CLIP-B/32-text` or another of `preset_names`; None for other names."""
        preset = {preset.lower(): preset for preset in IMAGE_TEXT_NAMES}.get(name.lower())
        if preset is None:
            return None
        family, _, size = preset.partition("/")[0].rpartition("-")
        return BUILDERS[family](size, preset.removesuffix("-text"), image)

    def name(self) -> str:
        """Return a name of `preset_names`, or the names of image and text encoder if none fits."""
        for preset, signature in list_preset_signatures():
            if signature == self.signature():
                return preset
        return f"{self.backbone.name()} with text {self.text.width}x{self.text.depth}"

    def __post_init__(self) -> None:
        image = self.backbone.classes or self.backbone.num_features
        if image != self.text.embedding:
            raise UsageError(
                f"the image encoder outputs {image} channels, but the text encoder {self.text.embedding}",
                f"use text.embedding={image}",
            )

    @property
    def table_grid(self) -> tuple[int, ...]:
        """Return the positions along each axis of the position table of images."""
        return self.backbone.table_grid

    @property
    def class_token(self) -> bool:
        """Return whether the image encoder has a class token."""
        return self.backbone.class_token

    @property
    def width(self) -> int:
        """Return the channels of a token of the image encoder."""
        return self.backbone.width

    @property
    def heads(self) -> int:
        """Return the attention heads of the image encoder."""
        return self.backbone.values_at(["heads"])["heads"]

    @property
    def front(self) -> str:
        """Return the type of the image encoder's first layers."""
        return self.backbone.front

    @property
    def needs_positions(self) -> bool:
        """Return whether blocks of the image encoder require token coordinates."""
        return self.backbone.needs_positions

    @property
    def packs_sizes(self) -> bool:
        """Return whether images of many sizes may be packed into one sequence."""
        return self.backbone.packs_sizes

    @property
    def num_features(self) -> int:
        """Return the channels of an embedding."""
        return self.text.embedding

    @property
    def classes(self) -> int:
        """Return 0: the classes of a zero-shot classifier are texts, not outputs of a head."""
        return 0

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return the maps of the image encoder."""
        return self.backbone.levels

    def parameter_layer(self, parameter: str) -> int:
        """Return the layer index of a parameter. Blocks of the text encoder are counted from its last block, so both
        encoders end at the same index."""
        if not parameter.startswith("text."):
            return super().parameter_layer(parameter)
        match = re.search(r"\bencoder\.blocks\.(\d+)\.", parameter)
        if match:
            return max(1, 1 + int(match[1]) + self.depth - self.text.depth)
        return 0 if parameter.startswith(("text.embedding.", "text.positions")) else self.depth + 1

    def export_rules(self) -> ExportRules:
        """Return the export rules of the image encoder, whose output is the image embedding."""
        rules = self.backbone.export_rules()
        return ExportRules(("features",), rules.fixed_size, rules.hint, patch_multiples=rules.patch_multiples)

    def default_preprocess(self) -> PreprocessDefaults:
        """Return CLIP's preprocessing, or with attention pooling that of SigLIP and PE-Core, which distort images to a
        square."""
        values = self.backbone.values_at(("pool", "attention.kind"))
        if values.get("pool") != "attention":
            return PreprocessDefaults("clip", "bicubic")
        is_rotary = values.get("attention.kind") == "rotary"  # PE-Core
        return PreprocessDefaults("half", "bilinear" if is_rotary else "bicubic", "squash")

    def metadata_fields(self) -> dict[str, Any]:
        """Return the fields that tensors do not determine, which other formats store as metadata."""
        return self.backbone.metadata_fields() | self.values_at(TEXT_METADATA_FIELDS)

    def numerical_choices(self) -> dict[str, Any]:
        """Return the fields that change outputs slightly, but no shapes of tensors."""
        return self.backbone.numerical_choices() | self.values_at(("text.gelu", "text.eps"))

    def head_count_field(self) -> dict[str, Any]:
        """Return the number of heads of both encoders, which tensors do not determine."""
        return self.backbone.head_count_field() | {"text.heads": self.text.heads}

    def signature(self) -> tuple[str, dict[str, Any]]:
        """Return the name of the image encoder, and the values that define text encoder and logits."""
        return self.backbone.name(), self.text_structure()

    def structure(self) -> dict[str, Any]:
        """Return the values on which the names and shapes of the model's tensors depend."""
        return self.backbone.structure() | self.text_structure()

    def text_structure(self) -> dict[str, Any]:
        """Return the values on which the names and shapes of the tensors outside of the image encoder depend."""
        text = {
            path: value
            for path, value in self.values_at(self.option_paths()).items()
            if path.startswith("text.") and path not in NON_STRUCTURAL_TEXT_FIELDS
        }
        return text | {"bias": self.bias}


@cache
def list_preset_signatures() -> list[tuple[str, tuple[str, dict[str, Any]]]]:
    """List the preset names with their `signature`."""
    configs = ((name, ImageTextConfig.parse_name(name, None)) for name in IMAGE_TEXT_NAMES)
    return [(name, config.signature()) for name, config in configs if config is not None]


def build_clip_backbone(name: str, image: ImageSize) -> ModelConfig:
    """Return the config of an image encoder by name, at an image size in pixels. Raises UsageError for an unknown
    name."""
    config = ViTConfig.parse_name(name, image)
    if config is None:
        raise UsageError(f"unknown image encoder {name}", "run `vitreous models` to list the names")
    return config


def build_clip_config(size: str, name: str, image: ImageSize) -> ImageTextConfig:
    """Return the config of OpenAI's CLIP of a size, such as `B`, whose image encoder has the name `name`."""
    width, embedding = TEXT_SIZES[size]
    text = TextConfig(width=width, heads=width // 64, hidden=4 * width, embedding=embedding)
    return ImageTextConfig(backbone=build_clip_backbone(name, image), text=text)


def build_eva02_clip_config(size: str, name: str, image: ImageSize) -> ImageTextConfig:
    """Return the config of an EVA-02-CLIP of a size, such as `B`, whose text encoder is CLIP's with the exact GELU."""
    config = build_clip_config(size, name, image)
    return replace(config, text=replace(config.text, gelu="none"))


def build_pe_config(size: str, name: str, image: ImageSize) -> ImageTextConfig:
    """Return the config of a PE-Core of a size, such as `B`, whose image encoder has the name `name`."""
    backbone, (width, depth, length) = build_clip_backbone(name, image), PE_TEXT_SIZES[size]
    text = TextConfig(length=length, width=width, depth=depth, heads=width // 64, hidden=4 * width, gelu="none")
    return ImageTextConfig(backbone=backbone, text=replace(text, embedding=backbone.classes))


def build_siglip_config(
    size: str, name: str, image: ImageSize, vocabulary: int = 32_000, pad_id: int = 1
) -> ImageTextConfig:
    """Return the config of a SigLIP of a size, such as `B`, whose image encoder has the name `name`."""
    text_size = "So400m" if size == "gopt" else size  # the largest model has the text encoder of the second largest
    width, depth, heads, hidden = VIT_SIZES[text_size]
    text = TextConfig(
        vocabulary=vocabulary,
        length=64,
        width=width,
        depth=depth,
        heads=heads,
        hidden=hidden,
        gelu="tanh",
        eps=1e-6,
        causal=False,
        pool="last",
        embedding=VIT_SIZES[size][0],
        projection_bias=True,
        pad_id=pad_id,
        end_id=1,
        cleaning="canonicalise",
    )
    return ImageTextConfig(backbone=build_clip_backbone(name, image), text=text, bias=True)


def build_siglip2_config(size: str, name: str, image: ImageSize) -> ImageTextConfig:
    """Return the config of a SigLIP 2 of a size, such as `B`; its image encoders are those of SigLIP."""
    return build_siglip_config(size, name.replace("SigLIP2", "SigLIP"), image, vocabulary=256_000, pad_id=0)


BUILDERS: dict[str, Callable[[str, str, ImageSize], ImageTextConfig]] = {
    "CLIP": build_clip_config,
    "EVA02-CLIP": build_eva02_clip_config,
    "SigLIP": build_siglip_config,
    "SigLIP2": build_siglip2_config,
    "PE-Core": build_pe_config,
}
