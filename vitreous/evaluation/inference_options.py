"""How answers are computed, in the words of the command line. Told without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict


@dataclass(frozen=True)
class InferenceOptions:
    """How answers are computed, in the words of the command line. `auto` is the fastest that gives the model's own
    answers.

    `precision` auto is bf16 where the device multiplies it in hardware, else fp32; int8 is for the engine `openvino`
    alone. `merge_tokens`: tokens that every block merges (ToMe), faster and less exact.
    """

    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    engine: Literal["auto", "torch", "openvino"] = "auto"
    merge_tokens: int = 0


class ComputeOptions(TypedDict, total=False):
    """The fields of `InferenceOptions` as keywords of `vitreous.load`."""

    device: str
    precision: str
    engine: str
    merge_tokens: int
