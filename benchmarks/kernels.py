"""GELU and rotary attention in bfloat16 on a CPU: this project's kernels compared with the operators of PyTorch and, for
GELU in inference, with that of oneDNN.

    OMP_NUM_THREADS=1 python benchmarks/kernels.py

GELU in training: GELU and the linear layer after it, forward and backward, with the tokens of 8 images of a ViT-B/16.
GELU in inference: a batch of 8 images with the PyTorch engine, where oneDNN applies its GELU within the product.
Rotary attention: that of a block of DINOv3-S/16 for 8 images, with and without the backward pass. Both contenders run
alternately; the shortest CPU time of --rounds counts.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from unittest.mock import patch

import torch

from vitreous import create
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.inference.engine import InferenceOptions, make_engine
from vitreous.models.names import vit_config_from_name
from vitreous.models.zoo import build_model
from vitreous.nn import kernels
from vitreous.nn.block import GeluLinear
from vitreous.nn.position import TokenPositions
from vitreous.system.machine import get_best_cpu_feature, get_processor_name

TOKENS, HIDDEN, WIDTH = 8 * 197, 3072, 768
MODELS = ("ViT-S/16", "ViT-B/16", "SigLIP-B/16")


def measure_fastest(contenders: dict[str, Callable[[], object]], rounds: int, switch: str) -> dict[str, float]:
    """Run the contenders alternately, and return the shortest CPU time of each in milliseconds. `switch`: the function
    of `nn.kernels` that returns True for the contender `native`."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, run in contenders.items():
            with patch.object(kernels, switch, lambda *arguments, name=name: name == "native"):
                start = time.process_time()
                run()
                best[name] = min(best[name], 1e3 * (time.process_time() - start))
    return best


def measure_training(gelu: str, rounds: int) -> dict[str, float]:
    """Measure GELU of this form and a linear layer, forward and backward."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(WIDTH, HIDDEN)).bfloat16().requires_grad_()
    bias, grad = torch.zeros(WIDTH).bfloat16().requires_grad_(), torch.randn(TOKENS, WIDTH).bfloat16()
    run = lambda: GeluLinear.apply(hidden, weight, bias, gelu).backward(grad)  # noqa: E731
    return measure_fastest({"native": run, "PyTorch": run}, rounds, "has_native_kernels")


def measure_inference(name: str, rounds: int) -> dict[str, float]:
    """Measure a batch of 8 images of 224 pixels."""
    model, preprocess = create(name, image_size=224), ImagePreprocess((224, 224))
    pixels, contenders = torch.from_numpy(preprocess.noise(8)), {}
    for contender in ("native", "oneDNN"):
        with patch.object(kernels, "is_native_gelu_faster", lambda contender=contender: contender == "native"):
            engine = make_engine(model, preprocess, InferenceOptions("cpu", "bf16", "torch"))
        contenders[contender] = lambda engine=engine: engine(pixels)
    return measure_fastest(contenders, rounds, "is_native_gelu_faster")


def measure_rotation(rounds: int, *, is_training: bool) -> dict[str, float]:
    """Measure the attention of a block of DINOv3-S/16, with the backward pass if `is_training`."""
    torch.manual_seed(0)
    config = vit_config_from_name("DINOv3-S/16", 224)
    attention = build_model(config).blocks()[0].attention.part.bfloat16()
    positions = TokenPositions(config.grid, config.prefix)
    tokens = torch.randn(8, config.prefix + math.prod(config.grid), config.width).bfloat16()
    grad = torch.randn_like(tokens)

    def run() -> None:
        """Compute the outputs, and the gradients in training."""
        with torch.set_grad_enabled(is_training):
            outputs = attention(tokens.requires_grad_(is_training), positions)
        if is_training:
            outputs.backward(grad)

    return measure_fastest({"native": run, "PyTorch": run}, rounds, "can_rotate")


def main() -> None:
    """Measure all, and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    if not kernels.has_native_kernels():
        raise SystemExit("this machine has no native kernels\n  see `vitreous doctor`")
    print(get_processor_name(), get_best_cpu_feature(), f"{torch.get_num_threads()} threads, milliseconds of CPU time")
    rows = [(f"training, gelu {gelu}", measure_training(gelu, rounds)) for gelu in ("none", "tanh")]
    rows += [(f"inference, {name}", measure_inference(name, rounds)) for name in MODELS]
    for phase in ("training", "inference"):
        rows.append((f"{phase}, rotary attention", measure_rotation(4 * rounds, is_training=phase == "training")))
    for title, times in rows:
        print(f"{title}:", ", ".join(f"{name} {value:.1f}" for name, value in times.items()))


if __name__ == "__main__":
    main()
