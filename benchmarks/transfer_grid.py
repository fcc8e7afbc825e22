"""`vitreous train --lr-grid` compared with a manual exhaustive search, on digits and on a subset of a folder such as
CIFAR-10.

    python benchmarks/transfer_grid.py [FOLDER] --out benchmarks/results/DATE-transfer-grid-HARDWARE.md

The manual search copies the data and moves files from train/ to val/, trains one ordinary run per learning rate, and
trains again with the best one on all of train/. Both ways must select the same learning rate, with the same metrics and
weights. Test images are evaluated at the end.
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
TRAIN_IMAGES, TEST_IMAGES = 200, 50  # images per class taken from a folder


def write_digits_folder(root: Path) -> Path:
    """Write the built-in digits as root/SPLIT/CLASS/*.png, with validation images in train."""
    for name, split in open_digits().splits.items():
        assert isinstance(split, ArraySplit)
        for sample, label in enumerate(split.labels):
            class_folder = root / ("train" if name == "val" else name) / str(label)
            class_folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(split.pixels[sample]).save(class_folder / f"{name}-{sample}.png")
    return root


def copy_subset(source: Path, root: Path) -> Path:
    """Copy the first images of each class of a folder with train/ and test/."""
    for name, count in (("train", TRAIN_IMAGES), ("test", TEST_IMAGES)):
        for class_folder in sorted((source / name).iterdir()):
            (root / name / class_folder.name).mkdir(parents=True)
            for path in sorted(class_folder.iterdir())[:count]:
                shutil.copy(path, root / name / class_folder.name)
    return root


def hold_out_val(root: Path, to: Path, share: float) -> Path:
    """Copy the training images with a share of each class in val/, and no test/."""
    train_split = open_image_folder(root).full_train_split
    assert isinstance(train_split, FileSplit)
    for name, samples in draw_stratified_splits(train_split.labels, 0, {"val": share}).items():
        for sample in samples:
            class_folder = to / name / train_split.paths[sample].parent.name
            class_folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(train_split.paths[sample], class_folder)
    return to


def run_vitreous(*words: str) -> dict:
    """The JSON document of a command."""
    result = subprocess.run(
        [sys.executable, "-m", "vitreous", *words, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    if result.returncode:
        sys.exit(f"vitreous {' '.join(words)}: {result.stdout.decode()}")
    return json.loads(result.stdout)


def compare_searches(name: str, root: Path, words: list[str], scratch: Path) -> list[str]:
    """Compare both ways on one dataset; returns lines of Markdown."""
    started = time.perf_counter()
    grid = run_vitreous(
        "train", str(root), *words, "--lr-grid", *map(str, LEARNING_RATES), "--out", str(scratch / "grid")
    )["lr_grid"]
    minutes = (time.perf_counter() - started) / 60
    protocol = grid["protocol"]
    apart, by_hand = hold_out_val(root, scratch / "apart", protocol["share"]), {}
    for rate in LEARNING_RATES:
        muon = ["--lr", str(rate), "--optimizer.matrix-lr", repr(protocol["matrix_lr"] * (rate / protocol["lr"]))]
        by_hand[rate] = run_vitreous("train", str(apart), *words, *muon, "--out", str(scratch / str(rate)))["val"]
    best = max(LEARNING_RATES, key=lambda rate: (by_hand[rate]["top1"], -by_hand[rate]["nll"], -rate))
    muon = ["--lr", str(best), "--optimizer.matrix-lr", repr(protocol["matrix_lr"] * (best / protocol["lr"]))]
    run_vitreous("train", str(root), *words, *muon, "--data.hold-out", "0", "--out", str(scratch / "last"))
    test = run_vitreous("evaluate", str(scratch / "grid"))["test"]
    same = (scratch / "grid/model/weights.safetensors").read_bytes() == (
        scratch / "last/model/weights.safetensors"
    ).read_bytes()
    run = from_yaml(Run, (scratch / "grid" / "config.yaml").read_text())
    text = (
        f"`vitreous train FOLDER {' '.join(words)} --lr-grid {' '.join(map(str, LEARNING_RATES))}`: {run.data.images:,} "
        "training images, "
        f"{protocol['held_out']} of them held out for the trials, optimiser {run.optimizer.name}, {minutes:.1f} minutes "
        "in total."
    )
    lines = [
        f"## {name}",
        "",
        text,
        "",
        "| learning rate | `--lr-grid`, held-out top-1 | NLL | manual, top-1 | NLL |",
        "|---|---|---|---|---|",
    ]
    for trial in grid["trials"]:
        hand = by_hand[trial["lr"]]
        lines.append(
            f"| {trial['lr']:g} | {trial['score']:.2%} | {trial['nll']:.6f} | {hand['top1']:.2%} | {hand['nll']:.6f} |"
        )
    chosen = grid["choice"]["lr"]
    low, high = test["interval"]["top1"]
    text = (
        f"Chosen by `--lr-grid`: **{chosen:g}**; manual: **{best:g}**. Weights after training on everything: "
        f"{'bit-identical' if same else 'NOT bit-identical'}. "
        f"Test top-1, evaluated afterwards: {test['top1']:.2%} (95 %: {low:.1%} to {high:.1%}, {test['images']} images)."
    )
    return [*lines, "", text, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="a folder with train/CLASS and test/CLASS")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [f"# The learning-rate grid compared with an exhaustive search, {time.strftime('%Y-%m-%d')}", ""]
    rows += [
        f"{get_processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}.",
        "`python benchmarks/transfer_grid.py FOLDER`",
        "",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows += compare_searches("digits", write_digits_folder(folder / "digits"), DIGITS_OPTIONS, folder / "of digits")
        if arguments.folder:
            name = f"{arguments.folder.name}, {TRAIN_IMAGES} training and {TEST_IMAGES} test images of each class"
            rows += compare_searches(
                name,
                copy_subset(arguments.folder, folder / arguments.folder.name),
                PHOTOS_OPTIONS,
                folder / "of folder",
            )
    text = "\n".join(rows)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
