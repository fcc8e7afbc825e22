"""What `vitreous data dedup` finds: copies planted on purpose, among pictures that are no copies.

    python benchmarks/dedup.py PHOTOS [--distractors FOLDER] [--most 100] --out benchmarks/results/DATE-dedup-HARDWARE.md
    python benchmarks/dedup.py CIFAR --judged benchmarks/cifar10-judged-pairs.csv
    python benchmarks/dedup.py TRAIN --search TEST

Every photograph is changed in every way of `KINDS`. Half of the photographs stand in the other dataset, with the
distractors: their changed versions are to be found, and to be told as copies of the right one; those of the other half
are strangers, and to be left alone. Then the halves change places. Of what is listed for a kind, the precision is the
share that is right.

--judged takes real pairs instead, judged by eye: `train,test,verdict,part`, file names below CIFAR/train and
  CIFAR/test. --search
takes two folders, and tells how many images of the first are copies of one in the second, and what that costs. Times
are processor seconds, user and system, of all processes.
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
    """A part of that share of the area, anywhere, its sides drawn apart by up to 5 %."""

    def change(picture: Image.Image, draw: random.Random) -> Image.Image:
        stretch = draw.uniform(0.95, 1.05)
        width, height = (min(1.0, area**0.5 * stretch), min(1.0, area**0.5 / stretch))
        w, h = max(1, round(width * picture.width)), max(1, round(height * picture.height))
        x, y = draw.randint(0, picture.width - w), draw.randint(0, picture.height - h)
        return picture.crop((x, y, x + w, y + h))

    return change


def scale_image(factor: float) -> ImageChange:
    """Both sides times a factor, bicubic."""
    return lambda picture, draw: picture.resize(
        (max(1, round(picture.width * factor)), max(1, round(picture.height * factor))), 3
    )


def compress_jpeg(quality: int) -> ImageChange:
    """Through JPEG of a low quality."""

    def change(picture: Image.Image, draw: random.Random) -> Image.Image:
        picture.save(held := io.BytesIO(), "JPEG", quality=quality)
        return Image.open(held).convert("RGB")

    return change


def change_colour(way: type, *factors: float) -> ImageChange:
    """Brightness, contrast or saturation times one of the factors."""
    return lambda picture, draw: way(picture).enhance(draw.choice(factors))


def to_greyscale(picture: Image.Image, draw: random.Random) -> Image.Image:
    """Without colour."""
    return picture.convert("L").convert("RGB")


def add_border(picture: Image.Image, draw: random.Random) -> Image.Image:
    """A border of 4 % of the short side, black, white or grey."""
    return ImageOps.expand(picture, max(1, round(0.04 * min(picture.size))), draw.choice(["black", "white", "grey"]))


def chain_changes(*changes: ImageChange) -> ImageChange:
    """One after the other."""

    def change(picture: Image.Image, draw: random.Random) -> Image.Image:
        for one in changes:
            picture = one(picture, draw)
        return picture

    return change


def shift_image(picture: Image.Image, draw: random.Random) -> Image.Image:
    """Moved by 1/32 to 4/32 of each side, at least a pixel; what is uncovered repeats the edge, is its mirror image, or
    is black."""
    pixels = np.asarray(picture)
    dx, dy = (max(1, round(side * draw.randint(1, 4) / 32)) for side in picture.size)
    filled: dict[str, Any] = {"mode": draw.choice(["edge", "reflect", "constant"])}
    padded = np.pad(pixels, ((dy, dy), (dx, dx), (0, 0)), **filled)
    top, left = draw.choice([0, 2 * dy]), draw.choice([0, 2 * dx])
    return Image.fromarray(np.ascontiguousarray(padded[top : top + pixels.shape[0], left : left + pixels.shape[1]]))


def rotate_hue(picture: Image.Image, draw: random.Random) -> Image.Image:
    """Every hue turned by 30 to 90 degrees, to either side."""
    h, s, v = picture.convert("HSV").split()
    turn = draw.choice([-1, 1]) * draw.randint(21, 64)
    return Image.merge("HSV", (h.point([(value + turn) % 256 for value in range(256)]), s, v)).convert("RGB")


def change_gamma(picture: Image.Image, draw: random.Random) -> Image.Image:
    """Grey levels to the power of 0.6 or 1.6."""
    power = draw.choice([0.6, 1.6])
    return picture.point([round(255 * (value / 255) ** power) for value in range(256)] * 3)


def add_letterbox(picture: Image.Image, draw: random.Random) -> Image.Image:
    """Black or white bars of 12 % of the side, above and below or at both sides."""
    along = draw.choice([0, 1])
    bars = [0, 0]
    bars[along] = max(1, round(0.12 * picture.size[along]))
    return ImageOps.expand(picture, (bars[0], bars[1], bars[0], bars[1]), draw.choice(["black", "white"]))


def crop_one_side(picture: Image.Image, draw: random.Random) -> Image.Image:
    """Three quarters of one side alone, from anywhere."""
    along = draw.choice([0, 1])
    kept = [*picture.size]
    kept[along] = max(1, round(0.75 * kept[along]))
    x, y = draw.randint(0, picture.width - kept[0]), draw.randint(0, picture.height - kept[1])
    return picture.crop((x, y, x + kept[0], y + kept[1]))


def blur_image(picture: Image.Image, draw: random.Random) -> Image.Image:
    """By a Gaussian of 2 % of the short side."""
    return picture.filter(ImageFilter.GaussianBlur(0.02 * min(picture.size)))


def mirror_image(picture: Image.Image, draw: random.Random) -> Image.Image:
    """Left and right changed."""
    return ImageOps.mirror(picture)


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
    """Every photograph in every way, as JPEG of quality 90 -> the files, and for each the photograph's number and the
    kind."""
    files, known = [], []
    for number, path in enumerate(photographs):
        picture = decode_to_pillow(path, 3)
        for order, (kind, change) in enumerate(COPY_KINDS.items()):
            file = scratch / f"{number}-{order}.jpg"
            change(picture, random.Random(1000 * number + order)).convert("RGB").save(file, quality=90)
            files.append(file)
            known.append((number, kind))
    return files, known


def processor_seconds() -> float:
    """User and system time of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure_recall(
    photographs: list[Path], distractors: list[Path], workers: int | None
) -> tuple[dict[str, list[int]], float, int]:
    """For each kind: planted, found right, found wrong; and the processor seconds of the search, and the images it
    looked at."""
    tally = {kind: [0, 0, 0] for kind in COPY_KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        files, known = plant_copies(photographs, Path(scratch))
        place, seconds, images = {os.fspath(file): row for file, row in zip(files, known, strict=True)}, 0.0, 0
        for half in (0, 1):
            originals = photographs[half::2]
            names = {os.fspath(path): number for number, path in enumerate(photographs)}
            other = [*originals, *distractors]
            began = processor_seconds()
            found = find_copies([to_unlabelled_split(files)], [to_unlabelled_split(other)], workers=workers)
            seconds += processor_seconds() - began
            images += len(files) + len(other)
            for number, kind in known:
                tally[kind][0] += number % 2 == half
            for copy in found["duplicates"]:
                number, kind = place[copy["path"]]
                tally[kind][1 if names.get(copy["duplicate_of"]) == number else 2] += 1
    return tally, seconds, images


def evaluate_labelled_pairs(root: Path, pairs: Path, workers: int | None) -> list[str]:
    """Rows of a table: of the pairs that are the same photograph, how many are found; of the others, how many are taken
    for copies.

    All images of the list are searched at once. A pair of the same photograph counts as found where the training image
    is listed.
    """
    with pairs.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    places = {name: sorted({root / name / f"{row[name]}.jpg" for row in rows}) for name in ("train", "test")}
    found = find_copies([to_unlabelled_split(places["train"])], [to_unlabelled_split(places["test"])], workers=workers)
    listed = {copy["path"]: copy["duplicate_of"] for copy in found["duplicates"]}
    lines = [
        "| part | same photograph | found | recall | other | taken for copies | precision |",
        "|---|---|---|---|---|---|---|",
    ]
    for part in ("tuned", "held-out"):
        names = [
            (os.fspath(root / "train" / f"{row['train']}.jpg"), os.fspath(root / "test" / f"{row['test']}.jpg"))
            for row in rows
        ]
        kept = [(row["verdict"], *name) for row, name in zip(rows, names, strict=True) if row["part"] == part]
        same = [one in listed for verdict, one, _ in kept if verdict == "same"]
        other = [listed.get(one) == two for verdict, one, two in kept if verdict == "other"]
        right, wrong = sum(same), sum(other)
        lines.append(
            f"| {part} | {len(same)} | {right} | {right / len(same):.1%} | {len(other)} | {wrong} | "
            f"{right / max(right + wrong, 1):.1%} |"
        )
    return lines


def measure_search(data: Path, other: Path, workers: int | None) -> list[str]:
    """Lines that tell what it costs to look for the images of one folder in another."""
    one, two, began = list_images(data), list_images(other), processor_seconds()
    found = find_copies([to_unlabelled_split(one)], [to_unlabelled_split(two)], workers=workers)
    seconds = processor_seconds() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sizes = f"{len(one):,} images against {len(two):,}"
    return [f"{sizes}: {seconds:.0f} processor seconds, {len(found['duplicates']):,} copies listed, {memory:.0f} MiB."]


def to_unlabelled_split(paths: list[Path]) -> FileSplit:
    """Files without labels."""
    return FileSplit(paths, np.zeros(len(paths), np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("--distractors", type=Path)
    parser.add_argument("--judged", type=Path, metavar="CSV")
    parser.add_argument("--search", type=Path, metavar="FOLDER")
    parser.add_argument("--most", type=int, default=100, help="photographs, drawn by a fixed seed where there are more")
    parser.add_argument("--most-distractors", type=int, default=10_000)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--title", default="photographs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    head = [
        f"# Copies that `data dedup` finds: {arguments.title}, {time.strftime('%Y-%m-%d')}",
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
    """The table of planted copies."""
    every = list_images(arguments.photographs)
    photographs = sorted(random.Random(0).sample(every, min(arguments.most, len(every))))
    taken = {os.path.realpath(path) for path in photographs}
    strange = (
        [path for path in list_images(arguments.distractors) if os.path.realpath(path) not in taken]
        if arguments.distractors
        else []
    )
    distractors = sorted(random.Random(1).sample(strange, min(arguments.most_distractors, len(strange))))
    tally, seconds, images = measure_recall(photographs, distractors, arguments.workers)
    rows = [
        (
            f"{len(photographs)} pictures, each changed in {len(COPY_KINDS)} ways; half of them in the other dataset, then the "
            "other half,"
        ),
        (
            f"among {len(distractors):,} distractors. {images:,} images in {seconds:.0f} processor seconds: "
            f"{images / seconds:.0f} a second."
        ),
        "",
        "| kind | planted | found | recall | wrong | precision |",
        "|---|---|---|---|---|---|",
    ]
    harder = [sum(tally[kind][column] for kind in HARDER_COPY_KINDS) for column in range(3)]
    total = [sum(column) for column in zip(*tally.values(), strict=True)]
    before = [whole - part for whole, part in zip(total, harder, strict=True)]
    for kind, (count, right, wrong) in [
        *tally.items(),
        ("the first 16 kinds", before),
        ("the harder kinds", harder),
        ("all", total),
    ]:
        precision = f"{right / (right + wrong):.1%}" if right + wrong else "–"
        rows.append(f"| {kind} | {count} | {right} | {right / max(count, 1):.1%} | {wrong} | {precision} |")
    return rows


if __name__ == "__main__":
    main()
