"""Images in colours or grey at 8 bits, of one size: photographs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import numpy as np
from PIL import Image

from vitreous.data.decoding.decode import MODES, decode
from vitreous.data.decoding.regions import Regions, open_picture
from vitreous.data.modalities.bands import find_bands
from vitreous.data.modalities.base import Preprocess, Raw, SampleForm
from vitreous.data.modalities.planar import ColourPixels, StillPreprocess


@dataclass(frozen=True)
class ImagePreprocess(ColourPixels, StillPreprocess):
    """RGB or grey images, (C, height, width) uint8; whatever else Pillow reads at 8 bits is converted to these."""

    _: KW_ONLY
    name: Literal["images"] = "images"

    @classmethod
    def read_form(cls, raw: Raw, name: str, channels: int | None, asked: Mapping[str, str]) -> SampleForm:
        """The form of an image, which is one of bands where it has to be read band by band, or is `asked` to be. Raises
        DataError."""
        assert isinstance(raw, (bytes, np.ndarray)), "a split gives bytes or pixels"
        if asked.get("name") != "images" and (form := find_bands(raw, name, asked.get("numbers"))) is not None:
            return form
        picture = decode(raw, 3, name)
        size, count = (picture.height, picture.width), channels or 3
        return SampleForm(size, count, cls(size, count, *cls.usual_moments(count)))

    def decode(self, raw: Raw, name: str | None = None) -> Image.Image:
        """A file, its bytes, or pixels (H, W[, C]) -> a Pillow image, RGB or L. Raises DataError."""
        return decode(raw, self.channels, name)  # type: ignore[arg-type]

    def open_view(self, raw: Raw, name: str, exact: bool, as_region: bool) -> Image.Image | Regions:
        """What augmentation draws a view from: a picture whose pixels are decoded later, if `as_region`."""
        if as_region:
            return open_picture(raw, self.channels, name, exact)  # type: ignore[arg-type]
        return self.decode(raw, name)

    def for_reduced_reading(self) -> ImagePreprocess | None:
        """The same, as files are decoded as grey or RGB."""
        return self if self.channels in MODES else None

    def from_pixels(self, pixels: np.ndarray, name: str) -> np.ndarray:
        """An array (H, W) or (H, W, 1, 3 or 4), uint8 or floats in 0 to 1 -> the same, uint8. Raises DataError."""
        return self.quantise(super().from_pixels(pixels, name), name)

    def continue_from(self, weights: Preprocess) -> Preprocess:
        """The preprocessing of weights, also that of images at their own aspect, for images of this size."""
        if weights.noun == self.noun and weights.has_colours:
            return weights.with_image(self.image)
        return super().continue_from(weights)
