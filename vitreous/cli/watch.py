"""The verb `vitreous watch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from vitreous.cli.console import Console
from vitreous.errors import require_installed


@dataclass(frozen=True)
class Options:
    """Show the curves of runs in a browser during and after training; listens on 127.0.0.1 only.

    Example: vitreous watch runs/latest
    Example: vitreous watch runs/adamw runs/muon
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN")] = ("runs/latest",)
    """Run folders, which may not exist yet; runs may train here or on a machine that shares the folder."""
    port: int = 8001
    """Port to listen on; 0 selects a free one."""


def run(options: Options, console: Console) -> None:
    """Serve the page with the training curves of runs until Ctrl-C or SIGTERM."""
    require_installed(("starlette", "uvicorn"), "serve")
    from vitreous.apps.server.watch import watch_runs

    def report_address(address: str) -> None:
        console.document({"runs": list(options.runs), "address": address})
        if console.document_to is None:
            console.print_line(f"watching {', '.join(options.runs)} at {address}; press Ctrl-C to stop")

    watch_runs(options.runs, options.port, report_address, console.note)
