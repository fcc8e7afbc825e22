"""Large images: Swin and a ViT with windows beside the plain ViT and timm's Swin, from 224 to 1536 pixels.

    python benchmarks/windows.py --out benchmarks/results/DATE-windows-HARDWARE.md

Inference of one image at a time, random weights, the contenders in turn within a size, each in a process of its own, as
`vitreous bench` has them. Time is that of an image; memory is the highest resident set of the process, its imports
included. The last columns say by which power of the number of pixels both grow between two sizes, 1 being linear; what a
process takes at the smallest size is not counted as growth of memory.
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
WINDOW_OPTIONS: dict[str, Any] = {"attention": {"window": 14, "global_blocks": (2, 5, 8, 11)}}  # ViTDet's


def build_vitreous_step(work: Workload, model: str, **settings: Any) -> BenchmarkStep:
    """A model of ours by the engine that `predict` takes."""
    return engine_turn(model, (work.image_size,) * 2, NUM_CLASSES, **settings)


def engine_turn(
    model: str, size: tuple[int, ...], classes: int, options: InferenceOptions | None = None, **settings: Any
) -> BenchmarkStep:
    """One image or clip of a size by the engine that `predict` takes."""
    torch.manual_seed(0)
    engine = make_engine(
        create_untrained_model(model, size, classes, **settings), ImagePreprocess(size), options or InferenceOptions()
    )
    pixels = torch.randint(0, 256, (1, 3, *size), dtype=torch.uint8)

    def turn() -> float:
        engine(pixels)
        return 1

    return turn


def timm_swin(work: Workload, bf16: bool = False) -> BenchmarkStep:
    """timm's Swin-T made for the size."""
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
    """Who takes part."""
    table = [
        Contender("vitreous", "Swin-T", partial(build_vitreous_step, model="Swin-T/4"), is_ours=True),
        Contender(
            "vitreous",
            "ViT-B/16, windows of 14",
            partial(build_vitreous_step, model="ViT-B/16", **WINDOW_OPTIONS),
            is_ours=True,
        ),
        Contender("vitreous", "ViT-B/16", partial(build_vitreous_step, model="ViT-B/16"), is_ours=True),
        Contender("timm", "Swin-T, default (fp32)", timm_swin, "timm"),
    ]
    return table + [Contender("timm", "Swin-T, bf16", partial(timm_swin, bf16=True), "timm")] * has_bf16("cpu")


def compute_growth_exponent(small: float, large: float, sizes: tuple[int, int]) -> str:
    """By which power of the pixels a figure grows."""
    return f"{math.log(large / small) / (2 * math.log(sizes[1] / sizes[0])):.2f}" if min(small, large) > 0 else ""


def build_page(found: dict[int, list[ContenderResult]]) -> str:
    """The tables."""
    lines = [
        f"# Large images, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}. One image at a time.",
        "",
        "    python benchmarks/windows.py",
        "",
        "| contender | pixels | ms an image | MiB | time grows by | memory grows by |",
        "|---|---|---|---|---|---|",
    ]
    sizes = list(found)
    for number, first in enumerate(found[sizes[0]]):
        for place, size in enumerate(sizes):
            lane, before = found[size][number], found[sizes[place - 1]][number] if place else None
            if lane.failure or not lane.throughputs:
                lines.append(f"| {lane.contender.label} | {size} | {lane.failure} | | | |")
                continue
            grown = ["", ""]
            if before is not None and before.throughputs:
                sides = (sizes[place - 1], size)
                grown[0] = compute_growth_exponent(1 / before.median, 1 / lane.median, sides)
                if place > 1:
                    grown[1] = compute_growth_exponent(before.memory - first.memory, lane.memory - first.memory, sides)
            cells = [lane.contender.label, size, f"{1000 / lane.median:.0f}", f"{lane.memory / 2**20:.0f}", *grown]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Race at every size, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 512, 1024, 1536])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round, and at least one image")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {}
    for size in given.sizes:
        found[size] = run_race(
            Workload("inference", "", size, 1), list_contenders(), Timing(given.rounds, given.seconds)
        )
        print(size, [(lane.contender.label, lane.failure or f"{1000 / lane.median:.0f} ms") for lane in found[size]])
    text = build_page(found)
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
