"""The modality interface: how a file becomes a model's input, its names, and its capabilities.

A modality is one module with a frozen dataclass whose fields are stored with the model (`preprocess` in `model.json`),
and whose `name` is its tag there. Code outside this folder uses these methods instead of checking for a modality.
PyTorch is imported only when a tensor is needed.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from PIL import Image

from vitreous.data.decoding.clip import Clip
from vitreous.data.layouts.folder import SampleFiles, list_files_by_suffix, open_class_folders
from vitreous.data.split import Data
from vitreous.errors import DataError, UsageError

# processes that only decode images start in 0.1 s without torch, and in seconds with it
if TYPE_CHECKING:
    import torch
    from torch import Tensor

IMAGENET_MOMENTS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF_MOMENTS = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # the paper's models: pixels in [-1, 1]

#: undecoded sample: a path, a file's bytes, pixels, a Pillow image, or an opened clip
RawSample = bytes | np.ndarray | Image.Image | str | os.PathLike[str] | Clip


class SampleForm(NamedTuple):
    """The size of a sample, one length per axis, its channels, and a preprocessing with the settings derived from the
    file; its size and channels are those of the sample."""

    size: tuple[int, ...]
    channels: int
    preprocess: Preprocess


@dataclass(frozen=True)
class Preprocess(ABC):
    """Deterministic conversion of a sample to a model's input: `decode`, `to_array`, `normalise`.

    `image` is the size of the input, one length per axis: (height, width), (depth, height, width), (frames, height,
    width) or (length,); shapes below write it as `*image`. `mean` and `std` are per channel, in units of `peak`.

    A subclass has a field `name: Literal["…"]`, its tag, and further fields that are settings, which
    `--preprocess.FIELD` sets. Raises UsageError for incompatible settings.
    """

    name: ClassVar[str]  # a field of each subclass
    #: the plural noun for samples, in messages and for splits (`data.annotations.target.get_sample_noun`)
    noun: ClassVar[str] = "images"
    #: the number of axes of `image`, their names in messages, and the noun for its values
    axes: ClassVar[int] = 2
    axis_names: ClassVar[str] = "H, W"
    unit: ClassVar[str] = "pixels"
    #: lower-case suffixes of its files
    suffixes: ClassVar[frozenset[str]] = frozenset()
    #: the result of `decode`: a Pillow image, or one for each channel; frames of a clip; or an array (C, *sizes).
    #: Recipes choose models and augmentation by it
    form: ClassVar[Literal["images", "clips", "arrays"]] = "arrays"
    #: the error for a folder without such files
    folder_hint: ClassVar[str] = ""
    #: `axes` of `data.sources.open_data` for files that could belong to another modality; None: layouts detect it
    array_axes: ClassVar[int | None] = None
    #: whether all inputs of a batch have one size and can be stacked
    stacks: ClassVar[bool] = True
    #: whether values are 8-bit RGB or grey, which colour augmentation needs
    has_colours: ClassVar[bool] = False
    #: whether inputs have a time axis and are shown as animations
    is_animated: ClassVar[bool] = False
    #: whether a browser can show the files, so that the server accepts them
    is_browsable: ClassVar[bool] = False
    #: whether a sample may be without valid pixels, so that all are checked before training
    may_be_void: ClassVar[bool] = False
    #: whether decoded samples may be cached in memory for training
    is_cacheable: ClassVar[bool] = False
    #: the Hugging Face Hub's name of its classification task, if it is not image classification
    hub_task: ClassVar[str] = ""

    image: tuple[int, ...]
    channels: int = 3
    mean: tuple[float, ...] = HALF_MOMENTS[0]
    std: tuple[float, ...] = HALF_MOMENTS[1]

    def __post_init__(self) -> None:
        if len(self.image) != self.axes:
            problem = f"the size of {self.noun} has {self.axes} axes ({self.axis_names}), not {len(self.image)}"
            raise UsageError(problem, f"use {self.axes} numbers")

    # from a file to an array

    @classmethod
    def find_files(cls, folder: str) -> list[str]:
        """List the paths of the samples below a folder, in natural order."""
        return list_files_by_suffix(folder, cls.suffixes)

    @classmethod
    def open_folder(cls, folder: Path, split_seed: int, is_asked: bool = False) -> Data | None:
        """Open the dataset in a folder of classes of such files, with or without split folders.

        Returns None for a folder without such files, or with files of a more likely modality, unless `is_asked`. Raises
        DataError as `layouts.folder.open_image_folder`, and if `is_asked` but there are no such files.
        """
        if not list_files_by_suffix(os.fspath(folder), cls.suffixes):
            return None
        return open_class_folders(
            folder, split_seed, cls.suffixes, lambda files: SampleFiles(files.paths, files.labels, cls.noun, cls.axes)
        )

    @classmethod
    def archive_suffixes(cls) -> frozenset[str]:
        """Return the suffixes of archive members that are samples."""
        return cls.suffixes

    @classmethod
    @abstractmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, requested: Mapping[str, str]) -> SampleForm:
        """Return the form of a sample, from its header if possible. Raises DataError for an unreadable file.

        `channels`: the number of channels that colours are converted to; None keeps theirs. `requested`: preprocessing
        fields requested by the user or the weights, for files that can be read in two ways.
        """

    @abstractmethod
    def decode(self, raw: RawSample, name: str | None = None) -> Any:
        """Decode a file, its bytes, or pixels to a sample in its original size, the input of `to_array`. Raises
        DataError, with `name` or the path."""

    @abstractmethod
    def to_array(self, decoded: Any) -> np.ndarray:
        """Convert the result of `decode` to (C, *image) in 0..peak of `array_dtype`."""

    def decode_within(self, content: bytes, name: str, max_pixels: int) -> Any:
        """Decode the bytes of an upload. Raises DataError, before decoding pixels, for more than `max_pixels`."""
        return self.decode(content, name)

    def read_upload_size(self, content: bytes, name: str, max_pixels: int) -> tuple[int, int]:
        """Return the upright (width, height) of an upload; (0, 0) if results are not drawn on it."""
        return 0, 0

    def open_view(self, raw: RawSample, name: str, exact: bool, as_region: bool) -> Any:
        """Open a sample for augmentation: decoded or, with `as_region`, as a lazy image of which only the required
        region is decoded, at a lower resolution unless `exact`. Raises DataError."""
        return self.decode(raw, name)

    def from_pixels(self, pixels: np.ndarray, name: str) -> np.ndarray:
        """Convert a user's array (*sizes) or (*sizes, C) to an input of `decode`. Raises DataError."""
        grey = pixels.ndim == self.axes + 1 and pixels.shape[-1] == 1
        return np.ascontiguousarray(pixels[..., 0] if grey else pixels)

    def cast_pixels(self, pixels: np.ndarray) -> np.ndarray:
        """Convert pixels (B, *sizes[, C]) of any dtype to the dtype of this modality's files, if this is lossless."""
        return pixels

    @property
    def pixel_channels(self) -> tuple[int, ...]:
        """The valid numbers of channels C of a user's array."""
        return (self.channels,)

    # values

    @property
    def peak(self) -> float:
        """The value that is 1 in units of `mean` and `std`: the maximum of the dtype, or 1."""
        return 1.0

    @property
    def array_dtype(self) -> np.dtype:
        """The dtype of arrays before normalisation: uint8 for 8-bit values, else float32."""
        return np.dtype(np.float32)

    @property
    def dtype(self) -> torch.dtype:
        """The tensor dtype of `array_dtype`."""
        import torch

        return torch.uint8 if self.array_dtype == np.uint8 else torch.float32

    @property
    def area(self) -> int:
        """The maximum number of pixels per channel of an input."""
        return math.prod(self.image)

    @property
    def nbytes(self) -> int:
        """The maximum number of bytes of an input before normalisation."""
        return self.channels * self.area * self.array_dtype.itemsize

    def count_tokens(self, grid: tuple[int, ...]) -> int:
        """Return the maximum number of patches of an input, if the model's image has `grid` patches per axis."""
        return math.prod(grid)

    def check_patch(self, patch: tuple[int, ...]) -> None:  # noqa: B027 (most modalities accept any patch size)
        """Raise UsageError if inputs are scaled to multiples of a patch size other than the model's."""

    def longest_grid(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the maximum patches along each axis of an input, if the model's image has `grid`."""
        return grid

    def to_tensor(self, decoded: Any) -> Tensor:
        """Convert the result of `decode` to a tensor with `to_array`."""
        import torch

        return torch.from_numpy(self.to_array(decoded))

    def transform(self, raw: RawSample) -> Tensor:
        """Convert a Pillow image, a file, its bytes or pixels (H, W[, C]) to the model's input, (C, *image) float32.
        This method can be pickled, for use as a Dataset's transform. Raises DataError."""
        return self.normalise(self.to_tensor(self.decode(raw))[None])[0]

    def normalise(self, pixels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Normalise (B, C, *image) in 0..peak, uint8 or float, to (B, C, *image) for the model, float32 or of
        `dtype`."""
        import torch

        from vitreous.system.machine import copy_to_device

        dtype = dtype or torch.float32
        shape = (1, -1) + (1,) * (pixels.dim() - 2)
        mean, std = (torch.tensor(values).view(shape) * self.peak for values in (self.mean, self.std))
        if pixels.device.type != "cpu":
            mean, std = (copy_to_device(values, pixels.device) for values in (mean, std))
        if torch.compiler.is_compiling() or pixels.device.type != "cpu":
            return pixels.to(torch.float32, copy=True).sub_(mean).div_(std).to(dtype)
        # allocated by numpy: torch requests aligned memory, for which glibc before 2.38 does not reuse the last batch's
        # block
        floats = torch.from_numpy(np.empty(pixels.shape, dtype=np.float32))
        # copied first: a difference of two dtypes takes three times as long, with bit-identical results
        return floats.copy_(pixels).sub_(mean).div_(std).to(dtype)

    def normalise_array(self, pixels: np.ndarray) -> np.ndarray:
        """Normalise (B, C, *image) in 0..peak to float32 of the same shape without torch, bit-identical to
        `normalise`."""
        shape = (1, -1) + (1,) * (pixels.ndim - 2)
        mean, std = (
            np.array(values, np.float32).reshape(shape) * np.float32(self.peak) for values in (self.mean, self.std)
        )
        floats = pixels.astype(np.float32)
        floats -= mean
        floats /= std
        return floats

    def denormalise(self, images: Tensor) -> Tensor:
        """Invert `normalise`: (B, C, *image) model inputs -> (B, C, *image) float32 in 0..peak, not clipped."""
        import torch

        shape = (1, -1) + (1,) * (images.dim() - 2)
        mean, std = (torch.tensor(values, device=images.device).view(shape) for values in (self.mean, self.std))
        return (images.float() * std + mean) * self.peak

    def noise(self, count: int = 1) -> np.ndarray:
        """Return (count, C, *image) pixels of noise with a fixed seed."""
        values = np.random.default_rng(0).integers(0, 256, (count, self.channels, *self.image), dtype=np.uint8)
        return values if self.array_dtype == np.uint8 else values.astype(np.float32) * np.float32(self.peak / 255)

    def blank(self) -> Tensor:
        """Return (C, *image) zeros of `dtype`, the placeholder for an unreadable sample."""
        import torch

        return torch.zeros(self.channels, *self.image, dtype=self.dtype)

    def collate(self, images: list[Tensor]) -> Tensor | list[Tensor]:
        """Stack B inputs (C, *image) to (B, C, *image), where B may be 0; or return a list if sizes differ."""
        import torch

        return torch.stack(images) if images else torch.empty(0, *self.blank().shape, dtype=self.dtype)

    # other sizes, other settings

    @property
    def frames(self) -> int:
        """The number of frames of an input; 1 without a time axis."""
        return 1

    @property
    def plane(self) -> tuple[int, int]:
        """The last two axes of `image`: (height, width) of images and of clip frames."""
        height, width = self.image[-2:]
        return height, width

    @property
    def resampling(self) -> Image.Resampling:
        """The filter for resampling regions of an image."""
        return Image.Resampling.BICUBIC

    @property
    def resized_axes(self) -> int:
        """The number of last axes of `image` that `--image-size` sets."""
        return self.axes

    def with_one_size(self, fit: Literal["crop", "squash"] = "squash") -> Preprocess:
        """Return the preprocessing for inputs of the single size `image`; inputs at native aspect ratio are converted
        by `fit`."""
        return self

    def with_image(self, image: tuple[int, ...]) -> Self:
        """Return the preprocessing for inputs of another size."""
        return replace(self, image=image)

    def with_only_size(self, image: tuple[int, ...]) -> Preprocess:
        """Return the preprocessing for inputs of another size, which need not be one of `buckets`."""
        return self.with_image(image)

    @property
    def buckets(self) -> tuple[tuple[int, ...], ...]:
        """The training sizes, of which each sample uses the nearest (`data.buckets`); () if all are trained at
        `image`."""
        return ()

    @property
    def stride(self) -> int:
        """The distance in frames between sampled frames of a clip; 0: evenly spread, or no frames."""
        return 0

    @property
    def has_buckets(self) -> bool:
        """Whether batches of a run have different sizes, one for each of `buckets`."""
        return bool(self.buckets)

    def with_buckets(self, buckets: tuple[tuple[int, ...], ...]) -> Preprocess:
        """Return the preprocessing with these `buckets`. Raises UsageError if the modality does not support them."""
        raise UsageError(f"--buckets is for images and clips, not for {self.noun}", "omit it")

    def at_buckets(self) -> tuple[Preprocess, ...]:
        """Return the preprocessing at each of `buckets`."""
        return tuple(self.with_image(size) for size in self.buckets)

    def adjust(self, **settings: Any) -> Self:
        """Return the preprocessing with other settings, limited to those that the modality has."""
        field_names = {field.name for field in fields(self)}
        return replace(self, **{name: value for name, value in settings.items() if name in field_names})

    def for_model(self, image: tuple[int, ...], channels: int) -> Self:
        """Return the preprocessing for inputs of that size and number of channels, with the default `mean` and
        `std`."""
        mean, std = self.default_moments(channels)
        return replace(self, image=image, channels=channels, mean=mean, std=std)

    @classmethod
    def default_moments(cls, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the default mean and std of each channel."""
        return HALF_MOMENTS[0][:1] * channels, HALF_MOMENTS[1][:1] * channels

    def with_moments(self, weights: Preprocess) -> Self:
        """Return the preprocessing with the `mean` and `std` of weights, and settings that depend on them."""
        return replace(self, mean=weights.mean, std=weights.std)

    def continue_from(self, weights: Preprocess) -> Preprocess:
        """Return the preprocessing of weights for inputs of this modality and size."""
        if type(weights) is type(self):
            return replace(weights, image=self.image)
        settings = {field.name: getattr(weights, field.name) for field in fields(weights)}
        excluded_names = ("name", "image", "channels", "buckets")
        return self.adjust(**{name: value for name, value in settings.items() if name not in excluded_names})

    @property
    def measures_moments(self) -> bool:
        """Whether `mean` and `std` are measured on the training samples, unless weights provide them."""
        return False

    def shares_moments(self, weights: Preprocess | None) -> bool:
        """Return whether the `mean` and `std` of weights trained with `weights` apply to these samples."""
        return weights is not None and type(weights) is type(self) and weights.channels == self.channels

    @property
    def form_settings(self) -> dict[str, str]:
        """The settings, as text, that select between two ways to read a file (`read_form`)."""
        return {}

    @property
    def value_type(self) -> str:
        """The type of values, for messages: `uint16`, `voxels`."""
        return self.unit

    # properties for other code

    @property
    def summary(self) -> str:
        """How a sample of another size is converted to `image`, in one word."""
        return "as it is"

    def resize_settings(self) -> dict[str, Any]:
        """Return the settings for resizing a sample to `image`, for programs that read exported files."""
        return {"fit": self.summary}

    @property
    def is_standardised(self) -> bool:
        """Whether each sample is standardised to mean 0 and std 1 separately."""
        return False

    def for_reduced_decoding(self) -> Any:
        """Return self as a `PlanarPreprocess` if a large JPEG may be decoded at a lower resolution, of which a box is
        then resampled (`inference.reading`); else None."""
        return None

    def is_within(self, decoded: Any) -> bool:
        """Return whether a decoded sample is no larger than the model's input."""
        return False

    def visible_box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Return the region of an image that the model sees: left, top, right and bottom as shares of width and
        height."""
        return 0.0, 0.0, 1.0, 1.0

    def check_views(self, views: str, crops: int) -> None:
        """Raise UsageError if the modality does not support `--clip-views VIEWS`, or this number of crops."""
        raise UsageError(f"--clip-views {views} is for clip models, but the input is {self.noun}", "omit it")


def image_to_tensor(image: Image.Image) -> Tensor:
    """Convert an image to a tensor (C, height, width) with `image_to_array`."""
    import torch

    return torch.from_numpy(image_to_array(image))


def image_to_array(image: Image.Image) -> np.ndarray:
    """Convert an image to (C, height, width) without torch, as uint8, or float32 for mode F."""
    array = np.array(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy()


def quantise_floats(pixels: np.ndarray, name: str) -> np.ndarray:
    """Convert pixels (H, W[, C]) of an image, or (T, H, W[, C]) of a clip, from floats in 0 to 1 to uint8. Raises
    DataError for other values."""
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= 1):
        message = f"{name}: pixels from {low:.3g} to {high:.3g}"
        raise DataError(message, "use unnormalised floats from 0 to 1, or uint8 from 0 to 255")
    return np.rint(pixels * 255).astype(np.uint8)
