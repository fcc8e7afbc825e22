"""What a photograph costs from its file to a normalised training crop, part by part: where the loader's limit is.

    python benchmarks/loader_parts.py PHOTOGRAPHS --out benchmarks/results/DATE-loader-parts-HARDWARE.md

Milliseconds of one core for an image, medians of rounds over all plain JPEG files of the folder; nothing is kept from
one image to the next, as in a loader. The parts are those of crops of 224 pixels, area 0.08 to 1, mirrored every second
time, in batches of 32. No process hands anything to another here: what the rate of `vitreous bench --tasks loader` lacks
to the sum of the parts is the way between processes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from vitreous.apps.bench.report import describe_hardware
from vitreous.data.augmentation.augment import Augment, flip_horizontally_at_random, image_to_uint8_tensor
from vitreous.data.augmentation.crops import AreaCrop
from vitreous.data.decoding.decode import read_input_file
from vitreous.data.decoding.regions import LazyJpeg, get_jpeg_decoder, open_lazy_image
from vitreous.data.keys import fork_torch_rng
from vitreous.data.layouts.folder import list_images
from vitreous.data.modalities.base import IMAGENET_MOMENTS
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.system.machine import configure_process

CROP_SIZE, BATCH_SIZE = (224, 224), 32
CROP_AREA, CROP_RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def measure_milliseconds(part: Callable[[int], object], count: int, rounds: int, images: int = 1) -> float:
    """Median milliseconds for an image of `part` at 0 .. count - 1, each call of which makes so many images."""
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        for number in range(count):
            part(number)
        seconds.append(time.process_time() - started)
    return 1000 * statistics.median(seconds) / count / images


def measure_parts(folder: Path, rounds: int) -> dict[str, float]:
    """Milliseconds of each part, and of all of them in one call."""
    contents, files = [], []
    for file in list_images(folder):
        if (
            isinstance(picture := open_lazy_image(read_input_file(file), 3, file), LazyJpeg)
            and picture.layout.components == 3
        ):
            contents.append(picture.content)
            files.append(file)
    opened = (open_lazy_image(content, 3, "") for content in contents)
    pictures = [picture for picture in opened if isinstance(picture, LazyJpeg)]
    crop, preprocess = (
        AreaCrop(CROP_SIZE, CROP_AREA, CROP_RATIO, "bicubic"),
        ImagePreprocess(CROP_SIZE, mean=IMAGENET_MOMENTS[0], std=IMAGENET_MOMENTS[1]),
    )
    boxes = []
    for number, picture in enumerate(pictures):
        with fork_torch_rng(number):  # the box that `augment.picture` draws below
            boxes.append(crop.draw_box(*picture.size))
    cut = [picture.decode_region(box, CROP_SIZE) for picture, box in zip(pictures, boxes, strict=True)]
    cuts = [torch.from_numpy(pixels[None]).permute(0, 3, 1, 2) for pixels in cut]
    crops = [F.interpolate(cut, CROP_SIZE, mode="bicubic", antialias=True)[0] for cut in cuts]
    batch, augment, decode = torch.stack(crops[:BATCH_SIZE]), Augment(crop=CROP_AREA, flip=0.5), get_jpeg_decoder()

    def whole(number: int) -> object:
        width, height = pictures[number].size
        return decode(contents[number], (height, width, 3), 1)

    time_part = lambda part, images=1: measure_milliseconds(part, len(files), rounds, images)  # noqa: E731
    return {
        "decoding a whole file: what the rate of the loader is compared with": time_part(whole),
        "reading the file": time_part(lambda n: read_input_file(files[n])),
        "checking its header": time_part(lambda n: open_lazy_image(contents[n], 3, "", False)),
        "drawing a box": time_part(lambda n: crop.draw_box(*pictures[n].size)),
        "decoding the rows of the box, and cutting it out": time_part(
            lambda n: pictures[n].decode_region(boxes[n], CROP_SIZE)
        ),
        "resizing": time_part(lambda n: F.interpolate(cuts[n], CROP_SIZE, mode="bicubic", antialias=True)),
        "mirroring every second one": time_part(
            lambda n: image_to_uint8_tensor(flip_horizontally_at_random(crops[n], 0.5))
        ),
        "putting a batch together": time_part(lambda n: torch.stack(crops[:BATCH_SIZE]), BATCH_SIZE),
        "normalising it": time_part(lambda n: preprocess.normalise(batch), BATCH_SIZE),
        "all before the batch, in one call": time_part(
            lambda n: augment.augment_image(open_lazy_image(read_input_file(files[n]), 3, "", False), preprocess, n)
        ),
    }


def build_page(rows: dict[str, float], command: str) -> str:
    """The table, and what follows from it."""
    whole, *parts, together = rows.values()
    least = rows["decoding the rows of the box, and cutting it out"] + rows["resizing"]
    chained = together + rows["putting a batch together"] + rows["normalising it"]
    lines = [
        f"# What a photograph costs before it is learned from, {time.strftime('%Y-%m-%d')}",
        "",
        f"{describe_hardware()}.",
        "",
    ]
    lines += [f"`{command}`", "", "| part | ms of one core |", "|---|---|"]
    lines += [f"| {name} | {value:.3f} |" for name, value in rows.items()]
    lines += [f"| the parts added up | {sum(parts):.3f} |", ""]
    lines += [
        f"Whole files alone decode in {whole / chained:.0%} of the time of the parts one after another, each of which finds the cache",
        "as the one before left it: the share that a loader would reach whose processes cost nothing. If nothing but",
        f"decoding and resizing took time, each as fast as by itself, it would be {whole / least:.0%}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    configure_process()
    text = build_page(measure_parts(given.folder, given.rounds), "python benchmarks/loader_parts.py photographs/")
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
