"""Attention without gradients in bfloat16 on a CPU: batched products of chunks compared with PyTorch's fused kernel.

    python benchmarks/attention.py --out benchmarks/results/DATE-attention-HARDWARE.md

Both run alternately; the shortest CPU time of --rounds counts, with OMP_NUM_THREADS threads. Errors are relative to the
output of the same queries, keys and values in float64; the standard deviation of their logits is given. The second
table compares whole models with both kinds of attention, frozen and packed as for inference.
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

#: images, heads, tokens, channels of a head
ATTENTION_SHAPES = ((64, 6, 50, 64), (32, 6, 64, 64), (16, 6, 197, 64), (16, 12, 197, 64), (32, 6, 256, 64), (1, 16, 577, 64), (4, 6, 785, 64))  # fmt: skip
MODELS = (("ViT-Ti/16", 16), ("ViT-S/16", 16), ("ViT-S/16", 1), ("DiT-S/2", 8))
LOGIT_STDS = (1.0, 3.0)


def measure_fastest(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Run the contenders alternately, and return the shortest CPU time of each in seconds."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    return best


def make_qkv(shape: tuple[int, ...], logit_std: float = 1.0) -> list[torch.Tensor]:
    """Return random queries, keys and values (B, h, N, d) bfloat16, with the memory layout of a layer's output.

    `logit_std` is the standard deviation of their logits.
    """
    images, heads, tokens, size = shape
    scale = torch.tensor([logit_std**0.5, logit_std**0.5, 1.0])[:, None, None]
    return list((torch.randn(images, tokens, 3, heads, size) * scale).bfloat16().permute(2, 0, 3, 1, 4))


def build_kernel_rows(rounds: int) -> list[str]:
    """Measure the attention functions, and return the rows of the first table."""
    lines = []
    for shape in ATTENTION_SHAPES:
        q, k, v = make_qkv(shape)
        fused = F.scaled_dot_product_attention
        times = measure_fastest(
            {"fused": partial(fused, q, k, v), "chunks": partial(attend_in_chunks, q, k, v)}, rounds
        )
        errors = []
        for logit_std in LOGIT_STDS:
            q, k, v = (x[:1] for x in make_qkv(shape, logit_std))
            reference = fused(q.double(), k.double(), v.double())
            errors += [
                float((attend(q, k, v).double() - reference).norm() / reference.norm())
                for attend in (fused, attend_in_chunks)
            ]
        cells = [
            " x ".join(map(str, shape)),
            f"{times['fused'] * 1e3:.2f}",
            f"{times['chunks'] * 1e3:.2f}",
            f"{times['fused'] / times['chunks']:.2f}",
        ]
        lines.append("| " + " | ".join(cells + [f"{error:.1e}" for error in errors]) + " |")
    return lines


def build_model_rows(rounds: int) -> list[str]:
    """Measure whole models, and return the rows of the second table."""
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

        times = measure_fastest({"fused": fused, "chunks": partial(model, *inputs)}, rounds)
        lines.append(
            f"| {name} | {images} | {times['fused'] * 1e3:.0f} | {times['chunks'] * 1e3:.0f} | {times['fused'] / times['chunks']:.2f} |"
        )
    return lines


def main() -> None:
    """Measure, and print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        lines = [
            f"# Attention in bfloat16 without gradients, {time.strftime('%Y-%m-%d')}",
            "",
            f"{get_processor_name()}, torch {torch.__version__}, threads: {torch.get_num_threads()}; shortest CPU time of {options.rounds} alternating rounds. Errors are relative to float64, for logits",
            "with a standard deviation of 1 and of 3.",
            "",
            "    python benchmarks/attention.py",
            "",
            "| images x heads x tokens x channels | fused, ms | chunks, ms | ratio | error at std 1: fused | chunks | at std 3: fused | chunks |",
            "|---|---|---|---|---|---|---|---|",
            *build_kernel_rows(options.rounds),
            "",
            "| model, frozen and packed | images | fused, ms | chunks, ms | ratio |",
            "|---|---|---|---|---|",
            *build_model_rows(options.rounds),
        ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
