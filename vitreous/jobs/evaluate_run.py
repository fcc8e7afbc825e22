"""The end of a run: evaluate the trained model, and write summary and report page."""

from __future__ import annotations

import json
from typing import Any

from vitreous.data.split import Data
from vitreous.errors import DataError
from vitreous.inference.engine import CHUNK, InferenceOptions
from vitreous.progress import Listener
from vitreous.reports.answers import Computing, compute_answers
from vitreous.reports.dense import judge_scenes
from vitreous.reports.generated import write_samples
from vitreous.reports.learned import write_learned
from vitreous.reports.pages.run_pictures import run_pictures
from vitreous.reports.readings import record, write_page
from vitreous.system.disk import write_text
from vitreous.training.folder import Folder
from vitreous.training.run import Run
from vitreous.training.trackers.trackers import Trackers


def evaluate_run(
    folder: Folder, run: Run, opened: Data, summary: dict[str, Any], listener: Listener, trackers: Trackers
) -> None:
    """Evaluate the trained model on the test split, add the figures to `summary`, write it and the page; trackers get
    the bundle and the pictures.

    Where there is no test split, or a grid left it unread, the page shows the validation images.
    """
    trackers.log_bundle(folder.bundle)
    read = "test" in opened.splits and "lr_grid" not in summary
    answers = report = None
    computing = Computing(
        CHUNK,
        run.data.workers,
        InferenceOptions(run.device),
        run.data.bad_images if read else "skip",
        listener=listener,
    )
    judged = run.objective.labelled or run.objective.annotated
    if judged and (read or ("val" in opened.splits and len(opened.splits["val"]))):
        split = "test" if read else "val"
        try:
            if run.objective.annotated:
                answers, report = judge_scenes(folder.path, None, split, computing)
            else:
                answers = compute_answers(folder.path, None, split, computing)
                report = answers.report
        except DataError as error:
            text = f"the {split} split is not evaluated: {error.message}"
            hint = f"; `vitreous evaluate {folder.path} --bad-images skip` evaluates the rest" if read else ""
            listener.note(text + hint)  # the run is complete, and the page can do without
    if read and answers is not None and report is not None:
        summary["test"] = report.summary()
        record(folder.path, answers.source, "test", summary["test"])
    write_text(folder.summary, json.dumps(summary, indent=2) + "\n")
    if run.objective.ships_features:
        write_learned(folder, listener)
    if run.objective.generates:
        write_samples(folder, listener)
    page = write_page(folder.path / "report.html", folder, answers, report, listener)
    if trackers.channels and page is not None:
        trackers.log_pictures(run_pictures(folder, page, report), summary["steps"])
