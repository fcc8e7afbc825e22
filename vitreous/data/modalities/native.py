"""Images in colours at their own aspect ratio, which have different sizes (NaViT, arXiv:2307.06304)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitreous.data.modalities.base import Preprocess, RawSample, SampleForm
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.modalities.planar import Box, ColourImageMixin, PlanarPreprocess
from vitreous.errors import UsageError
from vitreous.nn.sizes import fit_size_to_tokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NativePreprocess(ColourImageMixin, PlanarPreprocess):
    """Images that keep their aspect ratio, scaled to at most `tokens` patches of `patch` pixels, whatever `image`
    says."""

    stacks: ClassVar[bool] = False

    _: KW_ONLY
    tokens: int
    patch: tuple[int, ...]
    name: Literal["native"] = "native"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 1 or len(self.patch) != 2:
            problem = f"images at their own aspect with tokens={self.tokens} and patch={self.patch} cannot be"
            raise UsageError(problem, "they have 1 token or more, and a patch of 2 axes")

    @classmethod
    def of(cls, preprocess: Preprocess, tokens: int, patch: tuple[int, ...]) -> NativePreprocess:
        """The same as `preprocess` for images at their own aspect. Raises UsageError where it is for others."""
        if not isinstance(preprocess, ImagePreprocess | NativePreprocess):
            problem = f"{preprocess.noun} of {preprocess.value_type} have one size, not one by their own aspect"
            raise UsageError(problem, "leave --native-aspect out")
        own = {name: getattr(preprocess, name) for name in ("image", "channels", "mean", "std", "filter")}
        return cls(**own, tokens=tokens, patch=patch)

    @classmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, asked: Mapping[str, str]) -> SampleForm:
        """The form of an image, as `ImagePreprocess` has it. Raises DataError."""
        return ImagePreprocess.read_form(raw, name, channels, asked)

    @property
    def summary(self) -> str:
        """`native`."""
        return "native"

    @property
    def area(self) -> int:
        """Pixels of an image, of each channel, at most."""
        return self.tokens * math.prod(self.patch)

    def count_tokens(self, grid: tuple[int, ...]) -> int:
        """Patches of an image, at most."""
        return self.tokens

    def check_patch(self, patch: tuple[int, ...]) -> None:
        """Raise UsageError where `patch` is another."""
        if self.patch != patch:
            raise UsageError(f"preprocess.patch {self.patch} is not the model's, {patch}")

    def longest_grid(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """`tokens` along each axis: an image may be one row of patches."""
        return (self.tokens,) * 2

    def choose_plane(self, size: tuple[float, float]) -> tuple[int, int]:
        """(height, width) of an image of (width, height) pixels, by its aspect ratio."""
        height, width = fit_size_to_tokens((size[1], size[0]), self.patch, self.tokens)
        return height, width

    def crop_box(self, size: tuple[int, int], along: float = 0.5) -> Box:
        """All of an image of (width, height)."""
        return (0.0, 0.0, *size)

    def blank(self) -> Tensor:
        """(C, *patch) zeros, which stand for an image that cannot be read."""
        import torch

        return torch.zeros(self.channels, *self.patch, dtype=self.dtype)

    def collate(self, images: list[Tensor]) -> list[Tensor]:
        """The images (C, height, width) of different sizes as they are."""
        return list(images)

    def with_one_size(self, fit: Literal["crop", "squash"] = "squash") -> ImagePreprocess:
        """The same for images that are all squashed, or cut, to `image`."""
        return ImagePreprocess(self.image, self.channels, self.mean, self.std, fit=fit, filter=self.filter)
