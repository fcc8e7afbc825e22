"""CIFAR-10 from scratch in a quarter of an hour: `vitreous train` beside timm's ViT of the same size in plain PyTorch.

    python benchmarks/cifar.py FOLDER --out benchmarks/DATE-cifar-HARDWARE.md

FOLDER has train/CLASS/* and test/CLASS/*. One after the other, each alone on the machine. Ours is the command as it
stands in the README. timm's model sees the same training images (the same tenth held out), the same shift and mirror,
in bfloat16 autocast where the processor has it, with fused AdamW, label smoothing and a cosine over the same wall-clock
time: what a good plain script does. `--alone` leaves it out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from vitreous.data.augmentation.augment import Augment
from vitreous.data.keys import key
from vitreous.data.preprocess import Preprocess
from vitreous.data.sampling import Order, stream
from vitreous.data.screen import screen
from vitreous.data.sources import open_data
from vitreous.machine import has_bf16, processor
from vitreous.models.names import configure

MODEL = "Conv+ViT-128x4/8"


def ours(folder: str, scratch: Path) -> dict:
    """The command, timed as a whole process."""
    out = scratch / "run"
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "vitreous", "train", folder, "--model", MODEL, "--out", str(out)], check=True)
    minutes = (time.perf_counter() - started) / 60
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    curve = [(line["seconds"] / 60, line["val/top1"]) for line in lines if "val/top1" in line]
    return {
        "minutes": minutes,
        "test": summary["test"]["top1"],
        "interval": summary["test"]["interval"]["top1"],
        "epochs": summary["epochs"],
        "rate": summary["images_per_second"],
        "memory": summary["peak_memory_bytes"],
        "parameters": summary["parameters"],
        "curve": curve,
    }


def theirs(folder: str, minutes: float, rate: float) -> dict:
    """timm's model in a plain loop that ends after as many minutes."""
    import timm
    from timm.models.vision_transformer import VisionTransformer

    started = time.perf_counter()
    data, config = open_data(folder), configure(MODEL, 32)
    preprocess = Preprocess((32, 32))
    splits = {
        name: (screen(split, preprocess, 0, keep=True)[0], torch.from_numpy(split.labels))
        for name, split in data.splits.items()
    }
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=32,
        patch_size=4,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        num_classes=len(data.classes),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05, fused=True)
    images, labels = splits["train"]
    augment, order, seen, curve, losses = Augment(shift=0.0625, flip=0.5), Order(len(images), 0), 0, [], []
    spare = 25.0  # seconds kept for judging at the end
    while (elapsed := time.perf_counter() - started) < 60 * minutes - spare:
        progress = elapsed / (60 * minutes - spare)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, progress / 0.05) * (1 + np.cos(np.pi * progress)) / 2
        samples, epochs, _ = stream(order, seen, seen + 128)
        batch = preprocess.normalise(augment.batch(images[torch.from_numpy(samples)], key(0, epochs, samples, 0)))
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16("cpu")):
            loss = F.cross_entropy(model(batch).float(), labels[torch.from_numpy(samples)], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += 128
        losses.append(loss.item())
        if progress * 6 >= len(curve) + 1:
            curve.append((elapsed / 60, accuracy(model, preprocess, *splits["val"])))
            print(
                f"timm {elapsed / 60:.1f} min, {seen} images, loss {np.mean(losses[-100:]):.3f}, val "
                f"{curve[-1][1]:.1%}",
                flush=True,
            )
    trained = time.perf_counter() - started
    curve.append((trained / 60, accuracy(model, preprocess, *splits["val"])))
    return {
        "minutes": (time.perf_counter() - started) / 60,
        "test": accuracy(model, preprocess, *splits["test"]),
        "epochs": seen / len(images),
        "rate": seen / trained,
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": curve,
        "version": timm.__version__,
    }


@torch.inference_mode()
def accuracy(model: torch.nn.Module, preprocess: Preprocess, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Top-1 in bfloat16 autocast."""
    model.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16("cpu")):
        hits = sum(
            int((model(preprocess.normalise(x)).argmax(1) == y).sum())
            for x, y in zip(images.split(256), labels.split(256), strict=True)
        )
    model.train()
    return hits / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lr", type=float, default=1e-3, help="timm's learning rate")
    parser.add_argument("--alone", action="store_true", help="without timm")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        a = ours(arguments.folder, Path(scratch))
    b = None if arguments.alone else theirs(arguments.folder, a["minutes"], arguments.lr)
    low, high = a["interval"]
    own = [
        f"`vitreous train FOLDER --model {MODEL}`",
        f"{a['parameters']:,}",
        f"{a['minutes']:.1f}",
        f"{a['epochs']:g}",
        f"{a['rate']:.0f}",
    ]
    peer = []
    if b:
        name, epochs = f"timm ViT, AdamW {arguments.lr:g}, bf16 autocast", f"{b['epochs']:.1f}"
        peer = [name, f"{b['parameters']:,}", f"{b['minutes']:.1f}", epochs, f"{b['rate']:.0f}", f"{b['test']:.2%}"]
    rows = [
        f"# CIFAR-10 (JPEG copy) from scratch, {time.strftime('%Y-%m-%d')}",
        "",
        (
            f"{processor()}, {torch.get_num_threads()} threads, torch "
            f"{torch.__version__}{', timm ' + b['version'] if b else ''}."
        ),
        "`python benchmarks/cifar.py FOLDER`; one run each, seed 0, one after the other, whole processes timed.",
        "",
        "| | parameters | minutes, all in | epochs | images/s, training | test top-1 |",
        "|---|---|---|---|---|---|",
        "| " + " | ".join([*own, f"{a['test']:.2%} (95 %: {low:.1%} to {high:.1%})"]) + " |",
        *(["| " + " | ".join(peer) + " |"] if peer else []),
        "",
        "Accuracy on the held-out tenth of the training images against minutes:",
        "",
        "| vitreous, minutes | val top-1 | timm, minutes | val top-1 |",
        "|---|---|---|---|",
    ]
    curves = (a["curve"], b["curve"] if b else [])
    for i in range(max(map(len, curves))):
        cells = [(f"{c[i][0]:.1f}", f"{c[i][1]:.1%}") if i < len(c) else ("", "") for c in curves]
        rows.append("| " + " | ".join(cell for pair in cells for cell in pair) + " |")
    rows += ["", f"Peak memory of `vitreous train`: {a['memory'] / 2**20:.0f} MiB, the pictures in memory included."]
    text = "\n".join(rows) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
