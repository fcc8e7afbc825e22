"""Results of the runs of a study: a validation metric, or the measurements of a `Measure`, which are stored once per
run."""

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
    study_folder: Path,
    shared_options: SharedRunOptions,
    other_datasets: tuple[OtherDataset, ...],
    listener: ProgressListener,
) -> list[RunResult]:
    """Return the results of the runs that are in the table. Measurements are cached in the folder `measurements` of the
    study. Raises the exceptions of the measurement."""
    results: list[RunResult] = []
    for index, study_run in enumerate(runs, 1):
        if not study_run.cell.axis_values:
            continue
        run_result = (
            read_run_result(study_run, study.metric) if study.trains_models else make_untrained_result(study_run)
        )
        if study.run_measure is None or (study.trains_models and run_result.value is None and has_diverged(study_run)):
            num_missing_axes = len(study.axes) - len(run_result.axis_values)
            results.append(replace(run_result, axis_values=(*run_result.axis_values, *("-",) * num_missing_axes)))
            continue
        label = f"measuring {index} of {len(runs)}, {' '.join(study_run.cell.axis_values)}, seed {study_run.seed}"
        subject = MeasuredRun(
            study_run.folder.path if study.trains_models else None,
            study_run.run,
            seed=study_run.seed,
            other_datasets=other_datasets,
            album=study_folder / ALBUMS_FOLDER / study_run.folder.path.name,
            device=shared_options.device or "auto",
            precision=shared_options.precision or "auto",
            listener=PrefixedListener(listener, label),
        )
        listener.progress(label, index - 1, len(runs))
        measurements = load_or_measure(
            study.run_measure, subject, study_folder / MEASUREMENTS_FOLDER / f"{study_run.folder.path.name}.json"
        )
        results += [
            replace(
                run_result,
                axis_values=(*run_result.axis_values, *measurement.axis_values),
                metric=study.run_measure.metric,
                value=measurement.value,
                better=study.run_measure.better,
                measurements=run_result.measurements | measurement.measurements,
            )
            for measurement in measurements
        ]
    return results


def load_or_measure(measure: Measure, subject: MeasuredRun, file: Path) -> list[Measurement]:
    """Load the measurements of a run from its file, or measure the run and write the file."""
    with suppress(OSError, ValueError, KeyError):
        records = json.loads(file.read_text("utf-8"))
        return [
            Measurement(tuple(record["axis_values"]), record["value"], record["measurements"]) for record in records
        ]
    measurements = measure.measure_run(subject)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, json.dumps([asdict(measurement) for measurement in measurements], indent=1) + "\n")
    return measurements


def has_diverged(study_run: StudyRun) -> bool:
    """Return whether the loss of a run became non-finite."""
    return "failure" in json.loads(study_run.folder.summary.read_text("utf-8"))


def make_untrained_result(study_run: StudyRun) -> RunResult:
    """Make the result of an untrained model, to which measurements are added."""
    return RunResult(
        study_run.cell.axis_values,
        study_run.seed,
        folder="",
        metric="",
        value=None,
        better="higher",
        measurements={},
        images=None,
    )


def list_run_figures(runs: list[StudyRun], study_folder: Path) -> list[dict[str, Any]]:
    """List the `vitreous inspect` figures of the runs with seed 0, with titles and captions. Paths are relative to the
    study's folder."""
    figures: list[dict[str, Any]] = []
    for study_run in runs:
        figure_folder = study_folder / ALBUMS_FOLDER / study_run.folder.path.name
        if study_run.seed or not study_run.cell.axis_values or not (figure_folder / "inspect.json").is_file():
            continue
        for figure in json.loads((figure_folder / "inspect.json").read_text("utf-8"))["figures"]:
            file = f"{ALBUMS_FOLDER}/{figure_folder.name}/{figure['png']}"
            figures.append(
                {
                    "axis_values": study_run.cell.axis_values,
                    "file": file,
                    "title": figure["title"],
                    "caption": figure["caption"],
                }
            )
    return figures
