"""ViTDet's backbone compared with the same model in plain PyTorch modules: seconds and peak memory per image.

    python benchmarks/vitdet.py --out benchmarks/results/DATE-vitdet-HARDWARE.md

The plain model is implemented here as in detectron2: linear layers, windows by reshaping, decomposed relative positions
added to explicit logits, softmax, matrix product. Both models have the same random weights, and their maps are compared
first.

The complete backbone, a windowed block and a global block are measured separately, with and without a backward pass,
one image at a time. Contenders alternate, each in a separate process. Memory is the peak resident set of the process,
including imports.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.apps.bench.race import ContenderResult, run_race
from vitreous.apps.bench.work import BenchmarkStep, Contender, Timing, Workload
from vitreous.models.config import SAMConfig
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model
from vitreous.system.machine import get_processor_name, has_bf16
from vitreous.weights.formats.vitdet import VITDET

TASKS = ("whole", "windowed block", "global block")
PASSES = ("forward", "forward and backward")


class PlainAttention(nn.Module):
    """Attention over (B, h, w, D) with decomposed relative positions, without fused operations."""

    def __init__(self, width: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rel_pos_h, self.rel_pos_w = (nn.Parameter(torch.zeros(2 * side - 1, width // heads)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, w, D) -> (B, h, w, D)."""
        batch, height, width, channels = x.shape
        qkv = self.qkv(x).reshape(batch, height * width, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.flatten(1, 2)  # (B h, N, d) each
        logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        grid = q.view(-1, height, width, q.shape[-1])
        row_bias = torch.einsum("bhwc,hkc->bhwk", grid, gather_relative_positions(self.rel_pos_h, height))
        columns = torch.einsum("bhwc,wkc->bhwk", grid, gather_relative_positions(self.rel_pos_w, width))
        shape = (len(q), height, width, height, width)
        logits = (logits.view(shape) + row_bias[..., None] + columns[..., None, :]).flatten(3).flatten(1, 2)
        y = (logits.softmax(-1) @ v).view(batch, self.heads, height, width, -1)
        return self.proj(y.permute(0, 2, 3, 1, 4).reshape(batch, height, width, channels))


def gather_relative_positions(table: Tensor, length: int) -> Tensor:
    """(2 L - 1, d) -> (L, L, d): entry (q, k) has the vector of offset q - k."""
    positions = torch.arange(length)
    return table[positions[:, None] - positions + length - 1]


class PlainMlp(nn.Module):
    """Two linear layers and a GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.fc2(F.gelu(self.fc1(x)))


class PlainBlock(nn.Module):
    """Pre-norm block; with a `window` the grid is padded with zeros and split into windows."""

    def __init__(self, width: int, heads: int, hidden: int, window: int, side: int) -> None:
        super().__init__()
        self.window = window
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = PlainAttention(width, heads, window or side), PlainMlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, w, D) -> (B, h, w, D)."""
        y = self.norm1(x)
        if self.window:
            batch, height, width, channels = y.shape
            size = self.window
            y = F.pad(y, (0, 0, 0, -width % size, 0, -height % size))
            rows, columns = y.shape[1] // size, y.shape[2] // size
            y = y.view(batch, rows, size, columns, size, channels).transpose(2, 3).reshape(-1, size, size, channels)
            y = self.attn(y).view(batch, rows, columns, size, size, channels).transpose(2, 3)
            y = y.reshape(batch, rows * size, columns * size, channels)[:, :height, :width]
        else:
            y = self.attn(y)
        x = x + y
        return x + self.mlp(self.norm2(x))


class PlainViTDet(nn.Module):
    """The backbone, with detectron2's names."""

    def __init__(self, config: SAMConfig) -> None:
        super().__init__()
        c = config
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(c.channels, c.width, c.patch, c.patch)})
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + c.table_grid[0] * c.table_grid[1], c.width))
        self.table_grid = c.table_grid
        self.blocks = nn.ModuleList(
            PlainBlock(c.width, c.heads, c.mlp.hidden, c.attention.window if i in c.windowed_blocks else 0, c.grid[0])
            for i in range(c.depth)
        )

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, h, w, D)."""
        x = self.patch_embed["proj"](images)
        table = self.pos_embed[:, 1:].unflatten(1, self.table_grid).movedim(-1, 1)
        x = (x + F.interpolate(table, size=x.shape[2:], mode="bicubic", align_corners=False)).movedim(1, -1)
        for block in self.blocks:
            x = block(x)
        return x


def build_random_backbone(config: SAMConfig) -> nn.Module:
    """Our backbone with random weights, including relative positions."""
    torch.manual_seed(0)
    model = build_model(config)
    for name, parameter in model.named_parameters():
        if name.endswith((".rows", ".columns")):
            nn.init.normal_(parameter, std=0.02)
    return model


def build_pair(config: SAMConfig) -> tuple[nn.Module, PlainViTDet]:
    """Our backbone and the plain one, with the same weights."""
    ours, plain = build_random_backbone(config), PlainViTDet(config)
    plain.load_state_dict(VITDET.to_foreign_tensors(config, ours.state_dict()))
    return ours, plain


def compute_difference(config: SAMConfig) -> float:
    """The maximum difference of their maps, relative to the maximum of a map."""
    ours, plain = build_pair(config)
    images = torch.randn(1, config.channels, *config.image)
    with torch.inference_mode():
        expected = plain(images)
        return ((ours.features_at(images, config.strides)[0] - expected).abs().max() / expected.abs().max()).item()  # type: ignore[operator]


def build_task_module(work: Workload, is_ours: bool) -> tuple[Callable[[Tensor], Tensor], tuple[int, ...], nn.Module]:
    """The function to be timed for a task, the shape of its input, and the module with its parameters; nothing else is
    built."""
    config: Any = config_from_name(work.model, work.image_size)
    task = work.task.partition(", ")[0]
    if task != "whole":
        config = config.with_options(depth=1, attention={"global_blocks": () if task == "windowed block" else (0,)})
    model: Any = build_random_backbone(config) if is_ours else PlainViTDet(config)
    if task != "whole":
        block = model.encoder.blocks[0] if is_ours else model.blocks[0]
        return block, (1, *config.grid, config.width), block
    shape = (1, config.channels, *config.image)
    return (lambda images: model.features_at(images, config.strides)[0]) if is_ours else model, shape, model


def build_step(work: Workload, is_ours: bool, bf16: bool = False) -> BenchmarkStep:
    """A turn: one image, or one grid of tokens."""
    compute, shape, module = build_task_module(work, is_ours)
    backwards = work.task.endswith("backward")
    module.train(backwards).requires_grad_(backwards)
    images = torch.randn(shape, requires_grad=backwards and len(shape) == 4 and shape[1] != 3)

    def turn() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16), torch.set_grad_enabled(backwards):
            loss = compute(images).float().square().mean()
        if backwards:
            module.zero_grad()
            loss.backward()
        return 1

    return turn


def list_contenders() -> list[Contender]:
    """All contenders."""
    return [
        Contender(
            name, kind, partial(build_step, is_ours=name == "vitreous", bf16=kind == "bf16"), is_ours=name == "vitreous"
        )
        for kind in ("fp32", *(["bf16"] if has_bf16("cpu") else []))
        for name in ("vitreous", "plain modules")
    ]


def build_page(model: str, size: int, apart: float, results: dict[str, list[ContenderResult]]) -> str:
    """Build the table."""
    lines = [
        f"# {model} at {size} pixels, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}. One image at a time.",
        f"The maps differ by {apart:.1e}, relative to the maximum.",
        "",
        "    python benchmarks/vitdet.py",
        "",
        "| work | contender | seconds | MiB |",
        "|---|---|---|---|",
    ]
    for task, lanes in results.items():
        for lane in lanes:
            seconds, memory = lane.failure or "", ""
            if lane.throughputs and not lane.failure:
                seconds, memory = f"{1 / lane.median:.3f}", f"{lane.memory / 2**20:.0f}"
            lines.append(f"| {task} | {lane.contender.label} | {seconds} | {memory} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Race at every task, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViTDet-B/16")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum seconds per round (at least one image)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    apart = compute_difference(config_from_name(args.model, args.size))
    results = {}
    for task in args.tasks:
        for passes in args.passes:
            name = f"{task}, {passes}"
            work = Workload(name, args.model, args.size, 1)
            results[name] = run_race(work, list_contenders(), Timing(args.rounds, args.seconds))
            print(name, [(lane.contender.label, lane.failure or f"{1 / lane.median:.3f} s") for lane in results[name]])
    text = build_page(args.model, args.size, apart, results)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
