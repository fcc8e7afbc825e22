"""Training on images of many aspect ratios: packed at their native aspect ratio, compared with squashed to squares.

    python benchmarks/native_training.py --out benchmarks/results/DATE-native-training-HARDWARE.md

Without FOLDER, images are synthetic: one of scikit-learn's handwritten digits, upright and undistorted, on a canvas of
constant area whose aspect ratio is log-uniform from 1:4 to 4:1, with two fragments of other digits and two strokes. The
class does not depend on the shape of the canvas. Test images have digits that no training image has. Squashing
stretches the digits by up to four, which harms accuracy by construction; the benchmark measures how much. With FOLDER,
its class folders in train/ and test/ or val/ are used.

Speed: forward and backward passes over the same --batch images, in processor time of one thread, in alternating rounds,
without decoding. The ways are squares in a batch, and images at their native aspect ratio with at most as many patches:
packed with attention per image (the CPU default of `train --native-aspect`), packed with a mask, and one by one.

Accuracy: `vitreous train` for --epochs with the same recipe, seed and --tokens per image, squashed (`--preprocess.fit
squash`) and with `--native-aspect`; each model is evaluated on the test images in both ways.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits

import vitreous
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.modalities.native import NativePreprocess
from vitreous.data.sources import open_data
from vitreous.data.split import Split
from vitreous.models.config import replace_known_fields
from vitreous.models.names import config_from_name
from vitreous.models.packed import PackedViT
from vitreous.models.zoo import build_model
from vitreous.reports.evaluate import evaluate
from vitreous.system.machine import DTYPES, configure_process, get_processor_name, pick_precision
from vitreous.weights.bundle import load_bundle
from vitreous.weights.options import WeightsSource

CANVAS_AREA, DIGIT_SIZE, MAX_ASPECT_RATIO = (
    2**13,
    44,
    4.0,
)  # pixels of a canvas, pixels of a digit, and the largest aspect ratio
IMAGES_PER_CLASS = {"train": 300, "test": 100}  # images per class


def draw_canvas(rng: np.random.Generator, digit: np.ndarray, others: np.ndarray) -> Image.Image:
    """A digit (8, 8) in 0..16 on a canvas of random aspect ratio, with fragments of `others` (n, 8, 8) and strokes."""
    ratio = math.exp(rng.uniform(-1, 1) * math.log(MAX_ASPECT_RATIO))
    height, width = round(math.sqrt(CANVAS_AREA / ratio)), round(math.sqrt(CANVAS_AREA * ratio))
    pixels = np.zeros((height, width), np.float32)

    def paste_part(part: np.ndarray, side: int) -> None:
        enlarged = Image.fromarray((part * 255 / 16).clip(0, 255).astype(np.uint8)).resize((side, side))
        top, left = rng.integers(0, height - side + 1), rng.integers(0, width - side + 1)
        place = pixels[top : top + side, left : left + side]
        np.maximum(place, np.asarray(enlarged, np.float32), out=place)

    for fragment_digit in others:
        row, column = rng.integers(0, 5, 2)
        paste_part(fragment_digit[row : row + 4, column : column + 4], DIGIT_SIZE // 2)
    for _ in range(2):
        angle, length = rng.uniform(0, np.pi), rng.uniform(10, 30)
        steps = np.linspace(0, length, 60)
        rows = (rng.uniform(0, height) + steps * np.sin(angle)).astype(int)
        columns = (rng.uniform(0, width) + steps * np.cos(angle)).astype(int)
        inside = (rows < height - 1) & (columns < width - 1) & (rows >= 0) & (columns >= 0)
        for down, across in ((0, 0), (0, 1), (1, 0), (1, 1)):
            pixels[rows[inside] + down, columns[inside] + across] = 160
    paste_part(digit, DIGIT_SIZE)
    return Image.fromarray((pixels + rng.normal(0, 12, pixels.shape)).clip(0, 255).astype(np.uint8))


def write_data(output: Path, counts: dict[str, int]) -> Path:
    """Write the synthetic images, output/SPLIT/CLASS/NUMBER.png."""
    images, labels = (np.asarray(array) for array in load_digits(return_X_y=True))
    images, rng = images.reshape(-1, 8, 8), np.random.default_rng(0)
    split_masks = {"test": np.arange(len(labels)) % 5 == 0, "train": np.arange(len(labels)) % 5 != 0}
    for split, count in counts.items():
        for label in range(10):
            folder = output / split / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            class_digits, split_digits = images[split_masks[split] & (labels == label)], images[split_masks[split]]
            for index in range(count):
                digit, clutter = (
                    class_digits[rng.integers(len(class_digits))],
                    split_digits[rng.integers(len(split_digits), size=2)],
                )
                draw_canvas(rng, digit, clutter).save(folder / f"{index:04d}.png")
    return output


def build_steps(
    args: argparse.Namespace, split: Split, classes: tuple[str, ...]
) -> tuple[dict[str, Callable[[], Any]], str]:
    """Functions that run one forward and one backward pass over the same images, by name, and a description of their
    inputs."""
    side = math.isqrt(args.tokens)
    config = config_from_name(args.model)
    config = replace_known_fields(
        config_from_name(args.model, side * config.patch[0]),
        {"pool": "mean", "class_token": False, "classes": len(classes)},
    )  # so that every way computes the complete last block
    torch.manual_seed(0)
    precision = pick_precision("auto", "cpu")
    model = build_model(config).train().to(DTYPES[precision])
    model.any_size = True
    squash = ImagePreprocess(config.image, 3, fit="squash")
    native = NativePreprocess(config.image, 3, tokens=args.tokens, patch=config.patch)
    samples = np.random.default_rng(0).permutation(len(split))[: args.batch]
    raw = [split.raw(int(sample)) for sample in samples]
    squares = torch.stack([squash.transform(raw_image) for raw_image in raw]).to(model.head.weight.dtype)
    images = [native.transform(raw_image).to(model.head.weight.dtype) for raw_image in raw]
    labels = torch.from_numpy(split.labels[samples])
    counts = [math.prod(image.shape[1:]) // math.prod(config.patch) for image in images]

    def step(forward: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        def act() -> None:
            model.zero_grad()
            torch.nn.functional.cross_entropy(forward().float(), labels).backward()

        return act

    about = f"{args.batch} images of {len({image.shape for image in images})} sizes, {args.model} in {precision}"
    about += f": squares of {side**2} patches, native aspect ratios with {min(counts)} to {max(counts)}, {statistics.mean(counts):.1f} on average"
    return {
        "squashed, batched": step(lambda: model(squares)),
        "native aspect, packed": step(lambda: PackedViT(model, masked=False)(images)),
        "native aspect, packed with a mask": step(lambda: PackedViT(model, masked=True)(images)),
        "native aspect, one by one": step(lambda: torch.cat([model(image[None]) for image in images])),
    }, about


def measure_medians(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median processor seconds of each way in alternating rounds; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, act in ways.items():
            began = time.process_time()
            act()
            seconds[name].append(time.process_time() - began)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def train_both(args: argparse.Namespace, data: Path, work: Path) -> list[tuple[str, float, float]]:
    """Train squashed and at the native aspect ratio; returns for each its name, and top-1 on squashed and on native
    test images."""
    side, rows = math.isqrt(args.tokens) * config_from_name(args.model).patch[0], []
    ways = {
        "squashed": {"image_size": side, "settings": {"preprocess.fit": ["squash"]}},
        "native aspect": {"native_aspect": True, "tokens": str(args.tokens)},
    }
    for name, options in ways.items():
        settings = {"views.flip": [str(0.5 * (args.folder is not None))], **options.pop("settings", {})}
        out = work / name.replace(" ", "-")
        shared = {
            "recipe": "small",
            "model": args.model,
            "epochs": args.epochs,
            "workers": 0,
            "shards": 1,
            "ema": 0.99,
            "batch_size": 32,
            "patch_dropout": 0.0,
        }
        vitreous.train(data, out=str(out), progress=False, settings=settings, **shared, **options)
        split = "test" if (data / "test").is_dir() else "val"
        squares = out if name == "squashed" else save_squashing_bundle(out, work / "squares")
        sources = {
            "squashed": squares,
            "native aspect": WeightsSource(str(out), native_aspect=True, tokens=args.tokens),
        }
        top1 = [float(evaluate(source, data, split=split)[split]["top1"]) for source in sources.values()]
        rows.append((name, top1[0], top1[1]))
    return rows


def save_squashing_bundle(run: Path, folder: Path) -> Path:
    """Save the bundle of a run with preprocessing that squashes images to its square size."""
    bundle = load_bundle(run / "model")
    replace(bundle, preprocess=bundle.preprocess.with_one_size()).save(folder)
    return folder


def main() -> None:
    """Measure the speed, train, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--model", default="ViT-64x4/8")
    parser.add_argument("--tokens", type=int, default=36)
    parser.add_argument("--epochs", type=float, default=14)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    configure_process()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        data = args.folder or write_data(work / "pictures", IMAGES_PER_CLASS)
        opened = open_data(str(data))
        ways, about = build_steps(args, opened.split("train"), opened.classes)
        page = build_page(args, about, measure_medians(ways, args.rounds), train_both(args, data, work))
    print(page)
    if args.out:
        args.out.write_text(page)


def build_page(args: argparse.Namespace, about: str, medians: dict[str, float], rows: list[tuple]) -> str:
    """Build the page."""
    squashed_seconds = next(iter(medians.values()))
    command = "python benchmarks/native_training.py" + (" FOLDER" if args.folder else "")
    lines = [
        f"# Training at native aspect ratios, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, 1 thread, torch {torch.__version__}. {about}.",
        f"Forward and backward passes, processor time, medians of {args.rounds} alternating rounds.",
        "",
        f"    {command}",
        "",
        "| way | s per batch | images/s relative to squashed |",
        "|---|---|---|",
        *(f"| {name} | {value:.3f} | {squashed_seconds / value:.2f} |" for name, value in medians.items()),
        "",
        f"Recipe `small` in batches of 32 with all patches, {args.model}, {args.tokens} tokens per image, {args.epochs:g} epochs, seed 0; top-1 on the test images.",
        "",
        "| training | test squashed | test at native aspect |",
        "|---|---|---|",
        *(f"| {name} | {100 * a:.1f} % | {100 * b:.1f} % |" for name, a, b in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
