"""The registry of all studies by name."""

from __future__ import annotations

from vitreous.apps.studies import (
    deit,
    fewer_tokens,
    fewshot,
    generators,
    law,
    learned,
    pretraining,
    registers,
    speed,
    transfer,
    vit_design,
    vit_training,
)
from vitreous.apps.studies.study import Study
from vitreous.errors import UsageError, suggest_nearest

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        *transfer.STUDIES,
        *(
            vit_training.REGULARISATION_STUDY,
            vit_training.IMAGES_STUDY,
            *fewshot.STUDIES,
            vit_training.COMPUTE_STUDY,
            law.SCALING_LAW_STUDY,
        ),
        *(
            vit_design.POSITIONS_STUDY,
            vit_design.POOLING_STUDY,
            vit_design.SHAPE_STUDY,
            vit_training.OPTIMIZERS_STUDY,
            vit_design.AXIAL_STUDY,
            vit_design.MASKED_PATCHES_STUDY,
        ),
        *(*learned.STUDIES, *speed.STUDIES),
        *(
            deit.TEACHERS_STUDY,
            deit.AUGMENTATIONS_STUDY,
            pretraining.MASK_RATIO_STUDY,
            pretraining.MAE_DECODER_STUDY,
            pretraining.MAE_TARGETS_STUDY,
            pretraining.DINO_TEACHER_STUDY,
            *registers.STUDIES,
        ),
        *(
            pretraining.LABELS_STUDY,
            vit_training.RESOLUTION_STUDY,
            fewer_tokens.PATCH_DROPOUT_STUDY,
            fewer_tokens.TOKEN_MERGING_STUDY,
            generators.DIT_STUDY,
        ),
    )
}


def get_study(name: str) -> Study:
    """Return a study by name. Raises UsageError with the nearest name if it is unknown."""
    if name not in STUDIES:
        raise UsageError(
            f"unknown study {name}", suggest_nearest(name, STUDIES) or "list the studies: `vitreous study`"
        )
    return STUDIES[name]
