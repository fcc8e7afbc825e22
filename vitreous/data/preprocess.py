"""From a decoded image to the tensor that a model was trained on: stored with the model, the same everywhere."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image

from vitreous.data.decoding.clip import Clip, evenly, spaced
from vitreous.data.decoding.clips import open_clip
from vitreous.data.decoding.decode import MODES, decode
from vitreous.data.decoding.spectral import Picture, read_bands
from vitreous.data.decoding.volumes import read_volume
from vitreous.errors import UsageError
from vitreous.nn.sizes import format_size, native_size

# a process that only decodes images starts in a tenth of a second without torch, and in seconds with it
if TYPE_CHECKING:
    import torch
    from torch import Tensor

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # the paper's models: pixels in [-1, 1]
PEAKS = {"colours": 255.0, "uint8": 255.0, "uint16": 65535.0, "int16": 32767.0, "float32": 1.0, "voxels": 1.0}
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@dataclass(frozen=True)
class Preprocess:
    """How an image becomes a model's input, without chance.

    `image` in pixels, (height, width), of volumes (depth, height, width), of clips (frames, height, width), of which
    each frame is treated as an image is. `stride`: frames of a clip from one that is read to the next, in its middle;
    0: they are spread evenly over all of it. `fit` = `crop`: the short side is scaled to the target / `share` and the
    centre cut out; `squash`: the whole image is scaled to the target, as the paper's code does at test time; `native`:
    it keeps its aspect ratio, and has at most `tokens` patches of `patch` pixels, whatever `image` says (NaViT,
    arXiv:2307.06304): pictures have different sizes. `mean` and `std` are per channel, for pixels in [0, 1].

    `buckets`: sizes, of which each image is trained at the nearest (`data.buckets`); `image` is one of them, at which
    images are judged. () where all are trained at `image`.

    `numbers`: `colours` are RGB or grey at 8 bits, however they are stored; else each channel is taken for itself, its
    numbers of that type as they are in the file, and `mean` and `std` are in units of `peak`. `voxels` are volumes, and
    signals, whose `image` is (length,), of any type. With `standardise` = `each` every channel of every one is brought
    to mean 0 and deviation 1 by itself (`standardised`); with `data` values stay, and `mean` and `std` are those of the
    training data. One of another size than `image` is cut or filled up with 0 around its middle, or, with `squash`,
    scaled to it.
    """

    image: tuple[int, ...]
    channels: int = 3
    mean: tuple[float, ...] = HALF[0]
    std: tuple[float, ...] = HALF[1]
    fit: Literal["crop", "squash", "native"] = "crop"
    share: float = 1.0
    filter: Literal["bilinear", "bicubic"] = "bicubic"
    numbers: Literal["colours", "uint8", "uint16", "int16", "float32", "voxels"] = "colours"
    stride: int = 0
    buckets: tuple[tuple[int, ...], ...] = ()
    tokens: int = 0
    patch: tuple[int, ...] = ()
    standardise: Literal["each", "data"] = "each"

    def __post_init__(self) -> None:
        if self.native != (self.tokens > 0) or self.native != bool(self.patch):
            problem = f"fit={self.fit} with tokens={self.tokens} and patch={self.patch} cannot be"
            raise UsageError(problem, "fit=native has 1 token or more and a patch, any other 0 and ()")
        if self.native and (len(self.image) != 2 or len(self.patch) != 2):
            raise UsageError("clips and volumes have one size, not one by their own aspect", "use fit=crop")
        if self.stride < 0 or (self.stride and not self.of_clips):
            problem = f"a stride of {self.stride} frames" + ("" if self.of_clips else ", and the images are no clips")
            raise UsageError(problem, "a stride of clips is 1 or more, or 0 for frames spread evenly")
        if any(len(size) != len(self.image) for size in self.buckets):
            raise UsageError(f"buckets are sizes of {len(self.image)} axes, as {format_size(self.image)} is")

    @property
    def kind(self) -> Literal["pictures", "clips", "volumes", "signals"]:
        """What images are called."""
        if self.numbers == "voxels":
            return "signals" if len(self.image) == 1 else "volumes"
        return "clips" if self.of_clips else "pictures"

    @property
    def of_clips(self) -> bool:
        """Whether images are clips, (C, T, height, width)."""
        return len(self.image) == 3 and self.numbers == "colours"

    @property
    def native(self) -> bool:
        """Whether each picture keeps its aspect ratio, so that they have different sizes."""
        return self.fit == "native"

    @property
    def area(self) -> int:
        """Pixels of an image, of each channel, at most."""
        return self.tokens * math.prod(self.patch) if self.native else math.prod(self.image)

    @property
    def peak(self) -> float:
        """What is 1 to `mean` and `std`: the largest number of the type, or 1."""
        return PEAKS[self.numbers]

    @property
    def plane(self) -> tuple[int, int]:
        """(height, width) of pictures and of the frames of clips."""
        height, width = self.image[-2:]
        return height, width

    def plane_of(self, size: tuple[float, float]) -> tuple[int, int]:
        """(height, width) that an image of (width, height) pixels is brought to: `plane`, or its own."""
        if not self.native:
            return self.plane
        height, width = native_size((size[1], size[0]), self.patch, self.tokens)
        return height, width

    @property
    def dtype(self) -> torch.dtype:
        """Of pixels before they are normalised: uint8 where they have 8 bits, else float32."""
        import torch

        return torch.uint8 if self.numbers in ("colours", "uint8") else torch.float32

    def squared(self) -> Preprocess:
        """The same for images of one size, `image`, to which pictures at their own aspect are squashed."""
        return replace(self, fit="squash", tokens=0, patch=()) if self.native else self

    def decoded(
        self, raw: bytes | np.ndarray | Image.Image | str | os.PathLike[str] | Clip, name: str | None = None
    ) -> Picture:
        """A file, its bytes, or pixels (H, W[, C]) -> the image, or one for each channel, or a volume (C, D, H, W), a
        signal (C, L), or the frames of a clip that a model sees (T, H, W, 3) uint8. Raises DataError."""
        if self.of_clips or isinstance(raw, Clip):
            clip = opened_clip(raw, name)
            return clip.read(self.moments(len(clip)))
        if self.numbers == "colours":
            return decode(raw, self.channels, name)
        if self.numbers == "voxels":
            voxels = np.asarray(raw) if isinstance(raw, Image.Image) else raw
            return read_volume(voxels, self.channels, name, len(self.image), self.standardise == "each")
        pixels = np.asarray(raw) if isinstance(raw, Image.Image) else raw
        fill = [value * self.peak for value in self.mean] if len(self.mean) == self.channels else None
        return read_bands(pixels, self.channels, self.numbers, name, fill)

    def moments(self, count: int, draws: np.ndarray | None = None) -> np.ndarray:
        """Numbers of the frames (T,) int64 that are read of a clip of `count` frames: without chance, or at random by
        `draws` (T,) in [0, 1): one frame of each of T equal parts, or, with a stride, from a random start."""
        if self.stride:
            return spaced(count, self.image[0], self.stride, 0.5 if draws is None else float(draws[0]))
        return evenly(count, self.image[0], 0.5 if draws is None else draws)

    def pixels(self, picture: Picture) -> Tensor:
        """A decoded image -> (C, *image) of `dtype`; (C, height, width) of its own if `native`."""
        import torch

        return torch.from_numpy(self.array(picture))

    def transform(self, image: Image.Image | np.ndarray | bytes | str | os.PathLike[str]) -> Tensor:
        """A Pillow image, a file, its bytes or pixels (H, W[, C]) -> (C, *image) float32, the model's input. It can be
        pickled, as the transform of a Dataset. Raises DataError."""
        return self.normalise(self.pixels(self.decoded(image))[None])[0]

    def array(self, picture: Picture) -> np.ndarray:
        """The same as numpy has it, without torch."""
        if isinstance(picture, tuple):
            return np.concatenate([self.array(band) for band in picture])
        if isinstance(picture, np.ndarray):
            if self.of_clips:
                return self.frames(picture)
            return (scaled if self.fit == "squash" else centred)(picture, self.image)
        return to_array(self.fitted(picture))

    def frames(self, clip: np.ndarray, along: float = 0.5) -> np.ndarray:
        """(T, H, W, 3) uint8 -> (C, *image) uint8, each frame fitted by itself; `along` is that of `box`."""
        pictures = [Image.fromarray(frame).convert(MODES[self.channels]) for frame in clip]
        return np.stack([to_array(self.fitted(picture, along)) for picture in pictures], 1)

    def fitted(self, picture: Image.Image, along: float = 0.5) -> Image.Image:
        """A decoded image at the target size: one resampling of the box that the crop would cut from the scaled
        image."""
        plane = self.plane_of(picture.size)
        if picture.size == plane[::-1]:
            return picture
        return self.resampled(picture, self.box(picture.size, along), plane)

    def box(self, size: tuple[int, int], along: float = 0.5) -> tuple[float, float, float, float]:
        """The part of an image of (width, height) that is used: left, top, right and bottom, in pixels. `along` is
        where it lies on the side of which more is left over: 0 at the left or the top, 1 at the other end."""
        if self.fit != "crop":
            return (0.0, 0.0, *size)
        height, width = self.plane
        scale = max(height / size[1], width / size[0]) / self.share
        across, down = min(width / scale, size[0]) / 2, min(height / scale, size[1]) / 2
        x, y = size[0] / 2, size[1] / 2
        if x - across >= y - down:
            x += (along - 0.5) * 2 * (x - across)
        else:
            y += (along - 0.5) * 2 * (y - down)
        return x - across, y - down, x + across, y + down

    def resampled(
        self, picture: Image.Image, box: tuple[float, float, float, float], plane: tuple[int, int]
    ) -> Image.Image:
        """A box of an image at the size (height, width) `plane`."""
        return picture.resize((plane[1], plane[0]), _FILTERS[self.filter], box=box)

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

    def noise(self, count: int = 1) -> np.ndarray:
        """(count, C, *image) pixels of noise, always the same."""
        values = np.random.default_rng(0).integers(0, 256, (count, self.channels, *self.image), dtype=np.uint8)
        eight_bits = self.numbers in ("colours", "uint8")
        return values if eight_bits else values.astype(np.float32) * np.float32(self.peak / 255)

    def denormalise(self, images: Tensor) -> Tensor:
        """(B, C, *image) as a model takes it -> (B, C, *image) float32 in 0..peak, not clipped: the inverse of
        `normalise`."""
        import torch

        shape = (1, -1) + (1,) * (images.dim() - 2)
        mean, std = (torch.tensor(values, device=images.device).view(shape) for values in (self.mean, self.std))
        return (images.float() * std + mean) * self.peak


def opened_clip(raw: bytes | np.ndarray | Image.Image | str | os.PathLike[str] | Clip, name: str | None = None) -> Clip:
    """A file, its bytes, pixels (T, H, W, 3), an open clip, or a picture as a clip of one frame -> an open clip. Raises
    DataError."""
    return open_clip(np.asarray(raw)[None] if isinstance(raw, Image.Image) else raw, name)


def centred(volume: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """(C, *image) -> (C, *size): the middle of a volume, or the volume in the middle of zeros, along each axis."""
    out, to, of = np.zeros((len(volume), *size), volume.dtype), [slice(None)], [slice(None)]
    for wanted, own in zip(size, volume.shape[1:], strict=True):
        both = min(wanted, own)
        to.append(slice((wanted - both) // 2, (wanted - both) // 2 + both))
        of.append(slice((own - both) // 2, (own - both) // 2 + both))
    out[tuple(to)] = volume[tuple(of)]
    return out


def scaled(volume: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """(C, *image) float32 -> (C, *size), linear along each axis, and averaged over as many voxels as become one.

    out[i] = sum_j w_ij in[j] / sum_j w_ij,  w_ij = max(0, 1 - |j + 1/2 - (i + 1/2) r| / max(1, r)),  r = own / size
    """
    for axis, wanted in enumerate(size, 1):
        ratio = volume.shape[axis] / wanted
        if ratio != 1:
            places, voxels = (np.arange(wanted) + 0.5) * ratio, np.arange(volume.shape[axis]) + 0.5
            weights = np.maximum(0, 1 - np.abs(voxels - places[:, None]) / max(1, ratio))
            weights = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
            volume = np.moveaxis(np.tensordot(weights, volume, (1, axis)), 0, axis)
    return np.ascontiguousarray(volume)


def to_tensor(picture: Image.Image) -> Tensor:
    """The same as a tensor (C, height, width)."""
    import torch

    return torch.from_numpy(to_array(picture))


def to_array(picture: Image.Image) -> np.ndarray:
    """An image -> (C, height, width), uint8, or float32 where its mode is F, without torch."""
    array = np.array(picture)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy()
