"""Every study by name: one dict, complete at import."""

from __future__ import annotations

from vitreous.apps.studies import (
    augmentations,
    axial,
    compute,
    dino,
    dropout,
    fewshot,
    generators,
    images,
    labels,
    law,
    learned,
    mae,
    masks,
    merging,
    optimizers,
    patches,
    pooling,
    positions,
    registers,
    regularisation,
    resolution,
    shape,
    speed,
    teachers,
    transfer,
)
from vitreous.apps.studies.study import Study
from vitreous.errors import UsageError, nearest

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        *transfer.STUDIES,
        *(regularisation.STUDY, images.STUDY, *fewshot.STUDIES, compute.STUDY, law.STUDY),
        *(positions.STUDY, pooling.STUDY, shape.STUDY, optimizers.STUDY, axial.STUDY, patches.STUDY),
        *(*learned.STUDIES, *speed.STUDIES),
        *(teachers.STUDY, augmentations.STUDY, masks.STUDY, *mae.STUDIES, dino.STUDY, *registers.STUDIES),
        *(labels.STUDY, resolution.STUDY, dropout.STUDY, merging.STUDY, generators.STUDY),
    )
}


def find(name: str) -> Study:
    """The study of that name. Raises UsageError with the nearest."""
    if name not in STUDIES:
        raise UsageError(f"unknown study {name}", nearest(name, STUDIES) or "`vitreous study` lists them")
    return STUDIES[name]
