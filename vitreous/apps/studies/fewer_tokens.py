"""Studies of computing fewer tokens: patch dropout in training, token merging in inference."""

from __future__ import annotations

from vitreous.apps.studies.measures import measure_token_merging
from vitreous.apps.studies.study import Chart, Measure, Published, Study, StudyCell, StudySetting, update_options
from vitreous.recipes.options import TrainOptions

# Patch dropout (arXiv:2208.07220; FLIP, arXiv:2212.00794): accuracy against the share of patches left out.
DROPOUT_SHARES = (0, 25, 50, 75)  # per cent


def dropout_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Every share, left out in the whole run."""
    base = setting.options(TrainOptions(recipe="deit", model="ViT-B/16"))
    return tuple(
        StudyCell(
            (f"{share} %",),
            update_options(base, patch_dropout=share / 100, settings={"objective.patch-dropout-until": "1.0"}),
        )
        for share in DROPOUT_SHARES
    )


PATCH_DROPOUT_STUDY = Study(
    "patch-dropout",
    "Patches left out in training",
    question="How many patches can be left out in training, and what does it cost?",
    source="arXiv:2208.07220 and arXiv:2212.00794",
    axes=("left out",),
    cells=dropout_cells,
    reference=("0 %",),
    published=Published("no number is repeated here: models and data of these papers are others", {}),
    differs=(
        "The papers train larger models on images of many patches, of which many are similar. In small ones each patch "
        "matters more. All runs have as many steps; those that leave out patches have less compute."
    ),
    chart=Chart("left out"),
)


# Token merging (arXiv:2210.09461): accuracy against images a second, as more tokens merge at inference.
def merging_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """A ViT of many tokens: patches of half the size."""
    if setting.scale.name == "published":
        return (StudyCell(("ViT-L/16",), TrainOptions(recipe="deit", model="ViT-L/16")),)
    base = setting.options(TrainOptions())
    return (StudyCell(("ViT",), update_options(base, model=setting.vit(patch=max(1, setting.patch // 2)))),)


def unmerged_reference(axis_values: tuple[str, ...]) -> tuple[str, ...]:
    """The model of a place as it was trained."""
    return axis_values[0], "0"


TOKEN_MERGING_STUDY = Study(
    "token-merging",
    "Token merging at inference",
    question="How much faster is inference when tokens merge, and what does it cost in accuracy?",
    source="arXiv:2210.09461, section 4",
    axes=("model", "merged a block"),
    cells=merging_cells,
    reference=unmerged_reference,
    published=Published("ViT-L at 512 pixels is twice as fast for 0.2 to 0.3 % of its accuracy, without training", {}),
    differs=(
        "All rows of a seed are one model, trained without merging. Small images have few tokens, so that merging "
        "costs more accuracy and saves less time; images a second are of this machine, of batches of 64 in float32."
    ),
    chart=Chart("images_per_second", "model"),
    measure=Measure("merged_top1", measure_token_merging),
)
