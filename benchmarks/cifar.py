"""CIFAR-10 from scratch in a quarter of an hour, three seeds: `vitreous train` beside timm's ViT in plain PyTorch.

    python benchmarks/cifar.py FOLDER --work DIR --rows ROWS.jsonl --out benchmarks/results/DATE-cifar-HARDWARE.md

FOLDER has train/CLASS/* and test/CLASS/*; a tenth of the training images is held out. Each row is one run of one seed,
judged once on the test images. Runs learn for as many images as --minutes hold on --cores cores by the processor time
of one thread (benchmarks/pretraining.py), so rows can be made side by side with OMP_NUM_THREADS=1; timm's, whose loop is
here, for as much processor time. A second call goes on with the rows that lack.

`vitreous` is the command of the README at this length; others of ours are models and recipes that it has been before. timm's model
has the width, depth and heads of ours and patches of 4 pixels, in bfloat16 autocast where the processor has it, with fused
AdamW and a cosine, and one of two recipes: `plain`, with the shift, mirror and label smoothing of our recipe before; `CCT`, as
the authors of arXiv:2104.05704 train small transformers on CIFAR-10 (crops of 0.8 to 1, RandAugment of magnitude 9,
MixUp 0.8 or CutMix 1 until 7/12 of the run, smoothing 0.1, 5.5e-4, decay 0.06).
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

#: model, and other options of `vitreous train`, by method
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
}  # learning rate, decay, share that warms up

ViewFunction = Callable[[np.ndarray, np.ndarray, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class CifarPlan(EqualTime):
    """The same for CIFAR-10."""

    minutes: float = 15.0

    def home(self, name: str) -> Path:
        """The folder of a run."""
        return self.work / "".join(c if c.isalnum() else "-" for c in name)

    def made(self) -> dict[tuple[str, int], dict[str, Any]]:
        """The rows that are there, by method and seed."""
        return {(row["method"], row["seed"]): row for row in self.stored()}


def run_vitreous(plan: CifarPlan, method: str, seed: int) -> dict[str, Any]:
    """A run of ours, and its figures."""
    model, settings = VITREOUS_METHODS[method]
    options: dict[str, Any] = {"model": model, "settings": settings}
    summary, _ = plan.train(plan.folder, plan.home(f"{method} {seed}"), plan.home(method), seed, **options)
    figures = {name: summary[name]["top1"] for name in ("val", "test")}
    return {"epochs": summary["epochs"], "parameters": summary["parameters"]} | figures


def run_timm(plan: CifarPlan, method: str, seed: int) -> dict[str, Any]:
    """A run of timm's model in a plain loop, and its figures."""
    from timm.models.vision_transformer import VisionTransformer

    recipe, data, preprocess = TIMM_METHODS[method], open_data(str(plan.folder)), ImagePreprocess((32, 32))
    config: Any = config_from_name("ViT-128x4/4", 32)
    splits: dict[str, tuple[Tensor, Tensor]] = {}
    for name, split in data.splits.items():
        pixels = screen_images(split, preprocess, 0, keep=True)[0]
        assert pixels is not None, "pictures of 32 pixels are kept in memory"
        splits[name] = pixels, torch.from_numpy(split.labels)
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - timm draws from it
    sizes = {"embed_dim": config.width, "depth": config.depth, "num_heads": config.heads}
    model = VisionTransformer(img_size=32, patch_size=4, num_classes=len(data.classes), **sizes)
    rate, decay, warm = TIMM_HYPERPARAMETERS[recipe]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, fused=True)
    views = (make_plain_views if recipe == "plain" else make_cct_views)(
        *splits["train"], seed, len(data.classes), preprocess
    )
    order, seen, started = SampleOrder(len(splits["train"][1]), seed), 0, time.process_time()
    while (spent := (time.process_time() - started) / plan.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, spent / warm) * (1 + math.cos(math.pi * spent)) / 2
        samples, epochs, _ = get_stream_samples(order, seen, seen + BATCH_SIZE)
        images, targets = views(samples, epochs, spent)
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16("cpu")):
            loss = F.cross_entropy(model(images).float(), targets, label_smoothing=0.05 if recipe == "plain" else 0.0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += BATCH_SIZE
    figures = {name: compute_accuracy(model, preprocess, *splits[name]) for name in ("val", "test")}
    return {
        "epochs": round(seen / len(splits["train"][1]), 2),
        "parameters": sum(p.numel() for p in model.parameters()),
    } | figures


def make_plain_views(images: Tensor, labels: Tensor, seed: int, classes: int, preprocess: Preprocess) -> ViewFunction:
    """The shift and mirror of our recipe before: samples of an epoch -> (B, 3, 32, 32) and (B,)."""
    augment = Augment(shift=0.0625, flip=0.5)

    def views(samples: np.ndarray, epochs: np.ndarray, spent: float) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(samples)
        return preprocess.normalise(augment.augment_batch(images[rows], derive_keys(seed, epochs, samples, 0))), labels[
            rows
        ]

    return views


def make_cct_views(images: Tensor, labels: Tensor, seed: int, classes: int, preprocess: Preprocess) -> ViewFunction:
    """timm's own transforms with CCT's settings: samples of an epoch -> (B, 3, 32, 32) and (B, classes)."""
    from timm.data import Mixup, auto_augment, create_transform  # type: ignore[attr-defined]

    # at the largest magnitude timm keeps no bits, which Pillow 13 refuses
    auto_augment.NAME_TO_OP["PosterizeIncreasing"] = lambda image, bits, **_: ImageOps.posterize(image, max(1, bits))
    look = create_transform(
        32, is_training=True, scale=(0.8, 1.0), auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.0, interpolation="random",
        mean=preprocess.mean, std=preprocess.std,
    )  # fmt: skip
    mix = partial(Mixup, mode="batch", switch_prob=0.5, label_smoothing=0.1, num_classes=classes)
    mixed, alone = mix(mixup_alpha=0.8, cutmix_alpha=1.0), mix(mixup_alpha=0.8, cutmix_alpha=1.0, prob=0.0)

    def views(samples: np.ndarray, epochs: np.ndarray, spent: float) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(samples)
        pictures = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in images[rows]]
        batch: Tensor = torch.stack([look(picture) for picture in pictures])  # type: ignore[operator, misc]
        return (mixed if spent < 7 / 12 else alone)(batch, labels[rows])

    return views


@torch.inference_mode()
def compute_accuracy(model: torch.nn.Module, preprocess: Preprocess, images: Tensor, labels: Tensor) -> float:
    """Top-1 in bfloat16 autocast."""
    model.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16("cpu")):
        hits = sum(
            int((model(preprocess.normalise(x)).argmax(1) == y).sum())
            for x, y in zip(images.split(256), labels.split(256), strict=True)
        )
    model.train()
    return hits / len(labels)


def build_page(plan: CifarPlan) -> str:
    """The table of the rows that are there."""
    lines = [
        f"# CIFAR-10 from scratch, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}. Runs of {plan.minutes:g} minutes on {plan.cores} cores, by the",
        "processor time of one thread. Top-1 of the test images: mean of the seeds, and each.",
        "",
        "    python benchmarks/cifar.py FOLDER --work DIR --rows ROWS.jsonl",
        "",
        "| method | parameters | epochs | val, mean | test, mean | each seed |",
        "|---|---|---|---|---|---|",
    ]
    rows = plan.made()
    for method in (*VITREOUS_METHODS, *TIMM_METHODS):
        own = [row for (name, _), row in sorted(rows.items()) if name == method]
        if own:
            val, test = ([row[name] for row in own] for name in ("val", "test"))
            epochs = dict.fromkeys(f"{row['epochs']:.1f}" for row in own)
            name = (
                f"{method}: `{VITREOUS_METHODS[method][0]}`"
                if method in VITREOUS_METHODS
                else f"{method}: patches of 4"
            )
            cells = [name, f"{own[0]['parameters']:,}", ", ".join(epochs), f"{statistics.mean(val):.1%}"]
            cells += [f"**{statistics.mean(test):.1%}**", ", ".join(f"{value:.1%}" for value in test)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the rows that are not there yet, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    CifarPlan.add_options(parser)
    names = (*VITREOUS_METHODS, *TIMM_METHODS)
    parser.add_argument("--methods", nargs="*", choices=names, default=names, help="in this order; none: the page")
    given = vars(parser.parse_args())
    methods, out = given.pop("methods"), given.pop("out")
    plan = CifarPlan(**given)
    for seed in range(plan.seeds):
        for method in methods:
            if (method, seed) not in plan.made():
                facts = (run_vitreous if method in VITREOUS_METHODS else run_timm)(plan, method, seed)
                row = {"method": method, "seed": seed, "minutes": plan.minutes, "cores": plan.cores} | facts
                with plan.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
    text = build_page(plan)
    print(text)
    if out:
        out.write_text(text)


if __name__ == "__main__":
    main()
