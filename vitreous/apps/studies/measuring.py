"""What is read of the runs of a study: a figure of their validation images, or what a `Measure` measures, once each."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vitreous.apps.studies.factory import Common, StudyRun
from vitreous.apps.studies.study import Measure, OtherSet, Reading, Study, Subject
from vitreous.apps.studies.tables import Result, read_result
from vitreous.jobs.transfer import PrefixedListener
from vitreous.progress import Listener
from vitreous.system.disk import write_text

READINGS, ALBUMS = "readings", "albums"


def measure_runs(
    study: Study, runs: list[StudyRun], home: Path, common: Common, others: tuple[OtherSet, ...], listener: Listener
) -> list[Result]:
    """The results of the runs that are in the table; what is measured is written to HOME/readings, and read from there
    the next time. Raises what the measure raises."""
    results: list[Result] = []
    for number, one in enumerate(runs, 1):
        if not one.cell.place:
            continue
        own = read_result(one, study.figure) if study.trained else untrained_result(one)
        if study.measure is None or (study.trained and own.value is None and failed(one)):
            missing = len(study.axes) - len(own.place)
            results.append(replace(own, place=(*own.place, *("-",) * missing)))
            continue
        label = f"measuring {number} of {len(runs)}, {' '.join(one.cell.place)}, seed {one.seed}"
        subject = Subject(
            one.folder.path if study.trained else None,
            one.run,
            seed=one.seed,
            others=others,
            album=home / ALBUMS / one.folder.path.name,
            device=common.device or "auto",
            precision=common.precision or "auto",
            listener=PrefixedListener(listener, label),
        )
        listener.progress(label, number - 1, len(runs))
        readings = read_once(study.measure, subject, home / READINGS / f"{one.folder.path.name}.json")
        results += [
            replace(
                own,
                place=(*own.place, *reading.place),
                figure=study.measure.figure,
                value=reading.value,
                better=study.measure.better,
                measured=own.measured | reading.measured,
            )
            for reading in readings
        ]
    return results


def read_once(measure: Measure, subject: Subject, file: Path) -> list[Reading]:
    """The readings of a run: of the file where there is one, else measured and written to it."""
    with suppress(OSError, ValueError, KeyError):
        rows = json.loads(file.read_text("utf-8"))
        return [Reading(tuple(row["place"]), row["value"], row["measured"]) for row in rows]
    readings = measure.read(subject)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps([asdict(reading) for reading in readings], indent=1) + "\n")
    return readings


def failed(one: StudyRun) -> bool:
    """Whether the loss of a run was not finite."""
    return "failure" in json.loads(one.folder.summary.read_text("utf-8"))


def untrained_result(one: StudyRun) -> Result:
    """A result without a run, to which what is measured is added."""
    return Result(one.cell.place, one.seed, folder="", figure="", value=None, better="higher", measured={}, images=None)


def find_pictures(runs: list[StudyRun], home: Path) -> list[dict[str, Any]]:
    """The figures that were drawn of the runs of the first seed, by place, with titles and captions; files are relative
    to HOME."""
    pictures: list[dict[str, Any]] = []
    for one in runs:
        album = home / ALBUMS / one.folder.path.name
        if one.seed or not one.cell.place or not (album / "inspect.json").is_file():
            continue
        for figure in json.loads((album / "inspect.json").read_text("utf-8"))["figures"]:
            file = f"{ALBUMS}/{album.name}/{figure['png']}"
            pictures.append(
                {"place": one.cell.place, "file": file, "title": figure["title"], "text": figure["caption"]}
            )
    return pictures
