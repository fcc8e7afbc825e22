"""Common code of the modalities of images and clips: a box of each image or frame is resized to the input size."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from PIL import Image

from vitreous.data.decoding.decode import IMAGE_FILE_SUFFIXES, PILLOW_MODES, decode_to_pillow, read_upright_size
from vitreous.data.decoding.regions import LazyImage, open_lazy_image
from vitreous.data.decoding.spectral import list_bands
from vitreous.data.decoding.volumes import VOLUME_ONLY_SUFFIXES
from vitreous.data.layouts.folder import list_files_by_suffix
from vitreous.data.layouts.video import list_clips
from vitreous.data.modalities.base import Preprocess, image_to_array, quantise_floats
from vitreous.data.split import Data
from vitreous.errors import UsageError
from vitreous.nn.sizes import format_size

Box = tuple[float, float, float, float]  # left, top, right and bottom, in pixels
PILLOW_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@dataclass(frozen=True)
class PlanarPreprocess(Preprocess):
    """Base class of modalities of images and clips: a box of each image or frame is resized with `filter`."""

    form: ClassVar[Literal["images", "clips", "arrays"]] = "images"
    is_browsable: ClassVar[bool] = True
    suffixes: ClassVar[frozenset[str]] = IMAGE_FILE_SUFFIXES

    _: KW_ONLY
    filter: Literal["bilinear", "bicubic"] = "bicubic"

    @property
    def resampling(self) -> Image.Resampling:
        """Pillow's constant for `filter`."""
        return PILLOW_FILTERS[self.filter]

    def choose_plane(self, size: tuple[float, float]) -> tuple[int, int]:
        """Return the input size (height, width) for an image of the size (width, height)."""
        return self.plane

    @abstractmethod
    def crop_box(self, size: tuple[int, int], position: float = 0.5) -> Box:
        """Return the box of an image that is resized to the input size. `size` is (width, height) of the image.
        `position` places the box along the cropped axis: 0 is left or top, 1 is right or bottom."""

    def fit_image(self, image: Image.Image, position: float = 0.5) -> Image.Image:
        """Crop and resize a decoded image to the input size, by resampling the box of `crop_box` once."""
        plane = self.choose_plane(image.size)
        if image.size == plane[::-1]:
            return image
        return self.resample(image, self.crop_box(image.size, position), plane)

    def resample(self, image: Image.Image, box: Box, plane: tuple[int, int]) -> Image.Image:
        """Resize a box of an image to `plane`, (height, width)."""
        return image.resize((plane[1], plane[0]), self.resampling, box=box)

    def to_array(self, decoded: Any) -> np.ndarray:
        """Crop and resize a PIL image, or a tuple with one per channel, to the input size: (C, height, width)."""
        if isinstance(decoded, tuple):
            return np.concatenate([image_to_array(self.fit_image(band)) for band in decoded])
        return image_to_array(self.fit_image(decoded))

    @classmethod
    def open_folder(cls, folder: Path, split_seed: int, is_asked: bool = False) -> Data | None:
        """Return None, since `data.sources` opens folders of images and clips."""
        return None

    @classmethod
    def find_files(cls, folder: str) -> list[str]:
        """List the image files below a folder. If there are none, list its volumes, or else its clips, of which the
        first frame is used."""
        return (
            list_files_by_suffix(folder)
            or list_files_by_suffix(folder, VOLUME_ONLY_SUFFIXES)
            or list_clips(folder, 0)
            or []
        )

    def decode_within(self, content: bytes, name: str, max_pixels: int) -> Any:
        """Decode the bytes of an uploaded file. Raises DataError for an unreadable file, and for more than
        `max_pixels` pixels."""
        read_upright_size(content, name, max_pixels)
        return self.decode(content, name)

    def read_upload_size(self, content: bytes, name: str, max_pixels: int) -> tuple[int, int]:
        """Return (width, height) of an image file with EXIF orientation applied. Raises DataError for more than
        `max_pixels` pixels."""
        return read_upright_size(content, name, max_pixels)


@dataclass(frozen=True)
class SizedPreprocess(PlanarPreprocess):
    """Base class of modalities of images and clips that are resized to a fixed input size, `image`.

    `fit`: `crop` resizes an image to cover `image` / `share` and crops its centre; `squash` resizes the complete image,
    as the ViT paper's code does at test time. `buckets` are the input sizes of training: a sample is trained at the
    nearest one (`data.buckets`) and evaluated at `image`, which is one of them. () means that all samples are trained
    at `image`.
    """

    _: KW_ONLY
    fit: Literal["crop", "squash"] = "crop"
    share: float = 1.0
    buckets: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        axes = {len(size) for size in self.buckets}
        if axes - {len(self.image)}:
            problem = f"buckets must have {len(self.image)} axes, as the input size {format_size(self.image)} has"
            raise UsageError(problem, f"set {self.axis_names} of each bucket")

    def with_only_size(self, image: tuple[int, ...]) -> SizedPreprocess:
        """Return the preprocessing for inputs of the size `image`, without buckets unless `image` is one of
        `buckets`."""
        return replace(self, image=image, buckets=self.buckets * (image in self.buckets))

    def with_buckets(self, buckets: tuple[tuple[int, ...], ...]) -> SizedPreprocess:
        """Return the preprocessing with these `buckets`. Raises UsageError for buckets with another number of axes."""
        return replace(self, buckets=buckets)

    @property
    def summary(self) -> str:
        """`crop` or `squash`."""
        return self.fit

    def resize_settings(self) -> dict[str, Any]:
        """Return the fields `fit`, `share` and `filter`."""
        return {"fit": self.fit, "share": self.share, "filter": self.filter}

    def crop_box(self, size: tuple[int, int], position: float = 0.5) -> Box:
        """Return the box of an image that is resized to the input size. `size` is (width, height) of the image.
        `position` places the box along the cropped axis: 0 is left or top, 1 is right or bottom."""
        if self.fit != "crop":
            return (0.0, 0.0, *size)
        height, width = self.plane
        scale = max(height / size[1], width / size[0]) / self.share
        half_width, half_height = min(width / scale, size[0]) / 2, min(height / scale, size[1]) / 2
        x, y = size[0] / 2, size[1] / 2
        if x - half_width >= y - half_height:
            x += (position - 0.5) * 2 * (x - half_width)
        else:
            y += (position - 0.5) * 2 * (y - half_height)
        return x - half_width, y - half_height, x + half_width, y + half_height


@dataclass(frozen=True)
class StillPreprocess(SizedPreprocess):
    """Base class of modalities of images with a fixed input size. Images no larger than it may be cached for
    training."""

    is_cacheable: ClassVar[bool] = True

    def is_within(self, decoded: Any) -> bool:
        """Return whether a PIL image, or each of a tuple of bands, is no larger than the model's input."""
        (width, height), (max_height, max_width) = list_bands(decoded)[0].size, self.plane
        return height <= max_height and width <= max_width

    def visible_box(self, width: int, height: int) -> Box:
        """Return the region of an upright image of `width` x `height` pixels that is in the model's input: left, top,
        right and bottom as shares of width and height."""
        if self.fit != "crop" or (width, height) == self.plane[::-1]:
            return 0.0, 0.0, 1.0, 1.0
        target_height, target_width = self.plane
        scale = max(target_height / height, target_width / width) / self.share
        half_width, half_height = (
            min(target_width / scale / width, 1.0) / 2,
            min(target_height / scale / height, 1.0) / 2,
        )
        return 0.5 - half_width, 0.5 - half_height, 0.5 + half_width, 0.5 + half_height


class ColourMixin:
    """Common code of modalities with 8-bit RGB or grey values: images, clips and images at native aspect ratio."""

    has_colours: ClassVar[bool] = True
    channels: int

    @property
    def peak(self) -> float:
        """255, the maximum of uint8."""
        return 255.0

    @property
    def array_dtype(self) -> np.dtype:
        """uint8."""
        return np.dtype(np.uint8)

    @property
    def pixel_channels(self) -> tuple[int, ...]:
        """1, 3 and 4: grey, RGB and RGBA."""
        return 1, 3, 4

    def quantise(self, pixels: np.ndarray, name: str) -> np.ndarray:
        """Convert pixels from a user, (H, W[, C]) of an image or (T, H, W, C) of a clip, from floats in 0 to 1 to
        uint8. Integers are unchanged. Raises DataError for floats outside 0 to 1."""
        return quantise_floats(pixels, name) if pixels.dtype.kind == "f" else np.ascontiguousarray(pixels)


class ColourImageMixin(ColourMixin):
    """Common code of the modalities of colour images, of one size and at native aspect ratio."""

    def decode(self, raw: Any, name: str | None = None) -> Image.Image:
        """Decode a file, its bytes, or pixels (H, W[, C]) to a PIL image, RGB or grey by `channels`. Raises
        DataError for an unreadable file."""
        return decode_to_pillow(raw, self.channels, name)

    def open_view(self, raw: Any, name: str, exact: bool, as_region: bool) -> Image.Image | LazyImage:
        """Open an image for augmentation, as `Preprocess.open_view`: with `as_region`, only the cropped region is
        decoded. Raises DataError for an unreadable file."""
        return open_lazy_image(raw, self.channels, name, exact) if as_region else self.decode(raw, name)

    def from_pixels(self, pixels: np.ndarray, name: str) -> np.ndarray:
        """Convert an array from a user, (H, W) or (H, W, 1, 3 or 4), uint8 or floats in 0 to 1, to uint8. Raises
        DataError for other floats."""
        return self.quantise(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels, name)

    def for_reduced_decoding(self) -> Self | None:
        """Return self if files are decoded as grey or RGB, so that large JPEG files may be decoded at a lower
        resolution; None for other numbers of channels."""
        return self if self.channels in PILLOW_MODES else None
