"""The table of a study: means over seeds, intervals, and differences to the reference."""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from vitreous.apps.studies.factory import StudyRun
from vitreous.apps.studies.statistics import Estimate, estimate_difference, estimate_mean
from vitreous.apps.studies.study import AxisValues, Study
from vitreous.tasks.report import get_primary_key

SUMMARY_QUANTITIES = (
    "parameters",
    "exaflops",
    "wall_seconds",
    "images_per_second",
    "peak_memory_bytes",
    "steps",
    "samples",
)


@dataclass(frozen=True)
class RunResult:
    """One run: the primary metric of its validation images, None where its loss was not finite."""

    axis_values: AxisValues
    seed: int
    folder: str
    metric: str
    _: KW_ONLY
    value: float | None
    better: str
    measurements: dict[str, float | None]
    images: int | None  # of its evaluation


@dataclass(frozen=True)
class TableRow:
    """A row of the table, by its axis values. `difference` is to the reference, of the same seeds; None for the
    reference itself."""

    axis_values: AxisValues
    values: dict[int, float]
    failed: int
    mean: Estimate | None
    _: KW_ONLY
    difference: Estimate | None
    reference: AxisValues | None
    published: str | None
    measurements: dict[str, float | None]
    runs: list[str]

    @property
    def verdict(self) -> str:
        """Return the verdict of the comparison with the reference, in words."""
        if self.mean is None:
            return "loss not finite"
        if self.reference is None:
            return "reference"
        if self.difference is None:
            return "no pair of runs"
        if self.difference.interval is None:
            return "cannot be told: one seed"
        return self.difference.verdict


def read_run_result(one: StudyRun, metric: str = "") -> RunResult:
    """The primary metric of a complete run, or the one named, of which less is better."""
    summary = json.loads(one.folder.summary.read_text("utf-8"))
    val = summary.get("val") or {}
    better = "lower" if metric else val.get("better", "higher")
    metric = metric or (get_primary_key(val) if val else "")
    value = val.get(metric) if "failure" not in summary else None
    measurements: dict[str, float | None] = {
        **{name: summary.get(name) for name in SUMMARY_QUANTITIES},
        "samples": one.run.total,
    }
    return RunResult(
        one.cell.axis_values,
        one.seed,
        folder=str(one.folder.path),
        metric=metric,
        value=value,
        better=better,
        measurements=measurements,
        images=val.get("images"),
    )


def build_table_rows(study: Study, results: list[RunResult]) -> list[TableRow]:
    """Build the rows of a study, in the order of its cells."""
    values: dict[AxisValues, dict[int, float]] = {}
    for result in results:
        known = values.setdefault(result.axis_values, {})
        if result.value is not None:
            known[result.seed] = result.value
    return [
        build_table_row(study, axis_values, values, [one for one in results if one.axis_values == axis_values])
        for axis_values in values
    ]


def build_table_row(
    study: Study, axis_values: AxisValues, values: dict[AxisValues, dict[int, float]], results: list[RunResult]
) -> TableRow:
    """One row, of the results at its axis values."""
    own, reference = values[axis_values], study.get_reference(axis_values)
    pair = estimate_difference(values.get(reference, {}), own) if reference != axis_values else None
    names = dict.fromkeys(name for result in results for name in result.measurements)
    measurements = {name: mean_or_none([result.measurements.get(name) for result in results]) for name in names}
    return TableRow(
        axis_values,
        own,
        failed=sum(result.value is None for result in results),
        mean=estimate_mean(list(own.values())) if own else None,
        difference=pair,
        reference=None if reference == axis_values else reference,
        published=study.published.values.get(axis_values),
        measurements=measurements,
        runs=[result.folder for result in results],
    )


def mean_or_none(values: list[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def list_columns(study: Study) -> list[str]:
    """The names of the columns of a study's document."""
    return [*study.axes, "mean", "interval", "seeds", "difference", "difference interval", "verdict", "published"]


def rows_to_lists(rows: list[TableRow]) -> list[list[Any]]:
    """The rows in the order of `list_columns`, as JSON has them."""
    table = []
    for row in rows:
        mean, pair = row.mean, row.difference
        cells = [mean and mean.mean, mean and mean.interval, len(row.values)]
        table.append([*row.axis_values, *cells, pair and pair.mean, pair and pair.interval, row.verdict, row.published])
    return table


def row_to_dict(row: TableRow) -> dict[str, Any]:
    """A row with everything that was measured."""
    return asdict(row) | {"values": {str(seed): value for seed, value in row.values.items()}, "verdict": row.verdict}
