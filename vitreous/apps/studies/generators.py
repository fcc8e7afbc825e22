"""The study of DiT: Fréchet distance by forward-pass FLOPs (arXiv:2212.09748, Figure 8)."""

from __future__ import annotations

from vitreous.apps.studies.measures import measure_frechet_distance
from vitreous.apps.studies.study import (
    AxisValues,
    Chart,
    Measure,
    Published,
    Study,
    StudyCell,
    StudySetting,
    update_options,
)
from vitreous.recipes.options import TrainOptions

DIT_SIZES = ("S", "B", "L", "XL")
DIT_PATCH_SIZES = (8, 4, 2)
#: FID-50K at 400,000 steps without guidance (Table 4), by model size, for patch sizes 8, 4 and 2
DIT_FID_TABLE = {
    "S": "153.60 100.41 68.40",
    "B": "122.74 68.38 43.47",
    "L": "118.87 45.64 23.33",
    "XL": "106.41 43.01 19.47",
}
DIT_PUBLISHED_FIDS = {
    (size, f"{patch}"): value
    for size, values in DIT_FID_TABLE.items()
    for patch, value in zip(DIT_PATCH_SIZES, values.split(), strict=True)
}
DIT_PUBLISHED_STEPS = 400_000


def dit_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return the cells of the DiT study: two widths by two patch sizes or, at the published scale, the models of the
    paper's Table 4."""
    if setting.scale.name == "published":
        return tuple(
            StudyCell(
                (size, patch),
                TrainOptions(recipe="dit", model=f"DiT-{size}/{patch}", steps=DIT_PUBLISHED_STEPS, image_size=32),
            )
            for size, patch in DIT_PUBLISHED_FIDS
        )
    base = setting.options(TrainOptions(), recipe="dit")
    width, depth = setting.scale.width, setting.scale.depth
    return tuple(
        StudyCell((name, patches), update_options(base, model=f"DiT-{model_width}x{depth}/{patch}"))
        for name, model_width in (("narrow", max(32, width // 2)), ("wide", width))
        for patches, patch in (("large", 2 * setting.patch), ("small", setting.patch))
    )


def largest_patch_reference(axis_values: AxisValues) -> AxisValues:
    """Return the reference cell: the generator of the same size with the largest patches."""
    return axis_values[0], f"{DIT_PATCH_SIZES[0]}" if axis_values[0] in DIT_SIZES else "large"


DIT_STUDY = Study(
    "dit",
    "Image generation: DiT quality by compute",
    question="Does a diffusion transformer generate better images with more compute, from width or from smaller "
    "patches?",
    source="arXiv:2212.09748, section 5.1, Figure 8 and Table 4",
    axes=("size", "patch"),
    cells=dit_cells,
    reference=largest_patch_reference,
    published=Published(
        "FID-50K on ImageNet at 256 pixels after 400,000 steps, without guidance (Table 4)", DIT_PUBLISHED_FIDS
    ),
    differs=(
        "DiT generates latents of an autoencoder, and FID uses Inception features. Here models generate pixels, and "
        "the Fréchet distance is between 500 generated images and the validation images in pixel space. Its bias "
        "depends on the number of images, which is the same in all rows."
    ),
    chart=Chart("gflops", "patch", logarithmic=True, logarithmic_y=True),
    run_measure=Measure("frechet_distance", measure_frechet_distance, "lower"),
)
