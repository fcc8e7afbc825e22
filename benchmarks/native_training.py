"""Training on pictures of many aspects: at their own aspect ratio, packed into rows, beside squashed to squares.

    python benchmarks/native_training.py --out benchmarks/results/DATE-native-training-HARDWARE.md

Without FOLDER the pictures are made: one of scikit-learn's handwritten digits, upright and undistorted, on a canvas whose aspect
ratio is drawn log-evenly from 1:4 to 4:1 (its area is always the same), among two fragments of other digits and two
strokes. The class says nothing about the shape of the canvas. Test pictures have digits that no training picture has. Squashing
draws the digits out by up to four; that it harms is so by the making, and how much is what is measured. FOLDER, of
classes in train/ and test/ or val/, is read in its place.

Speed: forward and backward passes over the same --batch pictures, by the processor time of one thread, in alternating rounds;
decoding left out. The ways are squares in a batch, and pictures at their own aspect with at most as many patches: packed rows with
attention picture after picture (what `train --native-aspect` does on a CPU), rows under a mask, and each picture alone.

Accuracy: `vitreous train` for --epochs with the same recipe, seed and --tokens a picture, squashed (`--preprocess.fit squash`) and with
`--native-aspect`; each model is then asked about the test pictures in both ways.
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
IMAGES_PER_CLASS = {"train": 300, "test": 100}  # pictures of each class


def draw_canvas(rng: np.random.Generator, digit: np.ndarray, others: np.ndarray) -> Image.Image:
    """A digit (8, 8) in 0..16 on a canvas of random aspect, with fragments of `others` (n, 8, 8) and strokes."""
    ratio = math.exp(rng.uniform(-1, 1) * math.log(MAX_ASPECT_RATIO))
    height, width = round(math.sqrt(CANVAS_AREA / ratio)), round(math.sqrt(CANVAS_AREA * ratio))
    pixels = np.zeros((height, width), np.float32)

    def paste_part(part: np.ndarray, side: int) -> None:
        enlarged = Image.fromarray((part * 255 / 16).clip(0, 255).astype(np.uint8)).resize((side, side))
        top, left = rng.integers(0, height - side + 1), rng.integers(0, width - side + 1)
        place = pixels[top : top + side, left : left + side]
        np.maximum(place, np.asarray(enlarged, np.float32), out=place)

    for other in others:
        row, column = rng.integers(0, 5, 2)
        paste_part(other[row : row + 4, column : column + 4], DIGIT_SIZE // 2)
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


def write_data(home: Path, counts: dict[str, int]) -> Path:
    """Write the made pictures, home/SPLIT/CLASS/NUMBER.png."""
    images, labels = (np.asarray(part) for part in load_digits(return_X_y=True))
    images, rng = images.reshape(-1, 8, 8), np.random.default_rng(0)
    own = {"test": np.arange(len(labels)) % 5 == 0, "train": np.arange(len(labels)) % 5 != 0}
    for split, count in counts.items():
        for label in range(10):
            folder = home / split / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            known, others = images[own[split] & (labels == label)], images[own[split]]
            for number in range(count):
                digit, clutter = known[rng.integers(len(known))], others[rng.integers(len(others), size=2)]
                draw_canvas(rng, digit, clutter).save(folder / f"{number:04d}.png")
    return home


def step_ways(
    given: argparse.Namespace, split: Split, classes: tuple[str, ...]
) -> tuple[dict[str, Callable[[], Any]], str]:
    """The ways by name, each of which makes one forward and one backward pass over the same pictures; and a line on
    what they are given."""
    side = math.isqrt(given.tokens)
    config = config_from_name(given.model)
    config = replace_known_fields(
        config_from_name(given.model, side * config.patch[0]),
        {"pool": "mean", "class_token": False, "classes": len(classes)},
    )  # so that every way computes all of the last block
    torch.manual_seed(0)
    precision = pick_precision("auto", "cpu")
    model = build_model(config).train().to(DTYPES[precision])
    model.any_size = True
    squash = ImagePreprocess(config.image, 3, fit="squash")
    native = NativePreprocess(config.image, 3, tokens=given.tokens, patch=config.patch)
    numbers = np.random.default_rng(0).permutation(len(split))[: given.batch]
    raw = [split.raw(int(number)) for number in numbers]
    squares = torch.stack([squash.transform(one) for one in raw]).to(model.head.weight.dtype)
    pictures = [native.transform(one).to(model.head.weight.dtype) for one in raw]
    labels = torch.from_numpy(split.labels[numbers])
    counts = [math.prod(picture.shape[1:]) // math.prod(config.patch) for picture in pictures]

    def step(answer: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        def act() -> None:
            model.zero_grad()
            torch.nn.functional.cross_entropy(answer().float(), labels).backward()

        return act

    about = (
        f"{given.batch} pictures of {len({picture.shape for picture in pictures})} sizes, {given.model} in {precision}"
    )
    about += f": squares of {side**2} patches, own aspects of {min(counts)} to {max(counts)}, {statistics.mean(counts):.1f} on average"
    return {
        "squashed, in a batch": step(lambda: model(squares)),
        "own aspect, packed": step(lambda: PackedViT(model, masked=False)(pictures)),
        "own aspect, packed, by a mask": step(lambda: PackedViT(model, masked=True)(pictures)),
        "own aspect, each alone": step(lambda: torch.cat([model(picture[None]) for picture in pictures])),
    }, about


def measure_medians(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median processor seconds of each way, in alternating rounds; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, act in ways.items():
            began = time.process_time()
            act()
            seconds[name].append(time.process_time() - began)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def train_both(given: argparse.Namespace, data: Path, work: Path) -> list[tuple[str, float, float]]:
    """Train squashed and at the pictures' own aspect -> of each its name, top-1 on squashed test pictures and on such
    at their own aspect."""
    side, rows = math.isqrt(given.tokens) * config_from_name(given.model).patch[0], []
    ways = {
        "squashed": {"image_size": side, "settings": {"preprocess.fit": ["squash"]}},
        "own aspect": {"native_aspect": True, "tokens": str(given.tokens)},
    }
    for name, options in ways.items():
        settings = {"views.flip": [str(0.5 * (given.folder is not None))], **options.pop("settings", {})}
        out = work / name.replace(" ", "-")
        shared = {
            "recipe": "small",
            "model": given.model,
            "epochs": given.epochs,
            "workers": 0,
            "shards": 1,
            "ema": 0.99,
            "batch_size": 32,
            "patch_dropout": 0.0,
        }
        vitreous.train(data, out=str(out), progress=False, settings=settings, **shared, **options)
        split = "test" if (data / "test").is_dir() else "val"
        squares = out if name == "squashed" else save_squashing_bundle(out, work / "squares")
        asked = {"squashed": squares, "own aspect": WeightsSource(str(out), native_aspect=True, tokens=given.tokens)}
        top1 = [float(evaluate(source, data, split=split)[split]["top1"]) for source in asked.values()]
        rows.append((name, top1[0], top1[1]))
    return rows


def save_squashing_bundle(run: Path, place: Path) -> Path:
    """The bundle of a run, changed so that it squashes pictures to its own square."""
    bundle = load_bundle(run / "model")
    replace(bundle, preprocess=bundle.preprocess.with_one_size()).save(place)
    return place


def main() -> None:
    """Race, train, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--model", default="ViT-64x4/8")
    parser.add_argument("--tokens", type=int, default=36)
    parser.add_argument("--epochs", type=float, default=14)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    configure_process()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        work = given.work or Path(scratch)
        data = given.folder or write_data(work / "pictures", IMAGES_PER_CLASS)
        opened = open_data(str(data))
        ways, about = step_ways(given, opened.split("train"), opened.classes)
        page = build_page(given, about, measure_medians(ways, given.rounds), train_both(given, data, work))
    print(page)
    if given.out:
        given.out.write_text(page)


def build_page(given: argparse.Namespace, about: str, medians: dict[str, float], rows: list[tuple]) -> str:
    """The page."""
    first = next(iter(medians.values()))
    command = "python benchmarks/native_training.py" + (" FOLDER" if given.folder else "")
    lines = [
        f"# Training at own aspects, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, 1 thread, torch {torch.__version__}. {about}.",
        f"Forward and backward passes, processor time, medians of {given.rounds} alternating rounds.",
        "",
        f"    {command}",
        "",
        "| way | s a batch | images/s to squashed |",
        "|---|---|---|",
        *(f"| {name} | {value:.3f} | {first / value:.2f} |" for name, value in medians.items()),
        "",
        f"Recipe `small` in batches of 32 with all patches, {given.model}, {given.tokens} tokens a picture, {given.epochs:g} epochs, seed 0; top-1 on the test pictures.",
        "",
        "| trained | asked squashed | asked at own aspect |",
        "|---|---|---|",
        *(f"| {name} | {100 * a:.1f} % | {100 * b:.1f} % |" for name, a, b in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
