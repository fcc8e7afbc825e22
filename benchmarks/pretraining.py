"""What a small ViT learns from CIFAR-10 without labels, by each objective in the same minutes: nearest neighbours, a
linear head, and fine-tuning with 1 % and 10 % of the labels.

    python benchmarks/pretraining.py FOLDER --work DIR --rows ROWS.jsonl --out benchmarks/results/DATE-pretraining-HARDWARE.md

FOLDER has train/CLASS/* and test/CLASS/*. Runs lie in DIR and are resumed; a method whose row is in ROWS is skipped,
so a second call goes on where the first one was stopped. A tenth of the training images is held out and chooses
whatever is chosen. Other work on the machine would shorten a run of a fixed time, so short runs count the images that
each method takes in a second of one thread's processor time (DIR/METHOD/rate.json), and the epochs follow from that,
--minutes and --cores; methods can be made side by side, with OMP_NUM_THREADS=1. Fine-tuned and from scratch learn from the same images in as many steps, each with the best of three ways
by one run of a seed of its own on the held-out images. Test images are read once for each figure of the table.

lightly-train (`pip install lightly-train -e .`, in an environment of its own: --lightly PYTHON) trains our encoder for
the images of as many minutes, by `benchmarks/pretraining_lightly.py`; its weights are judged as ours.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vitreous
from vitreous.data.layouts.folder import list_class_files
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.screen import screen_images
from vitreous.data.sources import open_data
from vitreous.evaluation.knn import DEFAULT_NEIGHBOURS, compute_neighbour_votes, find_nearest_neighbours
from vitreous.system.machine import get_processor_name

#: options of `vitreous train` for each method of ours, the recipes as they stand
VITREOUS_METHODS: dict[str, dict[str, Any]] = {
    "DINO": {"recipe": "dino"},
    "MAE": {"recipe": "mae"},
    "DINOv2": {"recipe": "dinov2"},
    "masked patches, mean colour": {"recipe": "masked-patches"},
    "masked patches, small colours": {"recipe": "masked-patches", "settings": {"objective.target": ["small-colours"]}},
    "masked patches, pixels": {"recipe": "masked-patches", "settings": {"objective.target": ["pixels"]}},
}
LIGHTLY_METHODS = {"lightly-train, DINO": "dino", "lightly-train, default": "default"}
FROM_SCRATCH, RANDOM_ENCODER, RAW_PIXELS = "from scratch", "random encoder", "raw pixels"
METHODS = ("DINO", "MAE", FROM_SCRATCH, RAW_PIXELS, RANDOM_ENCODER, *list(VITREOUS_METHODS)[2:], *LIGHTLY_METHODS)

LABEL_SHARES = (0.01, 0.1)  # of the labels of a class
SELECTION_SEED = 1000  # the seed on which rates are compared; the table has seeds 0, 1, 2, ...
BATCH_SIZE = 64  # images of a fine-tuning step
NEVER = 10**9  # steps
CUTMIX_SETTINGS = {"views.cutmix": ["1.0"], "views.mix_probability": ["0.5"]}
MILD_SETTINGS = {"model.regularization.drop_path": ["0.1"], "views.shift": ["0.125"], "objective.smoothing": ["0.1"]}
#: what each way of learning from labels chooses from
CANDIDATES: dict[str, dict[str, dict[str, Any]]] = {
    "fine-tuned": {
        "AdamW at 2e-3": {},
        "Muon at 0.004": {"recipe": "small", "settings": {"optimizer.matrix_lr": ["0.004"], **MILD_SETTINGS}},
        "Muon at 0.007, CutMix": {
            "recipe": "small",
            "settings": {"optimizer.matrix_lr": ["0.007"], **MILD_SETTINGS, **CUTMIX_SETTINGS},
        },
    },
    FROM_SCRATCH: {
        "Muon at 0.007": {"recipe": "small"},
        "Muon at 0.02": {"recipe": "small", "settings": {"optimizer.matrix_lr": ["0.02"]}},
        "Muon at 0.02, CutMix": {"recipe": "small", "settings": {"optimizer.matrix_lr": ["0.02"], **CUTMIX_SETTINGS}},
    },
}


@dataclass(frozen=True)
class PretrainingPlan:
    """What is compared, and where its runs lie. `steps` of fine-tuning has one number for each of SHARES."""

    folder: Path
    work: Path
    rows: Path
    lightly: Path | None = None
    model: str = "Conv+ViT-128x4/8"
    minutes: float = 30.0
    cores: int = 2
    seeds: int = 5
    steps: tuple[int, ...] = (600, 2000)
    measured: int = 60  # steps that measure the images a second

    def home(self, method: str) -> Path:
        """The folder of a method's runs."""
        return self.work / "".join(c if c.isalnum() else "-" for c in method)

    def made(self) -> dict[str, dict[str, Any]]:
        """The rows that are there, by method."""
        lines = self.rows.read_text("utf-8").splitlines() if self.rows.is_file() else []
        return {row["method"]: row for row in map(json.loads, lines)}


@dataclass(frozen=True)
class EqualTime:
    """Methods that are compared after as much processor time, and where their runs lie."""

    folder: Path
    work: Path
    rows: Path
    minutes: float
    cores: int = 2
    seeds: int = 3
    measured: int = 60  # steps that count the images of a processor second

    @property
    def seconds(self) -> float:
        """Processor seconds of a run."""
        return 60 * self.minutes * self.cores

    def stored(self) -> list[dict[str, Any]]:
        """The rows that are there."""
        return [json.loads(line) for line in self.rows.read_text("utf-8").splitlines()] if self.rows.is_file() else []

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """The options of a script that give the fields, and `--out`, where the page goes."""
        parser.add_argument("folder", type=Path)
        parser.add_argument(
            "--work", type=Path, required=True, help="where runs are kept; a second call goes on with them"
        )
        parser.add_argument("--rows", type=Path, required=True, help="JSON lines, a run each")
        parser.add_argument("--out", type=Path)
        parser.add_argument("--minutes", type=float, default=cls.minutes)
        parser.add_argument("--cores", type=int, default=cls.cores, help="that the minutes are of")
        parser.add_argument("--seeds", type=int, default=cls.seeds)
        parser.add_argument("--measured", type=int, default=cls.measured)

    def train(self, data: Path, out: Path, rate_home: Path, seed: int, **options: Any) -> tuple[dict[str, Any], int]:
        """A run for the images that the processor seconds hold, by the rate in `rate_home`; its summary, and how many
        images those were."""
        rate = measure_processor_rate(rate_home, self.measured, str(data), **options)
        count = len(open_data(str(data)).splits["train"])
        length = {"epochs": round(rate * self.seconds / count, 2), "evaluate_every": NEVER, "save_every": 200}
        summary = train_or_load(out, data, seed=seed, **options, **length)
        return summary, round(summary["epochs"] * count)


def train_or_load(out: Path, data: Path, **options: Any) -> dict[str, Any]:
    """The summary of a run: of a complete one as it lies there, else when it has been begun or has gone on to its
    end."""
    if (out / "summary.json").is_file():
        return json.loads((out / "summary.json").read_text("utf-8"))
    begun = (out / "last.ckpt").exists() or (out / "checkpoints").exists()
    if not begun:
        shutil.rmtree(out, ignore_errors=True)
    started = time.perf_counter()
    summary = vitreous.train(str(data), out=str(out), resume=begun, workers=0, **options)
    print(f"{out}: {summary['steps']} steps, {time.perf_counter() - started:.0f} s", flush=True)
    return summary


def measure_processor_rate(home: Path, steps: int, data: str, **options: Any) -> float:
    """Images that training steps take in a second of one thread's processor time; measured once and kept in `home`.

    The time of a run of `steps` less that of one of a quarter of them, so that neither start nor evaluation counts; one
    before both bears what a process does once.
    """
    place = home / "rate.json"
    if not place.is_file():
        home.mkdir(parents=True, exist_ok=True)
        seconds, batch = [], 0
        for length in (steps // 4, steps // 4, steps):
            shutil.rmtree(home / "measured", ignore_errors=True)
            given: dict[str, Any] = {"steps": length, "evaluate_every": NEVER, "save_every": NEVER, "workers": 0}
            started = time.process_time()
            summary = vitreous.train(data, out=str(home / "measured"), **options, **given)
            seconds.append(time.process_time() - started)
            batch = round(summary["epochs"] * len(open_data(data).splits["train"]) / length)
        images = batch * (steps - steps // 4)
        place.write_text(json.dumps({"images_per_processor_second": images / (seconds[2] - seconds[1])}))
    return json.loads(place.read_text())["images_per_processor_second"]


def pretrain_encoder(plan: PretrainingPlan, method: str) -> dict[str, Any]:
    """Train an encoder without labels, for the images of so many minutes; what the row says of it."""
    rate = measure_processor_rate(
        plan.home(method), plan.measured, str(plan.folder), model=plan.model, **VITREOUS_METHODS[method]
    )
    images = len(open_data(str(plan.folder)).splits["train"])
    epochs = round(rate * 60 * plan.minutes * plan.cores / images, 2)
    summary = train_or_load(
        plan.home(method) / "encoder",
        plan.folder,
        model=plan.model,
        epochs=epochs,
        save_every=200,
        **VITREOUS_METHODS[method],
    )
    return {"images_per_processor_second": rate, "epochs": summary["epochs"], "images": round(epochs * images)}


def create_untrained_encoder(plan: PretrainingPlan) -> Path:
    """An encoder as it is before the first step: one step with a rate of next to nothing."""
    out = plan.home(RANDOM_ENCODER) / "encoder"
    train_or_load(out, plan.folder, model=plan.model, recipe="masked-patches", steps=1, lr=1e-12, warmup_steps=0)
    return out


def evaluate_knn(run: Path, data: Path) -> float:
    """Top-1 of the nearest neighbours of the test images among all training images."""
    found = vitreous.evaluate(run, str(data), protocol="knn", k=(DEFAULT_NEIGHBOURS,), workers=0, cache=False)
    return found["results"][0]["top1"]


def evaluate_linear(run: Path, data: Path) -> float:
    """Top-1 of a linear head on the test images."""
    return vitreous.evaluate(run, str(data), protocol="linear", workers=0, cache=False)["results"][0]["top1"]


def raw_pixels(plan: PretrainingPlan) -> dict[str, Any]:
    """The same nearest neighbours of the pixels themselves, normalised to [-1, 1]."""
    data, preprocess = open_data(str(plan.folder)), ImagePreprocess((32, 32))
    rows, labels = {}, {}
    for name, split in data.splits.items():
        pixels, _ = screen_images(split, preprocess, 0, keep=True)
        assert pixels is not None, "pictures of 32 pixels are kept in memory"
        rows[name] = preprocess.normalise(pixels).flatten(1).numpy()
        labels[name] = split.labels
    memory, known = (np.concatenate([part[name] for name in ("train", "val")]) for part in (rows, labels))
    shares = compute_neighbour_votes(
        *find_nearest_neighbours(memory, rows["test"], DEFAULT_NEIGHBOURS), known, len(data.classes)
    )
    return {"knn": float((shares.argmax(1) == labels["test"]).mean())}


def link_label_share(plan: PretrainingPlan, share: float, seed: int) -> Path:
    """A folder of links to that share of the training images of each class; to test, or for the seed that compares
    rates, to `val`, 500 of each class that no run of that seed learns from."""
    root = plan.work / "data" / f"{share:g}-{seed}"
    if (root / "done").exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    for number, (name, files) in enumerate(sorted(list_class_files(plan.folder / "train").items())):
        order = np.random.default_rng([seed, number]).permutation(len(files))
        parts = {"train": order[: max(1, round(share * len(files)))]}
        if seed == SELECTION_SEED:
            parts["val"] = order[-min(500, len(files) // 5) :]
        for split, rows in parts.items():
            (root / split / name).mkdir(parents=True)
            for row in rows:
                (root / split / name / files[row].name).symlink_to(files[row].resolve())
    (root / "test").symlink_to((plan.folder / "test").resolve())
    (root / "done").touch()
    return root


def finetune_method(plan: PretrainingPlan, method: str, number: int, encoder: Path | None) -> dict[str, Any]:
    """Learn from a share of the labels: the better candidate, and test top-1 of each seed."""
    way, share = FROM_SCRATCH if encoder is None else "fine-tuned", LABEL_SHARES[number]

    def learn(name: str, seed: int) -> tuple[Path, dict[str, Any]]:
        """One run on the labels of a seed."""
        given: dict[str, Any] = dict(CANDIDATES[way][name])
        start: dict[str, Any] = {"model": plan.model} if encoder is None else {"init": str(encoder)}
        if seed != SELECTION_SEED:
            given["settings"] = {"data.hold_out": ["0"], **given.get("settings", {})}
        out = plan.home(method) / f"{share:g} {name} seed {seed}".replace(" ", "-")
        length: dict[str, Any] = {
            "steps": plan.steps[number],
            "batch_size": BATCH_SIZE,
            "evaluate_every": NEVER,
            "save_every": NEVER,
        }
        return out, train_or_load(out, link_label_share(plan, share, seed), seed=seed, **start, **length, **given)

    judged = {name: learn(name, SELECTION_SEED)[1]["val"]["top1"] for name in CANDIDATES[way]}
    chosen = max(judged, key=lambda name: judged[name])
    tops = [learn(chosen, seed)[1]["test"]["top1"] for seed in range(plan.seeds)]
    return {"chosen": chosen, "judged": judged, "top1": tops}


def run_lightly(plan: PretrainingPlan, method: str) -> tuple[Path, dict[str, Any]]:
    """Let lightly-train train the same backbone for as many minutes; its weights and what the row says of it."""
    if plan.lightly is None:
        raise LookupError(f"{method} needs --lightly PYTHON")
    out, script = plan.home(method), Path(__file__).with_name("pretraining_lightly.py")
    if not (out / "told.json").is_file():
        out.mkdir(parents=True, exist_ok=True)
        words: list[Any] = [plan.lightly, script, plan.folder / "train", out, "--method", LIGHTLY_METHODS[method]]
        words += ["--model", plan.model, "--minutes", plan.minutes, "--measured", plan.measured]
        subprocess.run(list(map(str, words)), check=True)
    return out / "encoder", json.loads((out / "told.json").read_text())


def measure_row(plan: PretrainingPlan, method: str) -> dict[str, Any]:
    """Everything that the table says of a method."""
    facts: dict[str, Any] = {"method": method, "model": plan.model, "minutes": plan.minutes, "cores": plan.cores}
    if method == RAW_PIXELS:
        return facts | raw_pixels(plan)
    if method == RANDOM_ENCODER:
        return facts | {"knn": evaluate_knn(create_untrained_encoder(plan), plan.folder)}
    encoder = None
    if method != FROM_SCRATCH:
        if method in LIGHTLY_METHODS:
            encoder, told = run_lightly(plan, method)
        else:
            encoder, told = plan.home(method) / "encoder", pretrain_encoder(plan, method)
        facts |= told | {"knn": evaluate_knn(encoder, plan.folder), "linear": evaluate_linear(encoder, plan.folder)}
    return facts | {
        f"{share:g}": finetune_method(plan, method, number, encoder) for number, share in enumerate(LABEL_SHARES)
    }


def format_mean_and_std(found: dict[str, Any] | None) -> str:
    """Mean and standard deviation of the seeds in percent, and the rate."""
    if not found:
        return ""
    tops = found["top1"]
    return f"{statistics.mean(tops):.1%} ± {statistics.stdev(tops) if len(tops) > 1 else 0.0:.1%} ({found['chosen']})"


def build_page(plan: PretrainingPlan, notes: list[str]) -> str:
    """The page, of the rows that are there."""
    rows = plan.made()
    some = next(iter(rows.values()), {"model": plan.model, "minutes": plan.minutes})
    cores = "one core" if some.get("cores", 2) == 1 else f"{some.get('cores', 2)} cores"
    share: Callable[[dict, str], str] = lambda row, name: f"{row[name]:.1%}" if name in row else ""  # noqa: E731
    lines = [
        f"# Learning without labels on CIFAR-10, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}. `{some['model']}`, pre-trained for as many",
        f"images as {some['minutes']:g} minutes hold on {cores}; ours on the training",
        f"images but for a tenth, lightly-train on all. k-NN ({DEFAULT_NEIGHBOURS} neighbours among all training images), linear",
        f"head and fine-tuning ({' and '.join(map(str, plan.steps))} steps of {BATCH_SIZE} images, mean and deviation of seeds):",
        "top-1 of the test images.",
        "",
        "    python benchmarks/pretraining.py FOLDER --work DIR --rows ROWS.jsonl",
        "",
        f"| method | images/s, {cores} | epochs | images seen | k-NN | linear | 1 % of the labels | 10 % of the labels |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in [method for method in METHODS if method in rows]:
        row = rows[name]
        cells = ["", "", ""]
        if "images" in row:
            rate = row.get("images_per_second") or row["cores"] * row["images_per_processor_second"]
            cells = [f"{rate:.0f}", f"{row['epochs']:.1f}", f"{row['images']:,}"]
        cells += [
            share(row, "knn"),
            share(row, "linear"),
            format_mean_and_std(row.get("0.01")),
            format_mean_and_std(row.get("0.1")),
        ]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    missing = [method for method in METHODS if method not in rows]
    if missing:
        lines += ["", f"Not run yet: {'; '.join(missing)}."]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def main() -> None:
    """Make the rows that are not there yet, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="where runs are kept; a second call goes on with them")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines, a method each")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS, help="in this order; none: the page")
    parser.add_argument("--lightly", type=Path, help="the Python of an environment with lightly-train")
    parser.add_argument("--model", default=PretrainingPlan.model)
    parser.add_argument("--minutes", type=float, default=PretrainingPlan.minutes, help="of pre-training")
    parser.add_argument("--cores", type=int, default=PretrainingPlan.cores, help="that the minutes are of")
    parser.add_argument("--seeds", type=int, default=PretrainingPlan.seeds)
    parser.add_argument(
        "--steps", type=int, nargs=2, default=PretrainingPlan.steps, help="with 1 %% and with 10 %% of the labels"
    )
    parser.add_argument(
        "--measured", type=int, default=PretrainingPlan.measured, help="steps that measure the images a second"
    )
    parser.add_argument("--note", action="append", default=[], help="a sentence at the end of the page; several times")
    given = vars(parser.parse_args())
    methods, out, notes = given.pop("methods"), given.pop("out"), given.pop("note")
    plan = PretrainingPlan(**given)
    plan.rows.parent.mkdir(parents=True, exist_ok=True)
    for method in methods:
        if method in plan.made():
            continue
        try:
            row = measure_row(plan, method)
        except (LookupError, subprocess.CalledProcessError) as error:
            notes.append(f"{method} was left out: {error}.")
            continue
        with plan.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    text = build_page(plan, notes)
    print(text)
    if out:
        out.write_text(text)


if __name__ == "__main__":
    main()
