"""Classes of pixels and boxes learned from a few hundred images, beside other libraries' models in the same minutes.

    python benchmarks/dense.py KIND FOLDER --work DIR --rows ROWS.jsonl --out benchmarks/results/DATE-dense-HARDWARE.md

KIND is `nuclei`, the 2018 Data Science Bowl (FOLDER has a folder for each image, with images/ and masks/): every pixel
is a nucleus or not; `objects`, the same images, each nucleus by itself; `cells`, BCCD (FOLDER is Pascal VOC with train,
val and test): boxes of three kinds of blood cells; `hippocampus`, the Decathlon's volumes (FOLDER has images/ and
labels/): every voxel is of one of two parts or of neither. Of nuclei and volumes a fifth, by their names, is the test
split, a tenth validates. Each row is one run of one seed, judged once on the test images, all by the same code. Runs
learn for as many images as --minutes hold on --cores cores by the processor time of one thread
(benchmarks/pretraining.py), so rows can be made side by side with OMP_NUM_THREADS=1; a peer
(benchmarks/dense_peers.py), whose loop is here, for as much processor time, in float32, which is PyTorch's default,
where ours takes bfloat16 if the processor has it. A second call goes on with the rows that lack.
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
    """What is learned: options of `vitreous train` for it, and (or not) for learning from the images without their
    annotations first, a peer, and the figure of the table."""

    options: dict[str, Any]
    figure: str
    first: dict[str, Any] | None = None
    peer: str | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        """What is compared."""
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
    """The same for one of `SUBJECTS`."""

    kind: str
    minutes: float = 20.0
    measured: int = 24

    def home(self, method: str, seed: int) -> Path:
        """The folder of a run."""
        name = "".join(c if c.isalnum() else "-" for c in method)
        return self.work / self.kind / f"{name}-{seed}"

    def made(self) -> dict[tuple[str, str, int], dict[str, Any]]:
        """The rows that are there, by data, method and seed."""
        return {(row["data"], row["method"], row["seed"]): row for row in self.stored()}


def prepare_folder(plan: DensePlan) -> Path:
    """The folder that is trained on: BCCD as it is, of the others links by splits."""
    if plan.kind == "cells":
        return plan.folder
    root = plan.work / f"{'hippocampus' if plan.kind == 'hippocampus' else 'nuclei'}-split"
    if plan.kind == "hippocampus":
        for home in (plan.folder / "images", plan.folder / "labels"):
            for path in sorted(home.glob("*.nii.gz")):
                create_link(path, root / choose_split(path.name) / home.name / path.name)
    else:
        for home in sorted(path for path in plan.folder.iterdir() if path.is_dir()):
            create_link(home, root / choose_split(home.name) / home.name)
    return root


def choose_split(name: str) -> str:
    """Where an image belongs, by its name."""
    share = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32
    return "test" if share < 0.2 else "val" if share < 0.3 else "train"


def create_link(path: Path, place: Path) -> None:
    """A link at `place`, unless it is there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        place.symlink_to(path.resolve())


def train_run(plan: DensePlan, data: Path, out: Path, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """A run of ours for the images of the minutes; its summary, and how many images that were."""
    summary, images = plan.train(data, out, out.parent / f"rate-{options['recipe']}", seed, **options)
    return {"images": images, "parameters": summary["parameters"], "run": out}


def run_vitreous(plan: DensePlan, method: str, seed: int) -> dict[str, Any]:
    """A run of ours, and its figures on the test images."""
    data, home = prepare_folder(plan), plan.home(method, seed)
    subject = DENSE_TASKS[plan.kind]
    options = dict(subject.options)
    if method == PRETRAINED and subject.first:
        first = train_run(plan, data, home.parent / f"first-{seed}", subject.first, seed)
        options = {key: value for key, value in options.items() if key != "model"} | {"init": str(first["run"])}
    facts = train_run(plan, data, home, options, seed)
    document = vitreous.evaluate(facts.pop("run"), str(data), split="test", workers=0, cache=False)
    return facts | select_metrics(plan, document["test"], document["per_class"])


def select_metrics(plan: DensePlan, values: dict[str, Any], classes: list[dict[str, Any]]) -> dict[str, Any]:
    """What a row says of a run's figures."""
    if plan.kind in ("cells", "objects"):
        rest = {name: value for name, value in values.items() if name in (f"{BOX_PREFIX}ap50", f"{BOX_PREFIX}ap")}
        every = {row["class"]: row["ap50"] for row in classes}
        return {"ap50": values["ap50"], "ap": values["ap"], "classes": every} | rest
    own = {row["class"]: row["f1"] for row in classes[1:]}  # the first is what lies around
    if plan.kind == "nuclei":
        return {"dice_nuclei": own.popitem()[1], "miou": values["miou"]}
    return {"dice": statistics.mean(own.values()), "classes": own, "miou": values["miou"]}


def run_peer(plan: DensePlan, seed: int) -> dict[str, Any]:
    """A run of the peer, and its figures on the test images."""
    torch.manual_seed(seed)
    data = open_data(str(prepare_folder(plan)))
    data = paint_class_maps(data) if plan.kind == "nuclei" else data
    model, loss_of, judge = (build_unet if plan.kind == "nuclei" else build_faster_rcnn)(data)
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
        **select_metrics(plan, *judge()),
    }


def build_page(plan: DensePlan) -> str:
    """The table of the rows that are there."""
    cores = "one core" if plan.cores == 1 else f"{plan.cores} cores"
    lines = [
        f"# Masks and boxes from a few hundred images, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}. Runs of so many minutes on {cores}, by the processor time",
        "of one thread; pre-training has as many again. Figures of the test images: mean of the seeds, and each. `ap50` of",
        "objects is of their masks, `dice` of the hippocampus the mean of its two parts. Peers compute in float32, ours in",
        "bfloat16 where the processor has it.",
        "",
        "    python benchmarks/dense.py KIND FOLDER --work DIR --rows ROWS.jsonl",
        "",
        "| data | figure | method | minutes | parameters | images learned from | mean | each seed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (kind, method, _), row in sorted(plan.made().items()):
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
    wanted = [(kind, method) for kind, subject in DENSE_TASKS.items() for method in subject.methods]
    missing = [f"{kind}: {method}" for kind, method in wanted if (kind, method) not in groups]
    lines += ["", f"Not run yet: {'; '.join(missing)}."] if missing else []
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the rows that are not there yet, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=tuple(DENSE_TASKS))
    DensePlan.add_options(parser)
    parser.add_argument(
        "--methods", nargs="*", default=(FROM_SCRATCH, PRETRAINED, "peer"), help="in this order; none: the page"
    )
    given = vars(parser.parse_args())
    methods, out = given.pop("methods"), given.pop("out")
    plan = DensePlan(**given)
    for seed in range(plan.seeds):
        for word in methods:
            method = DENSE_TASKS[plan.kind].peer if word == "peer" else word
            if method not in DENSE_TASKS[plan.kind].methods or (plan.kind, method, seed) in plan.made():
                continue
            facts = run_peer(plan, seed) if word == "peer" else run_vitreous(plan, method, seed)
            row = {"data": plan.kind, "method": method, "seed": seed, "minutes": plan.minutes, **facts}
            with plan.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    text = build_page(plan)
    print(text)
    if out:
        out.write_text(text)


if __name__ == "__main__":
    main()
