"""Region heads that predict class, box and mask of each proposal (arXiv:1506.01497, arXiv:1703.06870).

Shapes: B images, W channels, P proposals, K classes, N detections per image, R sampled training regions. Regions (n, 5)
are an image index and a box: left, top, right, bottom in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.models.boxes import (
    clip_boxes,
    draw_splitmix64,
    has_min_side,
    is_in_crowd,
    nms_keep_mask,
    pyramid_roi_align,
    sample_foreground_background,
)
from vitreous.models.configs.detector import DetectorConfig
from vitreous.models.proposals import Proposals
from vitreous.nn.pyramid import LayerNorm2d

BOX_CODER_WEIGHTS = (10.0, 10.0, 5.0, 5.0)  # scales of the box corrections of x, y, width and height
REGION_FOREGROUND_IOU = 0.5  # IoU from which a region is foreground
FOREGROUND_FRACTION = 0.25  # maximum share of foreground regions among the sampled regions
BOX_BINS, MASK_BINS = 7, 14  # RoIAlign bins along a region's side for the box head and the mask head
MAX_NMS_CANDIDATES = 1000  # highest-scored boxes per image, over all classes, that enter non-maximum suppression
MIN_DETECTION_SIDE = 1e-2  # minimum width and height of a detection, in pixels
REGION_SAMPLING_SALT = 0x5245  # makes the random numbers of regions independent of those of anchors


class RegionHeads(nn.Module):
    """Heads for classes, boxes and masks of regions, built from torchvision's layers."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        from torchvision.models.detection._utils import BoxCoder, Matcher

        self.config = config
        self.box = BoxHead(config)
        self.mask = mask_head(config) if config.masks else None
        self.coder = BoxCoder(BOX_CODER_WEIGHTS)
        self.matcher = Matcher(REGION_FOREGROUND_IOU, REGION_FOREGROUND_IOU, allow_low_quality_matches=False)

    def forward(self, levels: Sequence[Tensor], proposals: Proposals, size: tuple[int, int]) -> tuple[Tensor, ...]:
        """Detect objects in the proposals: levels (B, W, h, w), proposals of images of `size` (height, width) -> the
        output of `Detector.forward`, N entries per image."""
        logits, corrections = self.box(self.pool_regions(levels, prepend_image_indices(proposals.boxes), BOX_BINS))
        images, count = proposals.boxes.shape[:2]
        logits = logits.float()
        scores = logits.softmax(-1)[:, 1:] if self.config.scores == "softmax" else logits[:, 1:].sigmoid()
        scores = scores.view(images, count, -1) * proposals.valid[..., None]
        deltas = corrections.float().view(images * count, -1)
        boxes = self.coder.decode_single(deltas, proposals.boxes.flatten(0, 1)).view(images, count, -1, 4)
        boxes = clip_boxes(boxes if self.config.agnostic else boxes[:, :, 1:], size)
        boxes = boxes.expand(-1, -1, self.config.classes, -1)
        boxes, scores, labels = self.select_detections(boxes, scores)
        if self.mask is None:
            return boxes, scores, labels
        logits = self.mask(self.pool_regions(levels, prepend_image_indices(boxes), MASK_BINS)).float()
        mask_labels = labels.flatten()[:, None, None, None].expand(-1, 1, *logits.shape[2:])
        masks = logits.gather(1, mask_labels).view(*labels.shape, *logits.shape[2:]).sigmoid()
        return boxes, scores, labels, masks

    def select_detections(self, boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Select the best detections per image: boxes (B, P, K, 4), scores (B, P, K) -> boxes (B, N, 4), scores (B, N),
        labels (B, N) int64.

        They are those with a score above the threshold that non-maximum suppression per class keeps, the highest score
        first. Entries after the last detection are zeros.
        """
        c, zero = self.config, torch.zeros((), device=scores.device)
        scores = scores.where((scores > c.threshold) & has_min_side(boxes, MIN_DETECTION_SIDE), zero).flatten(1)
        scores, order = scores.topk(min(MAX_NMS_CANDIDATES, scores.shape[1]))
        boxes = boxes.flatten(1, 2).gather(1, order[..., None].expand(-1, -1, 4))
        labels = order % c.classes
        keep = torch.stack(
            [nms_keep_mask(*candidates, c.nms) for candidates in zip(boxes, scores, labels, strict=True)]
        )
        num_missing = max(0, c.detections - scores.shape[1])
        scores = torch.nn.functional.pad(scores.where(keep, zero), (0, num_missing))
        boxes, labels = (
            torch.nn.functional.pad(boxes, (0, 0, 0, num_missing)),
            torch.nn.functional.pad(labels, (0, num_missing)),
        )
        scores, order = scores.topk(c.detections)
        is_valid = scores > 0
        boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4)) * is_valid[..., None]
        return boxes, scores, labels.gather(1, order) * is_valid

    def losses(self, levels: Sequence[Tensor], proposals: Proposals, targets: Mapping[str, Any]) -> dict[str, Tensor]:
        """Compute the losses, scalars, from levels (B, W, h, w), proposals and the targets of `Detector.losses`.

        For an image with R sampled regions:

        - `classes`: the mean cross-entropy over them. With `sigmoid` scores it is the sum of `federated_loss` over the
          image's classes, only those in `federated` (B, K) bool if targets have it.
        - `boxes`: the sum of smooth L1 over foreground regions, divided by R (torchvision's `fastrcnn_loss`).
        - `masks`: the mean binary cross-entropy over the masks of objects, 0 if there are none (`maskrcnn_loss`).
        """
        from torchvision.models.detection.roi_heads import fastrcnn_loss, maskrcnn_loss

        samples = [self.sample_training_regions(proposals, targets, image) for image in range(len(proposals.boxes))]
        counts = [len(labels) for _, labels, _ in samples]
        regions = torch.cat([prepend_image_index(boxes, image) for image, (boxes, _, _) in enumerate(samples)])
        logits, corrections = self.box(self.pool_regions(levels, regions, BOX_BINS))
        image_losses: list[Tensor] = []
        outputs = zip(torch.split(logits.float(), counts), torch.split(corrections.float(), counts), strict=True)
        for image, (region_logits, deltas) in enumerate(outputs):
            boxes, labels, match = samples[image]
            if self.config.agnostic:
                deltas = deltas.repeat(1, region_logits.shape[1])
            objects = select_targets(targets, image, "boxes")
            target_boxes = boxes if not len(objects) else objects[match]
            entropy, distance = fastrcnn_loss(
                region_logits, deltas, [labels], [self.coder.encode_single(target_boxes, boxes)]
            )
            if self.config.scores == "sigmoid":
                counted_classes = targets["federated"][image] if "federated" in targets else None
                entropy = federated_loss(region_logits, labels, counted_classes)
            image_losses.append(torch.stack([entropy, distance]))
        class_loss, box_loss = torch.stack(image_losses).mean(0)
        losses = {"classes": class_loss, "boxes": box_loss}
        if self.mask is None:
            return losses
        objects = [(boxes[labels > 0], match[labels > 0]) for boxes, labels, match in samples]
        regions = torch.cat([prepend_image_index(boxes, image) for image, (boxes, _) in enumerate(objects)])
        logits = self.mask(self.pool_regions(levels, regions, MASK_BINS)).float()
        logits = torch.split(logits, [len(match) for _, match in objects])
        image_losses = [
            maskrcnn_loss(
                mask_logits,
                [boxes],
                [select_targets(targets, image, "masks")],
                [select_targets(targets, image, "labels")],
                [match],
            )
            for image, (mask_logits, (boxes, match)) in enumerate(zip(logits, objects, strict=True))
        ]
        return losses | {"masks": torch.stack(image_losses).mean()}

    @torch.no_grad()
    def sample_training_regions(
        self, proposals: Proposals, targets: Mapping[str, Any], image: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample an image's training regions: boxes (R, 4), labels (R,) int64, and the index of the matched object (R,)
        int64.

        Labels are 0 for background and 1 + the class for an object. Ground-truth boxes are among the candidates.
        """
        from torchvision.ops import box_iou

        objects, labels = select_targets(targets, image, "boxes"), select_targets(targets, image, "labels")
        crowds = targets["boxes"][image][targets["crowd"][image]]
        boxes = torch.cat([proposals.boxes[image], objects])
        valid = torch.cat([proposals.valid[image], torch.ones(len(objects), dtype=torch.bool, device=boxes.device)])
        if len(objects):
            match = self.matcher(box_iou(objects, boxes))
            target_labels = torch.where(match >= 0, labels[match.clamp(min=0)] + 1, 0)
        else:
            target_labels = match = torch.zeros(len(boxes), dtype=torch.int64, device=boxes.device)
        target_labels = torch.where(~valid | ((target_labels == 0) & is_in_crowd(boxes, crowds)), -1, target_labels)
        keys = draw_splitmix64(targets["keys"][image] ^ REGION_SAMPLING_SALT, len(target_labels))
        selected = torch.cat(
            sample_foreground_background(target_labels, keys, self.config.sizes.regions, FOREGROUND_FRACTION)
        )
        return boxes[selected], target_labels[selected], match[selected].clamp(min=0)

    def pool_regions(self, levels: Sequence[Tensor], regions: Tensor, bins: int) -> Tensor:
        """Sample regions (n, 5) from levels (B, W, h, w) by RoIAlign -> (n, W, bins, bins) in the dtype of the levels.

        The coarsest level is not used, because only proposals use it.
        """
        used_levels, strides = levels[:-1], self.config.strides[:-1]
        return pyramid_roi_align(used_levels, strides, regions, bins, self.config.sizes.sampling).to(levels[0].dtype)


class BoxHead(nn.Module):
    """Head that predicts classes and box corrections of regions: (n, W, 7, 7) -> logits (n, 1 + K), the background
    first, and corrections (n, (1 + K) 4), or (n, 4) if all classes share them.

    Linear layers are drawn Xavier uniform, the last ones from N(0, 0.01^2) and N(0, 0.001^2), as in Detectron2.
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor

        sizes, width = config.sizes, config.width
        shape = (width, BOX_BINS, BOX_BINS)
        norm = LayerNorm2d if sizes.norm else None
        self.layers = FastRCNNConvFCHead(shape, [width] * sizes.convolutions, [config.hidden] * sizes.layers, norm)
        self.predictor = FastRCNNPredictor(config.hidden, 1 + config.classes)
        if config.agnostic:
            self.predictor.bbox_pred = nn.Linear(config.hidden, 4)
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_uniform_(layer.weight, a=1)
                nn.init.zeros_(layer.bias)
        for layer, std in ((self.predictor.cls_score, 0.01), (self.predictor.bbox_pred, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Predict logits and corrections: (n, W, 7, 7) -> (n, 1 + K), (n, (1 + K) 4)."""
        return self.predictor(self.layers(features))


def federated_loss(logits: Tensor, labels: Tensor, counted_classes: Tensor | None = None) -> Tensor:
    """Compute the binary cross-entropy of regions, summed over classes and averaged over regions: logits s (R, 1 + K),
    of which the first is not used, labels (R,) int64, 0 for background and 1 + the class for an object -> a scalar.

    If `counted_classes` (K,) bool is set, only these classes are counted: for the others the image is not exhaustively
    annotated (federated annotation, arXiv:2103.07461; as in detectron2).

        sum(log(1 + exp(s[r, 1 + k])) - s[r, 1 + k] * (labels[r] == 1 + k) for r in regions for k in counted) / R
    """
    targets = torch.nn.functional.one_hot(labels, logits.shape[1])[:, 1:].to(logits.dtype)
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 1:], targets, reduction="none").sum(0)
    return (entropy if counted_classes is None else entropy * counted_classes).sum() / max(1, len(logits))


def mask_head(config: DetectorConfig) -> nn.Module:
    """Build the head that predicts a mask per class: (n, W, 14, 14) -> logits (n, K, 28, 28)."""
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

    norm: Callable[..., nn.Module] | None = LayerNorm2d if config.sizes.norm else None
    layers = MaskRCNNHeads(config.width, [config.width] * config.sizes.masks, 1, norm)
    return nn.Sequential(layers, MaskRCNNPredictor(config.width, config.width, config.classes))


def prepend_image_indices(boxes: Tensor) -> Tensor:
    """Convert the boxes of each image (B, n, 4) to regions (B n, 5), with the index of the image in front."""
    images, count = boxes.shape[:2]
    image_indices = torch.arange(images, device=boxes.device, dtype=boxes.dtype)[:, None, None].expand(-1, count, 1)
    return torch.cat([image_indices, boxes], -1).flatten(0, 1)


def prepend_image_index(boxes: Tensor, image: int) -> Tensor:
    """Convert the boxes (n, 4) of one image to regions (n, 5), with the index of the image in front."""
    return torch.cat([torch.full_like(boxes[:, :1], image), boxes], 1)


def select_targets(targets: Mapping[str, Any], image: int, name: str) -> Tensor:
    """Return the named annotations (n, ...) of an image's objects, without crowd regions."""
    return targets[name][image][~targets["crowd"][image]]
