"""Gram anchoring: quality of patch features over training, with and without it, for equal processor time.

    python benchmarks/gram_anchoring.py --images cifar10/train --masks coco200 --work DIR --out ROWS.jsonl

A small ViT is pre-trained with the dinov3 recipe on CIFAR-10 without Gram anchoring. Training then continues from these
weights, heads and EMA teacher for equal processor time in two arms: without Gram anchoring, and with it, where the Gram
teacher is the encoder at the start of the arm. Schedules are constant and equal. With `--start masks`, the encoder is
trained on the class maps of train2017 instead, so that it has patch features that it can lose; the heads are new. The
recipe's learning rate hardly changes the encoder within minutes; `--lr 1e-3` does.

The patch features of the EMA teacher are measured on coco200, which is never trained on: each labelled patch of a
photograph of val2017 gets the majority class of its 20 nearest patches (cosine) of train2017. Both splits are sampled
once. `--images` has class folders of images of 32 x 32 pixels; `--masks` has images/{train,val}2017 and
semantic_segmentation/masks/{train,val}2017 of class indices, 0 unlabelled.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from vitreous.data.options import DataOptions
from vitreous.data.split import ArraySplit
from vitreous.inspection.features import extract_patch_tokens, extract_pooled_features
from vitreous.models.names import config_from_name
from vitreous.models.zoo import build_model
from vitreous.objectives.dinov3 import DINOv3Config
from vitreous.recipes.dinov3 import make_dinov3_run
from vitreous.recipes.options import TrainOptions
from vitreous.recipes.recipe import DatasetInfo
from vitreous.system.machine import get_processor_name
from vitreous.training.batches import RunInputs
from vitreous.training.folder import RunFolder
from vitreous.training.loop import TrainingState, run_training_loop
from vitreous.training.run import Run, ScheduleConfig
from vitreous.training.session import Session

PHOTO_SIDE = 64  # pixels of the photographs whose patches are classified
NUM_PATCHES = 20_000  # sampled labelled patches of each split
NUM_NEIGHBOURS = 20
IMAGE_SIDE = 32


class PatchTask:
    """Classification of the patches of coco200 by their nearest neighbours."""

    def __init__(self, folder: Path, patch: int) -> None:
        self.splits = {name: read_photos(folder, f"{name}2017", patch) for name in ("train", "val")}

    def measure(self, model: Any, mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, float]:
        """Measure a model: the accuracy over patches, the mean over classes, and the mean cosine of two patches of an
        image."""
        features, labels, cosines = {}, {}, []
        for name, (pixels, patch_labels, chosen) in self.splits.items():
            images = (pixels - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
            maps = torch.cat([extract_patch_tokens(model, part) for part in images.split(20)])
            tokens = F.normalize(maps.flatten(1, -2), dim=-1)
            cosines.append(tokens.mean(1).square().sum(-1).mean().item())
            features[name], labels[name] = tokens.flatten(0, 1)[chosen], patch_labels.flatten()[chosen]
        neighbours = torch.cat(
            [(part @ features["train"].T).topk(NUM_NEIGHBOURS).indices for part in features["val"].split(2000)]
        )
        votes = F.one_hot(labels["train"][neighbours], 256).sum(1)
        is_right = (votes.argmax(1) == labels["val"]).float()
        classes = [is_right[labels["val"] == value].mean().item() for value in labels["val"].unique()]
        return {
            "patch_accuracy": is_right.mean().item(),
            "patch_class_accuracy": float(np.mean(classes)),
            "patch_cosine": float(np.mean(cosines)),
        }


def read_photos(folder: Path, split: str, patch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read photographs squashed to `PHOTO_SIDE` pixels (n, 3, h, w) in 0 .. 1, the class of the centre of each patch
    (n, N), and the flat indices (k,) of sampled labelled patches."""
    pixels, labels = [], []
    grid = PHOTO_SIDE // patch
    for path in sorted((folder / "images" / split).glob("*.jpg")):
        image = Image.open(path).convert("RGB").resize((PHOTO_SIDE, PHOTO_SIDE), Image.Resampling.BICUBIC)
        mask = Image.open(folder / "semantic_segmentation" / "masks" / split / f"{path.stem}.png")
        pixels.append(np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255)
        labels.append(np.asarray(mask.resize((grid, grid), Image.Resampling.NEAREST), dtype=np.int64))
    patch_labels = torch.from_numpy(np.stack(labels)).flatten(1)
    labelled = patch_labels.flatten().nonzero()[:, 0]
    generator = torch.Generator().manual_seed(0)
    chosen = labelled[torch.randperm(len(labelled), generator=generator)[:NUM_PATCHES]].sort().values
    return torch.from_numpy(np.stack(pixels)), patch_labels, chosen


def read_training_images(folder: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Read at most `count` images of class folders, evenly over classes: pixels (n, H, W, 3) uint8, labels (n,)."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    paths = [(path, index) for index, home in enumerate(classes) for path in sorted(home.iterdir())[: count // 10]]
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path, _ in paths])
    return pixels, np.array([index for _, index in paths])


def train_on_masks(model: Any, task: PatchTask, run: Run, minutes: float) -> None:
    """Train an encoder and a linear head on its patch tokens to classify the patches of train2017, for a processor
    time."""
    pixels, labels, _ = task.splits["train"]
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (run.preprocess.mean, run.preprocess.std))
    images, head, model.any_size = (pixels - mean) / std, torch.nn.Linear(model.config.width, 256), True
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3, weight_decay=0.05)
    generator, started = torch.Generator().manual_seed(run.seed), time.process_time()
    while time.process_time() - started < 60 * minutes:
        rows = torch.randint(len(images), (32,), generator=generator)
        logits = head(model.features(images[rows])[:, model.config.prefix :]).flatten(0, 1)
        loss = F.cross_entropy(logits, labels[rows].flatten(), ignore_index=0)  # 0 is unlabelled
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Curve:
    """Trains a session for a limited processor time, and measures it at the beginning and at equal intervals of
    time."""

    def __init__(self, name: str, minutes: float, points: int, task: PatchTask, arguments: argparse.Namespace) -> None:
        self.name, self.seconds, self.points, self.task, self.out = name, 60 * minutes, points, task, arguments.out
        self.used, self.measured, self.started = 0.0, 0, 0.0

    def train(self, session: Session, state: TrainingState) -> None:
        """Train until the time is used."""
        self.session = session
        self.record(state, {})
        self.started = time.process_time()
        run_training_loop(state, session.batches(state), [(0, self.watch)])

    def watch(self, state: TrainingState) -> None:
        """Measure if it is time, and stop at the end; the time of measurements does not count."""
        used = self.used + time.process_time() - self.started
        if used >= self.seconds * self.measured / self.points:
            self.used = used
            _, scalars = state.pop_mean_metrics()
            self.record(state, scalars)
            self.started = time.process_time()
        state.should_stop = used >= self.seconds

    def record(self, state: TrainingState, scalars: dict[str, float]) -> None:
        """Measure the EMA teacher and append a row."""
        preprocess, model = state.run.preprocess, state.objective.deployed_model()
        row = {"arm": self.name, "step": state.step, "minutes": round(self.used / 60, 3)}
        row |= self.task.measure(model, preprocess.mean, preprocess.std)
        row["knn_top1"] = measure_knn(model, self.session, state.run)
        row |= {name: round(scalars[name], 6) for name in ("dino", "ibot", "gram") if name in scalars}
        row = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
        print(json.dumps(row), flush=True)
        with Path(self.out).open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.measured += 1


def measure_knn(model: Any, session: Session, run: Run) -> float:
    """Return the top-1 of k nearest neighbours (k = 20) of 1,000 training images among 3,000 others."""
    split: Any = session.inputs.train
    order = np.random.default_rng(0).permutation(len(split))[:4000]
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (run.preprocess.mean, run.preprocess.std))
    images = (torch.from_numpy(split.pixels[order]).permute(0, 3, 1, 2).float() / 255 - mean) / std
    features = F.normalize(torch.cat([extract_pooled_features(model, part) for part in images.split(500)]), dim=-1)
    labels = torch.from_numpy(LABELS[order])
    neighbours = (features[:1000] @ features[1000:].T).topk(NUM_NEIGHBOURS).indices
    votes = F.one_hot(labels[1000:][neighbours], 10).sum(1).argmax(1)
    return (votes == labels[:1000]).float().mean().item()


LABELS = np.zeros(0, dtype=np.int64)  # classes of the training images, for `measure_knn` only


def build_session(run: Run, pixels: np.ndarray, folder: Path) -> Session:
    """Build a session on images in memory without labels."""
    folder.mkdir(parents=True, exist_ok=True)
    split = ArraySplit(pixels, np.zeros((len(pixels), 0), np.float32))
    cached = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())
    return Session(run, RunInputs(split, None, cached), RunFolder(folder))


def main() -> None:
    """Run the pre-training and both arms."""
    global LABELS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--masks", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--start", choices=("dinov3", "masks"), default="dinov3", help="how the encoder is pre-trained")
    parser.add_argument("--model", default="ViT-64x4/4")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=4.5, help="processor time of the pre-training and of each arm")
    parser.add_argument("--points", type=int, default=6, help="measurements of each arm, in addition to the first")
    parser.add_argument("--weight", type=float, default=2.0, help="weight of the Gram loss")
    parser.add_argument("--lr", type=float, help="learning rate of the arms (default: that of the recipe)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pixels, LABELS = read_training_images(arguments.images, arguments.count)
    model = config_from_name(arguments.model, IMAGE_SIDE).with_options(classes=0, pool="mean", class_token=False)
    options = TrainOptions("cifar10", init="masks" if arguments.start == "masks" else None)
    run = make_dinov3_run(model, DatasetInfo(len(pixels), (IMAGE_SIDE, IMAGE_SIDE), 3), options)
    data = DataOptions("cifar10", (), len(pixels), "", cache=True)
    run = replace(run, data=data, seed=arguments.seed, schedule=ScheduleConfig(100, "constant"), epochs=10_000.0)
    task = PatchTask(arguments.masks, model.patch[0])
    print(get_processor_name(), arguments, f"{len(pixels)} images", flush=True)
    session = build_session(run, pixels, arguments.work / "pretraining")
    state = session.build()
    if arguments.start == "dinov3":
        Curve("pre-training", arguments.minutes, arguments.points, task, arguments).train(session, state)
    weights = {
        name: tensor.clone()
        for name, tensor in state.objective.state_dict().items()
        if not name.startswith("gram_teacher.")
    }
    if arguments.start == "masks":
        torch.manual_seed(arguments.seed)
        encoder = build_model(model)
        train_on_masks(encoder, task, run, arguments.minutes)
        weights |= {f"{part}.{name}": t for part in ("model", "teacher") for name, t in encoder.state_dict().items()}
    if arguments.lr:
        run = replace(run, optimizer=replace(run.optimizer, lr=arguments.lr))
    for weight in (0.0, arguments.weight):
        objective = replace(run.objective, gram_weight=weight, gram_refresh=0.0)
        assert isinstance(objective, DINOv3Config)
        views = replace(run.views, anchor_scale=2.0 if weight else 0.0)
        session = build_session(
            replace(run, objective=objective, views=views), pixels, arguments.work / f"gram-{weight:g}"
        )
        state = session.build()
        gram = {
            name.replace("teacher.", "gram_teacher.", 1): t for name, t in weights.items() if name[:8] == "teacher."
        }
        state.objective.load_state_dict(weights | (gram if weight else {}))
        Curve(f"Gram weight {weight:g}", arguments.minutes, arguments.points, task, arguments).train(session, state)


if __name__ == "__main__":
    main()
