"""Every study by name: one dict, complete at import."""

from __future__ import annotations

from vitreous.errors import UsageError, nearest
from vitreous.studies import (
    augmentations,
    axial,
    compute,
    dino,
    dropout,
    images,
    labels,
    masks,
    optimizers,
    pooling,
    positions,
    shape,
    teachers,
)
from vitreous.studies.study import Study

STUDIES: dict[str, Study] = {
    module.STUDY.name: module.STUDY
    for module in (
        *(positions, pooling, shape, optimizers, images, compute, axial),
        *(masks, teachers, augmentations, dino, labels, dropout),
    )
}


def find(name: str) -> Study:
    """The study of that name. Raises UsageError with the nearest."""
    if name not in STUDIES:
        raise UsageError(f"unknown study {name}", nearest(name, STUDIES) or "`vitreous study` lists them")
    return STUDIES[name]
