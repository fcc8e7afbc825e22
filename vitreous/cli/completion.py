"""The verb `vitreous completion`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from tyro.conf import Positional, arg, subcommand

from vitreous.cli.console import Console


@dataclass(frozen=True)
class Options:
    """Print the completion script of a shell, for verbs, options and their values.

    Example: vitreous completion bash > ~/.local/share/bash-completion/completions/vitreous
    """

    shell: Annotated[Positional[Literal["bash", "zsh"]], arg(metavar="SHELL")]
    """bash or zsh."""


def run(options: Options, console: Console) -> dict[str, Any]:
    """Print the completion script and nothing else."""
    script = generate_completion_script(options.shell)
    if console.document_to is None:
        console.print_line(script.rstrip("\n"))
    return {"shell": options.shell, "script": script}


def generate_completion_script(shell: str) -> str:
    """Generate the completion script for a shell (bash or zsh), from the options of all verbs."""
    import io
    from contextlib import redirect_stdout, suppress
    from importlib import import_module

    import tyro

    from vitreous.cli.main import VERBS, hide_empty_defaults

    families: dict[str, list[Any]] = {}
    for verb, (module, text) in VERBS.items():
        options_type = import_module(module).Options
        hide_empty_defaults(options_type)
        family, _, name = verb.rpartition(" ")
        families.setdefault(family, []).append(
            Annotated[options_type, subcommand(name, description=text, prefix_name=False)]
        )
    commands = families.pop("")
    commands += [Annotated[Union[tuple(inner)], subcommand(name)] for name, inner in families.items()]  # noqa: UP007
    verbs: Any = Union[tuple(commands)]  # noqa: UP007
    script = io.StringIO()
    with redirect_stdout(script), suppress(SystemExit):
        tyro.cli(verbs, prog="vitreous", args=["--tyro-print-completion", shell])
    return script.getvalue()
