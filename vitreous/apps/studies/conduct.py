"""The verb `study`: train the runs of a study, sequentially or on a cluster, and write its table and page.

OUT/runs/MODEL-KEY/     ordinary run folders; KEY is a digest of a run's settings and its data, so that studies share
                        them
OUT/sets/               subsets of the digits, for studies that need target datasets
OUT/NAME/study.json     settings, all runs, and the table
OUT/NAME/measurements/  the measurements of each run
OUT/NAME/albums/        the figures of `vitreous inspect` of each run
OUT/NAME/report.html    the page; report.md is the same page in Markdown, with figure.svg
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitreous.apps.studies.factory import RunFactory, SharedRunOptions, StudyRun
from vitreous.apps.studies.measuring import list_run_figures, measure_runs
from vitreous.apps.studies.options import StudyOptions, parse_duration
from vitreous.apps.studies.others import resolve_study_data
from vitreous.apps.studies.page import write_study_pages
from vitreous.apps.studies.planning import Forecast, forecast_study
from vitreous.apps.studies.registry import get_study
from vitreous.apps.studies.study import SCALES, OtherDataset, Study, StudyCell, StudySetting, order_with_parents
from vitreous.apps.studies.tables import RunResult, build_table_rows, list_columns, row_to_dict, rows_to_lists
from vitreous.config import apply_keyword_options
from vitreous.errors import Interrupted, ResourceError, UsageError
from vitreous.jobs.cluster import run_trials_on_ray
from vitreous.jobs.train import describe_run_data, prepare_run_folder
from vitreous.jobs.transfer import PrefixedListener
from vitreous.jobs.trial import raise_if_stopped, run_trial
from vitreous.progress import NullListener, ProgressDisplay, ProgressListener
from vitreous.reports.pages import report
from vitreous.system.disk import write_text_atomic
from vitreous.training.ranks import SINGLE_PROCESS
from vitreous.training.signals import StopSignals

STATE_FILE = "study.json"


@dataclass(frozen=True)
class StudySettings:
    """The settings of a study, which are stored when it starts, and used again by --resume. `step_fraction` is the
    fraction of the scale's steps that fits into the budget."""

    name: str
    data: str = "digits"
    to: tuple[str, ...] = ()
    scale: str = "small"
    _: KW_ONLY
    seeds: int = 3
    steps: int | None = None
    budget: str | None = None
    step_fraction: float = 1.0
    device: str | None = None
    precision: str | None = None


def run_study(
    name: str, listener: ProgressListener | None = None, progress: bool = True, **options: Any
) -> dict[str, Any]:
    """Run a study and return its document, as `vitreous study NAME --json` prints it. `options` are the fields of
    `StudyOptions`.

    Raises UsageError for an unknown study or option, DataError, ResourceError or Interrupted, each with a hint.
    """
    (study_options,) = apply_keyword_options(
        "study", options, StudyOptions(name), extra_names=("name", "listener", "progress")
    )
    if listener is not None or not progress:
        return execute_study(study_options, listener or NullListener())
    display = ProgressDisplay()
    try:
        return execute_study(study_options, display)
    finally:
        display.close()


def execute_study(options: StudyOptions, listener: ProgressListener) -> dict[str, Any]:
    """Train the missing runs of a study, measure all runs, and write the table and the page. With `dry_run`, only
    return the plan.

    Raises the errors of `run_study`.
    """
    study, study_folder = get_study(options.name), Path(options.out) / options.name
    settings = resolve_study_settings(options, study_folder)
    with nullcontext(options.out) if not options.dry_run else TemporaryDirectory() as scratch:
        sources = resolve_study_data(study, settings.data, settings.to, Path(scratch) / "sets")
        store = Path(options.out) / "runs"
        shared_options = SharedRunOptions(
            sources.data,
            store,
            step_fraction=settings.step_fraction,
            device=settings.device,
            precision=settings.precision,
            workers=options.workers,
        )
        # notes on training do not apply to untrained models
        factory = RunFactory(shared_options, listener if study.trains_models else NullListener())
        cells = list_study_cells(study, settings, factory.get_image_size(), sources.other_datasets)
        if options.dry_run or (options.budget and not options.resume):
            forecast = forecast_runs(study, factory, cells, settings)
            if options.budget and not options.resume:
                settings = replace(settings, step_fraction=forecast.affordable_share(parse_duration(options.budget)))
                factory.common = replace(shared_options, step_fraction=settings.step_fraction)
            if options.dry_run:
                return describe_forecast(settings, forecast)
    write_initial_state(study_folder, settings)
    with (signals := StopSignals()).catch():
        training = TrainingContext(options, listener, signals)
        if study.trains_models:
            runs = train_runs(factory, cells, settings, training)
        else:
            runs = [factory.make_run(cell, seed) for cell in cells for seed in range(settings.seeds)]
        results = measure_runs(
            study,
            runs,
            study_folder=study_folder,
            shared_options=shared_options,
            other_datasets=sources.other_datasets,
            listener=MeasuringListener(training),
        )
    return write_study_results(study, settings, study_folder, results, runs)


def forecast_runs(study: Study, factory: RunFactory, cells: list[StudyCell], settings: StudySettings) -> Forecast:
    """Forecast the cost of a study on this machine from a few timed steps. A study of untrained models costs
    nothing."""
    seeds = range(settings.seeds) if study.trains_models else ()
    return forecast_study([factory.make_run(cell, seed) for cell in cells for seed in seeds], factory.listener)


def resolve_study_settings(options: StudyOptions, study_folder: Path) -> StudySettings:
    """Return the settings of a study: those of the options or, with --resume, the stored ones. Raises UsageError for an
    existing folder without --resume, for a missing study with --resume, and for options that contradict the stored
    settings."""
    names = [field.name for field in fields(StudySettings) if hasattr(options, field.name)]
    set_options = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    state = study_folder / STATE_FILE
    if not options.resume:
        if state.exists() and not options.dry_run:
            hint = "use --resume to continue it, or move it away to compare other settings: finished runs are reused"
            raise UsageError(f"{study_folder} already exists", hint)
        scale = SCALES[options.scale or "small"]
        return replace(StudySettings(options.name, seeds=scale.seeds), **set_options)
    try:
        stored = StudySettings(**json.loads(state.read_text("utf-8"))["settings"])
        stored = replace(stored, to=tuple(stored.to))
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"{study_folder} is not a study: it has no {STATE_FILE}", "start the study without --resume"
        ) from None
    differing = [
        f"{name}: {getattr(stored, name)} -> {value}"
        for name, value in set_options.items()
        if value != getattr(stored, name)
    ]
    if differing:
        raise UsageError(
            f"--resume keeps the stored settings; these differ: {', '.join(differing)}", "remove these options"
        )
    return stored


def list_study_cells(
    study: Study, settings: StudySettings, image_size: int, other_datasets: tuple[OtherDataset, ...]
) -> list[StudyCell]:
    """List the cells of a study, each after its prerequisites. `settings.steps`, if set, replaces the scale's steps."""
    setting = StudySetting(SCALES[settings.scale], image_size, other_datasets)
    if settings.steps is not None:
        setting = replace(setting, scale=replace(setting.scale, steps=settings.steps))
    return order_with_parents(study.cells(setting))


def write_initial_state(study_folder: Path, settings: StudySettings) -> None:
    """Write the settings of a new study. Raises ResourceError if they cannot be written."""
    if (study_folder / STATE_FILE).exists():
        return
    try:
        study_folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(study_folder / STATE_FILE, json.dumps({"settings": asdict(settings)}, indent=2) + "\n")
    except OSError as error:
        raise ResourceError(f"cannot write {study_folder}: {error.strerror}", "use another --out") from None


@dataclass(frozen=True)
class TrainingContext:
    """Options, listener and stop signals for training a study's runs."""

    options: StudyOptions
    listener: ProgressListener
    signals: StopSignals


class MeasuringListener(NullListener):
    """Forward the progress of measurements, and stop after a signal. Finished measurements are already stored."""

    def __init__(self, training: TrainingContext) -> None:
        self.training_context = training

    def note(self, text: str) -> None:
        """Ignore notes during measurements."""

    def progress(self, label: str, done: int, total: int | None, text: str = "") -> None:
        """Forward progress. Raises Interrupted after a signal, with the command that continues the study."""
        options = self.training_context.options
        if self.training_context.signals.received:
            hint = f"continue with `vitreous study {options.name} --resume --out {options.out}`"
            raise Interrupted("stopped while measuring, saved", hint, 128 + self.training_context.signals.received)
        self.training_context.listener.progress(label, done, total, text)


def train_runs(
    factory: RunFactory, cells: list[StudyCell], settings: StudySettings, training: TrainingContext
) -> list[StudyRun]:
    """Train every incomplete run of the cells, prerequisites first, and return all runs.

    A run whose loss becomes non-finite ends, and this is recorded as its result. Raises Interrupted after a signal,
    with everything saved, and the exceptions of training.
    """
    finished: list[StudyRun] = []
    total = len(cells) * settings.seeds
    for _, group in groupby(cells, key=lambda cell: cell.depth):
        runs = [
            make_run_from_parents(factory, cell, seed, finished) for cell in group for seed in range(settings.seeds)
        ]
        for study_run in runs:
            if not study_run.folder.config.is_file():
                documents = {"data": describe_run_data(study_run.run, study_run.data)}
                prepare_run_folder(study_run.folder, study_run.run, documents, None, study_run.data.split("train"))
        if training.options.ray:
            train_on_ray(training, runs)
        for study_run in runs:
            finished.append(study_run)
            label = (
                f"run {len(finished)} of {total}, {' '.join(study_run.cell.axis_values) or 'pre-training'}, "
                f"seed {study_run.seed}"
            )
            train_in_process(study_run, label, training)
    return finished


def make_run_from_parents(factory: RunFactory, cell: StudyCell, seed: int, finished: list[StudyRun]) -> StudyRun:
    """Return the run of a cell with a seed. It starts from the finished runs of its prerequisites with the same
    seed."""
    parents = {
        option_path: next(
            study_run.folder.path.absolute()
            for study_run in finished
            if study_run.seed == seed and study_run.cell == parent
        )
        for option_path, parent in cell.parents.items()
    }
    return factory.make_run(cell, seed, parents)


def train_in_process(study_run: StudyRun, label: str, training: TrainingContext) -> None:
    """Train a run in this process, unless it is complete, and write its page. Raises Interrupted after a signal, with
    the command that continues the study."""
    options = training.options
    try:
        if not study_run.is_complete:
            run_trial(
                study_run.run,
                study_run.inputs,
                study_run.folder,
                PrefixedListener(training.listener, label),
                signals=training.signals,
            )
        raise_if_stopped(training.signals, SINGLE_PROCESS)
    except Interrupted as error:
        hint = f"continue with `vitreous study {options.name} --resume --out {options.out}`"
        raise Interrupted(f"stopped in {label}, saved", hint, error.code) from None
    page, summary = study_run.folder.path / "report.html", json.loads(study_run.folder.summary.read_text("utf-8"))
    if not page.is_file() and "failure" not in summary:
        report.write_report(page, study_run.folder)


def train_on_ray(training: TrainingContext, runs: list[StudyRun]) -> None:
    """Train the runs on a Ray cluster. Runs on the same images run concurrently."""
    runs_by_inputs: dict[int, list[StudyRun]] = {}
    for study_run in runs:
        runs_by_inputs.setdefault(id(study_run.inputs), []).append(study_run)
    for concurrent_runs in runs_by_inputs.values():
        trials = {study_run.folder.path: (study_run.run, study_run.folder) for study_run in concurrent_runs}
        run_trials_on_ray(
            training.options.ray or "",
            list(trials.values()),
            concurrent_runs[0].inputs,
            training.signals,
            training.listener,
        )


def describe_forecast(settings: StudySettings, forecast: Forecast) -> dict[str, Any]:
    """Return the document that --dry-run prints."""
    seconds = forecast.seconds * settings.step_fraction
    return asdict(settings) | {
        "runs": forecast.runs,
        "complete": forecast.num_complete,
        "total_steps": round(forecast.steps * settings.step_fraction),
        "hours": round(seconds / 3600, 3),
        "exaflops": forecast.exaflops * settings.step_fraction,
        "peak_memory_bytes": forecast.peak_memory_bytes,
    }


def write_study_results(
    study: Study, settings: StudySettings, study_folder: Path, results: list[RunResult], runs: list[StudyRun]
) -> dict[str, Any]:
    """Write the table and the pages of a study, and return its document."""
    rows = build_table_rows(study, results)
    metric = next((result.metric for result in results if result.metric), "top1")
    conclusion = study.conclude(rows) if study.conclude else None
    trained_runs = runs if study.trains_models else []
    document = {
        "name": study.name,
        "settings": asdict(settings),
        "metric": metric,
        "better": next((result.better for result in results), "higher"),
        "images": next((result.images for result in results if result.images), None),
        "runs": [str(study_run.folder.path) for study_run in trained_runs],
        "steps": sorted({study_run.run.steps for study_run in trained_runs if study_run.cell.axis_values}),
        "wall_seconds": sum(
            json.loads(study_run.folder.summary.read_text("utf-8")).get("wall_seconds") or 0
            for study_run in trained_runs
        ),
        "table": {"columns": list_columns(study), "rows": rows_to_lists(rows)},
        "rows": [row_to_dict(row) for row in rows],
        "conclusion": conclusion and asdict(conclusion),
        "uses_other_datasets": bool(study.other_data_kind),
        "figures": list_run_figures(runs, study_folder),
        "published": {" · ".join(axis_values): value for axis_values, value in study.published.values.items()},
        "page": str(study_folder / "report.html"),
    }
    write_study_pages(study_folder, study, document, rows)
    write_text_atomic(study_folder / STATE_FILE, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return document
