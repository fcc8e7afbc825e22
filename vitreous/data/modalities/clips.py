"""The modality of clips: video files, animated GIFs, and folders of numbered frames."""

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
    """Preprocessing of clips, (C, frames, height, width) uint8. Each frame is cropped or resized like an image.

    `stride` is the distance between sampled frames; at evaluation, they are centred in the clip. 0 spreads the frames
    evenly over the clip.
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
        """List the video files, GIFs and folders of frames below a folder. Returns an empty list if there are other
        images."""
        return list_clips(folder, 0) or []

    @classmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, requested: Mapping[str, str]) -> SampleForm:
        """Read the size (frames, height, width) of a clip. Raises DataError for an unreadable clip."""
        clip = open_as_clip(raw, name)
        size, count = (len(clip), *clip.size), channels or 3
        return SampleForm(size, count, cls(size, count, *cls.default_moments(count)))

    @property
    def frames(self) -> int:
        """The number of frames of a model's input."""
        return self.image[0]

    @property
    def resized_axes(self) -> int:
        """2, since `--image-size` sets height and width."""
        return 2

    def decode(self, raw: RawSample, name: str | None = None) -> np.ndarray:
        """Decode the sampled frames of a file, its bytes, a folder of frames, or pixels: (T, H, W, 3) uint8. Raises
        DataError for an unreadable clip."""
        clip = open_as_clip(raw, name)
        return clip.read_frames(self.choose_frame_numbers(len(clip)))

    def decode_within(self, content: bytes, name: str, max_pixels: int) -> np.ndarray:
        """Decode the bytes of an uploaded file. Raises DataError for an unreadable clip, and for frames of
        more than `max_pixels` pixels."""
        clip = open_clip(content, name)
        if math.prod(clip.size) > max_pixels:
            height, width = clip.size
            problem = f"{name}: frames of {width} x {height} pixels, more than {max_pixels:,}"
            raise DataError(problem, "scale the clip down")
        return self.decode(clip)

    def read_upload_size(self, content: bytes, name: str, max_pixels: int) -> tuple[int, int]:
        """Return (0, 0), since predictions are not drawn on clips."""
        return 0, 0

    def open_view(self, raw: RawSample, name: str, exact: bool, as_region: bool) -> Clip:
        """Open a clip for augmentation, which chooses and decodes its frames. Raises DataError for an unreadable
        clip."""
        return open_as_clip(raw, name)

    def from_pixels(self, pixels: np.ndarray, name: str) -> np.ndarray:
        """Convert an array from a user, (T, H, W) or (T, H, W, 1, 3 or 4), uint8 or floats in 0 to 1, to (T, H, W, C)
        uint8. Raises DataError for other floats."""
        return self.quantise(pixels[..., None] if pixels.ndim == self.axes else pixels, name)

    def choose_frame_numbers(self, count: int, draws: np.ndarray | None = None) -> np.ndarray:
        """Choose which frames of a clip of `count` frames are read: their indices (T,) int64.

        With a stride, frames begin at the centred start, or at the start that the first of `draws` selects. Otherwise,
        one frame is taken from each of T equal segments: the middle frame, or the frame that `draws` selects. `draws`
        (T,) are random numbers in [0, 1).
        """
        if self.stride:
            return sample_frames_by_stride(count, self.image[0], self.stride, 0.5 if draws is None else float(draws[0]))
        return sample_frames_evenly(count, self.image[0], 0.5 if draws is None else draws)

    def to_array(self, decoded: Any) -> np.ndarray:
        """Crop or resize decoded frames (T, H, W, 3) uint8 to the input size: (C, *image) uint8."""
        return self.fit_frames(decoded)

    def fit_frames(self, clip: np.ndarray, position: float = 0.5) -> np.ndarray:
        """Crop or resize each frame of a clip (T, H, W, 3) uint8 to the input size: (C, *image) uint8. `position`
        places the crop, as in `crop_box`."""
        images = [Image.fromarray(frame).convert(PILLOW_MODES[self.channels]) for frame in clip]
        return np.stack([image_to_array(self.fit_image(image, position)) for image in images], 1)

    def with_moments(self, weights: Preprocess) -> ClipPreprocess:
        """Return this preprocessing with `mean` and `std` from `weights`, the preprocessing of pre-trained weights, and
        with their stride if they are for clips."""
        stride = weights.stride if isinstance(weights, ClipPreprocess) else self.stride
        return super().with_moments(weights).adjust(stride=stride)

    def check_views(self, views: str, crops: int) -> None:
        """Raise UsageError for several `crops` per set of frames if `fit` is `squash`, which uses complete frames.
        `views` is the value of --clip-views."""
        if crops > 1 and self.fit == "squash":
            num_frame_sets = views.lower().replace("×", "x").partition("x")[0]
            raise UsageError(f"--clip-views {views}: the model uses whole frames, not crops", f"use {num_frame_sets}x1")


def open_as_clip(raw: RawSample, name: str | None = None) -> Clip:
    """Open a path, a file's bytes, pixels (T, H, W, 3), an opened clip, or a PIL image as a clip; an image becomes a
    clip of one frame. Raises DataError for an unreadable clip."""
    return open_clip(np.asarray(raw)[None] if isinstance(raw, Image.Image) else raw, name)
