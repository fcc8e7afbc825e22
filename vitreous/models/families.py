"""Table of model families: family name, as stored in files -> config class.

To add a family, add a module to `configs`, a module with the model, and an entry here. Classes are imported on first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitreous.config import import_object

if TYPE_CHECKING:
    from typing import Any

#: family name -> module and config class, in the order of `vitreous models`
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
    "image-text": "vitreous.models.configs.image_text:ImageTextConfig",
    "foreign": "vitreous.models.configs.foreign:ForeignConfig",
}


def config_type(family: str) -> type[Any]:
    """Return the config class of a family. Raises KeyError for an unknown family."""
    return import_object(FAMILIES[family])
