"""Studies of the features that a ViT learns (arXiv:2010.11929, Figures 6, 7, 10, 11 and 14): filters, position
embeddings, attention distance and rollout of trained models, as metrics over many images and runs."""

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

#: (learning rate, weight decay) of each cell
POSITION_HYPERPARAMETERS = (("3e-4", "0.01"), ("1e-3", "0.01"), ("1e-3", "0.1"))


def make_base_options(setting: StudySetting, model: str) -> TrainOptions:
    """Return the training options of the scale; at the published scale, the paper's for `model`."""
    return setting.options(TrainOptions(recipe="vit-jft", model=model))


def filter_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return the cells: a ViT with two patch sizes."""
    if setting.scale.name == "published":
        return tuple(StudyCell((f"{patch}",), make_base_options(setting, f"ViT-L/{patch}")) for patch in (32, 16))
    base, patch = make_base_options(setting, ""), setting.patch
    return tuple(
        StudyCell((f"{patch_size}",), update_options(base, model=setting.format_vit_name(patch=patch_size)))
        for patch_size in (2 * patch, patch)
    )


def position_similarity_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return the cells: a ViT with learned position embeddings for several learning rates and weight decays."""
    base = update_options(
        make_base_options(setting, "ViT-L/16"),
        settings={"model.positions.kind": "learned", "model.positions.at": "input"},
    )
    return tuple(
        StudyCell(axis_values, update_options(base, lr=float(axis_values[0]), weight_decay=float(axis_values[1])))
        for axis_values in POSITION_HYPERPARAMETERS
    )


def distance_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return the cells: a ViT, and a hybrid with a convolutional stem."""
    if setting.scale.name == "published":
        names = {"ViT": "ViT-L/16", "hybrid": "R50+ViT-L/16"}
        return tuple(StudyCell((label,), make_base_options(setting, name)) for label, name in names.items())
    base, scale = make_base_options(setting, ""), setting.scale
    stem = update_options(
        base, model=f"Conv+ViT-{scale.width}x{scale.depth}/8", image_size=max(32, min(setting.image_size, 64))
    )
    return StudyCell(("ViT",), base), StudyCell(("hybrid",), stem)


def rollout_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return the cells: a ViT with a class token, and a ViT with mean pooling."""
    base = make_base_options(setting, "ViT-L/16")
    return tuple(
        StudyCell((pool,), update_options(base, settings=settings)) for pool, settings in POOLING_SETTINGS.items()
    )


def first_component_reference(axis_values: AxisValues) -> AxisValues:
    """Return the reference cell: the first principal component alone, at the same patch size."""
    return axis_values[0], "1"


def first_block_mean_reference(axis_values: AxisValues) -> AxisValues:
    """Return the reference cell: the mean over heads in the first block of the same model."""
    return axis_values[0], "mean", "1"


def first_block_reference(axis_values: AxisValues) -> AxisValues:
    """Return the reference cell: the first block of the same model."""
    return axis_values[0], "1"


INSPECTION_DIFFERS = (
    "The paper shows figures of models trained on JFT-300M. Here a metric is computed for each figure, over short "
    "runs and up to 128 validation images, and small images have few patches. "
)
FILTERS_STUDY = Study(
    "filters",
    "Patch embedding filters",
    question="How many principal components describe the filters of the patch embedding?",
    source="arXiv:2010.11929, section 4.5 and Figure 7 left",
    axes=("patch", "components"),
    cells=filter_cells,
    reference=first_component_reference,
    published=Published(
        "Figure 7 left shows the first 28 components of ViT-L/32, without their explained variance", {}
    ),
    differs=INSPECTION_DIFFERS
    + "A small patch has at most as many components as values. The reference is the first component alone.",
    chart=Chart("components", "patch", logarithmic=True),
    run_measure=Measure("variance_share", measure_filter_variance),
)
POSITION_SIMILARITY_STUDY = Study(
    "position-similarity",
    "Position embedding similarity",
    question="Do learned positions encode rows and columns at all learning rates and weight decays?",
    source="arXiv:2010.11929, section 4.5, Figures 7 centre and 10",
    axes=("learning rate", "weight decay"),
    cells=position_similarity_cells,
    reference=POSITION_HYPERPARAMETERS[1],
    published=Published("Figure 10 shows similarities for three trainings of ViT-L/16, without values", {}),
    differs=INSPECTION_DIFFERS
    + "The metric is the mean cosine similarity of two positions in the same row or column, minus that of all other "
    "pairs; it is 0 if positions do not encode the grid.",
    run_measure=Measure("position_contrast", measure_position_contrast),
)
ATTENTION_DISTANCE_STUDY = Study(
    "attention-distance",
    "Attention distance by depth",
    question="How does attention distance change with depth, and are early heads of a hybrid as local as those of a "
    "ViT?",
    source="arXiv:2010.11929, section 4.5, D.7, Figures 7 right and 11",
    axes=("model", "heads", "block"),
    cells=distance_cells,
    reference=first_block_mean_reference,
    published=Published(
        "Figures 7 and 11 are scatter plots. In ViT-L/16, some heads of the first blocks are local and all heads of "
        "the last blocks are global; R50+ViT-L/16 has fewer local heads. Uniform attention has a distance of 116 "
        "pixels at 224",
        {},
    ),
    differs=INSPECTION_DIFFERS
    + "The hybrid has a convolutional stem instead of a ResNet, and larger images. Distances in pixels are therefore "
    "not comparable between models: compare each model with its own first block.",
    chart=Chart("block", ("model", "heads")),
    run_measure=Measure("attention_distance", measure_attention_distance),
)
ROLLOUT_STUDY = Study(
    "rollout",
    "Attention rollout by depth",
    question="How concentrated is attention rollout: on how few patches does the prediction depend?",
    source="arXiv:2010.11929, section 4.5, D.8, Figures 6 and 14; arXiv:2005.00928",
    axes=("pooling", "block"),
    cells=rollout_cells,
    reference=first_block_reference,
    published=Published("Figures 6 and 14 show the rollout of ViT-L/16 on single images, without values", {}),
    differs=INSPECTION_DIFFERS
    + "The metric is the smallest share of patches that hold half of the rollout from the output token; it is about "
    "50 % for uniform attention. The figures show a few validation images.",
    chart=Chart("block", "pooling"),
    run_measure=Measure("rollout_spread", measure_rollout_spread, "lower"),
)
STUDIES = (FILTERS_STUDY, POSITION_SIMILARITY_STUDY, ATTENTION_DISTANCE_STUDY, ROLLOUT_STUDY)
