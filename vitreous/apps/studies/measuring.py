"""Results of the runs of a study: a validation metric, or the measurements of a `Measure`, once per run."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vitreous.apps.studies.factory import SharedRunOptions, StudyRun
from vitreous.apps.studies.study import Measure, MeasuredRun, Measurement, OtherDataset, Study
from vitreous.apps.studies.tables import RunResult, read_run_result
from vitreous.jobs.transfer import PrefixedListener
from vitreous.progress import ProgressListener
from vitreous.system.disk import write_text_atomic

MEASUREMENTS_FOLDER, ALBUMS_FOLDER = "measurements", "albums"


def measure_runs(
    study: Study,
    runs: list[StudyRun],
    home: Path,
    common: SharedRunOptions,
    others: tuple[OtherDataset, ...],
    listener: ProgressListener,
) -> list[RunResult]:
    """Return the results of the runs in the table. Measurements are written to HOME/measurements, and read from there
    the next time. Raises the exceptions of the measure."""
    results: list[RunResult] = []
    for number, one in enumerate(runs, 1):
        if not one.cell.axis_values:
            continue
        own = read_run_result(one, study.metric) if study.trained else make_untrained_result(one)
        if study.measure is None or (study.trained and own.value is None and has_diverged(one)):
            missing = len(study.axes) - len(own.axis_values)
            results.append(replace(own, axis_values=(*own.axis_values, *("-",) * missing)))
            continue
        label = f"measuring {number} of {len(runs)}, {' '.join(one.cell.axis_values)}, seed {one.seed}"
        subject = MeasuredRun(
            one.folder.path if study.trained else None,
            one.run,
            seed=one.seed,
            others=others,
            album=home / ALBUMS_FOLDER / one.folder.path.name,
            device=common.device or "auto",
            precision=common.precision or "auto",
            listener=PrefixedListener(listener, label),
        )
        listener.progress(label, number - 1, len(runs))
        measurements = load_or_measure(
            study.measure, subject, home / MEASUREMENTS_FOLDER / f"{one.folder.path.name}.json"
        )
        results += [
            replace(
                own,
                axis_values=(*own.axis_values, *measurement.axis_values),
                metric=study.measure.metric,
                value=measurement.value,
                better=study.measure.better,
                measurements=own.measurements | measurement.measurements,
            )
            for measurement in measurements
        ]
    return results


def load_or_measure(measure: Measure, subject: MeasuredRun, file: Path) -> list[Measurement]:
    """Load the measurements of a run from its file if it exists, else measure and write it."""
    with suppress(OSError, ValueError, KeyError):
        rows = json.loads(file.read_text("utf-8"))
        return [Measurement(tuple(row["axis_values"]), row["value"], row["measurements"]) for row in rows]
    measurements = measure.read(subject)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, json.dumps([asdict(measurement) for measurement in measurements], indent=1) + "\n")
    return measurements


def has_diverged(one: StudyRun) -> bool:
    """Return whether the loss of a run was not finite."""
    return "failure" in json.loads(one.folder.summary.read_text("utf-8"))


def make_untrained_result(one: StudyRun) -> RunResult:
    """Make a result without a run, to which measurements are added."""
    return RunResult(
        one.cell.axis_values, one.seed, folder="", metric="", value=None, better="higher", measurements={}, images=None
    )


def list_run_figures(runs: list[StudyRun], home: Path) -> list[dict[str, Any]]:
    """The figures that were drawn of the runs of the first seed, by place, with titles and captions; files are relative
    to HOME."""
    figures: list[dict[str, Any]] = []
    for one in runs:
        album = home / ALBUMS_FOLDER / one.folder.path.name
        if one.seed or not one.cell.axis_values or not (album / "inspect.json").is_file():
            continue
        for figure in json.loads((album / "inspect.json").read_text("utf-8"))["figures"]:
            file = f"{ALBUMS_FOLDER}/{album.name}/{figure['png']}"
            figures.append(
                {
                    "axis_values": one.cell.axis_values,
                    "file": file,
                    "title": figure["title"],
                    "caption": figure["caption"],
                }
            )
    return figures
