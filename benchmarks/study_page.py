"""Convert the report of a study to a page of this folder: without links to its runs, with the machine and a conclusion.

    vitreous study positions --data FOLDER --out runs/studies
    python benchmarks/study_page.py runs/studies/positions --note "What it shows, and what not." \\
        --out benchmarks/results/DATE-study-positions-HARDWARE.md

The figure is written to docs/figures. The page replaces the path of the data by FOLDER.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from pathlib import Path

import torch

from vitreous.system.machine import get_processor_name

ROOT = Path(__file__).resolve().parents[1]


def build_public_page(study_folder: Path, figure_url: str, threads: int, note: str) -> str:
    """The Markdown of the study in `study_folder` for the repository, with its figure at the URL `figure_url`."""
    settings = json.loads((study_folder / "study.json").read_text("utf-8"))["settings"]
    text = (study_folder / "report.md").read_text("utf-8").replace("](figure.svg)", f"]({figure_url})")
    text = text.replace(settings["data"], "FOLDER").replace(f" --out {study_folder.parent}", "")
    table, *conclusion = text.split("\n## ", 1)
    table = re.sub(r"(?m)^(\|.*\|)[^|]*\|$", r"\1", table)  # its last column links to runs, which are not copied
    title, _, table = table.partition("\n")
    machine = f"{get_processor_name()}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}."
    head = f"{title}, {time.strftime('%Y-%m-%d')}\n\n{note}\n\n{machine}\n{table}"
    return "\n## ".join([head, *conclusion]).rstrip("\n") + "\n"


def main() -> None:
    """Write the page and its figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path, help="folder of the study, in the --out of `vitreous study`")
    parser.add_argument("--note", required=True, help="conclusion of the study, and its limits")
    parser.add_argument("--threads", type=int, default=1, help="number of threads of the runs")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figure_file = ROOT / "docs" / "figures" / f"study-{args.home.name}.svg"
    shutil.copyfile(args.home / "figure.svg", figure_file)
    args.out.write_text(
        build_public_page(args.home, f"../../docs/figures/{figure_file.name}", args.threads, args.note), "utf-8"
    )


if __name__ == "__main__":
    main()
