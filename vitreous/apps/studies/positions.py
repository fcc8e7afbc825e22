"""Table 8 of arXiv:2010.11929: what kind of position embedding, and where it is added."""

from __future__ import annotations

from vitreous.apps.studies.study import Cell, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions

#: the row of the table -> settings of the model
KINDS = {
    "none": {"model.position": "none"},
    "1-D": {"model.position": "learned"},
    "2-D": {"model.position": "axes"},
    "relative": {"model.position": "none", "model.attention": "relative"},
}
#: the column of the table -> where positions are added
WHERE = {"input": "input", "every layer": "each", "every layer, shared": "shared"}
ONCE = ("none", "relative")  # kinds that the table has in one column

VALUES = {
    ("none", "input"): "61.382 %",
    ("1-D", "input"): "64.206 %",
    ("1-D", "every layer"): "63.964 %",
    ("1-D", "every layer, shared"): "64.292 %",
    ("2-D", "input"): "64.001 %",
    ("2-D", "every layer"): "64.046 %",
    ("2-D", "every layer, shared"): "64.022 %",
    ("relative", "input"): "64.032 %",
}


def cells(setting: Setting) -> tuple[Cell, ...]:
    """Every kind at every place that the table has."""
    base = setting.options(TrainOptions(recipe="vit-jft", model="ViT-B/16"))
    rows = []
    for kind, of_model in KINDS.items():
        for where, position_at in WHERE.items():
            if kind in ONCE and where != "input":
                continue
            options = change(base, settings=of_model | {"model.position-at": position_at})
            rows.append(Cell((kind, where), options))
    return tuple(rows)


STUDY = Study(
    "positions",
    "Position embeddings",
    question="Does it matter what kind of position embedding a ViT has, and where it is added?",
    source="arXiv:2010.11929, Table 8",
    axes=("positions", "added at"),
    cells=cells,
    reference=("1-D", "input"),
    published=Published("ImageNet 5-shot accuracy of ViT-B/16 pre-trained on JFT-300M (Table 8)", VALUES),
    differs=(
        "The paper pre-trains on JFT-300M and judges by a linear 5-shot classifier on ImageNet. Here models are "
        "trained and judged on the classes of the data named, and they are smaller: with few tokens of few pixels "
        "places say more of an image, and few images have to teach positions."
    ),
)
