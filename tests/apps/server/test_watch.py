"""`watch`: the page of runs is updated live, restarts if a run is rewound, and is only accessible locally."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from tests.browser import find_chromium, needs_chromium
from tests.conftest import run_cli
from vitreous.apps.server.watch import watch_in_thread, watch_runs
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.options import DataOptions
from vitreous.errors import UsageError
from vitreous.models.config import ViTConfig
from vitreous.training.folder import MetricsFollower, RunFolder, read_json_lines
from vitreous.training.run import Run

METRIC_LINES = [{"step": step, "epoch": step / 2, "lr": 0.1, "train/loss": 1 / step} for step in range(1, 5)]


def create_run_folder(path, epochs=1.0) -> RunFolder:
    """Return the folder of a run with two steps per epoch that has just started."""
    run = Run(
        DataOptions("photos", ("ant", "bee"), 16, ""),
        ViTConfig(classes=2),
        ImagePreprocess((224, 224)),
        batch_size=8,
        epochs=epochs,
    )
    RunFolder(path).create(run, "vitreous train photos", {})
    return RunFolder(path)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Return the folder of a finished run."""
    folder = create_run_folder(tmp_path_factory.mktemp("home") / "run")
    for line in METRIC_LINES:
        folder.append(line)
    for path in (folder.summary, folder.path / "report.html"):
        path.write_text("{}")
    return folder.path


@pytest.fixture
def running_run(tmp_path):
    """Return the folder of a run that has just started: a config, and no metrics."""
    return create_run_folder(tmp_path / "run <b>")


class EventReader:
    """Reads the server-sent events of an address in order."""

    def __init__(self, address: str) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
        self.connection.request("GET", "/events")
        self.response = self.connection.getresponse()
        assert self.response.status == 200
        assert self.response.getheader("content-type") == "text/event-stream; charset=utf-8"

    def __iter__(self) -> Iterator[tuple[str, dict]]:
        while line := self.response.readline():
            event_name = line.decode().removeprefix("event: ").strip()
            data = self.response.readline().decode().removeprefix("data: ")
            assert self.response.readline() == b"\n"
            yield event_name, json.loads(data)

    def next(self, event_name: str) -> dict:
        """Return the next event of this kind."""
        return next(data for name, data in self if name == event_name)


@contextmanager
def open_response(address: str, path: str, **headers: str):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    connection.request("GET", path, headers=headers)
    yield connection.getresponse()
    connection.close()


def test_events_follow_a_run_that_grows_rewinds_and_ends(running_run):
    lines = METRIC_LINES
    with watch_in_thread(running_run.path) as address:
        events = EventReader(address)
        assert events.next("lines") == {"run": 0, "reset": True, "lines": []}
        assert events.next("state") == {"run": 0, "finished": False, "age": None}
        running_run.append(lines[0])
        assert events.next("lines") == {"run": 0, "reset": False, "lines": lines[:1]}
        running_run.append(lines[1])
        running_run.append(lines[2])
        events_seen = []
        while len(events_seen) < 2:
            events_seen += events.next("lines")["lines"]
        assert events_seen == lines[1:3]
        running_run.rewind(2)  # a resumed run
        assert events.next("lines") == {"run": 0, "reset": True, "lines": lines[:2]}
        running_run.append(lines[3])
        assert events.next("lines") == {"run": 0, "reset": False, "lines": [lines[3]]}
        late_reader = EventReader(address)
        assert late_reader.next("lines") == {"run": 0, "reset": True, "lines": [*lines[:2], lines[3]]}
        (running_run.path / "report.html").write_text("<p>the report</p>")
        running_run.summary.write_text("{}")
        assert any(data["finished"] for name, data in events if name == "state")
        with open_response(address, "/reports/0.html") as response:
            assert response.read() == b"<p>the report</p>"


def test_complete_lines_are_read_exactly_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower, lines_written = MetricsFollower(path), [{"step": step, "text": "é" * step} for step in range(40)]
    assert follower.read() == (False, [])
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines_written).encode()
    lines_read = []
    for start in range(0, len(content), 7):
        with open(path, "ab") as file:
            file.write(content[start : start + 7])
        reopened_data, lines = follower.read()
        assert not reopened_data
        lines_read += lines
    assert lines_read == lines_written
    assert follower.read() == (False, [])


def test_many_lines_arrive_in_several_events(running_run, monkeypatch):
    monkeypatch.setattr("vitreous.apps.server.watch.MAX_EVENT_LINES", 3)
    lines = [{"step": step, "epoch": 0.0, "lr": 0.1} for step in range(8)]
    for line in lines:
        running_run.append(line)
    with watch_in_thread(running_run.path) as address:
        events = EventReader(address)
        line_events = [events.next("lines") for _ in range(3)]
    assert [event["reset"] for event in line_events] == [True, False, False]
    assert [line for event in line_events for line in event["lines"]] == lines


def test_the_page_is_self_contained_and_names_the_run(running_run):
    with watch_in_thread(running_run.path) as address, open_response(address, "/") as response:
        page = response.read().decode()
        policy = response.getheader("content-security-policy")
    assert response.status == 200 and "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "run &lt;b&gt;" in page and "<b>" not in page
    assert not re.findall(r"(?:src|href)=\"(?!data:|report)", page) and "@import" not in page and "url(http" not in page
    page_data = json.loads(page.partition('id="facts">')[2].partition("</script>")[0])
    assert page_data["runs"][0]["steps"] == 2 and len(page_data["colours"]) > 5
    assert list(page_data["panels"][0]["series"]) == ["train/loss", "val/nll"]
    assert 'name="viewport" content="width=device-width' in page and "prefers-color-scheme: dark" in page


def test_foreign_hosts_origins_and_paths_are_rejected(running_run):
    with watch_in_thread(running_run.path) as address:
        for path, headers, status in (
            ("/", {"Host": "rebound.example"}, 403),
            ("/events", {"Host": "rebound.example:80"}, 403),
            ("/events", {"Origin": "http://other.example"}, 403),
            ("/reports/0.html", {}, 404),
            ("/config.yaml", {}, 404),
            ("/../config.yaml", {}, 404),
        ):
            with open_response(address, path, **headers) as response:
                assert response.status == status, (path, headers)


def test_open_pages_are_limited_and_closing_one_frees_a_slot(running_run, monkeypatch):
    monkeypatch.setattr("vitreous.apps.server.watch.MAX_OPEN_PAGES", 1)
    with watch_in_thread(running_run.path) as address:
        events = EventReader(address)
        events.next("lines")
        with open_response(address, "/events") as response:
            assert response.status == 503
        events.response.close()
        events.connection.close()
        for _ in range(100):
            running_run.append({"step": 1, "epoch": 1.0})  # the server detects a closed page on the next write
            with open_response(address, "/events") as response:
                if response.status == 200:
                    break
        assert response.status == 200


def test_invalid_runs_and_ports_are_rejected(finished_run, tmp_path):
    result = run_cli("watch", str(tmp_path))
    assert result.returncode == 2 and "is not a run folder" in result.stderr
    result = run_cli("watch", str(finished_run), "--port", "70000")
    assert result.returncode == 2 and "--port 70000" in result.stderr
    result = run_cli("watch", str(finished_run), str(finished_run))
    assert result.returncode == 2 and "occurs twice" in result.stderr


def test_runs_share_a_page_and_keep_their_events_apart(tmp_path, finished_run):
    folders = [create_run_folder(tmp_path / name / "run") for name in ("first", "second")]
    folders[1].append(METRIC_LINES[0])
    with watch_in_thread(*(folder.path for folder in folders), finished_run) as address:
        with open_response(address, "/") as response:
            page_data = json.loads(response.read().decode().partition('id="facts">')[2].partition("</script>")[0])
        assert [run["name"] for run in page_data["runs"]] == [
            "first/run",
            "second/run",
            "/".join(finished_run.parts[-2:]),
        ]
        events, lines, states = EventReader(address), {}, {}
        for name, data in events:
            if name == "lines":
                lines[data["run"]] = data["lines"]
            else:
                states[data["run"]] = data["finished"]
            if len(states) == 3:
                break
        assert lines == {0: [], 1: METRIC_LINES[:1], 2: METRIC_LINES} and states == {0: False, 1: False, 2: True}
        folders[0].append(METRIC_LINES[0])
        assert events.next("lines") == {"run": 0, "reset": False, "lines": METRIC_LINES[:1]}
        for path, status in (("/reports/0.html", 404), ("/reports/2.html", 200), ("/reports/3.html", 404)):
            with open_response(address, path) as response:
                assert response.status == status, path


def test_too_many_runs_are_rejected(finished_run):
    with pytest.raises(UsageError, match="17 runs; a page shows at most 16"):
        watch_runs([finished_run] * 17)


def test_a_port_in_use_is_reported(finished_run):
    with watch_in_thread(finished_run) as address:
        result = run_cli("watch", str(finished_run), "--port", address.rpartition(":")[2])
    assert result.returncode == 6 and "cannot listen on port" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_prints_its_address_and_stops_with_open_pages(finished_run, number, code):
    arguments = ["watch", str(finished_run), "--port", "0", "--json"]
    process = subprocess.Popen([sys.executable, "-m", "vitreous", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        document = json.loads(process.stdout.readline())
        events = EventReader(document["address"])
        assert events.next("lines")["lines"] == read_json_lines(RunFolder(finished_run).metrics)
        assert events.next("state")["finished"]
        os.kill(process.pid, number)
        assert process.wait(20) == code
    finally:
        process.kill()


@needs_chromium
@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1280, "light")])
def test_curves_grow_with_the_run(running_run, width, scheme):
    playwright = pytest.importorskip("playwright.sync_api")
    running_run.append({"step": 1, "epoch": 0.5, "lr": 0.1, "train/loss": 2.0, "val/top1": None})
    with watch_in_thread(running_run.path) as address, playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        errors = []
        # `errors.append` itself would be rejected: the method sets an attribute on its callback
        page.on("pageerror", lambda error: errors.append(error))
        page.goto(address)
        loss = page.get_by_role("img", name="loss: training 2 at step 1")
        playwright.expect(loss).to_be_visible()
        running_run.append({"step": 2, "epoch": 1.0, "lr": 0.1, "train/loss": 1.0})
        playwright.expect(page.get_by_role("img", name="loss: training 1 at step 2")).to_be_visible()
        playwright.expect(page.get_by_role("status")).to_contain_text("Step 2 of 2")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert not errors
        browser.close()


@needs_chromium
def test_the_page_shows_losses_hover_values_and_time_left(running_run):
    playwright = pytest.importorskip("playwright.sync_api")
    folder = create_run_folder(running_run.path.parent / "longer", epochs=50.0)
    for step in range(1, 11):
        folder.append(
            {"step": step, "epoch": step / 2, "seconds": 10.0 * step, "train/loss": 1 / step, "data_wait": 0.01}
        )
        if step % 5 == 0:
            folder.append(
                {"step": step, "epoch": step / 2, "seconds": 10.0 * step, "val/nll": 2 / step, "val/top1": 0.5}
            )
    with watch_in_thread(folder.path) as address, playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 800}, has_touch=True)
        page.goto(address)
        expect = playwright.expect
        expect(page.get_by_role("status")).to_contain_text(
            re.compile(r"Step 10 of 100 \(10 %\), epoch 5, about 15 min left")
        )
        chart = page.get_by_role("img", name="loss: training 0.1 at step 10, validation (NLL) 0.2 at step 10")
        expect(chart).to_be_visible()
        assert chart.locator("path").count() == 2
        expect(page.get_by_role("img", name="validation top-1: 50 % at step 10")).to_be_visible()
        box = chart.bounding_box()
        page.mouse.move(box["x"] + 56 + 0.05 * (box["width"] - 64), box["y"] + 50)  # step 5 of 100
        hovered_chart = page.get_by_role("img", name="loss: training 0.2 at step 5, validation (NLL) 0.4 at step 5")
        expect(hovered_chart).to_be_visible()
        expect(page.locator(".values").first).to_contain_text("step 5")
        page.mouse.move(0, 0)
        chart.focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        expect(page.get_by_role("img", name="loss: training 0.1111 at step 9")).to_be_visible()
        page.get_by_role("button", name="Loss", exact=True).tap()
        expect(page.get_by_role("tooltip")).to_contain_text("Compare their trends")
        assert not page.get_by_role("img", name="data_wait").is_visible()
        page.get_by_text("More metrics (1)").click()
        expect(page.get_by_role("img", name="data_wait: 0.01 at step 10")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        browser.close()


@needs_chromium
@pytest.mark.parametrize("width, scheme", [(390, "light"), (1280, "dark")])
def test_curves_of_runs_are_compared(tmp_path, width, scheme):
    playwright = pytest.importorskip("playwright.sync_api")
    folders = [create_run_folder(tmp_path / name, epochs=epochs) for name, epochs in (("adamw", 1.0), ("muon", 2.0))]
    for folder, factor in zip(folders, (1, 2), strict=True):
        for line in METRIC_LINES[:2]:
            folder.append(line | {"train/loss": factor * line["train/loss"], "val/nll": 3.0})
    with watch_in_thread(*(folder.path for folder in folders)) as address, playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        errors = []
        page.on("pageerror", lambda error: errors.append(error))
        page.goto(address)
        curves = ("training 0.5", "validation (NLL) 3"), ("training 1", "validation (NLL) 3")
        names = [
            f"{folder.path.name} {curve} at step 2" for folder, c in zip(folders, curves, strict=True) for curve in c
        ]
        chart = page.get_by_role("img", name=f"Loss: {', '.join(names)}")
        playwright.expect(chart).to_be_visible()
        strokes = [chart.locator("path").nth(index).get_attribute("stroke") for index in range(4)]
        assert strokes[0] == strokes[1] != strokes[2] == strokes[3]
        playwright.expect(page.get_by_role("status").nth(0)).to_contain_text("Step 2 of 2 (100 %)")
        playwright.expect(page.get_by_role("status").nth(1)).to_contain_text("Step 2 of 4 (50 %)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert not errors
        browser.close()
