"""Export formats: ONNX, torch.export's .pt2, and OpenVINO's .xml with .bin. Each file contains the model's card: its
classes, preprocessing and provenance."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.apps.export.graph import INPUT_NAME, output_names, trace_model
from vitreous.data.modalities.base import Preprocess
from vitreous.errors import UsageError
from vitreous.inference.card import Card
from vitreous.inference.engine import Engine
from vitreous.inference.export_file import (
    CARD_KEY,
    MAX_EXPORT_BYTES,
    append_onnx_checksum,
    append_xml_checksum,
    describe_export,
    read_export_bytes,
)
from vitreous.inference.exported import open_exported_file
from vitreous.inference.libraries import disable_telemetry, import_optional_library
from vitreous.inference.openvino import quantize_graph
from vitreous.inference.outputs import Outputs, compute_in_chunks, pack_arrays, unpack_outputs
from vitreous.models.zoo import Model

ONNX_OPSET = 18  # the first version (2022) with all operators that PyTorch's exporter uses
ONNX_TOO_LARGE = ("the model exceeds the 2 GiB limit of an ONNX file", "use --to openvino or --to torch")
MAX_ONNX_WEIGHT_BYTES = 1.9e9  # bytes of weights that fit into an ONNX file, which is limited to 2 GiB


@dataclass(frozen=True)
class ExportTarget:
    """A model to export: its card, whether height and width are dynamic, and, for int8, (1, C, *image) calibration
    images."""

    model: Model
    card: Card
    dynamic: bool = False
    calibration: list[np.ndarray] | None = None

    @property
    def quantised_dtype(self) -> str | None:
        """Return "int8" if matmuls are quantised, else None."""
        return None if self.calibration is None else "int8"

    @property
    def card_text(self) -> str:
        """Return the text of the card that is stored in the file."""
        return describe_export(self.card, self.quantised_dtype)


def write_onnx(target: ExportTarget, path: Path) -> None:
    """Write an ONNX file. Raises UsageError if the model exceeds the size limit of ONNX files."""
    import_optional_library("onnxscript")
    onnx = import_optional_library("onnx")
    if sum(p.numel() * p.element_size() for p in target.model.parameters()) > MAX_ONNX_WEIGHT_BYTES:
        raise UsageError(*ONNX_TOO_LARGE)
    with silence_warnings():
        graph = build_onnx_graph(target)
        strip_metadata(graph, target)
        if target.calibration is not None:
            graph = quantise_onnx(graph, target.calibration, path.parent)
    for name, text in {CARD_KEY: target.card_text, **build_card_metadata(target.card)}.items():
        graph.metadata_props.add(key=name, value=text)
    onnx.checker.check_model(graph)
    raw = graph.SerializeToString()
    if len(raw) > MAX_EXPORT_BYTES:
        raise UsageError(*ONNX_TOO_LARGE)
    path.write_bytes(append_onnx_checksum(raw))


def build_onnx_graph(target: ExportTarget) -> Any:
    """Build the ONNX graph of the model with PyTorch's exporter."""
    names: dict[str, Any] = {"input_names": [INPUT_NAME], "output_names": list(output_names(target.model.config))}
    traced = trace_model(target.model, target.dynamic)
    program = torch.onnx.export(traced, (), **names, opset_version=ONNX_OPSET, dynamo=True, verbose=False)
    assert program is not None
    return program.model_proto


def quantise_onnx(graph: Any, calibration_images: list[np.ndarray], scratch: Path) -> Any:
    """Quantise the matmuls with weights of an ONNX graph to int8, except the first and the last. `calibration_images`
    are (1, C, *image) normalised float32.

    Scales of activations are fixed by calibration (static quantisation), so that outputs do not depend on the batch.
    Weights are unsigned, too: with signed weights, sums of two products overflow on processors without VNNI
    instructions. Signed weights of 7 bits instead are as fast and less exact: logits of a ViT-S/16 on 100 photographs
    were off by 0.20 (root mean square) instead of 0.16.
    """
    quantization, onnx = import_optional_library("onnxruntime.quantization"), import_optional_library("onnx")
    initializer_names = {tensor.name for tensor in graph.graph.initializer}
    matmul_names = [
        node.name
        for node in graph.graph.node
        if node.op_type in ("MatMul", "Gemm") and initializer_names & set(node.input)
    ]
    image_iterator = iter(calibration_images)

    class CalibrationImages(quantization.CalibrationDataReader):
        """Pass the calibration images to onnxruntime, one at a time."""

        def get_next(self) -> dict[str, np.ndarray] | None:
            """Return the next image by input name, or None after the last."""
            image = next(image_iterator, None)
            return None if image is None else {graph.graph.input[0].name: image}

    with TemporaryDirectory(dir=scratch) as folder:
        quantization.quantize_static(
            graph,
            onnx_path := f"{folder}/int8.onnx",
            CalibrationImages(),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=["MatMul", "Gemm"],
            nodes_to_quantize=matmul_names[1:-1],
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QUInt8,
        )
        model = onnx.load(onnx_path)
    del model.metadata_props[:], model.graph.value_info[:]
    return model


def strip_metadata(graph: Any, target: ExportTarget) -> None:
    """Remove paths and other traces of this machine from an ONNX graph, and name its dynamic axes."""
    del graph.metadata_props[:], graph.graph.metadata_props[:], graph.graph.value_info[:]
    graph.graph.doc_string, graph.producer_name = "", "vitreous"
    for node in (*graph.graph.node, *(node for function in graph.functions for node in function.node)):
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*graph.graph.input, *graph.graph.output, *graph.graph.initializer):
        del value.metadata_props[:]
    for value in (*graph.graph.input, *graph.graph.output):
        axes = value.type.tensor_type.shape.dim
        if target.card.task.export_rules.any_batch_size:
            axes[0].dim_param = "batch"
        if target.dynamic and value.name == INPUT_NAME:
            axes[2].dim_param, axes[3].dim_param = "height", "width"


def build_card_metadata(card: Card) -> dict[str, str]:
    """Build metadata that other programs can read: classes, mean, std, image size, resizing and loss, each as JSON."""
    preprocess, rules = card.preprocess, card.task.export_rules
    return {
        "classes": json.dumps(card.task.classes, ensure_ascii=False),
        "mean": json.dumps([value * preprocess.peak for value in preprocess.mean]),
        "std": json.dumps([value * preprocess.peak for value in preprocess.std]),
        "image_size": json.dumps(preprocess.image),
        "resize": json.dumps(preprocess.resize_settings() | ({"fit": rules.fit} if rules.fit else {})),
        **{key: json.dumps(value) for key, value in card.task.export_metadata.items()},
    }


def write_torch(target: ExportTarget, path: Path) -> None:
    """Write a torch.export file (.pt2). Raises UsageError for int8."""
    if target.calibration is not None:
        raise UsageError("int8 needs --to onnx or --to openvino", "remove --quantize")
    with silence_warnings():
        torch.export.save(
            trace_model(target.model, target.dynamic), path, extra_files={f"{CARD_KEY}.json": target.card_text}
        )


def write_openvino(target: ExportTarget, path: Path) -> None:
    """Write an OpenVINO .xml file, with its .bin file of weights next to it."""
    with disable_telemetry(), silence_warnings():
        ov, config = import_optional_library("openvino"), target.card.preprocess
        rules = target.card.task.export_rules
        graph = (
            convert_through_onnx(ov, target, path)
            if rules.use_onnx_graph
            else ov.convert_model(trace_model(target.model, target.dynamic))
        )
        for value, name in zip(
            (*graph.inputs, *graph.outputs), (INPUT_NAME, *output_names(target.model.config)), strict=True
        ):
            value.get_tensor().set_names({name})
        if rules.any_batch_size:
            graph.reshape([-1, config.channels, *([-1, -1] if target.dynamic else config.image)])
        if target.calibration is not None:
            graph = quantize_graph(graph, target.calibration, for_any_cpu=True)
        graph.set_rt_info(target.card_text, CARD_KEY)
        for name, text in build_card_metadata(target.card).items():
            graph.set_rt_info(text, [f"{CARD_KEY}_metadata", name])
        ov.save_model(graph, path, compress_to_fp16=False)
    weights = read_export_bytes(path.with_suffix(".bin"))
    path.write_bytes(append_xml_checksum(read_export_bytes(path), weights))


def convert_through_onnx(ov: Any, target: ExportTarget, path: Path) -> Any:
    """Convert PyTorch's ONNX export to an OpenVINO graph, through a temporary file next to `path`."""
    import_optional_library("onnxscript")
    with TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder) / "model.onnx"
        file.write_bytes(build_onnx_graph(target).SerializeToString())
        return ov.convert_model(file)


class TorchExportEngine:
    """Inference engine for a .pt2 file that this process has written. Other .pt2 files are not opened, as they can run
    code."""

    name = "torch"
    precision = "fp32"

    def __init__(self, path: Path, preprocess: Preprocess) -> None:
        with silence_warnings():
            self.module = torch.export.load(path).module()
        self.preprocess = preprocess

    def logits(self, pixels: np.ndarray) -> np.ndarray:
        """Compute logits: (B, C, *image) pixels -> (B, K) float32."""
        return self.compute_outputs(pixels)[0].numpy()

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """Compute features, the inputs of the head: (B, C, *image) pixels -> (B, D) float32."""
        return self.compute_outputs(pixels)[-1].numpy()

    def objects(self, pixels: np.ndarray) -> Outputs:
        """Detect objects: (B, C, *image) pixels -> boxes, scores, labels and masks, in the order of the detector's
        `outputs`."""
        return unpack_outputs(
            compute_in_chunks(
                lambda chunk: pack_arrays([output.numpy() for output in self.compute_outputs(chunk)]), pixels, 1
            )
        )

    @torch.inference_mode()
    def compute_outputs(self, pixels: np.ndarray) -> tuple[Tensor, ...]:
        """Run the exported module on pixels (B, C, *image). Return logits (B, K), if it has a head, and features (B,
        D), in float32."""
        outputs = self.module(torch.from_numpy(self.preprocess.normalise_array(pixels)))
        return outputs if isinstance(outputs, tuple) else (outputs,)


def open_export(path: Path, target: ExportTarget) -> Engine:
    """Open an inference engine for an exported file that was just written. Unlike `load`, it also opens .pt2 files."""
    return TorchExportEngine(path, target.card.preprocess) if path.suffix == ".pt2" else open_exported_file(path)


@dataclass(frozen=True)
class ExportFormat:
    """An export format: file suffix, writer, and required libraries, with additional libraries for int8."""

    suffix: str
    write: Callable[[ExportTarget, Path], None]
    libraries: tuple[str, ...] = ()
    for_int8: tuple[str, ...] = ()


EXPORT_FORMATS = {
    "onnx": ExportFormat(".onnx", write_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "torch": ExportFormat(".pt2", write_torch),
    "openvino": ExportFormat(".xml", write_openvino, ("openvino",), ("nncf",)),
}


@contextmanager
def silence_warnings() -> Iterator[None]:
    """Suppress printed output, logs and warnings of exporters, since stdout may be reserved for a JSON document."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)
