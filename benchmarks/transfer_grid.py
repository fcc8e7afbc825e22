"""`vitreous train --lr-grid` beside an exhaustive search by hand, on digits and on a part of a folder such as CIFAR-10.

python benchmarks/transfer_grid.py [FOLDER] --out benchmarks/results/DATE-transfer-grid-HARDWARE.md

By hand: a copy of the data in which files are moved from train/ to val/, one ordinary run for each rate, the best one
again on the whole of train/. Both ways have to find the same rate, the same figures and the same weights. Test images
are read at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image

from vitreous.config import from_yaml
from vitreous.data.holdout import draw_stratified_splits
from vitreous.data.layouts.folder import open_image_folder
from vitreous.data.layouts.named import open_digits
from vitreous.data.split import ArraySplit, FileSplit
from vitreous.system.machine import get_processor_name
from vitreous.training.run import Run

LEARNING_RATES = (0.0003, 0.001, 0.003, 0.01)
DIGITS_OPTIONS = ["--model", "ViT-64x4/2", "--epochs", "12", "--batch-size", "64", "--warmup-steps", "20"]
PHOTOS_OPTIONS = ["--model", "ViT-64x4/4", "--epochs", "8", "--batch-size", "64", "--warmup-steps", "20"]
TRAIN_IMAGES, TEST_IMAGES = 200, 50  # images of a class that are taken of a folder


def digits_folder(root: Path) -> Path:
    """The embedded digits as root/SPLIT/CLASS/*.png, the images drawn for validation among those of train."""
    for name, split in open_digits().splits.items():
        assert isinstance(split, ArraySplit)
        for row, label in enumerate(split.labels):
            home = root / ("train" if name == "val" else name) / str(label)
            home.mkdir(parents=True, exist_ok=True)
            Image.fromarray(split.pixels[row]).save(home / f"{name}-{row}.png")
    return root


def copy_subset(source: Path, root: Path) -> Path:
    """The first images of each class of a folder with train/ and test/."""
    for name, count in (("train", TRAIN_IMAGES), ("test", TEST_IMAGES)):
        for home in sorted((source / name).iterdir()):
            (root / name / home.name).mkdir(parents=True)
            for path in sorted(home.iterdir())[:count]:
                shutil.copy(path, root / name / home.name)
    return root


def hold_out_val(root: Path, to: Path, share: float) -> Path:
    """The same training images with a share of each class in val/, and no test/."""
    whole = open_image_folder(root).full_train_split
    assert isinstance(whole, FileSplit)
    for name, rows in draw_stratified_splits(whole.labels, 0, {"val": share}).items():
        for row in rows:
            home = to / name / whole.paths[row].parent.name
            home.mkdir(parents=True, exist_ok=True)
            shutil.copy(whole.paths[row], home)
    return to


def run_vitreous(*words: str) -> dict:
    """The document of one command."""
    result = subprocess.run(
        [sys.executable, "-m", "vitreous", *words, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    if result.returncode:
        sys.exit(f"vitreous {' '.join(words)}: {result.stdout.decode()}")
    return json.loads(result.stdout)


def compare_searches(name: str, root: Path, words: list[str], scratch: Path) -> list[str]:
    """Both ways on one dataset, as lines of Markdown."""
    started = time.perf_counter()
    grid = run_vitreous(
        "train", str(root), *words, "--lr-grid", *map(str, LEARNING_RATES), "--out", str(scratch / "grid")
    )["lr_grid"]
    minutes = (time.perf_counter() - started) / 60
    numbers = grid["protocol"]
    apart, by_hand = hold_out_val(root, scratch / "apart", numbers["share"]), {}
    for rate in LEARNING_RATES:
        muon = ["--lr", str(rate), "--optimizer.matrix-lr", repr(numbers["matrix_lr"] * (rate / numbers["lr"]))]
        by_hand[rate] = run_vitreous("train", str(apart), *words, *muon, "--out", str(scratch / str(rate)))["val"]
    best = max(LEARNING_RATES, key=lambda rate: (by_hand[rate]["top1"], -by_hand[rate]["nll"], -rate))
    muon = ["--lr", str(best), "--optimizer.matrix-lr", repr(numbers["matrix_lr"] * (best / numbers["lr"]))]
    run_vitreous("train", str(root), *words, *muon, "--data.hold-out", "0", "--out", str(scratch / "last"))
    test = run_vitreous("evaluate", str(scratch / "grid"))["test"]
    same = (scratch / "grid/model/weights.safetensors").read_bytes() == (
        scratch / "last/model/weights.safetensors"
    ).read_bytes()
    run = from_yaml(Run, (scratch / "grid" / "config.yaml").read_text())
    said = (
        f"`vitreous train FOLDER {' '.join(words)} --lr-grid {' '.join(map(str, LEARNING_RATES))}`: {run.data.images:,} "
        "training images, "
        f"{numbers['held_out']} of them held out for the trials, optimiser {run.optimizer.name}, {minutes:.1f} minutes "
        "all in."
    )
    rows = [
        f"## {name}",
        "",
        said,
        "",
        "| rate | `--lr-grid`, held-out top-1 | NLL | by hand, top-1 | NLL |",
        "|---|---|---|---|---|",
    ]
    for row in grid["trials"]:
        hand = by_hand[row["lr"]]
        rows.append(
            f"| {row['lr']:g} | {row['score']:.2%} | {row['nll']:.6f} | {hand['top1']:.2%} | {hand['nll']:.6f} |"
        )
    chosen = grid["choice"]["lr"]
    low, high = test["interval"]["top1"]
    said = (
        f"Chosen by `--lr-grid`: **{chosen:g}**; by hand: **{best:g}**. Weights after training on everything: "
        f"{'the same to the last bit' if same else 'NOT the same'}. "
        f"Test top-1, read afterwards: {test['top1']:.2%} (95 %: {low:.1%} to {high:.1%}, {test['images']} images)."
    )
    return [*rows, "", said, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="a folder with train/CLASS and test/CLASS")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [f"# The learning-rate grid beside an exhaustive search, {time.strftime('%Y-%m-%d')}", ""]
    rows += [
        f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}.",
        "`python benchmarks/transfer_grid.py FOLDER`",
        "",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        rows += compare_searches("digits", digits_folder(place / "digits"), DIGITS_OPTIONS, place / "of digits")
        if arguments.folder:
            name = f"{arguments.folder.name}, {TRAIN_IMAGES} training and {TEST_IMAGES} test images of each class"
            rows += compare_searches(
                name, copy_subset(arguments.folder, place / arguments.folder.name), PHOTOS_OPTIONS, place / "of folder"
            )
    text = "\n".join(rows)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
