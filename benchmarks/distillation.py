"""Does a teacher help a small student? The same student learns from labels alone and from a teacher, for equal steps.

    python benchmarks/distillation.py FOLDER --work DIR --out benchmarks/results/DATE-distillation-HARDWARE.md

FOLDER has train/CLASS/* and test/CLASS/*. The teacher is a run, or trained first by the command of benchmarks/cifar.py.
Students have the recipe `small` on all patches, with and without a teacher, and the same seeds: the same first weights, images and
mixing. Test top-1 of each seed, and the differences seed by seed. A second call goes on where the first one ended.
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
#: what the student learns from -> options of `vitreous train`
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
}  # a student that sees half of the patches cannot know what the teacher saw


def train_or_load(folder: Path, out: Path, **options: Any) -> dict[str, Any]:
    """The summary of a run: of a complete one as it lies there, else when it has come to its end."""
    if not (out / "summary.json").is_file():
        resume = (out / "checkpoints").exists()
        vitreous.train(str(folder), out=str(out), resume=resume, workers=0, **options)
    return json.loads((out / "summary.json").read_text("utf-8"))


def measure_top1(given: argparse.Namespace, way: str, seed: int, teacher: Path) -> float:
    """Test top-1 of a student."""
    options = STUDENT_OPTIONS[way] | {"settings": STUDENT_OPTIONS[way]["settings"] | WHOLE_IMAGE_SETTINGS}
    if way != LABELS_ONLY:
        options["settings"] |= {"objective.teacher": [str(teacher)]}
    length = {"steps": given.steps, "batch_size": given.batch, "evaluate_every": given.steps, "save_every": 500}
    out = given.work / f"{way} seed {seed}".replace(" ", "-").replace(",", "")
    return train_or_load(given.folder, out, model=given.student, seed=seed, **length, **options)["test"]["top1"]


def build_page(given: argparse.Namespace, teacher: float, tops: dict[str, list[float]]) -> str:
    """The page: each way's top-1, and how much better than labels alone."""
    lines = [
        f"# A teacher for a small student on CIFAR-10, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}. Student `{given.student}`,",
        f"{given.steps} steps of {given.batch} images in each row; teacher of {teacher:.1%}. Test top-1, seeds 0 to",
        f"{given.seeds - 1}; the last column is the mean of the differences seed by seed, and their range.",
        "",
        "    python benchmarks/distillation.py FOLDER --work DIR",
        "",
        "| learns from | top-1 of the seeds | mean | more than from labels alone, points |",
        "|---|---|---|---|",
    ]
    for way, own in tops.items():
        more = [100 * (a - b) for a, b in zip(own, tops[LABELS_ONLY], strict=True)]
        told = "" if way == LABELS_ONLY else f"{statistics.mean(more):.1f} ({min(more):.1f} to {max(more):.1f})"
        lines.append(f"| {way} | {', '.join(f'{a:.1%}' for a in own)} | {statistics.mean(own):.1%} | {told} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train the teacher where there is none, then the students, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--teacher", type=Path, help="a complete run; without one it is trained first")
    parser.add_argument("--student", default="ViT-96x4/8")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--ways", nargs="*", choices=STUDENT_OPTIONS, default=list(STUDENT_OPTIONS), help=f"{LABELS_ONLY} among them"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    teacher = given.teacher or given.work / "teacher"
    known = train_or_load(given.folder, teacher, **({} if given.teacher else {"model": TEACHER, "save_every": 500}))
    tops = {way: [measure_top1(given, way, seed, teacher) for seed in range(given.seeds)] for way in given.ways}
    text = build_page(given, known["test"]["top1"], tops)
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
