"""The interface of modalities: conversion of files to model inputs, names for messages, and capabilities.

A modality is a kind of input, such as images, clips or volumes. Each has a module with a subclass of `Preprocess`, a
frozen dataclass whose fields are stored with the model (`preprocess` in `model.json`). Code outside this package calls
the methods of `Preprocess` and does not distinguish modalities. PyTorch is imported only when a tensor is needed.
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

# without torch, which takes seconds to import, processes that only decode images start in 0.1 s
if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: mean and std of each RGB channel, as shares of `Preprocess.peak`
IMAGENET_MOMENTS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF_MOMENTS = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # of the ViT paper: pixels in [-1, 1]

#: a sample before decoding: a path, a file's bytes, pixels, a PIL image, or an opened clip
RawSample = bytes | np.ndarray | Image.Image | str | os.PathLike[str] | Clip


class SampleForm(NamedTuple):
    """Shape of a sample, and a preprocessing for such samples.

    `size` has one length per axis of the sample. `preprocess` has this size, these channels, and the settings that the
    file determines, such as its dtype.
    """

    size: tuple[int, ...]
    channels: int
    preprocess: Preprocess


@dataclass(frozen=True)
class Preprocess(ABC):
    """Deterministic conversion of a sample to a model's input, in the steps `decode`, `to_array` and `normalise`.

    `image` is the size of the input, one length per axis: (height, width), (depth, height, width), (frames, height,
    width) or (length,). Shapes contain it as `*image`; C is `channels`. `mean` and `std` are per channel, as shares of
    `peak`.

    A subclass has a field `name: Literal["…"]`, which identifies the modality in `model.json`, and fields for its
    settings, which `--preprocess.FIELD` sets. Raises UsageError for incompatible settings.
    """

    name: ClassVar[str]  # a field of each subclass
    #: the plural noun for samples in messages; a split with the same noun belongs to this modality
    noun: ClassVar[str] = "images"
    #: the number of axes of `image`, the names of these axes in messages, and the plural noun for values of a sample
    axes: ClassVar[int] = 2
    axis_names: ClassVar[str] = "H, W"
    unit: ClassVar[str] = "pixels"
    #: suffixes of the modality's files, in lower case
    suffixes: ClassVar[frozenset[str]] = frozenset()
    #: the result of `decode`: `images`, a PIL image or a tuple with one per channel; `clips`, frames; `arrays`,
    #: (C, *sizes). Recipes choose the model and the augmentation by this value
    form: ClassVar[Literal["images", "clips", "arrays"]] = "arrays"
    #: the hint of the error for a folder without files of the modality
    folder_hint: ClassVar[str] = ""
    #: `axes` of `data.sources.open_data` that selects this modality; None if the files determine the modality
    array_axes: ClassVar[int | None] = None
    #: whether all inputs of a batch have the same size and can be stacked
    stacks: ClassVar[bool] = True
    #: whether values are 8-bit RGB or grey; colour augmentation requires this
    has_colours: ClassVar[bool] = False
    #: whether inputs have a time axis and are shown as animations
    is_animated: ClassVar[bool] = False
    #: whether browsers can show the files, which the web page requires
    is_browsable: ClassVar[bool] = False
    #: whether a sample may have no valid pixels; if True, all samples are checked before training
    may_be_void: ClassVar[bool] = False
    #: whether decoded samples may be cached in memory for training
    is_cacheable: ClassVar[bool] = False
    #: the Hugging Face Hub's name of the classification task; empty for image classification
    hub_task: ClassVar[str] = ""

    image: tuple[int, ...]
    channels: int = 3
    mean: tuple[float, ...] = HALF_MOMENTS[0]
    std: tuple[float, ...] = HALF_MOMENTS[1]

    def __post_init__(self) -> None:
        if len(self.image) != self.axes:
            problem = f"the size of {self.noun} has {self.axes} axes ({self.axis_names}), not {len(self.image)}"
            raise UsageError(problem, f"set one length per axis: {self.axis_names}")

    # from a file to an array

    @classmethod
    def find_files(cls, folder: str) -> list[str]:
        """List the paths of the samples below a folder, in natural order."""
        return list_files_by_suffix(folder, cls.suffixes)

    @classmethod
    def open_folder(cls, folder: Path, split_seed: int, is_asked: bool = False) -> Data | None:
        """Open a folder of the layout CLASS/FILE or SPLIT/CLASS/FILE with files of this modality.

        Returns None if the folder has no such files, or if its files more likely belong to another modality. With
        `is_asked`, the user has requested this modality: ambiguous files are opened, and missing files raise DataError.
        Raises DataError for an invalid layout, as `layouts.folder.open_image_folder`.
        """
        if not list_files_by_suffix(os.fspath(folder), cls.suffixes):
            return None
        return open_class_folders(
            folder, split_seed, cls.suffixes, lambda files: SampleFiles(files.paths, files.labels, cls.noun, cls.axes)
        )

    @classmethod
    def archive_suffixes(cls) -> frozenset[str]:
        """Return the suffixes, in lower case, of the members of a tar archive that are samples of this modality."""
        return cls.suffixes

    @classmethod
    @abstractmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, requested: Mapping[str, str]) -> SampleForm:
        """Read the size and channels of a sample, from its header if possible, and derive a preprocessing for it.

        Colours are converted to `channels` channels; None keeps the channels of the file. `requested` are preprocessing
        fields, as text, that the user or the weights set; they decide how a file is read that can be read in two ways.
        Raises DataError for an unreadable file.
        """

    @abstractmethod
    def decode(self, raw: RawSample, name: str | None = None) -> Any:
        """Decode a file, its bytes, or pixels at the original size; the type of the result depends on `form`. Raises
        DataError for an unreadable sample, with `name` or the path."""

    @abstractmethod
    def to_array(self, decoded: Any) -> np.ndarray:
        """Resize or crop the result of `decode` to the model's input size: (C, *image) in 0..peak of `array_dtype`."""

    def decode_within(self, content: bytes, name: str, max_pixels: int) -> Any:
        """Decode an uploaded file. Raises DataError, before pixels are decoded, for more than `max_pixels` pixels."""
        return self.decode(content, name)

    def read_upload_size(self, content: bytes, name: str, max_pixels: int) -> tuple[int, int]:
        """Return the upright (width, height) of an uploaded file; (0, 0) if predictions are not drawn on such files."""
        return 0, 0

    def open_view(self, raw: RawSample, name: str, exact: bool, as_region: bool) -> Any:
        """Open a sample as input of an augmentation. With `as_region`, an image is returned as a `LazyImage`, of which
        only the crop is decoded, at a lower resolution if possible unless `exact`. Raises DataError for an unreadable
        sample."""
        return self.decode(raw, name)

    def from_pixels(self, pixels: np.ndarray, name: str) -> np.ndarray:
        """Convert a user's array (*sizes) or (*sizes, C) to an input of `decode`. Raises DataError if invalid."""
        has_one_channel = pixels.ndim == self.axes + 1 and pixels.shape[-1] == 1
        return np.ascontiguousarray(pixels[..., 0] if has_one_channel else pixels)

    def cast_pixels(self, pixels: np.ndarray) -> np.ndarray:
        """Convert pixels (B, *sizes[, C]) to the dtype that `decode` expects, unless this would lose information."""
        return pixels

    @property
    def pixel_channels(self) -> tuple[int, ...]:
        """The valid numbers of channels of an array from a user (`from_pixels`)."""
        return (self.channels,)

    # values

    @property
    def peak(self) -> float:
        """The value that corresponds to 1 in `mean` and `std`: the maximum of an integer dtype, 1 for floats."""
        return 1.0

    @property
    def array_dtype(self) -> np.dtype:
        """The dtype of inputs before normalisation: uint8 for 8-bit values, else float32."""
        return np.dtype(np.float32)

    @property
    def dtype(self) -> torch.dtype:
        """The tensor dtype of `array_dtype`."""
        import torch

        return torch.uint8 if self.array_dtype == np.uint8 else torch.float32

    @property
    def area(self) -> int:
        """The maximum number of pixels of an input, per channel."""
        return math.prod(self.image)

    @property
    def nbytes(self) -> int:
        """The maximum number of bytes of an input before normalisation."""
        return self.channels * self.area * self.array_dtype.itemsize

    def count_tokens(self, grid: tuple[int, ...]) -> int:
        """Return the maximum number of patches of an input; `grid` is the patches per axis at the size `image`."""
        return math.prod(grid)

    def check_patch(self, patch: tuple[int, ...]) -> None:  # noqa: B027 (most modalities accept any patch size)
        """Raise UsageError if inputs are resized to multiples of another patch size than `patch`, the model's."""

    def longest_grid(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the maximum patches of an input along each axis; `grid` is the patches per axis at size `image`."""
        return grid

    def to_tensor(self, decoded: Any) -> Tensor:
        """Convert the result of `decode` to a tensor (C, *image), as `to_array` does."""
        import torch

        return torch.from_numpy(self.to_array(decoded))

    def transform(self, raw: RawSample) -> Tensor:
        """Convert a PIL image, a path, a file's bytes or pixels (H, W[, C]) to the model's input, (C, *image)
        float32. The bound method can be pickled, as the transform of a torch Dataset. Raises DataError for unreadable
        samples."""
        return self.normalise(self.to_tensor(self.decode(raw))[None])[0]

    def normalise(self, pixels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Normalise inputs (B, C, *image) in 0..peak, uint8 or float, to (x / peak - mean) / std, of the same shape and
        of `dtype`, by default float32."""
        import torch

        from vitreous.system.machine import copy_to_device

        dtype = dtype or torch.float32
        shape = (1, -1) + (1,) * (pixels.dim() - 2)
        mean, std = (torch.tensor(values).view(shape) * self.peak for values in (self.mean, self.std))
        if pixels.device.type != "cpu":
            mean, std = (copy_to_device(values, pixels.device) for values in (mean, std))
        if torch.compiler.is_compiling() or pixels.device.type != "cpu":
            return pixels.to(torch.float32, copy=True).sub_(mean).div_(std).to(dtype)
        # allocated by numpy: glibc before 2.38 does not reuse freed blocks for the aligned memory that torch requests
        floats = torch.from_numpy(np.empty(pixels.shape, dtype=np.float32))
        # the copy converts to float32; subtraction with two dtypes gives bit-identical results in three times the time
        return floats.copy_(pixels).sub_(mean).div_(std).to(dtype)

    def normalise_array(self, pixels: np.ndarray) -> np.ndarray:
        """Normalise inputs (B, C, *image) in 0..peak to float32 without torch, bit-identical to `normalise`."""
        shape = (1, -1) + (1,) * (pixels.ndim - 2)
        mean, std = (
            np.array(values, np.float32).reshape(shape) * np.float32(self.peak) for values in (self.mean, self.std)
        )
        floats = pixels.astype(np.float32)
        floats -= mean
        floats /= std
        return floats

    def denormalise(self, images: Tensor) -> Tensor:
        """Invert `normalise`: (B, C, *image) -> (B, C, *image) float32 in units of the files, may exceed 0..peak."""
        import torch

        shape = (1, -1) + (1,) * (images.dim() - 2)
        mean, std = (torch.tensor(values, device=images.device).view(shape) for values in (self.mean, self.std))
        return (images.float() * std + mean) * self.peak

    def noise(self, count: int = 1) -> np.ndarray:
        """Generate `count` inputs of uniform noise with a fixed seed, (count, C, *image), for timing and warm-up."""
        values = np.random.default_rng(0).integers(0, 256, (count, self.channels, *self.image), dtype=np.uint8)
        return values if self.array_dtype == np.uint8 else values.astype(np.float32) * np.float32(self.peak / 255)

    def blank(self) -> Tensor:
        """Create an input of zeros, (C, *image) of `dtype`, which replaces an unreadable sample."""
        import torch

        return torch.zeros(self.channels, *self.image, dtype=self.dtype)

    def collate(self, images: list[Tensor]) -> Tensor | list[Tensor]:
        """Collate B inputs (C, *image) to a batch (B, C, *image), or to a list if not `stacks`. B may be 0."""
        import torch

        return torch.stack(images) if images else torch.empty(0, *self.blank().shape, dtype=self.dtype)

    # variants of the preprocessing

    @property
    def frames(self) -> int:
        """The number of frames of an input; 1 without a time axis."""
        return 1

    @property
    def plane(self) -> tuple[int, int]:
        """The last two lengths of `image`: (height, width) of images and of clip frames."""
        height, width = self.image[-2:]
        return height, width

    @property
    def resampling(self) -> Image.Resampling:
        """Pillow's filter for resizing images."""
        return Image.Resampling.BICUBIC

    @property
    def resized_axes(self) -> int:
        """The number of axes that `--image-size` sets, counted from the last axis of `image`."""
        return self.axes

    def with_one_size(self, fit: Literal["crop", "squash"] = "squash") -> Preprocess:
        """Return the preprocessing that converts all samples to the size `image`. Images at native aspect ratio are
        then cropped or squashed, as `fit` selects; other modalities are unchanged."""
        return self

    def with_image(self, image: tuple[int, ...]) -> Self:
        """Return the preprocessing for inputs of the size `image`."""
        return replace(self, image=image)

    def with_only_size(self, image: tuple[int, ...]) -> Preprocess:
        """Return the preprocessing for inputs of the size `image`, without buckets unless it is one of them."""
        return self.with_image(image)

    @property
    def buckets(self) -> tuple[tuple[int, ...], ...]:
        """The input sizes of training: a sample is trained at the size that is nearest to its own (`data.buckets`). ()
        means that all samples are trained at `image`."""
        return ()

    @property
    def stride(self) -> int:
        """The distance between sampled frames of a clip, in frames; 0: evenly spread, or no frames at all."""
        return 0

    @property
    def has_buckets(self) -> bool:
        """Whether inputs have several sizes, those of `buckets`."""
        return bool(self.buckets)

    def with_buckets(self, buckets: tuple[tuple[int, ...], ...]) -> Preprocess:
        """Return the preprocessing with these `buckets`. Raises UsageError if the modality does not support buckets."""
        raise UsageError(f"--buckets is for images and clips, not for {self.noun}", "omit --buckets")

    def at_buckets(self) -> tuple[Preprocess, ...]:
        """Return one preprocessing for each size in `buckets`."""
        return tuple(self.with_image(size) for size in self.buckets)

    def adjust(self, **settings: Any) -> Self:
        """Return the preprocessing with new values of fields; ignore names that are not fields of this modality."""
        field_names = {field.name for field in fields(self)}
        return replace(self, **{name: value for name, value in settings.items() if name in field_names})

    def for_model(self, image: tuple[int, ...], channels: int) -> Self:
        """Return the preprocessing for the input size and channels of a model, with the default `mean` and `std`."""
        mean, std = self.default_moments(channels)
        return replace(self, image=image, channels=channels, mean=mean, std=std)

    @classmethod
    def default_moments(cls, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the default `mean` and `std`, one value per channel."""
        return HALF_MOMENTS[0][:1] * channels, HALF_MOMENTS[1][:1] * channels

    def with_moments(self, weights: Preprocess) -> Self:
        """Adopt `mean`, `std` and related settings from `weights`, the preprocessing of pre-trained weights."""
        return replace(self, mean=weights.mean, std=weights.std)

    def continue_from(self, weights: Preprocess) -> Preprocess:
        """Adopt the settings of `weights`, the preprocessing of pre-trained weights, for inputs of this modality and
        size. Settings that this modality does not have are ignored."""
        if type(weights) is type(self):
            return replace(weights, image=self.image)
        settings = {field.name: getattr(weights, field.name) for field in fields(weights)}
        excluded_names = ("name", "image", "channels", "buckets")
        return self.adjust(**{name: value for name, value in settings.items() if name not in excluded_names})

    @property
    def measures_moments(self) -> bool:
        """Whether `mean` and `std` are measured on the training samples, unless pre-trained weights provide them."""
        return False

    def shares_moments(self, weights: Preprocess | None) -> bool:
        """Return whether `mean` and `std` of `weights`, the preprocessing of pre-trained weights, apply to these
        samples."""
        return weights is not None and type(weights) is type(self) and weights.channels == self.channels

    @property
    def form_settings(self) -> dict[str, str]:
        """The settings, as text, that decide how a file is read that can be read in two ways; `requested` of
        `read_form`."""
        return {}

    @property
    def value_type(self) -> str:
        """The type of the values of a sample in messages, such as `uint16` or `voxels`."""
        return self.unit

    # properties for evaluation, export and the server

    @property
    def summary(self) -> str:
        """The conversion of samples of another size to `image`: `crop`, `squash`, `native` or `as it is`."""
        return "as it is"

    def resize_settings(self) -> dict[str, Any]:
        """Return the settings for resizing a sample to `image`, which are stored in exported files."""
        return {"fit": self.summary}

    @property
    def is_standardised(self) -> bool:
        """Whether each sample is standardised by its mean and std."""
        return False

    def for_reduced_decoding(self) -> Any:
        """Return self, a `PlanarPreprocess`, if large JPEG files may be decoded at a lower resolution before resizing
        (`inference.reading`); None for other modalities."""
        return None

    def is_within(self, decoded: Any) -> bool:
        """Return whether a decoded sample is no larger than the model's input, and can be cached without loss."""
        return False

    def visible_box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Return the region of an image of `width` x `height` pixels that is in the model's input: left, top, right and
        bottom as shares of width and height."""
        return 0.0, 0.0, 1.0, 1.0

    def check_views(self, views: str, crops: int) -> None:
        """Raise UsageError if `views`, the value of --clip-views, or several `crops` per set are not supported."""
        raise UsageError(
            f"--clip-views {views} is for clip models, but this model is for {self.noun}", "omit --clip-views"
        )


def image_to_tensor(image: Image.Image) -> Tensor:
    """Convert a PIL image to a tensor (C, height, width) uint8, or float32 for mode F."""
    import torch

    return torch.from_numpy(image_to_array(image))


def image_to_array(image: Image.Image) -> np.ndarray:
    """Convert a PIL image to an array (C, height, width) uint8, or float32 for mode F, without torch."""
    array = np.array(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy()


def quantise_floats(pixels: np.ndarray, name: str) -> np.ndarray:
    """Convert floating-point pixels in 0 to 1, (H, W[, C]) of an image or (T, H, W[, C]) of a clip, to uint8. Raises
    DataError for values outside 0 to 1."""
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= 1):
        problem = f"{name}: floating-point pixels from {low:.3g} to {high:.3g} are not in 0 to 1"
        raise DataError(problem, "use unnormalised floats from 0 to 1, or uint8 from 0 to 255")
    return np.rint(pixels * 255).astype(np.uint8)
