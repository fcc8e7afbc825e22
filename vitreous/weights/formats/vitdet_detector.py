"""ViTDet's detectors in detectron2's format (arXiv:2203.16527): backbone, simple feature pyramid, region proposal
network and the heads of Faster or Mask R-CNN, by the names of its `GeneralizedRCNN`.

K classes, H channels of the box head. Differences in layout:

| tensor | detectron2 | here |
|---|---|---|
| logits of a region | (K + 1, H), the background last | (1 + K, H), the background first |
| corrections of a region | (4 K, H), or (4, H) for all classes | (4 (1 + K), H), the first four unused |

Anchors are not stored: sides of 8 strides, height / width 1/2, 1, 2 in this order, corners not rounded. Files of
the federated loss have K sampling weights of classes: they indicate sigmoid scores, are not kept, and
are written as ones.

"Our" names and tensors are those of this package's models, "their" names and tensors those of the files.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from vitreous.data.modalities.base import IMAGENET_MOMENTS
from vitreous.models.config import DetectorConfig, ModelConfig
from vitreous.models.configs.detector import HEAD_SIZES
from vitreous.weights.formats.vitdet import VITDET, VITDET_RULES, infer_vitdet_config, is_vitdet_backbone
from vitreous.weights.table import (
    RenameRule,
    Shapes,
    Tensors,
    TensorTransform,
    WeightsFormat,
    nest_rules,
    parse_copy_rules,
    parse_rename_rule,
)

BACKBONE_PREFIX, RPN_PREFIX, BOX_HEAD_PREFIX, MASK_HEAD_PREFIX = (
    "backbone.net.",
    "proposal_generator.rpn_head",
    "roi_heads.box_head",
    "roi_heads.mask_head",
)
BOX_PREDICTOR_PREFIX = "roi_heads.box_predictor"
LOGITS, OBJECTNESS = f"{BOX_PREDICTOR_PREFIX}.cls_score.weight", f"{RPN_PREFIX}.objectness_logits.weight"
BOX_DELTAS = "regions.box.predictor.bbox_pred"
PIXEL_STATISTICS_NAMES = ("pixel_mean", "pixel_std")  # in files of early versions; values in 0 .. 255
ANCHOR_STRIDES = 8.0  # strides along the side of an anchor
DETECTOR_SIZES = HEAD_SIZES["vitdet"]
#: prediction settings that no tensor determines; unless the file's metadata set them, those of COCO's configs
POSTPROCESS_FIELDS = ("proposals", "detections", "nms", "threshold", "scores")
#: prediction settings of LVIS's configs, whose files have the class sampling weights of the federated loss
LVIS_POSTPROCESS: dict[str, Any] = {"detections": 300, "threshold": 0.02, "scores": "sigmoid"}
FEDERATED_LOSS_WEIGHTS = f"{BOX_PREDICTOR_PREFIX}.fed_loss_cls_weights"
#: level of the pyramid -> index of its 1 x 1 convolution in the layers of `simfp_N`
LATERAL_CONV_INDEX = (4, 1, 0, 1)


def _build_level_rule(ours: str, level: int, suffix: str) -> RenameRule:
    """Build the rule of a pyramid level, which detectron2 names by the logarithm of its stride."""
    return RenameRule((ours,), lambda c: (f"backbone.simfp_{c.strides[level].bit_length() - 1}.{suffix}",))


def _build_pyramid_rules() -> list[RenameRule]:
    """Build the rules of the feature pyramid."""
    rules = [
        _build_level_rule("pyramid.upsample4.1.norm.{x}", 0, "1.{x}"),
        _build_level_rule("pyramid.upsample4.{i}.{x}", 0, "{i}.{x}"),
        _build_level_rule("pyramid.upsample2.{x}", 1, "0.{x}"),
    ]
    for level, conv_index in enumerate(LATERAL_CONV_INDEX):
        for layer, index in (("reduce", conv_index), ("smooth", conv_index + 1)):
            rules.append(_build_level_rule(f"pyramid.{layer}.{level}.0.weight", level, f"{index}.weight"))
            rules.append(_build_level_rule(f"pyramid.{layer}.{level}.1.norm.{{x}}", level, f"{index}.norm.{{x}}"))
    return rules


def _make_background_roll(shift: int) -> Any:
    """Return a transform function that moves the background row of (K + 1, ...) from one end to the other."""
    return lambda tensors, c: [tensors[0].roll(shift, 0)]


def _import_box_deltas(theirs: list[Tensor], config: DetectorConfig) -> list[Tensor]:
    """Add zeros for the background to detectron2's box corrections: (4 K, ...) -> (4 (1 + K), ...)."""
    deltas = theirs[0]
    return [deltas] if config.agnostic else [torch.cat([deltas.new_zeros(4, *deltas.shape[1:]), deltas])]


def _export_box_deltas(ours: list[Tensor], config: DetectorConfig) -> list[Tensor]:
    """Remove the background from our box corrections: (4 (1 + K), ...) -> (4 K, ...)."""
    return [ours[0] if config.agnostic else ours[0][4:]]


DETECTOR_RULES = (
    *nest_rules(VITDET_RULES, "backbone.", lambda name: BACKBONE_PREFIX + name, attrgetter("backbone")),
    *_build_pyramid_rules(),
    *parse_copy_rules(
        f"proposals.head.conv.{{j}}.0.{{x}} = {RPN_PREFIX}.conv.conv{{j}}.{{x}}",
        f"proposals.head.cls_logits.{{x}} = {RPN_PREFIX}.objectness_logits.{{x}}",
        f"proposals.head.bbox_pred.{{x}} = {RPN_PREFIX}.anchor_deltas.{{x}}",
        f"regions.box.layers.{DETECTOR_SIZES.convolutions + 1}.{{x}} = {BOX_HEAD_PREFIX}.fc1.{{x}}",
        f"regions.box.layers.{{j}}.0.weight = {BOX_HEAD_PREFIX}.conv{{J}}.weight",
        f"regions.box.layers.{{j}}.1.norm.{{x}} = {BOX_HEAD_PREFIX}.conv{{J}}.norm.{{x}}",
        f"regions.mask.0.{{j}}.0.weight = {MASK_HEAD_PREFIX}.mask_fcn{{J}}.weight",
        f"regions.mask.0.{{j}}.1.norm.{{x}} = {MASK_HEAD_PREFIX}.mask_fcn{{J}}.norm.{{x}}",
        f"regions.mask.1.conv5_mask.{{x}} = {MASK_HEAD_PREFIX}.deconv.{{x}}",
        f"regions.mask.1.mask_fcn_logits.{{x}} = {MASK_HEAD_PREFIX}.predictor.{{x}}",
    ),
    parse_rename_rule(
        "regions.box.predictor.cls_score.{x}",
        f"{BOX_PREDICTOR_PREFIX}.cls_score.{{x}}",
        TensorTransform(_make_background_roll(1), _make_background_roll(-1)),
    ),
    parse_rename_rule(
        f"{BOX_DELTAS}.{{x}}",
        f"{BOX_PREDICTOR_PREFIX}.bbox_pred.{{x}}",
        TensorTransform(_import_box_deltas, _export_box_deltas),
    ),
)


def infer_detector_config(shapes: Shapes, settings: dict[str, Any]) -> DetectorConfig:
    """Infer the config of a detector from the shapes. `settings` may contain `agnostic` (one box for all classes),
    which shapes do not determine for a single class, prediction settings from the file's metadata, and the tensors in
    `facts`. Raises ValueError for unsupported pixel statistics, and as `infer_vitdet_config` does."""
    check_pixel_statistics(settings.get("facts", {}))
    backbone_shapes = {
        name.removeprefix(BACKBONE_PREFIX): shape for name, shape in shapes.items() if name.startswith(BACKBONE_PREFIX)
    }
    backbone = infer_vitdet_config(backbone_shapes, settings)
    classes, head_width = shapes[LOGITS][0] - 1, shapes[LOGITS][1]
    has_single_box = shapes[f"{BOX_PREDICTOR_PREFIX}.bbox_pred.weight"][0] == 4
    agnostic = has_single_box and (classes > 1 or bool(settings.get("agnostic")))
    postprocess = (LVIS_POSTPROCESS if FEDERATED_LOSS_WEIGHTS in shapes else {}) | {
        name: settings[name] for name in POSTPROCESS_FIELDS if name in settings
    }
    config = DetectorConfig(
        backbone=backbone,
        classes=classes,
        masks=any(name.startswith(f"{MASK_HEAD_PREFIX}.") for name in shapes),
        heads="vitdet",
        width=shapes[OBJECTNESS][1],
        hidden=head_width,
        finest=max(1, backbone.patch[0] // 4),
        anchor=ANCHOR_STRIDES,
        round_anchors=bool(settings.get("round_anchors", False)),
        agnostic=agnostic,
    )
    return replace(config, **postprocess)


def check_pixel_statistics(pixel_statistics: Tensors) -> None:
    """Raise ValueError if mean and standard deviation of the pixels in a file, (C, 1, 1) each, are not ImageNet's for
    RGB."""
    for name, values in zip(PIXEL_STATISTICS_NAMES, IMAGENET_MOMENTS, strict=True):
        actual = (
            [round(pixel_value, 3) for pixel_value in pixel_statistics[name].flatten().tolist()]
            if name in pixel_statistics
            else None
        )
        imagenet_values = [round(255 * value, 3) for value in values]
        if actual is None or actual == imagenet_values:
            continue
        channel_order = " (BGR)" if actual == imagenet_values[::-1] else ""
        raise ValueError(
            f"its {name} is {', '.join(f'{pixel_value:g}' for pixel_value in actual)}{channel_order}, "
            f"not {', '.join(f'{pixel_value:g}' for pixel_value in imagenet_values)} (RGB, 0 to 255)"
        )


def is_vitdet_detector(config: ModelConfig) -> bool:
    """Return whether the model is a ViTDet detector with all pyramid levels."""
    return (
        isinstance(config, DetectorConfig)
        and config.heads == "vitdet"
        and config.anchor == ANCHOR_STRIDES
        and len(config.strides) == len(LATERAL_CONV_INDEX) + 1
        and is_vitdet_backbone(config.backbone)
    )


def zero_background_deltas(state: Tensors) -> Tensors:
    """Return a detector's state with zeros in the background rows of the box corrections, the first four of (4 (1 + K),
    ...). They are unused, and detectron2 does not have them."""
    changed = dict(state)
    for suffix in ("weight", "bias"):
        if (deltas := changed.get(f"{BOX_DELTAS}.{suffix}")) is not None and len(deltas) > 4:
            changed[f"{BOX_DELTAS}.{suffix}"] = torch.cat([torch.zeros_like(deltas[:4]), deltas[4:]])
    return changed


DETECTOR_FORMAT = VITDET.name
DETECTOR = WeightsFormat(
    DETECTOR_FORMAT,
    "detectron2's ViTDet with the heads of Faster or Mask R-CNN",
    (f"{BACKBONE_PREFIX}patch_embed.proj.weight", f"{BACKBONE_PREFIX}blocks.0.attn.rel_pos_h", LOGITS),
    DETECTOR_RULES,
    configure=infer_detector_config,
    ignored=(*PIXEL_STATISTICS_NAMES, FEDERATED_LOSS_WEIGHTS.replace(".", r"\.")),
    can_represent=is_vitdet_detector,
    facts=PIXEL_STATISTICS_NAMES,
    buffers=lambda c: {FEDERATED_LOSS_WEIGHTS: torch.ones(c.classes)} if c.scores == "sigmoid" else {},
    excluded_names=(f"{BOX_PREDICTOR_PREFIX}.0.cls_score.weight",),
)
# The second format matches a detector without class logits, which is rejected as damaged and not read as a backbone.
# Cascade detectors, which have several predictors, are read as backbones.
FORMATS = [DETECTOR, replace(DETECTOR, signature=(*DETECTOR.signature[:2], OBJECTNESS))]
