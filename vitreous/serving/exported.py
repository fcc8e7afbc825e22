"""Files that `vitreous export` wrote, found by their suffix. Without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vitreous.errors import UsageError, WeightsError

if TYPE_CHECKING:
    from vitreous.evaluation.inference_options import InferenceOptions
    from vitreous.serving.onnx import OnnxRuntime
    from vitreous.serving.openvino import OpenVinoRuntime

SUFFIXES = (".onnx", ".xml", ".pt2")


def is_exported(run: str | os.PathLike[str]) -> bool:
    """Whether a name is that of an exported file, rather than of a run, a bundle or weights."""
    return Path(run).suffix.lower() in SUFFIXES and not Path(run).is_dir()


def open_exported(
    path: str | os.PathLike[str], how: InferenceOptions | None = None, quick: bool = False
) -> OnnxRuntime | OpenVinoRuntime:
    """What runs an exported file, with its card; `quick` answers one image alone sooner, and many later.

    Raises WeightsError for a file that is not sound, and UsageError for a `how` that it cannot be: it is computed on
    the CPU, in float32 or what it was quantised to.
    """
    kind = Path(path).suffix.lower()
    if kind == ".pt2":
        raise WeightsError(
            f"{path}: torch.export's files can run code as they are loaded, so none is opened here",
            "load it with torch.export.load where you trust it, or name the run, or a .onnx or .xml file",
        )
    own = {".onnx": "onnxruntime", ".xml": "openvino"}[kind]
    if how is not None and (
        how.device not in ("auto", "cpu")
        or how.precision not in ("auto", "fp32")
        or how.merge_tokens
        or how.engine not in ("auto", own)
    ):
        raise UsageError(
            f"{path} is computed by {own}, on the CPU, in the precision that it has",
            "leave --device, --precision and --engine out",
        )
    if kind == ".onnx":
        from vitreous.serving.onnx import OnnxRuntime

        return OnnxRuntime(path, quick)
    from vitreous.serving.openvino import OpenVinoRuntime

    return OpenVinoRuntime(path, quick)
