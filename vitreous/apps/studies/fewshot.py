"""Figure 4 of arXiv:2010.11929: few-shot accuracy by model, by shots and by the number of images learned from."""

from __future__ import annotations

from vitreous.apps.studies.measures import read_few_shots, read_five_shots
from vitreous.apps.studies.study import Cell, Chart, Measure, Place, Published, Setting, Study
from vitreous.apps.studies.transfer import pretrained
from vitreous.recipes.options import TrainOptions

PUBLISHED = ("ViT-B/32", "ViT-L/32", "ViT-L/16", "BiT-R50x1", "BiT-R152x2")
SHARES = (3, 10, 30, 100)  # per cent; of JFT-300M the paper's 9, 30, 90 and 300 million images


def models(setting: Setting) -> dict[str, Cell]:
    """The models of the figure, or those of the study of transfer, whose runs it shares."""
    if setting.scale.name != "published":
        return pretrained(setting)
    recipes = {name: "bit-jft-adam" if name.startswith("BiT") else "vit-jft" for name in PUBLISHED}
    return {name: Cell((), setting.options(TrainOptions(recipe=recipes[name], model=name))) for name in PUBLISHED}


def cells(setting: Setting) -> tuple[Cell, ...]:
    """Every model on all images."""
    return tuple(Cell((name,), cell.options) for name, cell in models(setting).items())


def cells_by_images(setting: Setting) -> tuple[Cell, ...]:
    """Every model on shares of the images."""
    return tuple(
        Cell((name, f"{share} %"), cell.options, share / 100)
        for name, cell in models(setting).items()
        for share in SHARES
    )


def base_model(place: Place) -> Place:
    """The scale's ViT with the shots, or the images, of a place."""
    return "ViT-B/32" if "-" in place[0] else "ViT", *place[1:]


DIFFERS = (
    "The paper judges on ImageNet, by a regression on frozen features, models that learned from JFT-300M. Here models "
    "are of minutes and the other sets are near to what was learned first. The figure is the mean over the sets, and "
    "over three draws of the shots; its interval is over runs."
)
SHOTS = Study(
    "few-shot",
    "Few-shot accuracy by shots",
    question="Which model's features need the fewest labelled images of other data sets?",
    source="arXiv:2010.11929, section 4.1 and Figure 4",
    axes=("model", "shots"),
    cells=cells,
    reference=base_model,
    published=Published("Figure 4 has curves of linear 5-shot accuracy on ImageNet and no table", {}),
    differs=DIFFERS,
    chart=Chart("shots", "model", logarithmic=True),
    measure=Measure("fewshot_top1", read_few_shots),
    others="sets",
)
IMAGES = Study(
    "few-shot-images",
    "5-shot accuracy against the number of images learned from",
    question="How many images have to be learned from, before a larger model's features are better?",
    source="arXiv:2010.11929, section 4.3 and Figure 4, right",
    axes=("model", "training images"),
    cells=cells_by_images,
    reference=base_model,
    published=Published(
        "Figure 4 has curves and no table: ResNets are better on 9 million images, where larger ViTs are worse than "
        "smaller ones; from 90 million on ViTs are better, and the larger ones most on 300 million",
        {},
    ),
    differs=DIFFERS,
    chart=Chart("training images", "model", logarithmic=True),
    measure=Measure("fewshot_top1", read_five_shots),
    others="sets",
)
STUDIES = (SHOTS, IMAGES)
