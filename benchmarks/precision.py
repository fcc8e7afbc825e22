"""What eight bits cost: answers of every engine and precision beside the model's own in float32, on real photographs.

    python benchmarks/precision.py RUN FOLDER --out benchmarks/results/DATE-precision-HARDWARE.md

RUN is a trained run whose data are at hand: int8 is calibrated on its training images. FOLDER has the photographs, in
folders of classes where accuracy is to be told. The measure is the model as PyTorch computes it in float32, image by
image the same pixels. bfloat16 is tried where the processor has it. Start-up of int8 is timed with nothing kept and a
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
    """Beside the exact logits: length of the difference to length, shares of equal and, where there are labels, of
    right first classes."""

    error: float
    agreement: float
    right: float | None


def compute_metrics(found: np.ndarray, exact: np.ndarray, labels: np.ndarray | None) -> AgreementMetrics:
    """Of (n, K) logits."""
    first = found.argmax(1)
    error = np.linalg.norm(found.astype(np.float64) - exact) / np.linalg.norm(exact.astype(np.float64))
    return AgreementMetrics(
        float(error),
        float((first == exact.argmax(1)).mean()),
        None if labels is None else float((first == labels).mean()),
    )


def open_images(run: str, folder: str, most: int) -> tuple[Split, np.ndarray | None]:
    """At most so many of the folder, always the same choice, and their labels in the model's order where it has
    classes."""
    bundle = open_bundle(run)
    if isinstance(bundle.task, Classification) and bundle.task.multilabel:
        raise SystemExit("agreement of first classes is for models that name one class an image")
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
    """(n, C, *image) as the model takes them."""
    reader = EvalLoader(split, open_bundle(run).preprocess)
    return np.stack([reader.load_sample(sample).numpy() for sample in range(len(split))])


def compute_exact_logits(run: str, pixels: np.ndarray) -> np.ndarray:
    """(n, K) of the model itself."""
    bundle = open_bundle(run)
    model = bundle.model.eval()
    with torch.inference_mode():
        return np.concatenate(
            [model(bundle.preprocess.normalise(part)).numpy() for part in torch.from_numpy(pixels).split(64)]
        )


def list_engines(run: str, scratch: str) -> Iterator[tuple[str, Callable[[], LogitsFunction]]]:
    """What can be asked on this machine: what a user types, and what makes ready what it stands for."""
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
    """What was made, and the seconds it took, of the clock and of processors."""
    clock, cores = time.perf_counter(), time.process_time()
    made = make()
    return made, f"{time.perf_counter() - clock:.1f} ({time.process_time() - cores:.1f})"


def build_table(run: str, pixels: np.ndarray, labels: np.ndarray | None) -> list[str]:
    """The table."""
    exact = compute_exact_logits(run, pixels)
    own = compute_metrics(exact, exact, labels)
    found = [("PyTorch, float32", own, "", "")]
    with tempfile.TemporaryDirectory() as scratch, set_environment_variable("XDG_CACHE_HOME", scratch):
        for name, make in list_engines(run, scratch):
            logits, first = measure_time(make)
            again = measure_time(make)[1] if "int8" in name and "export" not in name else ""
            found.append((name, compute_metrics(logits(pixels), exact, labels), first, again))
            print(found[-1], flush=True)
    right = [""] * len(found) if labels is None else [f"{figure.right:.2%}" for _, figure, _, _ in found]
    return [
        "| | logit error | top-1 equal | top-1 right | ready after, s (of processors) | again, s |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {figure.error:.1e} | {figure.agreement:.2%} | {top1} | {first} | {again} |"
            for (name, figure, first, again), top1 in zip(found, right, strict=True)
        ),
    ]


def build_page(run: str, folder: str, most: int) -> list[str]:
    """The page, line by line."""
    split, labels = open_images(run, folder, most)
    pixels, bundle = load_pixels(run, split), open_bundle(run)
    return [
        f"# What eight bits cost, {time.strftime('%Y-%m-%d')}",
        "",
        f"{describe_hardware()}; {describe_packages()}. `python benchmarks/precision.py RUN FOLDER --most {most}`.",
        (
            f"{bundle.model.config.name()} at {bundle.preprocess.image[0]} x {bundle.preprocess.image[1]}, "
            f"{len(bundle.classes)} classes,"
        ),
        f"{len(split):,} pictures.",
        "Logit error: length of the difference to length, over all logits. Equal: to PyTorch in float32.",
        "",
        *build_table(run, pixels, labels),
    ]


def main() -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("folder")
    parser.add_argument("--most", type=int, default=2000, help="pictures")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = build_page(options.run, options.folder, options.most)
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
