"""Multi-view evaluation of clips: predictions are averaged over temporal clips and spatial crops.

The protocol of ViViT (arXiv:2103.15691, section 4.1: the mean of the logits of the views) and of VideoMAE
(arXiv:2203.12602): `4x3` are 4 sets of frames, evenly over the clip, with 3 crops each along the longer side.
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
    """`num_frame_sets` sets of frames of a clip, each with `num_crops` crops."""

    num_frame_sets: int
    crops: int

    @property
    def count(self) -> int:
        """The number of views of a clip."""
        return self.num_frame_sets * self.crops

    def read_views(self, clip: Clip, preprocess: ClipPreprocess) -> np.ndarray:
        """Extract the views of a clip, (V, C, *image) uint8, ordered by set of frames and then by crop. Raises
        DataError.

        Without a stride, a clip is divided into T equal segments, and set v of V contains the frame at (v + 1/2) / V of
        each. With a stride, the first set begins at the first frame, the last set ends at the last frame, and the
        others are evenly spaced. A single set and a single crop are central.
        """
        set_indices, crop_indices = np.arange(self.num_frame_sets), np.arange(self.crops)
        set_positions = set_indices / max(self.num_frame_sets - 1, 1) if self.num_frame_sets > 1 else np.array([0.5])
        draws = set_positions if preprocess.stride else (set_indices + 0.5) / self.num_frame_sets
        crop_positions = crop_indices / (self.crops - 1) if self.crops > 1 else np.array([0.5])
        views = []
        for draw in draws:
            frames = clip.read_frames(preprocess.choose_frame_numbers(len(clip), np.full(preprocess.image[0], draw)))
            views += [preprocess.fit_frames(frames, float(position)) for position in crop_positions]
        return np.stack(views)

    def average_over_views(self, compute: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function that maps (B, V, C, *image) pixels to the means over views (B, K) of the outputs of
        `compute` for (B V, C, *image)."""

        def over_views(pixels: np.ndarray) -> np.ndarray:
            outputs = compute(pixels.reshape(-1, *pixels.shape[2:]))
            return outputs.reshape(len(pixels), self.count, *outputs.shape[1:]).mean(1)

        return over_views


def parse_clip_views(text: str, preprocess: Preprocess) -> ClipViews | None:
    """Parse clip views such as `4x3`; None for a single view, which needs no wrapper.

    Raises UsageError for an invalid value, for a model without clip input, and for crops if the model reads whole
    frames.
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
