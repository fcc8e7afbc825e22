"""The config classes of all model families. Does not import PyTorch."""

from __future__ import annotations

from typing import Any, TypeVar

from vitreous.config import change_fields, list_field_names, nest_paths
from vitreous.models.configs.adapter import AdapterConfig as AdapterConfig
from vitreous.models.configs.base import ModelConfig as ModelConfig
from vitreous.models.configs.bit import BiTConfig as BiTConfig
from vitreous.models.configs.bit import NumericsName as NumericsName
from vitreous.models.configs.detector import DetectorConfig as DetectorConfig
from vitreous.models.configs.dit import DiTConfig as DiTConfig
from vitreous.models.configs.foreign import ForeignConfig as ForeignConfig
from vitreous.models.configs.groups import AttentionConfig as AttentionConfig
from vitreous.models.configs.groups import ConfigGroup as ConfigGroup
from vitreous.models.configs.groups import HeadConfig as HeadConfig
from vitreous.models.configs.groups import MlpConfig as MlpConfig
from vitreous.models.configs.groups import NormConfig as NormConfig
from vitreous.models.configs.groups import PositionConfig as PositionConfig
from vitreous.models.configs.groups import PositionResize as PositionResize
from vitreous.models.configs.groups import RegularizationConfig as RegularizationConfig
from vitreous.models.configs.groups import RotaryConfig as RotaryConfig
from vitreous.models.configs.hybrid import ConvStemConfig as ConvStemConfig
from vitreous.models.configs.hybrid import HybridConfig as HybridConfig
from vitreous.models.configs.hybrid import StemConfig as StemConfig
from vitreous.models.configs.image_text import ImageTextConfig as ImageTextConfig
from vitreous.models.configs.segmenter import SegmenterConfig as SegmenterConfig
from vitreous.models.configs.swin import SwinAttentionConfig as SwinAttentionConfig
from vitreous.models.configs.swin import SwinConfig as SwinConfig
from vitreous.models.configs.swin import SwinMlpConfig as SwinMlpConfig
from vitreous.models.configs.swin import SwinNormConfig as SwinNormConfig
from vitreous.models.configs.swin import SwinPositionConfig as SwinPositionConfig
from vitreous.models.configs.text import TextConfig as TextConfig
from vitreous.models.configs.video import VideoConfig as VideoConfig
from vitreous.models.configs.vit import ViTConfig as ViTConfig
from vitreous.models.configs.vit import transformer_config as transformer_config
from vitreous.models.configs.vit_variants import AxialConfig as AxialConfig
from vitreous.models.configs.vit_variants import CLIPConfig as CLIPConfig
from vitreous.models.configs.vit_variants import SAMConfig as SAMConfig

C = TypeVar("C", bound=ModelConfig)

#: dotted paths of all options that Transformer configs share
TRANSFORMER_FIELDS = ViTConfig.option_paths()


def replace_known_fields(config: C, changes: dict[str, Any]) -> C:
    """Return a copy of a config with the `changes`, a mapping from dotted paths to values; paths without a field in
    this config are ignored.

    For example, `regularization.dropout` does not change the config of a ResNet.
    """
    names = set(list_field_names(config))
    known_paths = {path for path in config.option_paths() if path.partition(".")[0] in names} | names
    return change_fields(config, nest_paths({path: value for path, value in changes.items() if path in known_paths}))
