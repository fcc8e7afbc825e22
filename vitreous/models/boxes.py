"""Operations on boxes: non-maximum suppression, sampling for training, and RoIAlign (arXiv:1703.06870, section 3).

Boxes (n, 4) float32 are left, top, right, bottom in pixels. Regions (n, 5) are an image index and a box. Output shapes
do not depend on values, except those of sampled training boxes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CANONICAL_ROI_SIDE = 14  # minimum positions along a region's side on its level: 224 pixels at stride 16
MIN_CROWD_OVERLAP = 0.7  # share of a box in a crowd from which the box is ignored (as in Detectron)


def nms_keep_mask(boxes: Tensor, scores: Tensor, groups: Tensor | None, threshold: float) -> Tensor:
    """Compute which boxes torchvision's non-maximum suppression keeps: boxes (n, 4), scores (n,), groups (n,) int64 ->
    (n,) bool.

    A box is dropped if it overlaps a kept box of higher score by more than `threshold` (IoU). With `groups`, such as
    classes, boxes suppress only boxes of the same group: the boxes of each group are shifted to a separate area. The
    areas form a square grid, so coordinates stay small and exact.
    """
    from torchvision.ops import nms

    if groups is not None:
        spacing = boxes.max() + 1
        grid_size = (groups.max() + 1).to(boxes.dtype).sqrt().ceil().clamp(min=1)
        column, row = groups.to(boxes.dtype) % grid_size, (groups.to(boxes.dtype) / grid_size).floor()
        boxes = boxes + torch.stack([column, row, column, row], -1) * spacing
    survivors = nms(boxes, scores, threshold)
    return torch.zeros_like(scores).scatter(0, survivors, torch.ones_like(scores)[survivors]).bool()


def clip_boxes(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Clip boxes (..., 4) to an image of `size` (height, width), in pixels."""
    height, width = size
    return torch.stack([boxes[..., axis].clamp(0, (width, height)[axis % 2]) for axis in range(4)], -1)


def has_min_side(boxes: Tensor, min_side: float) -> Tensor:
    """Return whether width and height of boxes (..., 4) are at least `min_side` pixels, as bool of shape (...)."""
    return ((boxes[..., 2] - boxes[..., 0]) >= min_side) & ((boxes[..., 3] - boxes[..., 1]) >= min_side)


def pyramid_roi_align(
    levels: Sequence[Tensor], strides: Sequence[int], regions: Tensor, bins: int, sampling: int
) -> Tensor:
    """Sample regions from a feature pyramid by RoIAlign (arXiv:1703.06870, section 3): levels (B, W, h, w), regions
    (n, 5) -> (n, W, bins, bins) float32.

    A region is sampled from the level on which its side has at least 14, but less than 28, positions
    (FPN, arXiv:1612.03144, Eq. 1), or from the nearest level:

        for image, box in regions:
            level = clamp(floor(log2(sqrt(area of box) / (14 strides[0]))), 0, number of levels - 1)
            roi_align(levels[level][image], box / strides[level], bins, sampling)

    All levels are copied into a single map (an atlas), so one call samples the regions of all levels. The border of
    each level is repeated, because RoIAlign samples beyond an edge.
    """
    from torchvision.ops import roi_align

    heights, columns = [level.shape[2] + 2 for level in levels], max(level.shape[3] for level in levels) + 2
    padded_levels = [F.pad(level.float(), (1, 1, 1, 1), "replicate") for level in levels]
    atlas = torch.cat([F.pad(x, (0, columns - x.shape[3])) for x in padded_levels], 2)
    boxes = regions[:, 1:]
    box_size = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).clamp(min=0).sqrt()
    level_index = (box_size.clamp(min=1e-6) / (CANONICAL_ROI_SIDE * strides[0])).log2().add(1e-6).floor()
    level_index = level_index.clamp(0, len(levels) - 1).long()
    stride = torch.tensor([float(stride) for stride in strides], device=boxes.device)[level_index]
    first_row = torch.tensor([float(sum(heights[:index])) for index in range(len(heights))], device=boxes.device)[
        level_index
    ]
    offset = torch.stack([torch.ones_like(first_row), first_row + 1] * 2, -1)
    atlas_regions = torch.cat([regions[:, :1], boxes / stride[:, None] + offset], 1)
    if atlas.requires_grad and sampling and atlas.device.type == "cpu":
        return single_level_roi_align(atlas, atlas_regions, bins, sampling)
    return roi_align(atlas, atlas_regions, bins, 1.0, sampling, aligned=True)


def sample_foreground_background(labels: Tensor, keys: Tensor, count: int, share: float) -> tuple[Tensor, Tensor]:
    """Sample boxes for training by their labels: (n,) int64, above 0 for objects, 0 for background, below 0 for ignored
    boxes -> indices of the sampled objects, indices of the sampled background.

    At most `count` are sampled, at most the `share` of `count` objects, uniformly. This is torchvision's
    `BalancedPositiveNegativeSampler` with random numbers from distinct `keys` (n,): boxes with the lowest keys are
    sampled.
    """
    positive, negative = torch.where(labels >= 1)[0], torch.where(labels == 0)[0]
    positive = positive[keys[positive].argsort(stable=True)][: int(count * share)]
    return positive, negative[keys[negative].argsort(stable=True)][: count - len(positive)]


def draw_splitmix64(key: Tensor, count: int) -> Tensor:
    """Draw pseudo-random int64 (count,) from a `key`, a scalar int64, by SplitMix64's finaliser of key + index.

    The numbers are identical on every device and machine.
    """
    state = key + torch.arange(1, count + 1, device=key.device) * to_signed_int64(0x9E3779B97F4A7C15)
    state = (state ^ logical_right_shift(state, 30)) * to_signed_int64(0xBF58476D1CE4E5B9)
    state = (state ^ logical_right_shift(state, 27)) * to_signed_int64(0x94D049BB133111EB)
    return state ^ logical_right_shift(state, 31)


def logical_right_shift(values: Tensor, bits: int) -> Tensor:
    """Shift (n,) int64 to the right as unsigned 64-bit numbers, with zeros from the left."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def to_signed_int64(value: int) -> int:
    """Reinterpret an unsigned 64-bit number as int64."""
    return value - (1 << 64) if value >= 1 << 63 else value


def is_in_crowd(boxes: Tensor, crowds: Tensor) -> Tensor:
    """Return whether at least 0.7 of a box is in one of the crowd regions: boxes (n, 4), crowds (m, 4) -> (n,) bool."""
    if not len(crowds):
        return torch.zeros(len(boxes), dtype=torch.bool, device=boxes.device)
    corner = torch.maximum(boxes[:, None, :2], crowds[None, :, :2])
    overlap = (torch.minimum(boxes[:, None, 2:], crowds[None, :, 2:]) - corner).clamp(min=0)
    area = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).clamp(min=1e-6)
    return (overlap.prod(-1) / area[:, None] >= MIN_CROWD_OVERLAP).any(1)


def single_level_roi_align(maps: Tensor, regions: Tensor, bins: int, sampling: int) -> Tensor:
    """Sample regions from a single map, as torchvision's `roi_align` with `aligned=True`; used in training on a CPU:
    maps (B, W, h, w), regions (n, 5) in positions of the map -> (n, W, b, b), b = `bins`.

    Each bin is the mean of s x s points (s = `sampling`), each interpolated bilinearly:

        for bin in bins of the region:
            for y, x in the centres of s x s cells of the bin, less half a position:
                sum over the four positions around: (1 - |y - row|) (1 - |x - column|) map[row, column] / s^2
    """
    (num_images, channels, height, width), count = maps.shape, len(regions)
    rows, row_weights = bilinear_sampling_weights(regions[:, 2], regions[:, 4], height, bins, sampling)
    columns, column_weights = bilinear_sampling_weights(regions[:, 1], regions[:, 3], width, bins, sampling)
    first_row = regions[:, 0].long().view(-1, 1, 1, 1, 1) * height
    indices = (first_row + rows[:, :, None, :, None]) * width + columns[:, None, :, None]  # (n, b, b, 2 s, 2 s)
    weights = row_weights[:, :, None, :, None] * column_weights[:, None, :, None]
    table = maps.movedim(1, -1).reshape(num_images * height * width, channels)
    bags, bag_weights = indices.flatten(0, 2).flatten(1), weights.flatten(0, 2).flatten(1)
    sums = F.embedding_bag(bags, table, per_sample_weights=bag_weights, mode="sum")
    return sums.view(count, bins, bins, channels).movedim(-1, 1)


def bilinear_sampling_weights(
    low: Tensor, high: Tensor, length: int, bins: int, sampling: int
) -> tuple[Tensor, Tensor]:
    """Compute the positions that each bin samples along an axis of `length` positions, and their weights: start `low`
    (n,) and end `high` (n,) of regions -> (n, b, 2 s) int64, (n, b, 2 s), with b = `bins` and s = `sampling`."""
    fractions = (torch.arange(bins * sampling, device=low.device) + 0.5) / (bins * sampling)
    points = (low - 0.5)[:, None] + (high - low)[:, None] * fractions
    is_inside = (points >= -1) & (points <= length)
    points = points.clamp(0, length - 1)
    lower = points.floor()
    indices = torch.stack([lower, (lower + 1).clamp(max=length - 1)], -1).long()
    upper_weight = points - lower
    weights = torch.stack([1 - upper_weight, upper_weight], -1) * is_inside[..., None] / sampling
    return indices.view(-1, bins, 2 * sampling), weights.view(-1, bins, 2 * sampling)
