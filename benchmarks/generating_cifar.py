"""CIFAR-10 made by diffusion and by a flow in the same time, and what a classifier of the real images says of it.

    python benchmarks/generating_cifar.py FOLDER --classifier RUN --work DIR --rows ROWS.jsonl --out benchmarks/results/DATE-generating-cifar-HARDWARE.md

FOLDER has train/CLASS/* and test/CLASS/*; RUN is a run of `vitreous train FOLDER`, whose features the distances are of and
which says of each sample whether it is of its class. `--recipe dit` and `--recipe sit` train the same model on as many
images as --minutes hold on --cores cores by one thread's processor time (benchmarks/pretraining.py), so that both can be
trained side by side with OMP_NUM_THREADS=1. At a quarter, a half and the end of each run a thousand images are made, a
hundred a class, with 25 answers each (ddim in 25 steps, heun in 13), with and without guidance. Rows that ROWS has are
not made again; --recipes chooses. A picture of ten of each class of the end of each run goes to DIR/RECIPE.png.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from pretraining import NEVER, measure_processor_rate, train_or_load

import vitreous
from vitreous.data.sources import open_data
from vitreous.inference.image_sampler import build_sampler
from vitreous.inference.open_model import open_generator
from vitreous.reports.answers import EvaluationSettings
from vitreous.reports.generated import (
    GenerationOptions,
    RealImages,
    compute_generator_metrics,
    concatenate_features,
    generate_images,
    read_real_split,
)
from vitreous.reports.spaces import open_feature_space
from vitreous.system.machine import get_processor_name

SAMPLING_STEPS = {"dit": 25, "sit": 13}  # of ddim, and of heun, whose steps but the last have two answers
GUIDANCE_SCALES = (1.0, 2.0)
STAGES = (0.25, 0.5, 1.0)  # of a run
RATE_STEPS = 24  # steps that count the images of a processor second


def train_generator(given: argparse.Namespace, recipe: str) -> tuple[Path, float]:
    """Train a generator for its images, if that is to be done -> the run, and the epochs of it."""
    home = given.work / recipe
    ways: dict[str, Any] = {"recipe": recipe, "model": given.model, "progress": False}
    rate = measure_processor_rate(home, RATE_STEPS, str(given.folder), **ways)
    images = len(open_data(str(given.folder)).splits["train"])
    epochs = round(rate * 60 * given.minutes * given.cores / images, 2)
    steps = round(epochs * images / 128)
    saves = {"save_every": max(1, round(steps * STAGES[0])), "evaluate_every": NEVER, "keep": 8}
    train_or_load(home / "run", given.folder, epochs=epochs, **saves, **ways)
    return home / "run", epochs


def find_stage_weights(run: Path) -> dict[float, Path]:
    """The weights of a run at each of STAGES."""
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    places = {int(path.name.rpartition("-")[2]): path for path in (run / "checkpoints").glob("step-*")}
    wanted = {share: min(places, key=lambda step: abs(step - share * summary["steps"])) for share in STAGES[:-1]}
    return {share: places[step] for share, step in wanted.items()} | {1.0: run}


def append_rows(given: argparse.Namespace, recipe: str, done: set[tuple[Any, ...]]) -> None:
    """Make and judge the images of a recipe, and append a row for each stage and guidance."""
    run, epochs = train_generator(given, recipe)
    classes, real, space = open_generator(run).task.classes, None, None
    for share, place in find_stage_weights(run).items():
        for guidance in GUIDANCE_SCALES:
            if (recipe, share, guidance) in done:
                continue
            if space is None or real is None:
                space = open_feature_space(str(given.classifier), classes, EvaluationSettings(), "cpu")
                bundle, data = open_generator(run), open_data(str(given.folder))
                real = read_real_split(
                    str(given.folder), data, "test", bundle.preprocess, space, EvaluationSettings(workers=0)
                )
            row = {"recipe": recipe, "share": share, "guidance": guidance, "minutes": given.minutes * given.cores}
            row |= {"epochs": epochs, "model": given.model} | evaluate_samples(place, recipe, guidance, real, space)
            with given.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)
    picture = given.work / f"{recipe}.png"
    if not picture.is_file():
        options = {"guidance": GUIDANCE_SCALES[-1], "steps": SAMPLING_STEPS[recipe], "count": 10}
        vitreous.sample(run, picture, progress=False, **options)


def evaluate_samples(place: Path, recipe: str, guidance: float, real: RealImages, space: Any) -> dict[str, Any]:
    """Make a thousand images, and compare them with the test images."""
    bundle, began = open_generator(place), time.process_time()
    options = GenerationOptions(guidance=guidance, steps=SAMPLING_STEPS[recipe])
    batches = list(generate_images(build_sampler(bundle), len(bundle.task.classes), options, EvaluationSettings()))
    seconds = time.process_time() - began
    ours = concatenate_features([space.features(images, labels) for labels, images in batches])
    return compute_generator_metrics(real, ours) | {"seconds": seconds}


def build_page(rows: list[dict[str, Any]]) -> str:
    """The table."""
    first, recipes = rows[0], list(dict.fromkeys(row["recipe"] for row in rows))
    missing = [recipe for recipe in SAMPLING_STEPS if recipe not in recipes]
    lines = [
        f"# CIFAR-10 that was made, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}. {first['model']}, {' and '.join(f'`--recipe {one}`' for one in recipes)}, one run each, seed 0, for",
        f"{first['minutes']:g} minutes of one core by processor time; 1,000 samples, 100 a class, 25 answers each. Features, and who",
        "recognises a class, are of a classifier trained on the real training images. The Fréchet distance of 1,000 training",
        f"images to the test images is {first['frechet_distance_of_train']:.3g}.",
        "",
        f"    python benchmarks/generating_cifar.py FOLDER --classifier RUN --work DIR --rows ROWS.jsonl --minutes {first['minutes']:g} --cores 1",
        "",
        "| recipe | epochs | guidance | Fréchet distance | recognised | precision, recall | near copies (chance 1 %) | s of 1,000 samples, one core |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["recipe"], row["share"], row["guidance"])):
        cells = [row["recipe"], f"{row['share'] * row['epochs']:.2f}", f"{row['guidance']:g}"]
        cells += [f"{row['frechet_distance']:.3g}", f"{row['classifier_accuracy']:.1%}"]
        cells += [
            f"{row['precision']:.1%}, {row['recall']:.1%}",
            f"{row['near_duplicates']:.1%}",
            f"{row['seconds']:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"Not run yet: {', '.join(missing)}."] if missing else []
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the rows that lack, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classifier", type=Path, required=True, help="a run that names the classes of real images")
    parser.add_argument("--work", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--rows", type=Path, required=True, help="a file that rows are appended to")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--model", default="DiT-192x8/4")
    parser.add_argument("--recipes", nargs="+", default=list(SAMPLING_STEPS), choices=list(SAMPLING_STEPS))
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in given.rows.read_text("utf-8").splitlines()] if given.rows.is_file() else []
    done = {(row["recipe"], row["share"], row["guidance"]) for row in known}
    for recipe in given.recipes:
        append_rows(given, recipe, done)
    rows = [json.loads(line) for line in given.rows.read_text("utf-8").splitlines()]
    print(build_page(rows))
    if given.out:
        given.out.write_text(build_page(rows))


if __name__ == "__main__":
    main()
