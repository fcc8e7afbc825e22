"""DINO (arXiv:2104.14294, appendix D): the teacher's momentum and temperature, by k-NN of the features."""

from __future__ import annotations

from vitreous.apps.studies.study import Cell, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions

MOMENTA = ("0.9", "0.99", "0.996")
TEMPERATURES = ("0.02", "0.04", "0.07")
USUAL = ("0.99", "0.04")


def cells(setting: Setting) -> tuple[Cell, ...]:
    """Momenta at the usual temperature, temperatures at the usual momentum."""
    base = setting.options(TrainOptions(recipe="dino", model="ViT-S/16"), recipe="dino")
    pairs = [(momentum, USUAL[1]) for momentum in MOMENTA]
    pairs += [(USUAL[0], temperature) for temperature in TEMPERATURES if temperature != USUAL[1]]
    rows = []
    for momentum, temperature in pairs:
        settings = {"schedules.momentum.start": momentum, "schedules.teacher-temperature.start": temperature}
        settings["schedules.teacher-temperature.end"] = temperature
        rows.append(Cell((momentum, temperature), change(base, settings=settings)))
    return tuple(rows)


STUDY = Study(
    "dino",
    "DINO's teacher",
    question="How fast may DINO's teacher follow its student, and how sharp has its answer to be?",
    source="arXiv:2104.14294, section 5 and appendix D",
    axes=("momentum", "temperature"),
    cells=cells,
    reference=USUAL,
    published=Published(
        "the recipe's momentum is 0.996 at 1024 images a step and its temperature 0.04; no number is repeated", {}
    ),
    differs=(
        "Momentum begins at the number of the table and ends at 1. Small runs have few steps, in which a teacher of "
        "a high momentum hardly moves; the figure is k-NN accuracy, or RankMe where images have one class."
    ),
)
