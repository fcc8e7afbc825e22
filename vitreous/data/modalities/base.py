"""The contract of a modality: how a file of it becomes a model's input, what it is called and what it can do.

A modality is one file: a frozen dataclass whose fields are stored with the model (`preprocess` in `model.json`), and
whose `name` is its tag there. Code outside this folder asks it, and never which modality it is. No PyTorch is imported
until a tensor is asked for.
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

# a process that only decodes images starts in a tenth of a second without torch, and in seconds with it
if TYPE_CHECKING:
    import torch
    from torch import Tensor

IMAGENET_MOMENTS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF_MOMENTS = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # the paper's models: pixels in [-1, 1]

#: what a sample is decoded from: a path, a file's bytes, pixels, a Pillow image, or an opened clip
RawSample = bytes | np.ndarray | Image.Image | str | os.PathLike[str] | Clip


class SampleForm(NamedTuple):
    """The size of a sample, one length per axis, its channels, and a preprocessing with the settings that follow from
    the file; its size and channels are still those of the sample."""

    size: tuple[int, ...]
    channels: int
    preprocess: Preprocess


@dataclass(frozen=True)
class Preprocess(ABC):
    """How a sample becomes a model's input, without chance: `decode`, `to_array`, `normalise`.

    `image` is the size of the input, one length per axis: (height, width), (depth, height, width), (frames, height,
    width) or (length,); shapes below call it `*image`. `mean` and `std` are per channel, in units of `peak`.

    A subclass has a field `name: Literal["…"]`, its tag, and further fields that are settings, which
    `--preprocess.FIELD` sets. Raises UsageError for settings that do not go together.
    """

    name: ClassVar[str]  # a field of each subclass
    #: what samples are called, in the plural: in messages, and by a split (`data.annotations.target.get_sample_noun`)
    noun: ClassVar[str] = "images"
    #: how many axes `image` has, their names in messages, and what its numbers are called
    axes: ClassVar[int] = 2
    axis_names: ClassVar[str] = "H, W"
    unit: ClassVar[str] = "pixels"
    #: endings of its files, in small letters
    suffixes: ClassVar[frozenset[str]] = frozenset()
    #: what `decode` returns: a Pillow image, or one for each channel; frames of a clip; or an array (C, *sides).
    #: Recipes choose models and augmentation by it
    form: ClassVar[Literal["images", "clips", "arrays"]] = "arrays"
    #: what is wrong with a folder in which none is found
    folder_hint: ClassVar[str] = ""
    #: the `axes` of `data.sources.open_data` for files that could also be of another modality; None: layouts tell
    array_axes: ClassVar[int | None] = None
    #: whether all inputs of a batch have one size, so that they stack
    stacks: ClassVar[bool] = True
    #: whether values are RGB or grey at 8 bits, which augmentation of colours needs
    has_colours: ClassVar[bool] = False
    #: whether inputs change with time, so that they are shown as animations
    is_animated: ClassVar[bool] = False
    #: whether a browser shows the files, which the server then takes
    is_browsable: ClassVar[bool] = False
    #: whether a sample may have pixels without data, so that all are looked at before training
    may_be_void: ClassVar[bool] = False
    #: whether decoded samples may be kept in memory for training
    is_cacheable: ClassVar[bool] = False
    #: what the Hugging Face Hub calls a classifier of it, where that is no image classifier
    hub_task: ClassVar[str] = ""

    image: tuple[int, ...]
    channels: int = 3
    mean: tuple[float, ...] = HALF_MOMENTS[0]
    std: tuple[float, ...] = HALF_MOMENTS[1]

    def __post_init__(self) -> None:
        if len(self.image) != self.axes:
            problem = f"the size of {self.noun} has {self.axes} axes ({self.axis_names}), not {len(self.image)}"
            raise UsageError(problem, f"give {self.axes} numbers")

    # from a file to an array

    @classmethod
    def find_files(cls, folder: str) -> list[str]:
        """The paths of the samples below a folder, in natural order."""
        return list_files_by_suffix(folder, cls.suffixes)

    @classmethod
    def open_folder(cls, folder: Path, split_seed: int, is_asked: bool = False) -> Data | None:
        """The data set in a folder of classes of such files, with or without folders of splits around them; None for a
        folder without such files, or with files of others that are likelier, unless `is_asked`. Raises DataError as
        `layouts.folder.folder`, and where it `is_asked` and has no such files."""
        if not list_files_by_suffix(os.fspath(folder), cls.suffixes):
            return None
        return open_class_folders(
            folder, split_seed, cls.suffixes, lambda files: SampleFiles(files.paths, files.labels, cls.noun, cls.axes)
        )

    @classmethod
    def archive_suffixes(cls) -> frozenset[str]:
        """Endings of the members of an archive that are samples."""
        return cls.suffixes

    @classmethod
    @abstractmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, asked: Mapping[str, str]) -> SampleForm:
        """The form of a sample, from its header where that tells. Raises DataError for a file that cannot be read.

        `channels`: those to which colours are converted; None for their own. `asked`: fields of the preprocessing that
        the user or the weights ask for, for files that can be read in two ways.
        """

    @abstractmethod
    def decode(self, raw: RawSample, name: str | None = None) -> Any:
        """A file, its bytes, or pixels -> the sample, decoded, of its own size: what `to_array` takes. Raises
        DataError, with `name` or the path."""

    @abstractmethod
    def to_array(self, decoded: Any) -> np.ndarray:
        """What `decode` returned -> (C, *image) in 0..peak of `array_dtype`."""

    def decode_within(self, content: bytes, name: str, max_pixels: int) -> Any:
        """`decode` for the bytes of an upload. Raises DataError, before its pixels are decoded, for more than
        `max_pixels`."""
        return self.decode(content, name)

    def read_upload_size(self, content: bytes, name: str, max_pixels: int) -> tuple[int, int]:
        """(width, height) of an upload, upright; (0, 0) where nothing is drawn on it."""
        return 0, 0

    def open_view(self, raw: RawSample, name: str, exact: bool, as_region: bool) -> Any:
        """What augmentation draws a view from: the decoded sample, or, where it takes those (`as_region`), a picture of
        which only the part that is needed is decoded, unless `exact` at a lower resolution. Raises DataError."""
        return self.decode(raw, name)

    def from_pixels(self, pixels: np.ndarray, name: str) -> np.ndarray:
        """An array (*sides) or (*sides, C) that a user gives -> what `decode` takes. Raises DataError."""
        grey = pixels.ndim == self.axes + 1 and pixels.shape[-1] == 1
        return np.ascontiguousarray(pixels[..., 0] if grey else pixels)

    def cast_pixels(self, pixels: np.ndarray) -> np.ndarray:
        """Pixels (B, *sides[, C]) of any type -> of the type that files of these samples have, where that loses
        nothing."""
        return pixels

    @property
    def pixel_channels(self) -> tuple[int, ...]:
        """The numbers of channels C that an array may have which a user gives."""
        return (self.channels,)

    # numbers

    @property
    def peak(self) -> float:
        """What is 1 to `mean` and `std`: the largest number of the type of values, or 1."""
        return 1.0

    @property
    def array_dtype(self) -> np.dtype:
        """Of arrays before they are normalised: uint8 where values have 8 bits, else float32."""
        return np.dtype(np.float32)

    @property
    def dtype(self) -> torch.dtype:
        """`array_dtype` of tensors."""
        import torch

        return torch.uint8 if self.array_dtype == np.uint8 else torch.float32

    @property
    def area(self) -> int:
        """Pixels of an input, of each channel, at most."""
        return math.prod(self.image)

    @property
    def nbytes(self) -> int:
        """Bytes of an input before it is normalised, at most."""
        return self.channels * self.area * self.array_dtype.itemsize

    def count_tokens(self, grid: tuple[int, ...]) -> int:
        """Patches of an input, at most, where the model's own image has so many along each axis."""
        return math.prod(grid)

    def check_patch(self, patch: tuple[int, ...]) -> None:  # noqa: B027 (most have nothing to refuse)
        """Raise UsageError where inputs are scaled to whole patches other than those of a model."""

    def longest_grid(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """The patches that an input may have along each axis, at most, where the model's own image has `grid`."""
        return grid

    def to_tensor(self, decoded: Any) -> Tensor:
        """`to_array` as a tensor."""
        import torch

        return torch.from_numpy(self.to_array(decoded))

    def transform(self, raw: RawSample) -> Tensor:
        """A Pillow image, a file, its bytes or pixels (H, W[, C]) -> (C, *image) float32, the model's input. It can be
        pickled, as the transform of a Dataset. Raises DataError."""
        return self.normalise(self.to_tensor(self.decode(raw))[None])[0]

    def normalise(self, pixels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """(B, C, *image) in 0..peak, uint8 or float -> (B, C, *image) for the model, float32 or of `dtype`."""
        import torch

        from vitreous.system.machine import copy_to_device

        dtype = dtype or torch.float32
        shape = (1, -1) + (1,) * (pixels.dim() - 2)
        mean, std = (torch.tensor(values).view(shape) * self.peak for values in (self.mean, self.std))
        if pixels.device.type != "cpu":
            mean, std = (copy_to_device(values, pixels.device) for values in (mean, std))
        if torch.compiler.is_compiling() or pixels.device.type != "cpu":
            return pixels.to(torch.float32, copy=True).sub_(mean).div_(std).to(dtype)
        # numpy's memory: torch asks for aligned memory, and glibc before 2.38 then does not give it the place of the
        # last batch
        floats = torch.from_numpy(np.empty(pixels.shape, dtype=np.float32))
        # first a copy: a difference of two types takes three times as long, to the same bits
        return floats.copy_(pixels).sub_(mean).div_(std).to(dtype)

    def normalise_array(self, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) in 0..peak -> float32 of the same shape, bit for bit as `normalise`, without torch."""
        shape = (1, -1) + (1,) * (pixels.ndim - 2)
        mean, std = (
            np.array(values, np.float32).reshape(shape) * np.float32(self.peak) for values in (self.mean, self.std)
        )
        floats = pixels.astype(np.float32)
        floats -= mean
        floats /= std
        return floats

    def denormalise(self, images: Tensor) -> Tensor:
        """(B, C, *image) as a model takes it -> (B, C, *image) float32 in 0..peak, not clipped: the inverse of
        `normalise`."""
        import torch

        shape = (1, -1) + (1,) * (images.dim() - 2)
        mean, std = (torch.tensor(values, device=images.device).view(shape) for values in (self.mean, self.std))
        return (images.float() * std + mean) * self.peak

    def noise(self, count: int = 1) -> np.ndarray:
        """(count, C, *image) pixels of noise, always the same."""
        values = np.random.default_rng(0).integers(0, 256, (count, self.channels, *self.image), dtype=np.uint8)
        return values if self.array_dtype == np.uint8 else values.astype(np.float32) * np.float32(self.peak / 255)

    def blank(self) -> Tensor:
        """(C, *image) zeros of `dtype`, which stand for a sample that cannot be read."""
        import torch

        return torch.zeros(self.channels, *self.image, dtype=self.dtype)

    def collate(self, images: list[Tensor]) -> Tensor | list[Tensor]:
        """B inputs (C, *image) -> (B, C, *image), B may be 0; a list of them where they do not stack."""
        import torch

        return torch.stack(images) if images else torch.empty(0, *self.blank().shape, dtype=self.dtype)

    # other sizes, other settings

    @property
    def frames(self) -> int:
        """Moments of an input: 1 where it has no axis of time."""
        return 1

    @property
    def plane(self) -> tuple[int, int]:
        """The last two axes of `image`: (height, width) of images and of the frames of clips."""
        height, width = self.image[-2:]
        return height, width

    @property
    def resampling(self) -> Image.Resampling:
        """The filter by which parts of an image are scaled."""
        return Image.Resampling.BICUBIC

    @property
    def resized_axes(self) -> int:
        """The last axes of `image` that `--image-size` sets."""
        return self.axes

    def with_one_size(self, fit: Literal["crop", "squash"] = "squash") -> Preprocess:
        """The same for inputs that all have the size `image`, to which those at their own aspect are brought by
        `fit`."""
        return self

    def with_image(self, image: tuple[int, ...]) -> Self:
        """The same for inputs of another size."""
        return replace(self, image=image)

    def with_only_size(self, image: tuple[int, ...]) -> Preprocess:
        """The same for inputs of another size, which need be none of `buckets`."""
        return self.with_image(image)

    @property
    def buckets(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of which each sample is trained at the nearest (`data.buckets`); () where all are trained at
        `image`."""
        return ()

    @property
    def stride(self) -> int:
        """Frames of a clip from one that is read to the next; 0: spread evenly, or no frames."""
        return 0

    @property
    def has_buckets(self) -> bool:
        """Whether batches of a run have different sizes, one for each of `buckets`."""
        return bool(self.buckets)

    def with_buckets(self, buckets: tuple[tuple[int, ...], ...]) -> Preprocess:
        """The same with these `buckets`. Raises UsageError where samples have none."""
        raise UsageError(f"--buckets is for images and clips, not for {self.noun}", "leave it out")

    def at_buckets(self) -> tuple[Preprocess, ...]:
        """The same for each of `buckets`."""
        return tuple(self.with_image(size) for size in self.buckets)

    def adjust(self, **settings: Any) -> Self:
        """The same with other settings, of those that the modality has."""
        own = {field.name for field in fields(self)}
        return replace(self, **{name: value for name, value in settings.items() if name in own})

    def for_model(self, image: tuple[int, ...], channels: int) -> Self:
        """The same for inputs of that size and so many channels, with the `mean` and `std` that are usual before any
        are measured."""
        mean, std = self.default_moments(channels)
        return replace(self, image=image, channels=channels, mean=mean, std=std)

    @classmethod
    def default_moments(cls, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel, where nothing else is known."""
        return HALF_MOMENTS[0][:1] * channels, HALF_MOMENTS[1][:1] * channels

    def with_moments(self, weights: Preprocess) -> Self:
        """The same with the `mean` and `std` that weights were trained with, and what goes with these."""
        return replace(self, mean=weights.mean, std=weights.std)

    def continue_from(self, weights: Preprocess) -> Preprocess:
        """The preprocessing that weights were trained with, for inputs of this modality and size."""
        if type(weights) is type(self):
            return replace(weights, image=self.image)
        settings = {field.name: getattr(weights, field.name) for field in fields(weights)}
        others = ("name", "image", "channels", "buckets")
        return self.adjust(**{name: value for name, value in settings.items() if name not in others})

    @property
    def measures_moments(self) -> bool:
        """Whether `mean` and `std` are to be measured on the training samples, unless weights bring theirs."""
        return False

    def shares_moments(self, weights: Preprocess | None) -> bool:
        """Whether the `mean` and `std` of weights that were trained with `weights` are right for these samples."""
        return weights is not None and type(weights) is type(self) and weights.channels == self.channels

    @property
    def form_settings(self) -> dict[str, str]:
        """The settings, as words, by which files are read that can be read in two ways (`read_form`)."""
        return {}

    @property
    def value_type(self) -> str:
        """What values are, for messages: `uint16`, `voxels`."""
        return self.unit

    # what else code asks of it

    @property
    def summary(self) -> str:
        """How a sample of another size is brought to `image`, in a word."""
        return "as it is"

    def resize_settings(self) -> dict[str, Any]:
        """How a sample is brought to `image`, for programs that read exported files."""
        return {"fit": self.summary}

    @property
    def is_standardised(self) -> bool:
        """Whether each sample is brought to mean 0 and standard deviation 1 by itself."""
        return False

    def for_reduced_decoding(self) -> Any:
        """The same as a `PlanarPreprocess`, if a large JPEG may be decoded at a lower resolution, of which a box is
        then resampled (`inference.reading`); else None."""
        return None

    def is_within(self, decoded: Any) -> bool:
        """Whether a decoded sample is no larger than the model's input."""
        return False

    def visible_box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """The part of an image that the model sees: left, top, right and bottom as shares of width and height."""
        return 0.0, 0.0, 1.0, 1.0

    def check_views(self, views: str, crops: int) -> None:
        """Raise UsageError for `--clip-views VIEWS` of several sets of frames, or of so many crops of one, that a
        sample cannot have."""
        raise UsageError(f"--clip-views {views} is for models of clips, and this one takes {self.noun}", "leave it out")


def image_to_tensor(picture: Image.Image) -> Tensor:
    """`image_to_array` as a tensor (C, height, width)."""
    import torch

    return torch.from_numpy(image_to_array(picture))


def image_to_array(picture: Image.Image) -> np.ndarray:
    """An image -> (C, height, width), uint8, or float32 where its mode is F, without torch."""
    array = np.array(picture)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy()


def quantise_floats(pixels: np.ndarray, name: str) -> np.ndarray:
    """Pixels (H, W[, C]) of an image, or with T in front of a clip, floats in 0 to 1 -> the same, uint8. Raises
    DataError for others."""
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= 1):
        message = f"{name}: pixels from {low:.3g} to {high:.3g}"
        raise DataError(message, "floats are in 0 to 1, before normalisation; uint8 is in 0 to 255")
    return np.rint(pixels * 255).astype(np.uint8)
