"""Studies of pre-training: masked patch prediction, DINO, MAE, and each with few labels."""

from __future__ import annotations

from vitreous.apps.studies.study import AxisValues, Chart, Published, Study, StudyCell, StudySetting, update_options
from vitreous.recipes.options import TrainOptions

# Figure 5 of arXiv:2111.06377: the share of patches that MAE hides, by fine-tuning what it has learned.
MASK_RATIOS = (25, 50, 75, 90)  # per cent


def mask_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """A ViT from scratch, and ViTs fine-tuned from masked autoencoders of every ratio."""
    published = setting.scale.name == "published"
    finetuning_options = setting.options(TrainOptions(recipe="mae-finetune" if published else None, model="ViT-L/16"))
    pretraining_options = setting.options(TrainOptions(recipe="mae", model="ViT-L/16"), recipe="mae")
    scratch = update_options(finetuning_options, recipe="deit" if published else setting.recipe)
    cells = [StudyCell(("none",), scratch)]
    for ratio in MASK_RATIOS:
        pretraining_cell = StudyCell(
            (), update_options(pretraining_options, settings={"objective.mask": f"{ratio / 100}"})
        )
        # fine-tuned as the model from scratch is trained: the weights to begin from are all that differs
        overrides = {"recipe": "mae-finetune"} if published else {}
        cells.append(StudyCell((f"{ratio} %",), scratch, after={"init": pretraining_cell}, then=overrides))
    return tuple(cells)


MASK_RATIO_STUDY = Study(
    "masks",
    "How many patches MAE hides",
    question="Which mask ratio gives a masked autoencoder the best features for fine-tuning?",
    source="arXiv:2111.06377, section 4.1 and Figure 5",
    axes=("hidden",),
    cells=mask_cells,
    reference=("none",),
    published=Published(
        "Figure 5 has curves: fine-tuned ViT-L/16 are similar from 40 % to 80 %, with 84.9 % at 75 % (Table 1); from "
        "scratch 82.5 %",
        {("75 %",): "84.9 %", ("none",): "82.5 %"},
    ),
    differs=(
        "MAE pre-trains for 800 epochs on ImageNet and is fine-tuned by a separate recipe. Here both parts have "
        "the same few steps, and fine-tuning is that of the model from scratch; images of few patches leave little "
        "to fill in."
    ),
    chart=Chart(),
)


# DINO (arXiv:2104.14294, appendix D): the teacher's momentum and temperature, by k-NN of the features.
TEACHER_MOMENTA = ("0.9", "0.99", "0.996")
TEACHER_TEMPERATURES = ("0.02", "0.04", "0.07")
DINO_DEFAULTS = ("0.99", "0.04")


def dino_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Momenta at the usual temperature, temperatures at the usual momentum."""
    base = setting.options(TrainOptions(recipe="dino", model="ViT-S/16"), recipe="dino")
    pairs = [(momentum, DINO_DEFAULTS[1]) for momentum in TEACHER_MOMENTA]
    pairs += [
        (DINO_DEFAULTS[0], temperature) for temperature in TEACHER_TEMPERATURES if temperature != DINO_DEFAULTS[1]
    ]
    cells = []
    for momentum, temperature in pairs:
        settings = {"schedules.momentum.start": momentum, "schedules.teacher-temperature.start": temperature}
        settings["schedules.teacher-temperature.end"] = temperature
        cells.append(StudyCell((momentum, temperature), update_options(base, settings=settings)))
    return tuple(cells)


DINO_TEACHER_STUDY = Study(
    "dino",
    "DINO's teacher",
    question="How fast may DINO's teacher follow its student, and how sharp should its output be?",
    source="arXiv:2104.14294, section 5 and appendix D",
    axes=("momentum", "temperature"),
    cells=dino_cells,
    reference=DINO_DEFAULTS,
    published=Published(
        "the recipe's momentum is 0.996 at 1024 images a step and its temperature 0.04; no number is repeated", {}
    ),
    differs=(
        "Momentum begins at the number of the table and ends at 1. Small runs have few steps, in which a teacher of "
        "a high momentum hardly moves; the figure is k-NN accuracy, or RankMe where images have one class."
    ),
)


# Table 1 of arXiv:2111.06377: the depth of MAE's decoder, and its target.
MAE_DEPTHS = (1, 2, 4, 8)
MAE_TARGETS = {"pixels": "false", "normalised pixels": "true"}


def mae_finetune_cell(setting: StudySetting, label: str, settings: dict[str, str]) -> StudyCell:
    """A ViT fine-tuned after masked autoencoding with other settings, as the model from scratch is trained."""
    published = setting.scale.name == "published"
    pretraining_options = setting.options(TrainOptions(recipe="mae", model="ViT-L/16"), recipe="mae")
    options = setting.options(TrainOptions(recipe="mae-finetune" if published else None, model="ViT-L/16"))
    options = update_options(options, recipe="deit" if published else setting.recipe)
    pretraining_cell = StudyCell((), update_options(pretraining_options, settings=settings))
    overrides = {"recipe": "mae-finetune"} if published else {}
    return StudyCell((label,), options, after={"init": pretraining_cell}, then=overrides)


def depth_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Decoders of several depths."""
    return tuple(
        mae_finetune_cell(setting, f"{depth}", {"objective.decoder-depth": f"{depth}"}) for depth in MAE_DEPTHS
    )


def target_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Pixels as they are, and with mean 0 and standard deviation 1 in each patch."""
    return tuple(
        mae_finetune_cell(setting, name, {"objective.normalise": value}) for name, value in MAE_TARGETS.items()
    )


MAE_DIFFERS = (
    "MAE pre-trains for 800 epochs on ImageNet and is fine-tuned by a separate recipe. Here both parts have the same "
    "few steps, and fine-tuning is that of a model from scratch; the decoder is as wide as the paper's, which is wide "
    "for a small encoder."
)
MAE_DECODER_STUDY = Study(
    "mae-decoder",
    "Depth of MAE's decoder",
    question="How deep should the decoder of a masked autoencoder be?",
    source="arXiv:2111.06377, section 4.1 and Table 1a",
    axes=("decoder blocks",),
    cells=depth_cells,
    reference=("8",),
    published=Published(
        "ImageNet accuracy of ViT-L/16, fine-tuned after 800 epochs (Table 1a): with 8 blocks 84.9 %; depth matters "
        "for linear probes far more than for fine-tuning",
        {("8",): "84.9 %"},
    ),
    differs=MAE_DIFFERS,
    chart=Chart("decoder blocks"),
)
MAE_TARGETS_STUDY = Study(
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
    differs=MAE_DIFFERS,
)


# Labels available: a ViT from scratch, and ViTs that learned without labels first, on shares of the labels.
LABEL_SHARES = (1, 10, 100)  # per cent of the images with labels
LABELS_PRETRAINING = {"supervised": "", "MAE": "mae", "DINO": "dino"}


def label_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Every way to begin, then training with labels on a share; what needs no labels learns from all images."""
    published = setting.scale.name == "published"
    scratch = setting.options(TrainOptions(recipe="deit", model="ViT-B/16"))
    scratch = scratch if published else update_options(scratch, recipe=setting.recipe)
    overrides = {"recipe": "mae-finetune"} if published else {}
    cells = []
    for name, recipe in LABELS_PRETRAINING.items():
        prerequisites = {}
        if recipe:
            prerequisites["init"] = StudyCell(
                (), setting.options(TrainOptions(recipe=recipe, model="ViT-B/16"), recipe=recipe)
            )
        cells += [
            StudyCell((name, f"{share} %"), scratch, share / 100, prerequisites, then=overrides)
            for share in LABEL_SHARES
        ]
    return tuple(cells)


def supervised_reference(axis_values: AxisValues) -> AxisValues:
    """The ViT from scratch on the share of a place."""
    return "supervised", axis_values[1]


LABELS_STUDY = Study(
    "labels",
    "How many labels there are",
    question="How much does self-supervised pre-training gain with few or many labels?",
    source="arXiv:2111.06377 and arXiv:2104.14294",
    axes=("first", "labelled"),
    cells=label_cells,
    reference=supervised_reference,
    published=Published("no table of these papers has these three beside each other on shares of ImageNet", {}),
    differs=(
        "Both parts of a row have as many steps as a row from scratch has in all, so that what was learned without "
        "labels costs twice the compute or more. The papers pre-train for hundreds of epochs."
    ),
    chart=Chart("labelled", "first", logarithmic=True),
)
