"""CIFAR-10 from scratch with model families of similar size at equal CPU time: plain ViT, ViT with the blocks of ViT-5
(arXiv:2602.08071), with a convolutional stem or a small ResNet, and Swin.

    python benchmarks/families.py FOLDER --work DIR --rows ROWS.jsonl --out benchmarks/results/DATE-families-HARDWARE.md

FOLDER has train/CLASS/* and test/CLASS/*. Each model is trained with the recipe `small`, for as many epochs as it can
process in --minutes on --cores cores. Its throughput is measured in CPU seconds of one thread, which other load on the
machine affects little: the difference between a longer and a shorter run (DIR/MODEL/rate.json). Runs are resumed, and
models whose row is in ROWS.jsonl are skipped, so models can be trained concurrently, with OMP_NUM_THREADS=1 each.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from pretraining import measure_processor_rate, train_or_load

from vitreous.data.sources import open_data
from vitreous.system.machine import get_processor_name

#: name in the table -> model name, and fields of its config; about 1.2 million parameters each
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "plain ViT": ("ViT-128x6/4", {}),
    "Conv+ViT": ("Conv+ViT-128x4/8", {}),
    "hybrid": (
        "R50+ViT-B/16",
        {
            "patch": "4 4",
            "stem.blocks": "2",
            "stem.width": "32",
            "width": "128",
            "depth": "5",
            "heads": "4",
            "mlp.hidden": "512",
        },
    ),
    "ViT-5 blocks": (
        "ViT-5-S/16",
        {"patch": "4 4", "width": "128", "depth": "6", "heads": "4", "mlp.hidden": "512", "rotary.reference": "8"},
    ),
    "Swin": ("Swin-48x2-2-2/2-window4", {}),
    "Swin V2": ("SwinV2-48x2-2-2/2-window4", {}),
}


def build_train_options(name: str, folder: Path) -> dict[str, Any]:
    """Return the options of `vitreous.train` for a model of `MODELS`."""
    model, fields = MODELS[name]
    settings = {f"model.{field}": words.split() for field, words in fields.items()}
    return {"data": str(folder), "model": model, "recipe": "small", "image_size": 32, "settings": settings}


def measure_row(name: str, folder: Path, home: Path, minutes: float, rate: float) -> dict[str, Any]:
    """Train a model for this CPU time, and return its row of the table.

    `rate` is its training throughput in images per CPU second, `home` the folder of its runs.
    """
    train_options = build_train_options(name, folder)
    epochs = round(rate * 60 * minutes / len(open_data(str(folder)).splits["train"]), 2)
    summary = train_or_load(
        home / "run", Path(train_options.pop("data")), epochs=epochs, save_every=200, **train_options
    )
    return {
        "model": name,
        "parameters": summary["parameters"],
        "processor_minutes": minutes,
        "images_per_processor_second": rate,
        "epochs": summary["epochs"],
        "val": summary["val"]["top1"],
        "test": summary["test"]["top1"],
        "interval": summary["test"]["interval"]["top1"],
    }


def build_page(rows: list[dict[str, Any]]) -> str:
    """Return the page with the table of all rows."""
    lines = [
        f"# CIFAR-10 (JPEG copy) from scratch with models of similar size, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}, one thread. One run each, seed 0, with the recipe `small`, for",
        f"as many images as the model can process in {rows[0]['processor_minutes']:g} minutes of one core.",
        "",
        "    python benchmarks/families.py FOLDER --work DIR --rows ROWS.jsonl",
        "",
        "| | model | parameters | training images per CPU second | epochs | val top-1 | test top-1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name, fields = MODELS[row["model"]]
        changed = ", ".join(f"{field} {words}" for field, words in fields.items())
        low, high = row["interval"]
        cells = [row["model"], f"`{name}`" + (f" with {changed}" if changed else ""), f"{row['parameters']:,}"]
        cells += [f"{row['images_per_processor_second']:.0f}", f"{row['epochs']:.1f}", f"{row['val']:.1%}"]
        lines.append("| " + " | ".join([*cells, f"{row['test']:.2%} (95 %: {low:.1%} to {high:.1%})"]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compute the missing rows, and print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs; another call continues them")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines file, one row per model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--cores", type=int, default=2, help="cores for which --minutes are meant")
    parser.add_argument("--measured", type=int, default=80, help="steps that measure the throughput")
    options = parser.parse_args()
    read_rows = lambda: [json.loads(line) for line in options.rows.open()] if options.rows.is_file() else []  # noqa: E731
    for name in options.models:
        home = options.work / name.replace(" ", "-")
        home.mkdir(parents=True, exist_ok=True)
        rate = measure_processor_rate(home, options.measured, **build_train_options(name, options.folder))
        if name not in {row["model"] for row in read_rows()}:
            row = measure_row(name, options.folder, home, options.minutes * options.cores, rate)
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if rows := read_rows():
        print(build_page(rows))
        if options.out:
            options.out.write_text(build_page(rows))


if __name__ == "__main__":
    main()
