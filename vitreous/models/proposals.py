"""Region proposal network (arXiv:1506.01497, section 3) on a feature pyramid (arXiv:1612.03144, section 4.1).

Shapes: B images, W channels, A anchors per image over all levels, P proposals. Boxes are left, top, right, bottom in
pixels. Corrections (deltas) are the offsets of a box relative to an anchor, in the encoding of Faster R-CNN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.models.boxes import (
    clip_boxes,
    draw_splitmix64,
    has_min_side,
    is_in_crowd,
    nms_keep_mask,
    sample_foreground_background,
)
from vitreous.models.configs.detector import DetectorConfig

ANCHOR_RATIOS = (0.5, 1.0, 2.0)  # height / width of anchors
ANCHOR_FOREGROUND_IOU = 0.7  # IoU from which an anchor is foreground
ANCHOR_BACKGROUND_IOU = 0.3  # IoU below which an anchor is background
NMS_IOU = 0.7  # IoU above which the lower-scored proposal of a level is suppressed
SMOOTH_L1_BETA = 1 / 9  # `beta` of the smooth L1 loss
MIN_PROPOSAL_SIDE = 1e-3  # minimum width and height of a proposal, in pixels


class Proposals(NamedTuple):
    """Region proposals of a batch: `boxes` (B, P, 4) float32, the best first, and `valid` (B, P) bool, false for
    padding."""

    boxes: Tensor
    valid: Tensor


class RegionProposals(nn.Module):
    """Region proposal network: anchors of three aspect ratios at every position of every level, and a head that
    predicts their objectness and box corrections."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        from torchvision.models.detection._utils import BoxCoder, Matcher
        from torchvision.models.detection.rpn import RPNHead

        self.config = config
        self.head = RPNHead(config.width, len(ANCHOR_RATIOS), config.sizes.rpn)
        self.anchor_cells = [
            build_anchor_cells(config.anchor * stride, config.round_anchors) for stride in config.strides
        ]
        self.coder = BoxCoder((1.0, 1.0, 1.0, 1.0))
        self.matcher = Matcher(ANCHOR_FOREGROUND_IOU, ANCHOR_BACKGROUND_IOU, allow_low_quality_matches=True)

    def forward(self, levels: Sequence[Tensor], size: tuple[int, int]) -> Proposals:
        """Compute the proposals of images of `size` (height, width), in pixels, from the pyramid's levels (B, W, h,
        w)."""
        return self.propose(*self.predict(levels), self.make_anchors(levels), size)

    def predict(self, levels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Predict objectness logits (B, A) float32 and corrections of the anchors (B, A, 4) float32 from levels
        (B, W, h, w)."""
        from torchvision.models.detection.rpn import concat_box_prediction_layers

        logits, deltas = concat_box_prediction_layers(*self.head(list(levels)))
        batch_size = len(levels[0])
        return logits.float().view(batch_size, -1), deltas.float().view(batch_size, -1, 4)

    def make_anchors(self, levels: Sequence[Tensor]) -> list[Tensor]:
        """Compute the anchors of each level (B, W, h, w): a list of (h w 3, 4) float32.

        They equal those of torchvision's `AnchorGenerator`, or if they are not rounded, of detectron2's
        `DefaultAnchorGenerator`.
        """
        anchors: list[Tensor] = []
        for level, stride, cells in zip(levels, self.config.strides, self.anchor_cells, strict=True):
            y, x = (torch.arange(length, device=level.device) * float(stride) for length in level.shape[2:])
            shifts = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1] * 2, -1)  # (h, w, 4)
            anchors.append((shifts[:, :, None] + torch.tensor(cells, device=level.device)).view(-1, 4))
        return anchors

    @torch.no_grad()
    def propose(self, logits: Tensor, deltas: Tensor, anchors: list[Tensor], size: tuple[int, int]) -> Proposals:
        """Select the best proposals from logits (B, A), corrections (B, A, 4) and the anchors (a, 4) of each level.

        The top candidates of each level (twice as many in training) are corrected and clipped to the image `size`
        (height, width). Non-maximum suppression per level follows.
        """
        max_proposals = self.config.proposals * (2 if self.training else 1)
        indices_by_level, start = list[Tensor](), 0
        for level_anchors in anchors:
            level_logits = logits[:, start : start + len(level_anchors)]
            indices_by_level.append(level_logits.topk(min(max_proposals, len(level_anchors))).indices + start)
            start += len(level_anchors)
        top_indices = torch.cat(indices_by_level, 1)
        counts = [level_indices.shape[1] for level_indices in indices_by_level]
        scores = logits.gather(1, top_indices).sigmoid()
        deltas = deltas.gather(1, top_indices[..., None].expand(-1, -1, 4))
        top_anchors = torch.cat(anchors)[top_indices]
        boxes = self.coder.decode_single(deltas.flatten(0, 1), top_anchors.flatten(0, 1)).view_as(deltas)
        boxes = clip_boxes(boxes, size)
        scores = scores.where(has_min_side(boxes, MIN_PROPOSAL_SIDE), torch.zeros_like(scores))
        keep = torch.stack([self.nms_per_level(*candidates, counts) for candidates in zip(boxes, scores, strict=True)])
        scores = scores.where(keep, torch.zeros_like(scores))
        count = min(self.config.proposals, scores.shape[1])
        best_scores, order = scores.topk(count)
        valid = best_scores > 0
        boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4)) * valid[..., None]
        return Proposals(boxes, valid)

    def nms_per_level(self, boxes: Tensor, scores: Tensor, counts: list[int]) -> Tensor:
        """Compute which boxes non-maximum suppression within each level keeps: boxes (n, 4), scores (n,), `counts`
        boxes of each level -> (n,) bool."""
        levels = zip(torch.split(boxes, counts), torch.split(scores, counts), strict=True)
        return torch.cat([nms_keep_mask(*level, None, NMS_IOU) for level in levels])

    def losses(
        self, levels: Sequence[Tensor], size: tuple[int, int], targets: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], Proposals]:
        """Compute the losses, scalars, and the proposals, from levels (B, W, h, w), the image `size` (height, width)
        and the targets of `Detector.losses`.

        For an image with n sampled anchors, `objectness` is the mean cross-entropy over them. `proposals` is the sum of
        smooth L1 over the foreground anchors, divided by n. Both are averaged over the images.
        """
        (logits, deltas), anchors = self.predict(levels), self.make_anchors(levels)
        all_anchors, image_losses = torch.cat(anchors), list[Tensor]()
        for image, (boxes, crowd) in enumerate(zip(targets["boxes"], targets["crowd"], strict=True)):
            labels, match = self.match_anchors(all_anchors, boxes[~crowd], boxes[crowd])
            keys = draw_splitmix64(targets["keys"][image], len(labels))
            positive, negative = sample_foreground_background(labels, keys, self.config.sizes.anchors, 0.5)
            sampled = torch.cat([positive, negative])
            entropy = F.binary_cross_entropy_with_logits(logits[image, sampled], labels[sampled].float())
            target_deltas = self.coder.encode_single(boxes[~crowd][match[positive]], all_anchors[positive])
            distance = F.smooth_l1_loss(deltas[image, positive], target_deltas, beta=SMOOTH_L1_BETA, reduction="sum")
            image_losses.append(torch.stack([entropy, distance / max(1, len(sampled))]))
        objectness_loss, box_loss = torch.stack(image_losses).mean(0)
        losses = {"objectness": objectness_loss, "proposals": box_loss}
        return losses, self.propose(logits.detach(), deltas.detach(), anchors, size)

    def match_anchors(self, anchors: Tensor, boxes: Tensor, crowds: Tensor) -> tuple[Tensor, Tensor]:
        """Match anchors (A, 4) to objects (n, 4) and crowd regions (m, 4).

        Returns labels (A,) int64, 1 for foreground, 0 for background, -1 for ignored, and (A,) int64, the index of the
        matched object.
        """
        from torchvision.ops import box_iou

        if len(boxes):
            match = self.matcher(box_iou(boxes, anchors))
            labels = torch.where(match >= 0, 1, torch.where(match == self.matcher.BELOW_LOW_THRESHOLD, 0, -1))
        else:
            match = labels = torch.zeros(len(anchors), dtype=torch.int64, device=anchors.device)
        labels = torch.where((labels == 0) & is_in_crowd(anchors, crowds), -1, labels)
        return labels, match.clamp(min=0)


def build_anchor_cells(side: float, rounded: bool) -> list[list[float]]:
    """Build the anchors of one position, centred at 0: left, top, right, bottom in pixels, in the order of
    `ANCHOR_RATIOS`.

    Each has an area of `side` squared. With `rounded`, corners are rounded to whole pixels, halves to even.
    """
    sizes = [(side / ratio**0.5, side * ratio**0.5) for ratio in ANCHOR_RATIOS]
    cells = [[-width / 2, -height / 2, width / 2, height / 2] for width, height in sizes]
    return [[float(round(edge)) for edge in cell] for cell in cells] if rounded else cells
