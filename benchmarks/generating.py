"""The embedded digits made by diffusion and by a flow, and whether somebody else recognises them.

    python benchmarks/generating.py --work DIR --out benchmarks/results/DATE-generating-HARDWARE.md

`vitreous train digits --recipe dit` and `--recipe sit`, as they are; then a thousand samples of each, a hundred a digit, with and
without guidance. A support vector machine of scikit-learn's (RBF, C 10) that was trained on the real training digits says
which digit a sample is. Distances are of pixels, 64 numbers. Seconds are of one thread's processor, sampling included where it
says so. Runs that are in DIR are not trained again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.svm import SVC

import vitreous
from vitreous.data.loader import EvalLoader
from vitreous.data.modalities.base import Preprocess
from vitreous.data.sources import open_data
from vitreous.data.split import Split
from vitreous.inference.image_sampler import build_sampler
from vitreous.inference.open_model import open_generator
from vitreous.reports.answers import EvaluationSettings
from vitreous.reports.generated import GenerationOptions, generate_images, measure_generator
from vitreous.system.machine import get_processor_name

GUIDANCE_SCALES = (1.0, 1.5, 3.0)


def to_pixels(split: Split, preprocess: Preprocess) -> np.ndarray:
    """(n, 64) in 0 .. 1, as the generator is shown them."""
    images = [image for _, batch in EvalLoader(split, preprocess).iterate_batches(64) for image in batch]
    return torch.stack(images).numpy().reshape(len(split), -1) / 255


def measure_row(recipe: str, work: Path, guidance: float) -> dict[str, Any]:
    """Train where that is to be done, make a thousand digits, and judge them."""
    run, began = work / recipe, time.process_time()
    if not (run / "summary.json").is_file():
        vitreous.train("digits", recipe=recipe, out=str(run), progress=False)
        (work / f"{recipe}.seconds").write_text(str(time.process_time() - began))
    bundle, splits = open_generator(run), open_data("digits").splits
    judge = SVC(C=10, gamma=1 / 8).fit(to_pixels(splits["train"], bundle.preprocess), splits["train"].labels)
    options, began = GenerationOptions(guidance=guidance), time.process_time()
    made = generate_images(build_sampler(bundle), len(bundle.task.classes), options, EvaluationSettings())
    labels, images = (np.concatenate(parts) for parts in zip(*made, strict=True))
    seconds = time.process_time() - began
    document = measure_generator(run, None, "test", options, EvaluationSettings())
    return document["test"] | {
        "recipe": recipe,
        "guidance": guidance,
        "seconds": float((work / f"{recipe}.seconds").read_text()),
        "sampling": seconds,
        "recognised": float((judge.predict(images.reshape(len(images), -1) / 255) == labels).mean()),
        "judge": float(judge.score(to_pixels(splits["test"], bundle.preprocess), splits["test"].labels)),
    }


def build_page(rows: list[dict[str, Any]]) -> str:
    """The table."""
    lines = [
        f"# Digits that were made, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}, one thread. `vitreous train digits --recipe dit` and `--recipe sit`, one run",
        f"each, seed 0, {', '.join(str(round(s)) for s in dict.fromkeys(row['seconds'] for row in rows))} s of the processor;",
        f"1,000 samples, 100 a digit. The judge recognises {rows[0]['judge']:.1%} of the real test digits. The Fréchet distance",
        f"(pixels) of 1,000 training digits to the test digits is {rows[0]['frechet_distance_of_train']:.4f}.",
        "",
        "    python benchmarks/generating.py --work DIR",
        "",
        (
            "| recipe | guidance | recognised | Fréchet distance to test, and to that of training digits | precision, recall "
            "| near copies (chance 1 %) | s of 1,000 samples |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = row["frechet_distance"] / row["frechet_distance_of_train"]
        cells = [row["recipe"], f"{row['guidance']:g}", f"{row['recognised']:.1%}"]
        cells += [f"{row['frechet_distance']:.4f}, {ratio:.2f} x", f"{row['precision']:.1%}, {row['recall']:.1%}"]
        lines.append("| " + " | ".join([*cells, f"{row['near_duplicates']:.1%}", f"{row['sampling']:.0f}"]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the rows and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    rows = [measure_row(recipe, given.work, guidance) for recipe in ("dit", "sit") for guidance in GUIDANCE_SCALES]
    (given.work / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(build_page(rows))
    if given.out:
        given.out.write_text(build_page(rows))


if __name__ == "__main__":
    main()
