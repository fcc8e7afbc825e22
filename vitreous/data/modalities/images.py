"""The modality of 8-bit colour or grey images, such as photos, resized to one input size."""

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
    """Preprocessing of RGB or grey images, (C, height, width) uint8. Other images that Pillow reads are converted to
    these."""

    _: KW_ONLY
    name: Literal["images"] = "images"

    @classmethod
    def read_form(cls, raw: RawSample, name: str, channels: int | None, requested: Mapping[str, str]) -> SampleForm:
        """Read the form of an image. Returns a form with a `BandPreprocess` for a file that is not an 8-bit colour
        image, or if `requested` sets that modality. Raises DataError for an unreadable file."""
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
        """Adopt the settings of `weights`, the preprocessing of pre-trained weights, including native aspect ratio, for
        images of this size."""
        if weights.noun == self.noun and weights.has_colours:
            return weights.with_image(self.image)
        return super().continue_from(weights)
