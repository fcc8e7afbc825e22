"""Photographs at their own aspect ratio, packed into rows, beside the same photographs squashed to squares.

    python benchmarks/native.py FOLDER --out benchmarks/results/DATE-native-HARDWARE.md

All photographs under FOLDER are decoded once, and scaled to at most --tokens patches at their own aspect, or to a square
of as many. A ViT of random weights, frozen as for `predict`, answers them on --threads threads: squares in batches,
packed rows with attention image after image or under a mask, and images at their own aspect each alone. The ways take
turns in one process; the table has medians of --rounds, and answers per second of as many images.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from vitreous.data.decoding.decode import decode_to_pillow, is_image_file
from vitreous.models.names import config_from_name
from vitreous.models.packed import PackedViT
from vitreous.models.zoo import build_model
from vitreous.nn.frozen import freeze_for_inference
from vitreous.nn.sizes import fit_size_to_tokens
from vitreous.system.machine import (
    DTYPES,
    configure_process,
    get_processor_name,
    has_fast_packed_matmul,
    pick_precision,
)


def resize_to_tensor(picture: Image.Image, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A picture at (height, width) -> (3, height, width), about -1 to 1."""
    pixels = torch.frombuffer(bytearray(picture.resize(size[::-1]).tobytes()), dtype=torch.uint8)
    return (pixels.view(*size, 3).movedim(-1, 0) / 127.5 - 1).to(dtype)


def build_contenders(given: argparse.Namespace) -> tuple[dict[str, Callable[[], object]], str]:
    """The ways by name, each of which answers all photographs once, and a line on what they are given."""
    side = round(math.sqrt(given.tokens))
    config = config_from_name(given.model, side * 16)
    torch.manual_seed(0)
    precision = pick_precision("auto", "cpu")
    dtype = DTYPES[precision]
    model = freeze_for_inference(build_model(config).eval(), dtype, has_fast_packed_matmul("cpu"))
    model.any_size = True
    paths = sorted(path for path in given.folder.rglob("*") if is_image_file(path))
    pictures = [decode_to_pillow(path, 3) for path in paths]
    native = [
        resize_to_tensor(one, fit_size_to_tokens(one.size[::-1], config.patch, side**2), dtype) for one in pictures
    ]
    squares = torch.stack([resize_to_tensor(one, config.image, dtype) for one in pictures])
    counts = [math.prod(image.shape[1:]) // math.prod(config.patch) for image in native]
    batch = max(1, round(1600 / side**2))
    about = (
        f"{len(pictures)} photographs of {len({image.shape for image in native})} sizes, {given.model} in {precision}; "
    )
    about += f"squares of {side**2} patches, own aspects of {min(counts)} to {max(counts)}, {statistics.mean(counts):.0f} on average"
    return {
        "squashed, in batches": lambda: [model(part) for part in squares.split(batch)],
        "own aspect, packed": lambda: PackedViT(model, masked=False)(native),
        "own aspect, packed, by a mask": lambda: PackedViT(model, masked=True)(native),
        "own aspect, each alone": lambda: [model(image[None]) for image in native],
    }, about


def main() -> None:
    """Let the ways take turns, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="ViT-S/16")
    parser.add_argument("--tokens", type=int, default=196)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    configure_process()
    torch.set_num_threads(given.threads)
    ways, about = build_contenders(given)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for _ in range(given.rounds + 1):
            for name, answer in ways.items():
                began = time.process_time() if given.threads == 1 else time.perf_counter()
                answer()
                seconds[name].append((time.process_time() if given.threads == 1 else time.perf_counter()) - began)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first is not counted
    first = next(iter(medians.values()))
    lines = [
        f"# Images at their own aspect, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {given.threads} thread(s), torch {torch.__version__}.",
    ]
    lines += [f"{about}. Processor time of one thread, or seconds of several; medians of {given.rounds} turns.", ""]
    lines += [
        "    python benchmarks/native.py FOLDER",
        "",
        "| way | s for all | images/s to squashed |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {value:.2f} | {first / value:.2f} |" for name, value in medians.items()]
    print("\n".join(lines))
    if given.out:
        given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
