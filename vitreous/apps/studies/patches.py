"""Masked patch prediction (arXiv:2010.11929, section 4.6 and B.1.2) against labels, and nothing, learned first."""

from __future__ import annotations

from vitreous.apps.studies.study import Cell, Place, Published, Setting, Study, change
from vitreous.apps.studies.transfer import others_of
from vitreous.recipes.options import TrainOptions

FIRST = {"nothing": "", "masked patches": "masked-patches", "labels": ""}
#: of ImageNet with ViT-B/16; without pre-training and with labels the paper says how far these are
PUBLISHED = {("masked patches", "ImageNet"): "79.9 %"}


def cells(setting: Setting) -> tuple[Cell, ...]:
    """Every way to begin on the study's data, fine-tuned on every other set as the model from scratch is trained."""
    published = setting.scale.name == "published"
    plain = setting.options(TrainOptions(recipe="vit-jft", model="ViT-B/16"))
    masked = setting.options(TrainOptions(recipe="masked-patches", model="ViT-B/16"), recipe="masked-patches")
    first = {"masked patches": Cell((), masked), "labels": Cell((), plain)}
    rows = []
    for other in others_of(setting):
        recipe = "vit-imagenet" if published else setting.recipe
        scratch = change(plain, recipe=recipe)
        then = {"recipe": "finetune-imagenet"} if published else {}
        for kind in FIRST:
            after = {"init": first[kind]} if kind in first else {}
            rows.append(Cell((kind, other.name), scratch, after=after, then=then, data=other.source))
    return tuple(rows)


def from_nothing(place: Place) -> Place:
    """The model from scratch on the set of a place."""
    return "nothing", place[1]


STUDY = Study(
    "masked-patches",
    "Masked patch prediction against labels",
    question="How much of what labels teach does a ViT learn from patches that are hidden?",
    source="arXiv:2010.11929, section 4.6 and B.1.2",
    axes=("learned first", "data set"),
    cells=cells,
    reference=from_nothing,
    published=Published(
        "ImageNet accuracy of ViT-B/16 after masked patch prediction on JFT-300M: 2 % above training from scratch and "
        "4 % below pre-training with labels",
        PUBLISHED,
    ),
    differs=(
        "The paper pre-trains for a million steps. Here what is learned first and what is judged are near to each "
        "other, and images of few patches leave little to predict."
    ),
    others="sets",
)
