"""Build the figures of README.md, docs/index.md, docs/guides/inspection.md, of two tutorials and two guides.

    python docs/figures/build.py                  every figure; hours on two CPU cores
    python docs/figures/build.py terminal page    some of them
    python docs/figures/build.py --list           names, files and datasets

Trained runs are kept in --work and reused. Datasets are passed as folders, for example
`--data blood-cells=BCCD_Dataset/BCCD`. Each module in `MODULES` documents the sources and licences of its datasets.
Pages are rendered with Playwright in headless Chromium (`pip install '.[test]'`).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

FIGURES = Path(__file__).resolve().parent
#: modules of this folder that draw figures; each defines `OUTPUTS`, `DATASETS` and `build(context)`
MODULES = ("hero", "page", "terminal", "start", "inspection", "texts")


@dataclass(frozen=True)
class Context:
    """The input and output folders of a figure module.

    Args:
        work: folder of trained runs, created if missing.
        datasets: dataset name -> folder, from `--data NAME=FOLDER`.
        out: folder of the finished figures.
    """

    work: Path
    datasets: dict[str, Path] = field(default_factory=dict)
    out: Path = FIGURES


def main() -> None:
    """Parse the command line and build the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"figures to build: {', '.join(MODULES)}")
    parser.add_argument("--work", type=Path, default=Path("build/figures"), help="folder of trained runs")
    parser.add_argument("--data", nargs="*", default=[], metavar="NAME=FOLDER", help="datasets")
    parser.add_argument("--list", action="store_true", help="list the figures and their datasets")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(MODULES):
        parser.error(f"unknown figures: {', '.join(sorted(unknown))}; choose from {', '.join(MODULES)}")
    modules = {name: importlib.import_module(name) for name in arguments.names or MODULES}
    if arguments.list:
        for name, module in modules.items():
            print(name, *module.OUTPUTS, *(f"--data {dataset}=FOLDER" for dataset in module.DATASETS))
        return
    datasets = {name: Path(folder) for name, _, folder in (item.partition("=") for item in arguments.data)}
    missing = {dataset for module in modules.values() for dataset in module.DATASETS} - set(datasets)
    if missing:
        parser.error(f"missing datasets: {', '.join(f'--data {name}=FOLDER' for name in sorted(missing))}")
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name, module in modules.items():
        module.build(Context(arguments.work, datasets))
        for output in module.OUTPUTS:
            print(f"{name}: {output}, {(FIGURES / output).stat().st_size / 1000:,.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main()
