"""Figure 3 of arXiv:2010.11929: which regularisation suits a small, and which a larger, data set."""

from __future__ import annotations

from vitreous.apps.studies.study import Cell, Place, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions

SHARES = (10, 100)  # per cent of the training images
NONE = {"weight_decay": 0.0, "dropout": 0.0, "label_smoothing": 0.0}
#: the three that the paper tunes for each data set
KINDS = {
    "none": {},
    "weight decay": {"weight_decay": 0.1},
    "dropout": {"dropout": 0.1},
    "label smoothing": {"label_smoothing": 0.1},
    "all": {"weight_decay": 0.1, "dropout": 0.1, "label_smoothing": 0.1},
}


def cells(setting: Setting) -> tuple[Cell, ...]:
    """Each regulariser by itself, none, and all, on few images and on all of them."""
    base = setting.options(TrainOptions(recipe="vit-imagenet", model="ViT-B/16"))
    return tuple(
        Cell((kind, f"{share} %"), change(base, **(NONE | options)), share / 100)
        for share in SHARES
        for kind, options in KINDS.items()
    )


def unregularised(place: Place) -> Place:
    """The model without any on the images of a place."""
    return "none", place[1]


STUDY = Study(
    "regularisation",
    "Regularisation by the number of images",
    question="Do few images need another regularisation than many: weight decay, dropout, label smoothing?",
    source="arXiv:2010.11929, section 4.3 and Figure 3",
    axes=("regulariser", "training images"),
    cells=cells,
    reference=unregularised,
    published=Published(
        "for ImageNet the paper tunes weight decay, dropout and label smoothing and prints the first two (0.3 and 0.1 "
        "of ViT pre-trained on ImageNet, Table 3), and no accuracy of each by itself",
        {},
    ),
    differs=(
        "The paper tunes the three for each data set at once. Here each has one strength, by itself; what else the "
        "recipe has, augmentation above all, regularises too and is the same in all rows."
    ),
)
