"""Complete a run after training: evaluate the trained model, and write the summary and the report page."""

from __future__ import annotations

import json
from typing import Any

from vitreous.data.split import Data
from vitreous.errors import DataError
from vitreous.inference.engine import ENGINE_CHUNK, InferenceOptions
from vitreous.progress import ProgressListener
from vitreous.reports.answers import EvaluationSettings, predict_split
from vitreous.reports.dense import evaluate_dense
from vitreous.reports.generated import write_run_samples
from vitreous.reports.learned import write_learned_images
from vitreous.reports.pages.run_pictures import collect_run_images
from vitreous.reports.readings import record_evaluation, write_evaluation_page
from vitreous.system.disk import write_text_atomic
from vitreous.training.folder import RunFolder
from vitreous.training.run import Run
from vitreous.training.trackers.trackers import Trackers


def evaluate_run(
    folder: RunFolder, run: Run, dataset: Data, summary: dict[str, Any], listener: ProgressListener, trackers: Trackers
) -> None:
    """Evaluate the trained model on the test split, add the metrics to `summary`, and write the summary and the page.
    Trackers receive the bundle and sample images.

    If there is no test split, or if a learning-rate grid was used, the model is evaluated on the validation split for
    the page only.
    """
    trackers.log_bundle(folder.bundle)
    use_test = "test" in dataset.splits and "lr_grid" not in summary
    predictions = report = None
    evaluation_settings = EvaluationSettings(
        ENGINE_CHUNK,
        run.data.workers,
        InferenceOptions(run.device),
        run.data.bad_images if use_test else "skip",
        listener=listener,
    )
    has_targets = run.objective.labelled or run.objective.annotated
    if has_targets and (use_test or ("val" in dataset.splits and len(dataset.splits["val"]))):
        split = "test" if use_test else "val"
        try:
            if run.objective.annotated:
                predictions, report = evaluate_dense(folder.path, None, split, evaluation_settings)
            else:
                predictions = predict_split(folder.path, None, split, evaluation_settings)
                report = predictions.report
        except DataError as error:
            text = f"the {split} split is not evaluated: {error.message}"
            hint = f"; to skip such images: vitreous evaluate {folder.path} --bad-images skip" if use_test else ""
            listener.note(text + hint)  # the run is complete, so the page is written without this evaluation
    if use_test and predictions is not None and report is not None:
        summary["test"] = report.summary()
        record_evaluation(folder.path, predictions.source, "test", summary["test"])
    write_text_atomic(folder.summary, json.dumps(summary, indent=2) + "\n")
    if run.objective.ships_features:
        write_learned_images(folder, listener)
    if run.objective.generates:
        write_run_samples(folder, listener)
    page = write_evaluation_page(folder.path / "report.html", folder, predictions, report, listener)
    if trackers.channels and page is not None:
        trackers.log_images(collect_run_images(folder, page, report), summary["steps"])
