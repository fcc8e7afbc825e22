"""Cost of a photograph from its file to a normalised training crop, by step: the limits of the loader.

    python benchmarks/loader_parts.py PHOTOGRAPHS --out benchmarks/results/DATE-loader-parts-HARDWARE.md

Milliseconds of one core per image, as medians of rounds over all JPEG files of the folder without caching, as in a
loader. The steps are those of crops of 224 pixels, area 0.08 to 1, mirrored with probability 0.5, in batches of 32. No
data is passed between processes here; the difference between this sum and the rate of `vitreous bench --tasks loader`
is the cost of communication.
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
    """Median milliseconds per image of `part` at 0 .. count - 1; each call processes `images` images."""
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        for index in range(count):
            part(index)
        seconds.append(time.process_time() - started)
    return 1000 * statistics.median(seconds) / count / images


def measure_parts(folder: Path, rounds: int) -> dict[str, float]:
    """Milliseconds of each step, and of all steps in one call."""
    contents, files = [], []
    for file in list_images(folder):
        if (
            isinstance(jpeg := open_lazy_image(read_input_file(file), 3, file), LazyJpeg)
            and jpeg.layout.components == 3
        ):
            contents.append(jpeg.content)
            files.append(file)
    opened = (open_lazy_image(content, 3, "") for content in contents)
    jpegs = [jpeg for jpeg in opened if isinstance(jpeg, LazyJpeg)]
    crop, preprocess = (
        AreaCrop(CROP_SIZE, CROP_AREA, CROP_RATIO, "bicubic"),
        ImagePreprocess(CROP_SIZE, mean=IMAGENET_MOMENTS[0], std=IMAGENET_MOMENTS[1]),
    )
    boxes = []
    for index, jpeg in enumerate(jpegs):
        with fork_torch_rng(index):  # the box that `augment.augment_image` draws below
            boxes.append(crop.draw_box(*jpeg.size))
    cut = [jpeg.decode_region(box, CROP_SIZE) for jpeg, box in zip(jpegs, boxes, strict=True)]
    cuts = [torch.from_numpy(pixels[None]).permute(0, 3, 1, 2) for pixels in cut]
    crops = [F.interpolate(cut, CROP_SIZE, mode="bicubic", antialias=True)[0] for cut in cuts]
    batch, augment, decode = torch.stack(crops[:BATCH_SIZE]), Augment(crop=CROP_AREA, flip=0.5), get_jpeg_decoder()

    def whole(index: int) -> object:
        width, height = jpegs[index].size
        return decode(contents[index], (height, width, 3), 1)

    time_part = lambda part, images=1: measure_milliseconds(part, len(files), rounds, images)  # noqa: E731
    return {
        "decoding a complete file (reference for the loader's rate)": time_part(whole),
        "reading the file": time_part(lambda n: read_input_file(files[n])),
        "checking its header": time_part(lambda n: open_lazy_image(contents[n], 3, "", False)),
        "drawing a box": time_part(lambda n: crop.draw_box(*jpegs[n].size)),
        "decoding the rows of the box, and cropping": time_part(lambda n: jpegs[n].decode_region(boxes[n], CROP_SIZE)),
        "resizing": time_part(lambda n: F.interpolate(cuts[n], CROP_SIZE, mode="bicubic", antialias=True)),
        "random mirroring": time_part(lambda n: image_to_uint8_tensor(flip_horizontally_at_random(crops[n], 0.5))),
        "stacking a batch": time_part(lambda n: torch.stack(crops[:BATCH_SIZE]), BATCH_SIZE),
        "normalising it": time_part(lambda n: preprocess.normalise(batch), BATCH_SIZE),
        "all steps before the batch, in one call": time_part(
            lambda n: augment.augment_image(open_lazy_image(read_input_file(files[n]), 3, "", False), preprocess, n)
        ),
    }


def build_page(rows: dict[str, float], command: str) -> str:
    """Build the table, and the conclusions."""
    full_decoding, *steps, single_call = rows.values()
    least = rows["decoding the rows of the box, and cropping"] + rows["resizing"]
    chained = single_call + rows["stacking a batch"] + rows["normalising it"]
    lines = [f"# Cost of loading a photograph, {time.strftime('%Y-%m-%d')}", "", f"{describe_hardware()}.", ""]
    lines += [f"`{command}`", "", "| step | ms of one core |", "|---|---|"]
    lines += [f"| {name} | {value:.3f} |" for name, value in rows.items()]
    lines += [f"| sum of the steps | {sum(steps):.3f} |", ""]
    lines += [
        f"Complete files decode in {full_decoding / chained:.0%} of the time of all steps in sequence, with the CPU cache as left by",
        "the previous step: the share of a loader without communication cost. If only",
        f"decoding and resizing took time, it would be {full_decoding / least:.0%}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    configure_process()
    text = build_page(measure_parts(args.folder, args.rounds), "python benchmarks/loader_parts.py photographs/")
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
