"""Distillation: a small student trained on labels alone and with a teacher, for equal steps.

    python benchmarks/distillation.py FOLDER --work DIR --out benchmarks/results/DATE-distillation-HARDWARE.md

FOLDER has train/CLASS/* and test/CLASS/*. The teacher is an existing run, or trained first by the command of
benchmarks/cifar.py. Students use the recipe `small` on all patches, with and without a teacher, with the same seeds:
the same initial weights, images and mixing. The page has the test top-1 of each seed, and the difference of each seed.
A second call resumes.
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
LABELS_ONLY = "labels alone"
#: training of the student -> options of `vitreous train`
STUDENT_OPTIONS: dict[str, dict[str, Any]] = {
    LABELS_ONLY: {"recipe": "small", "settings": {}},
    "teacher, hard": {"recipe": "distil", "settings": {"objective.kind": ["hard"]}},
    "teacher, soft at temperature 2": {
        "recipe": "distil",
        "settings": {"objective.kind": ["soft"], "objective.temperature": ["2"], "objective.alpha": ["0.9"]},
    },
}
WHOLE_IMAGE_SETTINGS = {
    "objective.patch_dropout": ["0"]
}  # a student that sees half of the patches cannot match a teacher that sees all


def train_or_load(folder: Path, out: Path, **options: Any) -> dict[str, Any]:
    """Return the summary of a run: load it if it is complete, else train or resume it."""
    if not (out / "summary.json").is_file():
        resume = (out / "checkpoints").exists()
        vitreous.train(str(folder), out=str(out), resume=resume, workers=0, **options)
    return json.loads((out / "summary.json").read_text("utf-8"))


def measure_top1(args: argparse.Namespace, way: str, seed: int, teacher: Path) -> float:
    """Test top-1 of a student."""
    options = STUDENT_OPTIONS[way] | {"settings": STUDENT_OPTIONS[way]["settings"] | WHOLE_IMAGE_SETTINGS}
    if way != LABELS_ONLY:
        options["settings"] |= {"objective.teacher": [str(teacher)]}
    length = {"steps": args.steps, "batch_size": args.batch, "evaluate_every": args.steps, "save_every": 500}
    out = args.work / f"{way} seed {seed}".replace(" ", "-").replace(",", "")
    return train_or_load(args.folder, out, model=args.student, seed=seed, **length, **options)["test"]["top1"]


def build_page(args: argparse.Namespace, teacher: float, tops: dict[str, list[float]]) -> str:
    """Build the page: top-1 of each way, and its difference from labels alone."""
    lines = [
        f"# Distillation into a small student on CIFAR-10, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}. Student `{args.student}`,",
        f"{args.steps} steps of {args.batch} images in each row; the teacher has {teacher:.1%}. Test top-1, seeds 0 to",
        f"{args.seeds - 1}; the last column is the mean and range of the differences by seed.",
        "",
        "    python benchmarks/distillation.py FOLDER --work DIR",
        "",
        "| training | top-1 by seed | mean | difference from labels alone, points |",
        "|---|---|---|---|",
    ]
    for way, top1_by_seed in tops.items():
        gains = [100 * (a - b) for a, b in zip(top1_by_seed, tops[LABELS_ONLY], strict=True)]
        gain = "" if way == LABELS_ONLY else f"{statistics.mean(gains):.1f} ({min(gains):.1f} to {max(gains):.1f})"
        lines.append(
            f"| {way} | {', '.join(f'{a:.1%}' for a in top1_by_seed)} | {statistics.mean(top1_by_seed):.1%} | {gain} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train the teacher if it is missing, then the students, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--teacher", type=Path, help="a complete run; if it is not set, the teacher is trained first")
    parser.add_argument("--student", default="ViT-96x4/8")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--ways", nargs="*", choices=STUDENT_OPTIONS, default=list(STUDENT_OPTIONS), help=f"must contain {LABELS_ONLY}"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    teacher = args.teacher or args.work / "teacher"
    teacher_summary = train_or_load(
        args.folder, teacher, **({} if args.teacher else {"model": TEACHER, "save_every": 500})
    )
    tops = {way: [measure_top1(args, way, seed, teacher) for seed in range(args.seeds)] for way in args.ways}
    text = build_page(args, teacher_summary["test"]["top1"], tops)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
