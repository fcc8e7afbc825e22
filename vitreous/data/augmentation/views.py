"""Multi-crop: several views of one image, large and small (SwAV, arXiv:2006.09882; DINO, arXiv:2104.14294).

Views differ in size, so the views of an image are flattened to one vector, which can be stacked to batches;
`MultiCrop.unpack_batch` restores their shapes.
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

NUM_GLOBAL_VIEWS = 2  # number of global (large) views of an image; the teacher network sees only these
VIEW_CHUNK_SIZE = 64  # number of views that are computed together, so that they fit into the CPU cache


@dataclass(frozen=True)
class MultiCrop:
    """Settings of multi-crop: two global views of the model's input size, and `locals` local views of `local_image`
    (height, width). The defaults are DINO's.

    A view is a random crop, resampled with a bicubic filter. `global_area` and `local_area` are the ranges of its share
    of the image, uniform; `ratio` is the range of its aspect ratio, log-uniform. `flip` and `grey` are probabilities.
    `jitter` are the strengths of brightness, contrast, saturation and hue, changed together with `jitter_probability`.
    `blur` and `solarise` are probabilities for the first global view, the second, and each local view. `radius` is the
    range of the std of the Gaussian blur, in pixels, uniform. Images that are read by band (`BandPreprocess`) get no
    colour augmentation.

    With `anchor_scale` s > 0, an image also has two anchor views: the crops of its global views at s times their
    size, with the same mirroring, without changes of colour, blur and solarising. They are the crops of DINOv3's Gram
    teacher (arXiv:2508.10104, section 4.2). Raises UsageError for values out of range.
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
    anchor_scale: float = 0.0
    name: Literal["multicrop"] = "multicrop"

    def __post_init__(self) -> None:
        for name in ("flip", "jitter_probability", "grey", "blur", "solarise"):
            if not np.all((np.array(getattr(self, name)) >= 0) & (np.array(getattr(self, name)) <= 1)):
                raise UsageError(f"{name} {getattr(self, name)} is out of range", "use probabilities from 0 to 1")
        for name in ("global_area", "local_area"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                problem = f"invalid {name} {getattr(self, name)}"
                raise UsageError(problem, "use areas above 0 and at most 1, the lower one first")
        if self.locals < 0 or min(self.local_image) < 1:
            problem = f"invalid local views: {self.locals} views of {self.local_image} pixels"
            raise UsageError(problem, "use at least 0 views, of at least 1 x 1 pixels")
        if self.anchor_scale < 0:
            raise UsageError(f"anchor_scale {self.anchor_scale:g} is below 0", "use 2, or 0 for no anchor views")

    def get_anchor_size(self, image: tuple[int, ...]) -> tuple[int, int]:
        """Return the size (height, width) of the anchor views of global views of the size `image`."""
        height, width = (round(self.anchor_scale * length) for length in image)
        return height, width

    def draw_views(
        self, source_image: DecodedSample | LazyImage, image: tuple[int, int], sample_key: int
    ) -> list[Tensor]:
        """Draw the views of an image, a list of (C, h, w): the global views of the size `image` (height, width), then
        the local views, then the anchor views.

        View v is drawn from the random key of (sample_key, v), so that view v does not depend on the number of views.
        """
        source_image = (
            source_image if isinstance(source_image, (Image.Image, tuple, np.ndarray)) else source_image.decode_full()
        )
        bands, has_colours = list_bands(source_image), not isinstance(source_image, tuple)

        def draw_band_view(band: Image.Image, view: int, size: tuple[int, int], has_colours: bool) -> Tensor:
            with fork_torch_rng(sample_key, view):
                transform = compose_view_transform(self, min(view, NUM_GLOBAL_VIEWS), size, has_colours)
                return image_to_tensor(transform(band))

        views = [(view, image, has_colours) for view in range(NUM_GLOBAL_VIEWS + self.locals)]
        if self.anchor_scale:
            # the same random numbers as the global views, of which the crop uses the first
            views += [(view, self.get_anchor_size(image), False) for view in range(NUM_GLOBAL_VIEWS)]
        return [torch.cat([draw_band_view(band, *settings) for band in bands]) for settings in views]

    def augment_image(self, image: DecodedSample | LazyImage, preprocess: PlanarPreprocess, sample_key: int) -> Tensor:
        """Draw the views of an image with `draw_views`, flattened and concatenated to (n,)."""
        return torch.cat([view.flatten() for view in self.draw_views(image, preprocess.plane, sample_key)])

    def augment_batch(self, pixels: Tensor, keys: np.ndarray) -> Tensor:
        """Draw the views of cached images (B, C, H, W), which have the model's input size, by (B,) keys: (B, n),
        flattened and concatenated per image.

        The distribution of the views is that of `augment_image`; random numbers and rounding differ, since batches are
        processed in float32 instead of with Pillow.
        """
        global_views = np.arange(NUM_GLOBAL_VIEWS)
        view_groups = (global_views, NUM_GLOBAL_VIEWS + np.arange(self.locals))
        drawn = [self.draw_batch_views(pixels, keys, views) for views in view_groups if len(views)]
        if self.anchor_scale:
            drawn.append(self.draw_batch_views(pixels, keys, global_views, is_anchor=True))
        return torch.cat([views.flatten(1) for views in drawn], 1)

    def draw_batch_views(
        self, pixels: Tensor, keys: np.ndarray, views: np.ndarray, *, is_anchor: bool = False
    ) -> Tensor:
        """Draw some views of each image of a batch (B, C, H, W), by (B,) keys: (B, V, C, h, w). `views` (V,) are the
        indices of the views, all global or all local; with `is_anchor` the anchor views of these global views."""
        is_local, channels = views[0] >= NUM_GLOBAL_VIEWS, pixels.shape[1]
        size = self.local_image if is_local else (pixels.shape[-2], pixels.shape[-1])
        size = self.get_anchor_size(size) if is_anchor else size
        area = self.local_area if is_local else self.global_area
        view_types = np.minimum(views, NUM_GLOBAL_VIEWS)  # 0: first global view, 1: second, 2: local
        blur, solarise = np.array(self.blur)[view_types], np.array(self.solarise)[view_types]
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
                if channels in (1, 3) and not is_anchor:
                    chunk = augment_batch_colours(chunk, u[span], probabilities[span], self.jitter, self.radius)
                chunk.round_()
            result[span] = chunk.permute(0, 2, 1, 3)
        return result.unflatten(0, (len(keys), len(views)))

    def unpack_batch(self, entries: Tensor, preprocess: PlanarPreprocess) -> dict[str, Tensor]:
        """Restore the views of a batch from flattened views (B, n): `images` (B, 2, C, *image) are the global views,
        `local` (B, locals, C, *local_image) the local views, `anchors` (B, 2, C, *anchor size) the anchor views, if
        there are any."""
        shapes = {"images": (NUM_GLOBAL_VIEWS, *preprocess.image), "local": (self.locals, *self.local_image)}
        if self.anchor_scale:
            shapes["anchors"] = (NUM_GLOBAL_VIEWS, *self.get_anchor_size(preprocess.image))
        lengths = [preprocess.channels * math.prod(shape) for shape in shapes.values()]
        return {
            name: views.reshape(len(entries), shape[0], preprocess.channels, *shape[1:])
            for (name, shape), views in zip(shapes.items(), entries.split(lengths, 1), strict=True)
        }


#: `views.name` in a run's config -> class of the settings
VIEW_CLASSES: dict[str, type[Augment | MultiCrop | SceneViews | VolumeViews]] = {
    "augment": Augment,
    "multicrop": MultiCrop,
    "scenes": SceneViews,
    "volumes": VolumeViews,
}

DINO_VIEWS = MultiCrop()

#: DINOv2's settings (arXiv:2304.07193). DINOv2's code uses 1 and 0.1 for the two global views as probabilities of no
#: blur; the values here are the effective probabilities of blur. With patches of 14 pixels, use local views of 98.
DINOV2_VIEWS = MultiCrop(global_area=(0.32, 1.0), local_area=(0.05, 0.32), blur=(0.0, 0.9, 0.5))


@cache
def compose_view_transform(crops: MultiCrop, view_type: int, image: tuple[int, int], has_colours: bool):
    """Compose the random transform from a PIL image to a view. `view_type`: 0 for the first global view, 1 for the
    second, 2 for local views. Random numbers are drawn from torch's generator, as in torchvision."""
    from torchvision.transforms import v2

    size, area = (crops.local_image, crops.local_area) if view_type == NUM_GLOBAL_VIEWS else (image, crops.global_area)
    crop = AreaCrop(size, area, crops.ratio, "bicubic")
    steps: list = [
        lambda source_image: array_to_pillow(crop(source_image).permute(1, 2, 0).numpy()),
        v2.RandomHorizontalFlip(crops.flip),
    ]
    if not has_colours:
        return v2.Compose(steps)
    steps += [v2.RandomApply([v2.ColorJitter(*crops.jitter)], crops.jitter_probability), v2.RandomGrayscale(crops.grey)]
    steps += [
        partial(blur_at_random, probability=crops.blur[view_type], radius=crops.radius),
        v2.RandomSolarize(SOLARISE_THRESHOLD, crops.solarise[view_type]),
    ]
    return v2.Compose(steps)


def blur_at_random(image: Image.Image, probability: float, radius: Sequence[float]) -> Image.Image:
    """Blur an image with `probability`, by a Gaussian whose std in pixels is uniform in `radius`. Random numbers are
    drawn from torch's generator."""
    blur_draw, radius_draw = torch.rand(2).tolist()
    if blur_draw >= probability:
        return image
    return image.filter(ImageFilter.GaussianBlur(radius[0] + (radius[1] - radius[0]) * radius_draw))
