"""Table 7 of arXiv:2010.11929: SGD against Adam for ResNets."""

from __future__ import annotations

from vitreous.apps.studies.study import Cell, Place, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions

MODELS = {"R50": "BiT-R50x1", "R152x2": "BiT-R152x2"}
#: of small scales: units of the stages, and the width of the root
SIZES = {"R50": ("1 1", "16"), "R152x2": ("2 2", "32")}
OPTIMIZERS = {"SGD": ("sgd", 0.1), "Adam": ("adamw", 1e-3)}
PUBLISHED = {
    ("R50", "Adam"): "77.54 %",
    ("R50", "SGD"): "78.24 %",
    ("R152x2", "Adam"): "84.97 %",
    ("R152x2", "SGD"): "84.37 %",
}


def cells(setting: Setting) -> tuple[Cell, ...]:
    """Two ResNets with both optimisers; at small scales ones of few units."""
    rows = []
    for model, name in MODELS.items():
        for optimizer, (kind, lr) in OPTIMIZERS.items():
            recipe = TrainOptions(recipe=f"bit-jft-{'adam' if kind == 'adamw' else 'sgd'}", model=name)
            options = setting.options(recipe)
            if setting.scale.name != "published":
                blocks, width = SIZES[model]
                sizes = {"model.blocks": blocks, "model.width": width}
                options = change(options, model=name, optimizer=kind, lr=lr, settings=sizes)
            rows.append(Cell((model, optimizer), options))
    return tuple(rows)


def with_sgd(place: Place) -> Place:
    """The model of a place with SGD."""
    return place[0], "SGD"


STUDY = Study(
    "optimizers",
    "SGD against Adam for ResNets",
    question="Do ResNets learn better with Adam than with SGD?",
    source="arXiv:2010.11929, D.1 and Table 7",
    axes=("model", "optimiser"),
    cells=cells,
    reference=with_sgd,
    published=Published("ImageNet accuracy after pre-training on JFT-300M and fine-tuning (Table 7)", PUBLISHED),
    differs=(
        "The paper pre-trains and fine-tunes; here models are judged on what they are trained on. At the small "
        "scales R50 and R152x2 stand for ResNets of two stages, a small and a larger one. Each optimiser has one "
        "learning rate, which is not tuned: a difference may be that of the rates."
    ),
)
