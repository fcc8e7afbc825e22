"""Tables 2, 5 and 9 of arXiv:2010.11929: models pre-trained on one data set, fine-tuned on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vitreous.apps.studies.study import (
    AxisValues,
    Conclusion,
    OtherDataset,
    Published,
    Study,
    StudyCell,
    StudySetting,
    update_options,
)
from vitreous.recipes.options import TrainOptions

#: sets of the paper, by group of VTAB where they are of it, and the recipe that fine-tunes on them
PAPER_RECIPES = {
    "ImageNet": "imagenet",
    "CIFAR-10": "cifar",
    "CIFAR-100": "cifar",
    "Pets": "pets",
    "Flowers": "flowers",
}
TRANSFER_MODELS = ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14")
SCRATCH_LABEL = "from scratch"
#: after JFT-300M at 384 pixels (Table 5), in the order of MODELS
TABLE_5 = {
    "CIFAR-10": "99.00 98.61 99.38 99.19 99.50",
    "CIFAR-100": "91.87 90.49 94.04 92.52 94.55",
    "ImageNet": "84.15 80.73 87.12 84.37 88.04",
    "Flowers": "99.56 99.27 99.56 99.45 99.68",
    "Pets": "95.80 93.40 97.11 95.83 97.56",
}
TRANSFER_PUBLISHED = {
    (model, name): f"{value} %"
    for name, values in TABLE_5.items()
    for model, value in zip(TRANSFER_MODELS, values.split(), strict=True)
}
#: means of the groups of Table 9, of its printed numbers
GROUP_MEANS = {"ViT-H/14": ("86.7", "87.0", "65.0"), "ViT-L/16": ("85.6", "86.7", "63.0")}


def pretraining_cells(setting: StudySetting) -> dict[str, StudyCell]:
    """Pre-training cells on the study's data, by model name."""
    if setting.scale.name == "published":
        return {
            name: StudyCell((), setting.options(TrainOptions(recipe="vit-jft", model=name))) for name in TRANSFER_MODELS
        }
    base = setting.options(TrainOptions())
    half_width = max(32, setting.scale.width // 2 // 32 * 32)
    sizes = {"model.blocks": "1 1", "model.width": "16"}
    resnet = update_options(base, model="BiT-R50x1", optimizer="adamw", lr=1e-3, settings=sizes)
    return {
        "small ViT": StudyCell((), update_options(base, model=setting.vit(half_width))),
        "ViT": StudyCell((), base),
        "ResNet": StudyCell((), resnet),
    }


def finetune_cell(setting: StudySetting, dataset: OtherDataset, pretraining_cell: StudyCell) -> StudyCell:
    """What is fine-tuned on another set, from a run or, where there is none, drawn anew."""
    options = update_options(pretraining_cell.options, recipe=setting.recipe)
    if setting.scale.name == "published":
        name = PAPER_RECIPES.get(dataset.name, "vtab")
        options = setting.options(TrainOptions(recipe=f"finetune-{name}", model=pretraining_cell.options.model))
    return StudyCell(
        (), options, after={"init": pretraining_cell}, then={"model": None}, data=dataset.source
    )  # that of the weights


def resolve_other_datasets(setting: StudySetting) -> tuple[OtherDataset, ...]:
    """The sets that are named, or those that stand for them where costs are counted."""
    names = PAPER_RECIPES if setting.scale.name == "published" else ("5-9", "5-9 turned")
    return setting.others or tuple(OtherDataset(name, name) for name in names)


def transfer_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Every model fine-tuned on every set, and one trained on it from scratch."""
    pretrained_cells = pretraining_cells(setting)
    cells = []
    for dataset in resolve_other_datasets(setting):
        scratch = (
            StudyCell((), next(iter(pretrained_cells.values())).options)
            if setting.scale.name == "published"
            else pretrained_cells["ViT"]
        )
        cells.append(scratch_cell(setting, dataset, scratch))
        cells += [
            with_axis_values(finetune_cell(setting, dataset, pretraining_cell), model, dataset.name)
            for model, pretraining_cell in pretrained_cells.items()
        ]
    return tuple(cells)


def scratch_cell(setting: StudySetting, dataset: OtherDataset, template_cell: StudyCell) -> StudyCell:
    """The scale's ViT trained on another set alone."""
    recipe = "vit-imagenet" if setting.scale.name == "published" else setting.recipe
    options = setting.options(TrainOptions(recipe=recipe, model=template_cell.options.model), recipe=recipe)
    return StudyCell((SCRATCH_LABEL, dataset.name), options, data=dataset.source)


def with_axis_values(cell: StudyCell, *values: str) -> StudyCell:
    """A cell at a place."""
    return replace(cell, axis_values=values)


def scratch_reference(axis_values: AxisValues) -> AxisValues:
    """The model from scratch on the set of a place."""
    return SCRATCH_LABEL, *axis_values[1:]


def group_transfer_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """The cells of `transfer` with the group of each set; the sets of a group that stands for others are its own."""
    placeholder_datasets = tuple(
        OtherDataset(f"{group} set", group, group) for group in ("natural", "specialized", "structured")
    )
    datasets = setting.others or placeholder_datasets
    group_of = {dataset.name: dataset.group for dataset in datasets}
    cells = transfer_cells(replace(setting, others=datasets))
    return tuple(
        with_axis_values(cell, cell.axis_values[0], group_of[cell.axis_values[1]], cell.axis_values[1])
        for cell in cells
    )


def conclude_groups(rows: Sequence[Any]) -> Conclusion:
    """The mean over the sets of each group, by model, over seeds."""
    from vitreous.apps.studies.statistics import estimate_mean

    by_group: dict[AxisValues, dict[int, list[float]]] = {}
    for row in rows:
        for key in (row.axis_values[:2], (row.axis_values[0], "all groups")):
            for seed, value in row.values.items():
                by_group.setdefault(key, {}).setdefault(seed, []).append(value)
    lines = []
    for (model, group), seeds in by_group.items():
        mean = estimate_mean([sum(values) / len(values) for values in seeds.values()])
        interval_text = "–" if mean.interval is None else " to ".join(f"{100 * end:.1f} %" for end in mean.interval)
        count = len(next(iter(seeds.values())))
        lines.append((model, group, f"{count}", f"{100 * mean.mean:.2f} %", interval_text))
    sentence = (
        "A group's metric is the mean over its datasets, and `all groups` is the mean over all datasets, as in VTAB."
    )
    return Conclusion("By group", (sentence,), ("model", "group", "sets", "mean", "95 % interval"), tuple(lines))


TRANSFER_STUDY = Study(
    "transfer",
    "Transfer of several models to several data sets",
    question="Which pre-trained model is better on other datasets, with which confidence over runs?",
    source="arXiv:2010.11929, Tables 2 and 5",
    axes=("model", "data set"),
    cells=transfer_cells,
    reference=scratch_reference,
    published=Published(
        "accuracy after pre-training on JFT-300M, fine-tuned at 384 pixels (Table 5); Table 2 has mean and std "
        "of three runs, of ViT-L/16 on CIFAR-10 99.42 ± 0.03 %, on CIFAR-100 93.90 ± 0.05 %, on Pets 97.32 ± 0.11 %, "
        "on Flowers 99.74 ± 0.00 %",
        TRANSFER_PUBLISHED,
    ),
    differs=(
        "The paper pre-trains on 303 million images with 18,291 classes, and its seeds are those of fine-tuning alone. "
        "Here the pre-training data are few and resemble the other sets, each seed has a separate pre-training, "
        "and the model from scratch, which the paper's table does not have, is the reference."
    ),
    others="sets",
)

GROUP_TRANSFER_STUDY = Study(
    "groups",
    "Transfer by group of data sets",
    question="On which datasets does pre-training help most?",
    source="arXiv:2010.11929, Figure 2 and Table 9; arXiv:1910.04867",
    axes=("model", "group", "data set"),
    cells=group_transfer_cells,
    reference=scratch_reference,
    published=Published(
        "means over the groups of VTAB-1k after JFT-300M, of Table 9's numbers (natural, specialized, structured): "
        + "; ".join(f"{model} {', '.join(values)} %" for model, values in GROUP_MEANS.items()),
        {},
    ),
    differs=(
        "VTAB has 1,000 training images for each of 19 sets. Here all training images of each set named are learned "
        "from, whatever their number: `vitreous evaluate --protocol vtab` has VTAB's own rule."
    ),
    conclude=conclude_groups,
    others="groups",
)

STUDIES = (TRANSFER_STUDY, GROUP_TRANSFER_STUDY)
