"""The verb `vitreous doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitreous.cli.console import Console


@dataclass(frozen=True)
class Options:
    """Print versions, devices and supported dtypes, and time a training step of about two seconds.

    Example: vitreous doctor --fix
    """

    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    fix: bool = False
    """List missing packages and the command that installs them, without running it."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Print versions, devices, dtypes and the time of a training step."""
    if options.fix:
        return print_extras(console)
    from vitreous.jobs.doctor import diagnose_machine
    from vitreous.system.cores import ContentionMonitor, describe_contention

    document = diagnose_machine(options.device)
    rows = [[name.replace("_", " "), value] for name, value in document.items() if name != "engine_choices"]
    console.table(["doctor", ""], rows)
    for line in document["engine_choices"]:
        console.print_line(line)
    if (document["other_load"] or 0) >= ContentionMonitor.SHARE:
        console.note(describe_contention(document["other_load"]))
    return document


def print_extras(console: Console) -> dict[str, Any]:
    """Print each extra with its missing packages and its purpose, and the commands that install missing packages."""
    from vitreous.jobs.requirements import EXTRA_PURPOSES, build_install_commands, find_missing_requirements

    missing = find_missing_requirements()
    lines = build_install_commands(missing)
    rows = [
        [extra or "-", ", ".join(packages) or "installed", EXTRA_PURPOSES[extra]] for extra, packages in missing.items()
    ]
    console.table(["extra", "missing", "for"], rows)
    for line in lines:
        console.print_line(line)
    if not lines:
        console.print_line("nothing is missing")
    return {"missing": missing, "commands": lines, "ok": not missing[""]}
