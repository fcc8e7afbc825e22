"""Views of a clip at evaluation: several sets of frames, of each several crops, whose answers become one by their mean.

The protocol of ViViT (arXiv:2103.15691, section 4.1: the mean of the logits of the views) and of VideoMAE
(arXiv:2203.12602): `4x3` are 4 sets of frames, evenly over the clip, of each 3 crops along the longer side.
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

SINGLE_VIEW = "1x1"  # view: the middle one, of which nothing is the mean
MAX_CLIP_VIEWS = 100  # views of a clip


@dataclass(frozen=True)
class ClipViews:
    """`times` sets of frames of a clip, of each `crops` crops."""

    times: int
    crops: int

    @property
    def count(self) -> int:
        """Views of a clip."""
        return self.times * self.crops

    def pixels(self, clip: Clip, preprocess: ClipPreprocess) -> np.ndarray:
        """A clip -> its views (V, C, *image) uint8, the crops of one set of frames after the other. Raises DataError.

        Without a stride set v of V has, of each of T equal parts of the clip, the frame at (v + 1/2) / V of it; with a
        stride the first set begins at the first frame, the last one ends at the last, and others lie evenly between. A
        single set, and a single crop, are the middle ones.
        """
        moments, places = np.arange(self.times), np.arange(self.crops)
        spread = moments / max(self.times - 1, 1) if self.times > 1 else np.array([0.5])
        draws = spread if preprocess.stride else (moments + 0.5) / self.times
        across = places / (self.crops - 1) if self.crops > 1 else np.array([0.5])
        views = []
        for draw in draws:
            frames = clip.read(preprocess.choose_frame_numbers(len(clip), np.full(preprocess.image[0], draw)))
            views += [preprocess.fit_frames(frames, float(place)) for place in across]
        return np.stack(views)

    def mean(self, compute: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        """A function of (B, V, C, *image) pixels that returns the means over views (B, K) of what `compute` makes of
        (B V, C, *image)."""

        def over_views(pixels: np.ndarray) -> np.ndarray:
            rows = compute(pixels.reshape(-1, *pixels.shape[2:]))
            return rows.reshape(len(pixels), self.count, *rows.shape[1:]).mean(1)

        return over_views


def parse_clip_views(words: str, preprocess: Preprocess) -> ClipViews | None:
    """The views that `words` (`4x3`) ask for; None for one, which is read without them.

    Raises UsageError for other words, for a model that takes no clips, and for crops of one that sees whole frames.
    """
    match = re.fullmatch(r"([1-9]\d?\d?)[xX×]([1-9]\d?\d?)", words)
    if match is None or int(match[1]) * int(match[2]) > MAX_CLIP_VIEWS:
        problem = (
            f"--clip-views {words} is not a number of sets of frames and of crops, "
            f"at most {MAX_CLIP_VIEWS} views together"
        )
        raise UsageError(problem, "use 4x3, or 4x1 for whole frames")
    if (views := ClipViews(int(match[1]), int(match[2]))) == ClipViews(1, 1):
        return None
    preprocess.check_views(words, views.crops)
    return views
