"""Table 1 of arXiv:2111.06377: the depth of MAE's decoder, and what it has to restore."""

from __future__ import annotations

from vitreous.apps.studies.study import Cell, Chart, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions

DEPTHS = (1, 2, 4, 8)
TARGETS = {"pixels": "false", "normalised pixels": "true"}


def tuned(setting: Setting, place: str, settings: dict[str, str]) -> Cell:
    """A ViT fine-tuned after masked autoencoding with other settings, as the model from scratch is trained."""
    published = setting.scale.name == "published"
    learned = setting.options(TrainOptions(recipe="mae", model="ViT-L/16"), recipe="mae")
    options = setting.options(TrainOptions(recipe="mae-finetune" if published else None, model="ViT-L/16"))
    options = change(options, recipe="deit" if published else setting.recipe)
    before = Cell((), change(learned, settings=settings))
    own = {"recipe": "mae-finetune"} if published else {}
    return Cell((place,), options, after={"init": before}, then=own)


def depth_cells(setting: Setting) -> tuple[Cell, ...]:
    """Decoders of several depths."""
    return tuple(tuned(setting, f"{depth}", {"objective.decoder-depth": f"{depth}"}) for depth in DEPTHS)


def target_cells(setting: Setting) -> tuple[Cell, ...]:
    """Pixels as they are, and with mean 0 and deviation 1 in each patch."""
    return tuple(tuned(setting, name, {"objective.normalise": value}) for name, value in TARGETS.items())


DIFFERS = (
    "MAE pre-trains for 800 epochs on ImageNet and is fine-tuned by a recipe of its own. Here both parts have the same "
    "few steps, and fine-tuning is that of a model from scratch; the decoder is as wide as the paper's, which is wide "
    "beside a small encoder."
)
DEPTH = Study(
    "mae-decoder",
    "Depth of MAE's decoder",
    question="How deep has the decoder of a masked autoencoder to be?",
    source="arXiv:2111.06377, section 4.1 and Table 1a",
    axes=("decoder blocks",),
    cells=depth_cells,
    reference=("8",),
    published=Published(
        "ImageNet accuracy of ViT-L/16, fine-tuned after 800 epochs (Table 1a): with 8 blocks 84.9 %; depth matters "
        "for linear probes far more than for fine-tuning",
        {("8",): "84.9 %"},
    ),
    differs=DIFFERS,
    chart=Chart("decoder blocks"),
)
TARGET = Study(
    "mae-targets",
    "What MAE restores",
    question="Should a masked autoencoder restore pixels, or pixels that are normalised in each patch?",
    source="arXiv:2111.06377, section 4.1 and Table 1d",
    axes=("target",),
    cells=target_cells,
    reference=("pixels",),
    published=Published(
        "ImageNet accuracy of ViT-L/16, fine-tuned after 800 epochs (Table 1d)",
        {("pixels",): "84.9 %", ("normalised pixels",): "85.4 %"},
    ),
    differs=DIFFERS,
)
STUDIES = (DEPTH, TARGET)
