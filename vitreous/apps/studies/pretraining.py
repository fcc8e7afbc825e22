"""Studies of pre-training: MAE mask ratio, decoder and target, DINO teacher, and label efficiency."""

from __future__ import annotations

from vitreous.apps.studies.study import AxisValues, Chart, Published, Study, StudyCell, StudySetting, update_options
from vitreous.recipes.options import TrainOptions

# Figure 5 of arXiv:2111.06377: accuracy after fine-tuning by MAE mask ratio.
MASK_RATIOS = (25, 50, 75, 90)  # per cent


def list_mask_ratio_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return the cells: a ViT trained from scratch, and ViTs fine-tuned from masked autoencoders with each mask
    ratio."""
    published = setting.scale.name == "published"
    finetuning_options = setting.options(TrainOptions(recipe="mae-finetune" if published else None, model="ViT-L/16"))
    pretraining_options = setting.options(TrainOptions(recipe="mae", model="ViT-L/16"), recipe="mae")
    scratch_options = update_options(finetuning_options, recipe="deit" if published else setting.recipe)
    cells = [StudyCell(("none",), scratch_options)]
    for ratio in MASK_RATIOS:
        pretraining_cell = StudyCell(
            (), update_options(pretraining_options, settings={"objective.mask": f"{ratio / 100}"})
        )
        # fine-tuned with the settings of the model from scratch: only the initial weights differ
        overrides = {"recipe": "mae-finetune"} if published else {}
        cells.append(
            StudyCell((f"{ratio} %",), scratch_options, parents={"init": pretraining_cell}, parent_overrides=overrides)
        )
    return tuple(cells)


MASK_RATIO_STUDY = Study(
    "masks",
    "MAE mask ratio",
    question="Which mask ratio gives a masked autoencoder the best features for fine-tuning?",
    source="arXiv:2111.06377, section 4.1 and Figure 5",
    axes=("mask ratio",),
    cells=list_mask_ratio_cells,
    reference=("none",),
    published=Published(
        "ImageNet accuracy of fine-tuned ViT-L/16: similar from 40 % to 80 % (Figure 5, curves), 84.9 % at 75 % "
        "(Table 1), 82.5 % from scratch",
        {("75 %",): "84.9 %", ("none",): "82.5 %"},
    ),
    differs=(
        "MAE pre-trains for 800 epochs on ImageNet and fine-tunes with a separate recipe. Here pre-training and "
        "fine-tuning have the same small number of steps, and fine-tuning uses the recipe of the model from scratch. "
        "Images with few patches make reconstruction an easy task."
    ),
    chart=Chart(),
)


# DINO (arXiv:2104.14294, appendix D): the teacher's momentum and temperature, by k-NN accuracy.
TEACHER_MOMENTA = ("0.9", "0.99", "0.996")
TEACHER_TEMPERATURES = ("0.02", "0.04", "0.07")
DINO_DEFAULTS = ("0.99", "0.04")


def dino_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return the cells: DINO with each teacher momentum at the default temperature, and with each temperature at the
    default momentum."""
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
    "DINO teacher momentum and temperature",
    question="Which momentum and temperature of DINO's teacher give the best features?",
    source="arXiv:2104.14294, section 5 and appendix D",
    axes=("momentum", "temperature"),
    cells=dino_cells,
    reference=DINO_DEFAULTS,
    published=Published("the paper's recipe uses momentum 0.996 at batch size 1024, and temperature 0.04", {}),
    differs=(
        "Momentum increases from the value in the table to 1. Small runs have few steps, in which a teacher with high "
        "momentum hardly changes. The metric is k-NN accuracy, or RankMe for images of one class."
    ),
)


# Table 1 of arXiv:2111.06377: the depth of MAE's decoder, and its reconstruction target.
MAE_DEPTHS = (1, 2, 4, 8)
MAE_TARGETS = {"pixels": "false", "normalised pixels": "true"}


def mae_finetune_cell(setting: StudySetting, label: str, settings: dict[str, str]) -> StudyCell:
    """Return the cell of a ViT fine-tuned from a masked autoencoder with `settings`. Fine-tuning uses the recipe of a
    model from scratch."""
    published = setting.scale.name == "published"
    pretraining_options = setting.options(TrainOptions(recipe="mae", model="ViT-L/16"), recipe="mae")
    options = setting.options(TrainOptions(recipe="mae-finetune" if published else None, model="ViT-L/16"))
    options = update_options(options, recipe="deit" if published else setting.recipe)
    pretraining_cell = StudyCell((), update_options(pretraining_options, settings=settings))
    overrides = {"recipe": "mae-finetune"} if published else {}
    return StudyCell((label,), options, parents={"init": pretraining_cell}, parent_overrides=overrides)


def depth_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per depth of MAE's decoder."""
    return tuple(
        mae_finetune_cell(setting, f"{depth}", {"objective.decoder-depth": f"{depth}"}) for depth in MAE_DEPTHS
    )


def target_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per reconstruction target of MAE: raw pixels, or per-patch normalised pixels."""
    return tuple(
        mae_finetune_cell(setting, name, {"objective.normalise": value}) for name, value in MAE_TARGETS.items()
    )


MAE_DIFFERS = (
    "MAE pre-trains for 800 epochs on ImageNet and fine-tunes with a separate recipe. Here pre-training and "
    "fine-tuning have the same small number of steps, and fine-tuning uses the recipe of a model from scratch. The "
    "decoder has the paper's width, which is large for a small encoder."
)
MAE_DECODER_STUDY = Study(
    "mae-decoder",
    "MAE decoder depth",
    question="How deep should the decoder of a masked autoencoder be?",
    source="arXiv:2111.06377, section 4.1 and Table 1a",
    axes=("decoder blocks",),
    cells=depth_cells,
    reference=("8",),
    published=Published(
        "ImageNet accuracy of ViT-L/16, fine-tuned after 800 epochs of pre-training (Table 1a): 84.9 % with 8 blocks; "
        "depth matters much more for linear probes than for fine-tuning",
        {("8",): "84.9 %"},
    ),
    differs=MAE_DIFFERS,
    chart=Chart("decoder blocks"),
)
MAE_TARGETS_STUDY = Study(
    "mae-targets",
    "MAE reconstruction target",
    question="Should a masked autoencoder reconstruct raw pixels or per-patch normalised pixels?",
    source="arXiv:2111.06377, section 4.1 and Table 1d",
    axes=("target",),
    cells=target_cells,
    reference=("pixels",),
    published=Published(
        "ImageNet accuracy of ViT-L/16, fine-tuned after 800 epochs of pre-training (Table 1d)",
        {("pixels",): "84.9 %", ("normalised pixels",): "85.4 %"},
    ),
    differs=MAE_DIFFERS,
)


# Label efficiency: a ViT from scratch, and self-supervised ViTs, trained on shares of the labels.
LABEL_SHARES = (1, 10, 100)  # per cent of the images with labels
LABELS_PRETRAINING = {"supervised": "", "MAE": "mae", "DINO": "dino"}


def label_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per pre-training method and fraction of the labels. Pre-training uses all images, fine-tuning
    only that fraction."""
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
            StudyCell((name, f"{share} %"), scratch, share / 100, prerequisites, parent_overrides=overrides)
            for share in LABEL_SHARES
        ]
    return tuple(cells)


def supervised_reference(axis_values: AxisValues) -> AxisValues:
    """Return the reference cell: the ViT from scratch with the same fraction of the labels."""
    return "supervised", axis_values[1]


LABELS_STUDY = Study(
    "labels",
    "Label efficiency of self-supervised pre-training",
    question="How much does self-supervised pre-training improve accuracy with few and with many labels?",
    source="arXiv:2111.06377 and arXiv:2104.14294",
    axes=("pre-training", "labelled images"),
    cells=label_cells,
    reference=supervised_reference,
    published=Published("none: neither paper compares all three on shares of ImageNet", {}),
    differs=(
        "Pre-training and fine-tuning each have as many steps as the whole run from scratch, so rows with "
        "pre-training use at least twice the compute. The papers pre-train for hundreds of epochs."
    ),
    chart=Chart("labelled images", "pre-training", logarithmic=True),
)
