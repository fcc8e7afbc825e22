"""Recall and precision of `vitreous data dedup`, with synthetic near-duplicates or with labelled pairs.

    python benchmarks/dedup.py PHOTOS [--distractors FOLDER] [--most 100] --out benchmarks/results/DATE-dedup-HARDWARE.md
    python benchmarks/dedup.py CIFAR --judged benchmarks/cifar10-judged-pairs.csv
    python benchmarks/dedup.py TRAIN --search TEST

Each photo is changed by every function of `COPY_KINDS`. The reference dataset contains one half of the photos and the
distractors. A changed version of these photos must be listed as a copy of its original; a changed version of the other
half must not be listed. The halves are then exchanged. The precision of a kind of change is the share of its listed copies
that are correct.

--judged uses real pairs that were labelled by eye. The CSV file has the columns train, test (names of files in CIFAR/train
and CIFAR/test, without extension), verdict and part. --search compares two folders, and reports the number of images of
the first that are copies of images of the second, and the cost. Times are CPU seconds, user and system, of all processes.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitreous.apps.curation.dedup import find_copies
from vitreous.data.decoding.decode import decode_to_pillow
from vitreous.data.layouts.folder import list_images
from vitreous.data.split import FileSplit
from vitreous.system.machine import get_processor_name

ImageChange = Callable[[Image.Image, random.Random], Image.Image]


def crop_area(area: float) -> ImageChange:
    """Return a function that crops a random part of this share of the area; the aspect ratio changes by up to 10 %."""

    def change(image: Image.Image, rng: random.Random) -> Image.Image:
        stretch = rng.uniform(0.95, 1.05)
        width, height = (min(1.0, area**0.5 * stretch), min(1.0, area**0.5 / stretch))
        w, h = max(1, round(width * image.width)), max(1, round(height * image.height))
        x, y = rng.randint(0, image.width - w), rng.randint(0, image.height - h)
        return image.crop((x, y, x + w, y + h))

    return change


def scale_image(factor: float) -> ImageChange:
    """Return a function that scales height and width by a factor, with bicubic interpolation."""
    return lambda image, rng: image.resize(
        (max(1, round(image.width * factor)), max(1, round(image.height * factor))), 3
    )


def compress_jpeg(quality: int) -> ImageChange:
    """Return a function that compresses an image as JPEG of this quality."""

    def change(image: Image.Image, rng: random.Random) -> Image.Image:
        image.save(buffer := io.BytesIO(), "JPEG", quality=quality)
        return Image.open(buffer).convert("RGB")

    return change


def change_colour(enhancer: type, *factors: float) -> ImageChange:
    """Return a function that multiplies brightness, contrast or saturation by a random one of the factors."""
    return lambda image, rng: enhancer(image).enhance(rng.choice(factors))


def to_greyscale(image: Image.Image, rng: random.Random) -> Image.Image:
    """Convert an image to greyscale."""
    return image.convert("L").convert("RGB")


def add_border(image: Image.Image, rng: random.Random) -> Image.Image:
    """Add a black, white or grey border of 4 % of the shorter side."""
    return ImageOps.expand(image, max(1, round(0.04 * min(image.size))), rng.choice(["black", "white", "grey"]))


def chain_changes(*changes: ImageChange) -> ImageChange:
    """Return a function that applies the changes one after the other."""

    def change(image: Image.Image, rng: random.Random) -> Image.Image:
        for apply_change in changes:
            image = apply_change(image, rng)
        return image

    return change


def shift_image(image: Image.Image, rng: random.Random) -> Image.Image:
    """Shift an image by 1/32 to 4/32 of its width and height, at least one pixel.

    The uncovered area repeats the edge, is a reflection, or is black.
    """
    pixels = np.asarray(image)
    dx, dy = (max(1, round(side * rng.randint(1, 4) / 32)) for side in image.size)
    padding: dict[str, Any] = {"mode": rng.choice(["edge", "reflect", "constant"])}
    padded = np.pad(pixels, ((dy, dy), (dx, dx), (0, 0)), **padding)
    top, left = rng.choice([0, 2 * dy]), rng.choice([0, 2 * dx])
    return Image.fromarray(np.ascontiguousarray(padded[top : top + pixels.shape[0], left : left + pixels.shape[1]]))


def rotate_hue(image: Image.Image, rng: random.Random) -> Image.Image:
    """Rotate the hue of all pixels by 30 to 90 degrees in either direction."""
    h, s, v = image.convert("HSV").split()
    rotation = rng.choice([-1, 1]) * rng.randint(21, 64)
    return Image.merge("HSV", (h.point([(value + rotation) % 256 for value in range(256)]), s, v)).convert("RGB")


def change_gamma(image: Image.Image, rng: random.Random) -> Image.Image:
    """Apply a gamma correction of 0.6 or 1.6."""
    power = rng.choice([0.6, 1.6])
    return image.point([round(255 * (value / 255) ** power) for value in range(256)] * 3)


def add_letterbox(image: Image.Image, rng: random.Random) -> Image.Image:
    """Add black or white bars of 12 % of the height above and below, or of 12 % of the width left and right."""
    along = rng.choice([0, 1])
    bars = [0, 0]
    bars[along] = max(1, round(0.12 * image.size[along]))
    return ImageOps.expand(image, (bars[0], bars[1], bars[0], bars[1]), rng.choice(["black", "white"]))


def crop_one_side(image: Image.Image, rng: random.Random) -> Image.Image:
    """Crop a random part with three quarters of the height or of the width."""
    along = rng.choice([0, 1])
    kept = [*image.size]
    kept[along] = max(1, round(0.75 * kept[along]))
    x, y = rng.randint(0, image.width - kept[0]), rng.randint(0, image.height - kept[1])
    return image.crop((x, y, x + kept[0], y + kept[1]))


def blur_image(image: Image.Image, rng: random.Random) -> Image.Image:
    """Blur an image with a Gaussian whose std is 2 % of the shorter side."""
    return image.filter(ImageFilter.GaussianBlur(0.02 * min(image.size)))


def mirror_image(image: Image.Image, rng: random.Random) -> Image.Image:
    """Flip an image horizontally."""
    return ImageOps.mirror(image)


COPY_KINDS: dict[str, ImageChange] = {
    "cut to 90 % of the area": crop_area(0.9),
    "cut to 70 %": crop_area(0.7),
    "cut to 50 %": crop_area(0.5),
    "scaled by 0.5": scale_image(0.5),
    "scaled by 0.25": scale_image(0.25),
    "JPEG quality 50": compress_jpeg(50),
    "JPEG quality 20": compress_jpeg(20),
    "mirrored": mirror_image,
    "brightness × 0.6 or 1.4": change_colour(ImageEnhance.Brightness, 0.6, 1.4),
    "contrast × 0.6 or 1.5": change_colour(ImageEnhance.Contrast, 0.6, 1.5),
    "saturation × 0.3 or 1.8": change_colour(ImageEnhance.Color, 0.3, 1.8),
    "grey": to_greyscale,
    "a border of 4 %": add_border,
    "mirrored, cut to 70 %, brighter, × 0.5, quality 30": chain_changes(
        mirror_image, crop_area(0.7), change_colour(ImageEnhance.Brightness, 1.2), scale_image(0.5), compress_jpeg(30)
    ),
    "cut to 50 %, contrast × 1.3, × 0.5, quality 20": chain_changes(
        crop_area(0.5), change_colour(ImageEnhance.Contrast, 1.3), scale_image(0.5), compress_jpeg(20)
    ),
    "cut to 70 %, grey, a border": chain_changes(crop_area(0.7), to_greyscale, add_border),
}
HARDER_COPY_KINDS: dict[str, ImageChange] = {
    "shifted by 1/32 to 4/32": shift_image,
    "mirrored and shifted": chain_changes(mirror_image, shift_image),
    "hue turned by 30 to 90 degrees": rotate_hue,
    "hue, contrast × 0.6 or 1.5": chain_changes(rotate_hue, change_colour(ImageEnhance.Contrast, 0.6, 1.5)),
    "gamma 0.6 or 1.6": change_gamma,
    "bars of 12 %": add_letterbox,
    "bars of 12 %, mirrored, quality 50": chain_changes(add_letterbox, mirror_image, compress_jpeg(50)),
    "three quarters of one side": crop_one_side,
    "blurred by 2 %": blur_image,
    "shifted, hue, contrast, quality 40": chain_changes(
        shift_image, rotate_hue, change_colour(ImageEnhance.Contrast, 0.6, 1.5), compress_jpeg(40)
    ),
    "mirrored, shifted, gamma, a border, quality 40": chain_changes(
        mirror_image, shift_image, change_gamma, add_border, compress_jpeg(40)
    ),
}
COPY_KINDS |= HARDER_COPY_KINDS


def plant_copies(photographs: list[Path], scratch: Path) -> tuple[list[Path], list[tuple[int, str]]]:
    """Write every photo with every change as a JPEG file of quality 90 to the folder `scratch`.

    Returns the files, and for each the index of the photo and the kind of change.
    """
    files, origins = [], []
    for number, path in enumerate(photographs):
        image = decode_to_pillow(path, 3)
        for order, (kind, change) in enumerate(COPY_KINDS.items()):
            file = scratch / f"{number}-{order}.jpg"
            change(image, random.Random(1000 * number + order)).convert("RGB").save(file, quality=90)
            files.append(file)
            origins.append((number, kind))
    return files, origins


def processor_seconds() -> float:
    """Return the CPU time, user and system, of this process and of its finished child processes, in seconds."""
    usages = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure_recall(
    photographs: list[Path], distractors: list[Path], workers: int | None
) -> tuple[dict[str, list[int]], float, int]:
    """Search for changed photos, with each half of the photos and the distractors as the reference dataset.

    Returns for each kind of change the numbers of copies, of correct and of wrong matches; the CPU seconds of the
    search; and the number of searched images.
    """
    tally = {kind: [0, 0, 0] for kind in COPY_KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        files, origins = plant_copies(photographs, Path(scratch))
        origin_by_path, seconds, images = dict(zip(map(os.fspath, files), origins, strict=True)), 0.0, 0
        for half in (0, 1):
            originals = photographs[half::2]
            names = {os.fspath(path): number for number, path in enumerate(photographs)}
            reference = [*originals, *distractors]
            start = processor_seconds()
            result = find_copies([to_unlabelled_split(files)], [to_unlabelled_split(reference)], workers=workers)
            seconds += processor_seconds() - start
            images += len(files) + len(reference)
            for number, kind in origins:
                tally[kind][0] += number % 2 == half
            for copy in result["duplicates"]:
                number, kind = origin_by_path[copy["path"]]
                tally[kind][1 if names.get(copy["duplicate_of"]) == number else 2] += 1
    return tally, seconds, images


def evaluate_labelled_pairs(root: Path, pairs: Path, workers: int | None) -> list[str]:
    """Search for the labelled pairs, and return the lines of the table of recall and precision.

    All images of the CSV file are searched together. A pair of the same photo counts as found if its training image is
    listed as a copy.
    """
    with pairs.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    paths = {name: sorted({root / name / f"{row[name]}.jpg" for row in rows}) for name in ("train", "test")}
    result = find_copies([to_unlabelled_split(paths["train"])], [to_unlabelled_split(paths["test"])], workers=workers)
    original_by_copy = {copy["path"]: copy["duplicate_of"] for copy in result["duplicates"]}
    lines = [
        "| part | pairs of one photo | found | recall | other pairs | listed as copies | precision |",
        "|---|---|---|---|---|---|---|",
    ]
    for part in ("tuned", "held-out"):
        names = [
            (os.fspath(root / "train" / f"{row['train']}.jpg"), os.fspath(root / "test" / f"{row['test']}.jpg"))
            for row in rows
        ]
        pairs_of_part = [(row["verdict"], *name) for row, name in zip(rows, names, strict=True) if row["part"] == part]
        same = [train in original_by_copy for verdict, train, _ in pairs_of_part if verdict == "same"]
        other = [original_by_copy.get(train) == test for verdict, train, test in pairs_of_part if verdict == "other"]
        right, wrong = sum(same), sum(other)
        lines.append(
            f"| {part} | {len(same)} | {right} | {right / len(same):.1%} | {len(other)} | {wrong} | "
            f"{right / max(right + wrong, 1):.1%} |"
        )
    return lines


def measure_search(data: Path, reference: Path, workers: int | None) -> list[str]:
    """Compare the images of two folders, and return a line with CPU time, number of copies and memory."""
    images, reference_images, start = list_images(data), list_images(reference), processor_seconds()
    result = find_copies([to_unlabelled_split(images)], [to_unlabelled_split(reference_images)], workers=workers)
    seconds = processor_seconds() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sizes = f"{len(images):,} images compared with {len(reference_images):,}"
    return [f"{sizes}: {seconds:.0f} CPU seconds, {len(result['duplicates']):,} copies listed, {memory:.0f} MiB."]


def to_unlabelled_split(paths: list[Path]) -> FileSplit:
    """Return a split of these files in which all labels are 0."""
    return FileSplit(paths, np.zeros(len(paths), np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path, help="folder of photos")
    parser.add_argument("--distractors", type=Path)
    parser.add_argument("--judged", type=Path, metavar="CSV", help="pairs of images labelled by eye")
    parser.add_argument("--search", type=Path, metavar="FOLDER", help="compare with this folder, and report the cost")
    parser.add_argument("--most", type=int, default=100, help="most photos, a random sample with a fixed seed")
    parser.add_argument("--most-distractors", type=int, default=10_000)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--title", default="photographs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    header = [
        f"# Near-duplicates found by `data dedup`: {arguments.title}, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}.",
        f"`python benchmarks/dedup.py {' '.join(sys.argv[1:])}`",
        "",
    ]
    if arguments.judged:
        rows = evaluate_labelled_pairs(arguments.photographs, arguments.judged, arguments.workers)
    elif arguments.search:
        rows = measure_search(arguments.photographs, arguments.search, arguments.workers)
    else:
        rows = build_planted_table(arguments)
    text = "\n".join([*header, *rows]) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def build_planted_table(arguments: argparse.Namespace) -> list[str]:
    """Measure synthetic near-duplicates, and return the lines of the page."""
    all_photos = list_images(arguments.photographs)
    photographs = sorted(random.Random(0).sample(all_photos, min(arguments.most, len(all_photos))))
    chosen = {os.path.realpath(path) for path in photographs}
    other_images = (
        [path for path in list_images(arguments.distractors) if os.path.realpath(path) not in chosen]
        if arguments.distractors
        else []
    )
    distractors = sorted(random.Random(1).sample(other_images, min(arguments.most_distractors, len(other_images))))
    tally, seconds, images = measure_recall(photographs, distractors, arguments.workers)
    rows = [
        (
            f"{len(photographs)} photos with {len(COPY_KINDS)} kinds of changes; each half of them in turn is in the reference "
            "dataset,"
        ),
        (
            f"with {len(distractors):,} distractors. {images:,} images in {seconds:.0f} CPU seconds: "
            f"{images / seconds:.0f} images/s."
        ),
        "",
        "| kind of change | copies | found | recall | wrong | precision |",
        "|---|---|---|---|---|---|",
    ]
    harder = [sum(tally[kind][column] for kind in HARDER_COPY_KINDS) for column in range(3)]
    total = [sum(column) for column in zip(*tally.values(), strict=True)]
    easier = [all_count - harder_count for all_count, harder_count in zip(total, harder, strict=True)]
    for kind, (count, right, wrong) in [
        *tally.items(),
        ("the first 16 kinds", easier),
        ("the harder kinds", harder),
        ("all", total),
    ]:
        precision = f"{right / (right + wrong):.1%}" if right + wrong else "–"
        rows.append(f"| {kind} | {count} | {right} | {right / max(count, 1):.1%} | {wrong} | {precision} |")
    return rows


if __name__ == "__main__":
    main()
