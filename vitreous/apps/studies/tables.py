"""The table of a study: means over seeds, confidence intervals, and differences to the reference cell."""

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
    """The result of one run: the value of its metric, None if the loss became non-finite."""

    axis_values: AxisValues
    seed: int
    folder: str
    metric: str
    _: KW_ONLY
    value: float | None
    better: str
    measurements: dict[str, float | None]
    images: int | None  # number of evaluated images


@dataclass(frozen=True)
class TableRow:
    """A row of the table. `difference` is the difference to the reference cell, paired by seed; None for the reference
    itself."""

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
        """Return the verdict of the comparison with the reference cell in words."""
        if self.mean is None:
            return "non-finite loss"
        if self.reference is None:
            return "reference"
        if self.difference is None:
            return "no common seed"
        if self.difference.interval is None:
            return "inconclusive: one seed"
        return self.difference.verdict


def read_run_result(study_run: StudyRun, metric: str = "") -> RunResult:
    """Read the result of a complete run: its primary validation metric or, if `metric` is set, that metric, for which
    lower is better."""
    summary = json.loads(study_run.folder.summary.read_text("utf-8"))
    val_metrics = summary.get("val") or {}
    better = "lower" if metric else val_metrics.get("better", "higher")
    metric = metric or (get_primary_key(val_metrics) if val_metrics else "")
    value = val_metrics.get(metric) if "failure" not in summary else None
    measurements: dict[str, float | None] = {
        **{name: summary.get(name) for name in SUMMARY_QUANTITIES},
        "samples": study_run.run.total,
    }
    return RunResult(
        study_run.cell.axis_values,
        study_run.seed,
        folder=str(study_run.folder.path),
        metric=metric,
        value=value,
        better=better,
        measurements=measurements,
        images=val_metrics.get("images"),
    )


def build_table_rows(study: Study, results: list[RunResult]) -> list[TableRow]:
    """Build the rows of a study's table from the results of its runs, in the order of the cells."""
    values: dict[AxisValues, dict[int, float]] = {}
    for result in results:
        seed_values = values.setdefault(result.axis_values, {})
        if result.value is not None:
            seed_values[result.seed] = result.value
    return [
        build_table_row(
            study,
            axis_values,
            values,
            [cell_result for cell_result in results if cell_result.axis_values == axis_values],
        )
        for axis_values in values
    ]


def build_table_row(
    study: Study, axis_values: AxisValues, values: dict[AxisValues, dict[int, float]], results: list[RunResult]
) -> TableRow:
    """Build the row of a cell from the results of its runs. `values` has {seed: value} of every cell."""
    seed_values, reference = values[axis_values], study.get_reference(axis_values)
    difference = estimate_difference(values.get(reference, {}), seed_values) if reference != axis_values else None
    names = dict.fromkeys(name for result in results for name in result.measurements)
    measurements = {name: mean_or_none([result.measurements.get(name) for result in results]) for name in names}
    return TableRow(
        axis_values,
        seed_values,
        failed=sum(result.value is None for result in results),
        mean=estimate_mean(list(seed_values.values())) if seed_values else None,
        difference=difference,
        reference=None if reference == axis_values else reference,
        published=study.published.values.get(axis_values),
        measurements=measurements,
        runs=[result.folder for result in results],
    )


def mean_or_none(values: list[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if all are."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def list_columns(study: Study) -> list[str]:
    """List the column names of the table in a study's document."""
    return [*study.axes, "mean", "interval", "seeds", "difference", "difference interval", "verdict", "published"]


def rows_to_lists(rows: list[TableRow]) -> list[list[Any]]:
    """Convert the rows to lists for JSON, with cells in the order of `list_columns`."""
    table = []
    for row in rows:
        mean, difference = row.mean, row.difference
        cells = [mean and mean.mean, mean and mean.interval, len(row.values)]
        table.append(
            [
                *row.axis_values,
                *cells,
                difference and difference.mean,
                difference and difference.interval,
                row.verdict,
                row.published,
            ]
        )
    return table


def row_to_dict(row: TableRow) -> dict[str, Any]:
    """Convert a row to a dict for JSON, with all its measurements."""
    return asdict(row) | {"values": {str(seed): value for seed, value in row.values.items()}, "verdict": row.verdict}
