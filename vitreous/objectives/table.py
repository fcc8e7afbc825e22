"""Table of objectives: the `name` in a run's config -> config class."""

from __future__ import annotations

from vitreous.objectives.base import ObjectiveConfig
from vitreous.objectives.contrastive import ContrastiveConfig
from vitreous.objectives.detection import DetectionConfig
from vitreous.objectives.diffusion import DiffusionConfig
from vitreous.objectives.dino import DINOConfig
from vitreous.objectives.dinov2 import DINOv2Config
from vitreous.objectives.dinov3 import DINOv3Config
from vitreous.objectives.distillation import DistillationConfig
from vitreous.objectives.feature_distillation import FeatureDistillationConfig
from vitreous.objectives.flow import FlowConfig
from vitreous.objectives.mae import MAEConfig
from vitreous.objectives.masked import MaskedPatchesConfig
from vitreous.objectives.regression import RegressionConfig
from vitreous.objectives.segmentation import SegmentationConfig
from vitreous.objectives.supervised import SupervisedConfig

OBJECTIVES: dict[str, type[ObjectiveConfig]] = {
    "supervised": SupervisedConfig,
    "regression": RegressionConfig,
    "masked-patches": MaskedPatchesConfig,
    "mae": MAEConfig,
    "dino": DINOConfig,
    "dinov2": DINOv2Config,
    "dinov3": DINOv3Config,
    "distillation": DistillationConfig,
    "feature-distillation": FeatureDistillationConfig,
    "segmentation": SegmentationConfig,
    "detection": DetectionConfig,
    "diffusion": DiffusionConfig,
    "flow": FlowConfig,
    "contrastive": ContrastiveConfig,
}
