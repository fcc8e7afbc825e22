"""The verb `vitreous watch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from vitreous.cli.console import Console
from vitreous.errors import require_installed


@dataclass(frozen=True)
class Options:
    """Show the curves of a run in a browser during and after training; listens on 127.0.0.1 only.

    Example: vitreous watch runs/latest
    """

    run: Annotated[Positional[str], arg(metavar="RUN")] = "runs/latest"
    """A run folder, which may not exist yet; the run may train here or on a machine that shares the folder."""
    port: int = 8001
    """Port to listen on; 0 selects a free one."""


def run(options: Options, console: Console) -> None:
    """Serve the page with the training curves of a run until Ctrl-C or SIGTERM."""
    require_installed(("starlette", "uvicorn"), "serve")
    from vitreous.apps.server.watch import watch_run

    def report_address(address: str) -> None:
        console.document({"run": options.run, "address": address})
        if console.document_to is None:
            console.print_line(f"watching {options.run} at {address}; press Ctrl-C to stop")

    watch_run(options.run, options.port, report_address, console.note)
