"""Recall and precision of `vitreous data dedup` for planted copies among unrelated images.

    python benchmarks/dedup.py PHOTOS [--distractors FOLDER] [--most 100] --out
    benchmarks/results/DATE-dedup-HARDWARE.md
    python benchmarks/dedup.py CIFAR --judged benchmarks/cifar10-judged-pairs.csv
    python benchmarks/dedup.py TRAIN --search TEST

Every photograph is changed in every way of `COPY_KINDS`. Half of the photographs are in the other dataset, with the
distractors: their changed versions must be found as copies of the correct one; changed versions of the other half must
not be reported. Then the halves are swapped. The precision of a kind is the share of correct pairs among the reported
ones.

--judged uses real pairs with manual verdicts instead: `train,test,verdict,part`, with file names below CIFAR/train and
CIFAR/test. --search counts the images of the first folder that are copies of an image of the second, and measures the
cost. Times are processor seconds, user and system, of all processes.
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
    """Crop to a share of the area at a random position, with the aspect ratio changed by up to 5 %."""

    def change(image: Image.Image, draw: random.Random) -> Image.Image:
        stretch = draw.uniform(0.95, 1.05)
        width, height = (min(1.0, area**0.5 * stretch), min(1.0, area**0.5 / stretch))
        w, h = max(1, round(width * image.width)), max(1, round(height * image.height))
        x, y = draw.randint(0, image.width - w), draw.randint(0, image.height - h)
        return image.crop((x, y, x + w, y + h))

    return change


def scale_image(factor: float) -> ImageChange:
    """Scale height and width by a factor, bicubic."""
    return lambda picture, draw: picture.resize(
        (max(1, round(picture.width * factor)), max(1, round(picture.height * factor))), 3
    )


def compress_jpeg(quality: int) -> ImageChange:
    """Compress as JPEG of a low quality."""

    def change(image: Image.Image, draw: random.Random) -> Image.Image:
        image.save(held := io.BytesIO(), "JPEG", quality=quality)
        return Image.open(held).convert("RGB")

    return change


def change_colour(way: type, *factors: float) -> ImageChange:
    """Multiply brightness, contrast or saturation by one of the factors."""
    return lambda picture, draw: way(picture).enhance(draw.choice(factors))


def to_greyscale(image: Image.Image, draw: random.Random) -> Image.Image:
    """Convert to greyscale."""
    return image.convert("L").convert("RGB")


def add_border(image: Image.Image, draw: random.Random) -> Image.Image:
    """Add a border of 4 % of the short side, black, white or grey."""
    return ImageOps.expand(image, max(1, round(0.04 * min(image.size))), draw.choice(["black", "white", "grey"]))


def chain_changes(*changes: ImageChange) -> ImageChange:
    """Apply several changes in sequence."""

    def change(image: Image.Image, draw: random.Random) -> Image.Image:
        for step in changes:
            image = step(image, draw)
        return image

    return change


def shift_image(image: Image.Image, draw: random.Random) -> Image.Image:
    """Shift by 1/32 to 4/32 of height and width, at least one pixel; uncovered pixels repeat the edge, mirror it, or
    are black."""
    pixels = np.asarray(image)
    dx, dy = (max(1, round(side * draw.randint(1, 4) / 32)) for side in image.size)
    filled: dict[str, Any] = {"mode": draw.choice(["edge", "reflect", "constant"])}
    padded = np.pad(pixels, ((dy, dy), (dx, dx), (0, 0)), **filled)
    top, left = draw.choice([0, 2 * dy]), draw.choice([0, 2 * dx])
    return Image.fromarray(np.ascontiguousarray(padded[top : top + pixels.shape[0], left : left + pixels.shape[1]]))


def rotate_hue(image: Image.Image, draw: random.Random) -> Image.Image:
    """Rotate all hues by 30 to 90 degrees in either direction."""
    h, s, v = image.convert("HSV").split()
    turn = draw.choice([-1, 1]) * draw.randint(21, 64)
    return Image.merge("HSV", (h.point([(value + turn) % 256 for value in range(256)]), s, v)).convert("RGB")


def change_gamma(image: Image.Image, draw: random.Random) -> Image.Image:
    """Apply a gamma of 0.6 or 1.6."""
    power = draw.choice([0.6, 1.6])
    return image.point([round(255 * (value / 255) ** power) for value in range(256)] * 3)


def add_letterbox(image: Image.Image, draw: random.Random) -> Image.Image:
    """Add black or white bars of 12 %, above and below or left and right."""
    along = draw.choice([0, 1])
    bars = [0, 0]
    bars[along] = max(1, round(0.12 * image.size[along]))
    return ImageOps.expand(image, (bars[0], bars[1], bars[0], bars[1]), draw.choice(["black", "white"]))


def crop_one_side(image: Image.Image, draw: random.Random) -> Image.Image:
    """Crop one axis to three quarters, at a random position."""
    along = draw.choice([0, 1])
    size = [*image.size]
    size[along] = max(1, round(0.75 * size[along]))
    x, y = draw.randint(0, image.width - size[0]), draw.randint(0, image.height - size[1])
    return image.crop((x, y, x + size[0], y + size[1]))


def blur_image(image: Image.Image, draw: random.Random) -> Image.Image:
    """Blur with a Gaussian of 2 % of the short side."""
    return image.filter(ImageFilter.GaussianBlur(0.02 * min(image.size)))


def mirror_image(image: Image.Image, draw: random.Random) -> Image.Image:
    """Mirror horizontally."""
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
    "hue rotated by 30 to 90 degrees": rotate_hue,
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
    """Write every photograph in every way, as JPEG of quality 90; returns the files, and for each the photograph's
    index and the kind."""
    files, origins = [], []
    for index, path in enumerate(photographs):
        image = decode_to_pillow(path, 3)
        for order, (kind, change) in enumerate(COPY_KINDS.items()):
            file = scratch / f"{index}-{order}.jpg"
            change(image, random.Random(1000 * index + order)).convert("RGB").save(file, quality=90)
            files.append(file)
            origins.append((index, kind))
    return files, origins


def processor_seconds() -> float:
    """User and system time of this process and its finished children."""
    used = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure_recall(
    photographs: list[Path], distractors: list[Path], workers: int | None
) -> tuple[dict[str, list[int]], float, int]:
    """For each kind the planted, correctly found and wrongly found copies; the processor seconds of the search, and the
    number of searched images."""
    tally = {kind: [0, 0, 0] for kind in COPY_KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        files, origins = plant_copies(photographs, Path(scratch))
        origin_by_path, seconds, images = (
            {os.fspath(file): origin for file, origin in zip(files, origins, strict=True)},
            0.0,
            0,
        )
        for half in (0, 1):
            originals = photographs[half::2]
            names = {os.fspath(path): index for index, path in enumerate(photographs)}
            references = [*originals, *distractors]
            began = processor_seconds()
            result = find_copies([to_unlabelled_split(files)], [to_unlabelled_split(references)], workers=workers)
            seconds += processor_seconds() - began
            images += len(files) + len(references)
            for index, kind in origins:
                tally[kind][0] += index % 2 == half
            for copy in result["duplicates"]:
                index, kind = origin_by_path[copy["path"]]
                tally[kind][1 if names.get(copy["duplicate_of"]) == index else 2] += 1
    return tally, seconds, images


def evaluate_labelled_pairs(root: Path, pairs: Path, workers: int | None) -> list[str]:
    """The lines of a table: of the pairs of the same photograph, the share that is found; of the other pairs, the
    number reported as copies.

    All images of the list are searched together. A pair of the same photograph counts as found if the training image is
    reported.
    """
    with pairs.open(newline="", encoding="utf-8") as file:
        labelled = list(csv.DictReader(file))
    paths = {name: sorted({root / name / f"{row[name]}.jpg" for row in labelled}) for name in ("train", "test")}
    result = find_copies([to_unlabelled_split(paths["train"])], [to_unlabelled_split(paths["test"])], workers=workers)
    listed = {copy["path"]: copy["duplicate_of"] for copy in result["duplicates"]}
    lines = [
        "| subset | same photograph | found | recall | other pairs | reported as copies | precision |",
        "|---|---|---|---|---|---|---|",
    ]
    for subset in ("tuned", "held-out"):
        names = [
            (os.fspath(root / "train" / f"{row['train']}.jpg"), os.fspath(root / "test" / f"{row['test']}.jpg"))
            for row in labelled
        ]
        subset_pairs = [
            (row["verdict"], *name) for row, name in zip(labelled, names, strict=True) if row["part"] == subset
        ]
        same = [train_path in listed for verdict, train_path, _ in subset_pairs if verdict == "same"]
        wrong_pairs = [
            listed.get(train_path) == test_path for verdict, train_path, test_path in subset_pairs if verdict == "other"
        ]
        right, wrong = sum(same), sum(wrong_pairs)
        lines.append(
            f"| {subset} | {len(same)} | {right} | {right / len(same):.1%} | {len(wrong_pairs)} | {wrong} | "
            f"{right / max(right + wrong, 1):.1%} |"
        )
    return lines


def measure_search(data: Path, other: Path, workers: int | None) -> list[str]:
    """Measure the search for the images of one folder in another; returns lines."""
    data_paths, other_paths, began = list_images(data), list_images(other), processor_seconds()
    result = find_copies([to_unlabelled_split(data_paths)], [to_unlabelled_split(other_paths)], workers=workers)
    seconds = processor_seconds() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sizes = f"{len(data_paths):,} images against {len(other_paths):,}"
    return [f"{sizes}: {seconds:.0f} processor seconds, {len(result['duplicates']):,} copies listed, {memory:.0f} MiB."]


def to_unlabelled_split(paths: list[Path]) -> FileSplit:
    """A split of files without labels."""
    return FileSplit(paths, np.zeros(len(paths), np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("--distractors", type=Path)
    parser.add_argument("--judged", type=Path, metavar="CSV")
    parser.add_argument("--search", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--most", type=int, default=100, help="maximum number of photographs, sampled with a fixed seed"
    )
    parser.add_argument("--most-distractors", type=int, default=10_000)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--title", default="photographs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    head = [
        f"# Copies found by `data dedup`: {arguments.title}, {time.strftime('%Y-%m-%d')}",
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
    text = "\n".join([*head, *rows]) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def build_planted_table(arguments: argparse.Namespace) -> list[str]:
    """Build the table of planted copies."""
    every = list_images(arguments.photographs)
    photographs = sorted(random.Random(0).sample(every, min(arguments.most, len(every))))
    used = {os.path.realpath(path) for path in photographs}
    unrelated = (
        [path for path in list_images(arguments.distractors) if os.path.realpath(path) not in used]
        if arguments.distractors
        else []
    )
    distractors = sorted(random.Random(1).sample(unrelated, min(arguments.most_distractors, len(unrelated))))
    tally, seconds, images = measure_recall(photographs, distractors, arguments.workers)
    lines = [
        (
            f"{len(photographs)} images, each changed in {len(COPY_KINDS)} ways; half of them in the other dataset, then the "
            "other half,"
        ),
        (
            f"among {len(distractors):,} distractors. {images:,} images in {seconds:.0f} processor seconds: "
            f"{images / seconds:.0f} images/s."
        ),
        "",
        "| kind | planted | found | recall | wrong | precision |",
        "|---|---|---|---|---|---|",
    ]
    harder = [sum(tally[kind][column] for kind in HARDER_COPY_KINDS) for column in range(3)]
    total = [sum(column) for column in zip(*tally.values(), strict=True)]
    basic = [total_count - harder_count for total_count, harder_count in zip(total, harder, strict=True)]
    for kind, (count, right, wrong) in [
        *tally.items(),
        ("the first 16 kinds", basic),
        ("the harder kinds", harder),
        ("all", total),
    ]:
        precision = f"{right / (right + wrong):.1%}" if right + wrong else "–"
        lines.append(f"| {kind} | {count} | {right} | {right / max(count, 1):.1%} | {wrong} | {precision} |")
    return lines


if __name__ == "__main__":
    main()
