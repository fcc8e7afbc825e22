"""CIFAR-10 from scratch by models of one size and different kinds in the same minutes: a plain ViT, convolutions or a
small ResNet before one, and Swin.

    python benchmarks/families.py FOLDER --work DIR --rows ROWS.jsonl --out benchmarks/results/DATE-families-HARDWARE.md

FOLDER has train/CLASS/* and test/CLASS/*. Each model has `vitreous train`'s recipe for small images, for as many
epochs as the minutes hold on --cores cores. Its rate is counted in processor seconds of one thread, which other work on
the machine changes little: those of a longer run less those of a shorter one (DIR/MODEL/rate.json). Runs are resumed,
and models whose row is in ROWS skipped, so that models can be trained side by side: OMP_NUM_THREADS=1 for each.
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

#: what the table calls a model: its name, and fields of its config; about 1.2 million parameters each
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
    "Swin": ("Swin-48x2-2-2/2-window4", {}),
    "Swin V2": ("SwinV2-48x2-2-2/2-window4", {}),
}


def build_train_options(name: str, folder: Path) -> dict[str, Any]:
    """Options of `vitreous.train` for a model of the table."""
    model, fields = MODELS[name]
    settings = {f"model.{field}": words.split() for field, words in fields.items()}
    return {"data": str(folder), "model": model, "recipe": "small", "image_size": 32, "settings": settings}


def measure_row(name: str, folder: Path, home: Path, minutes: float, rate: float) -> dict[str, Any]:
    """Train a model for as many images as so many processor minutes hold, and what the table says of it."""
    given = build_train_options(name, folder)
    epochs = round(rate * 60 * minutes / len(open_data(str(folder)).splits["train"]), 2)
    summary = train_or_load(home / "run", Path(given.pop("data")), epochs=epochs, save_every=200, **given)
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
    """The table."""
    lines = [
        f"# CIFAR-10 (JPEG copy) from scratch by models of one size, {time.strftime('%Y-%m-%d')}",
        "",
        f"{get_processor_name()}, torch {torch.__version__}, one thread. One run each, seed 0, of the recipe for small images as it",
        f"stands, for as many images as {rows[0]['processor_minutes']:g} minutes of one processor core hold.",
        "",
        "    python benchmarks/families.py FOLDER --work DIR --rows ROWS.jsonl",
        "",
        "| | model | parameters | images per processor second, training | epochs | val top-1 | test top-1 |",
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
    """Make the rows that are not there yet, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="where runs are kept; a second call goes on with them")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines, a model each")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--cores", type=int, default=2, help="cores that the minutes are of")
    parser.add_argument("--measured", type=int, default=80, help="steps that measure the images a second")
    given = parser.parse_args()
    read = lambda: [json.loads(line) for line in given.rows.open()] if given.rows.is_file() else []  # noqa: E731
    for name in given.models:
        home = given.work / name.replace(" ", "-")
        home.mkdir(parents=True, exist_ok=True)
        rate = measure_processor_rate(home, given.measured, **build_train_options(name, given.folder))
        if name not in {row["model"] for row in read()}:
            row = measure_row(name, given.folder, home, given.minutes * given.cores, rate)
            with given.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if rows := read():
        print(build_page(rows))
        if given.out:
            given.out.write_text(build_page(rows))


if __name__ == "__main__":
    main()
