"""Image regression from scratch in equal time: `vitreous train` compared with timm's ViT and scikit-learn.

    python benchmarks/regression.py TABLE.csv --work DIR --rows ROWS.jsonl --out benchmarks/results/DATE-regression-HARDWARE.md

TABLE.csv has `path`, one column of values, and `split` with train, val and test. Each method trains on `train` with
each seed and is evaluated once on `test`. The splits are the same for all methods and seeds.

| method | description |
|---|---|
| vitreous | `vitreous train TABLE.csv --init none`: ViT-Ti/16 at the size of the images, at most 224 pixels |
| vitreous, learning rate chosen | the same with `--lr`: of three learning rates the best of seed 0 on `val` |
| timm, learning rate chosen | `vit_tiny_patch16_224` with one output at the size of the images, standardised targets, mean squared error, AdamW, warm-up and cosine, mirrored images; of the same three learning rates the best of seed 0 on `val` |
| ridge regression, random forest | scikit-learn on pixels scaled to 32 x 32; the forest's depth and the penalty are chosen on `val` |
| mean | the mean of the training values |

Training time is processor time of one thread, so runs can share a machine with OMP_NUM_THREADS=1. The runs that choose
a learning rate are not counted in the minutes. A second call continues with the missing rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from pretraining import EqualTime

import vitreous
from vitreous.system.machine import get_processor_name, has_bf16
from vitreous.tasks.intervals import bootstrap_metrics, percentile_interval
from vitreous.tasks.regression import ValuePrediction

SKLEARN_IMAGE_SIZE = 32  # height and width of scikit-learn's images
LEARNING_RATES = (1e-4, 3e-4, 1e-3)
BATCH_SIZE = 64
WARMUP_SHARE = 0.05  # share of the time
RIDGE_PENALTIES = tuple(10.0**power for power in range(0, 8))
FOREST_DEPTHS = (4, 8, None)
NUM_TREES = 500


@dataclass(frozen=True)
class RegressionPlan(EqualTime):
    """Settings for a table of values."""

    minutes: float = 2.0
    cores: int = 1
    measured: int = 8

    def finished_rows(self) -> dict[tuple[str, str, int], dict[str, Any]]:
        """The stored rows, by table, method and seed."""
        return {(row["table"], row["method"], row["seed"]): row for row in self.stored()}

    def run_folder(self, name: str) -> Path:
        """The folder of a run."""
        return self.work / self.folder.stem / "".join(c if c.isalnum() else "-" for c in name)


@dataclass(frozen=True)
class Samples:
    """Images of a split as (N, H, W, 3) uint8, and their values (N,)."""

    paths: list[str]
    images: np.ndarray
    values: np.ndarray


def read_splits(table: Path) -> tuple[str, dict[str, Samples]]:
    """The name of the target and the samples of each split; all images have the size of the first."""
    with table.open(newline="") as file:
        records = list(csv.DictReader(file))
    (target,) = set(records[0]) - {"path", "split"}
    splits = {}
    for name in ("train", "val", "test"):
        chosen = [record for record in records if record["split"] == name]
        paths = [str(table.parent / record["path"]) for record in chosen]
        images = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])
        splits[name] = Samples(paths, images, np.array([float(record[target]) for record in chosen]))
    return target, splits


def train_vitreous(
    plan: RegressionPlan, splits: dict[str, Samples], seed: int, learning_rate: float | None = None
) -> dict[str, np.ndarray]:
    """Predictions for val and test after `vitreous train` from scratch. None: the recipe's learning rate."""
    method = "vitreous" if learning_rate is None else f"vitreous {learning_rate:g}"
    folder = plan.run_folder(f"{method} {seed}")
    plan.train(plan.folder, folder, plan.run_folder("vitreous"), seed, init="none", lr=learning_rate)
    model = vitreous.load(folder)
    predictions_by_split = {split: model.predict(splits[split].paths) for split in ("val", "test")}
    return {
        split: np.array([prediction.values[0] for prediction in predictions if isinstance(prediction, ValuePrediction)])
        for split, predictions in predictions_by_split.items()
    }


def choose_learning_rate(
    name: str, train: Callable[[RegressionPlan, dict[str, Samples], int, float], dict[str, np.ndarray]]
) -> Callable[[RegressionPlan, dict[str, Samples], int], dict[str, np.ndarray]]:
    """`train` with the learning rate that has the best R2 on val with seed 0, stored in the folder of `name`."""

    def train_with_best(plan: RegressionPlan, splits: dict[str, Samples], seed: int) -> dict[str, np.ndarray]:
        chosen = plan.run_folder(name) / "learning_rate.json"
        if chosen.is_file():
            return train(plan, splits, seed, json.loads(chosen.read_text("utf-8")))
        runs = {rate: train(plan, splits, 0, rate) for rate in LEARNING_RATES}
        best = max(runs, key=lambda rate: compute_r2(splits["val"].values, runs[rate]["val"]))
        chosen.parent.mkdir(parents=True, exist_ok=True)
        chosen.write_text(json.dumps(best), "utf-8")
        return runs[best] if seed == 0 else train(plan, splits, seed, best)

    return train_with_best


def train_timm(
    plan: RegressionPlan, splits: dict[str, Samples], seed: int, learning_rate: float
) -> dict[str, np.ndarray]:
    """Predictions for val and test after training for the processor time of the plan."""
    import timm

    torch.manual_seed(seed)
    train, size = splits["train"], splits["train"].images.shape[1:3]
    mean, std = train.values.mean(), train.values.std()
    images, targets = to_tensor(train.images), torch.from_numpy((train.values - mean) / std).float()
    model = timm.create_model("vit_tiny_patch16_224", num_classes=1, img_size=size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.05, fused=True)
    order, started = torch.randperm(len(images)), time.process_time()
    while (spent := (time.process_time() - started) / plan.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, spent / WARMUP_SHARE) * (1 + math.cos(math.pi * spent)) / 2
        if len(order) < BATCH_SIZE:
            order = torch.cat([order, torch.randperm(len(images))])
        batch, order = order[:BATCH_SIZE], order[BATCH_SIZE:]
        views = torch.where(torch.rand(len(batch), 1, 1, 1) < 0.5, images[batch].flip(3), images[batch])
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16("cpu")):
            loss = F.mse_loss(model(views).float()[:, 0], targets[batch])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        return {
            name: torch.cat([model(part)[:, 0] for part in to_tensor(splits[name].images).split(BATCH_SIZE)]).numpy()
            * std
            + mean
            for name in ("val", "test")
        }


def to_tensor(images: np.ndarray) -> torch.Tensor:
    """(N, H, W, 3) uint8 -> (N, 3, H, W) float32 in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def scale_pixels(images: np.ndarray) -> np.ndarray:
    """(N, H, W, 3) uint8 -> (N, 3 * PIXELS ** 2) in [0, 1]."""
    small = [
        np.asarray(Image.fromarray(image).resize((SKLEARN_IMAGE_SIZE, SKLEARN_IMAGE_SIZE), Image.Resampling.BOX))
        for image in images
    ]
    return np.stack(small).reshape(len(small), -1) / 255


def fit_ridge(plan: RegressionPlan, splits: dict[str, Samples], seed: int) -> dict[str, np.ndarray]:
    """Predictions for val and test of ridge regression with the penalty of the best R2 on val."""
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return select_best_sklearn(
        splits, [make_pipeline(StandardScaler(), Ridge(alpha=alpha)) for alpha in RIDGE_PENALTIES]
    )


def fit_forest(plan: RegressionPlan, splits: dict[str, Samples], seed: int) -> dict[str, np.ndarray]:
    """Predictions for val and test of a random forest with the depth of the best R2 on val."""
    from sklearn.ensemble import RandomForestRegressor

    forests = (
        RandomForestRegressor(NUM_TREES, max_depth=depth, max_features="sqrt", random_state=seed)
        for depth in FOREST_DEPTHS
    )
    return select_best_sklearn(splits, list(forests))


def select_best_sklearn(splits: dict[str, Samples], models: list[Any]) -> dict[str, np.ndarray]:
    """Predictions for val and test of the model with the best R2 on val."""
    pixels = {name: scale_pixels(samples.images) for name, samples in splits.items()}
    fitted = [model.fit(pixels["train"], splits["train"].values) for model in models]
    best = max(fitted, key=lambda model: compute_r2(splits["val"].values, model.predict(pixels["val"])))
    return {name: best.predict(pixels[name]) for name in ("val", "test")}


def predict_mean(plan: RegressionPlan, splits: dict[str, Samples], seed: int) -> dict[str, np.ndarray]:
    """The mean of the training values."""
    return {name: np.full(len(splits[name].values), splits["train"].values.mean()) for name in ("val", "test")}


#: method -> function, and whether its result depends on the seed
METHODS: dict[str, tuple[Callable[[RegressionPlan, dict[str, Samples], int], dict[str, np.ndarray]], bool]] = {
    "vitreous": (train_vitreous, True),
    "vitreous, learning rate chosen": (choose_learning_rate("vitreous", train_vitreous), True),
    "timm, learning rate chosen": (choose_learning_rate("timm", train_timm), True),
    "ridge regression": (fit_ridge, False),
    "random forest": (fit_forest, True),
    "mean": (predict_mean, False),
}


def compute_r2(values: np.ndarray, predictions: np.ndarray) -> float:
    """The coefficient of determination."""
    return 1 - float(((values - predictions) ** 2).sum() / ((values - values.mean()) ** 2).sum())


def compute_r2_interval(values: np.ndarray, predictions: np.ndarray) -> list[float]:
    """The 95 % interval of R2, by a bootstrap over images."""

    def draw_r2(counts: np.ndarray) -> dict[str, np.ndarray]:
        total = counts.sum(0)
        mean = values @ counts / total
        spread = (values**2) @ counts - total * mean**2
        return {"r2": 1 - ((values - predictions) ** 2) @ counts / spread}

    return [round(bound, 4) for bound in percentile_interval(bootstrap_metrics(draw_r2, len(values))["r2"])]


def measure_row(plan: RegressionPlan, method: str, seed: int) -> dict[str, Any]:
    """One method with one seed, evaluated on val and test."""
    _, splits = read_splits(plan.folder)
    predictions = METHODS[method][0](plan, splits, seed)
    row: dict[str, Any] = {"table": plan.folder.stem, "method": method, "seed": seed, "minutes": plan.minutes}
    for name, predicted in predictions.items():
        values = splits[name].values
        row[name] = {
            "r2": compute_r2(values, predicted),
            "interval": compute_r2_interval(values, predicted),
            "mae": float(np.abs(values - predicted).mean()),
            "images": len(values),
        }
    return row | {"train_images": len(splits["train"].values)}


def format_page(plan: RegressionPlan) -> str:
    """The tables of all stored rows."""
    lines = [
        f"# Regression from scratch, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}, one thread. vitreous and timm train for {plan.minutes:g} minutes of",
        "processor time. R2 and mean absolute error (MAE) on the test images: mean of the seeds, and R2 of each seed with",
        (
            "its 95 % interval (bootstrap over images). Learning rate chosen: of "
            f"{', '.join(f'{rate:g}' for rate in LEARNING_RATES)} the best of seed 0 on val."
        ),
        "",
        "    python benchmarks/regression.py TABLE.csv --work DIR --rows ROWS.jsonl",
    ]
    rows = plan.finished_rows()
    for table in dict.fromkeys(row["table"] for row in plan.stored()):
        first_row = next(row for row in plan.stored() if row["table"] == table)
        lines += [
            "",
            f"## {table}: {first_row['train_images']} training images, {first_row['test']['images']} test images",
            "",
        ]
        lines += ["| method | val R2 | test R2 | test MAE | test R2 by seed (95 % interval) |", "|---|---|---|---|---|"]
        for method in METHODS:
            seeds = [row for (stored, name, _), row in sorted(rows.items()) if (stored, name) == (table, method)]
            if seeds:
                val, test, error = (
                    statistics.mean(row[split][metric] for row in seeds)
                    for split, metric in (("val", "r2"), ("test", "r2"), ("test", "mae"))
                )
                seed_cells = ", ".join(
                    f"{row['test']['r2']:.2f} ({row['test']['interval'][0]:.2f} to {row['test']['interval'][1]:.2f})"
                    for row in seeds
                )
                lines.append(f"| {method} | {val:.2f} | **{test:.2f}** | {error:.1f} | {seed_cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the missing rows, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    RegressionPlan.add_options(parser)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS), help="none: print the page")
    arguments = vars(parser.parse_args())
    methods, out = arguments.pop("methods"), arguments.pop("out")
    plan = RegressionPlan(**arguments)
    for method in methods:
        for seed in range(plan.seeds if METHODS[method][1] else 1):
            if (plan.folder.stem, method, seed) not in plan.finished_rows():
                row = measure_row(plan, method, seed)
                with plan.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
    text = format_page(plan)
    print(text)
    if out:
        out.write_text(text)


if __name__ == "__main__":
    main()
