"""Transfer between classes: half of the classes pre-train a small ViT; the others are learned from few labels,
fine-tuned or from scratch.

    python benchmarks/transfer.py FOLDER --scratch SCRATCH --out benchmarks/results/DATE-transfer-HARDWARE.md

FOLDER has train/CLASS/* and test/CLASS/*, as CIFAR-10. The first half of its classes pre-trains a model at the native
image size. The other classes are learned at a higher resolution from 1 % and 10 % of their training labels, drawn for
each seed and class: fine-tuned from that model with a new head, or from scratch, with the same images, batch size and
number of steps.

The settings of each way are selected among equally many candidates, with a separate seed, on training images that no
run trains on. Test images are evaluated once for each complete run of the table. A second call resumes the runs in
SCRATCH.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vitreous
from vitreous.config import from_yaml
from vitreous.data.layouts.folder import list_class_files, sort_class_names
from vitreous.errors import VitreousError
from vitreous.system.machine import get_processor_name
from vitreous.training.run import Run
from vitreous.weights.convert import convert

LABEL_SHARES = (0.01, 0.1)  # shares of the labels of each class
SELECTION_SEED = 1000  # candidates are compared with this seed; the table has seeds 0, 1, 2, ...
SELECTION_IMAGES = 200  # training images per class for comparing candidates; no run trains on them
BATCH_SIZE = 64
NEVER = 10**9  # a number of steps beyond every run
CANDIDATES: dict[str, dict[str, dict[str, Any]]] = {
    "fine-tuned": {
        "finetune, 0.0003": {"recipe": "finetune", "lr": 3e-4},
        "finetune, 0.001": {"recipe": "finetune", "lr": 1e-3},
        "small, as it is": {"recipe": "small", "lr": 2e-3},
    },
    "from scratch": {
        "small, as it is": {"recipe": "small", "lr": 2e-3},
        "small, Muon at 0.02": {"recipe": "small", "lr": 2e-3, "settings": {"optimizer.matrix_lr": ["0.02"]}},
        "photos, 0.001": {"recipe": "photos", "lr": 1e-3},
    },
}


@dataclass(frozen=True)
class TransferPlan:
    """The comparison, and the paths of its runs. `steps` has the steps for each of LABEL_SHARES; `image_size` is in
    pixels."""

    folder: Path
    scratch: Path
    seeds: int = 5
    model: str = "ViT-96x4/4"
    image_size: int = 48
    epochs: float = 6.0  # pre-training epochs
    steps: tuple[int, ...] = (50, 100)
    longer: int = 0  # factor of the steps of an additional run from scratch with seed 0; 0: none
    precision: str = "auto"

    @property
    def teacher(self) -> Path:
        """The folder of the pre-training run."""
        return self.scratch / "runs" / "pretrained"

    def halves(self) -> tuple[list[str], list[str]]:
        """The pre-training classes and the target classes."""
        names = sort_class_names([class_folder.name for class_folder in (self.folder / "train").iterdir()])
        return names[: len(names) // 2], names[len(names) // 2 :]

    def run(self, way: str, share: float, seed: int, name: str) -> Path:
        """The folder of one run."""
        words = f"{way} {share:.0%} seed {seed} {name}"
        return self.scratch / "runs" / "".join(c if c.isalnum() or c in ".%" else "-" for c in words)

    def final(self) -> Iterator[tuple[str, int, int, int]]:
        """Way, index in LABEL_SHARES, seed and factor of the steps of every run of the table."""
        for way in CANDIDATES:
            for share_index in range(len(LABEL_SHARES)):
                yield from ((way, share_index, seed, 1) for seed in range(self.seeds))
        if self.longer:
            yield from (("from scratch", share_index, 0, self.longer) for share_index in range(len(LABEL_SHARES)))


def link_label_share(plan: TransferPlan, share: float, seed: int, has_val: bool = False) -> Path:
    """Create a folder of links to a share of each target class, at least one image; `has_val` adds the selection images
    as `val`."""
    root = create_empty_folder(plan.scratch / "data" / f"{share:.0%} seed {seed}")
    listed = list_class_files(plan.folder / "train")
    for class_index, name in enumerate(plan.halves()[1]):
        files = listed[name]
        num_val = min(SELECTION_IMAGES, len(files) // 5)
        mixed = np.random.default_rng(class_index).permutation(len(files))
        pool = mixed[num_val:][np.random.default_rng([seed, class_index]).permutation(len(files) - num_val)]
        splits = {"train": pool[: max(1, round(share * len(files)))], **({"val": mixed[:num_val]} if has_val else {})}
        for split, samples in splits.items():
            class_folder = root / split / name
            class_folder.mkdir(parents=True)
            for sample in samples:
                (class_folder / files[sample].name).symlink_to(files[sample].resolve())
    return root


def link_classes(root: Path, class_folders: list[Path]) -> Path:
    """Create a folder of links to complete classes."""
    create_empty_folder(root)
    for class_folder in class_folders:
        (root / class_folder.name).symlink_to(class_folder.resolve())
    return root


def create_empty_folder(root: Path) -> Path:
    """Create an empty folder, replacing an existing one."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    return root


def train_run(plan: TransferPlan, data: Path, out: Path, **options: Any) -> dict[str, Any]:
    """Return the summary of a run: load it if it is complete, resume it if it was interrupted, else train."""
    begun = (out / "config.yaml").is_file()
    if not begun:
        shutil.rmtree(out, ignore_errors=True)
    started = time.perf_counter()
    summary = vitreous.train(str(data), out=str(out), resume=begun, precision=plan.precision, workers=0, **options)
    val = f", val top-1 {summary['val']['top1']:.2%}" if summary["val"] else ""
    print(f"{out.name}: {summary['steps']} steps, {time.perf_counter() - started:.0f} s{val}", flush=True)
    return summary


def pretrain(plan: TransferPlan) -> None:
    """Train the model on the first half of the classes; a tenth of their training images is held out for evaluation."""
    root = plan.scratch / "data" / "pretraining"
    link_classes(root / "train", [plan.folder / "train" / name for name in plan.halves()[0]])
    train_run(
        plan, root, plan.teacher, model=plan.model, recipe="small", epochs=plan.epochs, evaluate_every=NEVER, seed=0
    )


def train_candidate(plan: TransferPlan, way: str, share_index: int, seed: int, name: str, factor: int = 1) -> Path:
    """Train one run on the label share with this index; returns its folder."""
    share, is_selection = LABEL_SHARES[share_index], seed == SELECTION_SEED
    out = plan.run(way, share, seed, name + (f" x{factor}" if factor > 1 else ""))
    options = {
        "batch_size": BATCH_SIZE,
        "steps": factor * plan.steps[share_index],
        "evaluate_every": NEVER,
        "save_every": NEVER,
        **CANDIDATES[way][name],
    }
    options |= {"init": str(save_headless_model(plan))} if way == "fine-tuned" else {"model": plan.model}
    if not is_selection:
        options["settings"] = {"data.hold_out": ["0"], **options.get("settings", {})}
    train_run(
        plan, link_label_share(plan, share, seed, is_selection), out, image_size=plan.image_size, seed=seed, **options
    )
    return out


def save_headless_model(plan: TransferPlan) -> Path:
    """Save the pre-trained model without its head, which is for other classes."""
    folder = plan.scratch / "headless"
    if not folder.exists():
        convert(plan.teacher, folder, num_classes=0)
    return folder


def finetune(plan: TransferPlan) -> None:
    """Compare the candidates of each way and share, then train the runs of the table and evaluate each on the test
    images."""
    for way, candidates in CANDIDATES.items():
        for share_index in range(len(LABEL_SHARES)):
            for name in candidates:
                train_candidate(plan, way, share_index, SELECTION_SEED, name)
    test = link_classes(plan.scratch / "data" / "test", [plan.folder / "test" / name for name in plan.halves()[1]])
    for way, share_index, seed, factor in plan.final():
        out = train_candidate(plan, way, share_index, seed, choose_candidate(plan, way, share_index), factor)
        if not (out / "evaluations.jsonl").exists():
            top1 = vitreous.evaluate(out, test, workers=0)["test"]["top1"]
            print(f"{out.name}: test top-1 {top1:.2%}", flush=True)


def read_candidate_metrics(plan: TransferPlan, way: str, share_index: int) -> dict[str, dict[str, Any]]:
    """The metrics of each candidate on the selection images."""
    return {
        name: read_document(plan.run(way, LABEL_SHARES[share_index], SELECTION_SEED, name) / "summary.json")["val"]
        for name in CANDIDATES[way]
    }


def choose_candidate(plan: TransferPlan, way: str, share_index: int) -> str:
    """The candidate with the best top-1; ties are broken by the NLL."""
    metrics = read_candidate_metrics(plan, way, share_index)
    return max(metrics, key=lambda name: (metrics[name]["top1"], -metrics[name]["nll"]))


def read_result(plan: TransferPlan, way: str, share_index: int, seed: int, factor: int = 1) -> tuple[float, float]:
    """Top-1 of a run on the test images, and its training seconds."""
    name = choose_candidate(plan, way, share_index) + (f" x{factor}" if factor > 1 else "")
    out = plan.run(way, LABEL_SHARES[share_index], seed, name)
    return read_document(out / "evaluations.jsonl")["top1"], read_document(out / "summary.json")["wall_seconds"]


def read_document(path: Path) -> dict[str, Any]:
    """The first JSON document of a file. Exits the script if the run that writes it is missing."""
    if not path.is_file():
        sys.exit(f"{path.parent.name} is not complete: omit --only")
    text = path.read_text("utf-8")
    return json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)


def format_mean_and_std(values: list[float]) -> str:
    """Mean and standard deviation in percent."""
    return f"{statistics.mean(values):.2%} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.2%}"


def build_page(plan: TransferPlan) -> str:
    """Build the page."""
    pretraining_classes, target_classes = plan.halves()
    teacher = read_document(plan.teacher / "summary.json")
    run = from_yaml(Run, (plan.teacher / "config.yaml").read_text("utf-8"))
    size = f"{plan.image_size} x {plan.image_size}"
    rows = [
        f"# Transfer from half of the classes of {plan.folder.name} to the others, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {run.precision}.",
        "`python benchmarks/transfer.py FOLDER --scratch SCRATCH`",
        "",
        (
            f"Pre-training: {plan.model} on {', '.join(pretraining_classes)}; {run.data.images:,} images of "
            f"{' x '.join(map(str, run.model.image))} pixels,"
        ),
        f"{teacher['epochs']:g} epochs of recipe `small`, {teacher['wall_seconds'] / 60:.1f} minutes, one run, seed 0;",
        f"{teacher['val']['top1']:.2%} of {teacher['val']['images']:,} held-out images.",
        (
            f"Then {', '.join(target_classes)} at {size}, from a share of their training labels, drawn for each seed and class. "
            "Both ways "
        ),
        (
            f"train on the same images for as many steps of {BATCH_SIZE}; fine-tuning starts from the pre-trained weights and a zero "
            "head."
        ),
        "",
        "| labels | images | steps | | test top-1, mean ± std | by seed | seconds per run (median) |",
        "|---|---|---|---|---|---|---|",
    ]
    for share_index, share in enumerate(LABEL_SHARES):
        images = read_document(
            plan.run("from scratch", share, 0, choose_candidate(plan, "from scratch", share_index)) / "data.json"
        )["train_images"]
        tops = {}
        for way in CANDIDATES:
            results = [read_result(plan, way, share_index, seed) for seed in range(plan.seeds)]
            tops[way] = [top1 for top1, _ in results]
            values, seconds = (
                " ".join(f"{100 * top1:.2f}" for top1 in tops[way]),
                statistics.median(seconds for _, seconds in results),
            )
            cells = [
                f"{share:.0%}",
                f"{images:,}",
                str(plan.steps[share_index]),
                f"{way}: {choose_candidate(plan, way, share_index)}",
            ]
            rows.append(
                "| " + " | ".join([*cells, f"**{format_mean_and_std(tops[way])}**", values, f"{seconds:.0f}"]) + " |"
            )
        gains = [a - b for a, b in zip(*tops.values(), strict=True)]
        values = " ".join(f"{100 * gain:+.2f}" for gain in gains)
        rows.append(
            f"| {share:.0%} | | | gain per seed, points | {format_mean_and_std(gains).replace('%', '')} | {values} | |"
        )
        if plan.longer:
            top1, seconds = read_result(plan, "from scratch", share_index, 0, plan.longer)
            steps = plan.longer * plan.steps[share_index]
            cells = [
                f"{share:.0%}",
                f"{images:,}",
                str(steps),
                f"from scratch, {plan.longer} x the steps, seed 0",
                f"{top1:.2%}",
                "",
            ]
            rows.append("| " + " | ".join([*cells, f"{seconds:.0f}"]) + " |")
    rows += [
        "",
        (
            "Each evaluation uses all test images of these classes. The std covers sampling and order: there is one "
            "pre-trained model."
        ),
    ]
    rows += ["", *build_candidate_table(plan)]
    return "\n".join(rows) + "\n"


def build_candidate_table(plan: TransferPlan) -> list[str]:
    """Compare the candidates, as lines of Markdown."""
    rows = [
        (
            f"Recipe and learning rate were selected beforehand for each way and share, by top-1 of one run with seed {SELECTION_SEED} on "
            "training images on which no"
        ),
        f"run trains ({SELECTION_IMAGES} per class of 1,000); the number is the learning rate.",
        "",
        "| | " + " | ".join(f"{share:.0%} of the labels" for share in LABEL_SHARES) + " |",
        "|---" * (len(LABEL_SHARES) + 1) + "|",
    ]
    for way in CANDIDATES:
        metrics_by_share = [read_candidate_metrics(plan, way, share_index) for share_index in range(len(LABEL_SHARES))]
        best = [choose_candidate(plan, way, share_index) for share_index in range(len(LABEL_SHARES))]
        for name in CANDIDATES[way]:
            cells = [
                f"**{metrics[name]['top1']:.2%}**" if name == top else f"{metrics[name]['top1']:.2%}"
                for metrics, top in zip(metrics_by_share, best, strict=True)
            ]
            rows.append(f"| {way}: {name} | " + " | ".join(cells) + " |")
    return rows


def main() -> None:
    """Train the missing runs, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scratch", type=Path, required=True, help="folder of the runs; a second call resumes them")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=["pretrain", "finetune", "table"])
    parser.add_argument("--seeds", type=int, default=TransferPlan.seeds)
    parser.add_argument("--model", default=TransferPlan.model)
    parser.add_argument(
        "--image-size", type=int, default=TransferPlan.image_size, help="image size of fine-tuning, in pixels"
    )
    parser.add_argument("--epochs", type=float, default=TransferPlan.epochs, help="of pre-training")
    parser.add_argument(
        "--steps", type=int, nargs=2, default=TransferPlan.steps, help="steps with 1 %% and with 10 %% of the labels"
    )
    parser.add_argument(
        "--longer",
        type=int,
        default=TransferPlan.longer,
        help="factor of the steps of an additional run from scratch, seed 0",
    )
    parser.add_argument("--precision", default=TransferPlan.precision)
    options = vars(parser.parse_args())
    only, out = options.pop("only"), options.pop("out")
    options["steps"] = tuple(options["steps"])
    plan = TransferPlan(**options)
    try:
        if only in (None, "pretrain"):
            pretrain(plan)
        if only in (None, "finetune"):
            finetune(plan)
    except VitreousError as error:
        sys.exit(f"{error.message}: {error.hint}")
    if only in (None, "table"):
        text = build_page(plan)
        print(text)
        if out:
            out.write_text(text)


if __name__ == "__main__":
    main()
