"""The page of a study as a page of this folder: without the links to its runs, with the machine and what it shows.

    vitreous study positions --data FOLDER --out runs/studies
    python benchmarks/study_page.py runs/studies/positions --note "What it shows, and what not." \\
        --out benchmarks/results/DATE-study-positions-HARDWARE.md

The figure goes to docs/figures. FOLDER stands in the page for the folder of the data.
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


def public_page(home: Path, figure: str, threads: int, note: str) -> str:
    """The Markdown of the study in `home` for the repository, with its figure at the address `figure`."""
    settings = json.loads((home / "study.json").read_text("utf-8"))["settings"]
    text = (home / "report.md").read_text("utf-8").replace("](figure.svg)", f"]({figure})")
    text = text.replace(settings["data"], "FOLDER").replace(f" --out {home.parent}", "")
    table, *conclusion = text.split("\n## ", 1)
    table = re.sub(r"(?m)^(\|.*\|)[^|]*\|$", r"\1", table)  # its last column links to runs, which stay where they are
    title, _, table = table.partition("\n")
    machine = f"{get_processor_name()}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}."
    head = f"{title}, {time.strftime('%Y-%m-%d')}\n\n{note}\n\n{machine}\n{table}"
    return "\n## ".join([head, *conclusion]).rstrip("\n") + "\n"


def main() -> None:
    """Write the page and its figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path, help="the folder of the study, in the --out of `vitreous study`")
    parser.add_argument("--note", required=True, help="what the study shows, and what it does not")
    parser.add_argument("--threads", type=int, default=1, help="that the runs had")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    figure = ROOT / "docs" / "figures" / f"study-{given.home.name}.svg"
    shutil.copyfile(given.home / "figure.svg", figure)
    given.out.write_text(
        public_page(given.home, f"../../docs/figures/{figure.name}", given.threads, given.note), "utf-8"
    )


if __name__ == "__main__":
    main()
