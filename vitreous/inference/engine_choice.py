"""Choose the fastest installed engine for `--engine auto`, and cache the benchmark.

On a CPU the alternative to PyTorch is OpenVINO (extra `export`), on a GPU PyTorch with compiled blocks. Its outputs
must agree with PyTorch's; this depends on the weights and is checked at every start. Building the alternative takes
seconds, so it is not tried for short jobs. The benchmark is stored under `XDG_CACHE_HOME/vitreous/engines` by model,
batch size, precision, machine and library versions.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitreous.config import to_builtins
from vitreous.data.modalities.base import Preprocess
from vitreous.errors import ResourceError, VitreousError
from vitreous.inference.engine import ENGINE_CHUNK, InferenceOptions, ModelEngine, TorchEngine, make_engine
from vitreous.inference.graph_cache import find_installed_version, hash_cache_fields
from vitreous.inference.options import CalibrationImages
from vitreous.models.zoo import Model
from vitreous.nn.cuda_graphs import WARM_UP_PASSES
from vitreous.system.disk import get_cache_folder, open_atomic
from vitreous.system.machine import get_cpu_features, get_processor_name, pick_device
from vitreous.system.torch_types import from_numpy
from vitreous.version import __version__

#: largest relative L2 difference between the outputs of two engines; bfloat16 errors can reach 1e-2 each
MAX_OUTPUT_DIFFERENCE = {"fp32": 1e-4, "bf16": 2e-2}
#: shortest job, in seconds of the PyTorch engine, for which the alternative engine is built
WORTHWHILE_SECONDS = {"openvino": 30.0, "compiled": 120.0}
MIN_PASSES = 10  # shortest job, in forward passes, for which engines are timed: timing takes two passes
#: shortest forward pass, in seconds of the PyTorch engine, for which the alternative is tried, even for a long job
MIN_PASS_SECONDS = 2e-3
MAX_BENCHMARK_SECONDS, MAX_ROUNDS = 2.0, 20
#: smallest speedup of the alternative; below it, PyTorch is kept, whose outputs are the same across machines
MIN_SPEEDUP = 1.05
IMAGES_PER_THREAD = 4  # in a measured forward pass, for a long evaluation on a CPU
MAX_RECORDS = 200  # stored benchmarks; older ones are removed

#: (engine, (B, C, *image) pixels) -> (B, K) float32: one forward pass, as in the job
ComputeFunction = Callable[[ModelEngine, np.ndarray], np.ndarray]


def choose_engine(
    model: Model,
    preprocess: Preprocess,
    options: InferenceOptions,
    compute: ComputeFunction,
    batch_size: int,
    total_images: float,
    baseline: ModelEngine | None = None,
) -> ModelEngine:
    """Choose the fastest engine for batches of `batch_size` images and a job of `total_images` (inf: a server).

    `compute` computes a batch as in the job. `baseline` is the PyTorch engine, if it exists already. The alternative is
    chosen if its outputs for the same noise differ by at most `MAX_OUTPUT_DIFFERENCE` and it is at least `MIN_SPEEDUP`
    faster. The returned engine has options that create it again and, if there was a choice, a `note` about it.
    """
    torch_options = replace(options, engine="torch")
    baseline = baseline or make_engine(model, preprocess, torch_options)
    baseline.options = torch_options
    if total_images < MIN_PASSES * batch_size or (name := find_alternative_engine(model, preprocess, options)) is None:
        return baseline
    pixels = preprocess.noise(batch_size)
    expected = compute(baseline, pixels)
    start = time.perf_counter()
    compute(baseline, pixels)
    seconds = time.perf_counter() - start
    if seconds < MIN_PASS_SECONDS or seconds / batch_size * total_images < WORTHWHILE_SECONDS[name]:
        return baseline
    conditions = describe_benchmark_conditions(model, preprocess, baseline.precision, options.device, batch_size)
    record = find_benchmark_record(conditions)
    if record is not None and not is_faster(record, name):
        return set_engine_note(baseline, describe_benchmark_record(record))
    try:
        alternative = build_alternative(name, model, preprocess, options, baseline.precision)
        alternative.low_latency = baseline.low_latency
        outputs = compute(alternative, pixels)
    except VitreousError as error:
        record = {"facts": conditions, "seconds": {}, "problem": f"{name}: {error.message}"}
        write_benchmark_record(record)
        return set_engine_note(baseline, describe_benchmark_record(record))
    difference = float(np.linalg.norm(outputs - expected) / max(float(np.linalg.norm(expected)), 1e-12))
    if not difference <= MAX_OUTPUT_DIFFERENCE[baseline.precision]:
        note = f"engine: torch; the outputs of {name} differ by {difference:.1g} (relative L2 norm)"
        return set_engine_note(baseline, note)
    if record is None:
        engines = {"torch": baseline, name: alternative}
        functions = {engine_name: partial(compute, engine, pixels) for engine_name, engine in engines.items()}
        record = {"facts": conditions, "seconds": benchmark_engines(functions)}
        write_benchmark_record(record)
    return set_engine_note(alternative if is_faster(record, name) else baseline, describe_benchmark_record(record))


def set_engine_note(engine: ModelEngine, note: str) -> ModelEngine:
    """Set the engine's note about its choice, and return the engine."""
    engine.note = note
    return engine


def choose_chunk_engine(baseline: ModelEngine, total_images: float) -> ModelEngine:
    """Choose the fastest engine for a job of `total_images` (inf: a server) that calls `logits`, in fixed-size chunks.
    `baseline` is the PyTorch engine."""
    parallel = torch.get_num_threads() if pick_device(baseline.options.device) == "cpu" else 1  # chunks at a time
    return choose_engine(
        baseline.original,
        baseline.preprocess,
        options=baseline.options,
        compute=lambda engine, pixels: engine.logits(pixels),
        batch_size=1 if baseline.low_latency else baseline.chunk_size * parallel,
        total_images=total_images,
        baseline=baseline,
    )


def build_evaluation_engine(
    model: Model,
    preprocess: Preprocess,
    options: InferenceOptions,
    num_images: int,
    note: Callable[[str], None],
    calibration_images: CalibrationImages | None = None,
) -> ModelEngine:
    """Build the engine that evaluates `num_images` images, chosen by a benchmark if the options have `engine` auto.
    int8 is calibrated on `calibration_images`. `note` is called with a line about the choice. Raises UsageError for
    incompatible options."""
    engine = make_engine(model, preprocess, options, calibration_images)
    if options.engine != "auto":
        return engine
    on_cpu = not isinstance(engine, TorchEngine) or engine.device == "cpu"
    batch_size = IMAGES_PER_THREAD * torch.get_num_threads() if on_cpu else ENGINE_CHUNK
    engine = choose_engine(
        model,
        preprocess,
        options=options,
        compute=lambda engine, pixels: engine(from_numpy(pixels)).numpy(),
        batch_size=batch_size,
        total_images=num_images,
        baseline=engine,
    )
    if engine.note:
        note(engine.note)
    return engine


def find_alternative_engine(model: Model, preprocess: Preprocess, options: InferenceOptions) -> str | None:
    """Return the name of the alternative to PyTorch, or None if there is no choice. There is none if the options name
    an engine or int8, if only PyTorch supports the model or its input, or if the environment variable
    `VITREOUS_ENGINE_CHOICE` is 0."""
    is_supported = preprocess.stacks and not options.merge_tokens and not model.config.finds_objects
    if options.engine != "auto" or options.precision == "int8" or not is_supported:
        return None
    if os.environ.get("VITREOUS_ENGINE_CHOICE") == "0":
        return None
    device = pick_device(options.device)
    if device.startswith("cuda"):
        return "compiled"
    return "openvino" if device == "cpu" and find_spec("openvino") is not None else None


def build_alternative(
    name: str, model: Model, preprocess: Preprocess, options: InferenceOptions, precision: Any
) -> ModelEngine:
    """Build the engine `name` with the precision of the PyTorch engine. Raises UsageError for a model that it does not
    support, ResourceError for a broken installation."""
    return make_engine(model, preprocess, replace(options, engine=name, precision=precision))


def benchmark_engines(functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Measure the median seconds of each function. The functions are called alternately, at least once, for about
    `MAX_BENCHMARK_SECONDS` in total."""
    if "compiled" in functions:  # each engine records its CUDA graph first
        for function in functions.values():
            for _ in range(WARM_UP_PASSES + 1):
                function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    start_time = time.perf_counter()
    for rounds in range(1, MAX_ROUNDS + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
        elapsed = time.perf_counter() - start_time
        if elapsed * (rounds + 1) / rounds > MAX_BENCHMARK_SECONDS:
            break
    return {name: statistics.median(values) for name, values in seconds.items()}


def describe_benchmark_conditions(
    model: Model, preprocess: Preprocess, precision: str, device: str, batch_size: int
) -> dict[str, Any]:
    """Return the conditions of a benchmark: architecture, image size, precision, machine, and versions."""
    picked = pick_device(device)
    return {
        "model": model.config.name(),
        "architecture": to_builtins(model.config),
        "image": list(preprocess.image),
        "precision": precision,
        "batch_size": batch_size,
        "device": torch.cuda.get_device_name(picked) if picked.startswith("cuda") else picked,
        "processor": [get_processor_name(), *sorted(name for name, has in get_cpu_features().items() if has)],
        "threads": torch.get_num_threads(),
        "versions": get_library_versions(),
    }


def get_library_versions() -> dict[str, str | None]:
    """Return the versions of the benchmarked libraries; None if one is not installed."""
    return {"vitreous": __version__} | {name: find_installed_version(name) for name in ("torch", "openvino")}


def is_faster(record: dict[str, Any], name: str) -> bool:
    """Return whether the engine `name` is at least `MIN_SPEEDUP` faster than PyTorch in a benchmark record."""
    seconds = record["seconds"]
    return name in seconds and seconds["torch"] >= MIN_SPEEDUP * seconds[name]


def describe_benchmark_record(record: dict[str, Any]) -> str:
    """Describe a benchmark in one line: the chosen engine, and the throughput of each."""
    conditions, seconds = record["facts"], record["seconds"]
    if not seconds:
        return f"engine: torch ({record['problem']})"
    (name,) = (name for name in seconds if name != "torch")
    chosen_engine, other_engine = (name, "torch") if is_faster(record, name) else ("torch", name)
    batch_size = conditions["batch_size"]
    throughput = (
        f"{batch_size / seconds[chosen_engine]:,.1f} images/s in {conditions['precision']}, batch size {batch_size}"
    )
    return f"engine: {chosen_engine}, {throughput}; {other_engine} {batch_size / seconds[other_engine]:,.1f}"


def benchmark_record_path(conditions: dict[str, Any]) -> Path:
    """Return the path of the stored benchmark of the engines under these conditions."""
    return get_cache_folder("engines") / f"{hash_cache_fields(conditions)}.json"


def find_benchmark_record(conditions: dict[str, Any]) -> dict[str, Any] | None:
    """Return the stored benchmark of the engines under these conditions, or None if it is missing or damaged."""
    record = load_benchmark_record(benchmark_record_path(conditions))
    return record if record is not None and record["facts"] == json.loads(json.dumps(conditions)) else None


def load_benchmark_record(path: Path) -> dict[str, Any] | None:
    """Load a stored benchmark; None if the file is missing or invalid."""
    try:
        record = json.loads(path.read_text("utf-8"))
        seconds = record["seconds"]
        is_valid = not seconds or (
            len(seconds) == 2 and "torch" in seconds and all(0 < s < math.inf for s in seconds.values())
        )
        return record if is_valid and isinstance(record["facts"], dict) and (seconds or record["problem"]) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_benchmark_record(record: dict[str, Any]) -> None:
    """Store a benchmark and remove the oldest ones; write errors of the cache are ignored."""
    path = benchmark_record_path(record["facts"])
    with suppress(OSError, ResourceError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path, "w", shared=True, encoding="utf-8") as file:
            json.dump({**record, "measured": date.today().isoformat()}, file)
        for old_path in list_newest_records(path.parent)[MAX_RECORDS:]:
            old_path.unlink(missing_ok=True)


def list_newest_records(folder: Path) -> list[Path]:
    """List the stored benchmarks in a folder, newest first."""
    return sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)


def list_engine_choices() -> list[str]:
    """Describe each stored benchmark of the installed library versions in one line, newest first."""
    lines: list[str] = []
    for path in list_newest_records(get_cache_folder("engines")):
        record = load_benchmark_record(path)
        if record is None:
            continue
        conditions = record["facts"]
        if conditions.get("versions") == get_library_versions():
            size = "x".join(map(str, conditions["image"]))
            lines.append(f"{conditions['model']} at {size}: {describe_benchmark_record(record)}")
    return lines
