"""How outputs are computed, in the words of the command line. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

#: the pictures that int8 is calibrated on, each (C, *image) uint8, made when they are needed
Pictures = Callable[[], "Iterable[Tensor]"]


@dataclass(frozen=True)
class InferenceOptions:
    """How outputs are computed, in the words of the command line. `auto` is the fastest that is installed.

    `precision` auto is bf16 where the device multiplies it in hardware, else fp32; int8 is for the engine `openvino`
    alone. `engine` auto is PyTorch, or for long jobs the fastest installed engine (`inference.engine_choice`);
    `compiled` is PyTorch with compiled blocks, on a GPU. `merge_tokens`: tokens that every block merges (ToMe), faster
    and less exact. `clip_views`: the sets of frames of a clip, and the crops of each, whose logits are averaged
    (`data.clip_views`).
    """

    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    engine: Literal["auto", "torch", "compiled", "openvino"] = "auto"
    merge_tokens: int = 0
    clip_views: str = "1x1"
