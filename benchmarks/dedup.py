"""What `vitreous data dedup` finds: copies planted on purpose, among pictures that are no copies.

    python benchmarks/dedup.py PHOTOS [--distractors FOLDER] [--most 100] --out benchmarks/DATE-dedup-HARDWARE.md

Every photograph is changed in every way of `KINDS`. Half of the photographs stand in the other data set, with the distractors: their
changed versions are to be found, and to be told as copies of the right one; those of the other half are strangers, and to be left
alone. Then the halves change places. Of what is listed for a kind, the precision is the share that is right.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps

from vitreous.data.copies.dedup import dedup
from vitreous.data.decoding.decode import decode
from vitreous.data.layouts.folder import list_images
from vitreous.data.split import Files
from vitreous.machine import processor

Change = Callable[[Image.Image, random.Random], Image.Image]


def cut(area: float) -> Change:
    """A part of that share of the area, anywhere, its sides drawn apart by up to 5 %."""

    def change(picture: Image.Image, draw: random.Random) -> Image.Image:
        stretch = draw.uniform(0.95, 1.05)
        width, height = (min(1.0, area**0.5 * stretch), min(1.0, area**0.5 / stretch))
        w, h = max(1, round(width * picture.width)), max(1, round(height * picture.height))
        x, y = draw.randint(0, picture.width - w), draw.randint(0, picture.height - h)
        return picture.crop((x, y, x + w, y + h))

    return change


def scaled(factor: float) -> Change:
    """Both sides times a factor, bicubic."""
    return lambda picture, draw: picture.resize((max(1, round(picture.width * factor)), max(1, round(picture.height * factor))), 3)


def compressed(quality: int) -> Change:
    """Through JPEG of a low quality."""

    def change(picture: Image.Image, draw: random.Random) -> Image.Image:
        picture.save(held := io.BytesIO(), "JPEG", quality=quality)
        return Image.open(held).convert("RGB")

    return change


def coloured(way: type, *factors: float) -> Change:
    """Brightness, contrast or saturation times one of the factors."""
    return lambda picture, draw: way(picture).enhance(draw.choice(factors))


def grey(picture: Image.Image, draw: random.Random) -> Image.Image:
    """Without colour."""
    return picture.convert("L").convert("RGB")


def framed(picture: Image.Image, draw: random.Random) -> Image.Image:
    """A border of 4 % of the short side, black, white or grey."""
    return ImageOps.expand(picture, max(1, round(0.04 * min(picture.size))), draw.choice(["black", "white", "grey"]))


def several(*changes: Change) -> Change:
    """One after the other."""

    def change(picture: Image.Image, draw: random.Random) -> Image.Image:
        for one in changes:
            picture = one(picture, draw)
        return picture

    return change


def mirrored(picture: Image.Image, draw: random.Random) -> Image.Image:
    """Left and right changed."""
    return ImageOps.mirror(picture)


KINDS: dict[str, Change] = {
    "cut to 90 % of the area": cut(0.9),
    "cut to 70 %": cut(0.7),
    "cut to 50 %": cut(0.5),
    "scaled by 0.5": scaled(0.5),
    "scaled by 0.25": scaled(0.25),
    "JPEG quality 50": compressed(50),
    "JPEG quality 20": compressed(20),
    "mirrored": mirrored,
    "brightness × 0.6 or 1.4": coloured(ImageEnhance.Brightness, 0.6, 1.4),
    "contrast × 0.6 or 1.5": coloured(ImageEnhance.Contrast, 0.6, 1.5),
    "saturation × 0.3 or 1.8": coloured(ImageEnhance.Color, 0.3, 1.8),
    "grey": grey,
    "a border of 4 %": framed,
    "mirrored, cut to 70 %, brighter, × 0.5, quality 30": several(
        mirrored, cut(0.7), coloured(ImageEnhance.Brightness, 1.2), scaled(0.5), compressed(30)
    ),
    "cut to 50 %, contrast × 1.3, × 0.5, quality 20": several(cut(0.5), coloured(ImageEnhance.Contrast, 1.3), scaled(0.5), compressed(20)),
    "cut to 70 %, grey, a border": several(cut(0.7), grey, framed),
}


def plant(photographs: list[Path], scratch: Path) -> tuple[list[Path], list[tuple[int, str]]]:
    """Every photograph in every way, as JPEG of quality 90 -> the files, and for each the photograph's number and the kind."""
    files, known = [], []
    for number, path in enumerate(photographs):
        picture = decode(path, 3)
        for order, (kind, change) in enumerate(KINDS.items()):
            file = scratch / f"{number}-{order}.jpg"
            change(picture, random.Random(1000 * number + order)).convert("RGB").save(file, quality=90)
            files.append(file)
            known.append((number, kind))
    return files, known


def measure(photographs: list[Path], distractors: list[Path], workers: int | None) -> tuple[dict[str, list[int]], float, int]:
    """For each kind: planted, found right, found wrong; and the seconds of the search, and the images it looked at."""
    tally = {kind: [0, 0, 0] for kind in KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        files, known = plant(photographs, Path(scratch))
        place, seconds, images = {os.fspath(file): row for file, row in zip(files, known, strict=True)}, 0.0, 0
        for half in (0, 1):
            originals = photographs[half::2]
            names = {os.fspath(path): number for number, path in enumerate(photographs)}
            other = [*originals, *distractors]
            began = time.perf_counter()
            found = dedup([labelled(files)], [labelled(other)], workers=workers)
            seconds += time.perf_counter() - began
            images += len(files) + len(other)
            for number, kind in known:
                tally[kind][0] += number % 2 == half
            for copy in found["copies"]:
                number, kind = place[copy["path"]]
                tally[kind][1 if names.get(copy["copy_of"]) == number else 2] += 1
    return tally, seconds, images


def labelled(paths: list[Path]) -> Files:
    """Files without labels."""
    return Files(paths, np.zeros(len(paths), np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("--distractors", type=Path)
    parser.add_argument("--most", type=int, default=100, help="photographs, drawn by a fixed seed where there are more")
    parser.add_argument("--most-distractors", type=int, default=10_000)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--title", default="photographs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    every = list_images(arguments.photographs)
    photographs = sorted(random.Random(0).sample(every, min(arguments.most, len(every))))
    taken = {os.path.realpath(path) for path in photographs}
    strange = [path for path in list_images(arguments.distractors) if os.path.realpath(path) not in taken] if arguments.distractors else []
    distractors = sorted(random.Random(1).sample(strange, min(arguments.most_distractors, len(strange))))
    tally, seconds, images = measure(photographs, distractors, arguments.workers)
    rows = [
        f"# Copies that `data dedup` finds: {arguments.title}, {time.strftime('%Y-%m-%d')}",
        "",
        f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}.",
        f"`python benchmarks/dedup.py {' '.join(sys.argv[1:])}`",
        "",
        f"{len(photographs)} pictures, each changed in {len(KINDS)} ways; half of them in the other data set, then the other half,",
        f"among {len(distractors):,} distractors. {images:,} images in {seconds:.0f} s: {images / seconds:.0f} images/s.",
        "",
        "| kind | planted | found | recall | wrong | precision |",
        "|---|---|---|---|---|---|",
    ]
    total = [sum(column) for column in zip(*tally.values(), strict=True)]
    for kind, (planted, right, wrong) in [*tally.items(), ("all", total)]:
        precision = f"{right / (right + wrong):.1%}" if right + wrong else "–"
        rows.append(f"| {kind} | {planted} | {right} | {right / max(planted, 1):.1%} | {wrong} | {precision} |")
    text = "\n".join(rows) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
