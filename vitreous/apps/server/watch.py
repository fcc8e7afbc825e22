"""The server of `vitreous watch`: a local web page with the live curves of one or more runs."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from vitreous.apps.server.responses import Refusal
from vitreous.apps.server.server import bind_socket, configure_uvicorn
from vitreous.apps.server.settings import AccessControl
from vitreous.data.sources import get_public_name
from vitreous.errors import UsageError
from vitreous.reports.pages.formats import PERCENT_METRICS, render_template
from vitreous.reports.pages.metric_terms import EXPLANATIONS
from vitreous.reports.pages.plots import LINE_COLOURS
from vitreous.tasks.metrics import METRICS
from vitreous.training.folder import MetricsFollower, RunFolder
from vitreous.weights.model_paths import find_newest_run

METRICS_POLL_SECONDS = 0.5  # seconds between two reads of the metrics file
HEARTBEAT_SECONDS = 15.0  # seconds after which an event is sent even without new lines
MAX_EVENT_LINES = 2_000  # maximum lines of the metrics file per event
MAX_OPEN_PAGES = 32  # maximum pages that are open at a time
MAX_WATCHED_RUNS = 16  # maximum runs of a page
WATCH_CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
#: panels of curves in this order: `series` has the label of each metric; all other metrics are in collapsed panels
PANELS = (
    {"title": "Loss", "about": "losses", "series": {"train/loss": "training", "val/nll": "validation (NLL)"}},
    *(
        {"title": f"Validation {metric.label}", "about": name, "series": {f"val/{name}": ""}}
        for name, metric in METRICS.items()
        if metric.is_primary
    ),
    {"title": "RankMe of training images", "about": "rankme", "series": {"training_images/rankme": ""}},
    {"title": "Learning rate", "about": "lr", "series": {"lr": ""}},
    {"title": "Throughput, images/s", "about": "throughput", "series": {"images_per_second": ""}},
)


class WatchApp:
    """The web application: the page of the runs, its server-sent events, and the reports of finished runs."""

    def __init__(self, folders: Sequence[RunFolder]) -> None:
        self.folders, self.access, self.pages, self.closing = folders, AccessControl(), 0, False
        runs = [folder.run() for folder in folders]
        page_data = {
            "runs": [
                {"name": name, "steps": run.steps, "model": run.model.name(), "data": get_public_name(run.data.source)}
                for name, run in zip(make_unique_run_names(folders), runs, strict=True)
            ],
            "panels": PANELS,
            "colours": LINE_COLOURS,
            "shares": PERCENT_METRICS,
            "texts": EXPLANATIONS,
        }
        feature_counts = [run.model.num_features for run in runs if run.objective.ships_features]
        page_data["tops"] = {"rankme": max(feature_counts)} if feature_counts else {}
        self.page = render_template("watch.html", runs=page_data["runs"], facts=json.dumps(page_data))
        routes = {"/": self.show_page, "/events": self.send_events}
        routes |= {f"/reports/{index}.html": self.make_report_handler(folder) for index, folder in enumerate(folders)}
        self.app = Starlette(
            routes=[Route(path, self.require_local_access(handler)) for path, handler in routes.items()]
        )

    def require_local_access(self, handler: Callable[[], Response]) -> Callable[[Request], Any]:
        """Wrap a handler so that it refuses host names other than localhost, and requests from pages of other
        origins."""

        async def handle(request: Request) -> Response:
            """Check host and origin of a request, then call the handler."""
            try:
                self.access.check(dict(request.headers.raw), needs_token=False)
            except Refusal as error:
                return PlainTextResponse(f"{error}\n", error.status)
            return handler()

        return handle

    def show_page(self) -> Response:
        """Return the page with the curves."""
        return HTMLResponse(
            self.page, headers={"content-security-policy": WATCH_CONTENT_POLICY, "cache-control": "no-store"}
        )

    @staticmethod
    def make_report_handler(folder: RunFolder) -> Callable[[], Response]:
        """Make the handler that returns the report of a finished run; 404 before."""

        def show_report() -> Response:
            path = folder.path / "report.html"
            if not path.is_file():
                return PlainTextResponse("the run has not finished; its report is not available yet\n", 404)
            return FileResponse(path, headers={"cache-control": "no-store"})

        return show_report

    def send_events(self) -> Response:
        """Stream the metrics of the runs as server-sent events: first the existing lines, then each new line."""
        if self.pages >= MAX_OPEN_PAGES:
            return PlainTextResponse(f"{MAX_OPEN_PAGES} pages are already open\n", 503, {"retry-after": "5"})
        return StreamingResponse(
            self.stream_events(), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def stream_events(self) -> AsyncIterator[str]:
        """Yield server-sent events of all runs (see `RunStream`), each with the index of its run."""
        streams = [RunStream(index, folder) for index, folder in enumerate(self.folders)]
        self.pages += 1
        try:
            while not self.closing:
                for stream in streams:
                    for name, event in await asyncio.to_thread(stream.read_events):
                        yield f"event: {name}\ndata: {json.dumps(event)}\n\n"
                await asyncio.sleep(METRICS_POLL_SECONDS)
        finally:
            self.pages -= 1


class RunStream:
    """The events of one run for one open page.

    Events are `lines` with {"run": index, "reset": whether to drop earlier lines, "lines": [...]}, and `state` with
    {"run": index} and the result of `describe_state`.
    """

    def __init__(self, index: int, folder: RunFolder) -> None:
        self.index, self.folder, self.follower = index, folder, MetricsFollower(folder.metrics)
        self.is_first, self.last_finished, self.last_event_time = True, None, 0.0

    def read_events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return (name, data) of the events since the last call."""
        is_reset, lines = self.follower.read()
        is_reset, events = is_reset or self.is_first, []
        for start in range(0, len(lines) or int(is_reset), MAX_EVENT_LINES):
            chunk = lines[start : start + MAX_EVENT_LINES]
            events.append(("lines", {"run": self.index, "reset": is_reset and not start, "lines": chunk}))
        self.is_first = False
        state, now = self.describe_state(), time.monotonic()
        if lines or state["finished"] != self.last_finished or now - self.last_event_time >= HEARTBEAT_SECONDS:
            self.last_finished, self.last_event_time = state["finished"], now
            events.append(("state", {"run": self.index} | state))
        return events

    def describe_state(self) -> dict[str, Any]:
        """Return {"finished": whether the run has finished, "age": seconds since its last line, None before the
        first}."""
        finished = self.folder.summary.is_file() and (self.folder.path / "report.html").is_file()
        try:
            age = max(0.0, time.time() - self.folder.metrics.stat().st_mtime)
        except FileNotFoundError:
            age = None
        return {"finished": finished, "age": age}


def make_unique_run_names(folders: Sequence[RunFolder]) -> list[str]:
    """Return a unique name of each run: its folder name, preceded by as many parent folders as necessary."""
    paths = [folder.path.resolve().parts for folder in folders]
    length = 1
    while len({path[-length:] for path in paths}) < len(paths):
        length += 1
    return ["/".join(path[-length:]) for path in paths]


class WatchServer(uvicorn.Server):
    """A uvicorn server that ends event streams on shutdown."""

    def __init__(self, watch: WatchApp) -> None:
        super().__init__(configure_uvicorn(watch.app, timeout_graceful_shutdown=1))
        self.watch = watch

    async def on_tick(self, counter: int) -> bool:
        """End event streams on shutdown. uvicorn calls this ten times per second."""
        should_exit = await super().on_tick(counter)
        self.watch.closing = should_exit
        return should_exit


def watch_runs(
    runs: Sequence[str | os.PathLike[str]],
    port: int = 8001,
    on_ready: Callable[[str], None] = lambda address: None,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Serve the curves of runs at 127.0.0.1 until Ctrl-C or SIGTERM, from the main thread.

    `port` 0 selects a free port; `on_ready` is called with the address. If a run has not begun, wait for it, and call
    `note`. Raises UsageError for a folder with other content, ResourceError if the port is in use.
    """
    check_port(port)
    check_runs(runs)  # before the first one is awaited
    for run in runs:
        wait_for_run(run, note)
    server, listening = open_watch_server(runs, port)
    on_ready(make_loopback_url(listening))
    server.run([listening])


def open_watch_server(runs: Sequence[str | os.PathLike[str]], port: int) -> tuple[WatchServer, Any]:
    """Create the server for runs, and bind its listening socket.

    Raises UsageError for an invalid run folder or port, ResourceError for a port in use.
    """
    check_port(port)
    check_runs(runs)
    folders = [RunFolder(Path(run)) for run in runs]
    for folder in folders:
        if not folder.config.is_file():
            raise make_run_folder_error(folder)
    server = WatchServer(WatchApp(folders))
    return server, bind_socket("127.0.0.1", port)


def check_runs(runs: Sequence[str | os.PathLike[str]]) -> None:
    """Raise UsageError for too many runs, and for a run that occurs twice."""
    if len(runs) > MAX_WATCHED_RUNS:
        raise UsageError(f"{len(runs)} runs; a page shows at most {MAX_WATCHED_RUNS}", "pass fewer run folders")
    resolved = [Path(run).resolve() for run in runs]
    for run, path in zip(runs, resolved, strict=True):
        if resolved.count(path) > 1:
            raise UsageError(f"{run} occurs twice, as {path}", "pass each run once")


def check_port(port: int) -> None:
    """Raise UsageError if the port is not from 0 to 65535."""
    if not 0 <= port <= 65535:
        raise UsageError(f"invalid --port {port}", "use 0 to 65535; 0 selects a free one")


def make_run_folder_error(folder: RunFolder) -> UsageError:
    """Make the error for a folder that is not a run folder."""
    return UsageError(
        f"{folder.path} is not a run folder: it has no config.yaml", "use a run folder, such as runs/latest"
    )


def wait_for_run(run: str | os.PathLike[str], note: Callable[[str], None] = lambda text: None) -> None:
    """Return once a run folder has its config. If the run has not begun, call `note` once, and wait. Raises UsageError
    for a file, and for a folder with other content."""
    folder, has_noted = RunFolder(Path(run)), False
    while not folder.config.is_file():
        if folder.path.exists() and not has_noted and not (folder.path / "command.txt").is_file():
            raise make_run_folder_error(folder)
        if not has_noted:
            newest = find_newest_run()
            newest_hint = f" (the newest run in this folder is {newest})" if newest else ""
            note(f"waiting for a run in {folder.path}{newest_hint}; press Ctrl-C to stop")
            has_noted = True
        time.sleep(METRICS_POLL_SECONDS)


def make_loopback_url(listening: Any) -> str:
    """Return the URL of a listening socket at 127.0.0.1."""
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def watch_in_thread(*runs: str | os.PathLike[str], port: int = 0) -> Any:
    """Run `watch_runs` in a thread of this process: `with watch_in_thread(run) as address: …`."""
    server, listening = open_watch_server(runs, port)
    thread = Thread(target=lambda: asyncio.run(server.serve([listening])), name="watch")
    thread.start()
    try:
        yield make_loopback_url(listening)
    finally:
        server.should_exit = True
        thread.join()
