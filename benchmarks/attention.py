"""Attention without gradients in bfloat16 on a CPU: batched products by parts of the batch beside PyTorch's fused kernel.

    python benchmarks/attention.py --out benchmarks/results/DATE-attention-HARDWARE.md

In turn, the quickest of --rounds by processor time, of one thread or as many as OMP_NUM_THREADS says. Errors are relative, to the same
queries, keys and values in float64, whose logits have the deviation that is named. And whole models, frozen and packed as they
infer, with one and with the other.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

from vitreous import create
from vitreous.nn.attention import attend_in_chunks
from vitreous.nn.frozen import freeze_for_inference
from vitreous.system.machine import get_processor_name

#: images, heads, tokens, numbers of a head
ATTENTION_SHAPES = ((64, 6, 50, 64), (32, 6, 64, 64), (16, 6, 197, 64), (16, 12, 197, 64), (32, 6, 256, 64), (1, 16, 577, 64), (4, 6, 785, 64))  # fmt: skip
MODELS = (("ViT-Ti/16", 16), ("ViT-S/16", 16), ("ViT-S/16", 1), ("DiT-S/2", 8))
LOGIT_STDS = (1.0, 3.0)


def measure_fastest(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The quickest of each in seconds of the processor."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, act in contenders.items():
            began = time.process_time()
            act()
            best[name] = min(best[name], time.process_time() - began)
    return best


def make_qkv(shape: tuple[int, ...], deviation: float = 1.0) -> list[torch.Tensor]:
    """Queries, keys and values (B, h, N, d) bfloat16 as a layer gives them, whose logits have this deviation."""
    images, heads, tokens, size = shape
    scale = torch.tensor([deviation**0.5, deviation**0.5, 1.0])[:, None, None]
    return list((torch.randn(images, tokens, 3, heads, size) * scale).bfloat16().permute(2, 0, 3, 1, 4))


def build_kernel_rows(rounds: int) -> list[str]:
    """The lines of the first table."""
    lines = []
    for shape in ATTENTION_SHAPES:
        q, k, v = make_qkv(shape)
        fused = F.scaled_dot_product_attention
        times = measure_fastest({"fused": partial(fused, q, k, v), "parts": partial(attend_in_chunks, q, k, v)}, rounds)
        errors = []
        for deviation in LOGIT_STDS:
            q, k, v = (x[:1] for x in make_qkv(shape, deviation))
            exact = fused(q.double(), k.double(), v.double())
            errors += [float((y(q, k, v).double() - exact).norm() / exact.norm()) for y in (fused, attend_in_chunks)]
        cells = [
            " x ".join(map(str, shape)),
            f"{times['fused'] * 1e3:.2f}",
            f"{times['parts'] * 1e3:.2f}",
            f"{times['fused'] / times['parts']:.2f}",
        ]
        lines.append("| " + " | ".join(cells + [f"{error:.1e}" for error in errors]) + " |")
    return lines


def build_model_rows(rounds: int) -> list[str]:
    """The lines of the second table."""
    lines = []
    for name, images in MODELS:
        model = freeze_for_inference(create(name).eval(), torch.bfloat16, packed=True)
        if name.startswith("DiT"):
            inputs = (torch.randn(images, 4, 32, 32), torch.full((images,), 500.0), torch.arange(images))
        else:
            inputs = (torch.randn(images, 3, 224, 224),)

        def fused(model=model, inputs=inputs) -> None:
            with patch("vitreous.nn.attention.prefers_chunked_attention", return_value=False):
                model(*inputs)

        times = measure_fastest({"fused": fused, "parts": partial(model, *inputs)}, rounds)
        lines.append(
            f"| {name} | {images} | {times['fused'] * 1e3:.0f} | {times['parts'] * 1e3:.0f} | {times['fused'] / times['parts']:.2f} |"
        )
    return lines


def main() -> None:
    """Measure, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        lines = [
            f"# Attention in bfloat16 without gradients, {time.strftime('%Y-%m-%d')}",
            "",
            f"{get_processor_name()}, torch {torch.__version__}, threads: {torch.get_num_threads()}; the quickest of {given.rounds} in turn, processor time. Errors are to float64, of logits",
            "with a deviation of 1 and of 3.",
            "",
            "    python benchmarks/attention.py",
            "",
            "| images x heads x tokens x size | fused, ms | in parts, ms | ratio | error at 1: fused | parts | at 3: fused | parts |",
            "|---|---|---|---|---|---|---|---|",
            *build_kernel_rows(given.rounds),
            "",
            "| model, frozen and packed | images | fused, ms | in parts, ms | ratio |",
            "|---|---|---|---|---|",
            *build_model_rows(given.rounds),
        ]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
