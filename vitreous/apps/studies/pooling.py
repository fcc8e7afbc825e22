"""Figure 9 of arXiv:2010.11929: a class token or mean pooling, each at several learning rates."""

from __future__ import annotations

from vitreous.apps.studies.study import Cell, Chart, Place, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions

POOLS = {
    "class token": {"model.pool": "class", "model.class-token": "true"},
    "mean": {"model.pool": "mean", "model.class-token": "false"},
}
RATES = {"small": ("3e-4", "1e-3", "3e-3"), "gpu": ("3e-4", "1e-3", "3e-3"), "published": ("3e-4", "8e-4")}


def cells(setting: Setting) -> tuple[Cell, ...]:
    """Both ways to pool at every learning rate, with AdamW as the paper's Adam."""
    base = setting.options(TrainOptions(recipe="vit-jft", model="ViT-B/16"), optimizer="adamw")
    return tuple(
        Cell((pool, rate), change(base, lr=float(rate), settings=of_model))
        for pool, of_model in POOLS.items()
        for rate in RATES[setting.scale.name]
    )


def same_rate(place: Place) -> Place:
    """The class token at the learning rate of a place."""
    return "class token", place[1]


STUDY = Study(
    "pooling",
    "Class token or mean pooling",
    question="Does a ViT need a class token, or does the mean of its patches do, at a learning rate of its own?",
    source="arXiv:2010.11929, D.3 and Figure 9",
    axes=("pooling", "learning rate"),
    cells=cells,
    reference=same_rate,
    published=Published(
        "Figure 9 has curves and no table: the class token at 8e-4 and the mean at 3e-4 end alike, the mean at 8e-4 "
        "far below",
        {},
    ),
    differs=(
        "The paper's class token has a layer with tanh before the head, its mean has none, and it pre-trains on "
        "JFT-300M. Learning rates that suit smaller models and batches are higher than the paper's."
    ),
    chart=Chart("learning rate", "pooling", logarithmic=True),
)
