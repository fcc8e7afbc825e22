"""What a model is, as frozen values: the configs of all families. Needs no PyTorch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from vitreous.models.configs.adapter import AdapterConfig as AdapterConfig
from vitreous.models.configs.base import ModelConfig as ModelConfig
from vitreous.models.configs.bit import BiTConfig as BiTConfig
from vitreous.models.configs.bit import Numerics as Numerics
from vitreous.models.configs.detector import DetectorConfig as DetectorConfig
from vitreous.models.configs.dit import DiTConfig as DiTConfig
from vitreous.models.configs.foreign import ForeignConfig as ForeignConfig
from vitreous.models.configs.hybrid import ConvStemConfig as ConvStemConfig
from vitreous.models.configs.hybrid import HybridConfig as HybridConfig
from vitreous.models.configs.hybrid import StemConfig as StemConfig
from vitreous.models.configs.segmenter import SegmenterConfig as SegmenterConfig
from vitreous.models.configs.swin import SwinConfig as SwinConfig
from vitreous.models.configs.video import VideoConfig as VideoConfig
from vitreous.models.configs.vit import Resize as Resize
from vitreous.models.configs.vit import ViTConfig as ViTConfig
from vitreous.models.configs.vit import transformer_config as transformer_config
from vitreous.models.configs.vit_variants import AxialConfig as AxialConfig
from vitreous.models.configs.vit_variants import CLIPConfig as CLIPConfig
from vitreous.models.configs.vit_variants import SAMConfig as SAMConfig

C = TypeVar("C", bound=ModelConfig)

#: every option of every transformer
TRANSFORMER_FIELDS = ViTConfig.option_names()


def replace_fields(config: C, changes: dict[str, Any]) -> C:
    """A copy with those of the changes that the config has fields for: dropout is not for a ResNet, which stays."""
    known = {field.name for field in fields(config)}  # type: ignore[arg-type]
    return replace(config, **{name: value for name, value in changes.items() if name in known})  # type: ignore[type-var]
