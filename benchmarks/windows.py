"""Large images: Swin and a windowed ViT compared with the plain ViT and timm's Swin, from 224 to 1536 pixels.

    python benchmarks/windows.py --out benchmarks/results/DATE-windows-HARDWARE.md

Inference of single images with random weights. Contenders alternate within a size, each in a separate process, as in
`vitreous bench`. Time is per image; memory is the peak resident set of the process, including imports. The last columns
have the exponent by which both grow with the number of pixels between two sizes (1: linear); memory at the smallest
size does not count as growth.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitreous.apps.bench.race import ContenderResult, run_race
from vitreous.apps.bench.work import BenchmarkStep, Contender, Timing, Workload
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.inference.engine import InferenceOptions, make_engine
from vitreous.models.zoo import create_untrained_model
from vitreous.system.machine import get_processor_name, has_bf16

NUM_CLASSES = 1000
WINDOW_OPTIONS: dict[str, Any] = {"attention": {"window": 14, "global_blocks": (2, 5, 8, 11)}}  # as in ViTDet


def build_vitreous_step(work: Workload, model: str, **settings: Any) -> BenchmarkStep:
    """One of our models with the engine of `predict`."""
    return build_engine_turn(model, (work.image_size,) * 2, NUM_CLASSES, **settings)


def build_engine_turn(
    model: str, size: tuple[int, ...], classes: int, options: InferenceOptions | None = None, **settings: Any
) -> BenchmarkStep:
    """Return a turn that runs one image or clip of a size with the engine of `predict`."""
    torch.manual_seed(0)
    engine = make_engine(
        create_untrained_model(model, size, classes, **settings), ImagePreprocess(size), options or InferenceOptions()
    )
    pixels = torch.randint(0, 256, (1, 3, *size), dtype=torch.uint8)

    def turn() -> float:
        engine(pixels)
        return 1

    return turn


def build_timm_swin_step(work: Workload, bf16: bool = False) -> BenchmarkStep:
    """timm's Swin-T created for the size."""
    from timm.models.swin_transformer import SwinTransformer

    torch.manual_seed(0)
    model = SwinTransformer(work.image_size, num_classes=NUM_CLASSES).eval().requires_grad_(False)
    images = torch.randn(1, 3, work.image_size, work.image_size)
    if bf16:
        model, images = model.bfloat16(), images.bfloat16()

    @torch.inference_mode()
    def turn() -> float:
        model(images)
        return 1

    return turn


def list_contenders() -> list[Contender]:
    """All contenders."""
    table = [
        Contender("vitreous", "Swin-T", partial(build_vitreous_step, model="Swin-T/4"), is_ours=True),
        Contender(
            "vitreous",
            "ViT-B/16, windows of 14",
            partial(build_vitreous_step, model="ViT-B/16", **WINDOW_OPTIONS),
            is_ours=True,
        ),
        Contender("vitreous", "ViT-B/16", partial(build_vitreous_step, model="ViT-B/16"), is_ours=True),
        Contender("timm", "Swin-T, default (fp32)", build_timm_swin_step, "timm"),
    ]
    return table + [Contender("timm", "Swin-T, bf16", partial(build_timm_swin_step, bf16=True), "timm")] * has_bf16(
        "cpu"
    )


def compute_growth_exponent(small: float, large: float, sizes: tuple[int, int]) -> str:
    """The exponent by which a metric grows with the number of pixels."""
    return f"{math.log(large / small) / (2 * math.log(sizes[1] / sizes[0])):.2f}" if min(small, large) > 0 else ""


def build_page(results: dict[int, list[ContenderResult]]) -> str:
    """Build the table."""
    lines = [
        f"# Large images, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}. One image at a time.",
        "",
        "    python benchmarks/windows.py",
        "",
        "| contender | pixels | ms per image | MiB | exponent of time | exponent of memory |",
        "|---|---|---|---|---|---|",
    ]
    sizes = list(results)
    for lane_index, smallest in enumerate(results[sizes[0]]):
        for size_index, size in enumerate(sizes):
            lane, smaller = (
                results[size][lane_index],
                results[sizes[size_index - 1]][lane_index] if size_index else None,
            )
            if lane.failure or not lane.throughputs:
                lines.append(f"| {lane.contender.label} | {size} | {lane.failure} | | | |")
                continue
            grown = ["", ""]
            if smaller is not None and smaller.throughputs:
                sides = (sizes[size_index - 1], size)
                grown[0] = compute_growth_exponent(1 / smaller.median, 1 / lane.median, sides)
                if size_index > 1:
                    grown[1] = compute_growth_exponent(
                        smaller.memory - smallest.memory, lane.memory - smallest.memory, sides
                    )
            cells = [lane.contender.label, size, f"{1000 / lane.median:.0f}", f"{lane.memory / 2**20:.0f}", *grown]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Race at every size, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 512, 1024, 1536])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum seconds per round (at least one image)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {}
    for size in args.sizes:
        results[size] = run_race(
            Workload("inference", "", size, 1), list_contenders(), Timing(args.rounds, args.seconds)
        )
        print(size, [(lane.contender.label, lane.failure or f"{1000 / lane.median:.0f} ms") for lane in results[size]])
    text = build_page(results)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
