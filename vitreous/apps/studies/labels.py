"""Labels available: a ViT from scratch, and ViTs that learned without labels first, on shares of the labels."""

from __future__ import annotations

from vitreous.apps.studies.study import Cell, Chart, Place, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions

SHARES = (1, 10, 100)  # per cent of the images with labels
FIRST = {"supervised": "", "MAE": "mae", "DINO": "dino"}


def cells(setting: Setting) -> tuple[Cell, ...]:
    """Every way to begin, then training with labels on a share; what needs no labels learns from all images."""
    published = setting.scale.name == "published"
    scratch = setting.options(TrainOptions(recipe="deit", model="ViT-B/16"))
    scratch = scratch if published else change(scratch, recipe=setting.recipe)
    tune = {"recipe": "mae-finetune"} if published else {}
    rows = []
    for name, recipe in FIRST.items():
        after = {}
        if recipe:
            after["init"] = Cell((), setting.options(TrainOptions(recipe=recipe, model="ViT-B/16"), recipe=recipe))
        rows += [Cell((name, f"{share} %"), scratch, share / 100, after, then=tune) for share in SHARES]
    return tuple(rows)


def from_scratch(place: Place) -> Place:
    """The ViT from scratch on the share of a place."""
    return "supervised", place[1]


STUDY = Study(
    "labels",
    "How many labels there are",
    question="What is learning without labels worth, when few or many images have labels?",
    source="arXiv:2111.06377 and arXiv:2104.14294",
    axes=("first", "labelled"),
    cells=cells,
    reference=from_scratch,
    published=Published("no table of these papers has these three beside each other on shares of ImageNet", {}),
    differs=(
        "Both parts of a row have as many steps as a row from scratch has in all, so that what was learned without "
        "labels costs twice the compute or more. The papers pre-train for hundreds of epochs."
    ),
    chart=Chart("labelled", "first", logarithmic=True),
)
