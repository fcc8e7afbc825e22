"""Does transfer work? Half of the classes teach a small ViT; the other half are learned from a few labels, with and
without it.

    python benchmarks/transfer.py FOLDER --scratch SCRATCH --out benchmarks/results/DATE-transfer-HARDWARE.md

FOLDER has train/CLASS/* and test/CLASS/*, as CIFAR-10. The first half of its classes pre-trains a model at the
pictures' own size. The others are learned at a higher resolution from 1 % and 10 % of their training labels, drawn for
each seed and class: fine-tuned from that model with a new head, or from scratch, with the same pictures, in steps of as
many images, as many of them. How each way trains is chosen first, among as many candidates for both, on a seed of its
own and on training images that no run learns from. Test images are read once for each run of the table, when it is
complete. A second call goes on with what lies in SCRATCH.
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

LABEL_SHARES = (0.01, 0.1)  # of the labels of a class
SELECTION_SEED = 1000  # the seed on which candidates are compared; the table has seeds 0, 1, 2, ...
SELECTION_IMAGES = 200  # training images of a class that judge the candidates, and that no run learns from
BATCH_SIZE = 64
NEVER = 10**9  # steps
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
    """What is compared, and where its runs lie. `steps` has one number for each of SHARES; `image_size` in pixels."""

    folder: Path
    scratch: Path
    seeds: int = 5
    model: str = "ViT-96x4/4"
    image_size: int = 48
    epochs: float = 6.0  # of pre-training
    steps: tuple[int, ...] = (50, 100)
    longer: int = 0  # times the steps of a further run from scratch, of seed 0
    precision: str = "auto"

    @property
    def teacher(self) -> Path:
        """The run that pre-trains."""
        return self.scratch / "runs" / "pretrained"

    def halves(self) -> tuple[list[str], list[str]]:
        """The classes to pre-train on, and those to learn afterwards."""
        names = sort_class_names([home.name for home in (self.folder / "train").iterdir()])
        return names[: len(names) // 2], names[len(names) // 2 :]

    def run(self, way: str, share: float, seed: int, name: str) -> Path:
        """The folder of one run."""
        words = f"{way} {share:.0%} seed {seed} {name}"
        return self.scratch / "runs" / "".join(c if c.isalnum() or c in ".%" else "-" for c in words)

    def final(self) -> Iterator[tuple[str, int, int, int]]:
        """Way, position in SHARES, seed and factor of the steps of every run of the table."""
        for way in CANDIDATES:
            for number in range(len(LABEL_SHARES)):
                yield from ((way, number, seed, 1) for seed in range(self.seeds))
        if self.longer:
            yield from (("from scratch", number, 0, self.longer) for number in range(len(LABEL_SHARES)))


def link_label_share(plan: TransferPlan, share: float, seed: int, judged: bool = False) -> Path:
    """A folder of links to that share of each class to learn, at least one image; with `val`, if it is to be `judged`
    there."""
    root = create_empty_folder(plan.scratch / "data" / f"{share:.0%} seed {seed}")
    listed = list_class_files(plan.folder / "train")
    for number, name in enumerate(plan.halves()[1]):
        files = listed[name]
        kept = min(SELECTION_IMAGES, len(files) // 5)
        mixed = np.random.default_rng(number).permutation(len(files))
        pool = mixed[kept:][np.random.default_rng([seed, number]).permutation(len(files) - kept)]
        parts = {"train": pool[: max(1, round(share * len(files)))], **({"val": mixed[:kept]} if judged else {})}
        for split, rows in parts.items():
            home = root / split / name
            home.mkdir(parents=True)
            for row in rows:
                (home / files[row].name).symlink_to(files[row].resolve())
    return root


def link_classes(root: Path, homes: list[Path]) -> Path:
    """A folder of links to whole classes."""
    create_empty_folder(root)
    for home in homes:
        (root / home.name).symlink_to(home.resolve())
    return root


def create_empty_folder(root: Path) -> Path:
    """An empty folder in that place."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    return root


def train_run(plan: TransferPlan, data: Path, out: Path, **options: Any) -> dict[str, Any]:
    """The summary of a run: of a complete one as it lies there, of one that was interrupted when it has gone on to its
    end."""
    begun = (out / "config.yaml").is_file()
    if not begun:
        shutil.rmtree(out, ignore_errors=True)
    started = time.perf_counter()
    summary = vitreous.train(str(data), out=str(out), resume=begun, precision=plan.precision, workers=0, **options)
    val = f", val top-1 {summary['val']['top1']:.2%}" if summary["val"] else ""
    print(f"{out.name}: {summary['steps']} steps, {time.perf_counter() - started:.0f} s{val}", flush=True)
    return summary


def pretrain(plan: TransferPlan) -> None:
    """Teach the model the first half of the classes, a tenth of their training images held out to see how it does."""
    root = plan.scratch / "data" / "pretraining"
    link_classes(root / "train", [plan.folder / "train" / name for name in plan.halves()[0]])
    train_run(
        plan, root, plan.teacher, model=plan.model, recipe="small", epochs=plan.epochs, evaluate_every=NEVER, seed=0
    )


def train_candidate(plan: TransferPlan, way: str, number: int, seed: int, name: str, factor: int = 1) -> Path:
    """One run on the share of that number; its folder."""
    share, judged = LABEL_SHARES[number], seed == SELECTION_SEED
    out = plan.run(way, share, seed, name + (f" x{factor}" if factor > 1 else ""))
    options = {
        "batch_size": BATCH_SIZE,
        "steps": factor * plan.steps[number],
        "evaluate_every": NEVER,
        "save_every": NEVER,
        **CANDIDATES[way][name],
    }
    options |= {"init": str(save_headless_model(plan))} if way == "fine-tuned" else {"model": plan.model}
    if not judged:
        options["settings"] = {"data.hold_out": ["0"], **options.get("settings", {})}
    train_run(plan, link_label_share(plan, share, seed, judged), out, image_size=plan.image_size, seed=seed, **options)
    return out


def save_headless_model(plan: TransferPlan) -> Path:
    """The pre-trained model without its head, which would fit the new classes in number alone."""
    place = plan.scratch / "headless"
    if not place.exists():
        convert(plan.teacher, place, num_classes=0)
    return place


def finetune(plan: TransferPlan) -> None:
    """Compare the candidates of each way and share, then make the runs of the table and judge each on the test
    images."""
    for way, candidates in CANDIDATES.items():
        for number in range(len(LABEL_SHARES)):
            for name in candidates:
                train_candidate(plan, way, number, SELECTION_SEED, name)
    test = link_classes(plan.scratch / "data" / "test", [plan.folder / "test" / name for name in plan.halves()[1]])
    for way, number, seed, factor in plan.final():
        out = train_candidate(plan, way, number, seed, choose_candidate(plan, way, number), factor)
        if not (out / "evaluations.jsonl").exists():
            top1 = vitreous.evaluate(out, test, workers=0)["test"]["top1"]
            print(f"{out.name}: test top-1 {top1:.2%}", flush=True)


def read_candidate_metrics(plan: TransferPlan, way: str, number: int) -> dict[str, dict[str, Any]]:
    """The figures of each candidate on the images that judge them."""
    return {
        name: read_document(plan.run(way, LABEL_SHARES[number], SELECTION_SEED, name) / "summary.json")["val"]
        for name in CANDIDATES[way]
    }


def choose_candidate(plan: TransferPlan, way: str, number: int) -> str:
    """The candidate with the best accuracy; of several, the one with the best likelihood."""
    found = read_candidate_metrics(plan, way, number)
    return max(found, key=lambda name: (found[name]["top1"], -found[name]["nll"]))


def read_result(plan: TransferPlan, way: str, number: int, seed: int, factor: int = 1) -> tuple[float, float]:
    """Top-1 of a run on the test images, and the seconds that it trained."""
    name = choose_candidate(plan, way, number) + (f" x{factor}" if factor > 1 else "")
    out = plan.run(way, LABEL_SHARES[number], seed, name)
    return read_document(out / "evaluations.jsonl")["top1"], read_document(out / "summary.json")["wall_seconds"]


def read_document(path: Path) -> dict[str, Any]:
    """The first JSON document of a file. Ends the script where the run that writes it has not been made."""
    if not path.is_file():
        sys.exit(f"{path.parent.name} is not complete: leave --only out")
    text = path.read_text("utf-8")
    return json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)


def format_mean_and_std(values: list[float]) -> str:
    """Mean and standard deviation in percent."""
    return f"{statistics.mean(values):.2%} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.2%}"


def build_page(plan: TransferPlan) -> str:
    """The page."""
    first, second = plan.halves()
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
            f"Pre-training: {plan.model} on {', '.join(first)}; {run.data.images:,} images of "
            f"{' x '.join(map(str, run.model.image))} pixels,"
        ),
        f"{teacher['epochs']:g} epochs of recipe `small`, {teacher['wall_seconds'] / 60:.1f} minutes, one run, seed 0;",
        f"{teacher['val']['top1']:.2%} of {teacher['val']['images']:,} held-out images.",
        (
            f"Then {', '.join(second)} at {size}, from a share of their training labels, drawn for each seed and class. "
            "Both ways"
        ),
        (
            f"learn from the same images, as many steps of {BATCH_SIZE}; the fine-tuned have the pre-trained weights and a new "
            "head of zeros."
        ),
        "",
        "| labels | images | steps | | test top-1, mean ± deviation | of each seed | seconds a run (median) |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, share in enumerate(LABEL_SHARES):
        images = read_document(
            plan.run("from scratch", share, 0, choose_candidate(plan, "from scratch", number)) / "data.json"
        )["train_images"]
        tops = {}
        for way in CANDIDATES:
            found = [read_result(plan, way, number, seed) for seed in range(plan.seeds)]
            tops[way] = [top1 for top1, _ in found]
            each, seconds = (
                " ".join(f"{100 * top1:.2f}" for top1 in tops[way]),
                statistics.median(seconds for _, seconds in found),
            )
            cells = [
                f"{share:.0%}",
                f"{images:,}",
                str(plan.steps[number]),
                f"{way}: {choose_candidate(plan, way, number)}",
            ]
            rows.append(
                "| " + " | ".join([*cells, f"**{format_mean_and_std(tops[way])}**", each, f"{seconds:.0f}"]) + " |"
            )
        gains = [a - b for a, b in zip(*tops.values(), strict=True)]
        each = " ".join(f"{100 * gain:+.2f}" for gain in gains)
        rows.append(
            f"| {share:.0%} | | | gain of the same seed, points | {format_mean_and_std(gains).replace('%', '')} | {each} | |"
        )
        if plan.longer:
            top1, seconds = read_result(plan, "from scratch", number, 0, plan.longer)
            steps = plan.longer * plan.steps[number]
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
            "Each reading is of all test images of these classes. The spread is of draws and order: there is one "
            "pre-trained model."
        ),
    ]
    rows += ["", *build_candidate_table(plan)]
    return "\n".join(rows) + "\n"


def build_candidate_table(plan: TransferPlan) -> list[str]:
    """How the candidates compared, as lines of Markdown."""
    rows = [
        (
            f"Recipe and rate were chosen beforehand for each way and share, by top-1 of one run of seed {SELECTION_SEED} on "
            "training images that no"
        ),
        f"run learns from ({SELECTION_IMAGES} a class where there are 1,000); the number is the learning rate.",
        "",
        "| | " + " | ".join(f"{share:.0%} of the labels" for share in LABEL_SHARES) + " |",
        "|---" * (len(LABEL_SHARES) + 1) + "|",
    ]
    for way in CANDIDATES:
        found = [read_candidate_metrics(plan, way, number) for number in range(len(LABEL_SHARES))]
        best = [choose_candidate(plan, way, number) for number in range(len(LABEL_SHARES))]
        for name in CANDIDATES[way]:
            cells = [
                f"**{each[name]['top1']:.2%}**" if name == top else f"{each[name]['top1']:.2%}"
                for each, top in zip(found, best, strict=True)
            ]
            rows.append(f"| {way}: {name} | " + " | ".join(cells) + " |")
    return rows


def main() -> None:
    """Make what is not there yet, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--scratch", type=Path, required=True, help="where runs are kept; a second call goes on with them"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=["pretrain", "finetune", "table"])
    parser.add_argument("--seeds", type=int, default=TransferPlan.seeds)
    parser.add_argument("--model", default=TransferPlan.model)
    parser.add_argument("--image-size", type=int, default=TransferPlan.image_size, help="pixels to fine-tune at")
    parser.add_argument("--epochs", type=float, default=TransferPlan.epochs, help="of pre-training")
    parser.add_argument(
        "--steps", type=int, nargs=2, default=TransferPlan.steps, help="with 1 %% and with 10 %% of the labels"
    )
    parser.add_argument(
        "--longer", type=int, default=TransferPlan.longer, help="also from scratch with so many times the steps, seed 0"
    )
    parser.add_argument("--precision", default=TransferPlan.precision)
    given = vars(parser.parse_args())
    only, out = given.pop("only"), given.pop("out")
    given["steps"] = tuple(given["steps"])
    plan = TransferPlan(**given)
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
