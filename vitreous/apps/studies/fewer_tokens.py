"""Studies of computing fewer tokens: patch dropout in training, and token merging at inference."""

from __future__ import annotations

from vitreous.apps.studies.measures import measure_token_merging
from vitreous.apps.studies.study import Chart, Measure, Published, Study, StudyCell, StudySetting, update_options
from vitreous.recipes.options import TrainOptions

# Patch dropout (arXiv:2208.07220; FLIP, arXiv:2212.00794): accuracy against the share of dropped patches.
DROPOUT_SHARES = (0, 25, 50, 75)  # per cent


def dropout_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per rate of patch dropout, which is applied for the whole run."""
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
    "Patch dropout",
    question="How many patches can be dropped in training, and how much accuracy does it cost?",
    source="arXiv:2208.07220 and arXiv:2212.00794",
    axes=("dropped patches",),
    cells=dropout_cells,
    reference=("0 %",),
    published=Published("none: these papers use other models and datasets", {}),
    differs=(
        "The papers train larger models on images with many, often redundant, patches. In small images each patch "
        "matters more. All runs have the same number of steps, so runs with dropped patches use less compute."
    ),
    chart=Chart("dropped patches"),
)


# Token merging (arXiv:2210.09461): accuracy against throughput as more tokens are merged at inference.
def merging_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return the cell of a ViT with many tokens: its patches have half the usual size."""
    if setting.scale.name == "published":
        return (StudyCell(("ViT-L/16",), TrainOptions(recipe="deit", model="ViT-L/16")),)
    base = setting.options(TrainOptions())
    return (StudyCell(("ViT",), update_options(base, model=setting.format_vit_name(patch=max(1, setting.patch // 2)))),)


def unmerged_reference(axis_values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the reference cell: the same model without token merging."""
    return axis_values[0], "0"


TOKEN_MERGING_STUDY = Study(
    "token-merging",
    "Token merging at inference",
    question="How much faster is inference with token merging, and how much accuracy does it cost?",
    source="arXiv:2210.09461, section 4",
    axes=("model", "merged per block"),
    cells=merging_cells,
    reference=unmerged_reference,
    published=Published("ViT-L at 512 pixels: 2x throughput for 0.2-0.3 % accuracy, without training", {}),
    differs=(
        "All rows of a seed use one model, trained without merging. Small images have few tokens, so merging costs "
        "more accuracy and saves less time. Throughput is measured on this machine with batches of 64 in float32."
    ),
    chart=Chart("images_per_second", "model"),
    run_measure=Measure("merged_top1", measure_token_merging),
)
