"""ViTDet's detectors as detectron2 has them (arXiv:2203.16527): backbone, simple feature pyramid, region proposal
network and the heads of Faster or Mask R-CNN, by the names of its `GeneralizedRCNN`.

K classes, H channels of the box head. What lies otherwise there:

| tensor | there | here |
|---|---|---|
| logits of a region | (K + 1, H), the background last | (1 + K, H), the background first |
| corrections of a region | (4 K, H), or (4, H) for all classes | (4 (1 + K), H), the first four unread |

Anchors are not in its files: sides of 8 strides, height / width 1/2, 1, 2 in this order, corners not rounded. Files of
the federated loss have K weights by which classes are drawn: they tell that scores are by sigmoid, are not kept, and
are written as ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitreous.data.modalities.base import IMAGENET
from vitreous.models.config import DetectorConfig, ModelConfig
from vitreous.models.configs.detector import HEADS
from vitreous.weights.formats.vitdet import ROWS, VITDET, configure_vitdet, vitdet_like
from vitreous.weights.table import Format, Row, Shapes, Tensors, TensorTransform, row, table

NET, RPN, BOX, MASK = "backbone.net.", "proposal_generator.rpn_head", "roi_heads.box_head", "roi_heads.mask_head"
PREDICTOR = "roi_heads.box_predictor"
LOGITS, OBJECTNESS = f"{PREDICTOR}.cls_score.weight", f"{RPN}.objectness_logits.weight"
CORRECTIONS = "regions.box.predictor.bbox_pred"
PIXELS = ("pixel_mean", "pixel_std")  # in the files of early versions; of values in 0 .. 255
ANCHOR = 8.0  # strides along the side of an anchor
SIZES = HEADS["vitdet"]
#: fields of how a detector answers, which no tensor tells: those of the configs of COCO where no note has others
ANSWERS = ("proposals", "detections", "nms", "threshold", "scores")
#: those of the configs of LVIS, whose files have the weights by which classes are drawn for the federated loss
LVIS: dict[str, Any] = {"detections": 300, "threshold": 0.02, "scores": "sigmoid"}
WEIGHTS = f"{PREDICTOR}.fed_loss_cls_weights"
#: a level of the pyramid -> where its 1 x 1 convolution stands among the layers of `simfp_N`
REDUCE = (4, 1, 0, 1)


def _of_backbone(one: Row) -> Row:
    """A row of the backbone as that of a detector."""

    def theirs(config: DetectorConfig) -> tuple[str, ...]:
        names = one.theirs(config.backbone) if callable(one.theirs) else one.theirs
        return tuple(NET + name for name in names)

    fold = TensorTransform(
        lambda tensors, c: one.fold.into(tensors, c.backbone), lambda tensors, c: one.fold.out(tensors, c.backbone)
    )
    return Row(tuple(f"backbone.{name}" for name in one.ours), theirs, fold)


def _level(ours: str, level: int, place: str) -> Row:
    """A row of a level of the pyramid, which is named by the logarithm of its stride."""
    return Row((ours,), lambda c: (f"backbone.simfp_{c.strides[level].bit_length() - 1}.{place}",))


def _pyramid() -> list[Row]:
    """The rows of the pyramid."""
    rows = [
        _level("pyramid.upsample4.1.norm.{x}", 0, "1.{x}"),
        _level("pyramid.upsample4.{i}.{x}", 0, "{i}.{x}"),
        _level("pyramid.upsample2.{x}", 1, "0.{x}"),
    ]
    for level, first in enumerate(REDUCE):
        for part, place in (("reduce", first), ("smooth", first + 1)):
            rows.append(_level(f"pyramid.{part}.{level}.0.weight", level, f"{place}.weight"))
            rows.append(_level(f"pyramid.{part}.{level}.1.norm.{{x}}", level, f"{place}.norm.{{x}}"))
    return rows


def _rolled(places: int) -> Any:
    """Move the row of the background, (K + 1, ...), from one end to the other."""
    return lambda tensors, c: [tensors[0].roll(places, 0)]


def _corrections_into(theirs: list[Tensor], config: DetectorConfig) -> list[Tensor]:
    own = theirs[0]
    return [own] if config.agnostic else [torch.cat([own.new_zeros(4, *own.shape[1:]), own])]


def _corrections_out(ours: list[Tensor], config: DetectorConfig) -> list[Tensor]:
    return [ours[0] if config.agnostic else ours[0][4:]]


ROWS_OF_DETECTOR = (
    *map(_of_backbone, ROWS),
    *_pyramid(),
    *table(
        f"proposals.head.conv.{{j}}.0.{{x}} = {RPN}.conv.conv{{j}}.{{x}}",
        f"proposals.head.cls_logits.{{x}} = {RPN}.objectness_logits.{{x}}",
        f"proposals.head.bbox_pred.{{x}} = {RPN}.anchor_deltas.{{x}}",
        f"regions.box.layers.{SIZES.convolutions + 1}.{{x}} = {BOX}.fc1.{{x}}",
        f"regions.box.layers.{{j}}.0.weight = {BOX}.conv{{J}}.weight",
        f"regions.box.layers.{{j}}.1.norm.{{x}} = {BOX}.conv{{J}}.norm.{{x}}",
        f"regions.mask.0.{{j}}.0.weight = {MASK}.mask_fcn{{J}}.weight",
        f"regions.mask.0.{{j}}.1.norm.{{x}} = {MASK}.mask_fcn{{J}}.norm.{{x}}",
        f"regions.mask.1.conv5_mask.{{x}} = {MASK}.deconv.{{x}}",
        f"regions.mask.1.mask_fcn_logits.{{x}} = {MASK}.predictor.{{x}}",
    ),
    row(
        "regions.box.predictor.cls_score.{x}", f"{PREDICTOR}.cls_score.{{x}}", TensorTransform(_rolled(1), _rolled(-1))
    ),
    row(f"{CORRECTIONS}.{{x}}", f"{PREDICTOR}.bbox_pred.{{x}}", TensorTransform(_corrections_into, _corrections_out)),
)


def configure_detector(shapes: Shapes, settings: dict[str, Any]) -> DetectorConfig:
    """The config of a detector; `settings` may have `agnostic`, which one class leaves open, what a note of this
    project tells of the answers, and the `facts` of the format. Raises ValueError for pixels of another kind, and what
    `configure_vitdet` raises."""
    check_pixels(settings.get("facts", {}))
    own = {name.removeprefix(NET): shape for name, shape in shapes.items() if name.startswith(NET)}
    backbone = configure_vitdet(own, settings)
    classes, hidden = shapes[LOGITS][0] - 1, shapes[LOGITS][1]
    one_box = shapes[f"{PREDICTOR}.bbox_pred.weight"][0] == 4
    agnostic = one_box and (classes > 1 or bool(settings.get("agnostic")))
    answers = (LVIS if WEIGHTS in shapes else {}) | {name: settings[name] for name in ANSWERS if name in settings}
    config = DetectorConfig(
        backbone=backbone,
        classes=classes,
        masks=any(name.startswith(f"{MASK}.") for name in shapes),
        heads="vitdet",
        width=shapes[OBJECTNESS][1],
        hidden=hidden,
        finest=max(1, backbone.patch[0] // 4),
        anchor=ANCHOR,
        round_anchors=bool(settings.get("round_anchors", False)),
        agnostic=agnostic,
    )
    return replace(config, **answers)


def check_pixels(facts: Tensors) -> None:
    """Raise ValueError where the mean and deviation of a file's pixels, (C, 1, 1) each, are not ImageNet's of RGB."""
    for name, values in zip(PIXELS, IMAGENET, strict=True):
        own = [round(number, 3) for number in facts[name].flatten().tolist()] if name in facts else None
        usual = [round(255 * value, 3) for value in values]
        if own is None or own == usual:
            continue
        kind = "BGR" if own == usual[::-1] else "other"
        raise ValueError(
            f"its {name} is {', '.join(f'{number:g}' for number in own)}, of {kind} pixels, where {NAME} has "
            f"{', '.join(f'{number:g}' for number in usual)}, of RGB from 0 to 255"
        )


def detector_like(config: ModelConfig) -> bool:
    """Whether it is a detector of ViTDet, with the whole pyramid."""
    return (
        isinstance(config, DetectorConfig)
        and config.heads == "vitdet"
        and config.anchor == ANCHOR
        and len(config.strides) == len(REDUCE) + 1
        and vitdet_like(config.backbone)
    )


def without_background(state: Tensors) -> Tensors:
    """The state of a detector with zeros for the corrections of the background, the first four rows of (4 (1 + K),
    ...), which nothing reads and detectron2 does not have."""
    changed = dict(state)
    for end in ("weight", "bias"):
        if (rows := changed.get(f"{CORRECTIONS}.{end}")) is not None and len(rows) > 4:
            changed[f"{CORRECTIONS}.{end}"] = torch.cat([torch.zeros_like(rows[:4]), rows[4:]])
    return changed


NAME = VITDET.name
DETECTOR = Format(
    NAME,
    "detectron2's ViTDet with the heads of Faster or Mask R-CNN",
    (f"{NET}patch_embed.proj.weight", f"{NET}blocks.0.attn.rel_pos_h", LOGITS),
    ROWS_OF_DETECTOR,
    configure=configure_detector,
    ignored=(*PIXELS, WEIGHTS.replace(".", r"\.")),
    holds=detector_like,
    facts=PIXELS,
    buffers=lambda c: {WEIGHTS: torch.ones(c.classes)} if c.scores == "sigmoid" else {},
    without=(f"{PREDICTOR}.0.cls_score.weight",),
)
# one without its logits is a damaged detector, no backbone; those of a cascade have several predictors, and are read as
# backbones
FORMATS = [DETECTOR, replace(DETECTOR, sign=(*DETECTOR.sign[:2], OBJECTNESS))]
