"""Multi-view evaluation of clips: predictions are averaged over temporal clips and spatial crops.

The protocol is that of ViViT (arXiv:2103.15691, section 4.1: the logits of the views are averaged) and of VideoMAE
(arXiv:2203.12602). `4x3` means 4 sets of frames, spread evenly over the clip, with 3 crops each along the longer
side.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitreous.data.decoding.clip import Clip
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.clips import ClipPreprocess
from vitreous.errors import UsageError

SINGLE_VIEW = "1x1"  # a single view, the central one, without averaging
MAX_CLIP_VIEWS = 100  # maximum number of views of a clip


@dataclass(frozen=True)
class ClipViews:
    """Number of views of a clip: `num_frame_sets` sets of frames, each with `crops` crops."""

    num_frame_sets: int
    crops: int

    @property
    def count(self) -> int:
        """The number of views of a clip."""
        return self.num_frame_sets * self.crops

    def read_views(self, clip: Clip, preprocess: ClipPreprocess) -> np.ndarray:
        """Extract the V views of a clip, (V, C, *image) uint8, ordered by set of frames and then by crop. Raises
        DataError for unreadable frames.

        A set has T frames. If `preprocess` has no stride, the clip is divided into T equal segments, and set s of S
        contains the frame at (s + 1/2) / S of each segment. With a stride, the first set begins at the first frame, the
        last set ends at the last frame, and the others are evenly spaced. A single set, and a single crop, is
        centred.
        """
        set_indices, crop_indices = np.arange(self.num_frame_sets), np.arange(self.crops)
        set_positions = set_indices / max(self.num_frame_sets - 1, 1) if self.num_frame_sets > 1 else np.array([0.5])
        segment_positions = set_positions if preprocess.stride else (set_indices + 0.5) / self.num_frame_sets
        crop_positions = crop_indices / (self.crops - 1) if self.crops > 1 else np.array([0.5])
        views = []
        for segment_position in segment_positions:
            frames = clip.read_frames(
                preprocess.choose_frame_numbers(len(clip), np.full(preprocess.image[0], segment_position))
            )
            views += [preprocess.fit_frames(frames, float(position)) for position in crop_positions]
        return np.stack(views)

    def average_over_views(self, compute: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        """Wrap `compute`, which maps pixels (B V, C, *image) to outputs (B V, K), so that outputs are averaged over
        views: the returned function maps (B, V, C, *image) to (B, K)."""

        def compute_view_means(pixels: np.ndarray) -> np.ndarray:
            outputs = compute(pixels.reshape(-1, *pixels.shape[2:]))
            return outputs.reshape(len(pixels), self.count, *outputs.shape[1:]).mean(1)

        return compute_view_means


def parse_clip_views(text: str, preprocess: Preprocess) -> ClipViews | None:
    """Parse the value of --clip-views, such as `4x3`. Returns None for `1x1`, since a single view is not averaged.

    Raises UsageError for an invalid value, for a model without clip input, and for several crops if the model's input
    is the complete frame.
    """
    match = re.fullmatch(r"([1-9]\d?\d?)[xX×]([1-9]\d?\d?)", text)
    if match is None or int(match[1]) * int(match[2]) > MAX_CLIP_VIEWS:
        problem = (
            f"--clip-views {text} is not SETSxCROPS (sets of frames, crops of each), "
            f"at most {MAX_CLIP_VIEWS} views together"
        )
        raise UsageError(problem, "use 4x3, or 4x1 for whole frames")
    if (views := ClipViews(int(match[1]), int(match[2]))) == ClipViews(1, 1):
        return None
    preprocess.check_views(text, views.crops)
    return views
