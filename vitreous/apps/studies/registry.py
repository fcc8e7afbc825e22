"""Every study by name: one dict, complete at import."""

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
from vitreous.errors import UsageError, nearest

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        *transfer.STUDIES,
        *(vit_training.REGULARISATION, vit_training.IMAGES, *fewshot.STUDIES, vit_training.COMPUTE, law.STUDY),
        *(
            vit_design.POSITIONS,
            vit_design.POOLING,
            vit_design.SHAPE,
            vit_training.OPTIMIZERS,
            vit_design.AXIAL,
            vit_design.PATCHES,
        ),
        *(*learned.STUDIES, *speed.STUDIES),
        *(
            deit.TEACHERS,
            deit.AUGMENTATIONS,
            pretraining.MASKS,
            pretraining.MAE_DEPTH,
            pretraining.MAE_TARGET,
            pretraining.DINO,
            *registers.STUDIES,
        ),
        *(pretraining.LABELS, vit_training.RESOLUTION, fewer_tokens.DROPOUT, fewer_tokens.MERGING, generators.STUDY),
    )
}


def find(name: str) -> Study:
    """The study of that name. Raises UsageError with the nearest."""
    if name not in STUDIES:
        raise UsageError(f"unknown study {name}", nearest(name, STUDIES) or "`vitreous study` lists them")
    return STUDIES[name]
