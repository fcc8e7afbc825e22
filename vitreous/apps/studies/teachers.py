"""Table 3 of arXiv:2012.12877 (DeiT): no teacher, one that gives probabilities, one that gives a class."""

from __future__ import annotations

from vitreous.apps.studies.study import Cell, Published, Setting, Study, change
from vitreous.recipes.options import TrainOptions

#: of all students; alpha is the teacher's part of the loss
KINDS = {
    "no teacher": {"objective.alpha": "0.0"},
    "soft": {"objective.kind": "soft", "objective.temperature": "3.0"},
    "hard": {"objective.kind": "hard"},
}


def cells(setting: Setting) -> tuple[Cell, ...]:
    """A student by labels alone, and students of one convolutional teacher."""
    student = setting.options(TrainOptions(recipe="deit", model="ViT-B/16"))
    teacher = setting.options(TrainOptions(recipe="bit-imagenet", model="BiT-R50x1"))
    if setting.scale.name != "published":
        sizes = {"model.blocks": "1 1", "model.width": "16"}
        teacher = change(teacher, model="BiT-R50x1", optimizer="adamw", lr=1e-3, settings=sizes)
        student = change(student, optimizer="adamw", lr=1e-3)
    before = Cell(("teacher",), teacher)
    rows = [before]
    for kind, settings in KINDS.items():
        then = {"recipe": "distil", "settings": settings}
        rows.append(Cell((kind,), student, after={"objective.teacher": before}, then=then))
    return tuple(rows)


STUDY = Study(
    "teachers",
    "Kinds of distillation",
    question="Does a ViT learn more from a teacher's class or from its probabilities?",
    source="arXiv:2012.12877, section 5.2 and Table 3",
    axes=("distillation",),
    cells=cells,
    reference=("no teacher",),
    published=Published(
        "ImageNet accuracy of DeiT-B at 224 pixels without distillation token (Table 3)",
        {("no teacher",): "81.8 %", ("soft",): "81.8 %", ("hard",): "83.0 %"},
    ),
    differs=(
        "DeiT's teacher is a RegNetY-16GF of 82.9 %; here it is a small ResNet trained on the same images, whose "
        "accuracy is a row of the table. Students have no distillation token, and learn labels and teacher with one "
        "head; without a teacher its part of the loss is 0, so that all students have one recipe."
    ),
)
