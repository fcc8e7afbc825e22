"""The registry of modalities. Among modalities with the same noun, such as images and bands, `read_form` of the first
one decides to which a sample belongs."""

from __future__ import annotations

from typing import Annotated

from vitreous.config import TaggedUnion
from vitreous.data.annotations.target import get_sample_noun
from vitreous.data.modalities.bands import BandPreprocess
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.clips import ClipPreprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.modalities.native import NativePreprocess
from vitreous.data.modalities.signals import SignalPreprocess
from vitreous.data.modalities.volumes import VolumePreprocess
from vitreous.data.split import Split

#: `preprocess.name` in `model.json` -> class of the modality
MODALITIES: dict[str, type[Preprocess]] = {
    "images": ImagePreprocess,
    "bands": BandPreprocess,
    "native": NativePreprocess,
    "clips": ClipPreprocess,
    "volumes": VolumePreprocess,
    "signals": SignalPreprocess,
}

#: type of config fields for the preprocessing of any modality
AnyPreprocess = Annotated[Preprocess, TaggedUnion(MODALITIES)]


def find_modality(split: Split) -> type[Preprocess]:
    """Return the modality whose `read_form` applies to the samples of a split."""
    noun = get_sample_noun(split)
    return next(modality for modality in MODALITIES.values() if modality.noun == noun)
