"""The server of `vitreous watch`: a local web page with the live curves of a run."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
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
    """The web application: the page of a run, its server-sent events, and the report of a finished run."""

    def __init__(self, folder: RunFolder) -> None:
        run = folder.run()
        self.folder, self.access, self.pages, self.closing = folder, AccessControl(), 0, False
        page_data = {
            "steps": run.steps,
            "panels": PANELS,
            "colours": LINE_COLOURS,
            "shares": PERCENT_METRICS,
            "texts": EXPLANATIONS,
        }
        page_data["tops"] = {"rankme": run.model.num_features} if run.objective.ships_features else {}
        name = folder.path.resolve().name
        data = Path(run.data.source).name or run.data.source
        self.page = render_template(
            "watch.html", run=name, model=run.model.name(), data=data, facts=json.dumps(page_data)
        )
        routes = {"/": self.show_page, "/events": self.send_events, "/report.html": self.show_report}
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

    def show_report(self) -> Response:
        """Return the report of a finished run; 404 before."""
        path = self.folder.path / "report.html"
        if not path.is_file():
            return PlainTextResponse("the run has not finished; its report is not available yet\n", 404)
        return FileResponse(path, headers={"cache-control": "no-store"})

    def send_events(self) -> Response:
        """Stream the metrics of the run as server-sent events: first the existing lines, then each new line."""
        if self.pages >= MAX_OPEN_PAGES:
            return PlainTextResponse(f"{MAX_OPEN_PAGES} pages are already open\n", 503, {"retry-after": "5"})
        return StreamingResponse(
            self.stream_events(), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def stream_events(self) -> AsyncIterator[str]:
        """Yield server-sent events: `lines` with {"reset": whether to drop earlier lines, "lines": […]}, and `state`
        with the result of `describe_state`."""
        follower, last_finished, last_event_time = MetricsFollower(self.folder.metrics), None, 0.0
        is_first = True
        self.pages += 1
        try:
            while not self.closing:
                is_reset, lines = await asyncio.to_thread(follower.read)
                for start in range(0, len(lines) or int(is_reset or is_first), MAX_EVENT_LINES):
                    event = {
                        "reset": (is_reset or is_first) and not start,
                        "lines": lines[start : start + MAX_EVENT_LINES],
                    }
                    yield f"event: lines\ndata: {json.dumps(event)}\n\n"
                is_first = False
                state, now = self.describe_state(), time.monotonic()
                if lines or state["finished"] != last_finished or now - last_event_time >= HEARTBEAT_SECONDS:
                    last_finished, last_event_time = state["finished"], now
                    yield f"event: state\ndata: {json.dumps(state)}\n\n"
                await asyncio.sleep(METRICS_POLL_SECONDS)
        finally:
            self.pages -= 1

    def describe_state(self) -> dict[str, Any]:
        """Return {"finished": whether the run has finished, "age": seconds since its last line, None before the
        first}."""
        finished = self.folder.summary.is_file() and (self.folder.path / "report.html").is_file()
        try:
            age = max(0.0, time.time() - self.folder.metrics.stat().st_mtime)
        except FileNotFoundError:
            age = None
        return {"finished": finished, "age": age}


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


def watch_run(
    run: str | os.PathLike[str],
    port: int = 8001,
    on_ready: Callable[[str], None] = lambda address: None,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Serve the curves of a run at 127.0.0.1 until Ctrl-C or SIGTERM, from the main thread.

    `port` 0 selects a free port; `on_ready` is called with the address. If the run has not begun, wait for it, and call
    `note`. Raises UsageError for a folder with other content, ResourceError if the port is in use.
    """
    check_port(port)
    wait_for_run(run, note)
    server, listening = open_watch_server(run, port)
    on_ready(make_loopback_url(listening))
    server.run([listening])


def open_watch_server(run: str | os.PathLike[str], port: int) -> tuple[WatchServer, Any]:
    """Create the server for a run, and bind its listening socket.

    Raises UsageError for an invalid run folder or port, ResourceError for a port in use.
    """
    check_port(port)
    folder = RunFolder(Path(run))
    if not folder.config.is_file():
        raise make_run_folder_error(folder)
    server = WatchServer(WatchApp(folder))
    return server, bind_socket("127.0.0.1", port)


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
def watch_in_thread(run: str | os.PathLike[str], port: int = 0) -> Any:
    """Run `watch_run` in a thread of this process: `with watch_in_thread(run) as address: …`."""
    server, listening = open_watch_server(run, port)
    thread = Thread(target=lambda: asyncio.run(server.serve([listening])), name="watch")
    thread.start()
    try:
        yield make_loopback_url(listening)
    finally:
        server.should_exit = True
        thread.join()
