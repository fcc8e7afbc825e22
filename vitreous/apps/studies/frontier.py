"""Conclusions from curves of models: fitted frontiers of accuracy against compute, and where curves cross.

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
    """Return (exaFLOPs, error by seed) of each model of a family, ordered by compute."""
    own = [row for row in rows if row.place[0] == family and row.measured.get("exaflops") and row.values]
    points = [
        (row.measured["exaflops"], {seed: max(MIN_ERROR, 1 - value) for seed, value in row.values.items()})
        for row in own
    ]
    return sorted(points, key=lambda point: point[0])


def fit_frontiers(points: list[tuple[float, dict[int, float]]]) -> dict[int, tuple[float, float]]:
    """Fit log error = log a - b log C, and return (b, log a) by seed, for seeds with at least two compute values."""
    fits = {}
    for seed in {seed for _, errors in points for seed in errors}:
        own = [(compute, errors[seed]) for compute, errors in points if seed in errors]
        if len({compute for compute, _ in own}) > 1:
            computes, logs = np.log(own).T
            slope, level = np.polyfit(computes, logs, 1)
            fits[seed] = float(-slope), float(level)
    return fits


def conclude_frontiers(rows: Sequence[Any]) -> Conclusion:
    """Fit the frontier of each family, and compare the compute that families need for the same accuracy."""
    families = list(dict.fromkeys(row.place[0] for row in rows))
    points = {family: list_family_points(rows, family) for family in families}
    fits = {family: fit_frontiers(points[family]) for family in families}
    lines, curves = [], {}
    for family in families:
        if not fits[family]:
            continue
        slope = estimate_mean([b for b, _ in fits[family].values()])
        ends = "–" if slope.interval is None else " to ".join(f"{end:.2f}" for end in slope.interval)
        lines.append((family, f"{len(points[family])}", f"{slope.mean:.2f}", ends))
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


def compare_frontiers(first: str, second: str, points: dict[str, Any], fits: dict[str, Any]) -> str:
    """Describe the compute ratio of two families for the same accuracy, in the middle of their common range of
    errors."""
    shared = sorted(fits[first].keys() & fits[second].keys())
    ranges = [[error for _, errors in points[family] for error in errors.values()] for family in (first, second)]
    if not shared:
        return f"Inconclusive: {first} and {second} do not each have two models with the same seed."
    low, high = max(map(min, ranges)), min(map(max, ranges))
    if low > high:
        return f"Inconclusive: {first} and {second} reach no common accuracy."
    error = float(np.sqrt(low * high))
    if min(fits[family][seed][0] for family in (first, second) for seed in shared) <= 0:
        return f"Inconclusive: for at least one seed, larger models of {first} or {second} are not better."
    logs = [
        np.subtract(*((fits[f][seed][1] - np.log(error)) / fits[f][seed][0] for f in (second, first)))
        for seed in shared
    ]
    ratio = estimate_mean([float(log) for log in logs])
    text = f"For an accuracy of {1 - error:.1%}, {second} needs {np.exp(ratio.mean):.2g}x the compute of {first}"
    if ratio.interval is None:
        return f"{text}; inconclusive with one seed."
    ends = " to ".join(f"{np.exp(end):.2g}" for end in ratio.interval)
    unsure = "" if ratio.verdict != "inconclusive" else "; inconclusive"
    return f"{text} (95 % interval {ends}){unsure}."


def conclude_crossings(rows: Sequence[Any]) -> Conclusion:
    """Find the share of the images above which the first model outperforms each other model."""
    models = list(dict.fromkeys(row.place[0] for row in rows))
    values = {(row.place[0], float(row.place[1].split()[0])): row.values for row in rows}
    return Conclusion("Crossing points", tuple(describe_crossing(models[0], model, values) for model in models[1:]))


def describe_crossing(first: str, second: str, values: dict[tuple[str, float], dict[int, float]]) -> str:
    """Describe where the first model overtakes the second. For each seed, the crossing is interpolated linearly in the
    logarithm of the share."""
    shares = sorted({share for model, share in values if model == first})
    crossings, ahead, behind, seeds = [], 0, 0, set[int]()
    for seed in sorted({seed for row in values.values() for seed in row}):
        pairs = [(values[first, share].get(seed), values.get((second, share), {}).get(seed)) for share in shares]
        if any(one is None or other is None for one, other in pairs):
            continue
        seeds.add(seed)
        differences = [one - other for one, other in pairs if one is not None and other is not None]
        ahead, behind = ahead + all(d > 0 for d in differences), behind + all(d <= 0 for d in differences)
        crossings += find_first_crossing(shares, differences)
    if not seeds:
        return f"Inconclusive: no seed of {first} and {second} is complete for all shares."
    if behind == len(seeds):
        return f"{first} does not outperform {second} at any share of the images, with any seed."
    if ahead == len(seeds):
        return f"{first} outperforms {second} at every share of the images, with every seed."
    if len(crossings) < max(2, len(seeds)):
        return f"Inconclusive: {first} overtakes {second} with {len(crossings)} of {len(seeds)} seeds."
    mean = estimate_mean([float(np.log(crossing)) for crossing in crossings])
    low, high = np.exp(mean.interval or (np.nan, np.nan))
    unsure = "" if shares[0] <= low and high <= shares[-1] else ", which exceeds the tested shares"
    text = f"{first} overtakes {second} at {np.exp(mean.mean):.2g} % of the images"
    return f"{text} (95 % interval {low:.2g} to {high:.2g} %{unsure})."


def find_first_crossing(shares: Sequence[float], differences: Sequence[float]) -> list[float]:
    """Return [share] from which differences stay above 0; an empty list if there is none."""
    for place in range(len(shares) - 1, 0, -1):
        low, high = differences[place - 1], differences[place]
        if high <= 0:
            return []
        if low <= 0:
            part = -low / (high - low)
            return [float(np.exp((1 - part) * np.log(shares[place - 1]) + part * np.log(shares[place])))]
    return []
