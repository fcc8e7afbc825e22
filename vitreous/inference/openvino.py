"""Conversion and compilation of models with OpenVINO (extra `export`), and int8 by post-training quantisation
(nncf)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitreous.data.modalities.base import Preprocess
from vitreous.errors import UsageError
from vitreous.inference.graph_cache import graph_cache_fields, load_or_build_graph
from vitreous.inference.libraries import compile_openvino_graph, disable_telemetry, import_optional_library
from vitreous.inference.options import CalibrationImages
from vitreous.models.zoo import Model
from vitreous.system.machine import has_vnni

MAX_QUANTIZATION_IMAGES = 128  # largest number of calibration images
MIN_QUANTIZATION_IMAGES = 8
NEEDS_TEXT = "--engine openvino needs"  # start of the message for a missing library
PRECISION_HINTS = {"fp32": "f32", "bf16": "bf16", "int8": "f32"}


def compile_model(
    model: Model, preprocess: Preprocess, precision: str, calibration_images: CalibrationImages | None, keep: bool
) -> Any:
    """Compile a model with OpenVINO for pixels (B, C, *image) uint8 and `precision` fp32, bf16 or int8. int8 is
    calibrated on `calibration_images`; `keep` caches the graph. Raises ResourceError if OpenVINO is not installed,
    UsageError for int8 without calibration images and for a model that OpenVINO cannot convert or run."""
    with disable_telemetry():
        ov = import_optional_library("openvino", NEEDS_TEXT)
        samples = collect_calibration_images(calibration_images) if precision == "int8" else []
        build = partial(build_int8_graph, calibration_images=samples) if samples else convert_to_openvino
        build_graph = partial(build, ov, model, preprocess)
        graph = (
            load_or_build_graph(ov, graph_cache_fields(model, preprocess, samples), build_graph)
            if keep
            else build_graph()
        )
    try:
        return compile_openvino_graph(graph, PRECISION_HINTS[precision], PERFORMANCE_HINT="LATENCY")
    except RuntimeError as error:
        problem = f"OpenVINO cannot run this model in {precision} on this machine: {get_last_error_line(error)}"
        raise UsageError(problem, "use --precision fp32") from None


class PreprocessedModel(nn.Module):
    """A model that normalises its input first, so that the OpenVINO graph accepts uint8 pixels."""

    def __init__(self, model: Model, preprocess: Preprocess) -> None:
        super().__init__()
        self.model, self.preprocess = model, preprocess

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute (B, K) outputs of (B, C, *image) uint8 pixels."""
        return self.model(self.preprocess.normalise(pixels))


def collect_calibration_images(calibration_images: CalibrationImages | None) -> list[np.ndarray]:
    """Collect at most `MAX_QUANTIZATION_IMAGES` images for int8 calibration, (1, C, *image) each. Raises UsageError for
    too few."""
    samples = [
        image[None].numpy()
        for image in islice(calibration_images() if calibration_images else (), MAX_QUANTIZATION_IMAGES)
    ]
    if len(samples) < MIN_QUANTIZATION_IMAGES:
        problem = f"int8 needs at least {MIN_QUANTIZATION_IMAGES} calibration images, but there are {len(samples)}"
        raise UsageError(problem, "use --precision bf16 or fp32")
    return samples


def build_int8_graph(ov: Any, model: Model, preprocess: Preprocess, calibration_images: list[np.ndarray]) -> Any:
    """Build the int8 graph of a model, calibrated on images (1, C, *image)."""
    return quantize_graph(convert_to_openvino(ov, model, preprocess), calibration_images)


def convert_to_openvino(ov: Any, model: Model, preprocess: Preprocess) -> Any:
    """Convert a model to an OpenVINO graph for pixels (B, C, *image) with any B. Raises UsageError for a model that
    cannot be traced, or has operations that OpenVINO lacks."""
    wrapped = PreprocessedModel(model.cpu().eval(), preprocess)
    example = torch.zeros(2, preprocess.channels, *preprocess.image, dtype=preprocess.dtype)
    shapes = ({0: torch.export.Dim("batch", min=1, max=65536)},)
    try:
        graph = ov.convert_model(torch.export.export(wrapped, (example,), dynamic_shapes=shapes))
        graph.reshape([-1, *example.shape[1:]])
    except Exception as error:  # tracing and conversion raise many error types, few of them public
        problem = f"OpenVINO cannot convert this model: {get_last_error_line(error)}"
        raise UsageError(problem, "use --engine torch") from error
    return graph


def get_last_error_line(error: Exception) -> str:
    """Return the last line of an error message, or the type of the error if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip()[:200] if lines else type(error).__name__


def quantize_graph(graph: Any, calibration_images: list[np.ndarray], for_any_cpu: bool = False) -> Any:
    """Quantise a graph to int8 with nncf's rules for transformers, calibrated on inputs (1, C, *image).

    Without VNNI instructions, sums of two products overflow 16 bits unless one bit is unused. That bit is reserved if
    this processor has no VNNI, or if the graph must run `for_any_cpu`. The operations of `find_float_operations` stay
    in float32: they take little time and cause most of the error.
    """
    nncf = import_optional_library("nncf", NEEDS_TEXT)
    nncf.set_log_level(logging.ERROR)
    overflow_fix = nncf.OverflowFix.DISABLE if has_vnni() and not for_any_cpu else nncf.OverflowFix.ENABLE
    options = nncf.AdvancedQuantizationParameters(overflow_fix=overflow_fix)
    with redirect_stdout(StringIO()):  # nncf prints its progress to stdout, where JSON may be expected
        return nncf.quantize(
            graph,
            nncf.Dataset(calibration_images),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(calibration_images),
            ignored_scope=nncf.IgnoredScope(names=find_float_operations(graph)),
            advanced_parameters=options,
        )


def find_float_operations(graph: Any) -> list[str]:
    """List the names of the operations that stay in float32: the first matrix products after the pixels, the last ones
    before the logits, and convolutional stems."""
    first_products = find_first_products(
        graph.get_parameters(),
        lambda op: [port.get_node() for value in op.outputs() for port in value.get_target_inputs()],
    )
    last_products = find_first_products(
        graph.get_results()[:1], lambda op: [value.get_node() for value in op.input_values()]
    )
    stem = {op.get_friendly_name() for op in graph.get_ops() if op.get_type_name() == "Convolution"}
    blocks = (
        {op.get_friendly_name() for op in graph.get_ops() if op.get_type_name() == "MatMul"}
        - first_products
        - last_products
    )
    return sorted(first_products | last_products | (stem if blocks else set()))


def find_first_products(starts: list[Any], get_successors: Callable[[Any], list[Any]]) -> set[str]:
    """Find the names of the first matrix products and convolutions that are reached from the operations `starts`.
    `get_successors` lists the successors of an operation, in either direction of the graph."""
    products, visited, pending = set[str](), set[str](), list(starts)
    while pending:
        op = pending.pop()
        name = op.get_friendly_name()
        if op.get_type_name() in ("MatMul", "Convolution"):
            products.add(name)
        elif name not in visited and op.get_type_name() != "ShapeOf":  # the batch size is used everywhere
            visited.add(name)
            pending += get_successors(op)
    return products
