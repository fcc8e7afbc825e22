"""Accuracy of int8: predictions of every engine and precision compared with the model's in float32, on real
photographs.

    python benchmarks/precision.py RUN FOLDER --out benchmarks/results/DATE-precision-HARDWARE.md

RUN is a trained run whose dataset is available, because int8 is calibrated on its training images. FOLDER has the
photographs, in class folders if accuracy is to be reported. The reference is the model in PyTorch in float32, with the
same pixels. bfloat16 is measured if the processor supports it. Start-up of int8 is timed with an empty cache and a
second time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from vitreous.apps.bench.report import describe_hardware, describe_packages
from vitreous.apps.export.export import export
from vitreous.data.class_order import align_labels
from vitreous.data.keys import draw_permutation
from vitreous.data.layouts.folder import list_images
from vitreous.data.loader import EvalLoader
from vitreous.data.run_data import open_run_data
from vitreous.data.split import FileSplit, Split
from vitreous.errors import DataError
from vitreous.inference.libraries import set_environment_variable
from vitreous.inference.open_model import open_bundle
from vitreous.inference.options import InferenceOptions
from vitreous.inference.predict import load
from vitreous.system.machine import has_bf16
from vitreous.tasks.classification import Classification

LogitsFunction = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class AgreementMetrics:
    """Compared with the exact logits: relative error, share of equal top-1 classes and, with labels, top-1 accuracy."""

    error: float
    agreement: float
    right: float | None


def compute_metrics(logits: np.ndarray, exact: np.ndarray, labels: np.ndarray | None) -> AgreementMetrics:
    """The metrics of (n, K) logits."""
    predicted = logits.argmax(1)
    error = np.linalg.norm(logits.astype(np.float64) - exact) / np.linalg.norm(exact.astype(np.float64))
    return AgreementMetrics(
        float(error),
        float((predicted == exact.argmax(1)).mean()),
        None if labels is None else float((predicted == labels).mean()),
    )


def open_images(run: str, folder: str, most: int) -> tuple[Split, np.ndarray | None]:
    """At most `most` images of the folder, always the same ones, and their labels in the model's order if there are
    classes."""
    bundle = open_bundle(run)
    if isinstance(bundle.task, Classification) and bundle.task.multilabel:
        raise SystemExit("top-1 agreement is for single-label models")
    try:
        data = open_run_data(run, folder, "test")[1]
        split: Split = align_labels(data.split("test"), data, bundle.classes)
        labels = split.labels
    except DataError:
        files = list_images(Path(folder))
        split, labels = FileSplit(files, np.zeros(len(files), dtype=np.int64)), None
    rows = np.sort(draw_permutation(len(split), 0, 0)[:most])
    return split.take(rows, split.labels[rows]), None if labels is None else labels[rows]


def load_pixels(run: str, split: Split) -> np.ndarray:
    """The model's input pixels (n, C, *image)."""
    reader = EvalLoader(split, open_bundle(run).preprocess)
    return np.stack([reader.load_sample(sample).numpy() for sample in range(len(split))])


def compute_exact_logits(run: str, pixels: np.ndarray) -> np.ndarray:
    """The model's logits (n, K)."""
    bundle = open_bundle(run)
    model = bundle.model.eval()
    with torch.inference_mode():
        return np.concatenate(
            [model(bundle.preprocess.normalise(part)).numpy() for part in torch.from_numpy(pixels).split(64)]
        )


def list_engines(run: str, scratch: str) -> Iterator[tuple[str, Callable[[], LogitsFunction]]]:
    """Engines available on this machine: the command-line options, and a function that loads the engine."""
    half = has_bf16("cpu")

    def by(engine: str, precision: str) -> Callable[[], LogitsFunction]:
        return lambda: load(run, InferenceOptions("cpu", precision, engine)).engine.logits

    yield "`--precision fp32`", by("torch", "fp32")
    if half:
        yield "`--precision bf16`", by("torch", "bf16")
    if find_spec("openvino"):
        yield "`--engine openvino --precision fp32`", by("openvino", "fp32")
        if half:
            yield "`--engine openvino --precision bf16`", by("openvino", "bf16")
    if find_spec("nncf"):
        yield "`--engine openvino --precision int8`", by("openvino", "int8")
    if find_spec("onnxruntime") and find_spec("onnxscript"):

        def exported() -> LogitsFunction:
            export(run, "onnx", f"{scratch}/int8.onnx", quantize="int8", max_loss="any")
            return load(f"{scratch}/int8.onnx").engine.logits

        yield "`export --to onnx --quantize int8`", exported


def measure_time(make: Callable[[], LogitsFunction]) -> tuple[LogitsFunction, str]:
    """The result of a function, and its wall time and processor time in seconds."""
    clock, cores = time.perf_counter(), time.process_time()
    result = make()
    return result, f"{time.perf_counter() - clock:.1f} ({time.process_time() - cores:.1f})"


def build_table(run: str, pixels: np.ndarray, labels: np.ndarray | None) -> list[str]:
    """Build the table."""
    exact = compute_exact_logits(run, pixels)
    exact_metrics = compute_metrics(exact, exact, labels)
    results = [("PyTorch, float32", exact_metrics, "", "")]
    with tempfile.TemporaryDirectory() as scratch, set_environment_variable("XDG_CACHE_HOME", scratch):
        for name, make in list_engines(run, scratch):
            logits, first_start = measure_time(make)
            again = measure_time(make)[1] if "int8" in name and "export" not in name else ""
            results.append((name, compute_metrics(logits(pixels), exact, labels), first_start, again))
            print(results[-1], flush=True)
    top1_cells = [""] * len(results) if labels is None else [f"{metrics.right:.2%}" for _, metrics, _, _ in results]
    return [
        "| | logit error | top-1 agreement | top-1 accuracy | start-up, s (processor time) | second start-up, s |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {metrics.error:.1e} | {metrics.agreement:.2%} | {top1} | {first_start} | {again} |"
            for (name, metrics, first_start, again), top1 in zip(results, top1_cells, strict=True)
        ),
    ]


def build_page(run: str, folder: str, most: int) -> list[str]:
    """The lines of the page."""
    split, labels = open_images(run, folder, most)
    pixels, bundle = load_pixels(run, split), open_bundle(run)
    return [
        f"# Accuracy of int8, {time.strftime('%Y-%m-%d')}",
        "",
        f"{describe_hardware()}; {describe_packages()}. `python benchmarks/precision.py RUN FOLDER --most {most}`.",
        (
            f"{bundle.model.config.name()} at {bundle.preprocess.image[0]} x {bundle.preprocess.image[1]}, "
            f"{len(bundle.classes)} classes,"
        ),
        f"{len(split):,} images.",
        "Logit error: norm of the difference relative to the norm of all logits. Agreement: with PyTorch in float32.",
        "",
        *build_table(run, pixels, labels),
    ]


def main() -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("folder")
    parser.add_argument("--most", type=int, default=2000, help="maximum number of images")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = build_page(options.run, options.folder, options.most)
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
