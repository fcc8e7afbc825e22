"""A training step (forward, backward, AdamW): ours and timm's, in turn, in one run; images per second and peak memory.

    python benchmarks/step.py --out benchmarks/DATE-step-HARDWARE.md

Every contender lives in a process of its own, so that its peak memory is its own, and they take their steps in turn, so
that a change of the machine's speed meets all alike.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import resource
import statistics
import time
from pathlib import Path

WORK = {"ViT-S/16, 224 px, batch 16": ("ViT-S/16", 224, 16), "ViT-128x6/4, 32 px, batch 128": ("ViT-128x6/4", 32, 128)}
CONTENDERS = [
    "vitreous, bf16 (default)",
    "timm's model in the same loop, bf16",
    "timm, bf16 autocast, fused AdamW",
    "timm, fp32 (its default)",
]
WARM, ROUNDS, STEPS = 2, 7, 2


def build(contender: str, name: str, size: int, batch_size: int):
    """A function that takes one training step."""
    import torch
    import torch.nn.functional as F
    from timm.models.vision_transformer import VisionTransformer
    from torch import nn

    from vitreous.machine import settle_allocator
    from vitreous.models.vit import ViT
    from vitreous.models.zoo import configure
    from vitreous.objectives.supervised import Supervised
    from vitreous.training.flat import Flat
    from vitreous.training.optimizer import Optimizers
    from vitreous.training.run import Optimizer

    class Plain(nn.Module):
        """An objective around any classifier."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch):
            return {"loss": F.cross_entropy(self.model(batch["images"]).float(), batch["labels"])}

    torch.manual_seed(0)
    config = configure(name, size)
    images, labels = torch.randn(batch_size, 3, size, size), torch.randint(0, 1000, (batch_size,))

    def peer():
        return VisionTransformer(
            img_size=size, patch_size=config.patch[0], embed_dim=config.width, depth=config.depth, num_heads=config.heads, num_classes=1000
        )

    if contender.startswith("vitreous") or "same loop" in contender:
        settle_allocator()
        objective = Supervised(ViT(config)) if contender.startswith("vitreous") else Plain(peer())
        flat = Flat(objective, torch.bfloat16, torch.device("cpu"))
        optimizers = Optimizers(Optimizer(), flat)
        batch = {"images": images.bfloat16(), "labels": labels}

        def step():
            flat.zero()
            objective(batch)["loss"].backward()
            flat.collect()
            flat.clip(1.0)
            optimizers.step(1.0)
            flat.publish(1)

        return step
    model, half = peer(), "autocast" in contender
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True if half else None)

    def plain():
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = F.cross_entropy(model(images).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return plain


def serve(pipe, contender: str, work: tuple[str, int, int]) -> None:
    """A contender's process: build, then time steps when told to."""
    step = build(contender, *work)
    pipe.send("ready")
    while (count := pipe.recv()) > 0:
        started = time.perf_counter()
        for _ in range(count):
            step()
        pipe.send((time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    context, sections = mp.get_context("spawn"), []
    for title, work in WORK.items():
        pipes, processes = {}, []
        for contender in CONTENDERS:
            pipes[contender], theirs = context.Pipe()
            processes.append(context.Process(target=serve, args=(theirs, contender, work), daemon=True))
            processes[-1].start()
            assert pipes[contender].recv() == "ready"
        times, memory = {c: [] for c in CONTENDERS}, {}
        for round_ in range(WARM + ROUNDS):
            for contender in CONTENDERS:
                pipes[contender].send(STEPS)
                seconds, memory[contender] = pipes[contender].recv()
                if round_ >= WARM:
                    times[contender].append(work[2] * STEPS / seconds)
        for pipe, process in zip(pipes.values(), processes, strict=True):
            pipe.send(0)
            process.join()
        base = statistics.median(times[CONTENDERS[-1]])
        sections += [
            f"## {title}",
            "",
            "| contender | images/s, median (min to max) | ratio to timm's default | peak memory, MiB |",
            "|---|---|---|---|",
        ]
        for contender in CONTENDERS:
            rates = times[contender]
            middle = statistics.median(rates)
            sections.append(
                f"| {contender} | {middle:.1f} ({min(rates):.1f} to {max(rates):.1f}) | {middle / base:.2f} | {memory[contender]:.0f} |"
            )
        sections.append("")
        print("\n".join(sections[-len(CONTENDERS) - 5 :]), flush=True)
    if arguments.out:
        import timm
        import torch

        from vitreous.machine import processor

        head = [f"# Training step, {time.strftime('%Y-%m-%d')}", ""]
        head += [f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}, timm {timm.__version__}."]
        head += [
            f"`python benchmarks/step.py`; forward, backward, clipping, AdamW; {ROUNDS} rounds of {STEPS} steps in turn.",
            "",
        ]
        arguments.out.write_text("\n".join(head + sections))


if __name__ == "__main__":
    main()
