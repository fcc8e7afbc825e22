"""Studies of register tokens, their effect on features and on high-norm patch tokens (arXiv:2309.16588), and of the
local views of DINO (arXiv:2104.14294)."""

from __future__ import annotations

from vitreous.apps.studies.measures import measure_norm_ratio
from vitreous.apps.studies.study import Chart, Measure, Published, Study, StudyCell, StudySetting, update_options
from vitreous.recipes.options import TrainOptions

REGISTER_COUNTS = (0, 1, 4)
LOCAL_VIEW_COUNTS = (0, 2, 4, 8)


def register_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per number of register tokens, trained with DINO; at the published scale, with DINOv2."""
    published = setting.scale.name == "published"
    recipe = "dinov2" if published else "dino"
    base = setting.options(TrainOptions(recipe=recipe, model="ViT-L/16"), recipe=recipe)
    return tuple(
        StudyCell((f"{count}",), update_options(base, settings={"model.registers": f"{count}"}))
        for count in REGISTER_COUNTS
    )


def view_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per number of local views of DINO, in addition to two global views."""
    base = setting.options(TrainOptions(recipe="dino", model="ViT-S/16"), recipe="dino")
    return tuple(
        StudyCell((f"{count}",), update_options(base, settings={"views.locals": f"{count}"}))
        for count in LOCAL_VIEW_COUNTS
    )


REGISTERS_DIFFERS = (
    "Artefacts appear in large models after long training: the paper finds none in DINOv2 below ViT-L. Short runs of "
    "small models are no evidence against registers; run the same command at a larger scale."
)
REGISTERS_STUDY = Study(
    "registers",
    "Register tokens",
    question="Do register tokens improve features?",
    source="arXiv:2309.16588, section 3.2",
    axes=("registers",),
    cells=register_cells,
    reference=("0",),
    published=Published(
        "k-NN accuracy on ImageNet of DINOv2's released ViT-L/14 without and with registers, distilled from ViT-g",
        {("0",): "83.5 %", ("4",): "83.8 %"},
    ),
    differs=REGISTERS_DIFFERS,
)
ARTEFACT_NORMS_STUDY = Study(
    "artefact-norms",
    "High-norm patch tokens",
    question="Do register tokens remove high-norm patch tokens?",
    source="arXiv:2309.16588, sections 2.1 and 3.2, Figures 3 and 7",
    axes=("registers",),
    cells=register_cells,
    reference=("0",),
    published=Published(
        "the paper has figures and no table: without registers, about 2 % of the patch tokens of DINOv2 ViT-g have a "
        "norm above 150, and most are below 100; with registers, none is above 150",
        {},
    ),
    differs=REGISTERS_DIFFERS
    + (
        " The metric is the ratio of the largest to the median norm of an image's patch tokens, before the final norm "
        "layer."
    ),
    run_measure=Measure("norm_ratio", measure_norm_ratio, "lower"),
)
DINO_CROPS_STUDY = Study(
    "dino-crops",
    "DINO local views",
    question="How many local views does DINO need in addition to its two global views?",
    source="arXiv:2104.14294, section 5.4 and Table 8",
    axes=("local views",),
    cells=view_cells,
    reference=("0",),
    published=Published(
        "ViT-S/16 after 100 epochs with 8 local views: 69.3 % by k-NN, 74.0 % by a linear probe", {("8",): "69.3 %"}
    ),
    differs=(
        "DINO trains on 1.28 million photographs. Local views of small images have few patches. All runs have the "
        "same number of steps, so more views mean more compute."
    ),
    chart=Chart("local views"),
)
STUDIES = (REGISTERS_STUDY, ARTEFACT_NORMS_STUDY, DINO_CROPS_STUDY)
