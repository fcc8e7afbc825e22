"""Multi-crop: several views of one image, large and small (SwAV, arXiv:2006.09882; DINO, arXiv:2104.14294).

The views of an image are one flat tensor until they are unpacked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, Literal

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from vitreous.data.augmentation.augment import Augment
from vitreous.data.augmentation.batched import (
    DRAWS_PER_VIEW,
    SOLARISE_THRESHOLD,
    augment_batch_colours,
    crop_and_resize_batch,
)
from vitreous.data.augmentation.crops import AreaCrop, array_to_pillow
from vitreous.data.augmentation.scenes import SceneViews
from vitreous.data.augmentation.volumes import VolumeViews
from vitreous.data.decoding.regions import LazyImage
from vitreous.data.decoding.spectral import DecodedSample, list_bands
from vitreous.data.keys import derive_keys, draw_uniform, fork_torch_rng
from vitreous.data.modalities.base import image_to_tensor
from vitreous.data.modalities.planar import PlanarPreprocess
from vitreous.errors import UsageError

NUM_GLOBAL_VIEWS = 2  # global views, which the teacher sees too
VIEW_CHUNK_SIZE = 64  # views of cached images per chunk, to fit into the processor's cache


@dataclass(frozen=True)
class MultiCrop:
    """Two global views of the model's size and `locals` local ones of `local_image` (height, width); DINO's by default.

    `global_area` and `local_area` are shares of the image, `ratio` the aspect ratios of the crops, log-uniform,
    resampled with a bicubic filter. `flip` and `grey` are probabilities; `jitter` changes brightness, contrast,
    saturation and hue, with `jitter_probability`. `blur` and `solarise`: the probabilities of the first global view,
    the second, and each local one; `radius` of the Gaussian blur in pixels, uniform. Images that are read by band
    (`BandPreprocess`) get no colour augmentation. Raises UsageError for values out of range.
    """

    takes_regions: ClassVar[bool] = False

    locals: int = 8
    local_image: tuple[int, int] = (96, 96)
    global_area: tuple[float, float] = (0.4, 1.0)
    local_area: tuple[float, float] = (0.05, 0.4)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)
    jitter_probability: float = 0.8
    grey: float = 0.2
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)
    radius: tuple[float, float] = (0.1, 2.0)
    solarise: tuple[float, float, float] = (0.0, 0.2, 0.0)
    name: Literal["multicrop"] = "multicrop"

    def __post_init__(self) -> None:
        if not all(0 <= p <= 1 for p in (self.flip, self.jitter_probability, self.grey, *self.blur, *self.solarise)):
            raise UsageError("probabilities of views must be from 0 to 1")
        for area in (self.global_area, self.local_area):
            if not 0 < area[0] <= area[1] <= 1:
                raise UsageError(f"invalid view area {area}", "use areas above 0 and at most 1, the lower one first")
        if self.locals < 0 or min(self.local_image) < 1:
            raise UsageError(f"{self.locals} local views of {self.local_image} pixels are not valid")

    def draw_views(
        self, source_image: DecodedSample | LazyImage, image: tuple[int, int], sample_key: int
    ) -> list[Tensor]:
        """Draw 2 + locals views, (C, h, w) each, the global ones first and of (height, width) `image`.

        View v is drawn from key(sample_key, v), so that additional views do not change the others.
        """
        source_image = (
            source_image if isinstance(source_image, (Image.Image, tuple, np.ndarray)) else source_image.decode_full()
        )
        bands, colours = list_bands(source_image), not isinstance(source_image, tuple)

        def drawn(band: Image.Image, view: int) -> Tensor:
            with fork_torch_rng(sample_key, view):
                return image_to_tensor(compose_view_transform(self, min(view, NUM_GLOBAL_VIEWS), image, colours)(band))

        return [torch.cat([drawn(band, view) for band in bands]) for view in range(NUM_GLOBAL_VIEWS + self.locals)]

    def augment_image(self, image: DecodedSample | LazyImage, preprocess: PlanarPreprocess, sample_key: int) -> Tensor:
        """Flatten all views of an image, (n,)."""
        return torch.cat([view.flatten() for view in self.draw_views(image, preprocess.plane, sample_key)])

    def augment_batch(self, pixels: Tensor, keys: np.ndarray) -> Tensor:
        """Draw the views of cached (B, C, H, W) images of the model's size by (B,) keys: (B, n) rows.

        Batches are processed in float32 until the last step, whereas files use Pillow: the distributions are the same,
        the random numbers differ.
        """
        view_groups = (np.arange(NUM_GLOBAL_VIEWS), NUM_GLOBAL_VIEWS + np.arange(self.locals))
        return torch.cat(
            [self.draw_batch_views(pixels, keys, views).flatten(1) for views in view_groups if len(views)], 1
        )

    def draw_batch_views(self, pixels: Tensor, keys: np.ndarray, views: np.ndarray) -> Tensor:
        """Draw `draw_views` (V,), all global or all local, of (B, C, H, W) images by (B,) keys: (B, V, C, h, w)."""
        local, channels = views[0] >= NUM_GLOBAL_VIEWS, pixels.shape[1]
        size = self.local_image if local else (pixels.shape[-2], pixels.shape[-1])
        area = self.local_area if local else self.global_area
        setting_indices = np.minimum(views, NUM_GLOBAL_VIEWS)
        blur, solarise = np.array(self.blur)[setting_indices], np.array(self.solarise)[setting_indices]
        ones = np.ones(len(views))
        probabilities = np.stack([self.jitter_probability * ones, self.grey * ones, blur, solarise], 1)
        u, sources = (
            draw_uniform(derive_keys(keys[:, None], views).ravel(), DRAWS_PER_VIEW),
            np.arange(len(keys)).repeat(len(views)),
        )
        probabilities = np.tile(probabilities, (len(keys), 1))
        result = torch.empty(len(sources), channels, *size, dtype=pixels.dtype)
        for start in range(0, len(sources), VIEW_CHUNK_SIZE):
            span = slice(start, start + VIEW_CHUNK_SIZE)
            chunk = pixels[torch.from_numpy(sources[span])].permute(0, 2, 1, 3).float()
            chunk = crop_and_resize_batch(
                chunk, u[span], size=size, area=area, ratio=self.ratio, flip_probability=self.flip
            )
            if pixels.dtype == torch.uint8:
                chunk.clamp_(0, 255)
                if channels in (1, 3):
                    chunk = augment_batch_colours(chunk, u[span], probabilities[span], self.jitter, self.radius)
                chunk.round_()
            result[span] = chunk.permute(0, 2, 1, 3)
        return result.unflatten(0, (len(keys), len(views)))

    def unpack_batch(self, entries: Tensor, preprocess: PlanarPreprocess) -> dict[str, Tensor]:
        """Unpack (B, n) rows to `images` (B, 2, C, *image) and `local` (B, locals, C, *local_image)."""
        batch, image_shape = len(entries), (preprocess.channels, *preprocess.image)
        split_index = NUM_GLOBAL_VIEWS * math.prod(image_shape)
        global_views = entries[:, :split_index].reshape(batch, NUM_GLOBAL_VIEWS, *image_shape)
        local_views = entries[:, split_index:].reshape(batch, self.locals, preprocess.channels, *self.local_image)
        return {"images": global_views, "local": local_views}


#: `name` in a run's config -> config class
VIEW_CLASSES: dict[str, type[Augment | MultiCrop | SceneViews | VolumeViews]] = {
    "augment": Augment,
    "multicrop": MultiCrop,
    "scenes": SceneViews,
    "volumes": VolumeViews,
}

DINO_VIEWS = MultiCrop()

#: DINOv2's (arXiv:2304.07193). Its code uses the blur probabilities as probabilities of no blur, 1 and 0.1 for the two
#: global views; these are the effective ones. Local views of 98 pixels match patches of 14.
DINOV2_VIEWS = MultiCrop(global_area=(0.32, 1.0), local_area=(0.05, 0.32), blur=(0.0, 0.9, 0.5))


@cache
def compose_view_transform(crops: MultiCrop, view_index: int, image: tuple[int, int], colours: bool):
    """Compose the transform of a view (0 and 1 are global, 2 is local) with torchvision's draws."""
    from torchvision.transforms import v2

    size, area = (crops.local_image, crops.local_area) if view_index == NUM_GLOBAL_VIEWS else (image, crops.global_area)
    crop = AreaCrop(size, area, crops.ratio, "bicubic")
    steps: list = [
        lambda source_image: array_to_pillow(crop(source_image).permute(1, 2, 0).numpy()),
        v2.RandomHorizontalFlip(crops.flip),
    ]
    if not colours:
        return v2.Compose(steps)
    steps += [v2.RandomApply([v2.ColorJitter(*crops.jitter)], crops.jitter_probability), v2.RandomGrayscale(crops.grey)]
    steps += [
        partial(blur_at_random, probability=crops.blur[view_index], radius=crops.radius),
        v2.RandomSolarize(SOLARISE_THRESHOLD, crops.solarise[view_index]),
    ]
    return v2.Compose(steps)


def blur_at_random(image: Image.Image, probability: float, radius: Sequence[float]) -> Image.Image:
    """Blur an image with a probability, by a Gaussian with a uniform random radius. Draws from torch's generator."""
    draw, share = torch.rand(2).tolist()
    if draw >= probability:
        return image
    return image.filter(ImageFilter.GaussianBlur(radius[0] + (radius[1] - radius[0]) * share))
