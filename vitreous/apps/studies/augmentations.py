"""Table 8 of arXiv:2012.12877 (DeiT): each augmentation and regulariser left out by itself."""

from __future__ import annotations

from vitreous.apps.studies.study import Cell, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions

#: what is left out -> what switches it off
WITHOUT = {
    "nothing": {},
    "RandAugment": {"views.rand-layers": "0"},
    "MixUp": {"views.mixup": "0"},
    "CutMix": {"views.cutmix": "0"},
    "erasing": {"views.erase": "0"},
    "stochastic depth": {"model.drop-path": "0"},
    "repeated augmentation": {"data.repeats": "1"},
}


def cells(setting: Setting) -> tuple[Cell, ...]:
    """DeiT's recipe, and the same less one part."""
    base = setting.options(TrainOptions(recipe="deit", model="ViT-B/16"), recipe="deit")
    if setting.scale.name != "published":
        side = min(setting.side, 64)
        base = change(base, image_size=side, lr=1e-3, ema=0.99)
    return tuple(Cell((name,), change(base, settings=off)) for name, off in WITHOUT.items())


STUDY = Study(
    "augmentations",
    "DeiT's augmentations, one left out at a time",
    question="Which of DeiT's augmentations and regularisers does a ViT need?",
    source="arXiv:2012.12877, Table 8",
    axes=("left out",),
    cells=cells,
    reference=("nothing",),
    published=Published("ImageNet accuracy of DeiT-B at 224 pixels, 300 epochs; its Table 8 is not repeated here", {}),
    differs=(
        "DeiT trains for 300 epochs on 1.28 million images, where strong augmentation keeps a model from learning "
        "them by heart. Runs of few steps have no time for that, and may be better without."
    ),
)
