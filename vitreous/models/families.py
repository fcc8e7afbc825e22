"""The one table of model families: the name that files store -> the class of its configs, which knows everything else.

A new family is a file of `configs`, a file of its module, and a row here. Classes are imported when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitreous.config import import_object

if TYPE_CHECKING:
    from typing import Any

#: in the order in which `vitreous models` lists them
FAMILIES: dict[str, str] = {
    "vit": "vitreous.models.configs.vit:ViTConfig",
    "hybrid": "vitreous.models.configs.hybrid:HybridConfig",
    "bit": "vitreous.models.configs.bit:BiTConfig",
    "swin": "vitreous.models.configs.swin:SwinConfig",
    "dit": "vitreous.models.configs.dit:DiTConfig",
    "clip": "vitreous.models.configs.vit_variants:CLIPConfig",
    "sam": "vitreous.models.configs.vit_variants:SAMConfig",
    "axial": "vitreous.models.configs.vit_variants:AxialConfig",
    "video": "vitreous.models.configs.video:VideoConfig",
    "adapter": "vitreous.models.configs.adapter:AdapterConfig",
    "segmenter": "vitreous.models.configs.segmenter:SegmenterConfig",
    "detector": "vitreous.models.configs.detector:DetectorConfig",
    "foreign": "vitreous.models.configs.foreign:ForeignConfig",
}


def config_type(family: str) -> type[Any]:
    """The class of a family's configs. Raises KeyError for a family that the table has not."""
    return import_object(FAMILIES[family])
