"""Images that Python callers pass to `predict` and `embed`: paths, bytes, PIL images, arrays and tensors. Does not
import torch.

| input | interpretation |
|---|---|
| `str`, `Path` | the path of an image file; for video models, of a video file or a folder of frames |
| `bytes` | the content of an image file, or of a video file |
| `PIL.Image.Image` | as if saved to a file: EXIF orientation applied, transparency over white |
| `numpy.ndarray` | pixels (H, W) or (H, W, C); of volumes (D, H, W) or (D, H, W, C), of clips (T, H, W[, C]) |
| `torch.Tensor` | pixels (C, H, W), of volumes (C, D, H, W), of clips (C, T, H, W), on any device |

Pixels are uint8 in 0 to 255, or floats in 0 to 1, before normalisation. A model that was trained on other values than
8-bit colours expects the values of its image files. C is 1, 3 or 4 for colours, else the model's channels.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeGuard, cast

import numpy as np
from PIL import Image

from vitreous.data.modalities.base import Preprocess
from vitreous.errors import DataError, UsageError
from vitreous.inference.sources import Item

if TYPE_CHECKING:
    from torch import Tensor

    ImageInput: TypeAlias = str | os.PathLike[str] | bytes | BinaryIO | Image.Image | np.ndarray | Tensor

ACCEPTED_INPUTS = (
    "a path, bytes, an open binary file, a PIL image, an array (H, W, C), a tensor (C, H, W), or a list of them"
)


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor of any shape; False if PyTorch is not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_image(value: object) -> TypeGuard[ImageInput]:
    """Return whether a value is a single image, of a type in the table above."""
    accepted_types = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image, np.ndarray)
    return isinstance(value, accepted_types) or is_tensor(value) or is_open_file(value)


def is_open_file(value: object) -> TypeGuard[BinaryIO]:
    """Return whether a value is an open file, such as an `io.BytesIO` or an upload: any object with a `read` method."""
    return callable(getattr(value, "read", None))


def read_open_file(file: Any, name: str) -> bytes:
    """Read the bytes of an open file, from its beginning if it can seek. Raises UsageError for a file opened in text
    mode."""
    try:
        if file.seekable():
            file.seek(0)
    except AttributeError:  # the wrapper of an upload, already at its beginning
        pass
    content: bytes | bytearray | memoryview | str = file.read()
    if not isinstance(content, (bytes, bytearray, memoryview)):
        raise UsageError(f"{name}: read() returned {type(content).__name__}, not bytes", 'open it with mode "rb"')
    return bytes(content)


def build_items(images: ImageInput | Iterable[ImageInput], preprocess: Preprocess) -> list[Item]:
    """Convert one or several images to items, named by their path or as `image` and a number. Raises UsageError for
    other values."""
    if is_image(images):
        return [build_item(images, preprocess, "image")]
    if not isinstance(images, Iterable):
        raise UsageError(f"{type(images).__name__} is not an image", f"give {ACCEPTED_INPUTS}")
    return [
        build_item(image, preprocess, f"image {index}")
        for index, image in enumerate(cast("Iterable[ImageInput]", images))
    ]


def build_item(image: ImageInput, preprocess: Preprocess, name: str) -> Item:
    """Convert one image to an item; arrays and tensors are checked when they are read. Raises UsageError for other
    values."""
    if isinstance(image, (str, os.PathLike)):
        path = os.fsdecode(image)
        return Item(path, path)
    if isinstance(image, (bytes, bytearray, memoryview)):
        return Item(name, bytes(image))
    if isinstance(image, Image.Image):
        return Item(name, b"", lambda: image)
    if isinstance(image, np.ndarray) or is_tensor(image):
        if image.ndim == len(preprocess.image) + 2:
            message = f"{name}: {' x '.join(map(str, image.shape))} is a batch, not an image"
            raise UsageError(message, "give list(batch) instead")
        return Item(name, b"", partial(to_pixel_array, image, preprocess, name))
    if is_open_file(image):
        return Item(name, read_open_file(image, name))
    raise UsageError(f"{name}: {type(image).__name__} is not an image", f"give {ACCEPTED_INPUTS}")


def to_pixel_array(image: Any, preprocess: Preprocess, name: str) -> np.ndarray:
    """Convert an array (H, W[, C]) or a tensor (C, H, W), with D or T before H for volumes and clips, to the array that
    `Preprocess.decode` expects. Raises DataError for another shape or other values."""
    from_tensor, count = is_tensor(image), len(preprocess.image)
    axis_names = preprocess.axis_names
    axes, channels = (f"(C, {axis_names})", 0) if from_tensor else (f"({axis_names}) or ({axis_names}, C)", -1)
    shape = tuple(image.shape)
    allowed_channels = preprocess.pixel_channels
    if (
        len(shape) not in ((count + 1,) if from_tensor else (count, count + 1))
        or 0 in shape
        or (len(shape) == count + 1 and shape[channels] not in allowed_channels)
    ):
        problem = f"{name}: {'a tensor' if from_tensor else 'an array'} of {' x '.join(map(str, shape))} is not {axes}"
        raise DataError(problem, f"use {axes} with {' or '.join(map(str, allowed_channels))} channels")
    if from_tensor:
        image = image.detach().cpu()
        image = (image.float() if image.dtype.is_floating_point else image).numpy()
        image = np.moveaxis(image, 0, -1)
    return preprocess.from_pixels(image, name)
