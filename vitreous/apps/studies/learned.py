"""Figures 6, 7, 10, 11 and 14 of arXiv:2010.11929: filters, positions, attention distance and rollout of trained
models, over many images and runs."""

from __future__ import annotations

from vitreous.apps.studies.measures import (
    measure_attention_distance,
    measure_filter_variance,
    measure_position_contrast,
    measure_rollout_spread,
)
from vitreous.apps.studies.study import (
    AxisValues,
    Chart,
    Measure,
    Published,
    Study,
    StudyCell,
    StudySetting,
    update_options,
)
from vitreous.apps.studies.vit_design import POOLING_SETTINGS
from vitreous.recipes.options import TrainOptions

#: learning rate, weight decay
POSITION_HYPERPARAMETERS = (("3e-4", "0.01"), ("1e-3", "0.01"), ("1e-3", "0.1"))


def make_base_options(setting: StudySetting, model: str) -> TrainOptions:
    """The scale's options, or the paper's of a model."""
    return setting.options(TrainOptions(recipe="vit-jft", model=model))


def filter_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """A ViT on patches of two sizes."""
    if setting.scale.name == "published":
        return tuple(StudyCell((f"{patch}",), make_base_options(setting, f"ViT-L/{patch}")) for patch in (32, 16))
    base, patch = make_base_options(setting, ""), setting.patch
    return tuple(
        StudyCell((f"{patch_size}",), update_options(base, model=setting.vit(patch=patch_size)))
        for patch_size in (2 * patch, patch)
    )


def position_similarity_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Learned positions after training at other rates and decays."""
    base = update_options(
        make_base_options(setting, "ViT-L/16"),
        settings={"model.positions.kind": "learned", "model.positions.at": "input"},
    )
    return tuple(
        StudyCell(axis_values, update_options(base, lr=float(axis_values[0]), weight_decay=float(axis_values[1])))
        for axis_values in POSITION_HYPERPARAMETERS
    )


def distance_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """A ViT, and a hybrid behind convolutions."""
    if setting.scale.name == "published":
        names = {"ViT": "ViT-L/16", "hybrid": "R50+ViT-L/16"}
        return tuple(StudyCell((label,), make_base_options(setting, name)) for label, name in names.items())
    base, scale = make_base_options(setting, ""), setting.scale
    stem = update_options(
        base, model=f"Conv+ViT-{scale.width}x{scale.depth}/8", image_size=max(32, min(setting.side, 64))
    )
    return StudyCell(("ViT",), base), StudyCell(("hybrid",), stem)


def rollout_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """A ViT with a class token, and one with mean pooling."""
    base = make_base_options(setting, "ViT-L/16")
    return tuple(
        StudyCell((pool,), update_options(base, settings=settings)) for pool, settings in POOLING_SETTINGS.items()
    )


def first_component_reference(axis_values: AxisValues) -> AxisValues:
    """The first component of the filters of a place."""
    return axis_values[0], "1"


def first_block_mean_reference(axis_values: AxisValues) -> AxisValues:
    """The mean head of the first block."""
    return axis_values[0], "mean", "1"


def first_block_reference(axis_values: AxisValues) -> AxisValues:
    """The first block of the model of a place."""
    return axis_values[0], "1"


INSPECTION_DIFFERS = (
    "The paper shows models that learned from JFT-300M, as figures; here a metric of each figure is "
    "measured over runs of minutes and over up to 128 validation images, and small images have few patches. "
)
FILTERS_STUDY = Study(
    "filters",
    "Filters of the patch embedding",
    question="How few components do the filters of the first layer have?",
    source="arXiv:2010.11929, section 4.5 and Figure 7 left",
    axes=("patch", "components"),
    cells=filter_cells,
    reference=first_component_reference,
    published=Published(
        "Figure 7 left shows the first 28 components of ViT-L/32, without the variance that they explain", {}
    ),
    differs=INSPECTION_DIFFERS
    + "A patch of few pixels has no more components than numbers. The reference is the first component alone.",
    chart=Chart("components", "patch", logarithmic=True),
    measure=Measure("variance_share", measure_filter_variance),
)
POSITION_SIMILARITY_STUDY = Study(
    "position-similarity",
    "What position embeddings learn",
    question="Do learned positions encode rows and columns at all learning rates and weight decays?",
    source="arXiv:2010.11929, section 4.5, Figures 7 centre and 10",
    axes=("learning rate", "weight decay"),
    cells=position_similarity_cells,
    reference=POSITION_HYPERPARAMETERS[1],
    published=Published("Figure 10 shows the similarities of three trainings of ViT-L/16, without a number", {}),
    differs=INSPECTION_DIFFERS
    + "The metric is the mean cosine similarity of two positions in one row or column, minus that of others: 0 for "
    "positions that do not encode the grid.",
    measure=Measure("position_contrast", measure_position_contrast),
)
ATTENTION_DISTANCE_STUDY = Study(
    "attention-distance",
    "Attention distance by depth",
    question="How far do heads look in each block, and do the first ones of a hybrid look as near as those of a ViT?",
    source="arXiv:2010.11929, section 4.5, D.7, Figures 7 right and 11",
    axes=("model", "heads", "block"),
    cells=distance_cells,
    reference=first_block_mean_reference,
    published=Published(
        "Figures 7 and 11 have dots and no table: of ViT-L/16 some heads look near in the first blocks and all far in "
        "the last ones, of R50+ViT-L/16 fewer look near; a head with uniform attention has 116 pixels at 224",
        {},
    ),
    differs=INSPECTION_DIFFERS
    + "The hybrid has a stem of convolutions for a ResNet and larger images, so that distances in pixels are not "
    "comparable between models: compare rows of one model with its first block.",
    chart=Chart("block", ("model", "heads")),
    measure=Measure("attention_distance", measure_attention_distance),
)
ROLLOUT_STUDY = Study(
    "rollout",
    "Attention rollout by depth",
    question="On how few patches does the prediction depend, by attention rollout?",
    source="arXiv:2010.11929, section 4.5, D.8, Figures 6 and 14; arXiv:2005.00928",
    axes=("pooling", "block"),
    cells=rollout_cells,
    reference=first_block_reference,
    published=Published("Figures 6 and 14 show the rollout of single images of ViT-L/16, without a number", {}),
    differs=INSPECTION_DIFFERS
    + "The metric is the fewest patches that hold half of the rollout from the output token, as a share of "
    "all: about a half for uniform attention. The figures show a few validation images.",
    chart=Chart("block", "pooling"),
    measure=Measure("rollout_spread", measure_rollout_spread, "lower"),
)
STUDIES = (FILTERS_STUDY, POSITION_SIMILARITY_STUDY, ATTENTION_DISTANCE_STUDY, ROLLOUT_STUDY)
