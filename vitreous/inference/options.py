"""Inference options, with the names of the command line. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

#: a function that yields the images for int8 calibration, each (C, *image) uint8; called only if they are needed
CalibrationImages = Callable[[], "Iterable[Tensor]"]


Precision: TypeAlias = Literal["auto", "fp32", "bf16", "int8"]
EngineName: TypeAlias = Literal["auto", "torch", "compiled", "openvino"]


@dataclass(frozen=True)
class InferenceOptions:
    """Options of inference: device, precision, engine, merged tokens and clip views, as on the command line."""

    SECTIONS: ClassVar[dict[str, str]] = {"device": "Device and engine"}

    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    precision: Precision = "auto"
    """Compute dtype. auto is bf16 if the device supports it, else fp32; int8 needs --engine openvino."""
    engine: EngineName = "auto"
    """Inference engine. auto measures the installed engines once if the job is long enough, and uses the fastest whose
    outputs agree with PyTorch. openvino needs the extra `export`; compiled is torch.compile on a GPU; torch gives the
    same outputs on machines with and without the extra."""
    merge_tokens: int = 0
    """Similar tokens merged per block (ToMe): faster, less exact."""
    _: KW_ONLY
    clip_views: str = "1x1"
    """Clips: temporal views x spatial crops, such as 4x3; their logits are averaged."""
