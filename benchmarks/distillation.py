"""Does distillation help a small student? Train it with labels only and with a teacher, for the same number of steps.

    python benchmarks/distillation.py FOLDER --work DIR --out benchmarks/results/DATE-distillation-HARDWARE.md

FOLDER has train/CLASS/* and test/CLASS/*. The teacher is the run of --teacher, or a model that is trained first.
Students have the recipe `small` without patch dropout, with and without a teacher. For one seed, they have the same
initial weights, images and mixing. The page has the test top-1 of each seed, and the difference per seed. Another call
continues an interrupted one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import vitreous
from vitreous.system.machine import get_processor_name

TEACHER = "Conv+ViT-128x4/8"
LABELS_ONLY = "labels only"
#: targets of the student -> options of `vitreous train`
STUDENT_OPTIONS: dict[str, dict[str, Any]] = {
    LABELS_ONLY: {"recipe": "small", "settings": {}},
    "teacher, hard": {"recipe": "distil", "settings": {"objective.kind": ["hard"]}},
    "teacher, soft at temperature 2": {
        "recipe": "distil",
        "settings": {"objective.kind": ["soft"], "objective.temperature": ["2"], "objective.alpha": ["0.9"]},
    },
}
WHOLE_IMAGE_SETTINGS = {"objective.patch_dropout": ["0"]}  # no patch dropout: the teacher predicts from all patches


def train_or_load(folder: Path, out: Path, **options: Any) -> dict[str, Any]:
    """Return the summary of a run; if it is not complete, start or resume it first."""
    if not (out / "summary.json").is_file():
        resume = (out / "checkpoints").exists()
        vitreous.train(str(folder), out=str(out), resume=resume, workers=0, **options)
    return json.loads((out / "summary.json").read_text("utf-8"))


def measure_top1(options: argparse.Namespace, targets: str, seed: int, teacher: Path) -> float:
    """Train a student with these targets, and return its test top-1."""
    train_options = STUDENT_OPTIONS[targets] | {"settings": STUDENT_OPTIONS[targets]["settings"] | WHOLE_IMAGE_SETTINGS}
    if targets != LABELS_ONLY:
        train_options["settings"] |= {"objective.teacher": [str(teacher)]}
    length = {"steps": options.steps, "batch_size": options.batch, "evaluate_every": options.steps, "save_every": 500}
    out = options.work / f"{targets} seed {seed}".replace(" ", "-").replace(",", "")
    return train_or_load(options.folder, out, model=options.student, seed=seed, **length, **train_options)["test"][
        "top1"
    ]


def build_page(options: argparse.Namespace, teacher: float, tops: dict[str, list[float]]) -> str:
    """Return the page: top-1 for each kind of targets, and the difference from labels only. `tops` has one per seed."""
    lines = [
        f"# Distillation to a small student on CIFAR-10, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}. Student `{options.student}`,",
        f"{options.steps} steps of batch size {options.batch} in each row; top-1 of the teacher {teacher:.1%}. Test top-1, seeds 0 to",
        f"{options.seeds - 1}; the last column is the mean of the differences per seed, and their range.",
        "",
        "    python benchmarks/distillation.py FOLDER --work DIR",
        "",
        "| targets | top-1 of each seed | mean | difference from labels only, percentage points |",
        "|---|---|---|---|",
    ]
    for targets, values in tops.items():
        gains = [100 * (a - b) for a, b in zip(values, tops[LABELS_ONLY], strict=True)]
        gain_text = (
            "" if targets == LABELS_ONLY else f"{statistics.mean(gains):.1f} ({min(gains):.1f} to {max(gains):.1f})"
        )
        lines.append(
            f"| {targets} | {', '.join(f'{a:.1%}' for a in values)} | {statistics.mean(values):.1%} | {gain_text} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train the teacher if there is none, then the students, and print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--teacher", type=Path, help="a complete run (default: train one)")
    parser.add_argument("--student", default="ViT-96x4/8")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--ways",
        nargs="*",
        choices=STUDENT_OPTIONS,
        default=list(STUDENT_OPTIONS),
        help=f"targets to compare; must include '{LABELS_ONLY}'",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    teacher = options.teacher or options.work / "teacher"
    teacher_summary = train_or_load(
        options.folder, teacher, **({} if options.teacher else {"model": TEACHER, "save_every": 500})
    )
    tops = {way: [measure_top1(options, way, seed, teacher) for seed in range(options.seeds)] for way in options.ways}
    text = build_page(options, teacher_summary["test"]["top1"], tops)
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
