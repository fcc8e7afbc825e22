"""Studies of few-shot accuracy by model, number of shots, and number of pre-training images (arXiv:2010.11929, Figure
4)."""

from __future__ import annotations

from vitreous.apps.studies.measures import measure_few_shot_accuracy, measure_five_shot_accuracy
from vitreous.apps.studies.study import AxisValues, Chart, Measure, Published, Study, StudyCell, StudySetting
from vitreous.apps.studies.transfer import pretraining_cells
from vitreous.recipes.options import TrainOptions

FEW_SHOT_MODELS = ("ViT-B/32", "ViT-L/32", "ViT-L/16", "BiT-R50x1", "BiT-R152x2")
FEW_SHOT_IMAGE_SHARES = (3, 10, 30, 100)  # per cent; for JFT-300M, 9, 30, 90 and 300 million images as in the paper


def list_few_shot_models(setting: StudySetting) -> dict[str, StudyCell]:
    """Return the pre-training cell of each model by name: the models of the figure or, at small scales, those of the
    study `transfer`, which shares its runs."""
    if setting.scale.name != "published":
        return pretraining_cells(setting)
    recipes = {name: "bit-jft-adam" if name.startswith("BiT") else "vit-jft" for name in FEW_SHOT_MODELS}
    return {
        name: StudyCell((), setting.options(TrainOptions(recipe=recipes[name], model=name))) for name in FEW_SHOT_MODELS
    }


def few_shot_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per model, pre-trained on all images."""
    return tuple(StudyCell((name,), cell.options) for name, cell in list_few_shot_models(setting).items())


def few_shot_image_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per model and fraction of the pre-training images."""
    return tuple(
        StudyCell((name, f"{share} %"), cell.options, share / 100)
        for name, cell in list_few_shot_models(setting).items()
        for share in FEW_SHOT_IMAGE_SHARES
    )


def base_vit_reference(axis_values: AxisValues) -> AxisValues:
    """Return the reference cell: the basic ViT of the scale with the same number of shots or images."""
    return "ViT-B/32" if "-" in axis_values[0] else "ViT", *axis_values[1:]


FEW_SHOT_DIFFERS = (
    "The paper pre-trains on JFT-300M and fits a linear regression to frozen features on ImageNet. Here models train "
    "for minutes, and the target datasets resemble the pre-training data. The metric is the mean over datasets and "
    "over three draws of the shots; its interval is over runs."
)
FEW_SHOT_STUDY = Study(
    "few-shot",
    "Few-shot accuracy by number of shots",
    question="Which model's features need the fewest labelled images on other datasets?",
    source="arXiv:2010.11929, section 4.1 and Figure 4",
    axes=("model", "shots"),
    cells=few_shot_cells,
    reference=base_vit_reference,
    published=Published("Figure 4 has curves of linear 5-shot accuracy on ImageNet and no table", {}),
    differs=FEW_SHOT_DIFFERS,
    chart=Chart("shots", "model", logarithmic=True),
    run_measure=Measure("fewshot_top1", measure_few_shot_accuracy),
    other_data_kind="sets",
)
FEW_SHOT_IMAGES_STUDY = Study(
    "few-shot-images",
    "5-shot accuracy by number of pre-training images",
    question="How many pre-training images does a larger model need to learn better features?",
    source="arXiv:2010.11929, section 4.3 and Figure 4, right",
    axes=("model", "training images"),
    cells=few_shot_image_cells,
    reference=base_vit_reference,
    published=Published(
        "Figure 4 has curves and no table. With 9 million images, ResNets are better, and larger ViTs are worse than "
        "smaller ones. From 90 million images, ViTs are better; with 300 million, the largest ViTs are best",
        {},
    ),
    differs=FEW_SHOT_DIFFERS,
    chart=Chart("training images", "model", logarithmic=True),
    run_measure=Measure("fewshot_top1", measure_five_shot_accuracy),
    other_data_kind="sets",
)
STUDIES = (FEW_SHOT_STUDY, FEW_SHOT_IMAGES_STUDY)
