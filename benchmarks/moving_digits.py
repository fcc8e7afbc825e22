"""Generated clips of moving digits: are the digits recognisable in each frame, and do they move like real ones?

    python benchmarks/moving_digits.py --work DIR --rows ROWS.jsonl --out
    benchmarks/results/DATE-moving-digits-HARDWARE.md

Two of scikit-learn's handwritten digits, of one class, bounce in 32 x 32 pixels for 16 frames. Each has a random
direction, and a speed uniform from 0.5 to 2.5 pixels per frame (after arXiv:1502.04681). Test clips have digits that no
training clip has. `--recipe sit` trains each of --models on the clips that fit into --minutes of one core by processor
time (benchmarks/pretraining.py), with OMP_NUM_THREADS=1. From each, --samples clips are generated, equally many per
class, with and without guidance:

- recognised: a support vector machine classifies each frame. It is trained on frames of real training clips, cropped to
  the two windows of a digit's size with the most ink.
- motion: pixels between the centroids of consecutive frames. Two distributions are compared by the Wasserstein
  distance, in pixels.

Rows in ROWS are not measured again. DIR has the data, the runs, and MODEL-GUIDANCE.gif and .png with a clip of each
class.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image
from pretraining import NEVER, measure_processor_rate, train_or_load
from scipy.ndimage import shift
from scipy.stats import wasserstein_distance
from sklearn.datasets import load_digits
from sklearn.svm import SVC

import vitreous
from vitreous.data.decoding.clips import open_clip
from vitreous.data.sources import open_data
from vitreous.inference.image_grid import write_gif
from vitreous.inference.image_sampler import build_sampler
from vitreous.inference.open_model import open_generator
from vitreous.reports.answers import EvaluationSettings
from vitreous.reports.generated import GenerationOptions, generate_images
from vitreous.system.machine import get_processor_name

FRAME_SIZE, NUM_FRAMES, DIGIT_SIZE = 32, 16, 12  # size of a frame, frames, size of a digit
SPEEDS = (0.5, 2.5)  # pixels per frame
CLIPS_PER_CLASS = {"train": 500, "test": 20}  # clips per class
SAMPLING_STEPS, GUIDANCE_SCALES = 13, (1.0, 2.0)  # heun; 25 model evaluations
RATE_STEPS = 16  # steps of the run that measures clips per processor second
READER_FRAMES = (3, 12)  # frames of each training clip on which the frame classifier trains
MODELS = ("DiT-96x6/2x4x4-alternating", "DiT-96x6/2x4x4")


def draw_path(rng: np.random.Generator, frames: int) -> np.ndarray:
    """Rows and columns (T, 2) of the corner of a digit that bounces off the edges."""
    room, angle = FRAME_SIZE - DIGIT_SIZE, rng.uniform(0, 2 * np.pi)
    velocity = rng.uniform(*SPEEDS) * np.array([np.sin(angle), np.cos(angle)])
    positions = rng.uniform(0, room, 2) + velocity * np.arange(frames)[:, None]
    return room - np.abs(positions % (2 * room) - room)


def draw_moving_digits(rng: np.random.Generator, digits: np.ndarray, frames: int = NUM_FRAMES) -> np.ndarray:
    """Images (2, DIGIT, DIGIT) in 0..255 -> a clip (T, SIDE, SIDE) uint8 in which both bounce."""
    canvas = np.zeros((frames, FRAME_SIZE, FRAME_SIZE), np.float32)
    for digit in digits:
        still = np.pad(digit.astype(np.float32), (0, FRAME_SIZE - DIGIT_SIZE))
        moved = [shift(still, position, order=1) for position in draw_path(rng, frames)]
        canvas = np.maximum(canvas, moved)
    return canvas.round().clip(0, 255).astype(np.uint8)


def write_data(output: Path) -> Path:
    """Write the clips as GIFs, output/SPLIT/CLASS/NUMBER.gif, unless they exist."""
    if (output / "complete").is_file():
        return output
    images, labels = load_digits(return_X_y=True)
    enlarged = [
        Image.fromarray((digit.reshape(8, 8) * 255 / 16).astype(np.uint8)).resize((DIGIT_SIZE, DIGIT_SIZE))
        for digit in images
    ]
    digits, rng = np.stack([np.asarray(digit) for digit in enlarged]), np.random.default_rng(0)
    split_masks = {"test": np.arange(len(labels)) % 5 == 0, "train": np.arange(len(labels)) % 5 != 0}
    for split, count in CLIPS_PER_CLASS.items():
        for label in range(10):
            folder = output / split / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            class_digits = digits[split_masks[split] & (labels == label)]
            for index in range(count):
                clip = draw_moving_digits(rng, class_digits[rng.integers(0, len(class_digits), 2)])
                write_gif(folder / f"{index:04d}.gif", [Image.fromarray(frame) for frame in clip], milliseconds=100)
    (output / "complete").touch()
    return output


def read_data(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The clips of a split (n, T, H, W) uint8, and their classes (n,)."""
    files = sorted((folder / split).glob("*/*.gif"))
    clips = [open_clip(file) for file in files]
    pixels = np.stack([clip.read_frames(np.arange(NUM_FRAMES))[..., 0] for clip in clips])
    return pixels, np.array([int(file.parent.name) for file in files])


def extract_digit_windows(frame: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the two windows (DIGIT, DIGIT) of a frame (H, W) with the most ink; the second excludes the pixels of the
    first."""
    remaining = frame.astype(np.float32)
    for _ in range(2):
        ink = sliding_window_view(remaining, (DIGIT_SIZE, DIGIT_SIZE)).sum((2, 3))
        row, column = np.unravel_index(ink.argmax(), ink.shape)
        window = slice(row, row + DIGIT_SIZE), slice(column, column + DIGIT_SIZE)
        yield remaining[window].ravel() / 255
        remaining[window] = 0


class FrameClassifier:
    """Classifies a frame by its two windows; trained on frames of real clips."""

    def __init__(self, clips: np.ndarray, labels: np.ndarray) -> None:
        """(n, T, H, W) uint8 and (n,)."""
        windows = np.stack(
            [window for clip in clips for frame in READER_FRAMES for window in extract_digit_windows(clip[frame])]
        )
        self.machine = SVC(C=10).fit(windows, np.repeat(labels, 2 * len(READER_FRAMES)))

    def read(self, clips: np.ndarray) -> np.ndarray:
        """(n, T, H, W) -> (n, T) classes, by the sum of the votes on both windows."""
        windows = np.stack([window for clip in clips for frame in clip for window in extract_digit_windows(frame)])
        votes = self.machine.decision_function(windows)
        return votes.reshape(*clips.shape[:2], 2, -1).sum(2).argmax(-1)


def compute_motion(clips: np.ndarray) -> np.ndarray:
    """(n, T, H, W) -> (n, T - 1): pixels between the centroids of consecutive frames."""
    ink = clips.astype(np.float64) + 1e-9
    coordinates = np.arange(FRAME_SIZE)
    y, x = ((ink.sum(axis) * coordinates).sum(-1) / ink.sum((2, 3)) for axis in (3, 2))
    return np.hypot(np.diff(y, axis=1), np.diff(x, axis=1))


def compute_clip_metrics(
    clips: np.ndarray, labels: np.ndarray, reader: FrameClassifier, motion: np.ndarray
) -> dict[str, float]:
    """The metrics of clips (n, T, H, W) with classes (n,), given the motion of test clips."""
    right, clip_motion = reader.read(clips) == labels[:, None], compute_motion(clips)
    low, median, high = np.quantile(clip_motion, (0.1, 0.5, 0.9))
    metrics = {"recognised": right.mean(), "whole": right.all(1).mean(), "low": low, "median": median, "high": high}
    distance = wasserstein_distance(clip_motion.ravel(), motion.ravel())
    return {name: float(value) for name, value in (metrics | {"distance": distance}).items()}


def measure_real_clips(data: Path, reader: FrameClassifier, motion: np.ndarray) -> list[dict[str, Any]]:
    """The metrics of real clips: the test split, equally many training clips, and test clips with shuffled frames."""
    test, rng = read_data(data, "test"), np.random.default_rng(0)
    mixed = np.stack([clip[rng.permutation(NUM_FRAMES)] for clip in test[0]])
    clips, labels = (
        array[:: CLIPS_PER_CLASS["train"] // CLIPS_PER_CLASS["test"]] for array in read_data(data, "train")
    )
    clip_sets = {"test clips": test, "training clips": (clips, labels), "test clips, shuffled": (mixed, test[1])}
    return [
        {"clips": name, "number": len(clip_set[1])} | compute_clip_metrics(*clip_set, reader, motion)
        for name, clip_set in clip_sets.items()
    ]


def append_generated_rows(
    args: argparse.Namespace, data: Path, model: str, reader: FrameClassifier, motion: np.ndarray
) -> None:
    """Train a model if its run is missing, and append the missing rows for each guidance."""
    folder = args.work / model.replace("/", "-")
    ways: dict[str, Any] = {"recipe": args.recipe, "model": model, "frames": NUM_FRAMES, "progress": False}
    ways |= {"device": "cpu", "settings": {"model.channels": ["1"]}}
    rate = measure_processor_rate(folder, RATE_STEPS, str(data), **ways)
    count = len(open_data(str(data)).splits["train"])
    epochs = round(rate * 60 * args.minutes / count, 2)
    summary = train_or_load(folder / "run", data, epochs=epochs, save_every=200, evaluate_every=NEVER, keep=1, **ways)
    for guidance in GUIDANCE_SCALES:
        if any((row["clips"], row["guidance"]) == (model, guidance) for row in read_rows(args.rows)):
            continue
        bundle, began = open_generator(folder / "run"), time.process_time()
        options = GenerationOptions(guidance=guidance, steps=SAMPLING_STEPS, samples=args.samples)
        batches = list(generate_images(build_sampler(bundle, "cpu"), 10, options, EvaluationSettings()))
        seconds = time.process_time() - began
        labels, clips = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        row = {"clips": model, "number": len(labels), "guidance": guidance, "minutes": args.minutes}
        row |= {"epochs": epochs, "steps": summary["steps"], "error": summary["val"]["denoising_error"]}
        row |= {"seconds": seconds, "recipe": args.recipe} | compute_clip_metrics(clips[..., 0], labels, reader, motion)
        with args.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
        for suffix in ("gif", "png"):
            path = args.work / f"{folder.name}-{guidance:g}.{suffix}"
            vitreous.sample(folder / "run", path, progress=False, guidance=guidance, steps=SAMPLING_STEPS, device="cpu")


def read_rows(rows: Path) -> list[dict[str, Any]]:
    """The stored rows."""
    return [json.loads(line) for line in rows.read_text("utf-8").splitlines()] if rows.is_file() else []


def build_page(real: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Build the table."""
    first_row, total = rows[0], sum(CLIPS_PER_CLASS.values()) * 10
    lines = [
        f"# Generated clips of moving digits, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}. {total:,} clips of {NUM_FRAMES} frames of {FRAME_SIZE} x {FRAME_SIZE} pixels, two digits of one class in",
        f"each. `--recipe {first_row['recipe']}`,",
        f"one run for each model, seed 0, for {first_row['minutes']:g} minutes of one core by processor time; {first_row['number']} clips, heun with {SAMPLING_STEPS} steps.",
        "A support vector machine classifies single frames. Motion is that of a frame's centroid, in pixels per frame; the distance is the Wasserstein distance",
        "to that of the test clips.",
        "",
        "    python benchmarks/moving_digits.py --work DIR --rows ROWS.jsonl",
        "",
        "| clips | epochs | guidance | frames recognised | clips with all frames recognised | motion: 10 %, median, 90 % | distance | s per clip, one core |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in [*real, *rows]:
        generated = "guidance" in row
        cells = [row["clips"], *((f"{row['epochs']:.1f}", f"{row['guidance']:g}") if generated else ("", ""))]
        cells += [f"{row['recognised']:.1%}", f"{row['whole']:.1%}"]
        cells += [f"{row['low']:.2f}, {row['median']:.2f}, {row['high']:.2f}", f"{row['distance']:.3f}"]
        lines.append("| " + " | ".join([*cells, f"{row['seconds'] / row['number']:.2f}" if generated else ""]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the missing rows, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the clips and runs")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines file to which rows are appended")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--recipe", default="sit", choices=("sit", "dit"))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    data = write_data(args.work / "clips")
    reader, motion = FrameClassifier(*read_data(data, "train")), compute_motion(read_data(data, "test")[0])
    real = measure_real_clips(data, reader, motion)
    for model in args.models:
        append_generated_rows(args, data, model, reader, motion)
    text = build_page(real, read_rows(args.rows))
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
