"""Conclusions from a study's table: accuracy-compute frontiers of model families, and where the curves of models cross.

A frontier is 1 - accuracy = a C^-b for C exaFLOPs, a line in log-log space, fitted to each seed separately. Intervals
are Student's t over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitreous.apps.studies.statistics import estimate_mean
from vitreous.apps.studies.study import Conclusion

MIN_ERROR = 1e-3  # lower bound of an error, so that its logarithm is finite
CURVE_POINTS = 20  # points per fitted curve


def list_family_points(rows: Sequence[Any], family: str) -> list[tuple[float, dict[int, float]]]:
    """Return (exaFLOPs, {seed: error}) of each model of a family, sorted by compute. The error is 1 - accuracy."""
    family_rows = [
        row for row in rows if row.axis_values[0] == family and row.measurements.get("exaflops") and row.values
    ]
    points = [
        (row.measurements["exaflops"], {seed: max(MIN_ERROR, 1 - value) for seed, value in row.values.items()})
        for row in family_rows
    ]
    return sorted(points, key=lambda point: point[0])


def fit_frontiers(points: list[tuple[float, dict[int, float]]]) -> dict[int, tuple[float, float]]:
    """Fit log error = log a - b log C to the points of each seed. Return {seed: (b, log a)} for seeds with at least two
    values of C."""
    fits = {}
    for seed in {seed for _, errors in points for seed in errors}:
        seed_points = [(compute, errors[seed]) for compute, errors in points if seed in errors]
        if len({compute for compute, _ in seed_points}) > 1:
            computes, logs = np.log(seed_points).T
            slope, level = np.polyfit(computes, logs, 1)
            fits[seed] = float(-slope), float(level)
    return fits


def conclude_frontiers(rows: Sequence[Any]) -> Conclusion:
    """Fit the frontier of each family in a study's rows, and compare the compute that families need for the same
    accuracy."""
    families = list(dict.fromkeys(row.axis_values[0] for row in rows))
    points = {family: list_family_points(rows, family) for family in families}
    fits = {family: fit_frontiers(points[family]) for family in families}
    lines, curves = [], {}
    for family in families:
        if not fits[family]:
            continue
        slope = estimate_mean([b for b, _ in fits[family].values()])
        interval_text = "–" if slope.interval is None else " to ".join(f"{end:.2f}" for end in slope.interval)
        lines.append((family, f"{len(points[family])}", f"{slope.mean:.2f}", interval_text))
        b, level = np.mean(list(fits[family].values()), 0)
        computes = np.geomspace(points[family][0][0], points[family][-1][0], CURVE_POINTS)
        curves[family] = tuple(zip(computes.tolist(), (1 - np.exp(level) * computes**-b).tolist(), strict=True))
    sentences = [
        (
            "A frontier is 1 - accuracy = a C^-b for C exaFLOPs, fitted to each seed; b is the rate at which the error "
            "falls."
        )
    ]
    sentences += [compare_frontiers(families[0], family, points, fits) for family in families[1:]]
    return Conclusion(
        "Fitted frontiers", tuple(sentences), ("family", "models", "b", "95 % interval"), tuple(lines), curves=curves
    )


def compare_frontiers(base_family: str, other_family: str, points: dict[str, Any], fits: dict[str, Any]) -> str:
    """Return a sentence with the ratio of the compute that two families need for the same accuracy, in the middle of
    their common range of errors."""
    common_seeds = sorted(fits[base_family].keys() & fits[other_family].keys())
    ranges = [
        [error for _, errors in points[family] for error in errors.values()] for family in (base_family, other_family)
    ]
    if not common_seeds:
        return f"Inconclusive: {base_family} and {other_family} do not each have two models with the same seed."
    lowest_error, highest_error = max(map(min, ranges)), min(map(max, ranges))
    if lowest_error > highest_error:
        return f"Inconclusive: {base_family} and {other_family} reach no common accuracy."
    error = float(np.sqrt(lowest_error * highest_error))
    if min(fits[family][seed][0] for family in (base_family, other_family) for seed in common_seeds) <= 0:
        return f"Inconclusive: for at least one seed, larger models of {base_family} or {other_family} are not better."
    logs = [
        np.subtract(*((fits[f][seed][1] - np.log(error)) / fits[f][seed][0] for f in (other_family, base_family)))
        for seed in common_seeds
    ]
    ratio = estimate_mean([float(log) for log in logs])
    text = (
        f"For an accuracy of {1 - error:.1%}, {other_family} needs "
        f"{np.exp(ratio.mean):.2g}x the compute of {base_family}"
    )
    if ratio.interval is None:
        return f"{text}; inconclusive with one seed."
    interval_text = " to ".join(f"{np.exp(end):.2g}" for end in ratio.interval)
    caveat = "" if ratio.verdict != "inconclusive" else "; inconclusive"
    return f"{text} (95 % interval {interval_text}){caveat}."


def conclude_crossings(rows: Sequence[Any]) -> Conclusion:
    """Find the fraction of the images above which the first model of a study's rows outperforms each other model."""
    models = list(dict.fromkeys(row.axis_values[0] for row in rows))
    values = {(row.axis_values[0], float(row.axis_values[1].split()[0])): row.values for row in rows}
    return Conclusion("Crossing points", tuple(describe_crossing(models[0], model, values) for model in models[1:]))


def describe_crossing(first_model: str, second_model: str, values: dict[tuple[str, float], dict[int, float]]) -> str:
    """Return a sentence on the share of images from which the first model outperforms the second. `values` has {seed:
    accuracy} by model and share. For each seed, the crossing is interpolated linearly in the logarithm of the share."""
    shares = sorted({share for model, share in values if model == first_model})
    crossings, num_ahead, num_behind, seeds = [], 0, 0, set[int]()
    for seed in sorted({seed for seed_values in values.values() for seed in seed_values}):
        pairs = [
            (values[first_model, share].get(seed), values.get((second_model, share), {}).get(seed)) for share in shares
        ]
        if any(first_value is None or second_value is None for first_value, second_value in pairs):
            continue
        seeds.add(seed)
        differences = [
            first_value - second_value
            for first_value, second_value in pairs
            if first_value is not None and second_value is not None
        ]
        num_ahead, num_behind = (
            num_ahead + all(d > 0 for d in differences),
            num_behind + all(d <= 0 for d in differences),
        )
        crossings += find_last_crossing(shares, differences)
    if not seeds:
        return f"Inconclusive: no seed of {first_model} and {second_model} is complete for all shares."
    if num_behind == len(seeds):
        return f"{first_model} does not outperform {second_model} at any share of the images, with any seed."
    if num_ahead == len(seeds):
        return f"{first_model} outperforms {second_model} at every share of the images, with every seed."
    if len(crossings) < max(2, len(seeds)):
        return f"Inconclusive: {first_model} overtakes {second_model} with {len(crossings)} of {len(seeds)} seeds."
    mean = estimate_mean([float(np.log(crossing)) for crossing in crossings])
    low, high = np.exp(mean.interval or (np.nan, np.nan))
    caveat = "" if shares[0] <= low and high <= shares[-1] else ", which exceeds the tested shares"
    text = f"{first_model} overtakes {second_model} at {np.exp(mean.mean):.2g} % of the images"
    return f"{text} (95 % interval {low:.2g} to {high:.2g} %{caveat})."


def find_last_crossing(shares: Sequence[float], differences: Sequence[float]) -> list[float]:
    """Return the share at which differences become positive and stay so, as a list of one number. The list is empty if
    there is none. Shares are interpolated."""
    for index in range(len(shares) - 1, 0, -1):
        low, high = differences[index - 1], differences[index]
        if high <= 0:
            return []
        if low <= 0:
            fraction = -low / (high - low)
            return [float(np.exp((1 - fraction) * np.log(shares[index - 1]) + fraction * np.log(shares[index])))]
    return []
