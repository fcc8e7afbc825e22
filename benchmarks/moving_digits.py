"""Clips of moving digits, generated: does each frame show the digits that were asked for, and do they move as real ones do?

    python benchmarks/moving_digits.py --work DIR --rows ROWS.jsonl --out benchmarks/results/DATE-moving-digits-HARDWARE.md

Two of scikit-learn's handwritten digits, of one class, bounce in 32 x 32 pixels for 16 frames, each in a direction of
its own at a speed that is drawn evenly from 0.5 to 2.5 pixels a frame (after arXiv:1502.04681). Test clips have digits
that no training clip has. `--recipe sit` trains each of --models for the clips that --minutes hold on one core by processor time
(benchmarks/pretraining.py), with OMP_NUM_THREADS=1. Of each, --samples clips are made, as many of each class, with and without
guidance:

- recognised: a support vector machine reads the class from each frame by itself. It is trained on single frames of real
  training clips, cut to the two windows of a digit's size that hold the most ink.
- motion: by how many pixels the centroid of a frame lies from that of the frame before. The distance of two
  distributions of it is Wasserstein's, in pixels.

Rows that ROWS has are not made again. DIR has, beside the data and the runs, MODEL-GUIDANCE.gif and .png of a clip of each class.
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

FRAME_SIZE, NUM_FRAMES, DIGIT_SIZE = 32, 16, 12  # pixels of a frame, frames, pixels of a digit
SPEEDS = (0.5, 2.5)  # pixels a frame
CLIPS_PER_CLASS = {"train": 500, "test": 20}  # of each class
SAMPLING_STEPS, GUIDANCE_SCALES = 13, (1.0, 2.0)  # of heun: 25 answers
RATE_STEPS = 16  # steps that count the clips of a processor second
READER_FRAMES = (3, 12)  # frames of each training clip that the reader learns from
MODELS = ("DiT-96x6/2x4x4-alternating", "DiT-96x6/2x4x4")


def draw_path(rng: np.random.Generator, frames: int) -> np.ndarray:
    """Rows and columns (T, 2) of the corner of a digit that bounces off the edges."""
    room, angle = FRAME_SIZE - DIGIT_SIZE, rng.uniform(0, 2 * np.pi)
    velocity = rng.uniform(*SPEEDS) * np.array([np.sin(angle), np.cos(angle)])
    places = rng.uniform(0, room, 2) + velocity * np.arange(frames)[:, None]
    return room - np.abs(places % (2 * room) - room)


def moving_digits(rng: np.random.Generator, digits: np.ndarray, frames: int = NUM_FRAMES) -> np.ndarray:
    """Images (2, DIGIT, DIGIT) in 0..255 -> a clip (T, SIDE, SIDE) uint8 in which both bounce."""
    canvas = np.zeros((frames, FRAME_SIZE, FRAME_SIZE), np.float32)
    for digit in digits:
        still = np.pad(digit.astype(np.float32), (0, FRAME_SIZE - DIGIT_SIZE))
        moved = [shift(still, place, order=1) for place in draw_path(rng, frames)]
        canvas = np.maximum(canvas, moved)
    return canvas.round().clip(0, 255).astype(np.uint8)


def write_data(home: Path) -> Path:
    """Write the clips as GIFs, home/SPLIT/CLASS/NUMBER.gif, unless they are there."""
    if (home / "complete").is_file():
        return home
    images, labels = load_digits(return_X_y=True)
    enlarged = [
        Image.fromarray((one.reshape(8, 8) * 255 / 16).astype(np.uint8)).resize((DIGIT_SIZE, DIGIT_SIZE))
        for one in images
    ]
    digits, rng = np.stack([np.asarray(one) for one in enlarged]), np.random.default_rng(0)
    own = {"test": np.arange(len(labels)) % 5 == 0, "train": np.arange(len(labels)) % 5 != 0}
    for split, count in CLIPS_PER_CLASS.items():
        for label in range(10):
            folder = home / split / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            known = digits[own[split] & (labels == label)]
            for number in range(count):
                clip = moving_digits(rng, known[rng.integers(0, len(known), 2)])
                write_gif(folder / f"{number:04d}.gif", [Image.fromarray(frame) for frame in clip], milliseconds=100)
    (home / "complete").touch()
    return home


def read_data(home: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The clips of a split (n, T, H, W) uint8, and their classes (n,)."""
    files = sorted((home / split).glob("*/*.gif"))
    clips = [open_clip(file) for file in files]
    pixels = np.stack([clip.read_frames(np.arange(NUM_FRAMES))[..., 0] for clip in clips])
    return pixels, np.array([int(file.parent.name) for file in files])


def extract_digit_windows(frame: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the two windows (DIGIT, DIGIT) of a frame (H, W) that hold the most ink, the second without what is in the
    first."""
    left = frame.astype(np.float32)
    for _ in range(2):
        ink = sliding_window_view(left, (DIGIT_SIZE, DIGIT_SIZE)).sum((2, 3))
        row, column = np.unravel_index(ink.argmax(), ink.shape)
        place = slice(row, row + DIGIT_SIZE), slice(column, column + DIGIT_SIZE)
        yield left[place].ravel() / 255
        left[place] = 0


class FrameClassifier:
    """Reads the class of a frame by its two windows; trained on single frames of real clips."""

    def __init__(self, clips: np.ndarray, labels: np.ndarray) -> None:
        """(n, T, H, W) uint8 and (n,)."""
        rows = np.stack(
            [row for clip in clips for number in READER_FRAMES for row in extract_digit_windows(clip[number])]
        )
        self.machine = SVC(C=10).fit(rows, np.repeat(labels, 2 * len(READER_FRAMES)))

    def read(self, clips: np.ndarray) -> np.ndarray:
        """(n, T, H, W) -> (n, T) classes: by the sum of the votes on both windows."""
        rows = np.stack([row for clip in clips for frame in clip for row in extract_digit_windows(frame)])
        votes = self.machine.decision_function(rows)
        return votes.reshape(*clips.shape[:2], 2, -1).sum(2).argmax(-1)


def compute_motion(clips: np.ndarray) -> np.ndarray:
    """(n, T, H, W) -> (n, T - 1) pixels between the centroids of a frame and of the one before."""
    ink = clips.astype(np.float64) + 1e-9
    places = np.arange(FRAME_SIZE)
    rows, columns = ((ink.sum(axis) * places).sum(-1) / ink.sum((2, 3)) for axis in (3, 2))
    return np.hypot(np.diff(rows, axis=1), np.diff(columns, axis=1))


def compute_clip_metrics(
    clips: np.ndarray, labels: np.ndarray, reader: FrameClassifier, motion: np.ndarray
) -> dict[str, float]:
    """(n, T, H, W), (n,), and the motion of test clips -> what the table says of clips."""
    right, own = reader.read(clips) == labels[:, None], compute_motion(clips)
    low, median, high = np.quantile(own, (0.1, 0.5, 0.9))
    figures = {"recognised": right.mean(), "whole": right.all(1).mean(), "low": low, "median": median, "high": high}
    distance = wasserstein_distance(own.ravel(), motion.ravel())
    return {name: float(value) for name, value in (figures | {"distance": distance}).items()}


def measure_real_clips(data: Path, reader: FrameClassifier, motion: np.ndarray) -> list[dict[str, Any]]:
    """What real clips reach: those of the test split, as many training clips, and test clips with frames in any order."""
    test, rng = read_data(data, "test"), np.random.default_rng(0)
    mixed = np.stack([clip[rng.permutation(NUM_FRAMES)] for clip in test[0]])
    clips, labels = (part[:: CLIPS_PER_CLASS["train"] // CLIPS_PER_CLASS["test"]] for part in read_data(data, "train"))
    kinds = {"test clips": test, "training clips": (clips, labels), "test clips, shuffled": (mixed, test[1])}
    return [
        {"clips": name, "number": len(one[1])} | compute_clip_metrics(*one, reader, motion)
        for name, one in kinds.items()
    ]


def append_generated_rows(
    given: argparse.Namespace, data: Path, model: str, reader: FrameClassifier, motion: np.ndarray
) -> None:
    """Train a model, unless it is trained, and append a row for each guidance that has none."""
    home = given.work / model.replace("/", "-")
    ways: dict[str, Any] = {"recipe": given.recipe, "model": model, "frames": NUM_FRAMES, "progress": False}
    ways |= {"device": "cpu", "settings": {"model.channels": ["1"]}}
    rate = measure_processor_rate(home, RATE_STEPS, str(data), **ways)
    count = len(open_data(str(data)).splits["train"])
    epochs = round(rate * 60 * given.minutes / count, 2)
    summary = train_or_load(home / "run", data, epochs=epochs, save_every=200, evaluate_every=NEVER, keep=1, **ways)
    for guidance in GUIDANCE_SCALES:
        if any((row["clips"], row["guidance"]) == (model, guidance) for row in read_rows(given.rows)):
            continue
        bundle, began = open_generator(home / "run"), time.process_time()
        options = GenerationOptions(guidance=guidance, steps=SAMPLING_STEPS, samples=given.samples)
        batches = list(generate_images(build_sampler(bundle, "cpu"), 10, options, EvaluationSettings()))
        seconds = time.process_time() - began
        labels, clips = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        row = {"clips": model, "number": len(labels), "guidance": guidance, "minutes": given.minutes}
        row |= {"epochs": epochs, "steps": summary["steps"], "error": summary["val"]["denoising_error"]}
        row |= {"seconds": seconds, "recipe": given.recipe} | compute_clip_metrics(
            clips[..., 0], labels, reader, motion
        )
        with given.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
        for suffix in ("gif", "png"):
            place = given.work / f"{home.name}-{guidance:g}.{suffix}"
            vitreous.sample(home / "run", place, progress=False, guidance=guidance, steps=SAMPLING_STEPS, device="cpu")


def read_rows(rows: Path) -> list[dict[str, Any]]:
    """The rows that are there."""
    return [json.loads(line) for line in rows.read_text("utf-8").splitlines()] if rows.is_file() else []


def build_page(real: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """The table."""
    first, total = rows[0], sum(CLIPS_PER_CLASS.values()) * 10
    lines = [
        f"# Moving digits that were generated, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}. {total:,} clips of {NUM_FRAMES} frames of {FRAME_SIZE} x {FRAME_SIZE} pixels, two digits of one class in",
        f"each. `--recipe {first['recipe']}`,",
        f"one run for each model, seed 0, for {first['minutes']:g} minutes of one core by processor time; {first['number']} clips, by heun in {SAMPLING_STEPS} steps.",
        "A support vector machine reads the class of single frames. Motion is that of a frame's centroid, in pixels a frame; its distance, Wasserstein's, is",
        "to that of the test clips.",
        "",
        "    python benchmarks/moving_digits.py --work DIR --rows ROWS.jsonl",
        "",
        "| clips | epochs | guidance | frames recognised | clips of which every frame is | motion: 10 %, median, 90 % | its distance | s a clip, one core |",
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
    """Make the rows that lack, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where clips and runs are kept")
    parser.add_argument("--rows", type=Path, required=True, help="a file that rows are appended to")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--recipe", default="sit", choices=("sit", "dit"))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    data = write_data(given.work / "clips")
    reader, motion = FrameClassifier(*read_data(data, "train")), compute_motion(read_data(data, "test")[0])
    real = measure_real_clips(data, reader, motion)
    for model in given.models:
        append_generated_rows(given, data, model, reader, motion)
    text = build_page(real, read_rows(given.rows))
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
