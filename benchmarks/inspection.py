"""Attention distance and rollout of one image, compared with eager attention that stores every map: seconds, and peak
memory beyond the model.

    python benchmarks/inspection.py --out benchmarks/results/DATE-inspection-HARDWARE.md

Each row is a separate process: it loads the model (random weights), computes once on a small image, resets its peak
memory, and then measures one call on a noise image. Eager is timm's model with fused attention disabled and a hook on
every attention dropout that stores its probabilities, as in vit-explain, followed by the same distance, or the same
rollout (mean over the heads, half the identity, no discarding) with full matrices. If the maps do not fit into three
quarters of the free memory, only their size is reported.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from vitreous.system.machine import get_processor_name

MODEL_NAME, TIMM_NAME = "ViT-B/16", "vit_base_patch16_224"
PATCH, HEADS, DEPTH, MIB, GIB = 16, 12, 12, 2**20, 2**30
AttentionCall = Callable[[Tensor], Tensor]


def read_status_bytes(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def build_vitreous_call(task: str, image_size: int) -> AttentionCall:
    """The library's functions."""
    from vitreous.inspection.distance import compute_attention_distances
    from vitreous.inspection.rollout import compute_rollout
    from vitreous.models.zoo import create_untrained_model

    model = create_untrained_model(MODEL_NAME, image_size).eval()
    return (
        (lambda images: compute_attention_distances(model, [images]).mean)
        if task == "distance"
        else (lambda images: compute_rollout(model, images).maps[:, -1])
    )


def build_eager_call(task: str, image_size: int) -> AttentionCall:
    """Hooks that store (B, h, T, T) of every block."""
    import timm

    model = timm.create_model(TIMM_NAME, img_size=image_size, dynamic_img_size=True).eval()
    maps: list[Tensor] = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, inputs, out: maps.append(out))

    @torch.no_grad()
    def look(images: Tensor) -> Tensor:
        maps.clear()
        model(images)
        return compute_mean_distances(maps, images.shape[-1] // PATCH) if task == "distance" else multiply_rollout(maps)

    return look


def compute_mean_distances(maps: list[Tensor], side: int) -> Tensor:
    """Mean distances in pixels, (L, h), with the full matrix of distances."""
    positions = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float() * PATCH
    apart = torch.cdist(positions, positions)
    return torch.stack([(a[0, :, 1:, 1:] * apart).sum(-1).mean(-1) for a in maps])


def multiply_rollout(maps: list[Tensor]) -> Tensor:
    """The class token's row of the rollout, by products of full matrices."""
    identity = result = torch.eye(maps[0].shape[-1])
    for a in maps:
        mixed = (a.mean(1) + identity) / 2
        result = mixed / mixed.sum(-1, keepdim=True) @ result
    return result[0, 0, 1:]


def measure_row(who: str, task: str, image_size: int) -> dict:
    """Measure one row in this process."""
    look = {"vitreous": build_vitreous_call, "eager": build_eager_call}[who](task, image_size)
    look(torch.randn(1, 3, 32, 32))
    images = torch.randn(1, 3, image_size, image_size)
    ctypes.CDLL(None).malloc_trim(0)  # memory freed after loading would be reused, and not be counted
    Path("/proc/self/clear_refs").write_text("5")
    memory_before, began = read_status_bytes("VmRSS"), time.perf_counter()
    look(images)
    return {"seconds": time.perf_counter() - began, "beyond": read_status_bytes("VmHWM") - memory_before}


def count_map_bytes(image_size: int) -> int:
    """Bytes of every block's probabilities in float32."""
    return DEPTH * HEADS * ((image_size // PATCH) ** 2 + 1) ** 2 * 4


def get_available_memory() -> int:
    """Bytes of available memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def build_page(rows: list[dict]) -> list[str]:
    """The lines of the page."""
    import timm

    lines = [
        f"# Attention distance and rollout of {MODEL_NAME}, one image, {time.strftime('%Y-%m-%d')}",
        "",
        (
            f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, timm {timm.__version__}, "
            "float32."
        ),
        (
            "`python benchmarks/inspection.py`; each row is a separate process. Memory is the peak beyond the loaded "
            "model; eager is timm"
        ),
        "without fused attention, storing every map, as in vit-explain.",
        "",
        "| method | image size | | seconds | memory beyond the model |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if "seconds" in row:
            cells = f"{row['seconds']:.1f} | {row['beyond'] / MIB:,.0f} MiB"
        else:
            cells = f"not run | the maps alone take {count_map_bytes(row['image']) / GIB:.1f} GiB"
        lines.append(f"| {row['task']} | {row['image']} | {row['who']} | {cells} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image-sizes", type=int, nargs="+", default=[224, 1024])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.one:
        who, task, image_size = arguments.one
        print(json.dumps(measure_row(who, task, int(image_size))))
        return
    rows = []
    for image_size in arguments.image_sizes:
        for task in ("distance", "rollout"):
            for who in ("vitreous", "eager"):
                row = {"task": task, "image": image_size, "who": who}
                if who == "vitreous" or count_map_bytes(image_size) < 0.75 * get_available_memory():
                    command = [
                        sys.executable,
                        __file__,
                        "--threads",
                        str(arguments.threads),
                        "--one",
                        who,
                        task,
                        str(image_size),
                    ]
                    row |= json.loads(
                        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
                    )
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    text = "\n".join(build_page(rows))
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
