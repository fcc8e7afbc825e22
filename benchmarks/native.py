"""Photographs at their native aspect ratio, packed, compared with the same photographs squashed to squares.

    python benchmarks/native.py FOLDER --out benchmarks/results/DATE-native-HARDWARE.md

All photographs under FOLDER are decoded once and scaled to at most --tokens patches at their native aspect ratio, or to
a square of as many patches. A ViT with random weights, frozen as for `predict`, processes them on --threads threads:
squares in batches, packed images with attention per image or with a mask, and single images at their native aspect
ratio. The ways alternate in one process; the table has medians of --rounds, and images/s relative to squares.
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


def resize_to_tensor(image: Image.Image, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An image at (height, width) -> (3, height, width), about -1 to 1."""
    pixels = torch.frombuffer(bytearray(image.resize(size[::-1]).tobytes()), dtype=torch.uint8)
    return (pixels.view(*size, 3).movedim(-1, 0) / 127.5 - 1).to(dtype)


def build_contenders(args: argparse.Namespace) -> tuple[dict[str, Callable[[], object]], str]:
    """The functions that process all photographs once, by name, and a description of their inputs."""
    side = round(math.sqrt(args.tokens))
    config = config_from_name(args.model, side * 16)
    torch.manual_seed(0)
    precision = pick_precision("auto", "cpu")
    dtype = DTYPES[precision]
    model = freeze_for_inference(build_model(config).eval(), dtype, has_fast_packed_matmul("cpu"))
    model.any_size = True
    paths = sorted(path for path in args.folder.rglob("*") if is_image_file(path))
    images = [decode_to_pillow(path, 3) for path in paths]
    native = [
        resize_to_tensor(photo, fit_size_to_tokens(photo.size[::-1], config.patch, side**2), dtype) for photo in images
    ]
    squares = torch.stack([resize_to_tensor(photo, config.image, dtype) for photo in images])
    counts = [math.prod(image.shape[1:]) // math.prod(config.patch) for image in native]
    batch = max(1, round(1600 / side**2))
    about = (
        f"{len(images)} photographs of {len({image.shape for image in native})} sizes, {args.model} in {precision}; "
    )
    about += f"squares of {side**2} patches, native aspect ratios with {min(counts)} to {max(counts)}, {statistics.mean(counts):.0f} on average"
    return {
        "squashed, batched": lambda: [model(batch_images) for batch_images in squares.split(batch)],
        "native aspect, packed": lambda: PackedViT(model, masked=False)(native),
        "native aspect, packed with a mask": lambda: PackedViT(model, masked=True)(native),
        "native aspect, one by one": lambda: [model(image[None]) for image in native],
    }, about


def main() -> None:
    """Alternate the ways, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="ViT-S/16")
    parser.add_argument("--tokens", type=int, default=196)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    configure_process()
    torch.set_num_threads(args.threads)
    ways, about = build_contenders(args)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for _ in range(args.rounds + 1):
            for name, process in ways.items():
                began = time.process_time() if args.threads == 1 else time.perf_counter()
                process()
                seconds[name].append((time.process_time() if args.threads == 1 else time.perf_counter()) - began)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first round is not counted
    squashed_seconds = next(iter(medians.values()))
    lines = [
        f"# Images at their native aspect ratio, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {args.threads} thread(s), torch {torch.__version__}.",
    ]
    lines += [f"{about}. Processor time of one thread, or wall time of several; medians of {args.rounds} rounds.", ""]
    lines += [
        "    python benchmarks/native.py FOLDER",
        "",
        "| way | s for all | images/s relative to squashed |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {value:.2f} | {squashed_seconds / value:.2f} |" for name, value in medians.items()]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
