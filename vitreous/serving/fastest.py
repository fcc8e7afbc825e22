"""The engine of `--engine fastest`: measured on this machine, on this model, among those that are installed and agree.

Each engine answers the same noise in turn, as many images at a time as the caller will ask for. OpenVINO is taken only
where its answers are PyTorch's in the same precision, but for rounding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vitreous.errors import UsageError, VitreousError
from vitreous.evaluation.inference_options import InferenceOptions, Pictures
from vitreous.machine import pick_device
from vitreous.nn.cuda_graphs import WARM_UP_PASSES
from vitreous.nn.encoder import compile_blocks
from vitreous.serving.runtime import PART, TorchRuntime

if TYPE_CHECKING:
    from vitreous.weights.bundle import Bundle

#: length of the difference of OpenVINO's outputs to that of PyTorch's, at most; in bfloat16 each may be off by 1e-2
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
ROUNDS, SECONDS = 5, 2.0  # turns of each engine, at least, and how long all take where they are short


def open_runtime(
    bundle: Bundle, how: InferenceOptions | None = None, pictures: Pictures | None = None, quick: bool = False
) -> TorchRuntime:
    """Return what computes the answers of a bundle; `quick` answers one image alone sooner, and many later.

    Raises UsageError for options that do not go together.
    """
    if how is None or how.engine != "fastest":
        return TorchRuntime(bundle, how, pictures, quick)
    if how.precision == "int8":
        problem = "--engine fastest compares engines in one precision, and int8 is OpenVINO's alone"
        raise UsageError(problem, "use --engine openvino --precision int8")
    return fastest_runtime(bundle, how, quick)


def fastest_runtime(bundle: Bundle, how: InferenceOptions, quick: bool) -> TorchRuntime:
    """Return the runtime of the engine that answers soonest: one image where single images are waited for (`quick`),
    else a part for every core. Its `note` says what was measured, or why there was no choice."""
    ours = TorchRuntime(bundle, replace(how, engine="torch"), quick=quick)
    if pick_device(how.device).startswith("cuda") and not bundle.preprocess.native:
        return compiled_runtime(ours, quick)
    try:
        theirs = TorchRuntime(bundle, replace(how, engine="openvino", precision=ours.precision), quick=quick)
        pixels = bundle.preprocess.noise(1 if quick else PART * torch.get_num_threads())
        expected, given = ours.logits(pixels), theirs.logits(pixels)
    except VitreousError as error:  # not installed, or not for this device or model
        ours.note = f"engine: torch, the only one here ({error.message})"
        return ours
    distance = float(np.linalg.norm(given - expected) / max(float(np.linalg.norm(expected)), 1e-12))
    if not distance <= TOLERANCE[ours.precision]:
        ours.note = f"engine: torch, as the answers of openvino differ from its own by {distance:.1g} of their length"
        return ours
    seconds = race({"torch": lambda: ours.logits(pixels), "openvino": lambda: theirs.logits(pixels)})
    first, second = sorted(seconds, key=lambda name: seconds[name])
    rates = f"{len(pixels) / seconds[first]:,.1f} images/s in {ours.precision}, {len(pixels)} at a time"
    chosen = theirs if first == "openvino" else ours
    chosen.note = f"engine: {first}, {rates}; {second} {len(pixels) / seconds[second]:,.1f}"
    return chosen


def compiled_runtime(plain: TorchRuntime, quick: bool) -> TorchRuntime:
    """Return the faster of PyTorch on a GPU and PyTorch with compiled blocks, which take some seconds to compile."""
    compiled = TorchRuntime(plain.bundle, plain.how and replace(plain.how, engine="torch"), quick=quick)
    compile_blocks(compiled.engine.model)  # type: ignore[attr-defined]
    pixels = plain.bundle.preprocess.noise(1 if quick else compiled.part)
    turns: dict[str, Callable[[], object]] = {
        "torch": lambda: plain.logits(pixels),
        "torch, compiled": lambda: compiled.logits(pixels),
    }
    for turn in turns.values():
        for _ in range(WARM_UP_PASSES + 1):
            turn()
    seconds = race(turns)
    first, second = sorted(seconds, key=lambda name: seconds[name])
    chosen = plain if first == "torch" else compiled
    rates = f"{len(pixels) / seconds[first]:,.1f} images/s in {chosen.precision}, {len(pixels)} at a time"
    chosen.note = f"engine: {first}, {rates}; {second} {len(pixels) / seconds[second]:,.1f}"
    return chosen


def race(turns: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each, called in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    rounds, began = 0, time.perf_counter()
    while rounds < ROUNDS or time.perf_counter() - began < SECONDS:
        for name, turn in turns.items():
            start = time.perf_counter()
            turn()
            seconds[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: statistics.median(values) for name, values in seconds.items()}
