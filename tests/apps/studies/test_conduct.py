"""A study gives the same table however often it is stopped, reuses runs, and reports inconclusive results."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree.ElementTree import fromstring

import numpy as np
import pytest

from tests.conftest import make_folder, parse_json_output, run_cli
from tests.reports.test_report import NoteListener
from vitreous.apps.studies import conduct, registry, speed, study
from vitreous.apps.studies.conduct import run_study as make_study
from vitreous.apps.studies.factory import RunFactory, SharedRunOptions, select_excluded_samples
from vitreous.apps.studies.options import parse_duration
from vitreous.apps.studies.others import resolve_study_data
from vitreous.apps.studies.registry import STUDIES
from vitreous.apps.studies.study import SCALES, Measurement, StudyCell, StudySetting, order_with_parents, update_options
from vitreous.apps.studies.vit_design import POSITIONS_STUDY, position_cells
from vitreous.data.layouts.named import open_digits
from vitreous.errors import Interrupted, UsageError

QUICK_OPTIONS = {"steps": 3, "seeds": 2, "device": "cpu", "precision": "fp32", "progress": False}


@pytest.fixture
def toy_study(monkeypatch):
    """Register a study with two cells of Table 8 and tiny models."""
    monkeypatch.setitem(SCALES, "small", replace(SCALES["small"], width=32, depth=1, batch_size=16))
    small = replace(POSITIONS_STUDY, name="toy", cells=lambda setting: position_cells(setting)[:2])
    monkeypatch.setitem(registry.STUDIES, "toy", small)
    return small


@pytest.fixture
def trained_runs(monkeypatch):
    """Return a list of the runs that are actually trained."""
    trained = []

    def run_trial(run, inputs, folder, *arguments, **options):
        trained.append(folder.path.name)
        return real(run, inputs, folder, *arguments, **options)

    real = conduct.run_trial
    monkeypatch.setattr(conduct, "run_trial", run_trial)
    return trained


class LinkParser(HTMLParser):
    """Collects the links of a page, and the addresses that it would load."""

    def __init__(self, text):
        super().__init__()
        self.links, self.fetched = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attribute_values = dict(attributes)
        if tag == "a":
            self.links.append(attribute_values["href"])
        elif tag in ("script", "img", "link"):
            self.fetched += [
                value for key, value in attribute_values.items() if key in ("src", "href") and value != "data:,"
            ]


def get_table_rows(result):
    return [row[:-2] for row in result["table"]["rows"]]


def test_a_study_writes_a_table_and_a_self_contained_page(toy_study, tmp_path):
    result = make_study("toy", out=str(tmp_path), **QUICK_OPTIONS)
    (first, reference) = result["rows"]
    assert first["axis_values"] == ("none", "input") and reference["reference"] is None
    values = [json.loads((Path(run) / "summary.json").read_text())["val"]["top1"] for run in result["runs"]]
    assert len(set(result["runs"])) == 4 and first["mean"]["mean"] == pytest.approx(np.mean(values[:2]))
    assert first["difference"]["mean"] == pytest.approx(np.mean(values[:2]) - np.mean(values[2:]))
    assert first["published"] == "61.382 %"
    text = Path(result["page"]).read_text()
    page = LinkParser(text)
    assert not page.fetched and len(page.links) == 4
    assert all((tmp_path / "toy" / link).is_file() for link in page.links)
    assert "vitreous study toy --data digits" in text and "JFT-300M" in text and "<svg" in text
    markdown = (tmp_path / "toy" / "report.md").read_text()
    assert re.findall(r"\]\((\S+)\)", markdown) == [*page.links, "figure.svg"]
    assert fromstring((tmp_path / "toy" / "figure.svg").read_text()).tag == "{http://www.w3.org/2000/svg}svg"
    assert json.loads((tmp_path / "toy" / "study.json").read_text())["table"]["columns"] == result["table"]["columns"]


def test_runs_are_reused_by_other_studies(toy_study, tmp_path, trained_runs, monkeypatch):
    make_study("toy", out=str(tmp_path), **QUICK_OPTIONS)
    assert len(trained_runs) == 4
    wider = replace(toy_study, name="wider", cells=lambda setting: position_cells(setting)[:3])
    monkeypatch.setitem(registry.STUDIES, "wider", wider)
    result = make_study("wider", out=str(tmp_path), **QUICK_OPTIONS)
    assert len(trained_runs) == 6 and len(set(trained_runs)) == 6 and len(result["rows"]) == 3


def test_a_resumed_study_gives_the_same_table(toy_study, tmp_path, trained_runs):
    uninterrupted = make_study("toy", out=str(tmp_path / "whole"), **QUICK_OPTIONS)

    class StoppingListener:
        """Sends a signal once, in the second run."""

        sent = False

        def note(self, text):
            pass

        def progress(self, label, done, total, text=""):
            if label.startswith("run 2 of") and not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.SIGTERM)

    options = {name: value for name, value in QUICK_OPTIONS.items() if name != "progress"}
    with pytest.raises(Interrupted, match="stopped in run 2 of 4") as stopped:
        make_study("toy", StoppingListener(), out=str(tmp_path / "cut"), **options)
    assert "vitreous study toy --resume" in stopped.value.hint and stopped.value.code == 143
    trained_runs.clear()
    resumed = make_study("toy", out=str(tmp_path / "cut"), resume=True, progress=False)
    assert get_table_rows(resumed) == get_table_rows(uninterrupted) and len(trained_runs) == 3
    assert make_study("toy", out=str(tmp_path / "cut"), resume=True, progress=False)["rows"] == resumed["rows"]


def test_invalid_study_options_are_rejected(toy_study, tmp_path):
    make_study("toy", out=str(tmp_path), **QUICK_OPTIONS)
    for options, words in (
        ({}, "already exists"),
        ({"resume": True, "seeds": 3}, "seeds: 2 -> 3"),
        ({"resume": True, "out": str(tmp_path / "none")}, "no study"),
        ({"out": str(tmp_path / "new"), "budget": "0.001s"}, "too short"),
    ):
        with pytest.raises(UsageError, match=words):
            make_study("toy", **{"out": str(tmp_path), "progress": False, "device": "cpu"} | options)
    assert not (tmp_path / "new").exists()
    for words, message in (
        (["study", "position"], "did you mean positions?"),
        (["study", "positions", "--budget", "soon"], "invalid --budget 'soon'"),
        (["study", "--seeds", "2"], "missing study name"),
        (["study", "positions", "--seeds", "0"], "--seeds must be at least 1"),
    ):
        result = run_cli(*words)
        assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_dry_runs_write_nothing_and_budgets_shorten_every_run(toy_study, tmp_path):
    arguments = ["study", "toy", "--out", str(tmp_path / "plan"), "--device", "cpu", "--dry-run", "--json"]
    planned = parse_json_output(run_cli(*arguments, "--steps", "100"))
    assert planned["runs"] == 6 and planned["total_steps"] == 600 and planned["hours"] >= 0
    assert planned["peak_memory_bytes"] > 0 and not (tmp_path / "plan").exists()
    make = {**QUICK_OPTIONS, "steps": 100_000, "budget": "2s"}
    result = make_study("toy", out=str(tmp_path / "short"), **make)
    share = result["settings"]["step_fraction"]
    assert 0 < share < 1 and result["steps"] == [max(10, int(100_000 * share))]
    assert "To fit the budget of 2s" in Path(result["page"]).read_text()


def test_a_nonfinite_loss_is_reported_as_a_result(toy_study, tmp_path, monkeypatch):
    def list_cells(setting):
        valid_cell, broken_cell = position_cells(setting)[:2]
        return valid_cell, replace(
            broken_cell, options=replace(broken_cell.options, optimizer="sgd", lr=1e30, clip_grad=1e30)
        )

    monkeypatch.setitem(registry.STUDIES, "toy", replace(toy_study, cells=list_cells))
    result = make_study("toy", out=str(tmp_path), **QUICK_OPTIONS)
    assert [row["verdict"] for row in result["rows"]] == ["no common seed", "non-finite loss"]
    assert result["rows"][1]["failed"] == 2 and "2 runs ended" in Path(result["page"]).read_text()


def test_a_cell_starts_from_the_parent_run_of_its_seed(toy_study, tmp_path, monkeypatch):
    def list_cells(setting):
        first = replace(position_cells(setting)[0], axis_values=())
        child_options = {"settings": {"objective.patch_dropout": "0.0"}}
        second = StudyCell(
            ("1-D", "input"),
            update_options(first.options, lr=1e-4),
            parents={"init": first},
            parent_overrides=child_options,
        )
        return (second,)

    monkeypatch.setitem(registry.STUDIES, "toy", replace(toy_study, cells=list_cells))
    result = make_study("toy", out=str(tmp_path), **QUICK_OPTIONS)
    configs = [(Path(run) / "config.yaml").read_text() for run in result["runs"]]
    assert len(configs) == 4 and len(result["rows"]) == 1
    for seed, text in enumerate(configs[2:]):
        assert f"init: {Path(result['runs'][seed]).absolute()}" in text and f"\nseed: {seed}" in text


def test_data_fractions_are_stratified_and_nested(tmp_path):
    split = open_digits().splits["train"]
    out = {share: set(select_excluded_samples(split, share).tolist()) for share in (0.01, 0.1, 0.3, 1.0)}
    assert out[1.0] == set() and out[0.01] > out[0.1] > out[0.3]
    for share in (0.01, 0.1, 0.3):
        stays = split.labels[[row for row in range(len(split)) if row not in out[share]]]
        counts, class_counts = np.bincount(stays, minlength=10), np.bincount(split.labels)
        assert (counts == np.maximum(1, np.round(share * class_counts))).all()
    data = make_folder(tmp_path / "photos", {"train": 10, "val": 2})
    factory = RunFactory(SharedRunOptions(str(data), tmp_path / "runs", device="cpu"), conduct.NullListener())
    cell = replace(position_cells(StudySetting(SCALES["small"], factory.get_image_size()))[1], share=0.5)
    assert len(factory.make_run(cell, 0).inputs.train) == 15 and factory.make_run(cell, 0).run.data.images == 15


def test_run_keys_do_not_depend_on_paths(tmp_path):
    keys = []
    for home in ("here", "there"):
        factory = RunFactory(SharedRunOptions("digits", tmp_path / home, device="cpu"), conduct.NullListener())
        cell = replace(position_cells(StudySetting(SCALES["small"], 8))[1], share=0.5)
        keys.append([factory.make_run(cell, seed).folder.path.name for seed in (0, 1)])
    assert keys[0] == keys[1] and len(set(keys[0])) == 2


def test_evaluation_is_cheap_compared_with_training(tmp_path):
    factory = RunFactory(SharedRunOptions("digits", tmp_path, device="cpu"), conduct.NullListener())
    cell = position_cells(StudySetting(SCALES["small"], 8))[1]
    num_val = len(factory.make_run(cell, 0).data.splits["val"])
    periods = {}
    for steps in (6, 60, 600):
        options = replace(cell.options, steps=steps, batch_size=32)
        run = factory.make_run(replace(cell, options=options), 0).run
        assert run.total == steps * 32 and run.steps == steps
        periods[steps] = run.evaluate_every
        assert (-(-steps // run.evaluate_every) - 1) * num_val <= run.total / 4
        for changes in ({"keep_best": True}, {"evaluate_every": steps // 6}):
            as_asked = factory.make_run(replace(cell, options=replace(options, **changes)), 0).run
            assert as_asked.evaluate_every == max(1, steps // (20 if "keep_best" in changes else 6))
    assert periods == {6: 6, 60: 60, 600: 100} and num_val > 400


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("scale", SCALES)
def test_every_study_has_a_reference_and_unique_cells(name, scale):
    study_entry = STUDIES[name]
    cells = study_entry.cells(StudySetting(SCALES[scale], 8 if scale == "small" else 32 if scale == "gpu" else 224))
    table_cells = list(study.list_table_cells(cells))
    assert len(table_cells) == len(set(table_cells)) and study_entry.differs and study_entry.question.endswith("?")
    assert {*study_entry.series} <= {*study_entry.axes}
    if study_entry.run_measure is None:
        assert all(len(table_cell) == len(study_entry.axes) for table_cell in table_cells)
        assert {study_entry.get_reference(table_cell) for table_cell in table_cells} <= set(table_cells)
    assert scale != "published" or {
        table_cell[: len(table_cells[0])] for table_cell in study_entry.published.values
    } <= set(table_cells)


@pytest.mark.parametrize("name", STUDIES)
def test_every_run_of_every_study_is_valid(name, tmp_path):
    sources = resolve_study_data(STUDIES[name], "digits", (), tmp_path / "sets")
    factory = RunFactory(SharedRunOptions(sources.data, tmp_path, device="cpu"), conduct.NullListener())
    setting = StudySetting(SCALES["small"], 8, sources.other_datasets)
    runs = [factory.make_run(cell, 0) for cell in order_with_parents(STUDIES[name].cells(setting))]
    tags = [run.folder.path for run in runs if not run.cell.parents]
    assert len(set(tags)) == len(tags)


def test_the_study_list_contains_the_cost_of_every_scale():
    listed = parse_json_output(run_cli("study", "--json"))["studies"]
    assert [study_entry["name"] for study_entry in listed] == list(STUDIES)
    for study_entry in listed:
        small, gpu, published = study_entry["scales"]
        trained = STUDIES[study_entry["name"]].trains_models
        assert 0 < small["exaflops"] < gpu["exaflops"] < published["exaflops"] if trained else published["runs"] == 0


def test_the_documentation_lists_every_study():
    page = (Path(__file__).parents[3] / "docs" / "guides" / "studies.md").read_text("utf-8")
    for name, study_entry in STUDIES.items():
        assert f"| `{name}` | {study_entry.question} | {study_entry.source} |" in page


def test_durations_have_units():
    assert [parse_duration(text) for text in ("90s", "30m", "1.5h", "2d")] == [90, 1800, 5400, 172_800]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_writes_its_page(name, tmp_path):
    result = make_study(name, out=str(tmp_path), progress=False, device="cpu", steps=20, seeds=2)
    assert all(row["mean"] or row["failed"] for row in result["rows"]) and Path(result["page"]).is_file()


@pytest.mark.slow
def test_a_ray_cluster_gives_the_same_table(toy_study, tmp_path):
    local_result = make_study("toy", out=str(tmp_path / "here"), **QUICK_OPTIONS)
    assert get_table_rows(
        make_study("toy", out=str(tmp_path / "there"), ray="local", **QUICK_OPTIONS)
    ) == get_table_rows(local_result)


def test_untrained_studies_log_nothing_about_training(monkeypatch, tmp_path):
    monkeypatch.setattr(speed, "measure_throughput", lambda subject, sides, seconds: [Measurement(("64",), 7.0, {})])
    listener = NoteListener()
    result = make_study("speed", listener, out=str(tmp_path), seeds=1, device="cpu")
    assert len(get_table_rows(result)) == 3 and listener.notes == []
