"""Reduced computation: accuracy against time on CIFAR-10 or another folder of small images.

    python benchmarks/lighter.py FOLDER --epochs 1 2 4 --out benchmarks/results/DATE-lighter-HARDWARE.md

Each run is `vitreous train FOLDER --model ViT-96x4/4` with the options of its row, in a separate process on one thread;
time is its processor time, so that other load does not matter. The longest run without reductions is then evaluated
with 0, 2, 4, ... tokens merged in each block (ToMe).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from vitreous.system.machine import get_processor_name

MODEL_NAME = "ViT-96x4/4"
TRAIN_OPTIONS = {
    "everything kept": ["--patch-dropout", "0"],
    "patch dropout 0.5": ["--patch-dropout", "0.5"],
    "progressive from 0.5": ["--patch-dropout", "0", "--progressive", "0.5"],
    "both": ["--patch-dropout", "0.5", "--progressive", "0.5"],
}
MERGED_TOKENS = (0, 1, 2, 4, 6, 8)


def run_vitreous(*words: str) -> tuple[dict, float]:
    """The document of a command, and its processor seconds."""
    usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vitreous", *words, "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return json.loads(
        done.stdout
    ), usage_after.ru_utime + usage_after.ru_stime - usage_before.ru_utime - usage_before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=float, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    trained, merged = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for epochs in arguments.epochs:
            for name, options in TRAIN_OPTIONS.items():
                out = f"{scratch}/{len(trained)}"
                words = [
                    "--model",
                    MODEL_NAME,
                    "--epochs",
                    f"{epochs:g}",
                    "--shards",
                    "1",
                    "--workers",
                    "0",
                    "--evaluate-every",
                    "1000000",
                ]
                document, seconds = run_vitreous("train", arguments.folder, "--out", out, *words, *options)
                trained.append((name, epochs, seconds / 60, document["test"]["top1"], out))
                print(trained[-1], flush=True)
        longest = next(
            out for name, epochs, _, _, out in trained if name == "everything kept" and epochs == max(arguments.epochs)
        )
        for count in MERGED_TOKENS:
            document, seconds = run_vitreous("evaluate", longest, "--merge-tokens", str(count), "--workers", "0")
            merged.append((count, document["images_per_second"], document["test"]["top1"]))
            print(merged[-1], flush=True)
    text = "\n".join(build_page(trained, merged))
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def build_page(trained: list, merged: list) -> list[str]:
    """The lines of the page."""
    lines = [
        f"# Reduced computation: accuracy against time, CIFAR-10 (JPEG copy), {time.strftime('%Y-%m-%d')}",
        "",
        (
            f"{get_processor_name()}, one thread, torch {torch.__version__}. `python benchmarks/lighter.py FOLDER`; {MODEL_NAME}, one "
            "run each, seed 0."
        ),
        "",
        "Training: processor minutes of the complete command, including reading the images and the final evaluation.",
        "",
        "| | epochs | minutes | test top-1 |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name} | {epochs:g} | {minutes:.1f} | {top1:.2%} |" for name, epochs, minutes, top1, _ in trained]
    base = merged[0][1]
    lines += [
        "",
        (
            "Inference: tokens merged in each block of the longest run without reductions (64 tokens, 4 blocks), "
            "`evaluate --merge-tokens`;"
        ),
        "the rate is that of the complete command, with images decoded by the same thread.",
        "",
        "| merged in each block | images/s | ratio | test top-1 |",
        "|---|---|---|---|",
    ]
    lines += [f"| {count} | {rate:.0f} | {rate / base:.2f} x | {top1:.2%} |" for count, rate, top1 in merged]
    return [*lines, ""]


if __name__ == "__main__":
    main()
