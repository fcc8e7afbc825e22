"""Clips: frames of videos, GIFs and folders of numbered frames."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from PIL import Image

from vitreous.data.decoding.clip import Clip, sample_frames_by_stride, sample_frames_evenly
from vitreous.data.decoding.clips import GIF_SUFFIX, VIDEO_SUFFIXES, open_clip
from vitreous.data.decoding.decode import PILLOW_MODES
from vitreous.data.layouts.video import list_clips
from vitreous.data.modalities.base import Preprocess, RawSample, SampleForm, image_to_array
from vitreous.data.modalities.planar import ColourMixin, SizedPreprocess
from vitreous.errors import DataError, UsageError


@dataclass(frozen=True)
class ClipPreprocess(ColourMixin, SizedPreprocess):
    """Clips, (C, frames, height, width) uint8, of which each frame is fitted like an image.

    `stride`: distance between sampled frames of a clip, taken around its centre; 0: frames are spread evenly over the
    clip.
    """

    noun: ClassVar[str] = "clips"
    form: ClassVar[Literal["images", "clips", "arrays"]] = "clips"
    axes: ClassVar[int] = 3
    axis_names: ClassVar[str] = "T, H, W"
    suffixes: ClassVar[frozenset[str]] = VIDEO_SUFFIXES | {GIF_SUFFIX}
    folder_hint: ClassVar[str] = (
        "a folder of clips must contain video files, GIFs or folders of numbered frames, but no other images"
    )
    is_animated: ClassVar[bool] = True
    hub_task: ClassVar[str] = "video-classification"

    _: KW_ONLY
    stride: int = 0
    name: Literal["clips"] = "clips"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride < 0:
            hint = "use a stride of 1 or more, or 0 for evenly spread frames"
            raise UsageError(f"invalid stride of {self.stride} frames", hint)

    @classmethod
    def find_files(cls, folder: str) -> list[str]:
        """List the video files, GIFs and folders of frames below a folder; empty if there are other images."""
        return list_clips(folder, 0) or []

    @classmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, requested: Mapping[str, str]) -> SampleForm:
        """Return frames, height and width of a clip. Raises DataError."""
        clip = open_as_clip(raw, name)
        size, count = (len(clip), *clip.size), channels or 3
        return SampleForm(size, count, cls(size, count, *cls.default_moments(count)))

    @property
    def frames(self) -> int:
        """The number of frames that a model sees."""
        return self.image[0]

    @property
    def resized_axes(self) -> int:
        """The number of last axes of `image` that `--image-size` sets: height and width."""
        return 2

    def decode(self, raw: RawSample, name: str | None = None) -> np.ndarray:
        """Decode a file, its bytes, a folder of frames, or pixels to the sampled frames, (T, H, W, 3) uint8. Raises
        DataError."""
        clip = open_as_clip(raw, name)
        return clip.read_frames(self.choose_frame_numbers(len(clip)))

    def decode_within(self, content: bytes, name: str, max_pixels: int) -> np.ndarray:
        """Decode the bytes of an upload. Raises DataError for frames of more than `max_pixels`."""
        clip = open_clip(content, name)
        if math.prod(clip.size) > max_pixels:
            frame_height, frame_width = clip.size
            raise DataError(
                f"{name}: frames of {frame_width} x {frame_height} pixels", f"scale it down to at most {max_pixels:,}"
            )
        return self.decode(clip)

    def read_upload_size(self, content: bytes, name: str, max_pixels: int) -> tuple[int, int]:
        """Return (0, 0): results are not drawn on clips."""
        return 0, 0

    def open_view(self, raw: RawSample, name: str, exact: bool, as_region: bool) -> Clip:
        """Open the clip whose frames augmentation draws."""
        return open_as_clip(raw, name)

    def from_pixels(self, pixels: np.ndarray, name: str) -> np.ndarray:
        """Convert an array (T, H, W) or (T, H, W, 1, 3 or 4), uint8 or floats in 0 to 1, to (T, H, W, C) uint8. Raises
        DataError."""
        return self.quantise(pixels[..., None] if pixels.ndim == self.axes else pixels, name)

    def choose_frame_numbers(self, count: int, draws: np.ndarray | None = None) -> np.ndarray:
        """Choose the indices of the frames (T,) int64 to read from a clip of `count` frames: deterministically, or at
        random by `draws` (T,) in [0, 1): one frame from each of T equal segments, or, with a stride, from a random
        start."""
        if self.stride:
            return sample_frames_by_stride(count, self.image[0], self.stride, 0.5 if draws is None else float(draws[0]))
        return sample_frames_evenly(count, self.image[0], 0.5 if draws is None else draws)

    def to_array(self, decoded: Any) -> np.ndarray:
        """Convert (T, H, W, 3) uint8 to (C, *image) uint8."""
        return self.fit_frames(decoded)

    def fit_frames(self, clip: np.ndarray, position: float = 0.5) -> np.ndarray:
        """Fit (T, H, W, 3) uint8 to (C, *image) uint8, each frame separately; `position` as in `crop_box`."""
        images = [Image.fromarray(frame).convert(PILLOW_MODES[self.channels]) for frame in clip]
        return np.stack([image_to_array(self.fit_image(image, position)) for image in images], 1)

    def with_moments(self, weights: Preprocess) -> ClipPreprocess:
        """Return the preprocessing with the `mean` and `std` of weights, and their stride if they are for clips."""
        stride = weights.stride if isinstance(weights, ClipPreprocess) else self.stride
        return super().with_moments(weights).adjust(stride=stride)

    def check_views(self, views: str, crops: int) -> None:
        """Raise UsageError for several crops if the model sees whole frames."""
        if crops > 1 and self.fit == "squash":
            times = views.lower().replace("×", "x").partition("x")[0]
            raise UsageError(f"--clip-views {views}: the model sees whole frames, not crops", f"use {times}x1")


def open_as_clip(raw: RawSample, name: str | None = None) -> Clip:
    """Open a file, its bytes, pixels (T, H, W, 3), an open clip, or an image (as a clip of one frame) as a clip. Raises
    DataError."""
    return open_clip(np.asarray(raw)[None] if isinstance(raw, Image.Image) else raw, name)
