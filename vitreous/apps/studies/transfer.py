"""Studies of transfer: models pre-trained on one dataset and fine-tuned on others (arXiv:2010.11929, Tables 2, 5 and
9)."""

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

#: the paper's datasets -> the recipes `finetune-NAME` for them
PAPER_RECIPES = {
    "ImageNet": "imagenet",
    "CIFAR-10": "cifar",
    "CIFAR-100": "cifar",
    "Pets": "pets",
    "Flowers": "flowers",
}
TRANSFER_MODELS = ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14")
SCRATCH_LABEL = "from scratch"
#: accuracy after pre-training on JFT-300M and fine-tuning at 384 pixels (Table 5), in the order of TRANSFER_MODELS
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
#: group means, computed from the printed values of Table 9
GROUP_MEANS = {"ViT-H/14": ("86.7", "87.0", "65.0"), "ViT-L/16": ("85.6", "86.7", "63.0")}


def pretraining_cells(setting: StudySetting) -> dict[str, StudyCell]:
    """Return the cell of each pre-trained model by name. The models are pre-trained on the dataset of the study."""
    if setting.scale.name == "published":
        return {
            name: StudyCell((), setting.options(TrainOptions(recipe="vit-jft", model=name))) for name in TRANSFER_MODELS
        }
    base = setting.options(TrainOptions())
    half_width = max(32, setting.scale.width // 2 // 32 * 32)
    sizes = {"model.blocks": "1 1", "model.width": "16"}
    resnet = update_options(base, model="BiT-R50x1", optimizer="adamw", lr=1e-3, settings=sizes)
    return {
        "small ViT": StudyCell((), update_options(base, model=setting.format_vit_name(half_width))),
        "ViT": StudyCell((), base),
        "ResNet": StudyCell((), resnet),
    }


def finetune_cell(setting: StudySetting, dataset: OtherDataset, pretraining_cell: StudyCell) -> StudyCell:
    """Return the cell of a model fine-tuned on a target dataset from a pre-training cell."""
    options = update_options(pretraining_cell.options, recipe=setting.recipe)
    if setting.scale.name == "published":
        name = PAPER_RECIPES.get(dataset.name, "vtab")
        options = setting.options(TrainOptions(recipe=f"finetune-{name}", model=pretraining_cell.options.model))
    # model None: the model of the initial weights
    return StudyCell(
        (), options, parents={"init": pretraining_cell}, parent_overrides={"model": None}, data=dataset.source
    )


def resolve_other_datasets(setting: StudySetting) -> tuple[OtherDataset, ...]:
    """Return the target datasets of a setting or, for cost estimates, placeholders."""
    names = PAPER_RECIPES if setting.scale.name == "published" else ("5-9", "5-9 turned")
    return setting.other_datasets or tuple(OtherDataset(name, name) for name in names)


def transfer_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per model and target dataset, including a model trained from scratch."""
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
    """Return the cell of the scale's ViT trained from scratch on a target dataset."""
    recipe = "vit-imagenet" if setting.scale.name == "published" else setting.recipe
    options = setting.options(TrainOptions(recipe=recipe, model=template_cell.options.model), recipe=recipe)
    return StudyCell((SCRATCH_LABEL, dataset.name), options, data=dataset.source)


def with_axis_values(cell: StudyCell, *values: str) -> StudyCell:
    """Return a copy of a cell at another position of the table."""
    return replace(cell, axis_values=values)


def scratch_reference(axis_values: AxisValues) -> AxisValues:
    """Return the reference cell: the model from scratch on the same dataset."""
    return SCRATCH_LABEL, *axis_values[1:]


def group_transfer_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return the cells of `transfer` with the group of each target dataset; without target datasets, with placeholders
    for the groups of VTAB."""
    placeholder_datasets = tuple(
        OtherDataset(f"{group} set", group, group) for group in ("natural", "specialized", "structured")
    )
    datasets = setting.other_datasets or placeholder_datasets
    group_of = {dataset.name: dataset.group for dataset in datasets}
    cells = transfer_cells(replace(setting, other_datasets=datasets))
    return tuple(
        with_axis_values(cell, cell.axis_values[0], group_of[cell.axis_values[1]], cell.axis_values[1])
        for cell in cells
    )


def conclude_groups(rows: Sequence[Any]) -> Conclusion:
    """Average each model over the target datasets of each group, with intervals over seeds."""
    from vitreous.apps.studies.statistics import estimate_mean

    values_by_group: dict[AxisValues, dict[int, list[float]]] = {}
    for row in rows:
        for key in (row.axis_values[:2], (row.axis_values[0], "all groups")):
            for seed, value in row.values.items():
                values_by_group.setdefault(key, {}).setdefault(seed, []).append(value)
    lines = []
    for (model, group), seeds in values_by_group.items():
        mean = estimate_mean([sum(values) / len(values) for values in seeds.values()])
        interval_text = "–" if mean.interval is None else " to ".join(f"{100 * end:.1f} %" for end in mean.interval)
        count = len(next(iter(seeds.values())))
        lines.append((model, group, f"{count}", f"{100 * mean.mean:.2f} %", interval_text))
    sentence = (
        "A group's metric is the mean over its datasets, and `all groups` is the mean over all datasets, as in VTAB."
    )
    return Conclusion("By group", (sentence,), ("model", "group", "datasets", "mean", "95 % interval"), tuple(lines))


TRANSFER_STUDY = Study(
    "transfer",
    "Transfer learning by model and dataset",
    question="Which pre-trained model transfers best to other datasets, and how large is the variation over runs?",
    source="arXiv:2010.11929, Tables 2 and 5",
    axes=("model", "dataset"),
    cells=transfer_cells,
    reference=scratch_reference,
    published=Published(
        "accuracy after pre-training on JFT-300M and fine-tuning at 384 pixels (Table 5). Mean and std of three runs "
        "of ViT-L/16 (Table 2): CIFAR-10 99.42 ± 0.03 %, CIFAR-100 93.90 ± 0.05 %, Pets 97.32 ± 0.11 %, Flowers 99.74 "
        "± 0.00 %",
        TRANSFER_PUBLISHED,
    ),
    differs=(
        "The paper pre-trains on 303 million images with 18,291 classes, and varies only the seed of fine-tuning. "
        "Here the pre-training data are few and resemble the target datasets, and each seed has a separate "
        "pre-training. The reference is a model from scratch, which is not in the paper's table."
    ),
    other_data_kind="sets",
)

GROUP_TRANSFER_STUDY = Study(
    "groups",
    "Transfer learning by dataset group",
    question="On which datasets does pre-training help most?",
    source="arXiv:2010.11929, Figure 2 and Table 9; arXiv:1910.04867",
    axes=("model", "group", "dataset"),
    cells=group_transfer_cells,
    reference=scratch_reference,
    published=Published(
        (
            "group means of VTAB-1k after pre-training on JFT-300M, computed from Table 9 (natural, specialized, "
            "structured): "
        )
        + "; ".join(f"{model} {', '.join(values)} %" for model, values in GROUP_MEANS.items()),
        {},
    ),
    differs=(
        "VTAB uses 1,000 training images of each of 19 datasets. Here all training images of each dataset are used; "
        "`vitreous evaluate --protocol vtab` follows the protocol of VTAB."
    ),
    conclude=conclude_groups,
    other_data_kind="groups",
)

STUDIES = (TRANSFER_STUDY, GROUP_TRANSFER_STUDY)
