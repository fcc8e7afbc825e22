"""Studies of DeiT (arXiv:2012.12877): teachers for distillation, and augmentation."""

from __future__ import annotations

from vitreous.apps.studies.study import Published, Study, StudyCell, StudySetting, update_options
from vitreous.recipes.options import TrainOptions

# Table 3 of arXiv:2012.12877 (DeiT): no teacher, soft distillation, hard distillation.
#: settings of each student; alpha is the weight of the distillation loss
DISTILLATION_SETTINGS = {
    "no teacher": {"objective.alpha": "0.0"},
    "soft": {"objective.kind": "soft", "objective.temperature": "3.0"},
    "hard": {"objective.kind": "hard"},
}


def teacher_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return the cells: a convolutional teacher, a student trained on labels only, and students distilled from the
    teacher."""
    student = setting.options(TrainOptions(recipe="deit", model="ViT-B/16"))
    teacher = setting.options(TrainOptions(recipe="bit-imagenet", model="BiT-R50x1"))
    if setting.scale.name != "published":
        sizes = {"model.blocks": "1 1", "model.width": "16"}
        teacher = update_options(teacher, model="BiT-R50x1", optimizer="adamw", lr=1e-3, settings=sizes)
        student = update_options(student, optimizer="adamw", lr=1e-3)
    teacher_cell = StudyCell(("teacher",), teacher)
    cells = [teacher_cell]
    for label, settings in DISTILLATION_SETTINGS.items():
        parent_options = {"recipe": "distil", "settings": settings}
        cells.append(
            StudyCell((label,), student, parents={"objective.teacher": teacher_cell}, parent_overrides=parent_options)
        )
    return tuple(cells)


TEACHERS_STUDY = Study(
    "teachers",
    "Soft and hard distillation",
    question="Does hard distillation (the teacher's class) work better than soft distillation (its probabilities)?",
    source="arXiv:2012.12877, section 5.2 and Table 3",
    axes=("distillation",),
    cells=teacher_cells,
    reference=("no teacher",),
    published=Published(
        "ImageNet accuracy of DeiT-B at 224 pixels without distillation token (Table 3)",
        {("no teacher",): "81.8 %", ("soft",): "81.8 %", ("hard",): "83.0 %"},
    ),
    differs=(
        "DeiT's teacher is a RegNetY-16GF of 82.9 %; here it is a small ResNet trained on the same images, whose "
        "accuracy is a row of the table. Students have no distillation token: one head learns from both labels and "
        "teacher. `no teacher` uses the same recipe with a distillation weight of 0."
    ),
)


# Table 8 of arXiv:2012.12877 (DeiT): each augmentation and regulariser removed by itself.
#: removed augmentation -> the settings that disable it
DISABLED_AUGMENTATIONS = {
    "none": {},
    "RandAugment": {"views.rand-layers": "0"},
    "MixUp": {"views.mixup": "0"},
    "CutMix": {"views.cutmix": "0"},
    "erasing": {"views.erase": "0"},
    "stochastic depth": {"model.regularization.drop-path": "0"},
    "repeated augmentation": {"data.repeats": "1"},
}


def augmentation_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return the cells: DeiT's recipe, and DeiT's recipe without each augmentation or regulariser."""
    base = setting.options(TrainOptions(recipe="deit", model="ViT-B/16"), recipe="deit")
    if setting.scale.name != "published":
        image_size = min(setting.image_size, 64)
        base = update_options(base, image_size=image_size, lr=1e-3, ema=0.99)
    return tuple(
        StudyCell((name,), update_options(base, settings=overrides))
        for name, overrides in DISABLED_AUGMENTATIONS.items()
    )


AUGMENTATIONS_STUDY = Study(
    "augmentations",
    "DeiT augmentation ablation",
    question="Which of DeiT's augmentations and regularisers does a ViT need?",
    source="arXiv:2012.12877, Table 8",
    axes=("removed",),
    cells=augmentation_cells,
    reference=("none",),
    published=Published(
        "Table 8 has the ImageNet accuracy of DeiT-B at 224 pixels after 300 epochs; its values are not listed here", {}
    ),
    differs=(
        "DeiT trains for 300 epochs on 1.28 million images, where strong augmentation prevents overfitting. Short "
        "runs hardly overfit and may be better without strong augmentation."
    ),
)
