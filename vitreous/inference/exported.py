"""Files that `vitreous export` wrote, found by their suffix and run by onnxruntime or OpenVINO. Without torch."""

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
    check_onnx_seal,
    check_xml_seal,
    parse_export_card,
    parse_export_precision,
    read_export_bytes,
)
from vitreous.inference.libraries import disable_telemetry, get_openvino_core, import_optional_library
from vitreous.inference.outputs import DETECTION_OUTPUT_NAMES, Outputs, compute_in_chunks, pack_arrays, unpack_outputs
from vitreous.system.cores import count_usable_cores

if TYPE_CHECKING:
    from vitreous.inference.options import InferenceOptions

EXPORT_SUFFIXES = (".onnx", ".xml", ".pt2")
CHUNK_PIXELS = 2 * 224 * 224  # of one part: few enough to lie in caches, enough to be worth a call


def is_exported_file(run: str | os.PathLike[str]) -> bool:
    """Whether a name is that of an exported file, rather than of a run, a bundle or weights."""
    return Path(run).suffix.lower() in EXPORT_SUFFIXES and not Path(run).is_dir()


class ExportedEngine:
    """An exported file on the CPU, in float32 or what it was quantised to. `quick` computes one image at a time.

    `text` is the card as the file has it. Raises WeightsError where there is none.
    """

    name: str
    outputs: tuple[str, ...] = ("logits", "features")

    def __init__(self, text: str | None, path: Path, quick: bool) -> None:
        self.card, self.precision = parse_export_card(text, path), parse_export_precision(text)
        alone = quick or not self.card.task.export_rules.batch
        self.size = 1 if alone else max(1, min(64, CHUNK_PIXELS // max(1, int(np.prod(self.card.preprocess.image)))))

    def logits(self, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) pixels -> (B, K) float32."""
        return self.compute("logits", pixels)

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """(B, C, *image) pixels -> (B, D) float32, what the head reads. Raises UsageError for files without them."""
        if "features" not in self.outputs:
            raise UsageError("the file answers in logits only", "export the model again: it then has features too")
        return self.compute("features", pixels)

    def objects(self, pixels: np.ndarray) -> Outputs:
        """(B, C, *image) pixels -> boxes, scores, labels and masks of a detector. Raises UsageError for other files."""
        names = [name for name in DETECTION_OUTPUT_NAMES if name in self.outputs]
        if tuple(names[:3]) != DETECTION_OUTPUT_NAMES[:3]:
            raise UsageError("the file finds no objects on images", "export a detector")

        def answer(part: np.ndarray) -> np.ndarray:
            return pack_arrays(self.answers(names, self.card.preprocess.normalise_array(part)))

        return unpack_outputs(compute_in_chunks(answer, pixels, self.size))

    def compute(self, output: str, pixels: np.ndarray) -> np.ndarray:
        """One output for (B, C, *image) pixels, in parts of `size` images: (B, ...) float32."""
        return compute_in_chunks(
            lambda part: self.answers([output], self.card.preprocess.normalise_array(part))[0], pixels, self.size
        )

    def answers(self, outputs: Sequence[str], images: np.ndarray) -> list[np.ndarray]:
        """Outputs for a part of (size, C, *image) float32 normalised images: (size, ...) each."""
        raise NotImplementedError


class OnnxFileEngine(ExportedEngine):
    """A file that `vitreous export --to onnx` wrote. Raises WeightsError for any other, and for a damaged one."""

    name = "onnx"

    def __init__(self, path: Path, quick: bool = False) -> None:
        runtime, raw = import_optional_library("onnxruntime"), read_export_bytes(path)
        super().__init__(check_onnx_seal(raw, path).get(CARD_KEY), path, quick)
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = count_usable_cores(), 1
        options.log_severity_level = 4
        # a thread that spins takes a core from others
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self.session = runtime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has a class of its own for each, none of them public
            problem = f"{path} is not run by onnxruntime {runtime.__version__} ({str(error)[:200]})"
            raise WeightsError(problem, EXPORT_AGAIN_HINT) from None
        self.outputs = tuple(output.name for output in self.session.get_outputs())

    def answers(self, outputs: Sequence[str], images: np.ndarray) -> list[np.ndarray]:
        """Outputs for a part of (size, C, *image) float32 normalised images: (size, ...) each."""
        return self.session.run(list(outputs), {"images": images})


class OpenVinoFileEngine(ExportedEngine):
    """A .xml and .bin that `vitreous export --to openvino` wrote. Raises WeightsError for others and damaged ones."""

    name = "openvino"

    def __init__(self, path: Path, quick: bool = False) -> None:
        xml, weights = read_export_bytes(path), read_export_bytes(path.with_suffix(".bin"))
        check_xml_seal(xml, weights, path)
        with disable_telemetry():
            ov = import_optional_library("openvino")
        hints = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": count_usable_cores(),
        }
        try:
            core = get_openvino_core()
            graph = core.read_model(model=xml, weights=weights)
            super().__init__(graph.get_rt_info(CARD_KEY).value if graph.has_rt_info(CARD_KEY) else None, path, quick)
            self.compiled = core.compile_model(graph, "CPU", hints)
            self.outputs = tuple(output.any_name for output in self.compiled.outputs)
        except RuntimeError as error:
            raise WeightsError(
                f"{path} is not run by OpenVINO {ov.__version__} ({str(error)[:200]})", EXPORT_AGAIN_HINT
            ) from None

    def answers(self, outputs: Sequence[str], images: np.ndarray) -> list[np.ndarray]:
        """Outputs for a part of (size, C, *image) float32 normalised images: (size, ...) each."""
        results = self.compiled([images])
        return [np.array(results[self.outputs.index(output)]) for output in outputs]


def open_exported_file(
    path: str | os.PathLike[str], how: InferenceOptions | None = None, quick: bool = False
) -> ExportedEngine:
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
    library, runtime = {".onnx": ("onnxruntime", OnnxFileEngine), ".xml": ("openvino", OpenVinoFileEngine)}[kind]
    asked = () if how is None else (how.device, how.precision, how.engine, how.merge_tokens)
    allowed = (("auto", "cpu"), ("auto", "fp32"), ("auto", library), (0,))
    if any(value not in values for value, values in zip(asked, allowed, strict=False)):
        message = f"{path} is computed by {library}, on the CPU, in the precision that it has"
        raise UsageError(message, "leave --device, --precision and --engine out")
    return runtime(Path(path), quick)
