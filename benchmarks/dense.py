"""Segmentation and detection trained on a few hundred images, compared with other libraries at equal CPU time.

    python benchmarks/dense.py KIND FOLDER --work DIR --rows ROWS.jsonl --out benchmarks/results/DATE-dense-HARDWARE.md

| KIND | task | FOLDER |
|---|---|---|
| `nuclei` | 2018 Data Science Bowl, semantic segmentation: nucleus or background | a folder per image, with images/ and masks/ |
| `objects` | 2018 Data Science Bowl, instance segmentation of nuclei | as for `nuclei` |
| `cells` | BCCD, detection of three kinds of blood cells | Pascal VOC with train, val and test |
| `hippocampus` | Medical Segmentation Decathlon, segmentation of two parts of the hippocampus | images/ and labels/ |

For all but `cells`, a hash of the name assigns 20 % of the images or volumes to the test split and 10 % to validation.
Each row of ROWS.jsonl is one run with one seed, evaluated once on the test images by the same code. A run trains on as
many images as it can process in --minutes on --cores cores, measured by the CPU time of one thread
(benchmarks/pretraining.py). Rows can therefore be computed concurrently, with OMP_NUM_THREADS=1. Models of other
libraries (benchmarks/dense_peers.py) are trained by the loop in this file for the same CPU time, in float32, PyTorch's
default; vitreous uses bfloat16 if the processor supports it. Another call continues with the missing rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dense_peers import CROP_SIZE, build_faster_rcnn, build_unet, iterate_batches
from pretraining import EqualTime
from torch import nn

import vitreous
from vitreous.data.annotations.painted import paint_class_maps
from vitreous.data.sources import open_data
from vitreous.system.machine import get_processor_name
from vitreous.tasks.metrics import BOX_PREFIX

FROM_SCRATCH, PRETRAINED = "vitreous, from scratch", "vitreous, pre-trained on the same images"
MAE_OPTIONS = {"recipe": "mae", "model": "Conv+ViT-128x4/8", "image_size": CROP_SIZE}


@dataclass(frozen=True)
class DenseTask:
    """A dataset and task of the comparison.

    `options` are those of `vitreous train`, `figure` is the metric of the table, `first` the options of self-supervised
    pre-training on the same images, `peer` the model of another library; the last two are None if not compared.
    """

    options: dict[str, Any]
    figure: str
    first: dict[str, Any] | None = None
    peer: str | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the names of the compared methods."""
        return (FROM_SCRATCH, *((PRETRAINED,) if self.first else ()), *((self.peer,) if self.peer else ()))


DENSE_TASKS = {
    "nuclei": DenseTask(
        {"recipe": "segment", "model": "Conv+ViT-128x4/8", "image_size": CROP_SIZE},
        "dice_nuclei",
        MAE_OPTIONS,
        "segmentation-models-pytorch, U-Net, ResNet-34",
    ),
    "cells": DenseTask({"recipe": "detect"}, "ap50", MAE_OPTIONS, "torchvision, Faster R-CNN, MobileNetV3"),
    "objects": DenseTask({"recipe": "detect"}, "ap50"),
    "hippocampus": DenseTask({"recipe": "segment"}, "dice"),
}


@dataclass(frozen=True, kw_only=True)
class DensePlan(EqualTime):
    """A comparison of methods after equal CPU time on one of `DENSE_TASKS`, whose name is `kind`."""

    kind: str
    minutes: float = 20.0
    measured: int = 24

    def run_folder(self, method: str, seed: int) -> Path:
        """Return the folder of a run."""
        name = "".join(c if c.isalnum() else "-" for c in method)
        return self.work / self.kind / f"{name}-{seed}"

    def completed_rows(self) -> dict[tuple[str, str, int], dict[str, Any]]:
        """Return the rows that are already computed, by task, method and seed."""
        return {(row["data"], row["method"], row["seed"]): row for row in self.stored()}


def prepare_folder(plan: DensePlan) -> Path:
    """Return the dataset folder: BCCD itself; for other tasks, a folder of links that are divided into splits."""
    if plan.kind == "cells":
        return plan.folder
    root = plan.work / f"{'hippocampus' if plan.kind == 'hippocampus' else 'nuclei'}-split"
    if plan.kind == "hippocampus":
        for folder in (plan.folder / "images", plan.folder / "labels"):
            for path in sorted(folder.glob("*.nii.gz")):
                create_link(path, root / choose_split(path.name) / folder.name / path.name)
    else:
        for folder in sorted(path for path in plan.folder.iterdir() if path.is_dir()):
            create_link(folder, root / choose_split(folder.name) / folder.name)
    return root


def choose_split(name: str) -> str:
    """Return the split of an image, by a hash of its name: 20 % test, 10 % val, else train."""
    share = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32
    return "test" if share < 0.2 else "val" if share < 0.3 else "train"


def create_link(path: Path, link: Path) -> None:
    """Create a symbolic link to `path` at `link`, unless it exists."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(path.resolve())


def train_run(plan: DensePlan, data: Path, out: Path, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train with vitreous for the CPU time of the plan; return training images seen, parameters, and the run folder."""
    summary, images = plan.train(data, out, out.parent / f"rate-{options['recipe']}", seed, **options)
    return {"images": images, "parameters": summary["parameters"], "run": out}


def run_vitreous(plan: DensePlan, method: str, seed: int) -> dict[str, Any]:
    """Train a method of vitreous, pre-trained if `method` requires it, and return its metrics on the test images."""
    data, run_folder = prepare_folder(plan), plan.run_folder(method, seed)
    task = DENSE_TASKS[plan.kind]
    options = dict(task.options)
    if method == PRETRAINED and task.first:
        pretrained = train_run(plan, data, run_folder.parent / f"first-{seed}", task.first, seed)
        options = {key: value for key, value in options.items() if key != "model"} | {"init": str(pretrained["run"])}
    results = train_run(plan, data, run_folder, options, seed)
    document = vitreous.evaluate(results.pop("run"), str(data), split="test", workers=0, cache=False)
    return results | select_metrics(plan, document["test"], document["per_class"])


def select_metrics(plan: DensePlan, values: dict[str, Any], classes: list[dict[str, Any]]) -> dict[str, Any]:
    """Select the metrics that a row stores, from the metrics and the metrics per class of an evaluation."""
    if plan.kind in ("cells", "objects"):
        box_metrics = {
            name: value for name, value in values.items() if name in (f"{BOX_PREFIX}ap50", f"{BOX_PREFIX}ap")
        }
        ap50_by_class = {row["class"]: row["ap50"] for row in classes}
        return {"ap50": values["ap50"], "ap": values["ap"], "classes": ap50_by_class} | box_metrics
    dice_by_class = {row["class"]: row["f1"] for row in classes[1:]}  # without the background
    if plan.kind == "nuclei":
        return {"dice_nuclei": dice_by_class.popitem()[1], "miou": values["miou"]}
    return {"dice": statistics.mean(dice_by_class.values()), "classes": dice_by_class, "miou": values["miou"]}


def run_peer(plan: DensePlan, seed: int) -> dict[str, Any]:
    """Train the model of another library, and return its metrics on the test images."""
    torch.manual_seed(seed)
    data = open_data(str(prepare_folder(plan)))
    data = paint_class_maps(data) if plan.kind == "nuclei" else data
    model, compute_loss, evaluate = (build_unet if plan.kind == "nuclei" else build_faster_rcnn)(data)
    batches, images = iterate_batches(plan.kind, data.splits["train"], seed), 0
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    start, model = time.process_time(), model.train()
    while (seconds_spent := time.process_time() - start) < plan.seconds:
        optimizer.param_groups[0]["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * seconds_spent / plan.seconds))
        batch = next(batches)
        loss = compute_loss(*batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        images += len(batch[0])
    model.eval()
    return {
        "images": images,
        "parameters": sum(p.numel() for p in model.parameters()),
        **select_metrics(plan, *evaluate()),
    }


def build_page(plan: DensePlan) -> str:
    """Return the page with a table of the computed rows."""
    cores = "one core" if plan.cores == 1 else f"{plan.cores} cores"
    lines = [
        f"# Masks and boxes from a few hundred images, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}. Runs of the given minutes on {cores}, by the CPU time",
        "of one thread; pre-training takes the same time in addition. Metrics on the test images: mean over seeds, and each",
        "seed. `ap50` of objects is that of masks, `dice` of the hippocampus the mean of its two parts. Other libraries",
        "compute in float32, vitreous in bfloat16 if the processor supports it.",
        "",
        "    python benchmarks/dense.py KIND FOLDER --work DIR --rows ROWS.jsonl",
        "",
        "| task | metric | method | minutes | parameters | training images seen | mean | each seed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (kind, method, _), row in sorted(plan.completed_rows().items()):
        groups.setdefault((kind, method), []).append(row)
    for (kind, method), rows in groups.items():
        values = [row[DENSE_TASKS[kind].figure] for row in rows]
        cells = [
            kind,
            DENSE_TASKS[kind].figure,
            method,
            f"{rows[0]['minutes']:g}",
            f"{rows[0]['parameters']:,}",
            f"{rows[0]['images']:,}",
        ]
        cells += [f"{statistics.mean(values):.1%}", ", ".join(f"{value:.1%}" for value in values)]
        lines.append("| " + " | ".join(cells) + " |")
    combinations = [(kind, method) for kind, task in DENSE_TASKS.items() for method in task.methods]
    missing = [f"{kind}: {method}" for kind, method in combinations if (kind, method) not in groups]
    lines += ["", f"Not run yet: {'; '.join(missing)}."] if missing else []
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compute the missing rows, and print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=tuple(DENSE_TASKS))
    DensePlan.add_options(parser)
    parser.add_argument(
        "--methods",
        nargs="*",
        default=(FROM_SCRATCH, PRETRAINED, "peer"),
        help="methods, in this order; without any, only the page is written",
    )
    options = vars(parser.parse_args())
    methods, out = options.pop("methods"), options.pop("out")
    plan = DensePlan(**options)
    for seed in range(plan.seeds):
        for method_name in methods:
            method = DENSE_TASKS[plan.kind].peer if method_name == "peer" else method_name
            if method not in DENSE_TASKS[plan.kind].methods or (plan.kind, method, seed) in plan.completed_rows():
                continue
            results = run_peer(plan, seed) if method_name == "peer" else run_vitreous(plan, method, seed)
            row = {"data": plan.kind, "method": method, "seed": seed, "minutes": plan.minutes, **results}
            with plan.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    text = build_page(plan)
    print(text)
    if out:
        out.write_text(text)


if __name__ == "__main__":
    main()
