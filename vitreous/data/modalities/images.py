"""8-bit colour or grey images of one size: photos."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import numpy as np

from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.data.modalities.bands import find_band_form
from vitreous.data.modalities.base import Preprocess, RawSample, SampleForm
from vitreous.data.modalities.planar import ColourImageMixin, StillPreprocess


@dataclass(frozen=True)
class ImagePreprocess(ColourImageMixin, StillPreprocess):
    """RGB or grey images, (C, height, width) uint8; other 8-bit images that Pillow reads are converted."""

    _: KW_ONLY
    name: Literal["images"] = "images"

    @classmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, requested: Mapping[str, str]) -> SampleForm:
        """Return the form of an image; that of a band image if it must be read by band, or if `requested` requests it.
        Raises DataError."""
        assert isinstance(raw, (bytes, np.ndarray)), "a split returns bytes or pixels"
        if (
            requested.get("name") != "images"
            and (form := find_band_form(raw, name, requested.get("numbers"))) is not None
        ):
            return form
        image = decode_to_pillow(raw, 3, name)
        size, count = (image.height, image.width), channels or 3
        return SampleForm(size, count, cls(size, count, *cls.default_moments(count)))

    def continue_from(self, weights: Preprocess) -> Preprocess:
        """Return the preprocessing of weights, including native aspect ratio, for images of this size."""
        if weights.noun == self.noun and weights.has_colours:
            return weights.with_image(self.image)
        return super().continue_from(weights)
