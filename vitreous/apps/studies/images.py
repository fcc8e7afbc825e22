"""Figure 4 of arXiv:2010.11929: accuracy against the number of training images, of ViT, BiT and a hybrid."""

from __future__ import annotations

from vitreous.apps.studies.frontier import conclude_crossings
from vitreous.apps.studies.study import Cell, Chart, Place, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions

SHARES = (1, 3, 10, 30, 100)  # per cent
PUBLISHED = {"ViT": "ViT-B/32", "BiT": "BiT-R50x1", "hybrid": "R50+ViT-B/32"}


def model_of(kind: str, setting: Setting) -> TrainOptions:
    """The options of a kind of model at the scale."""
    if setting.scale.name == "published":
        recipe = "bit-jft-adam" if kind == "BiT" else "vit-jft"
        return setting.options(TrainOptions(recipe=recipe, model=PUBLISHED[kind]))
    base = setting.options(TrainOptions(), optimizer="adamw", lr=1e-3)
    if kind == "ViT":
        return base
    if kind == "BiT":
        return change(base, model="BiT-R50x1", settings={"model.blocks": "1 1", "model.width": "16"})
    return change(base, model=f"Conv+ViT-{setting.scale.width}x{setting.scale.depth}/8")


def cells(setting: Setting) -> tuple[Cell, ...]:
    """Every kind of model on every share of the images, the smaller ones among the larger."""
    return tuple(
        Cell((kind, f"{share} %"), model_of(kind, setting), share=share / 100) for kind in PUBLISHED for share in SHARES
    )


def vit_on_as_many(place: Place) -> Place:
    """The ViT on the share of a place."""
    return "ViT", place[1]


STUDY = Study(
    "images",
    "Accuracy against the number of images",
    question="From how many images on is a ViT better than a ResNet?",
    source="arXiv:2010.11929, section 4.3 and Figure 4",
    axes=("model", "training images"),
    cells=cells,
    reference=vit_on_as_many,
    published=Published(
        "Figure 4 has curves and no table: on 9 million images of JFT ViT-B/32 is worse than R50x1, on 90 million and "
        "more it is better",
        {},
    ),
    differs=(
        "The paper's subsets are 9 to 300 million images; here they are shares of the data named, some of a few "
        "images a class. All runs have as many steps, so that a small share is seen more often. The hybrid has a "
        "stem of convolutions for a ResNet, and models are not of one compute."
    ),
    chart=Chart("training images", "model", logarithmic=True),
    conclude=conclude_crossings,
)
