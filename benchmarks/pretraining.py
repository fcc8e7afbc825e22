"""Self-supervised objectives on CIFAR-10 for equal time: k-NN, linear evaluation, and fine-tuning with 1 % and 10 % of
the labels.

    python benchmarks/pretraining.py FOLDER --work DIR --rows ROWS.jsonl --out
    benchmarks/results/DATE-pretraining-HARDWARE.md

FOLDER has train/CLASS/* and test/CLASS/*. Runs are stored in DIR and resumed; methods with a row in ROWS are skipped,
so a second call continues. A tenth of the training images is held out for all selections.

Other load on the machine would shorten a run of fixed wall time. Therefore a short run measures each method's images
per second of one thread's processor time (DIR/METHOD/rate.json), from which --minutes and --cores determine the epochs.
Methods can run in parallel, with OMP_NUM_THREADS=1.

Fine-tuning and training from scratch use the same images and number of steps. Each uses the best of three settings,
selected by one run with a separate seed on the held-out images. Test images are evaluated once for each number of the
table.

lightly-train (`pip install lightly-train -e .`, in a separate environment: --lightly PYTHON) trains our encoder for as
many minutes, by `benchmarks/pretraining_lightly.py`; its weights are evaluated like ours.
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

#: options of `vitreous train` for each of our methods; recipes are unchanged
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

LABEL_SHARES = (0.01, 0.1)  # shares of the labels of each class
SELECTION_SEED = 1000  # learning rates are compared with this seed; the table has seeds 0, 1, 2, ...
BATCH_SIZE = 64  # batch size of fine-tuning
NEVER = 10**9  # a number of steps beyond every run
CUTMIX_SETTINGS = {"views.cutmix": ["1.0"], "views.mix_probability": ["0.5"]}
MILD_SETTINGS = {"model.regularization.drop_path": ["0.1"], "views.shift": ["0.125"], "objective.smoothing": ["0.1"]}
#: the settings that each way of training selects from
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
    """The compared methods, and the paths of their runs. `steps` has the fine-tuning steps for each of LABEL_SHARES."""

    folder: Path
    work: Path
    rows: Path
    lightly: Path | None = None
    model: str = "Conv+ViT-128x4/8"
    minutes: float = 30.0
    cores: int = 2
    seeds: int = 5
    steps: tuple[int, ...] = (600, 2000)
    measured: int = 60  # steps of the run that measures images/s

    def run_folder(self, method: str) -> Path:
        """The folder of a method's runs."""
        return self.work / "".join(c if c.isalnum() else "-" for c in method)

    def finished_rows(self) -> dict[str, dict[str, Any]]:
        """The stored rows, by method."""
        lines = self.rows.read_text("utf-8").splitlines() if self.rows.is_file() else []
        return {row["method"]: row for row in map(json.loads, lines)}


@dataclass(frozen=True)
class EqualTime:
    """Methods compared after equal processor time, and the paths of their runs."""

    folder: Path
    work: Path
    rows: Path
    minutes: float
    cores: int = 2
    seeds: int = 3
    measured: int = 60  # steps of the run that measures images per processor second

    @property
    def seconds(self) -> float:
        """Processor seconds of a run."""
        return 60 * self.minutes * self.cores

    def stored(self) -> list[dict[str, Any]]:
        """The stored rows."""
        return [json.loads(line) for line in self.rows.read_text("utf-8").splitlines()] if self.rows.is_file() else []

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options for the fields, and `--out` for the page."""
        parser.add_argument("folder", type=Path)
        parser.add_argument("--work", type=Path, required=True, help="folder of the runs; a second call resumes them")
        parser.add_argument("--rows", type=Path, required=True, help="JSON lines, one per run")
        parser.add_argument("--out", type=Path)
        parser.add_argument("--minutes", type=float, default=cls.minutes)
        parser.add_argument(
            "--cores", type=int, default=cls.cores, help="number of cores; --minutes counts the time of all of them"
        )
        parser.add_argument("--seeds", type=int, default=cls.seeds)
        parser.add_argument("--measured", type=int, default=cls.measured)

    def train(self, data: Path, out: Path, rate_home: Path, seed: int, **options: Any) -> tuple[dict[str, Any], int]:
        """Train for the images that fit into the processor seconds at the rate stored in `rate_home`; returns the
        summary and the number of images."""
        rate = measure_processor_rate(rate_home, self.measured, str(data), **options)
        count = len(open_data(str(data)).splits["train"])
        length = {"epochs": round(rate * self.seconds / count, 2), "evaluate_every": NEVER, "save_every": 200}
        summary = train_or_load(out, data, seed=seed, **options, **length)
        return summary, round(summary["epochs"] * count)


def train_or_load(out: Path, data: Path, **options: Any) -> dict[str, Any]:
    """Return the summary of a run: load it if it is complete, resume it if it was started, else train."""
    if (out / "summary.json").is_file():
        return json.loads((out / "summary.json").read_text("utf-8"))
    begun = (out / "last.ckpt").exists() or (out / "checkpoints").exists()
    if not begun:
        shutil.rmtree(out, ignore_errors=True)
    started = time.perf_counter()
    summary = vitreous.train(str(data), out=str(out), resume=begun, workers=0, **options)
    print(f"{out}: {summary['steps']} steps, {time.perf_counter() - started:.0f} s", flush=True)
    return summary


def measure_processor_rate(folder: Path, steps: int, data: str, **options: Any) -> float:
    """Measure training images per second of one thread's processor time, once; the result is stored in `folder`.

    This is the difference between a run of `steps` and one of a quarter of them, so that start-up and evaluation do not
    count. A first run absorbs the one-time costs of the process.
    """
    rate_file = folder / "rate.json"
    if not rate_file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        seconds, batch = [], 0
        for length in (steps // 4, steps // 4, steps):
            shutil.rmtree(folder / "measured", ignore_errors=True)
            limits: dict[str, Any] = {"steps": length, "evaluate_every": NEVER, "save_every": NEVER, "workers": 0}
            started = time.process_time()
            summary = vitreous.train(data, out=str(folder / "measured"), **options, **limits)
            seconds.append(time.process_time() - started)
            batch = round(summary["epochs"] * len(open_data(data).splits["train"]) / length)
        images = batch * (steps - steps // 4)
        rate_file.write_text(json.dumps({"images_per_processor_second": images / (seconds[2] - seconds[1])}))
    return json.loads(rate_file.read_text())["images_per_processor_second"]


def pretrain_encoder(plan: PretrainingPlan, method: str) -> dict[str, Any]:
    """Train an encoder without labels for the images of the given minutes; returns its columns of the row."""
    rate = measure_processor_rate(
        plan.run_folder(method), plan.measured, str(plan.folder), model=plan.model, **VITREOUS_METHODS[method]
    )
    images = len(open_data(str(plan.folder)).splits["train"])
    epochs = round(rate * 60 * plan.minutes * plan.cores / images, 2)
    summary = train_or_load(
        plan.run_folder(method) / "encoder",
        plan.folder,
        model=plan.model,
        epochs=epochs,
        save_every=200,
        **VITREOUS_METHODS[method],
    )
    return {"images_per_processor_second": rate, "epochs": summary["epochs"], "images": round(epochs * images)}


def create_untrained_encoder(plan: PretrainingPlan) -> Path:
    """Return an encoder with initial weights: one step with a negligible learning rate."""
    out = plan.run_folder(RANDOM_ENCODER) / "encoder"
    train_or_load(out, plan.folder, model=plan.model, recipe="masked-patches", steps=1, lr=1e-12, warmup_steps=0)
    return out


def evaluate_knn(run: Path, data: Path) -> float:
    """Top-1 of the test images by nearest neighbours among all training images."""
    evaluation = vitreous.evaluate(run, str(data), protocol="knn", k=(DEFAULT_NEIGHBOURS,), workers=0, cache=False)
    return evaluation["results"][0]["top1"]


def evaluate_linear(run: Path, data: Path) -> float:
    """Top-1 of a linear head on the test images."""
    return vitreous.evaluate(run, str(data), protocol="linear", workers=0, cache=False)["results"][0]["top1"]


def evaluate_raw_pixels(plan: PretrainingPlan) -> dict[str, Any]:
    """The k-NN accuracy of pixels normalised to [-1, 1]."""
    data, preprocess = open_data(str(plan.folder)), ImagePreprocess((32, 32))
    pixels_by_split, labels = {}, {}
    for name, split in data.splits.items():
        pixels, _ = screen_images(split, preprocess, 0, keep=True)
        assert pixels is not None, "images of 32 pixels are stored in memory"
        pixels_by_split[name] = preprocess.normalise(pixels).flatten(1).numpy()
        labels[name] = split.labels
    memory, memory_labels = (
        np.concatenate([arrays[name] for name in ("train", "val")]) for arrays in (pixels_by_split, labels)
    )
    shares = compute_neighbour_votes(
        *find_nearest_neighbours(memory, pixels_by_split["test"], DEFAULT_NEIGHBOURS), memory_labels, len(data.classes)
    )
    return {"knn": float((shares.argmax(1) == labels["test"]).mean())}


def link_label_share(plan: PretrainingPlan, share: float, seed: int) -> Path:
    """Create a folder of links to a share of the training images of each class.

    The folder also has the test images or, for the selection seed, `val` with 500 images of each class on which no run
    of that seed trains.
    """
    root = plan.work / "data" / f"{share:g}-{seed}"
    if (root / "done").exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    for class_index, (name, files) in enumerate(sorted(list_class_files(plan.folder / "train").items())):
        order = np.random.default_rng([seed, class_index]).permutation(len(files))
        splits = {"train": order[: max(1, round(share * len(files)))]}
        if seed == SELECTION_SEED:
            splits["val"] = order[-min(500, len(files) // 5) :]
        for split, samples in splits.items():
            (root / split / name).mkdir(parents=True)
            for sample in samples:
                (root / split / name / files[sample].name).symlink_to(files[sample].resolve())
    (root / "test").symlink_to((plan.folder / "test").resolve())
    (root / "done").touch()
    return root


def finetune_method(plan: PretrainingPlan, method: str, share_index: int, encoder: Path | None) -> dict[str, Any]:
    """Train on a share of the labels: returns the selected setting, and the test top-1 of each seed."""
    way, share = FROM_SCRATCH if encoder is None else "fine-tuned", LABEL_SHARES[share_index]

    def learn(name: str, seed: int) -> tuple[Path, dict[str, Any]]:
        """Train one run on the labels of a seed."""
        setting: dict[str, Any] = dict(CANDIDATES[way][name])
        start: dict[str, Any] = {"model": plan.model} if encoder is None else {"init": str(encoder)}
        if seed != SELECTION_SEED:
            setting["settings"] = {"data.hold_out": ["0"], **setting.get("settings", {})}
        out = plan.run_folder(method) / f"{share:g} {name} seed {seed}".replace(" ", "-")
        length: dict[str, Any] = {
            "steps": plan.steps[share_index],
            "batch_size": BATCH_SIZE,
            "evaluate_every": NEVER,
            "save_every": NEVER,
        }
        return out, train_or_load(out, link_label_share(plan, share, seed), seed=seed, **start, **length, **setting)

    selection_scores = {name: learn(name, SELECTION_SEED)[1]["val"]["top1"] for name in CANDIDATES[way]}
    chosen = max(selection_scores, key=lambda name: selection_scores[name])
    tops = [learn(chosen, seed)[1]["test"]["top1"] for seed in range(plan.seeds)]
    return {"chosen": chosen, "judged": selection_scores, "top1": tops}


def run_lightly(plan: PretrainingPlan, method: str) -> tuple[Path, dict[str, Any]]:
    """Train the same backbone with lightly-train for as many minutes; returns its weights and its columns of the
    row."""
    if plan.lightly is None:
        raise LookupError(f"{method} needs --lightly PYTHON")
    out, script = plan.run_folder(method), Path(__file__).with_name("pretraining_lightly.py")
    if not (out / "metadata.json").is_file():
        out.mkdir(parents=True, exist_ok=True)
        command: list[Any] = [plan.lightly, script, plan.folder / "train", out, "--method", LIGHTLY_METHODS[method]]
        command += ["--model", plan.model, "--minutes", plan.minutes, "--measured", plan.measured]
        subprocess.run(list(map(str, command)), check=True)
    return out / "encoder", json.loads((out / "metadata.json").read_text())


def measure_row(plan: PretrainingPlan, method: str) -> dict[str, Any]:
    """Measure all columns of a method's row."""
    row: dict[str, Any] = {"method": method, "model": plan.model, "minutes": plan.minutes, "cores": plan.cores}
    if method == RAW_PIXELS:
        return row | evaluate_raw_pixels(plan)
    if method == RANDOM_ENCODER:
        return row | {"knn": evaluate_knn(create_untrained_encoder(plan), plan.folder)}
    encoder = None
    if method != FROM_SCRATCH:
        if method in LIGHTLY_METHODS:
            encoder, pretraining = run_lightly(plan, method)
        else:
            encoder, pretraining = plan.run_folder(method) / "encoder", pretrain_encoder(plan, method)
        row |= pretraining | {
            "knn": evaluate_knn(encoder, plan.folder),
            "linear": evaluate_linear(encoder, plan.folder),
        }
    return row | {
        f"{share:g}": finetune_method(plan, method, share_index, encoder)
        for share_index, share in enumerate(LABEL_SHARES)
    }


def format_mean_and_std(result: dict[str, Any] | None) -> str:
    """Mean and standard deviation over the seeds in percent, and the selected setting."""
    if not result:
        return ""
    tops = result["top1"]
    return f"{statistics.mean(tops):.1%} ± {statistics.stdev(tops) if len(tops) > 1 else 0.0:.1%} ({result['chosen']})"


def build_page(plan: PretrainingPlan, notes: list[str]) -> str:
    """Build the page from the stored rows."""
    rows = plan.finished_rows()
    any_row = next(iter(rows.values()), {"model": plan.model, "minutes": plan.minutes})
    cores = "one core" if any_row.get("cores", 2) == 1 else f"{any_row.get('cores', 2)} cores"
    share: Callable[[dict, str], str] = lambda row, name: f"{row[name]:.1%}" if name in row else ""  # noqa: E731
    lines = [
        f"# Learning without labels on CIFAR-10, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}. `{any_row['model']}`, pre-trained for the number of",
        f"images that fit into {any_row['minutes']:g} minutes on {cores}; ours on 90 % of the training",
        f"images, lightly-train on all. k-NN ({DEFAULT_NEIGHBOURS} neighbours among all training images), linear",
        f"head and fine-tuning ({' and '.join(map(str, plan.steps))} steps of {BATCH_SIZE} images, mean and standard deviation over seeds):",
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
    """Measure the missing rows, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs; a second call resumes them")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines, one per method")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--methods",
        nargs="*",
        choices=METHODS,
        default=METHODS,
        help="methods to measure, in this order; none: only print the page",
    )
    parser.add_argument("--lightly", type=Path, help="Python interpreter of an environment with lightly-train")
    parser.add_argument("--model", default=PretrainingPlan.model)
    parser.add_argument("--minutes", type=float, default=PretrainingPlan.minutes, help="pre-training time in minutes")
    parser.add_argument(
        "--cores",
        type=int,
        default=PretrainingPlan.cores,
        help="number of cores; --minutes counts the time of all of them",
    )
    parser.add_argument("--seeds", type=int, default=PretrainingPlan.seeds)
    parser.add_argument(
        "--steps",
        type=int,
        nargs=2,
        default=PretrainingPlan.steps,
        help="fine-tuning steps with 1 %% and with 10 %% of the labels",
    )
    parser.add_argument(
        "--measured", type=int, default=PretrainingPlan.measured, help="steps of the run that measures images/s"
    )
    parser.add_argument(
        "--note", action="append", default=[], help="a sentence at the end of the page; can be repeated"
    )
    options = vars(parser.parse_args())
    methods, out, notes = options.pop("methods"), options.pop("out"), options.pop("note")
    plan = PretrainingPlan(**options)
    plan.rows.parent.mkdir(parents=True, exist_ok=True)
    for method in methods:
        if method in plan.finished_rows():
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
