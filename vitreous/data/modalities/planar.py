"""Common code of modalities whose samples, or frames, are fitted to a plane: resampling of one box."""

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
    """Images, or frames of clips, of which one box is resampled with `filter`."""

    form: ClassVar[Literal["images", "clips", "arrays"]] = "images"
    is_browsable: ClassVar[bool] = True
    suffixes: ClassVar[frozenset[str]] = IMAGE_FILE_SUFFIXES

    _: KW_ONLY
    filter: Literal["bilinear", "bicubic"] = "bicubic"

    @property
    def resampling(self) -> Image.Resampling:
        """Pillow's constant of `filter`."""
        return PILLOW_FILTERS[self.filter]

    def choose_plane(self, size: tuple[float, float]) -> tuple[int, int]:
        """Return the target (height, width) for an image of (width, height) pixels."""
        return self.plane

    @abstractmethod
    def crop_box(self, size: tuple[int, int], position: float = 0.5) -> Box:
        """Return the box of an image of (width, height) that is used. `position` is its position on the axis that is
        cropped: 0 at the left or the top, 1 at the other end."""

    def fit_image(self, image: Image.Image, position: float = 0.5) -> Image.Image:
        """Fit a decoded image to the target size: one resampling of the box that a crop of the scaled image would
        use."""
        plane = self.choose_plane(image.size)
        if image.size == plane[::-1]:
            return image
        return self.resample(image, self.crop_box(image.size, position), plane)

    def resample(self, image: Image.Image, box: Box, plane: tuple[int, int]) -> Image.Image:
        """Resample a box of an image to the size (height, width) `plane`."""
        return image.resize((plane[1], plane[0]), self.resampling, box=box)

    def to_array(self, decoded: Any) -> np.ndarray:
        """Convert a Pillow image, or one for each channel, to (C, height, width)."""
        if isinstance(decoded, tuple):
            return np.concatenate([image_to_array(self.fit_image(band)) for band in decoded])
        return image_to_array(self.fit_image(decoded))

    @classmethod
    def open_folder(cls, folder: Path, split_seed: int, is_asked: bool = False) -> Data | None:
        """Return None: `data.sources` contains the layouts of images and clips."""
        return None

    @classmethod
    def find_files(cls, folder: str) -> list[str]:
        """List the images below a folder; else volumes; else clips, of which the first frame is used."""
        return (
            list_files_by_suffix(folder)
            or list_files_by_suffix(folder, VOLUME_ONLY_SUFFIXES)
            or list_clips(folder, 0)
            or []
        )

    def decode_within(self, content: bytes, name: str, max_pixels: int) -> Any:
        """Decode the bytes of an upload with `decode`. Raises DataError for more than `max_pixels`."""
        read_upright_size(content, name, max_pixels)
        return self.decode(content, name)

    def read_upload_size(self, content: bytes, name: str, max_pixels: int) -> tuple[int, int]:
        """Return the upright (width, height) of an image file. Raises DataError for more than `max_pixels`."""
        return read_upright_size(content, name, max_pixels)


@dataclass(frozen=True)
class SizedPreprocess(PlanarPreprocess):
    """Images, or frames of clips, that are all converted to one size, `image`.

    `fit` = `crop`: the short side is scaled to the target / `share`, followed by a centre crop; `squash`: the whole
    image is scaled to the target, as in the paper's code at test time. `buckets`: training sizes, of which each image
    uses the nearest (`data.buckets`); `image` is one of them, and the size for evaluation; () if all are trained at
    `image`.
    """

    _: KW_ONLY
    fit: Literal["crop", "squash"] = "crop"
    share: float = 1.0
    buckets: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        axes = {len(size) for size in self.buckets}
        if axes - {len(self.image)}:
            raise UsageError(f"buckets must have {len(self.image)} axes, like {format_size(self.image)}")

    def with_only_size(self, image: tuple[int, ...]) -> SizedPreprocess:
        """Return the preprocessing for inputs of another size, with buckets only if it is one of them."""
        return replace(self, image=image, buckets=self.buckets * (image in self.buckets))

    def with_buckets(self, buckets: tuple[tuple[int, ...], ...]) -> SizedPreprocess:
        """Return the preprocessing with these `buckets`. Raises UsageError for sizes with other axes."""
        return replace(self, buckets=buckets)

    @property
    def summary(self) -> str:
        """`crop` or `squash`."""
        return self.fit

    def resize_settings(self) -> dict[str, Any]:
        """The fields `fit`, `share` and `filter`."""
        return {"fit": self.fit, "share": self.share, "filter": self.filter}

    def crop_box(self, size: tuple[int, int], position: float = 0.5) -> Box:
        """Return the box of an image of (width, height) that is used, as in `PlanarPreprocess`."""
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
    """Images of one size; small ones may be cached in memory for training."""

    is_cacheable: ClassVar[bool] = True

    def is_within(self, decoded: Any) -> bool:
        """Return whether a Pillow image, or one for each channel, is no larger than the model's input."""
        (width, height), (max_height, max_width) = list_bands(decoded)[0].size, self.plane
        return height <= max_height and width <= max_width

    def visible_box(self, width: int, height: int) -> Box:
        """Return the region of an upright image that the model sees: left, top, right, bottom as shares of width and
        height."""
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
    """8-bit RGB or grey values: common code of images, clips and images at native aspect ratio."""

    has_colours: ClassVar[bool] = True
    channels: int

    @property
    def peak(self) -> float:
        """255."""
        return 255.0

    @property
    def array_dtype(self) -> np.dtype:
        """uint8."""
        return np.dtype(np.uint8)

    @property
    def pixel_channels(self) -> tuple[int, ...]:
        """Grey, RGB and RGBA."""
        return 1, 3, 4

    def quantise(self, pixels: np.ndarray, name: str) -> np.ndarray:
        """Convert a user's pixels (H, W[, C]), or (T, H, W, C) of a clip, from uint8 or floats in 0 to 1 to uint8.
        Raises DataError for other floats."""
        return quantise_floats(pixels, name) if pixels.dtype.kind == "f" else np.ascontiguousarray(pixels)


class ColourImageMixin(ColourMixin):
    """Colour images: common code of images of one size and at native aspect ratio."""

    def decode(self, raw: Any, name: str | None = None) -> Image.Image:
        """Decode a file, its bytes, or pixels (H, W[, C]) to a Pillow image, RGB or L. Raises DataError."""
        return decode_to_pillow(raw, self.channels, name)

    def open_view(self, raw: Any, name: str, exact: bool, as_region: bool) -> Image.Image | LazyImage:
        """Open an image for augmentation, with lazy decoding if `as_region`."""
        return open_lazy_image(raw, self.channels, name, exact) if as_region else self.decode(raw, name)

    def from_pixels(self, pixels: np.ndarray, name: str) -> np.ndarray:
        """Convert an array (H, W) or (H, W, 1, 3 or 4), uint8 or floats in 0 to 1, to uint8. Raises DataError."""
        return self.quantise(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels, name)

    def for_reduced_decoding(self) -> Self | None:
        """Return self, since files are decoded as grey or RGB."""
        return self if self.channels in PILLOW_MODES else None
