"""Engines for files of `vitreous export`: onnxruntime for .onnx, OpenVINO for .xml. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitreous.errors import UsageError, WeightsError
from vitreous.inference.export_file import (
    CARD_KEY,
    EXPORT_AGAIN_HINT,
    parse_export_card,
    parse_export_precision,
    read_export_bytes,
    read_verified_onnx_metadata,
    verify_xml_checksum,
)
from vitreous.inference.libraries import (
    build_onnx_session_options,
    compile_openvino_graph,
    disable_telemetry,
    get_openvino_core,
    import_optional_library,
)
from vitreous.inference.outputs import DETECTION_OUTPUT_NAMES, Outputs, compute_in_chunks, pack_arrays, unpack_outputs

if TYPE_CHECKING:
    from vitreous.inference.options import InferenceOptions

EXPORT_SUFFIXES = (".onnx", ".xml", ".pt2")
CHUNK_PIXELS = 2 * 224 * 224  # pixels per chunk: fits in caches, and amortises the call overhead


def is_exported_file(run: str | os.PathLike[str]) -> bool:
    """Return whether a path has the suffix of an exported file, rather than of a run, a bundle or weights."""
    return Path(run).suffix.lower() in EXPORT_SUFFIXES and not Path(run).is_dir()


class ExportedEngine:
    """An exported file as an engine on the CPU, in float32 or its quantised precision. `text`: the stored description
    with the card. `quick` computes one image at a time. Raises WeightsError if the card is missing."""

    name: str
    outputs: tuple[str, ...] = ("logits", "features")

    def __init__(self, text: str | None, path: Path, quick: bool) -> None:
        self.card, self.precision = parse_export_card(text, path), parse_export_precision(text)
        single_image = quick or not self.card.task.export_rules.any_batch_size
        self.size = (
            1 if single_image else max(1, min(64, CHUNK_PIXELS // max(1, int(np.prod(self.card.preprocess.image)))))
        )

    def logits(self, pixels: np.ndarray) -> np.ndarray:
        """Compute (B, K) float32 logits of (B, C, *image) pixels."""
        return self.compute("logits", pixels)

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """Compute (B, D) float32 features, the head's input, of (B, C, *image) pixels. Raises UsageError for files
        without features."""
        if "features" not in self.outputs:
            raise UsageError("the exported file has no feature output", "export the model again to add it")
        return self.compute("features", pixels)

    def objects(self, pixels: np.ndarray) -> Outputs:
        """Compute boxes, scores, labels and masks of a detector, `Outputs`, from (B, C, *image) pixels. Raises
        UsageError for other tasks."""
        names = [name for name in DETECTION_OUTPUT_NAMES if name in self.outputs]
        if tuple(names[:3]) != DETECTION_OUTPUT_NAMES[:3]:
            raise UsageError("the exported file is not a detector", "use an exported file of a detector")

        def compute_chunk(chunk: np.ndarray) -> np.ndarray:
            """Compute the packed outputs of a chunk of pixels."""
            return pack_arrays(self.compute_outputs(names, self.card.preprocess.normalise_array(chunk)))

        return unpack_outputs(compute_in_chunks(compute_chunk, pixels, self.size))

    def compute(self, output: str, pixels: np.ndarray) -> np.ndarray:
        """Compute the output of this name, (B, ...) float32, for (B, C, *image) pixels in chunks of `size` images."""
        return compute_in_chunks(
            lambda chunk: self.compute_outputs([output], self.card.preprocess.normalise_array(chunk))[0],
            pixels,
            self.size,
        )

    def compute_outputs(self, outputs: Sequence[str], images: np.ndarray) -> list[np.ndarray]:
        """Compute the outputs of these names, each (size, ...), for one chunk of (size, C, *image) float32 normalised
        images."""
        raise NotImplementedError


class OnnxFileEngine(ExportedEngine):
    """A file of `vitreous export --to onnx`, computed by onnxruntime. Raises WeightsError for any other file, and for a
    damaged one."""

    name = "onnx"

    def __init__(self, path: Path, quick: bool = False) -> None:
        runtime, raw = import_optional_library("onnxruntime"), read_export_bytes(path)
        super().__init__(read_verified_onnx_metadata(raw, path).get(CARD_KEY), path, quick)
        options = build_onnx_session_options(runtime)
        # spinning threads would take cores from other work
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self.session = runtime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has many error classes, none of them public
            problem = f"onnxruntime {runtime.__version__} cannot run {path} ({str(error)[:200]})"
            raise WeightsError(problem, EXPORT_AGAIN_HINT) from None
        self.outputs = tuple(output.name for output in self.session.get_outputs())

    def compute_outputs(self, outputs: Sequence[str], images: np.ndarray) -> list[np.ndarray]:
        """Compute the outputs of these names, each (size, ...), for one chunk of (size, C, *image) float32 normalised
        images."""
        return self.session.run(list(outputs), {"images": images})


class OpenVinoFileEngine(ExportedEngine):
    """A .xml and .bin file of `vitreous export --to openvino`. Raises WeightsError for any other files, and for damaged
    ones."""

    name = "openvino"

    def __init__(self, path: Path, quick: bool = False) -> None:
        xml, weights = read_export_bytes(path), read_export_bytes(path.with_suffix(".bin"))
        verify_xml_checksum(xml, weights, path)
        with disable_telemetry():
            ov = import_optional_library("openvino")
        try:
            graph = get_openvino_core().read_model(model=xml, weights=weights)
            super().__init__(graph.get_rt_info(CARD_KEY).value if graph.has_rt_info(CARD_KEY) else None, path, quick)
            self.compiled = compile_openvino_graph(graph, "f32", PERFORMANCE_HINT="LATENCY")
            self.outputs = tuple(output.any_name for output in self.compiled.outputs)
        except RuntimeError as error:
            raise WeightsError(
                f"OpenVINO {ov.__version__} cannot run {path} ({str(error)[:200]})", EXPORT_AGAIN_HINT
            ) from None

    def compute_outputs(self, outputs: Sequence[str], images: np.ndarray) -> list[np.ndarray]:
        """Compute the outputs of these names, each (size, ...), for one chunk of (size, C, *image) float32 normalised
        images."""
        results = self.compiled([images])
        return [np.array(results[self.outputs.index(output)]) for output in outputs]


def open_exported_file(
    path: str | os.PathLike[str], how: InferenceOptions | None = None, quick: bool = False
) -> ExportedEngine:
    """Open an exported file as an engine with its card; `quick` optimises the latency of single images over throughput.
    Exported files run on the CPU, in float32 or their quantised precision. Raises WeightsError for a damaged file,
    UsageError for options in `how` that request something else."""
    suffix = Path(path).suffix.lower()
    if suffix == ".pt2":
        raise WeightsError(
            f"{path}: torch.export files can execute code when loaded, so vitreous does not open them",
            "load it with torch.export.load if you trust it, or use the run, or a .onnx or .xml file",
        )
    library, runtime = {".onnx": ("onnxruntime", OnnxFileEngine), ".xml": ("openvino", OpenVinoFileEngine)}[suffix]
    requested = () if how is None else (how.device, how.precision, how.engine, how.merge_tokens)
    allowed = (("auto", "cpu"), ("auto", "fp32"), ("auto", library), (0,))
    if any(value not in values for value, values in zip(requested, allowed, strict=False)):
        message = f"{path} runs in {library}, on the CPU, in its stored precision"
        raise UsageError(message, "leave --device, --precision and --engine out")
    return runtime(Path(path), quick)
