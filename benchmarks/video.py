"""Cost of frames: ViViT's arrangements compared with transformers' VideoMAE on the same clips, from 8 to 32 frames.

    python benchmarks/video.py --out benchmarks/results/DATE-video-HARDWARE.md

Inference of single clips, ViT-S blocks on patches of 2 x 16 x 16, random weights. Contenders alternate within a length,
each in a separate process, as in `vitreous bench`. Time is per clip; memory is the peak resident set of the process,
including imports.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from windows import build_engine_turn

from vitreous.apps.bench.race import ContenderResult, run_race
from vitreous.apps.bench.work import BenchmarkStep, Contender, Timing, Workload
from vitreous.inference.engine import InferenceOptions
from vitreous.system.machine import get_processor_name, has_bf16

NUM_CLASSES, IMAGE_SIZE = 400, 224
VIVIT_VARIANTS = ("joint", "factorised-encoder", "factorised-attention", "factorised-dot-product")


def build_vitreous_step(work: Workload, arrangement: str, precision: Literal["auto", "fp32"] = "auto") -> BenchmarkStep:
    """One of our models with the engine of `predict`; `image_size` is the number of frames."""
    clip = (work.image_size, IMAGE_SIZE, IMAGE_SIZE)
    return build_engine_turn(
        "ViViT-S/16x2", clip, NUM_CLASSES, InferenceOptions(precision=precision), arrangement=arrangement
    )


def build_videomae_step(work: Workload, bf16: bool = False) -> BenchmarkStep:
    """transformers' VideoMAE of the same width and depth, with joint attention."""
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    torch.manual_seed(0)
    sizes: dict[str, int] = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
    sizes |= {
        "num_hidden_layers": 12,
        "image_size": IMAGE_SIZE,
        "num_frames": work.image_size,
        "num_labels": NUM_CLASSES,
    }
    config = VideoMAEConfig(**sizes)
    model = VideoMAEForVideoClassification(config).eval().requires_grad_(False)
    clips = torch.randn(1, work.image_size, 3, IMAGE_SIZE, IMAGE_SIZE)

    @torch.inference_mode()
    def turn() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            model(clips)
        return 1

    return turn


def list_contenders() -> list[Contender]:
    """All contenders."""
    table = [
        Contender("vitreous", name, partial(build_vitreous_step, arrangement=name), is_ours=True)
        for name in VIVIT_VARIANTS
    ]
    table += [
        Contender(
            "vitreous", "joint, fp32", partial(build_vitreous_step, arrangement="joint", precision="fp32"), is_ours=True
        )
    ]
    table += [Contender("transformers", "VideoMAE, default (fp32)", build_videomae_step, "transformers")]
    fast = Contender("transformers", "VideoMAE, bf16 autocast", partial(build_videomae_step, bf16=True), "transformers")
    return table + [fast] * has_bf16("cpu")


def build_page(lanes: dict[int, list[ContenderResult]]) -> str:
    """Build the table: milliseconds and MiB for each length."""
    lengths = list(lanes)
    lines = [
        f"# Clips of 8 to 32 frames, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}. ViT-S, patches of 2 x 16 x 16, clips of",
        f"{IMAGE_SIZE} x {IMAGE_SIZE} pixels, one at a time: milliseconds per clip, and the memory of the process in MiB.",
        "",
        "    python benchmarks/video.py",
        "",
        "| contender | " + " | ".join(f"{frames} frames, ms | MiB" for frames in lengths) + " |",
        "|---" * (1 + 2 * len(lengths)) + "|",
    ]
    for lane_index, shortest in enumerate(lanes[lengths[0]]):
        cells = [shortest.contender.label]
        for frames in lengths:
            lane = lanes[frames][lane_index]
            if lane.failure or not lane.throughputs:
                cells += [lane.failure or "nothing", ""]
            else:
                cells += [f"{1000 / lane.median:.0f}", f"{lane.memory / 2**20:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Race at every length, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum seconds per round (at least one clip)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lanes = {}
    for frames in args.frames:
        lanes[frames] = run_race(
            Workload("inference", "", frames, 1), list_contenders(), Timing(args.rounds, args.seconds)
        )
        times = [(lane.contender.label, lane.failure or f"{1000 / lane.median:.0f} ms") for lane in lanes[frames]]
        print(frames, times, flush=True)
    text = build_page(lanes)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
