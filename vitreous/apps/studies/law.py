"""The study of a scaling law L(N, D), fitted to runs on this machine: ViT sizes by images seen (arXiv:2203.15556)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitreous.apps.studies.scaling import LAW_PARAMETERS, ScalingLawFit, fit_law
from vitreous.apps.studies.study import Chart, Conclusion, Published, Study, StudyCell, StudySetting, update_options
from vitreous.errors import DataError
from vitreous.recipes.options import TrainOptions

STEP_DIVISORS = (8, 4, 2, 1)  # each training length is the scale's steps divided by one of these
LAW_HOLD_OUT_SHARE = 0.2  # fraction of the points, those with the most compute, that is not fitted but predicted
LAW_WIDTHS = {"small": (32, 64, 96, 128), "gpu": (64, 128, 192, 256), "published": ()}
LAW_MODELS = ("ViT-S/16", "ViT-B/16", "ViT-L/16", "ViT-H/14")  # models at the published scale
LAW_EPOCHS = 7.0


def scaling_law_cells(setting: StudySetting) -> tuple[StudyCell, ...]:
    """Return one cell per model size and training length, each with a separate learning rate schedule."""
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
            StudyCell(
                (f"width {width}", f"1/{divisor}"),
                update_options(base, steps=steps, model=setting.format_vit_name(width)),
            )
            for width in LAW_WIDTHS[setting.scale.name]
        ]
    return tuple(cells)


def conclude_scaling_law(rows: Sequence[Any]) -> Conclusion:
    """Fit the law to the means over seeds of a study's rows, and describe its uncertainty."""
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
        (name, f"{getattr(law, name):.4g}", "{:.4g} to {:.4g}".format(*fit.bootstrap_interval(name)))
        for name in LAW_PARAMETERS
    )
    return Conclusion(
        title,
        describe_fit(fit, len(points)),
        ("parameter", "fitted", "95 % interval"),
        lines,
        curves=sample_law_curves(fit, rows),
    )


def describe_fit(fit: ScalingLawFit, count: int) -> tuple[str, ...]:
    """Return sentences that describe a fit to `count` points and its limitations."""
    num_held_out = len(fit.held_out)
    error_text = "" if fit.largest_error is None else f", with an error of at most {fit.largest_error:.1%}"
    summary = (
        "N: parameters; D: training images seen; L: validation NLL. The law is fitted to "
        f"{count - num_held_out} points (means over seeds) with an RMS error of {fit.residual:.1%} in L. The "
        f"{num_held_out} "
        f"points with the most compute are held out and predicted{error_text}."
    )
    return summary, *(f"Inconclusive: {doubt}." for doubt in fit.doubts)


def sample_law_curves(fit: ScalingLawFit, rows: Sequence[Any]) -> dict[str, tuple[tuple[float, float], ...]]:
    """Return points of the fitted law for each model size, over the range of images that its runs saw."""
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
    """Return the reference cell: the same model with the shortest training."""
    return axis_values[0], f"1/{STEP_DIVISORS[0]}"


SCALING_LAW_STUDY = Study(
    "scaling-law",
    "Scaling law: loss by parameters and images seen",
    question=(
        "How does the loss fall with ViT size and training images seen, and which combination is best for a compute "
        "budget?"
    ),
    source="arXiv:2203.15556, section 3.3; arXiv:2106.04560",
    axes=("model", "length"),
    cells=scaling_law_cells,
    reference=shortest_run_reference,
    published=Published(
        "for text, E = 1.69, A = 406.4, B = 410.7, a = 0.34 and b = 0.28 (arXiv:2203.15556); for images, only laws of "
        "compute are published (arXiv:2106.04560)",
        {},
    ),
    differs=(
        "Small datasets are repeated for many epochs, which the law does not model: a rising loss may be overfitting "
        "rather than an effect of model size. Each length has a separate learning rate schedule."
    ),
    chart=Chart("samples", "model", logarithmic=True, logarithmic_y=True),
    metric="nll",
    conclude=conclude_scaling_law,
)
