"""The one table of model families: what each is called, how it is built, what it costs, how its layers are counted.

Needs no PyTorch until a model is built. A new family is a file of `configs`, a file of its module, and a row here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from typing import Any

from vitreous.models import presets
from vitreous.models.config import (
    AdapterConfig,
    AxialConfig,
    BiTConfig,
    CLIPConfig,
    DetectorConfig,
    DiTConfig,
    HybridConfig,
    ModelConfig,
    SAMConfig,
    SegmenterConfig,
    SwinConfig,
    VideoConfig,
    ViTConfig,
)
from vitreous.models.configs.dit import dit_name, parse_dit
from vitreous.models.configs.foreign import BLOCK, ENTRY, ForeignConfig
from vitreous.models.video_names import parse_video, video_name


@dataclass(frozen=True)
class Family:
    """A row: `config` is the type of its frozen configs, which say what can be asked of a model (`has_attention`,
    `drops_patches`, `merges_tokens`, `packs_sizes`, `sees_whole_image`, `position`); `model` names its module.

    `parse` reads a name, None for one of another family, and `name` writes it. `block` finds the numbers of a block in
    the name of its parameter; `entry` are the parts before the first block.
    """

    config: type[Any]
    model: str
    parse: Callable[[str, presets.Image], ModelConfig | None]
    name: Callable[[Any], str]
    _: KW_ONLY
    block: str = r"\bencoder\.blocks\.(\d+)\."
    entry: tuple[str, ...] = ("projection", "position", "prefix", "slots", "stem", "first_norm")

    def build(self, config: ModelConfig) -> Any:
        """The model of a config, freshly initialised."""
        return self.model_class()(config)

    def model_class(self) -> Any:
        """The class of its models, imported when it is asked for."""
        module, _, name = self.model.partition(":")
        return getattr(import_module(module), name)

    def layer_of(self, parameter: str, config: ModelConfig) -> int:
        """The layer of a parameter, for layer decay (arXiv:2106.08254): 0 for what comes before the blocks, 1 to L for
        the blocks, L + 1 for what follows them, and for what stands on or beside a backbone."""
        backbone = getattr(config, "backbone", None)
        if backbone is not None:
            _, inside, inner = parameter.partition("backbone.")
            return family_of(backbone).layer_of(inner, backbone) if inside else config.depth + 1
        match = re.search(self.block, parameter)
        if match:
            return 1 + self.block_number(config, *(int(number or 0) for number in match.groups()))
        return (
            0
            if parameter.startswith(tuple(f"{part}." for part in self.entry)) or parameter in self.entry
            else (config.depth + 1)
        )

    def block_number(self, config: ModelConfig, *numbers: int) -> int:
        """The number of a block from those in its name: those of a ResNet or a Swin are stage and unit. What merges
        tokens before a stage of a Swin goes with the first block of the stage."""
        if len(numbers) == 1:
            return numbers[0] - getattr(config, "first_block", 0)
        assert isinstance(config, BiTConfig | SwinConfig)
        stage, unit = numbers
        return sum(config.blocks[:stage]) + unit


def parse_foreign(name: str, image: presets.Image) -> ForeignConfig | None:
    """`timm:resnet18` or `hf:FOLDER`, for which the library is asked (`models.libraries`); None for other names."""
    if not name.startswith(("timm:", "hf:")):
        return None
    from vitreous.models import libraries

    return libraries.parse_foreign(name, image)


#: tried in this order to read a name; the plain ViT is last, and refuses what is none
FAMILIES: dict[str, Family] = {
    "bit": Family(
        BiTConfig,
        "vitreous.models.bit:BiT",
        parse=presets.parse_bit,
        name=presets.bit_name,
        block=r"\bbody\.stages\.(\d+)\.units\.(\d+)\.",
        entry=("body.root",),
    ),
    "swin": Family(
        SwinConfig,
        "vitreous.models.swin:Swin",
        parse=presets.parse_swin,
        name=presets.swin_name,
        block=r"\bstages\.(\d+)\.(?:blocks\.(\d+)\.|merge\.)",
        entry=("projection", "first_norm"),
    ),
    "hybrid": Family(HybridConfig, "vitreous.models.vit_variants:Hybrid", presets.parse_hybrid, presets.hybrid_name),
    "axial": Family(AxialConfig, "vitreous.models.vit_variants:AxialViT", presets.parse_axial, presets.axial_name),
    # convolutions `after` a block propagate between windows; like detectron2, layer decay does not reach them
    "sam": Family(
        SAMConfig,
        "vitreous.models.vit_variants:SAM",
        presets.parse_kin,
        presets.vit_name,
        block=r"\bencoder\.blocks\.(\d+)\.(?!after\.)",
    ),
    "clip": Family(CLIPConfig, "vitreous.models.vit_variants:CLIP", presets.parse_kin, presets.vit_name),
    "video": Family(VideoConfig, "vitreous.models.video:Video", parse_video, video_name),
    "adapter": Family(
        AdapterConfig,
        "vitreous.models.adapter:ViTAdapter",
        presets.parse_dense,
        lambda config: presets.adapter_name(config, family_of(config.backbone).name(config.backbone)),
    ),
    "segmenter": Family(
        SegmenterConfig,
        "vitreous.models.segmenter:Segmenter",
        presets.parse_dense,
        lambda config: presets.segmenter_name(config, family_of(config.backbone).name(config.backbone)),
    ),
    "detector": Family(
        DetectorConfig,
        "vitreous.models.detector:Detector",
        presets.parse_dense,
        lambda config: presets.detector_name(config, family_of(config.backbone).name(config.backbone)),
    ),
    "dit": Family(DiTConfig, "vitreous.models.dit:DiT", parse_dit, dit_name, entry=("projection", "time", "classes")),
    "foreign": Family(
        ForeignConfig,
        "vitreous.models.foreign:ForeignModel",
        parse=parse_foreign,
        name=lambda config: config.name,
        block=BLOCK,
        entry=ENTRY,
    ),
    "vit": Family(ViTConfig, "vitreous.models.vit:ViT", presets.parse_vit, presets.vit_name),
}


def family_of(config: ModelConfig) -> Family:
    """The row of a config."""
    return FAMILIES[config.family]
