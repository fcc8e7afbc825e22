"""Time of fitting heads on cached features of a frozen encoder, `vitreous evaluate MODEL DATA --protocol heads`.

    python benchmarks/frozen_heads.py --out benchmarks/results/DATE-frozen-heads-HARDWARE.md
    python benchmarks/frozen_heads.py --images 1000 --evaluated 200 --classes 100
    python benchmarks/frozen_heads.py --maps --classes 21

The features are synthetic: those of a class are its mean and noise. Their shapes are those of a ViT-B (width 768: pooled
features, class token and mean of the last four blocks) and of the patch tokens of a ViT-S (196 x 384, float16). They are
read from files, as the cache stores them. The time of encoding is not included. The accuracies only show that every head
learns. With `--maps`, heads segment images of 224 x 224 pixels, whose patches have one class each; reading the class
maps of all images and evaluation at every pixel are included.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitreous.data.annotations.target import Target, create_empty_target
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.split import ArraySplit, Data, Split
from vitreous.inference.features import POOLED, SplitFeatures
from vitreous.inference.frozen_encoder import LAST_BLOCKS, LAYERS, TOKENS, FrozenEncoder
from vitreous.inference.options import InferenceOptions
from vitreous.models.zoo import create_untrained_model
from vitreous.reports.answers import EvaluationSettings
from vitreous.reports.protocols.frozen import HEADS, HeadData
from vitreous.reports.protocols.frozen_maps import encode_maps, fit_linear_maps, fit_patch_neighbours
from vitreous.reports.protocols.task import ProtocolOptions, ProtocolTask
from vitreous.system.machine import configure_process, get_processor_name
from vitreous.tasks.classification import Classification
from vitreous.tasks.segmentation import Segmentation
from vitreous.weights.bundle import Bundle

ARRAYS = {POOLED: ((768,), "<f4"), LAYERS: ((LAST_BLOCKS, 2, 768), "<f4"), TOKENS: ((196, 384), "<f2")}
SIGNAL = 0.15  # standard deviation of the class means, as a share of that of the noise
HeadRow = tuple[str, int, float, float, str]  # head, number of candidates, seconds, CPU seconds, metric
WRITE_CHUNK = 250  # images that are generated at a time


def write_array(path: Path, name: str, labels: np.ndarray, means: np.ndarray, seed: int) -> SplitFeatures:
    """Write synthetic features of the array `name` to a .npy file, and open it as the cache does: the means (K, ...) of
    the labels, (n,) of images or (n, N) of their patches, and noise."""
    (shape, dtype), draw = ARRAYS[name], np.random.default_rng(seed)
    file = np.lib.format.open_memmap(path, "w+", dtype, (len(labels), *shape))
    for start in range(0, len(labels), WRITE_CHUNK):
        chunk = labels[start : start + WRITE_CHUNK]
        file[start : start + len(chunk)] = means[chunk] + draw.standard_normal((len(chunk), *shape), np.float32)
    file.flush()
    return SplitFeatures(np.load(path, mmap_mode="r"), {}, path, reused=True)


def write_features(folder: Path, labels: np.ndarray, classes: int, seed: int) -> dict[str, SplitFeatures]:
    """Write synthetic features of images with labels (n,) to .npy files, and open them as the cache does."""
    features = {}
    for index, (name, (shape, _)) in enumerate(ARRAYS.items()):
        means = SIGNAL * np.random.default_rng(index).standard_normal((classes, *shape), np.float32)
        if name == TOKENS:
            means[:, 1:] = means[:, :1]  # all patches have the mean of the first one
        features[name] = write_array(folder / f"{name}-{seed}.npy", name, labels, means, 10 * seed + index)
    return features


def measure_seconds(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """Call a function; return its result, the seconds, and the CPU seconds of all threads."""
    started, cpu_started = time.perf_counter(), time.process_time()
    result = run()
    return result, time.perf_counter() - started, time.process_time() - cpu_started


def build_task(images: int, evaluated: int, classes: int) -> ProtocolTask:
    """Build the input of the protocol for images without pixels, whose labels are drawn evenly."""
    draw = np.random.default_rng(0)
    splits = {
        name: ArraySplit(np.zeros((count, 1, 1, 3), np.uint8), draw.permutation(np.arange(count) % classes))
        for name, count in (("train", images), ("test", evaluated))
    }
    names = tuple(f"class {index}" for index in range(classes))
    preprocess = ImagePreprocess((32, 32))
    model = create_untrained_model("ViT-32x1/8", image_size=32)
    return ProtocolTask(
        "encoder",
        "synthetic",
        data=Data("synthetic", names, dict(splits)),
        split="test",
        bundle=Bundle(model, Classification(names), preprocess),
        options=ProtocolOptions("heads"),
        evaluation_settings=EvaluationSettings(inference_options=InferenceOptions("cpu", "fp32")),
    )


def measure_heads(folder: Path, images: int, evaluated: int, classes: int) -> list[HeadRow]:
    """Fit every head on features in `folder`. Returns one row per head."""
    configure_process()
    task = build_task(images, evaluated, classes)
    labels = [task.training_split.labels, task.evaluated_split.labels]
    train, test = (write_features(folder, label, classes, seed) for seed, label in enumerate(labels))
    subsets = task.hold_out(labels[0], np.arange(images))
    data = HeadData(task, train, test, fit_rows=subsets["train"], dev_rows=subsets["dev"])
    rows = []
    for fit in HEADS.values():
        results, seconds, cpu_seconds = measure_seconds(partial(fit, data))
        candidates = sum(len(result.candidates) for result in results)
        rows.append((results[-1].head, candidates, seconds, cpu_seconds, results[-1].report.headline_text))
    return rows


@dataclass(frozen=True)
class CachedMapTask(ProtocolTask):
    """The input of the protocol for class maps, whose patch tokens are already computed, by split."""

    tokens: dict[str, SplitFeatures]

    def feature_arrays(self, name: str, split: Split, encoder: FrozenEncoder) -> dict[str, SplitFeatures]:
        """Return the patch tokens of a split."""
        return {TOKENS: self.tokens[name]}


@dataclass(frozen=True)
class PatchMapSplit(ArraySplit):
    """Images without pixels, whose patches have the classes `patches` (n, 14, 14)."""

    patches: np.ndarray

    def target(self, sample: int) -> Target:
        """Return the class map of an image of 224 x 224 pixels."""
        classes = self.patches[sample].repeat(16, 0).repeat(16, 1)
        return create_empty_target(classes.shape, classes)


def draw_map_split(count: int, classes: int, seed: int) -> PatchMapSplit:
    """Draw images of four rectangles, each of one class."""
    draw = np.random.default_rng(seed)
    patches = draw.integers(0, classes, (count, 2, 2), dtype=np.int32).repeat(7, 1).repeat(7, 2)
    labels = np.zeros((count, classes), np.float32)
    np.put_along_axis(labels, patches.reshape(count, -1).astype(np.int64), 1, 1)
    return PatchMapSplit(np.zeros((count, 1, 1, 3), np.uint8), labels, patches)


def write_map_tokens(folder: Path, split: PatchMapSplit, classes: int, seed: int) -> SplitFeatures:
    """Write the patch tokens of images to a .npy file, and open it as the cache does."""
    means = SIGNAL * np.random.default_rng(0).standard_normal((classes, ARRAYS[TOKENS][0][1]), np.float32)
    labels = split.patches.reshape(len(split), -1)
    return write_array(folder / f"maps-{seed}.npy", TOKENS, labels, means, seed)


def measure_map_heads(folder: Path, images: int, evaluated: int, classes: int) -> list[HeadRow]:
    """Read the class maps and fit every segmentation head on tokens in `folder`. Returns a row for each."""
    configure_process()
    splits = {"train": draw_map_split(images, classes, 0), "test": draw_map_split(evaluated, classes, 1)}
    names = tuple(f"class {index}" for index in range(classes))
    model = create_untrained_model("ViT-384x1/16", image_size=224)
    task = CachedMapTask(
        "encoder",
        "synthetic",
        data=Data("synthetic", names, dict(splits)),
        split="test",
        bundle=Bundle(model, Segmentation(names), ImagePreprocess((224, 224))),
        options=ProtocolOptions("heads"),
        evaluation_settings=EvaluationSettings(inference_options=InferenceOptions("cpu", "fp32")),
        tokens={
            name: write_map_tokens(folder, split, classes, seed) for seed, (name, split) in enumerate(splits.items())
        },
    )
    (data, _), seconds, cpu_seconds = measure_seconds(partial(encode_maps, task))
    rows = [("class maps", 0, seconds, cpu_seconds, "")]
    for fit in (fit_patch_neighbours, fit_linear_maps):
        result, seconds, cpu_seconds = measure_seconds(partial(fit, data))
        rows.append((result.head, len(result.candidates), seconds, cpu_seconds, result.report.headline_text))
    return rows


def build_page(rows: list[HeadRow], arguments: argparse.Namespace, command: str) -> str:
    """Build the Markdown page of the results."""
    threads = torch.get_num_threads()
    arrays = [ARRAYS[TOKENS]] if arguments.maps else ARRAYS.values()
    size = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in arrays)
    description = (
        f"{arguments.images:,} training images (a fifth chooses settings) and {arguments.evaluated:,} evaluated images "
        f"of {arguments.classes} classes;\n{size:,} bytes per image. CPU time is that of all threads."
    )
    lines = [
        "# Heads on cached features",
        "",
        f"{get_processor_name()}, {threads} threads, torch {torch.__version__}.\n`{command}`",
        "",
        description,
        "",
        "| head | candidates or draws | s | CPU s | result |",
        "|---|---|---|---|---|",
        *(f"| {name} | {count} | {seconds:.1f} | {cpu:.1f} | {metric} |" for name, count, seconds, cpu, metric in rows),
        f"| all | | {sum(row[2] for row in rows):.1f} | {sum(row[3] for row in rows):.1f} | |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000, help="training images")
    parser.add_argument("--evaluated", type=int, default=2_000, help="evaluated images")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--maps", action="store_true", help="heads that segment images")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", help="folder of the features, 2 GB (default: a temporary one)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measure = measure_map_heads if arguments.maps else measure_heads
        rows = measure(Path(folder), arguments.images, arguments.evaluated, arguments.classes)
    options = [f"--{name} {getattr(arguments, name)}" for name in ("images", "evaluated", "classes", "threads")]
    options += ["--maps"] if arguments.maps else []
    page = build_page(rows, arguments, f"python benchmarks/frozen_heads.py {' '.join(options)}")
    print(page)
    if arguments.out:
        arguments.out.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
