"""The region proposal network (arXiv:1506.01497, section 3) on a feature pyramid (arXiv:1612.03144, section 4.1).

B images, W channels, A anchors per image over all levels, P proposals.
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
ANCHOR_FOREGROUND_IOU, ANCHOR_BACKGROUND_IOU = (
    0.7,
    0.3,
)  # IoU from which an anchor is foreground, and below which it is background
NMS_IOU = 0.7  # IoU above which the lower-scored proposal of a level is suppressed
SMOOTH_L1_BETA = 1 / 9  # of the smooth L1 loss
MIN_PROPOSAL_SIDE = 1e-3  # minimum side in pixels


class Proposals(NamedTuple):
    """Region proposals: `boxes` (B, P, 4) float32, best first, and `valid` (B, P) bool, false for padding."""

    boxes: Tensor
    valid: Tensor


class RegionProposals(nn.Module):
    """Anchors of three shapes at every position of every level, and their objectness and box corrections."""

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
        """Levels (B, W, h, w) of images of (height, width) `size` -> P proposals per image."""
        return self.propose(*self.predict(levels), self.make_anchors(levels), size)

    def predict(self, levels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Levels (B, W, h, w) -> (B, A) float32 logits and (B, A, 4) float32 corrections of the anchors."""
        from torchvision.models.detection.rpn import concat_box_prediction_layers

        logits, deltas = concat_box_prediction_layers(*self.head(list(levels)))
        count = len(levels[0])
        return logits.float().view(count, -1), deltas.float().view(count, -1, 4)

    def make_anchors(self, levels: Sequence[Tensor]) -> list[Tensor]:
        """Levels (B, W, h, w) -> (h w 3, 4) float32 anchors per level: as torchvision's `AnchorGenerator`, or as
        detectron2's `DefaultAnchorGenerator` if they are not rounded."""
        anchors: list[Tensor] = []
        for level, stride, cells in zip(levels, self.config.strides, self.anchor_cells, strict=True):
            y, x = (torch.arange(length, device=level.device) * float(stride) for length in level.shape[2:])
            shifts = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1] * 2, -1)  # (h, w, 4)
            anchors.append((shifts[:, :, None] + torch.tensor(cells, device=level.device)).view(-1, 4))
        return anchors

    @torch.no_grad()
    def propose(self, logits: Tensor, deltas: Tensor, anchors: list[Tensor], size: tuple[int, int]) -> Proposals:
        """(B, A) logits, (B, A, 4) corrections of anchors (a, 4) per level -> the best proposals.

        The top candidates of each level (twice as many in training) are corrected and clipped; non-maximum suppression
        per level follows.
        """
        max_proposals = self.config.proposals * (2 if self.training else 1)
        index, start = list[Tensor](), 0
        for level_anchors in anchors:
            index.append(
                logits[:, start : start + len(level_anchors)].topk(min(max_proposals, len(level_anchors))).indices
                + start
            )
            start += len(level_anchors)
        top_indices, counts = torch.cat(index, 1), [level_indices.shape[1] for level_indices in index]
        scores = logits.gather(1, top_indices).sigmoid()
        deltas = deltas.gather(1, top_indices[..., None].expand(-1, -1, 4))
        starts = torch.cat(anchors)[top_indices]
        boxes = self.coder.decode_single(deltas.flatten(0, 1), starts.flatten(0, 1)).view_as(deltas)
        boxes = clip_boxes(boxes, size)
        scores = scores.where(has_min_side(boxes, MIN_PROPOSAL_SIDE), torch.zeros_like(scores))
        keep = torch.stack([self.nms_per_level(*candidates, counts) for candidates in zip(boxes, scores, strict=True)])
        scores = scores.where(keep, torch.zeros_like(scores))
        count = min(self.config.proposals, scores.shape[1])
        best, order = scores.topk(count)
        valid = best > 0
        boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4)) * valid[..., None]
        return Proposals(boxes, valid)

    def nms_per_level(self, boxes: Tensor, scores: Tensor, counts: list[int]) -> Tensor:
        """(n, 4), (n,), `counts` boxes of each level -> (n,) bool: the boxes kept."""
        levels = zip(torch.split(boxes, counts), torch.split(scores, counts), strict=True)
        return torch.cat([nms_keep_mask(*level, None, NMS_IOU) for level in levels])

    def losses(
        self, levels: Sequence[Tensor], size: tuple[int, int], targets: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], Proposals]:
        """Levels (B, W, h, w) and `Detector.losses`' targets -> losses, scalars, and the proposals.

        For an image with n sampled anchors, `objectness` is the mean cross-entropy over them, `proposals` the sum of
        smooth L1 over the foreground ones, divided by n.
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
        objectness, corrections = torch.stack(image_losses).mean(0)
        losses = {"objectness": objectness, "proposals": corrections}
        return losses, self.propose(logits.detach(), deltas.detach(), anchors, size)

    def match_anchors(self, anchors: Tensor, boxes: Tensor, crowds: Tensor) -> tuple[Tensor, Tensor]:
        """(A, 4), (n, 4), (m, 4) -> (A,) int64, 1 for foreground, 0 for background, -1 for ignored, and (A,) int64, the
        index of the matched object."""
        from torchvision.ops import box_iou

        if len(boxes):
            match = self.matcher(box_iou(boxes, anchors))
            labels = torch.where(match >= 0, 1, torch.where(match == self.matcher.BELOW_LOW_THRESHOLD, 0, -1))
        else:
            match = labels = torch.zeros(len(anchors), dtype=torch.int64, device=anchors.device)
        labels = torch.where((labels == 0) & is_in_crowd(anchors, crowds), -1, labels)
        return labels, match.clamp(min=0)


def build_anchor_cells(side: float, rounded: bool) -> list[list[float]]:
    """Build anchors of an area of `side` squared centred at 0, in the order of RATIOS: left, top, right, bottom in
    pixels.

    With `rounded`, corners are rounded to whole pixels, halves to even.
    """
    sizes = [(side / ratio**0.5, side * ratio**0.5) for ratio in ANCHOR_RATIOS]
    cells = [[-width / 2, -height / 2, width / 2, height / 2] for width, height in sizes]
    return [[float(round(edge)) for edge in cell] for cell in cells] if rounded else cells
