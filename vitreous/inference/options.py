"""How outputs are computed, in the words of the command line. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

#: the pictures that int8 is calibrated on, each (C, *image) uint8, made when they are needed
Pictures = Callable[[], "Iterable[Tensor]"]


Precision: TypeAlias = Literal["auto", "fp32", "bf16", "int8"]
EngineName: TypeAlias = Literal["auto", "torch", "compiled", "openvino"]


@dataclass(frozen=True)
class InferenceOptions:
    """How outputs are computed, in the words of the command line."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    precision: Precision = "auto"
    """Numbers to compute with; auto is bf16 where the device has it, else fp32; int8 needs --engine openvino."""
    engine: EngineName = "auto"
    """Inference engine. auto measures the installed engines once, if the job is long enough, and takes the fastest
    whose outputs agree with PyTorch's. torch gives the same outputs with and without the extra `export`, which openvino
    needs. compiled: torch.compile, on a GPU."""
    merge_tokens: int = 0
    """Tokens that each block merges with the one most like it (ToMe): faster, and less exact."""
    _: KW_ONLY
    clip_views: str = "1x1"
    """Of models of clips: sets of frames evenly over each clip, and crops along the longer side of each, as 4x3; the
    answer is by the mean of their logits."""
