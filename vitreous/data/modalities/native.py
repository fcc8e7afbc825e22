"""The modality of colour images at native aspect ratio, so that inputs have different sizes (NaViT,
arXiv:2307.06304)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitreous.data.modalities.base import Preprocess, RawSample, SampleForm
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.modalities.planar import Box, ColourImageMixin, PlanarPreprocess
from vitreous.errors import UsageError
from vitreous.nn.sizes import fit_size_by_scale, fit_size_to_tokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NativePreprocess(ColourImageMixin, PlanarPreprocess):
    """Preprocessing of images that keep their aspect ratio.

    An image is resized so that it has at most `tokens` patches of `patch` (height, width) pixels. `image` is only the
    size of the model's position embeddings. `rounding`: the lengths are rounded to the nearest multiple of the patch,
    or `up` as in SigLIP 2 NaFlex.
    """

    stacks: ClassVar[bool] = False

    _: KW_ONLY
    tokens: int
    patch: tuple[int, ...]
    rounding: Literal["nearest", "up"] = "nearest"
    name: Literal["native"] = "native"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 1 or len(self.patch) != 2:
            problem = f"invalid preprocessing for native aspect ratios: tokens {self.tokens}, patch {self.patch}"
            raise UsageError(problem, "use at least 1 token, and a patch of height and width")

    @classmethod
    def from_preprocess(cls, preprocess: Preprocess, tokens: int, patch: tuple[int, ...]) -> NativePreprocess:
        """Convert the preprocessing of images of one size to native aspect ratio. Raises UsageError for the
        preprocessing of another modality."""
        if not isinstance(preprocess, ImagePreprocess | NativePreprocess):
            problem = f"{preprocess.noun} of {preprocess.value_type} do not support native aspect ratios"
            raise UsageError(problem, "omit --native-aspect")
        shared_settings = {name: getattr(preprocess, name) for name in ("image", "channels", "mean", "std", "filter")}
        rounding = preprocess.rounding if isinstance(preprocess, NativePreprocess) else "nearest"
        return cls(**shared_settings, tokens=tokens, patch=patch, rounding=rounding)

    @classmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, requested: Mapping[str, str]) -> SampleForm:
        """Read the form of an image with `ImagePreprocess.read_form`. Raises DataError for an unreadable file."""
        return ImagePreprocess.read_form(raw, name, channels, requested)

    @property
    def summary(self) -> str:
        """`native`."""
        return "native"

    @property
    def area(self) -> int:
        """The maximum number of pixels of an image, per channel."""
        return self.tokens * math.prod(self.patch)

    def count_tokens(self, grid: tuple[int, ...]) -> int:
        """Return `tokens`, the maximum number of patches of an image, regardless of `grid`."""
        return self.tokens

    def check_patch(self, patch: tuple[int, ...]) -> None:
        """Raise UsageError if `patch`, the model's patch size, differs from that of the preprocessing."""
        if self.patch != patch:
            raise UsageError(
                f"preprocess.patch {self.patch} differs from the model's patch size {patch}", "use the latter"
            )

    def longest_grid(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return `tokens` for each axis, since a narrow image may be a single row or column of patches."""
        return (self.tokens,) * 2

    def choose_plane(self, size: tuple[float, float]) -> tuple[int, int]:
        """Return the input size (height, width) for an image of the size (width, height), by its aspect ratio."""
        fit_size = fit_size_by_scale if self.rounding == "up" else fit_size_to_tokens
        height, width = fit_size((size[1], size[0]), self.patch, self.tokens)
        return height, width

    def crop_box(self, size: tuple[int, int], position: float = 0.5) -> Box:
        """Return the box of the complete image of the size (width, height): images are not cropped."""
        return (0.0, 0.0, *size)

    def blank(self) -> Tensor:
        """Create an image of one patch of zeros, (C, *patch), which replaces an unreadable image."""
        import torch

        return torch.zeros(self.channels, *self.patch, dtype=self.dtype)

    def collate(self, images: list[Tensor]) -> list[Tensor]:
        """Return the images (C, height, width), which differ in size, as a list."""
        return list(images)

    def with_one_size(self, fit: Literal["crop", "squash"] = "squash") -> ImagePreprocess:
        """Return the preprocessing that squashes or crops all images to the size `image`."""
        return ImagePreprocess(self.image, self.channels, self.mean, self.std, fit=fit, filter=self.filter)
