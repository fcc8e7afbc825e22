"""`vitreous train digits` with five seeds, compared with scikit-learn's k-nearest neighbours on the same split.

python benchmarks/digits.py --out benchmarks/results/DATE-digits-HARDWARE.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from sklearn.neighbors import KNeighborsClassifier

from vitreous.data.layouts.named import open_digits
from vitreous.data.split import ArraySplit
from vitreous.system.machine import get_processor_name


def train_digits(seed: int, scratch: str) -> tuple[float, float, float]:
    """Train with one seed, and return validation and test top-1, and the seconds of the whole process."""
    start = time.perf_counter()
    arguments = ["train", "digits", "--seed", str(seed), "--json", "--out", f"{scratch}/{seed}"]
    result = subprocess.run(
        [sys.executable, "-m", "vitreous", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    summary = json.loads(result.stdout)
    return summary["val"]["top1"], summary["test"]["top1"], time.perf_counter() - start


def measure_knn() -> tuple[int, float, float]:
    """Return the number of neighbours with the best validation accuracy, and its accuracy on `val` and on `test`."""
    splits = {name: split for name, split in open_digits().splits.items() if isinstance(split, ArraySplit)}
    arrays = {name: (split.pixels.reshape(len(split), -1), split.labels) for name, split in splits.items()}
    scores = []
    for k in (1, 3, 5, 7, 9):
        model = KNeighborsClassifier(k).fit(*arrays["train"])
        scores.append((model.score(*arrays["val"]), -k, model.score(*arrays["test"])))
    val, k, test = max(scores)
    return -k, val, test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    k, val, test = measure_knn()
    rows = [
        f"# digits, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}.",
    ]
    rows += [
        (
            "`python benchmarks/digits.py`; the fixed split has 1,439 / 179 / 179 images, so one test image is 0.56 "
            "percentage points."
        ),
        "",
    ]
    rows += ["| | seed | val top-1 | test top-1 | seconds, whole process |", "|---|---|---|---|---|"]
    tests, times = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(arguments.seeds):
            v, t, seconds = train_digits(seed, scratch)
            tests.append(t)
            times.append(seconds)
            rows.append(f"| `vitreous train digits` | {seed} | {v:.2%} | {t:.2%} | {seconds:.0f} |")
            print(rows[-1], flush=True)
    spread = statistics.stdev(tests) if len(tests) > 1 else 0.0
    rows.append(
        f"| mean of {len(tests)} seeds | | | **{statistics.mean(tests):.2%}** ± {spread:.2%} | "
        f"{statistics.median(times):.0f} (median) |"
    )
    rows.append(f"| scikit-learn k-NN, k = {k} chosen on val | | {val:.2%} | {test:.2%} | |")
    text = "\n".join(rows) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
