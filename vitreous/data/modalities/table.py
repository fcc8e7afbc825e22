"""The modalities: the `name` in `model.json` -> the class; the first one of those that are called alike finds out which
of them a sample is."""

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

MODALITIES: dict[str, type[Preprocess]] = {
    "images": ImagePreprocess,
    "bands": BandPreprocess,
    "native": NativePreprocess,
    "clips": ClipPreprocess,
    "volumes": VolumePreprocess,
    "signals": SignalPreprocess,
}

#: a field of a dataclass that is the preprocessing of any modality
AnyPreprocess = Annotated[Preprocess, TaggedUnion(MODALITIES)]


def find_modality(split: Split) -> type[Preprocess]:
    """The modality that tells the form of a split's samples (`Preprocess.read_form`)."""
    noun = get_sample_noun(split)
    return next(modality for modality in MODALITIES.values() if modality.noun == noun)
