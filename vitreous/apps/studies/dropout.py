"""Patch dropout (arXiv:2208.07220; FLIP, arXiv:2212.00794): accuracy against the share of patches left out."""

from __future__ import annotations

from vitreous.apps.studies.study import Cell, Chart, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions

SHARES = (0, 25, 50, 75)  # per cent


def cells(setting: Setting) -> tuple[Cell, ...]:
    """Every share, left out in the whole run."""
    base = setting.options(TrainOptions(recipe="deit", model="ViT-B/16"))
    return tuple(
        Cell(
            (f"{share} %",), change(base, patch_dropout=share / 100, settings={"objective.patch-dropout-until": "1.0"})
        )
        for share in SHARES
    )


STUDY = Study(
    "patch-dropout",
    "Patches left out in training",
    question="How many patches can be left out in training, and what does it cost?",
    source="arXiv:2208.07220 and arXiv:2212.00794",
    axes=("left out",),
    cells=cells,
    reference=("0 %",),
    published=Published("no number is repeated here: models and data of these papers are others", {}),
    differs=(
        "The papers train larger models on images of many patches, of which many are alike. In small images each patch "
        "says more. All runs have as many steps; those that leave out patches have less compute."
    ),
    chart=Chart("left out"),
)
