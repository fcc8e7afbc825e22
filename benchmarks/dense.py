"""Segmentation and detection from a few hundred images, compared with models of other libraries for equal time.

    python benchmarks/dense.py KIND FOLDER --work DIR --rows ROWS.jsonl --out benchmarks/results/DATE-dense-HARDWARE.md

KIND is one of:

- `nuclei`: semantic segmentation of nuclei, 2018 Data Science Bowl (FOLDER has a folder for each image, with images/
  and masks/).
- `objects`: instance segmentation of the same images.
- `cells`: detection of three kinds of blood cells, BCCD (FOLDER is Pascal VOC with train, val and test).
- `hippocampus`: segmentation of two structures in the Decathlon's volumes (FOLDER has images/ and labels/).

Of nuclei and volumes, a fifth selected by name is the test split, and a tenth the validation split. Each row is one run
of one seed, evaluated once on the test images by the same code.

Runs train on the images that fit into --minutes on --cores cores by the processor time of one thread
(benchmarks/pretraining.py), so rows can be measured in parallel with OMP_NUM_THREADS=1. A peer
(benchmarks/dense_peers.py) trains in a loop of this script for as much processor time, in float32, PyTorch's default;
ours uses bfloat16 if the processor supports it. A second call continues with the missing rows.
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
    """A task: options of `vitreous train`, optional options for pre-training without annotations, a peer, and the
    reported metric."""

    options: dict[str, Any]
    figure: str
    first: dict[str, Any] | None = None
    peer: str | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        """The compared methods."""
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
    """Settings for one of `DENSE_TASKS`."""

    kind: str
    minutes: float = 20.0
    measured: int = 24

    def run_folder(self, method: str, seed: int) -> Path:
        """The folder of a run."""
        name = "".join(c if c.isalnum() else "-" for c in method)
        return self.work / self.kind / f"{name}-{seed}"

    def finished_rows(self) -> dict[tuple[str, str, int], dict[str, Any]]:
        """The stored rows, by data, method and seed."""
        return {(row["data"], row["method"], row["seed"]): row for row in self.stored()}


def prepare_folder(plan: DensePlan) -> Path:
    """Return the training folder: BCCD unchanged, for the others links by split."""
    if plan.kind == "cells":
        return plan.folder
    root = plan.work / f"{'hippocampus' if plan.kind == 'hippocampus' else 'nuclei'}-split"
    if plan.kind == "hippocampus":
        for source in (plan.folder / "images", plan.folder / "labels"):
            for path in sorted(source.glob("*.nii.gz")):
                create_link(path, root / choose_split(path.name) / source.name / path.name)
    else:
        for source in sorted(path for path in plan.folder.iterdir() if path.is_dir()):
            create_link(source, root / choose_split(source.name) / source.name)
    return root


def choose_split(name: str) -> str:
    """The split of an image, by its name."""
    share = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32
    return "test" if share < 0.2 else "val" if share < 0.3 else "train"


def create_link(path: Path, target: Path) -> None:
    """Create a link at `target`, unless it exists."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        target.symlink_to(path.resolve())


def train_run(plan: DensePlan, data: Path, out: Path, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train our model on the images of the minutes; returns its summary and the number of images."""
    summary, images = plan.train(data, out, out.parent / f"rate-{options['recipe']}", seed, **options)
    return {"images": images, "parameters": summary["parameters"], "run": out}


def run_vitreous(plan: DensePlan, method: str, seed: int) -> dict[str, Any]:
    """Train our model; returns its metrics on the test images."""
    data, run_folder = prepare_folder(plan), plan.run_folder(method, seed)
    subject = DENSE_TASKS[plan.kind]
    options = dict(subject.options)
    if method == PRETRAINED and subject.first:
        pretraining = train_run(plan, data, run_folder.parent / f"first-{seed}", subject.first, seed)
        options = {key: value for key, value in options.items() if key != "model"} | {"init": str(pretraining["run"])}
    metrics = train_run(plan, data, run_folder, options, seed)
    document = vitreous.evaluate(metrics.pop("run"), str(data), split="test", workers=0, cache=False)
    return metrics | select_metrics(plan, document["test"], document["per_class"])


def select_metrics(plan: DensePlan, values: dict[str, Any], classes: list[dict[str, Any]]) -> dict[str, Any]:
    """The reported metrics of a run."""
    if plan.kind in ("cells", "objects"):
        box_metrics = {
            name: value for name, value in values.items() if name in (f"{BOX_PREFIX}ap50", f"{BOX_PREFIX}ap")
        }
        class_ap50 = {row["class"]: row["ap50"] for row in classes}
        return {"ap50": values["ap50"], "ap": values["ap"], "classes": class_ap50} | box_metrics
    class_f1 = {row["class"]: row["f1"] for row in classes[1:]}  # the first is the background
    if plan.kind == "nuclei":
        return {"dice_nuclei": class_f1.popitem()[1], "miou": values["miou"]}
    return {"dice": statistics.mean(class_f1.values()), "classes": class_f1, "miou": values["miou"]}


def run_peer(plan: DensePlan, seed: int) -> dict[str, Any]:
    """Train the peer; returns its metrics on the test images."""
    torch.manual_seed(seed)
    data = open_data(str(prepare_folder(plan)))
    data = paint_class_maps(data) if plan.kind == "nuclei" else data
    model, loss_of, evaluate = (build_unet if plan.kind == "nuclei" else build_faster_rcnn)(data)
    batches, images = iterate_batches(plan.kind, data.splits["train"], seed), 0
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    started, model = time.process_time(), model.train()
    while (spent := time.process_time() - started) < plan.seconds:
        optimizer.param_groups[0]["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * spent / plan.seconds))
        batch = next(batches)
        loss = loss_of(*batch)
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
    """Build the table of the stored rows."""
    cores = "one core" if plan.cores == 1 else f"{plan.cores} cores"
    lines = [
        f"# Masks and boxes from a few hundred images, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}. Minutes are on {cores}, by the processor time",
        "of one thread; pre-training has as many in addition. Metrics of the test images: mean over the seeds, and by seed. `ap50` of",
        "objects is for masks, `dice` of the hippocampus the mean of its two structures. Peers compute in float32, ours in",
        "bfloat16 if the processor supports it.",
        "",
        "    python benchmarks/dense.py KIND FOLDER --work DIR --rows ROWS.jsonl",
        "",
        "| data | metric | method | minutes | parameters | training images seen | mean | by seed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (kind, method, _), row in sorted(plan.finished_rows().items()):
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
    expected = [(kind, method) for kind, subject in DENSE_TASKS.items() for method in subject.methods]
    missing = [f"{kind}: {method}" for kind, method in expected if (kind, method) not in groups]
    lines += ["", f"Not run yet: {'; '.join(missing)}."] if missing else []
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the missing rows, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=tuple(DENSE_TASKS))
    DensePlan.add_options(parser)
    parser.add_argument(
        "--methods",
        nargs="*",
        default=(FROM_SCRATCH, PRETRAINED, "peer"),
        help="methods to measure, in this order; none: only print the page",
    )
    options = vars(parser.parse_args())
    methods, out = options.pop("methods"), options.pop("out")
    plan = DensePlan(**options)
    for seed in range(plan.seeds):
        for method_option in methods:
            method = DENSE_TASKS[plan.kind].peer if method_option == "peer" else method_option
            if method not in DENSE_TASKS[plan.kind].methods or (plan.kind, method, seed) in plan.finished_rows():
                continue
            metrics = run_peer(plan, seed) if method_option == "peer" else run_vitreous(plan, method, seed)
            row = {"data": plan.kind, "method": method, "seed": seed, "minutes": plan.minutes, **metrics}
            with plan.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    text = build_page(plan)
    print(text)
    if out:
        out.write_text(text)


if __name__ == "__main__":
    main()
