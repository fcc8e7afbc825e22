"""Zero-shot retrieval of a small two-tower model on a synthetic caption set: handwritten digits with a colour and a
position in words, such as "a red seven in the top left".

    python benchmarks/contrastive.py FOLDER [--recipe siglip] [--epochs 4]

Writes the images and `pairs.csv` to FOLDER, trains the recipe's default model on two cores, and prints R@1 on images of
digits that are not in the training set. A caption describes several images, so a retrieved image or caption is correct
if its words are those of the query.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitreous
from vitreous.data.layouts.named import open_digits

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = {
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (60, 90, 240),
    "yellow": (240, 220, 40),
    "white": (245, 245, 245),
    "purple": (170, 60, 210),
}
#: position -> row and column of the digit's top left corner in the image
POSITIONS = {
    "top left": (0, 0),
    "top right": (0, 16),
    "centre": (8, 8),
    "bottom left": (16, 0),
    "bottom right": (16, 16),
}
IMAGE_SIDE, DIGIT_SIDE = 32, 16
RETRIEVAL_KEYS = ("retrieval_r1", "image_to_text_r1", "text_to_image_r1")
TRAIN_REPEATS = 10  # images of each training digit, with different colours and positions


def draw_image(pixels: np.ndarray, colour: str, position: str) -> Image.Image:
    """Draw a digit (8, 8) uint8 enlarged to 16 pixels on a black image of 32 pixels."""
    digit = Image.fromarray(pixels).resize((DIGIT_SIDE, DIGIT_SIDE), Image.Resampling.BICUBIC)
    canvas = np.zeros((IMAGE_SIDE, IMAGE_SIDE, 3))
    row, column = POSITIONS[position]
    shade = np.asarray(digit, dtype=np.float64)[..., None] / 255
    canvas[row : row + DIGIT_SIDE, column : column + DIGIT_SIDE] = shade * np.array(COLOURS[colour])
    return Image.fromarray(np.rint(canvas).astype(np.uint8))


def write_caption_set(folder: Path, seed: int = 0) -> Path:
    """Write the images of the caption set and their captions, `pairs.csv`. The digits of the split `val` are not in
    `train`."""
    data, generator = open_digits(), np.random.default_rng(seed)
    rows = []
    for split, digits, repeats in (
        ("train", data.splits["train"], TRAIN_REPEATS),
        ("val", data.splits["val"], 1),
        ("val", data.splits["test"], 1),
    ):
        for sample in range(len(digits)):
            for _ in range(repeats):
                colour, position = (str(generator.choice(list(names))) for names in (COLOURS, POSITIONS))
                name = f"images/{len(rows):05}.png"
                (folder / "images").mkdir(parents=True, exist_ok=True)
                draw_image(np.asarray(digits.raw(sample)), colour, position).save(folder / name)
                rows.append((name, f"a {colour} {DIGIT_WORDS[digits.labels[sample]]} in the {position}", split))
    with open(folder / "pairs.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "caption", "split"), *rows])
    return folder / "pairs.csv"


def main() -> None:
    """Write the caption set, train, and print the metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", default="siglip", choices=("clip", "siglip"))
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pairs = write_caption_set(arguments.folder)
    start, start_cpu = time.perf_counter(), time.process_time()
    out = arguments.folder / f"run-{arguments.recipe}-{arguments.seed}-{time.strftime('%H%M%S')}"
    options = {"recipe": arguments.recipe, "epochs": arguments.epochs, "seed": arguments.seed}
    summary: dict[str, Any] = dict(vitreous.train(pairs, out=out, device="cpu", **options))
    result = {
        **options,
        "model": summary["model"],
        "parameters": summary["parameters"],
        "threads": torch.get_num_threads(),
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - start_cpu, 1),
        **{name: summary["val"][name] for name in ("images", *RETRIEVAL_KEYS)},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
