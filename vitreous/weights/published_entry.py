"""The entry of published weights. Does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitreous.weights.published_speed import CPU_MILLISECONDS

TOP1_METRIC, LINEAR_PROBE_METRIC, FINE_TUNED_METRIC = "top-1", "top-1 of a linear probe", "top-1 once fine-tuned"
FINE_TUNED_KINETICS_METRIC = "top-1 once fine-tuned, Kinetics-400"
REAL_PROBE_METRIC = "top-1 of a linear probe, ImageNet-ReaL"
ZERO_SHOT_METRIC = "top-1 zero-shot"


@dataclass(frozen=True)
class PublishedWeights:
    """Weights published by their authors.

    `model`: name of the model in this package. `source`: a URL, or `hf:org/name`. `image_size`: image size in pixels
    for which positions were trained. `accuracy`: 0 to 1, on ImageNet's validation images unless `accuracy_note`
    specifies otherwise; None if not published. `digest`: `sha256:HEX` or `md5:HEX` of the file, or a prefix if only
    that is published; "" if none is, so only the size of the download is verified. `resize` and `share`: the authors'
    position resize rule, and their evaluation crop relative to the short side, if the file lacks them. `gated`: the
    download requires an account that accepted the licence, and its token.
    """

    name: str
    model: str
    source: str
    image_size: int
    licence: str
    reference: str
    accuracy: float | None = None
    accuracy_note: str = TOP1_METRIC
    digest: str = ""
    resize: str = ""
    share: float | None = None
    gated: bool = False

    @property
    def cpu_milliseconds(self) -> float | None:
        """CPU time of one image or clip in milliseconds on `SPEED_HARDWARE`; None if it was not measured."""
        return CPU_MILLISECONDS.get((self.model, self.image_size))

    def get_config_fields(self) -> dict[str, Any]:
        """Return config fields that the file lacks, by dotted path: image size and position resize rule."""
        if self.source.startswith("hf:") or self.model.startswith("BiT"):
            return {}  # set in config.json, or the model has no positions
        return {"image": (self.image_size, self.image_size)} | (
            {"positions.resize": self.resize} if self.resize else {}
        )
