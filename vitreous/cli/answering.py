"""What the verbs that use a model have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vitreous.weights.options import WeightsOptions

if TYPE_CHECKING:
    from vitreous.evaluation.inference_options import InferenceOptions


@dataclass(frozen=True, kw_only=True)
class Answering(WeightsOptions):
    """How a model is computed, and what happens to images that cannot be read."""

    bad_images: Literal["stop", "skip"] = "stop"
    """Stop at images that cannot be read, or name them, count them as wrong, and go on."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    precision: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    """Numbers to compute with; auto is bf16 where the device has it, else fp32; int8 needs --engine openvino."""
    engine: Literal["auto", "torch", "openvino"] = "auto"
    """What computes; auto is torch. openvino needs the extra `export`."""
    merge_tokens: int = 0
    """Tokens that each block merges with the one most like it (ToMe): faster, and less exact."""
    seed: int = 0
    """Accepted for uniformity; nothing here is left to chance."""

    def how(self) -> InferenceOptions:
        """What of it the engine needs."""
        from vitreous.evaluation.inference_options import InferenceOptions

        return InferenceOptions(self.device, self.precision, self.engine, self.merge_tokens)
