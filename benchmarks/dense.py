"""Classes of pixels and boxes learned from a few hundred images, beside other libraries' models in the same minutes.

    python benchmarks/dense.py nuclei FOLDER --work DIR --rows ROWS.jsonl --out benchmarks/DATE-dense-HARDWARE.md
    python benchmarks/dense.py cells FOLDER --work DIR --rows ROWS.jsonl --out benchmarks/DATE-dense-HARDWARE.md

`nuclei` is the 2018 Data Science Bowl (FOLDER has a folder for each image, with images/ and masks/): every pixel is a
nucleus or not; a fifth of the images, by their names, is the test split, a tenth validates. `cells`
is BCCD (FOLDER is Pascal VOC with train, val and test): boxes of three kinds of blood cells. Each row is one run of one
seed, judged once on the test images, all by the same code. Runs learn for as many images as --minutes hold on --cores
cores by the processor time of one thread (benchmarks/pretraining.py), so rows can be made side by side with
OMP_NUM_THREADS=1; a peer, whose loop is here, for as much processor time. A second call goes on with the rows that lack.

Peers, from scratch, with Adam at 1e-3 and a cosine: segmentation-models-pytorch's U-Net on a ResNet-34 (cross-entropy
and Dice, parts of 256 pixels, flips and quarter turns), torchvision's Faster R-CNN on MobileNetV3 (flips, its own
resizing).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pretraining import processor_rate, trained
from torch import Tensor, nn

import vitreous
from vitreous.data.annotations.painted import paint_classes
from vitreous.data.annotations.target import AnnotatedSplit
from vitreous.data.preprocess import Preprocess
from vitreous.data.sources import open_data
from vitreous.evaluation.coco import CocoEvaluator
from vitreous.evaluation.detections import Detections
from vitreous.evaluation.evaluator import Outputs, Ragged
from vitreous.evaluation.matching import match_image
from vitreous.evaluation.pixels import class_rows, confusion_of, figures_of
from vitreous.evaluation.tiles import class_map, native_pixels
from vitreous.machine import processor

SIDE = 256  # pixels of the parts of nuclei
SCRATCH, FIRST = "vitreous, from scratch", "vitreous, pre-trained on the same images"
#: options of `vitreous train` for what is learned, by data and method
OURS: dict[str, dict[str, Any]] = {
    "nuclei": {"recipe": "segment", "model": "Conv+ViT-128x4/8", "image_size": SIDE},
    "cells": {"recipe": "detect"},
}
#: the same for learning from the images without their annotations first
FIRSTS: dict[str, dict[str, Any]] = {
    "nuclei": {"recipe": "mae", "model": "Conv+ViT-128x4/8", "image_size": SIDE},
    "cells": {"recipe": "mae", "model": "Conv+ViT-128x4/8", "image_size": SIDE},
}
PEERS = {"nuclei": "segmentation-models-pytorch, U-Net, ResNet-34", "cells": "torchvision, Faster R-CNN, MobileNetV3"}
LEADING = {"nuclei": "dice_nuclei", "cells": "ap50"}


@dataclass(frozen=True)
class Plan:
    """What is compared, and where its runs lie."""

    kind: str
    folder: Path
    work: Path
    rows: Path
    minutes: float = 20.0
    cores: int = 2
    seeds: int = 3
    measured: int = 24  # steps that count the images of a processor second

    @property
    def seconds(self) -> float:
        """Processor seconds of a run."""
        return 60 * self.minutes * self.cores

    def home(self, method: str, seed: int) -> Path:
        """The folder of a run."""
        name = "".join(c if c.isalnum() else "-" for c in method)
        return self.work / self.kind / f"{name}-{seed}"

    def made(self) -> dict[tuple[str, str, int], dict[str, Any]]:
        """The rows that are there, by data, method and seed."""
        lines = self.rows.read_text("utf-8").splitlines() if self.rows.is_file() else []
        return {(row["data"], row["method"], row["seed"]): row for row in map(json.loads, lines)}


def prepared(plan: Plan) -> Path:
    """The folder that is trained on: links by splits for nuclei, BCCD as it is."""
    if plan.kind == "cells":
        return plan.folder
    root = plan.work / "nuclei-split"
    for home in sorted(path for path in plan.folder.iterdir() if path.is_dir()):
        share = int(hashlib.sha256(home.name.encode()).hexdigest()[:8], 16) / 2**32
        split = "test" if share < 0.2 else "val" if share < 0.3 else "train"
        (root / split).mkdir(parents=True, exist_ok=True)
        link = root / split / home.name
        if not link.exists():
            link.symlink_to(home.resolve())
    return root


def learn(plan: Plan, data: Path, out: Path, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """A run of ours for the images of the minutes; its summary, and how many images that were."""
    rate = processor_rate(out.parent / f"rate-{options['recipe']}", plan.measured, str(data), **options)
    images = rate * plan.seconds
    count = len(open_data(str(data)).splits["train"])
    length = {"epochs": round(images / count, 2), "evaluate_every": 10**9, "save_every": 200}
    summary = trained(out, data, seed=seed, **options, **length)
    return {"images": round(summary["epochs"] * count), "parameters": summary["parameters"], "run": out}


def ours(plan: Plan, method: str, seed: int) -> dict[str, Any]:
    """A run of ours, and its figures on the test images."""
    data, home = prepared(plan), plan.home(method, seed)
    options = dict(OURS[plan.kind])
    if method == FIRST:
        first = learn(plan, data, home.parent / f"first-{seed}", FIRSTS[plan.kind], seed)
        options = {key: value for key, value in options.items() if key != "model"} | {"init": str(first["run"])}
    facts = learn(plan, data, home, options, seed)
    document = vitreous.evaluate(facts.pop("run"), str(data), split="test", workers=0, cache=False)
    return facts | figures(plan, document["test"], document["per_class"])


def figures(plan: Plan, values: dict[str, Any], classes: list[dict[str, Any]]) -> dict[str, Any]:
    """What a row says of a run's figures."""
    if plan.kind == "nuclei":
        own = next(row for row in classes if row["class"] != "background")
        return {"dice_nuclei": own["f1"], "miou": values["miou"]}
    return {"ap50": values["ap50"], "ap": values["ap"], "classes": {row["class"]: row["ap50"] for row in classes}}


def theirs(plan: Plan, seed: int) -> dict[str, Any]:
    """A run of the peer, and its figures on the test images."""
    torch.manual_seed(seed)
    data = open_data(str(prepared(plan)))
    data = paint_classes(data) if plan.kind == "nuclei" else data
    model, loss_of, judge = (unet if plan.kind == "nuclei" else faster_rcnn)(data)
    batches, images = drawn(plan.kind, data.splits["train"], seed), 0
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    begun, model = time.process_time(), model.train()
    while (spent := time.process_time() - begun) < plan.seconds:
        optimizer.param_groups[0]["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * spent / plan.seconds))
        batch = next(batches)
        loss = loss_of(*batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        images += len(batch[0])
    model.eval()
    return {"images": images, "parameters": sum(p.numel() for p in model.parameters()), **figures(plan, *judge())}


def scenes(split: AnnotatedSplit) -> list[tuple[np.ndarray, Any]]:
    """Every image of a split as (3, H, W) uint8, and what is on it."""
    preprocess = Preprocess((SIDE, SIDE))
    rows = []
    for sample in range(len(split)):
        picture = preprocess.decoded(split.raw(sample), split.name(sample))
        rows.append((native_pixels(picture), split.target(sample)))
    return rows


def drawn(kind: str, split: Any, seed: int) -> Iterator[tuple[Any, Any]]:
    """Augmented batches without end."""
    chance, rows = np.random.default_rng(seed), scenes(split)
    while True:
        some = [rows[number] for number in chance.choice(len(rows), 8 if kind == "nuclei" else 4, replace=False)]
        if kind == "nuclei":
            parts = [part_of(pixels, target.class_map(), chance) for pixels, target in some]
            images, maps = (np.stack([part[n] for part in parts]) for n in (0, 1))
            yield normalised(images), torch.from_numpy(maps).long()
        else:
            yield zip_boxes([flipped(pixels, target, chance) for pixels, target in some])


def part_of(pixels: np.ndarray, classes: np.ndarray, chance: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(3, H, W), (H, W) -> a part of SIDE pixels of each, scaled by 1/2 to 2, flipped and turned."""
    factor = 2 ** chance.uniform(-1, 1)
    side = round(SIDE / factor)
    lacking = [max(0, side - length) for length in classes.shape]
    pixels = np.pad(pixels, [(0, 0), (0, lacking[0]), (0, lacking[1])])
    classes = np.pad(classes, [(0, lacking[0]), (0, lacking[1])])
    top, left = (int(chance.integers(0, length - side + 1)) for length in classes.shape)
    image = torch.from_numpy(pixels[None, :, top : top + side, left : left + side].copy()).float()
    image = F.interpolate(image, (SIDE, SIDE), mode="bilinear", antialias=True)[0].numpy()
    classes = classes[top : top + side, left : left + side]
    rows = (np.arange(SIDE) + 0.5) * side // SIDE
    classes = classes[np.ix_(rows.astype(int), rows.astype(int))]
    turns, flip = int(chance.integers(4)), int(chance.integers(2))
    image, classes = np.rot90(image, turns, (1, 2)), np.rot90(classes, turns)
    return (image[:, :, ::-1] if flip else image).copy(), (classes[:, ::-1] if flip else classes).copy()


def flipped(pixels: np.ndarray, target: Any, chance: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """An image in 0 .. 1, its boxes and labels from 1 on, mirrored as often as not along either axis."""
    boxes = torch.from_numpy(target.boxes.copy())
    image = torch.from_numpy(pixels).float() / 255
    for axis, length in ((0, pixels.shape[2]), (1, pixels.shape[1])):
        if chance.integers(2):
            image = image.flip(2 - axis)
            boxes[:, [axis, axis + 2]] = length - boxes[:, [axis + 2, axis]]
    return image, boxes, torch.from_numpy(target.labels) + 1


def zip_boxes(rows: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images, and targets as torchvision takes them."""
    return [image for image, *_ in rows], [{"boxes": boxes, "labels": labels} for _, boxes, labels in rows]


def normalised(images: np.ndarray) -> Tensor:
    """(B, 3, h, w) in 0 .. 255 -> normalised by ImageNet's mean and deviation."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (torch.from_numpy(np.ascontiguousarray(images)).float() / 255 - mean[:, None, None]) / std[:, None, None]


Judge = Callable[[], tuple[dict[str, Any], list[dict[str, Any]]]]


def unet(data: Any) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], Judge]:
    """A U-Net, its loss, and what judges it on the test images by tiles, as ours are."""
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet34", encoder_weights=None, classes=2)
    dice = smp.losses.DiceLoss("multiclass")

    @torch.no_grad()
    def judge() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        compute = lambda tiles: model(normalised(tiles)).numpy()  # noqa: E731
        matrices = [
            confusion_of(target.class_map(), class_map(compute, pixels, (SIDE, SIDE)), 2)
            for pixels, target in scenes(data.splits["test"])
        ]
        every = np.stack(matrices)
        return figures_of(every.sum(0)), class_rows(every, data.classes)

    return model, lambda images, maps: F.cross_entropy(out := model(images), maps) + dice(out, maps), judge


def faster_rcnn(data: Any) -> tuple[nn.Module, Callable[..., Tensor], Judge]:
    """A Faster R-CNN, its loss, and what judges it on the test images."""
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    count = len(data.classes)
    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=count + 1)

    @torch.no_grad()
    def judge() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        tables = []
        for pixels, target in scenes(data.splits["test"]):
            out = model([torch.from_numpy(pixels).float() / 255])[0]
            order = out["scores"].argsort(descending=True, stable=True)
            boxes, labels, scores = (out[name][order].numpy() for name in ("boxes", "labels", "scores"))
            tables.append(match_image(Detections(target.size, boxes, labels - 1, scores), target, False))
        rows = Ragged(np.concatenate(tables), np.array([len(table) for table in tables], np.int64))
        readable = np.ones(len(tables), bool)
        report = CocoEvaluator(data.classes).report(Outputs(data.splits["test"], rows, readable))
        return report.figures, report.per_class

    return model, lambda images, targets: sum(model(images, targets).values()), judge  # type: ignore[return-value]


def page(plan: Plan) -> str:
    """The table of the rows that are there."""
    lines = [
        f"# Masks and boxes from a few hundred images, {time.strftime('%Y-%m-%d')}",
        "",
        f"{processor()}, torch {torch.__version__}. Runs of {plan.minutes:g} minutes on {plan.cores} cores, by the processor",
        "time of one thread; pre-training has as many again. Figures of the test images: mean of the seeds, and each.",
        "",
        "    python benchmarks/dense.py nuclei|cells FOLDER --work DIR --rows ROWS.jsonl",
        "",
        "| data | figure | method | parameters | images learned from | mean | each seed |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (kind, method, _), row in sorted(plan.made().items()):
        groups.setdefault((kind, method), []).append(row)
    for (kind, method), rows in groups.items():
        values = [row[LEADING[kind]] for row in rows]
        cells = [kind, LEADING[kind], method, f"{rows[0]['parameters']:,}", f"{rows[0]['images']:,}"]
        cells += [f"{statistics.mean(values):.1%}", ", ".join(f"{value:.1%}" for value in values)]
        lines.append("| " + " | ".join(cells) + " |")
    wanted = [(kind, method) for kind in OURS for method in (SCRATCH, FIRST, PEERS[kind])]
    missing = [f"{kind}: {method}" for kind, method in wanted if (kind, method) not in groups]
    lines += ["", f"Not run yet: {'; '.join(missing)}."] if missing else []
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the rows that are not there yet, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=tuple(OURS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="where runs are kept; a second call goes on with them")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines, a run each")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--methods", nargs="*", default=(SCRATCH, FIRST, "peer"), help="in this order; none: the page")
    parser.add_argument("--minutes", type=float, default=Plan.minutes)
    parser.add_argument("--cores", type=int, default=Plan.cores, help="that the minutes are of")
    parser.add_argument("--seeds", type=int, default=Plan.seeds)
    parser.add_argument("--measured", type=int, default=Plan.measured)
    given = vars(parser.parse_args())
    methods, out = given.pop("methods"), given.pop("out")
    plan = Plan(**given)
    for seed in range(plan.seeds):
        for word in methods:
            method = PEERS[plan.kind] if word == "peer" else word
            if (plan.kind, method, seed) in plan.made():
                continue
            facts = theirs(plan, seed) if word == "peer" else ours(plan, method, seed)
            row = {"data": plan.kind, "method": method, "seed": seed, "minutes": plan.minutes, **facts}
            with plan.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    text = page(plan)
    print(text)
    if out:
        out.write_text(text)


if __name__ == "__main__":
    main()
