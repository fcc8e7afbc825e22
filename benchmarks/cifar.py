"""CIFAR-10 from scratch in 15 minutes, three seeds: `vitreous train` compared with timm's ViT in plain PyTorch.

    python benchmarks/cifar.py FOLDER --work DIR --rows ROWS.jsonl --out benchmarks/results/DATE-cifar-HARDWARE.md

FOLDER has train/CLASS/* and test/CLASS/*; a tenth of the training images is held out. Each row of ROWS.jsonl is one run
with one seed, evaluated once on the test images. A run trains on as many images as it can process in --minutes on
--cores cores, measured by the CPU time of one thread (benchmarks/pretraining.py). Rows can therefore be computed
concurrently, with OMP_NUM_THREADS=1. timm's model is trained by the loop in this file for the same CPU time. Another
call continues with the missing rows.

`vitreous` is the command of the README with this training length; the other vitreous methods are earlier models and
recipes. timm's model has the same width, depth and heads, and patches of 4 pixels. It is trained in bfloat16 autocast
if the processor supports it, with fused AdamW and a cosine schedule, by one of two recipes. `plain` has the shift, flip
and label smoothing of the earlier vitreous recipe. `CCT` is the recipe of arXiv:2104.05704 for small transformers on
CIFAR-10: crops of 0.8 to 1, RandAugment of magnitude 9, MixUp 0.8 or CutMix 1 in the first 7/12 of the run, label
smoothing 0.1, learning rate 5.5e-4, weight decay 0.06.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from pretraining import EqualTime
from torch import Tensor

from vitreous.data.augmentation.augment import Augment
from vitreous.data.keys import derive_keys
from vitreous.data.modalities.base import Preprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.sampling import SampleOrder, get_stream_samples
from vitreous.data.screen import screen_images
from vitreous.data.sources import open_data
from vitreous.models.names import config_from_name
from vitreous.system.machine import get_processor_name, has_bf16

#: method -> model, and settings of `vitreous train`
VITREOUS_METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "vitreous": ("Conv32-128x1-256x1-256+ViT-128x4/8", {}),
    "vitreous, units in a narrow stem": ("Conv32-64x1-128x1-128+ViT-128x4/8", {}),
    "vitreous, the recipe before": ("Conv+ViT-128x4/8", {"views.shift": ["0.0625"]}),
}
TIMM_METHODS = {"timm ViT, plain": "plain", "timm ViT, CCT": "CCT"}
BATCH_SIZE = 128
TIMM_HYPERPARAMETERS = {
    "plain": (1e-3, 0.05, 0.05),
    "CCT": (5.5e-4, 0.06, 1 / 30),
}  # recipe -> learning rate, weight decay, share of the run that warms up

ViewFunction = Callable[[np.ndarray, np.ndarray, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class CifarPlan(EqualTime):
    """A comparison of methods after equal CPU time on CIFAR-10."""

    minutes: float = 15.0

    def run_folder(self, name: str) -> Path:
        """Return the folder of a run, or of the throughput measurement of a method."""
        return self.work / "".join(c if c.isalnum() else "-" for c in name)

    def completed_rows(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Return the rows that are already computed, by method and seed."""
        return {(row["method"], row["seed"]): row for row in self.stored()}


def run_vitreous(plan: CifarPlan, method: str, seed: int) -> dict[str, Any]:
    """Train a method of vitreous, and return its epochs, parameters, and top-1 on `val` and `test`."""
    model, settings = VITREOUS_METHODS[method]
    options: dict[str, Any] = {"model": model, "settings": settings}
    summary, _ = plan.train(plan.folder, plan.run_folder(f"{method} {seed}"), plan.run_folder(method), seed, **options)
    metrics = {name: summary[name]["top1"] for name in ("val", "test")}
    return {"epochs": summary["epochs"], "parameters": summary["parameters"]} | metrics


def run_timm(plan: CifarPlan, method: str, seed: int) -> dict[str, Any]:
    """Train timm's model in a plain PyTorch loop, and return its epochs, parameters, and top-1 on `val` and `test`."""
    from timm.models.vision_transformer import VisionTransformer

    recipe, data, preprocess = TIMM_METHODS[method], open_data(str(plan.folder)), ImagePreprocess((32, 32))
    config: Any = config_from_name("ViT-128x4/4", 32)
    splits: dict[str, tuple[Tensor, Tensor]] = {}
    for name, split in data.splits.items():
        pixels = screen_images(split, preprocess, 0, keep=True)[0]
        assert pixels is not None, "images of 32 pixels are kept in memory"
        splits[name] = pixels, torch.from_numpy(split.labels)
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - timm uses the global generator
    sizes = {"embed_dim": config.width, "depth": config.depth, "num_heads": config.heads}
    model = VisionTransformer(img_size=32, patch_size=4, num_classes=len(data.classes), **sizes)
    lr, weight_decay, warmup_share = TIMM_HYPERPARAMETERS[recipe]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, fused=True)
    views = (make_plain_views if recipe == "plain" else make_cct_views)(
        *splits["train"], seed, len(data.classes), preprocess
    )
    order, images_seen, started = SampleOrder(len(splits["train"][1]), seed), 0, time.process_time()
    while (progress := (time.process_time() - started) / plan.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, progress / warmup_share) * (1 + math.cos(math.pi * progress)) / 2
        samples, epochs, _ = get_stream_samples(order, images_seen, images_seen + BATCH_SIZE)
        images, targets = views(samples, epochs, progress)
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16("cpu")):
            loss = F.cross_entropy(model(images).float(), targets, label_smoothing=0.05 if recipe == "plain" else 0.0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        images_seen += BATCH_SIZE
    metrics = {name: compute_accuracy(model, preprocess, *splits[name]) for name in ("val", "test")}
    return {
        "epochs": round(images_seen / len(splits["train"][1]), 2),
        "parameters": sum(p.numel() for p in model.parameters()),
    } | metrics


def make_plain_views(images: Tensor, labels: Tensor, seed: int, classes: int, preprocess: Preprocess) -> ViewFunction:
    """Return the augmentation of `plain`, shift and flip: sample indices -> images (B, 3, 32, 32) and labels (B,)."""
    augment = Augment(shift=0.0625, flip=0.5)

    def views(samples: np.ndarray, epochs: np.ndarray, progress: float) -> tuple[Tensor, Tensor]:
        sample_indices = torch.from_numpy(samples)
        return preprocess.normalise(
            augment.augment_batch(images[sample_indices], derive_keys(seed, epochs, samples, 0))
        ), labels[sample_indices]

    return views


def make_cct_views(images: Tensor, labels: Tensor, seed: int, classes: int, preprocess: Preprocess) -> ViewFunction:
    """Return the augmentation of `CCT`, by timm: sample indices -> images (B, 3, 32, 32) and targets (B, classes)."""
    from timm.data import Mixup, auto_augment, create_transform  # type: ignore[attr-defined]

    # at the largest magnitude, timm keeps 0 bits, which Pillow 13 rejects
    auto_augment.NAME_TO_OP["PosterizeIncreasing"] = lambda image, bits, **_: ImageOps.posterize(image, max(1, bits))
    transform = create_transform(
        32, is_training=True, scale=(0.8, 1.0), auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.0, interpolation="random",
        mean=preprocess.mean, std=preprocess.std,
    )  # fmt: skip
    make_mixup = partial(Mixup, mode="batch", switch_prob=0.5, label_smoothing=0.1, num_classes=classes)
    mixup, no_mixup = (
        make_mixup(mixup_alpha=0.8, cutmix_alpha=1.0),
        make_mixup(mixup_alpha=0.8, cutmix_alpha=1.0, prob=0.0),
    )

    def views(samples: np.ndarray, epochs: np.ndarray, progress: float) -> tuple[Tensor, Tensor]:
        sample_indices = torch.from_numpy(samples)
        pillow_images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images[sample_indices]]
        batch: Tensor = torch.stack([transform(image) for image in pillow_images])  # type: ignore[operator, misc]
        return (mixup if progress < 7 / 12 else no_mixup)(batch, labels[sample_indices])

    return views


@torch.inference_mode()
def compute_accuracy(model: torch.nn.Module, preprocess: Preprocess, images: Tensor, labels: Tensor) -> float:
    """Return the top-1 accuracy of a model on images (n, 3, 32, 32) uint8, in bfloat16 autocast."""
    model.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16("cpu")):
        hits = sum(
            int((model(preprocess.normalise(x)).argmax(1) == y).sum())
            for x, y in zip(images.split(256), labels.split(256), strict=True)
        )
    model.train()
    return hits / len(labels)


def build_page(plan: CifarPlan) -> str:
    """Return the page with a table of the computed rows."""
    lines = [
        f"# CIFAR-10 from scratch, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}. Runs of {plan.minutes:g} minutes on {plan.cores} cores, by the",
        "CPU time of one thread. Top-1 on the test images: mean over seeds, and each seed.",
        "",
        "    python benchmarks/cifar.py FOLDER --work DIR --rows ROWS.jsonl",
        "",
        "| method | parameters | epochs | val, mean | test, mean | each seed |",
        "|---|---|---|---|---|---|",
    ]
    rows = plan.completed_rows()
    for method in (*VITREOUS_METHODS, *TIMM_METHODS):
        method_rows = [row for (name, _), row in sorted(rows.items()) if name == method]
        if method_rows:
            val, test = ([row[name] for row in method_rows] for name in ("val", "test"))
            epochs = dict.fromkeys(f"{row['epochs']:.1f}" for row in method_rows)
            name = (
                f"{method}: `{VITREOUS_METHODS[method][0]}`"
                if method in VITREOUS_METHODS
                else f"{method}: patches of 4"
            )
            cells = [name, f"{method_rows[0]['parameters']:,}", ", ".join(epochs), f"{statistics.mean(val):.1%}"]
            cells += [f"**{statistics.mean(test):.1%}**", ", ".join(f"{value:.1%}" for value in test)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compute the missing rows, and print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    CifarPlan.add_options(parser)
    names = (*VITREOUS_METHODS, *TIMM_METHODS)
    parser.add_argument(
        "--methods",
        nargs="*",
        choices=names,
        default=names,
        help="methods, in this order; without any, only the page is written",
    )
    options = vars(parser.parse_args())
    methods, out = options.pop("methods"), options.pop("out")
    plan = CifarPlan(**options)
    for seed in range(plan.seeds):
        for method in methods:
            if (method, seed) not in plan.completed_rows():
                results = (run_vitreous if method in VITREOUS_METHODS else run_timm)(plan, method, seed)
                row = {"method": method, "seed": seed, "minutes": plan.minutes, "cores": plan.cores} | results
                with plan.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
    text = build_page(plan)
    print(text)
    if out:
        out.write_text(text)


if __name__ == "__main__":
    main()
