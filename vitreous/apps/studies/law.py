"""A scaling law L(N, D) of runs that this machine makes: sizes of a ViT by images seen (arXiv:2203.15556)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitreous.apps.studies.scaling import LAW_PARAMETERS, ScalingLawFit, fit_law
from vitreous.apps.studies.study import Chart, Conclusion, Published, Study, StudyCell, StudySetting, update_options
from vitreous.errors import DataError
from vitreous.recipes.options import TrainOptions

STEP_DIVISORS = (8, 4, 2, 1)  # parts of the scale's steps
LAW_HOLD_OUT_SHARE = 0.2  # of the points, those of the most compute
LAW_WIDTHS = {"small": (32, 64, 96, 128), "gpu": (64, 128, 192, 256), "published": ()}
LAW_MODELS = ("ViT-S/16", "ViT-B/16", "ViT-L/16", "ViT-H/14")  # of the published scale
LAW_EPOCHS = 7.0


def scaling_law_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Every size for every length, each length with a separate schedule."""
    cells = []
    for divisor in STEP_DIVISORS:
        if setting.scale.name == "published":
            cells += [
                StudyCell(
                    (model, f"1/{divisor}"), TrainOptions(recipe="vit-jft", model=model, epochs=LAW_EPOCHS / divisor)
                )
                for model in LAW_MODELS
            ]
            continue
        base = setting.options(TrainOptions(), optimizer="adamw", lr=1e-3)
        steps = max(2, setting.scale.steps // divisor)
        cells += [
            StudyCell((f"width {width}", f"1/{divisor}"), update_options(base, steps=steps, model=setting.vit(width)))
            for width in LAW_WIDTHS[setting.scale.name]
        ]
    return tuple(cells)


def conclude_scaling_law(rows: Sequence[Any]) -> Conclusion:
    """The law fitted to the means over seeds, with its uncertainties."""
    points = [(row.measurements["parameters"], row.measurements["samples"], row.mean.mean) for row in rows if row.mean]
    title = "L(N, D) = E + A / N^a + B / D^b"
    try:
        fit = fit_law(*zip(*points, strict=True), hold_out=LAW_HOLD_OUT_SHARE) if points else None
    except DataError as error:
        return Conclusion(title, (f"Inconclusive: {error.message}.",))
    if fit is None:
        return Conclusion(title, ("Inconclusive: no run has a finite loss.",))
    law = fit.law
    lines = tuple(
        (name, f"{getattr(law, name):.4g}", "{:.4g} to {:.4g}".format(*fit.interval(name))) for name in LAW_PARAMETERS
    )
    return Conclusion(
        title,
        describe_fit(fit, len(points)),
        ("number", "fitted", "95 % interval"),
        lines,
        curves=sample_law_curves(fit, rows),
    )


def describe_fit(fit: ScalingLawFit, count: int) -> tuple[str, ...]:
    """Describe the fit and its uncertainties."""
    num_held_out = len(fit.held_out)
    error_text = "" if fit.largest_error is None else f", which it misses by {fit.largest_error:.1%} at most"
    summary = (
        "N are parameters and D images seen; L is the NLL of the validation images. The law is fitted to "
        f"{count - num_held_out} points, the means over seeds, with an error of {fit.residual:.1%} in L; the "
        f"{num_held_out} "
        f"points of the most compute are predicted, not fitted{error_text}."
    )
    return summary, *(f"Inconclusive: {doubt}." for doubt in fit.doubts)


def sample_law_curves(fit: ScalingLawFit, rows: Sequence[Any]) -> dict[str, tuple[tuple[float, float], ...]]:
    """The law for the size of each model, over the images that its runs saw."""
    curves = {}
    for model in dict.fromkeys(row.axis_values[0] for row in rows):
        model_rows = [row for row in rows if row.axis_values[0] == model]
        num_samples = np.geomspace(
            min(row.measurements["samples"] for row in model_rows),
            max(row.measurements["samples"] for row in model_rows),
            20,
        )
        losses = fit.law.loss(np.full(len(num_samples), model_rows[0].measurements["parameters"]), num_samples)
        curves[model] = tuple(zip(num_samples.tolist(), losses.tolist(), strict=True))
    return curves


def shortest_run_reference(axis_values: tuple[str, ...]) -> tuple[str, ...]:
    """The model of a place trained for the shortest time."""
    return axis_values[0], f"1/{STEP_DIVISORS[0]}"


SCALING_LAW_STUDY = Study(
    "scaling-law",
    "Loss by parameters and images seen",
    question=(
        "How does the loss fall with the size of a ViT and with the images that it sees, and what is best for a budget?"
    ),
    source="arXiv:2203.15556, section 3.3; arXiv:2106.04560",
    axes=("model", "length"),
    cells=scaling_law_cells,
    reference=shortest_run_reference,
    published=Published(
        "of text, E = 1.69, A = 406.4, B = 410.7, a = 0.34 and b = 0.28 (arXiv:2203.15556), which are not those of "
        "images; for images laws are published of compute alone (arXiv:2106.04560)",
        {},
    ),
    differs=(
        "Images are seen again and again where there are few, which a law of new images does not know; a loss that "
        "rises again is then no fault of the model's size. Each length has a separate learning rate schedule."
    ),
    chart=Chart("samples", "model", logarithmic=True, logarithmic_y=True),
    metric="nll",
    conclude=conclude_scaling_law,
)
